"""Values of attributes and variables as they were, to be compared and to be given again.

number, string, None ...    itself
list, set, dict             its parts, so that an append or a new key is seen and undone
tuple of numbers            itself
tensor                      its storage and version, and a copy where it is small, no parameter
iterator                    where it stands
any other object            itself: what happens inside is not seen
"""

import copy
import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zoo.engine.iterators import Position, position_of
from zoo.errors import RecomputeError

SMALL = 1 << 16
LONG = 64
MANY = 4096
PLAIN = int | float | str | bytes | bool | None | torch.dtype | torch.device
ATOMS = frozenset({int, float, str, bytes, bool, type(None), torch.dtype, torch.device})
LISTS = (list, tuple, set, deque)
FLAT = (list, set, deque)
NOTABLE = (list, set, deque, dict, tuple, Tensor)


class Noted(NamedTuple):
    """A value as it was: for a container its parts, for a tensor its version."""

    value: Any
    parts: Any = None


def note(value: Any, above: frozenset[int] = frozenset()) -> Noted:
    """Notes a value; `above` are the containers that it is in."""
    if is_fixed(value) or id(value) in above or (isinstance(value, Tensor) and _is_opaque(value)):
        return Noted(value)
    if isinstance(value, Tensor):
        kept = value.detach()
        # an LSTM lists its parameters in an attribute, too: those are not written by a forward
        copied = is_small(value) and not isinstance(value, Parameter) and _is_there(value)
        small = kept.clone() if copied else None
        return Noted(kept, (value.requires_grad, version_of(value), small))
    if _is_array(value):
        return Noted(value, value.copy() if value.nbytes <= SMALL else None)
    return Noted(value, position_of(value) or _parts_of(value, above | {id(value)}))


def _parts_of(value: Any, above: frozenset[int]) -> Any:
    if type(value) in FLAT and len(value) <= MANY and _are_atoms(value):
        return tuple(value)
    if isinstance(value, dict) and LONG < len(value) <= MANY and _are_atoms(value.values()):
        return _Items(value)
    if isinstance(value, NOTABLE) and len(value) > LONG:
        # a log that grows all through training is not gone through at each step
        return len(value)
    if type(value) in LISTS or _is_named_tuple(value):
        return [note(part, above) for part in value]
    if isinstance(value, dict):
        return {key: note(part, above) for key, part in value.items()}
    return None


class _Items(dict[Any, Any]):
    """Of a long dictionary of numbers its items, as they are."""


def _are_atoms(values: Iterable[Any]) -> bool:
    return all(type(part) in ATOMS for part in values)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")


def is_fixed(value: Any) -> bool:
    """Says whether a value can neither change nor lead to another: a number, a tuple of some."""
    kind = type(value)
    return (
        kind in ATOMS
        or (kind in (tuple, torch.Size) and all(type(part) in ATOMS for part in value))
        or isinstance(value, PLAIN)
    )


def is_flat(noted: Noted) -> bool:
    """Says whether what was noted is a list of numbers."""
    return isinstance(noted.parts, tuple) and isinstance(noted.value, list)


def _is_opaque(tensor: Tensor) -> bool:
    """Says whether a tensor is sparse or nested: it has no storage and strides of its own."""
    return tensor.layout is not torch.strided or tensor.is_nested


def is_small(tensor: Tensor) -> bool:
    """Says whether a tensor takes at most 64 KiB; of a sparse one it is not known."""
    return not _is_opaque(tensor) and tensor.nbytes <= SMALL


def _is_there(tensor: Tensor) -> bool:
    """Says whether a tensor has its memory; FSDP takes it away between two uses."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def unchanged(noted: Noted, now: Any) -> bool:
    """Says whether a value is still what was noted."""
    value, parts = noted
    if isinstance(value, Tensor) and parts is not None:
        same_kind = isinstance(now, Tensor) and not _is_opaque(now)
        return same_kind and _same_tensor(value, parts, now)
    if parts is None:
        return value is now or (isinstance(value, PLAIN) and is_same_value(value, now))
    return value is now and _same_parts(value, parts)


def _same_tensor(value: Tensor, parts: Any, now: Tensor) -> bool:
    flag, version, small = parts
    return (
        now.untyped_storage()._cdata == value.untyped_storage()._cdata
        and _look(now) == _look(value)
        and (now.requires_grad, version_of(now)) == (flag, version)
        # writes through .data bump no version
        and (small is None or not is_comparable(now) or torch.equal(small, now))
    )


def _look(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def is_comparable(tensor: Tensor) -> bool:
    """Says whether looking at a tensor's numbers costs no waiting."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not _is_opaque(tensor)


def _same_parts(value: Any, parts: Any) -> bool:
    if isinstance(parts, Position):
        return parts.holds(value)
    if _is_array(value):
        return bool((parts == value).all())
    if isinstance(parts, int):
        return len(value) == parts
    if isinstance(parts, dict):
        same = is_same_value if isinstance(parts, _Items) else unchanged
        return list(parts) == list(value) and all(map(same, parts.values(), value.values()))
    if isinstance(parts, tuple):
        return len(parts) == len(value) and all(map(is_same_value, parts, value))
    return len(parts) == len(value) and all(map(unchanged, parts, value))


def is_same_value(one: Any, other: Any) -> bool:
    """Says whether two plain values are the same, type and sign of zero included."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    return not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)


def thaw(noted: Noted, fresh: dict[int, Any]) -> Any:
    """Returns a value as it was; containers are copies, the same for all who share one."""
    value, parts = noted
    if parts is None:
        # a container that is somewhere in itself
        return fresh.get(id(value), value)
    if id(value) not in fresh:
        fresh[id(value)] = _rebuilt(value, parts, fresh)
    return fresh[id(value)]


def _rebuilt(value: Any, parts: Any, fresh: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return _rebuilt_tensor(value, *parts)
    if isinstance(parts, Position):
        return parts.again()
    if _is_array(value):
        return parts.copy()
    if isinstance(value, dict):
        # a copy has the default factory, or whatever else a kind of dictionary has
        rebuilt = fresh[id(value)] = copy.copy(value)
        rebuilt.clear()
        # not by update, which in a Counter counts
        items = itertools.islice(value.items(), parts) if isinstance(parts, int) else parts.items()
        for key, part in items:
            rebuilt[key] = thaw(part, fresh) if isinstance(part, Noted) else part
        return rebuilt
    entries: Any = parts
    if isinstance(parts, int):
        entries = itertools.islice(value, parts)
    elif isinstance(parts, list):
        entries = (thaw(part, fresh) for part in parts)
    if isinstance(value, list | deque):
        empty: Any = deque(maxlen=value.maxlen) if isinstance(value, deque) else []
        fresh[id(value)] = empty
        empty.extend(entries)
        return empty
    return value._make(entries) if _is_named_tuple(value) else type(value)(entries)


def _rebuilt_tensor(value: Tensor, flag: bool, version: int, small: Tensor | None) -> Tensor:
    if small is not None:
        return small.clone().requires_grad_(flag)
    if version_of(value) == version:
        return value.detach().requires_grad_(flag)
    raise RecomputeError(
        f"a tensor {tuple(value.shape)} kept as an attribute or variable was changed in place "
        "after the forward read it, so the second run cannot repeat the first. Change it after "
        "the backward, or change a copy."
    )


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor, 0 where there is none."""
    try:
        return tensor._version
    except RuntimeError:
        # a tensor made in inference mode has none
        return 0
