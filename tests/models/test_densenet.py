import pytest
import torch
from torch import nn

import zoo
from tests.models.runs import maps_made, peaks, run, shake
from tests.training import assert_same
from zoo.errors import ArgumentError, InputError
from zoo.models.densenet import DenseBlock, DenseLayer, DenseNet, Transition
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork")


def torchvision_densenet(depths=(2, 3), growth_rate=4, **arguments):
    """torchvision's model of these depths; skips where torchvision cannot be imported."""
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    return models.DenseNet(growth_rate, depths, 2 * growth_rate, num_classes=7, **arguments)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_equals_torchvision_bit_for_bit_and_keeps_no_more(drop_rate, training):
    theirs = shake(torchvision_densenet(drop_rate=drop_rate))
    ours = DenseNet(4, (2, 3), classes=7, drop_rate=drop_rate)
    ours.load_state_dict(theirs.state_dict())
    results, kept = run(ours, 2, 3, 37, 37, training=training)
    expected, kept_by_torchvision = run(theirs, 2, 3, 37, 37, training=training)
    assert_same(results, expected)
    assert kept <= kept_by_torchvision


def test_small_images_take_torchvision_s_network_with_another_stem():
    theirs = shake(torchvision_densenet((2, 2, 2)))
    theirs.features.conv0 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    for name in ("norm0", "relu0", "pool0"):
        delattr(theirs.features, name)
    ours = DenseNet(4, (2, 2, 2), classes=7, small_images=True)
    ours.load_state_dict(theirs.state_dict())
    results, kept = run(ours, 2, 3, 10, 10)
    expected, kept_by_torchvision = run(theirs, 2, 3, 10, 10)
    assert_same(results, expected)
    assert kept <= kept_by_torchvision


@pytest.mark.parametrize("name", [f"densenet{depth}" for depth in (121, 161, 169, 201)])
def test_has_torchvision_s_parameters_in_its_order(name):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    with torch.device("meta"):
        theirs, ours = getattr(models, name)(), getattr(zoo, name)()
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [*shapes.items()]


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    # the paper has 0.8 and 25.6 million for the first two, and calls the table's 265 layers 264
    [("densenet100", 769162, 100), ("densenet190", 25624430, 190), ("densenet264", 33337704, 265)],
)
def test_is_as_deep_as_its_name_says_and_as_large_as_the_paper_says(name, parameters, layers):
    with torch.device("meta"):
        model = getattr(zoo, name)()
    weights = [value for value in model.parameters() if value.ndim > 1]
    assert len(weights) == layers
    assert sum(value.numel() for value in model.parameters()) == parameters


def test_draws_the_weights_that_torchvision_draws():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(3)
    theirs = models.densenet121()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert_same(zoo.densenet121().state_dict(), theirs.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def test_peaks_are_no_higher_than_torchvision_s():
    step, inference = peaks(DenseNet(4, (2, 3), classes=7))
    step_of_torchvision, inference_of_torchvision = peaks(torchvision_densenet())
    assert step <= 1.02 * step_of_torchvision
    assert inference <= 1.02 * inference_of_torchvision


def test_weights_go_back_to_torchvision():
    ours, theirs = DenseNet(4, (2, 3), classes=7), torchvision_densenet()
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict())


def test_loads_the_keys_of_torchvision_s_published_files():
    model, other = DenseNet(4, (2, 3), classes=7), DenseNet(4, (2, 3), classes=7)
    dotted = {
        key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): value
        for key, value in other.state_dict().items()
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in dotted
    model.load_state_dict(dotted)
    assert_same(model.state_dict(), other.state_dict())


def test_the_parts_of_layers_and_transitions_are_steps():
    names = zoo.chain_of(DenseNet(4, (2, 2), classes=7), torch.randn(2, 3, 64, 64)).names

    def steps_of(part):
        return [name.replace(part, "") for name in names if part in name]

    layer = ["cat", "norm1 relu1", "conv1", "norm2 relu2", "conv2"]
    assert steps_of("features.denseblock1.denselayer2.") == layer
    assert steps_of("features.transition1.") == ["cat", "norm relu", "conv", "pool"]


