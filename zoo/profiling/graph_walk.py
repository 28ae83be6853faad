"""The backward of a graph, node by node, in this thread and without autograd's engine.

The engine has threads, which a forked process does not inherit: once a process has run a backward,
autograd refuses one in its children. What is walked here are the same nodes in the same order (the
latest first), without gradients of gradients and without hooks on tensors. A function of Python's
gets zeros for a gradient that is not there, also where it asked for None. A block of
`torch.utils.checkpoint`'s inside is counted as if recomputed for each of its saved tensors.
"""

import heapq
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Pending:
    """A node that will run: the gradients of its outputs so far, and how many are yet to come."""

    def __init__(self, node: Any) -> None:
        self.gradients: list[Tensor | None] = [None] * len(node._input_metadata)
        self.missing = 0

    def add(self, gradient: Tensor | None, number: int, node: Any) -> bool:
        """Adds a gradient of an output; says whether it was the last one."""
        self.missing -= 1
        if gradient is not None:
            gradient = _as_expected(gradient, node._input_metadata[number])
            before = self.gradients[number]
            self.gradients[number] = gradient if before is None else before + gradient
        return not self.missing


def gradients_of(roots: list[Tensor], wanted: Container[int]) -> dict[int, Tensor]:
    """Returns the gradients of leaves by a scalar, as `torch.autograd.grad` does, by their ids.

    `wanted` are ids of leaves. `roots` is a list of this scalar, and is empty afterwards: a node
    that has run is let go of, and with it what it saved, as soon as nobody else holds it.
    """
    found: dict[int, Tensor] = {}
    root = roots.pop()
    node = root.grad_fn
    pending = _pending(node, wanted)
    if node not in pending:
        return found
    pending[node].gradients[root.output_nr] = torch.ones_like(root)
    del root
    order = itertools.count()
    ready: list[tuple[int, int, Any]] = [(-_number(node), next(order), node)]
    with torch.no_grad():
        while ready:
            node = heapq.heappop(ready)[-1]
            given = pending.pop(node).gradients
            if (leaf := id(getattr(node, "variable", None))) in wanted:
                if given[0] is not None:
                    found[leaf] = given[0]
                continue
            made = _run(node, given)
            del given
            for (behind, number), gradient in zip(node.next_functions, made, strict=True):
                if behind in pending and pending[behind].add(gradient, number, behind):
                    heapq.heappush(ready, (-_number(behind), next(order), behind))
            # a name would hold a node, and with it what it saved
            del made, node, gradient, behind
    return found


def parameters_behind(outputs: Iterable[Any], before: int) -> tuple[set[int], set[int]]:
    """Finds the parameters in the graph of outputs, by their ids: all, and those that are shared.

    Shared ones are behind a node that was made before this sequence number, so that other steps use
    them through the same node.
    """
    used: set[int] = set()
    shared: set[int] = set()
    visited: set[Any] = set()
    stack = [(output.grad_fn, False) for output in outputs]
    while stack:
        node, is_shared = stack.pop()
        if node is None or (node, is_shared) in visited:
            continue
        visited.add((node, is_shared))
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            (shared if is_shared else used).add(id(variable))
        is_shared = is_shared or node._sequence_nr() < before
        stack += [(behind, is_shared) for behind, _ in node.next_functions]
    return used | shared, shared


def _pending(root: Any, wanted: Container[int]) -> dict[Any, _Pending]:
    """Finds the nodes that lead to wanted leaves, and counts for each those that give to it."""
    leads: dict[Any, bool] = {}
    stack = [(root, False)]
    while stack:
        node, is_left = stack.pop()
        behind = [following for following, _ in node.next_functions if following is not None]
        if is_left:
            is_wanted = id(getattr(node, "variable", None)) in wanted
            leads[node] = is_wanted or any(leads.get(following, False) for following in behind)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack += [(following, False) for following in behind if following not in leads]
    found = {node: _Pending(node) for node, is_needed in leads.items() if is_needed}
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
