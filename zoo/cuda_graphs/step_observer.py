"""Observes a step: what a graph would make constant of what its Python does.

A dispatch mode below autograd writes down which kernels run, their numbers, and where each tensor
comes from. If two steps that begin alike are written down alike, a graph of one does what the other
does:

    aten.mul.Tensor    (result 0 of kernel 7, 0.9)    0.81 in the next step: Python changes it

Numbers on the device are never read. What no graph can do is an obstacle: a number read out of a
tensor, kernels on the host or copies from it, numbers drawn on the host, and values that the step
itself changes, which replays would leave as they are.
"""

import itertools
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import Args, Kwargs, Operator, PyTree, pytree
from zoo.cuda_graphs.guards import Guards
from zoo.cuda_graphs.watched_values import PLAIN, is_plain, is_same, whereabouts
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.tensor_state import gone, parts_of, storage_of, with_storages
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
    "grad_scaler.py": "use bfloat16, which needs no GradScaler to decide whether to step",
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


# a kernel that ran, and its arguments: plain values, and operands for tensors
ObservedKernel = tuple[str, tuple[object, ...]]


def _difference(kernel: ObservedKernel, other: ObservedKernel, now: str) -> str | None:
    """Returns how another call of a kernel differs, which is `now`; None if it does not."""
    (name, values), (name_now, values_now) = kernel, other
    if name != name_now:
        return f"it runs {name}, and {name_now} {now}"
    for pair in itertools.zip_longest(values, values_now, fillvalue=UNSEEN):
        # most are operands, whose parts have types of their own
        if not (type(pair[0]) is Operand and pair[0] == pair[1]) and not is_same(*pair):
            texts = [str(one) if type(one) is Operand else shortened(one) for one in pair]
            return f"{name} is given {texts[0]}, and {texts[1]} {now}"
    return None


