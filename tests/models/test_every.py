"""What every family keeps to: blocks write no inputs, copies are independent, shapes are enough."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import zoo
from zoo.models import densenet, preactivation_resnet, resnet, vit
from zoo.models.preactivation_resnet import PreactivationResNet
from zoo.tracing.partition import paths_of

DROPS = {"drop_rate": 0.1, "drop_path_rate": 0.5}
GPT2 = {"width": 16, "depth": 2, "heads": 4, "vocabulary": 50, "chunk_tokens": 8}
UNET = {"width": 2, "strides": (1, 2, 2), "kernels": (3, 3, 3)}
LLAMA = {"width": 16, "vocabulary": 50, "mlp_width": 32, "chunk_tokens": 8}
WORDS = {"vocabulary": 50, "embedding": 8, "hidden": 8, "chunk_steps": 3, "chunk_tokens": 4}


def images(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(shape),)


def text() -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    tokens, targets = torch.randint(50, (2, 7, 3))
    return tokens, targets


def text_without_state() -> tuple[Any, ...]:
    """Tokens, no state and targets."""
    tokens, targets = text()
    return tokens, None, targets


def text_and_state(tensors: int) -> Callable[[], tuple[Any, ...]]:
    """Tokens and a state of so many tensors."""

    def draw() -> tuple[Any, ...]:
        (tokens, _), state = text(), tuple(torch.randn(tensors, 2, 3, 8))
        return tokens, state if tensors > 1 else state[0]

    return draw


# small models that drop at random, and their inputs
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
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
    "unet": (
        lambda: zoo.unet(**UNET, axes=2, residual=True, norm="batch", drop_rate=0.1),
        images(2, 1, 16, 16),
    ),
    "unet of levels": (lambda: zoo.unet(**UNET, supervised=1), images(1, 1, 16, 16, 16)),
    "gpt2": (lambda: zoo.gpt2_small(**GPT2, drop_path_rate=0.5), text),
    "llama": (lambda: zoo.llama_tiny(**LLAMA, drop_rate=0.1), text),
    "qwen": (lambda: zoo.llama_tiny(**LLAMA, tied=False, qk_norm=True, qkv_bias=True), text),
    "experts": (lambda: zoo.llama_tiny(**LLAMA, experts=3), text),
    "lstm": (lambda: zoo.lstm(**WORDS), text_without_state),
    "lstm without targets": (lambda: zoo.lstm(**WORDS), text_and_state(2)),
    "gru": (lambda: zoo.gru(**WORDS), text_without_state),
    "gru without targets": (lambda: zoo.gru(**WORDS), text_and_state(1)),
}
EACH = pytest.mark.parametrize("name", MODELS)


def example(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    return make(), draw()


def train(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Logits or loss of one seeded forward, and all gradients."""
    torch.manual_seed(1)
    found = model(*inputs)
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return [result.detach(), *torch.autograd.grad(result.square().sum(), list(model.parameters()))]


@EACH
def test_neither_the_model_nor_a_block_writes_its_inputs(name: str) -> None:
    model, inputs = example(name)
    checked = [model, *map(model.get_submodule, paths_of(model, None))]
    before: dict[nn.Module, list[tuple[Tensor, int, Tensor]]] = {}

    def note(module: nn.Module, args: Any) -> None:
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        before[module] = [(value, value._version, value.detach().clone()) for value in tensors]

    def check(module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor, version, content in before.pop(module):
            assert tensor._version == version
            assert torch.equal(tensor, content)
        seen.append(module)

    seen: list[nn.Module] = []
    for module in checked:
        module.register_forward_pre_hook(note)
        module.register_forward_hook(check)
    model(*inputs)
    without_loss = "without targets" in name
    assert {*checked} - {*seen} == ({model.loss.chunk} if without_loss else set())


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


# torch's rule for fakes knows grouped products of half precision alone
@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_runs_on_fake_tensors(name: str) -> None:
    expected = [tensor.shape for tensor in train(*example(name))]
    with FakeTensorMode():
        assert [tensor.shape for tensor in train(*example(name))] == expected


IMAGES = "basic blocks", "bottleneck units", "densenet", "vnet of elu"


@pytest.mark.parametrize("name", IMAGES)
def test_compiles_into_one_graph(name: str) -> None:
    expected = train(*example(name))
    model, inputs = example(name)
    zoo.checkpoint(model, "blocks")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = train(compiled, inputs)  # type: ignore[arg-type]
    torch.compiler.reset()
    assert all(map(torch.equal, found, expected))
