"""The bytes and operations of each step of a chain, from one run on fake tensors.

A fake tensor has a shape, a dtype, a device and a storage of the right size with nothing behind it,
so a model is measured that would not fit, and the kernels chosen are those of the real device. For
a model on the meta device they are those of the CPU, since meta tensors choose others for attention
and LSTMs. Between steps not even fake tensors are kept, only their specs; so steps that do the same
to the same specs are run once.

Kernel workspaces (oneDNN's reordered tensors, cuDNN's) are not seen, unless each different kernel
also runs for real: see `kernel_costs`. The steps run in another process, or copies of them here:
see `isolation`.
"""

import contextlib
import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zoo._torch import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    fake_of,
    is_any_autocast_enabled,
    unset_fake_temporarily,
)
from zoo.chain import HOOKS, Held, NamedStep, Outline, PassThrough, State, Step
from zoo.errors import PlanError
from zoo.planner.costs import StepCosts
from zoo.profiling.caching_allocator import rounded_up
from zoo.profiling.fake_tensors import SMALL, FakeTensorFixes, copied, import_for_fakes
from zoo.profiling.isolation import Died, Raised, isolated
from zoo.profiling.kernel_costs import (
    Curve,
    Device,
    KernelCosts,
    Update,
    UpdateBytes,
    device_named,
    flop_formulas,
    measure_kernels,
)
from zoo.profiling.progress import shown
from zoo.profiling.sharded import copy_sharded, whole_parameters
from zoo.profiling.step_profile import (
    REAL,
    GradientSpec,
    Kernels,
    Outside,
    StepRun,
    Strided,
    run_step,
)
from zoo.profiling.tensor_spec import KernelSpec, NumberedSpec, StateSpec, Storages
from zoo.verification.state_comparison import BOOKKEEPING

VALUES = int | float | str | bool | None | torch.dtype


class _Use(NamedTuple):
    """The first and the last step that a parameter is of, and the bytes of its gradient.

    `made`: the first state, from the last one on, that has the gradient behind it.
    `added`: the step whose backward adds to a gradient that is a view, so not in place; -1 if none.
    `is_shared`: it comes to these steps through a node that was made before them.
    """

    first: int
    last: int
    size: int
    made: int
    added: int
    is_shared: bool

    @classmethod
    def of(cls, number: int, update: Update, before: "_Use | None", *, of_cast: bool) -> "_Use":
        """Counts a use by a step more, by the last so far."""
        first, last = (before.first, before.last) if before else (number, -1)
        made = number + (update.is_shared and update.birth < 0)
        # a gradient that was converted is no view
        is_view = update.is_view and (of_cast or not update.cast) and not update.is_shared
        size = update.cast if of_cast else update.size
        return cls(first, number, size, made, last if is_view else -1, update.is_shared)


class ChainRun(NamedTuple):
    """What the steps of a chain do, as data.

    `runs` are those of different steps, `numbers` their places in it for all steps of the chain.
    The others are as in `StepCosts`; `kernels` are the different ones, `handed` are all storages of
    each state, also those of outputs that no later step reads.
    """

    runs: tuple[StepRun, ...]
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    handed: tuple[frozenset[int], ...]
    live: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]
    gradients: tuple[int, ...]
    kernels: tuple[KernelSpec | None, ...]
    # for each step, ids of weights and the storages of their casts, which autocast caches
    casts: tuple[tuple[tuple[int, int], ...], ...]
    copied: tuple[frozenset[int], ...]
    held: tuple[frozenset[int], ...]
    # bytes of tensors that functions of the chain hold, such as a loss its targets
    outside: int


