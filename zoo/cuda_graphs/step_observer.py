"""Observes a step: what a graph would make constant of what its Python does.

A dispatch mode below autograd writes down which kernels run, their numbers, and of each tensor
where it comes from and how it lies there. Where two steps that begin alike are written down alike,
a graph of one of them does what the next one would have done:

    aten.mul.Tensor    (model.0.weight, 0.9)     0.81 in the next step: a number that Python
                                                 changes from step to step
    aten.add.Tensor    (result 0 of kernel 7, the batch's tensor 1)

Numbers on the device are never read. What no graph can do is an obstacle: a number that is read out
of a tensor, kernels on the host or copies from it, numbers that are drawn on the host, and values
that the step itself changes, which replays would leave as they are.
"""

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import Args, Kwargs, Operator, PyTree, pytree
from zoo.cuda_graphs.guards import Guards
from zoo.cuda_graphs.watched_values import is_plain, is_same
from zoo.engine import tensor_state
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.tensor_state import gone
from zoo.errors import shortened
from zoo.profiling.source_location import line_of_frame
from zoo.profiling.tensor_spec import flattened

# kernels whose results depend on the numbers of tensors
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
# these run no kernel; torch calls them more often in a capture, and zoo below several modes
IDLE = {torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format}
# called with what Python made of its own numbers
LIFTED = "aten::lift_fresh"
# files of torch in which a kernel has a way out of its own
WAYS_OUT = {
    "clip_grad.py": "pass error_if_nonfinite=False",
    "swa_utils.py": "call update_parameters after the step",
}
KEEP_ON_DEVICE = "keep it on the device: with torch.where, masks, or an index of fixed size"
# the names of storages that nothing has written yet, and of those with which kernels say which
# random numbers they drew: so many numbers on the host, and in a capture on the device
EMPTY, SEED = "empty memory", "a seed"
SEEDS, MOST_SEEDS = (torch.int64, torch.uint64), 2


class Obstacle(NamedTuple):
    """What a graph of a step cannot do, and the way out."""

    what: str
    way_out: str

    def __str__(self) -> str:
        """Says both."""
        return f"{self.what}; {self.way_out}"


class Operand(NamedTuple):
    """A tensor that a kernel is given: where it comes from, and how it lies in that storage.

    Attributes:
        origin: text, or the address of another storage from before the step.
    """

    origin: str | int
    offset: int = 0
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """Says what it is."""
        outside = "another tensor from before the step"
        origin = outside if isinstance(self.origin, int) else self.origin
        return f"{origin} {tuple(self.sizes)}"


# a tensor that the step made, where no mode saw it
UNSEEN = Operand("a tensor of the step")


class ObservedKernel(NamedTuple):
    """A kernel that ran, and its arguments: plain values, and operands for tensors."""

    name: str
    values: tuple[object, ...]

    def difference(self, other: "ObservedKernel", now: str) -> str | None:
        """Returns how another call differs, which is `now`; None if it does not."""
        if self.name != other.name:
            return f"it runs {self.name}, and {other.name} {now}"
        for value, later in zip(self.values, other.values, strict=False):
            # most are operands, whose parts have types of their own
            if not (type(value) is Operand and value == later) and not is_same(value, later):
                return f"{self.name} is given {_text(value)}, and {_text(later)} {now}"
        if len(self.values) != len(other.values):
            return f"{self.name} is given {len(self.values)} values, {len(other.values)} {now}"
        return None


def _text(value: object) -> str:
    return str(value) if isinstance(value, Operand) else shortened(value)


