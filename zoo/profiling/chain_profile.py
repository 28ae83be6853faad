"""The bytes and operations of each step of a chain, from one run on fake tensors.

A fake tensor has a shape, a type, a device and a storage of the right size with nothing behind it,
so a model is measured that would not fit, and the kernels chosen are those of the real device
(plain meta tensors choose others for attention and LSTMs). Between steps not even fake tensors are
kept, only their kinds; so steps that do the same to the same kinds are run once.

What kernels allocate inside themselves (oneDNN's reordered tensors, cuDNN's workspaces) is not
seen, unless each kind of kernel also runs for real (`timed`). The steps run in another process,
or copies of them here: see `isolated`.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo._torch import FakeTensor, FakeTensorMode, disable_current_modes, unset_fake_temporarily
from zoo.chain import HOOKS, Outline, State, Step
from zoo.errors import PlanError
from zoo.planner.costs import StepCosts
from zoo.profiling.constants import SMALL, Constants
from zoo.profiling.devices import Device, device_named
from zoo.profiling.fake_kernels import FakeKernels
from zoo.profiling.isolation import Died, Raised, isolated
from zoo.profiling.kernel_costs import KernelCosts, KernelSpec, KernelTable, measure_kernels
from zoo.profiling.sharded import whole_parameters
from zoo.profiling.step_key import Names, identity
from zoo.profiling.step_profile import (
    Curve,
    GradientSpec,
    StepRun,
    Strided,
    flop_formulas,
    run_step,
)
from zoo.profiling.tensor_spec import NumberedSpec, StateSpec, numbered_spec, renumber


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
    kind of kernel also runs for real, alone, on the inputs' device: that gives its seconds and its
    workspace. Grad mode, autocast and the training flags are those of the caller.

    Raises:
        PlanError: a step fails, or needs numbers that a fake tensor does not have.
    """
    found = Profile(chain, outline, inputs)
    return found.costs(device, found.kernels() if timed else ())


# a step, its inputs, their storages' sizes, how the gradients lie that it gets
Sample = tuple[Step, StateSpec, tuple[int, ...], Strided]


class Profile:
    """The steps of a chain as fake tensors show them, and their kernels for real where asked.

    Arguments and errors are those of `profile`.
    """

    def __init__(self, chain: nn.Module, outline: Outline, inputs: State) -> None:
        trained = {id(p): p.nbytes for p in chain.parameters() if p.requires_grad}
        self.outline, self.gradient_bytes = outline, sum(trained.values())
        tensors = (*(value for value in inputs if value is not None), *chain.parameters())
        self.place = tensors[0].device if tensors else torch.device("cpu")
        _import_all()
        answer = isolated(functools.partial(_followed, chain, outline, inputs))
        if isinstance(answer, Raised) and answer.error is not None:
            raise answer.error
        if not isinstance(answer, _Found):
            raise PlanError(
                f"the steps of {type(chain).__name__} could not be measured on fake tensors "
                f"({_told(answer)}). Where the model takes these inputs, pass checkpoint= a number "
                "of segments or a Plan, which need no measuring"
            )
        self.found = answer

    @property
    def specs(self) -> tuple[KernelSpec | None, ...]:
        """The kinds of kernels that the steps run."""
        return self.found.kernels

    def kernels(self) -> list[KernelCosts | None]:
        """Runs each kind of kernel for real, unless it is known."""
        return measure_kernels(self.specs, self.place)

    def costs(
        self, device: Device | None = None, kernels: Sequence[KernelCosts | None] = ()
    ) -> StepCosts:
        """Puts the numbers of all steps together, with what each kernel took or without."""
        found, runs = self.found, self.runs
        device = device or device_named(_like(self.place))
        workspaces = [kernel.workspace if kernel else 0 for kernel in kernels]

        def seconds(run: StepRun, curve: Curve) -> float:
            known = [kernels[kernel.number] if kernels else None for kernel in curve.kernels]
            return sum(
                device.seconds([(kernel.flops, kernel.moved)], run.dtype)
                if costs is None
                else costs.seconds
                for kernel, costs in zip(curve.kernels, known, strict=True)
            )

        return StepCosts(
            sizes=found.sizes,
            live=found.live,
            saved=found.saved,
            forward=tuple(run.forward.peak(workspaces) for run in runs),
            forward_until_saved=tuple(run.until_saved.peak(workspaces) for run in runs),
            backward=tuple(run.backward.peak(workspaces) for run in runs),
            gradients=found.gradients,
            flops=tuple(run.forward.flops for run in runs),
            flops_until_saved=tuple(run.until_saved.flops for run in runs),
            seconds=tuple(seconds(run, run.forward) for run in runs),
            seconds_until_saved=tuple(seconds(run, run.until_saved) for run in runs),
            seconds_backward=tuple(seconds(run, run.backward) for run in runs),
            blocks=self.outline.blocks,
            parameter_gradients=self._left(),
            gradients_made=tuple(run.made for run in runs),
            draws=tuple(run.draws for run in runs),
        )

    @property
    def runs(self) -> tuple[StepRun, ...]:
        """What each step did."""
        return tuple(self.found.runs[kind] for kind in self.found.kinds)

    def _left(self) -> tuple[int, ...]:
        """Returns the bytes of parameters' gradients that are there when a state is reached.

        Each step leaves its own in the backward, one that comes again its last time in the chain.
        Those that different steps share are there from the first of these that the backward comes
        to: before it begins, since what it adds is counted without them.
        """
        runs = self.runs
        last = {identity(step): number for number, step in enumerate(self.outline.steps)}
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


