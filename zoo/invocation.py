"""The arguments of a model's call, and properties of the model that a plan depends on."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from zoo._torch import Args, FakeTensorMode, Kwargs, PyTree, pytree
from zoo.errors import LONGEST, ArgumentError, ZooError, in_a_line, shortened
from zoo.optimizer.in_backward import attached_to
from zoo.profiling.tensor_spec import flattened, tensors_held_by
from zoo.units import shape_text

_log = logging.getLogger("zoo")
# the most objects that are searched for tensors in one argument
MOST_OBJECTS = 256
# the most shapes in a title
MOST_SHAPES = 4
# the forms in which a user passes a model's arguments
Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Invocation:
    """The arguments of one call of a model."""

    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: PyTree) -> "Invocation":
        """Reads a tensor, a tuple or list of arguments, or a mapping of keyword arguments.

        Raises:
            ArgumentError: it is none of these.
        """
        if isinstance(inputs, Invocation):
            return inputs
        if isinstance(inputs, Mapping):
            return cls(kwargs=dict(inputs))
        if isinstance(inputs, Tensor | tuple | list):
            return cls((inputs,) if isinstance(inputs, Tensor) else tuple(inputs))
        raise ArgumentError(
            "a model's inputs are a tensor, a tuple of arguments or a dict of keyword arguments; "
            f"got {type(inputs).__name__}"
        )

    def on(self, model: Callable[..., PyTree]) -> PyTree:
        """Calls a model and returns what it returns."""
        return model(*self.args, **self.kwargs)

    def taken_by(self, model: nn.Module) -> PyTree:
        """Calls a model; what it raises becomes ArgumentError, but for zoo's and lack of memory."""
        try:
            return self.on(model)
        except (ZooError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ArgumentError(
                f"{type(model).__name__} does not take these inputs: {in_a_line(error, LONGEST)}"
                f"{sizes_hint(self)}"
            ) from error

    def map(self, function: Callable[[Tensor], Tensor]) -> "Invocation":
        """Returns the same arguments with other tensors."""
        leaves, tree = flattened((self.args, self.kwargs))
        others = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Invocation(*pytree.tree_unflatten(others, tree))

    def without_data(self) -> "Invocation":
        """Returns fake tensors on the same devices for the tensors, and nothing else."""
        mode = FakeTensorMode()
        return Invocation(tuple(fake_at(mode, tensor, tensor.device) for tensor in self.tensors))

    def resized(self, sizes: Iterable[Sequence[int]]) -> "Invocation":
        """Returns the same arguments with fake tensors of other sizes, on the same devices."""
        shapes, mode = iter(sizes), FakeTensorMode()

        def fake(tensor: Tensor) -> Tensor:
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            sized = torch.empty_permuted(next(shapes), order, dtype=tensor.dtype, device="meta")
            return fake_at(mode, sized.requires_grad_(tensor.requires_grad), tensor.device)

        return self.map(fake)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        leaves, _ = flattened((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def fake_at(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """Makes a fake tensor on a device, of the sizes of one on meta."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


class InputSpec(NamedTuple):
    """The structure and the sizes of the arguments of a call: what a plan is made for."""

    structure: object
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, invocation: Invocation, model: nn.Module) -> "InputSpec":
        """Describes arguments; values count by their types, objects by the tensors they hold.

        Part of the structure, so that a change needs a new plan: dtypes, trained parameters and
        training modes of the model, autocast, and an optimizer in the backward.
        """
        leaves, tree = flattened((invocation.args, invocation.kwargs))
        tensors = [tensor for leaf in leaves for tensor in tensors_held_by(leaf, MOST_OBJECTS)]
        sizes = tuple((t.numel(),) if t.is_nested else tuple(t.shape) for t in tensors)
        autocast = tuple(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in sorted({device_of(model).type, *(t.device.type for t in tensors)})
            if torch.amp.is_autocast_available(device)
        )
        in_backward = attached_to(model.parameters()) is not None
        around = *_state(model), autocast, in_backward
        return cls((str(tree), *map(_leaf_spec, leaves), *around), sizes)

    def growth_over(self, other: "InputSpec") -> float:
        """Returns the factor, at least 1, by which these arguments are larger than others.

        It is infinite if the structures differ.
        """
        sizes = [*zip(self.sizes, other.sizes, strict=False)]
        is_like = [*map(len, self.sizes)] == [*map(len, other.sizes)]
        if self.structure != other.structure or not is_like:
            return math.inf
        growths = ([max(1.0, a / max(b, 1)) for a, b in zip(*pair, strict=True)] for pair in sizes)
        return max(map(math.prod, growths), default=1.0)

    @property
    def elements(self) -> int:
        """How many elements the tensors have."""
        return sum(map(math.prod, self.sizes))


# nn.Module.modules() takes 10 ms for a thousand layers, in each forward
_modules: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """Lists a model's modules, itself first."""
    modules = [module() for module in _modules.get(model, ())]
    if not modules or None in modules:  # a module is gone
        modules = [*model.modules()]
        _modules[model] = [ref(module) for module in modules if module is not None]
    return [module for module in modules if module is not None]


def weights_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields a model's parameters, shared ones more than once."""
    for module in _modules_of(model):
        for weight in module._parameters.values():
            if weight is not None:
                yield weight


def _state(model: nn.Module) -> tuple[object, ...]:
    """Lists each parameter's type and whether it is trained, and the mode of each module."""
    modules = _modules_of(model)
    weights = tuple((weight.dtype, weight.requires_grad) for weight in weights_of(model))
    return weights, tuple(module.training for module in modules)


def needs_gradients(model: nn.Module, invocation: Invocation) -> bool:
    """Returns whether a parameter of a model, or a tensor among its inputs, needs a gradient."""
    trained = any(weight.requires_grad for weight in weights_of(model))
    return trained or any(tensor.requires_grad for tensor in invocation.tensors)


def _leaf_spec(leaf: PyTree) -> object:
    if isinstance(leaf, Tensor):
        # not the index of the device, since all ranks agree on a plan
        return leaf.dtype, leaf.device.type, leaf.requires_grad, leaf.layout
    return type(leaf)


def sizes_hint(invocation: Invocation) -> str:
    """Returns a hint if inputs hold only whole numbers, as a shape does; else ''."""
    leaves = pytree.tree_leaves((invocation.args, invocation.kwargs))
    if not leaves or not all(type(leaf) is int for leaf in leaves):
        return ""
    shape = ", ".join(map(str, leaves[:8]))
    return (
        ". These inputs are whole numbers; for a tensor of this shape pass "
        f"torch.empty({shape}, device='meta')"
    )


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def kernel_device(model: nn.Module) -> torch.device:
    """Returns the device whose kernels a model is planned by: its own, or the CPU's for meta.

    Meta tensors run other kernels for attention and LSTMs than any device does.
    """
    device = device_of(model)
    return torch.device("cpu") if device.type == "meta" else device


def check_module(model: object, what: str) -> None:
    """Raises ArgumentError unless a model is a module; `what` needs one."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{what} needs a torch.nn.Module; got {type(model).__name__}")


def check_step(model: nn.Module, what: str, loss: object = None) -> None:
    """Raises ArgumentError unless a model is a module, and a loss a function; warns of eval mode.

    A model in eval mode is taken as it is, since gradients may flow through it all the same.
    """
    check_loss(loss)
    check_module(model, what)
    if not model.training:
        _log.warning(
            "this %s is in eval mode, and %s is for a step in that mode: norms use their running "
            "statistics, dropout does nothing. For a step in training mode call model.train() "
            "first",
            type(model).__name__,
            what,
        )


def check_loss(loss: object) -> None:
    """Raises ArgumentError unless a loss is None or can be called."""
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"loss= is a function of what the model returns; got {shortened(loss)}. Write it as "
            "lambda logits: cross_entropy(logits, targets)"
        )


def title_of(model: nn.Module, inputs: Iterable[Tensor]) -> str:
    """Names a model and its first inputs of several numbers: 'ResNet on 8×3×224×224'."""
    shapes = [shape_text(v.shape) for v in inputs if v.ndim and v.numel()]
    more = f" and {len(shapes) - MOST_SHAPES} more" if len(shapes) > MOST_SHAPES else ""
    mode = "" if model.training else " in eval mode"
    return f"{type(model).__name__}{mode} on {', '.join(shapes[:MOST_SHAPES])}{more}"
