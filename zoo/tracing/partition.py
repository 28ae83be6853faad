"""Cuts a traced training step into the steps that a plan keeps or recomputes.

    kernels  view t addmm view | gelu | view t addmm view | empty bernoulli_ div_ | mul | ...
    state    x                   x      x                   x                       x, mask

The state between two steps is every storage that a later kernel reads. There is no cut

- right before a write in place to storages that the kernel before read, wrote or made;
- between the kernel that makes a tensor and a write to it that no replay may repeat;
- inside of the forward of an `autograd.Function`, or of one call of a function of torch, such as
  `dropout` or `scaled_dot_product_attention`: what it dispatches depends on the device. There is
  one between two layers of an `nn.LSTM`, where they are kernels of their own;
- right before an operator that computes nothing, such as a view or an empty tensor. It belongs to
  the kernel after it, or to the one before it if it reads something within the same module;
- behind an operator that gathers parameters which are spread over processes, or before one that
  gathers or sums what processes computed.

Steps are grouped into blocks, the repeated units of a model that people checkpoint:

    Sequential / ModuleList of stages      layers.0, layers.1
        Sequential / ModuleList of blocks      layers.0.blocks.0   <- a block
            attention, mlp                         no blocks: nothing repeats them in a row

A block is a module with children and a forward of its own, of a class that occurs at least twice,
and that contains no row of such modules itself: the blocks are the modules that a stage repeats,
not the stage. If a model has none, its blocks are the Sequentials in a row, or its children. A
model of zoo names its own by `block_patterns`, wherever it is. Each call of such a module is a
block. Kernels between two blocks belong to the first of them.
"""

import bisect
import fnmatch
import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from zoo.engine.kernel_segments import Visit
from zoo.errors import ArgumentError, nearest
from zoo.models.model import Model
from zoo.planner.event_costs import Outline, StorageUses, storages_used, useful_cuts
from zoo.planner.step_events import Call, KernelRun, Saved, StepEvents, Viewed
from zoo.tracing.isolated_trace import RunsLaterError, StepTrace

# kernels whose results a later kernel fills, or that copy a tensor for another layout
LIGHT = ("aten.empty", "aten.new_empty", "aten.clone")
# operators by which fully sharded data parallelism gathers the parameters of the next module
GATHERING = ("fsdp.", "c10d._allgather_base_")
# operators by which tensor parallelism gathers or sums results
COMPLETING = "_c10d_functional."
CAST = "aten._to_copy"
ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def partition(
    model: nn.Module, trace: StepTrace, blocks: Collection[str], cuts: Sequence[int] = ()
) -> Outline:
    """Cuts a model's training step into steps; `blocks` are the paths of its blocks.

    The steps begin at operators that keep the least, or at given `cuts`: those of the same
    operators in other sizes.

    Raises:
        RunsLaterError: the forward calls no operator.
    """
    events, uses_of = trace.events, storages_used(trace.events.forward)
    calls = [
        call
        for call in events.operators[: events.model_operators]
        if not call.is_query and call.index in uses_of
    ]
    if not calls:
        raise RunsLaterError(
            f"the forward of {type(model).__name__} calls no operator before it returns, as one "
            "that yields, awaits or returns a function, so that there is nothing to plan. Put "
            "zoo.checkpoint on a module in it whose forward computes what it returns"
        )
    matrices = {number for number, one in enumerate(model.parameters()) if one.ndim > 1}
    functions = _functions(trace, matrices)
    if cuts:
        starts = [bisect.bisect_left(calls, cut, key=attrgetter("index")) for cut in cuts]
    else:
        starts = _useful(_cuts(calls, uses_of, functions), calls, trace)
    parts = [calls[start:end] for start, end in itertools.pairwise([*starts, len(calls)])]
    # views belong to the kernel that reads them, which names the step and its block
    kernels = [[call for call in part if not _is_light(call, uses_of)] for part in parts]
    visits = _blocks(calls, blocks, events.visits)
    of_call = {call.index: visit for call, visit in zip(calls, visits, strict=True)}
    firsts = [of_call[(some or part)[0].index] for some, part in zip(kernels, parts, strict=True)]
    runs = itertools.groupby(firsts)
    # a step of several kernels, which an in-place write holds together, may be a segment alone
    counts = [len({functions.get(call.index, call.index) for call in part}) for part in kernels]
    cuts = [*cuts] or _first_operators(starts, calls, events)
    names = _Names(model, uses_of).of(parts)
    return Outline(
        names=tuple(names),
        blocks=tuple(number for number, (_, run) in enumerate(runs) for _ in run),
        whole=frozenset(number for number, count in enumerate(counts) if count > 1),
        events=events,
        specs=trace.specs,
        lines=tuple(next((call.line for call in part if call.line), "") for part in parts),
        shapes=tuple(_shapes(part, uses_of) for part in parts),
        parameters=_parameters(events, [*cuts, events.model_operators]),
        cuts=(*cuts, *([events.model_operators] if trace.has_loss else ())),
        dry_step=trace.dry_step,
    )


