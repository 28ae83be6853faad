"""The numbers of constants while tensors are fake: `torch.arange(2, 5).tolist()` in a loss.

A fake tensor has no numbers, and code that reads one raises DataDependentOutputException. But what
code makes of its own numbers and of shapes alone is the same whatever the data: a counter of its
own, whether a mask that it was given masks anything. Beside each fake tensor whose numbers are
known a real one is kept, and every kernel that gets only such tensors runs on these, too. The fake
tensors stay, so that bytes and kernels are counted as ever. What is asked of any other tensor has
no answer, and none is made up.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    pytree,
    unset_fake_temporarily,
)
from zoo.engine.operators import effects_of
from zoo.engine.recording import KernelMode, has_own_storage, is_plain, written_by
from zoo.profiling.allocator import tensors_in

# numbers of a tensor, at most; who reads more reads data
MOST = 1 << 12
# in a process of its own, which need not save memory
SMALL = 1 << 16
CPU = torch.device("cpu")
# of these only the shape and the type count
OF_SHAPES = frozenset(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)


class NumbersNeeded(BaseException):
    """A forward asks for numbers that nobody knows; no `except Exception` of its own catches it."""


class Constants(KernelMode):
    """Knows the numbers of some fake tensors; enter it inside of a `FakeTensorMode`."""

    def __init__(self, mode: FakeTensorMode, strict: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        # raises NumbersNeeded, not torch's exceptions
        self.strict = strict
        self.most = SMALL if strict else MOST
        # whether the forward asked for what is not known, also where it went on all the same
        self.asked = False
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        # storages of such tensors, written by what is not known; all stay alive
        self._stale: set[int] = set()
        self._alive: list[Tensor] = []

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Notes the numbers of a fake tensor."""
        self._known[id(fake)] = weakref.ref(fake), real
        self._alive.append(real)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Has what is known told by `tolist` and `numpy`, too, which are no kernels.

        transformers masks otherwise when it sees fake tensors; now only where it cannot know.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(
                _replaced(FakeTensor, "tolist", lambda fake: self._numbers(fake).tolist())
            )
            undo.enter_context(
                _replaced(FakeTensor, "numpy", lambda fake, **_: self._numbers(fake).numpy())
            )
            if (utils := sys.modules.get("transformers.utils.import_utils")) is not None:
                undo.enter_context(_replaced(utils, "is_fake_tensor", self._is_unknown))
            yield

    def _is_unknown(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and self._real_of(value) is None

    def _numbers(self, tensor: Tensor) -> Tensor:
        found = self._real_of(tensor)
        if found is None:
            self.asked = True
            raise NumbersNeeded
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel on fake tensors, and on the real ones beside them."""
        if types and not all(map(has_own_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        is_known = hasattr(func, "_schema") and _repeats(func) and self._knows(func, given)
        if is_known and given and torch.Tag.data_dependent_output in func.tags:
            return self._real(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if is_known:
                return self._faked(self._real(func, args, kwargs))
            self.asked = True
            if not self.strict:
                raise
            raise NumbersNeeded from error
        found = tensors_in(result)
        is_small = is_known and (func.is_view or sum(part.numel() for part in found) <= self.most)
        if is_small:
            self._follow(func, args, kwargs, result)
        elif hasattr(func, "_schema"):
            self._forget_written(func, args, kwargs)
        return result

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written_by(effects_of(func), args, kwargs):
            self.forget(tensor)

    def _knows(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        is_of_shapes = func._schema.name in OF_SHAPES
        return is_of_shapes or all(self._real_of(tensor) is not None for tensor in tensors)

    def _real_of(self, tensor: Tensor) -> Tensor | None:
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor:
            stale = found[1].untyped_storage()._cdata in self._stale
            return None if stale else found[1]
        if isinstance(tensor, FakeTensor) or not is_plain(tensor) or tensor.numel() > self.most:
            return None
        # a tensor that the code itself has, such as that of `torch.tensor([1, 2])`
        if tensor.is_meta or tensor.requires_grad:
            return None
        self.know(tensor, copied(tensor))
        return self._known[id(tensor)][1]

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                found = self._real_of(leaf)
                return _shaped(leaf) if found is None else found
            return CPU if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _faked(self, result: Any) -> Any:
        def fake(real: Tensor) -> Tensor:
            made: Tensor = self.mode.from_tensor(real, static_shapes=True)
            self.know(made, real)
            return made

        return pytree.tree_map_only(Tensor, fake, result)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            real = self._real(func, args, kwargs)
        except Exception:
            # a kernel of another device alone
            self._forget_written(func, args, kwargs)
            return
        for fake, made in zip(tensors_in(result), tensors_in(real), strict=True):
            self.know(fake, made)

    def forget(self, tensor: Tensor) -> None:
        """Takes the numbers of a tensor, and of all that share its storage, for unknown."""
        if (found := self._known.get(id(tensor))) is not None and found[0]() is tensor:
            self._stale.add(found[1].untyped_storage()._cdata)


def as_data(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers only stand in for others: nobody takes them for constants."""
    for mode in dispatch_modes():
        if isinstance(mode, Constants):
            mode.forget(tensor)
    return tensor


def _shaped(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape and type, with any numbers."""
    with unset_fake_temporarily():
        return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def copied(tensor: Tensor) -> Tensor:
    """Copies the numbers of a tensor to where they can be read."""
    with unset_fake_temporarily(), torch.no_grad():
        return tensor.detach().to(CPU, copy=True)


def _repeats(operator: Any) -> bool:
    """Says whether an operator makes the same of the same numbers."""
    effects = effects_of(operator)
    is_empty = effects.blank and "empty" in operator._schema.name
    return not (effects.opaque or effects.seeded or effects.reshapes or is_empty)
