"""The bytes and operations of each step of a chain, from one run on fake tensors.

A fake tensor has a shape, a type, a device and a storage of the right size with nothing behind it,
so a model is measured that would not fit, and the kernels chosen are those of the real device
(plain meta tensors choose others for attention and LSTMs). Between steps not even fake tensors are
kept, only their kinds; so steps that do the same to the same kinds are run once.

What kernels allocate inside themselves (oneDNN's reordered tensors, cuDNN's workspaces) is not
seen, unless each kind of step is also run for real (`timed`). What the steps reach is left as it
was: buffers, hooks, attributes, variables, random streams; see `scratch`.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zoo.chain import Outline, State, Step
from zoo.errors import PlanError, ZooError
from zoo.measure.alike import Names, identity
from zoo.measure.constants import Constants
from zoo.measure.devices import Device, device_named
from zoo.measure.scratch import unseen
from zoo.measure.sharded import gathered
from zoo.measure.step import Given, Kind, Kinds, StepRun, Strided, kind_of, renumber, run_step
from zoo.measure.trial import Trial, run_trial
from zoo.measure.untouched import scratch, untouched, without_autocast_cache
from zoo.planner.costs import StepCosts


def profile(
    chain: nn.Module,
    outline: Outline,
    inputs: State,
    *,
    device: Device | None = None,
    timed: bool = False,
) -> StepCosts:
    """Measures the steps of a chain for inputs like these (real, fake or meta tensors).

    Seconds are those of a roofline of `device`, by default one like the inputs'. With `timed` every
    kind of step also runs for real, alone, on the inputs' device: that gives its seconds and what
    its kernels allocate. Grad mode, autocast and the training flags are those of the caller.

    Raises:
        PlanError: a step fails, or needs numbers that a fake tensor does not have.
    """
    found = Profile(chain, outline, inputs)
    return found.costs(device, found.trials() if timed else ())


# a step, its inputs, their storages' sizes, how the gradients lie that it gets
Sample = tuple[Step, Kinds, tuple[int, ...], Strided]
# runs for real what the step of a number does
RunTrial = Callable[[int, Sample, torch.device], Trial]


def _for_real(number: int, sample: Sample, device: torch.device) -> Trial:
    return run_trial(*sample, device)


class Profile:
    """The steps of a chain as fake tensors show them, and what they take for real where asked.

    Arguments and errors are those of `profile`.
    """

    def __init__(self, chain: nn.Module, outline: Outline, inputs: State) -> None:
        self.chain, self.outline, self.inputs = chain, outline, inputs
        trained = {id(p): p.nbytes for p in chain.parameters() if p.requires_grad}
        self._found = _Profile(inputs, sum(trained.values()))
        with _measuring(chain, "on fake tensors"), unseen():
            self._follow()

    def _follow(self) -> None:
        chain = self.chain
        with (
            untouched(chain, self.outline),
            without_autocast_cache(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            Constants(mode),
            gathered(chain, mode),
        ):
            for module in chain.modules():
                module._buffers = {
                    name: scratch(value, mode.from_tensor)
                    for name, value in module._buffers.items()
                }
            fakes = [value for value in chain.buffers() if isinstance(value, FakeTensor)]
            self._found.follow(self.outline, [*map(mode.from_tensor, chain.parameters()), *fakes])

    def costs(self, device: Device | None = None, trials: Sequence[Trial] = ()) -> StepCosts:
        """Puts the numbers of all steps together, with one trial for each or with none."""
        return self._found.costs(
            self.outline, device or device_named(_like(self._found.device)), trials
        )

    @property
    def runs(self) -> tuple[StepRun, ...]:
        """What each step did."""
        return tuple(self._found.known[key] for key in self._found.keys)

    def sizes_at(self, step: int) -> tuple[int, ...]:
        """Returns the bytes of the storages that a step gets, then of those that it leaves."""
        found = self._found
        key = found.keys[step]
        return (*found.samples[key][2], *found.known[key].new_sizes)

    def trials(self, run: RunTrial = _for_real) -> tuple[Trial, ...]:
        """Runs each kind of step for real, or by what is given, and returns a trial per step."""
        with (
            _measuring(self.chain, "by running each kind alone"),
            unseen(),
            untouched(self.chain, self.outline),
            without_autocast_cache(),
        ):
            for module in self.chain.modules():
                module._buffers = {
                    name: value if value is None else value.detach().clone()
                    for name, value in module._buffers.items()
                }
            return self._found.trials(run)


@contextlib.contextmanager
def _measuring(chain: nn.Module, how: str) -> Iterator[None]:
    """Raises what goes wrong as an error of the plan's."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise PlanError(
            f"the steps of {type(chain).__name__} could not be measured {how} "
            f"({type(error).__name__}: {error}). Where the model takes these inputs, pass "
            "checkpoint= a number of segments or a Plan, which need no measuring"
        ) from error