def _first_operators(starts: Sequence[int], calls: Sequence[Call], events: StepEvents) -> list[int]:
    """Returns the first operator of each step: the one after the last call of the step before.

    Queries before it belong to that step, whose custom function may yet save its tensors.
    """
    noted = [call.index for call in events.operators if not call.is_query]
    lasts = [calls[start - 1].index if start else -1 for start in starts]
    return [noted[bisect.bisect_right(noted, last)] if last >= 0 else 0 for last in lasts]


def _useful(starts: Sequence[int], calls: Sequence[Call], trace: StepTrace) -> list[int]:
    """Leaves out starts of steps that no plan gains by."""
    # the events of the model alone, so that steps do not depend on whether the loss is known
    events = trace.events
    events = events.before(events.model_operators) if trace.has_loss else events
    within = [calls[start].within for start in starts]
    numbers = useful_cuts(events, _first_operators(starts, calls, events), within)
    return [starts[number] for number in numbers]


def _functions(trace: StepTrace, matrices: Container[int]) -> dict[int, int]:
    """Returns for each operator inside of a function's call the first operator of its layer.

    No step begins inside. `matrices` are the parameters that tell layers apart. An
    `autograd.Function` makes its autograd node before its forward calls the first operator, and
    saves tensors after the last one.
    """
    first_of, latest = dict[int, int](), -1
    for first, event in trace.events.forward:
        if isinstance(event, Saved) and first < latest:
            inside = range(first, latest + 1)
            first_of |= {index: min(first_of.get(index, first), first) for index in inside}
        elif isinstance(event, KernelRun | Viewed):
            latest = max(latest, first)
    # a segment may begin behind a cast of autocast, since the result takes half of the bytes
    calls = (
        call
        for call in trace.events.operators
        if call.function and not call.operator.startswith((CAST, COMPLETING))
    )
    for _, group in itertools.groupby(calls, key=lambda call: call.function):
        for layer in _layers([*group], matrices):
            indices = [call.index for call in layer]
            first_of |= {index: min(first_of.get(index, index), indices[0]) for index in indices}
    return first_of


def _layers(calls: Sequence[Call], matrices: Container[int]) -> Iterator[Sequence[Call]]:
    """Yields the layers of a function's call, each of which has matrices of its own.

    A bias alone is no layer: there are devices that add it by a kernel of its own.
    """
    owned = [{number for number in call.parameters if number in matrices} for call in calls]
    last = {number: position for position, numbers in enumerate(owned) for number in numbers}
    # `end`: where the matrices of the layer are used last
    start, end = 0, -1
    for position, numbers in enumerate(owned):
        if numbers and -1 < end < position:
            yield calls[start:position]
            start = position
        end = max([end, *(last[number] for number in numbers)])
    yield calls[start:]


def _cuts(
    calls: Sequence[Call], uses_of: dict[int, StorageUses], functions: Mapping[int, int]
) -> list[int]:
    """Returns the positions among the calls where steps begin."""
    joined = bytearray(len(calls) + 1)
    working = {functions.get(call.index) for call in calls if not _is_light(call, uses_of)}
    # the first of the views and empty tensors that belong to the next kernel
    leading: int | None = None
    # the position of the latest kernel, and the storages that it used
    kernel, latest = 0, set[int]()
    made_at: dict[int, int] = {}
    for position, call in enumerate(calls):
        uses = uses_of[call.index]
        # inside of a function's call, or an operator that completes the result of a spread layer
        first = functions.get(call.index, call.index)
        is_inside = position > 0 and (
            first <= calls[position - 1].index or call.operator.startswith(COMPLETING)
        )
        if call.operator.startswith(GATHERING):
            joined[position] = leading is not None or is_inside
            leading = position if leading is None else leading
            continue
        is_write = not uses.writes.isdisjoint(latest)
        if not _is_light(call, uses_of):
            joined[position] = leading is not None or is_inside
            leading = None
        elif (
            leading is not None
            or is_inside
            or (
                position
                and call.within == calls[position - 1].within
                and uses.reads
                # not the first of a function that computes
                and first not in working
            )
        ):
            joined[position] = True
        else:
            leading = position
        if is_write:
            joined[kernel + 1 : position + 1] = b"\1" * (position - kernel)
        made_at |= dict.fromkeys(uses.makes, position)
        if uses.keeps:
            # the step contains the kernel that made the storage: a replay needs no earlier content
            start = min(made_at.get(storage, position) for storage in uses.keeps)
            joined[start + 1 : position + 1] = b"\1" * (position - start)
        if uses.writes:
            leading = None
        if uses.makes or uses.writes:
            kernel, latest = position, uses.reads | uses.makes
    if leading:
        joined[leading] = True
    return [position for position in range(len(calls)) if not (position and joined[position])]


