"""Cuts a tape into the steps of a chain.

    calls    conv1 | bn1  relu_ | maxpool | conv | bn  relu_ | conv | bn  += relu_ | ...
    state    x       y            x         x      y, x        y, x   y, x           x

The state between two steps is every value that a later call reads. A cut is left out

- where a later call writes in place what an earlier one made: who makes and who writes stay in one
  step, since a step that runs again must find its inputs as they were;
- before a call that only looks at a tensor in another way and makes nothing.

Equal steps of equal blocks are the same `Part` with other modules, so that each is measured once.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from zoo.adapter.tape import Attribute, Call, Tape, Value, mapped, restored, tensors_of
from zoo.chain import Outline, Source, Step, Titled, has_parts
from zoo.errors import RecomputeError


class Tensors(nn.Module):
    """The parameters and buffers of a module without its children: what a step reads itself."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = owner._parameters, owner._buffers

    def is_of(self, owner: nn.Module) -> bool:
        """Says whether these are still the module's own dictionaries."""
        return self._parameters is owner._parameters and self._buffers is owner._buffers


class Part:
    """What a step does: calls over numbered values and numbered modules.

    Called with as many modules as `modules` says and then with the state. It has no `__dict__`, so
    that the engine, which looks for all that a step reaches, finds the modules and not the tape.
    """

    __slots__ = ("__name__", "calls", "gives", "last", "modules", "needs", "unused")

    def __init__(self, calls: Sequence[Call], needs: int, gives: Sequence[int], modules: int):
        self.calls, self.needs, self.gives, self.modules = (
            tuple(calls),
            needs,
            tuple(gives),
            modules,
        )
        self.__name__ = "_".join(dict.fromkeys(map(_verb, self.calls)))
        self.last: list[list[int]] = []
        self.unused: list[list[int]] = []
        seen = set(self.gives)
        for call in reversed(self.calls):
            self.unused.append([number for number in call.results if number not in seen])
            self.last.append([number for number in set(call.reads()) if number not in seen])
            seen.update(call.reads())
        self.last.reverse()
        self.unused.reverse()

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Runs the calls; a value goes when its last reader has it."""
        modules = given[: self.modules]
        known: dict[int, Any] = dict(enumerate(given[self.modules :]))
        del given
        fill = functools.partial(_fill, known, modules)
        for place, (last, unused) in enumerate(zip(self.last, self.unused, strict=True)):
            call = self.calls[place]
            args, kwargs = mapped(call.args, fill), mapped(call.kwargs, fill)
            for number in last:
                del known[number]
            tensors = tensors_of(_called(call, modules, args, kwargs))
            del args, kwargs
            _check_count(call, tensors)
            known.update(zip(call.results, tensors, strict=True))
            for number in unused:
                known.pop(number, None)
            del tensors
        return tuple(known[number] for number in self.gives)


class Steps:
    """The steps of a model by a tape, and how to get from arguments to the state and back."""

    def __init__(self, model: nn.Module, tape: Tape, blocks: Sequence[str]) -> None:
        self.tape = tape
        modules = dict(model.named_modules())
        self.proxies: dict[str, Tensors] = {}
        known: dict[Any, Part] = {}
        steps: list[Step] = []
        found: list[str] = []
        whole: list[int] = []
        self.names: list[str] = []
        live = _live(tape)
        ends = cuts(tape)
        for start, stop in itertools.pairwise([0, *ends]):
            calls = tape.calls[start:stop]
            key, part, handles = _localized(calls, live[start], live[stop])
            part = known.setdefault(key, part)
            step = Titled(part, *(self._handle(modules, h) for h in handles))
            step.title = " ".join(dict.fromkeys(map(_title, calls)))
            step.sources = tuple(Source(id(modules[_path(call)]), call.line) for call in calls)
            steps.append(step)
            self.names.append(step.title)
            found.append(next(filter(None, blocks[start:stop]), ""))
            if any(call.module is not None and has_parts(modules[call.module]) for call in calls):
                whole.append(len(steps) - 1)
        self.outline = Outline(tuple(steps), tuple(_numbered(found)), frozenset(whole))
        self.live_in, self.live_out = live[0], live[len(tape.calls)]

    def _handle(self, modules: Mapping[str, nn.Module], handle: Any) -> nn.Module:
        if isinstance(handle, Attribute):
            owner = handle.owner
            return self.proxies.setdefault(owner, Tensors(modules[owner]))
        return modules[handle]

    def state(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the first state from the distinct tensors among the inputs."""
        return tuple(tensors[number] for number in self.live_in)

    def output(self, model: nn.Module, state: Sequence[Tensor]) -> list[Any]:
        """Returns the leaves of the forward's output from the last state."""
        known = dict(zip(self.live_out, state, strict=True))

        def filled(leaf: Any) -> Any:
            if type(leaf) is Value:
                return known[leaf.number]
            if type(leaf) is Attribute:
                return getattr(model.get_submodule(leaf.owner), leaf.name)
            return leaf

        return [mapped(leaf, filled) for leaf in self.tape.output]

    def returned(self, model: nn.Module, state: Sequence[Tensor]) -> Any:
        """Returns what the forward would have returned, from the last state."""
        return restored(pytree.tree_unflatten(self.output(model, state), self.tape.output_spec))


