"""Follows every tensor's memory through a training step, on any device or on fake tensors.

torch's own snapshot of memory is for CUDA; its profiler names operations, not what a tensor is for.
Here a dispatch mode sees the storages that operations make, a weak reference sees them go, and what
they were is settled at the end:

    parameters, buffers     those of the model
    optimizer state         in `optimizer.state` after a step of any optimizer
    inputs                  given as such, or read by an operation and older than the block
    gradients               in `.grad` of a parameter after a backward, from when they exist
    recomputed              made in a second run of a part of the model
    saved activations       made before a backward and there when it begins: what autograd saved,
                            what a plan keeps, and outputs that the program still holds
    temporaries             all others

A second run shows by itself: gradients are on inside of a backward. Only a backward that is to be
differentiated has them on, too, which stands where it was called; there the engine is asked.

Sees no memory that kernels take inside of themselves; with `allocator=True` torch's profiler sees
it (CPU), and the timeline then has every allocation, those without a tensor as "unseen". Under
`torch.compile` a tracked model runs uncompiled, as under any dispatch mode.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator, ExitStack
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zoo.engine.recompute import is_recomputing, observed, origin
from zoo.errors import ArgumentError, shortened
from zoo.measure.lives import BEFORE, Life, Record, settle
from zoo.measure.memory import AllocatorEvents, storages_of, tensors_in
from zoo.measure.optimizer import is_optimizer
from zoo.measure.places import NOWHERE, Place, Places, is_differentiated
from zoo.measure.sharded import sharded_parts
from zoo.measure.timeline import Timeline

_UNSHAPED = torch.empty(0, device="meta")
_FSDP = "torch.distributed.fsdp."
_LIFT = torch.ops.aten.lift_fresh.default
_DEVICE = torch.ops.prim.device.default


class Tracker(ContextDecorator):
    """Tracks a block of code; `timeline` is that of the latest one.

    Raises:
        ArgumentError: no module, or the events of an allocator that is not the CPU's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Any = (),
        allocator: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"tracking needs a torch.nn.Module; got {type(model).__name__}")
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if optimizer is not None and not is_optimizer(optimizer):
            raise ArgumentError(
                "optimizer= is the optimizer that steps in the block; got "
                f"{getattr(optimizer, '__name__', None) or shortened(optimizer)}"
            )
        if allocator and self.device.type != "cpu":
            raise ArgumentError(
                "allocator=True reads the events of the CPU's allocator; the model is on "
                f"{self.device}. Leave it out and compare with torch.cuda.max_memory_allocated()"
            )
        self.model, self.optimizer, self.inputs = model, optimizer, inputs
        self.allocator = allocator
        self.timeline = Timeline()
        self._open: list[ExitStack] = []

    def __call__(self, function: Any) -> Any:
        """Tracks each call of a function."""
        if not callable(function):
            raise ArgumentError(
                f"as a decorator, track takes a function; got {type(function).__name__}. Or write "
                "with zoo.track(model) as timeline:"
            )
        return super().__call__(function)

    def __enter__(self) -> Timeline:
        """Starts, and returns the timeline that is filled when the block ends."""
        self.timeline = Timeline(type(self.model).__name__, str(self.device))
        with ExitStack() as opening:
            opening.enter_context(self._tracked(self.timeline))
            self._open.append(opening.pop_all())
        return self.timeline

    def __exit__(self, *error: Any) -> None:
        """Stops and fills the timeline, also after an exception."""
        self._open.pop().__exit__(*error)

    @contextlib.contextmanager
    def _tracked(self, timeline: Timeline) -> Iterator[None]:
        recorder = Recorder(self.model)
        recorder.note_resident(self.optimizer, self.inputs)
        events = AllocatorEvents() if self.allocator else None
        try:
            with events or contextlib.nullcontext(), recorder.listening():
                yield
        except BaseException as error:
            timeline.error = repr(error)
            raise
        finally:
            recorder.look_around(self.optimizer)
            recorder.close()
            settle(timeline, recorder.record, None if events is None else events.events)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations make on this thread, and in the backwards it starts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.places = Places(model)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.record = Record()
        self.alive: dict[int, _End] = {}
        self.made_by: dict[int, Place] = {}
        self.phase, self.place = "", NOWHERE
        self.task = -1
        self.thread = threading.get_ident()
        self.stepping = 0
        self.is_forward = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens inside the block, to operations and to optimizers."""
        with ExitStack() as hooks:
            before: Any = register_optimizer_step_pre_hook(self._begin_optimizer)
            hooks.callback(before.remove)
            after: Any = register_optimizer_step_post_hook(self._end_optimizer)
            hooks.callback(after.remove)
            hooks.enter_context(self._resizing())
            hooks.enter_context(observed(lambda: self.place))
            hooks.enter_context(self)
            yield

    def note_resident(self, optimizer: torch.optim.Optimizer | None, inputs: Any) -> None:
        """Notes what is there before the block."""
        for name, parameter in self.model.named_parameters():
            self._assign(parameter, "parameters", name)
        self.look_around(optimizer)
        for tensor in tensors_in(inputs):
            self._assign(tensor, "inputs")

    def look_around(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Notes what is in buffers, in gradients and in the optimizer's state by now."""
        for name, buffer in self.model.named_buffers():
            self._assign(buffer, "buffers", name)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._assign(parameter.grad, "gradients", name)
        for owner, state in optimizer.state.items() if optimizer is not None else ():
            for tensor in tensors_in(state):
                self._assign(tensor, "optimizer state", self.names.get(id(owner), ""))

    def close(self) -> None:
        """Hears of no more ends, and says where in the model what has a name belongs."""
        self.alive.clear()
        for life in self.record.lives:
            if life.name:
                life.place = self.places.of_module(life.name.rpartition(".")[0], life.place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes the storages that are new in its result."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most of what is asked of fake tensors, and no operation
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # operations on what it wraps follow
        place = self._begin_operation(sys._getframe(1))
        # a replay reads copies, too, of what the program may have changed since
        for tensor in () if is_recomputing() else given:
            for storage in storages_of(tensor):
                if storage._cdata not in self.alive:
                    self._add(storage, tensor, place, resident=func is not _LIFT)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            for storage in storages_of(tensor):
                self._look(storage, tensor, place)
        return result

    @contextlib.contextmanager
    def _resizing(self) -> Iterator[None]:
        """Notes what FSDP2 fills and empties: whole parameters, in storages that it resizes.

        No operation does that, so that a dispatch mode does not see it.
        """
        if not sharded_parts(self.model):
            yield
            return
        resize = torch.UntypedStorage.resize_

        def noted(storage: Any, size: int) -> Any:
            caller = sys._getframe(1)
            place = self._begin_operation(caller)
            resize(storage, size)
            self._look(storage, _UNSHAPED, place)
            if size and caller.f_globals.get("__name__", "").startswith(_FSDP):
                self.alive[storage._cdata].life.category = "parameters"
            return storage

        with mock.patch.object(torch.UntypedStorage, "resize_", noted):
            yield

    def _look(self, storage: Any, tensor: Tensor, place: Place) -> None:
        known = self.alive.get(storage._cdata)
        if known is not None and known.life.bytes != storage.nbytes():
            self._gone(known)  # it was resized: another allocation
            known = None
        if known is None:
            self._add(storage, tensor, place)

    def _assign(self, tensor: Tensor, category: str, name: str = "") -> None:
        for storage in storages_of(tensor):
            if storage._cdata not in self.alive:
                self._add(storage, tensor, NOWHERE, resident=True)
            end = self.alive.get(storage._cdata)  # one without bytes is not noted
            if end is not None and not end.life.category:
                life = end.life
                life.category, life.name = category, name

    def _add(self, storage: Any, tensor: Tensor, place: Place, *, resident: bool = False) -> None:
        if not storage.nbytes():
            return
        life = Life(
            storage.nbytes(),
            self.record.now(),
            resident=resident,
            phase=BEFORE if resident else self.phase,
            place=place,
            shape=tuple(map(int, tensor.shape)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            address=_address(storage),
        )
        self.record.lives.append(life)
        self.alive[storage._cdata] = _End(storage, self._gone, life)

    def _gone(self, end: "_End") -> None:
        end.life.died = self.record.now()
        if self.alive.get(end.key) is end:
            del self.alive[end.key]

    def _begin_operation(self, frame: FrameType) -> Place:
        """Settles the phase of an operation and returns its place."""
        task = torch._C._current_graph_task_id()
        if self.task != task and -1 in (self.task, task):
            self._change_task(task)
        if task != -1 and not self._is_second_run(frame):
            place = self._place_of_node()
            self._set_phase("backward", place)
            return place
        place = origin() or self.places.here(frame)
        if task != -1:
            self._set_phase("recompute", place)
            return place
        self.made_by.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        self.is_forward |= self.places.inside
        phase = "optimizer" if self.stepping else "forward" if self.is_forward else "other"
        self._set_phase(phase, place)
        return place

    def _change_task(self, task: int) -> None:
        self.task, self.is_forward = task, False
        if task == -1:
            self.look_around()
            return
        # at its end, since the program may drop the gradients before the next operation
        torch.autograd.Variable._execution_engine.queue_callback(self.look_around)
        for end in list(self.alive.values()):
            end.life.saved |= end.life.phase in ("forward", "other")

    def _is_second_run(self, frame: FrameType) -> bool:
        if not torch.is_grad_enabled():
            return False
        # the backward of a GPU is on a thread of its own, whose stack does not say who began it
        own = threading.get_ident() == self.thread
        caller = frame if own else sys._current_frames().get(self.thread)
        return is_recomputing() or not is_differentiated(caller)

    def _place_of_node(self) -> Place:
        node: Any = torch._C._current_autograd_node()
        name = self.names.get(id(getattr(node, "variable", None)))
        if name is not None:
            return self.places.of_module(name.rpartition(".")[0])
        return self.made_by.get(node._sequence_nr(), NOWHERE) if node is not None else NOWHERE

    def _set_phase(self, phase: str, place: Place) -> None:
        if phase != self.phase or place is not self.place:
            self.phase, self.place = phase, place
            self.record.trail.append((self.record.now(), phase, place))

    def _begin_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.stepping += 1
        self.look_around(optimizer)

    def _end_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.look_around(optimizer)
        self.stepping, self.is_forward = max(self.stepping - 1, 0), False


class _End(weakref.ref[Any]):
    """A weak reference to a storage that knows whose life ends with it."""

    __slots__ = ("key", "life")

    def __new__(cls, storage: Any, gone: Any, life: Life) -> "_End":
        return super().__new__(cls, storage, gone)

    def __init__(self, storage: Any, gone: Any, life: Life) -> None:
        super().__init__(storage, gone)  # type: ignore[call-arg]
        self.key, self.life = storage._cdata, life


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    # the arguments of operations hold lists of tensors, and nothing deeper
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def _address(storage: Any) -> int:
    # that of a fake tensor, too, is on the meta device
    return 0 if storage.device.type == "meta" else int(storage.data_ptr())
