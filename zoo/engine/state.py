"""The state that a first run finds, given again to the second and taken back afterwards.

In training every BatchNorm folds its batch into running statistics; a second run would do it twice
(pytorch#96136). The same holds for spectral norm's vectors, moving averages, counters, caches and
whatever else a forward moves, and for what the user changes between forward and backward: train()
and eval(), requires_grad, parameters swapped by `torch.func.functional_call`.

    before the first run    attributes, buffers and parameters of all that the function reaches are
                            noted; buffers that may move are copied
    after it                what moved is known; large copies of what did not are dropped
    second run              where something differs from the note, the module gets what it had, on
                            scratch copies; afterwards it has its own objects again, so that no
                            version is bumped that a graph may have saved

Statistics of torch's own norms need no copy: in training they are written and not read, so any
scratch will do. Buffers of more than 64 KiB are copied until a first run has left them alone. One
that is moved later for the first time is refused in the backward, by name, and copied from then on.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from zoo.engine.notes import SMALL, is_comparable, note, thaw, unchanged, version_of
from zoo.engine.reach import Reached, Variable
from zoo.engine.snapshot import BOOKKEEPING, Snapshot, is_norm
from zoo.errors import RecomputeError

# a count may be divided by; what the others hold is written over or thrown away
STATISTICS = {
    "running_mean": torch.empty_like,
    "running_var": torch.empty_like,
    "num_batches_tracked": torch.zeros_like,
}


class State:
    """What a function reaches, as a first run found it."""

    def __init__(self, reached: Reached) -> None:
        read = {*reached.modules} if reached.statistics else {*reached.hooked}
        self.modules = [
            _ModuleState(module, found, found.norm and (module not in read or _is_lazy(module)))
            for module, found in reached.modules.items()
        ]
        self.variables = [_VariableState(variable) for variable in reached.variables.values()]
        self.objects = [_ObjectState(value) for value in reached.objects.values()]
        self.buffers = [
            _BufferState(state.module, name, buffer)
            for state in self.modules
            for name, buffer in state.buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self.parameters = [
            parameter
            for state in self.modules
            for parameter in state.parameters.values()
            if parameter is not None
        ]
        self.owned = frozenset(map(id, self.parameters))
        self.flags = [parameter.requires_grad for parameter in self.parameters]
        self.versions = list(map(version_of, self.parameters))
        self.written: set[int] = set()

    def owns(self, tensor: Tensor) -> bool:
        """Says whether a tensor is a parameter of a module that the function reaches."""
        return id(tensor) in self.owned

    def close(self) -> None:
        """Looks at the end of the first run what it moved; drops the copies that nobody needs."""
        states: list[Any] = [*self.buffers, *self.variables]
        for state in states:
            state.close()
        self.written = self._parameters_moved()
        self.versions = list(map(version_of, self.parameters))

    @contextlib.contextmanager
    def restored(self) -> Iterator[set[int]]:
        """Gives all that differs now what it was; yields the storages of scratch parameters.

        What cannot be given again is refused once its module is called: more is reached than runs.
        """
        scratch = _Scratch()
        try:
            lost = self._lost()
            self._restore(scratch)
            norms = [state.module for state in self.modules if is_norm(state.module)]
            with _watched(norms, lost):
                yield scratch.storages
        finally:
            for action in reversed(scratch.undo):
                action()

    def _restore(self, scratch: "_Scratch") -> None:
        holders: list[Any] = [*self.variables, *self.objects]
        for holder in holders:
            holder.restore(scratch)
        for parameter, flag in zip(self.parameters, self.flags, strict=True):
            if parameter.requires_grad != flag:
                scratch.undo.append(functools.partial(parameter.requires_grad_, not flag))
                parameter.requires_grad_(flag)
        moved: dict[nn.Module, dict[str, Tensor]] = {}
        for buffer in self.buffers:
            if buffer.differs:
                moved.setdefault(buffer.module, {})[buffer.name] = buffer.again()
        for state in self.modules:
            state.restore(moved.get(state.module, {}), self.written, scratch)

    def _parameters_moved(self) -> set[int]:
        versions = list(map(version_of, self.parameters))
        if versions == self.versions:
            return set()
        found = zip(self.parameters, versions, self.versions, strict=True)
        return {id(parameter) for parameter, now, before in found if now != before}

    def _lost(self) -> dict[nn.Module, str]:
        """Says what was changed in place since and cannot be given again, module by module."""
        lost: dict[nn.Module, str] = {}
        if changed := self._parameters_moved():
            for state in self.modules:
                for name, parameter in state.parameters.items():
                    if parameter is not None and id(parameter) in changed:
                        named = _named(name, state.module, parameter)
                        lost.setdefault(state.module, f"parameter {named}")
        for buffer in self.buffers:
            if buffer.copy is None and buffer.differs:
                named = _named(buffer.name, buffer.module, buffer.tensor)
                lost.setdefault(buffer.module, f"buffer {named}")
        return lost


class _Scratch:
    """What a second run changes, how to undo it, and the storages of its own parameters.

    `fresh` has the copies of containers that several places share.
    """

    def __init__(self) -> None:
        self.fresh: dict[int, Any] = {}
        self.undo: list[Callable[[], object]] = []
        self.storages: set[int] = set()

    def parameter(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Returns a copy to be written in the place of a parameter."""
        if parameter is None:
            return None
        copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        self.storages.add(copy.untyped_storage()._cdata)
        return copy


