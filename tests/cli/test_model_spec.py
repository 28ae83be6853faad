"""A command finds the model that it is told, wherever it is, and the inputs that go with it."""

import sys

import pytest
import torch
from torch import nn

import zoo
from zoo.cli.model_spec import model_spec
from zoo.cli.parser import MODEL, command
from zoo.errors import ArgumentError
from zoo.profiling.peak_memory import trace

MIB = 1024**2


def found(*arguments, batch_size=None):
    return command(MODEL)(lambda options: model_spec(options, batch_size))(arguments)


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        (["resnet18"], [(4, 3, 224, 224)]),
        (["resnet110"], [(8, 3, 32, 32)]),
        (["resnet18", "--batch-size", "7", "--size", "32", "48"], [(7, 3, 32, 48)]),
        (["resnet18", "--args", "in_channels=1", "--size", "32"], [(4, 1, 32, 32)]),
        (["vnet", "--size", "16"], [(1, 1, 16, 16, 16)]),
        (["vnet", "--size", "32", "16", "16"], [(1, 1, 32, 16, 16)]),
        (["gpt2_small", "--size", "5"], [(1, 5), (1, 5)]),
        (["gpt2_small", "--input", "2,5"], [(2, 5), (2, 5)]),
        (["lstm", "--size", "7"], [(7, 10), None, (7, 10)]),
        (["lstm", "--input", "7,2"], [(7, 2), None, (7, 2)]),
        (["lstm", "--input", "7,2", "--input", "none"], [(7, 2), None]),
    ],
)
def test_a_model_of_the_catalog_has_inputs_of_its_kind(arguments, shapes):
    inputs = found(*arguments).inputs_on("meta")
    assert [value if value is None else tuple(value.shape) for value in inputs] == shapes
    tensors = [value for value in inputs if value is not None]
    is_text = arguments[0] in ("gpt2_small", "lstm")
    assert all(value.is_meta and value.is_floating_point() != is_text for value in tensors)


def test_a_vision_transformer_is_built_for_its_input():
    assert found("vit_tiny_patch16", "--input", "2,3,32,32").build_on_meta().image_size == 32
    given = found("vit_tiny_patch16", "--args", "image_size=48", "--input", "2,3,32,32")
    assert given.build_on_meta().image_size == 48


@pytest.mark.parametrize("path", ["torch.nn.Linear", "torch.nn:Linear", "torch.nn.modules:Linear"])
def test_an_import_path_is_called_with_the_arguments(path):
    model = found(path, "--args", "3", "4", "bias=false", "--input", "2,3").build()
    assert (type(model), model.in_features, model.bias) == (nn.Linear, 3, None)


def test_inputs_may_have_names_all_of_them_or_none():
    named = ("--input", "pixels=2,4,8,8", "--input", "labels=2:int64")
    given = found("tests.tracing.test_traced_steps:Said", *named).inputs_on("meta")
    assert {name: tuple(value.shape) for name, value in given.items()} == {
        "pixels": (2, 4, 8, 8), "labels": (2,),
    }  # fmt: skip
    assert given["labels"].dtype is torch.int64
    for more in ("3,3", "labels=3"):
        with pytest.raises(ArgumentError, match="a different name for each input"):
            found("tests.tracing.test_traced_steps:Said", *named, "--input", more).inputs_on("meta")


class OfBatches(nn.Module):
    """Takes a dict as its one argument."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4)

    def forward(self, batch):
        return self.table(batch["ids"]) * batch["mask"][..., None]


def test_an_argument_may_be_a_dict(command):
    named = ("--input", "batch.ids=2,8:int64", "--input", "batch.mask=2,8")
    path = "tests.cli.test_model_spec:OfBatches"
    given = found(path, *named).inputs_on("meta")
    assert {key: value.dtype for key, value in given["batch"].items()} == {
        "ids": torch.int64, "mask": torch.float32,
    }  # fmt: skip
    assert list(given) == ["batch"]
    told = command("verify", path, *named, "--steps", "1")
    assert (told.code, told.out[:5]) == (0, "exact")
    with pytest.raises(ArgumentError, match="a different name for each input"):
        found(path, *named, "--input", "batch=3").inputs_on("meta")


def test_a_module_in_the_folder_of_the_command_is_found(monkeypatch, tmp_path):
    (tmp_path / "my_models_of_a_test.py").write_text(
        "import torch\nbuilt = torch.nn.Linear(2, 2).eval()\nclass Fails:\n  x = 1 / 0"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(ArgumentError, match="importing my_models_of_a_test fails: ZeroDivision"):
        found("my_models_of_a_test.built", "--input", "1,2")
    (tmp_path / "my_models_of_a_test.py").write_text(
        "import torch\nbuilt = torch.nn.Linear(2, 2).eval()"
    )
    assert found("my_models_of_a_test.built", "--input", "1,2").build().training
    assert sys.path == before


FILE = "import beside_of_a_test, torch\nNet = lambda: torch.nn.Linear(2, beside_of_a_test.SIZE)\n"


# a name of another module, and what is no name of a module
@pytest.mark.parametrize("name", ["mine_of_a_test", "torch", "a-model", "a.b"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_model_may_be_in_a_file(monkeypatch, tmp_path, name, is_whole):
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / f"{name}.py").write_text(FILE)
    (folder / "beside_of_a_test.py").write_text("SIZE = 3")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    path = f"{folder if is_whole else 'deep'}/{name}.py:Net"
    assert found(path, "--input", "1,2").build().out_features == 3
    assert (sys.path, sys.modules["torch"]) == (before, torch)


def test_a_file_with_an_error_says_so(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"importing broken\.py fails: ZeroDivision"):
        found("broken.py:Net", "--input", "1,2")


def test_a_module_that_lacks_a_package_says_which(monkeypatch, tmp_path):
    (tmp_path / "lacking_of_a_test.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="importing lacking_of_a_test needs no_such_package"):
        found("lacking_of_a_test.Net", "--input", "1,2")


class ReadsNumbers(nn.Module):
    """Cannot be built on the meta device."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


def test_what_cannot_be_built_without_memory_is_built_with():
    model = found("tests.cli.test_model_spec:ReadsNumbers", "--input", "1").build_on_meta()
    assert model.rates == [0, 0.5, 1]


@pytest.mark.parametrize("name", ["resnet18", "gpt2_small", "lstm"])
def test_a_model_on_paper_is_the_real_one_but_for_its_values(name):
    real, paper = zoo.create(name), found(name).build_unwritten()
    for one, other in zip(real.state_dict().items(), paper.state_dict().items(), strict=True):
        assert (one[0], one[1].shape, one[1].dtype) == (other[0], other[1].shape, other[1].dtype)
        assert other[1].device.type == "cpu"
    # tied weights stay tied
    assert len(list(real.parameters())) == len(list(paper.parameters()))


def test_a_model_on_meta_takes_no_memory():
    assert trace(found("resnet18").build_on_meta).peak < MIB
