import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from zoo.errors import ArgumentError
from zoo.layers.transformer import TransformerBlock


def timm_block(block, **arguments):
    """timm's block with a copy of ours' weights; skips where timm cannot be imported."""
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    from timm.models.vision_transformer import Block  # noqa: PLC0415

    theirs = Block(64, 4, qkv_bias=True, **arguments)
    theirs.load_state_dict(block.state_dict())
    theirs.mlp.drop1.p = 0.0  # ours drops nothing there, see the docstring
    return theirs


def run(block, training=True):
    """Output, gradients and bytes kept for the backward of one seeded run on (3, 17, 64)."""
    torch.manual_seed(1)
    x = torch.randn(3, 17, 64, requires_grad=True)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = block.train(training)(x)
    gradients = torch.autograd.grad(output.pow(2).sum(), [x, *block.parameters()])
    return [output.detach(), *gradients], sum(kept.values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"attention_drop_rate": 0.2}, {"attn_drop": 0.2}),
        ({"drop_rate": 0.2}, {"proj_drop": 0.2}),
        ({"drop_path_rate": 0.4}, {"drop_path": 0.4}),
        ({"mlp_ratio": 2.5}, {"mlp_ratio": 2.5}),
    ],
)
def test_equals_timm_bit_for_bit_and_keeps_no_more(ours, theirs, training):
    block = TransformerBlock(64, 4, **ours)
    results, kept = run(block, training)
    expected, kept_by_timm = run(timm_block(block, **theirs), training)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=0)
    assert kept <= 1.02 * kept_by_timm


@pytest.mark.parametrize("causal", [True, False])
def test_causal_tokens_do_not_see_later_ones(causal):
    block = TransformerBlock(16, 2, causal=causal)
    x = torch.randn(1, 8, 16)
    changed = torch.cat([x[:, :5], -x[:, 5:]], dim=1)
    assert torch.equal(block(x)[:, :5], block(changed)[:, :5]) == causal
    assert not torch.equal(block(x)[:, 5:], block(changed)[:, 5:])


class Scaled(nn.Module):
    """A user's model of two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(TransformerBlock(16, 2), TransformerBlock(16, 4))
        self.head = nn.Linear(16, 3)

    def forward(self, x, scale):
        return self.head(self.blocks(x) * scale)


def test_is_a_block_in_a_model_of_the_user():
    model, inputs = Scaled(), (torch.randn(2, 5, 16), torch.randn(2, 5, 1))
    found = zoo.chain_of(model, inputs)
    firsts = [found.names[found.blocks.index(block)] for block in dict.fromkeys(found.blocks)]
    assert firsts[:2] == ["blocks.0.norm1", "blocks.1.norm1"]
    expected = model(*inputs)
    assert torch.equal(zoo.checkpoint(model, "blocks", inputs=inputs)(*inputs), expected)


def test_writes_no_input():
    block, x = TransformerBlock(16, 2, drop_rate=0.5, drop_path_rate=0.5), torch.randn(2, 5, 16)
    before = x.clone()
    block(x)
    assert torch.equal(x, before)
    assert x._version == 0


def test_copies_have_weights_of_their_own():
    block, x = TransformerBlock(16, 2, activation="gelu_tanh"), torch.randn(2, 5, 16)
    expected = block(x)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(x), expected)
        nn.init.zeros_(copied.mlp["fc2"].weight)
        assert not torch.equal(copied(x), expected)
        assert torch.equal(block(x), expected)


def test_runs_on_fake_tensors():
    with FakeTensorMode():
        output = TransformerBlock(64, 4, causal=True)(torch.empty(2, 9, 64))
        output.sum().backward()
    assert output.shape == (2, 9, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, r"64 is not divisible by 5\. Choose heads from \[1, 2, 4"),
        ({"heads": 0}, "heads of at least 1; got 0"),
        ({"mlp_ratio": 0.0}, "hidden of at least 1; got 0"),
        ({"activation": "relu"}, "activation gelu or gelu_tanh; got 'relu'"),
        ({"drop_rate": 1.0}, "drop_rate from 0 up to below 1; got 1.0"),
        ({"attention_drop_rate": -0.1}, "attention_drop_rate from 0 up to below 1"),
        ({"drop_path_rate": 2}, "drop_path_rate from 0 up to below 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        TransformerBlock(64, **{"heads": 4, **arguments})
