import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from tests.models.runs import blocks_of, language_step_peak, saved_storages
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.errors import ArgumentError, InputError

pytestmark = pytest.mark.usefixtures("without_fork")

BOTH = pytest.mark.parametrize("factory", [zoo.lstm, zoo.gru])
V, E, H, T, N = 61, 12, 16, 23, 3


def small(factory, **arguments):
    """A model of 2 layers; chunks of 5 steps, and of 4 tokens where they are scored."""
    torch.manual_seed(4)
    sizes = {"vocabulary": V, "embedding": E, "hidden": H, "chunk_steps": 5, "chunk_tokens": 4}
    return factory(**{**sizes, "drop_rate": 0.0, **arguments})


def text(seed=1):
    """Tokens (T, N) and their next tokens."""
    words = torch.randint(V, (T + 1, N), generator=torch.Generator().manual_seed(seed))
    return words[:-1], words[1:]


def parts(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


class Plain(nn.Module):
    """torch's word_language_model example: `nn.LSTM` over the whole text, then all scores."""

    def __init__(self, ours, drop_rate):
        super().__init__()
        self.embedding, self.decoder = ours.embedding, ours.decoder
        self.dropout = nn.Dropout(drop_rate)
        self.stack = ours.recurrent(E, H, len(ours.layers), dropout=drop_rate)
        values = {
            name.replace("l0", f"l{number}"): value
            for number, layer in enumerate(ours.layers)
            for name, value in layer.state_dict().items()
        }
        self.stack.load_state_dict(values)

    def forward(self, tokens):
        x, state = self.stack(self.dropout(self.embedding(tokens)))
        return self.decoder(self.dropout(x)), state

    def gradients(self):
        """Gradients by our names."""
        names = {f"stack.{key}_l{n}": f"layers.{n}.{key}_l0" for n in (0, 1) for key in KEYS}
        return {names.get(key, key): value.grad for key, value in self.named_parameters()}


KEYS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def gradients(model):
    return {key: value.grad for key, value in model.named_parameters()}


def kept(model, call):
    """The bytes of each storage that autograd keeps for the backward of a call."""
    with saved_storages() as found:
        result = call()
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return list(found.values())


@BOTH
@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_one_chunk_is_the_plain_stack_bit_for_bit(factory, drop_rate):
    tokens, _ = text()
    ours = small(factory, drop_rate=drop_rate, chunk_steps=T)
    plain = Plain(copy.deepcopy(ours), drop_rate)
    torch.manual_seed(5)
    scores, state = ours(tokens)
    torch.manual_seed(5)
    expected, expected_state = plain(tokens)
    assert torch.equal(scores, expected)
    for part, expected_part in zip(parts(state), parts(expected_state), strict=True):
        assert torch.equal(part, expected_part)
    for result in (scores, expected):
        result.square().sum().backward()
    torch.testing.assert_close(gradients(ours), plain.gradients(), rtol=0, atol=0)


@BOTH
def test_chunks_change_rounding_only(factory):
    tokens, targets = text()
    whole = small(factory, chunk_steps=T, chunk_tokens=T * N)
    chunked = small(factory)
    losses = [model(tokens, targets=targets)[0] for model in (whole, chunked)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients(chunked), gradients(whole))
    torch.testing.assert_close(chunked(tokens), whole(tokens))


@pytest.mark.parametrize("shape", [(64, 8)])
def test_the_chosen_chunks_take_no_more_than_the_best_of_several(shape):
    sizes = {"vocabulary": 5000, "embedding": 64, "hidden": 64, "layers": 1}
    peak = functools.partial(language_step_peak, zoo.lstm, shape, **sizes)
    pairs = [(5, 32), (20, 64), (shape[0], 64)]
    given = [peak(chunk_steps=steps, chunk_tokens=tokens) for steps, tokens in pairs]
    chosen = peak()
    assert chosen <= 1.02 * min(given)
    assert chosen < 0.95 * max(given)


@BOTH
def test_with_and_without_a_plan_the_chosen_chunks_and_the_bits_are_the_same(factory):
    tokens, targets = text()
    sizes = {"vocabulary": 5000, "drop_rate": 0.3}
    found = []
    for checkpoint, steps, chunk in ((False, None, None), (True, None, None), (False, 8, 24)):
        model = small(factory, **sizes, chunk_steps=steps, chunk_tokens=chunk)
        model = put_in_force(model, checkpoint)
        torch.manual_seed(5)
        loss = model(tokens, targets=targets)[0]
        loss.backward()
        names = blocks_of(model, tokens, None, targets)
        found.append((names, loss.detach(), gradients(model)))
    for other in found[1:]:
        assert other[0] == found[0][0]
        torch.testing.assert_close(other[1:], found[0][1:], rtol=0, atol=0)


def test_a_short_text_is_one_chunk_and_given_chunks_win():
    def blocks(**chunks):
        model = small(zoo.lstm, vocabulary=5000, **chunks)
        return len(blocks_of(model, tokens, None, tokens))

    tokens = torch.zeros(8, 4, dtype=torch.int64)
    assert blocks(chunk_steps=None, chunk_tokens=None) == blocks(chunk_steps=8, chunk_tokens=32)
    assert blocks(chunk_steps=None, chunk_tokens=8) == blocks(chunk_steps=8, chunk_tokens=8)
    assert blocks(chunk_steps=4, chunk_tokens=None) == blocks(chunk_steps=4, chunk_tokens=16)


@BOTH
def test_loss_is_cross_entropy_of_the_scores_dropout_and_ignored_targets_included(factory):
    tokens, targets = text()
    targets = targets.masked_fill(tokens < 9, -100)
    model, plain = small(factory, drop_rate=0.3), small(factory, drop_rate=0.3)
    torch.manual_seed(5)
    loss, state = model(tokens, targets=targets)
    torch.manual_seed(5)
    scores, expected_state = plain(tokens)
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts(state), parts(expected_state), rtol=0, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


@BOTH
def test_every_exact_head_gives_the_same_bits(factory):
    found = []
    for head in ("inplace", "plain"):
        model = small(factory, head=head)
        loss = model(text()[0], targets=text()[1])[0]
        loss.backward()
        found.append((loss, gradients(model)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize(("checkpoint", "tied"), [(False, False), (False, True), (True, True)])
def test_the_fused_head_is_equal_up_to_rounding(factory, checkpoint, tied):
    found = []
    for head, option in (("fused", checkpoint), ("plain", False)):
        chunks = {"chunk_steps": 12, "chunk_tokens": 16}
        model = small(factory, head=head, tied=tied, embedding=H, **chunks).double()
        loss, state = put_in_force(model, option)(text()[0], targets=text()[1])
        loss.backward()
        found.append((loss, parts(state), gradients(model)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-15)


def test_a_hook_may_keep_the_scores():
    model, seen = small(zoo.lstm), []
    expected = torch.cat([scores.flatten(0, 1) for scores in model(text()[0])[0].split(5)])
    model.decoder.register_forward_hook(lambda *call: seen.append(call[-1]))
    model(text()[0], targets=text()[1])[0].backward()
    torch.testing.assert_close(torch.cat(seen), expected)


@BOTH
def test_carried_state_joins_two_batches_into_one_text(factory):
    tokens, _ = text()
    model = small(factory)
    expected, expected_state = model(tokens)
    first, state = model(tokens[:9])
    second, state = model(tokens[9:], state)
    torch.testing.assert_close(torch.cat((first, second)), expected)
    torch.testing.assert_close(parts(state), parts(expected_state))
    assert [part.shape for part in parts(state)] == [(2, N, H)] * (2 if factory is zoo.lstm else 1)


@BOTH
def test_detached_state_ends_the_backward_at_the_batch(factory):
    model, tokens = small(factory), torch.arange(2 * N).view(2, N)
    for cut in (model.detach, lambda state: state):
        _, state = model(tokens[:1])
        embedding = torch.autograd.grad(
            model(tokens[1:], cut(state))[0].sum(), model.embedding.weight
        )
        assert embedding[0][tokens[0]].any() == (cut != model.detach)
        assert embedding[0][tokens[1]].all()
    assert [part.shape for part in parts(model.detach(state))] == [p.shape for p in parts(state)]


@BOTH
def test_scores_of_one_chunk_are_the_largest_tensor_kept(factory):
    tokens, targets = text()
    model = small(factory, vocabulary=100 * V, drop_rate=0.3)
    assert max(kept(model, lambda: model(tokens, targets=targets)[0])) == 4 * 4 * 100 * V


@BOTH
def test_keeps_no_more_than_the_plain_stack(factory):
    tokens, targets = text()
    ours = small(factory, drop_rate=0.3, chunk_steps=T)
    plain = Plain(ours, 0.3)
    expected = kept(
        plain, lambda: F.cross_entropy(plain(tokens)[0].flatten(0, 1), targets.flatten())
    )
    assert sum(kept(ours, lambda: ours(tokens, targets=targets)[0])) <= 1.02 * sum(expected)


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_tied_weights_stay_one_parameter_in_copies_too(factory, copied):
    model = copied(small(factory, embedding=H, tied=True))
    assert model.decoder.weight is model.embedding.weight
    assert "decoder.weight" not in dict(model.named_parameters())
    tokens, targets = text()
    model(tokens, targets=targets)[0].backward()
    assert model.decoder.weight.grad.abs().sum(1).all()


@BOTH
def test_parameters_have_torch_s_names_and_the_examples_draws(factory):
    model = small(factory, layers=1)
    names = [f"layers.0.{key}_l0" for key in KEYS]
    assert [name for name, _ in model.named_parameters()] == [
        "embedding.weight",
        *names,
        "decoder.weight",
        "decoder.bias",
    ]
    for weight in (model.embedding.weight, model.decoder.weight):
        assert 0.09 < weight.abs().max() <= 0.1
    assert not model.decoder.bias.any()


def test_every_layers_chunk_of_time_and_every_chunk_of_scores_is_a_block():
    tokens, targets = text()
    _, *blocks, _ = blocks_of(small(zoo.lstm, drop_rate=0.3), tokens, None, targets)
    firsts = [steps[0] for steps in blocks]
    expected = []
    for size in (5, 5, 5, 5, 3):
        expected += ["chunk", *["loss.chunk.linear"] * -(-size * N // 4)]
    assert firsts == expected
    for steps in blocks:
        names = " ".join(steps)
        assert ("layers.0" in names) == ("layers.1" in names) == (steps[0] == "chunk")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 2),), "lstm takes token numbers.* got torch.float32"),
        ((torch.zeros(0, 2, dtype=torch.int64),), r"one element on each axis; got \(0, 2\)"),
        ((torch.zeros(3, dtype=torch.int64),), r"takes \(T, N\), 2 axes; got \(3,\)"),
        ((text()[0], None, text()[1][1:]), r"one target for each token; got targets \(22, 3\)"),
        ((text()[0], None, text()[1].int()), "targets of int64; got torch.int32"),
        (
            (text()[0], torch.zeros(2, N, H)),
            r"hidden and cell of \(2, 3, 16\).* got \[\(2, 3, 16\)\]",
        ),
        (
            (text()[0], (torch.zeros(2, 1, H),) * 2),
            r"for 3 texts; got \[\(2, 1, 16\), \(2, 1, 16\)\]",
        ),
    ],
)
def test_input_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        small(zoo.lstm)(*arguments)


def test_gru_refuses_the_state_of_an_lstm():
    tokens, _ = text()
    with pytest.raises(InputError, match=r"gru takes as state hidden of \(2, 3, 16\)"):
        small(zoo.gru)(tokens, small(zoo.lstm)(tokens)[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tied": True}, "embedding as wide as hidden.* embedding=12 and hidden=16"),
        ({"layers": 0}, "layers of at least 1; got 0"),
        ({"chunk_steps": 0}, "chunk_steps of at least 1; got 0"),
        ({"drop_rate": -0.1}, r"drop_rate from 0 up to below 1; got -0\.1"),
        ({"head": "exact"}, "head inplace or plain or fused; got 'exact'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        small(zoo.lstm, **arguments)


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_trains_whatever_kernels_the_processor_has(factory, dtype):
    """`nn.LSTM` under autocast raises where oneDNN has no LSTM of the type."""
    tokens, targets = text()
    losses = []
    for half in (True, False):
        model = small(factory)
        with torch.autocast("cpu", getattr(torch, dtype), enabled=half):
            loss, state = model(tokens, targets=targets)
            again, _ = model(tokens, model.detach(state), targets)
        (loss + again).backward()
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=0.01, atol=0)


def test_a_processor_without_a_kernel_for_bfloat16_trains_in_it():
    """In a process of its own, since oneDNN reads the variable once."""
    train = "test_autocast_trains_whatever_kernels_the_processor_has"
    program = (
        f"import zoo; from tests.models.test_lstm import {train} as t; t(zoo.lstm, 'bfloat16')"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
