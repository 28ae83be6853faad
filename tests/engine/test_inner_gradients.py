"""Gradients that a forward takes inside of a segment: energy models, unrolled optimization, MAML.

Time and memory are counted: n inner steps replay n times what one does, and hold what the baseline
holds.
"""

import ctypes
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import zoo
from tests.engine.kernels import replayed
from tests.training import Call, Forward, assert_exact, elsewhere, gradients, net, plain, rows
from zoo.errors import RecomputeError
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork")

Energy = Callable[[Tensor], Tensor]
# the next point of an inner loop, from a point and what the loop minimizes there
Step = Callable[[Tensor, Energy], Tensor]


def energy(x: Tensor) -> Tensor:
    """Saves what is gone when its gradient is taken; what reads `x` first saves nothing."""
    return ((x + 1).sin().exp() * 0.1).tanh().sum()


def detaching(v: Tensor, energy: Energy) -> Tensor:
    return (v - 0.1 * grad(energy(v), v)[0]).detach().requires_grad_()


def by_data(v: Tensor, energy: Energy) -> Tensor:
    return (v - 0.1 * grad(energy(v), v)[0]).data.requires_grad_()


def logging(v: Tensor, energy: Energy) -> Tensor:
    """What a kernel read before it was detached, and is gone then."""

    def moved() -> Tensor:
        new = v - 0.1 * grad(energy(v), v)[0]
        assert new.norm().isfinite()
        return new.detach()

    return moved().requires_grad_()


def of_a_view(v: Tensor, energy: Energy) -> Tensor:
    return (v - 0.1 * grad(energy(v.t()), v)[0]).t().detach().t().requires_grad_()


def in_place(v: Tensor, energy: Energy) -> Tensor:
    v = v.detach().clone().requires_grad_()
    for _ in range(2):
        (found,) = grad(energy(v), v)
        with torch.no_grad():
            v.sub_(0.1 * found)
    return v


def accumulating(v: Tensor, energy: Energy) -> Tensor:
    v = v.detach().requires_grad_()
    energy(v).backward()
    energy(v * 2).backward()
    assert v.grad is not None
    return (v - 0.1 * v.grad).detach().requires_grad_()


def unrolled(v: Tensor, energy: Energy) -> Tensor:
    return v - 0.1 * grad(energy(v), v, create_graph=True)[0]


def twice(v: Tensor, energy: Energy) -> Tensor:
    found = energy(v)
    first = grad(found, v, retain_graph=True)[0]
    return v - 0.1 * (first + grad(found, v)[0])


def langevin(v: Tensor, energy: Energy) -> Tensor:
    found = grad(energy(F.dropout(v, 0.2)), v)[0]
    return (v - 0.1 * found + 0.01 * torch.randn_like(v)).detach().requires_grad_()


def of_heads(v: Tensor, energy: Energy) -> Tensor:
    trunk = (v + 1).sin() * 2
    return v - 0.1 * grad(sum(energy(trunk * k) for k in range(3)), v, create_graph=True)[0]


STEPS: list[Step] = [
    detaching,
    by_data,
    logging,
    of_a_view,
    in_place,
    accumulating,
    unrolled,
    twice,
    langevin,
    of_heads,
]


def loop(step: Step, energy: Energy, count: int) -> Callable[[Tensor], Tensor]:
    """Returns a forward with an inner loop between operations of its own."""

    def forward(w: Tensor) -> Tensor:
        v = before = w.sin().exp()
        for _ in range(count):
            v = step(v, energy)
        return (before * v).cos().sum() + v.tanh().sum()

    return forward


def assert_linear(counts: list[int]) -> None:
    """Asserts that each further step takes as much as the one before."""
    assert counts[0], "nothing was replayed"
    first, *others = [after - before for before, after in itertools.pairwise(counts)]
    assert all(other <= first for other in others), counts