class Profile:
    """The steps of a chain for inputs like these (real, fake or meta tensors).

    Grad mode, autocast and the training flags are those of the caller. Casts of weights are counted
    as autocast caches them: made once, and held until the forward of the chain ends. A storage
    takes whole blocks of so many bytes.

    Raises:
        PlanError: a step fails, or needs numbers that a fake tensor does not have.
    """

    def __init__(self, chain: nn.Module, outline: Outline, inputs: State, block: int = 1) -> None:
        trained = {
            id(p): rounded_up(p.nbytes, block) for p in chain.parameters() if p.requires_grad
        }
        self.outline, self.gradient_bytes = outline, sum(trained.values())
        tensors = (*(value for value in inputs if value is not None), *chain.parameters())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        import_for_fakes()
        flop_formulas()
        with shown("measuring steps on fake tensors"):
            answer = isolated(functools.partial(_run_steps, chain, outline, inputs, block))
        if isinstance(answer, Raised) and answer.error is not None:
            raise answer.error
        if not isinstance(answer, ChainRun):
            raise PlanError(
                f"the steps of {type(chain).__name__} could not be measured on fake tensors "
                f"({_told(answer)}). Where the model takes these inputs, pass checkpoint= a number "
                "of segments or a Plan, which need no measuring"
            )
        self.found = answer
        self.specs = answer.kernels
        self.runs = [answer.runs[number] for number in answer.numbers]

    def kernels(self, *, timed: bool = True) -> list[KernelCosts | None]:
        """Runs each different kernel for real, alone, on the inputs' device, unless it is known."""
        return measure_kernels(self.specs, self.device, timed=timed)

    def costs(
        self,
        device: Device | None = None,
        kernels: Sequence[KernelCosts | None] = (),
        updates: UpdateBytes | None = None,
    ) -> StepCosts:
        """Puts the numbers of all steps together, with seconds and workspaces of `kernels`.

        Without these, workspaces are left out and seconds are estimates from the peak rates of
        `device`, by default one like the inputs'. With `updates`, what an optimizer allocates to
        update a parameter, it steps in the backward and frees each gradient.
        """
        found, runs = self.found, self.runs
        here = "cpu" if self.device.type in ("cpu", "meta") else "a100"
        device = device or device_named(here)

        def peaks(curves: Iterable[Curve]) -> tuple[int, ...]:
            return tuple(curve.peak(kernels) for curve in curves)

        def seconds(curves: Iterable[Curve]) -> tuple[float, ...]:
            pairs = zip(curves, runs, strict=True)
            return tuple(curve.seconds(device, run.dtype, kernels) for curve, run in pairs)

        firsts = self._first_casts
        return StepCosts(
            sizes=found.sizes,
            live=found.live,
            saved=tuple(frozenset(firsts.get(s, s) for s in saved) for saved in found.saved),
            forward=peaks(run.forward for run in runs),
            forward_until_saved=peaks(run.until_saved for run in runs),
            backward=peaks(self._backwards(updates)),
            gradients=tuple(map(operator.add, found.gradients, self._gradients_of_casts())),
            flops=tuple(run.forward.flops for run in runs),
            flops_until_saved=tuple(run.until_saved.flops for run in runs),
            seconds=seconds(run.forward for run in runs),
            seconds_until_saved=seconds(run.until_saved for run in runs),
            seconds_backward=seconds(run.backward for run in runs),
            blocks=self.outline.blocks,
            parameter_gradients=self._gradients_left(updates is not None),
            gradients_made=tuple(run.made for run in runs),
            draws=tuple(run.draws for run in runs),
            copied=found.copied if any(found.copied) else (),
            held=found.held if any(found.held) else (),
            casts=tuple(frozenset(firsts[cast] for _, cast in casts) for casts in found.casts)
            if any(found.casts)
            else (),
        )

    def _backwards(self, updates: UpdateBytes | None) -> list[Curve]:
        """Returns the curve of each step's backward, in which an optimizer may step."""
        curves = []
        for number, run in enumerate(self.runs):
            owned = [(self._owner(number, update.parameter), update) for update in run.updates]
            # a cast stays as long as an earlier step has it
            left_out = {
                cast.freed
                for cast, (_, storage) in zip(run.casts, self.found.casts[number], strict=True)
                if self._cast_savers.get(self._first_casts[storage]) != number
            }
            others = []
            for owner, update in owned:
                use, cast = self._uses[owner], self._cast_uses.get(owner)
                if cast is not None and update.cast:
                    if cast.added == number:
                        others += [(update.birth, update.cast), (update.birth, -update.cast)]
                    if cast.first != number:
                        left_out.add(update.birth)
                        continue
                    if cast.last != number:
                        # it has gone into the sum, which is then converted and freed
                        others += [(update.birth, -update.cast), (update.birth + 2, update.cast)]
                if update.is_shared and use.last != number:
                    left_out.add(update.birth)
                if use.added == number:
                    others += [(update.change, update.size), (update.change, -update.size)]
                if updates is not None and use.first == number:
                    need = updates.get((update.shape, update.dtype), 0)
                    others += [(update.change, size) for size in (need, -need, -update.freed)]
            curves.append(run.backward.without(left_out).with_changes(others))
        return curves

    def _gradients_left(self, frees: bool) -> tuple[int, ...]:
        """Returns the bytes of parameters' gradients that are there when a state is reached.

        Each step leaves its own in the backward, one that comes again its last time in the chain.
        One that several steps sum up in a buffer is there before the backward of the last of these
        where the forward made it. An optimizer in the backward `frees` each when it is complete,
        that of a weight that steps share through an earlier node at the end.
        """
        changes = [0] * (len(self.runs) + 1)
        for use in self._uses.values():
            changes[use.made] += use.size
            if frees and not use.is_shared:
                changes[use.first] -= use.size
        changes[-1] += max(self.gradient_bytes - sum(use.size for use in self._uses.values()), 0)
        left = list(itertools.accumulate(reversed(changes)))
        return tuple(min(count, self.gradient_bytes) for count in reversed(left))

    def _gradients_of_casts(self) -> list[int]:
        """Returns the bytes of the sums of gradients of casts that there are with each state.

        Steps that have the cast of a weight from autocast's cache add up its gradients as they are.
        The backward of the first of these converts the sum.
        """
        sums = [0] * (len(self.runs) + 1)
        for use in self._cast_uses.values():
            for state in range(use.first + 1, use.made + 1):
                sums[state] += use.size
        return sums

    @functools.cached_property
    def _uses(self) -> dict[int, _Use]:
        """The uses of each parameter, by its id; those of a cast are its first."""
        found: dict[int, _Use] = {}
        for number, run in enumerate(self.runs):
            for update in run.updates:
                owner = self._owner(number, update.parameter)
                if update.cast and self._cast_uses[owner].first != number:
                    continue
                found[owner] = _Use.of(number, update, found.get(owner), of_cast=False)
        return found

    @functools.cached_property
    def _cast_uses(self) -> dict[int, _Use]:
        """The uses of each parameter by casts that autocast caches, with gradients of these."""
        found: dict[int, _Use] = {}
        for number, run in enumerate(self.runs):
            for update in run.updates:
                if update.cast:
                    owner = self._owner(number, update.parameter)
                    found[owner] = _Use.of(number, update, found.get(owner), of_cast=True)
        return found

    @functools.cached_property
    def _first_casts(self) -> dict[int, int]:
        """The storages of casts, and that of the first cast of the same weight: it is cached."""
        firsts: dict[int, int] = {}
        return {
            cast: firsts.setdefault(self._owner(number, weight), cast)
            for number, casts in enumerate(self.found.casts)
            for weight, cast in casts
        }

    @functools.cached_property
    def _cast_savers(self) -> dict[int, int]:
        """The first step that saves each cast, by the storage of the first cast of the weight."""
        found: dict[int, int] = {}
        for number, casts in enumerate(self.found.casts):
            for _, storage in casts:
                if storage in self.found.saved[number]:
                    found.setdefault(self._first_casts[storage], number)
        return found

    def _owner(self, number: int, parameter: int) -> int:
        """Returns the id of a step's parameter; equal steps were measured by those of the first."""
        return self._owners[number].get(parameter, parameter)

    @functools.cached_property
    def _owners(self) -> list[dict[int, int]]:
        parameters = list(map(_parameters_of, self.outline.steps))
        measured = map(self.found.numbers.index, self.found.numbers)
        return [
            dict(zip(parameters[first], own, strict=True))
            for first, own in zip(measured, parameters, strict=True)
        ]


