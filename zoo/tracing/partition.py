"""Cuts a graph of kernels into the steps of a chain, to measure them and to plan with them.

    kernels  view t addmm view | gelu | view t addmm view | empty bernoulli_ div_ | mul | ...
    state    x                   x      x                   x                       x, mask

The state between two steps is every value that a later kernel reads. A cut is left out

- where a later kernel writes in place what an earlier one made;
- before a kernel that makes nothing, such as a view or an empty tensor. It belongs to the kernel
  behind it, or to the one before it where it looks at its result within the same module.

Views of parameters are no state: each step that needs one makes it. Equal steps of equal blocks are
the same `StepProgram` with other modules, so that each is measured once.
"""

import copy
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import DisableAutocast, FakeTensorMode
from zoo.chain import NamedStep, Outline, Source, Step
from zoo.errors import PlanError
from zoo.profiling.allocator import tensors_in
from zoo.tracing.blocks import block_of_each
from zoo.tracing.graph import OWNED, Attribute, Call, Graph, Value, mapped

# kernels whose results wait for who writes them
EMPTY = ("aten.empty", "aten.new_empty")


class Tensors(nn.Module):
    """Some parameters and buffers of a module, those that a step reads, as the module has them."""

    __slots__ = ("names", "owner")
    names: tuple[str, ...]
    owner: nn.Module

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "names", names)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tensors":
        # slots are not what a module copies
        return Tensors(copy.deepcopy(self.owner, memo), self.names)

    def tensor(self, name: str) -> Any:
        """Returns one of them."""
        owner: Any = self.owner
        held = owner._parameters
        return held[name] if name in held else owner._buffers[name]

    def _of(self, kind: str) -> dict[str, Any]:
        held = getattr(self.owner, kind)
        names: Any = self.names
        return {name: held[name] for name in names if name in held}

    @property
    def _parameters(self) -> Any:  # type: ignore[override]
        return self._of("_parameters")

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        """Leaves them: they are the owner's."""

    @property
    def _buffers(self) -> Any:  # type: ignore[override]
        return self._of("_buffers")

    @_buffers.setter
    def _buffers(self, value: Any) -> None:
        """Leaves them: they are the owner's."""


