"""The dispatch mode that records the kernels of a segment, and the base of all such modes."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from zoo._torch import (
    Args,
    Kwargs,
    Operator,
    PyTree,
    TorchDispatchMode,
    disable_current_modes,
    dispatch_modes,
)
from zoo.engine.devices import DRAWING, draws_of
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.operands import External, ScratchArgument, Value
from zoo.engine.operator_effects import (
    EFFECTS,
    NUMBERS,
    Effects,
    Kernel,
    bytes_returned,
    effects_of,
    notice_python_kernels,
    statistics_of,
    tensor_leaves,
    with_tensors,
    written_by,
)
from zoo.engine.recording import RecordedKernel, Recording
from zoo.engine.segments import thread
from zoo.engine.tensor_state import has_own_storage, parts_of_wrapper, storage_of, version_check_of
from zoo.engine.unseen_writes import marked_empty, new_mark, write_mark


class KernelMode(TorchDispatchMode):
    """A dispatch mode that also gets higher-order operators.

    A compiled block inside stays compiled, as one operator, if `keeps_compiled`.
    """

    supports_higher_order_operators = True
    keeps_compiled = False

    def __enter__(self) -> Self:
        _constructors.look()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns whether compiled blocks stay compiled; torch asks."""
        return cls.keeps_compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which is off in here anyway."""
        return False


@contextlib.contextmanager
def out_of_segments() -> Iterator[None]:
    """Runs the block outside of all dispatch modes, if they are all zoo's.

    `torch.jit.trace` loses track of some kernels below any mode, and drops what it computes. A
    constructor, as in `Subclass(tensor)`, refuses the alias that a mode hands out.
    """
    is_own = all(isinstance(mode, KernelMode) for mode in dispatch_modes())
    with disable_current_modes() if is_own else contextlib.nullcontext():
        yield


def _new(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Makes a tensor of a class as torch's own constructor does, also inside of a segment."""
    if torch.compiler.is_compiling() and len(args) == 1 and isinstance(args[0], Tensor):
        # the compiler takes another constructor than torch's for one that cuts the graph
        return args[0].as_subclass(cls)
    with out_of_segments():
        return Tensor.__new__(cls, *args, **kwargs)


class _Constructors:
    """Gives classes of the program that have torch's constructor the one above."""

    def __init__(self) -> None:
        self.count = 0

    def look(self) -> None:
        """Looks at classes that were made since; a class of one of these inherits from it."""
        if len(kinds := Tensor.__subclasses__()) == self.count:
            return
        self.count = len(kinds)
        for kind in kinds:
            if kind.__new__ is Tensor.__new__:
                # as torch's, of an instance also: a function set later would be bound to it
                kind.__new__ = staticmethod(_new)  # type: ignore[assignment]


_constructors = _Constructors()


