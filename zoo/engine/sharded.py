"""Parameters that FSDP2 has gathered for a forward and freed since, gathered again for a replay.

    forward    whole parameters from the shards, kernels, storage freed
    replay     whole parameters from the shards, kernels again, storage freed
    backward   whole parameters from the shards, gradients, storage freed

They lie in the same storage each time. Mostly FSDP2's own hook has gathered them when a backward
opens a segment. It has not where the segment goes beyond the sharded module and the backward begins
behind that. The older FullyShardedDataParallel makes other tensors each time; theirs are kept.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from zoo.engine.recording import storage_of

# a context that does nothing
_PLAIN = contextlib.nullcontext()


def gathered(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Gathers inside of the block those of these tensors whose storage FSDP2 has freed."""
    states = sys.modules.get("torch.distributed._composable_state")
    return _PLAIN if states is None else _gathered(states, tensors)


@contextlib.contextmanager
def _gathered(states: Any, tensors: Iterable[Tensor]) -> Iterator[None]:
    freed = {id(storage_of(tensor)) for tensor in tensors if is_freed(tensor)}
    modules = _owners(states, freed) if freed else []
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def is_freed(tensor: Tensor) -> bool:
    """Says whether a tensor has lost the memory of its numbers."""
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == 0 and tensor.numel() > 0


def _owners(states: Any, freed: set[int]) -> list[Any]:
    """Returns the modules of FSDP2 whose whole parameters lie in freed storages, in their order."""
    return [
        module
        for module in states._module_state_mapping
        if any(id(tensor.untyped_storage()) in freed for tensor in _whole_parameters(module))
    ]


def _whole_parameters(module: Any) -> Iterator[Tensor]:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    # torch 2.14 has several groups a module, before there was one
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    for group in groups:
        for parameter in getattr(group, "fsdp_params", ()):
            if hasattr(parameter, "_unsharded_param"):
                whole = parameter._unsharded_param
                yield getattr(whole, "_local_tensor", whole)
