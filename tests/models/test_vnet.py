import copy
import warnings

import pytest
import torch

import zoo
from zoo.errors import ArgumentError, InputError, WeightsError

pytestmark = pytest.mark.usefixtures("without_fork")


def monai_vnet(**arguments):
    """MONAI's V-Net; skips without MONAI, whose import warns about its own dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("monai", exc_type=(ImportError, RuntimeError))
        from monai.networks.nets import VNet  # noqa: PLC0415
    torch.manual_seed(3)
    return VNet(**arguments)


def volumes(*shape):
    """Volumes whose channels and samples differ in scale."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    scales = torch.arange(1.0, shape[0] * shape[1] + 1).view(*shape[:2], 1, 1, 1)
    return (drawn * scales).requires_grad_()


def train_once(model, x):
    """Logits, gradients (by our names), bytes kept for the backward and RNG state of one run."""
    kept = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits.square().mean(), [x, *parameters])
    named = dict(zip(["x", *names], gradients, strict=True))
    return logits, named, sum(kept.values()), torch.get_rng_state()


@pytest.mark.parametrize(
    ("activation", "training"), [("elu", True), ("elu", False), ("prelu", True)]
)
def test_values_gradients_statistics_and_draws_are_monais(activation, training):
    act = ("elu", {"inplace": True}) if activation == "elu" else "prelu"
    theirs = monai_vnet(in_channels=2, out_channels=3, act=act).train(training)
    ours = zoo.vnet(classes=3, in_channels=2, activation=activation).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = volumes(2, 2, 16, 32, 16)
    expected, found = train_once(theirs, x), train_once(ours, x)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], dict(ours.translate(expected[1])), rtol=0, atol=0)
    assert found[2] <= 1.02 * expected[2]
    assert torch.equal(found[3], expected[3])
    state = dict(ours.translate(theirs.state_dict()))
    torch.testing.assert_close(dict(ours.state_dict()), state, rtol=0, atol=0)


def test_one_seed_draws_the_weights_that_monai_draws():
    theirs = monai_vnet(in_channels=4, out_channels=3).state_dict()
    torch.manual_seed(3)
    ours = zoo.vnet(classes=3, in_channels=4)
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(ours.translate(theirs)), rtol=0, atol=0
    )


def small(**arguments):
    """A V-Net an eighth as wide."""
    torch.manual_seed(4)
    return zoo.vnet(**{"classes": 2, "width": 2, **arguments})


def test_renaming_leaves_own_names_alone():
    own = small(activation="prelu").state_dict()
    assert small(activation="prelu").translate(own) == own


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded():
    model, other = small(), small(classes=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"head\.conv\.weight \(3, 4, .* instead of \(2, 4"):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("size", [(16, 32, 48), (32, 16, 16)])
def test_logits_have_the_size_of_the_volume(norm, size):
    assert small(norm=norm, classes=5)(volumes(1, 1, *size)).shape == (1, 5, *size)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 16, 40, 16), r"axis H .* has size 40, which 16 does not divide.* 32 or 48"),
        ((1, 1, 16, 16, 9), r"axis W .* has size 9, .* pad it to 16"),
        ((1, 1, 16, 16), r"takes \(N, C, D, H, W\), 5 axes; got \(1, 1, 16, 16\)"),
        ((1, 3, 16, 16, 16), r"built for 1 channels; got 3"),
        ((0, 1, 16, 16, 16), r"at least one element on each axis"),
        ((1, 1, 16, 16, 16), r"at least 2 values per channel.* \(1, 1, 16, 16, 16\) leaves 1"),
    ],
)
def test_volume_that_does_not_fit_is_refused_before_anything_runs(shape, message):
    model = small()
    with pytest.raises(InputError, match=message):
        model(torch.zeros(shape))
    assert model.stem.unit.norm.num_batches_tracked == 0


def test_integers_are_refused():
    with pytest.raises(InputError, match=r"got torch\.int16\. Convert"):
        small()(torch.zeros(1, 1, 16, 16, 32, dtype=torch.int16))


def test_single_values_pass_where_the_norm_can_take_them():
    cube = volumes(2, 1, 16, 16, 16)
    assert small()(cube).isfinite().all()
    assert small().eval()(cube[:1]).isfinite().all()
    with pytest.raises(InputError, match="at least 2 values per channel"):
        small(norm="instance").eval()(cube)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_channels": 3}, r"to 2 channels; 3 does not divide 2"),
        ({"classes": 0}, r"classes of at least 2; got 0"),
        ({"classes": 1}, r"classes of at least 2; got 1"),
        ({"drop_rate": 1.0}, r"drop_rate from 0 up to below 1; got 1\.0"),
        ({"activation": "relu"}, r"activation elu or prelu; got 'relu'"),
        ({"norm": "group"}, r"norm batch or instance; got 'group'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        small(**arguments)


def test_drop_rate_rules_every_dropout():
    x, model = volumes(2, 1, 16, 16, 16), small(drop_rate=0.0)
    assert torch.equal(model(x), model(x))
    rates = [m.p for m in small(drop_rate=0.3).modules() if isinstance(m, torch.nn.Dropout3d)]
    assert sorted(rates) == [0.0] * 4 + [0.3] * 8


def test_instance_norm_keeps_samples_apart():
    x, model = volumes(3, 1, 16, 16, 32), small(norm="instance", drop_rate=0.0)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))
    assert not torch.allclose(small(drop_rate=0.0)(x)[1:2], small(drop_rate=0.0)(x[1:2]))


def test_every_operation_is_a_step_and_every_level_a_block():
    found = zoo.chain_of(small(), volumes(2, 1, 16, 16, 16))
    assert max(found.blocks) == 9
    assert [name for name in found.names if name.startswith("up.3")] == [
        "up.3.resample.conv",
        "up.3.resample.norm",
        "up.3.resample.act",
        "up.3.skip_dropout",
        "up.3.cat",
        "up.3.units.0.conv",
        "up.3.units.0.norm",
        "up.3.units.0.act",
        "up.3.add",
        "up.3.act",
    ]
