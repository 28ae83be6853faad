"""The anatomy of a step is that of the step that a program would run, really run or not."""

import copy
import functools
import json
import logging
import re
import threading

import pytest
import torch
from torch import nn

import zoo
from tests.tracing.models import Net
from tests.training import Residuals, assert_same, everything, images
from zoo.errors import ArgumentError
from zoo.models.resnet import ResNet, basic
from zoo.profiling.peak_memory import trace
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
MIB = 1024**2
PHASES = {"before", "forward", "recompute", "backward", "optimizer", "other"}


def texts(*shape):
    return torch.randint(50, shape), None, torch.randint(50, shape)


MODELS = {
    "residuals": (Residuals, lambda: images(8, size=16)),
    "resnet": (functools.partial(ResNet, basic, (2, 1), 10), lambda: torch.rand(2, 3, 32, 32)),
    "lstm": (
        lambda: zoo.lstm(vocabulary=50, embedding=32, hidden=32, layers=1),
        lambda: texts(25, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_take_what_real_ones_do(name):
    build, make = MODELS[name]
    model, inputs = build(), make()
    parts = [
        zoo.anatomy(model, inputs, optimizer=sgd, loss=first, checkpoint=True, device=device)
        for device in (None, "meta")
    ]
    for real, fake in zip(*((part.baseline, part.planned) for part in parts), strict=True):
        assert abs(fake.peak - real.tensor_peak) <= 0.002 * real.tensor_peak
        assert abs(fake.activation_peak - tensors(real)) <= 0.002 * tensors(real)
        assert real.allocator
        assert not fake.allocator


def first(outputs):
    return (outputs[0] if isinstance(outputs, tuple) else outputs).mean()


def tensors(timeline):
    return max(timeline.total(["saved activations", "recomputed", "temporaries"]))


def test_the_planned_step_takes_less_and_both_are_shown():
    found = zoo.anatomy(Residuals(), images(8, size=16), checkpoint=True)
    assert found.planned.activation_peak < found.baseline.activation_peak
    assert max(found.planned.curves()["recomputed"]) > 0
    assert not max(found.baseline.curves()["recomputed"])
    text = found.table()
    assert "baseline: Residuals on cpu: peak" in text
    assert "saved activations" in text
    assert json.loads(found.to_json())["plan"] == json.loads(json.dumps(found.plan))


def test_an_anatomy_draws_both_steps_and_without_a_plan_the_categories(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    drawn = {}
    for option in (None, True):
        zoo.anatomy(Net(), images(8, size=16), checkpoint=option).plot(tmp_path / "step.svg")
        drawn[option] = (tmp_path / "step.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn[True] for name in ("baseline", "checkpointed"))
    assert "<!-- saved activations -->" in drawn[None]
    assert "<!-- checkpointed -->" not in drawn[None]


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_plan_makes_each_tensor_in_the_line_of_the_model_that_says_so(device):
    found = zoo.anatomy(Net(), images(8, size=16), checkpoint="sqrt", device=device)
    written, planned = map(made, (found.baseline, found.planned))
    assert {file.rpartition("/")[2] for _, file, _ in written} == {"models.py"}
    assert {path for path, _, _ in written} >= {"stem", "blocks.0", "blocks.3.norm", "fc"}
    assert planned == written


def made(timeline):
    """Of what was made in a forward, first or again: the module and the line."""
    parts = [a for a in timeline.allocations if a.phase in ("forward", "recompute") and a.line]
    return {(a.module, *a.line.split(":")) for a in parts}


def test_both_tables_and_both_columns_name_a_block_alike():
    found = zoo.anatomy(Net(), images(8, size=16), checkpoint="sqrt", device="meta")
    _, blocks, *largest = (rows(part) for part in found.table(holders=30).split("\n\n")[1:])
    assert {row[4] for part in largest for row in part} <= {row[0] for row in blocks}
    one, other = (part.blocks().keys() - PHASES for part in (found.baseline, found.planned))
    assert one == other
    assert len(one) >= 5


def rows(part):
    return [re.split("  +", line) for line in part.splitlines() if "  " in line][1:]


def test_a_plan_of_the_models_own_is_the_plan():
    plan = zoo.Plan([(0, 1, 2), (3, 4, 5), *range(6, 11)])
    model = zoo.checkpoint(Residuals(), plan)
    assert zoo.anatomy(model, images()).plan == plan
    assert zoo.anatomy(Residuals(), images()).planned is None
    assert zoo.anatomy(model, images(), checkpoint=False).planned is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, None])
@pytest.mark.parametrize("device", [None, "meta"])
def test_an_optimizer_in_the_backward_leaves_few_gradients(device, optimizer):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    found, whole = (
        zoo.anatomy(
            model,
            torch.ones(4, 64),
            optimizer=optimizer,
            checkpoint=((0, 1), (2, 3), 4, 5),
            device=device,
            optimizer_in_backward=way,
        )
        for way in (True, False)
    )
    layer = sum(parameter.nbytes for parameter in model[0].parameters())
    for step, other in ((found.baseline, whole.baseline), (found.planned, whole.planned)):
        assert layer // 2 < max(step.curves()["gradients"]) <= layer
        assert max(other.curves()["gradients"]) == 6 * layer
        assert len({*step.curves()["optimizer state"], *other.curves()["optimizer state"]}) == 1
        assert step.peak <= other.peak - 4 * layer
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("device", [None, "meta"])
def test_the_model_and_the_random_state_are_left_as_they_are(device):
    model, batch = Residuals(), images().requires_grad_()
    before, runner = everything(model), patched_forward(model)
    given = copy.deepcopy(batch)
    zoo.anatomy(model, batch, checkpoint=True, device=device)
    assert_same(everything(model), before)
    assert patched_forward(model) is runner
    assert torch.equal(batch, given)
    assert batch.grad is None


class OwnLoss(nn.Module):
    """Has a loss with a buffer and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.layer(x)

    def loss(self, output):
        return self.norm(output).exp().mean()


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_loss_that_is_a_method_of_the_model_is_that_of_the_copy(device):
    model, batch = OwnLoss(), torch.rand(8, 4)
    before = copy.deepcopy(everything(model))
    zoo.anatomy(model, batch, loss=model.loss, device=device)
    assert_same(everything(model), before)


class Locked:
    """A loss that cannot be copied, and need not be."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, output):
        with self.lock:
            return output.square().mean()


@pytest.mark.parametrize("loss", [Locked(), Locked().__call__])
def test_a_loss_that_is_no_module_is_called_as_it_is(loss):
    assert zoo.anatomy(nn.Linear(4, 4), torch.rand(8, 4), loss=loss).baseline.peak > 0


def test_complex_outputs_have_a_mean():
    model = nn.Linear(4, 4, dtype=torch.complex64)
    assert zoo.anatomy(model, torch.rand(8, 4, dtype=torch.complex64)).baseline.peak > 0


def test_nothing_of_the_models_size_is_allocated_for_meta_inputs():
    model, batch = zoo.resnet18(), torch.empty(256, 3, 224, 224, device="meta")
    found = []
    run = functools.partial(zoo.anatomy, model, batch, optimizer=sgd, checkpoint="sqrt")
    record = trace(lambda: found.append(run()))
    assert record.peak < MIB
    assert found[0].baseline.peak > 5000 * MIB


def test_a_model_on_the_meta_device_needs_no_parameters():
    with torch.device("meta"):
        model = ResNet(basic, (2, 1), 10)
    real = zoo.anatomy(ResNet(basic, (2, 1), 10), torch.rand(2, 3, 32, 32), device="meta")
    assert zoo.anatomy(model, torch.rand(2, 3, 32, 32)).baseline.peak == real.baseline.peak


def test_a_model_on_the_meta_device_may_have_a_plan_and_counters():
    with torch.device("meta"):
        model = Residuals()
    found, real = (
        zoo.anatomy(one, images(8, size=16), checkpoint="sqrt", device="meta")
        for one in (model, Residuals())
    )
    assert found.plan == real.plan
    assert (found.baseline.peak, found.planned.peak) == (real.baseline.peak, real.planned.peak)


def test_any_module_has_an_anatomy():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    found = zoo.anatomy(model, torch.ones(4, 8), optimizer=None)
    assert found.baseline.blocks().keys() >= {"0", "1", "2"}
    assert not max(found.baseline.curves()["optimizer state"])


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (len, {}, r"needs a torch\.nn\.Module; got builtin"),
        (nn.Linear(4, 4).requires_grad_(False), {}, r"this Linear depends on nothing"),
        (
            nn.Linear(4, 4),
            {"optimizer": "no such name"},
            r"optimizer='no such name' is no optimizer",
        ),
        (nn.Linear(4, 4), {"device": "a100"}, "device='a100' is neither None nor 'meta'"),
    ],
)
def test_what_has_no_anatomy_is_refused(model, options, message):
    with pytest.raises(ArgumentError, match=message):
        zoo.anatomy(model, torch.ones(2, 4), **options)


def test_inputs_that_a_model_does_not_take_are_one_line_without_a_log_of_torch_s() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(ArgumentError, match="Linear does not take these inputs"):
            zoo.anatomy(nn.Linear(3, 3, device="meta"), torch.rand(2, 4, device="meta"))
    finally:
        logger.removeHandler(handler)
    assert not records
    assert not logger.disabled
