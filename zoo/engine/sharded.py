"""Parameters that FSDP2 has sharded, gathered again for a replay.

    forward    whole parameters from the shards, kernels, storage freed
    replay     whole parameters from the shards, kernels again, storage freed
    backward   whole parameters from the shards, gradients, storage freed

They use the same storage each time. Usually FSDP2's own hook has gathered them before a backward
opens a segment; not if the segment extends beyond the sharded module and the backward begins behind
that. The older FullyShardedDataParallel makes new tensors each time; theirs are kept.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from zoo.engine.tensor_state import storage_of


def freed_modules(tensors: Iterable[Tensor]) -> list[Any]:
    """Returns the FSDP2 modules that have freed one of these tensors, in order.

    `unshard` of a module gathers its parameters, `reshard` frees them again.
    """
    states: Any = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        return []
    storages = [storage_of(tensor) for tensor in tensors if tensor.numel()]
    freed = {id(storage) for storage in storages if storage is not None and not storage.nbytes()}
    return [
        module
        for module in (states._module_state_mapping if freed else ())
        if any(id(whole.untyped_storage()) in freed for _, whole in _whole_parameters(module))
    ]


def whole_storages() -> dict[int, Any]:
    """Returns the storages into which FSDP2 gathers parameters, by the ids of their shards."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    modules = () if states is None else states._module_state_mapping
    parameters = (pair for module in modules for pair in _whole_parameters(module))
    return {id(shard): whole.untyped_storage() for shard, whole in parameters}


def _whole_parameters(module: Any) -> Iterator[tuple[Tensor, Tensor]]:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    # a module has several groups in torch 2.14, one before
    single = getattr(state, "_fsdp_param_group", None)
    for group in getattr(state, "_fsdp_param_groups", None) or [single]:
        for parameter in getattr(group, "fsdp_params", ()):
            if hasattr(parameter, "_unsharded_param"):
                whole = parameter._unsharded_param
                yield parameter.sharded_param, getattr(whole, "_local_tensor", whole)


def is_spread(tensor: Tensor) -> bool:
    """Returns whether a tensor is distributed over processes (DTensor)."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 manages."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [part for part in model.modules() if fsdp and isinstance(part, fsdp.FSDPModule)]
