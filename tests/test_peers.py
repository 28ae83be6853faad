"""What the README says of other libraries' checkpointing, run on the installed ones.

A test that fails here may mean that they have become better: then the README changes, too.
"""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo

UNAVAILABLE = (ImportError, RuntimeError)


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))


def updates(model):
    """How often one training step moved the statistics of the norms."""
    counts = (buffer for name, buffer in model.named_buffers() if "num_batches" in name)
    return set(map(int, counts))


@pytest.mark.parametrize(
    ("way", "count"),
    [(zoo.recompute, 1), (functools.partial(checkpoint, use_reentrant=False), 2)],
)
def test_torch_moves_statistics_twice(way, count):
    model = block()
    way(model, torch.rand(3, 4)).sum().backward()
    assert updates(model) == {count}


def test_timm_moves_statistics_twice_and_an_adapted_model_once():
    timm = pytest.importorskip("timm", exc_type=UNAVAILABLE)
    model = timm.create_model("resnet10t", num_classes=3)
    model.set_grad_checkpointing()
    model(torch.rand(2, 3, 64, 64)).sum().backward()
    # those of the stem are outside of timm's segments
    assert updates(model) == {1, 2}
    model = zoo.checkpoint(timm.create_model("resnet10t", num_classes=3), "blocks")
    model(torch.rand(2, 3, 64, 64)).sum().backward()
    assert updates(model) == {1}


def test_torchvision_s_memory_efficient_densenet_moves_statistics_twice():
    models = pytest.importorskip("torchvision.models", exc_type=UNAVAILABLE)
    model = models.DenseNet(4, (2, 2), 8, num_classes=3, memory_efficient=True)
    model(torch.rand(2, 3, 64, 64)).sum().backward()
    assert 2 in updates(model)
