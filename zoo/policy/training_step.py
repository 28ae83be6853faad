"""The training step whose bytes a budget limits, and which a plan is for.

A budget limits the peak of a whole training step. A plan changes activations only; the rest is
counted here, with gradients of parameters from when the backward makes them:

    forward, backward    parameters + buffers + inputs + optimizer state + workspaces of libraries
                         + activations + gradients
    optimizer            the first five + gradients + temporaries + outputs

The larger of the two must fit the budget. Where gradients are accumulated, those of earlier
backwards are there from the start. Nothing of the model's size is allocated: bytes come
from fake tensors, seconds and kernel workspaces from real runs of each kind of kernel
(`profiling.kernel_costs`). For a CUDA device each storage counts as the caching allocator counts
it, and so do the workspaces of cuBLAS, so that a budget limits `torch.cuda.max_memory_allocated`.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.devices import name_of, splits_all_blocks
from zoo.engine.host_memory import copy_rate
from zoo.engine.sharded import is_spread
from zoo.errors import ArgumentError
from zoo.invocation import device_of, kernel_device, title_of, weights_of
from zoo.loss import Loss
from zoo.optimizer.in_backward import attached_to
from zoo.optimizer.independence import optimizer_like
from zoo.planner.costs import AT_ONCE, CopyRate, Simulation, StepCosts, computed_once, simulate
from zoo.planner.dry_step import KernelRates
from zoo.planner.event_costs import Outline, Rates, costs_of
from zoo.planner.plan import Plan
from zoo.planner.step_events import KernelRun
from zoo.policy.plan_report import FixedBytes, Point
from zoo.profiling.caching_allocator import Rounding, as_requested, rounding_of
from zoo.profiling.kernel_costs import (
    Device,
    KernelCosts,
    device_like,
    held_by_libraries,
    measure_kernels,
    rated_device,
    rated_name,
)
from zoo.profiling.optimizer_memory import (
    MakeOptimizer,
    OptimizerBytes,
    OptimizerOption,
    is_optimizer,
    maker_for,
    maker_of,
    optimizer_bytes,
)
from zoo.profiling.peak_memory import resident_bytes
from zoo.profiling.progress import shown
from zoo.profiling.step_mode import UpdateBytes

# a floating-point type by the bytes of an element
TYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e5m2}
# bytes of scalars that torch allocates in C++, such as a learning rate
NUMBERS = 64
# the optimizer that steps in the backward, or AdamW, with a warning
ASSUMED = "assumed"
NO_OPTIMIZER = OptimizerBytes()


@dataclass(frozen=True)
class TrainingStep:
    """How a program trains a model: what a budget counts beside the model and its inputs.

    Attributes:
        optimizer: the one whose state is counted, as in `zoo.plan`; its bytes, if they are known;
            or ASSUMED.
        loss: a function of the model's output; None if it is in the model or takes no memory.
        accumulates: whether the step begins with the gradients of earlier backwards.
        holds_outputs: whether a variable holds the outputs until the backward is over.
        optimizer_in_backward: whether the optimizer steps in the backward.
        forwards: how many forwards of the model run before the backward.
        others: bytes that other models hold through the step; `buckets`: those of DDP's.
        foreign: bytes of other parameters that the optimizer holds, some of which may be theirs.
        unseen: bytes that a step has taken beside those that were predicted.
        after: bytes that other models take at most between this one's forwards and backward.
        device: a device that is not here, for estimates by its peak rates; None for the model's.
    """

    optimizer: OptimizerOption | OptimizerBytes | None = ASSUMED
    loss: Loss | None = None
    accumulates: bool = False
    holds_outputs: bool = True
    optimizer_in_backward: bool = False
    forwards: int = 1
    others: int = 0
    buckets: int = 0
    foreign: int = 0
    unseen: int = 0
    after: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuses options that exclude each other."""
        if self.accumulates and self.optimizer_in_backward:
            raise ArgumentError(
                "accumulates=True keeps gradients over several backwards, and an optimizer in the "
                "backward uses and frees each in its own; leave out one of both"
            )
        if type(self.forwards) is not int or self.forwards < 1:
            raise ArgumentError(
                "forwards is how often the model runs before the backward, a whole number from 1 "
                f"on; got {self.forwards!r}"
            )

    def for_model(self, model: nn.Module) -> "TrainingStep":
        """Returns the same without the state of an optimizer, which would live as long as a plan.

        Other parameters that the optimizer holds count as `foreign`, with gradients and state.

        Raises:
            ArgumentError: no optimizer, or one of other parameters alone.
        """
        optimizer: Any = self.optimizer
        if optimizer == ASSUMED:
            return self
        if not is_optimizer(optimizer):
            maker_of(optimizer, model)
            return self
        own = {id(parameter) for parameter in model.parameters()}
        groups = [{**g, "params": [*g["params"]]} for g in optimizer.param_groups]
        others = [p for group in groups for p in group["params"] if id(p) not in own]
        if not others or len(others) == sum(len(group["params"]) for group in groups):
            maker_of(optimizer, model)
            return replace(self, optimizer=optimizer_like(optimizer, groups))
        foreign = [{**g, "params": [p for p in g["params"] if id(p) not in own]} for g in groups]
        trained = [p for p in others if p.requires_grad]
        make = maker_for(optimizer_like(optimizer, foreign), trained)
        state = optimizer_bytes(make, trained).state
        groups = [{**g, "params": [p for p in g["params"] if id(p) in own]} for g in groups]
        size = sum(p.nbytes * (1 + p.requires_grad) for p in others) + state
        return replace(self, optimizer=optimizer_like(optimizer, groups), foreign=size)

    @property
    def is_assumed(self) -> bool:
        """Whether the optimizer is AdamW for want of another."""
        return self.optimizer == ASSUMED and not self.optimizer_in_backward

    def of(self, model: nn.Module) -> "TrainingStep":
        """Returns the step of a model, whose optimizer may step in the backward.

        Raises:
            ArgumentError: the model's parameters are spread over processes.
        """
        check_gathered(model)
        in_backward = attached_to(model.parameters()) is not None
        return replace(self, optimizer_in_backward=in_backward)

    def in_data_parallel(self, model: nn.Module) -> "TrainingStep":
        """Returns the step inside of the forward of DistributedDataParallel, if that runs.

        Its buckets are as large as the gradients, and there from the beginning; gradients may be
        views of them.
        """
        around = DistributedDataParallel._active_ddp_module
        if around is None:
            return self
        if around.gradient_as_bucket_view:
            return replace(self, accumulates=True)
        trained = {id(p): p.nbytes for p in weights_of(model) if p.requires_grad}
        return replace(self, buckets=sum(trained.values()))

    @property
    def beside(self) -> int:
        """Bytes that others than the model and its inputs hold."""
        return max(self.others, self.foreign) + self.buckets + self.unseen

    @property
    def names(self) -> tuple[str, ...]:
        """The step as text, the same in all processes of a group."""
        parts = self.optimizer, self.loss
        named = (part if isinstance(part, str) else _name(part) for part in parts)
        held = self.others, self.buckets, self.foreign, self.unseen, self.after
        return (
            *named,
            str(self.accumulates),
            str(self.holds_outputs),
            *map(str, (self.forwards, *held)),
        )


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def without_optimizer(model: nn.Module) -> TrainingStep:
    """Returns a step of a model that counts no optimizer but one that steps in the backward."""
    in_backward = attached_to(model.parameters()) is not None
    return TrainingStep(ASSUMED if in_backward else NO_OPTIMIZER, optimizer_in_backward=in_backward)


