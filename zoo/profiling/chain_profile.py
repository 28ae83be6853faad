"""The bytes and operations of each step of a chain, from one run on fake tensors.

A fake tensor has a shape, a dtype, a device and a storage of the right size, but no data. So a
model that would not fit can be measured, and the kernels are those of the real device. A model on
the meta device is measured with the CPU's kernels, since meta tensors choose others for attention
and LSTMs. Between steps only the specs of tensors are kept; so steps that do the same to the same
specs are run once.

Kernel workspaces (oneDNN's reordered tensors, cuDNN's) are invisible, unless each different kernel
also runs for real: see `kernel_costs`. The steps run in a forked process, or copies of them in this
one: see `isolation`.
"""

import contextlib
import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo._torch import (
    DisableTorchDispatch,
    EnableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    fake_of,
    is_any_autocast_enabled,
    unset_fake_temporarily,
)
from zoo.chain import HOOKS, Outline, State, Step
from zoo.engine.operator_effects import CONSTANTS
from zoo.engine.sharded import copy_sharded, is_spread, whole_parameters
from zoo.errors import PlanError, ZooError
from zoo.planner.costs import StepCosts
from zoo.profiling.caching_allocator import Rounding, as_requested
from zoo.profiling.chain_step_profile import (
    REAL,
    GradientSpec,
    Incoming,
    StepContext,
    StepRun,
    Update,
    UpdateBytes,
    run_step,
)
from zoo.profiling.fake_tensors import (
    SMALL,
    FakeTensorFixes,
    copied,
    is_of_fakes,
    put_tensors,
)
from zoo.profiling.isolation import import_for_fakes, isolated
from zoo.profiling.kernel_costs import (
    DEVICES,
    Curve,
    Device,
    KernelCosts,
    held_by_libraries,
    measure_kernels,
)
from zoo.profiling.progress import shown
from zoo.profiling.source_location import line_of_traceback
from zoo.profiling.tensor_spec import KernelSpec, StateSpec, Storages, TensorSpec, storages_of
from zoo.verification.state_comparison import BOOKKEEPING


class StepError(PlanError):
    """Says that a step of a chain raised an error of its own, which it may do in training, too."""


class _Use(NamedTuple):
    """The steps whose backwards add to one gradient, of a parameter or of its cast."""

    steps: tuple[int, ...] = ()
    size: int = 0
    made: int = 0  # the backward has made the gradient when it comes to this state
    added: int = -1  # the step whose backward adds to a view, so not in place; -1 if none
    is_shared: bool = False

    def followed_by(self, number: int, update: Update) -> "_Use":
        """Adds a use by a later step."""
        made = number + (update.is_shared and update.born < 0)
        added = self.steps[-1] if self.steps and update.is_view else -1
        return _Use((*self.steps, number), update.size, made, added, update.is_shared)


class ChainRun(NamedTuple):
    """What the steps of a chain do, as data; fields without a comment are as in `StepCosts`."""

    runs: tuple[StepRun, ...]  # of each step; equal steps share one
    owners: tuple[dict[int, int], ...]  # ids of a step's parameters, by those of the step that ran
    sizes: tuple[int, ...]
    handed: tuple[frozenset[int], ...]  # storages of each state, including those that no step reads
    live: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]
    gradients: tuple[int, ...]
    kernels: tuple[KernelSpec | None, ...]  # the different ones
    casts: tuple[tuple[int, ...], ...]  # storages of each run's casts; all of a weight share one
    reads: tuple[frozenset[int], ...]
    reads_until_saved: tuple[frozenset[int], ...]
    writes: tuple[frozenset[int], ...]
    copied: tuple[frozenset[int], ...]
    kept: tuple[frozenset[int], ...]
    held: tuple[frozenset[int], ...]
    # of each step the events of its backward before which inputs are released, and their bytes
    released: tuple[tuple[tuple[int, int], ...], ...]
    sums: tuple[int, ...]  # bytes of the largest sum with a gradient that a step's backward makes
    outside: int  # bytes of tensors that the steps' functions hold, such as the targets of a loss


