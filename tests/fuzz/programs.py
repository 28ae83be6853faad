"""Plain modules drawn from a description, with all that a forward written in Python can do.

A description is plain data, so that Hypothesis can shrink it and a failing example can be read:

    operation   one line of a forward: it reads some of the tensors that there are, and makes or
                writes one
    block       a module whose forward runs operations in order
    model       blocks over a list of tensors

Operations do what a second run of Python, a trace, or a recording could get wrong: views and writes
in place, tensors that one block leaves for another or for the next step, control flow that goes by
numbers, by a counter or by chance, hooks, a backward inside of the forward, compiled parts. What
plain training trains, training by a plan must train. What plain training refuses, since a tensor
was written that it saved, a plan may train: what it did not keep nobody has written. And a segment
refuses a gradient, as docs/limitations.md says, where a later block wrote what it read.

A model trains in one of three ways: blocks in nested segments, segments cut anywhere between two
kernels, or `zoo.checkpoint` of the whole, by a drawn plan or by one that it makes, also ahead.
Something may be around its forward, such as autocast, and something may happen to it between two
steps; once its plan is removed, it is as it was. Its first pass may be one without gradients over
the same weights, its optimizer may step in the backward, and a step may be interrupted or its graph
dropped (`disturbances`). What its segments start from may lie on the host until the backward, in
slabs that are smaller than some of it; in the end nothing is left there.

Not drawn, as docs/limitations.md excludes it:

    a backward inside of a forward of which code that torch does not see writes a tensor
    gradients added up, float16, and hooks that read gradients of weights, where the optimizer steps
    in the backward
"""

import contextlib
import dataclasses
import functools
import gc
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations, spectral_norm

import zoo
from tests.fuzz.disturbances import FATES, Living, dropped, interrupted, restoring
from tests.fuzz.lines import (
    COMPILED,
    INNER,
    LINES,
    MAKES,
    PYTHON,
    ROWS,
    SEVERAL,
    UNSEEN,
    VIEWS,
    WIDTH,
    WRITES,
)
from tests.fuzz.plans import Shape, Stretched, offloaded_of, shapes
from tests.training import Counting, assert_same, frozen, state_of
from zoo.engine import host_memory, segments
from zoo.engine.devices import read_streams
from zoo.engine.host_memory import HostMemory
from zoo.engine.kernel_segments import Conductor, PlannedBranch, conducts
from zoo.engine.recompute import recompute
from zoo.engine.segments import thread
from zoo.layers.drop_path import DropPath
from zoo.planner import costs
from zoo.planner.plan import Item, Plan
from zoo.policy.goal import Goal, Offload
from zoo.policy.training_step import TrainingStep

STEPS = 3
# a fraction is an overhead, and DRAWN the plan of the description for the steps that are found
DRAWN = "drawn"
OPTIONS = (True, DRAWN, DRAWN, "sqrt", "blocks", "cheap", 0.2, 1.0)
WAYS = ("blocks", "cuts", "checkpoint")
BACKWARDS = ("once", "once", "retained", "partial", "two", "double", "summed")
# in the refusal of a tensor whose memory `Tensor.data` exchanged after a segment read it
GIVEN = "was given other memory"
# in the refusal of a plan for an operator without a derivative, which no gradient need reach
WITHOUT_DERIVATIVE = "RuntimeError: derivative for _foreach_copy_ is not implemented). Where"
# torch leaks a result that `save_on_cpu` packs on the CPU, and what `register_multi_grad_hook` has
LEAKING = ("on the cpu", "hook of two")
BRANCHES = ("by a number", "by the step", "by chance", "twice")
AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "in a segment": contextlib.nullcontext,
    "without gradients": torch.no_grad,
    "saved on the cpu": save_on_cpu,
}
WITH_A_GRADIENT = "with a gradient"
# what is in each refusal of a tensor that code wrote which torch does not see
UNSEEN_WRITE = "code that torch does not see"
SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "a mode": Counting,
    "doubles": lambda: _default_dtype(torch.float64),
    "saved on the cpu": save_on_cpu,
}


