"""Runs a model on fake tensors and leaves it as it was: to write its tape, and to prove it.

The proof: the model as it is written and the steps made of its tape run on the same fake inputs,
and every operation that reaches the kernels, with the tensors and numbers that it gets, must be the
same in the same order.
"""

import contextlib
import functools
import logging
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.adapter.instead import NAME, Instead
from zoo.adapter.surroundings import Surroundings
from zoo.adapter.tape import Tape
from zoo.adapter.watch import Opaque, Watch, is_constant
from zoo.chain import HOOKS, is_hooked
from zoo.engine.unseen import unseen
from zoo.measure.constants import Constants
from zoo.measure.sharded import gathered, is_shard, is_spread, sharded_parts
from zoo.measure.untouched import scratch, without_autocast_cache

# here other processes would wait for this one, or it for them
COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
Work = list[tuple[Any, ...]]
Result = TypeVar("Result")
# methods of `nn.Module` are replaced meanwhile
_one_at_a_time = threading.RLock()


class Rehearsal:
    """A model, its own forward and arguments for it."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.model, self.forward = model, forward
        self.leaves, self.structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor) and not is_constant(leaf):
                raise Opaque("", f"takes a {type(leaf).__name__}")
        sharded = {id(value) for part in sharded_parts(model) for value in part.parameters()}
        for value in model.parameters():
            if is_spread(value) and not (id(value) in sharded and is_shard(value)):
                raise Opaque("", "uses parameters that are spread over processes (DTensor)")
        self.work: Work = []

    def record(self, leaves: frozenset[nn.Module]) -> Tape:
        """Returns the tape of the forward; `leaves` are called as a whole.

        Raises:
            Opaque: a module's own code cannot be put on a tape; `path` is that of the module.
        """
        with self._fake() as (values, tensors), Surroundings(self.model).put_back() as changed:
            args, kwargs = pytree.tree_unflatten(values, self.structure)
            watch = Watch(self.model, leaves, tensors)
            with _Work() as log:
                tape = watch.run(self.forward, args, kwargs)
            self.work = log.work
            if any(map(is_hooked, self.model.modules())):
                # none were there; a replay would not put them up
                raise Opaque("", "registers hooks on modules")
        if changed:
            raise Opaque("", f"changes {changed[0]}")
        return tape

    def proves(self, run: Callable[[Sequence[Tensor]], Any]) -> bool:
        """Says whether a function of the distinct input tensors does the same work."""
        log = _Work()

        def noted(tensors: Sequence[Tensor]) -> None:
            with log:
                run(tensors)

        self.on_fakes(noted)
        return log.work == self.work

    def on_fakes(self, run: Callable[[Sequence[Tensor]], Result]) -> Result:
        """Calls a function of the distinct input tensors, which are fake; all else is put back."""
        with self._fake() as (_, tensors), Surroundings(self.model).put_back():
            return run(tensors)

    @contextlib.contextmanager
    def _fake(self) -> Iterator[tuple[list[Any], list[Tensor]]]:
        """Yields the leaves of the arguments as fake tensors, and the distinct ones of these."""
        # a model of fake tensors stays among its own
        fakes = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        with (
            _one_at_a_time,
            unseen(),
            _untouched(self.model),
            without_autocast_cache(),
            _unlogged(),
            fakes as mode,
            Constants(),
            gathered(self.model, mode),
        ):
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = scratch(buffer, functools.partial(_fake, mode))
            known: dict[int, Tensor] = {}
            for leaf in self.leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in known:
                    fake = _fake(mode, leaf)
                    known[id(leaf)] = fake.requires_grad_(leaf.requires_grad)
            values = [known[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            yield values, list(known.values())


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps torch from also logging, with a traceback, what an operation on fakes raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    earlier, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = earlier


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation, with a number for each tensor in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Work = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVE:
            raise Opaque("", "calls a collective of torch.distributed")
        given = self._named((args, kwargs))
        result = func(*args, **kwargs)
        self.work.append((func, given, self._named(result), torch.is_grad_enabled()))
        return result

    def _named(self, value: Any) -> list[Any]:
        return [self._name(leaf) for leaf in pytree.tree_leaves(value)]

    def _name(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if is_constant(leaf) else type(leaf)
        if id(leaf) not in self.numbers:
            self.numbers[id(leaf)] = len(self.numbers)
            self.alive.append(leaf)
        return self.numbers[id(leaf)], tuple(leaf.shape), leaf.dtype, leaf.requires_grad


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Takes the hooks off a model; puts back all of it, and Python's streams, after the block."""
    before = {module: dict(vars(module)) for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in before}
    streams = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    others = numpy.random.get_state() if numpy is not None else None
    try:
        for module in before:
            vars(module).update({name: OrderedDict() for name in HOOKS})
            if isinstance(vars(module).get(NAME), Instead):
                # a plan for a part is no part of what the whole does
                vars(module)[NAME] = vars(module)[NAME].original
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers[module])
        random.setstate(streams)
        if numpy is not None:
            numpy.random.set_state(others)


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Returns a fake tensor of the same kind, also of one that is fake already."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            # else torch warns of the `.grad` of what is no leaf: what a generator made
            plain = tensor.detach()
        return mode.from_tensor(plain, static_shapes=True)
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
