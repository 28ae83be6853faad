"""Makes a kernel call operators with the dispatch keys that they have outside of dispatch modes.

While a mode handles an operator, torch excludes all keys above it from what the kernel calls:
autocast, and those that resolve tensors which are conjugate, negative or zero without memory that
says so. So they are given back where they matter: under autocast, for complex numbers, and to
custom operators, which may do anything.
"""

import functools
from operator import call

import torch
from torch import Tensor

from zoo._torch import (
    Args,
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    Kwargs,
    Operator,
    PyTree,
    RestoreKeys,
    excluded_keys,
    has_kernel,
    included_keys,
    pytree,
)
from zoo.engine.operator_effects import CALLERS, Effects, Kernel
from zoo.errors import RecomputeError

_KEYS = DispatchKey.__members__
_NONE = DispatchKeySet(_KEYS["Undefined"])
_LAZY = (
    DispatchKeySet(_KEYS["Conjugate"])
    | DispatchKeySet(_KEYS["Negative"])
    | DispatchKeySet(_KEYS["ZeroTensor"])
)
# the second returns how many autocast regions are around; called by one call in C, since an
# interruption between them would leave the number wrong
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


class KernelWithKeys:
    """A kernel with what was in force where it was called, to be called there and in a replay.

    Attributes:
        keys: those that are not to be excluded.
        dtypes: for each kind of device whose autocast they have, the type that it casts to.
    """

    def __init__(
        self,
        kernel: Kernel,
        keys: DispatchKeySet,
        dtypes: dict[str, torch.dtype],
    ) -> None:
        self.kernel, self.keys, self.dtypes = kernel, keys, dtypes

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the kernel."""
        earlier = [(kind, torch.get_autocast_dtype(kind)) for kind in self.dtypes]
        caches = torch.is_autocast_cache_enabled()
        try:
            # in a replay a cast would stay in the cache for the next forward
            torch.set_autocast_cache_enabled(False)
            for kind, dtype in self.dtypes.items():
                torch.set_autocast_dtype(kind, dtype)
            with ForceDispatchKeyGuard(included_keys(), excluded_keys() - self.keys):
                return self.kernel(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)
            for kind, dtype in earlier:
                torch.set_autocast_dtype(kind, dtype)


def kernel_of(operator: Operator, effects: Effects, args: Args, kwargs: Kwargs) -> Kernel:
    """Returns what a dispatch mode calls for the operator that it handles now.

    Raises:
        RecomputeError: autocast casts for one of the functions that call it and not for another,
            and torch does not tell which one it was.
    """
    _, is_cast = (0, 0) if effects.leaf else map(call, _NESTING)
    first = args[0] if args else None
    is_lazy = effects.opaque or (isinstance(first, Tensor) and first.is_complex())
    if is_lazy or is_cast:
        return with_present_keys(operator, args, kwargs, is_lazy=is_lazy)
    kernel: Kernel = operator._op
    return kernel


def with_present_keys(
    operator: Operator, args: Args, kwargs: Kwargs, *, is_lazy: bool = True
) -> Kernel:
    """Returns the kernel with the keys that are in force where the operator is called.

    One that `is_lazy` may meet conjugate and negative tensors.

    Raises:
        RecomputeError: as `kernel_of`.
    """
    if not hasattr(operator, "_schema") or operator.namespace == "prim":
        # torch dispatches higher-order operators in Python, and questions that it asks itself
        return operator  # type: ignore[no-any-return]
    if args and isinstance(args[0], Tensor):
        # a kernel is one of the device of its first argument
        kinds = {args[0].device.type}
    else:
        leaves = pytree.tree_leaves((args, kwargs))
        kinds = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))}
    with RestoreKeys():
        found = [
            kind
            for kind in kinds
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
    keys, dtypes = _LAZY if is_lazy else _NONE, {}
    for kind in found:
        name = f"Autocast{kind.upper()}"
        key = name if name in _KEYS else "AutocastPrivateUse1"
        if not _casts(operator.name(), operator._schema.name, key):
            keys = keys | DispatchKeySet(_KEYS[key])
            dtypes[kind] = torch.get_autocast_dtype(kind)
    return KernelWithKeys(operator._op, keys, dtypes) if is_lazy or dtypes else operator._op


@functools.cache
def _casts(overload: str, name: str, key: str) -> bool:
    """Returns whether autocast casts for an operator, whose kernel then runs without autocast.

    Raises:
        RecomputeError: it does by one name and does not by another.
    """
    callers = CALLERS.get(name, (overload,))
    found = {has_kernel(caller, key) for caller in callers}
    if len(found) > 1:
        names = " and ".join(f"torch.ops.{caller.replace('::', '.')}" for caller in callers)
        raise RecomputeError(
            f"{names} differ under autocast, and a recording cannot tell one from the other. "
            "Call it in `torch.autocast(device_type, enabled=False)`, or outside of the segment."
        )
    return found == {True}