class Profile:
    """The profile of a chain's steps for inputs like these (real, fake or meta tensors).

    Grad mode, autocast and the training flags are those of the caller. Casts of weights are counted
    as autocast caches them: made once, and held until the forward of the chain ends. Storages are
    counted by `rounding`.

    Raises:
        PlanError: a step fails, or needs numbers that a fake tensor does not have.
    """

    def __init__(
        self,
        chain: nn.Module,
        outline: Outline,
        inputs: State,
        rounding: Rounding = as_requested,
        *,
        has_loss: bool = False,
    ) -> None:
        trained = (p for p in chain.parameters() if p.requires_grad)
        self.gradient_bytes = sum(rounding(p.nbytes) for p in trained)
        self.blocks = outline.blocks
        tensors = (*(value for value in inputs if value is not None), *chain.parameters())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        import_for_fakes()
        with shown("measuring steps on fake tensors"):
            found: ChainRun = isolated(
                functools.partial(_run_steps, chain, outline, inputs, rounding),
                lambda text: PlanError(_unmeasured(chain, text)),
            )
        self.found, self.runs, self.specs = found, found.runs, found.kernels
        self.constants, self.is_trained = found.outside, bool(found.gradients[-1])
        # what a training loop's variables hold: outputs of the chain, and the loss
        last = len(outline.steps) - has_loss
        self.returned = found.handed[last] | found.handed[-1]

    def kernels(self, *, timed: bool = True) -> list[KernelCosts | None]:
        """Runs each different kernel for real, alone, on the inputs' device, unless it is known."""
        return measure_kernels(self.specs, self.device, timed=timed)

    def costs(
        self,
        device: Device | None = None,
        kernels: Sequence[KernelCosts | None] = (),
        updates: UpdateBytes | None = None,
    ) -> StepCosts:
        """Returns the costs of all steps, with the seconds and workspaces of `kernels`.

        Without `kernels`, workspaces are left out and seconds are estimated from the peak rates of
        `device`, by default one like the inputs'. `updates` are the bytes that an optimizer
        allocates to update a parameter; with them, the optimizer steps in the backward and frees
        each gradient.
        """
        found, runs, device = self.found, self.runs, device or device_like(self.device)

        def peaks(curves: Iterable[Curve]) -> tuple[int, ...]:
            return tuple(curve.peak(kernels) for curve in curves)

        def seconds(curves: Iterable[Curve]) -> tuple[float, ...]:
            pairs = zip(curves, runs, strict=True)
            return tuple(curve.seconds(device, run.dtype, kernels) for curve, run in pairs)

        uses, uses_of_casts = self._uses
        of_parameters = self._gradients(uses, frees=updates is not None)
        # gradients of parameters that no step uses count all the time
        others = max(self.gradient_bytes - sum(use.size for use in uses.values()), 0)
        of_casts = self._gradients(uses_of_casts, frees=True)
        return StepCosts(
            sizes=found.sizes,
            live=found.live,
            saved=found.saved,
            forward=peaks(run.forward for run in runs),
            forward_until_saved=peaks(run.until_saved for run in runs),
            backward=peaks(self._backwards(updates)),
            backward_alone=peaks(self._backwards(updates, releases=True)),
            gradients=tuple(map(operator.add, found.gradients, of_casts)),
            flops=tuple(run.forward.flops for run in runs),
            flops_until_saved=tuple(run.until_saved.flops for run in runs),
            seconds=seconds(run.forward for run in runs),
            seconds_until_saved=seconds(run.until_saved for run in runs),
            seconds_backward=seconds(run.backward for run in runs),
            blocks=self.blocks,
            parameter_gradients=tuple(
                min(size + others, self.gradient_bytes) for size in of_parameters
            ),
            gradients_made=tuple(run.made for run in runs),
            draws=tuple(run.draws for run in runs),
            reads=found.reads,
            reads_until_saved=found.reads_until_saved,
            writes=found.writes if any(found.writes) else (),
            copied=found.copied if any(found.copied) else (),
            kept=found.kept if any(found.kept) else (),
            held=found.held if any(found.held) else (),
            casts=tuple(map(frozenset, found.casts)) if any(found.casts) else (),
        )

    def held_by_libraries(
        self, device: Device | None = None, kernels: Sequence[KernelCosts | None] = ()
    ) -> int:
        """Returns the bytes that libraries hold beside a step; arguments are those of `costs`."""
        return held_by_libraries(self.specs, device or device_like(self.device), kernels)

    def _backwards(self, updates: UpdateBytes | None, *, releases: bool = False) -> list[Curve]:
        """Returns the curve of each step's backward, in which an optimizer may step.

        With `releases` only autograd holds the inputs that the step saved.
        """
        all_uses, all_uses_of_casts = self._uses
        first_saved: dict[int, int] = {}
        for number in reversed(range(len(self.runs))):
            first_saved.update(dict.fromkeys(self.found.saved[number], number))
        curves = []
        for number, (run, size) in enumerate(zip(self.runs, self.found.sums, strict=True)):
            # a cast that an earlier step saves, too, is not freed here
            casts = zip(run.casts, self.found.casts[number], strict=True)
            left_out = {c.freed for c, storage in casts if first_saved.get(storage) != number}
            end = len(run.backward.events)
            others = [*self.found.released[number]] if releases else []
            others += [(end, size), (end, -size)]
            for update in run.updates:
                owner = self._owner(number, update)
                use, of_cast = all_uses[owner], all_uses_of_casts.get(owner)
                if of_cast is not None and update.cast:
                    if of_cast.added == number:
                        others += [(update.born, update.cast), (update.born, -update.cast)]
                    if of_cast.steps[0] != number:
                        left_out.add(update.born)
                        continue
                    if of_cast.steps[-1] != number:
                        # it went into the sum, which is freed after the kernel that converts it
                        others += [(update.born, -update.cast), (update.born + 3, update.cast)]
                if update.is_shared and use.steps[-1] != number:
                    left_out.add(update.born)
                if use.added == number:
                    others += [(update.done, update.size), (update.done, -update.size)]
                if updates is not None and use.steps[0] == number:
                    need = updates.get(update.form, 0)
                    freed = update.size if update.born >= 0 and not update.is_shared else 0
                    others += [(update.done, size) for size in (need, -need, -freed)]
            curves.append(run.backward.edited(left_out, others))
        return curves

    def _gradients(self, uses: Mapping[int, _Use], *, frees: bool) -> list[int]:
        """Returns the bytes of gradients that exist when the backward reaches each state.

        A gradient that several steps add to in a buffer exists before the backward of the last of
        them if the forward made the buffer. With `frees`, each gradient is freed when it is
        complete, as by an optimizer in the backward; except that of a weight that steps share
        through an earlier autograd node.
        """
        changes = [0] * (len(self.runs) + 1)
        for use in uses.values():
            changes[use.made] += use.size
            if frees and not use.is_shared:
                changes[use.steps[0]] -= use.size
        return list(itertools.accumulate(reversed(changes)))[::-1]

    @functools.cached_property
    def _uses(self) -> tuple[dict[int, _Use], dict[int, _Use]]:
        """The uses of each parameter, by its id, and the uses of its cast that autocast caches.

        The steps that use a weight's cast add up gradients of the cast. Only the backward of the
        first of these steps converts the sum to a gradient of the weight.
        """
        uses: dict[int, _Use] = {}
        casts: dict[int, _Use] = {}
        for number, run in enumerate(self.runs):
            for update in run.updates:
                owner = self._owner(number, update)
                # what was converted is no view
                own = update._replace(is_view=update.is_view and not update.cast)
                if update.cast:
                    of_cast = update._replace(size=update.cast, is_shared=False)
                    casts[owner] = casts.get(owner, _Use()).followed_by(number, of_cast)
                if not update.cast or casts[owner].steps == (number,):
                    uses[owner] = uses.get(owner, _Use()).followed_by(number, own)
        return uses, casts

    def _owner(self, number: int, update: Update) -> int:
        return self.found.owners[number].get(update.parameter, update.parameter)


