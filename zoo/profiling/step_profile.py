"""One step on fake tensors: what its forward and its backward allocate, save and compute.

A dispatch mode sees every storage that an operation makes, and a weak reference sees it go.
torch's profilers see only real memory; the formulas for operations are those of
`torch.utils.flop_counter`.
"""

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo._torch import TorchDispatchMode, sequence_number
from zoo.chain import Step
from zoo.engine.references import detached
from zoo.profiling.allocator import tensors_in
from zoo.profiling.constants import as_data
from zoo.profiling.graph_walk import gradients_of
from zoo.profiling.kernel_costs import KernelTable
from zoo.profiling.tensor_spec import StateSpec, Storages


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
        number: that of its call in a `KernelTable`.
        flops: its floating point operations.
        moved: the bytes that it read and wrote.
        change: how many changes of memory there were when it had returned.
    """

    number: int
    flops: int
    moved: int
    change: int


@dataclass(frozen=True)
class Curve:
    """How bytes came and went, and the kernels that ran meanwhile; `given` are not counted."""

    changes: tuple[int, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    given: int = 0

    def peak(self, workspaces: Sequence[int] = ()) -> int:
        """Returns the most bytes at once; a kernel takes its workspace beside its results."""
        totals = list(itertools.accumulate(self.changes, initial=0))
        most = max(totals)
        if workspaces:
            inside = (totals[kernel.change] + workspaces[kernel.number] for kernel in self.kernels)
            most = max(most, max(inside, default=0))
        return max(most - self.given, 0)

    @property
    def flops(self) -> int:
        """Floating point operations of its kernels."""
        return sum(kernel.flops for kernel in self.kernels)


class GradientSpec(NamedTuple):
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
        forward, until_saved, backward: the bytes of its forward, of that until the last tensor is
            saved, and of its backward.
        gives: for the tensors of the state that it took part in, the gradient that they get.
        parameter_gradients: bytes of the gradients of parameters that no other step shares.
        shared_gradients: for parameters that other steps share, by id, bytes of their gradients.
        made: bytes of gradients of parameters that the forward made; its peaks are without them.
        draws: how many kernels of the forward draw random numbers.
    """

    outputs: StateSpec
    new_sizes: tuple[int, ...]
    saved: frozenset[int]
    forward: Curve
    until_saved: Curve
    backward: Curve
    gives: Mapping[int, GradientSpec]
    parameter_gradients: int
    shared_gradients: Mapping[int, int]
    made: int
    draws: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it returns."""
        kinds = [kind.dtype for kind in self.outputs if kind is not None]
        return next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)


# places in a state and the gradients of the tensors there, those that are not contiguous
Strided = tuple[tuple[int, GradientSpec], ...]


def run_step(
    step: Step,
    kinds: StateSpec,
    sizes: Sequence[int],
    fixed: Container[int],
    *,
    strided: Strided = (),
    table: KernelTable | None = None,
) -> StepRun:
    """Runs a step, forward and backward, on tensors of these kinds in storages of these sizes.

    Call it under a `FakeTensorMode`. Storages and tensors are numbered from 0 in order. `fixed`
    holds the addresses of storages that are there anyway, those of parameters and buffers.
    `strided` says how the gradients of outputs lie that are not contiguous. With a `table` kernels
    are numbered by it.
    """
    storages = Storages(sizes)
    leaves = storages.tensors(kinds)
    inputs = frozenset(storages.number(leaf) for leaf in leaves if leaf is not None)
    released = _Released(storages, inputs)
    saved: set[int] = set()
    until_saved: tuple[int | None, int | None] = (0, 0)
    stop = _Stop(leaves)
    start = sequence_number()

    def pack(tensor: Tensor) -> "_Saved":
        nonlocal until_saved
        stop.note(tensor)
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in fixed:
            return _Saved(tensor)
        saved.add(storages.number(tensor))
        until_saved = (len(watch.events), len(watch.kernels))
        return released.saved(tensor)

    with AllocationMode(fixed, table) as watch, saved_tensors_hooks(pack, _Saved.get):
        value = step(*leaves)
    if not stop.is_settled:
        until_saved = (None, None)
    outputs = list(value) if isinstance(value, tuple) else [value]
    returned = storages.kinds(outputs, leaves)
    ends = ends_of(outputs, strided)
    # only their graph holds the outputs from here on
    del value, outputs
    behind = _run_backward(ends, leaves, released, AllocationMode(fixed, table), start)
    return StepRun(
        outputs=returned,
        saved=frozenset(saved),
        forward=watch.curve_without(behind.gradients),
        until_saved=watch.curve_without(behind.gradients, *until_saved),
        made=watch.made(behind.gradients),
        draws=watch.draws,
        backward=behind.curve,
        gives={
            kind.tensor: behind.gives[id(leaf)]
            for kind, leaf in zip(kinds, leaves, strict=True)
            if kind is not None and id(leaf) in behind.gives
        },
        parameter_gradients=behind.parameter_gradients,
        shared_gradients=behind.shared_gradients,
        new_sizes=tuple(storages.sizes[len(sizes) :]),
    )


class _Behind(NamedTuple):
    """A step's backward: its bytes, what it gives to which leaf (by id).

    `gradients` are those of the parameters.
    """

    curve: Curve = Curve()
    gives: Mapping[int, GradientSpec] = {}
    parameter_gradients: int = 0
    shared_gradients: Mapping[int, int] = {}
    gradients: Sequence[Tensor] = ()


class End(NamedTuple):
    """An output that has a graph, and how its gradient lies, if not contiguous."""

    output: Tensor
    given: GradientSpec | None

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
    ends: list[End],
    leaves: Sequence[Tensor | None],
    released: "_Released",
    watch: "AllocationMode",
    start: int,
) -> _Behind:
    """Runs a step's backward, and empties `ends`.

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
    roots = [root_of(ends)]
    outputs.clear()
    ends.clear()
    with watch:
        released.watch = watch
        found = gradients_of(roots, list(starts.values()))
    released.watch = None
    gradients = {
        name: gradient for name, gradient in zip(starts, found, strict=True) if gradient is not None
    }
    sums = {name: gradient for name, gradient in gradients.items() if name in shared}
    own = {
        gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
        for name, gradient in gradients.items()
        if name not in inputs and name not in shared
    }
    return _Behind(
        replace(watch.curve_without(sums.values()), given=given),
        {name: _given(gradient) for name, gradient in gradients.items() if name in inputs},
        sum(own.values()),
        {name: gradient.untyped_storage().nbytes() for name, gradient in sums.items()},
        [gradient for name, gradient in gradients.items() if name not in inputs],
    )


