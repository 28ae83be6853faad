"""Parameters that FSDP2 has sharded, as a step will find them: gathered, of the whole size.

Hooks gather them before a module runs. Where no hooks run, fake tensors of the whole size can take
the place of the shards. Tensor-parallel parameters stay spread while a module computes with them,
so nothing can take their place.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import FakeTensorMode


def is_spread(tensor: Tensor) -> bool:
    """Says whether a tensor is spread over processes (DTensor)."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole_parameters(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Makes a fake tensor of the whole size for each shard of FSDP2's, by the id of the shard."""
    shards = {
        id(value): value
        for module in sharded_parts(model)
        for value in module._parameters.values()
        if value is not None and is_shard(value)
    }
    return {name: _whole(mode, value) for name, value in shards.items()}


def sharded_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose parameters FSDP2 has sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return list(dict.fromkeys(part for module in sharded for part in module.modules()))


def is_shard(value: Any) -> bool:
    """Says whether a tensor is spread along one axis of processes alone, as FSDP2 does."""
    return is_spread(value) and value.device_mesh.ndim == 1


def _whole(mode: FakeTensorMode, value: Tensor) -> nn.Parameter:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return nn.Parameter(fake, value.requires_grad)
