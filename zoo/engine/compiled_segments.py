"""Segments in graphs of `torch.compile`, which run by torch's own checkpoint.

That one, or the compiler in its place, recomputes a segment in the backward from memory as it is
then. So no graph is compiled that writes memory which a segment reads: a moving average, decayed
weights, `x.mul_(2)`. A complete graph is run on fake tensors to see that. Compilers without
AOTAutograd run the Python of a segment again, with each write and each draw of random numbers, so
that a segment may have none.

    eager      mean.lerp_(x)   x - mean          recorded, replayed: exact
    compiled   mean.lerp_(x)   x - mean          refused: the frame runs uncompiled, which is exact
    compiled   count.add_(1)   batch_norm(x)     by AOTAutograd exact: nothing reads what is written
"""

import functools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.fx import GraphModule, Interpreter

from zoo._torch import Args, FakeTensor, Kwargs, Operator, PyTree, no_graph_error
from zoo.engine.operator_effects import effects_of, statistics_of, tensor_leaves, written_by
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import storage_of
from zoo.errors import RecomputeError, in_a_line

_log = logging.getLogger("zoo")
# compilers that use AOTAutograd
AOT = {"inductor", "aot_eager", "aot_eager_decomp_partition", "aot_ts", "cudagraphs"}
WAYS_OUT = (
    "Leave this block out of zoo.recompute, or out of torch.compile by torch.compiler.disable. "
    "Without fullgraph=True it runs uncompiled, which is exact."
)


def check_graph_of(context: Any) -> None:
    """Registers a check of the graph that is being compiled, which runs once it is complete.

    `context` is the argument of a function that runs at compile time.
    """
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    checks = output.register_finalizer_fns
    if not any(getattr(check, "func", None) is check_graph for check in checks):
        compiler = getattr(output.compiler_fn, "_compiler_name", None)
        output.add_graph_finalizer(functools.partial(check_graph, compiler))


def check_graph(compiler: str | None, graph: GraphModule) -> None:
    """Raises where a segment in a graph reads memory that the graph writes.

    The error is a RecomputeError, and to torch a reason not to compile the frame.
    """
    try:
        what = _refused(graph, compiler)
    except Exception as error:
        what = f"cannot be told apart from what else the graph does ({in_a_line(error, 200)})"
    if what is not None:
        text = f"a segment in a graph of torch.compile {what}. {WAYS_OUT}"
        _warn(text)
        raise _error_class()(text)


@functools.cache
def _warn(text: str) -> None:
    _log.warning(text)


@functools.cache
def _error_class() -> PyTree:
    return type("CompiledSegmentError", (RecomputeError, no_graph_error()), {})


def _refused(graph: GraphModule, compiler: str | None) -> str | None:
    """Returns why the recomputation of a segment would differ; None if it would not."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [_alias(node.meta["example_value"]) for node in inputs]
    modes = {value.fake_mode for value in values if isinstance(value, FakeTensor)}
    if not modes:
        return None
    (mode,) = modes
    shapes: Any = mode.shape_env
    tracer = _AccessTracer()
    tracer.note(values)
    with mode, shapes.ignore_fresh_unbacked_symbols(), tracer:
        _SegmentInterpreter(graph, tracer).run(*values)
    names = {
        id(storage_of(v)): n for n, v in zip(inputs, values, strict=True) if isinstance(v, Tensor)
    }
    for segment in tracer.segments:
        written = segment.reads & segment.written_since
        if compiler in AOT:
            # the backward may start from what the graph was given, where it writes in the end
            written |= segment.reads & tracer.written & set(names)
        for storage in written:
            return f"reads {_name(names.get(storage))}, which the graph writes in place"
        if compiler in AOT:
            continue
        again = f", and by the compiler {compiler!r} its Python runs twice"
        for storage in segment.writes:
            return f"writes {_name(names.get(storage))}{again}"
        if segment.draws:
            return f"draws random numbers{again}"
    return None


def _name(node: torch.fx.Node | None) -> str:
    """Returns the name that a program has for an input of a graph, such as `self.norm.weight`."""
    if node is None:
        return "a tensor"
    source = getattr(node.meta.get("grapharg"), "source", None)
    # a method before torch 2.12
    name = getattr(source, "name", node.name)
    path = re.sub(r"\._(?:modules|buffers|parameters)\b", "", name() if callable(name) else name)
    return re.sub(r"\['(\w+)'\]", r".\1", path).removeprefix("L.").removeprefix("G.")


def _alias(value: PyTree) -> PyTree:
    """Returns a detached tensor of the same memory; any other value itself."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class _Segment:
    """The reads and writes of a segment in memory from outside of it, by ids of storages."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.written_since: set[int] = set()  # by any kernel
        self.draws = False


class _AccessTracer(KernelMode):
    """Traces which storages kernels read and write, in segments and after them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # kept alive, so that no id is reused; and in which order they were first seen
        self._storages: dict[int, tuple[UntypedStorage | None, int]] = {}
        self.written: set[int] = set()
        self.segments: list[_Segment] = []
        self.open: list[_Segment] = []

    def begin(self) -> None:
        """Begins a segment."""
        segment = _Segment(len(self._storages))
        self.segments.append(segment)
        self.open.append(segment)

    def note(self, values: PyTree) -> set[int]:
        """Returns the ids of the storages of tensors, and notes those that are new."""
        storages = set(map(storage_of, tensor_leaves(values))) - {None}
        for storage in storages:
            self._storages.setdefault(id(storage), (storage, len(self._storages)))
        return set(map(id, storages))

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and notes what it reads and writes."""
        kwargs = kwargs or {}
        effects = effects_of(func)
        arguments = self.note((args, kwargs))
        statistics = self.note([*statistics_of(effects, args).values()])
        written = self.note(written_by(effects, args, kwargs)) | statistics
        out = func(*args, **kwargs)
        changed = self.note(out) | written
        # reading a tensor only to write it has no effect
        is_number = not tensor_leaves(out)
        read = {storage for storage in arguments - statistics if is_number or changed - {storage}}
        for segment in self.open:
            segment.reads |= self._of_outside(read, segment)
            segment.writes |= self._of_outside(written, segment)
            segment.draws |= effects.seeded
        self.written |= written
        for segment in self.segments:
            segment.written_since |= written
        return out

    def _of_outside(self, storages: Iterable[int], segment: _Segment) -> set[int]:
        return {storage for storage in storages if self._storages[storage][1] < segment.start}


class _SegmentInterpreter(Interpreter):
    """Runs a graph, and tells the tracer where its segments are."""

    def __init__(self, graph: GraphModule, tracer: _AccessTracer) -> None:
        super().__init__(graph)
        self._tracer = tracer

    def call_function(
        self, target: Callable[..., object] | str, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Calls a function, or runs a segment as a graph in the graph."""
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        graph, *inputs = args
        self._tracer.begin()
        try:
            return _SegmentInterpreter(graph, self._tracer).run(*inputs)
        finally:
            self._tracer.open.pop()