class _Found(NamedTuple):
    """What the steps do, as data: each kind of step once, and the kinds of all in order."""

    runs: tuple[StepRun, ...]
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    live: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]
    gradients: tuple[int, ...]
    kernels: tuple[KernelSpec | None, ...]


@functools.cache
def _import_all() -> None:
    """Has torch import once, and not in each process, what fake tensors need."""
    with FakeTensorMode():
        torch.empty(1).relu()
    flop_formulas()


def _told(answer: Raised | Died) -> str:
    if isinstance(answer, Raised):
        return f"{answer.kind}: {answer.text}"
    return f"the process in which they ran ended with status {answer.status}"


def _followed(chain: nn.Module, outline: Outline, inputs: State, is_apart: bool) -> _Found:
    """Runs the steps on fake tensors: `is_apart` themselves, else copies of them."""
    follower = _Follower(inputs)
    with (
        _without_autocast_cache(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        FakeKernels(),  # type: ignore[no-untyped-call]
        Constants(mode),
    ):
        made = {id(buffer): _fake_buffer(mode, buffer) for buffer in chain.buffers()}
        made |= whole_parameters(chain, mode)
        steps = outline.steps
        if is_apart:
            _replace(chain, made)
        else:
            steps = _copies(chain, steps, made)
        owned = [made.get(id(value), value) for value in (*chain.parameters(), *chain.buffers())]
        fixed = [mode.from_tensor(value) for value in owned if not isinstance(value, FakeTensor)]
        fixed += [value for value in owned if isinstance(value, FakeTensor)]
        return follower.follow(steps, fixed)


def _replace(chain: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Puts tensors in the place of a chain's own, and takes the hooks off."""
    for module in chain.modules():
        for held in (module._parameters, module._buffers):
            # a module of TorchScript has none; its steps are kernels, which take any tensor
            if isinstance(held, dict):
                held |= {name: made[id(value)] for name, value in held.items() if id(value) in made}
        for name in HOOKS:
            setattr(module, name, {})


def _copies(
    chain: nn.Module, steps: Sequence[Step], made: Mapping[int, Tensor]
) -> tuple[Step, ...]:
    """Copies steps and the modules that they are of, without hooks and without what is large."""
    known: dict[int, Any] = {
        id(parameter): parameter
        for parameter in chain.parameters()
        # a step may write a small one that is frozen
        if parameter.requires_grad or parameter.nbytes > SMALL
    }
    known |= made
    for module in chain.modules():
        known |= {id(getattr(module, name)): {} for name in HOOKS}
        known[id(getattr(module, "runner", None))] = None
    with disable_current_modes():
        return copy.deepcopy(tuple(steps), known)


def _fake_buffer(mode: FakeTensorMode, buffer: Tensor) -> Tensor:
    """Stands in for a buffer; a counter stays a number, since some layers compute with it."""
    if buffer.ndim == 0 and buffer.device.type in ("cpu", "meta"):
        with unset_fake_temporarily():
            return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.clone()
    return mode.from_tensor(buffer)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keeps fake casts of real weights out of autocast's cache."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _Follower:
    """Follows the kinds of the state through the chain and numbers storages for all steps."""

    def __init__(self, inputs: State) -> None:
        self.table = KernelTable()
        self.fixed: set[int] = set()
        self.sizes: list[int] = []
        self.inputs: set[int] = set()
        self.tensors = 0
        self.state = self._input_kinds(inputs)
        self.states = [self.state]
        self.live = [self._live()]
        self.saved: list[frozenset[int]] = []
        self.names: list[list[int]] = []
        self.keys: list[Hashable] = []
        self.known: dict[Hashable, StepRun] = {}
        self.samples: dict[Hashable, Sample] = {}
        self.alike = Names()

    def follow(self, steps: Sequence[Step], fixed: Sequence[Tensor]) -> _Found:
        """Runs each kind of step once on fake tensors."""
        self.fixed = {tensor.untyped_storage()._cdata for tensor in fixed}
        for step in steps:
            self._advance(step)
            self.states.append(self.state)
            self.live.append(self._live())
        gradients = self._follow_gradients()
        places = {key: place for place, key in enumerate(self.known)}
        return _Found(
            tuple(self.known.values()),
            tuple(places[key] for key in self.keys),
            tuple(self.sizes),
            tuple(self.live),
            tuple(self.saved),
            gradients,
            tuple(self.table.specs),
        )

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
            self.known[key] = run_step(*sample[:3], self.fixed, strided=sample[3], table=self.table)
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

    def _gives(self, number: int, held: Mapping[int, GradientSpec]) -> dict[int, GradientSpec]:
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

    def _back(self, kind: NumberedSpec, names: list[int], numbers: list[int]) -> NumberedSpec:
        while kind.tensor >= len(names):
            names.append(self.tensors)
            self.tensors += 1
        return kind._replace(tensor=names[kind.tensor], storage=numbers[kind.storage])

    def _live(self) -> frozenset[int]:
        return frozenset(kind.storage for kind in self.state if kind is not None) - self.inputs

    def _input_kinds(self, inputs: State) -> StateSpec:
        storages: dict[int, int] = {}
        names: dict[int, int] = {}
        kinds: list[NumberedSpec | None] = []
        for value in inputs:
            if value is None:
                kinds.append(None)
                continue
            storage = value.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = len(self.sizes)
                self.sizes.append(storage.nbytes())
            number = names.setdefault(id(value), len(names))
            kinds.append(numbered_spec(value, number, storages[storage._cdata]))
        self.inputs = set(storages.values())
        self.tensors = len(names)
        return tuple(kinds)


def _like(device: torch.device) -> str:
    return "cpu" if device.type in ("cpu", "meta") else "a100"


def _own(kind: NumberedSpec) -> GradientSpec:
    return GradientSpec(("own", kind.tensor), kind.bytes)


def _bytes(held: Mapping[int, GradientSpec]) -> int:
    return sum({given.storage: given.bytes for given in held.values()}.values())
