"""Where `nn.Module` keeps the hooks of its calls."""

from torch import nn
from torch.nn.modules import module as registries

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# those of all modules; others of torch's registries only say more about these
GLOBAL_HOOKS = (
    registries._global_forward_pre_hooks,
    registries._global_forward_hooks,
    registries._global_backward_pre_hooks,
    registries._global_backward_hooks,
)


def is_hooked(module: nn.Module) -> bool:
    """Returns whether calling a module does more than its forward."""
    return any(getattr(module, name) for name in HOOKS)
