"""One step on fake tensors: what its forward and its backward allocate, save and compute.

A dispatch mode sees every storage that an operation makes, and a weak reference sees it go.
torch's profilers see only real memory; the formulas for operations are those of
`torch.utils.flop_counter`.
"""

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.chain import Step
from zoo.measure.constants import as_data
from zoo.measure.memory import tensors_in


class Kind(NamedTuple):
    """A tensor of a state without its numbers: which tensor, which storage, how it looks at it."""

    tensor: int
    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.size) * self.dtype.itemsize

    def fills(self, size: int) -> bool:
        """Says whether the tensor is dense and covers a storage of this many bytes exactly."""
        reach = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset == 0 and reach * self.dtype.itemsize == self.bytes == size


Kinds = tuple[Kind | None, ...]
# for each kernel its floating point operations and the bytes that it reads and writes
Work = tuple[tuple[int, int], ...]


class Given(NamedTuple):
    """The gradient of a tensor: a name for its storage, which others may share, and its bytes.

    `stride` is how it lies there, None where it is contiguous: steps that need it so copy it.
    """

    storage: Hashable
    bytes: int
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepRun:
    """What a step did. Storages below `len(sizes given)` are those of its inputs, others are new.

    Attributes:
        outputs: the state that it returned.
        new_sizes: bytes of the new storages among outputs and saved tensors.
        saved: storages that autograd saved, parameters left out.
        forward, forward_until_saved, backward: peak bytes; see `planner.costs`.
        gives: for the tensors of the state that it took part in, the gradient that they get.
        parameter_gradients: bytes of the gradients of parameters that no other step shares.
        shared_gradients: for parameters that other steps share, by id, bytes of their gradients.
        made: bytes of gradients of parameters that the forward made; its peaks are without them.
        draws: how many kernels of the forward draw random numbers.
        work, work_until_saved, work_backward: floating point operations and bytes of each kernel.
    """

    outputs: Kinds
    new_sizes: tuple[int, ...]
    saved: frozenset[int]
    forward: int
    forward_until_saved: int
    backward: int
    gives: Mapping[int, Given]
    parameter_gradients: int
    shared_gradients: Mapping[int, int]
    made: int
    draws: int
    work: Work
    work_until_saved: Work
    work_backward: Work

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it returns."""
        kinds = [kind.dtype for kind in self.outputs if kind is not None]
        return next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)

    @property
    def flops(self) -> int:
        """Floating point operations of the forward."""
        return sum(flops for flops, _ in self.work)

    @property
    def flops_until_saved(self) -> int:
        """Those of them that are done when the last tensor is saved."""
        return sum(flops for flops, _ in self.work_until_saved)


# places in a state and the gradients of the tensors there, those that are not contiguous
Strided = tuple[tuple[int, Given], ...]


def run_step(
    step: Step,
    kinds: Kinds,
    sizes: Sequence[int],
    fixed: Container[int],
    strided: Strided = (),
) -> StepRun:
    """Runs a step, forward and backward, on tensors of these kinds in storages of these sizes.

    Call it under a `FakeTensorMode`. Storages and tensors are numbered from 0 in order. `fixed`
    holds the addresses of storages that are there anyway, those of parameters and buffers.
    `strided` says how the gradients of outputs lie that are not contiguous.
    """
    storages = _Storages(sizes)
    leaves = storages.tensors(kinds)
    inputs = frozenset(storages.number(leaf) for leaf in leaves if leaf is not None)
    released = _Released(storages, inputs)
    saved: set[int] = set()
    until_saved: tuple[int | None, int | None] = (0, 0)
    stop = _Stop(leaves)
    start = torch._C._autograd._get_sequence_nr()

    def pack(tensor: Tensor) -> "_Saved":
        nonlocal until_saved
        stop.note(tensor)
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in fixed:
            return _Saved(tensor)
        saved.add(storages.number(tensor))
        until_saved = (len(watch.events), len(watch.work))
        return released.saved(tensor)

    with Watch(fixed) as watch, saved_tensors_hooks(pack, _Saved.get):
        value = step(*leaves)
    if not stop.is_settled:
        until_saved = (None, None)
    outputs = value if isinstance(value, tuple) else (value,)
    ends = ends_of(outputs, strided)
    behind = _run_backward(ends, leaves, released, fixed, start)
    return StepRun(
        outputs=storages.kinds(outputs, leaves),
        saved=frozenset(saved),
        forward=watch.peak_without(behind.gradients),
        forward_until_saved=watch.peak_without(behind.gradients, until_saved[0]),
        made=watch.made(behind.gradients),
        draws=watch.draws,
        backward=behind.peak,
        gives={
            kind.tensor: behind.gives[id(leaf)]
            for kind, leaf in zip(kinds, leaves, strict=True)
            if kind is not None and id(leaf) in behind.gives
        },
        parameter_gradients=behind.parameter_gradients,
        shared_gradients=behind.shared_gradients,
        new_sizes=tuple(storages.sizes[len(sizes) :]),
        work=tuple(watch.work),
        work_until_saved=tuple(watch.work[: until_saved[1]]),
        work_backward=behind.work,
    )


class _Behind(NamedTuple):
    """A step's backward: the most that it adds, what it gives to which leaf (by id), its work.

    `gradients` are those of the parameters.
    """

    peak: int = 0
    gives: Mapping[int, Given] = {}
    parameter_gradients: int = 0
    shared_gradients: Mapping[int, int] = {}
    gradients: Sequence[Tensor] = ()
    work: Work = ()


class End(NamedTuple):
    """An output that has a graph, and how its gradient lies, if not contiguous."""

    output: Tensor
    given: Given | None

    @property
    def bytes(self) -> int:
        """The bytes of the storage of its gradient."""
        return self.given.bytes if self.given else self.output.numel() * self.output.element_size()


def ends_of(outputs: Sequence[Tensor | None], strided: Strided) -> list[End]:
    """Lists the outputs that have a graph, each once."""
    given = dict(strided)
    found = {
        id(output): End(output, given.get(place))
        for place, output in enumerate(outputs)
        if output is not None and output.grad_fn is not None
    }
    return list(found.values())


def _run_backward(
    ends: Sequence[End],
    leaves: Sequence[Tensor | None],
    released: "_Released",
    fixed: Container[int],
    start: int,
) -> _Behind:
    """Runs a step's backward.

    The most that it adds to the saved tensors and the gradients that it is given. Both are freed on
    the way, as autograd frees them: a gradient when it was used, a saved tensor when its node is
    done. The gradients of tensors that the step only hands on are already there. So is, but for
    one of the steps, that of a parameter which the steps share: it is not counted.
    """
    outputs = [end.output for end in ends]
    inputs = {id(leaf): leaf for leaf in leaves if leaf is not None and leaf.requires_grad}
    starts = inputs | parameters_behind(outputs)
    shared = parameters_behind(outputs, before=start).keys() - inputs.keys()
    if not starts or not ends:
        return _Behind()
    given = sum(end.bytes for end in ends)
    root = root_of(ends)
    wanted = list(starts.values())
    with Watch(fixed) as watch:
        released.watch = watch
        found = torch.autograd.grad(root, wanted, allow_unused=True)
    released.watch = None
    sums = {
        name: gradient
        for name, gradient in zip(starts, found, strict=True)
        if name in shared and gradient is not None
    }
    gives = {
        name: _given(gradient)
        for name, gradient in zip(starts, found, strict=True)
        if gradient is not None and name in inputs
    }
    own = {
        gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
        for name, gradient in zip(starts, found, strict=True)
        if gradient is not None and name not in inputs and name not in shared
    }
    peak = int(max(watch.peak_without(sums.values()) - given, 0))
    pairs = zip(starts, found, strict=True)
    of_parameters = [value for name, value in pairs if name not in inputs and value is not None]
    sizes = {name: gradient.untyped_storage().nbytes() for name, gradient in sums.items()}
    return _Behind(peak, gives, sum(own.values()), sizes, of_parameters, tuple(watch.work))


def _given(gradient: Tensor) -> Given:
    storage = gradient.untyped_storage()
    stride = None if gradient.is_contiguous() else gradient.stride()
    return Given(storage._cdata, storage.nbytes(), stride)


def root_of(ends: Sequence[End]) -> Tensor:
    """Returns a scalar whose backward gives each output a gradient that only autograd holds."""
    root: Tensor = _Root.apply([end.given for end in ends], *(end.output for end in ends))
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Sequence[Given | None], *outputs: Tensor) -> Tensor:
        kinds = [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.kinds = [(*kind, entry) for kind, entry in zip(kinds, given, strict=True)]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *(_ones(*kind) for kind in ctx.kinds))


def _ones(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, given: Given | None
) -> Tensor:
    if given is None or given.stride is None:
        return as_data(torch.ones(shape, dtype=dtype, device=device))
    storage = as_data(torch.ones(given.bytes // dtype.itemsize, dtype=dtype, device=device))
    return storage.as_strided(shape, given.stride)


def make_inputs(kinds: Kinds, sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Makes real tensors of these kinds: random numbers where they are floating, else zeros."""
    leaves = _Storages(sizes).tensors(kinds)
    with torch.no_grad():
        for leaf in leaves:
            if leaf is not None:
                # an expanded tensor cannot be written, its storage can
                whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
                whole.set_(leaf.untyped_storage())
                whole.normal_() if leaf.is_floating_point() else whole.zero_()
    return leaves


