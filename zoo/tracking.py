"""`zoo.track`, and what it tracks where nobody trains: one step of a copy of a model.

measured     a real copy trains two steps, the second is tracked
predicted    a fake copy: its tensors have sizes and no memory behind them, so that a step is
             tracked that would fit nowhere; what only real kernels allocate is not in it
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.chain import Chain
from zoo.checkpointing import Checkpoint, PlannedRunner, runner_for
from zoo.entry import Invocation, Loss, explained, nothing_trained, own_loss
from zoo.errors import ArgumentError
from zoo.measure.constants import Constants
from zoo.measure.fakes import FakeKernels
from zoo.measure.memory import tensors_in
from zoo.measure.optimizer import MakeOptimizer, made_by
from zoo.measure.timeline import Timeline
from zoo.measure.tracker import Tracker
from zoo.plan import Plan
from zoo.tracing.api import checkpoint as put_in_force
from zoo.tracing.entry import Entry, named_steps, runner_of
from zoo.tracing.isolated import TraceError


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
            the timeline has what tensors do not show. Not inside of another profiler. torch may
            say on stderr that a "memory block of unknown size was allocated before": it was freed
            in the block, and the timeline has it all the same. `TORCH_CPP_LOG_LEVEL=ERROR`, set
            before torch is imported, stops that and all else that torch's C++ warns of on stderr.

    Raises:
        ArgumentError: no module, no optimizer, allocator=True for a model that is not on the CPU,
            or, as a decorator, no function.
    """
    return Tracker(
        model,
        optimizer=optimizer,
        inputs=inputs,
        allocator=allocator,
    )


@dataclass(frozen=True)
class TrainingStep:
    """A model and all that one training step of it needs.

    `wrap` does to a fake copy what a program does to a model before it trains: shards it, say.
    """

    model: nn.Module
    inputs: Invocation
    optimizer: MakeOptimizer | None
    loss: Loss
    wrap: Callable[[nn.Module], object] | None = None

    @property
    def place(self) -> torch.device:
        """Where the model is, and its fake copy where it is on the meta device."""
        devices = (parameter.device for parameter in self.model.parameters())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def plan(self, checkpoint: Checkpoint | None) -> Plan | str | None:
        """Decides the plan, without running a step; "blocks" where there is none for the model."""
        asked = checkpoint is not None
        runner = runner_for(checkpoint, None, None) if asked else runner_of(self.model)  # type: ignore[arg-type]
        if not isinstance(runner, PlannedRunner):
            return None if runner is None else runner.plan
        try:
            with torch.enable_grad():
                return Entry.of(self.model, self._weightless()).decided(runner)
        except TraceError:
            if checkpoint not in (None, True, "blocks"):
                raise
            return "blocks"

    def measured(self, plan: Plan | str | None) -> Timeline:
        """Trains a real copy for two steps and returns the timeline of the second."""
        model, inputs = copy.deepcopy(self.model), self.inputs.map(_clone)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        on_cpu = all(parameter.device.type == "cpu" for parameter in trained)
        with torch.inference_mode(False), torch.enable_grad():
            optimizer = self._optimizer(model)
            step = self._step(model, inputs, optimizer)
            self._put_in_force(model, plan)
            step()
            tensors = inputs.tensors
            with track(model, optimizer=optimizer, inputs=tensors, allocator=on_cpu) as timeline:
                step()
        return timeline

    def predicted(self, plan: Plan | str | None) -> Timeline:
        """Trains a fake copy for one step, with the state of an optimizer that has stepped."""
        model = self.fake
        with self._on_paper():
            inputs, optimizer = self._fake_inputs, self._fake_optimizer
            self._put_in_force(model, plan)
            step = self._step(model, inputs, optimizer)
            if plan is not None and not isinstance(model, Chain):
                # the first one is traced
                step()
            with track(model, optimizer=optimizer, inputs=inputs.tensors) as timeline:
                step()
        return timeline

    @functools.cached_property
    def fake(self) -> nn.Module:
        """The fake copy that trains, each time by another plan."""
        model = _fake_copy(self.model, self._mode, self.place)
        if self.wrap is not None:
            self.wrap(model)
        return model

    @functools.cached_property
    def _fake_inputs(self) -> Invocation:
        return self._fakes(self._mode)

    @functools.cached_property
    def _fake_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the fake copy, after a step."""
        optimizer = self._optimizer(self.fake)
        if self.wrap is not None:
            # the first step of what is wrapped is another than all that follow
            self._put_in_force(self.fake, None)
            self._step(self.fake, self._fake_inputs, optimizer)()
        elif optimizer is not None:
            _step_once(optimizer)
        return optimizer

    @functools.cached_property
    def _explained_loss(self) -> Loss:
        return explained(self.loss, self.place)

    @functools.cached_property
    def _mode(self) -> FakeTensorMode:
        return FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def _on_paper(self) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            self._mode,
            FakeKernels(),  # type: ignore[no-untyped-call]
            Constants(self._mode),
        ):
            yield

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer is None or not trained:
            return None
        return made_by(self.optimizer, trained)

    def _put_in_force(self, model: nn.Module, plan: Plan | str | None) -> None:
        put_in_force(model, False if plan is None else plan, steps=named_steps(self.model))

    def _step(
        self, model: nn.Module, inputs: Invocation, optimizer: torch.optim.Optimizer | None
    ) -> Callable[[], None]:
        """Makes a step of training a copy."""
        model.zero_grad(set_to_none=True)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            # as in a training loop, these names outlive the backward
            outputs = inputs.taken_by(model)
            loss = self._explained_loss(outputs)
            if not loss.requires_grad:
                raise ArgumentError(nothing_trained(model))
            loss.backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()

        return step

    def _weightless(self) -> Invocation:
        """Returns inputs that take no memory, where the model itself is."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            return self._fakes(FakeTensorMode())
        return self.inputs.map(lambda tensor: tensor.to("meta"))

    def _fakes(self, mode: FakeTensorMode) -> Invocation:
        """Returns fake inputs on the device of the model."""
        return self.inputs.map(functools.partial(_fake, mode, self.place))


def mean_of(outputs: Any) -> Tensor:
    """Adds the means of all floating tensors -> (); a loss that is named is its own.

    Raises:
        ArgumentError: there is none.
    """
    own = own_loss(outputs)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own
    floating = (tensor for tensor in tensors_in(outputs) if tensor.is_floating_point())
    found = [tensor.mean() if tensor.ndim else tensor for tensor in floating]
    if not found:
        raise ArgumentError("the model returns no floating tensor; pass loss= a scalar of its own")
    return sum(found[1:], found[0])


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


def _step_once(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