class _Profile:
    """Follows the kinds of the state through the chain and numbers storages for all steps."""

    def __init__(self, inputs: State, gradient_bytes: int) -> None:
        self.gradient_bytes = gradient_bytes
        self.fixed: set[int] = set()
        self.sizes: list[int] = []
        self.inputs: set[int] = set()
        self.tensors = 0
        self.state = self._input_kinds(inputs)
        self.states = [self.state]
        self.live = [self._live()]
        self.saved: list[frozenset[int]] = []
        self.names: list[list[int]] = []
        self.gradients: tuple[int, ...] = ()
        self.keys: list[Hashable] = []
        self.known: dict[Hashable, StepRun] = {}
        self.samples: dict[Hashable, Sample] = {}
        self.alike = Names()
        given = [value for value in inputs if value is not None]
        self.device = given[0].device if given else torch.device("cpu")

    def follow(self, outline: Outline, fixed: Sequence[Tensor]) -> None:
        """Runs each kind of step once on fake tensors."""
        self.fixed = {tensor.untyped_storage()._cdata for tensor in fixed}
        for step in outline.steps:
            self._advance(step)
            self.states.append(self.state)
            self.live.append(self._live())
        self.gradients = self._follow_gradients()

    def trials(self, run: RunTrial) -> tuple[Trial, ...]:
        """Runs each kind of step once."""
        found: dict[Hashable, Trial] = {}
        for number, key in enumerate(self.keys):
            if key not in found:
                found[key] = run(number, self.samples[key], self.device)
        return tuple(found[key] for key in self.keys)

    def costs(self, outline: Outline, device: Device, trials: Sequence[Trial]) -> StepCosts:
        """Puts the numbers of all steps together."""
        runs = [self.known[key] for key in self.keys]
        known: Sequence[Trial | None] = trials or [None] * len(runs)
        pairs = list(zip(runs, known, strict=True))
        times = [_seconds(run, trial, device) for run, trial in pairs]
        sizes, saved = list(self.sizes), list(self.saved)
        for step, (run, trial) in enumerate(pairs):
            # such as the workspace of an LSTM's kernel, which as a fake tensor is empty
            if unseen := _unseen(run, trial):
                saved[step] |= {len(sizes)}
                sizes.append(unseen)
        return StepCosts(
            sizes=tuple(sizes),
            live=tuple(self.live),
            saved=tuple(saved),
            forward=tuple(run.forward + _hidden(run, trial) for run, trial in pairs),
            forward_until_saved=tuple(
                run.forward_until_saved + _hidden(run, trial) * _is_past_kernels(run)
                for run, trial in pairs
            ),
            backward=tuple(
                max(run.backward, trial.backward if trial else 0) for run, trial in pairs
            ),
            gradients=self.gradients,
            flops=tuple(run.flops for run in runs),
            flops_until_saved=tuple(run.flops_until_saved for run in runs),
            seconds=tuple(time.forward for time in times),
            seconds_until_saved=tuple(time.until_saved for time in times),
            seconds_backward=tuple(time.backward for time in times),
            blocks=outline.blocks,
            parameter_gradients=self._left(outline, runs),
            gradients_made=tuple(run.made for run in runs),
            draws=tuple(run.draws for run in runs),
        )

    def _left(self, outline: Outline, runs: Sequence[StepRun]) -> tuple[int, ...]:
        """Returns the bytes of parameters' gradients that are there when a state is reached.

        Each step leaves its own in the backward, one that comes again its last time in the chain.
        Those that different steps share are there from the first of these that the backward comes
        to: before it begins, since what it adds is counted without them.
        """
        last = {identity(step): number for number, step in enumerate(outline.steps)}
        own = [0] * len(runs)
        for number in last.values():
            own[number] = runs[number].parameter_gradients
        first = {name: number for number, run in enumerate(runs) for name in run.shared_gradients}
        own.append(0)
        for name, number in first.items():
            own[number + 1] += runs[number].shared_gradients[name]
        own[-1] += max(self.gradient_bytes - sum(own), 0)
        behind = itertools.accumulate(reversed(own))
        return tuple(min(count, self.gradient_bytes) for count in reversed(list(behind)))

    def _advance(self, step: Step) -> None:
        tensors: dict[int, int] = {}
        storages: dict[int, int] = {}
        kinds = tuple(kind and renumber(kind, tensors, storages) for kind in self.state)
        sizes = tuple(self.sizes[number] for number in storages)
        key = (self.alike.of_step(step), kinds, sizes)
        run = self._run(key, (step, kinds, sizes, ()))
        self.keys.append(key)
        numbers = [*storages, *range(len(self.sizes), len(self.sizes) + len(run.new_sizes))]
        names = list(tensors)
        self.names.append(names)
        self.sizes += run.new_sizes
        self.state = tuple(kind and self._back(kind, names, numbers) for kind in run.outputs)
        self.saved.append(frozenset(numbers[number] for number in run.saved) - self.inputs)

    def _run(self, key: Hashable, sample: Sample) -> StepRun:
        if key not in self.known:
            self.samples[key] = sample
            self.known[key] = run_step(*sample[:3], self.fixed, sample[3])
        return self.known[key]

    def _follow_gradients(self) -> tuple[int, ...]:
        """Returns the bytes of each state's gradients, from the last state to the first.

        A step gives its inputs their gradients; an addition gives both the same tensor. Tensors
        that a step handed on keep theirs; where the step used them too, the sum is a tensor of its
        own. A step that gets gradients which are not contiguous runs again with such.
        """
        held = {kind.tensor: _own(kind) for kind in self.states[-1] if kind and kind.requires_grad}
        found = [_bytes(held)]
        for number in reversed(range(len(self.keys))):
            gives = self._gives(number, held)
            before = {k.tensor: k for k in self.states[number] if k and k.requires_grad}
            after = held
            held = {tensor: after[tensor] for tensor in before if tensor in after}
            for tensor, given in gives.items():
                name = given._replace(storage=(number, given.storage))
                held[tensor] = _own(before[tensor]) if tensor in after else name
            found.append(_bytes(held))
        return tuple(reversed(found))

    def _gives(self, number: int, held: Mapping[int, Given]) -> dict[int, Given]:
        """Returns the gradients that a step gives when it gets these."""
        key = self.keys[number]
        after = self.states[number + 1]
        strided = tuple(
            (place, held[kind.tensor]._replace(storage=None))
            for place, kind in enumerate(after)
            if kind and kind.tensor in held and held[kind.tensor].stride is not None
        )
        if strided:
            self.keys[number] = (key, strided)
            self._run(self.keys[number], (*self.samples[key][:3], strided))
        gives, names = self.known[self.keys[number]].gives, self.names[number]
        return {names[tensor]: gradient for tensor, gradient in gives.items()}

    def _back(self, kind: Kind, names: list[int], numbers: list[int]) -> Kind:
        while kind.tensor >= len(names):
            names.append(self.tensors)
            self.tensors += 1
        return kind._replace(tensor=names[kind.tensor], storage=numbers[kind.storage])

    def _live(self) -> frozenset[int]:
        return frozenset(kind.storage for kind in self.state if kind is not None) - self.inputs

    def _input_kinds(self, inputs: State) -> Kinds:
        storages: dict[int, int] = {}
        names: dict[int, int] = {}
        kinds: list[Kind | None] = []
        for value in inputs:
            if value is None:
                kinds.append(None)
                continue
            storage = value.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = len(self.sizes)
                self.sizes.append(storage.nbytes())
            number = names.setdefault(id(value), len(names))
            kinds.append(kind_of(value, number, storages[storage._cdata]))
        self.inputs = set(storages.values())
        self.tensors = len(names)
        return tuple(kinds)


