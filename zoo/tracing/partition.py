"""Partitions a computation graph into the steps of a chain, to measure them and to plan with them.

    kernels  view t addmm view | gelu | view t addmm view | empty bernoulli_ div_ | mul | ...
    state    x                   x      x                   x                       x, mask

The state between two steps holds every value that a later kernel reads: an edge cut. There is no
cut

- between a kernel and a later one that writes its result in place;
- right before a kernel that computes nothing, such as a view or an empty tensor. It belongs to the
  kernel after it, or to the one before it if it reads that one's result within the same module.

Views of parameters are no state: each step that needs one makes it. Equal steps of equal blocks are
the same `StepProgram` with other modules, so that each is measured once.

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
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx.node import map_aggregate

from zoo._torch import DisableAutocast, FakeTensorMode
from zoo.chain import Held, NamedStep, Outline, PassThrough, Source, State, Step
from zoo.errors import ArgumentError, nearest
from zoo.invocation import device_of
from zoo.profiling.tensor_spec import tensors_in
from zoo.tracing.tracer import Call, Graph, GraphValue

# kernels whose results a later kernel fills
EMPTY = ("aten.empty", "aten.new_empty")
ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# attributes that are true while a model checkpoints itself, and how to turn that off
SWITCHES = {
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
    "gradient_checkpointing": "model.gradient_checkpointing_disable()",
    "memory_efficient": "building it with memory_efficient=False",
    "use_checkpoint": "building it with use_checkpoint=False",
    "with_cp": "building it with with_cp=False",
}


class ModelSteps(NamedTuple):
    """The steps that a model runs for some inputs.

    Attributes:
        outline: the steps, and the block of each.
        state: the inputs of the first step: fake tensors, meta tensors if the model is on meta.
        loss: a function of the last state, if there is a loss.
        boundaries: for each step the number of operators that the forward dispatches before it.
        live_in: numbers of the graph's inputs in the first state, in order.
        live_out: numbers of the values in the last state: those that the model returns, or that
            the loss reads.
    """

    outline: Outline
    state: State
    loss: Step | None = None
    boundaries: Sequence[int] = ()
    live_in: Sequence[int] = ()
    live_out: Sequence[int] = ()


class StepProgram:
    """The kernels of a step, over numbered values: those of the state first.

    Called with its modules and then the state. `owned` are its parameters and buffers, numbered
    next: each is the index of a module and a name in it.
    """

    def __init__(
        self, calls: Sequence[Call], gives: Sequence[int], owned: Sequence[tuple[int, str]]
    ) -> None:
        self.calls, self.gives, self.owned = calls, gives, owned
        self.modules = len(dict(owned))
        self.__name__ = "_".join(dict.fromkeys(call.verb for call in calls))
        self._alive = _liveness(calls, gives)

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Runs the kernels, below autocast; frees each value when its last reader begins."""
        owned = [getattr(given[module], name) for module, name in self.owned]
        values: dict[int, Any] = dict(enumerate((*given[self.modules :], *owned)))
        del given, owned

        def filled(leaf: Any) -> Any:
            return values[leaf.number] if type(leaf) is GraphValue else leaf

        with DisableAutocast():
            for place, call in enumerate(self.calls):
                args, kwargs = map_aggregate((call.args, call.kwargs), filled)
                versions = {id(view): view._version for view in _recorded_views(values)}
                tensors = tensors_in(call.run(args, kwargs))
                values.update(zip(call.results, tensors, strict=True))
                del args, kwargs, tensors
                _regenerate(values, versions)
                for number in values.keys() - self._alive[place + 1]:
                    del values[number]
        return tuple(values[number] for number in self.gives)


def _recorded_views(values: Mapping[int, Any]) -> list[Tensor]:
    """Lists the views that autograd records, each once."""
    tensors = {id(value): value for value in values.values() if value is not None}.values()
    return [tensor for tensor in tensors if tensor.requires_grad and tensor._is_view()]


def _regenerate(values: dict[int, Any], versions: Mapping[int, int]) -> None:
    """Replaces views of what was written since, as autograd regenerates those of real tensors.

    The backward of `as_strided` allocates the whole storage. For fakes autograd calls the operators
    of the view again instead, whose backward allocates nothing.
    """
    for view in _recorded_views(values):
        base: Any = view._base
        # views of complex numbers are regenerated by their own operators
        is_strided = not (view.is_complex() or base.is_complex())
        if is_strided and view._version != versions.get(id(view), view._version):
            again = base.as_strided(view.shape, view.stride(), view.storage_offset())
            values |= {number: again for number, value in values.items() if value is view}


