import copy

import pytest
import torch
from torch import nn

import zoo
from tests.models.runs import blocks_of, text
from tests.training import needs_numpy
from zoo.errors import ArgumentError, InputError
from zoo.models.llama import Llama

pytestmark = pytest.mark.usefixtures("without_fork")

SMALL = {
    "width": 64, "depth": 2, "heads": 4, "groups": 2, "head_width": 32, "mlp_width": 96,
    "vocabulary": 101, "positions": 64,
}  # fmt: skip
OURS = {
    "llama": {"rotary_stretch": 32.0},
    "qwen3": {"qk_norm": True, "norm_epsilon": 1e-6, "rotary_base": 1e6},
    "qwen2": {"qkv_bias": True, "norm_epsilon": 1e-6, "rotary_base": 1e6},
}
OURS["moe"] = OURS["qwen3"] | {"experts": 4, "experts_per_token": 3, "balance": 0.1}
THEIR_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "norm_topk_prob": True, "experts_implementation": "grouped_mm", "output_router_logits": True,
    "router_aux_loss_coef": 0.1, "decoder_sparse_step": 1,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def hugging_face(kind, tied=True, dtype=torch.float32, drop_rate=0.0):
    """Hugging Face's model of the same size with larger weights; skips without the library."""
    pytest.importorskip("transformers", exc_type=(ImportError, RuntimeError))
    import transformers  # noqa: PLC0415

    name = {"llama": "Llama", "qwen3": "Qwen3", "qwen2": "Qwen2", "moe": "Qwen3Moe"}[kind]
    plain = {"rope_type": "default", "rope_theta": 1e6}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=101,
        # more than the texts before the stretch had
        max_position_embeddings=16384,
        rms_norm_eps=1e-5 if kind == "llama" else 1e-6,
        rope_parameters=STRETCHED if kind == "llama" else plain,
        tie_word_embeddings=tied,
        attention_dropout=drop_rate,
        attn_implementation="sdpa",
        use_cache=False,
        **(THEIR_EXPERTS if kind == "moe" else {}),
    )
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def padded():
    """A mask (3, 20) of a text that ends early and one that begins late."""
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, 15:], mask[1, :4] = 0, 0
    return mask


def packed():
    """Positions (3, 20) of two texts in each row."""
    return torch.cat([torch.arange(7), torch.arange(13)]).repeat(3, 1)


# their name of an argument, ours, and its value
FORMS = {
    "whole": ({}, {}),
    "padded": ({"attention_mask": padded()}, {"mask": padded()}),
    "packed": ({"position_ids": packed()}, {"positions": packed()}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "tied"),
    [("llama", True), ("llama", False), ("qwen3", True), ("qwen2", False), ("moe", False)],
)
def test_equals_hugging_face_bit_for_bit(kind, tied, dtype, form):
    torch.manual_seed(0)
    theirs = hugging_face(kind, tied, dtype)
    ours = Llama(**SMALL, **OURS[kind], tied=tied).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    (tokens, targets), (named_theirs, named) = text(), FORMS[form]
    assert torch.equal(ours(tokens, **named), theirs(tokens, **named_theirs).logits)
    expected = theirs(tokens, labels=tokens, **named_theirs).loss
    loss = ours(tokens, targets, **named)
    assert torch.equal(loss, expected)
    expected.backward()
    loss.backward()
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameters.pop(name).grad, parameter.grad), name
    assert not parameters