class StepProgram:
    """What a step does: kernels over numbered values and numbered modules.

    Called with as many modules as `modules` says and then with the state.
    """

    __slots__ = ("__name__", "calls", "gives", "last", "modules", "unused")

    def __init__(self, calls: Sequence[Call], gives: Sequence[int], modules: int) -> None:
        self.calls, self.gives, self.modules = tuple(calls), tuple(gives), modules
        self.__name__ = "_".join(dict.fromkeys(call.verb for call in self.calls))
        self.last: list[list[int]] = []
        self.unused: list[list[int]] = []
        seen = set(self.gives)
        for call in reversed(self.calls):
            reads = set(call.reads())
            self.unused.append([number for number in call.results if number not in seen])
            self.last.append([number for number in reads if number not in seen])
            seen |= reads
        self.last.reverse()
        self.unused.reverse()

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Runs the kernels, below autocast; a value goes when its last reader has it."""
        modules = given[: self.modules]
        known: dict[int, Any] = dict(enumerate(given[self.modules :]))
        del given
        fill = functools.partial(_fill, known, modules)
        with DisableAutocast():
            for place, (last, unused) in enumerate(zip(self.last, self.unused, strict=True)):
                call = self.calls[place]
                args, kwargs = mapped(call.args, fill), mapped(call.kwargs, fill)
                for number in last:
                    known.pop(number, None)
                tensors = tensors_in(_called(call, args, kwargs))
                del args, kwargs
                _check_count(call, tensors)
                known.update(zip(call.results, tensors, strict=True))
                for number in unused:
                    known.pop(number, None)
                del tensors
        return tuple(known[number] for number in self.gives)


@dataclass(frozen=True)
class Steps:
    """The steps of a model by a graph.

    Attributes:
        outline: the steps, and the block of each.
        names: what each is called.
        boundaries: for each the number of operators that the forward dispatches before it.
        live_in: numbers of the graph's inputs in the first state, in order.
        live_out: numbers of the values in the last state: what the model returns.
        loss: a function of the last state, where the graph has a loss.
    """

    outline: Outline
    names: tuple[str, ...]
    boundaries: tuple[int, ...]
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]
    loss: Step | None
    graph: Graph

    def state(self, inputs: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        """Returns the first state from the graph's inputs by number."""
        return tuple(inputs[number] for number in self.live_in)

    def fake_state(self) -> tuple[Tensor, ...]:
        """Returns the first state as fake tensors like the graph's inputs."""
        with FakeTensorMode():
            return tuple(self.graph.inputs[number].empty() for number in self.live_in)

    def outputs(self, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns what the model returned, from the last state."""
        known = dict(zip(self.live_out, state, strict=True))
        return tuple(known[number] for number in self.graph.outputs if number in known)


def partition(model: nn.Module, graph: Graph, blocks: Sequence[str]) -> Steps:
    """Cuts a model's graph into steps; `blocks` are the paths of its blocks."""
    return _Partition(model, graph, blocks).steps()


class _Partition:
    def __init__(self, model: nn.Module, graph: Graph, blocks: Sequence[str]) -> None:
        self.graph = graph
        self.modules = dict(model.named_modules())
        # numbers of views of parameters and the calls that make them
        self.views = _views_of_owned(graph.calls)
        calls = [call for call in graph.calls if self.views.keys().isdisjoint(call.results)]
        behind = {id(call) for call in graph.calls[graph.model_calls :]}
        self.calls = [call for call in calls if id(call) not in behind]
        self.loss_calls = [call for call in calls if id(call) in behind]
        self.blocks = block_of_each(self.calls, blocks)
        self.known: dict[Any, StepProgram] = {}
        self.proxies: dict[tuple[str, tuple[str, ...]], Tensors] = {}

    def steps(self) -> Steps:
        """Makes the steps."""
        outputs = [number for number in self.graph.outputs if number not in self.views]
        ends = outputs if self.graph.loss is None else [self.graph.loss]
        reads = set(ends) if not self.loss_calls else self._alive(self.loss_calls, ends)[0]
        live = self._alive(self.calls, {*outputs, *reads})
        ranges = list(itertools.pairwise([0, *cuts(self.calls)])) if self.calls else []
        names = self._titles(ranges)
        steps, found = [], []
        for (start, stop), name in zip(ranges, names, strict=True):
            calls = self.calls[start:stop]
            step = self._step(calls, sorted(live[start]), sorted(live[stop]), name)
            steps.append(step)
            found.append(next(filter(None, self.blocks[start:stop]), ""))
        return Steps(
            Outline(tuple(steps), tuple(_numbered(found))),
            names,
            tuple(self.calls[start - 1].index + 1 if start else 0 for start, _ in ranges),
            tuple(sorted(live[0])),
            tuple(sorted(live[-1])),
            self._loss(sorted(live[-1])),
            self.graph,
        )

    def _loss(self, live: Sequence[int]) -> Step | None:
        if self.graph.loss is None:
            return None
        return self._step(self.loss_calls, live, [self.graph.loss], "the loss")

    def _step(
        self, calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int], name: str
    ) -> NamedStep:
        calls = [*self._views_for(calls), *calls]
        key, part, owners = _localized(calls, needs, gives)
        part = self.known.setdefault(key, part)
        step = NamedStep(part, *(self._proxy(owner, names) for owner, names in owners.items()))
        step.title = name
        step.sources = tuple(Source(id(self.modules[_path(c)]), c.line) for c in calls)
        return step

    def _proxy(self, owner: str, names: Iterable[str]) -> Tensors:
        key = owner, tuple(sorted(names))
        return self.proxies.setdefault(key, Tensors(self.modules[owner], key[1]))

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
        """Returns for each place between calls the values that are read later."""
        alive = set(ends)
        found = [set(alive)]
        for call in reversed(calls):
            alive -= set(call.results)
            alive |= {number for number in call.reads() if number not in self.views}
            for view in self._views_for([call]):
                alive |= {number for number in view.reads() if number not in self.views}
            found.append(set(alive))
        return found[::-1]

    def _titles(self, ranges: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Names the steps by the modules of one kernel, others by their operators, too."""
        parts = [_shown(self.calls[start:stop]) for start, stop in ranges]
        paths = [frozenset(map(_path, calls)) for calls in parts]
        nothing = frozenset[str]()
        around = zip([nothing, *paths[:-1]], [*paths[1:], nothing], strict=True)
        return tuple(
            " ".join(dict.fromkeys(self._title(call, before | behind) for call in calls))
            for calls, (before, behind) in zip(parts, around, strict=True)
        )

    def _title(self, call: Call, around: Container[str]) -> str:
        path = _path(call)
        if not path:
            return call.verb
        is_whole = path not in around and not self.modules[path]._modules
        return path if is_whole else f"{path}.{call.verb}"


def cuts(calls: Sequence[Call]) -> list[int]:
    """Returns for each step the number of the call behind its last one."""
    makers = {number: place for place, call in enumerate(calls) for number in call.results}
    joined = bytearray(len(calls))
    # where the views and empty tensors begin that belong to the next kernel
    leading: int | None = None
    for place, call in enumerate(calls):
        if not _is_light(call):
            joined[place] = leading is not None
            leading = None
        elif leading is not None or (place and _looks_back(call, calls[place - 1])):
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


def _looks_back(call: Call, before: Call) -> bool:
    """Says whether a kernel looks at a value in the module that ran before it."""
    return call.within == before.within and next(call.reads(), None) is not None


def _views_of_owned(calls: Sequence[Call]) -> dict[int, Call]:
    """Returns by number the views of parameters and buffers that nothing writes."""
    found: dict[int, Call] = {}
    for call in calls:
        is_view = bool(call.results) and set(call.origins) == {OWNED}
        is_read_only = not call.writes and not str(call.operator).split(".")[1].endswith("_")
        if is_view and is_read_only and all(number in found for number in call.reads()):
            found |= dict.fromkeys(call.results, call)
    return found


def _localized(
    calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int]
) -> tuple[Any, StepProgram, dict[str, dict[str, None]]]:
    """Renumbers the values and modules of a step.

    Returns what names it, its part, and for each module the names of the tensors that it reads.
    """
    values = {number: place for place, number in enumerate(needs)}
    owners: dict[str, dict[str, None]] = {}
    for call in calls:
        for attribute in call.attributes():
            owners.setdefault(attribute.owner, {})[attribute.name] = None
    places = {owner: place for place, owner in enumerate(owners)}

    def local(leaf: Any) -> Any:
        if type(leaf) is Value:
            return Value(values[leaf.number])
        if type(leaf) is Attribute:
            return Attribute(places[leaf.owner], leaf.name)  # type: ignore[arg-type]
        return leaf

    found = []
    for call in calls:
        args, kwargs = mapped(call.args, local), mapped(call.kwargs, local)
        for number in call.results:
            values[number] = len(values)
        results = tuple(values[number] for number in call.results)
        found.append(Call(call.operator, args, kwargs, results, 0, (), call.grad))
    given = [values[number] for number in gives]
    key = tuple((c.operator, repr(c.args), repr(c.kwargs), c.results, c.grad) for c in found)
    return (key, len(needs), tuple(given)), StepProgram(found, given, len(owners)), owners


def _called(call: Call, args: Any, kwargs: Any) -> Any:
    if call.grad:
        return call.function(*args, **kwargs)
    with torch.no_grad():
        return call.function(*args, **kwargs)


def _check_count(call: Call, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != len(call.results):
        raise PlanError(
            f"{call.operator} returned {len(tensors)} tensors, and {len(call.results)} when the "
            "model ran"
        )


def _fill(known: Mapping[int, Any], modules: Sequence[Tensors], leaf: Any) -> Any:
    if type(leaf) is Value:
        return known[leaf.number]
    if type(leaf) is Attribute:
        return modules[leaf.owner].tensor(leaf.name)  # type: ignore[call-overload]
    return leaf


def _shown(calls: Sequence[Call]) -> Sequence[Call]:
    """Returns the calls by which a step is named."""
    return [call for call in calls if not _is_light(call) or call.writes] or calls


def _path(call: Call) -> str:
    """Returns the path of the module whose code called a kernel."""
    return "".join(call.within[-1:])


def _numbered(names: Sequence[str]) -> Iterator[int]:
    for number, (_, group) in enumerate(itertools.groupby(names)):
        for _ in group:
            yield number
