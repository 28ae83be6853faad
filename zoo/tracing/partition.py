"""Cuts a traced training step into the steps that a plan keeps or recomputes.

    kernels  view t addmm view | gelu | view t addmm view | empty bernoulli_ div_ | mul | ...
    state    x                   x      x                   x                       x, mask

The state between two steps is every storage that a later kernel reads. There is no cut

- right before a write in place to what the kernel before has just touched;
- between the kernel that makes a tensor and a write to it that no replay may repeat;
- inside of the forward of an `autograd.Function`;
- right before an operator that computes nothing, such as a view or an empty tensor. It belongs to
  the kernel after it, or to the one before it if it reads something within the same module;
- behind an operator that gathers parameters which are spread over processes.

Steps are grouped into blocks, the repeated units of a model that people checkpoint:

    Sequential / ModuleList of stages      layers.0, layers.1
        Sequential / ModuleList of blocks      layers.0.blocks.0   <- a block
            attention, mlp                         no blocks: nothing repeats them in a row

A block is a module with children and a forward of its own, of a class that occurs at least twice,
and that contains no row of such modules itself: the blocks are the modules that a stage repeats,
not the stage. If a model has none, its blocks are the Sequentials in a row, or its children.
Kernels between two blocks belong to the first of them.
"""

import fnmatch
import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zoo.errors import ArgumentError, nearest
from zoo.planner.step_log import Allocated, KernelRun, Saved, Viewed
from zoo.profiling.log_profile import LoggedOutline, LoggedStep
from zoo.tracing.isolated_trace import StepTrace
from zoo.tracing.tracer import Call, Graph

# kernels whose results a later kernel fills
EMPTY = ("aten.empty", "aten.new_empty")
# those by which fully sharded data parallelism gathers the parameters of the module that comes
GATHERING = ("fsdp.", "c10d._allgather_base_")
ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# attributes that are true while a model checkpoints itself, and how to turn that off
SWITCHES = {
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
    "gradient_checkpointing": "model.gradient_checkpointing_disable()",
    "memory_efficient": "building it with memory_efficient=False",
    "use_checkpoint": "building it with use_checkpoint=False",
    "with_cp": "building it with with_cp=False",
}


@dataclass(slots=True)
class _Touched:
    """The storages that an operator was given, wrote and made.

    Those in `kept` it wrote in a way that no replay repeats.
    """

    given: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


def partition(model: nn.Module, trace: StepTrace, blocks: Collection[str]) -> LoggedOutline:
    """Cuts a model's training step into steps; `blocks` are the paths of its blocks."""
    graph, touched = trace.graph, _touched(trace)
    calls = [call for call in graph.calls if call.index in touched and call.index < graph.of_model]
    starts = _cuts(calls, touched, _functions(trace))
    parts = [calls[start:end] for start, end in itertools.pairwise([*starts, len(calls)])]
    of_calls = _blocks(calls, blocks)
    ends = [*starts[1:], len(calls)]
    firsts = [next(filter(None, of_calls[s:e]), "") for s, e in zip(starts, ends, strict=True)]
    runs = itertools.groupby(firsts)
    # a step of several kernels, which an in-place write holds together, may be a segment alone
    made = [sum(not _is_light(call, touched) for call in part) for part in parts]
    cuts = [0, *(part[-1].index + 1 for part in parts)][: len(parts)]
    names = _Names(model, touched).of(parts)
    return LoggedOutline(
        steps=tuple(map(LoggedStep, names)),
        blocks=tuple(number for number, (_, run) in enumerate(runs) for _ in run),
        whole=frozenset(number for number, count in enumerate(made) if count > 1),
        log=trace.log,
        specs=trace.specs,
        shapes=tuple(_shapes(part, touched) for part in parts),
        parameters=tuple(
            _parameters(graph, *ends) for ends in itertools.pairwise([*cuts, graph.of_model])
        ),
        cuts=(*cuts, *([graph.of_model] if trace.has_loss else ())),
    )


