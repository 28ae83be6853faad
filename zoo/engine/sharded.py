"""Parameters that FSDP2 gathers before a module runs and takes apart after it.

    forward    hook: shards -> whole    forward of the module    hook: whole -> shards
    backward   hook: shards -> whole    second run, gradients    hook: whole -> shards

Which of the two a module has is up to torch's hooks, which run in a second run, too. So these are
never given back: the shards of the first run would be in place when the hooks take the whole
parameters to be there. The whole one lies in the same storage each time.

The older FullyShardedDataParallel makes new tensors each time and is refused.
"""

import sys
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import nn

from zoo.errors import RecomputeError


class Sharded:
    """The modules among some that FSDP2 has sharded.

    `parts` has with them all below them: the modules whose parameters are exchanged.

    Raises:
        RecomputeError: one is of FSDP1.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        self.modules: list[Any] = _sharded(modules, fsdp) if fsdp is not None else []
        self.parts = {part for module in self.modules for part in module.modules()}
        self.found: list[list[nn.Parameter]] | None = None

    def is_between_hooks(self) -> bool:
        """Says whether a module runs between two hooks that have to come in pairs.

        In the backward of a module they do nothing. Elsewhere, as when only what follows it has
        begun its backward, the first marks the module as running and the second ends that.
        """
        states = [module._get_fsdp_state() for module in self.modules]
        return any(state._training_state.name == "FORWARD" for state in states)

    def watch(self) -> None:
        """Notes before a second run who is gathered."""
        if self.found is None:
            self.found = [list(module.parameters()) for module in self.modules]

    def settle(self) -> None:
        """Takes apart what a second run gathered and no backward did, as half of one would leave.

        The next forward would take it for gathered, and use weights of before the optimizer's step.
        """
        for module, found in zip(self.modules, self.found or (), strict=False):
            if not all(map(is_, found, module.parameters())):
                module.reshard()
        self.found = None


def _sharded(modules: Iterable[nn.Module], fsdp: Any) -> list[Any]:
    found = [m for m in modules if isinstance(m, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)]
    for module in found:
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise RecomputeError(
                "a segment holds a FullyShardedDataParallel, whose parameters are other tensors "
                "each time it runs. Shard with torch.distributed.fsdp.fully_shard, or put the "
                "segments inside of what is sharded."
            )
    return found
