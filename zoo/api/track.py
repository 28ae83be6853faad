"""`zoo.track` and `zoo.anatomy`: where the memory of a training step goes, with and without a plan.

An anatomy trains a copy of the model: a real one, or one of fake tensors, which have sizes and no
memory, so that a step larger than any memory can be tracked, without kernel workspaces.
"""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo._torch import FakeTensorMode, PyTree
from zoo.api.checkpoint import checkpoint as put_in_force, outline_of
from zoo.engine.devices import random_state_restored
from zoo.errors import ArgumentError
from zoo.invocation import Inputs, Invocation, check_step, fake_at
from zoo.loss import Loss, checked_loss, nothing_trained, own_loss, with_loss_errors
from zoo.optimizer.in_backward import optimizer_in_backward as step_in_backward
from zoo.planner.event_costs import Outline
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner
from zoo.policy.decision import plans_for, step_of
from zoo.policy.goal import Checkpoint, Offload, OffloadOption, goal_for, parse_checkpoint
from zoo.policy.savings import savings_of
from zoo.policy.training_step import CountedStep, TrainingStep
from zoo.profiling.cudnn_recurrent import flattened
from zoo.profiling.fake_tensors import FakeTensorFixes
from zoo.profiling.memory_tracker import Tracker
from zoo.profiling.optimizer_memory import MakeOptimizer, OptimizerOption, maker_of, optimizer_from
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.progress import each, shown
from zoo.profiling.tensor_spec import tensors_in
from zoo.profiling.timeline import Timeline, compare
from zoo.report.pictures import plots
from zoo.tracing.isolated_trace import TraceError
from zoo.tracing.planned_forward import TracedForward, named_steps, patched_forward
from zoo.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# see profiling.source_location
IS_TRAINING_LOOP = True


def track(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Inputs = (),
    allocator: bool = False,
) -> Tracker:
    """Tracks the memory of a block of code: a context manager and a decorator.

        with zoo.track(model, optimizer=optimizer, inputs=images) as timeline:
            loss(model(images)).backward()
            optimizer.step()
        print(timeline)

    The timeline is filled when the block ends, also by an exception; a decorated function has its
    latest one as `timeline`. torch's peak counters are reset, for `timeline.reserved_peak`.

    Args:
        model: its modules name the bytes.
        optimizer: its state counts from the start, that of any other from its first step on.
        inputs: tensors in any nesting, which count from the start.
        allocator: on the CPU, also records the allocator's own events by torch's profiler, for
            kernel workspaces; not inside of another profiler. TORCH_CPP_LOG_LEVEL=ERROR stops lines
            on stderr about memory blocks "allocated before".

    Raises:
        ArgumentError: no module, no optimizer, allocator=True for a model that is not on the CPU,
            or, as a decorator, no function.
    """
    return Tracker(model, optimizer, inputs, allocator)


