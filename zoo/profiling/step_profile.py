"""One step on fake tensors: what its forward and its backward allocate, save and compute.

A dispatch mode sees every storage that an operation makes, and a weak reference sees it freed.
torch's profilers see only real memory; the formulas for operations are those of
`torch.utils.flop_counter`.
"""

import weakref
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo._torch import sequence_number
from zoo.chain import Step
from zoo.engine.recording import SMALL, KernelMode
from zoo.engine.references import detached
from zoo.profiling.allocator_events import tensors_in
from zoo.profiling.backward_walk import gradients_of
from zoo.profiling.caching_allocator import rounded_up
from zoo.profiling.fake_kernels import QUESTIONS
from zoo.profiling.fake_tensors import as_data
from zoo.profiling.kernel_costs import Curve, Kernel, Update, flop_formulas
from zoo.profiling.tensor_spec import KernelSpec, StateSpec, Storages


class GradientSpec(NamedTuple):
    """The gradient of a tensor: a name for its storage, which others may share, and its bytes.

    `stride` is None where it is contiguous: steps that need it so copy it.
    """

    storage: Hashable
    bytes: int
    stride: tuple[int, ...] | None = None


# places in a state and the gradients of the tensors there, those that are not contiguous
Strided = tuple[tuple[int, GradientSpec], ...]
# different calls of kernels by their texts: the number of each, and its spec
Kernels = dict[str, tuple[int, KernelSpec | None]]
# storages that somebody else holds, by their addresses, which no other gets meanwhile: the bytes,
# none of a fake one that stands in for a real one
Outside = dict[int, tuple[Any, int]]
# outputs that have a graph, and their gradients where these are not contiguous
Ends = dict[Tensor, GradientSpec | None]


class Cast(NamedTuple):
    """A cast of a weight that autocast caches.

    weight: the id of the weight.
    storage: that of the cast.
    freed: which change of the backward freed it, -1 if it was freed before.
    """

    weight: int
    storage: int
    freed: int


@dataclass(frozen=True)
class StepRun:
    """What a step did. Storages are numbered: those of its inputs first, then new ones.

    Attributes:
        outputs: the state that it returned.
        dtype: that of the first floating tensor which it returned.
        new_sizes: bytes of the new storages among outputs and saved tensors.
        saved: storages that autograd saved, parameters left out.
        forward, until_saved: the bytes of its forward, and of that until the last tensor is saved.
        backward: the bytes of its backward above the saved tensors and the incoming gradients. Both
            are freed on the way, as autograd frees them: a gradient when it was used, a saved
            tensor when its node is done. Gradients of tensors that the step only hands on are
            already there.
        gives: for the tensors of the state that it took part in, the gradient that they get.
        updates: when the gradient of each parameter was complete, in the order of time.
        made: bytes of gradients of parameters that the forward made; its peaks are without them.
        draws: how many kernels of the forward draw random numbers.
        copied: storages of its inputs of which a segment keeps a copy: small ones without history
            that kernels read.
        casts: those of weights that the forward makes and autocast caches.
    """

    outputs: StateSpec
    dtype: torch.dtype
    new_sizes: tuple[int, ...]
    saved: frozenset[int]
    forward: Curve
    until_saved: Curve
    backward: Curve
    gives: Mapping[int, GradientSpec]
    updates: tuple[Update, ...]
    made: int
    draws: int
    copied: frozenset[int]
    casts: tuple[Cast, ...]