def _touched(trace: StepTrace) -> dict[int, _Touched]:
    """Returns what each operator did to the storages of the log, if it did something."""
    found: defaultdict[int, _Touched] = defaultdict(_Touched)
    for index, event in trace.log.forward:
        if isinstance(event, Allocated):
            found[index].made.add(event.storage)
        elif isinstance(event, Viewed):
            found[index].given.add(event.storage)
        elif isinstance(event, KernelRun):
            found[index].given |= event.reads
            found[index].written |= event.writes
            found[index].kept |= event.writes & event.keeps
    return found


def _functions(trace: StepTrace) -> set[int]:
    """Returns the operators at which no step begins since they are inside of one function.

    An `autograd.Function` is a node before its forward calls the first operator, and saves tensors
    after the last one.
    """
    found, latest = set[int](), -1
    for operator, event in trace.log.forward:
        if isinstance(event, Saved):
            found.update(range(operator + 1, latest + 1))
        elif isinstance(event, KernelRun | Viewed):
            latest = max(latest, operator)
    return found


def _cuts(
    calls: Sequence[Call], touched: dict[int, _Touched], functions: Container[int]
) -> list[int]:
    """Returns the places among the calls where steps begin."""
    joined = bytearray(len(calls) + 1)
    # the first of the views and empty tensors that belong to the next kernel
    leading: int | None = None
    # the place of the latest kernel, and what it touched
    kernel, latest = 0, set[int]()
    made_at: dict[int, int] = {}
    for place, call in enumerate(calls):
        found = touched[call.index]
        if call.operator.startswith(GATHERING):
            joined[place] = leading is not None
            leading = place if leading is None else leading
            continue
        is_write = not found.written.isdisjoint(latest)
        if not _is_light(call, touched):
            joined[place] = leading is not None
            leading = None
        elif leading is not None or (
            place and call.within == calls[place - 1].within and found.given
        ):
            joined[place] = True
        else:
            leading = place
        if is_write:
            joined[kernel + 1 : place + 1] = b"\1" * (place - kernel)
        made_at |= dict.fromkeys(found.made, place)
        if found.kept:
            # a replay needs nothing of what was there before
            start = min(made_at.get(storage, place) for storage in found.kept)
            joined[start + 1 : place + 1] = b"\1" * (place - start)
        if found.written:
            leading = None
        if found.made or found.written:
            kernel, latest = place, found.given | found.made
    if leading:
        joined[leading] = True
    for place, call in enumerate(calls):
        joined[place] |= call.index in functions
    return [place for place in range(len(calls)) if not (place and joined[place])]


class _Names:
    """Names steps after their modules; also after operators if a module spans several steps."""

    def __init__(self, model: nn.Module, touched: dict[int, _Touched]) -> None:
        self.modules, self.touched = dict(model.named_modules()), touched

    def of(self, parts: Sequence[Sequence[Call]]) -> list[str]:
        """Returns the names of steps."""
        naming = [list(filter(self._names, calls)) or calls for calls in parts]
        paths = [frozenset(), *(frozenset(map(_path, calls)) for calls in naming), frozenset()]
        around = map(frozenset.union, paths, paths[2:])
        return [
            " ".join(dict.fromkeys(self._name(call, others) for call in calls))
            for calls, others in zip(naming, around, strict=True)
        ]

    def _names(self, call: Call) -> bool:
        return not _is_light(call, self.touched) or bool(self.touched[call.index].written)

    def _name(self, call: Call, around: Container[str]) -> str:
        path = _path(call)
        if not path:
            return call.verb
        is_whole = path not in around and not self.modules[path]._modules
        return path if is_whole else f"{path}.{call.verb}"


def _blocks(calls: Sequence[Call], paths: Collection[str]) -> list[str]:
    """Returns the path of each call's block, '' before the first and after the last."""
    blocks = [next((path for path in call.within if path in paths), "") for call in calls]
    last = max((place for place, path in enumerate(blocks) if path), default=0)
    for place in range(1, last):
        blocks[place] = blocks[place] or blocks[place - 1]
    return blocks


