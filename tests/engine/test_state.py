"""The state that a second run finds: what is copied for it, what is not, and who sees it."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.engine.pitfalls.program import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_exact_or_refused,
    assert_trains,
    compare,
    module,
    net,
    outcome,
    plain,
    rows,
    state_of,
    train,
)
from zoo.engine.norms import STATISTICS
from zoo.engine.reach import reach
from zoo.engine.sample import without_samples
from zoo.engine.state import State
from zoo.measure.memory import trace


def test_statistics_of_norms_in_training_are_not_copied() -> None:
    """They are written and not read; in eval mode they are read."""
    norm = nn.BatchNorm1d(4)
    assert not State(reach([norm])).buffers
    assert len(State(reach([norm.eval()])).buffers) == 3


@pytest.mark.parametrize("average", [0.1, None])
def test_a_second_run_may_find_anything_in_empty_scratch(
    average: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cumulative average divides by its count."""
    for name, make in STATISTICS.items():
        if make is torch.empty_like:
            monkeypatch.setitem(STATISTICS, name, lambda value: torch.full_like(value, -1))
    assert_trains(lambda: net(nn.BatchNorm1d(4, momentum=average)))


class Hidden:
    """Holds a norm where the engine does not look: in a slot."""

    __slots__ = ("norm",)

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(4)


def test_a_norm_on_another_thread_moves_during_a_second_run() -> None:
    hidden = Hidden()

    def function(x: Tensor) -> Tensor:
        if zoo.is_recomputing():
            thread = threading.Thread(target=hidden.norm, args=rows())
            thread.start()
            thread.join()
        return x.sin().exp()

    zoo.recompute(function, *rows()).sum().backward()
    assert int(hidden.norm.num_batches_tracked) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_a_norm_that_is_reached_by_no_name_moves_once(options: Any, training: bool) -> None:
    def program(call: Call) -> Any:
        hidden = Hidden()
        hidden.norm = nn.BatchNorm1d(4, **options).train(training)
        (x,) = rows()
        call(lambda x: hidden.norm(hidden.norm(x).sin()).exp(), x).sum().backward()
        return x.grad, state_of(hidden.norm)

    assert_exact(program)


@pytest.mark.parametrize("training", [True, False])
def test_a_lazy_norm_is_initialized_once(training: bool) -> None:
    norm = nn.LazyBatchNorm1d
    assert_trains(lambda: nn.Sequential(nn.Linear(4, 4), norm().train(training), nn.Tanh()))


def test_a_tensor_of_a_closure_moves_once() -> None:
    def program(call: Call) -> Any:
        linear, total = nn.Linear(4, 4), torch.ones(4)

        def function(x: Tensor) -> Tensor:
            total.add_(1)
            return torch.tanh(linear(x) * total)

        for _ in range(3):
            call(function, *rows()).sum().backward()
        return total, state_of(linear)

    assert_exact(program)


class Renormalized(nn.BatchNorm1d):
    """A norm of the user's, whose output depends on the statistics that it moves."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (self.running_var + 1).sqrt() + self.running_mean


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_of_the_users_sees_its_statistics_as_they_were(training: bool) -> None:
    assert_trains(lambda: net(Renormalized(4).train(training)))


class Turning(nn.Module):
    """Works with the statistics of a norm of torch's without a call that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.running_var.fill_(9)


class ByTheFlag(Turning):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.training = False
        y = self.norm(self.linear(x))
        self.norm.training = True
        return self.norm(y)


