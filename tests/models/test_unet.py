import warnings

import pytest
import torch

import zoo
from tests.models.runs import blocks_of
from zoo.errors import ArgumentError, InputError
from zoo.models.unet import UNet

# four levels, and four that halve one axis less
STRIDES = {
    "even": lambda axes: ([1, 2, 2, 2], [3] * 4),
    "uneven": lambda axes: (
        [1, (1,) + (2,) * (axes - 1), 2, 2],
        [(1,) + (3,) * (axes - 1)] * 2 + [3] * 2,
    ),
}


def pair(axes, levels, *, norm="instance", residual=False, supervised=0, drop_rate=0.0):
    """MONAI's model and ours with its weights; skips without the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = pytest.importorskip("monai.networks.nets", exc_type=(ImportError, RuntimeError))
    strides, kernels = STRIDES[levels](axes)
    theirs = nets.DynUNet(
        axes,
        1,
        3,
        kernels,
        strides,
        strides[1:],
        filters=[8, 16, 32, 64],
        dropout=drop_rate or None,
        norm_name=(norm, {"affine": True}),
        deep_supervision=supervised > 0,
        deep_supr_num=max(supervised, 1),
        res_block=residual,
    )
    ours = UNet(
        3,
        axes=axes,
        width=8,
        strides=strides,
        kernels=kernels,
        norm=norm,
        residual=residual,
        supervised=supervised,
        drop_rate=drop_rate,
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(model, x):
    """Result and gradients by name of a seeded step."""
    torch.manual_seed(1)
    result = model(x)
    named = {n: p for n, p in model.named_parameters() if not n.startswith("skip_layers.")}
    loss = result.square().mean()
    gradients = torch.autograd.grad(loss, named.values(), allow_unused=True)
    buffers = {n: b for n, b in model.named_buffers() if not n.startswith("skip_layers.")}
    return {"result": result.detach(), **dict(zip(named, gradients, strict=True)), **buffers}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("axes", "levels", "options"),
    [
        (3, "even", {}),
        (2, "even", {"norm": "batch", "residual": True}),
        (3, "uneven", {"residual": True, "supervised": 2}),
        (2, "uneven", {"supervised": 1, "drop_rate": 0.3}),
    ],
)
def test_equals_monai_bit_for_bit(axes, levels, options, training):
    torch.manual_seed(0)
    theirs, ours = (model.train(training) for model in pair(axes, levels, **options))
    x = torch.rand((2, 1) + (16,) * axes)
    expected, found = run(theirs, x), run(ours, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # in eval mode the heads of levels get no gradients
        assert value is found[name] or torch.equal(value, found[name]), name


def test_supervised_levels_are_stacked_in_training_alone():
    model, x = (
        UNet(width=4, strides=(1, 2, 2, 2), kernels=(3,) * 4, supervised=2),
        torch.rand(1, 1, 16, 16, 16),
    )
    assert model(x).shape == (1, 3, 2, 16, 16, 16)
    assert model.eval()(x).shape == (1, 2, 16, 16, 16)


def test_the_default_is_that_of_nnu_net():
    with torch.device("meta"):
        model = zoo.unet()
        flat = zoo.unet(axes=2)
        assert model(torch.empty(1, 1, 64, 64, 64)).shape == (1, 2, 64, 64, 64)
        assert flat(torch.empty(1, 1, 64, 64)).shape == (1, 2, 64, 64)
    widths = [block.conv1[0].out_channels for block in (model.input_block, *model.downsamples)]
    assert widths == [32, 64, 128, 256, 320]
    assert model.bottleneck.conv1[0].out_channels == 320
    assert flat.bottleneck.conv1[0].out_channels == 512


def test_each_level_is_a_block():
    model = UNet(width=4, strides=(1, 2, 2), kernels=(3, 3, 3))
    blocks = blocks_of(model, torch.rand(1, 1, 16, 16, 16))
    names = {name.rsplit(".", 2)[0] for steps in blocks for name in steps}
    assert {"input_block", "downsamples.0", "bottleneck"} <= {n.split(".conv")[0] for n in names}
    assert len(blocks) >= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": 1}, "axes=2 or axes=3; got 1"),
        ({"strides": (1, 2, 2, 2)}, r"got 6 kernels .* and 4 strides"),
        ({"strides": (1, 2), "kernels": (3, 3)}, "each of 3 or more levels"),
        ({"strides": (1, 2, (2, 2), 2, 2, 2)}, "a number or 3 of them"),
        ({"strides": (1, 5, 2, 2, 2, 2)}, r"got \(5, 5, 5\) for \(3, 3, 3\)"),
        ({"supervised": 5}, "6 levels has 4 to supervise below the last; got supervised=5"),
        ({"norm": "layer"}, "norm instance or batch; got 'layer'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        UNet(**arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 40, 32, 32), "has one of 40, which 32 does not divide. Crop or pad it to 32 or 64"),
        ((1, 2, 32, 32, 32), "1 channels; got 2"),
        ((1, 1, 32, 32), r"takes \(N, C, D, H, W\), 5 axes"),
        ((1, 1, 32, 32, 32), "at least 2 values per channel"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shape, message):
    with torch.device("meta"):
        model, x = zoo.unet(), torch.empty(shape)
    with pytest.raises(InputError, match=message):
        model(x)