def cuts(tape: Tape) -> list[int]:
    """Returns for each step the number of the call behind its last one."""
    calls = tape.calls
    makers = {number: place for place, call in enumerate(calls) for number in call.results}
    joined = set()
    for place, call in enumerate(calls):
        if place and not call.writes and _only_looks(call):
            joined.add(place)
        for origin in call.writes:
            joined.update(range(makers.get(origin, 0) + 1, place + 1))
    return [*(place for place in range(1, len(calls)) if place not in joined), len(calls)]


def _only_looks(call: Call) -> bool:
    """Says whether a call makes no storage of its own."""
    return not set(call.results) & set(call.origins)


def _live(tape: Tape) -> list[tuple[int, ...]]:
    """Returns for each place between calls the values that are read later, in order."""
    alive = {leaf.number for leaf in tape.output if isinstance(leaf, Value)}
    found = [tuple(sorted(alive))]
    for call in reversed(tape.calls):
        alive -= set(call.results)
        alive |= set(call.reads())
        found.append(tuple(sorted(alive)))
    return found[::-1]


def _localized(
    calls: Sequence[Call], needs: Sequence[int], gives: Sequence[int]
) -> tuple[Any, Part, list[Any]]:
    """Renumbers the values and modules of a step; returns what names it, the part, its modules."""
    values = {number: place for place, number in enumerate(needs)}
    handles: dict[Any, int] = {}

    def local(leaf: Any) -> Any:
        if type(leaf) is Value:
            return Value(values[leaf.number])
        if type(leaf) is Attribute:
            place = handles.setdefault(Attribute(leaf.owner, ""), len(handles))
            return Attribute(place, leaf.name)  # type: ignore[arg-type]
        return leaf

    found = []
    for call in calls:
        args, kwargs = mapped(call.args, local), mapped(call.kwargs, local)
        module: Any = None
        if call.module is not None:
            module = handles.setdefault(call.module, len(handles))
        for number in call.results:
            values[number] = len(values)
        results = tuple(values[number] for number in call.results)
        found.append(Call(call.function, module, args, kwargs, results, (), call.grad))
    given = [values[number] for number in gives]
    part = Part(found, len(needs), given, len(handles))
    key = tuple(
        (c.function, c.module, repr(c.args), repr(c.kwargs), c.results, c.grad) for c in found
    )
    return (key, len(needs), tuple(given)), part, list(handles)


def _called(call: Call, modules: Sequence[nn.Module], args: Any, kwargs: Any) -> Any:
    function: Any = call.function if call.module is None else modules[call.module]  # type: ignore[call-overload]
    if call.grad:
        return function(*args, **kwargs)
    with torch.no_grad():
        return function(*args, **kwargs)


def _check_count(call: Call, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != len(call.results):
        raise RecomputeError(
            f"a step returned {len(tensors)} tensors, and {len(call.results)} when the model was "
            "watched: a hook or a method was replaced. Call zoo.checkpoint again, or "
            "zoo.uncheckpoint."
        )


def _fill(known: Mapping[int, Any], modules: Sequence[nn.Module], leaf: Any) -> Any:
    if type(leaf) is Value:
        return known[leaf.number]
    if type(leaf) is Attribute:
        return getattr(modules[leaf.owner], leaf.name)  # type: ignore[call-overload]
    return leaf


def _verb(call: Call) -> str:
    return "call" if call.module is not None else getattr(call.function, "__name__", "apply")


def _title(call: Call) -> str:
    """Names a call: the module's path, or a function behind the path of whose code it is in."""
    if call.module is not None:
        return call.module
    return ".".join((*call.within[-1:], _verb(call)))


def _path(call: Call) -> str:
    """Returns the path of the module that is called, or whose code calls a function."""
    return call.module if call.module is not None else "".join(call.within[-1:])


def _numbered(names: Sequence[str]) -> Iterator[int]:
    for number, (_, group) in enumerate(itertools.groupby(names)):
        for _ in group:
            yield number
