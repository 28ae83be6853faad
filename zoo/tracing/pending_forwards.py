"""The forwards of a model whose backward has not begun: what a step's later forwards find.

    forward 1   its outputs' autograd nodes hold a token
    forward 2   one token is alive, so that two forwards wait for a backward
    backward    the nodes run, and the tokens are forgotten
    forward 1   none is alive: a step begins

A token dies with the graph, too, where no backward runs.
"""

import weakref
from collections import deque
from collections.abc import Iterable

from torch import Tensor

# the steps of which all ran fewer forwards than were planned for, before fewer are
STEPS = 16


class _Waiting:
    """Held by the autograd nodes of a forward's outputs."""

    __slots__ = ("__weakref__",)


class PendingForwards:
    """Counts the forwards of each step; those of other threads, too."""

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[_Waiting]] = []
        self._running = 0
        self._counts: deque[int] = deque(maxlen=STEPS)

    def begin(self) -> int:
        """Notes that a forward begins; returns how many wait for a backward, with this one."""
        self._tokens = [token for token in self._tokens if token() is not None]
        running = len(self._tokens) + 1
        if running == 1 and self._running:
            self._counts.append(self._running)
            self._running = 0
        self._running = max(self._running, running)
        return running

    def add(self, outputs: Iterable[Tensor]) -> None:
        """Notes the outputs of a forward that is over."""
        token = _Waiting()
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        for node in nodes:
            node.register_prehook(_Forgetting(self, token))
        if nodes:
            self._tokens.append(weakref.ref(token))

    def usual(self, planned: int) -> int:
        """Returns how many forwards to plan for, where a step begins."""
        most = max(self._counts, default=planned)
        return most if most > planned or len(self._counts) == STEPS else planned

    def _forget(self, token: _Waiting) -> None:
        self._tokens = [other for other in self._tokens if other() not in (None, token)]


class _Forgetting:
    """Forgets a token when the autograd node runs that has this as its hook."""

    __slots__ = ("pending", "token")

    def __init__(self, pending: PendingForwards, token: _Waiting) -> None:
        self.pending, self.token = pending, token

    def __call__(self, _: object) -> None:
        self.pending._forget(self.token)
