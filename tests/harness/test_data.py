"""Batches are real, of the shape that a config asks for, and the same for the same seed."""

import sys

import pytest
import torch

from zoo.errors import ConfigError
from zoo.harness.config import ModelConfig
from zoo.harness.data import batches

SHAPES = {
    "photographs": (40, (2, 3, 40, 40), (2,)),
    "digits": (32, (2, 3, 32, 32), (2,)),
    "volume": ([16, 32, 24], (2, 1, 16, 32, 24), (2, 16, 32, 24)),
    "text": (12, (2, 12), (2, 12)),
    "stream": (12, (12, 2), (12, 2)),
}


def config(kind, size=None, batch_size=2, **arguments):
    return ModelConfig("any", kind, batch_size, size or SHAPES[kind][0], arguments)


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_and_types(kind):
    _, inputs, targets = SHAPES[kind]
    (batch,) = batches(config(kind), 1, seed=0)
    assert (batch.inputs.shape, batch.targets.shape) == (inputs, targets)
    assert batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()


@pytest.mark.parametrize("kind", SHAPES)
def test_the_seed_decides(kind):
    first, again = batches(config(kind), 3, seed=5), batches(config(kind), 3, seed=5)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one.inputs, other.inputs, rtol=0, atol=0)
        torch.testing.assert_close(one.targets, other.targets, rtol=0, atol=0)
    assert not torch.equal(first[0].inputs, first[1].inputs)


@pytest.mark.parametrize("kind", ["photographs", "digits", "volume"])
def test_labels_fill_the_classes(kind):
    found = batches(config(kind, batch_size=16, classes=3), 2, seed=0)
    labels = torch.cat([batch.targets.flatten() for batch in found])
    assert labels.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["photographs", "digits", "volume"])
def test_inputs_are_roughly_normalized(kind):
    (batch,) = batches(config(kind, batch_size=16), 1, seed=0)
    assert batch.inputs.mean().abs() < 1
    assert 0.3 < batch.inputs.std() < 2


@pytest.mark.parametrize("kind", ["text", "stream"])
def test_the_target_is_the_next_word(kind):
    (batch,) = batches(config(kind), 1, seed=0)
    axis = 1 if kind == "text" else 0
    following = batch.inputs.narrow(axis, 1, 11)
    torch.testing.assert_close(batch.targets.narrow(axis, 0, 11), following, rtol=0, atol=0)


def test_a_stream_goes_on_from_batch_to_batch():
    first, second = batches(config("stream"), 2, seed=0)
    torch.testing.assert_close(first.targets[-1], second.inputs[0], rtol=0, atol=0)


def test_a_small_vocabulary_gathers_rare_words_in_its_last():
    (batch,) = batches(config("text", size=2000, vocabulary=20), 1, seed=0)
    assert batch.inputs.max() == 19
    assert batch.inputs.min() == 0


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    words = r"the comparison's data needs sklearn: pip install 'zoo-checkpoint\[compare\]'"
    with pytest.raises(ConfigError, match=words):
        batches(config("digits"), 1, seed=0)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("volume", [16, 16], r"volume takes 3 size\(s\); got \[16, 16\]"),
        ("text", [16, 16], r"text takes 1 size\(s\)"),
        ("text", 10**6, r"the text has \d{6}\. Make"),
        ("stream", 10**5, "needs 200002 words; the text has"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(kind, size, message):
    with pytest.raises(ConfigError, match=message):
        batches(config(kind, size), 1, seed=0)
