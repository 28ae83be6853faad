"""One step of a chain on fake tensors: what its forward and backward allocate, save and compute.

A dispatch mode sees every storage that an operation makes, and a weak reference sees it freed.
torch's profilers see only real memory; the formulas for operations are those of
`torch.utils.flop_counter`.
"""

import math
import weakref
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo._torch import sequence_number
from zoo.chain import Step
from zoo.engine.operands import detached
from zoo.engine.operator_effects import Effects, effects_of
from zoo.engine.recording import SMALL, KernelMode, written_by
from zoo.profiling.autograd_interpreter import HeldTensor, gradients_of
from zoo.profiling.caching_allocator import Rounding, as_requested
from zoo.profiling.fake_results import LIFT
from zoo.profiling.fake_tensors import QUESTIONS, as_data
from zoo.profiling.kernel_costs import Curve, Kernel, flop_formulas
from zoo.profiling.step_logger import (
    CONVERSION,
    FREE,
    Form,
    bytes_moved,
    form_of,
    is_cached,
)
from zoo.profiling.tensor_spec import KernelSpec, StateSpec, Storages, storages_of, tensors_in

# tensors that are neither fake nor wrappers of other tensors
REAL = (Tensor, nn.Parameter)


@dataclass
class StepContext:
    """The context that the steps of a chain share while they run."""

    rounding: Rounding = as_requested  # how the bytes of a storage are counted
    caches_casts: bool = False  # autocast holds casts of weights until the forward ends
    # storages that are not the step's, by their addresses, and the bytes to count: 0 for
    # parameters, buffers, inputs and fakes of real tensors; all for others, such as targets
    outside: dict[int, tuple[Any, int]] = field(default_factory=dict)
    # the number and the spec of each different kernel call, by the spec's repr
    kernels: dict[str, tuple[int, KernelSpec | None]] = field(default_factory=dict)

    def bytes_of(self, storage: Any) -> int:
        """Returns the bytes of a storage as they are counted."""
        return self.rounding(storage.nbytes())

    def bytes_in(self, tensor: Tensor) -> int:
        """Returns the bytes of the storages of a tensor; sparse ones have several."""
        return sum(map(self.bytes_of, storages_of(tensor)))