@dataclass(frozen=True)
class Operation:
    """One line of a forward: what it does, and with which of the tensors that there are."""

    kind: str
    one: int = 0
    other: int = 0
    parts: tuple["Operation", ...] = ()


@dataclass(frozen=True)
class Program:
    """A model, and how it trains: its segments, and what its backward is."""

    blocks: tuple[tuple[Operation, ...], ...]
    hooked: bool
    input_gradient: bool
    way: str
    plan: Plan
    cuts: tuple[float, ...]
    option: Any
    backward: str
    around: str = "nothing"
    between: str = "nothing"
    conditioned: bool = False
    keeps_draws: bool = True
    steps_in_backward: bool = False
    fate: str | None = None
    interrupt: float | None = None
    offloads: bool = False
    order: int = 0


class Outcome(NamedTuple):
    """How training by a plan compares with plain training, and for how many steps."""

    kind: str
    steps: int
    offloads: bool = False


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def operations(
    compiled: bool, unseen: bool = False, left_out: Collection[str] = ()
) -> st.SearchStrategy[Operation]:
    """Draws operations, most of which make something, without lines that are left out."""
    place = st.integers(0, 5)

    def of(kinds: Sequence[str]) -> st.SearchStrategy[Operation]:
        drawn = [kind for kind in kinds if kind not in left_out]
        return st.builds(Operation, st.sampled_from(drawn), place, place)

    own = [f"unseen {name}" for name in UNSEEN] if unseen else [*INNER]
    makes, python = of([*MAKES]), of([*PYTHON, *own, *(COMPILED if compiled else ())])
    writes = of([f"write {name}" for name in WRITES])
    around = [*AROUND] if unseen else [*AROUND, WITH_A_GRADIENT]
    several = of([f"write {name}" for name in SEVERAL])
    simple = st.one_of(makes, makes, makes, makes, writes, of([*VIEWS]), python, python, several)
    # in a segment inside of the one that made what they write
    inside = st.lists(several | makes, min_size=1, max_size=2).map(tuple)
    found = simple = simple | st.builds(Operation, st.just("in a segment"), place, place, inside)
    for most in (2, 4):
        parts = st.lists(found, min_size=1, max_size=most).map(tuple)
        found = st.one_of(
            *[simple] * 6,
            st.builds(Operation, st.sampled_from(BRANCHES), place, place, parts),
            st.builds(Operation, st.sampled_from(around), place, place, parts),
        )
    return found


@st.composite
def programs(
    draw: st.DrawFn,
    compiled: bool = False,
    ways: Sequence[str] = WAYS,
    left_out: Collection[str] = (),
) -> Program:
    """Draws models of one to six blocks."""
    plan, cuts = draw(shapes(most=6))
    count = len(cuts) + 1
    unseen = draw(st.sampled_from([False, False, True]))
    block = st.lists(operations(compiled, unseen, left_out), min_size=1, max_size=5).map(tuple)
    description = Program(
        tuple(draw(st.lists(block, min_size=count, max_size=count))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(ways)),
        plan,
        cuts,
        draw(st.sampled_from(OPTIONS)),
        draw(st.sampled_from(BACKWARDS)),
        draw(st.sampled_from(["nothing"] * 3 + [*SURROUNDINGS])),
        draw(st.sampled_from(["nothing"] * 3 + [*BETWEEN])),
        draw(st.sampled_from([False, False, True])),
        draw(st.booleans()),
        fate=draw(st.sampled_from([None, None, *FATES])),
        interrupt=draw(st.none() | st.floats(0, 0.99)),
        offloads=draw(st.booleans()),
        order=draw(st.integers(0, 99)),
    )
    adds_up = description.backward != "once" or description.between == "added up"
    in_halves = description.around == "autocast without a cache"
    if adds_up or in_halves or any(_has(block, "accumulated") for block in description.blocks):
        return description
    return dataclasses.replace(description, steps_in_backward=draw(st.booleans()))


