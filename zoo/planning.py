"""From a memory budget to a plan: `zoo.plan`, `zoo.frontier`, and what `checkpoint="auto"` does.

A budget is the peak of a whole training step. A plan decides about activations only; the rest is
counted here, and gradients of parameters from when the backward makes them:

    forward, backward    parameters + buffers + inputs + optimizer state + activations + gradients
    optimizer            parameters + buffers + inputs + optimizer state + gradients + its scratch

The larger of the two must keep to the budget. Nothing of the model's size is allocated: bytes come
from fake tensors, seconds from one real run of each kind of step (`measure.profile`).
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.chain import Chain, Outline, Runner, State, step_names
from zoo.errors import ArgumentError, BudgetError, PlanError
from zoo.measure.devices import device_named
from zoo.measure.memory import resident_bytes
from zoo.measure.optimizer import MakeOptimizer, OptimizerBytes, optimizer_bytes
from zoo.measure.profile import profile
from zoo.plan import Item, Plan
from zoo.planner import schemes
from zoo.planner.costs import StepCosts
from zoo.planner.simulate import simulate
from zoo.units import format_bytes, parse_bytes

# states of random streams, which a second run swaps: 5 KiB each
STREAMS = 8 * 5056
# segments in segments, at most: each takes four frames of Python's stack, which holds 1,000
DEEPEST = 64

Budget = int | float | str
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of a training step that no plan changes. `scratch` is the optimizer's, in its step."""

    parameters: int
    buffers: int
    gradients: int
    inputs: int
    optimizer: int
    scratch: int

    @property
    def beside_activations(self) -> int:
        """Bytes that are there in forward and backward, the gradients of parameters left out."""
        return self.parameters + self.buffers + self.inputs + self.optimizer

    @property
    def optimizer_peak(self) -> int:
        """Bytes in the optimizer's step."""
        return self.beside_activations + self.gradients + self.scratch


