"""Graphs in software on the CPU, with real numbers: what a CUDA graph keeps is kept, and no more.

A capture runs a step, logs its kernels, and undoes what they wrote. The log says where arguments
and results lie, and holds neither tensors nor memory: zoo replays kernels whose results are freed,
and autograd takes gradients over that nothing else holds, so that a log which held them would be
one of another step. A replay calls the kernels again, with the numbers that Python gave them then
and no Python of the step:

    memory in the log              in a replay
    from before the step           itself; it must not have been freed
    of the step, freed since       new in each replay, so that nothing is left of an earlier one
    of the step, alive             itself: a gradient, an output

Copies of whole storages, by which zoo protects what is written in place, pass no dispatch mode, and
are logged on their own. A kernel that reads memory which nothing in the log made is an error.

Random numbers are drawn as in a CUDA graph: a kernel that found the generator as another left it in
the capture does so in each replay.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import BelowAutograd, DisableTorchDispatch, pytree
from zoo.cuda_graphs.batch import detached
from zoo.cuda_graphs.step_observer import Observation
from zoo.engine import storages
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import Geometry, storage_of

# what copies them, also where a log does instead
clone_storage = UntypedStorage.clone


class SoftwareGraphs:
    """In the place of `zoo.cuda_graphs.capture.DeviceGraphs`."""

    def pool(self) -> str:
        """Returns what stands for a pool."""
        return "pool"

    def run_eagerly(self, step: Callable[[], Any]) -> Any:
        """Runs a step."""
        return step()

    def capture(
        self, observe: Callable[[], Observation], pool: str, generators: Iterable[torch.Generator]
    ) -> tuple["SoftwareGraph", Observation, Any]:
        """Captures a step, whose kernels change nothing."""
        assert pool == "pool"
        log = KernelLog()
        before = torch.get_rng_state()
        try:
            with log, logged_storage_copies(log):
                captured = observe()
                outputs = detached(captured.take_outputs())
        finally:
            with DisableTorchDispatch():
                left = torch.get_rng_state()
                torch.set_rng_state(before)
                log.undo_writes()
        return SoftwareGraph(log, key_of(before), key_of(left)), captured, outputs


def key_of(state: Tensor) -> bytes:
    """Returns a state of the generator as a key."""
    return bytes(state.tolist())


@dataclass(eq=False)
class Location:
    """Where a tensor lies: in which storage, by its number in the log, and where in it.

    Attributes:
        geometry: None for a tensor without a storage, which then has the number itself.
    """

    number: int
    geometry: Geometry | None

    def tensor(self, memory: Any) -> Tensor:
        """Returns the tensor there."""
        if self.geometry is None:
            assert isinstance(memory, Tensor)
            return memory
        return self.geometry.of_storage(memory, torch.device("cpu"))


@dataclass
class LoggedKernel:
    """A call of a kernel, with locations for tensors.

    Attributes:
        states: of the generator, as the kernel found it and left it; None if it draws nothing.
        grad_enabled: as it was; some kernels return a workspace for the backward only then.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Any]
    states: tuple[bytes, bytes] | None
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)


@dataclass
class Memory:
    """Numbers of storages, each as long as it lives; it holds none of them.

    Attributes:
        references: the storages, by their numbers.
    """

    references: list[Callable[[], Any]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, storage: Any) -> int | None:
        """Returns the number of a storage; None if it has none."""
        number = self.numbers.get(id(storage))
        # another may have been freed at this address
        return None if number is None or self.references[number]() is not storage else number

    def add(self, storage: Any) -> int:
        """Returns a new number for a storage."""
        self.numbers[id(storage)] = len(self.references)
        self.references.append(ref(storage))
        return len(self.references) - 1


