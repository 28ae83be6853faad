import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from tests.models.runs import maps_made, peaks, run, saved_storages, shake
from tests.training import assert_same
from zoo.errors import ArgumentError, InputError, WeightsError
from zoo.models.preactivation_resnet import (
    PreactivationResNet,
    Unit,
    bottleneck as preactivation_bottleneck,
)
from zoo.models.resnet import Block, ResNet, basic, bottleneck, conv
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork")

NAMES = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152)]
NAMES += ["wide_resnet50_2", "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d"]
MILLIONS = {"resnet110": 1.7, "resnet164": 1.7, "resnet1001": 10.3, "resnet1202": 19.4}


def torchvision_resnet(name, **arguments):
    """torchvision's model of this name; skips where torchvision cannot be imported."""
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    return getattr(models, name)(**arguments)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_equals_torchvision_bit_for_bit_and_keeps_no_more(name, training):
    theirs = shake(torchvision_resnet(name, num_classes=7))
    ours = getattr(zoo, name)(classes=7)
    ours.load_state_dict(theirs.state_dict())
    results, kept = run(ours, 2, 3, 40, 40, training=training)
    expected, kept_by_torchvision = run(theirs, 2, 3, 40, 40, training=training)
    assert_same(results, expected)
    assert kept <= kept_by_torchvision


@pytest.mark.parametrize("name", NAMES)
def test_has_torchvision_s_parameters_in_its_order(name):
    with torch.device("meta"):
        theirs, ours = torchvision_resnet(name), getattr(zoo, name)()
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [*shapes.items()]


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_draws_the_weights_that_torchvision_draws(name):
    torch.manual_seed(3)
    theirs = torchvision_resnet(name, num_classes=7)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = getattr(zoo, name)(classes=7)
    assert_same(ours.state_dict(), theirs.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def test_peaks_are_no_higher_than_torchvision_s():
    step, inference = peaks(zoo.resnet18())
    step_of_torchvision, inference_of_torchvision = peaks(torchvision_resnet("resnet18"))
    assert step <= 1.02 * step_of_torchvision
    assert inference <= 1.02 * inference_of_torchvision


def test_weights_go_back_to_torchvision():
    ours, theirs = zoo.resnet18(classes=7), torchvision_resnet("resnet18", num_classes=7)
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict())


def test_refuses_weights_of_another_size_and_stays_as_it_was():
    model = zoo.resnet18(classes=7)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"fc\.weight \(8, 512\) instead of \(7, 512\)"):
        model.load_state_dict(zoo.resnet18(classes=8).state_dict())
    assert_same(dict(model.state_dict()), dict(before))


def test_drops_rise_linearly_and_only_in_training():
    model = zoo.resnet18(classes=7, drop_rate=0.3, drop_path_rate=0.7)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert [getattr(block.drop_path, "rate", 0.0) for block in blocks] == pytest.approx(
        [i / 10 for i in range(8)]
    )
    plain = zoo.resnet18(classes=7)
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(images), plain.eval()(images))


def test_drops_features_before_the_classifier():
    torch.manual_seed(0)
    model = zoo.resnet18(drop_rate=0.3)
    model.fc = nn.Identity()
    model.layer4.register_forward_hook(lambda *_: torch.ones(8, 512, 2, 2))
    features = model(torch.randn(2, 3, 33, 33))
    assert 0.25 < (features == 0).float().mean() < 0.35
    assert features.max() == pytest.approx(1 / 0.7)


def test_drop_path_drops_the_branch_and_not_the_shortcut():
    block = Block(basic(8, 8), 0.999999)
    images = torch.rand(4, 8, 5, 5)
    assert torch.equal(block(images), images)


