"""What the backward replays: the kernels that its saved tensors need, and no others."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.engine.kernels import replayed
from tests.training import (
    Call,
    assert_exact,
    assert_same,
    elsewhere,
    frozen,
    generator,
    net,
    pictures,
    plain,
    rows,
    state_of,
)
from zoo.engine.kernel_settings import read_settings
from zoo.engine.segments import thread as of_engine
from zoo.profiling.peak_memory import trace

WEIGHT = nn.Parameter(torch.ones(4))


def after(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns what the backward of a segment replays."""
    loss = zoo.recompute(function, *args).sum()
    return replayed(loss.backward)


def test_each_kernel_is_replayed_once() -> None:
    (x,) = rows()
    layers = net(*[nn.Linear(4, 4) for _ in range(10)])
    found = after(lambda x: layers(x).sin().exp(), x)
    assert found == {"addmm": 12, "tanh": 2, "sin": 1, "exp": 1}


def test_the_last_convolution_is_not_replayed() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert after(model, *pictures())["convolution"] == 1


def test_a_linear_layer_at_the_end_is_not_replayed() -> None:
    assert after(net(), *rows())["addmm"] == 1


@pytest.mark.parametrize(
    "function",
    [
        nn.Linear(4, 4),
        nn.Conv1d(6, 2, 1),
        lambda x: x * 3 + 1,
        lambda x: x * WEIGHT,
        torch.sin,
        lambda x: x.view(-1).sin()[2:].sum(),
        lambda x: torch.cat([x, x]).mean(),
    ],
)
def test_what_saves_only_what_is_there_replays_nothing(function: Any) -> None:
    """Inputs and parameters are in memory anyway."""
    assert not after(function, *rows())


