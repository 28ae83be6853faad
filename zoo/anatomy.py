"""`zoo.track` and `zoo.anatomy`: where the memory of a training step goes, with and without a plan.

`track` watches a step that the program runs itself. `anatomy` runs one on a copy of a model, really
or, with meta tensors, on fake ones: those have sizes and no memory behind them, so a step is taken
apart that would fit nowhere, in seconds. What only real kernels allocate is then not in it.
"""

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.chain import Chain, Outline, Runner, State
from zoo.checkpointing import Checkpoint, PlannedRunner, attach
from zoo.engine.recompute import is_recomputing
from zoo.errors import ArgumentError
from zoo.measure.fakes import FakeKernels
from zoo.measure.memory import tensors_in
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.timeline import Timeline, compare
from zoo.measure.tracker import Tracker
from zoo.plan import Plan
from zoo.verification.records import read_streams, set_streams

Loss = Callable[[Any], Tensor]


def track(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Any = (),
    allocator: bool = False,
) -> Tracker:
    """Tracks the memory of a block of code: a context manager and a decorator.

        with zoo.track(model, optimizer=optimizer, inputs=images) as timeline:
            loss(model(images)).backward()
            optimizer.step()
        print(timeline)

    The timeline is filled when the block ends, also by an exception. As a decorator, its latest one
    is the `timeline` of what `track` returned. Works for real tensors on any device and for fake
    ones; changes no number and leaves nothing behind.

    Args:
        model: whose parameters, buffers, steps and modules give the bytes their names.
        optimizer: its state counts as there from the start; one that is not named is met in its
            first step, and then likewise.
        inputs: tensors in any nesting that are there before, also where the block never reads them.
        allocator: on the CPU, also record the allocator's own events with torch's profiler, so that
            the timeline has what tensors do not show. Not inside of another profiler.

    Raises:
        ArgumentError: no module, or allocator=True for a model that is not on the CPU.
    """
    return Tracker(
        model,
        optimizer=optimizer,
        inputs=inputs,
        allocator=allocator,
        recomputing=is_recomputing,
    )


@dataclass(frozen=True)
class Anatomy:
    """The timelines of one training step without a plan, and with one where there is one."""

    baseline: Timeline
    planned: Timeline | None = None
    plan: Plan | None = None

    def table(self, holders: int = 10) -> str:
        """Writes what takes how much at the peak, by category, block and tensor."""
        if self.planned is None:
            return self.baseline.table(holders)
        return compare({"baseline": self.baseline, "with the plan": self.planned}, holders)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Writes plan and timelines as JSON."""
        timelines = {"baseline": self.baseline, "planned": self.planned}
        found = {name: json.loads(t.to_json()) if t else None for name, t in timelines.items()}
        return json.dumps({"plan": self.plan, **found})


def anatomy(
    model: nn.Module,
    inputs: Any,
    *,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    checkpoint: Checkpoint | None = None,
    device: str | None = None,
) -> Anatomy:
    """Takes a steady training step of a model apart: without a plan and, if there is one, with it.

    The model is left as it is; a copy trains. Its first step is not counted.

    Args:
        model: in training mode. Where it is a chain with a plan of its own, that is the plan.
        inputs: what it is called with: a tensor or a tuple, real or on the meta device.
        optimizer: is called with the list of parameters; None takes no step.
        loss: turns what the model returns into a scalar; by default a scalar is its own loss, and
            of anything else the means of all floating tensors are added.
        checkpoint: what `zoo.create` takes, in place of the model's own.
        device: "meta" runs nothing real: fake tensors stand for those of the model's device, the
            CPU's where the model is on the meta device. Meta inputs or parameters say so, too.

    Raises:
        ArgumentError: no module or not in training mode; a plan for what is no chain.
    """
    _check(model, checkpoint, device)
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    tensors = [*tensors_in(given), *model.parameters()]
    is_fake = device == "meta" or any(tensor.is_meta for tensor in tensors)
    place = next((t.device for t in model.parameters() if not t.is_meta), torch.device("cpu"))
    run = _Run(model, given, optimizer, loss or mean_of, place)
    plan = run.plan(checkpoint)
    streams = read_streams()
    try:
        measure = run.predicted if is_fake else run.measured
        return Anatomy(measure(None), measure(plan) if plan is not None else None, plan)
    finally:
        set_streams(streams)


def mean_of(outputs: Any) -> Tensor:
    """Adds the means of all floating tensors -> (); one number is its own mean.

    Raises:
        ArgumentError: there is none.
    """
    found = [tensor.mean() for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    if not found:
        raise ArgumentError("the model returns no floating tensor; pass loss= a scalar of its own")
    return sum(found[1:], found[0])


@dataclass(frozen=True)
class _Run:
    """A model and all that one training step of it needs."""

    model: nn.Module
    inputs: tuple[Any, ...]
    optimizer: MakeOptimizer | None
    loss: Loss
    place: torch.device

    def plan(self, checkpoint: Checkpoint | None) -> Plan | None:
        """Decides the plan, without running a step of the model."""
        model = self.model
        if not isinstance(model, Chain) or (checkpoint is None and model.runner is None):
            return None
        runner = model.runner
        try:
            if checkpoint is not None:
                attach(model, checkpoint)
            if model.runner is None:
                return None
            return _decided(model, self._weightless(model))
        finally:
            model.runner = runner

    def measured(self, plan: Plan | None) -> Timeline:
        """Trains a real copy for two steps and returns the timeline of the second."""
        inputs = pytree.tree_map_only(Tensor, _clone, self.inputs)
        step, tracker = self._training(copy.deepcopy(self.model), inputs, plan)
        step()
        with tracker as timeline:
            step()
        return timeline

    def predicted(self, plan: Plan | None) -> Timeline:
        """Trains a fake copy for one step, with the state of an optimizer that has stepped."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = _fake_copy(self.model, mode, self.place)
        with mode, FakeKernels(), _Counters():  # type: ignore[no-untyped-call]
            step, tracker = self._training(model, self._fakes(mode), plan)
            with tracker as timeline:
                step()
        return timeline

    def _training(
        self, model: nn.Module, inputs: tuple[Any, ...], plan: Plan | None
    ) -> tuple[Callable[[], None], Tracker]:
        """Makes a step of training a copy, and a tracker of it."""
        model.zero_grad(set_to_none=True)
        if isinstance(model, Chain):
            attach(model, False if plan is None else plan)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(trained) if self.optimizer is not None and trained else None

        def step() -> None:
            model.zero_grad(set_to_none=True)
            self.loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()

        on_cpu = all(t.device.type == "cpu" for t in trained)
        is_real = not any(isinstance(t, FakeTensor) for t in trained)
        tracker = track(model, optimizer=optimizer, inputs=inputs, allocator=on_cpu and is_real)
        if not is_real and optimizer is not None:
            _step_once(optimizer, trained)
        return step, tracker

    def _weightless(self, model: nn.Module) -> tuple[Any, ...]:
        """Returns inputs that take no memory, where the model itself is."""
        if not any(parameter.is_meta for parameter in model.parameters()):
            return self._fakes(FakeTensorMode())
        found: tuple[Any, ...] = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), self.inputs)
        return found

    def _fakes(self, mode: FakeTensorMode) -> tuple[Any, ...]:
        """Returns fake inputs on the device of the model."""
        fake = functools.partial(_fake, mode, self.place)
        found: tuple[Any, ...] = pytree.tree_map_only(Tensor, fake, self.inputs)
        return found