def partition(model: nn.Module, graph: Graph, blocks: Sequence[str]) -> ModelSteps:
    """Cuts a model's graph into steps; `blocks` are the paths of its blocks."""
    return _Partition(model, graph).steps(blocks)


class _Partition:
    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.graph, self.device = graph, device_of(model)
        self.modules = dict(model.named_modules())
        self.views = _views_of_owned(graph)
        self.calls, self.loss_calls = (
            [call for call in calls if self.views.keys().isdisjoint(call.results)]
            for calls in (graph.calls[: graph.model_calls], graph.calls[graph.model_calls :])
        )
        self.programs: dict[str, StepProgram] = {}

    def steps(self, paths: Collection[str]) -> ModelSteps:
        loss, ends = self.graph.loss, set(self.graph.outputs) - self.views.keys()
        if loss is not None:
            ends |= self._states(self.loss_calls, {loss})[0]
        *before, last = self._states(self.calls, ends)
        # in the order of the outputs: a loss is recognized as the first one
        known = [number for number in self.graph.outputs if number in last]
        states = [*map(sorted, before), [*known, *sorted(last.difference(known))]]
        places = self._cuts()
        live = [states[place] for place in places]
        ranges = [slice(*pair) for pair in itertools.pairwise(places)]
        parts = [self.calls[part] for part in ranges]
        steps = tuple(map(self._step, parts, live, live[1:], self._names(parts)))
        of_calls = _blocks(self.calls, paths)
        runs = itertools.groupby(next(filter(None, of_calls[part]), "") for part in ranges)
        blocks = tuple(number for number, (_, run) in enumerate(runs) for _ in run)
        # a step of several kernels, which an in-place write holds together, may be a segment alone
        made = [sum(not _is_light(call) for call in calls) for calls in parts]
        whole = frozenset(number for number, count in enumerate(made) if count > 1)
        return ModelSteps(
            Outline(steps, blocks, whole, self._held(parts, live)),
            self._fake_state(live[0]),
            None if loss is None else self._step(self.loss_calls, live[-1], [loss], "the loss"),
            [0, *(part[-1].index + 1 for part in parts)][: len(parts)],
            live[0],
            live[-1],
        )

    def _states(self, calls: Sequence[Call], ends: Iterable[int]) -> list[set[int]]:
        """Returns the state at each place between calls."""
        alive = _liveness(calls, ends)
        return [numbers - self.graph.owned.keys() - self.views.keys() for numbers in alive]

    def _cuts(self) -> list[int]:
        """Returns the places between calls where steps begin and end."""
        calls, owned = self.calls, self.graph.owned.keys()
        makers = {number: place for place, call in enumerate(calls) for number in call.results}
        joined = bytearray(len(calls) + 1)
        # the first of the views and empty tensors that belong to the next kernel
        leading: int | None = None
        for place, call in enumerate(calls):
            if not _is_light(call):
                joined[place] = leading is not None
                leading = None
            elif leading is not None or (
                place and call.within == calls[place - 1].within and set(call.reads()) - owned
            ):
                joined[place] = True
            else:
                leading = place
            for origin in call.writes:
                start = min(makers.get(origin, 0) + 1, place + 1)
                joined[start : place + 1] = b"\1" * (place + 1 - start)
                leading = None
        if leading:
            joined[leading] = True
        return [place for place in range(len(calls) + 1) if not (place and joined[place])]

    def _fake_state(self, numbers: Iterable[int]) -> State:
        specs = [self.graph.inputs[number] for number in numbers]
        if self.device.type == "meta":
            return tuple(spec._replace(device=self.device).empty() for spec in specs)
        with FakeTensorMode():
            return tuple(spec.empty() for spec in specs)

    def _step(
        self, calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int], name: str
    ) -> NamedStep:
        numbers = [number for call in calls for number in call.reads()]
        views = {v.results: v for number in numbers for v in self.views.get(number, ())}
        calls = [*(views[results] for results in sorted(views)), *calls]
        read = dict.fromkeys(number for call in calls for number in call.reads())
        reads = [number for number in needs if number in read]
        owned = {number: self.graph.owned[number] for number in read if number in self.graph.owned}
        modules = list(dict.fromkeys(path for path, _ in owned.values()))
        places = {number: place for place, number in enumerate(needs)}
        made = [number for number in gives if number not in places]
        results = (number for call in calls for number in call.results)
        local = {number: place for place, number in enumerate((*reads, *owned, *results))}
        what = (
            [_renumbered(call, local) for call in calls],
            [local[number] for number in made],
            [(modules.index(path), name) for path, name in owned.values()],
        )
        part = PassThrough(
            self.programs.setdefault(repr((what, len(reads))), StepProgram(*what)),
            len(modules),
            tuple(places[number] for number in reads),
            tuple(places[n] if n in places else ~made.index(n) for n in gives),
        )
        step = NamedStep(part, *(self.modules[path] for path in modules))
        step.title = name
        step.sources = tuple(Source(id(self.modules[_path(c)]), c.line) for c in calls)
        return step

    def _held(
        self, parts: Sequence[Sequence[Call]], states: Sequence[Sequence[int]]
    ) -> tuple[Held, ...]:
        """Returns for each step what the forward holds although the step does not read it.

        Empty if the trace did not record lifetimes.
        """
        sizes, found = self.graph.sizes, []
        origins = {number: number for number in self.graph.inputs}
        freed: dict[int, float] = {}
        for call in self.graph.calls:
            for number, origin in zip(call.results, call.origins, strict=True):
                origins[number] = origin
                last = self.graph.freed.get(number, math.inf)
                freed[origin] = max(last, freed.get(origin, 0))
        # storages by the numbers of their first tensors, and the first place of each in a state
        held: list[int] = []
        known: dict[int, tuple[int, int]] = {}
        for number, (calls, state) in enumerate(zip(parts, states, strict=False) if sizes else ()):
            here = {origins[value]: (number, place) for place, value in enumerate(state)}
            for origin, at in here.items():
                known.setdefault(origin, at)
            # views before it allocate nothing
            allocates = next((c.index for c in calls if c.makes_storage), calls[0].index)
            held = [origin for origin in held if freed[origin] > allocates]
            others = [origin for origin in held if origin not in here]
            tensors = tuple(known[origin] for origin in others if origin in known)
            found.append(Held(tensors, tuple(sizes[n] for n in others if n not in known)))
            held += (number for c in calls for number in c.results if number in c.origins)
        return tuple(found)

    def _names(self, parts: Sequence[Sequence[Call]]) -> list[str]:
        """Names steps after their modules; also after operators if a module spans several steps."""
        naming = [[c for c in calls if not _is_light(c) or c.writes] or calls for calls in parts]
        paths = [frozenset(), *(frozenset(map(_path, calls)) for calls in naming), frozenset()]
        around = map(frozenset.union, paths, paths[2:])
        return [
            " ".join(dict.fromkeys(self._name(call, others) for call in calls))
            for calls, others in zip(naming, around, strict=True)
        ]

    def _name(self, call: Call, around: Container[str]) -> str:
        path = _path(call)
        if not path:
            return call.verb
        is_whole = path not in around and not self.modules[path]._modules
        return path if is_whole else f"{path}.{call.verb}"


