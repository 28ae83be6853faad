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
scratch will do (`norms`). Copies of other buffers are made where they may move (`buffers`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from zoo.engine.buffers import BufferState
from zoo.engine.compiled import uncompiled
from zoo.engine.leaves import no_new_hooks
from zoo.engine.norms import has_lazy_buffers, is_norm, moves_statistics, scratch_statistics_of
from zoo.engine.notes import note, thaw, unchanged, version_of
from zoo.engine.reach import Reached, Variable
from zoo.engine.sharded import Sharded
from zoo.engine.snapshot import BOOKKEEPING, Snapshot
from zoo.engine.writes import check_repeated, copies_of, learn
from zoo.errors import RecomputeError

_Written = Mapping[int, Tensor | None]


class State:
    """What a function reaches, as a first run found it."""

    def __init__(self, reached: Reached) -> None:
        read = {*reached.modules} if reached.statistics else {*reached.hooked}
        self.sharded = Sharded(reached.modules)
        self.modules = [
            _ModuleState(
                module,
                found,
                norm=found.norm and (module not in read or has_lazy_buffers(module)),
                exchanged=module in self.sharded.parts,
            )
            for module, found in reached.modules.items()
        ]
        self.variables = [_VariableState(variable) for variable in reached.variables.values()]
        self.objects = [_ObjectState(value) for value in reached.objects.values()]
        self.buffers = [
            BufferState(state.module, name, buffer)
            for state in self.modules
            for name, buffer in state.buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self.places = [
            (state.module, name, parameter)
            for state in self.modules
            for name, parameter in state.parameters.items()
            if parameter is not None
        ]
        self.parameters = [parameter for _, _, parameter in self.places]
        self.owned = frozenset(map(id, self.parameters))
        self.flags = [parameter.requires_grad for parameter in self.parameters]
        self.versions = list(map(version_of, self.parameters))
        self.copies = {} if self.sharded.parts else copies_of(self.places)
        self.written: dict[int, Tensor | None] = {}
        self.repeats = False

    def owns(self, tensor: Tensor) -> bool:
        """Says whether a tensor is a parameter of a module that the function reaches."""
        return id(tensor) in self.owned

    def close(self) -> None:
        """Looks at the end of the first run what it moved; drops the copies that nobody needs."""
        states: list[Any] = [*self.buffers, *self.variables]
        for state in states:
            state.close()
        written = self._parameters_moved()
        if written or self.copies:
            learn(self.places, written)
        self.written = {key: self.copies.get(key) for key in written}
        self.copies = {}
        self.versions = list(map(version_of, self.parameters))

    @contextlib.contextmanager
    def restored(self) -> Iterator[set[int]]:
        """Gives all that differs now what it was; yields the storages of scratch tensors.

        What cannot be given again is refused once its module is called: more is reached than runs.
        """
        scratch = _Scratch()
        try:
            lost = self._lost()
            self._restore(scratch)
            modules = [state.module for state in self.modules]
            self.repeats = bool(scratch.repeated)
            with _watched(modules, lost, scratch.storages), no_new_hooks(self._tensors()):
                yield scratch.storages
        finally:
            for action in reversed(scratch.undo):
                action()
            check_repeated(scratch.repeated)

    def _tensors(self) -> list[Tensor]:
        found = (state.variable.read() for state in self.variables)
        return [*self.parameters, *(value for value in found if isinstance(value, Tensor))]

    def must_end(self) -> bool:
        """Says whether a second run must not stop here, or at all before its end."""
        return self.repeats or self.sharded.is_between_hooks()

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
            for module, name, parameter in self.places:
                if id(parameter) in changed:
                    lost.setdefault(module, f"parameter {_named(name, module, parameter)}")
        for buffer in self.buffers:
            if buffer.is_lost:
                named = _named(buffer.name, buffer.module, buffer.tensor)
                lost.setdefault(buffer.module, f"buffer {named}")
        return lost


class _Scratch:
    """What a second run changes, how to undo it, and the storages of its own tensors.

    `fresh` has the copies of containers that several places share; `repeated` the parameters that
    the first run wrote and their copies, where what they were is not known.
    """

    def __init__(self) -> None:
        self.fresh: dict[int, Any] = {}
        self.undo: list[Callable[[], object]] = []
        self.storages: set[int] = set()
        self.repeated: list[tuple[nn.Parameter, Tensor]] = []

    def parameter(self, parameter: nn.Parameter, before: Tensor | None) -> nn.Parameter:
        """Returns a copy to be written in the place of a parameter."""
        value = parameter.detach() if before is None else before
        copy = nn.Parameter(value.clone(), parameter.requires_grad)
        self.storages.add(copy.untyped_storage()._cdata)
        if before is None:
            self.repeated.append((parameter, copy))
        return copy

    def statistics_of(self, buffers: dict[str, Any]) -> dict[str, Tensor]:
        """Returns scratch statistics to be written."""
        return _noted(scratch_statistics_of(buffers), self.storages)


class _ModuleState:
    """A module before the first run: attributes, parameters, children, and buffers that matter.

    Those of a norm that only writes its statistics do not. Parameters that torch's hooks exchange
    are left to them.
    """

    __slots__ = ("buffers", "children", "exchanged", "module", "norm", "parameters", "snapshot")

    def __init__(self, module: nn.Module, found: Snapshot, *, norm: bool, exchanged: bool) -> None:
        self.module, self.snapshot = module, found
        self.norm, self.exchanged = norm, exchanged
        self.parameters = dict(module._parameters)
        self.buffers: dict[str, Tensor | None] = {} if norm else dict(module._buffers)
        self.children = dict(module._modules)

    def restore(self, moved: dict[str, Tensor], written: _Written, scratch: _Scratch) -> None:
        """Gives the module what it had; `moved` are buffers, `written` parameters to be copied."""
        if moved or self._is_among(written) or self._differs():
            self._replace(moved, written, scratch)
        elif self.norm:
            registry: dict[str, Any] = self.module._buffers
            scratch.undo.append(functools.partial(registry.update, dict(registry)))
            registry.update(scratch.statistics_of(registry))

    def _differs(self) -> bool:
        module = self.module
        return (
            not self.snapshot.holds(module)
            or not (self.exchanged or _identical(self.parameters, module._parameters))
            or not _identical(self.children, module._modules)
            or (not self.norm and not _identical(self.buffers, module._buffers))
        )

    def _replace(self, moved: dict[str, Tensor], written: _Written, scratch: _Scratch) -> None:
        module = self.module
        now = dict(vars(module))
        scratch.undo.append(functools.partial(_put_back, module, now))
        buffers: dict[str, Any] = dict(module._buffers if self.norm else self.buffers)
        buffers |= moved
        if self.norm:
            buffers |= scratch.statistics_of(buffers)
        registries = {
            "_parameters": self._parameters_again(written, scratch),
            "_buffers": buffers,
            "_modules": dict(self.children),
        }
        kept = {name: value for name, value in now.items() if name in BOOKKEEPING}
        _put_back(module, kept | self.snapshot.thawed(scratch.fresh) | registries)

    def _parameters_again(self, written: _Written, scratch: _Scratch) -> Any:
        if self.exchanged:
            return self.module._parameters
        # what a first run initialized it initializes again, to the same values
        return {
            name: scratch.parameter(value, written[id(value)])
            if value is not None and id(value) in written
            else value
            for name, value in self.parameters.items()
        }

    def _is_among(self, written: _Written) -> bool:
        return bool(written) and any(id(value) in written for value in self.parameters.values())


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


def _identical(before: dict[str, Any], now: dict[str, Any]) -> bool:
    same_length = len(before) == len(now)
    return same_length and all(map(is_, before.values(), map(now.get, before)))


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def _named(name: str, module: nn.Module, tensor: Tensor) -> str:
    return f"{name!r} of {type(module).__name__}, {tuple(tensor.shape)},"


def _noted(tensors: dict[str, Tensor], storages: set[int]) -> dict[str, Tensor]:
    storages.update(tensor.untyped_storage()._cdata for tensor in tensors.values())
    return tensors


@contextlib.contextmanager
def _watched(
    reached: Sequence[nn.Module], lost: Mapping[nn.Module, str], storages: set[int]
) -> Iterator[None]:
    """Refuses modules whose state is lost; gives norms that were not reached scratch statistics.

    A function may get at modules in ways that reading it does not show, so a forward pre-hook for
    all modules watches. Only modules on this thread are touched.
    """
    replaced: dict[nn.Module, dict[str, Any]] = {m: {} for m in reached if is_norm(m)}
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
        if module not in replaced and moves_statistics(module):
            replaced[module] = dict(module._buffers)
            module._buffers.update(_noted(scratch_statistics_of(module._buffers), storages))

    # the compiler would also take a hook that is called next to a block that it compiled
    is_compiled = any(module._compiled_call_impl is not None for module in reached)
    handle = register_module_forward_pre_hook(uncompiled(replace) if is_compiled else replace)
    try:
        yield
    finally:
        handle.remove()
        for module, originals in replaced.items():
            module._buffers.update(originals)
