"""What stands in a module's `forward`: an instance attribute that can be taken back."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

NAME = "forward"


class Instead:
    """A callable in the place of a module's forward; `before` is an instance attribute it had."""

    __slots__ = ("__weakref__", "_module", "before")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.before: Any = vars(module).get(NAME)

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None, "its forward is part of the module"
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the module had."""
        return self._bound(self.before)

    @property
    def written(self) -> Callable[..., Any]:
        """The forward that the module has where no plan is in force."""
        before = self.before
        while isinstance(before, Instead):
            before = before.before
        return self._bound(before)

    def _bound(self, before: Any) -> Callable[..., Any]:
        """Returns a forward of the module's own, or that of its class where it has none."""
        return type(self.module).forward.__get__(self.module) if before is None else before  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def put(self) -> None:
        """Takes its place."""
        vars(self.module)[NAME] = self

    def take_back(self) -> None:
        """Gives the module the forward that it had."""
        attributes = vars(self.module)
        if self.before is None:
            attributes.pop(NAME, None)
        else:
            attributes[NAME] = self.before
