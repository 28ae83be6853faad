"""A digest changes with any bit, and only the digest of the kind that holds the bit."""

import pytest
import torch
from torch import nn

from zoo.harness.training import digest, step_digests
from zoo.report.rows import differences


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    return model, loss.detach()


def flip_bit(tensor):
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw[0] ^= 1


def changed(change):
    model, loss = trained()
    before = step_digests(model, loss)
    change(model, loss)
    return differences([before], [step_digests(model, loss)])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("loss", lambda model, loss: flip_bit(loss)),
        ("gradients", lambda model, loss: flip_bit(model[0].bias.grad)),
        ("gradients", lambda model, loss: setattr(model[0].bias, "grad", None)),
        ("buffers", lambda model, loss: flip_bit(model[1].running_var)),
        ("buffers", lambda model, loss: model[1].num_batches_tracked.add_(1)),
        ("parameters", lambda model, loss: flip_bit(model[1].weight)),
        ("rng", lambda model, loss: torch.rand(1)),
    ],
)
def test_one_bit_shows_in_its_kind_alone(kind, change):
    assert changed(change) == [f"{kind} from step 1 on"]


def test_equal_runs_have_equal_digests():
    assert step_digests(*trained()) == step_digests(*trained())
    assert step_digests(*trained()) != step_digests(*trained(seed=1))


def test_signs_of_zero_names_types_and_shapes_count():
    zeros = torch.zeros(4)
    tensors = [("a", zeros), ("a", -zeros), ("b", zeros), ("a", zeros.view(2, 2)), ("a", None)]
    tensors += [("a", zeros.int()), ("a", zeros.bfloat16())]
    assert len({digest([named]) for named in tensors}) == len(tensors)


def test_strides_do_not_count():
    matrix = torch.randn(3, 5)
    assert digest([("a", matrix)]) == digest([("a", matrix.t().contiguous().t())])


def test_differences_name_the_first_step_of_each_kind():
    baseline = [{"loss": "a", "rng": "a"}, {"loss": "b", "rng": "b"}, {"loss": "c", "rng": "c"}]
    other = [{"loss": "a", "rng": "a"}, {"loss": "b", "rng": "x"}, {"loss": "y", "rng": "z"}]
    assert differences(baseline, other) == ["rng from step 2 on", "loss from step 3 on"]
