import copy
import functools
import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from tests.models.runs import blocks_of, language_step_peak, saved_storages, text
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.errors import ArgumentError, InputError, WeightsError
from zoo.models.gpt2 import GPT2

pytestmark = pytest.mark.usefixtures("without_fork")

SMALL = {"width": 64, "depth": 2, "heads": 4, "vocabulary": 101, "positions": 32}


def hugging_face(drop_rate=0.0, activation="gelu_pytorch_tanh"):
    """Hugging Face's model of the same size, biases and norms drawn too; skips without it."""
    pytest.importorskip("transformers", exc_type=(ImportError, RuntimeError))
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=101,
        n_positions=32,
        embd_pdrop=drop_rate,
        attn_pdrop=drop_rate,
        resid_pdrop=drop_rate,
        activation_function=activation,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def run(model, call):
    """Result, gradients by our names and bytes kept for the backward of one seeded run."""
    torch.manual_seed(1)
    with saved_storages() as kept:
        result = call(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(result.pow(2).mean(), parameters)
    named = GPT2(**SMALL).translate(dict(zip(names, gradients, strict=True)))
    return {"result": result.detach(), **named}, sum(kept.values())


def assert_close(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="their weights lie transposed; MKL rounds both products alike, other libraries may not",
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_equals_hugging_face_bit_for_bit_and_keeps_no_more(drop_rate, training):
    theirs = hugging_face(drop_rate).train(training)
    ours = GPT2(**SMALL, drop_rate=drop_rate).train(training)
    ours.load_state_dict(theirs.state_dict())
    tokens, targets = text()
    expected, kept_by_theirs = run(theirs, lambda model: model(tokens).logits)
    results, kept = run(ours, lambda model: model(tokens))
    assert_close(results, expected)
    assert kept <= 1.02 * kept_by_theirs
    expected, kept_by_theirs = run(theirs, lambda model: model(tokens, labels=tokens).loss)
    results, kept = run(ours, lambda model: model(tokens, targets))
    assert_close(results, expected)
    assert kept <= 1.02 * kept_by_theirs


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
def test_equals_hugging_face_in_double_precision(activation):
    theirs = hugging_face(activation=activation).double()
    ours = GPT2(**SMALL, drop_rate=0.0).double()
    ours.load_state_dict(theirs.state_dict())
    expected, _ = run(theirs, lambda model: model(text()[0]).logits)
    results, _ = run(ours, lambda model: model(text()[0]))
    assert_close(results, expected, rtol=1e-9, atol=1e-12)


def test_loads_what_hugging_face_saves():
    theirs = hugging_face()
    masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.1.attn.masked_bias": torch.ones(())}
    bare, whole = GPT2(**SMALL), GPT2(**SMALL)
    bare.load_state_dict({**theirs.transformer.state_dict(), **masks})
    whole.load_state_dict(theirs.state_dict())
    assert_close(bare.state_dict(), whole.state_dict())
    assert torch.equal(whole.blocks[1].mlp["fc1"].weight, theirs.transformer.h[1].mlp.c_fc.weight.T)
    assert_close(GPT2(**SMALL).translate(whole.state_dict()), whole.state_dict())


def test_a_decoder_of_its_own_is_refused():
    weights = GPT2(**SMALL).state_dict()
    foreign = {
        "wte.weight": weights["token_embedding.weight"],
        "lm_head.weight": torch.ones(101, 64),
    }
    model = GPT2(**SMALL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"1 unknown: lm_head\.weight"):
        model.load_state_dict(foreign)
    assert_close(model.state_dict(), before)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30, 60, 100])