def _check(model: Any, checkpoint: Checkpoint | None, device: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"an anatomy needs a torch.nn.Module; got {type(model).__name__}")
    if not model.training:
        raise ArgumentError("an anatomy is that of a training step; call model.train() first")
    if checkpoint not in (None, False) and not isinstance(model, Chain):
        raise ArgumentError(
            f"checkpoint={checkpoint!r} needs a zoo.Chain; got {type(model).__name__}"
        )
    if device not in (None, "meta"):
        raise ArgumentError(
            f"device={device!r} is neither None nor 'meta'; the step runs where the model is"
        )


class _Called(BaseException):
    """Leaves a forward before its first step."""


class _Deciding:
    """Runs no step: only has another runner decide for the inputs of a forward."""

    def __init__(self, runner: PlannedRunner) -> None:
        self.runner = runner
        self.plan: Plan | None = None

    def __call__(self, chain: Chain, outline: Outline, inputs: State) -> Any:
        self.runner.settle(chain, outline, inputs)
        self.plan = self.runner.plan
        raise _Called


def _decided(model: Chain, inputs: Sequence[Any]) -> Plan | None:
    if not isinstance(model.runner, PlannedRunner):
        return model.plan
    deciding = _Deciding(model.runner)
    model.runner = cast(Runner, deciding)
    try:
        with torch.enable_grad():
            model(*inputs)
    except _Called:
        return deciding.plan
    raise ArgumentError(f"{type(model).__name__}'s forward does not run its steps")


def _fake_copy(model: nn.Module, mode: FakeTensorMode, place: torch.device) -> nn.Module:
    """Copies a model with fake parameters and buffers; what is only one number stays real."""
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = _fake(mode, place, parameter.detach())
        known[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.ndim:
            known[id(buffer)] = _fake(mode, place, buffer)
        elif buffer.is_meta:
            known[id(buffer)] = torch.zeros_like(buffer, device=place)
    return copy.deepcopy(model, known)


def _fake(mode: FakeTensorMode, place: torch.device, tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    return fake.requires_grad_(tensor.requires_grad)


class _Counters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a second run the value of a counter: that of a fake scratch copy nobody knows.

    It changes no size, or the engine finds that the second run differs from the first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and is_recomputing():
            return 1
        return func(*args, **(kwargs or {}))


def _step_once(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