@dataclass(frozen=True)
class Anatomy:
    """The timelines of one training step: of the baseline, and with the plan if there is one.

    `savings` are sentences: what a plan can save of the step, and what holds the rest.
    """

    baseline: Timeline
    planned: Timeline | None = None
    plan: Plan | None = None
    savings: tuple[str, ...] = ()

    def table(self, holders: int = 10) -> str:
        """Writes the bytes at the peak by category, block and tensor, and the sentences."""
        if self.planned is None:
            table = self.baseline.table(holders)
        else:
            table = compare({"baseline": self.baseline, "with the plan": self.planned}, holders)
        return "\n".join([table, "", *self.savings])

    __str__ = table

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws the bytes over the step, peaks marked, to an SVG, PNG or PDF file or into Axes.

        Raises:
            ArgumentError: matplotlib is missing, or a path has another ending.
        """
        if self.planned is None:
            self.baseline.plot(target)
            return
        title = f"Memory of a training step of {self.baseline.title}"
        peaks = [format_bytes(step.peak) for step in (self.baseline, self.planned)]
        subtitle = f"peak {peaks[0]} for the baseline, {peaks[1]} with the plan"
        steps = {"baseline": self.baseline.summary(), "checkpointed": self.planned.summary()}
        plots().draw_memory(target, steps, title, subtitle)

    def to_json(self) -> str:
        """Writes plan and timelines as JSON."""
        steps = {"baseline": self.baseline, "planned": self.planned}
        timelines = {name: step and json.loads(step.to_json()) for name, step in steps.items()}
        return json.dumps({"plan": self.plan, "savings": self.savings, **timelines})


@shown("zoo.anatomy")
def anatomy(
    model: nn.Module,
    inputs: Inputs,
    *,
    optimizer: OptimizerOption | None = torch.optim.AdamW,
    loss: Loss | None = None,
    checkpoint: Checkpoint | None = None,
    device: str | None = None,
    optimizer_in_backward: bool = False,
    offload: OffloadOption = False,
) -> Anatomy:
    """Tracks a steady training step of a model: the baseline and, if there is a plan, with it.

    The model is not changed; a copy trains. Its first step is not counted.

    Args:
        model: in the mode of the training, with or without a plan of its own.
        inputs: as in `zoo.plan`.
        optimizer: as in `zoo.plan`; None takes no step.
        loss: as in `zoo.plan`; by default a scalar or an output named `loss`, else the sum of the
            means of all floating outputs.
        checkpoint: as in `zoo.checkpoint`, in place of the model's own.
        device: "meta" runs fake tensors alone. Meta inputs or parameters imply it.
        optimizer_in_backward: both steps are trained so; without an optimizer by plain SGD.
        offload: as in `zoo.checkpoint`, with `checkpoint`; the timeline has the host's bytes, too.

    Raises:
        ArgumentError: no module; a plan for what cannot be traced.
        OptimizerError: with `optimizer_in_backward`.
    """
    check_step(model, "an anatomy", loss)
    if device not in (None, "meta"):
        raise ArgumentError(
            f"device={device!r} is neither None nor 'meta'; the step runs where the model is"
        )
    invocation = Invocation.of(inputs)
    meta_inputs = invocation.map(lambda tensor: tensor.to("meta"))
    judged = functools.partial(outline_of, model, meta_inputs, is_judged=True)
    without_loss = functools.cache(judged)

    def outline(loss: Loss | None) -> Outline:
        return without_loss() if loss is None else judged(loss)

    to_host = Offload.of(offload, None)
    plan, offloads = _plan_of_option(model, meta_inputs.tensors, checkpoint, to_host, outline)
    on_meta = any(tensor.is_meta for tensor in (*invocation.tensors, *model.parameters()))
    options: Any = {"fake": device == "meta" or on_meta, "in_backward": optimizer_in_backward}
    with random_state_restored():
        step = CopiedStep(model, invocation, optimizer, loss or mean_of, **options)
        plans = ((None, False),) if plan is None else ((plan, offloads), (None, False))
        tracked = each("tracked steps", plans)
        *planned, baseline = (step.track(plan, offloads) for plan, offloads in tracked)
    by_plan = plan if isinstance(plan, Plan) else None
    maker_of(optimizer, model)
    try:
        with torch.enable_grad():
            # a loss of the model itself would run its real modules
            steps = outline(None if _is_of_module(loss) else loss)
            training = TrainingStep(optimizer, optimizer_in_backward=optimizer_in_backward)
            step_of_copy = CountedStep(model, steps, meta_inputs.tensors, training)
            savings = savings_of(StepPlanner(step_of_copy))
    except TraceError as error:
        savings = (f"The step cannot be planned for ahead of a real one: {error}",)
    return Anatomy(baseline, planned[0] if planned else None, by_plan, savings)


def _plan_of_option(
    model: nn.Module,
    inputs: Sequence[Tensor],
    checkpoint: Checkpoint | None,
    offload: Offload,
    outline: Callable[[Loss | None], Outline],
) -> tuple[Plan | str | None, OffloadOption]:
    """Decides the plan, and what it offloads, without running a step.

    The plan is "blocks" where the model cannot be traced.
    """
    patched = patched_forward(model) if checkpoint is None else None
    training = TrainingStep() if patched is None else patched.training
    given = False if checkpoint is None else parse_checkpoint(checkpoint)
    goal = goal_for(given, offload=offload) if patched is None else patched.goal
    if goal is None:
        return None, False
    is_on = goal.offload.is_on
    goal = replace(goal, report=None)
    try:
        with torch.enable_grad():
            step = step_of(goal, training, (model, outline(training.loss), inputs))
            chosen = plans_for(goal, step)[0]
            return chosen.plan, chosen.offloads
    except TraceError:
        if checkpoint not in (None, True, "blocks"):
            raise
        return "blocks", is_on


class CopiedStep:
    """A training step of a copy of a model, tracked by one plan after another.

    The tensors of a fake copy have sizes and no memory. `wrap` prepares it as a program prepares a
    model for training: shards it, say. With `in_backward` the optimizer steps in the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Invocation,
        optimizer: OptimizerOption | None,
        loss: Loss,
        wrap: Callable[[nn.Module], object] | None = None,
        *,
        fake: bool = True,
        in_backward: bool = False,
    ) -> None:
        make = maker_of(optimizer, model)
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.names, self.in_backward = named_steps(model), in_backward
        # the trace of a step on fake tensors by a plan, which serves all other plans
        self.traced: TracedForward | None = None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        own = functools.partial(_own, self.mode, device)
        copies = {} if self.mode is None else _fakes(model, own, device)
        self.model = copy.deepcopy(model, copies)
        if not fake:
            flattened(self.model)
        if _is_of_module(loss):
            # modules that it shares with the model become the copy's
            loss = copy.deepcopy(loss, copies)
        self.loss = with_loss_errors(loss, device)
        if wrap is not None:
            wrap(self.model)
        with self._modes():
            self.inputs = inputs.map(functools.cache(own))
            self.optimizer = optimizer_of(make, self.model, in_backward)
            on_cpu = not fake and all(p.device.type == "cpu" for p in self._trained())
            tensors = self.inputs.tensors
            self.tracker = track(
                self.model, optimizer=self.optimizer, inputs=tensors, allocator=on_cpu
            )
            if wrap is not None:
                # the first step of a wrapped model differs from all that follow
                put_in_force(self.model, False)
                self._train_tracked()
            elif fake and self.optimizer is not None:
                # a step makes its state
                for parameter in self._trained():
                    parameter.grad = torch.empty_like(parameter)
                self.optimizer.step()

    def track(self, plan: Plan | str | None, offload: OffloadOption = False) -> Timeline:
        """Tracks a step by a plan, after another one; None is the baseline."""
        with self._by(plan, offload):
            return self._train_tracked()

    def peak(self, plan: Plan | None, offload: OffloadOption = False) -> int:
        """Returns the allocator's peak bytes in a real step by a plan, after another one."""
        with self._by(plan, offload):
            arguments = self.model, self.optimizer, self.inputs.tensors
            return measure_step(self._train, *arguments).peak

    def _train(self) -> None:
        train_step(self.model, self.inputs, self.loss, self.optimizer)

    def _train_tracked(self) -> Timeline:
        """Trains a step; what it leaves counts in the next one, until that replaces it."""
        with self.tracker as timeline:
            self._train()
        return timeline

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextlib.contextmanager
    def _by(self, plan: Plan | str | None, offload: OffloadOption) -> Iterator[None]:
        """Puts a plan in force on the copy inside the block, ready for a steady step."""
        # outside of the mode, since the optimizer is tried on real tensors
        attached = stepping_in_backward(self.model, self.optimizer if self.in_backward else None)
        with attached, self._modes():
            keeps_all = isinstance(plan, Plan) and not (plan.depth() or offload)
            option = False if plan is None or keeps_all else plan
            put_in_force(self.model, option, steps=self.names, offload=offload)
            self.model.zero_grad(set_to_none=True)
            patched = patched_forward(self.model)
            if patched is not None and self.traced is not None:
                patched.plan_for(self.traced)
            elif patched is not None:
                patched.keeps_trace = self.mode is not None
                if self.mode is None:
                    # planned before a profiler counts the bytes, beside which no kernel is measured
                    self._train()
                self._train_tracked()
                self.traced = patched.traced
            elif self.mode is None or not self.tracker.timeline.length:
                self._train_tracked()  # it makes the state of a real optimizer
            yield

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        fakes: Any = () if self.mode is None else (self.mode, FakeTensorFixes(self.mode))
        with contextlib.ExitStack() as stack:
            for mode in (torch.inference_mode(False), torch.enable_grad(), *fakes):
                stack.enter_context(mode)
            yield