@pytest.mark.parametrize("part", [DenseLayer(8, 2), Transition(8, 8)])
def test_norm_and_activation_take_the_memory_of_one_tensor_beside_the_concatenation(part):
    for name in ("conv1", "norm2", "relu2", "conv2", "conv", "pool"):
        if hasattr(part, name):
            setattr(part, name, nn.Identity())
    features = [torch.randn(2, 3, 64, 64), torch.randn(2, 5, 64, 64)]
    concatenation = sum(tensor.nbytes for tensor in features)
    assert trace(lambda: part(features)).peak <= 2.1 * concatenation


def test_activations_are_in_place():
    made = maps_made(DenseNet(4, (2, 3), classes=7), torch.randn(2, 3, 64, 64))
    # five layers, a transition and the head concatenate for their first norm
    assert made.pop("cat") == 5 + 1 + 1
    assert (made.pop("convolution"), made.pop("norm")) == (1 + 5 * 2 + 1, 1 + 5 * 2 + 1 + 1)
    assert made.keys() <= {"pool", "mean"}


def test_groups_the_steps_by_layers():
    with torch.device("meta"):
        found = zoo.chain_of(zoo.densenet121(), torch.empty(2, 3, 64, 64))
    assert len(found.names) == 3 + 58 * 5 + 3 * 4 + 3
    assert found.blocks[-1] + 1 == 1 + 58 + 3 + 1


def test_a_layer_returns_only_its_own_features():
    layer = DenseLayer(8, 4)
    features = [torch.randn(2, 5, 4, 4), torch.randn(2, 3, 4, 4)]
    before = [tensor.clone() for tensor in features]
    added = layer(features)
    assert len(features) == 2
    assert all(map(torch.equal, features, before))
    assert added.shape == (2, 4, 4, 4)
    assert added.untyped_storage().nbytes() == added.numel() * added.element_size()


def test_a_block_hands_on_its_input_and_the_features_of_each_layer():
    block = DenseBlock(2, 8, 4, 0.0)
    images = torch.randn(2, 8, 4, 4)
    handed_on, *added = block(images)
    assert handed_on is images
    assert [tensor.shape for tensor in added] == [(2, 4, 4, 4)] * 2


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(2, 4, 64, 64), "built for 3 channels; got 4"),
        (torch.zeros(3, 64, 64), "takes .N, C, H, W., 4 axes"),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "floating numbers; got torch.uint8"),
        (torch.zeros(2, 3, 28, 64), "at least 29x29; got 28x64"),
        (torch.zeros(1, 3, 60, 29), r"at least 2 values per channel.*\(1, 3, 60, 29\) leaves 1"),
    ],
)
def test_refuses_bad_images_before_anything_ran(images, match):
    model = DenseNet(4, (1, 1, 1, 1), classes=7)
    with pytest.raises(InputError, match=match):
        model(images)
    assert int(model.features["norm0"].num_batches_tracked) == 0


@pytest.mark.parametrize("small_images", [True, False])
def test_takes_the_smallest_images_that_it_does_not_refuse(small_images):
    model = DenseNet(4, (1, 1, 1, 1), classes=7, small_images=small_images)
    smallest = 8 if small_images else 29
    assert model(torch.randn(2, 3, smallest, smallest)).shape == (2, 7)
    assert model.eval()(torch.randn(1, 3, smallest, smallest)).shape == (1, 7)
    with pytest.raises(InputError, match=f"at least {smallest}x{smallest}"):
        model(torch.randn(2, 3, smallest - 1, smallest))


@pytest.mark.parametrize(
    "wrong", [{"classes": 0}, {"in_channels": 0}, {"growth_rate": 0}, {"drop_rate": 1.0}]
)
def test_refuses_arguments_out_of_range(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ArgumentError, match=rf"DenseNet needs {name} .*; got {value}"):
        zoo.densenet100(**wrong)


def test_runs_on_meta_tensors():
    with torch.device("meta"):
        model = zoo.densenet264(in_channels=1, growth_rate=8)
        assert model(torch.empty(2, 1, 224, 224)).shape == (2, 1000)