def _renumbered(call: Call, numbers: Mapping[int, int]) -> Call:
    """Returns a call as a step runs it, with the step's numbers."""

    def other(leaf: Any) -> Any:
        return GraphValue(numbers[leaf.number]) if type(leaf) is GraphValue else leaf

    args, kwargs = map_aggregate((call.args, call.kwargs), other)
    results = tuple(numbers[number] for number in call.results)
    return Call(call.operator, args, kwargs, 0, (), call.grad, results, stands_in=call.stands_in)


def _blocks(calls: Sequence[Call], paths: Collection[str]) -> list[str]:
    """Returns the path of each call's block, '' before the first and after the last."""
    blocks = [next((path for path in call.within if path in paths), "") for call in calls]
    last = max((place for place, path in enumerate(blocks) if path), default=0)
    for place in range(1, last):
        blocks[place] = blocks[place] or blocks[place - 1]
    return blocks


def _is_light(call: Call) -> bool:
    """Says whether a kernel computes nothing to keep: a view, an empty tensor, a counter."""
    return not call.makes_storage or call.operator.startswith(EMPTY)


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def _views_of_owned(graph: Graph) -> dict[int, list[Call]]:
    """Returns the calls that make each view of a parameter or buffer, if nothing writes it."""
    views: dict[int, list[Call]] = {}
    for call in graph.calls:
        is_view = bool(call.results) and graph.owned.keys() >= set(call.origins)
        is_read_only = not call.writes and not call.verb.endswith("_")
        if is_view and is_read_only and all(n in views or n in graph.owned for n in call.reads()):
            before = [view for number in call.reads() for view in views.get(number, ())]
            views |= {number: [*before, call] for number in call.results}
    return views


def _liveness(calls: Sequence[Call], ends: Iterable[int]) -> list[set[int]]:
    """Returns the values that are read later, at each place between calls."""
    alive = [set(ends)]
    for call in reversed(calls):
        alive.append((alive[-1] - set(call.results)).union(call.reads()))
    return alive[::-1]


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