class Averaging(nn.Module):
    """Keeps a moving average, a counter and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.count += 1
            self.accuracy = (y.argmax(1) == x.argmax(1)).float().mean()
        return y.tanh()


def test_statistics_counters_and_metrics_are_not_replayed() -> None:
    assert after(Averaging(), *rows()) == {"addmm": 1, "tanh": 1}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_is_replayed_without_its_counter(momentum: float | None) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
    found = after(model, *pictures())
    # the norm's kernel has other names where cuDNN or MIOpen has one
    (norm,) = (count for name, count in found.items() if name.endswith("batch_norm"))
    assert found["convolution"] == norm == found["relu"] == 1
    assert not {"add_", "add", "mul_", "copy_"} & found.keys()


def test_a_mask_is_drawn_once_more() -> None:
    # so many draws take more bytes than the random state for their replay
    x = torch.rand(1000, 4, requires_grad=True)
    found = after(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), x)
    assert found["bernoulli_"] == found["div_"] == 1
    assert not {"addmm", "mul"} & found.keys()


def test_a_replay_drops_what_nobody_reads_any_more() -> None:
    """Of a chain whose last result alone is saved it holds two at a time, not all."""
    x = torch.rand(100_000).requires_grad_()

    def function(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + 1
        return x.sin()

    loss = zoo.recompute(function, x).sum()
    # beside them a gradient; an allocator may round up
    peak = trace(loss.backward, torch.get_default_device()).peak
    assert x.nbytes < peak <= 4.1 * x.nbytes


def test_what_only_a_lost_output_needs_is_not_replayed() -> None:
    (x,) = rows()
    one, two = zoo.recompute(lambda x: (x.sin().exp(), x.cos().sigmoid()), x)
    del two
    assert replayed(one.sum().backward) == {"sin": 1, "exp": 1}


def test_a_retained_graph_is_replayed_by_each_backward() -> None:
    loss = zoo.recompute(lambda x: x.sin().exp().tanh(), *rows()).sum()
    for _ in range(3):
        found = replayed(lambda: loss.backward(retain_graph=True))
        assert found == {"sin": 1, "exp": 1, "tanh": 1}
    assert replayed(loss.backward) == {"sin": 1, "exp": 1, "tanh": 1}


class ReadsTwice(torch.autograd.Function):
    """Asks twice for what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (first,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (first + again)


def test_of_a_retained_graph_only_what_was_freed_is_replayed_again() -> None:
    (x,) = rows()
    loss = zoo.recompute(lambda x: x.cos().exp().tanh() + ReadsTwice.apply(x.sin()), x).sum()
    found = replayed(lambda: loss.backward(retain_graph=True))
    assert found == {"sin": 2, "cos": 1, "exp": 1, "tanh": 1}


def test_for_a_segment_of_a_retained_graph_what_it_starts_from_is_replayed_once() -> None:
    """Also where it is replayed twice, for what was freed."""

    def inner(y: Tensor) -> Tensor:
        return ReadsTwice.apply(y.sin())

    loss = zoo.recompute(lambda x: zoo.recompute(inner, x.cos()), *rows()).sum()
    assert replayed(lambda: loss.backward(retain_graph=True)) == {"sin": 2, "cos": 1}


def test_each_output_of_a_retained_graph_replays_once() -> None:
    (x,) = rows()
    one, two = zoo.recompute(lambda x: (x.sin().exp(), x.sin().tanh()), x)
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    found = replayed(lambda: torch.autograd.grad(two.sum(), x))
    assert found["tanh"] == 1


def level(depth: int, *inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a segment with an operator of its own before and after the one inside."""
    before, between = [(Tensor.sin, Tensor.exp), (Tensor.cos, Tensor.tanh),
                       (Tensor.erf, Tensor.sigmoid)][depth]  # fmt: skip

    def function(x: Tensor) -> Tensor:
        y = before(x)
        for part in inner:
            y = part(y)
        return between(y)

    return lambda x: zoo.recompute(function, x)


def test_a_segment_three_deep_is_replayed_three_times() -> None:
    """Once for what follows each segment around it, and once for itself."""
    loss = level(0, level(1, level(2)))(*rows()).sum()
    assert replayed(loss.backward) == {
        "sin": 1, "exp": 1, "cos": 2, "tanh": 2, "erf": 3, "sigmoid": 3,
    }  # fmt: skip


def test_two_segments_inside_of_one_are_replayed_as_often() -> None:
    loss = level(0, level(1), level(2))(*rows()).sum()
    assert replayed(loss.backward) == {
        "sin": 1, "exp": 1, "cos": 2, "tanh": 2, "erf": 2, "sigmoid": 2,
    }  # fmt: skip


def test_a_segment_that_ends_another_is_not_replayed_for_it() -> None:
    """Nothing follows whose gradient needs what it made."""
    (x,) = rows()
    loss = zoo.recompute(lambda x: zoo.recompute(lambda x: x.cos().erf(), x.sin()), x).sum()
    assert replayed(loss.backward) == {"sin": 1, "cos": 1}


def test_a_backward_inside_of_the_forward_replays_the_inner_segment() -> None:
    found = Counter[str]()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = zoo.recompute(lambda y: y.cos().erf(), y)

        def inner() -> None:
            self_gradient.extend(torch.autograd.grad(z.sum(), y, create_graph=True))

        self_gradient: list[Tensor] = []
        found.update(replayed(inner))
        return (z * self_gradient[0]).exp()

    zoo.recompute(function, *rows()).sum().backward()
    assert found["cos"] == 1


def test_a_replay_inside_of_a_forward_is_not_recorded() -> None:
    """Its kernels would be kept until the forward ends, and replayed once more."""
    counts: list[int] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        for _ in range(2):
            counts.append(of_engine.segment.recording.count)  # type: ignore[union-attr]
            assert y.grad_fn._saved_self.shape == x.shape  # type: ignore[union-attr]
        return y

    assert replayed(lambda: zoo.recompute(function, *rows())) == {"sin": 2, "exp": 2}
    assert counts[0] == counts[1]


def test_a_forward_that_goes_on_after_a_replay_is_recorded_again() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        assert y.grad_fn._saved_self.shape == x.shape  # type: ignore[union-attr]
        return y.erf().tanh()

    assert after(function, *rows()) == {"sin": 1, "exp": 1, "cos": 1, "erf": 1, "tanh": 1}


@pytest.mark.parametrize("wrt", ["input", "inside", "parameter"])
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gradients_asked_for_inside_of_the_forward(depth: int, create: bool, wrt: str) -> None:
    """A force field: the output is a gradient by the input, the loss is of both."""

    def program(call: Call) -> Any:
        model, (x,) = net(nn.Linear(4, 4), nn.Tanh()), rows()

        def function(x: Tensor) -> Tensor:
            inside = x * 1.5
            energy = call(model, inside) if depth == 2 else model(inside)
            by = {"input": x, "inside": inside, "parameter": model[0].weight}[wrt]
            (force,) = torch.autograd.grad(
                energy.square().sum(), by, create_graph=create, retain_graph=True
            )
            return energy.sin().sum(1) + force.square().sum()

        y = function(x) if depth == 0 else call(function, x)
        y.square().sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


def by_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def by_mkldnn() -> None:
    torch._C._set_mkldnn_enabled(False)


def by_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def by_precision_of_a_library() -> None:
    set_precision("mkldnn", "matmul", "bf16")


def set_precision(library: str, kind: str, precision: str) -> None:
    # not by `torch.backends`, which other tests freeze
    torch._C._set_fp32_precision_setter(library, kind, precision)


def by_precision_of_all() -> None:
    set_precision("generic", "all", "tf32")


def by_determinism() -> None:
    torch.use_deterministic_algorithms(True)


def by_filling() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False


CHANGES = [
    by_default_dtype,
    by_mkldnn,
    by_precision,
    by_precision_of_a_library,
    by_precision_of_all,
    by_determinism,
    by_filling,
]


def reset_precisions() -> None:
    """Sets what torch begins with."""
    for place in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        set_precision(*place, "none")


class Settings(AbstractContextManager[None]):
    """Sets what was set before."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype(), torch._C._get_mkldnn_enabled()
        self.filling = torch.utils.deterministic.fill_uninitialized_memory

    def __exit__(self, *raised: object) -> None:
        torch.set_default_dtype(self.before[0])
        torch._C._set_mkldnn_enabled(self.before[1])
        torch.set_float32_matmul_precision("highest")
        reset_precisions()
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = self.filling


@pytest.mark.parametrize("where", ["around", "inside", "between", "backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_settings_are_those_of_each_kernel(change: Callable[[], None], where: str) -> None:
    """Changed around the forward only, inside of it, after it, or around the backward only."""

    def program(call: Call) -> Any:
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Tanh())
        (x,) = pictures()

        def function(x: Tensor) -> Tensor:
            y = (model[:2](x) * torch.linspace(0, 1, 3)).tanh()
            if where == "inside":
                change()
            y = y * torch.linspace(0, 1, 3) / torch.arange(1, 4)
            z = model[2:](y.float()).sum((2, 3)) * torch.full((4,), 0.1)
            return (z @ torch.eye(4, dtype=z.dtype)).sin().exp()

        with Settings():
            if where == "around":
                change()
            y = call(function, x)
        with Settings():
            if where == "between":
                change()
            if where == "backward":
                change()
            before = read_settings()
            y.square().sum().backward()
            assert read_settings() == before
        return y, x.grad, state_of(model)

    assert_exact(program)


class OfMultiplications(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes under which setting each matrix multiplication of a forward or its replay runs."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read, self.found = read, set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.found.add(self.read())
        return func(*args, **(kwargs or {}))


def matmul_precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("general", [False, True])
def test_a_precision_is_that_of_each_kernel(general: bool) -> None:
    """Processors without bfloat16 compute the same by either, so it is read where kernels run."""

    place = ("generic", "all") if general else ("mkldnn", "matmul")
    try:
        set_precision(*place, "bf16")
        y = zoo.recompute(net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), *rows())
        set_precision(*place, "tf32")
        with OfMultiplications(matmul_precision) as precisions:
            y.sum().backward()
        assert precisions.found == {"bf16"}
        # one that went by the general one still does
        set_precision("generic", "all", "ieee")
        expected = "ieee" if general else "tf32"
        assert matmul_precision() == expected
    finally:
        reset_precisions()


@pytest.mark.parametrize(
    ("read", "write", "forward", "backward"),
    [
        (torch.get_num_threads, torch.set_num_threads, 3, 2),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1, 0),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0, 2),
    ],
)
def test_a_setting_is_that_of_each_kernel(
    read: Callable[[], int], write: Callable[[int], None], forward: int, backward: int
) -> None:
    """Numbers need not depend on it on this machine, so it is read where kernels run."""
    before = read()
    try:
        write(forward)
        y = zoo.recompute(net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), *rows())
        write(backward)
        with OfMultiplications(read) as settings:
            y.sum().backward()
        assert settings.found == {forward}
        assert read() == backward
    finally:
        write(before)


