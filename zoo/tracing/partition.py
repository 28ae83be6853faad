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
import itertools
import math
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx.node import map_aggregate

from zoo._torch import DisableAutocast, FakeTensorMode
from zoo.chain import Held, NamedStep, Outline, PassThrough, Source, State, Step
from zoo.invocation import place_of
from zoo.profiling.allocator_events import tensors_in
from zoo.tracing.graph import Call, Graph, Value

# kernels whose results wait for the kernel that writes them
EMPTY = ("aten.empty", "aten.new_empty")


class Steps(NamedTuple):
    """The steps that a model runs for some inputs.

    Attributes:
        outline: the steps, and the block of each.
        names: what each is called.
        state: what comes to the first step: fake tensors, meta tensors if the model is on meta.
        loss: a function of the last state, where there is a loss.
        boundaries: for each step the number of operators that the forward dispatches before it.
        live_in: numbers of the graph's inputs in the first state, in order.
        live_out: numbers of the values in the last state: what the model or the loss needs.
    """

    outline: Outline
    names: Sequence[str]
    state: State
    loss: Step | None = None
    boundaries: Sequence[int] = ()
    live_in: Sequence[int] = ()
    live_out: Sequence[int] = ()


class StepProgram:
    """What a step does: kernels over numbered values, of which the first are the state's.

    Called with its modules and then with the state. `owned` are the parameters and buffers, which
    are numbered next: the place of the module, and the name in it.
    """

    def __init__(
        self, calls: Sequence[Call], gives: Sequence[int], owned: Sequence[tuple[int, str]]
    ) -> None:
        self.calls, self.gives, self.owned = calls, gives, owned
        self.modules = 1 + max((module for module, _ in owned), default=-1)
        self.__name__ = "_".join(dict.fromkeys(call.verb for call in calls))
        self._alive = _liveness(calls, gives)

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Runs the kernels, below autocast; a value goes when its last reader has it."""
        owned = [getattr(given[module], name) for module, name in self.owned]
        values: dict[int, Any] = dict(enumerate((*given[self.modules :], *owned)))
        del given, owned

        def filled(leaf: Any) -> Any:
            return values[leaf.number] if type(leaf) is Value else leaf

        with DisableAutocast():
            for place, call in enumerate(self.calls):
                args, kwargs = map_aggregate((call.args, call.kwargs), filled)
                tensors = tensors_in(call.run(args, kwargs))
                values.update(zip(call.results, tensors, strict=True))
                del args, kwargs, tensors
                for number in values.keys() - self._alive[place + 1]:
                    del values[number]
        return tuple(values[number] for number in self.gives)


def partition(model: nn.Module, graph: Graph, blocks: Sequence[str]) -> Steps:
    """Cuts a model's graph into steps; `blocks` are the paths of its blocks."""
    return _Partition(model, graph).steps(blocks)