@pytest.mark.usefixtures("few_plans")
@pytest.mark.parametrize(
    "option",
    [
        {"checkpoint": "blocks"},
        {"checkpoint": True},
        {"checkpoint": 1},
        pytest.param({"memory_budget": 0.99}, marks=needs_numpy),
    ],
)
def test_experts_are_chosen_and_counted_once_under_every_option(option):
    """A second forward would count each token twice, and after an update choose other experts."""
    torch.manual_seed(0)
    plain = Llama(**SMALL, experts=4, drop_rate=0.1)
    planned = zoo.checkpoint(copy.deepcopy(plain), **option)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, planned)]
    for seed in range(3):
        for model, optimizer in zip((plain, planned), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            model(torch.randint(101, (3, 20)), torch.randint(101, (3, 20))).backward()
            optimizer.step()
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    loads = [layer.mlp.load for layer in planned.model.layers]
    assert [load.sum().item() for load in loads] == [3 * 60 * 2] * 2
    for load, layer in zip(loads, plain.model.layers, strict=True):
        assert torch.equal(load, layer.mlp.load)


@pytest.mark.parametrize("training", [True, False])
def test_attention_weights_are_dropped_as_hugging_face_does(training):
    torch.manual_seed(0)
    theirs = hugging_face("llama", drop_rate=0.5).train(training)
    ours = Llama(**SMALL, **OURS["llama"], drop_rate=0.5).train(training)
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(1)
    expected = theirs(text()[0]).logits
    torch.manual_seed(1)
    assert torch.equal(ours(text()[0]), expected)


def test_frequencies_are_float32_whatever_type_the_parameters_have():
    torch.manual_seed(0)
    model = Llama(**SMALL)
    rotary, positions = model.bfloat16().model.rotary, torch.tensor([[60]])
    turned, _ = rotary(torch.empty(1, dtype=torch.float32), positions)
    exact = 60.0 * 5e5 ** (-torch.arange(0, 32, 2).double() / 32)
    torch.testing.assert_close(turned[0, 0, 0, :16].double(), exact.cos(), rtol=0, atol=1e-5)


def test_a_token_reads_its_own_text_up_to_itself():
    model, (tokens, _) = Llama(**SMALL), text()
    changed = tokens.clone()
    changed[:, 9:] = 100 - tokens[:, 9:]
    assert torch.equal(model(tokens)[:, :9], model(changed)[:, :9])
    mask = torch.ones_like(tokens).index_fill(1, torch.tensor([3]), 0)
    hidden = tokens.index_fill(1, torch.tensor([3]), 7)
    assert torch.equal(model(tokens, mask=mask)[:, 4:], model(hidden, mask=mask)[:, 4:])
    changed[:, :7], changed[:, 7:] = 100 - tokens[:, :7], tokens[:, 7:]
    one, other = (model(texts, positions=packed())[:, 7:] for texts in (tokens, changed))
    assert torch.equal(one, other)
    alone = model(tokens[:, 7:])
    torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (zoo.llama3_2_1b, 1_235_814_400),
        (zoo.llama3_2_3b, 3_212_749_824),
        (zoo.llama3_1_8b, 8_030_261_248),
        (zoo.qwen3_0_6b, 596_049_920),
        (zoo.qwen3_1_7b, 1_720_574_976),
    ],
)
def test_published_sizes(build, parameters):
    with torch.device("meta"):
        model, tokens = build(), torch.zeros(2, 9, dtype=torch.int64)
        assert model(tokens).shape == (2, 9, model.lm_head.out_features)
        assert model(tokens, tokens).shape == ()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@needs_numpy
@pytest.mark.usefixtures("few_plans")
def test_the_8b_is_planned_on_meta():
    with torch.device("meta"):
        model, tokens = zoo.llama3_1_8b(depth=2), torch.zeros(1, 4096, dtype=torch.int64)
    curve = zoo.frontier(model, (tokens, tokens), device="a100", optimizer="sgd")
    least = min(point.peak for point in curve)
    activations = curve.baseline.peak - least
    # of a layer's activations most go, and of the logits (0.98 GiB) all but a chunk
    assert activations > 2**30


def test_each_layer_and_each_chunk_of_the_loss_is_a_block():
    model = Llama(**SMALL, chunk_tokens=32)
    _, *layers, last = blocks_of(model, *text())
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.silu"} <= {*layers[0]}
    assert {"model.layers.1.mlp.gate_proj", "model.norm.mul"} <= {*layers[1]}
    assert [steps[0] for steps in layers[2:]] == ["loss.chunk.linear"] * 2
    assert last[-1].endswith("div")


TOKENS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"mask": TOKENS[:, 1:]}, r"mask for each of the tokens \(2, 8\); got \(2, 7\)"),
        ({"positions": 7}, r"positions for each of the tokens \(2, 8\); got 7"),
        ({"mask": TOKENS.float()}, r"mask of whole numbers; got torch\.float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(named, message):
    with pytest.raises(InputError, match=message):
        Llama(**SMALL)(TOKENS, **named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "groups that divide the heads .* got groups=3, heads=4"),
        ({"head_width": 7}, "an even head_width; got .* head_width=7"),
        ({"mlp_width": 0}, "mlp_width of at least 1; got 0"),
        ({"experts": 2, "experts_per_token": 3}, "at most its experts=2; got 3"),
        ({"head": "exact"}, "head inplace or plain or fused; got 'exact'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Llama(**{**SMALL, **arguments})
