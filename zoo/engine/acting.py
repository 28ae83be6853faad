"""Whether a hook looks or acts.

One that looks returns None and leaves its module and what it gets as they are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.engine.notes import version_of

Hook = Callable[..., Any]


def acts(hook: Hook, args: Any) -> tuple[Any, bool]:
    """Calls a hook with a module and more; returns its result and whether it acted."""
    module, *rest = args
    before = _face(module, rest)
    result = hook(*args)
    return result, result is not None or _face(module, rest) != before


def _face(module: nn.Module, args: Any) -> Any:
    """Returns what a hook could change of a module and what it gets, by identity and version."""
    registries = (module._parameters, module._buffers)
    tensors = [value for registry in registries for value in registry.values()]
    tensors += [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return (
        [(name, id(value)) for name, value in vars(module).items()],
        [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None],
    )


def is_ours(hook: Hook) -> bool:
    """Says whether a hook is of torch or of this engine: it keeps books of every run."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.partition(".")[0] == "torch" or origin.startswith("zoo.engine.")