def check_gathered(model: nn.Module) -> None:
    """Raises ArgumentError if the parameters of a model are spread over processes."""
    if any(map(is_spread, model.parameters())):
        raise ArgumentError(
            f"the parameters of {type(model).__name__} are spread over processes (DTensor), and "
            "gathering them is not counted. Plan before the model is distributed, with "
            "zoo.plan_rank, or choose checkpoint=True or a scheme"
        )


def outputs_held(holds_outputs: bool | None, loss: object) -> bool:
    """Returns whether outputs count until the backward is over; None: unless there is a loss.

    A step with a loss is `loss(model(x)).backward()`, as losses are called.
    """
    return loss is None if holds_outputs is None else holds_outputs


class Profile:
    """The costs of an outline's steps on a device; `rounding` gives the bytes of a storage.

    Attributes:
        specs: the different kernel calls.
        gradient_bytes: bytes of the gradients of all parameters.
        constants: bytes of tensors that the functions of the step hold, such as targets.
        returned: storages that a program's variables may hold: outputs, and the loss.
        remaining: storages that the model holds when the step is over.
        is_trained: whether anything needs a gradient.
    """

    def __init__(
        self, model: nn.Module, outline: Outline, rounding: Rounding = as_requested
    ) -> None:
        self.outline, self.events = outline, outline.events
        if rounding is not as_requested:
            self.events = self.events.rounded(rounding)
        self.device, self.specs = kernel_device(model), outline.specs
        self.gradient_bytes, self.constants = sum(self.events.trained), sum(self.events.constants)
        self.returned = self.events.outputs | self.events.ends
        self.remaining = self.events.remaining
        self.is_trained = len(self.events.backward) > 1

    def kernels(self, *, timed: bool = True) -> list[KernelCosts | None]:
        """Measures each different kernel on the model's device, unless it was measured before."""
        return measure_kernels(self.specs, self.device, timed=timed)

    def costs(
        self,
        device: Device | None = None,
        kernels: Sequence[KernelCosts | None] = (),
        updates: UpdateBytes | None = None,
        *,
        accumulates: bool = False,
    ) -> StepCosts:
        """Returns the costs of all steps.

        Args:
            device: its peak rates give the seconds of kernels that are not measured; None is a
                device like the model's.
            kernels: the costs of each different kernel, from `kernels`.
            updates: bytes that an optimizer in the backward takes for a parameter, by the
                parameter's form; None for an optimizer after it.
            accumulates: whether gradients are added to those of earlier backwards.
        """
        seconds = self._seconds(device, kernels)
        blocks, cuts = self.outline.blocks, self.outline.cuts
        if len(cuts) > len(blocks):
            blocks = (*blocks, blocks[-1] + 1 if blocks else 0)
        workspaces = [0 if cost is None else cost.workspace for cost in kernels]
        rates = Rates(seconds, workspaces)
        return costs_of(self.events, cuts, blocks, rates, updates, accumulates=accumulates)

    def rates(
        self, device: Device | None = None, kernels: Sequence[KernelCosts | None] = ()
    ) -> KernelRates:
        """Returns what each different kernel costs; arguments are those of `costs`."""
        seconds, count = self._seconds(device, kernels), len(self.specs)
        runs: list[KernelRun] = [KernelRun()] * count
        of_forward = (event for _, event in self.events.forward)
        of_nodes = (event for run in self.events.backward for event in run.events)
        for event in itertools.chain(of_forward, of_nodes):
            if type(event) is KernelRun:
                runs[event.number] = event
        workspaces = [0 if cost is None else cost.workspace for cost in kernels] or [0] * count
        return KernelRates(workspaces, [*map(seconds, runs)], [run.flops for run in runs])

    def _seconds(
        self, device: Device | None, kernels: Sequence[KernelCosts | None]
    ) -> Callable[[KernelRun], float]:
        like = device or device_like(self.device)

        def seconds(kernel: KernelRun) -> float:
            if kernels and (cost := kernels[kernel.number]) is not None:
                return cost.seconds
            return like.seconds(kernel.flops, kernel.moved, TYPES[kernel.itemsize])

        return seconds

    def held_by_libraries(
        self, device: Device | None = None, kernels: Sequence[KernelCosts | None] = ()
    ) -> int:
        """Returns the bytes that libraries hold beside a step; arguments are those of `costs`."""
        return held_by_libraries(self.specs, device or device_like(self.device), kernels)


