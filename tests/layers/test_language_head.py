import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo.errors import InputError
from zoo.layers.checks import check_tokens
from zoo.layers.language_head import ChunkedLoss, Head, choose_chunk_tokens, cross_entropy

WIDTH, VOCABULARY = 6, 50


def example(dtype=torch.float32):
    """A decoder, hidden (4, 10, 6) and targets (4, 10), three of them ignored."""
    torch.manual_seed(0)
    decoder = nn.Linear(WIDTH, VOCABULARY).to(dtype)
    hidden = torch.randn(4, 10, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (4, 10))
    targets[1, 2:4] = targets[3, 9] = -100
    return decoder, hidden, targets


def chunked(decoder, hidden, targets, chunk_tokens, total=None):
    """The mean loss of a plain head."""

    def loss(hidden, targets):
        return cross_entropy(decoder(hidden), targets)

    total = hidden.new_zeros(()) if total is None else total
    added = ChunkedLoss()(total, Head(loss, chunk_tokens), hidden, targets)
    return added / (targets != -100).sum()


def whole(decoder, hidden, targets):
    return F.cross_entropy(decoder(hidden).flatten(0, 1), targets.flatten())


def with_gradients(function, decoder, hidden, targets):
    loss = function(decoder, hidden, targets)
    return loss.detach(), *torch.autograd.grad(loss, [hidden, *decoder.parameters()])


def test_one_chunk_is_cross_entropy_bit_for_bit():
    ours = with_gradients(functools.partial(chunked, chunk_tokens=40), *example())
    theirs = with_gradients(whole, *example())
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 8, 39, 1000])
def test_chunks_add_up_to_the_whole_loss(chunk_tokens):
    cut = functools.partial(chunked, chunk_tokens=chunk_tokens)
    ours = with_gradients(cut, *example(torch.float64))
    theirs = with_gradients(whole, *example(torch.float64))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-15)


def test_ignored_targets_change_nothing():
    decoder, hidden, targets = example()
    before = chunked(decoder, hidden, targets, 8)
    with torch.no_grad():
        hidden[targets == -100] = 1e6
    assert torch.equal(chunked(decoder, hidden, targets, 8), before)
    nothing = chunked(decoder, hidden, torch.full_like(targets, -100), 8)
    assert math.isnan(nothing.detach())


def test_losses_are_added_to_the_total_one_chunk_after_the_other():
    decoder, hidden, targets = example()
    parts = zip(hidden.flatten(0, 1).split(16), targets.flatten().split(16), strict=True)
    total = torch.tensor(0.3)
    expected = total
    for part, wanted in parts:
        expected = expected + cross_entropy(decoder(part), wanted)
    found = chunked(decoder, hidden, targets, 16, total)
    assert torch.equal(found, expected / (targets != -100).sum())


def test_each_chunk_is_a_call_of_a_module():
    decoder, hidden, targets = example()
    head, sizes = ChunkedLoss(), []
    head.chunk.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[-1])))
    for chunk_tokens in (16, None):
        made = Head(lambda x, wanted: cross_entropy(decoder(x), wanted), chunk_tokens)
        head(torch.zeros(()), made, hidden, targets)
    assert sizes == [16, 16, 8, 40]


class Largest(TorchDispatchMode):
    """Notes the most elements that one result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_nothing_is_larger_than_the_scores_of_one_chunk():
    decoder, hidden, targets = example()
    with Largest() as largest:
        chunked(decoder, hidden, targets, 8).backward()
    assert largest.elements == 8 * VOCABULARY
    with Largest() as largest:
        whole(decoder, hidden, targets).backward()
    assert largest.elements == 40 * VOCABULARY


def test_a_chosen_chunk_has_the_bytes_of_a_layer_and_few_tokens_are_one_chunk():
    for tokens, width, vocabulary in [(1024, 384, 50257), (5000, 1600, 50257), (30_000, 64, 9000)]:
        chunk = choose_chunk_tokens(tokens, width, vocabulary)
        layer = 8 * tokens * width
        assert layer <= chunk * vocabulary < layer + 32 * vocabulary + vocabulary
    assert [choose_chunk_tokens(tokens, 8, 50257) for tokens in (1, 31, 32, 33)] == [1, 31, 32, 32]
    assert choose_chunk_tokens(4096, 768, 100) == 4096


def test_half_precision_is_summed_in_float32():
    decoder, hidden, targets = example(torch.bfloat16)
    loss = chunked(decoder, hidden, targets, 8)
    assert loss.dtype == torch.float32
    reference = F.cross_entropy(decoder(hidden).flatten(0, 1).double(), targets.flatten())
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)


def test_writes_no_input():
    inputs = example()[1:]
    before = [tensor.detach().clone() for tensor in inputs]
    chunked(example()[0], *inputs, 16)
    assert all(map(torch.equal, before, inputs))


def test_targets_that_do_not_fit_the_tokens_are_refused():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(InputError, match=r"one target for each token; got targets \(2, 4\)"):
        check_tokens("GPT2", tokens, tokens[:, :4], "NT", vocabulary=50)
    with pytest.raises(InputError, match=r"int64; got torch\.int32\. Convert them"):
        check_tokens("GPT2", tokens, tokens.int(), "NT", vocabulary=50)
