"""Observes a step: what a graph would make constant of what its Python does.

A dispatch mode below autograd writes down which kernels run, their numbers, and where each tensor
comes from. If two steps that begin alike are written down alike, a graph of one does what the other
does:

    aten.mul.Tensor    (result 0 of kernel 7, 0.9)    0.81 in the next step: Python changes it

Numbers on the device are never read. What no graph can do is an obstacle: a number read out of a
tensor, kernels on the host or copies from it, numbers drawn on the host, and values that the step
itself changes, which replays would leave as they are.
"""

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import Args, Kwargs, Operator, PyTree, pytree
from zoo.cuda_graphs.guards import Guards
from zoo.cuda_graphs.watched_values import is_plain, is_same, whereabouts
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.tensor_state import gone, storage_of
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
# with which kernels say which random numbers they drew: on the host, and in a capture on the device
SEEDS, MOST_SEEDS = (torch.int64, torch.uint64), 2


class Operand(NamedTuple):
    """A tensor that a kernel is given: of which storage, and how it lies there."""

    origin: str
    # of a storage from before the step that is no part of the state
    address: int = 0
    # offset, sizes, strides, type
    geometry: tuple[Any, ...] = (0, ())

    def __str__(self) -> str:
        """Says what it is."""
        return f"{self.origin} {tuple(self.geometry[1])}"


# one that the step made, where no mode saw it
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
    return str(value) if type(value) is Operand else shortened(value)