def test_runs_on_meta_tensors():
    with torch.device("meta"):
        assert zoo.resnet50(in_channels=1)(torch.empty(2, 1, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("block", "inputs", "names"),
    [
        (Block(basic(8, 8)), 8, "conv1 | bn1 relu | conv2 | bn2 add_ relu"),
        (
            Block(basic(8, 8, 2)), 8,
            "conv1 | bn1 relu | conv2 | downsample.0 | bn2 | downsample.1 | add_ relu",
        ),
        (
            Block(bottleneck(32, 8)), 32,
            "conv1 | bn1 relu | conv2 | bn2 relu | conv3 | bn3 add_ relu",
        ),
        (
            Block(bottleneck(8, 8)), 8,
            "conv1 | bn1 relu | conv2 | bn2 relu | conv3 | downsample.0 | bn3 | downsample.1"
            " | add_ relu",
        ),
        (Unit(basic(8, 8)), 8, "bn1 relu | conv1 | bn2 relu | conv2 add_"),
        (
            Unit(preactivation_bottleneck(8, 8)), 8,
            "bn1 relu | conv1 | bn2 relu | conv2 | bn3 relu | downsample | conv3 add_",
        ),
    ],
)  # fmt: skip
def test_the_parts_of_a_block_are_steps(block, inputs, names):
    assert zoo.chain_of(block, torch.randn(2, inputs, 8, 8)).names == tuple(names.split(" | "))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("residual", [Block, Unit])
def test_norm_activation_and_sum_take_the_memory_of_one_tensor(residual, depth):
    block = residual([conv(64, 64, 3) for _ in range(depth)])
    for number in range(1, depth + 1):
        setattr(block, f"conv{number}", nn.Identity())
    images = torch.randn(2, 64, 32, 32)
    assert trace(lambda: block(images)).peak <= (depth + 0.1) * images.nbytes


@pytest.mark.parametrize(
    ("model", "convolutions", "norms"),
    [
        (Block(basic(3, 3)), 2, 2), (Block(bottleneck(3, 16)), 4, 4), (zoo.resnet18(), 20, 20),
        (Unit(basic(3, 3)), 2, 2), (Unit(preactivation_bottleneck(3, 16)), 4, 3),
        (PreactivationResNet(basic, 1), 9, 7),
    ],
)  # fmt: skip
def test_activations_and_sums_are_in_place(model, convolutions, norms):
    made = maps_made(model, torch.randn(2, 3, 33, 33))
    assert (made.pop("convolution"), made.pop("norm")) == (convolutions, norms)
    assert made.keys() <= {"pool", "mean"}


@pytest.mark.parametrize(
    ("build", "steps", "blocks"),
    [
        # stem, units of three convolutions and norms, projections, sums after them, pool and fc
        (zoo.resnet50, 3 + 16 * 6 + 4 + 4 * 2 + 2, 1 + 16 + 1),
        (zoo.resnet164, 1 + 54 * 6 + 3 + 3, 1 + 54 + 1),
    ],
)
def test_groups_the_steps_by_blocks(build, steps, blocks):
    with torch.device("meta"):
        found = zoo.chain_of(build(), torch.empty(2, 3, 64, 64))
    assert len(found.names) == steps
    assert found.blocks[-1] + 1 == blocks


@pytest.mark.parametrize(
    ("build", "images", "match"),
    [
        (zoo.resnet18, torch.zeros(2, 4, 64, 64), "built for 3 channels; got 4"),
        (zoo.resnet18, torch.zeros(3, 64, 64), "takes .N, C, H, W., 4 axes"),
        (zoo.resnet18, torch.zeros(2, 3, 64, 64).byte(), "floating numbers; got torch.uint8"),
        (zoo.resnet18, torch.zeros(2, 3, 0, 64), "at least one element"),
        (zoo.resnet18, torch.zeros(1, 3, 32, 17), r"2 values per.*\(1, 3, 32, 17\) leaves 1"),
        (zoo.resnet110, torch.zeros(2, 1, 32, 32), "built for 3 channels; got 1"),
        (zoo.resnet110, torch.zeros(2, 3, 32), "takes .N, C, H, W., 4 axes"),
        (zoo.resnet110, torch.zeros(2, 3, 32, 32).long(), "floating numbers; got torch.int64"),
        (zoo.resnet110, torch.zeros(1, 3, 4, 4), r"2 values per.*\(1, 3, 4, 4\) leaves 1"),
    ],
)
def test_refuses_bad_images_before_anything_ran(build, images, match):
    model = build()
    with pytest.raises(InputError, match=match):
        model(images)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not any(norm.num_batches_tracked for norm in norms)


@pytest.mark.parametrize(
    ("model", "size"),
    [(ResNet(basic, (1, 1, 1, 1), 7), 32), (PreactivationResNet(basic, 1, 7), 4)],
)
def test_takes_one_small_image_where_statistics_can_be_computed_or_need_not(model, size):
    assert model.eval()(torch.randn(1, 3, 1, 1)).shape == (1, 7)
    model.train()
    assert model(torch.randn(1, 3, size + 1, size)).shape == (1, 7)
    assert model(torch.randn(1, 3, size, size + 1)).shape == (1, 7)
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm2d))
    assert model(torch.randn(1, 3, size, size)).shape == (1, 7)


