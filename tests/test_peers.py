"""What docs/comparison.md says of other libraries' checkpointing, run on the installed ones.

A test that fails here may mean that they have become better: then the page changes, too.
"""

import functools
import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


@pytest.mark.parametrize(("saved", "moves"), [([], 2), ([torch.ops.aten.native_batch_norm], 1)])
def test_a_selective_policy_moves_statistics_twice_unless_it_saves_the_norm(saved, moves):
    batch = torch.rand(6, 4)
    expected, found = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    for _ in range(moves):
        expected(batch)
    context = functools.partial(
        create_selective_checkpoint_contexts, [operator.default for operator in saved]
    )
    model = nn.Sequential(found, nn.Linear(4, 4))
    checkpoint(model, batch, use_reentrant=False, context_fn=context).sum().backward()
    torch.testing.assert_close(found.running_mean, expected.running_mean, rtol=0, atol=0)
    assert updates(model) == {2}  # the counter is an operator of its own


def test_torch_has_a_private_planner_of_selective_checkpointing():
    assert importlib.util.find_spec("torch.distributed._tools.sac_ilp") is not None


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