def _parameters_of(step: Step) -> list[int]:
    """Returns the ids of the parameters of a step's modules, in the order of its key."""
    found: list[int] = []

    def collect(module: nn.Module) -> None:
        found.extend(map(id, module.parameters()))

    step_key(step, collect)
    return found


def _told(answer: Raised | Died) -> str:
    if isinstance(answer, Raised):
        return f"{answer.kind}: {answer.text}"
    return f"the process in which they ran ended with status {answer.status}"


def _run_steps(
    chain: nn.Module, outline: Outline, inputs: State, block: int, is_apart: bool
) -> ChainRun:
    """Runs the steps on fake tensors: in a child (`is_apart`) themselves, else copies of them."""
    follower = _Follower(inputs, block)
    on_meta = any(parameter.is_meta for parameter in chain.parameters())
    with (
        contextlib.ExitStack() as restored,
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        FakeTensorFixes(mode, moves_meta=on_meta) as fixes,
    ):
        restored.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        # it would keep fake casts of real weights
        torch.set_autocast_cache_enabled(False)
        made = {id(buffer): _fake_buffer(fixes, buffer) for buffer in chain.buffers()}
        made |= whole_parameters(chain, mode)
        steps = outline.steps
        if is_apart:
            _replace(chain, made)
        else:
            steps = _copies(chain, steps, made)
        owned = [made.get(id(value), value) for value in (*chain.parameters(), *chain.buffers())]
        fakes = [v if isinstance(v, FakeTensor) else fake_of(mode, v) for v in owned]
        real = [v for v in (*inputs, *owned) if v is not None and type(v) in REAL]
        fixed = {v.untyped_storage()._cdata for v in (*fakes, *real)}
        return follower.run(steps, outline.held, fixed)


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
        copy_sharded(chain, known)
        return copy.deepcopy(tuple(steps), known)


