"""Whatever happens to one cell, the others' results are there, and are not measured twice."""

import io
import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from tests.harness.test_results import records as recorded
from zoo.cli.main import run as command
from zoo.errors import ConfigError
from zoo.harness import run as module
from zoo.harness.comparison_cells import GRAPHS, KINDS
from zoo.harness.config import Config, ModelConfig
from zoo.harness.results import Results, cells_of_run, comparisons
from zoo.harness.run import names_left, results_of, run
from zoo.report.rows import rows

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {})
MEMORY = {"memory": {"peak": 3, "activation_peak": 2}, "digests": [{"loss": "a"}]}
SECONDS = {
    "step_seconds": {"baseline": [1.0], "checkpointed": [1.2], "optimizer_in_backward": [1.1]},
}


@pytest.fixture
def config(tmp_path):
    models = (MODEL, replace(MODEL, name="resnet34"))
    return Config("mine", models, output=str(tmp_path))


def quiet():
    return Console(file=io.StringIO(), width=200)


def measured(cell):
    return SECONDS if cell.kind == "timing" else MEMORY


def broken(cell):
    return {"status": "failed", "reason": "broken"}


def too_large(cell):
    return {"status": "does not fit", "reason": "needs more than there is"}


def killed_in_the_second(cell):
    if (cell.model.name, cell.kind) == ("resnet18", "checkpointed"):
        os.kill(os.getpid(), signal.SIGKILL)
    # so that no second process looks where the first one ran
    return {"environment": {}} | measured(cell)


@pytest.fixture
def results(monkeypatch):
    """Lets a test say what cells result in, without processes: by default they are measured."""

    def results(function):
        place = {"environment": {"torch": "2"}}
        monkeypatch.setattr(module, "check_cells", lambda cells: None)
        monkeypatch.setattr(
            module,
            "outcome",
            lambda work, cell, timeout: place if work is module.locate else function(cell),
        )

    results(measured)
    return results


def test_results_are_kept_one_line_a_cell(config, results):
    found = run(config, quiet())
    lines = results_of(config).path.read_text().splitlines()
    assert len(lines) == 8
    assert [json.loads(line)["kind"] for line in lines] == list(KINDS) * 2
    assert found[1]["model"]["name"] == "resnet34"
    assert found[1]["timing"]["step_seconds"] == SECONDS["step_seconds"]


def test_the_timing_has_the_plans_that_were_measured(config, results):
    plans = {"checkpointed": "(0-1) 2", "optimizer_in_backward": "0 (1-2)"}
    results(lambda cell: measured(cell) | {"plan": plans.get(cell.kind)})
    found = run(config, quiet())
    assert [found[0][kind]["cell"]["plan"] for kind in KINDS] == [None, None, None, "(0-1) 2"]
    assert found[0]["timing"]["cell"]["plan_in_backward"] == "0 (1-2)"
    assert comparisons(results_of(config).read().values()) == [
        entry | {"model": entry["checkpointed"]["cell"]["model"]} for entry in as_stored(found)
    ]


def test_the_third_variant_can_be_left_out(config, results):
    found = run(replace(config, optimizer_in_backward=False), quiet())
    assert [list(entry) for entry in found] == [["model", "baseline", "checkpointed", "timing"]] * 2
    assert len(results_of(config).read()) == 6
    assert list(comparisons(results_of(config).read().values())[0]) == list(found[0])


def test_graphs_follow_where_the_device_has_them(config, results, monkeypatch):
    refused = {"status": "refused", "reason": "it waits"}
    graph = {"replay_seconds": [0.5]}
    results(
        lambda cell: refused if cell.kind == "baseline_graph"
        else measured(cell) | (graph if cell.kind in GRAPHS else {})
    )  # fmt: skip
    monkeypatch.setattr(module, "has_graphs", lambda device: device.type == "cpu")
    console, asked = quiet(), replace(config, cuda_graph=True)
    found = run(asked, console)
    lines = console.file.getvalue().splitlines()
    assert lines[4] == "[ 5/14] resnet18 baseline graph: refused, it waits (0 s)"
    assert lines[5].startswith("[ 6/14] resnet18 checkpointed graph: step peak 3 B, a replay takes")
    assert [row.faults for row in rows(found)] == [()] * 2
    stored = comparisons(results_of(config).read().values())
    assert [row.notes for row in rows(stored)] == [row.notes for row in rows(found)] != [()] * 2
    results(broken)
    assert run(asked, quiet())[0]["baseline_graph"]["status"] == "refused"
    # of fewer steps, with which no graph can be compared
    results(measured)
    run(config, quiet())
    assert not {*GRAPHS} & {*comparisons(results_of(config).read().values())[0]}


