"""The base of all models: weights are loaded all or nothing, under other libraries' names, too."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from zoo.errors import WeightsError, nearest


class Model(nn.Module):
    """A module of the catalog.

    Attributes:
        renames: parts of another library's parameter names, as regular expressions, and of ours;
            applied in this order.
        block_patterns: paths of the modules of which each call begins a block of the model, with
            `*` for any name; without them the blocks are found by their classes.
    """

    renames: ClassVar[Mapping[str, str]] = {}
    # not `blocks`, which would hide a module of this name
    block_patterns: ClassVar[tuple[str, ...]] = ()

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames the keys of another library's weights for this model, by `renames`, if any."""
        names = {key: key for key in state_dict}
        for theirs, ours in self.renames.items():
            names = {key: re.sub(theirs, ours, name) for key, name in names.items()}
        return {names[key]: v for key, v in state_dict.items()} if self.renames else state_dict

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights as `nn.Module` does, but loads all or nothing.

        Raises:
            WeightsError: keys are missing, unknown or of another shape; the model is unchanged.
        """
        if isinstance(state_dict, Mapping):
            state_dict = self.translate(state_dict)
        check_weights(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def check_weights(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Raises WeightsError, before anything is loaded, when a state dict does not fit a model."""
    if not isinstance(state_dict, Mapping):
        raise WeightsError(f"a state dict maps names to tensors; got {type(state_dict).__name__}")
    own = model.state_dict()
    missing = sorted(own.keys() - state_dict.keys()) if strict else []
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    unknown = sorted(state_dict.keys() - own.keys()) if strict else []
    shapes, others = [], []
    for key, value in state_dict.items():
        wanted = own.get(key)
        if isinstance(wanted, Tensor) and not isinstance(value, Tensor):
            others.append(f"{key} ({type(value).__name__})")
        elif isinstance(wanted, Tensor) and value.shape != wanted.shape:
            shapes.append(f"{key} {tuple(value.shape)} instead of {tuple(wanted.shape)}")
    kinds = "missing", "unknown", "of another shape", "no tensor"
    faults = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
        for what, keys in zip(kinds, (missing, unknown, shapes, others), strict=True)
        if keys
    ]
    if faults:
        hint = nearest(unknown[0], missing) if unknown and missing else ""
        raise WeightsError(
            f"these weights do not fit {type(model).__name__}: {'; '.join(faults)}.{hint} "
            "Nothing was loaded."
        )
