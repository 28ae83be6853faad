"""Parameters that FSDP2 has sharded, as a step will find them: gathered, of the whole size.

FSDP2's hooks gather them before a module runs. Where no hooks run, fake tensors of the whole size
can take the place of the shards. Tensor-parallel parameters stay spread while a module computes
with them, so nothing can take their place.
"""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import STATE_OF_FSDP, FakeTensorMode


def is_spread(tensor: Tensor) -> bool:
    """Says whether a tensor is spread over processes (DTensor)."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 manages."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [part for part in model.modules() if fsdp and isinstance(part, fsdp.FSDPModule)]


def copy_sharded(model: nn.Module, known: dict[int, Any]) -> None:
    """Copies the modules that FSDP2 manages into the memo of a deep copy, which they refuse.

    The copies are of the classes that the modules had before, and without what FSDP2 knows of them.
    """
    modules = sharded_modules(model)
    for module in modules:
        known[id(module)] = object.__new__(type(module).__bases__[-1])
    for module in modules:
        own = {k: value for k, value in vars(module).items() if not k.startswith(STATE_OF_FSDP)}
        vars(known[id(module)]).update(copy.deepcopy(own, known))


def whole_parameters(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Makes a fake tensor of the whole size for each shard of FSDP2's, by the id of the shard."""
    found: dict[int, Tensor] = {}
    for module in sharded_modules(model):
        for shard in module.parameters():
            # FSDP2 spreads along one axis of processes alone
            if id(shard) not in found and is_spread(shard) and shard.device_mesh.ndim == 1:  # type: ignore[attr-defined]
                with mode:
                    whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
                found[id(shard)] = nn.Parameter(whole, shard.requires_grad)
    return found