class _Storages:
    """Numbers storages: those of the inputs first, then others as they are met."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # a storage's address is its name only as long as it lives

    def tensors(self, kinds: Kinds) -> tuple[Tensor | None, ...]:
        """Makes tensors of these kinds; equal numbers give the same storage, the same tensor."""
        looks = Counter(kind.storage for kind in {kind for kind in kinds if kind is not None})
        bases: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        for kind in kinds:
            if kind is None or kind.tensor in made:
                continue
            if looks[kind.storage] == 1 and kind.fills(self.sizes[kind.storage]):
                made[kind.tensor] = torch.empty_strided(
                    kind.size, kind.stride, dtype=kind.dtype, device=kind.device
                )
                self._register(made[kind.tensor].untyped_storage(), kind.storage)
            else:
                made[kind.tensor] = self._view(kind, bases)
            made[kind.tensor].requires_grad_(kind.requires_grad)
        return tuple(None if kind is None else made[kind.tensor] for kind in kinds)

    def _view(self, kind: Kind, bases: dict[int, Tensor]) -> Tensor:
        size = self.sizes[kind.storage]
        if kind.storage not in bases:
            base = torch.empty(size, dtype=torch.uint8, device=kind.device)
            bases[kind.storage] = base
            self._register(base.untyped_storage(), kind.storage)
        whole = size // kind.dtype.itemsize * kind.dtype.itemsize
        numbers = bases[kind.storage][:whole].view(kind.dtype)
        return numbers.as_strided(kind.size, kind.stride, kind.offset).detach()

    def kinds(self, outputs: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> Kinds:
        """Describes a returned state; a tensor that was only handed on keeps its number."""
        names: dict[int, int] = {}
        for leaf in leaves:
            if leaf is not None:
                names.setdefault(id(leaf), len(names))
        return tuple(
            None
            if output is None
            else kind_of(output, names.setdefault(id(output), len(names)), self.number(output))
            for output in outputs
        )

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self._register(storage, len(self.sizes))
            self.sizes.append(storage.nbytes())
        return self.numbers[storage._cdata]

    def _register(self, storage: Any, number: int) -> None:
        self.numbers[storage._cdata] = number
        self.alive.append(storage)


def kind_of(tensor: Tensor, number: int, storage: int) -> Kind:
    """Describes a tensor."""
    return Kind(
        number,
        storage,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def renumber(kind: Kind, tensors: dict[int, int], storages: dict[int, int]) -> Kind:
    """Translates a kind's two numbers; numbers not met yet are given the next free one."""
    return kind._replace(
        tensor=tensors.setdefault(kind.tensor, len(tensors)),
        storage=storages.setdefault(kind.storage, len(storages)),
    )