def device_like(device: torch.device) -> Device:
    """Returns a device of the table that is like one of torch's."""
    like = DEVICES["small-cpu" if device.type in ("cpu", "meta") else "a100"]
    # cuBLAS holds workspaces on CUDA alone
    return like if device.type == "cuda" else replace(like, workspace=0)


def _unmeasured(chain: nn.Module, text: str) -> str:
    return (
        f"the chain of {type(chain).__name__} could not be measured on fake tensors ({text}). "
        "Where the model takes these inputs, pass checkpoint= a number of segments or a Plan, "
        "which need no measuring"
    )


def _run_steps(
    chain: nn.Module, outline: Outline, inputs: State, rounding: Rounding, is_apart: bool
) -> ChainRun:
    """Runs the steps on fake tensors in a forked process (`is_apart`), else copies of the steps."""
    caches_casts = is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
    propagation = _SpecPropagation(inputs, StepContext(rounding, caches_casts))
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
        made |= _recurrent_parameters(chain, mode) | whole_parameters(chain, mode)
        steps = outline.steps
        if is_apart:
            put_tensors(chain, made)
            for module in chain.modules():
                vars(module).update({name: {} for name in HOOKS})
        else:
            steps = _copies(chain, steps, made)
        owned = [made.get(id(value), value) for value in (*chain.parameters(), *chain.buffers())]
        fakes = [v if isinstance(v, FakeTensor) else fake_of(mode, v) for v in owned]
        real = [v for v in (*inputs, *owned) if v is not None and type(v) in REAL]
        for storage in itertools.chain(*map(storages_of, (*fakes, *real))):
            propagation.context.outside[storage._cdata] = storage, 0
        # the steps are user code and may need the user's function modes
        with EnableTorchFunction():
            try:
                return propagation.run(steps)
            except Exception as error:
                if isinstance(error, ZooError):
                    raise
                line = line_of_traceback(error)
                at = f"{line}: " if line else ""
                kind = PlanError if is_of_fakes(error) else StepError
                text = f"{at}{type(error).__name__}: {error}"
                raise kind(_unmeasured(chain, text)) from error


