"""Segments that are ranges of a forward's kernels, opened and closed between any two of them."""

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zoo
from tests.engine.kernels import Made, replayed
from tests.training import assert_same, frozen, gradients, plain, state_of
from zoo.engine import kernel_segments
from zoo.engine.kernel_segments import Conductor, PlannedBranch, conducts
from zoo.engine.segments import thread
from zoo.planner.plan import Plan

Forward = Callable[[], Any]


class Mixed(nn.Module):
    """Statistics, masks, views and in-place writes, and tensors that reach far."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.act(self.norm(self.first(x))))
        z = y * 2
        z[:, :3].mul_(y[:, 3:6].detach())
        z.t()[1:2].add_(1)
        z = z * z.exp().sum(1, keepdim=True).rsqrt()
        return (self.second(z) * x).tanh() * torch.ones(5, 6).tril() + self.first(x).sin().sum()


def branch_of(forward: Forward, starts: list[int], plan: Any, block: str = "") -> PlannedBranch:
    """Returns the branch of a forward that is cut before these kernels."""
    with Conductor([]) as conductor:
        forward()
    visits = {visit: place for visit, place in conductor.visits.items() if visit[0] == block}
    return PlannedBranch(conductor.operators, [0, *starts], Plan(plan), visits)


def place_of(forward: Forward, name: str, number: int = 0) -> int:
    """Returns the place of a kernel, by a pattern of its name, among those of a forward."""
    with Conductor([]) as conductor:
        forward()
    names = [operator.overloadpacket.__name__ for operator in conductor.operators]
    return [place for place, other in enumerate(names) if re.fullmatch(name, other)][number]


def outcome(model: nn.Module, branches: list[PlannedBranch]) -> Any:
    """Trains for a step and returns all that this leaves."""
    torch.manual_seed(2)
    x = torch.randn(5, 6, requires_grad=True)
    with Conductor(branches) if branches else nullcontext():
        y = model(x)
    y.square().sum().backward()
    return frozen([y, x.grad, state_of(model), torch.get_rng_state()])


def mixed() -> nn.Module:
    torch.manual_seed(1)
    return Mixed()


def test_a_cut_before_any_kernel_is_exact() -> None:
    expected = outcome(mixed(), [])
    rows = torch.randn(5, 6, requires_grad=True)
    for start in range(1, place_of(lambda: mixed()(rows), "sum", -1)):
        branch = branch_of(lambda: mixed()(rows), [start], [(0,), (1,)])
        assert_same(outcome(mixed(), [branch]), expected, f"cut at {start}")


@pytest.mark.parametrize("seed", range(12))
def test_random_cuts_and_plans_are_exact(seed: int) -> None:
    draw = random.Random(seed)
    plan = draw.choice([
        [0, (1,), 2, (3,)], [(0, 1), 2, (3,)], [((0,), (1, 2)), (3,)], [(0, (1, (2,), 3))],
        [((0, 1), (2, 3))],
    ])  # fmt: skip
    rows = torch.randn(5, 6, requires_grad=True)
    last = place_of(lambda: mixed()(rows), "sum", -1)
    starts = sorted(draw.sample(range(1, last), 3))
    branch = branch_of(lambda: mixed()(rows), starts, plan)
    assert_same(outcome(mixed(), [branch]), outcome(mixed(), []))


def test_a_forward_that_outgrows_its_branch_at_any_kernel_is_exact() -> None:
    rows = torch.randn(5, 6, requires_grad=True)
    branch = branch_of(lambda: mixed()(rows), [3, 6], [(0, 1), (2,)])
    limited = replace(branch, sizes=[1 << 20] * len(branch.operators), room=1.0)
    with Conductor([limited]) as conductor:
        mixed()(rows)
    assert not conductor.outgrown
    sizes = [max(1, conductor.sizes[place]) for place in range(len(branch.operators))]
    expected = outcome(mixed(), [])
    for place in [place for place, size in enumerate(sizes[:-1]) if size >= 64]:
        # one that has room for this kernel serves instead, if there is one
        small = replace(limited, sizes=[*sizes[:place], 1, *sizes[place + 1 :]])
        large = replace(limited, sizes=sizes, plan=Plan([0, (1, 2)]))
        for branches in ([small], [small, large]):
            assert_same(outcome(mixed(), branches), expected, f"outgrown at {place}")
            with Conductor(branches) as conductor:
                mixed()(rows)
            assert conductor.branch is branches[-1]
            assert conductor.outgrown is conductor.lost is (len(branches) == 1)


def test_nested_ranges_are_replayed_within_each_other() -> None:
    x = torch.randn(4, requires_grad=True)

    def forward() -> Tensor:
        return x.sin().cos().exp().tanh().sigmoid()

    branch = branch_of(forward, [1, 3, 4], [(0, (1, 2), 3)])
    with Conductor([branch]):
        y = forward()
    # the result of tanh ends the inner segment, and the outer replay makes it for sigmoid
    assert replayed(y.sum().backward)["cos"] == 2


def test_what_is_saved_before_a_turn_and_read_after_it_stays() -> None:
    """A product saves its factors before its kernel runs: they belong to what comes after."""
    x = torch.randn(4, requires_grad=True)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        factors = x.sin(), x.cos()
        return *factors, factors[0] * factors[1]

    branch = branch_of(forward, [place_of(forward, "mul")], [(0,), (1,)])
    with Conductor([branch]):
        one, other, product = forward()
    assert not replayed(lambda: torch.autograd.grad(product.sum(), (one, other)))


def test_what_a_closed_range_no_longer_needs_is_freed() -> None:
    x = torch.randn(1 << 13, requires_grad=True)

    def forward() -> Tensor:
        mask = (x.detach() * 3).cos()
        return (x * 2).sin() + mask.sum()

    branch = branch_of(forward, [], [(0,)])
    with Made() as made, Conductor([branch]):
        y = forward()
    assert made.alive(y) == []


def test_a_kernel_that_is_not_the_branchs_ends_its_plan() -> None:
    x = torch.randn(4, requires_grad=True)
    branch = branch_of(lambda: x.sin().exp().tanh().sin(), [2], [(0,), (1,)])
    with Conductor([branch]) as conductor:
        y = x.sin().exp().cos().sin()
    assert conductor.lost
    assert not conductor.synchronized
    # where no block is under way, what follows is kept; cos, which strayed, found exp's result kept
    assert replayed(y.sum().backward) == {"exp": 1, "sin": 1}
    expected = torch.autograd.grad(x.sin().exp().cos().sin().sum(), x)
    assert_same(frozen([x.grad]), frozen(list(expected)))


def test_another_branch_of_the_same_beginning_goes_on() -> None:
    x = torch.randn(4, requires_grad=True)
    ways = [lambda: x.sin().exp().tanh().sin().exp(), lambda: x.sin().exp().cos().sin().exp()]
    branches = [branch_of(way, [2], [(0,), (1,)]) for way in ways]
    for way in ways:
        with Conductor(branches) as conductor:
            y = way()
        assert not conductor.lost
        assert conductor.branch is branches[ways.index(way)]
        # the second part is a segment in both ways
        assert replayed(y.sum().backward)["sin"] == 2
        assert_same(frozen(list(torch.autograd.grad(way().sum(), x))), frozen([x.grad]))
        x.grad = None


class Blocks(nn.Module):
    """Three blocks, with a product or some sigmoids between the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoids = 0

    def block(self, name: str, x: Tensor) -> Tensor:
        conductor = thread.conductor
        if conductor is not None:
            conductor.enter(name)
        y = x.sin().exp().tanh()
        if conductor is not None:
            conductor.leave()
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.block("first", x)
        for _ in range(self.sigmoids):
            y = y.sigmoid()
        return self.block("last", self.block("other", y if self.sigmoids else y * 2))


