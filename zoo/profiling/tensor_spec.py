"""The metadata of tensors and of kernel calls: shape, stride, dtype, device, storage.

Equal tensors, fake or real, can be made from it; those that shared a storage share one again.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import (
    Args,
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    conj,
    is_traceable_wrapper_subclass,
    neg_view,
    pytree,
)
from zoo.engine.operator_effects import CONSTANTS, DROPOUT_STATE, effects_of, resolved
from zoo.engine.tensor_state import parts_of, parts_of_wrapper
from zoo.optimizer.in_backward import FreedGradient

CPU, META = torch.device("cpu"), torch.device("meta")
# types that hold no tensor
VALUES = (int, float, str, type(None), torch.dtype, torch.device, torch.layout)
LEAVES = frozenset({*VALUES, bool, torch.memory_format})
# those of tensors that are no wrappers
PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor})
# those of arguments that are the same if they are equal
EQUAL = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout})
# of an operator's name and arguments
CallKey = tuple[str, Hashable]


class TensorSpec(NamedTuple):
    """The metadata of a tensor; `bytes` are those of its storage.

    Among several specs, equal `tensor` or `storage` numbers mean the same tensor or storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    bytes: int
    tensor: int = 0
    storage: int = 0
    # whether its numbers are those in memory conjugated, or negated
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: Tensor, number: int = 0, storage: int = 0) -> "TensorSpec":
        """Describes a strided tensor."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
            number,
            storage,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def empty(self, base: Tensor | None = None) -> Tensor:
        """Makes such a tensor without values, in the storage of `base` (bytes) or in its own."""
        if base is None and self.offset == 0:
            dense = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
            if dense.untyped_storage().nbytes() == self.bytes:
                return self._marked(dense)
        if base is None:
            base = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        size = self.dtype.itemsize
        numbers = base[: self.bytes // size * size].view(self.dtype)
        # detached: for autograd it is no view
        return self._marked(numbers.as_strided(self.shape, self.stride, self.offset).detach())

    def fake(self, mode: FakeTensorMode) -> Tensor:
        """Makes such a fake tensor, unseen by dispatch modes."""
        with DisableTorchDispatch():
            meta = self._replace(device=META).empty()
        fake: Tensor = FakeTensor(mode, meta, self.device)
        return fake

    def _marked(self, tensor: Tensor) -> Tensor:
        if self.conjugate:
            tensor = conj(tensor)
        if self.negative:
            tensor = neg_view(tensor)
        return tensor

    def alone(self) -> "TensorSpec":
        """Returns the spec of the same tensor in a storage that holds nothing else."""
        steps = zip(self.shape, self.stride, strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in steps)
        size = reach * self.dtype.itemsize if math.prod(self.shape) else 0
        is_alone = self.offset == 0 and self.bytes == size
        return self if is_alone else self._replace(offset=0, bytes=size)


def tensors_from(specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Makes the tensors that specs describe; those of one storage share one."""
    distinct = {spec.tensor: spec for spec in specs}
    views = Counter(spec.storage for spec in distinct.values())
    bases: dict[int, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    for number, spec in distinct.items():
        if views[spec.storage] > 1 and spec.storage not in bases:
            bases[spec.storage] = torch.empty(spec.bytes, dtype=torch.uint8, device=spec.device)
        tensors[number] = spec.empty(bases.get(spec.storage))
    return [tensors[spec.tensor] for spec in specs]


class KernelSpec(NamedTuple):
    """A kernel call: its arguments, with a `TensorSpec` for each tensor and a tuple for each list.

    Not a pytree of torch's, which takes longer to make than a fake kernel to run.
    """

    operator: str
    args: Args
    kwargs: tuple[tuple[str, PyTree], ...]

    @classmethod
    def of(cls, operator: Operator, args: Args, kwargs: Kwargs) -> "KernelSpec | None":
        """Returns the spec of a call; None for a kernel that cannot be called alone."""
        tensors = tensors_in((args, kwargs))
        is_strided = all(tensor.layout is torch.strided for tensor in tensors)
        if effects_of(operator).opaque or not is_strided:
            return None
        specs = iter(_of_arguments(tensors))
        with contextlib.suppress(TypeError):
            # in the order of `tensors_in`
            arguments = _described(args, specs)
            return cls(
                str(operator),
                arguments,
                tuple((name, _described(kwargs[name], specs)) for name in kwargs),
            )
        return None

    def prepared(self) -> tuple[Operator, Args, Kwargs]:
        """Returns the operator and its arguments: floating-point tensors of 0.5, others of 0."""
        arguments = tensors_from(self._tensors)
        for tensor in arguments:
            # an expanded tensor cannot be written, but its storage can
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            whole.fill_(0.5 if tensor.is_floating_point() or tensor.is_complex() else 0)
        tensors, operator = iter(arguments), resolved(self.operator)
        args = [_filled(value, tensors) for value in self.args]
        kwargs = {name: _filled(value, tensors) for name, value in self.kwargs}
        return operator, _with_dropout_state(operator, args), kwargs

    @property
    def key(self) -> CallKey:
        """Equal for calls that differ in nothing but where their tensors lie."""
        return self.operator, _key((self.args, self.kwargs))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each storage of its arguments."""
        return tuple({spec.storage: spec.bytes for spec in self._tensors}.values())

    @property
    def leaves(self) -> tuple[PyTree, ...]:
        """Its arguments, those in lists one by one."""
        return tuple(_leaves((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def _tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))


def key_of(operator: Operator, args: Args, kwargs: Kwargs) -> CallKey | None:
    """Returns the key of a call's spec, without making that; None for a call that has none."""
    if not effects_of(operator).opaque:
        with contextlib.suppress(TypeError):
            return str(operator), _key((args, tuple(kwargs.items())))
    return None


def _key(value: PyTree) -> Hashable:
    """Returns what is the same for an argument and its spec; raises TypeError for another kind."""
    kind = type(value)
    if kind in EQUAL:
        return value  # type: ignore[no-any-return]
    if kind is TensorSpec:
        return (*value[:2], *value[3:5], *value[8:])
    if isinstance(value, Tensor):
        return _key_of_tensor(value)
    if isinstance(value, list | tuple):
        return (*map(_key, value),)
    if not isinstance(value, CONSTANTS | torch.Generator):
        raise TypeError(kind.__name__)
    # True and 1.0 equal 1, and NaN equals nothing
    return None if isinstance(value, torch.Generator) else (kind, repr(value))


def _key_of_tensor(tensor: Tensor) -> Hashable:
    if tensor.layout is not torch.strided:
        raise TypeError(str(tensor.layout))
    # a fake tensor asks all modes whether it `is_meta`
    device = CPU if tensor.device.type == "meta" else tensor.device
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.dtype, device, *lazy


def _described(value: PyTree, specs: Iterator[TensorSpec]) -> PyTree:
    """Returns an argument with specs for its tensors; raises TypeError for another kind."""
    if isinstance(value, Tensor):
        return next(specs)
    if isinstance(value, list | tuple):
        return tuple(_described(part, specs) for part in value)
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, CONSTANTS):
        raise TypeError(type(value).__name__)
    return value


