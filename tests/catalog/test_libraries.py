"""Other libraries' models by name: built as by the library itself, or one sentence says why not."""

from typing import Any

import pytest
import torch

import zoo
from zoo.catalog.libraries import sample_of
from zoo.tracing.planned_forward import patched_forward

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "bos_token_id": 0}
UNET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8), "strides": (2,)}
MODELS: dict[str, dict[str, Any]] = {
    "timm/resnet10t": {"num_classes": 3},
    "torchvision/shufflenet_v2_x0_5": {"num_classes": 3},
    "transformers/GPT2LMHeadModel": GPT2 | {"eos_token_id": 0},
    "monai/UNet": UNET,
}


def library(name: str) -> Any:
    module = {"monai": "monai.networks.nets"}.get(name, name)
    return pytest.importorskip(module, exc_type=(ImportError, RuntimeError))


def by_itself(name: str, arguments: dict[str, Any]) -> Any:
    """Builds a model as a user of the library does."""
    kind, own = name.split("/")
    module = library(kind)
    if kind == "transformers":
        return module.GPT2LMHeadModel(module.GPT2Config(use_cache=False, **arguments))
    if kind == "monai":
        return getattr(module, own)(**arguments)
    make = module.create_model if kind == "timm" else module.models.get_model
    return make(own, **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_library_with_a_plan(name: str) -> None:
    torch.manual_seed(0)
    expected = by_itself(name, MODELS[name])
    torch.manual_seed(0)
    model = zoo.create(name, checkpoint=True, **MODELS[name])
    assert type(model) is type(expected)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert patched_forward(model) is not None
    assert name in zoo.list_models(f"{name[:-1]}*")


@pytest.mark.usefixtures("without_fork", "few_plans")
@pytest.mark.parametrize("option", [{"memory_budget": "97%"}, {"max_overhead": 0.5}])
def test_a_budget_is_kept_by_a_model_of_another_library(option: dict[str, Any]) -> None:
    library("timm")
    model = zoo.create("timm/resnet10t", checkpoint="auto", num_classes=3, **option)
    model(torch.rand(16, 3, 64, 64)).sum().backward()
    plan = zoo.plan_of(model)
    assert plan is not None
    assert plan.depth() > 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("timm/resnet51", {}, "no model 'timm/resnet51'. Did you mean .*timm/resnet50"),
        ("timm/", {}, "no model 'timm/'"),
        ("tim/resnet50", {}, "no library 'tim' in 'tim/resnet50'. Did you mean timm"),
        ("timm/resnet10t", {"num_clases": 3}, "cannot be built: .*'num_clases'.*mean num_classes"),
        ("torchvision/resnet18", {"num_clases": 3}, "cannot be built: .*Did you mean num_classes"),
        ("torchvision/quantized_resnet18", {}, "no model .*mean .*torchvision/resnet18"),
        ("transformers/gpt2lmheadmodel", {}, "Did you mean transformers/GPT2LMHeadModel"),
        ("transformers/openai-community/gpt2", {}, r"from_pretrained\(\.\.\.\) makes of a hub's"),
        ("transformers/GPT2Config", {}, "no model 'transformers/GPT2Config'"),
        ("transformers/GPT2LMHeadModel", {"n_layr": 3}, "no argument 'n_layr'. .*mean n_layer"),
        (
            "transformers/GPT2LMHeadModel",
            {"n_embd": 10},
            "cannot be built: ValueError: .*divis",
        ),
        ("transformers/GPT2LMHeadModel", {"pretrained": True}, "is a class, not weights"),
        ("transformers/EncoderDecoderModel", {}, "cannot be built: ValueError"),
        ("timm/resnet10t", {"pretrained": True, "num_clases": 3}, "Did you mean num_classes"),
        ("monai/UNet", {}, "needs the arguments spatial_dims, in_channels, out_channels"),
        ("monai/UNet", UNET | {"chanels": 1}, "no argument 'chanels'. Did you mean channels"),
        ("monai/UNet", UNET | {"pretrained": True}, "has no pretrained weights"),
    ],
)
def test_what_is_wrong_is_one_sentence(name: str, arguments: Any, message: str) -> None:
    if name.partition("/")[0] in ("timm", "torchvision", "transformers", "monai"):
        library(name.partition("/")[0])
    with pytest.raises(zoo.ZooError, match=message) as caught:
        zoo.create(name, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError])
def test_a_library_that_cannot_be_imported_is_named_with_the_way_out(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision raises a RuntimeError beside a torch that it was not built for."""

    def fail(module: str) -> None:
        arguments = {"name": module} if error is ModuleNotFoundError else {}
        raise error(f"nothing of {module}", **arguments)

    monkeypatch.setattr("zoo.catalog.libraries.importlib.import_module", fail)
    version = "" if error is ModuleNotFoundError else " of the version that fits torch"
    match = (
        rf"timm cannot be imported here for 'timm/.*nothing of timm\): pip install timm{version}"
    )
    for ask in (zoo.create, zoo.list_models):
        with pytest.raises(zoo.ModelNameError, match=match):
            ask("timm/resnet50")


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("timm/resnet50", {}, ("photographs", (3, 224, 224), 1000)),
        ("timm/vit_tiny_patch16_224", {"img_size": 64, "num_classes": 5},
         ("photographs", (3, 64, 64), 5, "", "", "img_size")),
        ("torchvision/inception_v3", {}, ("photographs", (3, 299, 299), 1000)),
        ("torchvision/r3d_18", {}, None),
        ("transformers/GPT2LMHeadModel", {"vocab_size": 50},
         ("text", (512,), 50, "input_ids", "labels")),
        ("transformers/BertModel", {}, ("text", (256,), 30522, "input_ids")),
        ("transformers/ViTForImageClassification", {"image_size": 32},
         ("photographs", (3, 32, 32), 2, "pixel_values", "", "image_size")),
        ("transformers/WhisperForConditionalGeneration", {}, None),
        ("monai/BasicUNet", {}, ("volume", (1, 64, 64, 64), 2)),
        ("monai/UNet", UNET, ("photographs", (1, 224, 224), 2)),
    ],
)  # fmt: skip
def test_a_sample_is_that_of_the_configuration(name: str, arguments: Any, expected: Any) -> None:
    library(name.partition("/")[0])
    sample = sample_of(name, arguments)
    padded = expected and (*expected, *[""] * (6 - len(expected)))
    assert (sample and tuple(sample)) == padded


def test_a_model_with_an_encoder_takes_labels_by_its_default_configuration() -> None:
    library("transformers")
    small = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": 50}
    model = zoo.create("transformers/T5ForConditionalGeneration", **small)
    tokens = torch.randint(1, 50, (2, 8))
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    assert not model.config.use_cache


def test_weights_without_a_network_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    models = library("torchvision").models

    def nowhere(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(models._api, "load_state_dict_from_url", nowhere)
    with pytest.raises(zoo.WeightsError, match="resnet18 cannot be built with pretrained weights"):
        zoo.create("torchvision/resnet18", pretrained=True)
    # a detector's backbone fetches weights unless it is told not to
    with torch.device("meta"):
        zoo.create("torchvision/fasterrcnn_resnet50_fpn")