class Observation(KernelMode):  # type: ignore[no-untyped-call]
    """What a step did: a mode that writes down its kernels, and those of its backward.

    Attributes:
        obstacle: what a graph of it cannot do, and the way out; None if nothing was found.
        calls: its kernels; as the last ones what it returns, and what it leaves in the state.
        storages: storages from before the step that kernels read, by their addresses.
        outside: the ones among them in which no tensor of the state lies.
        replaced: where tensors were kept that the step has replaced without reading them.
        is_repeated: whether an earlier step began as this one, and did the same.
    """

    keeps_compiled = True
    is_repeated = False

    def __init__(self, step: Callable[[], PyTree], state: Guards, batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.device = state, state.device
        self.obstacle: str | None = None
        self.calls: list[ObservedKernel] = []
        self.storages: dict[int, UntypedStorage] = {}
        self.fresh = itertools.count()
        # by the numbers of storages, weakly since another may get the number: what a storage is
        # called, from where on, and whether the step made it or was given it
        self.origins: dict[int, tuple[Callable[[], object], str, int, bool]] = {}
        self.of_state = {location.storage for location in state.tensors}
        generators = _host_generators(state)
        # weakly: the step may free them; another one may come to lie at the same address
        pairs = ((location, location.read()) for location in state.tensors)
        before = [(where, gone if tensor is None else ref(tensor)) for where, tensor in pairs]
        for location, alive in reversed(before):
            if location.storage > 0 and (tensor := alive()) is not None:
                self._name(tensor, location.name, is_own=False)
        for number, tensor in enumerate(batch):
            self._name(tensor, f"tensor {number} of the batch", int(tensor.storage_offset()))
        versions = [(tensor, tensor._version) for tensor in batch if not tensor.is_inference()]
        with self:
            self._outputs: PyTree = step()
        leaves, structure = flattened(self._outputs)
        self.calls.append(("what it returns", (str(structure), *map(self.value, leaves))))
        for leaf in (leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))):
            what = f"it returns {shortened(leaf)}, which a replay would not renew"
            self.note(what, "return its tensors, in tuples, lists and dicts")
        if generators != _host_generators(state):
            what = "it draws random numbers on the host, which replays would not draw again"
            way_out = f"draw them on {self.device}, or before the step and pass them as a tensor"
            self.note(what, way_out)
        if (difference := state.change(by_step=True)) is not None:
            what = f"it changes {difference}, which replays would leave as it is"
            way_out = "change it after the step, or keep it in a tensor that is written in place"
            self.note(what, way_out)
        written = [tensor for tensor, version in versions if tensor._version != version]
        if written:
            what = f"it writes a tensor {tuple(written[0].shape)} of its batch in place, which"
            self.note(f"{what} a replay does to a copy", "write into a clone")
        now = [(where, where.read(), tensor()) for where, tensor in before]
        changed = {where for where, new, tensor in now if new is None or new is not tensor}
        self.replaced = [where for where in changed if where.storage not in (-1, *self.storages)]
        self.outside = [each for at, each in self.storages.items() if at not in self.of_state]
        self.calls += (
            (where.name, (self.value(new) if where in changed else "as it was",))
            for where, new, _ in now
        )
        self.storages.clear()
        self.origins.clear()

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
        pairs = zip(self.calls, later.calls, strict=False)
        for number, (call, other) in enumerate(pairs):
            if (text := _difference(call, other, now)) is not None:
                return f"{text} (kernel {number} of {len(self.calls)})"
        return None

    def _name(self, tensor: Tensor, name: str, offset: int = 0, is_own: bool = True) -> None:
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
        calls, inputs = self.calls, with_storages(leaves)
        is_lifted = getattr(func, "_schema", None) is not None and func._schema.name == LIFTED
        if is_lifted:
            self._name(inputs[0], f"the constant of kernel {len(calls)}")
        if func not in IDLE:
            calls.append((str(func), (*(kwargs or {}), *map(self.value, leaves))))
        before = {*map(storage_of, inputs)}
        out = func(*args, **kwargs or {})
        results = with_storages(pytree.tree_leaves(out))
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        for index, tensor in enumerate(results):
            if storage_of(tensor) not in before:
                is_seed = draws and tensor.dtype in SEEDS and tensor.numel() <= MOST_SEEDS
                # what is empty is called after its first use
                name = "" if func in IDLE else f"result {index} of kernel {len(calls) - 1}"
                self._name(tensor, UNSEEN.origin if is_seed else name)
        if self.obstacle is None:
            self._look_for_obstacle(func, inputs, results, is_lifted)
        return out

    def value(self, leaf: object) -> object:
        """Returns what a graph makes constant of an argument of a kernel."""
        if not isinstance(leaf, Tensor):
            return leaf if is_plain(leaf) else type(leaf).__name__
        if parts := parts_of(leaf):
            return (*map(self.value, parts),)
        where, origin = whereabouts(leaf), self._origin(leaf)
        assert where is not None, "it is a tensor"
        is_copy = origin is None and thread.replaying and where.address not in self.of_state
        if not where.geometry or is_copy:
            return UNSEEN
        name, begin, is_own = origin or ("another tensor from before the step", 0, False)
        if not name:
            self._name(leaf, name := f"new memory {next(self.fresh)}")
        if not is_own:
            self.storages[where.address] = leaf.untyped_storage()
        if name == UNSEEN.origin:
            return UNSEEN
        if is_own and leaf.numel() == 1 and self._is_on_host(leaf):
            return leaf.tolist()
        offset, *geometry = where.geometry[:4]
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
        self.note(f"{func}{here} {what}", _way_out(frame) or way_out)


def _way_out(frame: FrameType | None) -> str | None:
    files = (os.path.basename(one.f_code.co_filename) for one, _ in traceback.walk_stack(frame))
    return next((WAYS_OUT[name] for name in files if name in WAYS_OUT), None)


def _host_generators(state: Guards) -> bytes:
    """Returns the states of the generators of random numbers on the host."""
    generators = (torch.default_generator, *state.generators)
    on_host = [one for one in generators if one.device.type == "cpu" != state.device.type]
    states = [random.getstate(), *(one.get_state().tolist() for one in on_host)]
    for one in state.host_generators:
        # what asks the system has none, and a class of the program may not be pickled
        if not isinstance(one, random.SystemRandom):
            is_python = isinstance(one, random.Random)
            states.append(random.Random.getstate(one) if is_python else one)
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(numpy.random.get_state(legacy=False))
    return pickle.dumps(states)
