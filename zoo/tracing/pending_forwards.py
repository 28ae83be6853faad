"""The forwards whose backward has not begun, of a planned model and of the others beside it.

    forward 1   its outputs' autograd nodes hold a token, with the bytes that its graph holds
    forward 2   one token is alive, so that two forwards wait for a backward
    backward    the nodes run, and the tokens are forgotten
    forward 1   none is alive: a step begins

A token dies with the graph, too, where no backward runs. Models whose forwards run in turns on one
thread share what is there: the budget of each counts what the others hold meanwhile.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zoo._torch import is_graph_kept
from zoo.engine.devices import counts_memory, peak as most_in_use
from zoo.engine.saved_tensors import warn_of_graph
from zoo.invocation import device_of, weights_of
from zoo.profiling.cast_cache import caches_casts

# the steps of which all ran fewer forwards than were planned for, before fewer are
STEPS = 16
# how many steps by new plans are looked at: from the second one on the optimizer has its state
LOOKS = 3
# what others hold counts in such parts of a budget, and less is noticed by so many of them
PARTS, MANY = 256, 16


def nodes_of(outputs: Iterable[Tensor]) -> list[Node]:
    """Returns the autograd nodes that made outputs."""
    return [output.grad_fn for output in outputs if output.grad_fn is not None]


class _Waiting:
    """Held by the autograd nodes of a forward's outputs: bytes that its graph holds, and casts."""

    __slots__ = ("__weakref__", "bytes", "casts")

    def __init__(self, held: int, casts: int) -> None:
        self.bytes, self.casts = held, casts


