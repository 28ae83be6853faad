"""Inputs and outputs of any structure, views and writes in place, modules used in many places."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.training import Call, assert_exact, gradients, net, pictures, rows, state_of


@dataclasses.dataclass
class Output:
    """As ModelOutput of transformers, without its registration."""

    logits: Tensor
    name: str = "output"
    more: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Any


def make(kind: str, y: Tensor) -> Any:
    hidden = y.sin()
    kinds = {
        "dict": {"y": y, "inner": {"h": hidden}},
        "dataclass": Output(y, more=[hidden]),
        "named tuple": Pair(y, hidden),
        "mixed": (y, None, 3, "text", 2.5, torch.float32, [hidden], {"empty": ()}),
        "no gradient": (y, hidden.detach(), y.argmax(1), y > 0, torch.Size([2])),
        "same twice": (y, y, [y]),
        "views": (y[0], y.t(), y.view(-1)[2:], y.unbind(1), y.chunk(2)),
    }
    return kinds[kind]


KINDS = ["dict", "dataclass", "named tuple", "mixed", "no gradient", "same twice", "views"]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_structure(kind: str) -> None:
    """fairscale#802, pytorch#52422, pytorch#7617; also which outputs need a gradient."""

    def program(call: Call) -> Any:
        model, (x,) = net(nn.BatchNorm1d(4), nn.Dropout(0.3)), rows()
        output = call(lambda x: make(kind, model(x)), x)
        loss = sum(((number + 1) * y.sin()).sum() for number, y in enumerate(needing(output)))
        loss.backward()
        return output, type(output).__name__, x.grad, state_of(model)

    assert_exact(program)


