"""The bytes and operations of each step of a chain, from one run on fake tensors.

A fake tensor has a shape, a type, a device and a storage of the right size with nothing behind it,
so a model is measured that would not fit, and the kernels chosen are those of the real device
(plain meta tensors choose others for attention and LSTMs). Each step is run alone, forward and
backward, under a dispatch mode that sees every storage appear and a weak reference that sees it go.

What kernels allocate inside themselves (oneDNN's reordered weights, cuDNN's workspaces) is not seen.
The model is left as it was: buffers, hooks and attributes are put back, no random number is drawn.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zoo.chain import Outline, State, Step
from zoo.planner.costs import StepCosts

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def profile(chain: nn.Module, outline: Outline, inputs: State) -> StepCosts:
    """Measures the steps of a chain for inputs like these (real, fake or meta tensors).

    Grad mode, autocast and the training flags are those of the caller.
    """
    with _untouched(chain), _without_autocast_cache(), FakeTensorMode(
        allow_non_fake_inputs=True
    ) as mode:
        for module in chain.modules():
            module._buffers = {
                name: _scratch(mode, value) for name, value in module._buffers.items()
            }
        state = tuple(_detached(_fake(mode, value)) for value in inputs)
        ledger = _Ledger()
        ledger.leave_out(buffer for buffer in chain.buffers())
        ledger.leave_out(state)
        return _measure(ledger, outline, state)


def _measure(ledger: "_Ledger", outline: Outline, state: State) -> StepCosts:
    live = [ledger.storages(state)]
    gradients = [_gradient_bytes(state)]
    runs: list[_Run] = []
    for step in outline.steps:
        state, run = _run_step(ledger, step, state)
        runs.append(run)
        live.append(ledger.storages(state))
        gradients.append(_gradient_bytes(state))
    return StepCosts(
        sizes=tuple(ledger.sizes),
        live=tuple(live),
        saved=tuple(frozenset(run.saved) for run in runs),
        forward=tuple(run.forward for run in runs),
        forward_until_saved=tuple(run.forward_until_saved for run in runs),
        backward=tuple(run.backward for run in runs),
        gradients=tuple(gradients),
        flops=tuple(run.flops for run in runs),
        flops_until_saved=tuple(run.flops_until_saved for run in runs),
        blocks=outline.blocks,
    )


@dataclass
class _Run:
    saved: set[int] = field(default_factory=set)
    forward: int = 0
    forward_until_saved: int = 0
    backward: int = 0
    flops: int = 0
    flops_until_saved: int = 0


def _run_step(ledger: "_Ledger", step: Step, state: State) -> tuple[State, _Run]:
    run = _Run()
    released = _Released(ledger, ledger.storages(state))

    def pack(tensor: Tensor) -> "_Saved":
        if not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            run.saved |= ledger.storages((tensor,))
            run.forward_until_saved = watch.peak
            run.flops_until_saved = watch.flops
        return released.saved(tensor)

    leaves = tuple(_detached(value) for value in state)
    with _Watch() as watch, saved_tensors_hooks(pack, _Saved.get):
        value = step(*leaves)
    run.forward, run.flops = watch.peak, watch.flops
    outputs = value if isinstance(value, tuple) else (value,)
    # a state tensor that the step only hands on keeps being itself, not the step's detached alias
    own = {id(leaf): original for leaf, original in zip(leaves, state, strict=True)}
    following = tuple(_detached(own.get(id(output), output)) for output in outputs)
    run.backward = _backward_peak(outputs, leaves, released)
    return following, run


def _backward_peak(outputs: State, leaves: State, released: "_Released") -> int:
    """Returns the most that a step's backward adds to its saved tensors and its given gradients.

    Both are freed on the way, as the engine frees them: a gradient when it was used, a saved tensor
    when its node is done.
    """
    ends = [output for output in outputs if output is not None and output.grad_fn is not None]
    starts = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    starts += _parameters_behind(ends)
    if not ends or not starts:
        return 0
    given = _gradient_bytes(tuple(ends))
    root = _Root.apply(*ends)
    del ends, outputs
    with _Watch() as watch:
        released.watch = watch
        found = torch.autograd.grad(root, starts, allow_unused=True)
        del found
    released.watch = None
    return max(watch.peak - given, 0)


class _Root(torch.autograd.Function):
    """Gives each output a gradient that nobody but autograd holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.kinds = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds
        )


