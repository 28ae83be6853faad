"""One step run for real: the seconds that it takes, and what its kernels allocate inside.

Fake tensors show what a step's operations return and save; a convolution's reordered weights or a
library's workspace they do not show, and no seconds. Here the step runs on tensors of random
numbers of the same kinds, alone: no more memory is needed than one step takes.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zoo.chain import Step
from zoo.measure.memory import trace
from zoo.measure.step import (
    Kinds,
    Strided,
    ends_of,
    make_inputs,
    parameters_behind,
    root_of,
)

# a quick step is timed so often; a slow one only until so many seconds went by
RUNS = 10
SECONDS = 0.05


@dataclass(frozen=True)
class Trial:
    """What a step took: most new bytes in its forward and backward, and seconds (medians).

    `kept` are the bytes that its forward leaves, outputs and what autograd saved.
    `seconds_until_saved` ends when autograd has saved the step's last tensor. Bytes are counted as
    in `planner.costs`: in the backward above what is saved and the gradients that it is given.
    """

    forward: int
    kept: int
    backward: int
    seconds: float
    seconds_until_saved: float
    seconds_backward: float


def run_trial(
    step: Step, kinds: Kinds, sizes: Sequence[int], strided: Strided, device: torch.device
) -> Trial:
    """Runs a step several times on random tensors of these kinds; see `run_step`.

    The caller lets it work on scratch buffers and puts back what else it moves.
    """
    leaves = make_inputs(kinds, sizes)
    attempt = _Attempt(step, leaves, strided, device)
    attempt.timed()
    traced = attempt.traced()
    times: list[tuple[float, float, float]] = []
    while len(times) < RUNS and sum(map(sum, times)) < SECONDS:
        times.append(attempt.timed())
    until_saved, whole, behind = map(statistics.median, zip(*times, strict=True))
    return Trial(*traced, whole, min(until_saved, whole), behind)


class _Attempt:
    """A step and its inputs, ready to be run any number of times."""

    def __init__(
        self,
        step: Step,
        leaves: Sequence[Tensor | None],
        strided: Strided,
        device: torch.device,
    ) -> None:
        self.step, self.leaves, self.strided, self.device = step, leaves, strided, device
        self.moment = _cuda_moment if device.type == "cuda" else time.perf_counter
        self.last_saved: Any = None

    def timed(self) -> tuple[float, float, float]:
        """Returns the seconds until the last tensor was saved, of the forward, of the backward."""
        start = self.last_saved = self.moment()
        with saved_tensors_hooks(self._pack, _same):
            outputs = self._forward()
        end = self.moment()
        grad, _ = self._backward_of([outputs])
        del outputs
        before = self.moment()
        if grad is not None:
            grad()
        after = self.moment()
        return (
            _seconds(start, self.last_saved), _seconds(start, end), _seconds(before, after),
        )  # fmt: skip

    def traced(self) -> tuple[int, int, int]:
        """Returns bytes: the forward's peak, what it leaves, the backward's peak."""
        outputs: list[Any] = []
        start = torch._C._autograd._get_sequence_nr()
        forward = trace(lambda: outputs.append(self._forward()), self.device, collect=False)
        ends = ends_of(outputs[0], self.strided)
        shared = parameters_behind((end.output for end in ends), before=start)
        del ends
        grad, given = self._backward_of(outputs)
        if grad is None:
            return forward.peak, forward.kept, 0
        found: dict[int, Tensor | None] = {}
        backward = trace(lambda: found.update(grad()), self.device, collect=False, earlier=True)
        leaves = set(map(id, self.leaves))
        # where the forward made a gradient, nothing is freed; another may lie where a block was
        moved = {address for address, _ in backward.events}
        made = forward.without(_addresses(found, found.keys() - leaves) - moved)
        left = backward.activation_peak(_addresses(found, shared.keys() - leaves)) - given
        return made.peak, made.kept, max(left, 0)

    def _forward(self) -> tuple[Tensor | None, ...]:
        value = self.step(*self.leaves)
        return value if isinstance(value, tuple) else (value,)

    def _backward_of(
        self, kept: list[tuple[Tensor | None, ...]]
    ) -> tuple[Callable[[], dict[int, Tensor | None]] | None, int]:
        """Takes the outputs out of a list, so that only their graph holds them."""
        ends = ends_of(kept.pop(), self.strided)
        starts = {id(leaf): leaf for leaf in self.leaves if leaf is not None and leaf.requires_grad}
        wanted = starts | parameters_behind(end.output for end in ends)
        if not wanted or not ends:
            return None, 0
        given = sum(end.bytes for end in ends)
        root, values = root_of(ends), list(wanted.values())

        def grad() -> dict[int, Tensor | None]:
            found = torch.autograd.grad(root, values, allow_unused=True)
            return dict(zip(wanted, found, strict=True))

        return grad, given

    def _pack(self, tensor: Tensor) -> Tensor:
        self.last_saved = self.moment()
        return tensor


def _addresses(found: Mapping[int, Tensor | None], names: Iterable[int]) -> frozenset[int]:
    tensors = (found.get(name) for name in names)
    return frozenset(t.untyped_storage().data_ptr() for t in tensors if t is not None)


def _cuda_moment() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _same(tensor: Tensor) -> Tensor:
    return tensor