def counted(run: Callable[[Tensor], Tensor], w: Tensor) -> tuple[int, int]:
    """Returns how many kernels are replayed in a forward, and how many in its backward."""
    losses: list[Tensor] = []
    forward = replayed(lambda: losses.append(run(w)))
    return forward.total(), replayed(losses[0].backward).total()


@pytest.mark.parametrize("step", STEPS)
def test_inner_steps_replay_as_many_kernels_each(step: Step) -> None:
    """inner gradients (forces, MAML) | each recomputes all before it | its own part only"""
    found = []
    for count in (2, 4, 6):
        run = loop(step, energy, count)
        found.append(counted(lambda w, run=run: zoo.recompute(run, w), *rows()))
    assert_linear([inside for inside, _ in found])
    assert_linear([total + 1 for _, total in found])


@pytest.mark.parametrize("step", [detaching, unrolled, twice])
def test_inner_steps_through_nested_segments_replay_as_many_kernels_each(step: Step) -> None:
    def deep(x: Tensor) -> Tensor:
        y = zoo.recompute(lambda x: zoo.recompute(lambda x: x.sin().exp() * x, x).tanh(), x + 1)
        return zoo.recompute(energy, y.cos())

    found = []
    for count in (2, 4, 6):
        run = loop(step, deep, count)
        found.append(counted(lambda w, run=run: zoo.recompute(run, w), *rows()))
    assert_linear([inside for inside, _ in found])
    assert_linear([total for _, total in found])


class SummedOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(("step", "plan"), [(detaching, True), (unrolled, "sqrt")])
def test_inner_steps_of_a_plan_replay_as_many_kernels_each(step: Step, plan: Any) -> None:
    found = []
    for count in (4, 16):
        block = nn.Sequential(net(), SummedOutput())
        model = zoo.checkpoint(Forward(loop(step, block, count), block), plan)
        found.append(sum(counted(model, *rows())) / count)
    # where a plan cuts the steps, and how deep, is not the same for each count
    assert found[1] < 1.5 * found[0], found


def test_gradients_of_what_is_alive_replay_nothing_before_it() -> None:
    """The trunk is gone, and its result is there, which many gradients begin from."""

    def forward(w: Tensor) -> Tensor:
        trunk = w.sin().exp().tanh().cos() * 2
        start = trunk.detach().requires_grad_()
        total = trunk.sum()
        for scale in range(8):
            total = total + grad((start * scale).sin().sum(), start)[0].sum()
        return total

    w, losses = rows()[0], list[Tensor]()
    found = replayed(lambda: losses.append(zoo.recompute(forward, w)))
    assert found - Counter(as_strided=8) == Counter(mul=8)


def test_other_saved_tensors_wait_for_their_own_backward() -> None:
    """Those of a step that was taken, and of one that is yet to be taken."""

    def forward(w: Tensor) -> Tensor:
        losses = [(w + k).sin().exp().sum() for k in range(8)]
        return sum(grad(one, w)[0].cos().sum() for one in losses)

    found = replayed(lambda: zoo.recompute(forward, *rows()))
    assert found == Counter(add=8, sin=8, exp=8)


class Everything(nn.Module):
    """An inner loop over layers with statistics, random numbers, hooks, segments and writes."""

    def __init__(self, call: Call, step: Step) -> None:
        super().__init__()
        self.call, self.step, self.seen = call, step, list[Tensor]()
        self.layers = net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4), nn.LayerNorm(4))
        self.inner = net(nn.Dropout(0.2), nn.BatchNorm1d(4))

    def energy(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 4)
        y = x * 1
        y[1:3] = x[1:3].sin()
        y.register_hook(lambda g: self.seen.append(g.clone()))
        y = self.call(self.inner, self.layers[:2](y) * (y * 2).relu_())
        return self.layers(torch.cat([y.sum(1, True), x.chunk(4, 1)[0], x[:, :2].exp()], 1)).sum()

    def forward(self, x: Tensor) -> Tensor:
        v = y = self.layers[:2](x)
        for _ in range(3):
            v = self.step(v, self.energy)
            y = y + v.reshape(y.shape).sin() * y
        return y.square().sum() + self.layers(x).sum()


