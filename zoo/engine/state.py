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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from zoo.engine.notes import PLAIN, SMALL, Noted, note, thaw, unchanged, version_of
from zoo.engine.reach import BOOKKEEPING, Reached, Variable
from zoo.errors import RecomputeError

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class State:
    """What a function reaches, as a first run found it."""

    def __init__(self, reached: Reached) -> None:
        self.modules = [_ModuleState(module) for module in reached.modules]
        self.variables = [_VariableState(variable) for variable in reached.variables.values()]
        self.objects = [_ObjectState(value) for value in reached.objects.values()]
        self.parameters = {id(entry[1]) for state in self.modules for entry in state.parameters}

    def owns(self, tensor: Tensor) -> bool:
        """Says whether a tensor is a parameter of a module that the function reaches."""
        return id(tensor) in self.parameters

    def close(self) -> None:
        """Looks at the end of the first run what it moved; drops the copies that nobody needs."""
        states: list[Any] = [*self.modules, *self.variables]
        for state in states:
            state.close()

    @contextlib.contextmanager
    def restored(self) -> Iterator[set[int]]:
        """Gives all that differs now what it was; yields the storages of scratch parameters.

        What cannot be given again is refused once its module is called: more is reached than runs.
        """
        fresh: dict[int, Any] = {}
        undo: list[Any] = []
        scratch: set[int] = set()
        lost: dict[nn.Module, str] = {}
        try:
            holders: list[Any] = [*self.variables, *self.objects]
            for holder in holders:
                holder.restore(fresh, undo)
            for module in self.modules:
                module.restore(fresh, undo, scratch)
                if message := module.lost():
                    lost[module.module] = message
            norms = [state.module for state in self.modules if state.norm]
            with _watched(norms, lost):
                yield scratch
        finally:
            for action in reversed(undo):
                action()


class _ModuleState:
    """A module before the first run: attributes, what they hold, parameters and buffers."""

    __slots__ = (
        "buffers", "module", "names", "norm", "notes", "parameters", "plain", "registries",
        "written",
    )  # fmt: skip

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.norm = module.training and _is_norm(module)
        attributes = vars(module)
        self.names = len(attributes)
        self.plain: dict[str, Any] = {}
        self.notes: dict[str, Noted] = {}
        for name, value in attributes.items():
            if isinstance(value, PLAIN):
                self.plain[name] = value
            elif name not in BOOKKEEPING:
                self.notes[name] = note(value)
        self.registries = [dict(registry) for registry in _registries(module)]
        self.parameters = [
            (name, parameter, parameter.requires_grad, version_of(parameter))
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.written: list[str] = []
        self.buffers: list[_BufferState] = []
        if module._buffers and not self.norm:
            self.buffers = [
                _BufferState(module, name, buffer)
                for name, buffer in module._buffers.items()
                if buffer is not None and not is_lazy(buffer)
            ]

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        found = [(name, value, flag, version_of(value)) for name, value, flag, _ in self.parameters]
        if found != self.parameters:
            pairs = zip(found, self.parameters, strict=True)
            self.written = [now[0] for now, before in pairs if now[3] != before[3]]
            self.parameters = found

    def restore(self, fresh: dict[int, Any], undo: list[Any], scratch: set[int]) -> None:
        for _, parameter, flag, _ in self.parameters:
            if parameter.requires_grad != flag:
                undo.append(functools.partial(parameter.requires_grad_, not flag))
                parameter.requires_grad_(flag)
        if self.differs():
            self._replace(fresh, undo, scratch)
        elif self.norm:
            registry: dict[str, Any] = self.module._buffers
            undo.append(functools.partial(setattr, self.module, "_buffers", registry))
            self.module._buffers = registry | _scratch_statistics_of(registry)

    def lost(self) -> str | None:
        """Says what was changed in place and cannot be given again."""
        for name, value, _, version in self.parameters:
            if version_of(value) != version:
                return f"parameter {_named(name, self.module, value)}"
        for buffer in self.buffers:
            if buffer.copy is None and buffer.differs:
                return f"buffer {_named(buffer.name, self.module, buffer.tensor)}"
        return None

    def differs(self) -> bool:
        """Says whether the module is not what it was, or was moved and will be again."""
        now = vars(self.module)
        return (
            bool(self.written)
            or any(buffer.differs for buffer in self.buffers)
            or len(now) != self.names
            or not all(
                now.get(name) is value or name in BOOKKEEPING or _equal(now.get(name), value)
                for name, value in self.plain.items()
            )
            or not all(unchanged(noted, now.get(name)) for name, noted in self.notes.items())
            or not all(map(_identical, self.registries, _registries(self.module)))
        )

    def _replace(self, fresh: dict[int, Any], undo: list[Any], scratch: set[int]) -> None:
        module = self.module
        now = dict(vars(module))
        undo.append(lambda: _put_back(module, now))
        parameters, buffers, modules = map(dict, self.registries)
        if self.norm:
            buffers |= _scratch_statistics_of(buffers)
        buffers |= {buffer.name: buffer.again() for buffer in self.buffers}
        for name in self.written:
            # what a first run initialized it initializes again, to the same values
            parameters[name] = _scratch_parameter(parameters[name])
            scratch.add(parameters[name].untyped_storage()._cdata)
        kept = {name: value for name, value in now.items() if name in BOOKKEEPING}
        had = {name: value for name, value in self.plain.items() if name not in BOOKKEEPING}
        notes = {name: thaw(noted, fresh) for name, noted in self.notes.items()}
        registries = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
        _put_back(module, kept | had | notes | registries)


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
        self.moved = version_of(self.tensor) != self.version
        if self.copy is not None and not self.moved and _is_comparable(self.tensor):
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

    def restore(self, fresh: dict[int, Any], undo: list[Any]) -> None:
        now = self.variable.read()
        value = self.before.value
        if isinstance(value, Tensor) and version_of(value) != self.after:
            raise RecomputeError(
                f"tensor {self.variable.name!r}, {tuple(value.shape)}, was changed in place after "
                "the forward used it, so the second run cannot repeat the first. Change it after "
                "the backward, or change a copy."
            )
        if self.changed():
            undo.append(lambda: self.variable.write(now))
            self.variable.write(thaw(self.before, fresh))


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

    def restore(self, fresh: dict[int, Any], undo: list[Any]) -> None:
        if self.changed():
            undo.append(functools.partial(_put_back, self.value, dict(vars(self.value))))
            _put_back(self.value, {name: thaw(noted, fresh) for name, noted in self.before.items()})


_moves: "weakref.WeakKeyDictionary[nn.Module, dict[str, bool]]" = weakref.WeakKeyDictionary()
_copies: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


def _shared_copy(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    copies = _copies.setdefault(module, {})
    version, copy = copies.get(name, (-1, tensor))
    same = version == version_of(tensor) and copy.shape == tensor.shape
    if not same or (_is_comparable(tensor) and not torch.equal(copy, tensor)):
        copy = tensor.detach().clone()
        copies[name] = version_of(tensor), copy
    return copy


def _registries(module: nn.Module) -> Sequence[dict[str, Any]]:
    return module._parameters, module._buffers, module._modules


def _identical(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(now[key] is value for key, value in before.items())


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other)


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def _scratch_statistics_of(buffers: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(value)
        for name in STATISTICS
        if (value := buffers.get(name)) is not None
    }


def _scratch_parameter(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _named(name: str, module: nn.Module, tensor: Tensor) -> str:
    return f"{name!r} of {type(module).__name__}, {tuple(tensor.shape)},"


def _is_comparable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.")


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
    return _is_norm(module) and module.training and module._buffers.get("running_mean") is not None