class ByName(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.norm.get_buffer("running_var").clone()


class ByAString(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * getattr(self.norm, "running_var").clone()  # noqa: B009


class ByACopy(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.norm).eval()(self.norm(self.linear(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ByTheFlag, ByName, ByAString, ByACopy])
def test_statistics_that_a_function_may_read_are_as_they_were(
    kind: type[Turning], way: Way
) -> None:
    """Scratch in their place gives a wrong gradient."""
    assert_trains(kind, way=way)


class Graph(nn.Module):
    """Multiplies by an adjacency that is no dense tensor."""

    def __init__(self, form: str, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        adjacency = getattr(torch.eye(6), form)()
        if place == "buffer":
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(self.adjacency, self.linear(x)))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("place", ["buffer", "attribute"])
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors(form: str, place: str) -> None:
    """They have no storage, and the compressed ones cannot be compared."""

    def program(call: Call) -> Any:
        model, (x,) = Graph(form, place), rows()
        call(model, x).square().sum().backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    assert_exact(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_saved() -> None:
    """It has no shape."""

    def program(call: Call) -> Any:
        layer, (one,), (two,) = nn.Linear(4, 4), rows(2), rows(3)

        def function(one: Tensor, two: Tensor) -> Tensor:
            both = torch.nested.as_nested_tensor([one, two])
            return torch.nested.to_padded_tensor(layer(both), 0.0).tanh()

        call(function, one, two).sum().backward()
        return one.grad, two.grad, state_of(layer)

    assert_exact(program)


class Initialized(nn.Module):
    """Sets its scale by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.ready = True
        return torch.tanh(x * self.scale)


class Clipped(nn.Module):
    """Clips its weights before it uses them, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(x)).exp()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [Initialized, Clipped])
def test_a_forward_that_writes_its_parameters(kind: type[nn.Module], frozen: bool) -> None:
    assert_trains(lambda: net(kind().requires_grad_(not frozen)))


@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_layers_without_parameters_changed_before_the_backward(change: str) -> None:
    """The second run has the layers of the first; afterwards the user's are back."""

    def program(call: Call) -> Any:
        model = net(nn.Sequential(nn.Tanh(), nn.Sigmoid()))
        loss = call(model, *rows()).square().sum()
        if change == "replaced":
            model[2][1] = nn.Tanh()
        elif change == "removed":
            del model[2][1]
        else:
            model[2].append(nn.Tanh())
        loss.backward()
        return state_of(model), [type(part).__name__ for part in model.modules()]

    assert_exact(program)


class Table(nn.Module):
    """Looks things up in a big buffer, which the first of its calls may move."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.rand(100_000, 4))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.table.mul_(0.5)
        return torch.tanh(self.linear(x) * self.table[0]).exp()


def test_the_copy_of_a_big_buffer_that_stayed_is_dropped_after_the_forward() -> None:
    model, losses = Table(), []
    record = trace(lambda: losses.append(zoo.recompute(model, *rows()).sum()))
    assert record.kept < 100_000


def test_segments_share_the_copy_of_a_small_buffer() -> None:
    model, outputs = nn.Linear(4, 4), rows()
    model.register_buffer("small", torch.rand(4_000, 4))

    def forward() -> None:
        for _ in range(20):
            outputs.append(zoo.recompute(lambda x: model(x).tanh(), outputs[-1]))

    assert trace(forward).kept < 2 * model.small.nbytes


class Tagged(Tensor):
    """A tensor whose content is not compared, as those on a GPU: only its version tells."""


@pytest.mark.parametrize("kind", [Tensor, Tagged])
def test_a_small_buffer_that_moves_in_every_step(kind: type[Tensor]) -> None:
    def program(call: Call) -> Any:
        model = nn.Linear(4, 4)
        model.register_buffer("total", torch.ones(4).as_subclass(kind))

        def function(x: Tensor) -> Tensor:
            model.total.add_(1)
            return torch.tanh(model(x) * model.total.as_subclass(Tensor)).exp()

        for _ in range(3):
            call(function, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("grows", [True, False])
def test_a_buffer_replaced_between_two_steps(grows: bool) -> None:
    """As `load_state_dict(assign=True)` does; it has the version that the first had."""

    def program(call: Call) -> Any:
        model = nn.Linear(4, 4)
        model.register_buffer("total", None)

        def function(x: Tensor) -> Tensor:
            model.total.add_(1)
            return torch.tanh(model(x) * model.total.as_subclass(Tensor).sum()).exp()

        for step in range(3):
            model.total = torch.full((4 + step * grows,), 0.1 * step).as_subclass(Tagged)
            call(function, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


def test_a_model_with_buffers_is_freed() -> None:
    model = Table(moves=True)
    model.register_buffer("small", torch.rand(4))
    zoo.recompute(model, *rows()).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_buffer_that_moved_once_is_copied_from_then_on() -> None:
    """It moves in every second step only, so a step that leaves it alone forgets nothing."""

    def program(call: Call) -> Any:
        model = Table(moves=True)
        for step in range(4):
            model.moves = step % 2 == 0
            call(model, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


def test_a_big_buffer_that_moves_late_is_refused_once() -> None:
    """By its name; from then on it is copied."""
    model = Table()
    zoo.recompute(model, *rows()).sum().backward()
    model.moves = True
    loss = zoo.recompute(model, *rows()).sum()
    with pytest.raises(
        zoo.RecomputeError, match=r"buffer 'table' of Table.* is copied from the ne"
    ):
        loss.backward()
    twin = copy.deepcopy(model)
    compare(
        outcome(lambda call: train(call, model, rows, module, 2), zoo.recompute),
        outcome(lambda call: train(call, twin, rows, module, 2), plain),
    )


@pytest.mark.parametrize("size", [4, 30_000])
def test_a_buffer_that_the_user_changes_before_the_backward(size: int) -> None:
    """A small one is seen as it was; a big one that no forward moves is refused."""
    model, (x,) = nn.Tanh(), rows()
    model.register_buffer("shift", torch.zeros(size, 4))

    def function(x: Tensor) -> Tensor:
        return model(x + model.shift[0]).exp()

    for _ in range(2):
        loss = zoo.recompute(function, x).sum()
    model.shift.add_(1)
    if size > 4:
        with pytest.raises(zoo.RecomputeError, match=r"buffer 'shift' of Tanh.*was changed"):
            loss.backward()
    else:
        loss.backward()
        model.shift.sub_(1)
        assert torch.equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


class Runs:
    """Counts in a slot, which is not given back to a second run."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Code(nn.Module):
    """Computes something of its parameter alone."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.weight, self.runs = nn.Parameter(torch.rand(4)), runs

    def forward(self, x: Tensor) -> Any:
        return zoo.recompute(self.code, x)

    def code(self, x: Tensor) -> Tensor:
        self.runs.count += 1
        return x + self.weight.sin()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_segment_that_saves_nothing_but_parameters_does_not_run_again(swapped: bool) -> None:
    """They are in memory anyway, also those of `torch.func.functional_call`."""
    model = Code(Runs())
    weight = torch.rand(4).requires_grad_() if swapped else model.weight
    torch.func.functional_call(model, {"weight": weight}, (torch.rand(4),)).sum().backward()
    assert torch.equal(weight.grad, weight.cos())
    assert model.runs.count == 1


class Reading(nn.Module):
    """Holds what the forwards below read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.window = torch.arange(1.0, 9.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale(x)).exp()

    def scale(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfStatistics(Reading):
    def scale(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.norm.running_var.sqrt() + self.norm.running_mean


class OfEvalInside(Reading):
    def scale(self, x: Tensor) -> Tensor:
        y = self.norm.eval()(x)
        return self.norm.train()(x) + y


class OfWeightsThroughData(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.5)
        return torch.tanh(self.linear(x))


class OfASlidingWindow(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.window = self.window[1:]
        return self.window[:4]


class OfAnAttributeThroughData(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.window.data.mul_(2)
        return self.window[:4]


MOVING = [
    OfStatistics, OfEvalInside, OfWeightsThroughData, OfASlidingWindow, OfAnAttributeThroughData,
]  # fmt: skip


@pytest.mark.parametrize("kind", MOVING)
def test_state_that_is_read_where_it_moves(kind: type[nn.Module]) -> None:
    """Exact or refused; none of these is."""
    assert_exact_or_refused(lambda call: train(call, kind(), rows, module, 2))


class Decaying(Clipped):
    """Writes something else each time."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.decay()
        y = torch.tanh(self.linear(x.detach())) * x
        if self.late:
            self.decay()
        return y

    @torch.no_grad()
    def decay(self) -> None:
        self.linear.weight.mul_(0.5)


@pytest.mark.parametrize("late", [True, False])
def test_weights_that_a_forward_lets_decay_are_refused_once(late: bool) -> None:
    """Also where no numbers are compared; from then on they are copied before."""
    model = Decaying()
    model.late = late
    loss = zoo.recompute(model, *rows()).sum()
    with (
        pytest.raises(zoo.RecomputeError, match=r"\(4, 4\) is written in place"),
        without_samples(),
    ):
        loss.backward()
    twin = copy.deepcopy(model)
    compare(
        outcome(lambda call: train(call, model, rows, module, 2), zoo.recompute),
        outcome(lambda call: train(call, twin, rows, module, 2), plain),
    )


class Taught(nn.Module):
    """Has a teacher whose weights are a moving average of its own, moved at one of two places."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), after
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.after:
            self.average()
        y = self.linear(x).tanh() * self.teacher(x.detach())
        if self.after:
            self.average()
        return y

    @torch.no_grad()
    def average(self) -> None:
        for mean, weight in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_inside_of_a_forward(after: bool, way: Way) -> None:
    def program(call: Call) -> Any:
        with without_samples():
            return train(call, Taught(after), rows, way, 3)

    assert_exact(program)


def test_copies_of_frozen_weights_that_stayed_are_dropped_after_the_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 4)).requires_grad_(False)
    first = trace(lambda: zoo.recompute(model, *rows()))
    again = trace(lambda: zoo.recompute(model, *rows()))
    assert first.kept < 16_000
    assert again.peak + 16_000 < first.peak


class Slotted(nn.Module):
    """Runs a layer that the engine does not find."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.hidden = Hidden()
        self.hidden.norm = layer
        self.registered = layer

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden
        return zoo.recompute(lambda x: hidden.norm(x).tanh(), x)


def test_other_parameters_in_a_layer_that_is_not_found_are_refused() -> None:
    """Also where no numbers are compared."""
    model = Slotted(nn.Linear(4, 4))
    others = {name: nn.Parameter(2 * value) for name, value in model.named_parameters()}
    loss = torch.func.functional_call(model, others, tuple(rows())).sum()
    with without_samples(), pytest.raises(zoo.RecomputeError, match="uses another parameter"):
        loss.backward()
