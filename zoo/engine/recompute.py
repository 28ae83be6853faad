"""Runs a function without keeping what it saves for the backward, and runs it again there.

`torch.utils.checkpoint` does the same. This engine exists because a second run must change nothing:
statistics, random streams and autocast are those of the first run (`state`, `randomness`,
`ambient`), and because it is lean: no import of the compiler at the first call, no custom autograd
function per segment, and segments of a chain share what surrounds them. It stands on
`torch.autograd.graph.saved_tensors_hooks`:

    first run       each tensor that autograd saves is replaced by a holder, an empty box
    backward        the first box that is opened makes its segment run again
    second run      the n-th saved tensor goes into the n-th box; when the last box that anyone
                    still holds is full, the run stops (so a segment that ends with a
                    convolution does not convolve again)

A segment inside a segment keeps no inputs of its own: its inputs are one more thing that the outer
segment's second run delivers, and that run leaves the inner one's boxes empty.

    forward   outer( a  inner( b  c ) )       holds the inputs of outer
    backward  opens c's box   -> inner has no inputs -> outer runs a, keeps a's, hands inner its
                                inputs and stops -> inner runs b c and keeps theirs
              opens a's box   -> is already full

Under `torch.compile` torch's own checkpoint takes over; under `torch.func` the function just runs.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from zoo.engine.ambient import Ambient
from zoo.engine.compiled import Never, run_compiled_segment, uncompiled
from zoo.engine.hooks import Hooks
from zoo.engine.notes import version_of
from zoo.engine.randomness import Stream, read_streams, replayed_streams, sources
from zoo.engine.reach import reach
from zoo.engine.sample import same_numbers, same_values, sample
from zoo.engine.state import State
from zoo.errors import ArgumentError, RecomputeError

Function = Callable[..., Any]


def recompute(function: Function, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)` and keeps only its inputs for the backward.

    A drop-in for `torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)` that is
    exact: outputs, gradients, running statistics and random streams are bit for bit those of the
    plain call. The inside runs a second time in the backward.

    Raises:
        ArgumentError: `use_reentrant=True`, whose first run goes without a graph.
        RecomputeError: in the backward, when an input or a parameter was changed in place since, or
            when the second run saves other tensors than the first.
    """
    if use_reentrant:
        raise ArgumentError("use_reentrant=True cannot be exact; leave it out or pass False")
    if torch.compiler.is_compiling():
        return _recompute_compiled(function, args, kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # the first run gets the caller's own containers, and may append to them
    own = [(args, kwargs)]

    def call(*values: Any) -> Any:
        called = own.pop() if own else pytree.tree_unflatten(values, structure)
        called_args, called_kwargs = called
        return function(*called_args, **called_kwargs)

    roots = (function, *(leaf for leaf in leaves if not isinstance(leaf, Tensor)))
    return run_segment(call, leaves, Ambient.capture(leaves), roots)


def _recompute_compiled(function: Function, args: Any, kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return uncompiled(recompute)(function, *args, **kwargs)
    try:
        return run_compiled_segment(function, *args, **kwargs)
    except Never:
        raise


def run_segment(
    function: Function, inputs: Sequence[Any], ambient: Ambient, roots: Sequence[Any]
) -> Any:
    """Calls `function(*inputs)` as a segment of whatever runs on this thread.

    `roots` are the functions and modules that it runs.
    """
    if not torch.is_grad_enabled() or _is_transformed():
        return function(*inputs)
    return _thread.mode.segment(_Task(function, ambient, roots), inputs)


def is_recomputing() -> bool:
    """Says whether the code that asks is in a second run, on this thread."""
    return _thread.replay is not None


def remember(function: Function) -> Any:
    """Returns `function()`, and in a second run what it returned in the first.

    For what must not happen twice or cannot be repeated: a collective's result, a router's choice,
    a number from outside. Outside a segment it is just the call. Tensors are remembered without
    their history.

    Raises:
        RecomputeError: the second run asks more often than the first did.
    """
    value, moved = _called(function) if _thread.replay is None else _thread.replay.remembered()
    if _thread.recordings:
        kept = pytree.tree_map_only(Tensor, _Remembered, value)
        for recording in _thread.recordings:
            recording.target.remembered.append((kept, moved))
    return value


def _called(function: Function) -> tuple[Any, list[Stream]]:
    """Calls a function, and returns with its value the random streams that it moved."""
    found = (
        [source for source, _ in _thread.recordings[-1].target.streams]
        if _thread.recordings
        else []
    )
    before = read_streams(found)
    # what its value's graph saves is kept with it: no second run makes it again
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        value = function()
    after = read_streams(found)
    pairs = zip(after, before, strict=True)
    return value, [now for now, earlier in pairs if now[1] is not earlier[1]]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Remembered:
    """A tensor that `remember` gives again."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept, self.flag = _Kept(tensor.detach()), tensor.requires_grad

    def again(self) -> Tensor:
        return self.kept.unpack().detach().requires_grad_(self.flag)


class _Task(NamedTuple):
    """A function to run as a segment, what surrounds it and what it runs."""

    function: Function
    ambient: Ambient
    roots: Sequence[Any]


class _Mode:
    """Training as usual: a segment that starts here is an outermost one."""

    def segment(self, task: _Task, inputs: Sequence[Any]) -> Any:
        return _Recording(_Segment(task, None)).run(inputs)


class _Thread(threading.local):
    mode: _Mode = _Mode()
    recordings: tuple["_Recording", ...] = ()
    replay: Optional["_Replay"] = None


_thread = _Thread()


class _Recording(_Mode):
    """A first run: puts an empty holder in the place of each saved tensor.

    It holds no inputs: autograd keeps the pack hook, and so this object, as long as the graph.
    """

    def __init__(self, segment: "_Segment") -> None:
        self.target = segment

    def run(self, inputs: Sequence[Any]) -> Any:
        segment = self.target
        reached = reach(segment.task.roots)
        segment.streams = read_streams(sources(inputs, reached.generators.values()))
        segment.state = State(reached)
        segment.hooks = Hooks(reached)
        if segment.parent is None:
            segment.inputs = _Inputs(inputs)
        earlier = _thread.recordings
        _thread.recordings = (*earlier, self)
        try:
            with segment.hooks.watched():
                outputs = _run_in(self, segment.task.function, inputs)
        finally:
            _thread.recordings = earlier
        segment.state.close()
        if segment.inputs is not None:
            segment.inputs.close()
        return outputs

    def segment(self, task: _Task, inputs: Sequence[Any]) -> Any:
        inner = _Segment(task, self.target)
        self.target.slots.append(weakref.ref(inner))
        return _Recording(inner).run(inputs)

    def pack(self, tensor: Tensor) -> "_Holder | _Kept":
        if self._is_parameter(tensor):
            kept = _Kept(tensor.detach(), "parameter")
            self.target.slots.append(kept)
            return kept
        # on a line of its own: to pass it on is to refer to it once more
        references = sys.getrefcount(tensor)
        holder = _Holder(self.target, tensor, sample(tensor, references))
        self.target.slots.append(weakref.ref(holder))
        return holder

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Says whether a saved tensor is a parameter or a view of one: in memory anyway."""
        assert self.target.state is not None
        base = tensor._base if tensor._base is not None else tensor
        return isinstance(base, Parameter) or self.target.state.owns(base)


class _Replay(_Mode):
    """A second run: fills the holders that are still held, then stops.

    It stops inside the operation that saves the last tensor, before its kernel runs; unless that
    kernel may be about to write one of the tensors that it just saved, as RReLU's does its noise
    (pytorch#193671). Such a tensor has no history and is no input. It is settled when a tensor is
    saved that came out of its operation or of a later one.
    """

    def __init__(self, segment: "_Segment") -> None:
        self.slot = 0
        self.open = {
            number: target
            for number, slot in enumerate(segment.slots)
            if not isinstance(slot, _Kept) and (target := slot()) is not None and target.empty
        }
        self.target = segment
        self.inputs: set[int] = set()
        self.scratch: set[int] = set()
        self.unsettled: int | None = None
        self.next_remembered = 0

    def remembered(self) -> tuple[Any, list[Stream]]:
        known = self.target.remembered
        if self.next_remembered == len(known):
            raise RecomputeError(
                f"the second run of a segment called zoo.remember more often than the first, "
                f"{len(known)} times. The function must do the same work each time."
            )
        value, moved = known[self.next_remembered]
        self.next_remembered += 1
        for source, state in moved:
            source.write(state)
        return pytree.tree_map_only(_Remembered, _Remembered.again, value), moved

    def run(self, inputs: Sequence[Any]) -> None:
        if not self.open:
            return
        segment = self.target
        assert segment.state is not None
        assert segment.hooks is not None
        self.inputs = set(map(id, inputs))
        earlier = _thread.recordings, _thread.replay
        _thread.recordings, _thread.replay = (), self
        try:
            with (
                torch.enable_grad(),
                segment.task.ambient.restored(),
                replayed_streams(segment.streams),
                segment.hooks.acting_only(),
                segment.state.restored() as self.scratch,
            ):
                _run_in(self, segment.task.function, inputs)
        except _Full:
            return
        finally:
            _thread.recordings, _thread.replay = earlier
        if self.open:
            raise RecomputeError(
                f"the second run of a segment saved {self.slot} tensors for the backward, the "
                f"first {len(segment.slots)}; {len(self.open)} are missing. The function must do "
                "the same work each time it is called with the same inputs."
            )

    def segment(self, task: _Task, inputs: Sequence[Any]) -> Any:
        self.unsettled = None
        inner = self._take()
        if inner is not None:
            inner.inputs = _Inputs(inputs)
        self._stop_when_full()
        return super().segment(task, inputs)

    def pack(self, tensor: Tensor) -> "_Kept":
        self._settle(tensor)
        first = self.target.slots[self.slot] if self.slot < len(self.target.slots) else None
        if isinstance(first, _Kept) and self._is_foreign(tensor):
            first.check_same(tensor)
        holder = self._take()
        if holder is not None:
            references = sys.getrefcount(tensor)
            holder.fill(tensor, None if self._is_scratch(tensor) else sample(tensor, references))
        self._stop_when_full()
        return _Kept(tensor.detach())

    def _is_foreign(self, tensor: Tensor) -> bool:
        return id(tensor) not in self.inputs and not self._is_scratch(tensor)

    def _is_scratch(self, tensor: Tensor) -> bool:
        strided = tensor.layout is torch.strided
        return strided and tensor.untyped_storage()._cdata in self.scratch

    def _settle(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            if self.unsettled is not None and tensor.grad_fn._sequence_nr() >= self.unsettled:
                self.unsettled = None
        elif not tensor.requires_grad and id(tensor) not in self.inputs:
            self.unsettled = torch._C._autograd._get_sequence_nr() - 1

    def _take(self) -> Any:
        number, self.slot = self.slot, self.slot + 1
        return self.open.pop(number, None)

    def _stop_when_full(self) -> None:
        if self.open or self.unsettled is not None:
            return
        assert self.target.state is not None
        if not self.target.state.must_end():
            raise _Full


class _Full(BaseException):
    """Every holder is full. No Exception, so that a function's own `except` lets it through."""


class _Segment:
    """One first run of a function: all that is needed to run it again."""

    __slots__ = (
        "__weakref__", "hooks", "inputs", "lock", "parent", "remembered", "slots", "state",
        "streams", "task",
    )  # fmt: skip

    def __init__(self, task: _Task, parent: Optional["_Segment"]) -> None:
        self.task = task
        self.parent = parent
        self.state: State | None = None
        self.hooks: Hooks | None = None
        self.remembered: list[Any] = []
        self.inputs: _Inputs | None = None
        self.streams: list[Stream] = []
        self.slots: list[weakref.ref[_Holder] | weakref.ref[_Segment] | _Kept] = []
        self.lock = threading.RLock()

    @property
    def empty(self) -> bool:
        return self.inputs is None

    def replay(self) -> None:
        """Runs again and fills the holders; an inner segment has its inputs delivered first."""
        with self.lock:
            if self.inputs is None:
                assert self.parent is not None
                self.parent.replay()
                assert self.inputs is not None, "an outer replay delivers to all living segments"
            assert self.state is not None
            values = self.inputs.again()
            self.state.sharded.watch()
            _Replay(self).run(values)
            self.inputs.check(values)
            if torch._C._current_graph_task_id() != -1:
                _at_end_of_backward(weakref.WeakMethod(self.forget))

    def forget(self) -> None:
        """Empties what a backward filled and did not use up."""
        assert self.state is not None
        self.state.sharded.settle()
        for slot in self.slots:
            target = None if isinstance(slot, _Kept) else slot()
            if target is not None:
                target.clear()

    def clear(self) -> None:
        self.inputs = None


class _Holder:
    """The place of one saved tensor: empty until its segment has run again."""

    __slots__ = ("__weakref__", "kept", "kind", "sample", "segment")

    def __init__(self, segment: _Segment, tensor: Tensor, numbers: list[float] | None) -> None:
        self.segment = segment
        self.kind = _kind(tensor)
        self.sample = numbers
        self.kept: _Kept | None = None

    @property
    def empty(self) -> bool:
        return self.kept is None

    def fill(self, tensor: Tensor, numbers: list[float] | None) -> None:
        kind = _kind(tensor)
        if kind != self.kind:
            raise RecomputeError(
                f"the second run of a segment saved {_text(kind)} where the first saved "
                f"{_text(self.kind)}. The function must do the same work each time; call "
                "train() or eval() after the backward, not before it."
            )
        if not same_numbers(self.sample, numbers):
            raise RecomputeError(
                "the second run of a segment computed other numbers than the first: a saved tensor "
                f"{_text(kind)} differs. Something that the function reads was changed where zoo "
                "does not see it, an input was written in place after it was read, or a kernel is "
                "not deterministic. Pass what changes as an argument, change a copy, or take it "
                "through zoo.remember."
            )
        self.kept = _Kept(tensor.detach())

    def clear(self) -> None:
        self.kept = None

    def unpack(self) -> Tensor:
        with self.segment.lock:
            if self.kept is None:
                self.segment.replay()
            kept = self.kept
            assert kept is not None, "a replay fills every holder that is alive"
            if torch._C._current_graph_task_id() == -1:
                self.segment.forget()
            elif torch._C._autograd._get_current_graph_task_keep_graph():
                self.kept = None
            return kept.unpack()


class _Kept:
    """A saved tensor as it is, with a check that nobody changed it since."""

    __slots__ = ("tensor", "version", "what")

    def __init__(self, tensor: Tensor, what: str = "tensor") -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.what = what

    def check_same(self, tensor: Tensor) -> None:
        """Refuses a second run on other parameters, as after `torch.func.functional_call`.

        One that the function makes is made again, to the same values.
        """
        self.unpack()
        same = tensor.untyped_storage()._cdata == self.tensor.untyped_storage()._cdata
        if not same and not same_values(tensor, self.tensor):
            raise RecomputeError(
                f"the second run of a segment uses another parameter {tuple(tensor.shape)} than "
                "the first. Run the backward while the parameters of the forward are in place, "
                "inside whatever swapped them."
            )

    def unpack(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RecomputeError(
                f"a {self.what} {tuple(self.tensor.shape)} that this gradient needs was changed in "
                f"place after it was used (version {self.version}, now {version_of(self.tensor)}). "
                "Change it after the backward, or change a copy."
            )
        return self.tensor


class _Inputs:
    """The inputs of a segment, cut from their graph, with the versions they had.

    An input that the first run wrote in place is known only as the run left it. The second run
    gets a copy of that; if it leaves the copy as it was, the write is one that may be repeated
    (ReLU), and the run is right.
    """

    __slots__ = ("flags", "values", "versions", "written")

    def __init__(self, inputs: Sequence[Any]) -> None:
        # one tensor given twice stays one: attention asks whether `query is key`
        cut = {id(value): value.detach() for value in inputs if isinstance(value, Tensor)}
        self.values = [cut.get(id(value), value) for value in inputs]
        self.flags = [isinstance(value, Tensor) and value.requires_grad for value in inputs]
        self.versions = [_version(value) for value in inputs]
        self.written: list[int] = []

    def close(self) -> None:
        """Looks at the end of the first run what it wrote."""
        now = [_version(value) for value in self.values]
        pairs = zip(self.versions, now, strict=True)
        self.written = [number for number, (one, other) in enumerate(pairs) if one != other]
        self.versions = now

    def check(self, values: Sequence[Any]) -> None:
        """Refuses a second run that changed what the first had written."""
        for number in self.written:
            if not same_values(values[number], self.values[number]):
                raise RecomputeError(
                    f"input {number} of a segment, {tuple(values[number].shape)}, is written in "
                    "place by the function itself and a second run writes something else, so it "
                    "cannot be repeated. Let the function change a copy."
                )

    def again(self) -> list[Any]:
        """Returns the inputs as the function saw them first."""
        for number, (value, version) in enumerate(zip(self.values, self.versions, strict=True)):
            if _version(value) != version:
                raise RecomputeError(
                    f"input {number} of a segment, {tuple(value.shape)}, was changed in place "
                    f"after the forward (version {version}, now {_version(value)}), so the second "
                    "run cannot repeat the first. Change a copy instead."
                )
        made: dict[int, Any] = {}
        for number, value in enumerate(self.values):
            if id(value) not in made:
                made[id(value)] = self._again(number)
        return [made[id(value)] for value in self.values]

    def _again(self, number: int) -> Any:
        value = self.values[number]
        if self.flags[number]:
            value = value.detach().requires_grad_()
        if number in self.written:
            # a leaf that needs a gradient could not be written in place
            with torch.enable_grad():
                value = value.clone()
        return value


def _run_in(mode: Any, function: Function, inputs: Sequence[Any]) -> Any:
    earlier, _thread.mode = _thread.mode, mode
    try:
        with saved_tensors_hooks(mode.pack, _unpack):
            return function(*inputs)
    finally:
        _thread.mode = earlier


def _is_transformed() -> bool:
    """Says whether torch.func, forward-mode derivatives or a tracer are at work.

    The function then just runs, and nothing is saved.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor


def _at_end_of_backward(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    def call() -> None:
        if (alive := method()) is not None:
            alive()

    torch.autograd.Variable._execution_engine.queue_callback(call)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    # nested tensors of the older layout have no shape
    nested = tensor.is_nested and tensor.layout is torch.strided
    return torch.Size() if nested else tensor.shape, tensor.dtype, tensor.device


def _text(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} {dtype} on {device}"
