"""The batch of a captured step: its kind, and the memory that a graph reads it from.

A graph reads its inputs at fixed addresses. So each batch is copied into tensors that are made at
the capture, and two batches can share a graph if they differ in the numbers of tensors alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo._torch import DisableTorchFunction, PyTree, is_traceable_wrapper_subclass
from zoo.cuda_graphs.watched_values import is_plain
from zoo.errors import GraphError, shortened
from zoo.invocation import Invocation
from zoo.profiling.tensor_spec import flattened


class BatchKind(NamedTuple):
    """What the batches of one graph have in common: structure, values, and metadata of tensors."""

    structure: str
    leaves: tuple[object, ...]

    @classmethod
    def of(cls, batch: Invocation) -> "BatchKind":
        """Describes the arguments of a step."""
        leaves, tree = flattened((batch.args, batch.kwargs))
        # a tensor that is passed twice is the same one in the graph, too
        first = {id(leaf): number for number, leaf in reversed([*enumerate(leaves)])}
        with DisableTorchFunction():
            kinds = tuple((first[id(leaf)], *_leaf_kind(leaf)) for leaf in leaves)
        return cls(str(tree), kinds)


def _leaf_kind(leaf: object) -> tuple[object, ...]:
    if not isinstance(leaf, Tensor):
        # -0.0 is not 0.0; an object is another kind than any other
        value = float.hex(leaf) if isinstance(leaf, float) else leaf
        return type(leaf), value if is_plain(leaf) else id(leaf)
    strides = leaf.stride() if leaf.layout is torch.strided else None
    about = leaf.shape, strides, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    # with what the program has put on the tensor
    return type(leaf), *about, *((key, *_leaf_kind(value)) for key, value in vars(leaf).items())


def check_batch(batch: Invocation, device: torch.device) -> None:
    """Raises GraphError for a batch that cannot be copied into the memory of a graph."""
    for leaf in flattened((batch.args, batch.kwargs))[0]:
        if isinstance(leaf, Tensor):
            _check_tensor(leaf, device)
        elif not is_plain(leaf):
            raise GraphError(
                f"a graphed step takes tensors and plain values; got {shortened(leaf)}, whose "
                "changes a replay would not see. Pass its tensors, or let the step find it"
            )


def _check_tensor(tensor: Tensor, device: torch.device) -> None:
    shape = tuple(tensor.shape)
    if tensor.device != device:
        raise GraphError(
            f"a graphed step takes its batch on {device}; got a tensor {shape} on {tensor.device}. "
            f"Move it before the step, with batch.to({str(device)!r}, non_blocking=True)"
        )
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    if tensor.layout is not torch.strided or is_wrapper or tensor.is_conj() or tensor.is_neg():
        kind = type(tensor).__name__ if is_wrapper else str(tensor.layout)
        raise GraphError(
            f"a graphed step takes dense tensors; got one {shape} ({kind}). Pass the tensors that "
            "it is made of, and make it in the step"
        )
    if tensor.requires_grad:
        raise GraphError(
            f"a graphed step hands back no gradients of its batch; got a tensor {shape} that "
            "requires one. Pass it detached, and call requires_grad_() on a clone in the step"
        )


def static_copy(batch: Invocation) -> Invocation:
    """Returns a batch with the same numbers in memory of its own; the values as they are."""
    copies: dict[int, Tensor] = {}
    return batch.map(lambda tensor: copies.setdefault(id(tensor), _static_copy(tensor)))


def copy_numbers(static: Invocation, batch: Invocation) -> None:
    """Copies the numbers of a batch of the kind."""
    for one, tensor in zip(static.tensors, batch.tensors, strict=True):
        _copy_numbers(one, tensor)


def in_own_memory(batch: Invocation) -> Invocation:
    """Returns a batch whose tensors share no memory with one another, as those of a graph."""
    tensors = {id(tensor): tensor for tensor in batch.tensors}.values()
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return batch if len(storages) == len(tensors) else static_copy(batch)


def _static_copy(tensor: Tensor) -> Tensor:
    """Returns a tensor like another in memory of its own, with what the program has put on it."""
    with DisableTorchFunction():
        like: Any = {"dtype": tensor.dtype, "device": tensor.device}
        static = torch.empty_strided(tensor.shape, tensor.stride(), **like)
        _copy_numbers(static, tensor)
        if type(tensor) is not Tensor:
            static = static.as_subclass(type(tensor))  # type: ignore[arg-type]
    vars(static).update(vars(tensor))
    return static


@torch.no_grad()
def _copy_numbers(static: Tensor, tensor: Tensor) -> None:
    # of an expanded dimension once
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    with DisableTorchFunction():
        static[once].copy_(tensor[once], non_blocking=True)


def own_outputs(outputs: PyTree) -> PyTree:
    """Returns what a step returned in tensors of its own, without a graph of autograd."""
    return Invocation((outputs,)).map(lambda tensor: tensor.detach().clone()).args[0]


def detached(outputs: PyTree) -> PyTree:
    """Returns what a step returned, without a graph of autograd, in the same memory."""
    return Invocation((outputs,)).map(lambda tensor: tensor.detach()).args[0]