class _Saved:
    """A saved tensor in autograd's hands: it dies when its node lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get(self) -> Tensor:
        """Returns the tensor."""
        return self.tensor


class _Released:
    """Tells a watch when a storage that only this step saved is no longer saved by anyone."""

    def __init__(self, ledger: "_Ledger", others: frozenset[int]) -> None:
        self.ledger = ledger
        self.others = others
        self.count: Counter[int] = Counter()
        self.watch: _Watch | None = None

    def saved(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        for storage in self.ledger.storages((tensor,)) - self.others:
            self.count[storage] += 1
            weakref.finalize(saved, self._one_less, storage).atexit = False
        return saved

    def _one_less(self, storage: int) -> None:
        self.count[storage] -= 1
        if self.watch is not None and not self.count[storage]:
            self.watch.bytes -= self.ledger.sizes[storage]


def _parameters_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Finds the leaves of a step's graph other than its inputs: the parameters that it uses."""
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    leaves: dict[int, Tensor] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            leaves[id(variable)] = variable
        waiting += [following for following, _ in node.next_functions]
    return list(leaves.values())


class _Ledger:
    """Numbers the storages that a plan can decide about."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.numbers: dict[int, int | None] = {}
        self.alive: list[Any] = []  # a storage's address is its name only as long as it lives

    def leave_out(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._register(tensor.untyped_storage(), None)

    def storages(self, tensors: Iterable[Any]) -> frozenset[int]:
        """Returns the numbers of the storages behind these tensors, parameters left out."""
        found = set()
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.numbers:
                self._register(storage, len(self.sizes))
                self.sizes.append(storage.nbytes())
            number = self.numbers[storage._cdata]
            if number is not None:
                found.add(number)
        return frozenset(found)

    def _register(self, storage: Any, number: int | None) -> None:
        self.numbers[storage._cdata] = number
        self.alive.append(storage)


class _Watch(TorchDispatchMode):
    """Follows the bytes of the storages that operations make, and counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self.flops = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known_before = {
            tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs or {}))
        }
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._notice(tensor, known_before)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=result))
        return result

    def _notice(self, tensor: Tensor, known_before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in known_before or isinstance(tensor, nn.Parameter):
            return
        self.known[key] = weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.known[key].atexit = False
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> None:
        self.bytes -= size
        self.known.pop(key, None)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def _scratch(mode: FakeTensorMode, buffer: Tensor | None) -> Any:
    """Stands in for a buffer; a counter stays a number, since some layers compute with it."""
    if buffer is not None and buffer.ndim == 0 and buffer.device.type == "cpu":
        with unset_fake_temporarily():
            return buffer.clone()
    return _fake(mode, buffer)


def _fake(mode: FakeTensorMode, value: Tensor | None) -> Any:
    return None if value is None else mode.from_tensor(value)


def _detached(value: Tensor | None) -> Any:
    return None if value is None else value.detach().requires_grad_(value.requires_grad)


def _gradient_bytes(state: State) -> int:
    distinct = {id(value): value for value in state if value is not None and value.requires_grad}
    return sum(value.numel() * value.element_size() for value in distinct.values())


@contextlib.contextmanager
def _untouched(chain: nn.Module) -> Iterator[None]:
    """Puts back the attributes, buffers and hooks of every module after the block."""
    before = {module: dict(vars(module)) for module in chain.modules()}
    try:
        for module in before:
            for name in HOOKS:
                setattr(module, name, {})
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keeps fake casts of real weights out of autocast's cache."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
