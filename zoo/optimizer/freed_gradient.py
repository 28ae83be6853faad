"""What stands in `.grad` of a parameter whose gradient was used by the optimizer and freed.

It has the gradient's shape and no memory. Whatever reads or writes it (clipping by a norm, a
GradScaler, a second backward that would add to it) is refused, as the numbers are gone.
"""

from typing import Any

import torch
from torch import Tensor

from zoo.errors import OptimizerError


class FreedGradient(Tensor):
    """A gradient without numbers: any use of them raises OptimizerError."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "FreedGradient":
        """Makes that of a parameter of any shape and type."""
        like = {"strides": parameter.stride(), "dtype": parameter.dtype, "device": parameter.device}
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, parameter.size(), **like)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Says what it is, without numbers."""
        return f"FreedGradient({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses every kernel but `detach`, which returns the same object: it has no history."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise OptimizerError(
            f"{func} uses a gradient that the optimizer has used in the backward and freed "
            "(zoo.optimizer_in_backward). Call optimizer.step() and optimizer.zero_grad() after "
            "each backward; what needs all gradients at once (clipping by a global norm, a "
            "GradScaler, accumulation over several backwards) needs the optimizer's own step: "
            "remove() the handle"
        )