def train_step(
    model: nn.Module,
    inputs: Invocation,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    call: Callable[[Invocation, nn.Module], Any] = Invocation.taken_by,
) -> tuple[Any, Tensor]:
    """Trains a model one step; returns what it returned, and the loss."""
    model.zero_grad(set_to_none=True)
    # as in a training loop, these names outlive the backward
    outputs = call(inputs, model)
    value = checked_loss(loss, loss(outputs))
    if not value.requires_grad:
        raise ArgumentError(nothing_trained(model))
    torch.autograd.backward(value)
    if optimizer is not None:
        optimizer.step()
    return outputs, value


def optimizer_of(
    make: MakeOptimizer | None, model: nn.Module, in_backward: bool = False
) -> torch.optim.Optimizer | None:
    """Makes an optimizer of the trained parameters; with `in_backward` SGD if `make` is None."""
    make = torch.optim.SGD if make is None and in_backward else make
    if make is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return optimizer_from(make, trained) if trained else None


@contextlib.contextmanager
def stepping_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Moves an optimizer's step into the backwards of the block, and then drops the gradients."""
    handle = step_in_backward(model, optimizer) if optimizer is not None else None
    try:
        yield
    finally:
        if handle is not None:
            # a backward may have raised
            handle.reset()
            handle.remove()