@dataclass(frozen=True)
class PlanReport:
    """A plan and what it should cost.

    Attributes:
        plan: the plan.
        predicted_peak: bytes of the whole training step at its peak.
        predicted_time_ratio: seconds of forward and backward against keeping everything.
        predicted_activations: bytes of activations at their peak, gradients of parameters left out.
        budget: bytes, None where time was given.
        baseline_peak: `predicted_peak` when everything is kept.
        least_peak: the smallest that any plan reaches.
        fixed: bytes that no plan changes.
        flops: operations of the forward, and those that are run again.
        names: the steps.
    """

    plan: Plan
    predicted_peak: int
    predicted_time_ratio: float
    predicted_activations: int
    budget: int | None
    baseline_peak: int
    least_peak: int
    fixed: FixedBytes
    flops: int
    recomputed_flops: int
    names: tuple[str, ...]

    def to_json(self) -> str:
        """Writes the report as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "PlanReport":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: it is no such text.
        """
        try:
            values = json.loads(text)
            values["plan"] = Plan(values["plan"])
            values["fixed"] = FixedBytes(**values["fixed"])
            values["names"] = tuple(values["names"])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"this is no report of a plan in JSON: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the report to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "PlanReport":
        """Reads a file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def draw(self) -> str:
        """Draws the plan, one line per step."""
        return self.plan.draw(self.names)

    def __str__(self) -> str:
        budget = "" if self.budget is None else f"budget             {format_bytes(self.budget)}\n"
        fixed = self.fixed
        return (
            f"{budget}"
            f"predicted peak     {format_bytes(self.predicted_peak)} of a training step, "
            f"x{self.predicted_peak / self.baseline_peak:.2f} of keeping everything, "
            f"{format_bytes(self.baseline_peak)}; the least is {format_bytes(self.least_peak)}\n"
            f"predicted time     x{self.predicted_time_ratio:.2f} of forward and backward, "
            f"{self.recomputed_flops / max(self.flops, 1):.1%} of the forward's operations again\n"
            f"activations        {format_bytes(self.predicted_activations)}\n"
            f"parameters         {format_bytes(fixed.parameters)}, as much for gradients at most\n"
            f"optimizer          {format_bytes(fixed.optimizer)} of state, "
            f"{format_bytes(fixed.scratch)} in its step\n"
            f"buffers, inputs    {format_bytes(fixed.buffers)}, {format_bytes(fixed.inputs)}\n"
            f"plan               {self.plan}"
        )


@dataclass(frozen=True)
class Point:
    """A plan on the frontier, or a scheme beside it: peak of a training step, time ratio."""

    peak: int
    time_ratio: float
    plan: Plan
    name: str = "optimal"


def plan(
    model: Chain,
    inputs: Tensor | Sequence[Any],
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> PlanReport:
    """Finds the plan of least time whose training step keeps to a budget in bytes.

    `inputs` are what the model is called with: a tensor or a tuple, also of meta tensors, which
    take no memory. `memory_budget` is the peak of the whole step: bytes, "8GiB", "8GB", "device"
    for what is free there, or a fraction of what keeping everything takes, `0.5`. Instead,
    `max_overhead=0.2` asks for the least memory in at most 1.2 times the baseline's time.

    `optimizer` makes the optimizer whose state is counted, AdamW if not said; None counts none.
    `loss` is a function of the model's outputs where it is not part of the model, counted too.
    `device` plans for a device that may not be here ("a100"; see `zoo.measure.devices`) by its
    peak rates; else each kind of step is timed once, where the model is.

    Raises:
        ArgumentError: no chain, not one of budget and overhead, or no such form of them.
        BudgetError: no plan keeps to the budget, with the least that one needs.
    """
    found = Prospect.of(model, inputs, optimizer=optimizer, loss=loss, device=device)
    return found.report(memory_budget, max_overhead)


def frontier(
    model: Chain,
    inputs: Tensor | Sequence[Any],
    *,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> list[Point]:
    """Returns the best plans by rising peak and falling time, then the classic schemes.

    Arguments and errors are those of `plan`.
    """
    return Prospect.of(model, inputs, optimizer=optimizer, loss=loss, device=device).frontier()


class Prospect:
    """A chain's costs for one kind of inputs, and its best plans for any budget."""

    def __init__(
        self,
        model: Chain,
        found: Outline,
        state: State,
        *,
        optimizer: MakeOptimizer | None = torch.optim.AdamW,
        loss: Loss | None = None,
        device: str | None = None,
    ) -> None:
        self.names = tuple(step_names(model, found.steps))
        self.steps = len(found.steps)
        self.fixed = _fixed_bytes(model, state, optimizer_bytes(optimizer, model.parameters()))
        self.place = _place(model)
        costs = _costs(model, _with_loss(found, loss), state, device, self.place)
        # a training loop's names for the outputs and the loss outlive the backward
        self.costs = replace(costs, returned=costs.live[self.steps] | costs.live[-1])
        self.whole = self.costs.with_parameter_gradients()
        self.points = self._best_plans()

    @classmethod
    def of(cls, model: Chain, inputs: Tensor | Sequence[Any], **options: Any) -> "Prospect":
        """Looks at a model as it would be called with these inputs."""
        if not isinstance(model, Chain):
            raise ArgumentError(f"planning needs a zoo.Chain; got {type(model).__name__}")
        if not model.training:
            raise ArgumentError("a plan is for training; call model.train() first")
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        place = _place(model)
        return cls(model, *_called(model, [_in_place(value, place) for value in given]), **options)

    def report(self, memory_budget: Budget | None, max_overhead: float | None) -> PlanReport:
        """Chooses a plan and says what it costs."""
        if (memory_budget is None) == (max_overhead is None):
            raise ArgumentError(
                f"one of memory_budget and max_overhead must be given; got {memory_budget!r} and "
                f"{max_overhead!r}"
            )
        if max_overhead is not None:
            return self._describe(self._within_time(max_overhead), None)
        budget = self.bytes_of(memory_budget)
        return self._describe(self._within_bytes(budget), budget)

    def frontier(self) -> list[Point]:
        """Returns the best plans and the classic schemes."""
        classic = {name: scheme(self.costs.blocks) for name, scheme in schemes.FROM_BLOCKS.items()}
        classic |= {name: scheme(self.costs) for name, scheme in schemes.FROM_COSTS.items()}
        return [*self.points, *(self._point(found, name) for name, found in classic.items())]

    def bytes_of(self, budget: Any) -> int:
        """Returns a budget in bytes."""
        if budget == "device":
            return _free_bytes(self.place) + self.fixed.parameters + self.fixed.buffers
        if isinstance(budget, float):
            if not 0 < budget <= 1:
                raise ArgumentError(
                    f"memory_budget={budget} is no fraction of the baseline; give one above 0 and "
                    "up to 1, an int of bytes, or text such as '8GiB'"
                )
            return int(budget * self.points[-1].peak)
        return parse_bytes(budget, "memory_budget")

    def _best_plans(self) -> list[Point]:
        table = _table(self.whole)
        plans = dict.fromkeys(_kept_from(point.plan, self.steps) for point in table.frontier())
        shallow = (found for found in plans if found.depth() <= DEEPEST)
        points = sorted(map(self._point, shallow), key=lambda p: (p.time_ratio, p.peak))
        best: list[Point] = []
        for point in points:
            if not best or point.peak < best[-1].peak:
                best.append(point)
        return best[::-1]

    def _point(self, found: Plan, name: str = "optimal") -> Point:
        result = simulate(found, self.whole)
        streams = STREAMS if found.depth() else 0
        activations = self.fixed.beside_activations + result.peak + streams
        peak = max(activations, self.fixed.optimizer_peak)
        return Point(peak, 1 + result.recomputed_seconds / self._seconds(), found, name)

    def _seconds(self) -> float:
        return sum(self.costs.seconds) + sum(self.costs.seconds_backward) or 1.0

    def _within_bytes(self, budget: int) -> Point:
        found = [point for point in self.points if point.peak <= budget]
        if not found:
            least, baseline = self.points[0].peak, self.points[-1].peak
            raise BudgetError(
                f"a training step needs at least {_exact(least)}; the budget is {_exact(budget)}; "
                f"keeping everything takes {_exact(baseline)}. Lower the batch size, or choose an "
                "optimizer of less state."
            )
        return found[-1]

    def _within_time(self, overhead: float) -> Point:
        if not overhead >= 0:
            raise ArgumentError(f"max_overhead={overhead} is below 0; 0.2 allows a fifth more time")
        return next(point for point in self.points if point.time_ratio <= 1 + overhead)

    def _describe(self, point: Point, budget: int | None) -> PlanReport:
        result = simulate(point.plan, self.costs)
        return PlanReport(
            plan=Plan(point.plan[:-1]) if len(self.costs) > self.steps else point.plan,
            predicted_peak=point.peak,
            predicted_time_ratio=point.time_ratio,
            predicted_activations=result.peak,
            budget=budget,
            baseline_peak=self.points[-1].peak,
            least_peak=self.points[0].peak,
            fixed=self.fixed,
            flops=sum(self.costs.flops),
            recomputed_flops=result.recomputed_flops,
            names=self.names,
        )