def test_a_device_without_graphs_is_named_and_the_comparison_goes_on(config, results):
    console = quiet()
    found = run(replace(config, cuda_graph=True), console)
    line, *lines = console.file.getvalue().splitlines()
    assert line == (
        "cuda_graph is not in force: device cpu has no CUDA graphs; all steps are eager ones"
    )
    assert len(lines) == 8
    assert not {*GRAPHS} & {*found[0]}


def varying(cell):
    """A training that does not repeat its own numbers, unless torch sees to it."""
    source = b"" if cell.deterministic else os.urandom(8)
    return SECONDS if cell.kind == "timing" else MEMORY | {"digests": [{"loss": source.hex()}]}


def differing(cell):
    """A checkpointed training that is not the baseline's, which repeats itself."""
    loss = {"loss": "b" if cell.kind == "checkpointed" else "a"}
    return SECONDS if cell.kind == "timing" else MEMORY | {"digests": [loss]}


def test_where_nothing_differs_no_baseline_is_trained_again(config, results):
    assert all("baseline_again" not in found for found in run(config, quiet()))


@pytest.mark.parametrize(("function", "exact"), [(varying, None), (differing, False)])
def test_where_a_bit_differs_the_baseline_is_trained_again(config, results, function, exact):
    results(function)
    console = quiet()
    found = run(config, console)
    assert [list(entry)[-1] for entry in found] == ["baseline_again"] * 2
    lines = console.file.getvalue().splitlines()
    assert lines[4].startswith("[5/9] resnet18 baseline again: step peak 3 B")
    assert lines[9].startswith("[10/10] resnet34 baseline again")
    assert [row.exact for row in rows(found)] == [exact] * 2
    assert [row.baseline_repeats for row in rows(found)] == [exact is False] * 2
    stored = comparisons(results_of(config).read().values())
    assert [row.faults for row in rows(stored)] == [row.faults for row in rows(found)]
    results(broken)
    again = run(config, quiet())
    assert [entry["baseline_again"]["status"] for entry in again] == ["done"] * 2


def test_a_baseline_that_varies_is_compared_by_deterministic_algorithms(config, results):
    results(varying)
    (first, second) = rows(run(replace(config, deterministic=True), quiet()))
    assert (first.exact, first.faults, second.exact) == (True, (), True)


def as_stored(found):
    return json.loads(json.dumps(found))


def test_a_cell_that_dies_is_recorded_and_costs_no_other(config, monkeypatch):
    monkeypatch.setattr(module, "work", killed_in_the_second)
    monkeypatch.setattr(module, "check_cells", lambda cells: None)
    first, second = run(config, quiet())
    assert first["checkpointed"]["reason"].startswith("killed by SIGKILL")
    assert [first[kind]["status"] for kind in KINDS] == ["done", "failed", "done", "done"]
    assert [second[kind]["status"] for kind in KINDS] == ["done"] * 4
    assert results_of(config).read()[first["checkpointed"]["key"]]["status"] == "failed"


def test_what_was_measured_is_not_measured_again(config, results):
    run(config, quiet())
    results(broken)
    again = run(config, quiet())
    assert [again[1][kind]["status"] for kind in KINDS] == ["done"] * 4


def test_what_failed_is_tried_again(config, results):
    results(broken)
    assert run(config, quiet())[0]["baseline"]["status"] == "failed"
    results(measured)
    assert run(config, quiet())[0]["baseline"]["status"] == "done"


def test_what_does_not_fit_is_a_result(config, results):
    results(too_large)
    console = quiet()
    assert run(config, console)[0]["baseline"]["status"] == "does not fit"
    assert "baseline: does not fit, needs more than there is (0 s)" in console.file.getvalue()
    results(measured)
    assert run(config, quiet())[0]["baseline"]["status"] == "does not fit"
    assert run(replace(config, fresh=True), quiet())[0]["baseline"]["status"] == "done"


@pytest.mark.parametrize("result", [measured, broken, too_large])
def test_every_result_says_where_it_was_measured(config, results, result):
    results(result)
    run(config, quiet())
    records = results_of(config).read().values()
    assert {record["environment"]["torch"] for record in records} == {"2"}


def test_fresh_measures_again(config, results):
    run(config, quiet())
    results(broken)
    assert run(replace(config, fresh=True), quiet())[0]["baseline"]["status"] == "failed"
    assert len(results_of(config).path.read_text().splitlines()) == 8