class _Partition:
    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.graph, self.device = graph, place_of(model)
        self.modules = dict(model.named_modules())
        # numbers of views of parameters and the calls that make them
        self.views = _views_of_owned(graph)
        split = graph.calls[: graph.model_calls], graph.calls[graph.model_calls :]
        self.calls, self.loss_calls = (
            [call for call in calls if self.views.keys().isdisjoint(call.results)]
            for calls in split
        )
        self.programs: dict[str, StepProgram] = {}

    def steps(self, paths: Collection[str]) -> Steps:
        loss, calls = self.graph.loss, self.calls
        ends = set(self.graph.outputs) - self.views.keys()
        if loss is not None:
            ends |= self._states(self.loss_calls, {loss})[0]
        *states, last = self._states(calls, ends)
        # in the order of the outputs: a loss that is the first is known by its place
        known = [number for number in dict.fromkeys(self.graph.outputs) if number in last]
        live = [*map(sorted, states), [*known, *sorted(last.difference(known))]]
        ranges = list(itertools.pairwise([0, *self._cuts()])) if calls else []
        names = self._names([calls[start:stop] for start, stop in ranges])
        steps = tuple(
            self._step(calls[start:stop], live[start], live[stop], name)
            for (start, stop), name in zip(ranges, names, strict=True)
        )
        of_calls = _blocks(calls, paths)
        blocks = (next(filter(None, of_calls[start:stop]), "") for start, stop in ranges)
        runs = enumerate(itertools.groupby(blocks))
        numbers = tuple(number for number, (_, run) in runs for _ in run)
        return Steps(
            Outline(steps, numbers, held=self._held(ranges, [live[start] for start, _ in ranges])),
            names,
            self._fake_state(live[0]),
            None if loss is None else self._step(self.loss_calls, live[-1], [loss], "the loss"),
            [calls[start - 1].index + 1 if start else 0 for start, _ in ranges],
            live[0],
            live[-1],
        )

    def _cuts(self) -> list[int]:
        """Returns for each step the place behind its last call."""
        calls, owned = self.calls, self.graph.owned.keys()
        makers = {number: place for place, call in enumerate(calls) for number in call.results}
        joined = bytearray(len(calls))
        # where the views and empty tensors begin that belong to the next kernel
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
        if leading is not None:
            joined[leading] = True
        return [*(place for place in range(1, len(calls)) if not joined[place]), len(calls)]

    def _states(self, calls: Sequence[Call], ends: Iterable[int]) -> list[set[int]]:
        """Returns for each place between calls the state there."""
        alive = _liveness(calls, ends)
        return [numbers - self.graph.owned.keys() - self.views.keys() for numbers in alive]

    def _fake_state(self, numbers: Iterable[int]) -> State:
        specs = [self.graph.inputs[number] for number in numbers]
        if self.device.type == "meta":
            return tuple(spec._replace(device=self.device).empty() for spec in specs)
        with FakeTensorMode():
            return tuple(spec.empty() for spec in specs)

    def _step(
        self, calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int], name: str
    ) -> NamedStep:
        calls = [*self._views_for(calls), *calls]
        read = {number for call in calls for number in call.reads()}
        places = {number: place for place, number in enumerate(needs)}
        reads = [number for number in needs if number in read]
        made = [number for number in gives if number not in places]
        program, modules = self._localized(calls, reads, made)
        part = PassThrough(
            program,
            program.modules,
            tuple(places[number] for number in reads),
            tuple(places[n] if n in places else ~made.index(n) for n in gives),
        )
        step = NamedStep(part, *(self.modules[path] for path in modules))
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

    def _localized(
        self, calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int]
    ) -> tuple[StepProgram, list[str]]:
        """Returns the program of a step, which equal steps share, and the paths of its modules."""
        read = dict.fromkeys(number for call in calls for number in call.reads())
        own = {number: self.graph.owned[number] for number in read if number in self.graph.owned}
        modules = list(dict.fromkeys(path for path, _ in own.values()))
        made = (number for call in calls for number in call.results)
        local = {number: place for place, number in enumerate((*needs, *own, *made))}

        def renumbered(leaf: Any) -> Any:
            return Value(local[leaf.number]) if type(leaf) is Value else leaf

        program = [
            Call(call.operator, *map_aggregate((call.args, call.kwargs), renumbered), 0, (),
                 call.grad, tuple(map(local.__getitem__, call.results)), stands_in=call.stands_in)
            for call in calls
        ]  # fmt: skip
        owned = [(modules.index(path), name) for path, name in own.values()]
        what = program, [local[number] for number in gives], owned
        return self.programs.setdefault(repr((what, len(needs))), StepProgram(*what)), modules

    def _held(
        self, ranges: Sequence[tuple[int, int]], states: Sequence[Sequence[int]]
    ) -> tuple[Held, ...]:
        """Returns for each step what it does not read and the forward holds none the less.

        It is empty where the trace did not tell.
        """
        if not self.graph.sizes:
            return ()
        origins = {number: number for number in self.graph.inputs}
        freed: dict[int, float] = {}
        for call in self.graph.calls:
            for number, origin in zip(call.results, call.origins, strict=True):
                origins[number] = origin
                last = self.graph.freed.get(number, math.inf)
                freed[origin] = max(last, freed.get(origin, 0))
        # by storage the number of the state, and the place in it
        alive = [
            {origins[number]: (state, place) for place, number in enumerate(numbers)}
            for state, numbers in enumerate(states)
        ]
        first = dict(itertools.chain.from_iterable(map(dict.items, reversed(alive))))
        begins = [self.calls[start].index for start, _ in ranges]
        # views before it allocate nothing
        allocates = [
            next((c.index for c in self.calls[start:stop] if c.makes_storage), begin)
            for (start, stop), begin in zip(ranges, begins, strict=True)
        ]
        held: list[list[int]] = [[] for _ in ranges]
        for call in self.calls:
            start = bisect.bisect_right(begins, call.index)
            for origin in sorted({*call.origins}.intersection(call.results)):
                for step in range(start, bisect.bisect_left(allocates, freed[origin])):
                    if origin not in alive[step]:
                        held[step].append(origin)
        return tuple(
            Held(
                tuple(first[origin] for origin in others if origin in first),
                tuple(self.graph.sizes[n] for n in others if n not in first),
            )
            for others in held
        )

    def _names(self, steps: Sequence[Sequence[Call]]) -> list[str]:
        """Names the steps by the modules of one kernel, others by their operators, too."""
        naming = [[c for c in calls if not _is_light(c) or c.writes] or calls for calls in steps]
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


def _blocks(calls: Sequence[Call], paths: Collection[str]) -> list[str]:
    """Returns for each call the path of its block, '' before the first and after the last."""
    blocks = [next((path for path in call.within if path in paths), "") for call in calls]
    last = max((place for place, path in enumerate(blocks) if path), default=0)
    for place in range(1, last):
        blocks[place] = blocks[place] or blocks[place - 1]
    return blocks


def _is_light(call: Call) -> bool:
    """Says whether a kernel leaves nothing of its own: a view, an empty tensor, a counter."""
    return not call.makes_storage or call.operator.startswith(EMPTY)


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def _views_of_owned(graph: Graph) -> dict[int, Call]:
    """Returns by number the views of parameters and buffers that nothing writes."""
    views: dict[int, Call] = {}
    for call in graph.calls:
        is_view = bool(call.results) and graph.owned.keys() >= set(call.origins)
        is_read_only = not call.writes and not call.verb.endswith("_")
        if is_view and is_read_only and all(n in views or n in graph.owned for n in call.reads()):
            views |= dict.fromkeys(call.results, call)
    return views


def _liveness(calls: Sequence[Call], ends: Iterable[int]) -> list[set[int]]:
    """Returns for each place between calls the values that are read later."""
    alive = [set(ends)]
    for call in reversed(calls):
        alive.append((alive[-1] - set(call.results)).union(call.reads()))
    return alive[::-1]