def test_loss_is_the_cross_entropy_of_the_scores(chunk_tokens):
    model = GPT2(**SMALL, chunk_tokens=chunk_tokens).eval()
    tokens, targets = text()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss = model(tokens, targets=targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert chunk_tokens < 60 or torch.equal(loss, expected)


@pytest.mark.parametrize("shape", [(4, 96)])
def test_the_chosen_chunk_takes_no_more_than_the_best_of_several(shape):
    sizes = {"width": 64, "depth": 2, "heads": 4, "vocabulary": 5000, "positions": 128}
    peak = functools.partial(language_step_peak, zoo.gpt2_small, shape, **sizes)
    given = [peak(chunk_tokens=chunk) for chunk in (16, 128, shape[0] * shape[1])]
    chosen = peak()
    assert chosen <= 1.01 * min(given)
    assert chosen < 0.7 * max(given), "one chunk for all takes much more"


def test_with_and_without_a_plan_the_chosen_chunk_and_the_bits_are_the_same():
    sizes, records = {**SMALL, "vocabulary": 5000}, []
    for checkpoint, chunk in ((False, None), (True, None), (False, 32), (False, 7)):
        torch.manual_seed(0)
        model = put_in_force(GPT2(**sizes, chunk_tokens=chunk), checkpoint)
        record, _ = run(model, lambda model: model(*text()))
        records.append((len(blocks_of(model, *text())), record))
    baseline, planned, same, other = records
    assert baseline[0] == planned[0] == same[0] == other[0] - 7  # 60 tokens: 2 chunks, and 9
    assert_close(planned[1], baseline[1])
    assert_close(same[1], baseline[1])
    with pytest.raises(AssertionError):
        assert_close(other[1], baseline[1])


def test_every_exact_head_gives_the_same_bits():
    records = []
    for head in ("inplace", "plain"):
        torch.manual_seed(0)
        model = GPT2(**SMALL, head=head, chunk_tokens=16)
        records.append(run(model, lambda model: model(*text()))[0])
    assert_close(*records)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_fused_head_is_equal_up_to_rounding(checkpoint):
    records = []
    for head in ("fused", "plain"):
        torch.manual_seed(0)
        model = put_in_force(GPT2(**SMALL, head=head, chunk_tokens=16).double(), checkpoint)
        records.append(run(model, lambda model: model(*text()))[0])
    assert_close(*records, rtol=1e-9, atol=1e-15)


def test_tokens_do_not_see_later_ones():
    model, (tokens, _) = GPT2(**SMALL).eval(), text()
    changed = torch.cat([tokens[:, :9], 100 - tokens[:, 9:]], dim=1)
    assert torch.equal(model(tokens)[:, :9], model(changed)[:, :9])


# OpenAI's own sizes, published as 124M, 355M, 774M and 1558M
@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (zoo.gpt2_small, 124_439_808),
        (zoo.gpt2_medium, 354_823_168),
        (zoo.gpt2_large, 774_030_080),
        (zoo.gpt2_xl, 1_557_611_200),
    ],
)
def test_real_sizes(build, parameters):
    with torch.device("meta"):
        model, tokens = build(), torch.zeros(2, 1024, dtype=torch.int64)
        assert model(tokens[:, :9]).shape == (2, 9, 50257)
        assert model(tokens, tokens).shape == ()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_weights_are_drawn_as_published():
    torch.manual_seed(0)
    model = GPT2(width=128, depth=8, heads=4, vocabulary=500, positions=200)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            expected = torch.ones(128) if name.endswith("weight") else torch.zeros(len(parameter))
            assert torch.equal(parameter, expected)
        else:
            spread = 0.02 / 4 if name.endswith(("proj.weight", "fc2.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(spread, rel=0.03)


def test_the_decoder_is_the_embedding():
    model = GPT2(**SMALL)
    assert [name for name, value in model.state_dict().items() if value.shape == (101, 64)] == [
        "token_embedding.weight"
    ]
    assert model.token_embedding.weight is model.get_parameter("token_embedding.weight")
    hidden = torch.randn(2, 64)
    assert torch.equal(model.decode(hidden), hidden @ model.token_embedding.weight.T)


def test_arguments_reach_the_model():
    with torch.device("meta"):
        model = zoo.gpt2_small(
            depth=3, vocabulary=11, positions=7, drop_rate=0.2, drop_path_rate=0.11, chunk_tokens=2
        )
        tokens = torch.zeros(1, 7, dtype=torch.int64)
        assert model(tokens).shape == (1, 7, 11)
    assert model.drop.p == model.blocks[2].drop.p == model.blocks[2].attention_drop_rate == 0.2
    rates = [getattr(block.drop_path, "rate", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.055, 0.11])
    assert len(blocks_of(model, tokens, tokens)) == 1 + 3 + 4 + 1


def test_blocks_offer_their_parts():
    first, *blocks, last = blocks_of(GPT2(**SMALL, chunk_tokens=32), *text())
    assert {"embedding", "position_embedding"} <= {*first}
    for number, steps in enumerate(blocks[:2]):
        parts = "norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.act", "mlp.fc2"
        assert {f"blocks.{number}.{part}" for part in parts} <= {*steps}
    # the last norm follows the last block
    assert "norm" in blocks[1]
    assert [steps[0] for steps in blocks[2:]] == ["loss.chunk.linear"] * 2
    assert last[-1].endswith("div")


TOKENS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((TOKENS.float(),), r"token numbers, int64 or int32; got torch\.float32"),
        ((TOKENS[:, :0],), r"at least one element on each axis; got \(2, 0\)"),
        ((TOKENS[0],), r"takes \(N, T\), 2 axes; got \(8,\)"),
        ((TOKENS.repeat(1, 5),), "has 32 positions; got 40 tokens"),
        ((TOKENS, TOKENS[:, 1:]), r"one target for each token; got targets \(2, 7\)"),
        ((TOKENS, TOKENS.int()), r"targets of int64; got torch\.int32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(InputError, match=message):
        GPT2(**SMALL)(*inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 0}, "vocabulary of at least 1; got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens of at least 1; got 0"),
        ({"heads": 5}, "64 is not divisible by 5"),
        ({"drop_rate": 1.0}, "drop_rate from 0 up to below 1; got 1.0"),
        ({"head": "exact"}, "head inplace or plain or fused; got 'exact'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        GPT2(**{**SMALL, **arguments})
