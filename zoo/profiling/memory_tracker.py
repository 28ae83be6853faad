"""Memory tracker: the lifetime of every storage in a training step, on any device or fake tensors.

torch's memory snapshot is for CUDA; its profiler names operations, not the purpose of a tensor.
Here a dispatch mode sees the storages that operations allocate, and a weak reference sees each one
freed. The category of a storage is known after the tracked block of code:

    parameters, buffers     those of the model
    optimizer state         in `optimizer.state` after a step of any optimizer
    inputs                  passed as `inputs`, or older than the block and read by an operation
    gradients               in `.grad` of a parameter after a backward, or used by an optimizer
                            in the backward; from when they exist
    recomputed              allocated in a recomputation
    saved activations       allocated before a backward and alive when it begins: saved tensors, and
                            outputs that the program still holds
    temporaries             all others
    on the host             offloaded, without memory on the device

Within a backward, grad mode is on during a recomputation. It is also on throughout a backward with
`create_graph`, which is read from the caller's frame; then only the engine's replays count.

Kernel workspaces belong to no tensor. With `allocator=True` torch's profiler records the events of
the CPU's allocator. Each storage gets the exact times of the block at its address; blocks without a
storage are "kernel workspace":

    allocator   address 7   +64 .............. -64       address 9   +512 -512
    storage     address 7      seen ..... gone           none: a "kernel workspace"

Under `torch.compile` a tracked model runs uncompiled, as under any dispatch mode.
"""

import bisect
import contextlib
import functools
import itertools
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zoo._torch import (
    Args,
    FakeTensor,
    Kwargs,
    Operator,
    PyTree,
    TorchDispatchMode,
    current_backward,
    current_node,
    is_traceable_wrapper_subclass,
    queue_callback,
    replaced,
    sequence_number,
)
from zoo.engine import devices, host_memory
from zoo.engine.devices import cpu_events
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.operator_effects import effects_of
from zoo.engine.recompute import observed
from zoo.engine.segments import thread
from zoo.engine.tensor_state import alive
from zoo.errors import ArgumentError, shortened
from zoo.invocation import check_module, device_of
from zoo.optimizer.in_backward import observed_gradients
from zoo.profiling.fake_results import LIFT
from zoo.profiling.fake_tensors import DEVICE
from zoo.profiling.optimizer_memory import is_optimizer
from zoo.profiling.source_location import UNKNOWN, Location, Locations, is_differentiated
from zoo.profiling.tensor_spec import storages_of, tensors_in
from zoo.profiling.timeline import HOST, WORKSPACE, Allocation, Mark, Timeline

F = TypeVar("F", bound=Callable[..., object])
_UNSHAPED = torch.empty(0, device="meta")
_FSDP = "torch.distributed.fsdp."


@dataclass(slots=True)
class StorageLifetime:
    """The lifetime of a storage, or of a block of the allocator; times in nanoseconds.

    `resident`: older than the tracked code. `saved`: allocated before a backward and alive when
    the backward began. `category`: "" until it is known. `on_host`: offloaded.
    """

    bytes: int
    born: int
    died: int | None = None
    category: str = ""
    saved: bool = False
    resident: bool = False
    phase: str = ""
    location: Location = UNKNOWN
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    address: int = 0
    on_host: bool = False

    def allocation(self, start: int, end: int | None) -> Allocation:
        """Returns the `Allocation` from one point of a timeline to another."""
        own = "saved activations" if self.saved else "temporaries"
        own = "recomputed" if self.phase == "recompute" else own
        category = HOST if self.on_host else self.category or ("inputs" if self.resident else own)
        origin = (self.phase, *self.location, self.shape, self.dtype, self.name)
        return Allocation(self.bytes, start, end, category, *origin)