class _Names:
    """Names steps after their modules; also after operators if a module spans several steps."""

    def __init__(self, model: nn.Module, uses_of: dict[int, StorageUses]) -> None:
        self.modules, self.uses_of = dict(model.named_modules()), uses_of

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
        return not _is_light(call, self.uses_of) or bool(self.uses_of[call.index].writes)

    def _name(self, call: Call, around: Container[str]) -> str:
        path = _path(call)
        if not path:
            return call.verb
        is_whole = path not in around and not self.modules[path]._modules
        return path if is_whole else f"{path}.{call.verb}"


def _blocks(
    calls: Sequence[Call], paths: Collection[str], visits: Mapping[Visit, int]
) -> list[Visit | None]:
    """Returns each call's visit of a block; None before the first and after the last."""
    starts: defaultdict[str, list[int]] = defaultdict(list)
    for (path, _), start in visits.items():
        starts[path].append(start)
    blocks = list[Visit | None]()
    for call in calls:
        path = next((path for path in call.within if path in paths), "")
        visit = path, bisect.bisect_right(starts[path], call.index)
        blocks.append(visit if path else None)
    last = max((position for position, block in enumerate(blocks) if block), default=0)
    for position in range(1, last):
        blocks[position] = blocks[position] or blocks[position - 1]
    return blocks


def _is_light(call: Call, uses_of: dict[int, StorageUses]) -> bool:
    """Returns whether an operator makes nothing to keep: a view, an empty tensor, a counter.

    Copies count, too: whether a tensor is copied for another shape depends on sizes and device.
    """
    return not uses_of[call.index].makes or call.operator.startswith(LIGHT)


def _shapes(calls: Sequence[Call], uses_of: dict[int, StorageUses]) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of the first result of a step's last kernel; others are its own."""
    kernels = [call for call in calls if not _is_light(call, uses_of)] or calls
    return kernels[-1].shapes[:1]


def _parameters(events: StepEvents, cuts: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Returns the parameters that steps use, also by views alone."""
    return tuple(
        frozenset().union(*(call.parameters for call in events.operators[start:end]))
        for start, end in itertools.pairwise(cuts)
    )


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def paths_of(model: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the paths of a model's blocks: those that match, that repeat, or its children.

    Raises:
        ArgumentError: one of the `patterns`, such as `blocks.*`, matches nothing.
    """
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    paths = block_paths(model)
    if len(paths) > 1 or any(map(_names_blocks, model.modules())):
        return paths
    return _outermost(_rows(model)) or tuple(_parts(model))


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the repeated modules, none inside another; a model of zoo names its own.

    Such a model has the same blocks inside of any other module.
    """
    naming = {path: module for path, module in model.named_modules() if _names_blocks(module)}
    named = [_join(path, block) for path, module in naming.items() for block in _named(module)]
    counts = Counter(type(module) for module in model.modules() if _is_unit(module))
    repeated = (
        path
        for path, module in model.named_modules()
        if path
        and _is_unit(module)
        and counts[type(module)] > 1
        and not _holds_row(module)
        # neither a model that names its blocks, nor a module around or inside of one
        and not any(_contains(path, other) or _contains(other, path) for other in naming)
    )
    return _outermost([*named, *repeated])


def _names_blocks(module: nn.Module) -> bool:
    return isinstance(module, Model) and bool(module.block_patterns)


def _named(model: Any) -> Iterator[str]:
    """Yields the paths of a zoo model's modules that match its `block_patterns`."""
    for name, _ in model.named_modules():
        if any(_matches(name, pattern) for pattern in model.block_patterns):
            yield name


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _contains(path: str, other: str) -> bool:
    """Returns whether the module at `other` is the module at `path`, or inside of it."""
    return not path or f"{other}.".startswith(f"{path}.")


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths that are not inside another."""
    candidates = list(paths)
    above = tuple(f"{path}." for path in candidates)
    return tuple(path for path in candidates if not path.startswith(above))


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matching: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise ArgumentError(
                f"steps={pattern!r} is no module of {type(model).__name__}."
                f"{nearest(pattern, names)}"
            )
        matching.update(matches)
    return [name for name in names if name in matching]


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a path matches; `*` stands for one name, as in file paths."""
    return name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)


def _rows(model: nn.Module) -> Iterator[str]:
    """Yields the paths of the Sequentials in a row of Sequentials."""
    for path, row in model.named_modules():
        names = [name for name, child in row.named_children() if isinstance(child, nn.Sequential)]
        if isinstance(row, ROWS) and len(names) > 1:
            yield from (_join(path, name) for name in names)


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
    """Returns whether a module has children and a forward of its own."""
    # TorchScript's classes have a forward that only instances can look up
    forward = inspect.getattr_static(type(module), "forward")
    return bool(module._modules) and forward not in [row.forward for row in ROWS]


def _holds_row(module: nn.Module) -> bool:
    """Returns whether a module contains a row of modules that might be blocks."""
    rows = (row for row in module.modules() if isinstance(row, ROWS))
    units = ([type(child) for child in row.children() if _is_unit(child)] for row in rows)
    return any(len(set(types)) < len(types) for types in units)