class _ModuleState:
    """A module before the first run: attributes, parameters, children, and buffers that matter.

    Those of a norm that only writes its statistics do not.
    """

    __slots__ = ("buffers", "children", "module", "norm", "parameters", "snapshot")

    def __init__(self, module: nn.Module, found: Snapshot, norm: bool) -> None:
        self.module, self.snapshot, self.norm = module, found, norm
        self.parameters = dict(module._parameters)
        self.buffers: dict[str, Tensor | None] = {} if norm else dict(module._buffers)
        self.children = dict(module._modules)

    def restore(self, moved: dict[str, Tensor], written: set[int], scratch: _Scratch) -> None:
        """Gives the module what it had; `moved` are buffers, `written` parameters to be copied."""
        if moved or not written.isdisjoint(map(id, self.parameters.values())) or self._differs():
            self._replace(moved, written, scratch)
        elif self.norm:
            registry: dict[str, Any] = self.module._buffers
            scratch.undo.append(functools.partial(registry.update, dict(registry)))
            registry.update(_scratch_statistics_of(registry))

    def _differs(self) -> bool:
        module = self.module
        return (
            not self.snapshot.holds(module)
            or not _identical(self.parameters, module._parameters)
            or not _identical(self.children, module._modules)
            or (not self.norm and not _identical(self.buffers, module._buffers))
        )

    def _replace(self, moved: dict[str, Tensor], written: set[int], scratch: _Scratch) -> None:
        module = self.module
        now = dict(vars(module))
        scratch.undo.append(functools.partial(_put_back, module, now))
        buffers: dict[str, Any] = dict(module._buffers if self.norm else self.buffers)
        buffers |= moved
        if self.norm:
            buffers |= _scratch_statistics_of(buffers)
        registries = {
            # what a first run initialized it initializes again, to the same values
            "_parameters": {
                name: scratch.parameter(value) if id(value) in written else value
                for name, value in self.parameters.items()
            },
            "_buffers": buffers,
            "_modules": dict(self.children),
        }
        kept = {name: value for name, value in now.items() if name in BOOKKEEPING}
        _put_back(module, kept | self.snapshot.thawed(scratch.fresh) | registries)


class _BufferState:
    """A buffer before the first run, with a copy where it may move.

    Copies of small buffers are shared by all segments for as long as the buffer stays as it is: one
    that does not move it may still find it moved by another when its turn comes again.
    """

    __slots__ = ("copy", "module", "moved", "name", "tensor", "version")

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.version = version_of(tensor)
        self.moved = False
        self.copy: Tensor | None = None
        if tensor.nbytes <= SMALL:
            self.copy = _shared_copy(module, name, tensor)
        elif _moves.get(module, {}).get(name, True):
            self.copy = tensor.detach().clone()

    def close(self) -> None:
        self.moved = version_of(self.tensor) != self.version or self._moves_unseen()
        if self.copy is not None and not self.moved and is_comparable(self.tensor):
            # writes through .data bump no version
            self.moved = not torch.equal(self.copy, self.tensor)
        if self.tensor.nbytes > SMALL:
            known = _moves.setdefault(self.module, {})
            known[self.name] = self.moved or known.get(self.name, False)
            if not self.moved:
                self.copy = None

    @property
    def differs(self) -> bool:
        return self.moved or version_of(self.tensor) != self.version

    def _moves_unseen(self) -> bool:
        """Says whether these may be statistics that a kernel writes without bumping a version."""
        norm = isinstance(self.module, _NormBase) and self.module.training
        return norm and self.name in STATISTICS and not is_comparable(self.tensor)

    def again(self) -> Tensor:
        """Returns the buffer as the first run found it."""
        return self.copy.clone() if self.differs and self.copy is not None else self.tensor