def _filled(value: PyTree, tensors: Iterator[Tensor]) -> PyTree:
    """Returns an argument with the next of the tensors for each spec."""
    if isinstance(value, TensorSpec):
        return next(tensors)
    return [_filled(part, tensors) for part in value] if isinstance(value, tuple) else value


def _leaves(value: PyTree) -> Iterator[PyTree]:
    if isinstance(value, tuple) and not isinstance(value, TensorSpec):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _with_dropout_state(operator: Operator, args: Sequence[PyTree]) -> Args:
    """Puts a state in the place of cuDNN's for dropout, which is made by a kernel of its own."""
    names = [argument.name for argument in operator._schema.arguments]
    return tuple(
        DROPOUT_STATE(0.5, True, 0, dtype=value.dtype, device=value.device)
        if name == "dropout_state" and value is not None
        else value
        for name, value in zip(names, args, strict=False)
    )


def _of_arguments(tensors: Iterable[Tensor]) -> list[TensorSpec]:
    """Returns the specs of a kernel's arguments, numbered in their order.

    An argument that shares its storage with no other gets one of its own size, at offset 0: a
    kernel does not see the rest. The CPU's kernels stand for those of any device.
    """
    numbers, storages = dict[int, int](), dict[int, int]()
    specs = [
        TensorSpec.of(
            tensor,
            numbers.setdefault(id(tensor), len(numbers)),
            storages.setdefault(tensor.untyped_storage()._cdata, len(storages)),
        )
        for tensor in tensors
    ]
    # a fake tensor asks all modes whether it `is_meta`
    specs = [spec._replace(device=CPU) if spec.device.type == "meta" else spec for spec in specs]
    views = Counter({spec.tensor: spec.storage for spec in specs}.values())
    return [spec.alone() if views[spec.storage] == 1 else spec for spec in specs]


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Lists a tensor's storages in this process; those inside a wrapper such as DTensor."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if isinstance(tensor, FreedGradient):
        return []
    if is_traceable_wrapper_subclass(tensor):
        return [storage for part in parts_of_wrapper(tensor) for storage in storages_of(part)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for part in parts_of(tensor)]


def tensors_held_by(value: PyTree, most: float = math.inf) -> list[Tensor]:
    """Returns the tensors that an object holds, also in attributes, as of a dataclass or cache.

    At most so many objects are looked into.
    """
    tensors: dict[int, Tensor] = {}
    # keeps each object alive, so that its id is not reused
    seen: dict[int, object] = {}
    waiting = [value]
    while waiting and len(seen) < most:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), value)
        elif not isinstance(value, VALUES) and id(value) not in seen and not callable(value):
            seen[id(value)] = value
            parts = list(getattr(value, "__dict__", {}).values())
            if isinstance(value, Mapping):
                parts = [*value.values(), *parts]
            elif isinstance(value, list | tuple | set | frozenset):
                parts = [*value, *parts]
            waiting += reversed(parts)
    return list(tensors.values())


def tensors_in(value: PyTree) -> list[Tensor]:
    """Lists the tensors in nested containers and dataclasses, or of a single one."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list):
        parts = value
    elif type(value) is dict:
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in dataclasses.fields(value)]
    else:
        # a pytree knows all containers, but takes ten times as long
        parts = [leaf for leaf in pytree.tree_leaves(value) if leaf is not value]
    tensors: list[Tensor] = []
    for part in parts:
        # most are of these very types, which is faster to tell
        if type(part) in LEAVES:
            continue
        if isinstance(part, Tensor):
            tensors.append(part)
        elif not isinstance(part, VALUES):
            tensors += tensors_in(part)
    return tensors


def flattened(
    value: PyTree, flatten: Callable[..., PyTree] = pytree.tree_flatten
) -> tuple[list[PyTree], pytree.TreeSpec]:
    """Returns the leaves of nested containers, and their structure.

    A container that contains itself is a leaf at its second occurrence. `flatten` is one of the
    functions of torch's pytrees.
    """
    try:
        return flatten(value)  # type: ignore[no-any-return]
    except RecursionError:
        seen: set[int] = set()

        def comes_again(part: PyTree) -> bool:
            is_known = id(part) in seen
            seen.add(id(part))
            return is_known

        return flatten(value, is_leaf=comes_again)  # type: ignore[no-any-return]
