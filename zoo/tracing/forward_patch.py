"""An instance attribute in place of a module's `forward`, which nothing else of a module shows.

Class, names, hooks, signature and state dict stay. A shallow copy of a module shares the patch of
its original; a pickle or a deep copy has one of its own.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from zoo._torch import SCRIPT_COMPILER, Args, Kwargs, PyTree
from zoo.engine.segments import thread
from zoo.errors import ArgumentError


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is compiled, by `torch.compile` or its own `compile`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class ForwardOfClass:
    """The forward of a class of modules."""

    def __init__(self, owner: type[nn.Module]) -> None:
        self.owner = owner
        # a TorchScript module has its forward on the instance only
        self.forward: Any = inspect.getattr_static(owner, "forward", None)
        self.is_function = isinstance(self.forward, FunctionType)
        # a builtin such as `forward = torch.relu` is not bound
        self.is_bound = hasattr(type(self.forward), "__get__")

    def of(self, module: nn.Module) -> Callable[..., PyTree]:
        """Returns the forward of a module of the class."""
        if isinstance(module, torch.jit.ScriptModule):
            # what its class has is found by this alone
            return module.__getattr__("forward")  # type: ignore[no-any-return]
        if self.is_bound:
            return self.forward.__get__(module, self.owner)  # type: ignore[no-any-return]
        return self.forward  # type: ignore[no-any-return]

    def compiled(self, module: nn.Module) -> Callable[..., PyTree]:
        """Returns the same for code that is compiled: torch 2.11 compiles no `__get__`."""
        return functools.partial(self.forward, module) if self.is_function else self.of(module)


class Patch:
    """A callable in place of a module's forward; `before` is the instance attribute it had."""

    __name__ = "forward"  # as a method has

    def __init__(self, module: nn.Module) -> None:
        # weakly, so that a model is freed without the garbage collector
        self.module: Callable[[], nn.Module] = weakref.ref(module)  # type: ignore[assignment]
        self.before: Any = None
        self.class_forward = ForwardOfClass(type(module))
        # the attributes of the class would hide them
        forward = vars(module).get("forward", self.class_forward.forward)
        self.__doc__, self.__module__ = forward.__doc__, getattr(forward, "__module__", "")

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the original forward, as bound methods do of their function."""
        if "class_forward" not in vars(self):  # a pickle is being loaded
            raise AttributeError(name)
        if sys._getframe(1).f_globals.get("__name__") == SCRIPT_COMPILER:
            raise ArgumentError(
                f"TorchScript compiles the forward of {type(self._living()).__name__} as it is "
                "written, without its plan: call zoo.uncheckpoint before torch.jit.script"
            )
        # the attribute of the function, which does not need the module to be alive
        return getattr(self.class_forward.forward if self.before is None else self.before, name)

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a bound method."""
        return self._living()

    @property
    def __func__(self) -> Callable[..., PyTree]:
        """The function of the original forward, which takes the module first; runs by the plan."""
        is_own = self.before is None and self.class_forward.is_function
        # a forward that is no method has none
        original: Any = self.class_forward.forward if is_own else self.before.__func__

        @functools.wraps(original)
        def forward(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            called: Any = self if module is self.module() else functools.partial(original, module)
            return called(*args, **kwargs)

        return forward

    @property
    def __wrapped__(self) -> Callable[..., PyTree]:
        """The original forward, whose signature this has."""
        return self._original(self._living())

    def _living(self) -> nn.Module:
        """Returns the module; raises ArgumentError if it was freed."""
        module: nn.Module | None = self.module()
        if module is None:
            raise ArgumentError(
                "the module of this forward was freed: a forward with a plan does not keep its "
                "module alive. Keep the model, or call zoo.uncheckpoint before you take its forward"
            )
        return module

    def _original(self, module: nn.Module) -> Callable[..., PyTree]:
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        own, owner = self.class_forward, type(module)
        # made ahead, since compiled code comes here, and the compiler warns of `inspect`
        forward = own if own.owner is owner else ForwardOfClass(owner)
        return forward.compiled(module) if torch.compiler.is_compiling() else forward.of(module)

    def of_copy(self, frame: FrameType) -> Callable[..., PyTree] | None:
        """Returns the original forward if a copy that shares this patch is called; else None.

        `copy.copy` and `nn.DataParallel` copy a module's attributes as they are. Only the frame of
        the module's `__call__` shows which module is called.
        """
        if frame.f_globals.get("__name__") != nn.Module.__module__:
            return None
        called, module = frame.f_locals.get("self"), self.module()
        if called is None or called is module or vars(called).get("forward") is not self:
            return None
        # the patch was assigned as the forward of another kind of module
        is_other = module is not None and type(called) is not type(module)
        return None if is_other else self._original(called)

    @property
    def __code__(self) -> CodeType:
        """The code of the original forward, which `torch.export` reads."""
        return inspect.unwrap(self.__wrapped__).__code__  # type: ignore[no-any-return, attr-defined]

    def install(self) -> None:
        """Installs this as the module's forward."""
        self.before = vars(self.module()).get("forward")
        vars(self.module())["forward"] = self

    def uninstall(self) -> None:
        """Restores the original forward, unless the module or its forward was replaced since."""
        if (module := self.module()) is not None:
            self.uninstall_from(module)

    def uninstall_from(self, module: nn.Module) -> None:
        """Restores the original forward of the module or of a copy of it."""
        if vars(module).get("forward") is self:
            del vars(module)["forward"]
            vars(module).update({} if self.before is None else {"forward": self.before})

    def __getstate__(self) -> dict[str, object]:
        # a function may be no global name
        return vars(self) | {"module": self.module(), "class_forward": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state["module"]
        own = {"module": weakref.ref(module), "class_forward": ForwardOfClass(type(module))}
        vars(self).update(state | own)


class BlockMark(Patch):
    """The forward of a block; tells the conductor where the block begins and ends."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module)
        self.path = path

    @property
    def only_marks(self) -> bool:
        """Whether the module had no other forward than its class."""
        return self.before is None

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the block."""
        forward = self.of_copy(sys._getframe(1)) or self.__wrapped__
        return self._run(forward, args, kwargs)

    def _run(self, forward: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
        conductor = thread.conductor
        if conductor is None:
            return forward(*args, **kwargs)
        conductor.enter(self.path, (*args, *kwargs.values()))
        try:
            return forward(*args, **kwargs)
        finally:
            conductor.leave()
