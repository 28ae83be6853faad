"""Restores dispatch keys for the operators that a kernel calls from inside of a dispatch mode.

While a mode handles an operator, torch excludes all keys above it from the calls that the kernel
makes: autocast, and those that resolve lazily conjugate, negative or zero tensors. They are
restored where they matter: under autocast, for complex numbers, and for custom operators, which
may do anything.
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
# the second returns the autocast nesting; both run in one call in C, since an interrupt between
# them would leave the nesting wrong
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


class KernelWithKeys:
    """A kernel with the dispatch keys of its call, for the forward and for replays.

    Attributes:
        keys: dispatch keys that are not to be excluded.
        dtypes: autocast's type for each kind of device whose autocast key is among them.
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
    """Returns the function by which a dispatch mode runs the operator that it handles.

    Raises:
        RecomputeError: autocast casts for one of its possible callers and not for another, and
            torch does not tell which one it was.
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
    """Returns the kernel with the dispatch keys that are active where the operator is called.

    `is_lazy`: it may get lazily conjugate and negative tensors.

    Raises:
        RecomputeError: as `kernel_of`.
    """
    if not hasattr(operator, "_schema") or operator.namespace == "prim":
        # torch dispatches higher-order operators and its own metadata queries in Python
        return operator  # type: ignore[no-any-return]
    if args and isinstance(args[0], Tensor):
        # the first argument's device decides the kernel
        kinds = {args[0].device.type}
    else:
        leaves = pytree.tree_leaves((args, kwargs))
        kinds = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))}
    with RestoreKeys():
        autocast_kinds = [
            kind
            for kind in kinds
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
    keys, dtypes = _LAZY if is_lazy else _NONE, {}
    for kind in autocast_kinds:
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
        RecomputeError: it does for one of the operator's callers and not for another.
    """
    callers = CALLERS.get(name, (overload,))
    casts = {has_kernel(caller, key) for caller in callers}
    if len(casts) > 1:
        names = " and ".join(f"torch.ops.{caller.replace('::', '.')}" for caller in callers)
        raise RecomputeError(
            f"{names} differ under autocast, and a recording cannot tell one from the other. "
            "Call it in `torch.autocast(device_type, enabled=False)`, or outside of the segment."
        )
    return casts == {True}
