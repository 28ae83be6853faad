"""Runs the backward of an autograd graph node by node, in this thread, without autograd's engine.

The engine has threads, which a forked process does not inherit: once a process has run a backward,
autograd refuses one in its children. Here the same nodes run in the same order (the latest first),
without gradients of gradients and without tensor hooks. An `autograd.Function` gets zeros for a
missing gradient, even if it asked for None. A block inside that `torch.utils.checkpoint` recomputes
is counted as if recomputed for each of its saved tensors.

The tensors that come into a traced forward may have a graph of their own: that of another planned
module, of a checkpointed backbone, of the step before. They may come as arguments, or by an
attribute, a closure or an object that nobody can list. So two rules tell, for any node, whether it
lies in front of the forward, where the backward ends:

    made before    autograd numbers the nodes of a thread, and the trace knows its first
    of a tensor    that a kernel of the trace reads and none has made, whatever thread made it

Nothing behind is called: no segment, no recomputation, no hook and no function of the program.
"""

import heapq
import itertools
import operator
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zoo._torch import interpreted_backward, sequence_number
from zoo.engine.recompute import is_packing
from zoo.engine.tensor_state import is_dense, storage_of
from zoo.profiling.fake_tensors import NumbersNeeded

# the name of the node of a cast
CAST = "ToCopyBackward0"


class TracedGraph:
    """The nodes of the forward that this thread runs from here on.

    Attributes:
        hooked: numbers of the nodes that were made while hooks of the program packed what autograd
            saves: to open such a tensor calls the program.
        shares_casts: whether casts of a weight count as one, as where autocast has made them.
    """

    shares_casts = False

    def __init__(self) -> None:
        # by thread the number of its first node: a device has a thread of its own for a backward
        # inside of the forward
        self._first = {threading.get_ident(): sequence_number()}
        self._latest = sequence_number()  # of the node that comes next
        self._end: int | None = None
        self.hooked: set[int] = set()
        self._in_front: set[Node] = set()
        # tensors that need no look, by their ids: made by the forward, or noted before
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def note_kernel(self, inputs: Iterable[Tensor], *, has_hooks: bool) -> None:
        """Called before a kernel reads tensors; `has_hooks`: the trace's own hooks are there."""
        number = sequence_number()
        self._first.setdefault(threading.get_ident(), number)
        if has_hooks and number > self._latest and not is_packing():
            # autograd has numbered the operation whose kernel this is
            self.hooked.add(number - 1)
        self._latest = number
        for tensor in inputs:
            # without a gradient the kernel makes no edge, and autograd may make a node anew to tell
            if id(tensor) not in self._known and tensor.requires_grad and torch.is_grad_enabled():
                self.note_input(tensor)
                self.note_result(tensor)

    def note_input(self, tensor: Tensor) -> None:
        """Notes a tensor that the forward has not made: the node that made it lies in front."""
        for source in (tensor, tensor._base):
            if source is not None and source.grad_fn is not None:
                self._in_front.add(source.grad_fn)

    def note_result(self, tensor: Tensor) -> None:
        """Notes a tensor that a kernel made, whose node will be one of the forward."""
        key = id(tensor)
        self._known[key] = weakref.ref(tensor, lambda _: self._known.pop(key, None))

    def end(self) -> None:
        """Called when the forward is over, before its backward is traced."""
        self._end = sequence_number()
        self._known.clear()

    def is_in_front(self, node: Node) -> bool:
        """Returns whether a node was there before the forward, or another thread has made it."""
        if node in self._in_front:
            return True
        number = node._sequence_nr()
        own, *others = self._first.values()
        is_own = own <= number and (self._end is None or number < self._end)
        return not is_own and all(number < first for first in others)

    def is_hooked(self, node: Node) -> bool:
        """Returns whether hooks of the program hold what a node has saved."""
        return node._sequence_nr() in self.hooked


class LeafGradient(NamedTuple):
    """A leaf and its complete gradient."""

    leaf: Tensor
    gradient: Tensor