def test_the_number_of_threads_is_that_of_the_forward() -> None:
    """another number of threads | sums round differently | exact

    A sum over many numbers depends on it, also where one core runs them all.

    Some sums come out the same by chance, so there are several.
    """
    before = torch.get_num_threads()

    def function(x: Tensor) -> Tensor:
        sums = torch.stack([row.sum() for row in x.unbind()])
        return (x * sums[:, None] * 1e-3).sin().exp()

    def program(call: Call) -> Any:
        x = torch.randn(8, 100_000).requires_grad_()
        try:
            torch.set_num_threads(4)
            y = call(function, x)
            torch.set_num_threads(1)
            y.sum().backward()
        finally:
            torch.set_num_threads(before)
        return x.grad

    assert_exact(program)


@pytest.mark.parametrize("own", [True, False])
def test_a_hook_that_draws_during_the_backward_draws_as_without(own: bool) -> None:
    """A replay sets generators; what runs between two kernels must not see it."""

    def program(call: Call) -> Any:
        stream = generator(3) if own else None
        drawn, (x,) = list[Tensor](), rows()

        def draw(gradient: Tensor) -> None:
            # a thread of the device knows no default device
            drawn.append(torch.rand(2, generator=stream, device=gradient.device))

        def part(y: Tensor) -> Tensor:
            noise = torch.rand(y.shape, generator=stream)
            z = F.dropout((y * noise).tanh(), 0.3)
            z.register_hook(draw)
            return z.sin()

        y = call(lambda x: call(part, call(part, x)).exp(), call(part, x))
        y.sum().backward()
        return x.grad, drawn, stream, torch.rand(1)

    assert_exact(program)


def test_forwards_and_backwards_in_many_threads() -> None:
    """one model in many threads | exact | exact

    Each forward on one thread, its backward on another, all at once.
    """

    def gradients(call: Call, together: bool) -> Any:
        torch.manual_seed(0)
        models = [net(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(4)]
        batches = [[rows()[0] for _ in range(5)] for _ in models]

        def forward(number: int, batch: int) -> None:
            model = models[number]
            loss = call(lambda x: call(model, x.sin()), batches[number][batch]).square().sum()
            elsewhere(loss.backward)

        def work(number: int) -> None:
            for batch in range(5):
                forward(number, batch)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        return [frozen(state_of(model)) for model in models]

    assert_same(gradients(zoo.recompute, True), gradients(plain, False))