def test_an_interruption_keeps_what_is_there_and_the_next_run_goes_on(config, results):
    calls = []

    def interrupted(cell):
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(cell)

    results(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    records = results_of(config).read().values()
    assert (len(records), cells_of_run(records)) == (2, (2, 8))
    run(config, quiet())
    assert len(calls) == 3 + 6
    assert cells_of_run(results_of(config).read().values()) == (8, 8)


def test_a_cell_that_is_measured_again_takes_none_from_its_run(config, results):
    results(lambda cell: (broken if cell.kind == "baseline" else measured)(cell))
    run(config, quiet())
    results(measured)
    run(config, quiet())
    last = json.loads(results_of(config).path.read_text().splitlines()[-1])
    assert (last["kind"], last["run"]) == ("baseline", {"cells": 8, "measured": 8})


def test_each_report_of_a_run_that_was_interrupted_says_so_first(config, results, tmp_path, capsys):
    calls = []

    def interrupted(cell):
        calls.append(cell)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return measured(cell)

    results(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    command(["report", str(results_of(config).path)])
    first = "4 of 8 cells: Training resnet18"
    assert first in capsys.readouterr().out.strip().splitlines()[0]
    folder = tmp_path / "mine"
    assert (folder / "report.md").read_text().startswith(f"# {first}")
    page = (folder / "report.html").read_text()
    assert f"<h1>{first}" in page
    assert f"<title>{first}" in page
    results(measured)
    run(config, quiet())
    command(["report", str(results_of(config).path)])
    assert "of 8 cells" not in (folder / "report.md").read_text()


def test_a_line_that_broke_off_costs_only_itself(tmp_path):
    results, (record, *_) = Results(tmp_path / "mine.jsonl"), recorded()
    results.append(record | {"key": "a", "value": 1})
    with results.path.open("a") as file:
        file.write('{"key": "b", "val')
    results.append(record | {"key": "c", "value": 3})
    assert {key: record["value"] for key, record in results.read().items()} == {"a": 1, "c": 3}


def test_progress_is_a_line_per_cell_where_there_is_no_terminal(config, results):
    console = quiet()
    run(config, console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("[1/8] resnet18 baseline: step peak 3 B")
    assert lines[2].startswith("[3/8] resnet18 optimizer in backward: step peak 3 B")
    assert ", checkpointed ×1.20, optimizer in backward ×1.10" in lines[3]


def test_the_line_of_a_timing_has_quartiles_from_five_pairs_on(config, results):
    seconds = {"baseline": [1.0, 2.0, 3.0, 4.0, 5.0], "checkpointed": [2.0, 4.0, 6.0, 4.0, 20.0]}
    results(lambda cell: {"step_seconds": seconds} if cell.kind == "timing" else MEMORY)
    console = quiet()
    run(config, console)
    line = console.file.getvalue().splitlines()[3]
    assert "a step takes 3.00 s, checkpointed ×2.00 [2.00, 2.00] (0 s)" in line


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], ""),
        (["vnet", "vnet", "lstm"], "left: vnet, lstm"),
        (["a", "b", "c", "d", "d", "e"], "left: a, b, c +2"),
    ],
)
def test_what_is_left_is_named(models, words):
    assert names_left(models) == words


def test_a_terminal_shows_what_runs_now_and_what_is_left(config, results, monkeypatch):
    monkeypatch.delenv("ZOO_PROGRESS")
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    seen = []
    results(lambda cell: (seen.append(bar(console)), measured(cell))[1])
    run(config, console)
    assert "resnet18 checkpointed" in seen[1]
    assert "1/8" in seen[1]
    assert "left: resnet18, resnet34" in seen[1]
    assert "left" not in seen[7]


def bar(console):
    """Returns what the bar shows now."""
    live = console._live_stack[-1] if hasattr(console, "_live_stack") else console._live
    # the console itself would print beside it what it showed last
    other = Console(file=io.StringIO(), width=120)
    other.print(live.get_renderable())
    return other.file.getvalue()


def test_a_device_that_is_not_there_is_refused_before_anything_runs(config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device cuda: torch finds none on this machine; --d"):
        run(replace(config, device="cuda"), quiet())
    assert not results_of(config).path.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(config, results, tmp_path):
    (tmp_path / "file").write_text("")
    results(broken)
    with pytest.raises(ConfigError, match=r"cannot be written to: .*--output names another"):
        run(replace(config, output=str(tmp_path / "file")), quiet())