class Shared:
    """What the blocks of a model share, on which no module knows."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.carried = torch.zeros(ROWS, WIDTH)
        self.left: Tensor | None = None
        self.calls = self.steps = 0
        self.seen: list[float] = []
        # what lives until the next forward
        self.held: list[Tensor] = []
        self.hooks: list[Any] = []
        self.call: Callable[..., Any] = _plainly

    def note(self, gradient: Tensor) -> None:
        self.seen.append(gradient.sum().item())


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Block(nn.Module):
    """Runs its operations on a list of tensors (4, 6)."""

    def __init__(self, lines: tuple[Operation, ...], shared: Shared, path: str) -> None:
        super().__init__()
        self.lines, self.shared, self.path = lines, shared, path
        self.linear, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.gru, self.embedding = nn.GRU(WIDTH, WIDTH), nn.Embedding(3, WIDTH)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.mean_norm = nn.BatchNorm1d(WIDTH, momentum=None, affine=False)
        self.instance_norm = nn.InstanceNorm1d(ROWS, affine=True, track_running_stats=True)
        self.group_norm, self.prelu = nn.GroupNorm(2, WIDTH), nn.PReLU(WIDTH)
        self.drop_path = DropPath(0.3)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.hooked_norm = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = list(tensors)
        for line in self.lines:
            self.run(line, found)
        return (*found[-4:-1], torch.tanh(found[-1]))

    def run(self, line: Operation, tensors: list[Tensor]) -> None:
        """Runs a line, or those of a branch as often as it is taken now."""
        one, other = tensors[line.one % len(tensors)], tensors[line.other % len(tensors)]
        if line.kind in AROUND:
            call = self.shared.call if line.kind == "in a segment" else _plainly
            with AROUND[line.kind]():
                tensors.append(call(functools.partial(self.last, line.parts), *tensors))
        elif line.kind == WITH_A_GRADIENT:
            tensors.append(self.with_a_gradient(line.parts, one, *tensors))
        elif line.parts:
            for _ in range(self.times(line.kind, one)):
                for part in line.parts:
                    self.run(part, tensors)
        elif (made := LINES[line.kind](self, one, other)) is not None:
            tensors.append(made)

    def last(self, lines: tuple[Operation, ...], *tensors: Tensor) -> Tensor:
        """Runs lines on a list of their own and returns what is last in it then."""
        found = list(tensors)
        for line in lines:
            self.run(line, found)
        return found[-1]

    def with_a_gradient(
        self, lines: tuple[Operation, ...], one: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Runs lines and multiplies what is last by its gradient."""
        found = self.last(lines, *tensors)
        if not (found.requires_grad and one.requires_grad):
            return found
        (slope,) = torch.autograd.grad(found.sum(), one, create_graph=True, allow_unused=True)
        return found if slope is None else found * slope.tanh()

    def times(self, kind: str, one: Tensor) -> int:
        """Returns how often a branch is taken now."""
        if kind == "by a number":
            return int(one.detach().sum().item() > 0)
        if kind == "by the step":
            return self.shared.steps % 2
        return int(random.random() > 0.5) if kind == "by chance" else 2


