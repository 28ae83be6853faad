import inspect
import subprocess
import sys

import pytest
import torch

import zoo
from zoo.catalog.factories import OPTIONS, model_arguments
from zoo.errors import ArgumentError, ModelNameError
from zoo.tracing.planned_forward import patched_forward


def test_names_are_listed_by_pattern() -> None:
    assert zoo.list_models("resnet1*") == ["resnet1001", "resnet101", "resnet110", "resnet1202",
                                           "resnet152", "resnet164", "resnet18"]  # fmt: skip
    assert len(zoo.list_models()) == 38


@pytest.mark.parametrize("name", zoo.list_models())
def test_each_name_is_a_function_with_its_arguments(name: str) -> None:
    factory = getattr(zoo, name)
    assert factory.__name__ == name
    signature = inspect.signature(factory)
    assert list(signature.parameters) == [*OPTIONS, *model_arguments(name)]
    assert "drop_rate" in model_arguments(name)
    with torch.device("meta"):
        model = factory(**{key: value.default for key, value in signature.parameters.items()})
    assert type(model) is signature.return_annotation
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    shown = f"{millions:.0f}" if name.startswith(("gpt2", "llama3", "qwen3")) else f"{millions:.1f}"
    assert f" {shown} million parameters." in factory.__doc__


def test_arguments_are_those_that_leave_the_architecture_as_it_is() -> None:
    resnet50 = ["classes", "in_channels", "drop_rate", "drop_path_rate"]
    assert list(model_arguments("resnet50")) == list(model_arguments("resnet1001")) == resnet50
    assert list(model_arguments("densenet100")) == ["growth_rate", *resnet50[:3]]
    defaults = [model_arguments("densenet190")[key].default for key in ("growth_rate", "classes")]
    assert defaults == [40, 10]
    with pytest.raises(ArgumentError, match=r"resnet18 takes no argument 'depths'\. .*It takes"):
        zoo.resnet18(depths=(1, 1, 1, 1))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelNameError, match=r"no model 'resnet51'\. Did you mean .*resnet50"):
        zoo.create("resnet51")


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"no argument 'clases'\. Did you mean classes\?"):
        zoo.create("resnet50", clases=3)


def test_create_passes_arguments_on() -> None:
    model = zoo.create("vnet", checkpoint="blocks", in_channels=1, classes=3)
    assert zoo.plan_of(model) is None
    assert patched_forward(model) is not None


def test_the_zoo_s_own_models_need_torch_and_einops_only() -> None:
    script = (
        "import sys, torch; before = set(sys.modules);"
        "import zoo; zoo.list_models(); zoo.resnet18();"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "known = {name.split('.')[0] for name in before} | set(sys.stdlib_module_names);"
        "print(sorted(new - known))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['einops', 'zoo']"


def test_a_star_import_brings_the_public_names_and_no_packages() -> None:
    found = set(zoo.__all__)
    assert {
        "__version__",
        "plan",
        "checkpoint",
        "verify",
        "resnet50",
        "BudgetError",
    } <= found
    assert found.isdisjoint({"models", "planner", "engine", "errors", "units"})