def run_step(
    step: Step,
    state: StateSpec,
    strided: Strided,
    fixed: Container[int],
    kernels: Kernels,
    *,
    outside: Outside | None = None,
    caches_casts: bool = False,
    block: int = 1,
) -> StepRun:
    """Runs a step, forward and backward, on a state of these specs, under a `FakeTensorMode`.

    Storages and tensors are numbered from 0 in order. `fixed` are the addresses of storages that
    are there anyway, those of parameters, buffers and inputs. Different kernels are added to
    `kernels`, and to `outside` tensors that somebody else holds, such as a loss its targets.
    `caches_casts` holds casts of weights to the end of the forward, as autocast's cache does. The
    bytes of a storage are those of whole `block`s.
    """
    storages = Storages(block)
    leaves = storages.empty(state)
    given = len(storages.sizes)
    mode = AllocationMode(fixed, kernels, outside, block)
    mode.caches_casts = caches_casts
    saved = _SavedTensors(storages, leaves, mode)
    start = sequence_number()
    with mode, saved_tensors_hooks(saved.pack, _unpack):
        value = step(*leaves)
    outputs = list(value) if isinstance(value, tuple) else [value]
    returned = storages.specs(outputs, leaves)
    ends = ends_of(outputs, strided)
    casts = [(weight, storages.number(cast), mode.births_of([cast])) for weight, cast in mode.casts]
    cast_weights = {weight for weight, *_ in casts}
    # only their graph holds the outputs and casts from here on
    del value, outputs
    mode.casts.clear()
    draws, copied = mode.draws, _copied(state, leaves, mode.read)
    roots, incoming = _roots(ends, block)
    backward = mode.now
    mode.changes.append((-1, -incoming))
    completed: list[tuple[Tensor, int]] = []
    with mode:
        gradients, shared = gradients_of(
            roots, start, lambda leaf: completed.append((leaf, mode.now.changes))
        )
    inputs = {id(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad}
    of_parameters = {name: gradients[name] for name in gradients.keys() - inputs}
    births = mode.births_of(of_parameters.values())
    complete = [(leaf, change) for leaf, change in completed if id(leaf) in of_parameters]
    # gradients of one storage are freed with the last of them
    last = {of_parameters[id(leaf)].untyped_storage()._cdata: id(leaf) for leaf, _ in complete}
    updates = []
    for leaf, change in complete:
        storage = of_parameters[id(leaf)].untyped_storage()
        size = mode.bytes_of(storage) if last[storage._cdata] == id(leaf) else 0
        birth = mode.born_since(backward, storage)
        cast, is_view = 0, of_parameters[id(leaf)]._is_view()
        if birth >= 0 and id(leaf) in cast_weights:
            cast, is_view = mode.converted(backward, birth) or (0, is_view)
        updates.append(
            Update(
                parameter=id(leaf),
                shape=tuple(leaf.shape),
                dtype=leaf.dtype,
                change=change - backward.changes,
                size=size,
                freed=size if birth >= 0 and id(leaf) not in shared else 0,
                is_shared=id(leaf) in shared,
                birth=birth,
                cast=cast,
                is_view=is_view,
            )
        )
    return StepRun(
        outputs=returned,
        dtype=_dtype_of(returned),
        new_sizes=tuple(storages.sizes[given:]),
        saved=frozenset(saved.numbers),
        forward=mode.curve(births, end=backward),
        until_saved=mode.curve(births, end=saved.last() or backward),
        backward=mode.curve(start=backward),
        gives=_gives(state, leaves, gradients, mode),
        updates=tuple(updates),
        made=sum(mode.changes[birth][1] for birth in births if birth < backward.changes),
        draws=draws,
        copied=copied,
        casts=tuple(
            Cast(weight, number, mode.freed(births, backward)) for weight, number, births in casts
        ),
    )


def _copied(
    state: StateSpec, leaves: Sequence[Tensor | None], read: Container[int]
) -> frozenset[int]:
    return frozenset(
        entry.storage
        for entry, leaf in zip(state, leaves, strict=True)
        if entry is not None and leaf is not None and not leaf.requires_grad
        if entry.spec.bytes <= SMALL and leaf.untyped_storage()._cdata in read
    )


def _dtype_of(state: StateSpec) -> torch.dtype:
    dtypes = [entry.spec.dtype for entry in state if entry is not None]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _gives(
    state: StateSpec,
    leaves: Sequence[Tensor | None],
    gradients: Mapping[int, Tensor],
    mode: "AllocationMode",
) -> dict[int, GradientSpec]:
    found = {}
    for entry, leaf in zip(state, leaves, strict=True):
        if entry is not None and (gradient := gradients.get(id(leaf))) is not None:
            storage = gradient.untyped_storage()
            stride = None if gradient.is_contiguous() else gradient.stride()
            found[entry.tensor] = GradientSpec(storage._cdata, mode.bytes_of(storage), stride)
    return found


def ends_of(outputs: Sequence[Tensor | None], strided: Strided = ()) -> Ends:
    """Lists the outputs that have a graph, each once."""
    gradients = dict(strided)
    return {
        output: gradients.get(place)
        for place, output in enumerate(outputs)
        if output is not None and output.grad_fn is not None
    }


def _roots(ends: Ends, block: int) -> tuple[list[Tensor], int]:
    """Empties `ends`; returns what a backward from them starts with, and their gradients' bytes."""
    incoming = sum(
        rounded_up(output.nbytes, block) if gradient is None else gradient.bytes
        for output, gradient in ends.items()
    )
    roots = [root_of(ends)] if ends else []
    ends.clear()
    return roots, incoming


def root_of(ends: Ends) -> Tensor:
    """Returns a scalar whose backward gives each output a gradient that only autograd holds."""
    root: Tensor = _Root.apply(list(ends.values()), *ends)
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[GradientSpec | None], *outputs: Tensor) -> Tensor:
        ctx.gradients = [
            (output.shape, output.dtype, output.device, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
        ]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *(_ones(*gradient) for gradient in ctx.gradients))