def _is_light(call: Call, touched: dict[int, _Touched]) -> bool:
    """Returns whether an operator makes nothing to keep: a view, an empty tensor, a counter."""
    return not touched[call.index].made or call.operator.startswith(EMPTY)


def _shapes(calls: Sequence[Call], touched: dict[int, _Touched]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of what the last kernel of a step returned."""
    kernels = [call for call in calls if not _is_light(call, touched)] or calls
    return kernels[-1].shapes


def _parameters(graph: Graph, start: int, end: int) -> frozenset[int]:
    """Returns the parameters that operators use, those that take a view of one alone, too."""
    return frozenset().union(*(c.parameters for c in graph.calls if start <= c.index < end))


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def check_switches(model: nn.Module) -> None:
    """Raises ArgumentError if a model's own checkpointing is on: everything would run three times.

    `torch.utils.checkpoint`, which the models call, also updates running statistics twice.
    """
    for path, module in model.named_modules():
        for name, way in SWITCHES.items():
            if vars(module).get(name) is True:
                where = f"{path}.{name}" if path else name
                raise ArgumentError(
                    f"{type(model).__name__} checkpoints itself ({where} is True). Turn that off "
                    f"by {way}; then zoo.checkpoint takes its place"
                )


def paths_of(model: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the paths of a model's blocks: those that match, that repeat, or its children.

    Raises:
        ArgumentError: one of the `patterns`, such as `blocks.*`, matches nothing.
    """
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    repeated = block_paths(model)
    return repeated if len(repeated) > 1 else _outermost(_rows(model)) or tuple(_parts(model))


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the repeated modules, none inside another."""
    counts = Counter(type(module) for module in model.modules() if _is_unit(module))
    return _outermost(
        path
        for path, module in model.named_modules()
        if path and _is_unit(module) and counts[type(module)] > 1 and not _holds_row(module)
    )


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths that are not inside another."""
    found = list(paths)
    above = tuple(f"{path}." for path in found)
    return tuple(path for path in found if not path.startswith(above))


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matching: set[str] = set()
    for pattern in patterns:
        # `*` stands for one name, as in file paths
        level = [name for name in names if name.count(".") == pattern.count(".")]
        matches = [name for name in level if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ArgumentError(
                f"steps={pattern!r} is no module of {type(model).__name__}."
                f"{nearest(pattern, names)}"
            )
        matching.update(matches)
    return [name for name in names if name in matching]


def _rows(model: nn.Module) -> Iterator[str]:
    """Yields the paths of the Sequentials in a row of Sequentials."""
    for path, row in model.named_modules():
        found = [name for name, child in row.named_children() if isinstance(child, nn.Sequential)]
        if isinstance(row, ROWS) and len(found) > 1:
            yield from (f"{path}.{name}" if path else name for name in found)


def _parts(model: nn.Module) -> Iterator[str]:
    """Yields the paths of a model's children; for a row of modules, those of its children."""
    children = dict(model.named_children())
    for name, child in children.items():
        if len(children) == 1 and child._modules:
            yield from (f"{name}.{path}" for path in _parts(child))
        elif isinstance(child, ROWS):
            yield from (f"{name}.{inner}" for inner in child._modules)
        else:
            yield name


def _is_unit(module: nn.Module) -> bool:
    """Says whether a module has children and a forward of its own."""
    # TorchScript's classes have a forward that only instances can look up
    forward = inspect.getattr_static(type(module), "forward")
    return bool(module._modules) and forward not in [row.forward for row in ROWS]


def _holds_row(module: nn.Module) -> bool:
    """Says whether a module contains a row of modules that might be blocks."""
    rows = (row for row in module.modules() if isinstance(row, ROWS))
    units = ([type(child) for child in row.children() if _is_unit(child)] for row in rows)
    return any(len(set(types)) < len(types) for types in units)
