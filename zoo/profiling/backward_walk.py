"""The backward of a graph, node by node, in this thread and without autograd's engine.

The engine has threads, which a forked process does not inherit: once a process has run a backward,
autograd refuses one in its children. What is walked here are the same nodes in the same order (the
latest first), without gradients of gradients and without hooks on tensors. A function of Python's
gets zeros for a gradient that is not there, also where it asked for None. A block of
`torch.utils.checkpoint`'s inside is counted as if recomputed for each of its saved tensors.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Pending:
    """A node that will run: the gradients of its outputs so far, and how many are yet to come.

    `is_behind`: a path to it leads through a node that the caller asked about.
    """

    def __init__(self, node: Any) -> None:
        self.gradients: list[Tensor | None] = [None] * len(node._input_metadata)
        self.missing = 0
        self.is_behind = False

    def add(self, gradient: Tensor | None, number: int, node: Any) -> None:
        """Adds a gradient of an output."""
        self.missing -= 1
        if gradient is not None:
            gradient = _as_expected(gradient, node._input_metadata[number])
            before = self.gradients[number]
            self.gradients[number] = gradient if before is None else before + gradient


def gradients_of(
    roots: list[Tensor], before: int = 0, complete: Callable[[Tensor], None] = lambda leaf: None
) -> tuple[dict[int, Tensor], set[int]]:
    """Returns the gradients of all leaves by a scalar, by the ids of the leaves.

    `complete` is called with a leaf when its gradient is.

    And the ids of leaves that are behind a node which was made before that sequence number. `roots`
    holds the scalar, if any, and is empty afterwards: a node that has run is let go of, and with it
    what it saved, as soon as nobody else holds it.
    """
    gradients: dict[int, Tensor] = {}
    leaves_behind: set[int] = set()
    if not roots:
        return gradients, leaves_behind
    root = roots.pop()
    node = root.grad_fn
    pending = _pending(node)
    pending[node].gradients[root.output_nr] = torch.ones_like(root)
    del root
    order = itertools.count()
    ready: list[tuple[int, int, Any]] = [(0, next(order), node)]
    with torch.no_grad():
        while ready:
            node = heapq.heappop(ready)[-1]
            given = pending.pop(node)
            # a function of Python's may have an attribute of that name
            leaf = None if hasattr(node, "apply") else getattr(node, "variable", None)
            if leaf is not None:
                if given.gradients[0] is not None:
                    gradients[id(leaf)] = given.gradients[0]
                    complete(leaf)
                if given.is_behind:
                    leaves_behind.add(id(leaf))
                continue
            made = _run(node, given.gradients)
            is_behind = given.is_behind or _number(node) < before
            del given
            for (behind, number), gradient in zip(node.next_functions, made, strict=True):
                if behind is not None:
                    pending[behind].add(gradient, number, behind)
                    pending[behind].is_behind |= is_behind
                    if not pending[behind].missing:
                        heapq.heappush(ready, (-_number(behind), next(order), behind))
            # a name would hold a node, and with it what it saved
            del made, node, gradient, behind
    return gradients, leaves_behind


def _pending(root: Any) -> dict[Any, _Pending]:
    """Finds all nodes, and counts for each the edges that lead to it."""
    found = {root: _Pending(root)}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if node not in found:
                found[node] = _Pending(node)
                stack.append(node)
            found[node].missing += 1
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


def _zeros(metadata: Any) -> Tensor:
    return torch.zeros(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _as_expected(gradient: Tensor, metadata: Any) -> Tensor:
    """Gives a gradient the shape and dtype of what it is the gradient of, as the engine does."""
    if metadata.is_nested_tensor:
        return gradient
    if gradient.shape != tuple(metadata.shape):
        gradient = gradient.sum_to_size(tuple(metadata.shape))
    # `to` is a kernel on fake tensors also where it changes nothing
    return gradient.to(metadata.dtype) if gradient.dtype != metadata.dtype else gradient


def _number(node: Any) -> int:
    return int(node._sequence_nr())
