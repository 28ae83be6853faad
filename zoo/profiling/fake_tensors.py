"""Fake tensors whose values are known: constant propagation, which planning needs.

A fake tensor has no values, and code that reads one (`torch.arange(2, 5).tolist()` in a loss)
raises DataDependentOutputException. But values that code computes from its own constants and from
shapes are the same whatever the data: a counter, whether a given mask masks anything. So each fake
tensor whose values are known has a real one beside it, and every kernel that gets only such tensors
runs on the real ones, too (constant propagation). No value of any other tensor is made up. What
kernels return on fake tensors is the business of `fake_results`.
"""

import contextlib
import functools
import logging
import operator
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zoo._torch import (
    Args,
    DisableTorchDispatch,
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    TorchDispatchMode,
    disable_current_modes,
    dispatch_modes,
    pytree,
    replaced,
    scoped_library,
    unset_fake_temporarily,
)
from zoo.engine.devices import count_as_seeded
from zoo.engine.operator_effects import (
    DRAWN_NUMBER,
    DROPOUT_STATE,
    effects_of,
    is_view,
    makes_dropout_state,
    written_by,
)
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import has_own_storage, is_plain
from zoo.errors import ArgumentError
from zoo.profiling.fake_results import DATA_NEEDED, FakeResults
from zoo.profiling.tensor_spec import CPU, META, VALUES, tensors_in

# torch asks a tensor these before it runs a kernel; they are no kernels
DEVICE = torch.ops.prim.device.default
QUESTIONS = frozenset({DEVICE, torch.ops.prim.layout.default})
ONE_HOT = torch.ops.aten.one_hot.default
# namespaces of operators that wait for other processes
COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
# stands for a number that is read and makes no difference
UNUSED = torch.zeros((), dtype=torch.int64, device=CPU)
# the most elements of a constant; a larger tensor is data
MOST = 1 << 12
# the most in a forked process, which need not save memory
SMALL = 1 << 16


class _Silenced:
    """A log that is off inside of `with` blocks, which may overlap on several threads.

    It has no lock, which a forked process might find held for good.
    """

    def __init__(self, name: str) -> None:
        self.log, self.was_off = logging.getLogger(name), False
        # an entry for each block that is open: appending and popping are atomic
        self.inside: list[None] = []

    def __enter__(self) -> None:
        if not self.inside:
            self.was_off = self.log.disabled
        self.inside.append(None)
        self.log.disabled = True

    def __exit__(self, *raised: object) -> None:
        if len(self.inside) == 1:
            self.log.disabled = self.was_off
        self.inside.pop()


_log_of_torch = _Silenced("torch._subclasses.fake_tensor")


class NumbersNeeded(BaseException):
    """A forward reads unknown values; no `except Exception` of its own catches this."""


