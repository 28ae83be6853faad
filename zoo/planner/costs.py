"""The cost model of planners: the costs of each step of a model, and of a plan of these steps.

`simulate` judges every planner. Its clock goes through the steps in the engine's order: the forward
of all steps, then the backward from the last item of the plan to the first, where a segment is
recomputed before the backwards of its steps. The bytes of a tick are: storages held for later, the
current state, the step's own allocations, and in the backward the gradient of the state.

Bytes are counted by distinct storage. States share storage (many steps pass on a skip connection,
all later ones DenseNet's features), so a sum over shapes would count it many times.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from zoo.planner.plan import Item, Plan, first_step, indices

Value = TypeVar("Value")
FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
# storages of fewer bytes are not offloaded: that saves nothing that the calls for it are worth
LEAST_OFFLOADED = 1 << 16


class computed_once(functools.cached_property[Value]):
    """`functools.cached_property`, whose objects of a class share no lock, as those of Python 3.11.

    A fork would inherit the lock of another thread that computes, and wait for it forever.
    """

    lock = contextlib.nullcontext()

    def __init__(self, function: Callable[[Any], Value]) -> None:
        super().__init__(function)
        vars(self).pop("lock", None)


@dataclass(frozen=True)
class StepCosts:
    """The costs of n steps for one signature of inputs.

    Storages of parameters, buffers and the model's inputs are left out: no plan can change them.
    Sets hold indices into `sizes`. A tuple has an entry for each step; or for each of the n + 1
    states, before step 0, ..., after the last. An empty one stands for zeros or empty sets.
    *Until saved*: the last step of a recomputation stops when its last tensor is saved.
    """

    sizes: tuple[int, ...]  # bytes of each storage
    live: tuple[frozenset[int], ...]  # storages of each state that a later step reads
    saved: tuple[frozenset[int], ...]  # storages that autograd saves for the step's backward
    forward: tuple[int, ...]  # the largest number of new bytes during the step's forward
    forward_until_saved: tuple[int, ...]
    # the largest number of new bytes during its backward, gradients of parameters included, unless
    # several steps add to one buffer
    backward: tuple[int, ...]
    gradients: tuple[int, ...]  # bytes of the gradient of each state
    flops: tuple[int, ...]  # floating-point operations of the step's forward
    flops_until_saved: tuple[int, ...]
    # seconds of the step's forward, in any unit: planners only compare them
    seconds: tuple[float, ...]
    seconds_until_saved: tuple[float, ...]
    seconds_backward: tuple[float, ...]  # equal under every plan
    blocks: tuple[int, ...]  # the number of the step's block
    # for each state, bytes of the parameters' gradients that exist when the backward reaches it
    parameter_gradients: tuple[int, ...] = ()
    # storages that the program holds until the backward is over: the model's outputs if the caller
    # does, and what the model keeps, as in attributes; a recomputation allocates new ones
    held_until_end: frozenset[int] = frozenset()
    # bytes of parameters' gradients that the step's forward makes, not counted above
    gradients_made: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.saved)

    def with_parameter_gradients(self) -> "StepCosts":
        """Returns costs whose peaks include the gradients of parameters, from when they exist."""
        if not self.parameter_gradients:
            return self
        new_gradients = self.gradients_made or (0,) * len(self)
        return replace(
            self,
            forward=tuple(map(operator.add, self.forward, new_gradients)),
            forward_until_saved=tuple(map(operator.add, self.forward_until_saved, new_gradients)),
            gradients=tuple(map(operator.add, self.gradients, self.parameter_gradients)),
            parameter_gradients=(),
            gradients_made=(),
        )

    @computed_once
    def present(self) -> tuple[frozenset[int], ...]:
        """For each step the storages that exist in the forward under every plan."""
        made, found = frozenset[int](), list[frozenset[int]]()
        for live, after, saved in zip(self.live, self.live[1:], self.saved, strict=False):
            found.append(live | made)
            made |= (after | saved) & self.held_until_end
        return tuple(found)

    def last_states(self) -> dict[int, int]:
        """Returns the last state that has each storage of a state."""
        return {storage: state for state, live in enumerate(self.live) for storage in live}

    def newly_saved(self) -> tuple[int, ...]:
        """Returns for each step the bytes that it saves and no earlier step saves."""
        earlier: set[int] = set()
        sizes = []
        for storages in self.saved:
            sizes.append(self.bytes_of(storages - earlier))
            earlier |= storages
        return tuple(sizes)

    def bytes_of(self, storages: Collection[int]) -> int:
        """Returns the bytes of a set of storages."""
        return sum(map(self.sizes.__getitem__, storages)) if storages else 0


class Moment(NamedTuple):
    """The bytes of one tick by category, each counted once."""

    phase: str  # FORWARD, RECOMPUTE or BACKWARD
    step: int
    kept: int  # held since the forward, also by the caller of the model
    recomputed: int  # held by recomputations, and not since the forward
    state: int  # the current state, if nothing else holds it
    work: int  # the step's peak: outputs, saved tensors and temporaries
    gradient: int  # that of state `gradient_of`, and of parameters if the costs include these
    gradient_of: int | None  # None in the forward


@dataclass(frozen=True)
class Simulation:
    """The costs of a plan: peak bytes of activations, and the work that it recomputes."""

    peak: int
    recomputed_flops: int
    recomputed_seconds: float
    backward_peaks: tuple[int, ...]  # the peak in the backward of each item
    moment: Moment  # the first tick at the peak
    offloaded: int = 0  # bytes that are copied to the host until the backward
    waited_seconds: float = 0.0  # in which kernels wait for copies
    # for each step, what is copied there of what it saves, or of that from which a segment starts
    # with it
    on_host: tuple[int, ...] = ()
    between_passes: int = 0  # bytes that are held when the backward begins


class CopyRate(NamedTuple):
    """Bytes per second between device and host, and whether copies pass beside the kernels."""

    bytes_per_second: float = math.inf
    is_beside: bool = True


AT_ONCE = CopyRate()


def simulate(
    plan: Plan,
    costs: StepCosts,
    *,
    offloads: Collection[int] = (),
    steps: int | None = None,
    copies: CopyRate = AT_ONCE,
) -> Simulation:
    """Computes the costs of a plan, without running it.

    What a kept step in `offloads` saves, and what a segment starts from whose first step is in it,
    is copied to the host until the backward reaches them, as `engine.host_memory` has it: the last
    item that holds a storage decides; the copies of storages are under way until others leave; and
    what an item needs is copied back as the backward reaches the one behind it. Where copies take
    longer than the kernels beside them, these wait. Nothing leaves after the first `steps` steps,
    those of the model (default: all).

    Raises:
        PlanError: the plan is for another number of steps.
    """
    plan.check(len(costs))
    clock = _Clock(costs)
    if offloads:
        clock.offloading = _Offloading(clock, frozenset(offloads), steps, copies)
    clock.run(plan)
    if clock.offloading is not None:
        clock.offloading.copy_out(len(costs))
    peaks = [(clock.peak, clock.moment)]
    clock.hold(costs.held_until_end)
    between_passes = clock.held_bytes
    for item in reversed(plan):
        # here no recomputed tensor is held
        if clock.offloading is not None:
            clock.offloading.come_back(item)
        clock.forward_bytes, clock.peak = clock.held_bytes, 0
        clock.give_away(item)
        clock.backward(item)
        peaks.append((clock.peak, clock.moment))
    peak, moment = max(peaks, key=operator.itemgetter(0))
    backward_peaks = tuple(backward_peak for backward_peak, _ in reversed(peaks[1:]))
    # an exact sum: plans that repeat equal steps in another order take equal time
    seconds = math.fsum(clock.seconds)
    if clock.offloading is None:
        return Simulation(
            peak, clock.flops, seconds, backward_peaks, moment, between_passes=between_passes
        )
    on_host, waited = clock.offloading.bytes, clock.offloading.waited
    costs_of_plan = peak, clock.flops, seconds, backward_peaks, moment
    return Simulation(*costs_of_plan, sum(on_host), waited, tuple(on_host), between_passes)


def least_possible(costs: StepCosts) -> int:
    """Returns a lower bound in bytes: every plan runs each step's forward and backward once.

    The forward of a step needs its inputs and its allocations; the backward its saved tensors, the
    model's outputs, the incoming gradient, and its allocations. Whatever else a plan holds adds to
    that, also in any other order of the steps without offloading.
    """
    peaks = [0]
    for step, saved in enumerate(costs.saved):
        behind = costs.bytes_of(saved | costs.held_until_end) + costs.gradients[step + 1]
        before = costs.bytes_of(costs.present[step])
        peaks += before + costs.forward[step], behind + costs.backward[step]
    return max(peaks)


def _steps(item: Item) -> tuple[int, ...]:
    return (item,) if isinstance(item, int) else tuple(indices(item))


class _Clock:
    """Counts the holders of storages, the bytes held, and the peak since `peak` was set to 0."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.holders = [0] * len(costs.sizes)
        self.held_bytes = self.forward_bytes = self.peak = self.flops = 0
        self.moment = Moment(FORWARD, 0, 0, 0, 0, 0, 0, None)
        self.given_away: frozenset[int] = frozenset()  # outputs that a recomputation allocates anew
        self.seconds: list[float] = []
        self.offloading: _Offloading | None = None

    def run(self, plan: Plan) -> None:
        """Runs the forward."""
        costs = self.costs
        for item in plan:
            steps = _steps(item)
            if isinstance(item, tuple):
                self.hold(self.inputs(item))
            for step in steps:
                if self.offloading is not None and step == steps[0]:
                    self.offloading.copy_out(step)
                state = self.extra(costs.present[step])
                self.tick(FORWARD, step, state, costs.forward[step], None)
                self.pass_time(costs.seconds[step])
            if isinstance(item, int):
                self.hold(costs.saved[item])
            if self.offloading is not None:
                self.offloading.add(item)

    def backward(self, item: Item) -> None:
        """Runs the backward of an item; that of a segment recomputes it first.

        A segment holds its inputs until its backward is over.
        """
        costs = self.costs
        if isinstance(item, int):
            self.tick(BACKWARD, item, 0, costs.backward[item], item + 1)
            self.pass_time(costs.seconds_backward[item])
            self.release(costs.saved[item])
            return
        self.recompute(item)
        self.take_back(item)
        for inner in reversed(item):
            self.backward(inner)
        self.release(self.inputs(item))

    def recompute(self, item: tuple[Item, ...]) -> None:
        """Recomputes the forward of a segment, as far as its backward needs it."""
        costs, last = self.costs, item[-1]
        end = _steps(last)[-1] + 1
        for inner in item:
            if isinstance(inner, tuple):
                self.hold(self.inputs(inner))
            for step in _steps(inner):
                if inner is not last:
                    work, flops = costs.forward[step], costs.flops[step]
                    seconds = costs.seconds[step]
                elif step == inner:
                    work, flops = costs.forward_until_saved[step], costs.flops_until_saved[step]
                    seconds = costs.seconds_until_saved[step]
                else:
                    # its own backward recomputes an inner segment at the end
                    continue
                self.tick(RECOMPUTE, step, self.extra(costs.live[step]), work, end)
                self.flops += flops
                self.seconds.append(seconds)
                self.pass_time(seconds)
            if isinstance(inner, int):
                self.hold(costs.saved[inner])

    def pass_time(self, seconds: float) -> None:
        """Lets kernels run, and copies beside them."""
        if self.offloading is not None:
            self.offloading.now += seconds

    def inputs(self, item: tuple[Item, ...]) -> frozenset[int]:
        """Returns the storages that a segment starts from."""
        return self.costs.live[first_step(item)]

    def tick(self, phase: str, step: int, state: int, work: int, end: int | None) -> None:
        """Records the bytes of a moment; `end` is the state whose gradient exists."""
        gradient = 0 if end is None else self.costs.gradients[end]
        total = self.held_bytes + state + work + gradient
        if total > self.peak:
            self.peak, forward_bytes = total, self.held_bytes if end is None else self.forward_bytes
            recomputed = self.held_bytes - forward_bytes
            self.moment = Moment(phase, step, forward_bytes, recomputed, state, work, gradient, end)

    def extra(self, storages: Iterable[int]) -> int:
        holders, sizes, total = self.holders, self.costs.sizes, 0
        for storage in storages:
            if not holders[storage]:
                total += sizes[storage]
        return total

    def hold(self, storages: Iterable[int]) -> None:
        holders = self.holders
        for storage in storages:
            if not holders[storage]:
                self.held_bytes += self.costs.sizes[storage]
            holders[storage] += 1

    def give_away(self, item: Item) -> None:
        """Leaves the model's outputs in a segment to the caller: recomputing it allocates new ones.

        Their bytes stay. Nothing else holds them: the backward of all later items is done.
        """
        if isinstance(item, tuple):
            self.given_away = self.made_by(item) & self.costs.held_until_end
            for storage in self.given_away:
                self.holders[storage] = 0

    def take_back(self, item: tuple[Item, ...]) -> None:
        """Frees recomputed outputs of the model: autograd gets the caller's tensors.

        An inner segment starts from the recomputed ones.
        """
        saved, inputs = frozenset[int](), frozenset[int]()
        for inner in item if self.given_away else ():
            if isinstance(inner, int):
                saved |= self.costs.saved[inner]
            else:
                inputs |= self.inputs(inner)
        for storage in (saved - inputs) & self.given_away:
            self.held_bytes -= self.costs.sizes[storage]
            self.holders[storage] += 1
        self.given_away -= saved - inputs

    def made_by(self, item: tuple[Item, ...]) -> frozenset[int]:
        """Returns the storages within and after a segment that are not its inputs."""
        live, saved = self.costs.live, self.costs.saved
        inside = (live[step + 1] | saved[step] for step in indices(item))
        return frozenset().union(*inside) - live[first_step(item)]

    def release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.holders[storage] -= 1
            if not self.holders[storage]:
                self.held_bytes -= self.costs.sizes[storage]