@pytest.mark.parametrize("sigmoids", [1, 2])
def test_after_a_stray_each_block_is_a_segment_until_a_known_one(sigmoids: int) -> None:
    model, x = Blocks(), torch.randn(4, requires_grad=True)
    branch = branch_of(lambda: model(x), [7], [0, 1], block="last")
    model.sigmoids = sigmoids
    with Conductor([branch]) as conductor:
        y = model(x)
    assert conductor.lost
    assert conductor.synchronized
    # the plan keeps all, so that only the block after the stray is replayed
    assert replayed(y.sum().backward) == {"sin": 1, "exp": 1, "tanh": 1}
    found = frozen([y, x.grad])
    x.grad = None
    y = model(x)
    y.sum().backward()
    assert_same(found, frozen([y, x.grad]))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_open_after_a_forward(fails: bool) -> None:
    x = torch.randn(4, requires_grad=True)
    branch = branch_of(lambda: x.sin().exp(), [1], [((0,), 1)])
    with pytest.raises(ValueError, match="stop") if fails else nullcontext(), Conductor([branch]):
        x.sin().exp()
        if fails:
            raise ValueError("stop")
    assert thread.segment is None
    assert thread.conductor is None
    y = x.sin().exp()
    assert not replayed(y.sum().backward)


@pytest.mark.parametrize("is_view", [False, True])
def test_a_backward_inside_of_a_forward_does_not_stray(is_view: bool) -> None:
    x = torch.randn(4, requires_grad=True)

    def forward() -> Tensor:
        # what a replay hands out is made by an operator, too, where it is a view
        y = x.sin().exp()[1:].sin() if is_view else x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x)
        return y.sum() * slope.detach().tanh()

    branch = branch_of(forward, [1], [(0,), (1,)])
    # the forward's own backward replays; its kernels are those of the branch all the same
    with Conductor([branch]) as conductor:
        y = forward()
    assert not conductor.lost
    y.retain_grad()


