"""Each command says what the library says, and its JSON holds the same numbers."""

import json
import re
from dataclasses import asdict

import pytest
import torch

import zoo
from tests.traces import Traces, tracing_once
from tests.tracing.models import Net
from tests.training import Residuals
from zoo.catalog.factories import model_arguments
from zoo.cli.main import run
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans", "traces_once")

TRACES: Traces = {}
RESIDUALS = ("tests.training:Residuals", "--input", "8,4,16,16")
MIB = 1024**2
A100 = ("--device", "a100")


@pytest.fixture
def traces_once(monkeypatch):
    """Traces each model on inputs of a shape once, for the command and for the function."""
    monkeypatch.setattr("zoo.api.checkpoint.step_trace_of", tracing_once(TRACES, str))


@pytest.fixture
def numbers(command):
    def ask(*arguments):
        told = command(*arguments, "--json")
        assert (told.code, told.err) == (0, "")
        return json.loads(told.out)

    return ask


def images(*shape):
    return torch.empty(shape or (8, 4, 16, 16), device="meta")


def as_json(value):
    return json.loads(json.dumps(value))


def test_list_lists_the_catalog(command, numbers):
    found = numbers("list")
    assert [entry["name"] for entry in found] == zoo.list_models()
    assert all(entry["arguments"] == list(model_arguments(entry["name"])) for entry in found)
    vit = next(entry for entry in found if entry["name"] == "vit_tiny_patch16")
    assert (vit["kind"], vit["inputs"]) == ("ViT", [[4, 3, 224, 224]])
    assert [line.split()[1] for line in command("list", "vit*").out.splitlines()[2:]] == [
        entry["name"] for entry in found if entry["name"].startswith("vit")
    ]


TINY = {
    "resnet18": ["--size", "32"],
    "densenet100": [],
    "vnet": ["--size", "16", "--batch-size", "2", "--args", "width=4"],
    "vit_tiny_patch16": ["--args", "image_size=32", "--size", "32"],
    "gpt2_small": ["--size", "8", "--args", "depth=2"],
    "lstm": ["--size", "20", "--args", "chunk_steps=10"],
}


@pytest.mark.parametrize("name", TINY)
def test_info_counts_every_parameter_once(numbers, name):
    found = numbers("info", name, *TINY[name])
    named = dict(part.split("=") for part in TINY[name] if "=" in part)
    model = zoo.create(name, **{key: int(value) for key, value in named.items()})
    count = sum(parameter.numel() for parameter in model.parameters())
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"]) == count


def test_info_shows_what_each_step_hands_on(command, numbers):
    parts = numbers("info", "resnet18", "--size", "32", "--args", "classes=7")["parts"]
    assert parts[0]["shapes"] == [[4, 64, 16, 16]]
    assert parts[-1] == {
        "name": "fc", "block": 9, "shapes": [[4, 7]], "parameters": 3591, "steps": 1
    }  # fmt: skip
    by_block = command("info", "resnet18", "--size", "32").out
    assert re.search(r"\| layer1.0 \(\d steps\) +\| +4×64×8×8 \| +73,984 \|", by_block)
    assert "layer1.0.bn1" not in by_block
    assert len(command("info", "resnet18", "--steps").out.splitlines()) > len(parts)


def test_info_of_any_module_lists_the_steps_that_are_found(command, numbers):
    arguments = "tests.tracing.models:Net", "--args", "8", "3", "--input", "4,4,8,8"
    found, model = numbers("info", *arguments), Net(8, 3)
    expected = zoo.chain_of(model, images(4, 4, 8, 8))
    steps = [(part["name"], part["block"]) for part in found["parts"]]
    assert steps == list(zip(expected.names, expected.blocks, strict=True))
    parameters = sum(part["parameters"] for part in found["parts"])
    assert parameters == found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["reason"] is None
    assert [found["parts"][place]["shapes"] for place in (0, -1)] == [[[4, 8, 8, 8]], [[4, 5]]]
    by_block = command("info", *arguments).out
    assert f"{len(steps)} steps in 5 blocks" in by_block
    assert re.search(r"\| blocks.1 +\(\d steps\) +\| +4×8×8×8 \|", by_block)


def test_info_of_what_cannot_be_followed_lists_its_children_and_says_why(command, numbers):
    counted = "info", "tests.cli.test_commands:Counted", "--input"
    found = numbers(*counted, "2,3")
    assert [(part["name"], part["shapes"], part["parameters"]) for part in found["parts"]] == [
        ("second", [[2, 4]], 16),
        ("first", [], 0),
        ("unused", [], 2),
    ]
    assert "reads numbers out of tensors" in found["reason"]
    told = command(*counted, "2,3").out
    assert found["reason"] in told
    assert "3 modules in 3 blocks\n\n| module " in told
    wrong = command(*counted, "2,7")
    assert (wrong.code, wrong.out) == (2, "")


