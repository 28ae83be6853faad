"""Running statistics that a second run must not move again.

In training every BatchNorm folds its batch into `running_mean` and `running_var` and counts the
batch. A second run of the same forward would do it twice (pytorch#96136). Here the second run
works on scratch buffers, put in the place of the real ones when a module is about to run and taken
out at the end. Alternatives that fail: `track_running_stats=False` changes how many tensors the
layer saves; writing the old values back bumps the version of tensors that a graph may have saved.

Which modules run is not known beforehand (a step may reach them through a closure), so a forward
pre-hook for all modules watches while a second run lasts. Training-mode normalization of torch
does not read its running statistics, so zeros will do.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextlib.contextmanager
def scratch_statistics() -> Iterator[None]:
    """Gives every normalization that runs in the block, on this thread, scratch statistics."""
    replaced: dict[nn.Module, dict[str, Tensor]] = {}
    thread = threading.get_ident()

    def replace(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() == thread and module not in replaced and _moves(module):
            replaced[module] = _swap(
                module, {name: torch.zeros_like(value) for name, value in _statistics(module)}
            )

    handle = register_module_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
        for module, originals in replaced.items():
            _swap(module, originals)


def _moves(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


def _statistics(module: nn.Module) -> list[tuple[str, Tensor]]:
    buffers = module._buffers
    return [(name, value) for name in STATISTICS if (value := buffers.get(name)) is not None]


def _swap(module: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    earlier = dict(_statistics(module))
    module._buffers.update(buffers)
    return earlier