def _fake_buffer(fixes: FakeTensorFixes, buffer: Tensor) -> Tensor:
    """Stands in for a buffer; a counter stays a number, since some layers compute with it."""
    if buffer.ndim == 0 and buffer.device.type in ("cpu", "meta"):
        with unset_fake_temporarily():
            return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.clone()
    fake: Tensor = fake_of(fixes.mode, buffer)
    if buffer.ndim == 0 and not isinstance(buffer, FakeTensor):
        fixes.know(fake, copied(buffer))
    return fake


class _Follower:
    """Follows the specs of the state through the chain and numbers storages for all steps."""

    def __init__(self, inputs: State, block: int) -> None:
        self.block = block
        self.kernels: Kernels = {}
        self.fixed: set[int] = set()
        self.outside: Outside = {}
        self.caches_casts = is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
        storages = Storages(block)
        self.state = tuple(entry and entry.on_cpu() for entry in storages.specs(inputs))
        self.sizes = storages.sizes
        self.inputs = frozenset(range(len(self.sizes)))
        self.tensors = len({entry.tensor for entry in self.state if entry is not None})
        self.states = [self.state]
        # for each step the places of the state that it reads, None for all, and what it returned
        self.reads: list[tuple[int, ...] | None] = []
        self.made: list[StateSpec] = []
        self.saved: list[frozenset[int]] = []
        self.casts: list[tuple[tuple[int, int], ...]] = []
        self.copied: list[frozenset[int]] = []
        # for each step: the tensors that it numbers from 0, and the key of its run
        self.names: list[list[int]] = []
        self.keys: list[Hashable] = []
        self.known: dict[Hashable, StepRun] = {}
        self.samples: dict[Hashable, tuple[Step, StateSpec]] = {}

    def run(self, steps: Sequence[Step], held: Sequence[Held], fixed: set[int]) -> ChainRun:
        """Runs each different step once; `fixed` are storages of parameters, buffers and inputs."""
        self.fixed = fixed
        described = functools.cache(_described)
        for step in steps:
            self._advance(step, described)
            self.states.append(self.state)
        gradients = self._gradients()
        handed = tuple(map(self._storages, self.states))
        live = self._live()
        held = held or (Held((), ()),) * len(steps)
        storages_held = tuple(
            self._held(in_forward) | (all_storages - read)
            for in_forward, all_storages, read in zip(held, handed[:-1], live[:-1], strict=True)
        )
        places = {key: place for place, key in enumerate(self.known)}
        return ChainRun(
            tuple(self.known.values()),
            tuple(places[key] for key in self.keys),
            tuple(self.sizes),
            handed,
            live,
            tuple(self.saved),
            gradients,
            tuple(spec for _, spec in self.kernels.values()),
            tuple(self.casts),
            tuple(self.copied),
            storages_held,
            sum(size for _, size in self.outside.values()),
        )

    def _advance(self, step: Step, described: Callable[[nn.Module], Hashable]) -> None:
        """Runs a step on the state, or on the part of it that the step reads, and follows."""
        given, part = self.state, getattr(step, "func", None)
        self.reads.append(part.reads if isinstance(part, PassThrough) else None)
        if isinstance(part, PassThrough):
            step = functools.partial(part.function, *cast(NamedStep, step).args)
            given = tuple(given[place] for place in part.reads)
        tensors: dict[int, int] = {}
        storages: dict[int, int] = {}
        state = tuple(entry and entry.renumbered(tensors, storages) for entry in given)
        self.keys.append((step_key(step, described), state))
        run = self._run(self.keys[-1], (step, state))
        numbers = [*storages, *range(len(self.sizes), len(self.sizes) + len(run.new_sizes))]
        names = list(tensors)
        self.names.append(names)
        self.sizes += run.new_sizes
        made = tuple(entry and self._global(entry, names, numbers) for entry in run.outputs)
        self.made.append(made)
        self.state = part.next_state(self.state, made) if isinstance(part, PassThrough) else made
        self.saved.append(frozenset(numbers[number] for number in run.saved) - self.inputs)
        self.copied.append(frozenset(numbers[number] for number in run.copied))
        self.casts.append(tuple((cast.weight, numbers[cast.storage]) for cast in run.casts))

    def _run(self, key: Hashable, sample: tuple[Step, StateSpec], strided: Strided = ()) -> StepRun:
        if key not in self.known:
            self.samples[key] = sample
            self.known[key] = run_step(
                *sample,
                strided,
                self.fixed,
                self.kernels,
                outside=self.outside,
                caches_casts=self.caches_casts,
                block=self.block,
            )
        return self.known[key]

    def _gradients(self) -> tuple[int, ...]:
        """Returns the bytes of each state's gradients, from the last state to the first.

        A step gives its inputs their gradients; an addition gives both the same tensor. Tensors
        that a step handed on keep theirs; where the step used them too, the sum is a tensor of its
        own. A step that gets gradients which are not contiguous is measured anew with such.
        """
        held = {entry.tensor: self._own(entry) for entry in self._ends()}
        found = [_bytes(held)]
        for number in reversed(range(len(self.keys))):
            gives = self._gives(number, held)
            before = {entry.tensor: entry for entry in self._trained(number)}
            after = held
            held = {tensor: after[tensor] for tensor in before if tensor in after}
            for tensor, given in gives.items():
                name = given._replace(storage=(number, given.storage))
                held[tensor] = self._own(before[tensor]) if tensor in after else name
            found.append(_bytes(held))
        return tuple(reversed(found))

    def _ends(self) -> list[NumberedSpec]:
        """Returns the outputs that a backward starts from: all, or the loss if that is the first.

        A language model that returns its loss and then its logits is trained by the loss.
        """
        outputs = self._trained(len(self.keys))
        if outputs and not outputs[0].spec.shape:
            return [entry for entry in outputs if not entry.spec.shape]
        return outputs

    def _trained(self, number: int) -> list[NumberedSpec]:
        return [entry for entry in self.states[number] if entry and entry.spec.requires_grad]

    def _gives(self, number: int, held: Mapping[int, GradientSpec]) -> dict[int, GradientSpec]:
        """Returns the gradients that a step gives when it gets these."""
        key = self.keys[number]
        strided = tuple(
            (place, held[entry.tensor]._replace(storage=None))
            for place, entry in enumerate(self.made[number])
            if entry and entry.tensor in held and held[entry.tensor].stride is not None
        )
        if strided:
            self.keys[number] = (key, strided)
            self._run(self.keys[number], self.samples[key], strided)
        gives, names = self.known[self.keys[number]].gives, self.names[number]
        return {names[tensor]: gradient for tensor, gradient in gives.items()}

    def _global(self, entry: NumberedSpec, names: list[int], numbers: list[int]) -> NumberedSpec:
        while entry.tensor >= len(names):
            names.append(self.tensors)
            self.tensors += 1
        return entry._replace(tensor=names[entry.tensor], storage=numbers[entry.storage])

    def _held(self, held: Held) -> frozenset[int]:
        """Returns the storages that a forward holds beside a state."""
        entries = (self.states[state][place] for state, place in held.tensors)
        storages = {entry.storage for entry in entries if entry is not None}
        if held.others:
            # one for them all
            storages.add(len(self.sizes))
            self.sizes.append(sum(rounded_up(size, self.block) for size in held.others))
        return frozenset(storages - self.inputs)

    def _own(self, entry: NumberedSpec) -> GradientSpec:
        """Describes a gradient that lies in a storage of its own."""
        size = math.prod(entry.spec.shape) * entry.spec.dtype.itemsize
        return GradientSpec(("own", entry.tensor), rounded_up(size, self.block))

    def _live(self) -> tuple[frozenset[int], ...]:
        """Returns for each state the storages that later steps read; of the last one, its own.

        Without those that are handed on because the chain returns them, such as a cache of keys.
        """
        read = {entry.tensor for entry in self.made[-1] if entry} if self.made else set()
        found = []
        for number in reversed(range(len(self.states))):
            state = self.states[number]
            if number < len(self.made):
                read -= {entry.tensor for entry in self.made[number] if entry}
                reads = self.reads[number]
                given = state if reads is None else [state[place] for place in reads]
                read |= {entry.tensor for entry in given if entry}
            kept = tuple(entry for entry in state if entry and entry.tensor in read)
            found.append(self._storages(kept))
        return tuple(reversed(found))

    def _storages(self, state: StateSpec) -> frozenset[int]:
        return frozenset(entry.storage for entry in state if entry is not None) - self.inputs


