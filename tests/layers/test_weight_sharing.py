"""A weight's gradient is one buffer, whatever uses the weight and whoever asks for the gradient."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from zoo.engine.recompute import recompute
from zoo.layers.language_head import ChunkedLoss, Head, cross_entropy
from zoo.layers.weight_sharing import SharedWeight
from zoo.profiling.peak_memory import trace

V, C = 50, 6


class Tied(nn.Module):
    """Embeds tokens, decodes them in chunks; `shared=False` leaves all to autograd."""

    def __init__(self, shared: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, C, dtype=dtype)
        self.body = nn.Linear(C, C, dtype=dtype)
        self.decoder = nn.Linear(C, V, dtype=dtype)
        self.decoder.weight = self.embedding.weight
        self.shared = shared

    def forward(self, tokens: Tensor, targets: Tensor, chunk_tokens: int = 7) -> Tensor:
        weight = SharedWeight(self.embedding.weight)
        embedding, decoder = weight.embedding(self.embedding), weight.decoder(self.decoder)
        if not self.shared:
            embedding, decoder = self.embedding, self.decoder
        hidden = torch.cat([self.body(embedding(part)).tanh() for part in tokens.split(1)])
        head = Head(lambda x, wanted: cross_entropy(decoder(x), wanted), chunk_tokens)
        total: Tensor = ChunkedLoss()(hidden.new_zeros(()), head, hidden, targets)
        return total / (targets >= 0).sum()


def text() -> tuple[Tensor, Tensor]:
    """Tokens (3, 10) of which many come again, and targets, two ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (3, 10), generator=generator)
    targets = torch.randint(V, (3, 10), generator=generator)
    targets[0, 2:4] = -100
    return tokens, targets


def gradients(model: nn.Module, loss: Any = None) -> dict[str, Tensor]:
    """Gradients by name, of the loss of the text if no other is given."""
    loss = model(*text()) if loss is None else loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-15)
equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30])
def test_gradients_are_those_of_plain_operations(chunk_tokens: int) -> None:
    ours, plain = Tied(), Tied(shared=False)
    close(
        gradients(ours, ours(*text(), chunk_tokens)), gradients(plain, plain(*text(), chunk_tokens))
    )


def test_lookups_alone_add_up_too() -> None:
    weight = torch.randn(V, C, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(3, 10, C, dtype=torch.float64)
    found = []
    for embedding in (
        SharedWeight(weight).embedding(nn.Embedding(V, C)),
        lambda part: F.embedding(part, weight),
    ):
        parts = [embedding(part) for part in text()[0].int().split(1)]
        found += torch.autograd.grad((torch.cat(parts) * factors).sum(), weight)
    close(*found)


def test_a_partial_backward_leaves_nothing_behind() -> None:
    model = Tied()
    expected = gradients(model)
    loss = model(*text())
    torch.autograd.grad(loss, model.body.weight, retain_graph=True)
    equal(gradients(model, loss), expected)


def test_a_backward_that_fails_midway_leaves_nothing_behind() -> None:
    model = Tied()
    expected = gradients(model)
    loss = model(*text())

    def fail(_: Tensor) -> None:
        raise ArithmeticError("midway")

    handle = model.body.bias.register_hook(fail)
    with pytest.raises(ArithmeticError, match="midway"):
        loss.backward(retain_graph=True)
    handle.remove()
    assert model.embedding.weight.grad is None
    equal(gradients(model, loss), expected)


def test_a_backward_that_asks_for_no_weight_sums_none() -> None:
    weight = nn.Parameter(torch.randn(V, C))
    shared = SharedWeight(weight)
    x = torch.randn(4, C, requires_grad=True)
    total = shared.decoder()(x).sum()
    torch.autograd.grad(total, x, retain_graph=True)
    assert not shared.total.sums
    total.backward()
    assert not shared.total.sums


def test_two_backwards_of_one_graph_add_twice() -> None:
    model = Tied()
    expected = gradients(model)
    loss = model(*text())
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        equal(parameter.grad, 2 * expected[name])


def test_two_losses_of_one_forward() -> None:
    weight = nn.Parameter(torch.randn(V, C, dtype=torch.float64))
    x = torch.randn(8, C, dtype=torch.float64)
    decoder = SharedWeight(weight).decoder()
    first, second = decoder(x[:3]).square().sum(), decoder(x[3:]).square().sum()
    first.backward()
    second.backward()
    expected = torch.autograd.grad(F.linear(x, weight).square().sum(), weight)
    close(weight.grad, expected[0])


def test_gradients_of_batches_add_up() -> None:
    model = Tied()
    expected = gradients(model)
    for _ in range(3):
        model(*text()).backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, 3 * expected[name])


