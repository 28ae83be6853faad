"""Weight sharing: the gradient of a weight that many steps of a forward use, summed in place.

Every chunk of tokens uses a language model's decoder, and so does a tied embedding. Autograd
computes a gradient of the whole weight for each use (GPT-2 small: 147 MiB) and adds them pairwise,
so two or three exist at once. Here the uses share one buffer, which becomes the parameter's
gradient, equal up to the order of additions:

    forward    weight -> token          an empty tensor, which every use takes as an input
    backward   last use                 total  = logits' @ hidden
               ...                      total += logits' @ hidden
               embedding                total[tokens] += gradient
               token, after all uses    gives total to the weight

Plain operations are used under autocast, `torch.compile` and `torch.func`, without gradients, for
frozen weights and tensor subclasses, and in a backward that is itself differentiated or batched.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from zoo._torch import (
    FakeTensor,
    are_functorch_transforms_active,
    current_backward,
    is_any_autocast_enabled,
    is_graph_kept,
    is_legacy_batched,
    is_tracing,
    will_run,
)
from zoo.layers.module_hooks import GLOBAL_HOOKS, is_hooked


def is_eager() -> bool:
    """Returns whether no compiler, tracer, `torch.func` or forward-mode derivative is at work."""
    is_transformed = are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (torch.compiler.is_compiling() or is_tracing() or is_transformed)


def is_first_order(gradient: Tensor) -> bool:
    """Returns whether the backward of this gradient is neither differentiated nor batched."""
    is_batched = is_legacy_batched(gradient) or are_functorch_transforms_active()
    return not torch.is_grad_enabled() and not is_batched


def is_last_backward() -> bool:
    """Returns whether the current backward frees its graph, so that no other can follow."""
    return not is_graph_kept()


class SharedWeight:
    """A weight (V, C) for the steps of one forward; make a new one in each."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.total = Total()
        self.shared = (
            type(weight) in (Tensor, nn.Parameter, FakeTensor)
            and weight.requires_grad
            and torch.is_grad_enabled()
            and not is_any_autocast_enabled()
            and is_eager()
        )
        self.token: Tensor | None = _Token.apply(weight, self.total) if self.shared else None

    def __deepcopy__(self, memo: Any) -> "SharedWeight":
        """Returns itself: its token belongs to the graph of one forward."""
        return self

    def decoder(self, module: nn.Module | None = None) -> Callable[[Tensor], Tensor]:
        """Returns x (tokens, C) -> logits (tokens, V) by this weight.

        That is the module where it does more than `nn.Linear`: its hooks, parametrizations or own
        forward see the logits.
        """
        if module is None or (type(module) is nn.Linear and _is_unmodified(module)):
            return functools.partial(self._linear, getattr(module, "bias", None))
        return module

    def embedding(self, module: nn.Embedding) -> Callable[[Tensor], Tensor]:
        """Returns tokens (...) -> x (..., C): the module, if it does more than look up."""
        is_plain = type(module) is nn.Embedding and _is_unmodified(module)
        if not self.shared or not is_plain or module.scale_grad_by_freq or module.sparse:
            return module
        has_options = module.padding_idx is not None or module.max_norm is not None
        return module if has_options else self._look_up

    def _linear(self, bias: Tensor | None, x: Tensor) -> Tensor:
        if self.shared:
            return cast(Tensor, _Linear.apply(self.token, self.weight, x, bias, self.total))
        return F.linear(x, self.weight, bias)

    def _look_up(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, _Lookup.apply(self.token, self.weight, tokens, self.total))


class Total:
    """The gradient of one weight so far, by the id of the backward that sums it.

    The sum of a backward that failed stays, under an id that no other backward has.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def add(
        self, ctx: Any, gradient: Tensor, make: Callable[[], Tensor], add: Callable[[Tensor], Any]
    ) -> Tensor | None:
        """Adds a use's gradient of the weight in place; returns it where autograd must add it.

        `make` computes it, `add` adds it to a sum; `gradient` is that of the use's output.
        """
        if not is_first_order(gradient):
            return make()
        backward, (token, _) = current_backward(), ctx.next_functions[0]
        if not will_run(token):
            return None  # `autograd.grad` for other inputs
        if backward in self.sums:
            add(self.sums[backward])
        else:
            self.sums[backward] = make()
        return None


class _Token(torch.autograd.Function):
    """Weight -> an empty tensor; its backward runs after those of all that took it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: Total) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.total.sums.pop(current_backward(), None), None


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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (weight, x) = gradients, ctx.saved_tensors
        for_weight = ctx.total.add(
            ctx, gradient, lambda: gradient.t() @ x, lambda total: total.addmm_(gradient.t(), x)
        )
        for_x = gradient @ weight if ctx.needs_input_grad[2] else None
        for_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        return None, for_weight, for_x, for_bias, None


class _Lookup(torch.autograd.Function):
    """`F.embedding`, the weight's gradient added to the total."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, tokens: Tensor, total: Total) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.total = len(weight), total
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (tokens,) = gradients, ctx.saved_tensors
        make = functools.partial(_row_sums, gradient, tokens, ctx.rows)
        add = functools.partial(_add_rows, gradient, tokens.flatten())
        return None, ctx.total.add(ctx, gradient, make, add), None, None


def _add_rows(gradient: Tensor, tokens: Tensor, total: Tensor) -> None:
    """Adds each token's gradient to its row, deterministically: one sum per row.

    The sum of equal tokens is in the slot of the first of them in order; the slots of the others
    are zero, so that the order of their additions changes no bit.

        tokens 7 3 7    ordered 3 7 7    slots 1 0 1    sums (second) (first + third) 0
    """
    ordered = tokens.sort().values
    slots = torch.searchsorted(ordered, tokens)
    total.index_add_(0, ordered, _row_sums(gradient.flatten(0, -2), slots, len(tokens)))


def _row_sums(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    sums: Tensor = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, -1, False)
    return sums


def _is_unmodified(module: nn.Module) -> bool:
    """Returns whether calling a module does only its class's forward."""
    # a plan in force marks where blocks begin and end
    forward = vars(module).get("forward")
    has_forward = forward is not None and not getattr(forward, "only_marks", False)
    return not (is_hooked(module) or has_forward or any(GLOBAL_HOOKS))