class Observation:
    """What a step did.

    Attributes:
        obstacle: what a graph of it cannot do; None if nothing was found.
        calls: its kernels, and as the last one what it returns.
        storages: storages from before the step that kernels read, by their addresses.
        outside: the ones among them in which no tensor of the state lies.
        left: for the names of tensors of the state, what is there now.
        replaced: where tensors were kept that the step has replaced without reading them.
    """

    def __init__(
        self,
        step: Callable[[], PyTree],
        state: Guards,
        batch: Iterable[Tensor],
    ) -> None:
        device = state.device
        self.obstacle: Obstacle | None = None
        self.calls: list[ObservedKernel] = []
        self.storages: dict[int, UntypedStorage] = {}
        for name in state.scalers:
            self.note(
                f"{name} is a GradScaler, which decides in Python whether to step",
                "use bfloat16, which needs none",
            )
        generators = _host_generators(state)
        # weakly: the step may free them; another one may come to lie at the same address
        pairs = [(location, location.read()) for location in state.tensors]
        before = [(where, gone if tensor is None else ref(tensor)) for where, tensor in pairs]
        del pairs
        observer = _Observer(self, batch, state)
        with observer:
            self._outputs: PyTree = step()
        leaves, structure = flattened(self._outputs)
        returned = str(structure), *map(observer.value, leaves)
        self.calls.append(ObservedKernel("what it returns", returned))
        if generators != _host_generators(state):
            self.note(
                "it draws random numbers on the host, which replays would not draw again",
                f"draw them on {device}, or before the step and pass them as a tensor",
            )
        if (difference := state.changed_by_step()) is not None:
            self.note(
                f"it changes {difference}, which replays would leave as it is",
                "change it after the step, or keep it in a tensor that is written in place",
            )
        self.replaced = [
            location
            for location, tensor in before
            if tensor is not gone
            and (tensor() is None or location.read() is not tensor())
            and location.storage not in self.storages
        ]
        of_state = {location.storage for location in state.tensors}
        pairs_outside = (pair for pair in self.storages.items() if pair[0] not in of_state)
        self.outside = [storage for _, storage in pairs_outside]
        self.left = {where.name: observer.left(where.read(), tensor()) for where, tensor in before}
        self.storages.clear()

    def take_outputs(self) -> PyTree:
        """Returns what the step returned, once: with it lives the graph of autograd."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def note(self, what: str, way_out: str) -> None:
        """Notes an obstacle, unless there is one."""
        if self.obstacle is None:
            self.obstacle = Obstacle(what, way_out)

    def difference(self, later: "Observation", now: str = "in the next") -> str | None:
        """Returns how a later step differed, which is `now`; None if it did not."""
        pairs = zip(self.calls, later.calls, strict=False)
        for number, (call, other) in enumerate(pairs):
            if (text := call.difference(other, now)) is not None:
                return f"{text} (kernel {number} of {len(self.calls) - 1})"
        if len(self.calls) != len(later.calls):
            return f"it runs {len(self.calls)} kernels, {len(later.calls)} {now}"
        for name in self.left.keys() & later.left.keys():
            if not is_same(left := self.left[name], is_left := later.left[name]):
                return f"it leaves {_text(left)} in {name}, and {_text(is_left)} {now}"
        return None


class Origin(NamedTuple):
    """Where a storage comes from.

    Attributes:
        storage: weakly; another one may come to have its number.
        offset: where in it the tensor begins that is called so.
        is_own: whether the step was given it, or made it.
    """

    storage: Callable[[], object]
    name: str
    offset: int
    is_own: bool


class _Observer(KernelMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of a step, and those of its backward."""

    keeps_compiled = True

    def __init__(self, observation: Observation, batch: Iterable[Tensor], state: Guards) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observation, self.device = observation, state.device
        # by the numbers of storages
        self.origins: dict[int, Origin] = {}
        self.of_state = {location.storage for location in state.tensors}
        for location in reversed(state.tensors):
            tensor = location.read()
            if location.storage > 0 and tensor is not None:
                self._note(tensor, location.name, is_own=False)
        for number, tensor in enumerate(batch):
            self._note(tensor, f"tensor {number} of the batch", offset=int(tensor.storage_offset()))

    def _note(self, tensor: Tensor, name: str, *, offset: int = 0, is_own: bool = True) -> None:
        if (storage := storage_of(tensor)) is not None:
            self.origins[storage._cdata] = Origin(ref(storage), name, offset, is_own)

    def _origin(self, tensor: Tensor) -> Origin | None:
        """Returns where a tensor's storage comes from; None if no mode saw it being made."""
        storage = storage_of(tensor)
        origin = None if storage is None else self.origins.get(storage._cdata)
        return origin if origin is not None and origin.storage() is storage else None

    def _is_own(self, tensor: Tensor) -> bool:
        origin = self._origin(tensor)
        return storage_of(tensor) is None or (origin is not None and origin.is_own)

    def _is_copy(self, tensor: Tensor) -> bool:
        """Returns whether a kernel that is replayed reads a copy, which no mode saw being made."""
        storage = storage_of(tensor)
        return storage is not None and thread.replaying and storage.data_ptr() not in self.of_state

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" != self.device.type

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and writes it down."""
        leaves = pytree.tree_leaves((args, kwargs))
        calls, inputs = self.observation.calls, [x for x in leaves if isinstance(x, Tensor)]
        is_lifted = getattr(func, "_schema", None) is not None and func._schema.name == LIFTED
        if is_lifted:
            self._note(inputs[0], f"the constant of kernel {len(calls)}")
        if func not in IDLE:
            calls.append(ObservedKernel(str(func), (*(kwargs or {}), *map(self.value, leaves))))
        before = {*map(_number, inputs)}
        out = func(*args, **kwargs or {})
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self._note_results(func, results, before)
        if self.observation.obstacle is None:
            self._look_for_obstacle(func, inputs, results, is_lifted)
        return out

    def _note_results(self, func: Operator, results: list[Tensor], inputs: set[int]) -> None:
        """Notes which kernel made new storages, or filled those that were empty before."""
        kernel, draws = len(self.observation.calls) - 1, torch.Tag.nondeterministic_seeded
        for index, tensor in enumerate(results):
            is_new, origin = _number(tensor) not in inputs, self._origin(tensor)
            if not is_new and (origin is None or func in IDLE or origin.name != EMPTY):
                continue
            name = EMPTY if func in IDLE else f"result {index} of kernel {kernel}"
            is_seed = draws in getattr(func, "tags", ()) and tensor.dtype in SEEDS
            self._note(tensor, SEED if is_seed and tensor.numel() <= MOST_SEEDS else name)

    def left(self, now: object, before: object) -> object:
        """Returns what stands for a tensor that is where another one was before the step."""
        return "what was there" if now is before else self.value(now)

    def value(self, leaf: object) -> object:
        """Returns what a graph makes constant of an argument of a kernel."""
        if not isinstance(leaf, Tensor):
            return leaf if is_plain(leaf) else type(leaf).__name__
        storage, origin = storage_of(leaf), self._origin(leaf)
        is_seed = origin is not None and origin.name == SEED
        if storage is None or is_seed or (origin is None and self._is_copy(leaf)):
            return UNSEEN
        if self._is_on_host(leaf) and leaf.numel() == 1 and self._is_own(leaf):
            return leaf.tolist()
        if origin is None or not origin.is_own:
            self.observation.storages[storage.data_ptr()] = storage
        name, begin = (storage.data_ptr(), 0) if origin is None else (origin.name, origin.offset)
        begin = int(leaf.storage_offset()) - begin
        return Operand(name, begin, leaf.size(), leaf.stride(), leaf.dtype)

    def _look_for_obstacle(
        self, func: Operator, inputs: list[Tensor], results: list[Tensor], is_lifted: bool
    ) -> None:
        host = [self._is_on_host(tensor) for tensor in (*inputs, *results)]
        outside = next((t for t in inputs if self._is_on_host(t) and not self._is_own(t)), None)
        if not all(host) and not READS.isdisjoint(getattr(func, "tags", ())):
            what, way_out = "reads numbers of a tensor and waits for the device", KEEP_ON_DEVICE
        elif outside is not None:
            what = f"computes on the host with a tensor {tuple(outside.shape)} from before the step"
            way_out = f"keep that tensor on {self.device}"
        elif is_lifted and not any(host) and results[0].numel():
            what = f"puts numbers of Python on {self.device} and waits for it"
            way_out = "make the tensor before the step, or with torch.full"
        elif any(host) and not all(host) and func in COPIES:
            what = f"copies between the host and {self.device}"
            way_out = f"make the tensor on {self.device}, or pass it with the batch"
        else:
            return
        frame = sys._getframe(2)
        here = f" at {line}" if (line := line_of_frame(frame)) else ""
        self.observation.note(f"{func}{here} {what}", _way_out(frame) or way_out)


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Returns the storage of a tensor; None for one without memory, as that of a freed gradient."""
    storage = tensor_state.storage_of(tensor)
    try:
        return storage if storage is None or storage.data_ptr() >= 0 else None
    except RuntimeError:
        return None


def _number(tensor: Tensor) -> int:
    """Returns the number of a tensor's storage, as long as that lives; 0 without one."""
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage._cdata)


def _way_out(frame: FrameType | None) -> str | None:
    while frame is not None:
        if (way := WAYS_OUT.get(os.path.basename(frame.f_code.co_filename))) is not None:
            return way
        frame = frame.f_back
    return None


def _host_generators(state: Guards) -> bytes:
    """Returns the states of the generators of random numbers on the host."""
    numpy = sys.modules.get("numpy")
    on_host = [
        one for one in (torch.default_generator, *state.generators) if one.device.type == "cpu"
    ]
    others = [random.getstate(), *state.host_generators]
    if numpy is not None:
        others.append(numpy.random.get_state(legacy=False))
    if state.device.type != "cpu":
        others += [generator.get_state().tolist() for generator in on_host]
    return pickle.dumps(others)
