"""Partitions a computation graph into the steps of a chain, to measure them and to plan with them.

    kernels  view t addmm view | gelu | view t addmm view | empty bernoulli_ div_ | mul | ...
    state    x                   x      x                   x                       x, mask

The state between two steps is every value that a later kernel reads: an edge cut. There is none

- where a later kernel writes in place what an earlier one made;
- before a kernel that makes nothing, such as a view or an empty tensor. It belongs to the kernel
  behind it, or to the one before it if it reads that one's result within the same module.

Views of parameters are no state: each step that needs one makes it. Equal steps of equal blocks are
the same `StepProgram` with other modules, so that each is measured once.
"""

import bisect
import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from zoo._torch import DisableAutocast, FakeTensorMode
from zoo.chain import Held, NamedStep, Outline, PassThrough, Source, Step
from zoo.invocation import place_of
from zoo.profiling.allocator_events import tensors_in
from zoo.tracing.blocks import block_of_each
from zoo.tracing.graph import OWNED, Attribute, Call, Graph, Value

# kernels whose results wait for the kernel that writes them
EMPTY = ("aten.empty", "aten.new_empty")


class StepProgram:
    """What a step does: kernels over numbered values and numbered modules.

    Called with as many modules as `modules` says and then with the state.
    """

    __slots__ = ("__name__", "calls", "gives", "modules", "unneeded")

    def __init__(self, calls: Sequence[Call], gives: Sequence[int], modules: int) -> None:
        self.calls, self.gives, self.modules = tuple(calls), tuple(gives), modules
        self.__name__ = "_".join(dict.fromkeys(call.verb for call in self.calls))
        # for each call the values that no later one reads
        self.unneeded: list[set[int]] = []
        needed = set(self.gives)
        for call in reversed(self.calls):
            values = {*call.reads(), *call.results}
            self.unneeded.insert(0, values - needed)
            needed |= values

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Runs the kernels, below autocast; a value goes when its last reader has it."""
        modules = given[: self.modules]
        values: dict[int, Any] = dict(enumerate(given[self.modules :]))
        del given
        fill = functools.partial(_fill, values, modules)
        with DisableAutocast():
            for place, call in enumerate(self.calls):
                args, kwargs = map_aggregate((call.args, call.kwargs), fill)
                tensors = tensors_in(call.run(args, kwargs))
                values.update(zip(call.results, tensors, strict=True))
                del args, kwargs, tensors
                for number in self.unneeded[place]:
                    values.pop(number, None)
        return tuple(values[number] for number in self.gives)


def _fill(values: Mapping[int, Any], modules: Sequence[nn.Module], leaf: Any) -> Any:
    if type(leaf) is Value:
        return values[leaf.number]
    if type(leaf) is Attribute:
        module = modules[leaf.owner]  # type: ignore[call-overload]
        held = module._parameters if leaf.name in module._parameters else module._buffers
        return held[leaf.name]
    return leaf


@dataclass(frozen=True)
class Steps:
    """The steps of a model by a graph.

    Attributes:
        outline: the steps, and the block of each.
        names: what each is called.
        boundaries: for each the number of operators that the forward dispatches before it.
        live_in: numbers of the graph's inputs in the first state, in order.
        live_out: numbers of the values in the last state: what the model or the loss needs.
        loss: a function of the last state, where the graph has a loss.
        device: that of the model.
    """

    outline: Outline
    names: tuple[str, ...]
    boundaries: tuple[int, ...]
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]
    loss: Step | None
    device: torch.device
    graph: Graph

    def fake_state(self) -> tuple[Tensor, ...]:
        """Returns the first state as fake tensors; as meta tensors if the model is on meta."""
        specs = [self.graph.inputs[number] for number in self.live_in]
        if self.device.type == "meta":
            return tuple(spec._replace(device=self.device).empty() for spec in specs)
        with FakeTensorMode():
            return tuple(spec.empty() for spec in specs)


def partition(model: nn.Module, graph: Graph, blocks: Sequence[str]) -> Steps:
    """Cuts a model's graph into steps; `blocks` are the paths of its blocks."""
    return _Partition(model, graph, blocks).steps()


