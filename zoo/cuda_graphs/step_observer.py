"""Observes an eager step: whether a graph of it would do what its Python does.

A dispatch mode writes down what a graph would make constant: which kernels run, their numbers, and
the addresses of tensors from outside of the step that they read. Where two steps that begin alike
are written down alike, a graph of one of them does what the next one would have done:

    aten.mul.Tensor    (the address of a weight, 0.9)     0.81 in the next step: a number that
                                                          Python changes from step to step

What no graph can do is an obstacle: a number that is read out of a tensor, kernels on the host or
copies from it, numbers that are drawn on the host, and values that the step itself changes, which
replays would leave as they are.
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
from zoo.cuda_graphs.batch import VALUES
from zoo.cuda_graphs.python_state import PythonState
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.tensor_state import storage_of
from zoo.errors import shortened
from zoo.profiling.source_location import line_of_frame

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
# stands for a tensor that the step made itself
OWN = "a tensor of the step"


class Obstacle(NamedTuple):
    """What a graph of a step cannot do, and the way out."""

    what: str
    way_out: str

    def __str__(self) -> str:
        """Says both."""
        return f"{self.what}; {self.way_out}"


class Address(NamedTuple):
    """The address of a tensor from before the step."""

    value: int


class ObservedKernel(NamedTuple):
    """A kernel that ran, and the plain values and addresses among its arguments."""

    name: str
    values: tuple[object, ...]

    def difference(self, other: "ObservedKernel") -> str | None:
        """Returns how another call differs; None if it does not."""
        if self.name != other.name:
            return f"it runs {self.name} in one step, and {other.name} in the next"
        for value, later in zip(self.values, other.values, strict=False):
            if value == later:
                continue
            if isinstance(value, Address) or isinstance(later, Address):
                return f"{self.name} reads a tensor from before the step, another in each step"
            return f"{self.name} is given {shortened(value)}, and {shortened(later)} in the next"
        return None


class Observation:
    """What a step did that ran eagerly.

    Attributes:
        obstacle: what a graph of it cannot do; None if nothing was found.
        calls: its kernels.
        storages: storages from before the step that kernels read, by their addresses.
        outside: the ones among them in which no tensor of the state lies.
        replaced: where tensors were kept that the step has replaced without reading them.
    """

    def __init__(
        self,
        step: Callable[[], PyTree],
        state: PythonState,
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
        pairs = ((location, location.read()) for location in state.tensors)
        tensors = [(where, ref(tensor)) for where, tensor in pairs if isinstance(tensor, Tensor)]
        of_state = {location.storage for location in state.tensors}
        with _Observer(self, batch, of_state, device):
            self._outputs: PyTree = step()
        if generators != _host_generators(state):
            self.note(
                "it draws random numbers on the host, which replays would not draw again",
                f"draw them on {device}, or before the step and pass them as a tensor",
            )
        for values in state.values:
            if (difference := values.change()) is not None:
                self.note(
                    f"it changes {difference}, which replays would leave as it is",
                    "change it after the step, or keep it in a tensor that is written in place",
                )
        self.replaced = [
            location
            for location, tensor in tensors
            if (tensor() is None or location.read() is not tensor())
            and location.storage not in self.storages
        ]
        pairs_outside = (pair for pair in self.storages.items() if pair[0] not in of_state)
        self.outside = [storage for _, storage in pairs_outside]
        self.storages.clear()

    def take_outputs(self) -> PyTree:
        """Returns what the step returned, once: with it lives the graph of autograd."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def note(self, what: str, way_out: str) -> None:
        """Notes an obstacle, unless there is one."""
        if self.obstacle is None:
            self.obstacle = Obstacle(what, way_out)

    def difference(self, later: "Observation") -> str | None:
        """Returns how a later step differed; None if it did not."""
        for call, other in zip(self.calls, later.calls, strict=False):
            if (text := call.difference(other)) is not None:
                return text
        if len(self.calls) != len(later.calls):
            return f"it runs {len(self.calls)} kernels in one step, {len(later.calls)} in the next"
        return None


class _Observer(KernelMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of a step, and those of its backward."""

    keeps_compiled = True

    def __init__(
        self,
        observation: Observation,
        batch: Iterable[Tensor],
        of_state: set[int],
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observation, self.of_state, self.device = observation, of_state, device
        # storages of the batch, and those that the step makes
        self.own: set[int] = set()
        # storages of what kernels return to say which random numbers they drew: on the host, and in
        # a capture on the device
        self.seeds: set[int] = set()
        self._add_own(batch)

    def _add_own(self, tensors: Iterable[object]) -> None:
        self.own.update(_number(leaf) for leaf in tensors if isinstance(leaf, Tensor))

    def _is_own(self, tensor: Tensor) -> bool:
        return storage_of(tensor) is None or _number(tensor) in self.own

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
        is_lifted = getattr(func, "_schema", None) is not None and func._schema.name == LIFTED
        if is_lifted:
            self._add_own(leaves)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        before = {*map(_number, inputs)}
        if func not in IDLE:
            values = tuple(map(self._value, leaves))
            self.observation.calls.append(ObservedKernel(str(func), values))
        out = func(*args, **kwargs or {})
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self._add_own(tensor for tensor in results if _number(tensor) not in before)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.seeds.update(map(_number, filter(self._is_on_host, results)))
        if self.observation.obstacle is None:
            self._look_for_obstacle(func, inputs, results, is_lifted)
        return out

    def _value(self, leaf: object) -> object:
        """Returns what a graph makes constant of an argument of a kernel."""
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, VALUES) else type(leaf).__name__
        storage = storage_of(leaf)
        if storage is None or self._is_own(leaf) or self._is_copy(leaf):
            is_number = self._is_on_host(leaf) and leaf.numel() == 1
            return leaf.tolist() if is_number and _number(leaf) not in self.seeds else OWN
        self.observation.storages[storage.data_ptr()] = storage
        return Address(storage.data_ptr() + int(leaf.storage_offset()) * leaf.itemsize)

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


def _host_generators(state: PythonState) -> bytes:
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