def _is_of_module(loss: Any) -> bool:
    """Returns whether a loss is a module, or a method of one, which may be the model."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(getattr(loss, "__self__", loss), nn.Module)


def own_copy(inputs: Invocation) -> Invocation:
    """Copies the tensors among arguments; one that is passed twice stays one."""
    return inputs.map(functools.cache(functools.partial(_own, None, torch.device("cpu"))))


def _own(mode: FakeTensorMode | None, device: torch.device, tensor: Tensor) -> Tensor:
    """Returns a clone of a tensor or, with a mode, its fake, on the device if it is on meta."""
    if mode is None:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return fake_at(mode, tensor, device) if tensor.is_meta else mode.from_tensor(tensor)


def mean_of(outputs: PyTree) -> Tensor:
    """Returns the loss among named outputs, or the summed means of all floating tensors -> ()."""
    own = own_loss(outputs)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own
    means = [tensor.mean() if tensor.ndim else tensor for tensor in floating_in(outputs)]
    return sum(means[1:], means[0])


def floating_in(outputs: Any) -> list[Tensor]:
    """Returns the floating-point tensors among outputs, complex ones as pairs of numbers.

    Raises:
        ArgumentError: there is none.
    """
    tensors = (torch.view_as_real(t) if t.is_complex() else t for t in tensors_in(outputs))
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        raise ArgumentError(
            "the model returns no floating-point tensor; pass loss=, a function to a scalar of it"
        )
    return floating


def _fakes(
    model: nn.Module, fake: Callable[[Tensor], Tensor], device: torch.device
) -> dict[int, Any]:
    """Returns fakes of a model's parameters and buffers, but for buffers of one number, by id."""
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(fake(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.ndim:
            copies[id(buffer)] = fake(buffer)
        elif buffer.is_meta:
            copies[id(buffer)] = torch.zeros_like(buffer, device=device)
    return copies
