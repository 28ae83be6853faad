"""Records the kernels of a forward, so that the backward can replay them: rematerialization.

`torch.utils.checkpoint` recomputes a segment by running its Python again, which must then find
everything as it was. Here the user's Python runs once. A dispatch mode below autograd (`recorder`)
records each kernel, and each tensor that autograd saves becomes a handle (`segments`), by which a
replay makes it again:

    kernel        a RecordedKernel: the operator, its arguments, what it made and wrote
    storage       a value for each of its versions; a write makes the next one (`storages`)
    tensor        a reference: a value and a geometry (sizes, strides, offset, dtype; `operands`)
    view          nothing recorded: another geometry
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zoo._torch import Kwargs, PyTree, tracer_modes
from zoo.engine.devices import Draws, PackedDraws, PackedState, RandomStream, indexed, is_same_state
from zoo.engine.kernel_settings import DENORMAL, ONE, Settings, read_settings
from zoo.engine.operands import (
    REFERENCES,
    External,
    ListArgument,
    SparseExternal,
    Value,
    View,
    Write,
)
from zoo.engine.operator_effects import SEQUENCES, Effects, Kernel, flat
from zoo.engine.storages import Storages
from zoo.engine.tensor_state import gone
from zoo.engine.unseen_writes import bytes_of

# arguments without tensors, which most are
ATOMS = {int, float, bool, type(None), str, torch.dtype, torch.layout}
# sparse layouts whose products on the CPU neither convert nor write them
BY_ROWS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr}


class RecordedKernel:
    """One recorded kernel: how to call it, what it made and wrote."""

    # in slots and all set, since a default of a class takes long to read
    __slots__ = (
        "also_reads", "args", "draws", "follows", "function", "index", "is_kept", "kwargs",
        "origin", "outs", "result", "settings", "several", "writes",
    )  # fmt: skip

    def __init__(
        self, function: Kernel, index: int, settings: Settings, args: Sequence[PyTree]
    ) -> None:
        self.function, self.index, self.settings = function, index, settings
        self.args = list(args)
        self.kwargs: dict[str, PyTree] | None = None
        # what it reads beside the values among `args`: of lists, by name, and what it writes
        self.also_reads: Sequence[Value] = ()
        # all that it made or wrote: most make one value, and each object that waits for the
        # backward costs the garbage collector time
        self.result: Value | None = None
        self.several: Sequence[Value] = ()
        # of several results the value of each; None for one that is no new storage
        self.outs: Sequence[Value | None] = ()
        self.writes: Sequence[Write] = ()
        self.draws: PackedDraws | tuple[()] = ()
        # kernels that leave the random streams in the states that this one needs
        self.follows: Sequence[RecordedKernel] = ()
        self.is_kept = False  # it cannot be replayed, so that its results are external
        self.origin: object = None  # where it was called, if there is an observer

    @property
    def results(self) -> Sequence[Value]:
        """All values that it made or wrote."""
        return self.several if self.result is None else (self.result,)

    def reads(self) -> Iterator[Value]:
        """Yields the values that it reads, with repetitions."""
        for argument in self.args:
            if type(argument) is Value or type(argument) is View:
                yield argument.value
        yield from self.also_reads

    def externals(self) -> Iterator[External]:
        """Yields the external tensors among the arguments, with repetitions."""
        operands = [*self.args, *(self.kwargs or {}).values()]
        while operands:
            operand = operands.pop()
            kind = type(operand)
            if kind is ListArgument or kind is SparseExternal:
                operands += operand.parts
            elif kind is Write:
                operands.append(operand.target)
            if kind is External or kind is SparseExternal:
                yield operand


class Recording:
    """The kernels of an outermost segment, and while it is open the storages that they used."""

    def __init__(self, observer: Callable[[], object] | None) -> None:
        self.kernels: list[RecordedKernel] = []
        self.count = 0
        self.storages = Storages()
        self.settings: Settings | None = None
        # the last kernel that drew from each random stream, by its id, and the state after it
        self.last_draws: dict[int, tuple[RandomStream, RecordedKernel, Tensor]] = {}
        self.observer = observer
        # those that were there when it began; a replay is for the same
        self.tracer_modes = tracer_modes()
        self.lock = threading.RLock()

    def settings_for(self, effects: Effects) -> Settings:
        """Returns the present settings, the same object until one changes that a kernel heeds."""
        settings, heeded = self.settings, effects.heeded
        if (
            settings is not None
            and torch.get_default_dtype() is settings[0]
            and torch.get_num_threads() == settings[1]
            and (DENORMAL * ONE == 0) is settings[2]
            and (heeded is None or heeded.are_in(settings))
        ):
            return settings
        now = read_settings()
        if settings is None or now != settings:
            self.settings = settings = now
        return settings

    def encode(self, kernel: RecordedKernel, kwargs: Kwargs) -> None:
        """Replaces the tensors among a kernel's arguments with references."""
        args, refer = kernel.args, self.storages.refer
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                args[position] = reference = refer(value)
                if isinstance(reference, External):
                    self._before_read(reference, value, kernel)
            elif type(value) not in ATOMS:
                args[position] = self._encoded(value, kernel)
        if kwargs:
            named = kwargs.items()
            kernel.kwargs = {name: self._encoded(value, kernel) for name, value in named}

    def _encoded(self, value: PyTree, kernel: RecordedKernel) -> PyTree:
        if isinstance(value, Tensor):
            reference = self._referred(value, kernel)
            if not isinstance(reference, External):
                kernel.also_reads = (*kernel.also_reads, reference.value)
            return reference
        if type(value) is torch.device:
            # another device may be the current one in a replay
            return indexed(value)
        if type(value) in SEQUENCES and not ATOMS.issuperset(map(type, value)):
            parts = [self._encoded(part, kernel) for part in value]
            return ListArgument(parts) if any(type(part) in REFERENCES for part in parts) else value
        return value

    def _referred(self, tensor: Tensor, kernel: RecordedKernel) -> Value | View | External:
        """Returns the reference of a tensor that a kernel is about to read."""
        reference = self.storages.refer(tensor)
        if isinstance(reference, External):
            self._before_read(reference, tensor, kernel)
        return reference

    def _before_read(self, external: External, tensor: Tensor, kernel: RecordedKernel) -> None:
        """Called before a kernel reads an external tensor."""
        is_sparse = type(external) is SparseExternal
        if is_sparse and not (tensor.is_cpu and tensor.layout in BY_ROWS):
            # products with it add by atomics, or convert it and count that as a write
            kernel.is_kept = True
        if not external.is_read and tensor.is_inference():
            # its writes count no version
            kernel.is_kept = True
        elif not external.is_read:
            self.storages.before_read(external)
        elif external.sample is None and not torch.is_grad_enabled():
            # it was first read with gradients on, when no sample was taken
            external.sample = bytes_of(external.tensor)

    def put_writes(
        self,
        kernel: RecordedKernel,
        effects: Effects,
        targets: list[tuple[Tensor, Value | None]],
        kwargs: Kwargs,
    ) -> Kwargs:
        """Replaces each target with a Write; returns the keyword arguments with them."""
        writes = {id(tensor): self._write(kernel, tensor, value) for tensor, value in targets}
        kernel.writes = list(writes.values())

        def put(target: PyTree) -> PyTree:
            if isinstance(target, Tensor):
                return writes[id(target)]
            return target and [writes.get(id(part), part) for part in target]

        kwargs = {**kwargs}
        for position, name in effects.writes:
            if position < len(kernel.args):
                kernel.args[position] = put(kernel.args[position])
            elif name in kwargs:
                kwargs[name] = put(kwargs[name])
        return kwargs

    def _write(self, kernel: RecordedKernel, tensor: Tensor, value: Value | None) -> Write:
        reference = None if value is None else value.refer(tensor)
        if value is None or reference is None:
            return Write(self._referred(tensor, kernel), tensor)
        kernel.also_reads = (*kernel.also_reads, value)
        return Write(reference, tensor)

    def note_draws(self, kernel: RecordedKernel, draws: Draws, first: int) -> None:
        """Notes the random states before a kernel, but for those that one since `first` left."""
        kernel.draws, kernel.follows = states, follows = [], []
        for stream, state in draws:
            after = stream.get_state()
            if is_same_state(after, state):
                continue
            last = self.last_draws.get(id(stream))
            if last is not None and last[1].index >= first and is_same_state(last[2], state):
                follows.append(last[1])
            else:
                states.append((stream, PackedState(state, stream.device)))
            self.last_draws[id(stream)] = stream, kernel, after

    def append(self, kernel: RecordedKernel, effects: Effects, out: PyTree) -> None:
        """Notes what a kernel made and wrote; records the kernel unless that is nothing."""
        if effects.makes:
            note, index = self.storages.note_result, kernel.index
            requires_grad = torch.is_grad_enabled() and _require_grad(kernel.args)
            if isinstance(out, Tensor) and not kernel.writes:
                kernel.result = note(out, index, effects, requires_grad)
            else:
                outs = [note(result, index, effects, requires_grad) for result in flat(out)]
                values = [value for value in outs if value is not None]
                # one list for both where it can be
                kernel.outs = values if len(values) == len(outs) else outs
                kernel.several = values
        for write in kernel.writes:
            tensor, write.scratch = write.scratch, None
            if not isinstance(write.target, External) and tensor is not None:
                write.after = self.storages.written(write.target.value, tensor, kernel.index)
                kernel.several = [*kernel.several, write.after]
        if kernel.result is not None or kernel.several or kernel.writes:
            if self.observer is not None:
                kernel.origin = self.observer()
            self.kernels.append(kernel)
            self.count += 1

    def close(self, kernels: list[RecordedKernel]) -> None:
        """Ends the recording and keeps only these kernels."""
        self.kernels = kernels
        self.storages.close()
        # so that fewer objects wait for the backward
        for kernel in kernels:
            for value in kernel.results:
                value.base, value.saved = gone, ()
                if value.home() is None:
                    value.home = gone
        del self.last_draws


def _require_grad(args: Iterable[PyTree]) -> bool:
    """Returns whether a kernel's arguments include one that requires a gradient."""
    for argument in args:
        kind = type(argument)
        if kind is Value or kind is View:
            requires_grad = argument.requires_grad
        elif kind is External:
            requires_grad = argument.tensor.requires_grad
        elif kind is ListArgument:
            requires_grad = _require_grad(argument.parts)
        else:
            requires_grad = kind is Write or kind is SparseExternal
        if requires_grad:
            return True
    return False
