"""The costs of a traced model's steps: those of its log, with measured or estimated kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from zoo.chain import Outline, State
from zoo.invocation import kernel_device, with_loss
from zoo.planner.costs import StepCosts
from zoo.planner.log_costs import Rates, costs_of
from zoo.planner.step_log import KernelRun, StepLog
from zoo.profiling.caching_allocator import Rounding, as_requested
from zoo.profiling.chain_profile import Profile, device_like
from zoo.profiling.chain_step_profile import UpdateBytes
from zoo.profiling.kernel_costs import Device, KernelCosts, held_by_libraries, measure_kernels
from zoo.profiling.tensor_spec import KernelSpec

# a floating-point type by the bytes of an element
TYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e5m2}


class LoggedStep(str):
    """The name of a step, which does not run by itself."""

    def __call__(self, *_: object) -> NoReturn:
        """Raises AssertionError."""
        raise AssertionError(f"{self} is part of a forward and does not run alone")


@dataclass(frozen=True)
class LoggedOutline(Outline):
    """The steps that a training step's log is cut into.

    Attributes:
        log: of forward and backward.
        specs: the different kernel calls by their numbers in the log.
        cuts: the first operator of each step, and that of the loss if there is one.
        shapes: those of the tensors that the last kernel of each step returned.
        parameters: numbers of the model's parameters that each step uses.
    """

    log: StepLog | None = None
    specs: Sequence[KernelSpec | None] = ()
    cuts: tuple[int, ...] = ()
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    parameters: tuple[frozenset[int], ...] = ()

    def names(self, model: nn.Module) -> list[str]:
        """Returns the names of the steps."""
        return list(map(str, self.steps))

    def without_loss(self) -> "LoggedOutline":
        """Returns the steps of the model alone."""
        if len(self.cuts) == len(self):
            return self
        assert self.log is not None
        return replace(self, log=self.log.before(self.cuts[-1]), cuts=self.cuts[:-1])


class LogProfile:
    """The profile of the steps of a log; storages are counted by `rounding`.

    Attributes:
        specs: the different kernel calls.
        gradient_bytes: bytes of the gradients of all parameters.
        constants: bytes of tensors that the functions of the step hold, such as targets.
        returned: storages that the program holds when the forward is over: outputs, and the loss.
        is_trained: whether anything needs a gradient.
    """

    def __init__(
        self, model: nn.Module, outline: LoggedOutline, rounding: Rounding = as_requested
    ) -> None:
        assert outline.log is not None
        self.outline, self.log = outline, outline.log.counted(rounding)
        self.device, self.specs = kernel_device(model), outline.specs
        self.gradient_bytes, self.constants = sum(self.log.trained), sum(self.log.constants)
        self.returned = self.log.outputs | self.log.ends
        self.is_trained = len(self.log.backward) > 1

    def kernels(self, *, timed: bool = True) -> list[KernelCosts | None]:
        """Runs each different kernel for real, alone, on the model's device, unless it is known."""
        return measure_kernels(self.specs, self.device, timed=timed)

    def costs(
        self,
        device: Device | None = None,
        kernels: Sequence[KernelCosts | None] = (),
        updates: UpdateBytes | None = None,
    ) -> StepCosts:
        """Returns the costs of all steps; arguments are those of `Profile.costs`."""
        like = device or device_like(self.device)

        def seconds(kernel: KernelRun) -> float:
            if kernels and (known := kernels[kernel.number]) is not None:
                return known.seconds
            return like.seconds(kernel.flops, kernel.moved, TYPES[kernel.itemsize])

        blocks, cuts = self.outline.blocks, self.outline.cuts
        if len(cuts) > len(blocks):
            blocks = (*blocks, blocks[-1] + 1 if blocks else 0)
        workspaces = [0 if known is None else known.workspace for known in kernels]
        return costs_of(self.log, cuts, blocks, Rates(seconds, workspaces), updates)

    def held_by_libraries(
        self, device: Device | None = None, kernels: Sequence[KernelCosts | None] = ()
    ) -> int:
        """Returns the bytes that libraries hold beside a step; arguments are those of `costs`."""
        return held_by_libraries(self.specs, device or device_like(self.device), kernels)


Profiled = Profile | LogProfile


def profile_of(
    model: nn.Module,
    outline: Outline,
    inputs: State,
    rounding: Rounding = as_requested,
    loss: Callable[..., Tensor] | None = None,
) -> Profiled:
    """Returns the profile of a model's steps, of which a chain's run one by one."""
    if isinstance(outline, LoggedOutline):
        return LogProfile(model, outline, rounding)
    whole = with_loss(outline, loss)
    return Profile(model, whole, inputs, rounding, has_loss=loss is not None)
