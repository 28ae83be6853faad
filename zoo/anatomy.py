"""`zoo.track` and `zoo.anatomy`: where the memory of a training step goes, with and without a plan.

`track` watches a step that the program runs itself. `anatomy` runs one on a copy of a model, really
or, with meta tensors, on fake ones: those have sizes and no memory behind them, so a step is taken
apart that would fit nowhere, in seconds. What only real kernels allocate is then not in it.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.adapter.entry import Entry, UnfollowedError, follow, named_steps, runner_of
from zoo.adapter.front import checkpoint as put_in_force
from zoo.checkpointing import Checkpoint, PlannedRunner, runner_for
from zoo.engine.recompute import is_recomputing
from zoo.entry import Inputs, Invocation, Loss, own_loss
from zoo.errors import ArgumentError
from zoo.measure.fakes import FakeKernels
from zoo.measure.memory import tensors_in
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.timeline import Timeline, compare
from zoo.measure.tracker import Tracker
from zoo.plan import Plan
from zoo.verification.records import read_streams, set_streams


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
    inputs: Inputs,
    *,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    checkpoint: Checkpoint | None = None,
    device: str | None = None,
) -> Anatomy:
    """Takes a steady training step of a model apart: without a plan and, if there is one, with it.

    The model is left as it is; a copy trains. Its first step is not counted.

    Args:
        model: in training mode. Where it has a plan of its own, that is the plan.
        inputs: what it is called with: a tensor, a tuple or a dict of keyword arguments, real or on
            the meta device.
        optimizer: is called with the list of parameters; None takes no step.
        loss: turns what the model returns into a scalar; by default a scalar is its own loss, and
            an output named `loss` too, and of anything else the means of all floating tensors are
            added.
        checkpoint: what `zoo.create` takes, in place of the model's own.
        device: "meta" runs nothing real: fake tensors stand for those of the model's device, the
            CPU's where the model is on the meta device. Meta inputs or parameters say so, too.

    Raises:
        ArgumentError: no module or not in training mode; a plan for what cannot be followed.
    """
    _check(model, device)
    given = Invocation.of(inputs)
    tensors = [*given.tensors, *model.parameters()]
    is_fake = device == "meta" or any(tensor.is_meta for tensor in tensors)
    place = next((t.device for t in model.parameters() if not t.is_meta), torch.device("cpu"))
    run = _Run(model, given, optimizer, loss or mean_of, place)
    plan = run.plan(checkpoint)
    streams = read_streams()
    try:
        measure = run.predicted if is_fake else run.measured
        planned = measure(plan) if plan is not None else None
        return Anatomy(measure(None), planned, plan if isinstance(plan, Plan) else None)
    finally:
        set_streams(streams)


def mean_of(outputs: Any) -> Tensor:
    """Adds the means of all floating tensors -> (); a loss that is named is its own.

    Raises:
        ArgumentError: there is none.
    """
    own = own_loss(outputs)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own
    found = [tensor.mean() for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    if not found:
        raise ArgumentError("the model returns no floating tensor; pass loss= a scalar of its own")
    return sum(found[1:], found[0])


@dataclass(frozen=True)
class _Run:
    """A model and all that one training step of it needs."""

    model: nn.Module
    inputs: Invocation
    optimizer: MakeOptimizer | None
    loss: Loss
    place: torch.device

    def plan(self, checkpoint: Checkpoint | None) -> Plan | str | None:
        """Decides the plan, without running a step; "blocks" where there is none for the model."""
        asked = checkpoint is not None
        runner = runner_for(checkpoint, None, None) if asked else runner_of(self.model)  # type: ignore[arg-type]
        if not isinstance(runner, PlannedRunner):
            return None if runner is None else runner.plan
        try:
            with torch.enable_grad():
                return Entry.of(self.model, self._weightless()).decided(runner)
        except UnfollowedError:
            if checkpoint not in (None, True, "blocks"):
                raise
            return "blocks"

    def measured(self, plan: Plan | str | None) -> Timeline:
        """Trains a real copy for two steps and returns the timeline of the second."""
        step, tracker = self._training(copy.deepcopy(self.model), self.inputs.map(_clone), plan)
        step()
        with tracker as timeline:
            step()
        return timeline

    def predicted(self, plan: Plan | str | None) -> Timeline:
        """Trains a fake copy for one step, with the state of an optimizer that has stepped."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = _fake_copy(self.model, mode, self.place)
        with mode, FakeKernels(), _Counters():  # type: ignore[no-untyped-call]
            inputs = self._fakes(mode)
            step, tracker = self._training(model, inputs, plan)
            follow(model, inputs)
            with tracker as timeline:
                step()
        return timeline

    def _training(
        self, model: nn.Module, inputs: Invocation, plan: Plan | str | None
    ) -> tuple[Callable[[], None], Tracker]:
        """Makes a step of training a copy, and a tracker of it."""
        model.zero_grad(set_to_none=True)
        put_in_force(model, False if plan is None else plan, steps=named_steps(self.model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(trained) if self.optimizer is not None and trained else None

        def step() -> None:
            model.zero_grad(set_to_none=True)
            self.loss(inputs.on(model)).backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()

        on_cpu = all(t.device.type == "cpu" for t in trained)
        is_real = not any(isinstance(t, FakeTensor) for t in trained)
        tracker = track(
            model, optimizer=optimizer, inputs=inputs.tensors, allocator=on_cpu and is_real
        )
        if not is_real and optimizer is not None:
            _step_once(optimizer, trained)
        return step, tracker

    def _weightless(self) -> Invocation:
        """Returns inputs that take no memory, where the model itself is."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            return self._fakes(FakeTensorMode())
        return self.inputs.map(lambda tensor: tensor.to("meta"))

    def _fakes(self, mode: FakeTensorMode) -> Invocation:
        """Returns fake inputs on the device of the model."""
        return self.inputs.map(functools.partial(_fake, mode, self.place))


def _check(model: Any, device: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"an anatomy needs a torch.nn.Module; got {type(model).__name__}")
    if not model.training:
        raise ArgumentError("an anatomy is that of a training step; call model.train() first")
    if device not in (None, "meta"):
        raise ArgumentError(
            f"device={device!r} is neither None nor 'meta'; the step runs where the model is"
        )


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
