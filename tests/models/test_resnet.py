import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from tests.models.runs import assert_same, peaks, run, shake
from zoo.chain import outline, step_names
from zoo.errors import ArgumentError, InputError, WeightsError
from zoo.measure.memory import trace
from zoo.models import resnet
from zoo.models.resnet import BasicBlock, Bottleneck, ResNet

NAMES = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152)]
NAMES += ["wide_resnet50_2", "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d"]


def torchvision_resnet(name, **arguments):
    """torchvision's model of this name; skips where torchvision cannot be imported."""
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    return getattr(models, name)(**arguments)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_equals_torchvision_bit_for_bit_and_keeps_no_more(name, training):
    theirs = shake(torchvision_resnet(name, num_classes=7))
    ours = getattr(resnet, name)(classes=7)
    ours.load_state_dict(theirs.state_dict())
    results, kept = run(ours, 2, 3, 40, 40, training=training)
    expected, kept_by_torchvision = run(theirs, 2, 3, 40, 40, training=training)
    assert_same(results, expected)
    assert kept <= kept_by_torchvision


@pytest.mark.parametrize("name", NAMES)
def test_has_torchvision_s_parameters_in_its_order(name):
    with torch.device("meta"):
        theirs, ours = torchvision_resnet(name), getattr(resnet, name)()
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [*shapes.items()]
    millions = sum(parameter.numel() for parameter in ours.parameters()) / 1e6
    assert f"{millions:.1f} million parameters" in getattr(resnet, name).__doc__


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_draws_the_weights_that_torchvision_draws(name):
    torch.manual_seed(3)
    theirs = torchvision_resnet(name, num_classes=7)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = getattr(resnet, name)(classes=7)
    assert_same(ours.state_dict(), theirs.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def test_peaks_are_no_higher_than_torchvision_s():
    step, inference = peaks(resnet.resnet18())
    step_of_torchvision, inference_of_torchvision = peaks(torchvision_resnet("resnet18"))
    assert step <= 1.02 * step_of_torchvision
    assert inference <= 1.02 * inference_of_torchvision


def test_weights_go_back_to_torchvision():
    ours, theirs = resnet.resnet18(classes=7), torchvision_resnet("resnet18", num_classes=7)
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict())


def test_refuses_weights_of_another_size_and_stays_as_it_was():
    model = resnet.resnet18(classes=7)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"fc\.weight \(8, 512\) instead of \(7, 512\)"):
        model.load_state_dict(resnet.resnet18(classes=8).state_dict())
    assert_same(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (BasicBlock(8, 8), "convolve1 normalize1 convolve2 add"),
        (BasicBlock(8, 8, 2), "convolve1 normalize1 convolve2 project add"),
        (Bottleneck(32, 8), "convolve1 normalize1 convolve2 normalize2 convolve3 add"),
        (Bottleneck(8, 8), "convolve1 normalize1 convolve2 normalize2 convolve3 project add"),
    ],
)
def test_offers_the_parts_of_a_block_as_steps(block, names):
    assert step_names(block, outline(block.steps()).steps) == names.split()


@pytest.mark.parametrize("chain", [BasicBlock(64, 64), Bottleneck(64, 16), resnet.resnet18()])
def test_norm_activation_and_sum_take_the_memory_of_one_tensor(chain):
    steps = outline(chain.steps()).steps[:7]
    state = (torch.randn(2, 3 if isinstance(chain, ResNet) else 64, 32, 32),)
    for name, step in zip(step_names(chain, steps), steps, strict=True):
        before, after = state, step(*state)
        state = after if isinstance(after, tuple) else (after,)
        if name in ("normalize", "normalize1", "add"):
            assert trace(functools.partial(step, *before)).peak <= 1.1 * state[0].nbytes


def test_groups_the_steps_by_blocks():
    with torch.device("meta"):
        found = outline(resnet.resnet50().steps())
    assert len(found.steps) == 3 + 16 * 6 + 4 + 1
    assert found.blocks[-1] + 1 == 1 + 16 + 1


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_no_step_writes_its_inputs(name):
    model = getattr(resnet, name)(classes=7, drop_rate=0.1, drop_path_rate=0.5)
    state = (torch.randn(2, 3, 33, 47),)
    for step in outline(model.steps()).steps:
        before = [(tensor.clone(), tensor._version) for tensor in state]
        after = step(*state)
        for tensor, (value, version) in zip(state, before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor, value)
        state = after if isinstance(after, tuple) else (after,)
    assert state[0].shape == (2, 7)


def test_drops_rise_linearly_and_only_in_training():
    model = resnet.resnet18(classes=7, drop_rate=0.3, drop_path_rate=0.7)
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock)]
    assert [block.drop_path.rate for block in blocks] == pytest.approx([i / 10 for i in range(8)])
    plain = resnet.resnet18(classes=7)
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(images), plain.eval()(images))


def test_drops_features_before_the_classifier():
    torch.manual_seed(0)
    model = resnet.resnet18(drop_rate=0.3)
    model.fc = nn.Identity()
    head = outline(model.steps()).steps[-1]
    features = head(torch.ones(8, 512, 2, 2))
    assert 0.25 < (features == 0).float().mean() < 0.35
    assert features.max() == pytest.approx(1 / 0.7)


def test_drop_path_drops_the_branch_and_not_the_shortcut():
    block = BasicBlock(8, 8, drop_path=0.999999)
    images = torch.rand(4, 8, 5, 5)
    assert torch.equal(block(images), images)


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(2, 4, 64, 64), "built for 3 channels; got 4"),
        (torch.zeros(3, 64, 64), "takes .N, C, H, W., 4 axes"),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "floating numbers; got torch.uint8"),
        (torch.zeros(2, 3, 0, 64), "at least one element"),
        (torch.zeros(1, 3, 32, 17), r"at least 2 values per channel.*\(1, 3, 32, 17\) leaves 1"),
    ],
)
def test_refuses_bad_images_before_anything_ran(images, match):
    model = resnet.resnet18(classes=7)
    with pytest.raises(InputError, match=match):
        model(images)
    assert int(model.bn1.num_batches_tracked) == 0


def test_takes_one_small_image_where_no_statistics_are_computed():
    model = resnet.resnet18(classes=7)
    assert model.eval()(torch.randn(1, 3, 1, 1)).shape == (1, 7)
    model.train()
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm2d))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    assert model.train()(torch.randn(1, 3, 33, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    "wrong", [{"classes": 0}, {"in_channels": 0}, {"drop_rate": 1.0}, {"drop_path_rate": -0.1}]
)
def test_refuses_arguments_out_of_range(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ArgumentError, match=rf"ResNet needs {name} .*; got {value}"):
        resnet.resnet18(**wrong)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_on_their_own(clone):
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=7, drop_path_rate=0.1)
    twin = clone(model)
    assert_same(run(twin, 2, 3, 40, 40)[0], run(model, 2, 3, 40, 40)[0])
    with torch.no_grad():
        model.conv1.weight.zero_()
    assert not torch.equal(
        run(twin, 2, 3, 40, 40)[0]["logits"], run(model, 2, 3, 40, 40)[0]["logits"]
    )


def test_runs_on_meta_tensors():
    with torch.device("meta"):
        assert resnet.resnet50(in_channels=1)(torch.empty(2, 1, 224, 224)).shape == (2, 1000)