def key_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, of a sparse one that of its values."""
    return int(storages_of(tensor)[-1]._cdata)


class GradientSpec(NamedTuple):
    """The gradient of a tensor."""

    storage: Hashable  # a name; gradients of the same name share a storage
    bytes: int
    stride: tuple[int, ...] | None = None  # None if contiguous
    is_held: bool = False  # it is another tensor's gradient, too, so its use does not free it


# the incoming gradients that are not contiguous or held, each with its tensor's place in the state
Incoming = tuple[tuple[int, GradientSpec], ...]
# the outputs with a grad_fn, and the specs of gradients that are not contiguous or held
Ends = dict[Tensor, GradientSpec | None]
# bytes that an optimizer allocates to update a parameter
UpdateBytes = Mapping[Form, int]


class Cast(NamedTuple):
    """A cast of a weight that autocast caches."""

    weight: int  # its id
    storage: int
    freed: int  # the event of the backward that freed it; -1 if before


class Update(NamedTuple):
    """A complete gradient of a parameter, which may now be used and freed."""

    parameter: int  # its id
    form: Form
    born: int  # the event of the backward that allocated it; -1 if before
    done: int  # events of the backward until it was complete
    size: int  # bytes; 0 if it shares the storage of a later one
    # bytes of the gradient of a cast that autocast caches, which was converted to this one and
    # freed at once; 0 if there is none
    cast: int
    is_shared: bool  # other steps add to it, through an autograd node made before this step
    is_view: bool  # so autograd's first addition to it (or to the cast's) is not in place


@dataclass(frozen=True)
class StepRun:
    """What a step did. Storages are numbered: those of its inputs first, then new ones.

    `backward` counts bytes above the saved tensors and incoming gradients. Both are freed on the
    way, as autograd does: a gradient after its use, a saved tensor after its autograd node.
    Gradients of tensors that the step only passes on are not counted.
    """

    outputs: StateSpec
    new_sizes: tuple[int, ...]  # bytes of the new storages among outputs and saved tensors
    saved: frozenset[int]  # storages, without those of parameters
    forward: Curve
    until_saved: Curve  # the forward until the last tensor is saved
    backward: Curve
    gives: Mapping[int, GradientSpec]  # gradients of its inputs, by the number of the tensor
    updates: tuple[Update, ...]  # in the order in which they are complete
    # saved storages of inputs, and the event of the backward before which autograd releases each
    released: tuple[tuple[int, int], ...]
    made: int  # bytes of parameters' gradients that the forward made; the curves leave them out
    draws: int  # kernels of the forward that draw random numbers
    read: frozenset[int]  # storages of inputs that kernels of the forward read
    read_until_saved: frozenset[int]  # the same until the last tensor is saved
    written: frozenset[int]  # storages of inputs that kernels of the forward write
    # storages of inputs that a segment copies: small, without a grad_fn, read by kernels
    copied: frozenset[int]
    kept: frozenset[int]  # new storages that a segment keeps: no recomputation makes them
    casts: tuple[Cast, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor that it returned."""
        dtypes = [spec.dtype for spec in self.outputs if spec is not None]
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def run_step(step: Step, state: StateSpec, incoming: Incoming, context: StepContext) -> StepRun:
    """Runs a step, forward and backward, on a state of these specs, under a `FakeTensorMode`.

    Storages and tensors are numbered from 0 in order. New kernels, and tensors that are not the
    step's, are added to the context.
    """
    storages = Storages(context.rounding)
    leaves = storages.empty(state)
    given = len(storages.sizes)
    mode = AllocationMode(context)
    saved = _SavedTensors(storages, leaves, mode)
    start = sequence_number()
    with mode, saved_tensors_hooks(saved.pack, attrgetter("tensor")):
        value = step(*leaves)
    outputs = list(value) if isinstance(value, tuple) else [value]
    returned = storages.specs(outputs, leaves)
    kept = saved.kept | storages.numbers_of(mode.made_once) | set(map(storages.add, mode.copies))
    ends = _ends(outputs, incoming)
    held: list[Tensor] = []
    roots: list[Tensor] = [_Root.apply([*ends.values()], held, *ends)] if ends else []
    incoming_bytes = sum(
        context.rounding(output.nbytes) if gradient is None else gradient.bytes
        for output, gradient in ends.items()
    )
    casts = [(weight, storages.number(cast), mode.births_of([cast])) for weight, cast in mode.casts]
    # only their graph holds the outputs and casts from here on
    del value, outputs, ends
    mode.casts.clear()
    draws, mode.backward = mode.draws, mode.now
    end = mode.now if saved.may_change else saved.last
    # not after the backward, when addresses may be those of other storages
    pairs = [(spec, leaf) for spec, leaf in zip(state, leaves, strict=True) if spec is not None]
    reads = [(spec, leaf, mode.first_read(leaf)) for spec, leaf in pairs if leaf is not None]
    written = frozenset(spec.storage for spec, leaf, _ in reads if key_of(leaf) in mode.written)
    mode.events.append((-1, -incoming_bytes))
    with mode:
        complete = [(*found, mode.now) for found in gradients_of(roots, start)]
    inputs = {id(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad}
    trained = [found for found in complete if id(found[0]) not in inputs]
    births = mode.births_of(gradient for _, gradient, *_ in trained)
    gradients = {id(leaf): _gradient_spec(gradient, context) for leaf, gradient, *_ in complete}
    return StepRun(
        outputs=returned,
        new_sizes=tuple(storages.sizes[given:]),
        saved=frozenset(saved.numbers),
        forward=mode.curve(0, mode.backward, births),
        until_saved=mode.curve(0, end, births),
        backward=mode.curve(mode.backward),
        gives={spec.tensor: gradients[id(leaf)] for spec, leaf in pairs if id(leaf) in gradients},
        updates=_updates(trained, {weight for weight, *_ in casts}, mode),
        released=tuple((number, max(at - mode.backward, 0)) for number, at in saved.freed.items()),
        made=sum(mode.bytes_at(birth) for birth in births if birth < mode.backward),
        draws=draws,
        read=frozenset(spec.storage for spec, _, at in reads if at < mode.backward),
        read_until_saved=frozenset(spec.storage for spec, _, at in reads if at < end),
        written=written,
        copied=frozenset(
            spec.storage
            for spec, leaf, at in reads
            if not leaf.requires_grad and spec.bytes <= SMALL and at < mode.backward
        ),
        kept=frozenset(kept),
        casts=tuple(Cast(weight, storage, mode.freed(born)) for weight, storage, born in casts),
    )


def _gradient_spec(gradient: Tensor, context: StepContext) -> GradientSpec:
    is_dense = gradient.layout is not torch.strided or gradient.is_contiguous()
    return GradientSpec(
        key_of(gradient), context.bytes_in(gradient), None if is_dense else gradient.stride()
    )


def _updates(
    complete: Sequence[tuple[Tensor, Tensor, bool, int]],
    cast_weights: Container[int],
    mode: "AllocationMode",
) -> tuple[Update, ...]:
    # gradients of one storage are freed with the last of them
    last = {key_of(gradient): leaf for leaf, gradient, *_ in complete}
    updates = []
    for leaf, gradient, is_shared, moment in complete:
        key = key_of(gradient)
        born = mode.born(key)
        cast, is_view = 0, gradient._is_view()
        if born >= 0 and id(leaf) in cast_weights:
            cast, is_view = mode.converted(born) or (0, is_view)
        updates.append(
            Update(
                parameter=id(leaf),
                form=form_of(leaf),
                born=born,
                done=moment - mode.backward,
                size=mode.context.bytes_in(gradient) if last[key] is leaf else 0,
                cast=cast,
                is_shared=is_shared,
                is_view=is_view and not is_shared,
            )
        )
    return tuple(updates)


def _ends(outputs: Sequence[Tensor | None], incoming: Incoming) -> Ends:
    """Lists the outputs with a grad_fn, each once."""
    gradients = dict(incoming)
    return {
        output: gradients.get(place)
        for place, output in enumerate(outputs)
        if output is not None and output.grad_fn is not None
    }


class _Root(torch.autograd.Function):
    """A scalar whose backward gives each output a gradient that only autograd holds.

    The backward adds those that something else holds to `held`, which holds them.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[GradientSpec | None], held: list[Tensor], *outputs: Tensor
    ) -> Tensor:
        # not the outputs themselves, which only their graph holds
        forms = ((o.shape, {"dtype": o.dtype, "device": o.device}) for o in outputs)
        ctx.gradients = [(*form, spec) for form, spec in zip(forms, gradients, strict=True)]
        ctx.held = held
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        made = [_ones(*gradient) for gradient in ctx.gradients]
        pairs = zip(made, ctx.gradients, strict=True)
        ctx.held += [one for one, (*_, spec) in pairs if spec is not None and spec.is_held]
        return (None, None, *made)


def _ones(shape: torch.Size, options: dict[str, Any], gradient: GradientSpec | None) -> Tensor:
    if gradient is None or gradient.stride is None:
        return as_data(torch.ones(shape, **options))
    numbers = as_data(torch.ones(gradient.bytes // options["dtype"].itemsize, **options))
    return numbers.as_strided(shape, gradient.stride)


class _SavedTensors:
    """Records the storages, except parameters', that autograd saves in a step's forward.

    A recomputation may stop after `last` events, when the last of them is saved, unless that one
    `may_change`: its operation may be about to write it, as dropout writes its mask.
    """

    def __init__(
        self, storages: Storages, leaves: Sequence[Tensor | None], mode: "AllocationMode"
    ) -> None:
        self.storages, self.mode = storages, mode
        self.numbers: set[int] = set()
        self.kept: set[int] = set()
        self.freed: dict[int, int] = {}  # when autograd released a storage of an input
        self.last = 0
        self.may_change = False
        self._inputs = frozenset(map(id, leaves))
        self._given = len(storages.sizes)
        self._writer = 0

    def pack(self, tensor: Tensor) -> HeldTensor:
        """Records a saved tensor; holds one without a reference cycle through its own grad_fn."""
        saved = HeldTensor(tensor if tensor.is_leaf else detached(tensor))
        key = key_of(tensor)
        is_outside = key in self.mode.context.outside
        if tensor.grad_fn is not None:
            self.may_change &= tensor.grad_fn._sequence_nr() < self._writer
        elif not (is_outside or tensor.requires_grad or id(tensor) in self._inputs):
            self.may_change, self._writer = True, sequence_number() - 1
        if not (is_outside or isinstance(tensor, nn.Parameter)):
            number = self.storages.number(tensor)
            self.numbers.add(number)
            if key in self.mode.blank:
                # and a copy, since its kernel, which is about to write it, may read it first
                self.kept |= {number, self.storages.add(self.storages.sizes[number])}
            self.last = self.mode.now
            if number < self._given:
                saved.on_release = finalizer = weakref.finalize(saved, self._release, number)
                finalizer.atexit = False
        return saved

    def _release(self, number: int) -> None:
        self.freed[number] = self.mode.now


class AllocationMode(KernelMode):
    """Records allocations, frees and kernels as events, in their order.

    An allocation or free is a pair: the index of the event that allocated the storage (-1 for
    none), and its bytes, negative for a free.
    """

    supports_higher_order_operators = False

    def __init__(self, context: StepContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.context = context
        self.events: list[tuple[int, int] | Kernel] = []
        self.backward = 0  # the index of its first event
        self.draws = 0
        # the first event of a kernel that was given a storage, by its address
        self._reads: dict[int, int] = {}
        self.written: set[int] = set()  # addresses of storages
        self.blank: set[int] = set()  # of storages that were made and not written yet
        # storages of what operators made that run once under every plan
        self.made_once: weakref.WeakSet[Any] = weakref.WeakSet()
        # bytes of what a segment copies before a kernel writes it, as a dropout its state
        self.copies: list[int] = []
        self.casts: list[tuple[int, Tensor]] = []  # ids of weights, and their cached casts
        self._births: dict[int, int] = {}
        # whether the source of a conversion was a view, by the event that allocated the result
        self._conversions: dict[int, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        inputs, outside = tensors_in((args, kwargs)), self.context.outside
        effects = effects_of(func)
        is_kept = effects.keeps_results(args, kwargs)
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        given = {storage._cdata for tensor in inputs for storage in storages_of(tensor)}
        for tensor in inputs:
            # the code itself makes the data of `torch.tensor`
            if type(tensor) in REAL and func is not LIFT:
                for storage in storages_of(tensor):
                    outside.setdefault(storage._cdata, (storage, self.context.bytes_of(storage)))
        starts_kernel = not (func.is_view or func in FREE)
        # before it runs, since it may change its arguments in place
        number = self._number(func, args, kwargs) if starts_kernel else 0
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if func is CONVERSION:
            self._conversions[self.now] = args[0]._is_view()
        # a view of a fake tensor that stands in for the real one
        is_outside = func.is_view and not outside.keys().isdisjoint(given)
        for storage in (storage for tensor in outputs for storage in storages_of(tensor)):
            if is_outside:
                outside.setdefault(storage._cdata, (storage, 0))
            elif storage._cdata not in given:
                self._note(storage, effects, is_kept)
        written = written_by(effects, args, kwargs)
        addresses = {storage._cdata for tensor in written for storage in storages_of(tensor)}
        if is_kept:
            # what it wrote was made otherwise, and no recomputation makes it so
            self.made_once.update(one for tensor in written for one in storages_of(tensor))
        self.blank -= addresses
        self.written |= addresses
        if self.context.caches_casts and is_cached(func, args, result):
            self.casts.append((id(args[0]), result))
        if starts_kernel:
            self._reads |= dict.fromkeys(given - self._reads.keys(), self.now)
            count = flop_formulas().get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=result) if count is not None else 0
            moved = sum(bytes_moved(tensor) for tensor in (*inputs, *outputs))
            states = written if effects.dropping is not None else ()
            copies = list(map(self.context.bytes_in, states))
            self.copies += copies
            # a recomputation writes a copy of the copy
            self.events += [(-1, size) for size in copies]
            self.events.append(Kernel(number, flops, moved))
            self.events += [(-1, -size) for size in copies]
        return result

    def _number(self, func: Any, args: Any, kwargs: Any) -> int:
        spec, known = KernelSpec.of(func, args, kwargs), self.context.kernels
        return known.setdefault(repr(spec), (len(known), spec))[0]

    def _note(self, storage: Any, effects: Effects, is_kept: bool) -> None:
        key = storage._cdata
        if key not in self._births and key not in self.context.outside:
            birth = self._births[key] = self.now
            size = self.context.bytes_of(storage)
            self.events.append((birth, size))
            weakref.finalize(storage, self._free, key, size).atexit = False
            if is_kept:
                self.made_once.add(storage)
            if effects.empty:
                self.blank.add(key)

    def _free(self, key: int, size: int) -> None:
        self.blank.discard(key)
        self.events.append((self._births.pop(key), -size))

    @property
    def now(self) -> int:
        """The number of events so far."""
        return len(self.events)

    def curve(self, start: int = 0, end: int | None = None, left_out: Container[int] = ()) -> Curve:
        """Returns the events between two indices, as if some storages had no bytes."""
        events = self.events[start:end]
        return Curve(
            tuple(
                event if isinstance(event, Kernel) else 0 if event[0] in left_out else event[1]
                for event in events
            )
        )

    def first_read(self, tensor: Tensor) -> float:
        """Returns the event of the first kernel that was given a tensor's storage, or infinity."""
        addresses = (storage._cdata for storage in storages_of(tensor))
        return min((self._reads.get(one, math.inf) for one in addresses), default=math.inf)

    def bytes_at(self, place: int) -> int:
        """Returns the bytes that an event allocated (below 0: freed); 0 for a kernel."""
        event = self.events[place] if place < self.now else (-1, 0)
        return 0 if isinstance(event, Kernel) else event[1]

    def born(self, key: int) -> int:
        """Returns the event of the backward that allocated a storage; -1 if it is older."""
        return max(self._births.get(key, -1) - self.backward, -1)

    def freed(self, births: Container[int]) -> int:
        """Returns the event of the backward that freed what these events allocated; -1 if none."""
        later = enumerate(self.events[self.backward :])
        return next((n for n, e in later if not isinstance(e, Kernel) and e[0] in births), -1)

    def converted(self, born: int) -> tuple[int, bool] | None:
        """Returns the source bytes of a conversion in the backward, and whether it was a view.

        None if the event is no conversion, or if the source was not freed after that kernel.
        """
        place = self.backward + born
        is_view, size = self._conversions.get(place), self.bytes_at(place + 2)
        return None if is_view is None or size >= 0 else (-size, is_view)

    def births_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Returns the events that allocated the storages of tensors."""
        storages = {storage._cdata for tensor in tensors for storage in storages_of(tensor)}
        return {self._births[storage] for storage in storages if storage in self._births}