def _ones(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, gradient: GradientSpec | None
) -> Tensor:
    if gradient is None or gradient.stride is None:
        return as_data(torch.ones(shape, dtype=dtype, device=device))
    numbers = as_data(torch.ones(gradient.bytes // dtype.itemsize, dtype=dtype, device=device))
    return numbers.as_strided(shape, gradient.stride)


class _SavedTensors:
    """Notes the storages that autograd saves in a step's forward, parameters left out, and when."""

    def __init__(
        self, storages: Storages, leaves: Sequence[Tensor | None], mode: "AllocationMode"
    ) -> None:
        self.storages, self.mode = storages, mode
        self.numbers: set[int] = set()
        self._inputs = frozenset(map(id, leaves))
        self._last = _START
        self._unsettled: int | None = None

    def last(self) -> "Moment | None":
        """Returns when the last tensor was saved, where a recomputation may stop; None if not.

        It may not where the operation may be about to write what it saved, as dropout does its
        mask.
        """
        return self._last if self._unsettled is None else None

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes a saved tensor; returns what autograd holds: no cycle with its own history."""
        self._note_writer(tensor)
        storage = tensor.untyped_storage()._cdata
        is_fixed = storage in self.mode.fixed or storage in self.mode.outside
        if not (is_fixed or isinstance(tensor, nn.Parameter)):
            self.numbers.add(self.storages.number(tensor))
            self._last = self.mode.now
        return tensor if tensor.is_leaf else detached(tensor)

    def _note_writer(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            if self._unsettled is not None and tensor.grad_fn._sequence_nr() >= self._unsettled:
                self._unsettled = None
        elif not tensor.requires_grad and id(tensor) not in self._inputs:
            self._unsettled = sequence_number() - 1


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class Moment(NamedTuple):
    """How many changes of memory and how many kernels there were."""

    changes: int = 0
    kernels: int = 0


_START = Moment()

# tensors that are not fake, nor made of others
REAL = (Tensor, nn.Parameter)
_CONVERSION = torch.ops.aten._to_copy.default
# these start no kernel
_FREE = frozenset({torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format})


def _is_cached(func: Any, args: Any, result: Any) -> bool:
    """Says whether autocast caches what a kernel returned: a weight in its lower precision."""
    if func is not _CONVERSION or not isinstance(args[0], nn.Parameter):
        return False
    is_trained = args[0].requires_grad and args[0].dtype is torch.float32
    return is_trained and result.dtype is torch.get_autocast_dtype(args[0].device.type)


class AllocationMode(KernelMode):
    """Follows the bytes of the storages that operations make, and notes the kernels.

    Those in `fixed` were there before: views of real parameters lie in them. `changes` are pairs:
    a storage by the place of the change that made it (-1 for none), and the bytes that came or
    went, in whole `block`s.
    """

    supports_higher_order_operators = False

    def __init__(
        self,
        fixed: Container[int] = (),
        known: Kernels | None = None,
        outside: Outside | None = None,
        block: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed = fixed
        self.known = known
        self.block = block
        self.outside = {} if outside is None else outside
        self.draws = 0
        # addresses of the storages that kernels were given
        self.read: set[int] = set()
        # ids of weights, and the casts of these that autocast would cache
        self.caches_casts = False
        self.casts: list[tuple[int, Tensor]] = []
        self.kernels: list[Kernel] = []
        self.changes: list[tuple[int, int]] = []
        self._births: dict[int, int] = {}
        # whether what was converted was a view, by the change that made the copy
        self._conversions: dict[int, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in inputs:
            # the code makes the numbers of `torch.tensor` itself
            if type(tensor) in REAL and func is not torch.ops.aten.lift_fresh.default:
                self._note_outside(tensor.untyped_storage())
        starts_kernel = not (func.is_view or func in _FREE)
        # before it runs, since one that writes in place may change what it was given
        number = self._number(func, args, kwargs) if starts_kernel else 0
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if func is _CONVERSION:
            self._conversions[len(self.changes)] = args[0]._is_view()
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if func.is_view and not self.outside.keys().isdisjoint(given):
                # a view of a fake tensor that stands in for the real one
                self.outside.setdefault(storage._cdata, (storage, 0))
            else:
                self._note(storage, given)
        if self.caches_casts and _is_cached(func, args, result):
            self.casts.append((id(args[0]), result))
        if starts_kernel:
            self.read |= given
            count = flop_formulas().get(func._overloadpacket)
            flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.kernels.append(Kernel(number, flops, moved, len(self.changes)))
        return result

    def _number(self, func: Any, args: Any, kwargs: Any) -> int:
        if self.known is None:
            return 0
        spec = KernelSpec.of(func, args, kwargs)
        return self.known.setdefault(repr(spec), (len(self.known), spec))[0]

    def _note_outside(self, storage: Any) -> None:
        if storage._cdata not in self.fixed:
            self.outside.setdefault(storage._cdata, (storage, self.bytes_of(storage)))

    def _note(self, storage: Any, given: set[int]) -> None:
        key = storage._cdata
        if key not in self._births and key not in given and key not in self.fixed:
            birth = self._births[key] = len(self.changes)
            size = self.bytes_of(storage)
            self.changes.append((birth, size))
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self.changes.append((self._births.pop(key), -size))

    def bytes_of(self, storage: Any) -> int:
        """Returns the bytes of a storage, in whole blocks."""
        return rounded_up(storage.nbytes(), self.block)

    @property
    def now(self) -> Moment:
        """How much there was by now."""
        return Moment(len(self.changes), len(self.kernels))

    def curve(
        self, left_out: Container[int] = (), start: Moment = _START, end: Moment | None = None
    ) -> Curve:
        """Returns what happened between two moments, as if some storages had taken nothing."""
        end = end or self.now
        changes = self.changes[start.changes : end.changes]
        kernels = self.kernels[start.kernels : end.kernels]
        return Curve(
            tuple(0 if birth in left_out else size for birth, size in changes),
            tuple(kernel._replace(change=kernel.change - start.changes) for kernel in kernels),
        )

    def born_since(self, moment: Moment, storage: Any) -> int:
        """Returns which change after a moment made a storage; -1 if it was made before."""
        return max(self._births.get(storage._cdata, -1) - moment.changes, -1)

    def freed(self, births: Container[int], moment: Moment) -> int:
        """Returns which change after a moment freed what these changes made; -1 if none."""
        later = enumerate(self.changes[moment.changes :])
        return next((place for place, (birth, _) in later if birth in births), -1)

    def converted(self, moment: Moment, place: int) -> tuple[int, bool] | None:
        """Returns the bytes that a change after a moment converted, and whether they were a view.

        None where it was no conversion, or where they were not freed next.
        """
        place += moment.changes
        _, size = self.changes[place + 1] if place + 1 < len(self.changes) else (-1, 0)
        found = self._conversions.get(place)
        return None if found is None or size >= 0 else (-size, found)

    def births_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Returns the storages of tensors, by the places of the changes that made them."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return {self._births[storage] for storage in storages if storage in self._births}