class _Stop:
    """Knows whether a second run may stop at a step's last saved tensor; see `engine.recompute`.

    It may not where the operation may be about to write what it saved, as dropout does its mask.
    """

    def __init__(self, inputs: Iterable[Tensor | None]) -> None:
        self.inputs = frozenset(map(id, inputs))
        self.unsettled: int | None = None

    @property
    def is_settled(self) -> bool:
        """Says whether nothing is about to be written."""
        return self.unsettled is None

    def note(self, tensor: Tensor) -> None:
        """Looks at a saved tensor."""
        if tensor.grad_fn is not None:
            if self.unsettled is not None and tensor.grad_fn._sequence_nr() >= self.unsettled:
                self.unsettled = None
        elif not tensor.requires_grad and id(tensor) not in self.inputs:
            self.unsettled = torch._C._autograd._get_sequence_nr() - 1


class _Saved:
    """A saved tensor in autograd's hands: it dies when its node lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get(self) -> Tensor:
        return self.tensor


class _Released:
    """Tells a watch when a storage that only this step saved is no longer saved by anyone."""

    def __init__(self, storages: _Storages, others: frozenset[int]) -> None:
        self.storages = storages
        self.others = others
        self.count: Counter[int] = Counter()
        self.watch: Watch | None = None

    def saved(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        number = self.storages.number(tensor)
        if number not in self.others:
            self.count[number] += 1
            weakref.finalize(saved, self._one_less, number).atexit = False
        return saved

    def _one_less(self, number: int) -> None:
        self.count[number] -= 1
        if self.watch is not None and not self.count[number]:
            self.watch.add(-1, -self.storages.sizes[number])


# these start no kernel
_FREE = frozenset({torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of the storages that operations make, and notes each operation's work.

    Those in `fixed` were there before: views of real parameters lie in them.
    """

    def __init__(self, fixed: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed = fixed
        self.bytes = 0
        self.peak = 0
        self.draws = 0
        self.work: list[tuple[int, int]] = []
        self.known: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        for tensor in outputs:
            self._notice(tensor, given)
        if not (func.is_view or func in _FREE):
            count = _flop_formulas().get(func._overloadpacket)
            flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            self.work.append((flops, sum(tensor.nbytes for tensor in (*inputs, *outputs))))
        return result

    def _notice(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in given or key in self.fixed:
            return
        self.known[key] = len(self.events)
        weakref.finalize(storage, self._gone, key, storage.nbytes()).atexit = False
        self.add(self.known[key], storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self.add(self.known.pop(key), -size)

    def add(self, name: int, size: int) -> None:
        """Notes that bytes came or went; the name is that of their storage, -1 for none."""
        self.events.append((name, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def peak_without(self, tensors: Iterable[Tensor | None], until: int | None = None) -> int:
        """Returns the peak as if the storages of these tensors had taken nothing.

        With `until`, that of so many events.
        """
        left_out = self._names(tensors)
        sizes = (0 if name in left_out else size for name, size in self.events[:until])
        return max(itertools.accumulate(sizes), default=0)

    def made(self, tensors: Iterable[Tensor | None]) -> int:
        """Returns the bytes of those of these tensors' storages that operations made."""
        return sum(self.events[name][1] for name in self._names(tensors))

    def _names(self, tensors: Iterable[Tensor | None]) -> set[int]:
        storages = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
        return {self.known[storage] for storage in storages if storage in self.known}


@functools.cache
def _flop_formulas() -> Mapping[Any, Callable[..., int]]:
    # imported late because it imports triton: 0.2 s that `import zoo` does not need
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

    return flop_registry


def parameters_behind(outputs: Iterable[Any], before: int | None = None) -> dict[int, Tensor]:
    """Finds the parameters that a step used, through the graph of its outputs.

    With `before`, those behind a node that was made before this number: parameters that other steps
    use too, through the same node.
    """
    seen: set[Any] = set()
    waiting = [(output.grad_fn, before is None) for output in outputs]
    found: dict[int, Tensor] = {}
    while waiting:
        node, counts = waiting.pop()
        if node is None or (node, counts) in seen:
            continue
        seen.add((node, counts))
        variable = getattr(node, "variable", None)
        if counts and isinstance(variable, nn.Parameter):
            found[id(variable)] = variable
        counts = counts or (before is not None and node._sequence_nr() < before)
        waiting += [(following, counts) for following, _ in node.next_functions]
    return found