class Tracker(ContextDecorator):
    """Tracks a block of code, as `zoo.track` says; `timeline` is that of the latest block.

    What it left, `remaining`, counts in the next block from the start until it is freed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        inputs: PyTree,
        allocator: bool,
    ) -> None:
        check_module(model, "tracking")
        self.device = device_of(model)
        if optimizer is not None and not is_optimizer(optimizer):
            raise ArgumentError(
                "optimizer= takes the optimizer that steps in the block; got "
                f"{getattr(optimizer, '__name__', None) or shortened(optimizer)}"
            )
        if allocator and self.device.type != "cpu":
            raise ArgumentError(
                "allocator=True reads the events of the CPU's allocator; the model is on "
                f"{self.device}. Leave it out and compare with "
                "torch.accelerator.max_memory_allocated()"
            )
        self.model, self.optimizer, self.inputs = model, optimizer, inputs
        self.allocator, self.timeline = allocator, Timeline()
        self.remaining: list[weakref.ref[UntypedStorage]] = []
        self._open: list[AbstractContextManager[None]] = []

    def __call__(self, function: F) -> F:
        """Tracks each call of a function."""
        if not callable(function):
            raise ArgumentError(
                f"as a decorator, track takes a function; got {type(function).__name__}. Or write "
                "with zoo.track(model) as timeline:"
            )
        return super().__call__(function)

    def __enter__(self) -> Timeline:
        """Starts tracking; returns the timeline, which is filled when the block ends."""
        self.timeline = Timeline(type(self.model).__name__, str(self.device))
        block = self._tracked(self.timeline)
        block.__enter__()
        self._open.append(block)
        return self.timeline

    def __exit__(self, *error: Any) -> None:
        """Stops tracking and fills the timeline, also after an exception."""
        self._open.pop().__exit__(*error)

    @contextlib.contextmanager
    def _tracked(self, timeline: Timeline) -> Iterator[None]:
        recorder = StorageRecorder(self.model)
        recorder.record_resident(self.optimizer, self.inputs, alive(self.remaining))
        events = None
        counts = (
            not any(isinstance(p, FakeTensor) for p in self.model.parameters())
            and devices.reserved_peak(self.device) is not None
        )
        if counts:
            devices.reset_peak(self.device)
        try:
            recorded = cpu_events() if self.allocator else contextlib.nullcontext()
            with recorded as events, recorder.listening():
                yield
        except BaseException as error:
            timeline.error = repr(error)
            raise
        finally:
            recorder.record_states(self.optimizer)
            self.remaining = [*map(weakref.ref, alive(recorder.ends.values()))]
            recorder.fill(timeline, events)
            timeline.reserved_peak = devices.reserved_peak(self.device) if counts else None


class StorageRecorder(TorchDispatchMode):
    """Records the storages that operations allocate on this thread and in its backwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.locations = Locations(model)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.lifetimes: list[StorageLifetime] = []
        self.trail: list[tuple[int, str, Location]] = []  # when phase or location changed
        self.alive: dict[int, StorageLifetime] = {}
        self.ends: dict[int, weakref.ref[UntypedStorage]] = {}
        self.node_locations: dict[int, Location] = {}
        self.phase, self.location, self.is_forward = "", UNKNOWN, True
        self.task, self.thread = -1, threading.get_ident()
        self.stepping = self.latest = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records operations and optimizers' steps inside the block."""
        with (
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
            self._resizing(),
            observed_gradients(self._record_gradient),
            observed(lambda: self.location),
            self,
        ):
            yield

    def record_resident(
        self,
        optimizer: torch.optim.Optimizer | None,
        inputs: PyTree,
        others: Iterable[UntypedStorage],
    ) -> None:
        """Records the storages that are older than the block."""
        self._categorize("parameters", self.model.named_parameters())
        self.record_states(optimizer)
        self._categorize("inputs", (("", tensor) for tensor in tensors_in(inputs)))
        for storage in others:
            self._record(storage, _UNSHAPED, UNKNOWN, resident=True)

    def record_states(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Records buffers, gradients and the optimizer's state as they are now."""
        self._categorize("buffers", self.model.named_buffers())
        self._categorize("gradients", ((n, p.grad) for n, p in self.model.named_parameters()))
        for owner, state in optimizer.state.items() if optimizer is not None else ():
            name = self.names.get(id(owner), "")
            self._categorize("optimizer state", ((name, tensor) for tensor in tensors_in(state)))

    def fill(self, timeline: Timeline, events: Iterable[tuple[int, int, int]] | None) -> None:
        """Fills a timeline; `events` are the allocator's (nanoseconds, address, bytes) or None."""
        # from here on no storage's end is recorded
        self.alive.clear()
        self.ends.clear()
        for life in self.lifetimes:
            if life.name:
                module = life.name.rpartition(".")[0]
                life.location = self.locations.of_module(module, life.location)
        timeline.allocator = events is not None
        lifetimes = self.lifetimes if events is None else [*self.lifetimes, *self._match(events)]
        births = [(life.born, number) for number, life in enumerate(lifetimes) if not life.resident]
        deaths = [(life.died, ~n) for n, life in enumerate(lifetimes) if life.died is not None]
        changes = sorted([*births, *deaths])
        points = {number: point for point, (_, number) in enumerate(changes, 1)}
        timeline.length = len(changes)
        timeline.allocations = [
            life.allocation(points.get(number, 0), points.get(~number))
            for number, life in enumerate(lifetimes)
        ]
        moments = [moment for moment, _ in changes]
        # if several phases begin at one point, only the last one allocated anything
        phases = {bisect.bisect(moments, moment): phase for moment, phase, _ in self.trail}
        runs = itertools.groupby(phases.items(), key=operator.itemgetter(1))
        timeline.phases = [Mark(*next(run)) for _, run in runs]

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs an operation and records the storages that are new in its result."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # no operation, and by far the most frequent call
        kwargs = kwargs or {}
        arguments = tensors_in((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, arguments)):
            return NotImplemented  # operations on the wrapped tensors follow
        location = self._begin_operation(sys._getframe(1))
        # a replay's inputs may be the engine's own copies
        for tensor in () if thread.replaying else arguments:
            for storage in storages_of(tensor):
                self._record(storage, tensor, location, resident=func is not LIFT)
        # by the dispatch keys of the program: autocast casts inside of some kernels
        if thread.replaying:
            kernel = with_present_keys(func, args, kwargs)
        else:
            kernel = kernel_of(func, effects_of(func), args, kwargs)
        result = kernel(*args, **kwargs)
        for tensor in tensors_in(result):
            for storage in storages_of(tensor):
                self._record_result(storage, tensor, location)
        return result

    @contextlib.contextmanager
    def _resizing(self) -> Iterator[None]:
        """Records what is allocated by resizing storages, without an operation.

        FSDP2 gathers parameters so, and what was offloaded comes back so.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> UntypedStorage:
            caller = sys._getframe(1)
            name, life = caller.f_globals.get("__name__", ""), self.alive.get(storage._cdata)
            location = self._begin_operation(caller)
            resize(storage, size)
            if name == host_memory.__name__ and life is not None:
                self._move(storage, life)
                return storage
            self._record_result(storage, _UNSHAPED, location)
            if size and name.startswith(_FSDP):
                self.alive[storage._cdata].category = "parameters"
            return storage

        with replaced(torch.UntypedStorage, "resize_", resized):
            yield

    def _move(self, storage: UntypedStorage, life: StorageLifetime) -> None:
        """Records that a storage was copied to the host, or back."""
        self._freed(storage._cdata, life)
        moved = replace(life, born=self._now(), died=None, saved=True, address=0)
        moved.category = life.category or "inputs" * life.resident
        moved.resident, moved.on_host = False, not storage.nbytes()
        if storage.nbytes() and storage.device.type != "meta":
            moved.address = int(storage.data_ptr())
        self._begin(storage, moved)

    def _record_gradient(self, parameter: Tensor) -> None:
        self._categorize("gradients", [(self.names.get(id(parameter), ""), parameter.grad)])

    def _record_result(self, storage: UntypedStorage, tensor: Tensor, location: Location) -> None:
        lifetime = self.alive.get(storage._cdata)
        if lifetime is not None and lifetime.bytes != storage.nbytes():
            self._freed(storage._cdata, lifetime)  # resizing makes a new allocation
        self._record(storage, tensor, location)

    def _categorize(self, category: str, named: Iterable[tuple[str, Tensor | None]]) -> None:
        tensors = ((name, tensor) for name, tensor in named if tensor is not None)
        for name, tensor in tensors:
            for storage in storages_of(tensor):
                self._record(storage, tensor, UNKNOWN, resident=True)
                life = self.alive.get(storage._cdata)  # None for a storage without bytes
                if life is not None and not life.category:
                    life.category, life.name = category, name

    def _record(
        self, storage: UntypedStorage, tensor: Tensor, location: Location, *, resident: bool = False
    ) -> None:
        key = storage._cdata
        if key in self.alive or not storage.nbytes():
            return
        # a fake tensor's storage is on the meta device, too
        is_real = storage.device.type != "meta"
        life = StorageLifetime(
            storage.nbytes(),
            self._now(),
            resident=resident,
            phase="before" if resident else self.phase,
            location=location,
            shape=tuple(map(int, tensor.shape)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            address=int(storage.data_ptr()) if is_real else 0,
        )
        self._begin(storage, life)

    def _begin(self, storage: UntypedStorage, life: StorageLifetime) -> None:
        key = storage._cdata
        self.lifetimes.append(life)
        self.alive[key] = life
        self.ends[key] = weakref.ref(storage, functools.partial(self._freed, key, life))

    def _freed(self, key: int, life: StorageLifetime, _: object = None) -> None:
        life.died = self._now()
        if self.alive.get(key) is life:
            del self.alive[key], self.ends[key]

    def _now(self) -> int:
        """Returns the clock's nanoseconds, more with each call."""
        self.latest = max(self.latest + 1, time.time_ns())
        return self.latest

    def _begin_operation(self, frame: FrameType) -> Location:
        """Decides the phase of an operation and returns its source location."""
        task = current_backward()
        if self.task != task and -1 in (self.task, task):
            self._change_task(task)
        if task != -1 and not self._is_recomputation(frame):
            phase, location = "backward", self._location_of_node()
        else:
            phase, origin = "recompute", thread.origin
            location = origin if isinstance(origin, Location) else self.locations.here(frame)
        if task == -1:
            self.node_locations.setdefault(sequence_number() - 1, location)
            self.is_forward |= self.locations.inside
            phase = "optimizer" if self.stepping else "forward" if self.is_forward else "other"
        if phase != self.phase or location is not self.location:
            self.phase, self.location = phase, location
            self.trail.append((self._now(), phase, location))
        return location

    def _change_task(self, task: int) -> None:
        self.task, self.is_forward = task, False
        if task == -1:
            self.record_states()
            return
        # at the end of the backward: the program may drop the gradients before the next operation
        queue_callback(self.record_states)
        for life in list(self.alive.values()):
            life.saved |= life.phase in ("forward", "other")

    def _is_recomputation(self, frame: FrameType) -> bool:
        if not torch.is_grad_enabled():
            return False
        # a GPU's backward has its own thread, whose stack does not show the call that began it
        own = threading.get_ident() == self.thread
        caller = frame if own else sys._current_frames().get(self.thread)
        return thread.replaying or not is_differentiated(caller)

    def _location_of_node(self) -> Location:
        node = current_node()
        name = self.names.get(id(getattr(node, "variable", None)))
        if name is not None:
            return self.locations.of_module(name.rpartition(".")[0])
        return UNKNOWN if node is None else self.node_locations.get(node._sequence_nr(), UNKNOWN)

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.stepping += 1
        self.record_states(optimizer)

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.record_states(optimizer)
        self.stepping, self.is_forward = max(self.stepping - 1, 0), False

    def _match(self, events: Iterable[tuple[int, int, int]]) -> list[StorageLifetime]:
        """Gives each storage the times of its block; returns the blocks without a storage."""
        workspaces: dict[int, StorageLifetime] = {}
        alive: dict[int, StorageLifetime] = {}
        seen = sorted(self.lifetimes, key=lambda life: -life.born)
        for moment, address, size in (*events, (sys.maxsize, 0, 0)):
            while seen and seen[-1].born < moment:
                life = seen.pop()
                block = alive.get(life.address)
                if block is not None and id(block) in workspaces and block.bytes >= life.bytes:
                    life.born, life.died, life.resident = block.born, None, False
                    alive[life.address] = life
                    del workspaces[id(block)]
            if size > 0:
                block = StorageLifetime(size, moment, category=WORKSPACE, address=address)
                alive[address] = workspaces[id(block)] = block
            elif address in alive:
                alive.pop(address).died = moment
        trail = [(0, "other", UNKNOWN), *self.trail]
        for block in workspaces.values():
            index = bisect.bisect(trail, block.born, key=operator.itemgetter(0)) - 1
            _, block.phase, block.location = trail[index]
        return [*workspaces.values()]