class KernelLog(KernelMode):
    """Logs the kernels of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[LoggedKernel] = []
        self.memory = Memory()
        # contents of storages from before the step that kernels use, and constants of the step
        self.contents: dict[int, UntypedStorage] = {}
        self.constants: list[Any] = []
        # `isinstance` would run Python of objects that are imported late
        for tensor in (one for one in gc.get_objects() if issubclass(type(one), Tensor)):
            if self.memory.number_of(base := base_of(tensor)) is None:
                self.memory.add(base)
        self.earlier = len(self.memory.references)

    def undo_writes(self) -> None:
        """Gives storages from before the step the contents that they had."""
        for number, content in self.contents.items():
            if (storage := self.memory.references[number]()) is not None:
                storage.copy_(content)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, f"capturing: {func}"
        if func is torch.ops.aten.lift_fresh.default:
            self.memory.add(base_of(args[0]))
            self.constants.append(base_of(args[0]))
        located = pytree.tree_map_only(Tensor, self._location, (args, kwargs or {}))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        found = key_of(torch.get_rng_state()) if draws else b""
        result = func(*args, **kwargs or {})
        states = (found, key_of(torch.get_rng_state())) if draws else None
        results = pytree.tree_leaves(pytree.tree_map_only(Tensor, self._result, result))
        self.kernels.append(LoggedKernel(func, *located, results, states))
        return result

    def note_copy(self, storage: UntypedStorage, copy: UntypedStorage) -> None:
        """Logs a copy of a whole storage."""
        source, target = self._location(bytes_of(storage)), self._result(bytes_of(copy))
        self.kernels.append(LoggedKernel(torch.Tensor.clone, (source,), {}, [target], None))

    def _location(self, tensor: Tensor) -> Location:
        base = base_of(tensor)
        number = self.memory.number_of(base)
        if number is None and tensor.numel() == 0:
            number = self.memory.add(base)
            self.constants.append(base)
        assert number is not None, f"nothing in the log made this {tuple(tensor.shape)} tensor"
        if number < self.earlier and number not in self.contents and base is not tensor:
            with DisableTorchDispatch():
                self.contents[number] = clone_storage(base)
        return Location(number, None if base is tensor else Geometry(tensor))

    def _result(self, tensor: Tensor) -> Location:
        base = base_of(tensor)
        number = self.memory.number_of(base)
        number = self.memory.add(base) if number is None else number
        return Location(number, None if base is tensor else Geometry(tensor))


def base_of(tensor: Tensor) -> Any:
    """Returns the storage of a tensor; of one without a storage itself."""
    storage = storage_of(tensor)
    return tensor if storage is None else storage


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Returns all of a storage as a tensor."""
    with DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextlib.contextmanager
def logged_storage_copies(log: KernelLog) -> Iterator[None]:
    """Logs the copies of storages inside of the block."""

    def logged(storage: UntypedStorage) -> UntypedStorage:
        with DisableTorchDispatch():
            copy = clone_storage(storage)
        log.note_copy(storage, copy)
        return copy

    def copied(storage: UntypedStorage, tensor: Tensor) -> UntypedStorage:
        # as on an accelerator; on the CPU zoo calls memmove
        return logged(storage)

    with (
        mock.patch.object(UntypedStorage, "clone", logged),
        mock.patch.object(storages, "_copied", copied),
    ):
        yield


class SoftwareGraph:
    """The kernels of a capture, and the states in which it found and left the generator."""

    def __init__(self, log: KernelLog, found: bytes, left: bytes) -> None:
        self.kernels, self.constants = log.kernels, log.constants
        self.references, self.earlier = log.memory.references, log.earlier
        self.found, self.left = found, left

    def replay(self) -> None:
        """Calls the kernels."""
        states = {self.found: torch.get_rng_state()}
        # storages of this replay, by their numbers
        memory: dict[int, Any] = {}
        for kernel in self.kernels:
            if kernel.states is not None:
                torch.set_rng_state(states[kernel.states[0]])
            with BelowAutograd(), torch.set_grad_enabled(kernel.grad_enabled):
                args, kwargs = pytree.tree_map_only(
                    Location, lambda at: self._argument(at, memory), (kernel.args, kernel.kwargs)
                )
                results = pytree.tree_leaves(kernel.function(*args, **kwargs))
                self._take_results(kernel.results, results, memory)
            if kernel.states is not None:
                states[kernel.states[1]] = torch.get_rng_state()
        torch.set_rng_state(states[self.left])

    def _argument(self, where: Location, memory: dict[int, Any]) -> Tensor:
        if where.number not in memory:
            memory[where.number] = self.references[where.number]()
            assert memory[where.number] is not None, "a graph reads memory that was freed"
        return where.tensor(memory[where.number])

    def _take_results(
        self, locations: Sequence[Any], results: Sequence[Any], memory: dict[int, Any]
    ) -> None:
        for where, result in zip(locations, results, strict=True):
            if not isinstance(where, Location):
                continue
            base = base_of(result)
            if memory.get(where.number) is base:
                continue
            alive = self.references[where.number]() if where.number not in memory else None
            memory[where.number] = base if alive is None else alive
            if alive is not None:
                where.tensor(alive).copy_(result)