class Observation:
    """What a step did.

    Attributes:
        obstacle: what a graph of it cannot do, and the way out; None if nothing was found.
        calls: its kernels; as the last ones what it returns, and what it leaves in the state.
        storages: storages from before the step that kernels read, by their addresses.
        outside: the ones among them in which no tensor of the state lies.
        replaced: where tensors were kept that the step has replaced without reading them.
        is_repeated: whether an earlier step began as this one, and did the same.
    """

    is_repeated = False

    def __init__(self, step: Callable[[], PyTree], state: Guards, batch: Iterable[Tensor]) -> None:
        self.state, device = state, state.device
        self.obstacle: str | None = None
        self.calls: list[ObservedKernel] = []
        self.storages: dict[int, UntypedStorage] = {}
        for name in state.scalers:
            what = f"{name} is a GradScaler, which decides in Python whether to step"
            self.note(what, "use bfloat16, which needs none")
        generators = _host_generators(state)
        # weakly: the step may free them; another one may come to lie at the same address
        pairs = ((location, location.read()) for location in state.tensors)
        before = [(where, gone if tensor is None else ref(tensor)) for where, tensor in pairs]
        observer = _Observer(self, batch, state)
        with observer:
            self._outputs: PyTree = step()
        leaves, structure = flattened(self._outputs)
        returned = str(structure), *map(observer.value, leaves)
        self.calls.append(ObservedKernel("what it returns", returned))
        if generators != _host_generators(state):
            what = "it draws random numbers on the host, which replays would not draw again"
            self.note(what, f"draw them on {device}, or before the step and pass them as a tensor")
        if (difference := state.changed_by_step()) is not None:
            what = f"it changes {difference}, which replays would leave as it is"
            way_out = "change it after the step, or keep it in a tensor that is written in place"
            self.note(what, way_out)
        now = [(where, tensor, where.read()) for where, tensor in before]
        earlier = [(where, tensor(), new) for where, tensor, new in now if tensor is not gone]
        changed = [where for where, tensor, new in earlier if new is not tensor or new is None]
        self.replaced = [where for where in changed if where.storage not in self.storages]
        of_state = {location.storage for location in state.tensors}
        self.outside = [each for at, each in self.storages.items() if at not in of_state]
        self.left = {
            where.name: (
                observer.value(new) if where in changed or tensor is gone else "as it was",
            )
            for where, tensor, new in now
        }
        self.storages.clear()

    def take_outputs(self) -> PyTree:
        """Returns what the step returned, once: with it lives the graph of autograd."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def note(self, what: str, way_out: str) -> None:
        """Notes an obstacle, unless there is one."""
        if self.obstacle is None:
            self.obstacle = f"{what}; {way_out}"

    def difference(self, later: "Observation", now: str = "in the next") -> str | None:
        """Returns how a later step differed, which is `now`; None if it did not."""
        # tensors that it replaces unread are compared in one of them only
        both = [name for name in self.left if name in later.left]
        one, two = (
            [*each.calls, *(ObservedKernel(name, each.left[name]) for name in both)]
            for each in (self, later)
        )
        for number, (call, other) in enumerate(zip(one, two, strict=False)):
            if (text := call.difference(other, now)) is not None:
                return f"{text} (kernel {number} of {len(one) - 1})"
        return None


class _Observer(KernelMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of a step, and those of its backward."""

    keeps_compiled = True

    def __init__(self, observation: Observation, batch: Iterable[Tensor], state: Guards) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observation, self.device = observation, state.device
        # by the numbers of storages, weakly since another may get the number: what a storage is
        # called, from where on, and whether the step made it or was given it
        self.origins: dict[int, tuple[Callable[[], object], str, int, bool]] = {}
        self.of_state = {location.storage for location in state.tensors}
        for location in reversed(state.tensors):
            tensor = location.read()
            if location.storage > 0 and tensor is not None:
                self._note(tensor, location.name, is_own=False)
        for number, tensor in enumerate(batch):
            self._note(tensor, f"tensor {number} of the batch", int(tensor.storage_offset()))

    def _note(self, tensor: Tensor, name: str, offset: int = 0, is_own: bool = True) -> None:
        if (storage := storage_of(tensor)) is not None:
            self.origins[storage._cdata] = ref(storage), name, offset, is_own

    def _origin(self, tensor: Tensor) -> tuple[str, int, bool] | None:
        """Returns where a tensor's storage comes from; None if no mode saw it being made."""
        if (storage := storage_of(tensor)) is None:
            return UNSEEN.origin, 0, True
        alive, name, offset, is_own = self.origins.get(storage._cdata, (gone, "", 0, False))
        return (name, offset, is_own) if alive() is storage else None

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
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        for index, tensor in enumerate(results):
            if _number(tensor) not in before:
                is_seed = draws and tensor.dtype in SEEDS and tensor.numel() <= MOST_SEEDS
                # what is empty first is called after the kernel in front of it
                name = f"result {index} of kernel {len(calls) - 1}"
                self._note(tensor, UNSEEN.origin if is_seed else name)
        if self.observation.obstacle is None:
            self._look_for_obstacle(func, inputs, results, is_lifted)
        return out

    def value(self, leaf: object) -> object:
        """Returns what a graph makes constant of an argument of a kernel."""
        if not isinstance(leaf, Tensor):
            return leaf if is_plain(leaf) else type(leaf).__name__
        where, origin = whereabouts(leaf), self._origin(leaf)
        assert where is not None, "it is a tensor"
        is_copy = origin is None and thread.replaying and where.address not in self.of_state
        if not where.geometry or is_copy:
            return UNSEEN
        name, begin, is_own = origin or ("another tensor from before the step", 0, False)
        if not is_own:
            self.observation.storages[where.address] = leaf.untyped_storage()
        if name == UNSEEN.origin:
            return UNSEEN
        if is_own and leaf.numel() == 1 and self._is_on_host(leaf):
            return leaf.tolist()
        offset, *geometry = where.geometry
        return Operand(name, 0 if origin else where.address, (offset - begin, *geometry))

    def _look_for_obstacle(
        self, func: Operator, inputs: list[Tensor], results: list[Tensor], is_lifted: bool
    ) -> None:
        host = [self._is_on_host(tensor) for tensor in (*inputs, *results)]
        on_host = filter(self._is_on_host, inputs)
        outside = next((t for t in on_host if not (self._origin(t) or (0,))[-1]), None)
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
    # as a class of the program may not be pickled, and what asks the system has no state
    others = [random.getstate(), *map(_state_of_generator, state.host_generators)]
    if numpy is not None:
        others.append(numpy.random.get_state(legacy=False))
    if state.device.type != "cpu":
        others += [generator.get_state().tolist() for generator in on_host]
    return pickle.dumps(others)


def _state_of_generator(generator: Any) -> object:
    if not isinstance(generator, random.Random):
        return generator
    is_of_system = isinstance(generator, random.SystemRandom)
    return None if is_of_system else random.Random.getstate(generator)