class _Partition:
    def __init__(self, model: nn.Module, graph: Graph, blocks: Sequence[str]) -> None:
        self.graph, self.device = graph, place_of(model)
        self.modules = dict(model.named_modules())
        # numbers of views of parameters and the calls that make them
        self.views = _views_of_owned(graph.calls)
        self.calls = self._without_views(graph.calls[: graph.model_calls])
        self.loss_calls = self._without_views(graph.calls[graph.model_calls :])
        self.blocks = block_of_each(self.calls, blocks)
        self.programs: dict[Any, StepProgram] = {}

    def steps(self) -> Steps:
        """Makes the steps."""
        loss = self.graph.loss
        ends = {number for number in self.graph.outputs if number not in self.views}
        if loss is not None:
            ends |= self._alive(self.loss_calls, {loss})[0]
        *alive, last = self._alive(self.calls, ends)
        # in the order of the outputs: a loss that is the first is known by its place
        order = {number: place for place, number in enumerate(self.graph.outputs)}
        known = sorted(last & order.keys(), key=order.__getitem__)
        live = [*map(sorted, alive), [*known, *sorted(last - order.keys())]]
        ranges = list(itertools.pairwise([0, *cuts(self.calls)])) if self.calls else []
        names = self._names(ranges)
        steps = tuple(
            self._step(self.calls[start:stop], live[start], live[stop], name)
            for (start, stop), name in zip(ranges, names, strict=True)
        )
        blocks = [next(filter(None, self.blocks[start:stop]), "") for start, stop in ranges]
        held = self._held(ranges, [live[start] for start, _ in ranges])
        return Steps(
            Outline(steps, _numbered(blocks), held=held),
            names,
            tuple(self.calls[start - 1].index + 1 if start else 0 for start, _ in ranges),
            tuple(live[0]),
            tuple(live[-1]),
            None if loss is None else self._step(self.loss_calls, live[-1], [loss], "the loss"),
            self.device,
            self.graph,
        )

    def _without_views(self, calls: Iterable[Call]) -> list[Call]:
        return [call for call in calls if self.views.keys().isdisjoint(call.results)]

    def _step(
        self, calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int], name: str
    ) -> NamedStep:
        calls = [*self._views_for(calls), *calls]
        read = {number for call in calls for number in call.reads()}
        places = {number: place for place, number in enumerate(needs)}
        reads = [number for number in needs if number in read]
        made = [number for number in gives if number not in places]
        key, program, owners = _localized(calls, reads, made)
        part = PassThrough(
            self.programs.setdefault(key, program),
            len(owners),
            tuple(places[number] for number in reads),
            tuple(places[n] if n in places else ~made.index(n) for n in gives),
        )
        step = NamedStep(part, *(self.modules[owner] for owner in owners))
        step.title = name
        step.sources = tuple(Source(id(self.modules[_path(c)]), c.line) for c in calls)
        return step

    def _views_for(self, calls: Sequence[Call]) -> list[Call]:
        """Returns the views of parameters that calls read, in the order in which they are made."""
        needed: dict[int, Call] = {}
        waiting = [number for call in calls for number in call.reads()]
        while waiting:
            call = self.views.get(waiting.pop())
            if call is not None and id(call) not in needed:
                needed[id(call)] = call
                waiting += call.reads()
        return sorted(needed.values(), key=lambda call: call.results)

    def _alive(self, calls: Sequence[Call], ends: Iterable[int]) -> list[set[int]]:
        """Returns for each place between calls the values that are read later (liveness)."""
        alive = set(ends)
        at_each = [set(alive)]
        for call in reversed(calls):
            alive -= set(call.results)
            for reader in (call, *self._views_for([call])):
                alive |= set(reader.reads()) - self.views.keys()
            at_each.append(set(alive))
        return at_each[::-1]

    def _held(
        self, ranges: Sequence[tuple[int, int]], states: Sequence[Sequence[int]]
    ) -> tuple[Held, ...]:
        """Returns for each step what it does not read and the forward holds none the less.

        It is empty where the trace did not tell.
        """
        if not self.graph.lifetimes:
            return ()
        origins = {number: number for number in self.graph.inputs}
        for call in self.calls:
            origins |= zip(call.results, call.origins, strict=True)
        alive = [{origins[number]: place for place, number in enumerate(now)} for now in states]
        known: dict[int, tuple[int, int]] = {}
        for state, places in enumerate(alive):
            for origin, place in places.items():
                known.setdefault(origin, (state, place))
        begins = [self.calls[start].index for start, _ in ranges]
        # views before it allocate nothing
        allocates = [
            next((c.index for c in self.calls[start:stop] if c.makes_storage), begin)
            for (start, stop), begin in zip(ranges, begins, strict=True)
        ]
        tensors: list[list[tuple[int, int]]] = [[] for _ in ranges]
        others: list[list[int]] = [[] for _ in ranges]
        for origin, lifetime in self.graph.lifetimes.items():
            if origin in self.graph.inputs or origin == OWNED:
                continue
            last = len(ranges)
            if lifetime.freed is not None:
                last = bisect.bisect_left(allocates, lifetime.freed)
            for step in range(bisect.bisect_left(begins, lifetime.made), last):
                if origin in alive[step]:
                    continue
                if origin in known:
                    tensors[step].append(known[origin])
                else:
                    others[step].append(lifetime.size)
        pairs = zip(map(tuple, tensors), map(tuple, others), strict=True)
        return tuple(itertools.starmap(Held, pairs))

    def _names(self, ranges: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Names the steps by the modules of one kernel, others by their operators, too."""
        naming = [_naming(self.calls[start:stop]) for start, stop in ranges]
        paths = [frozenset(map(_path, calls)) for calls in naming]
        nothing = frozenset[str]()
        around = zip([nothing, *paths[:-1]], [*paths[1:], nothing], strict=True)
        return tuple(
            " ".join(dict.fromkeys(self._name(call, before | behind) for call in calls))
            for calls, (before, behind) in zip(naming, around, strict=True)
        )

    def _name(self, call: Call, around: Container[str]) -> str:
        path = _path(call)
        if not path:
            return call.verb
        is_whole = path not in around and not self.modules[path]._modules
        return path if is_whole else f"{path}.{call.verb}"


def cuts(calls: Sequence[Call]) -> list[int]:
    """Returns for each step the place behind its last call."""
    makers = {number: place for place, call in enumerate(calls) for number in call.results}
    joined = bytearray(len(calls))
    # where the views and empty tensors begin that belong to the next kernel
    leading: int | None = None
    for place, call in enumerate(calls):
        if not _is_light(call):
            joined[place] = leading is not None
            leading = None
        elif leading is not None or (
            place and call.reads() and call.within == calls[place - 1].within
        ):
            joined[place] = True
        else:
            leading = place
        for origin in call.writes:
            start = min(makers.get(origin, 0) + 1, place + 1)
            joined[start : place + 1] = b"\1" * (place + 1 - start)
            leading = None
    if leading is not None:
        joined[leading] = True
    return [*(place for place in range(1, len(calls)) if not joined[place]), len(calls)]


def _is_light(call: Call) -> bool:
    """Says whether a kernel leaves nothing of its own: a view, an empty tensor, a counter."""
    return not call.makes_storage or str(call.operator).startswith(EMPTY)


def _views_of_owned(calls: Sequence[Call]) -> dict[int, Call]:
    """Returns by number the views of parameters and buffers that nothing writes."""
    views: dict[int, Call] = {}
    for call in calls:
        is_view = bool(call.results) and set(call.origins) == {OWNED}
        is_read_only = not call.writes and not str(call.operator).split(".")[1].endswith("_")
        if is_view and is_read_only and all(number in views for number in call.reads()):
            views |= dict.fromkeys(call.results, call)
    return views


def _localized(
    calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int]
) -> tuple[Any, StepProgram, list[str]]:
    """Renumbers the values and modules of a step.

    Returns a key that equal steps share, the program, and the paths of its modules.
    """
    values = {number: place for place, number in enumerate(needs)}
    places: dict[str, int] = {}
    for call in calls:
        for attribute in call.attributes():
            places.setdefault(attribute.owner, len(places))

    def local(leaf: Any) -> Any:
        if type(leaf) is Value:
            return Value(values[leaf.number])
        if type(leaf) is Attribute:
            return Attribute(places[leaf.owner], leaf.name)  # type: ignore[arg-type]
        return leaf

    renumbered = []
    for call in calls:
        args, kwargs = map_aggregate((call.args, call.kwargs), local)
        for number in call.results:
            values[number] = len(values)
        results = tuple(values[number] for number in call.results)
        renumbered.append(Call(call.operator, args, kwargs, results, 0, (), call.grad))
    given = tuple(values[number] for number in gives)
    key = repr(renumbered), len(needs), given
    return key, StepProgram(renumbered, given, len(places)), list(places)


def _naming(calls: Sequence[Call]) -> Sequence[Call]:
    """Returns the calls by which a step is named."""
    return [call for call in calls if not _is_light(call) or call.writes] or calls


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def _numbered(blocks: Sequence[str]) -> tuple[int, ...]:
    """Numbers runs of equal names."""
    numbered = enumerate(itertools.groupby(blocks))
    return tuple(number for number, (_, group) in numbered for _ in group)