class PendingForwards:
    """Counts the forwards of each step of a model, and what other models hold meanwhile.

    Attributes:
        budget: of the model, in bytes; 0 for none, such as a share of its own baseline.
        limit: the bytes that its steps may take: its budget, or that of a report.
        resident: bytes of the model's parameters and buffers, and of the optimizer's state.
        after: the least bytes that others can take between its forward and its backward, where
            their budgets would not be kept else.
        looks: of how many more forwards the steps are looked at, where the device counts its
            memory.
        most_before: the most bytes in use on the device before the last forward; -1 unless it is
            looked at.
        unseen: bytes that no plan has counted, and a step has taken.
    """

    def __init__(self, model: nn.Module, budget: int, limit: int = 0) -> None:
        self.budget, self.limit = budget, budget or limit
        self.resident = self.after = self.unseen = 0
        device = device_of(model)
        self._device = device if counts_memory(device) else None
        self.looks, self.most_before = LOOKS, -1
        self._model = weakref.ref(model)
        self._tokens: list[weakref.ref[_Waiting]] = []
        # forwards of this step, and of those before; the bytes of others likewise
        self._running = self._held = 0
        self._counts: deque[int] = deque(maxlen=STEPS)
        self._holdings: deque[int] = deque(maxlen=STEPS)
        # how many waited when each of the last forwards began
        self._running_of_late: deque[int] = deque(maxlen=STEPS)
        # whether the last forward began a step
        self.begins_step = True
        # the most forwards of a step, and bytes of others, that are planned for no longer
        self._dropped_forwards = self._dropped_bytes = 0
        # when its last forward began, and its last step
        self._began = self._step_began = 0
        self._thread = threading.get_ident()
        # bytes of the parameters of others that are this model's, too
        self._common: weakref.WeakKeyDictionary[PendingForwards, int]
        self._common = weakref.WeakKeyDictionary()
        if budget:
            _all.add(self)

    def begin(self) -> int:
        """Notes that a forward begins; returns how many wait for a backward, with this one."""
        self._thread = threading.get_ident()
        running = len(self._waiting()) + 1
        self._running_of_late.append(running)
        # a loop may keep a graph from step to step, as a pipelined one
        most = min(self._running_of_late) if len(self._running_of_late) == STEPS else 1
        self.begins_step = running <= most
        if self.begins_step and self._running:
            self._counts.append(self._running)
            self._holdings.append(self._held)
            self._running = self._held = 0
        self._running = max(self._running, running)
        self._note_others()
        self._began = next(_clock)
        if self.begins_step:
            self._step_began = self._began
        return running

    def add(self, outputs: Iterable[Tensor], held: int, casts: int = 0) -> None:
        """Notes the outputs of a forward that is over, and the bytes that its graph holds.

        An autocast around it holds `casts` of weights until it is left.
        """
        token = _Waiting(held, casts)
        nodes = nodes_of(outputs)
        for node in nodes:
            node.register_prehook(_Forgetting(self, token))
        if nodes:
            self._tokens.append(weakref.ref(token))

    def note_most_before(self) -> None:
        """Notes the most bytes in use before a forward, if its step is looked at."""
        self.most_before = -1
        if self.looks and self.limit and self._device is not None:
            self.looks -= 1
            self.most_before = most_in_use(self._device)

    def most_since(self, before: int) -> int | None:
        """Returns the most bytes in use since there were so many at most; None if that is it."""
        assert self._device is not None, "it has told the bytes before"
        most = most_in_use(self._device)
        return most if most > before else None

    def forget(self, token: _Waiting) -> None:
        """Notes that the backward of a forward begins."""
        self._tokens = [other for other in self._tokens if other() not in (None, token)]
        self._note_others()

    def usual(self, planned: int) -> int:
        """Returns how many forwards to plan for, where a step begins.

        They become fewer if none of the last steps had as many, unless that was so before.
        """
        most = max(self._counts, default=planned)
        if most > planned:
            return max(most, self._dropped_forwards)
        if len(self._counts) < STEPS or most == planned or planned <= self._dropped_forwards:
            return planned
        self._dropped_forwards = planned
        return most

    def others(self, planned: int) -> int:
        """Returns the bytes to plan with that others hold in a step, of which it is a part.

        They are rounded up, and stay as `planned` unless they are more, or many less.
        """
        part = max(1, self.budget // PARTS)
        held = -(-max(self._held, *self._holdings, 0) // part) * part
        if held > planned:
            return max(held, self._dropped_bytes)
        if held >= planned - MANY * part or planned <= self._dropped_bytes:
            return planned
        self._dropped_bytes = planned
        return held

    def note_planned(self) -> None:
        """Notes that the model is planned for anew, so that it holds something else."""
        for other in self._on_this_thread():
            other._holdings.clear()
            other._held = 0

    def require_room(self, takes: int) -> None:
        """Requires models whose forwards wait for a backward to leave so many bytes."""
        waiting = [other for other in self._on_this_thread() if other.held()]
        for other in waiting:
            between = sum(one.held() for one in waiting if one._began > other._began)
            less = max(0, other.budget - self.budget)
            other.after = max(other.after, between + takes + less)

    def held(self) -> int:
        """Returns the bytes that forwards hold which wait for their backward."""
        in_autocast = caches_casts()
        return sum(token.bytes + token.casts * in_autocast for token in self._waiting())

    def _waiting(self) -> list[_Waiting]:
        alive = [token for reference in self._tokens if (token := reference()) is not None]
        self._tokens = [*map(weakref.ref, alive)]
        return alive

    def _active_models(self) -> "list[PendingForwards]":
        """Returns the other models that have run on this thread since the last step began.

        In the first step these are those whose forwards wait.
        """
        return [
            other
            for other in self._on_this_thread()
            if other._began > self._step_began and (self._step_began or other._waiting())
        ]

    def _on_this_thread(self) -> "list[PendingForwards]":
        """Returns those of other models that run on this thread."""
        return [one for one in [*_all] if one is not self and one._thread == self._thread]

    def _common_with(self, other: "PendingForwards") -> int:
        if other not in self._common:
            own = {id(parameter) for parameter in self._weights()}
            its = {id(p): p.nbytes for p in other._weights() if id(p) in own}
            self._common[other] = sum(its.values())
        return self._common[other]

    def _weights(self) -> list[nn.Parameter]:
        model = self._model()
        return [] if model is None else [*weights_of(model)]

    def _note_others(self) -> None:
        """Notes what others hold now, and by how much the least of the budgets is less."""
        if not self.budget or not (beside := self._active_models()):
            return
        own = {id(parameter) for parameter in self._weights()}
        others = {id(p): p.grad for other in beside for p in other._weights() if id(p) not in own}
        held = sum(max(0, o.resident - self._common_with(o)) + o.held() for o in beside)
        held += sum(gradient.nbytes for gradient in others.values() if gradient is not None)
        held += max(0, self.budget - min(other.budget for other in beside))
        self._held = max(self._held, held)


# of all planned models with a budget
_all: "weakref.WeakSet[PendingForwards]" = weakref.WeakSet()
_clock = itertools.count(1)


class _Forgetting:
    """Forgets a token when the autograd node runs that has this as its hook."""

    __slots__ = ("pending", "token")

    def __init__(self, pending: PendingForwards, token: _Waiting) -> None:
        self.pending, self.token = pending, token

    def __call__(self, _: object) -> None:
        if torch.is_grad_enabled():
            warn_of_graph()
        # with retain_graph it goes on to hold what the forward saved
        if not is_graph_kept():
            self.pending.forget(self.token)