@pytest.mark.parametrize("create", [False, True])
def test_a_cut_anywhere_in_a_backward_inside_of_a_forward_is_exact(create: bool) -> None:
    """On an accelerator that backward runs on another thread than the forward."""
    x = torch.linspace(0, 1, 4).requires_grad_()

    def forward() -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.tanh().sum(), x, retain_graph=True, create_graph=create)
        return (y.cos() * slope).sin().exp()

    (expected,) = torch.autograd.grad(forward().sum(), x)
    with Conductor([]) as conductor:
        forward()
    for start in range(1, len(conductor.operators)):
        branch = branch_of(forward, [start], [(0,), (1,)])
        with Conductor([branch]) as conductor:
            y = forward()
        assert not conductor.lost
        assert conductor.path == (1,), f"cut at {start}"
        assert_same(
            frozen(list(torch.autograd.grad(y.sum(), x))), frozen([expected]), f"cut at {start}"
        )


def test_a_segment_of_the_model_is_none_where_a_plan_is_in_force() -> None:
    x = torch.randn(4, requires_grad=True)

    def forward(call: Any) -> Tensor:
        return call(lambda x: x.sin().exp().tanh(), x.cos()).sigmoid()

    branch = branch_of(lambda: forward(plain), [2], [0, (1,)])
    with Conductor([branch]) as conductor:
        y = forward(zoo.recompute)
    assert not conductor.lost
    assert replayed(y.sum().backward) == {"exp": 1, "tanh": 1, "sigmoid": 1}
    found, x.grad = x.grad, None
    forward(plain).sum().backward()
    assert_same(frozen([found]), frozen([x.grad]))


@pytest.mark.parametrize("plan", [[0, 1], [(0,), 1]])
def test_kernels_of_lists_count_versions_where_the_plan_keeps(plan: Any) -> None:
    x, scale = torch.randn(4, requires_grad=True), torch.ones(4)

    def forward() -> Tensor:
        y = x * scale.exp_()
        torch._foreach_mul_([scale], 2.0)
        return y

    branch = branch_of(forward, [place_of(forward, "_foreach_mul_")], plan)
    with Conductor([branch]):
        y = forward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        y.sum().backward()


def test_statistics_that_the_plan_keeps_to_move_are_read_as_they_were() -> None:
    torch.manual_seed(0)
    # too large to be copied when they are read
    layer, norm, x = nn.Linear(4, 5000), nn.BatchNorm1d(5000), torch.rand(6, 4)

    def forward() -> Tensor:
        return norm((layer(x) - norm.running_mean).tanh().exp())

    def trained(branches: list[PlannedBranch] | None) -> Any:
        norm.reset_running_stats()
        layer.zero_grad()
        with nullcontext() if branches is None else Conductor(branches):
            output = forward()
        output.square().sum().backward()
        return frozen([output, layer.weight.grad, norm.running_mean])

    place = place_of(forward, ".*_batch_norm")
    assert_same(trained([branch_of(forward, [place], [(0,), 1])]), trained(None))


def test_where_a_forward_is_not_cut() -> None:
    assert conducts()
    with torch.no_grad():
        assert not conducts()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert not conducts()
    found = list[bool]()
    zoo.recompute(lambda x: found.append(conducts()), torch.ones(1))
    with Conductor([]):
        found.append(conducts())
    assert found == [False, False]


def test_gradients_of_a_cut_model_with_blocks_that_share_parameters() -> None:
    """Blocks of one module, cut in their midst, with an optimizer between two steps."""
    runs = []
    for cut in (False, True):
        torch.manual_seed(3)
        layer, x = nn.Linear(6, 6), torch.randn(3, 6)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)

        def forward(layer: nn.Module = layer, x: Tensor = x) -> Tensor:
            return layer(layer(layer(x).tanh()).tanh())

        branch = branch_of(forward, [2, 5], [(0,), (1, 2)])
        for _ in range(2):
            optimizer.zero_grad()
            with Conductor([branch]) if cut else nullcontext():
                y = forward()
            y.square().sum().backward()
            optimizer.step()
        runs.append([frozen(y), gradients(layer), state_of(layer)])
    assert_same(*runs)


@pytest.mark.parametrize("part", ["prune", "Segment"])
def test_an_interrupted_turn_leaves_no_segment_open(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.rand(2, 4)
    zoo.checkpoint(model, "blocks")
    model(x).sum().backward()
    original, calls = getattr(kernel_segments, part), []

    def interrupted(*arguments: Any) -> Any:
        found = original(*arguments)
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(kernel_segments, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert thread.segment is None
    assert thread.conductor is None
    assert conducts()