@pytest.mark.parametrize(
    ("build", "network"), [(zoo.resnet18, "^ResNet"), (zoo.resnet110, "^PreactivationResNet")]
)
@pytest.mark.parametrize(
    "wrong", [{"classes": 0}, {"in_channels": 0}, {"drop_rate": 1.0}, {"drop_path_rate": -0.1}]
)
def test_refuses_arguments_out_of_range(build, network, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ArgumentError, match=rf"{network} needs {name} .*; got {value}"):
        build(**wrong)


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


def train_once(model, forward):
    """Logits and gradients, and the bytes kept for the backward, of one seeded run."""
    torch.manual_seed(1)
    images = torch.randn(3, 3, 9, 12, requires_grad=True)
    with saved_storages() as kept:
        logits = forward(images)
    gradients = torch.autograd.grad(logits.pow(2).sum(), [images, *model.parameters()])
    return [logits, *gradients], sum(kept.values())


@pytest.mark.parametrize("unit", [basic, preactivation_bottleneck])
def test_equals_the_paper_s_forward_bit_for_bit_and_keeps_no_more(unit):
    model = PreactivationResNet(unit, 2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    ours, kept = train_once(model, model)
    expected, kept_by_forward = train_once(
        model, lambda images: forward_as_in_the_paper(model, images)
    )
    assert all(torch.equal(left, right) for left, right in zip(ours, expected, strict=True))
    assert kept <= kept_by_forward


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_is_as_deep_as_its_name_says_and_as_large_as_the_paper_says(name, millions):
    with torch.device("meta"):
        model = getattr(zoo, name)()
    weights = {key: value for key, value in model.named_parameters() if value.ndim > 1}
    layers = [key for key in weights if "downsample" not in key]
    assert name == f"resnet{len(layers)}"
    assert round(sum(value.numel() for value in model.parameters()) / 1e6, 1) == millions


def test_projects_only_where_the_number_of_channels_changes():
    for block, stages in ((basic, (2, 3)), (preactivation_bottleneck, (1, 2, 3))):
        keys = PreactivationResNet(block, 2).state_dict()
        ends = [key for key in keys if "downsample" in key]
        assert ends == [f"layer{stage}.0.downsample.weight" for stage in stages]


def test_draws_weights_by_their_fan_out():
    torch.manual_seed(0)
    model = PreactivationResNet(preactivation_bottleneck, 1)
    weight = model.layer3[0].conv3.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert not model.fc.bias.any()


def test_drops_of_units_rise_linearly_and_only_in_training():
    model = PreactivationResNet(basic, 2, drop_rate=0.3, drop_path_rate=0.5)
    units = [module for module in model.modules() if isinstance(module, Unit)]
    assert [getattr(unit.drop_path, "rate", 0.0) for unit in units] == pytest.approx(
        [i / 10 for i in range(6)]
    )
    assert model.dropout.p == 0.3
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), forward_as_in_the_paper(model, images))