class _Called(BaseException):
    """Carries the steps of a forward and their inputs out of it."""

    def __init__(self, found: Outline, state: State) -> None:
        super().__init__()
        self.found, self.state = found, state


def _stop(chain: Chain, found: Outline, state: State) -> Any:
    raise _Called(found, state)


def _called(model: Chain, inputs: Sequence[Any]) -> tuple[Outline, State]:
    """Calls a model up to where its first step would run."""
    runner, model.runner = model.runner, cast(Runner, _stop)
    try:
        with torch.enable_grad():
            model(*inputs)
    except _Called as called:
        return called.found, called.state
    finally:
        model.runner = runner
    raise ArgumentError(f"{type(model).__name__}'s forward does not run its steps")


def _place(model: Chain) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _costs(
    model: Chain, found: Outline, inputs: State, device: str | None, place: torch.device
) -> StepCosts:
    named = device_named(device) if device is not None else None
    timed = named is None and place.type != "meta"
    return profile(model, found, inputs, device=named, timed=timed)


def _in_place(value: Any, place: torch.device) -> Any:
    """Returns a fake tensor where the model is for a meta tensor, any other as it is."""
    if isinstance(value, list | tuple):
        return tuple(_in_place(part, place) for part in value)
    if not isinstance(value, Tensor) or value.device.type != "meta" or place.type == "meta":
        return value
    with FakeTensorMode():
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
    return fake.requires_grad_(value.requires_grad)


def _with_loss(found: Outline, loss: Loss | None) -> Outline:
    """Adds the loss as a last step, a block of its own."""
    if loss is None:
        return found
    last = found.blocks[-1] + 1 if found.blocks else 0
    return replace(
        found, steps=(*found.steps, functools.partial(loss)), blocks=(*found.blocks, last)
    )


def _kept_from(found: Plan, steps: int) -> Plan:
    """Takes the loss out of a segment that it ends, since it is not the chain's to run again."""
    total = len(found.flatten())
    if total == steps or isinstance(found[-1], int):
        return found
    inner = _without_last(found[-1])
    return Plan([*found[:-1], *([inner] if inner else []), total - 1])


def _without_last(item: tuple[Item, ...]) -> tuple[Item, ...]:
    last = item[-1]
    rest = _without_last(last) if isinstance(last, tuple) else ()
    return (*item[:-1], rest) if rest else item[:-1]


def _table(costs: StepCosts) -> Any:
    try:
        # numpy is needed to plan for a budget, and for nothing else that `import zoo` brings
        from zoo.planner.optimal import Table  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError(
            "planning for a budget needs numpy: pip install 'zoo-checkpoint[plan]'"
        ) from error
    return Table(costs)


def _fixed_bytes(model: Chain, inputs: State, optimizer: OptimizerBytes) -> FixedBytes:
    given = [value for value in inputs if isinstance(value, Tensor)]
    resident = resident_bytes(model, inputs=given)
    trained: Iterable[Tensor] = (p for p in model.parameters() if p.requires_grad)
    return FixedBytes(
        parameters=resident.parameters,
        buffers=resident.buffers,
        gradients=sum(parameter.nbytes for parameter in trained),
        inputs=resident.inputs,
        optimizer=optimizer.state,
        scratch=optimizer.step,
    )


def _free_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on a device, or cached by torch and not in use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    if device.type != "cpu":
        raise ArgumentError(f"memory_budget='device' is known for cpu and cuda, not for {device}")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _exact(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"