class Two(torch.nn.Module):
    """Runs its children in another order than it has them, and not all."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.ReLU(), torch.nn.Linear(3, 4)
        self.unused = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.first(self.second(x))


class Counted(Two):
    """Reads a number between two children."""

    def forward(self, x):
        x = self.second(x)
        return self.first(x * x.sum().item())


def test_plan_says_what_zoo_plan_says(command, numbers, tmp_path):
    expected = zoo.plan(Residuals(), images(), memory_budget=0.99, device="a100")
    given = (*RESIDUALS, "--memory-budget", "99%", "--device", "a100")
    assert numbers("plan", *given) == as_json(asdict(expected))
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    told = command("plan", *given, "--save", str(file), "--plot", str(picture), "--draw")
    assert told.out == f"{expected}\n\n{expected.draw()}\n"
    assert zoo.PlanReport.load(file) == expected
    assert picture.read_text().startswith("<?xml")


def test_plan_for_a_rank_says_what_zoo_plan_rank_says(command, numbers, tmp_path, monkeypatch):
    expected = zoo.plan_rank(Residuals(), images(), world_size=4, memory_budget=0.8)
    given = ("plan", *RESIDUALS, "--memory-budget", "80%", "--world-size", "4")
    assert numbers(*given) == as_json(asdict(expected))
    monkeypatch.setattr("zoo.cli.planning_commands.plan_rank", lambda *_, **__: expected)
    told = command(*given, "--save", str(tmp_path / "plan.json"))
    assert told.out == f"{expected}\n"
    assert zoo.PlanReport.load(tmp_path / "plan.json") == expected.alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "ddp"), "give --world-size, too"),
        (("--world-size", "4", "--plot", "plan.svg"), "leave out --world-size"),
        (("--world-size", "4", "--device", "cpu"), "a rank's are only estimated"),
    ],
)
def test_options_of_ranks_that_mean_nothing_are_refused(command, options, message):
    told = command("plan", *RESIDUALS, "--memory-budget", "80%", *options)
    assert (told.code, told.out) == (2, "")
    assert message in told.err


def test_the_optimizer_in_the_backward_is_that_of_the_functions(numbers):
    given, flag = (*RESIDUALS, "--optimizer", "sgd"), "--optimizer-in-backward"
    options = {"optimizer": "sgd", "optimizer_in_backward": True}
    for ranks in ((), ("--world-size", "2")):
        both = (
            numbers("plan", *given, "--max-overhead", "9", *A100, *ranks, *way)
            for way in ((), (flag,))
        )
        without, found = ((part["alone"] if ranks else part)["fixed"] for part in both)
        assert without["gradients"] > found["gradients"] == 0
    # cuBLAS alone holds 16.25 MiB there
    bounds = {"memory_budget": "17.25MiB", "device": "a100", "verify": False}
    expected = zoo.largest(Residuals(), images(), **bounds, **options)
    found = numbers("max-batch", *given, "--memory-budget", "17.25MiB", "--device", "a100", flag)
    assert found == as_json({**asdict(expected), "plan": expected.plan.text()})
    step = zoo.anatomy(Residuals(), images(), **options).baseline
    assert numbers("anatomy", *given, flag)["baseline"]["categories"] == step.by("category")


def test_offloading_is_that_of_the_functions(numbers):
    given = ("tests.training:Residuals", "--args", "5", "--input", "4,4,32,32", *A100)
    model, x = Residuals(5), torch.zeros(4, 4, 32, 32)
    options = {"device": "a100", "offload": True, "host_budget": "1MiB"}
    flags = ("--offload", "--host-budget", "1MiB")
    expected = zoo.plan(model, x, max_overhead=0.5, **options)
    assert 0 < expected.offloaded <= MIB
    assert numbers("plan", *given, "--max-overhead", "50%", *flags) == as_json(asdict(expected))
    found = numbers("frontier", *given, *flags)
    assert found == as_json(asdict(zoo.frontier(model, x, **options)))
    sizes = zoo.largest(model, x, memory_budget="20MiB", checkpoint="blocks", **options)
    given = (*given, "--memory-budget", "20MiB", "--checkpoint", "blocks", *flags)
    assert numbers("max-batch", *given)["offloaded"] == sizes.offloaded > 0


def test_plan_takes_an_overhead_and_an_optimizer(numbers):
    given = ("plan", *RESIDUALS, *A100, "--max-overhead", "0.3", "--optimizer")
    plain, adam = (numbers(*given, name) for name in ("none", "adamw"))
    parameters = sum(parameter.nbytes for parameter in Residuals().parameters())
    assert (plain["budget"], plain["fixed"]["optimizer"]) == (None, 0)
    assert adam["fixed"]["optimizer"] >= 2 * parameters
    assert max(plain["predicted_time_ratio"], adam["predicted_time_ratio"]) <= 1.3


def test_a_budget_that_no_plan_keeps_is_exit_code_1(command):
    told = command("plan", *RESIDUALS, *A100, "--memory-budget", "1KiB")
    assert (told.code, told.out) == (1, "")
    assert re.fullmatch(r"zoo plan: a training step needs at least .*\n", told.err)


@pytest.mark.parametrize("name", ["plan", "max-batch"])
def test_what_is_free_is_asked_where_the_weights_are(numbers, monkeypatch, name):
    monkeypatch.setattr("zoo.policy.budget.free_on", lambda place: 10 * MIB)
    weights = sum(tensor.nbytes for tensor in Residuals().state_dict().values())
    assert numbers(name, *RESIDUALS, "--memory-budget", "device")["budget"] == 10 * MIB + weights


@pytest.mark.parametrize("name", ["plan", "frontier"])
@pytest.mark.parametrize("way", [[], ["--device", "cpu"]])
def test_kernels_are_measured_on_the_device_at_hand_as_in_python(numbers, name, way):
    bounds = {"plan": ["--max-overhead", "9"], "frontier": []}[name]
    found = numbers(name, *RESIDUALS, *bounds, *way)
    made = zoo.plan(Residuals(), images(), max_overhead=9, device=way[-1] if way else None)
    assert (found["kernels_measured"], found["device"]) == (True, "cpu")
    assert (made.kernels_measured, made.device) == (True, "cpu")
    baseline = found["baseline"]["peak"] if name == "frontier" else found["baseline_peak"]
    assert baseline == made.baseline_peak


def test_a_file_of_a_plan_names_the_device_of_its_estimate(command, tmp_path):
    file = tmp_path / "plan.json"
    told = command("plan", *RESIDUALS, *A100, "--max-overhead", "9", "--save", str(file))
    assert "estimated for a100, without kernel workspaces" in told.out
    report = zoo.PlanReport.load(file)
    assert (report.device, report.kernels_measured) == ("a100", False)


def test_frontier_says_what_zoo_frontier_says(command, numbers, tmp_path):
    expected = zoo.frontier(Residuals(), images(), device="a100")
    given = (*RESIDUALS, "--device", "a100")
    assert numbers("frontier", *given) == as_json(asdict(expected))
    file = tmp_path / "curve.csv"
    told = command("frontier", *given, "--points", "2", "--csv", str(file))
    names = re.findall(r"^\| (\w+) ", told.out, re.MULTILINE)[1:]
    assert sorted(names) == ["baseline", "blocks", "cheap", "optimal", "optimal", "sqrt"]
    assert file.read_bytes().decode() == expected.to_csv()


def test_anatomy_says_what_zoo_anatomy_says(command, numbers):
    expected = zoo.anatomy(Residuals(), images(), checkpoint="sqrt")
    found = numbers("anatomy", *RESIDUALS, "--checkpoint", "sqrt")
    assert zoo.Plan.parse(found["plan"]) == expected.plan
    for name in ("baseline", "planned"):
        timeline = getattr(expected, name)
        assert found[name]["categories"] == timeline.by("category")
        assert found[name]["peak"] == timeline.peak == sum(found[name]["categories"].values())
        assert found[name]["activation_peak"] == timeline.activation_peak
        assert found[name]["blocks"].keys() <= timeline.blocks().keys()
        assert [one["bytes"] for one in found[name]["holders"]] == [
            one.bytes for one in timeline.holders()
        ]
    shown = command("anatomy", *RESIDUALS, "--checkpoint", "sqrt", "--holders", "0").out
    assert shown == f"{expected.table(0)}\n"


def test_anatomy_allocates_no_activations():
    codes = []
    record = trace(lambda: codes.append(run(["anatomy", "resnet18", "--input", "64,3,224,224"])))
    assert codes == [0]
    assert record.peak < MIB


def test_anatomy_is_what_a_real_step_takes(numbers):
    given = ("anatomy", "resnet18", "--batch-size", "2", "--size", "64", "--checkpoint", "true")
    paper, real = numbers(*given), numbers(*given, "--device", "cpu")
    for name in ("baseline", "planned"):
        assert paper[name]["peak"] == pytest.approx(real[name]["tensor_peak"], rel=0.01)
    assert real["baseline"]["kernel_workspace"] is not None


def test_anatomy_takes_any_module_and_a_saved_plan(command, numbers, tmp_path):
    found = numbers("anatomy", "tests.cli.test_commands:Two", "--input", "2,3")
    assert (found["plan"], found["planned"]) == (None, None)
    file = str(tmp_path / "plan.json")
    saved = numbers("plan", *RESIDUALS, *A100, "--memory-budget", "99%", "--save", file)
    found = numbers("anatomy", *RESIDUALS, "--checkpoint", file)
    assert zoo.Plan.parse(found["plan"]) == zoo.Plan(saved["plan"])
    timelines = tmp_path / "steps.json"
    command("anatomy", *RESIDUALS, "--save", str(timelines), "--plot", str(tmp_path / "x.svg"))
    kept = json.loads(timelines.read_text())["baseline"]
    assert zoo.Timeline.from_json(json.dumps(kept)).peak == found["baseline"]["peak"]


def test_max_batch_says_what_zoo_largest_says(numbers):
    given = ("max-batch", *RESIDUALS, "--memory-budget", "20.25MiB", "--device", "a100")
    options = {"memory_budget": "20.25MiB", "device": "a100", "verify": False}
    expected = zoo.largest(Residuals(), images(), **options)
    found = numbers(*given)
    assert found == as_json({**asdict(expected), "plan": expected.plan.text()})
    assert numbers(*given, "--checkpoint", "auto")["size"] > found["size"]
    assert numbers(*given, "--multiple-of", "8")["size"] == found["size"] // 8 * 8
    assert found["measured_peak"] is None


def test_max_batch_measures_where_the_model_is(numbers):
    found = numbers("max-batch", *RESIDUALS, "--memory-budget", "2MiB", "--device", "cpu")
    assert 0 < found["measured_peak"] <= 2 * MIB


def test_max_batch_of_a_text_in_columns_varies_the_columns(command, monkeypatch):
    seen = []

    def note(model, sample, *, vary, **options):
        seen.append((vary, sample[0].shape))
        return zoo.largest(Residuals(), images(), memory_budget="2MiB", verify=False)

    monkeypatch.setattr("zoo.cli.planning_commands.largest", note)
    for more in ([], ["--vary", "0"]):
        command("max-batch", "lstm", "--size", "5", "--memory-budget", "2MiB", *more)
    command("max-batch", *RESIDUALS, "--memory-budget", "2MiB")
    assert seen == [((1,), (5, 1)), ((0,), (5, 1)), ((0,), (8, 4, 16, 16))]


def test_verify_says_exact(command, numbers):
    given = ("verify", "resnet18", "--checkpoint", "sqrt", "--size", "32", "--steps", "1")
    told = command(*given)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("exact: ResNet with checkpoint='sqrt', 33 of 46 steps recomputed, ")
    found = numbers(*given)
    assert (found["exact"], found["first"], found["steps"]) == (True, None, 1)
    assert sum(runs > 1 for runs in zoo.Plan.parse(found["plan"]).runs()) == 33


@pytest.mark.parametrize(
    ("given", "code", "exact"), [([], 3, None), (["--deterministic"], 0, True)]
)
def test_verify_tells_a_baseline_that_does_not_repeat_its_numbers(command, given, code, exact):
    asked = ("verify", "tests.api.test_verify:Unrepeatable", "--input", "3,4", *given)
    told = command(*asked, "--checkpoint", "2")
    assert told.code == code
    assert told.out.startswith("exact: " if exact else "the baseline does not repeat its own ")
    assert ("Pass deterministic=True (--deterministic)" in told.out) is (code == 3)
    found = json.loads(command(*asked, "--checkpoint", "2", "--json").out)
    assert (found["exact"], found["deterministic"]) == (exact, bool(given))
    assert (found["first"] is None) is bool(exact)
    assert torch.get_deterministic_debug_mode() == 0


def test_verify_by_an_operator_without_a_deterministic_algorithm_is_2(command):
    asked = ("verify", "tests.verification.test_determinism:Puts", "--input", "2,3,6,6")
    told = command(*asked, "--deterministic")
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert told.err.startswith("zoo verify: torch has no deterministic algorithm for put_, which ")


def test_verify_fails_when_training_is_not_exact(command):
    given = (
        "tests.api.test_verify:Scaled",
        "--args",
        "rate=0.0",
        "--input",
        "4,4,6,6",
    )
    told = command("verify", *given, "--checkpoint", "(0-10) 11")
    assert told.code == 1
    assert told.out.startswith("not exact: Scaled with checkpoint='(0-10) 11' differs")
    told = command("verify", *given, "--checkpoint", "false")
    assert told.code == 0
    assert told.out.startswith("exact, with nothing recomputed: Scaled with checkpoint=False keeps")
