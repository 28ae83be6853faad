"""Whatever happens to one cell, the others' results are there, and are not measured twice."""

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from zoo.errors import ConfigError
from zoo.harness import run as module
from zoo.harness.cells import KINDS, expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.results import Results
from zoo.harness.run import results_of, run, run_cell

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {})
MEMORY = {"memory": {"peak": 3, "activation_peak": 2}, "digests": []}
SECONDS = {"step_seconds": {"baseline": [1.0], "checkpointed": [1.2]}}


@pytest.fixture
def config(tmp_path):
    models = (MODEL, replace(MODEL, name="resnet34"))
    return Config("mine", models, output=str(tmp_path))


def worker(monkeypatch, code):
    """Lets cells run `code` in place of the worker; `cell` is the cell it got."""
    start = "import json, os, signal, sys, time; cell = json.loads(sys.stdin.readline()); "
    monkeypatch.setattr(module, "WORKER", (sys.executable, "-c", start + code))


def quiet():
    return Console(file=io.StringIO(), width=200)


def measured(code="pass"):
    result = f"({MEMORY!r}, {SECONDS!r})[cell['kind'] == 'timing']"
    return f"exec({code!r}); print(json.dumps({result}))"


def test_results_are_kept_one_line_a_cell(config, monkeypatch):
    worker(monkeypatch, measured())
    found = run(config, quiet())
    lines = results_of(config).path.read_text().splitlines()
    assert len(lines) == 6
    assert [json.loads(line)["kind"] for line in lines] == list(KINDS) * 2
    assert found[1]["model"]["name"] == "resnet34"
    assert found[1]["timing"]["step_seconds"] == SECONDS["step_seconds"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL, as happens when memory runs"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit('no such thing')", "ended with exit code 1: no such thing"),
        ("print(json.dumps({'reason': 'OutOfMemoryError: 3 GiB'})); sys.exit(1)", "OutOfMemory"),
    ],
)
def test_a_cell_that_dies_is_recorded_and_costs_no_other(config, monkeypatch, code, reason):
    dying = f"if (cell['model']['name'], cell['kind']) == ('resnet18', 'checkpointed'): {code}"
    worker(monkeypatch, measured(dying))
    first, second = run(config, quiet())
    assert reason in first["checkpointed"]["reason"]
    assert [first[kind]["status"] for kind in KINDS] == ["done", "failed", "done"]
    assert [second[kind]["status"] for kind in KINDS] == ["done"] * 3


def test_a_cell_that_hangs_is_ended(monkeypatch):
    worker(monkeypatch, "time.sleep(60)")
    record = run_cell(expand(Config("mine", (MODEL,)))[0]["baseline"], timeout=0.5)
    assert record["reason"] == "not done after 0.5 s; --timeout allows more"


def test_what_was_measured_is_not_measured_again(config, monkeypatch):
    worker(monkeypatch, measured())
    run(config, quiet())
    worker(monkeypatch, "sys.exit('run again')")
    again = run(config, quiet())
    assert [again[1][kind]["status"] for kind in KINDS] == ["done"] * 3


def test_what_failed_is_tried_again(config, monkeypatch):
    worker(monkeypatch, "sys.exit('broken')")
    assert run(config, quiet())[0]["baseline"]["status"] == "failed"
    worker(monkeypatch, measured())
    assert run(config, quiet())[0]["baseline"]["status"] == "done"


def test_fresh_measures_again(config, monkeypatch):
    worker(monkeypatch, measured())
    run(config, quiet())
    run(replace(config, fresh=True), quiet())
    lines = results_of(config).path.read_text().splitlines()
    assert len(lines) == 6
    assert not any("cached" in line for line in lines)


def test_an_interruption_keeps_what_is_there_and_the_next_run_goes_on(config, monkeypatch):
    worker(monkeypatch, measured())
    real, calls = module.run_cell, []

    def interrupted(cell, timeout):
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(cell, timeout)

    monkeypatch.setattr(module, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet())
    assert len(results_of(config).read()) == 2
    run(config, quiet())
    assert len(calls) == 3 + 4


def test_a_line_that_broke_off_costs_only_itself(tmp_path):
    results = Results(tmp_path / "mine.jsonl")
    results.append({"key": "a", "value": 1})
    with results.path.open("a") as file:
        file.write('{"key": "b", "val')
    results.append({"key": "c", "value": 3})
    assert {key: record["value"] for key, record in results.read().items()} == {"a": 1, "c": 3}


def test_progress_is_a_line_per_cell_where_there_is_no_terminal(config, monkeypatch):
    worker(monkeypatch, measured())
    console = quiet()
    run(config, console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("[1/6] resnet18 baseline: activation peak 2 B")


def test_a_device_that_is_not_there_is_refused_before_anything_runs(config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device here; --device cpu"):
        run(replace(config, device="cuda"), quiet())
    assert not results_of(config).path.exists()