class _PendingNode:
    """A node that will run: the gradients of its outputs so far, and how many are missing.

    `owners` keep the node alive: Python does not own that of an `autograd.Function`, which would
    be freed before it runs (torch 2.11). One that `is_in_front` of the traced forward never runs.
    """

    def __init__(self, node: Node, *, is_in_front: bool) -> None:
        self.metadata, self.is_in_front = node._input_metadata, is_in_front
        self.is_leaf = _leaf_of(node) is not None
        self.is_own = self.is_shared = False
        self.gradients: list[Tensor | None] = [None] * len(self.metadata)
        self.missing = 0
        self.owners: list[object] = []

    def fitted(self, gradient: Tensor | None, number: int) -> Tensor | None:
        """Returns a gradient of an output in the output's shape and dtype, as the engine does."""
        expected = self.metadata[number]
        if gradient is None or expected.is_nested_tensor:
            return gradient
        if gradient.shape != tuple(expected.shape):
            try:
                gradient = gradient.sum_to_size(tuple(expected.shape))
            except RuntimeError:
                # of a sparse tensor, whose metadata has no size
                gradient = _zeros(expected)
        # on fake tensors `to` is a kernel even if it changes nothing
        return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)

    def add(self, gradient: Tensor | None, number: int, *, is_shared: bool) -> None:
        """Adds a gradient of an output; one that `is_shared` is given to another node as well."""
        self.missing -= 1
        before = self.gradients[number]
        if gradient is None:
            return
        if before is None:
            self.gradients[number], self.is_shared = gradient, is_shared
            self.is_own = not (is_shared or gradient._is_view()) and is_dense(gradient)
        elif self.is_own:
            # as the engine does if nothing else holds the gradient; a view holds its base
            before.add_(gradient)
        else:
            self.gradients[number] = before + gradient
            self.is_own, self.is_shared = True, False

    def gradient_of_leaf(self) -> Any:
        """Returns the gradient that a leaf keeps: a copy of one that another node will read."""
        return self.gradients[0].clone() if self.is_shared else self.gradients[0]  # type: ignore[union-attr]


@torch.no_grad()
def gradients_of(
    roots: list[Tensor],
    on_node: Callable[[Node], bool] = lambda _: False,
    on_end: Callable[[], object] = lambda: None,
    *,
    graph: TracedGraph | None = None,
    keeps_graph: bool = False,
) -> Iterator[LeafGradient]:
    """Yields leaves with the gradients of the sum of `roots`, each when its gradient is complete.

    `roots` is emptied, so that each node is freed after it ran, together with its saved tensors.
    `on_node` is called before each node runs, and returns whether gradients that are views of the
    node's own are copied; `on_end` when it has released its saved tensors, before its gradients are
    added to others. Nodes in front of the `graph` get gradients and are not run. With `keeps_graph`
    the graph stays as it was: backwards and hooks for saved tensors that the program defines are
    not called, and zeros stand for their gradients.
    """
    with interpreted_backward():
        yield from _gradients_of(roots, on_node, on_end, graph, keeps_graph)


def _gradients_of(
    roots: list[Tensor],
    on_node: Callable[[Node], bool],
    on_end: Callable[[], object],
    graph: TracedGraph | None,
    keeps_graph: bool,
) -> Iterator[LeafGradient]:
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    casts = _first_casts(nodes) if graph is not None and graph.shares_casts else {}
    pending = _pending(nodes, graph, casts)
    del nodes
    while roots:
        _start(roots.pop(), pending)
    order = itertools.count()
    ready: list[tuple[int, int, Node]] = [
        (-node._sequence_nr(), next(order), node) for node in pending if not pending[node].missing
    ]
    heapq.heapify(ready)
    behind: Node | None
    while ready:
        node = heapq.heappop(ready)[-1]
        incoming = pending.pop(node)
        if (leaf := _leaf_of(node)) is not None:
            if incoming.gradients[0] is not None:
                yield LeafGradient(leaf, incoming.gradient_of_leaf())
            continue
        if incoming.is_in_front:
            continue
        is_copied = on_node(node)
        is_hooked = graph is not None and graph.is_hooked(node)
        is_skipped = keeps_graph and (is_hooked or _is_users(node))
        gradients = _zeros_instead(node) if is_skipped else _run(node, incoming)
        if is_copied:
            gradients = _copies(gradients, incoming.gradients)
        following = _following(node, casts)
        fitted = [
            None if behind is None else pending[behind].fitted(gradient, number)
            for (behind, number), gradient in zip(following, gradients, strict=True)
        ]
        functions = [
            behind
            for behind, _ in following
            if behind and _is_function(behind) and not pending[behind].is_in_front
        ]
        for behind in functions:
            pending[behind].owners.append((node, incoming.owners))
        if functions and not keeps_graph and _is_function(node):
            # the node stays as an owner, but its attributes need not
            vars(node).clear()
        # a name would keep the node alive; its saved tensors go before gradients are added up
        del incoming, gradients, node, functions
        on_end()
        times = Counter(map(id, fitted))
        for (behind, number), gradient in zip(following, fitted, strict=True):
            if behind is not None:
                pending[behind].add(gradient, number, is_shared=times[id(gradient)] > 1)
                # a leaf runs at once
                times[id(gradient)] -= pending[behind].is_leaf
                if not pending[behind].missing:
                    heapq.heappush(ready, (-behind._sequence_nr(), next(order), behind))
        del fitted, following, gradient, behind