def test_gradients_of_other_uses_join_the_sum() -> None:
    weight = nn.Parameter(torch.randn(V, C, dtype=torch.float64))
    shared, x = SharedWeight(weight), torch.randn(8, C, dtype=torch.float64)
    found = torch.autograd.grad(shared.decoder()(x).sum() + weight.square().sum(), weight)
    expected = torch.autograd.grad(F.linear(x, weight).sum() + weight.square().sum(), weight)
    close(found, expected)


def test_can_be_differentiated_twice() -> None:
    found = []
    for model in (Tied(), Tied(shared=False)):
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(*text()), parameters, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in first)
        found.append(gradients(model, norm))
    close(*found)


def test_batched_gradients() -> None:
    found = []
    for model in (Tied(), Tied(shared=False)):
        loss = model(*text())
        ways = torch.tensor([1.0, 3.0], dtype=torch.float64)
        found.append(
            torch.autograd.grad(loss, list(model.parameters()), ways, is_grads_batched=True)
        )
    close(*found)


def test_frozen_weights_get_none_and_pass_gradients_on() -> None:
    found = []
    for model in (Tied(), Tied(shared=False)):
        model.embedding.weight.requires_grad_(False)
        model(*text()).backward()
        assert model.embedding.weight.grad is None
        found.append(model.body.weight.grad)
    close(*found)


def test_functional_transforms() -> None:
    def loss(model: nn.Module, weights: dict[str, Tensor]) -> Any:
        return functional_call(model, weights, text())

    model = Tied()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    close(torch.func.grad(functools.partial(loss, model))(weights), gradients(model))
    with forward_ad.dual_level():
        tangents = {k: forward_ad.make_dual(v, v) for k, v in model.named_parameters()}
        slope = forward_ad.unpack_dual(loss(model, tangents)).tangent
    close(slope, sum((gradients(model)[k] * v).sum() for k, v in weights.items()))


def test_autocast_is_left_to_autograd() -> None:
    found = []
    for model in (Tied(dtype=torch.float32), Tied(shared=False, dtype=torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*text())
        found.append(gradients(model, loss))
    equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_it_gives_the_same_bits(dtype: torch.dtype) -> None:
    model = Tied(dtype=dtype)
    x = torch.randn(10, C, dtype=dtype)

    def scores(recomputes: bool) -> list[Tensor]:
        weight = SharedWeight(model.embedding.weight)
        decoder, embedding = weight.decoder(model.decoder), weight.embedding(model.embedding)
        call = recompute if recomputes else lambda function, *args: function(*args)
        found = call(lambda x: decoder(x).log_softmax(-1), call(embedding, text()[0][0]) + x)
        return list(torch.autograd.grad(found.float().square().sum(), list(model.parameters())[:1]))

    equal(scores(True), scores(False))


def test_a_whole_model_can_be_recomputed() -> None:
    model = Tied()
    equal(gradients(model, recompute(model, *text())), gradients(model))


def test_modules_that_are_more_than_their_class_are_called() -> None:
    model, fired = Tied(), []
    expected = gradients(model)
    model.embedding.register_forward_hook(lambda *_: fired.append("embedding"))
    model.decoder.register_forward_hook(lambda *_: fired.append("decoder"))
    close(gradients(model), expected)
    assert fired == ["embedding"] * 3 + ["decoder"] * 5
    model = Tied()
    model.embedding.padding_idx = 3
    plain = Tied(shared=False)
    plain.embedding.padding_idx = 3
    close(gradients(model), gradients(plain))


@pytest.mark.parametrize(("shared", "buffers"), [(True, 1), (False, 3)])
def test_the_backward_makes_one_buffer_of_the_weights_size(shared: bool, buffers: int) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(4000, 64)
    size = embedding.weight.nbytes
    weight = SharedWeight(embedding.weight)
    look_up = weight.embedding(embedding) if shared else embedding
    decoder = weight.decoder() if shared else lambda x: F.linear(x, embedding.weight)
    tokens = torch.randint(4000, (12,))
    parts = [decoder(part).square().sum() for part in look_up(tokens).split(2)]
    loss = torch.stack(parts).sum()
    alive = most = 0
    for _, change in trace(loss.backward).events:
        alive += (change > 0) - (change < 0) if abs(change) == size else 0
        most = max(most, alive)
    assert most == buffers
