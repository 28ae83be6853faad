"""The backward of a graph, node by node, in this thread and without autograd's engine.

The engine has threads, which a forked process does not inherit: once a process has run a backward,
autograd refuses one in its children. What is walked here are the same nodes in the same order (the
latest first), without gradients of gradients and without hooks on tensors. A function of Python's
gets zeros for a gradient that is not there, also where it asked for None. A block of
`torch.utils.checkpoint`'s inside is counted as if recomputed for each of its saved tensors.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Waiting:
    """A node that will run: the gradients of its outputs so far, and who has yet to give some."""

    def __init__(self, node: Any) -> None:
        self.gradients: list[Tensor | None] = [None] * len(node._input_metadata)
        self.missing = 0

    def takes(self, gradient: Tensor | None, number: int, node: Any) -> bool:
        """Adds what a node before it gives to an output; says whether it was the last one."""
        self.missing -= 1
        if gradient is not None:
            gradient = _as_expected(gradient, node._input_metadata[number])
            before = self.gradients[number]
            self.gradients[number] = gradient if before is None else before + gradient
        return not self.missing


def gradients_of(roots: list[Tensor], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of leaves by a scalar, what `torch.autograd.grad` returns for it.

    `roots` is a list of this scalar, and is empty afterwards: a node that has run is let go of, and
    with it what it saved, as soon as nobody else holds it.
    """
    places = {id(leaf): place for place, leaf in enumerate(wanted)}
    found: list[Tensor | None] = [None] * len(wanted)
    root = roots.pop()
    node = root.grad_fn
    waiting = _waiting(node, places)
    if node not in waiting:
        return found
    waiting[node].gradients[root.output_nr] = torch.ones_like(root)
    del root
    order = itertools.count()
    ready: list[tuple[int, int, Any]] = [(-_number(node), next(order), node)]
    with torch.no_grad():
        while ready:
            node = heapq.heappop(ready)[-1]
            given = waiting.pop(node).gradients
            if (place := places.get(id(getattr(node, "variable", None)))) is not None:
                found[place] = given[0]
                continue
            made = _run(node, given)
            del given
            for (behind, number), gradient in zip(node.next_functions, made, strict=True):
                if behind in waiting and waiting[behind].takes(gradient, number, behind):
                    heapq.heappush(ready, (-_number(behind), next(order), behind))
            # a name would hold a node, and with it what it saved
            del made, node, gradient, behind
    return found


def _waiting(root: Any, places: dict[int, int]) -> dict[Any, _Waiting]:
    """Finds the nodes that lead to wanted leaves, and counts for each those that give to it."""
    leads: dict[Any, bool] = {}
    stack = [(root, False)]
    while stack:
        node, is_left = stack.pop()
        behind = [following for following, _ in node.next_functions if following is not None]
        if is_left:
            is_wanted = id(getattr(node, "variable", None)) in places
            leads[node] = is_wanted or any(leads.get(following, False) for following in behind)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack += [(following, False) for following in behind if following not in leads]
    found = {node: _Waiting(node) for node, is_needed in leads.items() if is_needed}
    for node in found:
        for following, _ in node.next_functions:
            if following in found:
                found[following].missing += 1
    return found


def _run(node: Any, given: list[Tensor | None]) -> Sequence[Tensor | None]:
    """Runs a node; returns a gradient or None for each of the nodes behind it."""
    if not hasattr(node, "apply"):
        made = node(*given)
        return made if isinstance(made, tuple) else (made,)
    # a function of Python's, in which a gradient that is not there is taken for one of zeros
    pairs = zip(given, node._input_metadata, strict=True)
    made = node.apply(*(_zeros(kind) if one is None else one for one, kind in pairs))
    every = made if isinstance(made, tuple) else (made,)
    # of its arguments only tensors have nodes behind them
    pairs = zip(every, node.needs_input_grad, strict=False)
    wanted = (gradient for gradient, is_needed in pairs if is_needed)
    return [None if behind is None else next(wanted) for behind, _ in node.next_functions]


def _zeros(kind: Any) -> Tensor:
    return torch.zeros(tuple(kind.shape), dtype=kind.dtype, device=kind.device)


def _as_expected(gradient: Tensor, kind: Any) -> Tensor:
    """Gives a gradient the shape and type of what it is the gradient of, as the engine does."""
    if kind.is_nested_tensor:
        return gradient
    if gradient.shape != tuple(kind.shape):
        gradient = gradient.sum_to_size(tuple(kind.shape))
    return gradient.to(kind.dtype) if gradient.dtype != kind.dtype else gradient


def _number(node: Any) -> int:
    return int(node._sequence_nr())
