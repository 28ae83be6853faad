import copy

import pytest
import torch

import zoo
from tests.models.runs import blocks_of, run
from tests.training import assert_same
from zoo.errors import ArgumentError, InputError, WeightsError
from zoo.models.vit import ViT

SMALL = {"width": 48, "depth": 3, "heads": 3, "classes": 7, "image_size": 32}


def timm_vit(**arguments):
    """timm's model of the same size; skips where timm cannot be imported."""
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    size = {"embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7, "img_size": 32}
    return VisionTransformer(**size, **arguments)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rates", [{}, {"drop_rate": 0.3, "drop_path_rate": 0.5}])
def test_equals_timm_bit_for_bit_and_keeps_no_more(rates, training):
    ours, theirs = ViT(**SMALL, **rates), timm_vit(**rates)
    ours.load_state_dict(theirs.state_dict())
    results, kept = run(ours, 4, 3, 32, 32, training=training)
    expected, kept_by_timm = run(theirs, 4, 3, 32, 32, training=training)
    assert_same(results, expected)
    assert kept <= 1.02 * kept_by_timm


def test_draws_the_weights_that_timm_draws():
    torch.manual_seed(3)
    theirs = timm_vit()
    torch.manual_seed(3)
    assert_same(ViT(**SMALL).state_dict(), theirs.state_dict())


# timm 1.0 reports the same counts for vit_*_patch16_224
@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (zoo.vit_tiny_patch16, 5_717_416),
        (zoo.vit_small_patch16, 22_050_664),
        (zoo.vit_base_patch16, 86_567_656),
        (zoo.vit_large_patch16, 304_326_632),
    ],
)
def test_real_sizes(build, parameters):
    with torch.device("meta"):
        model = build()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_arguments_reach_the_model():
    with torch.device("meta"):
        model = zoo.vit_tiny_patch16(
            classes=5, in_channels=1, image_size=48, drop_rate=0.2, drop_path_rate=0.11
        )
        assert model(torch.empty(1, 1, 48, 48)).shape == (1, 5)
    assert model.head_drop.p == 0.2
    assert [getattr(block.drop_path, "rate", 0.0) for block in model.blocks] == pytest.approx(
        [0.01 * index for index in range(12)]
    )


def test_blocks_offer_their_parts():
    first, *blocks, last = blocks_of(ViT(**SMALL), torch.zeros(2, 3, 32, 32))
    assert first[0] == "patch_embed.proj"
    assert last == ["norm", "head"]
    for number, steps in enumerate(blocks):
        assert all(name.startswith(f"blocks.{number}.") for name in steps)
        parts = "norm1", "attn.qkv", "norm2", "mlp.fc1", "mlp.act"
        assert {f"blocks.{number}.{part}" for part in parts} <= {*steps}
    assert len(blocks) == 3


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 48, 48), r"takes images of 32 x 32; got 48 x 48\. Resize"),
        (torch.zeros(1, 3, 32, 16), "takes images of 32 x 32; got 32 x 16"),
        (torch.zeros(3, 32, 32), r"takes \(N, C, H, W\), 4 axes; got \(3, 32, 32\)"),
        (torch.zeros(1, 1, 32, 32), "built for 3 channels; got 1"),
        (torch.zeros(0, 3, 32, 32), "at least one element"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "floating numbers; got torch.uint8"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        ViT(**SMALL)(images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 100}, r"patches of 16; image_size 100 is not a multiple\. Take 96"),
        ({"image_size": 8}, "image_size 8 is not a multiple. Take 16"),
        ({"classes": 0}, "classes of at least 1; got 0"),
        ({"heads": 5}, "48 is not divisible by 5"),
        ({"drop_rate": 1.5}, "drop_rate from 0 up to below 1; got 1.5"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ViT(**{**SMALL, **arguments})


def test_weights_of_another_size_are_refused_and_change_nothing():
    model = ViT(**SMALL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"pos_embed \(1, 10, 48\) instead of \(1, 5, 48\)"):
        model.load_state_dict(ViT(**{**SMALL, "image_size": 48}).state_dict())
    assert_same(model.state_dict(), before)