def trained(model: Everything, run: Callable[[Tensor], Tensor]) -> Any:
    (x,) = rows()
    losses = []
    for _ in range(2):
        loss = run(x)
        loss.backward()
        losses.append(loss)
    return losses, x.grad, gradients(model), dict(model.named_buffers()), model.seen


@pytest.mark.parametrize("step", STEPS)
def test_inner_gradients_are_those_of_the_baseline(step: Step) -> None:
    def program(call: Call) -> Any:
        model = Everything(call, step)
        return trained(model, lambda x: call(model, x))

    assert_exact(program)


@pytest.mark.parametrize(
    ("step", "plan"),
    [(detaching, True), (in_place, "blocks"), (accumulating, "sqrt"), (of_heads, "blocks")],
)
def test_inner_gradients_of_a_plan_are_those_of_the_baseline(step: Step, plan: Any) -> None:
    def program(call: Call) -> Any:
        model = Everything(plain, step)
        return trained(model, model if call is plain else zoo.checkpoint(model, plan))

    assert_exact(program)


def assert_exact_in_a_segment(forward: Callable[[Tensor], Tensor], make: Any = rows) -> None:
    """Compares a function of one weight, and its gradient, with the plain one."""

    def program(call: Call) -> Any:
        (w,) = make()
        loss = call(forward, w)
        loss.backward()
        return loss, w.grad

    assert_exact(program)


def test_what_code_that_no_mode_sees_wrote_since_is_made_again() -> None:
    """In the baseline the sum does not mind that what it read is written afterwards."""

    def forward(w: Tensor) -> Tensor:
        h = w.detach() * 2
        y = ((h + 1) * w).sin()
        y = (y + h).exp() * 1
        h.numpy()[:] = 0
        return grad(y.sum(), w)[0].sum() + (w * 2).sin().sum()

    assert_exact_in_a_segment(forward)


def test_what_was_written_by_address_since_is_made_again() -> None:
    """What has a gradient has no sample: a replay of what it is read for tells."""

    def forward(w: Tensor) -> Tensor:
        h = w * 2
        y = (h + 1).sin()
        ctypes.memset(h.data_ptr(), 0, h.nbytes)
        return grad(y.sum(), w)[0].sum() + (w * 2).sin().sum()

    assert_exact_in_a_segment(forward)


def test_what_another_thread_wrote_since_is_made_again() -> None:
    """Its writes are counted and not recorded."""

    def forward(w: Tensor) -> Tensor:
        h = w.detach() * 2
        y = ((h + w).sin() * w).exp().sum()
        elsewhere(h[1, 5].zero_)
        return grad(y, w)[0].sum() + (w * 2).sin().sum()

    assert_exact_in_a_segment(forward, lambda: [torch.rand(64, 64, requires_grad=True)])