class Recorder(KernelMode):
    """Records the kernels of an outermost segment; runs all others unrecorded."""

    # saved tensors of a compiled block are kept
    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording: Recording | None = None
        # bytes of results that are kept since their random numbers cannot be drawn again
        self.kept_draws = 0

    def __enter__(self) -> Self:
        notice_python_kernels()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and records it."""
        if types and not all(map(has_own_storage, types)):
            # its own dispatch takes it apart, and the parts come here again
            self._note_wrappers(args, kwargs)
            return NotImplemented
        effects = EFFECTS.get(id(func)) or effects_of(func)
        if args and type(args[0]) in NUMBERS:
            args = with_tensors(func, args)
        if kwargs is None:
            kwargs = {}
        recording = self.recording
        if effects.ignored:
            if effects.detaches and recording is not None:
                function: Kernel = functools.partial(_detach, recording, func)
            else:
                function = func._op
            return function(*args, **kwargs)
        if thread.replaying:
            return with_present_keys(func, args, kwargs)(*args, **kwargs)
        if recording is not None and not effects.simple:
            run = self._run_alone if effects.seeded else self._run
            return run(recording, func, effects, args, kwargs)
        # not the operator, which is a Python function that calls this
        function = kernel_of(func, effects, args, kwargs)
        if recording is None:
            # between the segments of a plan
            written = [*written_by(effects, args, kwargs), *statistics_of(effects, args).values()]
            return self._run_unrecorded(function, effects, written, args, kwargs)
        settings = recording.settings_for(effects)
        kernel = RecordedKernel(function, recording.count, settings, args)
        recording.encode(kernel, kwargs)
        out = function(*args, **kwargs)
        if not kernel.is_kept:
            recording.append(kernel, effects, out)
        return out

    def _note_wrappers(self, args: Args, kwargs: Kwargs | None) -> None:
        """Makes a replay refuse external parts of a wrapper that was written in the meantime."""
        if self.recording is None or thread.replaying:
            return
        for wrapper in tensor_leaves((args, kwargs)):
            for part in parts_of_wrapper(wrapper):
                external = self.recording.storages.refer(part)
                if isinstance(external, External):
                    external.wrapper = version_check_of(wrapper)

    def before_write(self, tensor: Tensor) -> None:
        """Called before a kernel writes an external tensor."""
        if self.recording is not None:
            self.recording.storages.before_write(tensor)

    def _run(
        self, recording: Recording, func: Operator, effects: Effects, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs a kernel that may write, draw random numbers or be nondeterministic."""
        if effects.reshapes:
            self._before_reshape(recording, func, args[0])
            return func(*args, **kwargs)
        if effects.empty:
            return _run_empty(recording, func, effects, args, kwargs)
        function = kernel_of(func, effects, args, kwargs)
        written = written_by(effects, args, kwargs)
        keeps, segment = effects.keeps_results(args, kwargs), thread.segment
        if segment is not None and effects.seeded and not (keeps or effects.makes):
            keeps = segment.count_draw(written)
        draws = draws_of(args, kwargs) if effects.seeded and not keeps else None
        if keeps or (effects.seeded and draws is None):
            out = self._run_unrecorded(function, effects, written, args, kwargs)
            self.kept_draws += 0 if keeps else bytes_returned(out)
            return out
        values = [recording.storages.target(tensor, effects) for tensor in written]
        # all of its results are external tensors that exist already
        is_there = bool(written) and not effects.makes and not any(values)
        # or it may read what it wrote: in a replay each argument has a copy of its own
        if is_there or (None in values and _is_given_twice(written, values, args, kwargs)):
            return self._run_unrecorded(function, effects, written, args, kwargs)
        targets = [*zip(written, values, strict=True)]
        settings = recording.settings_for(effects)
        kernel = RecordedKernel(function, recording.count, settings, args)
        encoded = kwargs
        if written:
            encoded = recording.put_writes(kernel, effects, targets, kwargs)
        elif statistics := statistics_of(effects, args):
            self._leave_out_statistics(kernel, statistics)
        recording.encode(kernel, encoded)
        if kernel.is_kept:
            return self._run_unrecorded(function, effects, written, args, kwargs)
        external = [tensor for tensor, value in targets if value is None]
        out = self._run_unrecorded(function, effects, external, args, kwargs)
        if draws:
            recording.note_draws(kernel, draws, segment.first if segment else recording.count)
        recording.append(kernel, effects, out)
        return out

    def _run_alone(
        self, recording: Recording, func: Operator, effects: Effects, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs a kernel that may draw, while no other thread draws in a segment or a replay."""
        with DRAWING:
            return self._run(recording, func, effects, args, kwargs)

    def _before_reshape(self, recording: Recording, func: Operator, tensor: Tensor) -> None:
        """Notes that a tensor is about to get another geometry or storage: a new version."""
        if (value := recording.storages.value_of(tensor)) is not None:
            recording.storages.reshape(value, tensor)
        else:
            self.before_write(tensor)
        if func._schema.name == "aten::resize_":
            recording.storages.forget(tensor)

    def _run_unrecorded(
        self, function: Kernel, effects: Effects, external: list[Tensor], args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs a kernel unrecorded: the tensors that it writes are external from now on."""
        for tensor in external:
            self.before_write(tensor)
        out = function(*args, **kwargs)
        if effects.lists:
            # below a mode a kernel of lists does not count the versions that it makes
            torch.autograd.graph.increment_version(written_by(effects, args, kwargs))
        return out

    def _leave_out_statistics(self, kernel: RecordedKernel, statistics: dict[int, Tensor]) -> None:
        """Leaves running statistics, which a norm does not read, out of its replay.

        Statistics of another data type choose another kernel, which gets scratch memory for them.
        """
        for position, tensor in statistics.items():
            self.before_write(tensor)
            is_alike = tensor.dtype is kernel.args[0].dtype
            kernel.args[position] = None if is_alike else ScratchArgument(tensor)


def _detach(recording: Recording, func: Operator, tensor: Tensor, **kwargs: PyTree) -> Tensor:
    """Runs an operator whose result shares the memory of its argument, and may outlive it."""
    recording.storages.note_detach(tensor)
    alias: Tensor = func._op(tensor, **kwargs)
    recording.storages.watch_detached(tensor, alias)
    return alias


def _run_empty(
    recording: Recording, func: Operator, effects: Effects, args: Args, kwargs: Kwargs
) -> PyTree:
    """Runs an operator that allocates uninitialized memory; its replay reads no argument."""
    out = func._op(*args, **kwargs)
    # keeping the empty reserve of a norm on the CPU costs less than recording it
    if out.layout is torch.strided and (out.dtype is not torch.uint8 or out.numel()):
        mark = new_mark()
        write_mark(out.untyped_storage(), mark)
        settings = recording.settings_for(effects)
        layout = out.size(), out.stride(), mark
        kernel = RecordedKernel(marked_empty, recording.count, settings, layout)
        kernel.kwargs = {"dtype": out.dtype, "device": out.device}
        recording.append(kernel, effects, out)
    return out


def _is_given_twice(
    written: list[Tensor], values: Sequence[Value | None], args: Args, kwargs: Kwargs
) -> bool:
    """Returns whether a kernel writes external memory that another argument shares."""
    storages = Counter(id(storage_of(tensor)) for tensor in tensor_leaves((args, kwargs)))
    external = (tensor for tensor, value in zip(written, values, strict=True) if value is None)
    return any(storages[id(storage_of(tensor))] > 1 for tensor in external)
