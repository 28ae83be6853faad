"""What a model is called with, and the properties of it that a plan depends on."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo._torch import (
    Args,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    pytree,
)
from zoo.errors import LONGEST, ArgumentError, ZooError, in_a_line, shortened
from zoo.optimizer.in_backward import attached_to
from zoo.profiling.fake_tensors import NumbersNeeded, as_data
from zoo.profiling.tensor_spec import flattened, tensors_held_by
from zoo.units import shape_text

# of what a model returns, whole, as in loss(model(inputs))
Loss = Callable[[Any], Tensor]
NUMBERS_READ = (
    "It reads a number out of its targets or of what the model returns, which are not known while "
    "planning: compute that number before, as one_hot(targets, classes) wants it, or leave loss= "
    "out"
)
OUTPUTS_ALONE = (
    "It is called with that alone and knows its targets, as lambda logits: cross_entropy(logits, "
    "targets) does; where several sizes are looked at, it makes targets of the size of the outputs"
)
_log = logging.getLogger("zoo")
# the most objects that are searched for tensors in one argument
MOST_OBJECTS = 256
# as many in a title
MOST_SHAPES = 4
# what a user writes for what a model is called with
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
    def of(cls, given: Invocation, model: nn.Module) -> "InputSpec":
        """Describes arguments; values count by their types, objects by the tensors they hold.

        A model of which more is trained, or in another type, is planned for anew; so is one of
        which another part is in training mode, one under another autocast, and one with an
        optimizer in the backward, which frees gradients.
        """
        leaves, tree = flattened((given.args, given.kwargs))
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
        """Returns how many times as large as others these arguments are.

        That is 1 where no size is above theirs, and infinity where they are no such arguments.
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
    found = [module() for module in _modules.get(model, ())]
    if not found or None in found:  # a module is gone
        found = [*model.modules()]
        _modules[model] = [ref(module) for module in found if module is not None]
    return [module for module in found if module is not None]


def _weights_of(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                yield weight


def _state(model: nn.Module) -> tuple[object, ...]:
    """Lists each parameter's type and whether it is trained, and the mode of each module."""
    modules = _modules_of(model)
    weights = tuple((weight.dtype, weight.requires_grad) for weight in _weights_of(modules))
    return weights, tuple(module.training for module in modules)


def needs_gradients(model: nn.Module, given: Invocation) -> bool:
    """Returns whether a parameter of a model, or a tensor among its inputs, needs a gradient."""
    trained = any(weight.requires_grad for weight in _weights_of(_modules_of(model)))
    return trained or any(tensor.requires_grad for tensor in given.tensors)


def _leaf_spec(leaf: PyTree) -> object:
    if isinstance(leaf, Tensor):
        # of devices of a type each rank has another, and all agree on a plan
        return leaf.dtype, leaf.device.type, leaf.requires_grad, leaf.layout
    return type(leaf)


def sizes_hint(given: Invocation) -> str:
    """Returns the way out if inputs hold whole numbers alone, as a shape does; else ''."""
    leaves = pytree.tree_leaves((given.args, given.kwargs))
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


def nothing_trained(model: nn.Module) -> str:
    """Returns the sentence that a model has no training step."""
    return (
        f"the loss of this {type(model).__name__} depends on nothing that requires a gradient, so "
        "that it has no training step; unfreeze a parameter, pass inputs.requires_grad_(), or "
        "loss= where the model returns no loss"
    )


def check_loss(loss: object) -> None:
    """Raises ArgumentError unless a loss is None or can be called."""
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"loss= is a function of what the model returns; got {shortened(loss)}. Write it as "
            "lambda logits: cross_entropy(logits, targets)"
        )


class UnknownTargets(ArgumentError):
    """A loss reads numbers out of targets that have none."""


def with_loss_errors(loss: Loss, device: torch.device) -> Loss:
    """Returns a loss that takes targets on meta, which become zeros, and whose failures say so.

    They are ArgumentErrors: it does not take what the model returns, or returns no scalar.
    """
    name = _name(loss)

    def explained_loss(outputs: PyTree) -> Tensor:
        targets = _ZerosForMeta(device)
        try:
            with targets:
                found = loss(outputs)
        except NumbersNeeded:
            if not targets.zeros:
                raise
            raise UnknownTargets(f"loss={name} has targets on meta. {NUMBERS_READ}") from None
        except (ZooError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reads = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            raise ArgumentError(
                f"loss={name} fails on what the model returns, {_shape(outputs)} "
                f"({type(error).__name__}: {str(error).strip(' .')}). "
                f"{NUMBERS_READ if reads else OUTPUTS_ALONE}"
            ) from error
        return checked_loss(loss, found)

    return explained_loss


def _name(loss: Loss) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def checked_loss(loss: Loss, found: object) -> Tensor:
    """Returns what a loss returned; raises ArgumentError unless it is a tensor of one element."""
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ArgumentError(
            f"loss={_name(loss)} returned {_shape(found)}; return a tensor of one element"
        )
    return found


class _ZerosForMeta(TorchFunctionMode):
    """Hands functions zeros on a device for meta tensors, the same each time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        # a tensor stays alive beside its zeros, so that no other gets its id
        self.zeros: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if self.device.type != "meta":
            args, kwargs = pytree.tree_map_only(Tensor, self._zeros, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _zeros(self, value: Tensor) -> Tensor:
        if value.device.type != "meta" or isinstance(value, nn.Parameter):
            return value
        if id(value) not in self.zeros:
            zeros = as_data(torch.zeros_like(value, device=self.device))
            self.zeros[id(value)] = value, zeros
        return self.zeros[id(value)][1]


def _shape(value: object) -> str:
    """Describes a value: 'a tensor of shape (8, 5)', 'tuple (a tensor of shape (), dict)'."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = f" ({', '.join(map(_shape, value))})" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{parts}"


def title_of(model: nn.Module, inputs: Iterable[Tensor]) -> str:
    """Names a model and its first inputs of several numbers: 'ResNet on 8×3×224×224'."""
    shapes = [shape_text(v.shape) for v in inputs if v.ndim and v.numel()]
    more = f" and {len(shapes) - MOST_SHAPES} more" if len(shapes) > MOST_SHAPES else ""
    mode = "" if model.training else " in eval mode"
    return f"{type(model).__name__}{mode} on {', '.join(shapes[:MOST_SHAPES])}{more}"


def own_loss(outputs: PyTree) -> PyTree:
    """Returns the loss among named outputs, where transformers put it for labels; None if none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else None
