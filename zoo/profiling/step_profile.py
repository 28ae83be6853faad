"""The costs of a traced model's steps, from its events and measured or estimated kernels."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zoo.invocation import kernel_device
from zoo.planner.costs import StepCosts
from zoo.planner.dry_step import DryStep, KernelRates
from zoo.planner.event_costs import Rates, costs_of
from zoo.planner.step_events import KernelRun, StepEvents
from zoo.profiling.caching_allocator import Rounding, as_requested
from zoo.profiling.kernel_costs import (
    Device,
    KernelCosts,
    device_like,
    held_by_libraries,
    measure_kernels,
)
from zoo.profiling.step_mode import UpdateBytes
from zoo.profiling.tensor_spec import KernelSpec

# a floating-point type by the bytes of an element
TYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e5m2}


@dataclass(frozen=True)
class Outline:
    """The steps of a plan that a training step is cut into.

    Attributes:
        names: the names of the steps, in order.
        blocks: for each step the number of the block that it belongs to.
        whole: the steps that are each worth a segment: several kernels without a cut between.
        events: those of forward and backward.
        specs: the different kernel calls by their numbers in the events.
        cuts: the first operator of each step, and that of the loss if there is one.
        lines: "file:line" of the code that each step begins with; "" if unknown.
        shapes: the shapes of the tensors that the last kernel of each step returned.
        parameters: numbers of the model's parameters that each step uses.
        dry_step: runs a dry step of the model by a plan, and returns its log or a `FailedCall`;
            None where there is no such step.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    whole: frozenset[int]
    events: StepEvents
    specs: Sequence[KernelSpec | None]
    cuts: tuple[int, ...]
    lines: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    parameters: tuple[frozenset[int], ...]
    dry_step: Callable[[DryStep], Any] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def step_of(self, operator: int) -> int:
        """Returns the number of the step that an operator belongs to; behind the last, the loss."""
        return max(bisect.bisect_right(self.cuts, operator) - 1, 0)

    def without_loss(self) -> "Outline":
        """Returns the steps of the model alone."""
        if len(self.cuts) == len(self):
            return self
        # a dry step has the loss
        events = self.events.before(self.cuts[-1])
        return replace(self, events=events, cuts=self.cuts[:-1], dry_step=None)


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