def _bytes(held: Mapping[int, GradientSpec]) -> int:
    return sum({given.storage: given.bytes for given in held.values()}.values())


def step_key(step: Any, described: Callable[[nn.Module], Hashable]) -> Hashable:
    """Says what a step does: its functions, bound values, and what `described` says of modules.

    With descriptions, equal keys mean equal work on equal inputs; with ids, also equal parameters.
    """
    if isinstance(step, functools.partial):
        bound = (*step.args, *step.keywords.values())
        keys = tuple(_value_key(value, described) for value in bound)
        return step_key(step.func, described), tuple(step.keywords), keys
    if isinstance(step, nn.Module):
        return None, described(step)
    owner = getattr(step, "__self__", None)
    # a function written in C has an owner, its library, and no function
    function = getattr(step, "__func__", step) if owner is not None else id(step)
    return function, _value_key(owner, described)


def _value_key(value: Any, described: Callable[[nn.Module], Hashable]) -> Hashable:
    if isinstance(value, nn.Module):
        return described(value)
    return (type(value), value) if isinstance(value, VALUES) else id(value)


def _described(module: nn.Module) -> Hashable:
    """Describes a module: its type, settings, parameters and what is inside."""
    owned = (*module._parameters.items(), *module._buffers.items())
    return (
        type(module),
        tuple((k, _setting(v)) for k, v in vars(module).items() if k not in BOOKKEEPING),
        tuple(
            (k, v if v is None else (v.shape, v.dtype, v.device, v.requires_grad)) for k, v in owned
        ),
        tuple((k, v and _described(v)) for k, v in module._modules.items()),
    )


def _setting(value: Any) -> Hashable:
    """Names an attribute of a module: what cannot be compared by value is only like itself."""
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    return value if isinstance(value, VALUES) else id(value)