class _Seconds(NamedTuple):
    """Seconds of a step: of its forward, of that until its last tensor is saved, behind it."""

    forward: float
    until_saved: float
    backward: float


def _seconds(run: StepRun, trial: Trial | None, device: Device) -> _Seconds:
    """Returns what was measured, else what a device should take."""
    if trial is None:
        works = (run.work, run.work_until_saved, run.work_backward)
        return _Seconds(*(device.seconds(work, run.dtype) for work in works))
    whole = run.work_until_saved == run.work
    until_saved = trial.seconds if whole else trial.seconds_until_saved
    return _Seconds(trial.seconds, until_saved, trial.seconds_backward)


def _hidden(run: StepRun, trial: Trial | None) -> int:
    """Returns the bytes that a forward took for real and its tensors do not show."""
    return max(0, trial.forward - run.forward) if trial is not None else 0


def _unseen(run: StepRun, trial: Trial | None) -> int:
    """Returns the bytes that a forward leaves for real and its tensors do not show."""
    return max(0, trial.kept - sum(run.new_sizes)) if trial is not None else 0


def _is_past_kernels(run: StepRun) -> bool:
    """Says whether a step has done its arithmetic when it saves its last tensor."""
    return bool(run.forward_until_saved) and run.flops_until_saved == run.flops


def _like(device: torch.device) -> str:
    return "cpu" if device.type in ("cpu", "meta") else "a100"


def _own(kind: Kind) -> Given:
    return Given(("own", kind.tensor), kind.bytes)


def _bytes(held: Mapping[int, Given]) -> int:
    return sum({given.storage: given.bytes for given in held.values()}.values())
