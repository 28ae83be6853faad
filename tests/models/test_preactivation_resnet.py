import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models.runs import noting_kept
from zoo.chain import outline, step_names
from zoo.errors import ArgumentError, InputError
from zoo.measure.memory import trace
from zoo.models import preactivation_resnet
from zoo.models.preactivation_resnet import BasicUnit, BottleneckUnit, PreactivationResNet

MILLIONS = {"resnet110": 1.7, "resnet164": 1.7, "resnet1001": 10.3, "resnet1202": 19.4}


def unit_as_in_the_paper(unit, images, first):
    """A unit written as one forward, from the paper's figure and the authors' code."""
    active = F.relu(unit.bn1(images), inplace=True)
    branch = unit.conv2(F.relu(unit.bn2(unit.conv1(active)), inplace=True))
    if hasattr(unit, "conv3"):
        branch = unit.conv3(F.relu(unit.bn3(branch), inplace=True))
    shortcut = active if first else images
    return branch + (shortcut if unit.downsample is None else unit.downsample(shortcut))


def forward_as_in_the_paper(model, images):
    features = model.conv1(images)
    for stage in (model.layer1, model.layer2, model.layer3):
        for number, unit in enumerate(stage):
            features = unit_as_in_the_paper(unit, features, first=number == 0)
    features = F.relu(model.bn(features), inplace=True)
    return model.fc(F.adaptive_avg_pool2d(features, 1).flatten(1))


def run(model, forward):
    """Logits and gradients, and the bytes kept for the backward, of one seeded run."""
    torch.manual_seed(1)
    images = torch.randn(3, 3, 9, 12, requires_grad=True)
    with noting_kept() as kept:
        logits = forward(images)
    gradients = torch.autograd.grad(logits.pow(2).sum(), [images, *model.parameters()])
    return [logits, *gradients], sum(kept.values())


@pytest.mark.parametrize("unit", [BasicUnit, BottleneckUnit])
def test_equals_the_paper_s_forward_bit_for_bit_and_keeps_no_more(unit):
    model = PreactivationResNet(unit, 2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    ours, kept = run(model, model)
    expected, kept_by_forward = run(model, lambda images: forward_as_in_the_paper(model, images))
    assert all(torch.equal(left, right) for left, right in zip(ours, expected, strict=True))
    assert kept <= kept_by_forward


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_is_as_deep_as_its_name_says_and_as_large_as_the_paper_says(name, millions):
    with torch.device("meta"):
        model = getattr(preactivation_resnet, name)()
    weights = {key: value for key, value in model.named_parameters() if value.ndim > 1}
    layers = [key for key in weights if "downsample" not in key]
    assert name == f"resnet{len(layers)}"
    assert round(sum(value.numel() for value in model.parameters()) / 1e6, 1) == millions
    assert f"{millions} million parameters" in getattr(preactivation_resnet, name).__doc__


def test_projects_only_where_the_number_of_channels_changes():
    basic, bottleneck = PreactivationResNet(BasicUnit, 2), PreactivationResNet(BottleneckUnit, 2)
    ends = [key for key in basic.state_dict() if "downsample" in key]
    assert ends == ["layer2.0.downsample.weight", "layer3.0.downsample.weight"]
    ends = [key for key in bottleneck.state_dict() if "downsample" in key]
    assert ends == [f"layer{stage}.0.downsample.weight" for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        (BasicUnit(8, 8, 1, False, 0.0), "normalize1 convolve1 normalize2 add"),
        (
            BottleneckUnit(8, 8, 1, True, 0.0),
            "normalize1 convolve1 normalize2 convolve2 normalize3 project add",
        ),
    ],
)
def test_offers_the_parts_of_a_unit_as_steps(unit, names):
    assert step_names(unit, outline(unit.steps()).steps) == names.split()


@pytest.mark.parametrize("unit", [BasicUnit, BottleneckUnit])
def test_norm_and_activation_take_the_memory_of_one_tensor(unit):
    chain = unit(8, 8, 1, False, 0.0)
    steps = outline(chain.steps()).steps
    state = (torch.randn(2, 8, 32, 32),)
    for name, step in zip(step_names(chain, steps), steps, strict=True):
        before, after = state, step(*state)
        state = after if isinstance(after, tuple) else (after,)
        if name.startswith("normalize"):
            assert trace(functools.partial(step, *before)).peak <= 1.1 * state[0].nbytes


def test_groups_the_steps_by_units():
    with torch.device("meta"):
        found = outline(preactivation_resnet.resnet1001().steps())
    assert len(found.steps) == 1 + 333 * 6 + 3 + 2
    assert found.blocks[-1] + 1 == 1 + 333 + 1


@pytest.mark.parametrize("unit", [BasicUnit, BottleneckUnit])
def test_no_step_writes_its_inputs(unit):
    model = PreactivationResNet(unit, 2, drop_rate=0.1, drop_path_rate=0.5)
    state = (torch.randn(2, 3, 9, 12),)
    for step in outline(model.steps()).steps:
        before = [(tensor.clone(), tensor._version) for tensor in state]
        after = step(*state)
        for tensor, (value, version) in zip(state, before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor, value)
        state = after if isinstance(after, tuple) else (after,)
    assert state[0].shape == (2, 10)


def test_draws_weights_by_their_fan_out():
    torch.manual_seed(0)
    model = PreactivationResNet(BottleneckUnit, 1)
    weight = model.layer3[0].conv3.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert not model.fc.bias.any()


def test_drops_rise_linearly_and_only_in_training():
    model = PreactivationResNet(BasicUnit, 2, drop_rate=0.3, drop_path_rate=0.5)
    units = [module for module in model.modules() if isinstance(module, BasicUnit)]
    assert [unit.drop_path.rate for unit in units] == pytest.approx([i / 10 for i in range(6)])
    assert model.dropout.p == 0.3
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), forward_as_in_the_paper(model, images))


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(2, 1, 32, 32), "built for 3 channels; got 1"),
        (torch.zeros(2, 3, 32), "takes .N, C, H, W., 4 axes"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), "floating numbers; got torch.int64"),
        (torch.zeros(1, 3, 4, 4), r"at least 2 values per channel.*\(1, 3, 4, 4\) leaves 1"),
    ],
)
def test_refuses_bad_images_before_anything_ran(images, match):
    model = PreactivationResNet(BasicUnit, 1)
    with pytest.raises(InputError, match=match):
        model(images)
    assert int(model.layer1[0].bn1.num_batches_tracked) == 0


def test_takes_one_small_image_where_statistics_can_be_computed():
    model = PreactivationResNet(BasicUnit, 1)
    assert model(torch.randn(1, 3, 4, 5)).shape == (1, 10)
    assert model(torch.randn(1, 3, 5, 4)).shape == (1, 10)
    assert model.eval()(torch.randn(1, 3, 1, 1)).shape == (1, 10)


@pytest.mark.parametrize(
    "wrong", [{"classes": 0}, {"in_channels": 0}, {"drop_rate": 1.0}, {"drop_path_rate": -0.1}]
)
def test_refuses_arguments_out_of_range(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ArgumentError, match=rf"PreactivationResNet needs {name} .*; got {value}"):
        preactivation_resnet.resnet110(**wrong)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_on_their_own(clone):
    model = PreactivationResNet(BottleneckUnit, 1)
    twin = clone(model)
    ours, theirs = run(model, model)[0], run(twin, twin)[0]
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
    with torch.no_grad():
        model.conv1.weight.zero_()
    assert not torch.equal(run(twin, twin)[0][0], run(model, model)[0][0])