def _given(gradient: Tensor) -> GradientSpec:
    storage = gradient.untyped_storage()
    stride = None if gradient.is_contiguous() else gradient.stride()
    return GradientSpec(storage._cdata, storage.nbytes(), stride)


def root_of(ends: Sequence[End]) -> Tensor:
    """Returns a scalar whose backward gives each output a gradient that only autograd holds."""
    root: Tensor = _Root.apply([end.given for end in ends], *(end.output for end in ends))
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Sequence[GradientSpec | None], *outputs: Tensor) -> Tensor:
        kinds = [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.kinds = [(*kind, entry) for kind, entry in zip(kinds, given, strict=True)]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *(_ones(*kind) for kind in ctx.kinds))


def _ones(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, given: GradientSpec | None
) -> Tensor:
    if given is None or given.stride is None:
        return as_data(torch.ones(shape, dtype=dtype, device=device))
    storage = as_data(torch.ones(given.bytes // dtype.itemsize, dtype=dtype, device=device))
    return storage.as_strided(shape, given.stride)


class _Stop:
    """Knows whether a recomputation may stop at a step's last saved tensor.

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
            self.unsettled = sequence_number() - 1


class _Saved:
    """A saved tensor in autograd's hands: it dies when its node lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # not a cycle with its own history
        self.tensor = tensor if tensor.is_leaf else detached(tensor)

    def get(self) -> Tensor:
        return self.tensor


class _Released:
    """Tells a watch when a storage that only this step saved is no longer saved by anyone."""

    def __init__(self, storages: Storages, others: frozenset[int]) -> None:
        self.storages = storages
        self.others = others
        self.count: Counter[int] = Counter()
        self.watch: AllocationMode | None = None

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


class AllocationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of the storages that operations make, and notes the kernels.

    Those in `fixed` were there before: views of real parameters lie in them.
    """

    def __init__(self, fixed: Container[int], table: KernelTable | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed = fixed
        self.table = table
        self.bytes = 0
        self.peak = 0
        self.draws = 0
        self.kernels: list[Kernel] = []
        self.known: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        starts_kernel = not (func.is_view or func in _FREE)
        # before it runs, since one that writes in place may change what it was given
        number = self.table.number(func, args, kwargs) if self.table and starts_kernel else 0
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        for tensor in outputs:
            self._notice(tensor, given)
        if starts_kernel:
            count = flop_formulas().get(func._overloadpacket)
            flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.kernels.append(Kernel(number, flops, moved, len(self.events)))
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

    def curve_without(
        self,
        tensors: Iterable[Tensor | None],
        changes: int | None = None,
        kernels: int | None = None,
    ) -> Curve:
        """Returns what happened as if the storages of these tensors had taken nothing.

        Of so many changes and kernels, or of all.
        """
        left_out = self._names(tensors)
        sizes = (0 if name in left_out else size for name, size in self.events[:changes])
        return Curve(tuple(sizes), tuple(self.kernels[:kernels]))

    def made(self, tensors: Iterable[Tensor | None]) -> int:
        """Returns the bytes of those of these tensors' storages that operations made."""
        return sum(self.events[name][1] for name in self._names(tensors))

    def _names(self, tensors: Iterable[Tensor | None]) -> set[int]:
        storages = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
        return {self.known[storage] for storage in storages if storage in self.known}


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Returns torch's formulas for floating point operations, by operator."""
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
