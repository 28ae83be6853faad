"""Gradients computed in the forward are those of the plain operations, up to rounding."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.kernels import bytes_left
from zoo.engine.recompute import recompute
from zoo.errors import ArgumentError
from zoo.layers.language_head import cross_entropy, make_head
from zoo.layers.weight_sharing import SharedWeight
from zoo.profiling.peak_memory import trace

TOKENS, C, V = 40, 6, 50
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-15)
equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Tied(nn.Module):
    """Embeds tokens and decodes them with the same weight, by a head of this name."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.embedding = nn.Embedding(V, C, dtype=dtype)
        self.decoder = nn.Linear(C, V, dtype=dtype)
        self.decoder.weight = self.embedding.weight
        nn.init.normal_(self.decoder.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        weight = SharedWeight(self.embedding.weight)
        hidden = weight.embedding(self.embedding)(tokens).sin()
        head = make_head(self.name, weight, 7, self.decoder)
        return head.loss(hidden, targets) / (targets >= 0).sum()


def text() -> tuple[Tensor, Tensor]:
    """Tokens and targets, some ignored."""
    words = torch.randint(V, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    words[1, ::5] = -100
    return words[0], words[1]


def gradients(model: nn.Module, loss: Tensor | None = None, **options: Any) -> list[Tensor]:
    """The loss of the text if no other is given, and the gradients."""
    loss = model(*text()) if loss is None else loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), **options)]


def test_gradients_are_those_of_the_plain_head() -> None:
    close(gradients(Tied("fused")), gradients(Tied("plain")))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_frozen_gets_none(name: str) -> None:
    found = []
    for head in ("fused", "plain"):
        model = Tied(head)
        getattr(model.decoder, name).requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append(torch.autograd.grad(model(*text()), trained))
    close(*found)


def test_two_backwards_of_one_graph_are_equal() -> None:
    model = Tied("fused")
    loss = model(*text())
    first = gradients(model, loss, retain_graph=True)
    equal(gradients(model, loss, retain_graph=True), first)
    equal(gradients(model, loss), first)


def test_a_backward_for_the_bias_alone_leaves_nothing_behind() -> None:
    model = Tied("fused")
    loss = model(*text())
    bias = torch.autograd.grad(loss, model.decoder.bias, retain_graph=True)[0]
    equal(gradients(model, loss)[2], bias)
    equal(gradients(model), gradients(model))


@pytest.mark.parametrize("options", [{"create_graph": True}, {"is_grads_batched": True}])
def test_second_derivatives_and_batches_are_refused(options: dict[str, bool]) -> None:
    model = Tied("fused")
    ways = torch.ones(2, dtype=torch.float64) if "is_grads_batched" in options else None
    with pytest.raises(ArgumentError, match=r"head='fused' .* build the model with head='inplace'"):
        gradients(model, grad_outputs=ways, **options)


def test_functional_transforms_are_plain() -> None:
    model = Tied("fused")
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(model, weights, text())

    close(list(torch.func.grad(loss)(weights).values()), gradients(Tied("plain"))[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype) -> None:
    found = []
    for name in ("fused", "plain"):
        model = Tied(name, torch.float32)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found.append(gradients(model, model(*text())))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-3)
    assert {tensor.dtype for tensor in found[0]} == {torch.float32}


def test_a_second_run_gives_the_same_bits() -> None:
    model = Tied("fused", torch.float32)
    equal(gradients(model, recompute(model, *text())), gradients(model))


def test_without_gradients_nothing_is_computed_for_them() -> None:
    model = Tied("fused")
    with torch.no_grad():
        close(model(*text()), Tied("plain")(*text()).detach())


class Largest(TorchDispatchMode):
    """Notes the most bytes that one result has."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_no_more_than_a_chunk_of_scores_is_there_and_none_is_kept() -> None:
    torch.manual_seed(0)
    decoder = nn.Linear(4, 5000)
    hidden, targets = torch.randn(128, 4, requires_grad=True), torch.randint(5000, (128,))
    head = make_head("fused", SharedWeight(decoder.weight), 32, decoder)
    chunk, weight = 32 * 5000 * 4, decoder.weight.nbytes + decoder.bias.nbytes
    losses: list[Tensor] = []
    with Largest() as largest:
        found = trace(lambda: losses.append(head.loss(hidden, targets)))
    assert largest.bytes == chunk
    assert found.peak < 1.5 * chunk + weight, "the scores, and an eighth of them some times"
    assert sum(size for _, size in found.events) < weight + 2 * hidden.nbytes
    plain = bytes_left(lambda: losses.append(cross_entropy(decoder(hidden), targets)))
    assert plain > 3 * chunk


def test_the_weights_gradient_is_one_buffer() -> None:
    embedding = nn.Embedding(4000, 64)
    shared = SharedWeight(embedding.weight)
    hidden = shared.embedding(embedding)(torch.arange(12))
    head = make_head("fused", shared, 4)
    size, alive, most = embedding.weight.nbytes, 0, 0
    for _, change in trace(lambda: head.loss(hidden, torch.arange(12)).backward()).events:
        alive += (change > 0) - (change < 0) if abs(change) == size else 0
        most = max(most, alive)
    assert most == 1
