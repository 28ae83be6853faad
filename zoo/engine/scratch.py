"""Runs on copies of what they move: a rehearsal, unlike a second run, leaves nothing behind.

Before it has a plan for a chain, the planner runs its steps: on fake tensors, which write to
counters, logs and small real tensors all the same, and for real, which also draws random numbers.
What a first run then finds must be what it would have found without.

    containers, small tensors    a copy stands in their place, the same wherever they stand
    iterators                    a copy, or one that refuses where Python makes none
    objects                      themselves, their attributes put back afterwards
    random streams               put back afterwards

What has gradients, or is large, is not copied: see "Limits" for what reading a function finds.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from zoo.engine.acting import Acting
from zoo.engine.global_hooks import GlobalHooks
from zoo.engine.iterators import position_of
from zoo.engine.notes import LONG, SMALL, is_fixed
from zoo.engine.randomness import read_streams, replayed_streams, sources
from zoo.engine.reach import Variable, reach
from zoo.engine.snapshot import BOOKKEEPING
from zoo.errors import PlanError


@contextlib.contextmanager
def on_scratch(roots: Sequence[Any], inputs: Sequence[object]) -> Iterator[None]:
    """Lets functions run on copies of what they move, without hooks for all modules.

    `inputs` are tensors like those that the functions get; they are not copied.
    """
    reached, copies = reach(roots), _Copies()
    streams = read_streams(sources(inputs, reached.generators.values()))
    with contextlib.ExitStack() as undo:
        undo.enter_context(replayed_streams(streams))
        undo.enter_context(GlobalHooks(Acting(set())).acting_only())
        for variable in reached.variables.values():
            undo.callback(_rebind, variable, variable.read())
            _rebind(variable, copies.of(variable.read()))
        for value in (*reached.objects.values(), *reached.modules):
            undo.callback(_put_back, value, dict(vars(value)))
            vars(value).update(copies.of_attributes(value))
        yield


def _rebind(variable: Variable, value: Any) -> None:
    if variable.read() is not value:
        variable.write(value)


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


class _Copies:
    """Copies of values, one for each."""

    def __init__(self) -> None:
        # the value stays alive beside its copy, so that no other gets its id
        self.known: dict[int, tuple[Any, Any]] = {}

    def of_attributes(self, owner: Any) -> dict[str, Any]:
        """Copies the attributes of an object; of a module also small parameters without gradients.

        Other buffers and parameters are left to who runs it.
        """
        found = {
            name: self.of(value)
            for name, value in vars(owner).items()
            if not (isinstance(owner, nn.Module) and name in BOOKKEEPING)
        }
        if isinstance(owner, nn.Module):
            found["_parameters"] = {name: self.of(p) for name, p in owner._parameters.items()}
        return found

    def of(self, value: Any) -> Any:
        """Returns a copy of a value, or the value where it is not one to copy."""
        if is_fixed(value):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = (value, self._made(value))
        return self.known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _copy_of_tensor(value)
        if position := position_of(value):
            return _Untaken(value) if position.before is None else position.again()
        if isinstance(value, dict):
            made = copy.copy(value)
            if len(value) <= LONG:
                made.update((key, self.of(part)) for key, part in value.items())
            return made
        if type(value) in (list, tuple, deque):
            parts = map(self.of, value) if len(value) <= LONG else value
            return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
        return value.copy() if type(value) is set else value


def _copy_of_tensor(tensor: Tensor) -> Tensor:
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.requires_grad
    if not plain or tensor.nbytes > SMALL:
        return tensor
    made = tensor.detach().clone()
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


class _Untaken:
    """Stands in for an iterator that nobody can take from twice."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> "_Untaken":
        return self

    def __next__(self) -> NoReturn:
        raise PlanError(
            f"a step takes what comes next from a {type(self._value).__name__}, which planning "
            "cannot give back. Pass checkpoint= a number of segments or a Plan, which need no "
            "measuring."
        )

    def __getattr__(self, name: str) -> Any:
        return self.__next__ if name in ("send", "throw") else getattr(self._value, name)