class _VariableState:
    """A variable of a function, before the first run."""

    __slots__ = ("after", "before", "variable")

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self.before = note(variable.read())
        self.after = 0

    def close(self) -> None:
        if isinstance(self.before.value, Tensor):
            self.after = version_of(self.before.value)

    def changed(self) -> bool:
        return not unchanged(self.before, self.variable.read())

    def restore(self, scratch: _Scratch) -> None:
        """Binds the variable to what it was."""
        now = self.variable.read()
        value = self.before.value
        if isinstance(value, Tensor) and version_of(value) != self.after:
            raise RecomputeError(
                f"tensor {self.variable.name!r}, {tuple(value.shape)}, was changed in place after "
                "the forward used it, so the second run cannot repeat the first. Change it after "
                "the backward, or change a copy."
            )
        if self.changed():
            scratch.undo.append(lambda: self.variable.write(now))
            self.variable.write(thaw(self.before, scratch.fresh))


class _ObjectState:
    """The attributes of an object that is no module, before the first run."""

    __slots__ = ("before", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.before = {name: note(part) for name, part in vars(value).items()}

    def changed(self) -> bool:
        now = vars(self.value)
        return now.keys() != self.before.keys() or not all(
            unchanged(noted, now[name]) for name, noted in self.before.items()
        )

    def restore(self, scratch: _Scratch) -> None:
        """Gives the object the attributes that it had."""
        if self.changed():
            scratch.undo.append(functools.partial(_put_back, self.value, dict(vars(self.value))))
            before = {name: thaw(noted, scratch.fresh) for name, noted in self.before.items()}
            _put_back(self.value, before)


_moves: "weakref.WeakKeyDictionary[nn.Module, dict[str, bool]]" = weakref.WeakKeyDictionary()
_Copy = tuple[Any, int, Tensor]
_copies: "weakref.WeakKeyDictionary[nn.Module, dict[str, _Copy]]" = weakref.WeakKeyDictionary()


def _shared_copy(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    copies = _copies.setdefault(module, {})
    known, version, copy = copies.get(name, (None, -1, tensor))
    same = known is not None and known() is tensor and version == version_of(tensor)
    if (
        not same
        or copy.shape != tensor.shape
        or (is_comparable(tensor) and not torch.equal(copy, tensor))
    ):
        copy = tensor.detach().clone()
        copies[name] = weakref.ref(tensor), version_of(tensor), copy
    return copy


def _identical(before: dict[str, Any], now: dict[str, Any]) -> bool:
    same_length = len(before) == len(now)
    return same_length and all(map(is_, before.values(), map(now.get, before)))


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def _scratch_statistics_of(buffers: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: empty(value)
        for name, empty in STATISTICS.items()
        if (value := buffers.get(name)) is not None
    }


def _is_lazy(module: nn.Module) -> bool:
    return any(buffer is not None and is_lazy(buffer) for buffer in module._buffers.values())


def _named(name: str, module: nn.Module, tensor: Tensor) -> str:
    return f"{name!r} of {type(module).__name__}, {tuple(tensor.shape)},"


@contextlib.contextmanager
def _watched(reached: Sequence[nn.Module], lost: Mapping[nn.Module, str]) -> Iterator[None]:
    """Refuses modules whose state is lost; gives norms that were not reached scratch statistics.

    A function may get at modules in ways that reading it does not show, so a forward pre-hook for
    all modules watches. Only modules on this thread are touched.
    """
    replaced: dict[nn.Module, dict[str, Any]] = {module: {} for module in reached}
    thread = threading.get_ident()

    def replace(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != thread:
            return
        if module in lost:
            raise RecomputeError(
                f"{lost[module]} was changed in place after the forward used it, so the second run "
                "cannot repeat the first. Change it after the backward (step the optimizer there); "
                "a buffer that the forward itself moves is copied from the next forward on."
            )
        if module not in replaced and _moves_statistics(module):
            replaced[module] = dict(module._buffers)
            module._buffers.update(_scratch_statistics_of(module._buffers))

    handle = register_module_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
        for module, originals in replaced.items():
            module._buffers.update(originals)


def _moves_statistics(module: nn.Module) -> bool:
    return is_norm(module) and module.training and module._buffers.get("running_mean") is not None