class Overwriting(torch.autograd.Function):
    """Writes in its backward into what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 3
        ctx.save_for_backward(y)
        return y.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        z = y.exp()
        y.tanh_()
        return 3 * (1 - y * y) * gradients[0] + z * 0


def test_a_backward_inside_may_write_what_was_made_for_it() -> None:
    def program(call: Call) -> Any:
        def forward(w: Tensor) -> Tensor:
            v = w
            for _ in range(3):
                v = v - 0.1 * grad(Overwriting.apply(v.sin()).exp().sum(), v)[0]
            return v.sin().sum()

        (w,) = rows()
        call(forward, w).backward()
        return w.grad

    assert_exact(program)


class Keeping(torch.autograd.Function):
    """Lets the forward have what its backward is given."""

    given: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = Keeping.given[:] = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


def test_what_a_backward_inside_saved_and_is_written_is_refused_as_without() -> None:
    def forward(w: Tensor) -> Tensor:
        (found,) = grad(Keeping.apply(w.sin()).sum(), w, create_graph=True)
        with torch.no_grad():
            Keeping.given[0].mul_(2)
        return found.sum()

    for call in (plain, zoo.recompute):
        loss = call(forward, *rows())
        with pytest.raises(RuntimeError, match=r"in ?place"):
            loss.backward()


@pytest.mark.parametrize("cube", [Keeping.apply, lambda x: x.pow(3)])
def test_memory_that_was_detached_and_is_written_after_a_backward_inside_is_refused(
    cube: Callable[[Tensor], Tensor],
) -> None:
    """The backward saved what is made again of a tensor whose memory is still there."""

    def forward(w: Tensor) -> Tensor:
        y = w.sin()
        memory = y.detach()
        z = cube(y)
        del y
        (found,) = grad(z.sum(), w, create_graph=True)
        memory.mul_(2)
        return found.sum()

    with pytest.raises(RuntimeError, match="inplace"):
        forward(*rows()).backward()
    with pytest.raises(RecomputeError, match="in place"):
        zoo.recompute(forward, *rows()).backward()


SIZE = 1 << 16


def peak_of(call: Call, step: Step, count: int) -> int:
    """Returns the peak of the forward of a loop, in tensors."""
    w = torch.rand(SIZE, requires_grad=True)
    found = trace(lambda: call(loop(step, energy, count), w))
    total = peak = 0
    for _, size in found.events:
        total += size
        peak = max(peak, total)
    return round(peak / (4 * SIZE))


@pytest.mark.parametrize("step", [step for step in STEPS if step is not of_a_view])
def test_inner_gradients_take_the_memory_of_the_baseline(step: Step) -> None:
    for count in (1, 4):
        assert peak_of(zoo.recompute, step, count) <= peak_of(plain, step, count)


class Marker:
    """Something that a hook holds."""


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """No kernel of torch's, whose result is kept."""
    return x * 2


doubled.register_autograd(lambda ctx, g: g * 2)


@pytest.mark.parametrize("creates", [False, True])
def test_graphs_of_inner_gradients_live_no_longer_than_without(creates: bool) -> None:
    def lives(call: Call) -> list[int]:
        markers, found = list[weakref.ref[Marker]](), list[int]()

        def forward(w: Tensor) -> Tensor:
            h = w * 2
            for turn in range(4):
                marker = Marker()
                markers.append(weakref.ref(marker))
                y = (h * turn).sin()
                y.register_hook(lambda g, held=marker: g)
                if turn % 2:
                    y.grad_fn.register_hook(lambda one, other, held=y: None)
                z = F.dropout(doubled(y).exp() * 3, 0.1).tanh()
                grad(z.sum(), h, create_graph=creates)
                del y, z, marker
                found.append(sum(one() is not None for one in markers))
            return w.sin().sum()

        call(forward, *rows())
        return found

    gc.collect()
    gc.disable()
    try:
        assert lives(zoo.recompute) == lives(plain)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_backward_inside_that_is_interrupted_leaves_nothing_for_the_next(is_inside: bool) -> None:
    """Its nested segment was given what its own operations needed, and no more."""

    def program(call: Call) -> Any:
        stops = [InterruptedError]

        def stop(gradient: Tensor) -> None:
            if stops:
                raise stops.pop()

        def both(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return one.cos() * one, other.exp() * other

        def forward(w: Tensor) -> Tensor:
            x = (w * 0.1).detach().requires_grad_()
            one, other = call(both, w.sin() + 1, x)
            other.register_hook(stop)
            with pytest.raises(InterruptedError):
                grad(other.tanh().sin().sum(), x, retain_graph=True)
            if is_inside:
                (found,) = grad(one.sum(), w, create_graph=True)
                return found.sum() + other.sum()
            return one.sum() + other.sum()

        (w,) = rows()
        call(forward, w).backward()
        return w.grad

    assert_exact(program)