def needing(value: Any) -> list[Tensor]:
    """Lists the tensors with a gradient in a structure."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if dataclasses.is_dataclass(value):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, dict | list | tuple)
    return [found for part in parts for found in needing(part)] if is_container else []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no gradient"])
def test_inputs_of_every_structure(kind: str) -> None:
    """dicts, dataclasses, keyword arguments | no gradients, if reentrant | exact

    pytorch#121212: tensors in lists, dicts, dataclasses, as keywords, that need a gradient.
    """

    def function(*values: Any, extra: Any) -> Tensor:
        total = sum((number + 1) * y.exp().sum() for number, y in enumerate(needing([*values])))
        return (total + extra[0].exp().sum()).sin()

    def program(call: Call) -> Any:
        (x,), (extra,) = rows(), rows()
        value = make(kind, x * 0.1)
        call(function, value, "text", None, 3, extra=[extra * 0.1]).backward()
        return x.grad, extra.grad

    assert_exact(program)


def test_inputs_that_need_no_gradient() -> None:
    """inputs that require no gradient | none at all, if reentrant | exact

    transformers#21381, transformers#23170, pytorch#7617, pytorch#33962: the first block.
    """

    def program(call: Call) -> Any:
        model = net(nn.Dropout(0.3))
        output = call(model, torch.randn(6, 4))
        output.square().sum().backward()
        return output, gradients(model)

    assert_exact(program)


def test_the_caller_appends_to_the_list_that_it_passed() -> None:
    """a list that grows after the call (DenseNet) | wrong gradients | exact

    torchvision's _DenseBlock: what reads the list later sees the longer one.
    """

    def program(call: Call) -> Any:
        layers = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(4 * n), nn.Linear(4 * n, 4))
                                for n in (1, 2, 3)])  # fmt: skip
        features = rows()
        for layer in layers:
            features.append(call(lambda xs, layer=layer: layer(torch.cat(xs, 1)).tanh(), features))
        torch.cat(features, 1).square().sum().backward()
        return features[0].grad, state_of(layers)

    assert_exact(program)


def test_the_function_appends_to_the_list_that_it_got() -> None:
    """As in plain training it is appended to once."""

    def function(values: list[Tensor], found: dict[str, Tensor]) -> Tensor:
        values.append(values[-1].sin())
        found[str(len(found))] = values[-1].exp()
        return torch.stack([*values, *found.values()]).prod(0).sin()

    def program(call: Call) -> Any:
        values, found = rows(), {}
        call(function, values, found).sum().backward()
        return values[0].grad, len(values), list(found)

    assert_exact(program)


WRITES = [torch.relu_, lambda y: y.zero_(), torch.abs_, lambda y: y.mul_(2), lambda y: y.exp_()]


@pytest.mark.parametrize("write", WRITES)
def test_a_segment_that_starts_with_a_write(write: Callable[[Tensor], Tensor]) -> None:
    """a segment that starts with an in-place ReLU | raises | exact

    ColossalAI#1460, preactivation: an in-place ReLU overwrites the saved input.

    A second `mul_(2)` would give another number, and a second `abs_` another sign.
    """

    def program(call: Call) -> Any:
        layer, last, (x,) = nn.Linear(4, 4), nn.Linear(4, 4), rows()
        y = layer(x * 0.1)
        output = call(lambda y: last(write(y)).sin(), y)
        (output.sum() + y.sum()).backward()
        return output, y, x.grad, state_of(layer), state_of(last)

    assert_exact(program)


@pytest.mark.parametrize("write", [Tensor.t_, lambda x: x.unsqueeze_(0)])
def test_an_input_whose_geometry_is_changed_in_place(write: Callable[[Tensor], Tensor]) -> None:
    """It counts as a version, after which the tensor lies otherwise than when it was read."""

    def program(call: Call) -> Any:
        y, (x,) = torch.rand(80, 80), rows(80)
        return call(lambda x: (x.sum(1) + y, write(y))[0].tanh(), x).sum().backward(), x.grad, y

    assert_exact(program)


def test_a_write_through_a_view() -> None:
    """writes through views | raises | exact

    Two inputs that share memory: the function writes one and reads the other.
    """

    def function(y: Tensor, first: Tensor) -> Tensor:
        torch.relu_(first)
        return (y.sin() * 2).exp()

    def program(call: Call) -> Any:
        (x,) = rows()
        y = x * 0.5
        call(function, y, y.view(-1)[:8]).sum().backward()
        return x.grad, y

    assert_exact(program)


@pytest.mark.parametrize(
    "function", [lambda y: torch.tanh(y + 1) + y.relu_(), torch.abs_, nn.ReLU6(inplace=True)]
)
def test_an_input_read_before_it_is_written(function: Any) -> None:
    """an input read, then written | raises | exact

    What was read before the write is what the gradient needs.
    """

    def program(call: Call) -> Any:
        (x,) = rows()
        y = x * 0.5
        call(function, y).sum().backward()
        return x.grad, y

    assert_exact(program)


def test_writes_in_place_to_outputs_and_inside() -> None:
    """Outputs of a reentrant segment are views of a custom function and cannot be written."""

    def program(call: Call) -> Any:
        model, (x,) = (
            net(nn.Linear(4, 4), nn.ReLU(True), nn.Linear(4, 4), nn.ELU(inplace=True)),
            rows(),
        )
        y = call(lambda x: model(x).clone(), x)
        y += x[:, :3]
        y[0].mul_(3)
        torch.relu_(y)
        y.square().sum().backward()
        return y, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda x: x.view(-1), lambda x: x[1:], lambda x: (x, x.sin(), x[0])]
)
def test_outputs_that_alias_inputs(function: Callable[[Tensor], Any]) -> None:
    """outputs that are inputs or their views | not writable, if reentrant | exact

    The input itself, a view of it, and both beside a new tensor.
    """

    def program(call: Call) -> Any:
        (x,) = rows()
        y = x * 2
        output = call(function, y)
        values = output if isinstance(output, tuple) else (output,)
        sum((n + 1) * value.exp().sum() for n, value in enumerate(values)).sin().backward()
        shared = [value.untyped_storage()._cdata == y.untyped_storage()._cdata for value in values]
        return x.grad, shared, [value is y for value in values]

    assert_exact(program)


def test_the_format_of_memory() -> None:
    """`channels_last` | exact | exact, strides too

    channels_last inputs: outputs and gradients keep their strides; also strided inputs.
    """

    def program(call: Call) -> Any:
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
        model.to(memory_format=torch.channels_last)
        (x,) = pictures()
        y = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        output = call(model, y)
        output.square().mean().backward()
        strided = call(model, x.transpose(2, 3)[:, :, ::2].expand(3, 4, 3, 5))
        strided.square().mean().backward()
        return output, y.grad, strided, x.grad, state_of(model)

    assert_exact(program)


def test_sparse_gradients() -> None:
    """Guard: nn.Embedding(sparse=True) in the segment."""

    def program(call: Call) -> Any:
        embedding, layer = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)
        words = torch.randint(9, (3, 5))
        call(lambda words: layer(embedding(words).sin()).exp(), words).sum().backward()
        gradient = embedding.weight.grad
        return gradient.is_sparse, gradient.coalesce().to_dense(), state_of(layer)

    assert_exact(program)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(4),
    lambda: nn.Dropout(0.4),
    lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_a_module_used_several_times(segments: int, layer: Callable[[], nn.Module]) -> None:
    """a module used twice, tied weights | state updated too often | exact

    Twice in one segment, in two segments, and in and outside of one; state moves each time.
    """

    def program(call: Call) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), layer())
        (x,) = rows()
        for _ in range(2):
            twice = (lambda x: model(model(x))) if segments == 1 else model
            y = call(twice, x if segments == 1 else call(model, x))
            y = model(y) if segments == 3 else y
            y.square().sum().backward()
        return y, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("fires", ["hook", "accumulate"])
def test_tied_weights_and_the_hooks_of_their_gradient(fires: str) -> None:
    """pytorch#81296: a weight in two segments and outside; its hooks fire once."""

    def program(call: Call) -> Any:
        first, second, (x,) = nn.Linear(4, 4), nn.Linear(4, 4), rows()
        second.weight = first.weight
        found: list[Tensor] = []
        if fires == "hook":
            first.weight.register_hook(lambda gradient: found.append(gradient.clone()))
        else:
            first.weight.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))
        y = call(lambda x: torch.tanh(first(x)), x)
        y = call(lambda y: torch.tanh(second(y)) * first(y), y) @ first.weight
        y.square().sum().backward()
        return found, x.grad, state_of(first), state_of(second)

    assert_exact(program)