class _Offloading:
    """Storages on the host: those that nothing holds but segments and kept steps."""

    def __init__(
        self, clock: _Clock, chosen: frozenset[int], steps: int | None, copies: CopyRate
    ) -> None:
        self.clock, self.chosen, self.copies = clock, chosen, copies
        self.steps = len(clock.costs) if steps is None else steps
        # by the first step of the last item that holds them
        self.bytes = [0] * len(clock.costs)
        # the time of the kernels, for how long they have waited, and when the copies end
        self.now = self.waited = self.copied = 0.0
        self.ends: dict[int, float] = {}
        # how many items hold a storage, and the first step of the last of these
        self.holders: dict[int, int] = {}
        self.last: dict[int, int] = {}
        # storages that shall leave, those whose copies are under way, and those without memory on
        # the device
        self.candidates: dict[int, None] = {}
        self.leaving: list[int] = []
        self.away: set[int] = set()

    def held_by(self, item: Item) -> frozenset[int]:
        """Returns what an item holds until its backward."""
        if isinstance(item, int):
            return self.clock.costs.saved[item]
        return self.clock.inputs(item)

    def add(self, item: Item) -> None:
        """Adds an item whose forward is over."""
        first = first_step(item)
        for storage in self.held_by(item):
            if self.clock.costs.sizes[storage] >= LEAST_OFFLOADED:
                self.holders[storage] = self.holders.get(storage, 0) + 1
                self.last[storage] = first
                if first in self.chosen:
                    self.candidates[storage] = None
                else:
                    self.candidates.pop(storage, None)

    def copy_out(self, step: int) -> None:
        """Copies out what only items hold when a step of the model begins, or the model ends."""
        costs, holders = self.clock.costs, self.clock.holders
        needed = costs.live[step] | costs.held_until_end
        leaving = [
            storage
            for storage in (self.candidates if step <= self.steps else ())
            if holders[storage] == self.holders[storage] and storage not in needed
        ]
        if leaving:
            for storage in self.leaving:
                self.wait(storage)
                self.away.add(storage)
                self.clock.held_bytes -= costs.sizes[storage]
            self.leaving = leaving
        for storage in leaving:
            del self.candidates[storage]
            self.bytes[self.last[storage]] += costs.sizes[storage]
            self.copy(storage)

    def come_back(self, item: Item) -> None:
        """Copies back what an item needs, and what the one before it does."""
        own = first_step(item)
        if self.bytes[own] or not isinstance(item, int):
            before = (self.last[storage] for storage in (*self.away, *self.leaving))
            first = max((reader for reader in before if reader < own), default=own)
            for storage in sorted(self.away, key=self.last.__getitem__, reverse=True):
                if self.last[storage] >= first:
                    self.away.remove(storage)
                    self.clock.held_bytes += self.clock.costs.sizes[storage]
                    self.copy(storage)
        for storage in self.held_by(item) if self.ends else ():
            if storage in self.ends:
                self.wait(storage)

    def copy(self, storage: int) -> None:
        """Begins a copy after those before it."""
        start = max(self.now, self.copied)
        size = self.clock.costs.sizes[storage]
        self.copied = self.ends[storage] = start + size / self.copies.bytes_per_second
        if not self.copies.is_beside:
            self.wait(storage)

    def wait(self, storage: int) -> None:
        """Has kernels wait for a copy."""
        self.waited += max(0.0, self.ends[storage] - self.now)
        self.now = max(self.now, self.ends[storage])
