"""Parameters that FSDP2 has sharded, as a step will find them: gathered, of the whole size.

Hooks gather them before a module runs. Here no hooks run, and fake tensors of the whole size take
the place of the shards. Tensor-parallel parameters stay spread while a module computes with them,
so nothing can take their place.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def is_spread(tensor: Tensor) -> bool:
    """Says whether a tensor is spread over processes (DTensor)."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@contextlib.contextmanager
def gathered(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Puts fake tensors in the place of the shards of FSDP2's modules, and the shards back."""
    made: dict[int, nn.Parameter] = {}
    shards = {module: dict(module._parameters) for module in sharded_parts(model)}
    try:
        for module, parameters in shards.items():
            for name, value in parameters.items():
                if value is not None and is_shard(value):
                    if id(value) not in made:
                        made[id(value)] = _whole(mode, value)
                    # in the same dictionary, which others may know by now
                    module._parameters[name] = made[id(value)]
        yield
    finally:
        for module, parameters in shards.items():
            module._parameters.update(parameters)


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
