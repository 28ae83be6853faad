"""Parameters that a forward writes itself: clipped weights, an averaged teacher.

A second run needs what they were. A copy is made of frozen ones until a first run has left them
alone, and of all that were ever written. One that needs gradients is written for the first time
without a copy: then the second run starts from what the first left, and is right if it leaves the
same again, as clipping does. Else it is refused, and from the next forward on there is a copy.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoo.engine.sample import same_values
from zoo.errors import RecomputeError

Place = tuple[nn.Module, str, nn.Parameter]
_known: "weakref.WeakKeyDictionary[nn.Module, dict[str, bool]]" = weakref.WeakKeyDictionary()


def copies_of(places: Iterable[Place]) -> dict[int, Tensor]:
    """Returns copies of the parameters that may be written, by their identity."""
    return {
        id(parameter): parameter.detach().clone()
        for module, name, parameter in places
        if _may_be_written(module, name, parameter)
    }


def _may_be_written(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    known = _known.get(module) if _known else None
    if known is None or name not in known:
        return not parameter.requires_grad and not is_lazy(parameter)
    return known[name]


def learn(places: Iterable[Place], written: set[int]) -> None:
    """Remembers which of these a first run wrote."""
    for module, name, parameter in places:
        if not parameter.requires_grad or id(parameter) in written:
            known = _known.setdefault(module, {})
            known[name] = known.get(name, False) or id(parameter) in written


def check_repeated(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Refuses a second run that changed what the first had left of a parameter.

    Raises:
        RecomputeError: with its shape.
    """
    for parameter, copy in pairs:
        if not same_values(parameter, copy):
            raise RecomputeError(
                f"a parameter {tuple(parameter.shape)} is written in place by the forward itself, "
                "and a second run writes something else, so it cannot repeat the first. From the "
                "next forward on it is copied before; call the forward once under no_grad to "
                "begin with, or write the parameter outside."
            )
