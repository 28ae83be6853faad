"""What torch gets wrong about memory when tensors are fake, put right.

- The kernels of fused optimizers write in place and allocate nothing. torch does not know what they
  do to fake tensors and runs them, on real tensors of the same sizes.
- The CPU's LSTM kernel hands its backward a workspace that as a fake tensor is empty, and for real
  is most of what an LSTM saves. How large it is only the kernel knows: it runs once, for real, for
  each kind of call.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from zoo._torch import TorchDispatchMode, unset_fake_temporarily

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default


class FakeKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in front of a `FakeTensorMode`; enter it inside of one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on fake tensors."""
        schema = func._schema
        if schema.name.startswith("aten::_fused_") and schema.is_mutable and not schema.returns:
            return None
        result = func(*args, **(kwargs or {}))
        if func is _LSTM:
            *outputs, workspace = result
            size = _workspace(tuple(_kind(value) for value in args))
            return (*outputs, workspace.new_empty(size, dtype=torch.uint8))
        return result


@functools.cache
def _workspace(kinds: tuple[Any, ...]) -> int:
    """Returns the bytes of the workspace of the LSTM kernel for arguments of these kinds."""
    # gradients are on, since else the kernel makes none
    with unset_fake_temporarily(), torch.enable_grad():
        workspace = _LSTM(*(_made(kind) for kind in kinds))[-1]
    return 0 if workspace is None else int(workspace.nbytes)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _made(kind: Any) -> Any:
    if isinstance(kind, tuple) and kind and isinstance(kind[0], tuple):
        shape, stride, dtype = kind
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()
    return list(kind) if isinstance(kind, tuple) else kind