def _start(root: Tensor, pending: dict[Node, _PendingNode]) -> None:
    """Gives the node of a root a gradient of ones."""
    if (node := root.grad_fn) is None:
        return
    shape, dtype, device, number = root.shape, root.dtype, root.device, root.output_nr
    if _is_function(node):
        pending[node].owners.append(root)
    # as the loss that is not known has released it
    del root
    pending[node].gradients[number] = torch.ones(shape, dtype=dtype, device=device)


Edge = tuple[Node | None, int]


def _following(node: Node, casts: Mapping[Node, Node]) -> list[Edge]:
    """Returns the nodes that get a node's gradients, and the numbers of the outputs there."""
    edges = node.next_functions
    return [(behind and casts.get(behind, behind), number) for behind, number in edges]


def _first_casts(roots: Iterable[Node]) -> dict[Node, Node]:
    """Returns for each cast of a leaf the first of those to the same dtype."""
    stack, seen = [*roots], set[Node]()
    casts: defaultdict[tuple[int, torch.dtype], list[Node]] = defaultdict(list)
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        behind = [one for one, _ in node.next_functions if one is not None]
        stack += behind
        if node.name() == CAST and (leaf := _leaf_of(behind[0])) is not None:
            casts[id(leaf), node._input_metadata[0].dtype].append(node)
    same = (sorted(nodes, key=operator.methodcaller("_sequence_nr")) for nodes in casts.values())
    return {node: first for first, *others in same for node in others}


def _pending(
    roots: Iterable[Node], graph: TracedGraph | None, casts: Mapping[Node, Node]
) -> dict[Node, _PendingNode]:
    """Finds all nodes that run, and those in front; counts the edges that lead to each."""
    pending: dict[Node, _PendingNode] = {}
    stack: list[Node] = []

    def find(node: Node) -> _PendingNode:
        if node not in pending:
            is_leaf = _leaf_of(node) is not None
            is_in_front = graph is not None and not is_leaf and graph.is_in_front(node)
            pending[node] = _PendingNode(node, is_in_front=is_in_front)
            if not is_in_front:
                stack.append(node)
        return pending[node]

    for root in roots:
        find(root)
    while stack:
        for node, _ in _following(stack.pop(), casts):
            if node is not None:
                find(node).missing += 1
    return pending


def _leaf_of(node: Node) -> Tensor | None:
    """Returns the leaf whose gradient a node adds up; None for any other node."""
    # an autograd.Function may have an attribute named `variable`
    return None if _is_function(node) else getattr(node, "variable", None)


def _copies(
    gradients: Sequence[Tensor | None], incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns gradients with memory of their own, in place of views of the incoming ones."""
    given = [id(storage_of(part)) for part in incoming if part is not None]
    return [
        part if part is None or id(storage_of(part)) not in given else part.clone()
        for part in gradients
    ]


def _is_function(node: Node) -> bool:
    """Returns whether a node is of an `autograd.Function`."""
    return hasattr(node, "apply")


def _is_users(node: Node) -> bool:
    """Returns whether the backward of a node is a program's own, in Python or in C++."""
    return _is_function(node) or "CppNode" in node.name()


def _zeros_instead(node: Node) -> list[Tensor | None]:
    """Returns zeros in place of the gradients that a node would return."""
    following = node.next_functions
    kinds = [None if behind is None else behind._input_metadata[n] for behind, n in following]
    return [None if kind is None or kind.is_nested_tensor else _zeros(kind) for kind in kinds]


def _zeros(kind: Any) -> Tensor:
    return torch.zeros(tuple(kind.shape), dtype=kind.dtype, device=kind.device)


def _run(node: Node, pending: _PendingNode) -> Sequence[Tensor | None]:
    """Runs a node; returns a gradient or None for each of its next nodes."""
    try:
        return _called(node, pending)
    except (Exception, NumbersNeeded):
        # fails on fake tensors alone, as a mask that selects an unknown number of elements; or in
        # training, too, which raises it
        return _zeros_instead(node)


def _called(node: Any, pending: _PendingNode) -> Sequence[Tensor | None]:
    incoming = pending.gradients
    if not _is_function(node):
        returned = node(*incoming)
        return returned if isinstance(returned, tuple) else (returned,)
    # an autograd.Function gets zeros for a missing gradient
    pairs = zip(incoming, pending.metadata, strict=True)
    gradients = (_zeros(kind) if part is None else part for part, kind in pairs)
    returned = node.apply(*gradients)
    every = returned if isinstance(returned, tuple) else (returned,)
    # only its tensor arguments have next nodes
    wanted = itertools.compress(every, node.needs_input_grad)
    return [None if behind is None else next(wanted) for behind, _ in node.next_functions]