@dataclass(frozen=True, eq=False)
class CountedStep:
    """A traced training step of a model on some inputs: what its parts take, by the trace.

    `kernels` are the costs of each different kernel, and `counted_optimizer` the bytes of the
    optimizer, if they are known.
    """

    model: nn.Module
    outline: Outline
    inputs: Sequence[Tensor]
    training: TrainingStep = TrainingStep()
    kernels: Sequence[KernelCosts | None] = ()
    counted_optimizer: OptimizerBytes | None = None

    def measured(self, *, timed: bool = True) -> "CountedStep":
        """Returns the step with measured kernels, unless its device is not here."""
        return self.with_kernels(self.profile.kernels(timed=timed)) if self.is_here else self

    def with_kernels(self, kernels: Sequence[KernelCosts | None]) -> "CountedStep":
        """Returns the step with these costs of kernels."""
        return replace(self, kernels=kernels, counted_optimizer=self.optimizer_bytes)

    def in_backward(self) -> "CountedStep":
        """Returns the same step with the optimizer in the backward."""
        training = replace(self.training, optimizer_in_backward=True)
        return replace(self, training=training, counted_optimizer=None)

    def trained_as(self, training: TrainingStep) -> "CountedStep":
        """Returns the step as another program trains the model, whose optimizer may be assumed."""
        other = training.of(self.model)
        if other.is_assumed:
            other = replace(other, optimizer=self.training.optimizer)
        return replace(self, training=other, counted_optimizer=None)

    def without_loss(self) -> "CountedStep":
        """Returns the step of the model alone."""
        return replace(self, outline=self.outline.without_loss())

    @property
    def steps(self) -> int:
        """How many steps the model has; the loss, if it is known, comes behind them."""
        return len(self.outline)

    @property
    def is_here(self) -> bool:
        """Whether the kernels can be measured."""
        return self.rated is None and self.model_device.type != "meta"

    @property
    def title(self) -> str:
        """The model and its inputs."""
        return title_of(self.model, self.inputs)

    @property
    def model_device(self) -> torch.device:
        """The device that the model is on."""
        return device_of(self.model)

    @computed_once
    def rated(self) -> Device | None:
        """The device whose peak rates were asked for; None for the model's own."""
        return rated_device(self.training.device, self.model_device)

    @property
    def made_for(self) -> str:
        """The device by its maker's name."""
        own = "cpu" if self.model_device.type == "meta" else self.model_device.type
        return (rated_name(str(self.training.device)) if self.rated else name_of(own)) or own

    @computed_once
    def rounding(self) -> Rounding:
        """How the device's allocator counts a storage."""
        kind = self.model_device.type if self.rated is None else self.rated.kind
        return rounding_of(kind, splits_all=self.splits_all)

    @property
    def splits_all(self) -> bool:
        """Whether the device's allocator splits blocks of any size."""
        return self.rated is None and splits_all_blocks(self.model_device)

    @computed_once
    def optimizer_bytes(self) -> OptimizerBytes:
        """The bytes of the optimizer.

        One in the backward that cannot be made again, or cannot step on fake tensors, counts as
        AdamW.
        """
        optimizer = self.counted_optimizer or self.training.optimizer
        if isinstance(optimizer, OptimizerBytes):
            return optimizer
        if optimizer != ASSUMED:
            return self._bytes_of(maker_of(optimizer, self.model))
        attached = attached_to(self.model.parameters())
        if self.training.optimizer_in_backward and attached is not None:
            with contextlib.suppress(ArgumentError):
                return self._bytes_of(_maker_like(attached))
        return self._bytes_of(torch.optim.AdamW)

    def _bytes_of(self, make: MakeOptimizer | None) -> OptimizerBytes:
        kind = None if self.rated is None else self.rated.kind
        arguments = make, self.model.parameters(), self.training.optimizer_in_backward
        with shown("counting the optimizer's state"):
            return optimizer_bytes(*arguments, kind, self.rounding)

    @computed_once
    def profile(self) -> Profile:
        """The costs of the steps by device and kernels."""
        return Profile(self.model, self.outline, self.rounding)

    @computed_once
    def fixed(self) -> FixedBytes:
        """The bytes that no plan changes."""
        resident = resident_bytes(self.model, inputs=self.inputs, rounding=self.rounding)
        optimizer, profile = self.optimizer_bytes, self.profile
        return FixedBytes(
            parameters=resident.parameters,
            buffers=resident.buffers,
            gradients=0 if optimizer.updates is not None else profile.gradient_bytes,
            inputs=resident.inputs + profile.constants,
            optimizer=optimizer.state,
            scratch=optimizer.step,
            libraries=profile.held_by_libraries(self.rated, self.kernels),
            others=self.training.beside,
        )

    @computed_once
    def costs(self) -> StepCosts:
        """The costs of the steps, of the loss, too, if it is known."""
        updates, profile = self.optimizer_bytes.updates, self.profile
        accumulates = self.training.accumulates
        costs = profile.costs(self.rated, self.kernels, updates, accumulates=accumulates)
        # a training loop's variables hold the outputs and the loss beyond the backward
        returned = profile.returned if self.training.holds_outputs else frozenset()
        return replace(costs, held_until_end=returned | profile.remaining)

    @computed_once
    def costs_with_gradients(self) -> StepCosts:
        """The costs with the gradients of parameters."""
        return self.costs.with_parameter_gradients()

    @computed_once
    def seconds(self) -> float:
        """Seconds of forward and backward without recomputation; 1 if none are known."""
        return sum(self.costs.seconds) + sum(self.costs.seconds_backward) or 1.0

    @computed_once
    def flops(self) -> int:
        """Floating-point operations of the forward; 1 if there are none."""
        return sum(self.costs.flops) or 1

    @computed_once
    def resident(self) -> int:
        """Bytes that are there in forward and backward under every plan."""
        return self.fixed.beside_activations + self.fixed.gradients * self.training.accumulates

    @computed_once
    def copies(self) -> CopyRate:
        """How fast copies to the host are: measured where kernels are, else by peak rates."""
        if self.rated is not None:
            return CopyRate(self.rated.to_host, self.rated.kind != "cpu")
        if not self.kernels:
            return AT_ONCE
        return CopyRate(copy_rate(self.model_device), self.model_device.type != "cpu")

    def simulate(self, plan: Plan, costs: StepCosts, offloads: Collection[int] = ()) -> Simulation:
        """Computes the costs of a plan, with items on the host."""
        if not offloads:
            return simulate(plan, costs)
        return simulate(plan, costs, offloads=offloads, steps=self.steps, copies=self.copies)

    def point(
        self,
        plan: Plan,
        name: str = "optimal",
        offloads: Collection[int] = (),
        result: Simulation | None = None,
    ) -> Point:
        """Returns a plan of the model and its loss, with what it takes by the costs of the steps.

        `result` is its simulation with the gradients of parameters, if that is known.
        """
        result = result or self.simulate(plan, self.costs_with_gradients, offloads)
        held = self.costs.bytes_of(self.costs.held_until_end)
        return Point(
            self.peak(self.with_earlier(result.peak, result.between_passes), held),
            1 + (result.recomputed_seconds + result.waited_seconds) / self.seconds,
            plan,
            name,
            result.recomputed_flops / self.flops,
            result.offloaded,
            tuple(step for step, size in enumerate(result.on_host) if size),
        )

    def with_earlier(self, during: int, between: int, backward: int | None = None) -> int:
        """Adds to the peak of activations and gradients what the step's earlier forwards hold.

        Each holds `between` bytes until its backward, and all backwards but the first to run find
        gradients of parameters: `backward` is the peak of one. All forwards are taken to be alike.
        Other models may run before the backward.
        """
        more = self.training.forwards - 1
        held = between * (more + 1) + self.training.after if self.training.after else 0
        if not more:
            return max(during, held)
        inputs = self.inputs_held
        gradients = self.fixed.gradients * (not self.training.accumulates)
        later = gradients + (during if backward is None else backward)
        return more * inputs + max(more * between + during, (more - 1) * between + later, held)

    @computed_once
    def inputs_held(self) -> int:
        """Bytes of the inputs that no earlier forward of a planned model has returned."""
        return sum(self.rounding(t.nbytes) for t in self.inputs if not t.requires_grad)

    def peak(self, during: int, held: int) -> int:
        """Returns the peak of the whole step, from that of activations and gradients `during` it.

        `held` are bytes that the program holds at its end.
        """
        # the loss and the gradient 1 that `backward` holds to its end: on CUDA a block each
        numbers = max(NUMBERS, 2 * self.rounding(1))
        return max(self.resident + during, self.fixed.optimizer_peak + held) + numbers

    def of_model(self, point: Point) -> Point:
        """Removes the loss, which is not the model's, from a point's plan."""
        has_loss = len(self.costs) > self.steps
        return replace(point, plan=Plan(point.plan[:-1])) if has_loss else point

    def with_loss(self, plan: Plan) -> Plan:
        """Returns a plan of the model that keeps its loss, if there is one.

        Raises:
            PlanError: it is for another number of steps.
        """
        plan.check(self.steps)
        return Plan([*plan, *range(self.steps, len(self.costs))])


def _maker_like(attached: torch.optim.Optimizer) -> MakeOptimizer:
    """Returns a function that makes optimizers like one that has a single group."""
    group = attached.param_groups[0]
    return lambda parameters: optimizer_like(attached, [{**group, "params": parameters}])
