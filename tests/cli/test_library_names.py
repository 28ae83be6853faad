"""Other libraries' models on the command line: default inputs, arguments, lists."""

import json
from typing import Any

import pytest

from tests.cli.test_model_spec import found
from zoo.cli.main import run
from zoo.errors import ArgumentError

LIBRARIES = ("timm", "torchvision", "transformers", "monai")
GPT2 = ("transformers/GPT2LMHeadModel", "--args", "n_layer=1", "n_embd=8", "n_head=2")


@pytest.fixture(autouse=True)
def libraries() -> None:
    for library in LIBRARIES:
        pytest.importorskip(library, exc_type=(ImportError, RuntimeError))


def inputs(*arguments: str) -> dict[str, Any]:
    """The inputs of a command's model: name -> (shape, numbers below)."""
    specs = found(*arguments).inputs
    return {spec.name: (spec.shape, spec.below) for spec in specs if spec is not None}


def test_inputs_are_those_of_the_configuration_or_of_the_options() -> None:
    assert inputs("timm/resnet10t") == {"": ((4, 3, 176, 176), 2)}
    assert inputs("timm/resnet10t", "--size", "64", "--batch-size", "2") == {
        "": ((2, 3, 64, 64), 2)
    }
    tokens = (2, 16), 50257
    assert inputs(*GPT2, "--input", "2,16") == {"input_ids": tokens, "labels": tokens}
    named = ("--input", "input_ids=2,16", "--input", "attention_mask=2,16:int64")
    assert inputs(*GPT2, *named) == {"input_ids": tokens, "attention_mask": ((2, 16), 2)}
    assert inputs("monai/BasicUNet", "--size", "32") == {"": ((1, 1, 32, 32, 32), 2)}


def test_a_model_of_a_fixed_size_is_built_for_the_images() -> None:
    for size, sides in ((["64"], (64, 64)), (["64", "96"], (64, 96))):
        spec = found("timm/vit_tiny_patch16_224", "--size", *size)
        assert spec.build_on_meta().patch_embed.img_size == sides


def test_a_model_that_says_nothing_of_its_inputs_needs_them() -> None:
    with pytest.raises(ArgumentError, match=r"r3d_18 tells no default inputs; give each by --inp"):
        found("torchvision/r3d_18")
    assert inputs("torchvision/r3d_18", "--input", "1,3,4,32,32") == {"": ((1, 3, 4, 32, 32), 2)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["list", "tim/*"], "no library 'tim' in 'tim/*'. Did you mean timm?"),
        (["list", "timm/convnxt_tiny"], "Did you mean timm/convnext_tiny"),
        (["list", "timm"], "zoo list 'timm/*' lists all"),
        (["info", "timm/resnet51"], "Did you mean timm/resnet51q, timm/resnet50"),
        (["info", "timm/resnet10t", "--args", "num_clases=3"], "Did you mean num_classes"),
        (["info", "timm/resnet10t", "--args", "resnet"], "--args of timm/resnet10t have names"),
        (["info", "monai/UNet"], "monai/UNet needs the arguments spatial_dims"),
        (["info", "folder/mine.Net"], "no library 'folder'"),
    ],
)
def test_a_mistake_is_one_sentence(line: list[str], message: str, capsys: Any) -> None:
    assert run(line) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_library_s_names_are_listed_as_text_and_json(capsys: Any) -> None:
    assert run(["list", "timm/convnext_tiny*", "--json"]) == 0
    names = [entry["name"] for entry in json.loads(capsys.readouterr().out)]
    assert run(["list", "timm/convnext_tiny*"]) == 0
    assert capsys.readouterr().out.split() == names
    assert "timm/convnext_tiny" in names


def test_the_arguments_of_a_library_s_model_are_shown(capsys: Any) -> None:
    assert run(["info", *GPT2, "--size", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["kind"], data["inputs"]) == ("GPT2LMHeadModel", [[1, 8], [1, 8]])
    assert (data["arguments"]["n_layer"], data["arguments"]["use_cache"]) == (12, False)
