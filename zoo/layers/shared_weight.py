"""One weight used by many steps of a forward, whose gradient is summed in place.

A language model's decoder is used by every chunk of tokens, and where it is tied also by the
embedding. Autograd gives each use a gradient of the whole weight (GPT-2 small: 147 MiB) and adds
them pairwise, so two or three exist at once. Here the uses share one buffer, which in the end *is*
the parameter's gradient:

    forward    weight -> token          an empty tensor, which every use takes as an input
    backward   last use                 total  = scores' @ hidden
               ...                      total += scores' @ hidden
               embedding                total[tokens] += gradient
               token, after all uses    gives total to the weight

Sums are kept apart by the number of the backward that they belong to, so what a failed one left
behind goes into no other. Gradients equal autograd's up to the order of additions.

Plain operations take over where a sum in place cannot be: under autocast, `torch.compile` and
`torch.func`, without gradients, for frozen weights and other kinds of tensors; and in a backward
that is itself differentiated or batched.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zoo.chain import hooks_for_all, is_hooked
from zoo.layers.modes import is_eager, is_once_differentiated


class SharedWeight:
    """A weight (V, C) for the steps of one forward; make a new one in each."""

    def __init__(self, weight: Tensor) -> None:
        self.total = Total()
        self.shared = _can_share(weight)
        self.weight = weight
        self.token: Tensor | None = _Token.apply(weight, self.total) if self.shared else None

    def decoder(self, module: nn.Module | None = None) -> Callable[[Tensor], Tensor]:
        """Returns x (tokens, C) -> scores (tokens, V), what a decoder of this weight computes.

        With a module it is the module's call, except for a `nn.Linear` that is nothing more: one
        without hooks, parametrizations or a forward of its own. What it is not the module's call
        for, nobody else sees.
        """
        if module is None:
            return functools.partial(self._linear, None)
        if type(module) is nn.Linear and _is_plain(module):
            return functools.partial(self._linear, module.bias)
        return module

    def embedding(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Returns tokens (...) -> x (..., C), what an embedding of this weight computes.

        It is the module's call, except for a `nn.Embedding` that is nothing more.
        """
        plain = type(module) is nn.Embedding and _is_plain(module) and _looks_up(module)
        return self._lookup if self.shared and plain else module

    def _linear(self, bias: Tensor | None, x: Tensor) -> Tensor:
        if self.shared:
            return cast(Tensor, _Linear.apply(self.token, self.weight, x, bias, self.total))
        return F.linear(x, self.weight, bias)

    def _lookup(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, _Lookup.apply(self.token, self.weight, tokens, self.total))


class Total:
    """The gradient of one weight so far, for each backward that is under way.

    The token takes it away. A backward that fails before leaves it, under a number that no other
    backward has, until the graph goes.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def get(self) -> Tensor | None:
        """Returns the sum of the backward under way."""
        return self.sums.get(torch._C._current_graph_task_id())

    def begin(self, gradient: Tensor) -> None:
        """Makes a gradient that nobody else holds the sum so far."""
        self.sums[torch._C._current_graph_task_id()] = gradient

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient that nobody else holds."""
        total = self.get()
        if total is None:
            self.begin(gradient)
        else:
            total.add_(gradient)

    def take(self) -> Tensor | None:
        """Returns the sum and forgets it."""
        return self.sums.pop(torch._C._current_graph_task_id(), None)


class _Token(torch.autograd.Function):
    """Weight -> an empty tensor; its backward runs when those of all that took it are done."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: Total) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        return ctx.total.take(), None


class _Linear(torch.autograd.Function):
    """`F.linear` of x (tokens, C), the weight's gradient added to the total."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd hands arguments on by position)
        ctx: Any, token: Tensor, weight: Tensor, x: Tensor, bias: Tensor | None, total: Total
    ) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.total = total
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (weight, x) = gradients, ctx.saved_tensors
        for_weight = None
        if not is_once_differentiated(gradient):
            for_weight = gradient.t() @ x
        elif is_wanted(ctx):
            total = ctx.total.get()
            if total is None:
                ctx.total.begin(gradient.t() @ x)
            else:
                total.addmm_(gradient.t(), x)
        for_x = gradient @ weight if ctx.needs_input_grad[2] else None
        for_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        return None, for_weight, for_x, for_bias, None


class _Lookup(torch.autograd.Function):
    """`F.embedding`, the weight's gradient added to the total."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, tokens: Tensor, total: Total) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        ctx.total = total
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (tokens,) = gradients, ctx.saved_tensors
        for_weight = None
        if not is_once_differentiated(gradient):
            for_weight = _row_sums(gradient, tokens, ctx.rows)
        elif is_wanted(ctx):
            total = ctx.total.get()
            if total is None:
                ctx.total.begin(_row_sums(gradient, tokens, ctx.rows))
            else:
                _add_rows(total, gradient, tokens.flatten())
        return None, for_weight, None, None


def _add_rows(total: Tensor, gradient: Tensor, tokens: Tensor) -> None:
    """Adds each token's gradient to its row: one sum per row, the same bits on every run.

    A token that comes again has its sum in the slot of its first place in order; the slots of the
    others are zero, and added in whatever sequence these change no bit.

        tokens 7 3 7    ordered 3 7 7    slots 1 0 1    sums (second) (first + third) 0
    """
    ordered = tokens.sort().values
    slots = torch.searchsorted(ordered, tokens)
    sums = _row_sums(gradient.flatten(0, -2), slots, len(tokens))
    total.index_add_(0, ordered, sums)


def _row_sums(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    sums: Tensor = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, -1, False)
    return sums


def is_wanted(ctx: Any) -> bool:
    """Says whether this backward leads to the weight (`autograd.grad` may ask for others)."""
    token, _ = ctx.next_functions[0]
    return bool(torch._C._will_engine_execute_node(token))  # type: ignore[attr-defined]


def _can_share(weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter, FakeTensor)
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
        and is_eager()
    )


def _is_plain(module: nn.Module) -> bool:
    """Says whether calling a module does no more than its class's forward."""
    hooked = is_hooked(module)
    return not (hooked or "forward" in vars(module) or _is_watched())


def _is_watched() -> bool:
    """Says whether someone watches all modules, other than the engine in a second run."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("zoo.") for hook in hooks_for_all()
    )


def _looks_up(embedding: nn.Embedding) -> bool:
    unusual = embedding.scale_grad_by_freq or embedding.sparse
    return embedding.padding_idx is None and embedding.max_norm is None and not unusual