class FakeTensorFixes(KernelMode):
    """Corrects the results of a `FakeTensorMode`; enter it inside one.

    `strict`, for a trace ahead, refuses collectives, and raises NumbersNeeded instead of torch's
    own exceptions. `moves_meta` is for a model on the meta device: its tensors there, and those
    that its forward makes, are moved to the CPU, whose kernels stand for those of any device.
    """

    def __init__(
        self, mode: FakeTensorMode, *, strict: bool = False, moves_meta: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.strict, self.moves_meta = mode, strict, moves_meta
        self._results = FakeResults(mode)
        self.most = SMALL if strict else MOST
        self.asked = False  # for unknown values, even if the forward went on
        self._constants: Any = WeakTensorKeyDictionary()  # fake tensors -> real ones
        # storages of real ones whose fakes were overwritten with unknown values
        self._stale: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._entered: list[contextlib.ExitStack] = []
        # devices on which the state of cuDNN's dropout was made, which a forward has yet to make
        self._dropout: set[torch.device] = set()

    def __enter__(self) -> "FakeTensorFixes":
        entered = contextlib.ExitStack()
        # torch logs a traceback for a fake kernel that fails; the error says as much
        entered.enter_context(_log_of_torch)
        entered.enter_context(_one_hot_replaced())
        # cuDNN's networks compare the addresses of weights; those of fakes are offsets
        entered.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        self._entered.append(entered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.pop().close()
        while self._dropout:
            count_as_seeded(self._dropout.pop())

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Records the values of a fake tensor."""
        self._constants[fake] = real

    def know_unless_known(self, fake: Tensor, number: float) -> None:
        """Takes a number for the values of a fake tensor that are unknown."""
        if self._real_of(fake) is None:
            with unset_fake_temporarily():
                self.know(fake, torch.full(fake.shape, number, dtype=fake.dtype))

    def forget(self, tensor: Tensor) -> None:
        """Marks the values of a tensor, and of all that share its storage, as unknown."""
        if (real := self._constants.get(tensor)) is not None:
            self._stale.add(real.untyped_storage())

    @contextlib.contextmanager
    def questions_allowed(self) -> Iterator[None]:
        """Leaves `asked` as it is if the block reads unknown values."""
        asked = self.asked
        try:
            yield
        finally:
            self.asked = asked

    @contextlib.contextmanager
    def constants_readable(self) -> Iterator[None]:
        """Lets `tolist` and `numpy`, which are no kernels, return constants, too.

        transformers makes other masks for fake tensors; here only for those of unknown values.
        """

        def read(fake: Tensor) -> Tensor:
            if (real := self._real_of(fake)) is None:
                self.asked = True
                raise NumbersNeeded
            return real

        def array(fake: Tensor, **_: object) -> object:
            real = read(fake)
            # as of a real tensor, which a mode would make a fake one, without numbers
            fake.detach()
            with DisableTorchDispatch():
                return real.numpy()

        def is_unknown(value: object) -> bool:
            return isinstance(value, FakeTensor) and self._real_of(value) is None

        utils = sys.modules.get("transformers.utils.import_utils")
        with (
            replaced(FakeTensor, "tolist", lambda fake: read(fake).tolist()),
            replaced(FakeTensor, "numpy", array),
            replaced(utils, "is_fake_tensor", is_unknown) if utils else contextlib.nullcontext(),
        ):
            yield

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel on fake tensors, and on the real ones beside them."""
        if types and not all(map(has_own_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if self.moves_meta and self._is_moved(tensors, args, kwargs):
            args, kwargs = pytree.tree_map(self._moved, (args, kwargs))
            tensors = tensors_in((args, kwargs))
        if func in QUESTIONS:
            return answer(func, args[0])
        if self.strict:
            refuse_collective(func)
        is_known = self._knows(func, tensors)
        if is_known and tensors and torch.Tag.data_dependent_output in func.tags:
            return self._on_reals(func, args, kwargs)
        try:
            result = self._results.of(func, args, kwargs)
        except DATA_NEEDED as error:
            if is_known:
                return self._faked(self._on_reals(func, args, kwargs))
            self.asked = True
            if not self.strict:
                raise
            raise NumbersNeeded from error
        if not (is_known and self._follow(func, args, kwargs, result)):
            for tensor in written_by(effects_of(func), args, kwargs):
                self.forget(tensor)
        if func is DRAWN_NUMBER and makes_dropout_state(func, args, kwargs):
            # a seed, on which nothing depends that a fake tensor shows
            self.know(args[0], UNUSED)
        elif func is DROPOUT_STATE and type(result) is Tensor:
            self._dropout.add(result.device)
        return result

    @staticmethod
    def _is_moved(tensors: Sequence[Tensor], args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a kernel gets a device, or a tensor that may be on the meta device."""
        is_fake = all(type(tensor) is FakeTensor for tensor in tensors)
        return not is_fake or any(
            isinstance(value, torch.device) for value in (*args, *kwargs.values())
        )

    def _moved(self, leaf: PyTree) -> PyTree:
        """Replaces a tensor on the meta device by a fake on the CPU, and that device by the CPU."""
        if isinstance(leaf, torch.device):
            return CPU if leaf.type == "meta" else leaf
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.is_meta:
            fake: Any = self.mode.from_tensor(leaf)
            fake.fake_device = CPU
            return fake
        return leaf

    def _follow(self, func: Operator, args: Args, kwargs: Kwargs, result: PyTree) -> bool:
        """Runs a kernel on the real tensors, too; returns whether that was possible."""
        numbers = sum(tensor.numel() for tensor in tensors_in(result))
        if numbers > self.most and not is_view(func):
            return False
        try:
            reals = self._on_reals(func, args, kwargs)
        except Exception:
            # a kernel that only another device has
            return False
        for fake, real in zip(tensors_in(result), tensors_in(reals), strict=True):
            self.know(fake, real)
        return True

    def _knows(self, func: Operator, tensors: Sequence[Tensor]) -> bool:
        """Returns whether a kernel is deterministic and gets known values."""
        effects = effects_of(func)
        if effects.opaque or effects.seeded or effects.reshapes or effects.empty:
            return False
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        # `zeros_like` and the like read only the shape and dtype of a tensor
        return effects.blank or all(self._real_of(tensor) is not None for tensor in tensors)

    def _real_of(self, tensor: Tensor) -> Tensor | None:
        real: Tensor | None = self._constants.get(tensor)
        if real is not None:
            return None if real.untyped_storage() in self._stale else real
        if isinstance(tensor, FakeTensor) or not is_plain(tensor) or tensor.numel() > self.most:
            return None
        # a real tensor of the code itself, such as `torch.tensor([1, 2])`
        if tensor.is_meta or tensor.requires_grad:
            return None
        self.know(tensor, copied(tensor))
        return self._real_of(tensor)

    def _on_reals(self, func: Operator, args: Args, kwargs: Kwargs) -> PyTree:
        def real(leaf: PyTree) -> PyTree:
            if not isinstance(leaf, Tensor):
                return CPU if isinstance(leaf, torch.device) else leaf
            if (constant := self._real_of(leaf)) is not None:
                return constant
            # only its shape and dtype are read
            return torch.empty((), dtype=leaf.dtype).expand(leaf.shape)

        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map(real, (args, kwargs))
            return func(*args, **kwargs)

    def _faked(self, result: PyTree) -> PyTree:
        def fake(real: Tensor) -> Tensor:
            copy: Tensor = self.mode.from_tensor(real, static_shapes=True)
            self.know(copy, real)
            return copy

        return pytree.tree_map_only(Tensor, fake, result)


def refuse_collective(func: Operator) -> None:
    """Raises ArgumentError for an operator that waits for other processes."""
    if getattr(func, "namespace", "") in COLLECTIVE:
        raise ArgumentError(
            f"the forward calls {func}, which waits for other processes, so that it cannot be "
            "traced ahead. Plan before the model is distributed"
        )


def as_data(tensor: Tensor) -> Tensor:
    """Returns a tensor whose values are placeholders and must not count as constants."""
    for mode in _active():
        mode.forget(tensor)
    return tensor


def _active() -> list[FakeTensorFixes]:
    return [mode for mode in dispatch_modes() if isinstance(mode, FakeTensorFixes)]


@contextlib.contextmanager
def _one_hot_replaced() -> Iterator[None]:
    """Makes `one_hot` call the kernels on fake tensors that it calls on real ones.

    It is no kernel itself, so that no dispatch mode sees it, and torch has other ones for fakes.
    """
    with scoped_library("aten", "IMPL") as library:
        # raised if another planner has replaced it
        with contextlib.suppress(RuntimeError):
            # a key of fakes, and of real tensors inside a mode only
            library.impl("one_hot", _one_hot, "PythonTLSSnapshot")
        yield


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    is_given = num_classes > 0
    is_valid = x.dtype is torch.int64 and x.numel() > 0 and (is_given or num_classes == -1)
    if not (isinstance(x, FakeTensor) and is_valid):
        return ONE_HOT._op_dk(DispatchKey.CompositeImplicitAutograd, x, num_classes)  # type: ignore[no-any-return]
    if x.device == CPU:
        for number in _least_and_highest(x):
            # only checked, where the number of classes is given
            for mode in _active() if is_given else ():
                mode.know(number, UNUSED)
            highest = number.item()
    elif not is_given:
        highest = x.max().item()
    classes = num_classes if is_given else int(highest) + 1
    zeros = torch.zeros((*x.shape, classes), dtype=x.dtype, device=x.device)
    return zeros.scatter_(-1, x.unsqueeze(-1), 1)


def _least_and_highest(x: Tensor) -> Iterator[Tensor]:
    """Yields the least and the highest number of a tensor by the kernels of `one_hot`."""
    if _takes_both_at_once():
        yield from torch.aminmax(x)
    else:
        yield x.min()
        yield x.max()


@functools.cache
def _takes_both_at_once() -> bool:
    """Returns whether this torch's `one_hot` calls `aminmax`, as 2.14 does and 2.11 does not."""
    operators: list[Operator] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Operator, _: object, args: Args = (), kwargs: Kwargs | None = None
        ) -> PyTree:
            operators.append(func)
            return func(*args, **kwargs or {})

    with disable_current_modes(), Names():  # type: ignore[no-untyped-call]
        torch.nn.functional.one_hot(UNUSED)
    return torch.ops.aten.aminmax.default in operators


def put_tensors(model: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Replaces a model's tensors, by id, including those in lists and dicts of its modules.

    Lists and dicts are written in place, since several modules may share one.
    """
    leaves = (nn.Module, *VALUES)
    # by id; the original is held, so that no other object gets its id
    visited: dict[int, tuple[PyTree, PyTree]] = {}

    def other(value: PyTree) -> PyTree:
        if isinstance(value, Tensor):
            return replacements.get(id(value), value)
        # to flatten is slow, and most values are no containers
        if isinstance(value, leaves):
            return value
        if id(value) not in visited:
            # a container may contain itself
            visited[id(value)] = value, value
            visited[id(value)] = value, filled(value)
        return visited[id(value)][1]

    def filled(value: PyTree) -> PyTree:
        if isinstance(value, list | dict):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in list(entries):
                if (new := other(part)) is not part:
                    value[key] = new
            return value
        parts, tree = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        others = [*map(other, parts)]
        is_same = all(map(operator.is_, parts, others))
        return value if is_same else pytree.tree_unflatten(others, tree)

    for module in list(model.modules()):
        other(vars(module))


def copied(tensor: Tensor) -> Tensor:
    """Copies the values of a tensor to a real one on the CPU."""
    with unset_fake_temporarily(), torch.no_grad():
        return tensor.detach().to(CPU, copy=True)


def answer(question: Operator, tensor: Tensor) -> PyTree:
    """Returns the device or layout of a tensor, as a `FakeTensorMode` does."""
    if question is not DEVICE or type(tensor) is not FakeTensor:
        return question(tensor)
    is_inside = tensor.fake_mode.in_kernel_invocation  # type: ignore[attr-defined]
    return META if is_inside else tensor.fake_device  # type: ignore[attr-defined]
