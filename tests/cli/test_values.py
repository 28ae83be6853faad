"""Text of a command line becomes the value that the library takes."""

import pytest
import torch

import zoo
from tests.policy.test_plan_report import report
from zoo.cli import values
from zoo.cli.values import RandomInput
from zoo.errors import ArgumentError, PlanError
from zoo.policy.goal import parse_budget, parse_checkpoint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", 8 << 30),
        ("8 GB", 8 * 10**9),
        ("1.5KiB", 1536),
        ("512", 512),
        ("0.5", 0.5),
        (".25", 0.25),
        ("50%", 0.5),
        ("100%", 1.0),
        ("device", "device"),
    ],
)
def test_a_budget_is_a_size_or_a_share(text, value):
    found = parse_budget(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["8GBi", "1.01", "0.0", "101%", "%", "-1", "", "half", "1.5.2"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ArgumentError, match=r"is no (size|share)"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32,3,224,224", RandomInput((32, 3, 224, 224))),
        ("7", RandomInput((7,))),
        ("8,128:int64", RandomInput((8, 128), torch.int64)),
        ("none", None),
    ],
)
def test_a_shape_may_have_a_type(text, value):
    assert values.shape(text) == value


@pytest.mark.parametrize("text", ["", "3,", "0,3", "-1,3", "3x4", "3,4:", "9999999999999,1"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ArgumentError, match=r"takes a shape|know the dtype"):
        values.shape(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("4", 4),
        ("auto", "auto"),
        ("sqrt", "sqrt"),
        ("(0-1) 2", zoo.Plan(((0, 1), 2))),
    ],
)
def test_a_checkpoint_is_what_the_models_take(text, value):
    found = parse_checkpoint(text)
    assert (found, type(found)) == (value, type(value))


def test_a_checkpoint_may_be_a_file_of_a_plan_with_or_without_its_costs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = report()
    whole.save("report.json")
    (tmp_path / "plan.json").write_text(f"\n {whole.plan.to_json()}")
    (tmp_path / "broken.json").write_text("(0-1) 2")
    assert parse_checkpoint("report.json") == whole
    assert parse_checkpoint("plan.json") == whole.plan
    with pytest.raises(PlanError, match="no report of a plan in JSON: Expecting value"):
        parse_checkpoint("broken.json")


@pytest.mark.parametrize(
    "read", [values.count, values.number, parse_checkpoint, values.shape, parse_budget]
)
def test_thousands_of_digits_are_a_wrong_value(read):
    with pytest.raises(
        ArgumentError, match=r"up to 1099511627776|takes a shape|any memory|is no scheme"
    ):
        read("9" * 5000)


def test_random_numbers_have_the_type_and_are_in_range():
    whole = RandomInput((64,), torch.int64, below=3).random("cpu")
    assert (whole.dtype, set(whole.tolist())) == (torch.int64, {0, 1, 2})
    assert RandomInput((64,), torch.bool).random("cpu").unique().numel() == 2
    real = RandomInput((2, 3)).random("cpu")
    assert (real.dtype, real.shape) == (torch.float32, (2, 3))