class Model(nn.Module):
    """Blocks one after the other, in the segments of a plan where it is run by one."""

    def __init__(self, description: Program) -> None:
        super().__init__()
        self.shared = Shared()
        self.weight = self.shared.weight
        self.blocks = nn.ModuleList(
            Block(lines, self.shared, f"blocks.{number}")
            for number, lines in enumerate(description.blocks)
        )
        self.plan: Sequence[Item] = range(len(self.blocks))
        self.conditioned = description.conditioned
        if description.hooked:
            block = self.blocks[-1]
            block.register_forward_hook(lambda block, args, out: (*out[:-1], out[-1] * 1.5))
            block.register_full_backward_hook(lambda block, gradient, out: self.note(out))

    def note(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.shared.seen += [value.sum().item() for value in gradients if value is not None]

    def forward(self, x: Tensor) -> Tensor:
        self.shared.left = None
        self.shared.held.clear()
        while self.shared.hooks:
            self.shared.hooks.pop().remove()
        other = x.cos()
        if self.conditioned:
            with torch.no_grad():
                other = self.run(self.plan, x * 1, other)[-1].float() * x
        tensors = self.run(self.plan, x * 1, other)
        # so that each model trains
        return torch.stack([value.float() for value in tensors]).sum(0) + self.weight.mean()

    def run(self, items: Sequence[Item], *tensors: Tensor) -> tuple[Tensor, ...]:
        for item in items:
            if isinstance(item, int):
                tensors = self.blocks[item](*tensors)
            else:
                tensors = recompute(self.run, item, *tensors)
        return tensors


def check_program(description: Program) -> Outcome:
    """Trains a model plainly and by its plan; every bit must agree."""
    expected, plainly_living = trained(description, plainly=True)
    # draws as small as these take fewer bytes than a random state and would all be kept
    largest = segments.PACKED_SIZE if description.keeps_draws else 0
    # an error of a kernel that runs late would come too late
    order = None if isinstance(expected[-1], str) else description.order
    with (
        mock.patch.object(segments, "PACKED_SIZE", largest),
        mock.patch.object(host_memory, "LEAST_OFFLOADED", 1),
        mock.patch.object(costs, "LEAST_OFFLOADED", 1),
        mock.patch.object(host_memory, "SLAB", 3 * ROWS * WIDTH),
        mock.patch.object(HostMemory, "__init__", _noted(made := list[HostMemory]())),
        _streams_in_order(order),
    ):
        found, living = trained(description, plainly=False)
    kind = "exact"
    if isinstance(expected[-1], str):
        # refused, and until then all is equal
        kind, expected = "refused as plain", expected[:-1]
        found = found[: len(expected)]
    last = found[-1] if found and isinstance(found[-1], str) else ""
    if last.startswith(("TraceError", "PlanError")) or WITHOUT_DERIVATIVE in last:
        # it cannot be planned ahead, and nothing was trained
        assert isinstance(description.option, float)
        assert len(found) == 1
        return Outcome("not planned", 0)
    if is_limit(description, last):
        kind, found = "refused as documented", found[:-1]
        expected = expected[: len(found)]
    assert_same(found, expected)
    # what the nodes of torch's own leaks hold is more in a segment
    assert any(plainly_living) or not any(living)
    if kind == "exact" and not any(name in repr(description) for name in LEAKING):
        _check_emptied(made)
    return Outcome(kind, max(len(expected) - 1, 0), any(host.peak for host in made))


@contextlib.contextmanager
def _streams_in_order(seed: int | None) -> Iterator[None]:
    """Runs what is queued on streams in a random order, on the software accelerator; None: now."""
    device: Any = torch.get_device_module(torch.get_default_device())
    has_orders = seed is not None and hasattr(device, "set_order")
    if has_orders:
        device.set_order("random", seed)
    try:
        yield
    finally:
        if has_orders:
            device.set_order("synchronous")


def _noted(made: list[HostMemory]) -> Callable[..., None]:
    """Returns what makes a host and adds it to a list."""
    make = HostMemory.__init__

    def init(self: HostMemory, limit: int | None = None) -> None:
        make(self, limit)
        made.append(self)

    return init


def _check_emptied(hosts: Sequence[HostMemory]) -> None:
    """Asserts that nothing is left on the host.

    Of a step that plain training refuses some may be, as a part of its graph is.
    """
    for host in hosts:
        # else the last copy is under way until the next forward
        host.settle()
    if any(host.offloaded for host in hosts):
        gc.collect()
    assert not any(host.offloaded for host in hosts)


def is_limit(description: Program, error: str) -> bool:
    """Returns whether an error is one that docs/limitations.md states for what is written."""
    is_refused = error.startswith("RecomputeError: a tensor") and description.way == "blocks"
    if is_refused or GIVEN in error:
        return any(_has(block, "write", "unseen") for block in description.blocks)
    return UNSEEN_WRITE in error and any(_has(block, "unseen") for block in description.blocks)


def _has(lines: tuple[Operation, ...], *begins: str) -> bool:
    return any(line.kind.startswith(begins) or _has(line.parts, *begins) for line in lines)


def trained(description: Program, plainly: bool) -> tuple[list[Any], Living]:
    """Trains for some steps; returns what each leaves, at last the error that ended it, and leaks.

    Before the last step one may be interrupted.
    """
    torch.manual_seed(1)
    random.seed(0)
    model = Model(description)
    batch = torch.randn(ROWS, WIDTH, requires_grad=description.input_gradient)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
    forward = _plainly if plainly else _forward_by(description, model)
    attached = contextlib.ExitStack()
    if description.steps_in_backward and not plainly:
        attached.callback(zoo.optimizer_in_backward(model, optimizer).remove)
    record: list[Any] = []

    def step() -> list[Tensor]:
        with SURROUNDINGS[description.around]():
            outputs = [forward(model, batch) for _ in range(1 + (description.backward == "summed"))]
        BACKWARD[description.backward](model, batch, sum(outputs, torch.zeros(())))
        return outputs

    for number in range(STEPS):
        model.shared.steps = number
        if description.between != "added up":
            optimizer.zero_grad()
        batch.grad = None
        if number == STEPS - 1 and _is_interrupted(description) and not plainly:
            assert description.interrupt is not None
            interrupted(step, restoring(model, batch, optimizer), description.interrupt)
        try:
            outputs = step()
            if description.steps_in_backward:
                optimizer.step()
                optimizer.zero_grad()
            record.append(frozen([outputs, *left_by(model, batch)]))
            if not description.steps_in_backward:
                optimizer.step()
            BETWEEN[description.between](model, functools.partial(forward, model, batch))
        except Exception as error:
            return [*record, f"{type(error).__name__}: {error}"], Living(0, 0)
    record.append(frozen(left_by(model, batch)))
    if description.fate is None or description.steps_in_backward:
        attached.close()
        zoo.uncheckpoint(model)
        record.append(frozen([left_by(model, batch), _hooks_of(model)]))
        return record, Living(0, 0)
    del outputs

    def call() -> Tensor:
        with SURROUNDINGS[description.around]():
            return forward(model, batch)  # type: ignore[no-any-return]

    return record, dropped(description.fate, call, model.weight)


def _is_interrupted(description: Program) -> bool:
    """Returns whether a step is interrupted: not one whose state cannot be restored."""
    if description.interrupt is None or description.steps_in_backward:
        return False
    is_compiled = any(_has(block, *COMPILED) for block in description.blocks)
    return description.between != "added up" and not is_compiled


def left_by(model: Model, batch: Tensor) -> list[Any]:
    """Lists what a step leaves: gradients, the state of the model and of all random streams."""
    shared = model.shared
    return [
        batch.grad, _state_of(model), [block.generator for block in model.blocks],
        shared.carried, shared.calls, shared.seen, read_streams(), random.random(),
        [(value, value.grad) for value in shared.held],
    ]  # fmt: skip


def _hooks_of(model: Model) -> list[int]:
    """Counts the hooks of each kind of each module."""
    parts = [vars(module) for module in model.modules()]
    return [len(value) for part in parts for name, value in part.items() if name.endswith("_hooks")]


def _state_of(model: Model) -> dict[str, Any]:
    """Copies the state of a model but for what a plan puts on it."""
    state = state_of(model)
    for key in [*state["attributes"]]:
        if key.endswith((".forward", ".plan")):
            del state["attributes"][key]
    return state


def _forward_by(description: Program, model: Model) -> Callable[[nn.Module, Tensor], Tensor]:
    """Returns what calls a model by the plan of a description."""
    if description.way == "blocks":
        model.plan = description.plan
        model.shared.call = recompute
    offload = description.offloads
    if description.way == "checkpoint" and isinstance(description.option, float):
        zoo.checkpoint(model, max_overhead=description.option, offload=offload)
    elif description.way == "checkpoint" and description.option == DRAWN:
        shape = Shape(description.plan, description.cuts)
        goal = Goal(shape, offload=Offload(offload))
        Stretched(model, goal, TrainingStep()).install()
    elif description.way == "checkpoint":
        zoo.checkpoint(model, description.option, offload=offload)
    return Cut(description) if description.way == "cuts" else _plainly


class Cut:
    """Calls a model with its kernels cut into the segments of a plan, after a first step."""

    def __init__(self, description: Program) -> None:
        self.description = description
        self.branch: PlannedBranch | None = None
        self.host = HostMemory() if description.offloads else None

    def __call__(self, model: Model, batch: Tensor) -> Tensor:
        if not conducts():
            return _plainly(model, batch)  # type: ignore[no-any-return]
        branches = [] if self.branch is None else [self.branch]
        conductor = Conductor(branches, host=self.host)
        with _marked(model):
            result: Tensor = conductor.run(lambda: model(batch))
        if self.branch is None:
            count = len(conductor.operators)
            starts = sorted({int(cut * count) for cut in self.description.cuts} - {0})
            plan = self.description.plan if len(starts) == len(self.description.cuts) else [(0,)]
            starts = starts if len(starts) == len(self.description.cuts) else []
            self.branch = PlannedBranch(
                conductor.operators,
                [0, *starts],
                Plan(plan),
                conductor.visits,
                offloads=frozenset() if self.host is None else offloaded_of(Plan(plan)),
            )
        return result


@contextlib.contextmanager
def _marked(model: Model) -> Iterator[None]:
    """Tells the conductor where blocks begin and end."""
    hooks = []
    for block in model.blocks:
        hooks += [
            block.register_forward_pre_hook(lambda block, args: thread.conductor.enter(block.path)),
            block.register_forward_hook(
                lambda block, args, out: thread.conductor.leave(), always_call=True
            ),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def _backward_once(model: Model, batch: Tensor, output: Tensor) -> None:
    loss_of(output).backward()


def _backward_retained(model: Model, batch: Tensor, output: Tensor) -> None:
    loss = loss_of(output)
    loss.backward(retain_graph=True)
    loss.backward()


def _backward_partial(model: Model, batch: Tensor, output: Tensor) -> None:
    loss = loss_of(output)
    wanted = [value for value in (batch, model.weight) if value.requires_grad]
    for gradient in torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True):
        model.shared.seen.append(0.0 if gradient is None else gradient.sum().item())
    loss.backward()


def _backward_of_two(model: Model, batch: Tensor, output: Tensor) -> None:
    output[:2].sum().backward(retain_graph=True)
    output[2:].sin().sum().backward()


def _backward_double(model: Model, batch: Tensor, output: Tensor) -> None:
    wanted = [value for value in (batch, model.weight) if value.requires_grad]
    found = torch.autograd.grad(loss_of(output), wanted, create_graph=True, allow_unused=True)
    slopes = [value.square().sum() for value in found if value is not None]
    sum(slopes, loss_of(output)).backward()


BACKWARD = {
    "once": _backward_once,
    "retained": _backward_retained,
    "partial": _backward_partial,
    "two": _backward_of_two,
    "double": _backward_double,
    "summed": _backward_once,
}


def _evaluated(model: Model, call: Callable[[], Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        call()
    model.train()


def _called_without_gradients(model: Model, call: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        call()


def _frozen_and_thawed(model: Model, call: Callable[[], Tensor]) -> None:
    linear = model.blocks[0].linear
    linear.requires_grad_(not linear.weight.requires_grad)


def _loaded(model: Model, call: Callable[[], Tensor]) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def _changed(model: Model, call: Callable[[], Tensor]) -> None:
    block = model.blocks[-1]
    block.linear.weight.data = block.linear.weight.detach() * 0.9
    block.batch_norm.train(not block.batch_norm.training)


BETWEEN: dict[str, Callable[[Model, Callable[[], Tensor]], object]] = {
    "nothing": lambda model, call: None,
    "added up": lambda model, call: None,
    "evaluated": _evaluated,
    "called without gradients": _called_without_gradients,
    "frozen and thawed": _frozen_and_thawed,
    "loaded": _loaded,
    "changed": _changed,
    "called without a backward": lambda model, call: call(),
}
