"""What surrounds a forward or a backward, for functions that do what plain operations cannot.

A function that sums into a buffer or writes over one is right where autograd runs it once and looks
at no more than its result. `torch.autograd.Function` cannot tell; torch's internals can.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_eager() -> bool:
    """Says whether no compiler, tracer, `torch.func` or forward-mode derivative is at work."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and forward_ad._current_level < 0
    )


def is_once_differentiated(gradient: Tensor) -> bool:
    """Says whether the backward given this gradient is neither differentiated nor batched."""
    batched = torch._C._functorch.is_legacy_batchedtensor(gradient)  # by is_grads_batched=True
    transformed = batched or torch._C._are_functorch_transforms_active()
    return not torch.is_grad_enabled() and not transformed


def is_last_backward() -> bool:
    """Says whether the backward under way frees its graph, so that no other will follow."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()
