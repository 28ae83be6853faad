"""What every family keeps to: steps write no inputs, copies are independent, shapes are enough."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from zoo.chain import Chain, outline
from zoo.models import densenet, preactivation_resnet, resnet, vit
from zoo.models.preactivation_resnet import PreactivationResNet

DROPS = {"drop_rate": 0.1, "drop_path_rate": 0.5}
GPT2 = {"width": 16, "depth": 2, "heads": 4, "vocabulary": 50, "chunk_tokens": 8}
WORDS = {"vocabulary": 50, "embedding": 8, "hidden": 8, "chunk_steps": 3, "chunk_tokens": 4}


def images(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(shape),)


def text(states: int = 0) -> Callable[[], tuple[Tensor | None, ...]]:
    """Tokens and targets; or tokens and so many tensors of state."""

    def draw() -> tuple[Tensor | None, ...]:
        tokens, targets = torch.randint(50, (2, 7, 3))
        return tokens, None if states else targets, *torch.randn(states, 2, 3, 8)

    return draw


# small models that drop at random, and their inputs
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Tensor | None, ...]]]] = {
    "basic blocks": (
        lambda: resnet.ResNet(resnet.basic, (1, 2, 1, 1), 7, **DROPS),
        images(2, 3, 33, 47),
    ),
    "bottlenecks": (
        lambda: resnet.ResNet(resnet.bottleneck, (1, 2, 1, 1), 7, **DROPS),
        images(2, 3, 33, 47),
    ),
    "basic units": (
        lambda: PreactivationResNet(resnet.basic, 2, **DROPS),
        images(2, 3, 9, 12),
    ),
    "bottleneck units": (
        lambda: PreactivationResNet(preactivation_resnet.bottleneck, 2, **DROPS),
        images(2, 3, 9, 12),
    ),
    "densenet": (lambda: densenet.DenseNet(4, (2, 2), 7, drop_rate=0.3), images(2, 3, 33, 47)),
    "vit": (
        lambda: vit.ViT(width=48, depth=2, heads=3, image_size=32, **DROPS),
        images(2, 3, 32, 32),
    ),
    "vnet of elu": (lambda: zoo.vnet(width=2), images(2, 1, 16, 16, 16)),
    "vnet of prelu": (lambda: zoo.vnet(width=2, activation="prelu"), images(2, 1, 16, 16, 16)),
    "gpt2": (lambda: zoo.gpt2_small(**GPT2, drop_path_rate=0.5), text()),
    "lstm": (lambda: zoo.lstm(**WORDS), text()),
    "lstm without targets": (lambda: zoo.lstm(**WORDS), text(states=2)),
    "gru": (lambda: zoo.gru(**WORDS), text()),
    "gru without targets": (lambda: zoo.gru(**WORDS), text(states=1)),
}
EACH = pytest.mark.parametrize("name", MODELS)


def example(name: str) -> tuple[Any, tuple[Tensor | None, ...]]:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    return make(), draw()


def train(model: nn.Module, inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Logits or loss of one seeded forward, and all gradients."""
    torch.manual_seed(1)
    found = Chain.forward(model, *inputs)  # type: ignore[arg-type]
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return [result.detach(), *torch.autograd.grad(result.square().sum(), list(model.parameters()))]


@EACH
def test_no_step_writes_its_inputs(name: str) -> None:
    model, state = example(name)
    for step in outline(model.steps_for(*state)).steps:
        tensors = [tensor for tensor in state if tensor is not None]
        before = [(tensor._version, tensor.detach().clone()) for tensor in tensors]
        value = step(*state)
        for tensor, (version, content) in zip(tensors, before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor, content)
        state = value if isinstance(value, tuple) else (value,)


@EACH
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_on_their_own(name: str, clone: Callable[[Any], Any]) -> None:
    model, inputs = example(name)
    twin = clone(model)
    expected = train(model, inputs)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert not torch.equal(train(model, inputs)[0], expected[0])
    assert all(map(torch.equal, train(twin, inputs), expected))


@EACH
def test_runs_on_fake_tensors(name: str) -> None:
    expected = [tensor.shape for tensor in train(*example(name))]
    with FakeTensorMode():
        assert [tensor.shape for tensor in train(*example(name))] == expected
