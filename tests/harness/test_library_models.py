"""Other libraries' models in a comparison, and their own checkpointing beside zoo's."""

import functools
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.command_line import load
from zoo.errors import ConfigError
from zoo.harness.comparison_cells import expand
from zoo.harness.data import batches
from zoo.harness.results import comparisons, parse
from zoo.harness.training import library_loss
from zoo.harness.worker import first_fault, work
from zoo.report.rows import differences, rows

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

GPT2 = "{n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 50, bos_token_id: 0, eos_token_id: 0}"
UNET = "{spatial_dims: 3, in_channels: 1, out_channels: 2, channels: [4, 8], strides: [2]}"
MODELS = {
    "timm/resnet10t": ("{num_classes: 5}", "64", "16"),
    "torchvision/shufflenet_v2_x0_5": ("{num_classes: 5}", "64", "4"),
    "transformers/GPT2LMHeadModel": (GPT2, "16", "2"),
    "monai/UNet": (UNET, "16", "1"),
}


def cells(name: str, *options: str) -> Any:
    """The cells of a model, as `zoo compare --model` makes them."""
    library = name.partition("/")[0]
    pytest.importorskip(library, exc_type=(ImportError, RuntimeError))
    arguments, size, batch = MODELS[name]
    given = ["--arguments", arguments, "--size", size, "--batch-size", batch, "--steps", "2"]
    (found,) = expand(load(["--model", name, *given, *options]))
    return found


@functools.cache
def done(name: str, kind: str) -> dict[str, Any]:
    """Works on a cell of each kind once; nobody writes the result."""
    return work(cells(name, "--repeats", "1")[kind])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library_is_exact(name: str) -> None:
    assert first_fault(list(cells(name).values())) == {}
    whole, checkpointed = (done(name, kind) for kind in ("baseline", "checkpointed"))
    assert differences(whole["digests"], checkpointed["digests"]) == []
    assert checkpointed["memory"]["peak"] < whole["memory"]["peak"]
    assert checkpointed["memory"]["tensor_peak"] <= whole["memory"]["tensor_peak"]
    assert not whole["missing"]


def test_images_have_the_channels_of_the_model() -> None:
    model = cells("timm/resnet10t")["baseline"].model
    for channels in (1, 3, 4):
        arguments = model.arguments | {"in_chans": channels}
        (batch,) = batches(replace(model, arguments=arguments), 1, seed=0)
        assert batch.inputs.shape == (16, channels, 64, 64)
        assert batch.inputs.std() > 0.1


def test_what_the_library_s_own_checkpointing_changes_is_a_note_and_no_fault() -> None:
    found = cells("timm/resnet10t", "--repeats", "1")
    known: dict[str, Any] = {"model": asdict(found["baseline"].model)}
    for kind in ("baseline", "checkpointed", "library_checkpointing", "timing"):
        record = {"status": "done", "key": kind, "kind": kind, "seconds": 1.0}
        known[kind] = record | {"cell": asdict(found[kind])} | done("timm/resnet10t", kind)
    # as from disk
    records = [parse(json.dumps(record)) for kind, record in known.items() if kind != "model"]
    (row,) = rows(comparisons(records))
    assert (row.exact, row.faults) == (True, ())
    own = "timm/resnet10t by its library's own checkpointing, set_grad_checkpointing(), "
    assert row.notes == (f"{own}differs in buffers from step 1 on",)
    assert row.variants == ["baseline", "library_checkpointing", "checkpointed"]
    assert len(row.time_ratios("library_checkpointing")) == 1
    equal = known["library_checkpointing"] | {"digests": known["baseline"]["digests"]}
    assert rows([known | {"library_checkpointing": equal}])[0].notes == (f"{own}is exact",)
    failed = {"status": "failed", "reason": "killed"}
    (row,) = rows([known | {"library_checkpointing": failed}])
    assert (row.faults, row.notes[0][-14:]) == ((), "failed: killed")


def test_models_are_named_by_one_option_or_by_several() -> None:
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    names = ["timm/resnet10t", "resnet18"]
    for line in (["--model", *names], ["--model", names[0], "--model", names[1]]):
        assert [model.name for model in load(line).models] == names


def test_a_model_without_a_switch_or_a_config_that_says_so_has_no_such_cell() -> None:
    assert "library_checkpointing" not in cells("torchvision/shufflenet_v2_x0_5")
    assert "library_checkpointing" not in cells("timm/resnet10t", "--no-library-checkpointing")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("timm/resnet51", "no model 'timm/resnet51'. Did you mean"),
        ("monai/UNet", "monai/UNet needs the arguments spatial_dims"),
        ("torchvision/r3d_18", "the configuration of torchvision/r3d_18 tells no default inputs"),
    ],
)
def test_a_config_says_in_a_sentence_what_is_wrong(model: str, message: str) -> None:
    pytest.importorskip(model.partition("/")[0], exc_type=(ImportError, RuntimeError))
    with pytest.raises(ConfigError, match=message):
        load(["--model", model])


def test_the_loss_is_the_model_s_own_or_one_of_its_logits_or_of_all_that_it_returns() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(5, (3, 7))
    expected = torch.nn.functional.cross_entropy(logits, targets)

    def loss(outputs: Any, classes: int = 5) -> Tensor:
        return library_loss(outputs, classes, targets)

    assert loss({"loss": torch.tensor(2.0), "logits": logits}) == 2
    assert loss((logits, torch.ones(2))) == expected
    # logits of other classes are none
    assert loss(logits, classes=4) == logits.square().mean()
    assert loss((targets, torch.ones(2), torch.full((3,), 2.0))) == 1 + 4