def _copies(
    chain: nn.Module, steps: Sequence[Step], made: Mapping[int, Tensor]
) -> tuple[Step, ...]:
    """Copies steps and their modules, without hooks and without large or trained parameters."""
    known: dict[int, Any] = {
        id(parameter): parameter
        for parameter in chain.parameters()
        # a small frozen one is copied, since a step may write it
        if parameter.requires_grad or parameter.nbytes > SMALL
    }
    known |= made
    for module in chain.modules():
        known |= {id(getattr(module, name)): {} for name in HOOKS}
        known[id(getattr(module, "runner", None))] = None
    with disable_current_modes():
        copy_sharded(chain, known)
        return copy.deepcopy(tuple(steps), known)


def _recurrent_parameters(chain: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Returns fakes for the LSTMs' and GRUs' parameters that are not on the CPU, by id.

    Their operators compare devices before anything is dispatched, where tensors on the meta device
    are moved, and on CUDA addresses: those of weights that lie in one storage, as fakes of them do.
    Other parameters stay, since a step may hold one itself and is identified by it.
    """
    layers = (module for module in chain.modules() if isinstance(module, nn.RNNBase))
    weights = [p for layer in layers for p in layer.parameters() if not (p.is_cpu or is_spread(p))]
    return {id(p): nn.Parameter(fake_of(mode, p.detach()), p.requires_grad) for p in weights}


def _fake_buffer(fixes: FakeTensorFixes, buffer: Tensor) -> Tensor:
    """Returns a fake of a buffer; a counter keeps its value, since some layers compute with it."""
    if buffer.ndim == 0 and buffer.device.type in ("cpu", "meta"):
        with unset_fake_temporarily():
            return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.clone()
    fake: Tensor = fake_of(fixes.mode, buffer)
    if buffer.ndim == 0 and not isinstance(buffer, FakeTensor):
        fixes.know(fake, copied(buffer))
    return fake


@dataclass
class _ChainStep:
    """A step in the chain, and how the tensors and storages of its run are numbered there."""

    key: tuple[Hashable, StateSpec]  # its `step_key` and its inputs, numbered from 0
    given: StateSpec
    made: StateSpec
    run: StepRun
    tensors: list[int]  # numbers in the chain, by those in the run
    storages: list[int]
    owners: dict[int, int]
    sum: int = 0  # bytes of the largest sum with a gradient of an input that its backward makes

    def numbers(self, storages: Iterable[int]) -> frozenset[int]:
        """Returns the numbers of the run's storages in the chain."""
        return frozenset(map(self.storages.__getitem__, storages))


class _SpecPropagation:
    """Propagates the specs of the state through a chain, like shape propagation.

    Between steps tensors and storages are only numbers.
    """

    def __init__(self, inputs: State, context: StepContext) -> None:
        self.context = context
        storages = Storages(context.rounding)
        self.states = [tuple(spec and spec.on_cpu() for spec in storages.specs(inputs))]
        self.sizes = storages.sizes
        self.inputs = frozenset(range(len(self.sizes)))
        self.tensors = len({spec.tensor for spec in self.states[0] if spec is not None})
        self.steps: list[_ChainStep] = []
        self.known: dict[Hashable, StepRun] = {}
        # the first step of each key, and the ids of its parameters
        self.samples: dict[Hashable, tuple[Step, list[int]]] = {}
        self.casts: dict[int, int] = {}  # the storage of a weight's first cast, by the weight's id

    def run(self, steps: Sequence[Step]) -> ChainRun:
        """Runs each different step once."""
        described = functools.cache(_described)
        for step in steps:
            self._advance(step, described)
        gradients, live = self._gradients(), self._live()
        handed = tuple(map(self._storages, self.states))
        ran = self.steps
        return ChainRun(
            runs=tuple(step.run for step in ran),
            owners=tuple(step.owners for step in ran),
            handed=handed,
            live=live,
            saved=tuple(step.numbers(step.run.saved) - self.inputs for step in ran),
            gradients=gradients,
            kernels=tuple(spec for _, spec in self.context.kernels.values()),
            casts=tuple(
                tuple(step.storages[cast.storage] for cast in step.run.casts) for step in ran
            ),
            reads=tuple(step.numbers(step.run.read) for step in ran),
            reads_until_saved=tuple(step.numbers(step.run.read_until_saved) for step in ran),
            writes=tuple(step.numbers(step.run.written) for step in ran),
            copied=tuple(step.numbers(step.run.copied) for step in ran),
            kept=tuple(step.numbers(step.run.kept) for step in ran),
            held=tuple(map(operator.sub, handed[:-1], live[:-1])),
            released=tuple(map(self._released, ran)),
            sums=tuple(step.sum for step in ran),
            sizes=tuple(self.sizes),
            outside=sum(size for _, size in self.context.outside.values()),
        )

    def _advance(self, step: Step, described: Callable[[nn.Module], Hashable]) -> None:
        """Runs a step on the part of the state that it reads, and appends the next state."""
        given = self.states[-1]
        tensors: dict[int, int] = {}
        storages: dict[int, int] = {}
        state = tuple(spec and spec.renumbered(tensors, storages) for spec in given)
        parameters, firsts = _parameters_of(step), dict[int, int]()
        # equal steps share parameters among their modules in the same way
        sharing = tuple(firsts.setdefault(one, len(firsts)) for one in parameters)
        key = (step_key(step, described), sharing), state
        _, measured = self.samples.setdefault(key, (step, parameters))
        owners = dict(zip(measured, parameters, strict=True))
        run = self._run(key)
        numbers = [*storages, *range(len(self.sizes), len(self.sizes) + len(run.new_sizes))]
        self.sizes += run.new_sizes
        for one in run.casts:
            owner = owners.get(one.weight, one.weight)
            numbers[one.storage] = self.casts.setdefault(owner, numbers[one.storage])
        new = range(len(tensors), 1 + max((s.tensor for s in run.outputs if s), default=-1))
        names = [*tensors, *(self.tensors + n for n in range(len(new)))]
        self.tensors += len(new)
        made = tuple(
            spec and spec._replace(tensor=names[spec.tensor], storage=numbers[spec.storage])
            for spec in run.outputs
        )
        self.steps.append(_ChainStep(key, given, made, run, names, numbers, owners))
        self.states.append(made)

    def _run(self, key: tuple[Hashable, StateSpec], incoming: Incoming = ()) -> StepRun:
        if (key, incoming) not in self.known:
            step, _ = self.samples[key]
            self.known[key, incoming] = run_step(step, key[1], incoming, self.context)
        return self.known[key, incoming]

    def _gradients(self) -> tuple[int, ...]:
        """Returns the bytes of each state's gradients.

        A step's backward makes the gradients of its inputs; an addition gives both inputs the same
        tensor. Tensors that a step passes on keep their gradients; where the step also used one,
        the sum is a new tensor, and there for a moment beside both. A step is measured again with
        its incoming gradients if one is not contiguous, or is the gradient of another tensor, too.
        """
        outputs = self._trained(-1)
        # a language model that returns its loss and then its logits is trained with the loss
        is_loss = bool(outputs) and not outputs[0].shape
        held = {s.tensor: self._own(s) for s in outputs if not (is_loss and s.shape)}
        found = [held]
        for number, step in reversed([*enumerate(self.steps)]):
            self._measure_again(step, held)
            before = {spec.tensor: spec for spec in self._trained(number)}
            after = held
            held = {tensor: after[tensor] for tensor in before if tensor in after}
            for local, given in step.run.gives.items():
                tensor, name = step.tensors[local], (number, given.storage)
                held[tensor] = given._replace(storage=name)
                if tensor in after:
                    held[tensor] = self._sum(before[tensor], after[tensor], given)
                    step.sum = max(step.sum, held[tensor].bytes)
            found.append(held)
        storages = ({given.storage: given.bytes for given in held.values()} for held in found)
        return tuple(sum(sizes.values()) for sizes in storages)[::-1]

    def _trained(self, number: int) -> list[TensorSpec]:
        return [spec for spec in self.states[number] if spec and spec.requires_grad]

    def _measure_again(self, step: _ChainStep, held: Mapping[int, GradientSpec]) -> None:
        """Runs a step again whose incoming gradients are no contiguous tensors of their own.

        Some are held elsewhere, some in more memory than they need: `col2im` returns a tensor in
        memory of the size of the columns.
        """
        given = {spec.tensor for spec in step.given if spec}
        made = {spec.tensor for spec in step.made if spec} - given
        others = {found.storage for tensor, found in held.items() if tensor not in made}
        gradients = (
            (output, self._alone(spec, held[spec.tensor]))
            for output, spec in enumerate(step.made)
            if spec and spec.tensor in made and spec.tensor in held
        )
        incoming = tuple(
            (output, found._replace(storage=None, is_held=found.storage in others))
            for output, found in gradients
            if found.stride is not None or found.storage in others
        )
        if incoming:
            step.run = self._run(step.key, incoming)

    def _alone(self, spec: TensorSpec, gradient: GradientSpec) -> GradientSpec:
        """Returns a gradient with its strides if it is a part of its memory."""
        if gradient.stride is not None or gradient.bytes <= self._own(spec).bytes:
            return gradient
        with DisableTorchDispatch():
            return gradient._replace(stride=torch.empty(spec.shape, device="meta").stride())

    def _released(self, step: _ChainStep) -> tuple[tuple[int, int], ...]:
        """Returns when the backward of a step releases inputs that it saved, and their bytes."""
        released = ((step.storages[number], event) for number, event in step.run.released)
        return tuple((event, -self.sizes[n]) for n, event in released if n not in self.inputs)

    def _own(self, spec: TensorSpec) -> GradientSpec:
        """Returns the spec of a gradient in a storage of its own."""
        size = math.prod(spec.shape) * spec.dtype.itemsize
        return GradientSpec(("own", spec.tensor), self.context.rounding(size))

    def _sum(self, spec: TensorSpec, *gradients: GradientSpec) -> GradientSpec:
        """Returns the spec of the sum of two gradients of a tensor: the first one tells the layout.

        The kernels before it copy where a gradient has another layout than what they saved.
        """
        with DisableTorchDispatch():
            dense = torch.empty(spec.shape, device="meta")
            strides = (dense.stride() if one.stride is None else one.stride for one in gradients)
            parts = [torch.empty_strided(spec.shape, one, device="meta") for one in strides]
            found = functools.reduce(operator.add, parts)
        stride = None if found.is_contiguous() else found.stride()
        return self._own(spec)._replace(stride=stride)

    def _live(self) -> tuple[frozenset[int], ...]:
        """Returns for each state the storages that later steps read; for the last one, its own.

        Without those that are only passed on since the chain returns them, such as a cache of keys.
        """
        read = {spec.tensor for spec in self.steps[-1].made if spec} if self.steps else set()
        found = [self._storages(self.states[-1], read)]
        for step, state in zip(reversed(self.steps), reversed(self.states[:-1]), strict=True):
            read -= {spec.tensor for spec in step.made if spec}
            read |= {spec.tensor for spec in step.given if spec}
            found.append(self._storages(state, read))
        return tuple(reversed(found))

    def _storages(self, state: StateSpec, tensors: Container[int] | None = None) -> frozenset[int]:
        specs = [spec for spec in state if spec and (tensors is None or spec.tensor in tensors)]
        return frozenset(spec.storage for spec in specs) - self.inputs


def _parameters_of(step: Step) -> list[int]:
    """Returns the ids of the parameters of a step's modules, in the order of its key."""
    modules: list[nn.Module] = []
    step_key(step, modules.append)
    named = (module.named_parameters(remove_duplicate=False) for module in modules)
    return [id(parameter) for _, parameter in itertools.chain.from_iterable(named)]


def step_key(step: Any, described: Callable[[nn.Module], Hashable]) -> Hashable:
    """Identifies what a step does: its functions, bound values, and `described` of its modules.

    If `described` returns descriptions, equal keys mean equal work on equal inputs; if it returns
    ids, also the same parameters.
    """
    if isinstance(step, functools.partial):
        bound = _value_key((*step.args, *step.keywords.values()), described)
        return step_key(step.func, described), tuple(step.keywords), bound
    if isinstance(step, nn.Module):
        return None, described(step)
    owner = getattr(step, "__self__", None)
    # the `__self__` of a function written in C is its library, and it has no `__func__`
    function = getattr(step, "__func__", step) if owner is not None else id(step)
    return function, _value_key(owner, described)


def _value_key(value: Any, described: Callable[[nn.Module], Hashable]) -> Hashable:
    """Returns a key for a value: its id where it cannot be compared by value."""
    if isinstance(value, nn.Module):
        return described(value)
    if isinstance(value, tuple | list):
        return tuple(_value_key(part, described) for part in value)
    return (type(value), value) if isinstance(value, CONSTANTS) else id(value)


def _described(module: nn.Module) -> Hashable:
    """Describes a module: its type, settings, parameters and submodules."""
    owned = (*module._parameters.items(), *module._buffers.items())
    settings = ((name, v) for name, v in vars(module).items() if name not in BOOKKEEPING)
    return (
        type(module),
        tuple((name, _value_key(value, id)) for name, value in settings),
        tuple(
            (name, v if v is None else (v.shape, v.dtype, v.device, v.requires_grad))
            for name, v in owned
        ),
        tuple((name, part and _described(part)) for name, part in module._modules.items()),
    )
