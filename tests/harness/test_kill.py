"""`kill -9` at any moment loses only the cell in flight; the next run goes on after the last."""

import io
import json
import os
import signal
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tests.harness.test_results import records as recorded
from zoo.harness import run as module
from zoo.harness.config import Config, ModelConfig
from zoo.harness.processes import outcome
from zoo.harness.run import results_of, run

MODELS = ("resnet18", "resnet34")
CELLS = 4 * len(MODELS)


def runs(folder, killed_at):
    """Runs a comparison of cells that only tell that they ran, and dies before a line of code."""
    model = ModelConfig("resnet18", "photographs", 2, 32, {})
    models = tuple(replace(model, name=name) for name in MODELS)
    config = Config("mine", models, output=str(folder))
    module.check_cells = lambda cells: None
    module.outcome = lambda work, cell, timeout: measured(folder, cell)
    sys.settrace(Clock(killed_at))
    run(config, Console(file=io.StringIO()))
    sys.settrace(None)
    (folder / "whole").touch()


def measured(folder, cell):
    with (folder / "ran").open("a") as file:
        file.write(f"{cell.key()}\n")
    return {
        "environment": {},
        "memory": {"peak": 1, "activation_peak": 1},
        "digests": [{"loss": "a"}],
        "step_seconds": {"baseline": [1.0], "checkpointed": [1.0]},
    }


class Clock:
    """Kills this process before the given line of the harness that it runs."""

    def __init__(self, left):
        self.left = left

    def __call__(self, frame, event, argument):
        return self.tick if f"{os.sep}harness{os.sep}" in frame.f_code.co_filename else None

    def tick(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.tick


def kill_and_go_on(folder):
    """Kills a run at its 1st, 38th, ... line, each time in a new folder, until none is left."""
    faults, moment = [], 1
    while True:
        place = folder / str(moment)
        place.mkdir()
        forked(runs, place, moment)
        if (place / "whole").exists():
            return {"moments": moment, "faults": faults}
        kept = lines(place / "mine.jsonl")
        forked(runs, place, 0)
        faults += wrong(place, kept, moment)
        moment += 37


def forked(function, *arguments):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        function(*arguments)
    finally:
        os._exit(0)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def wrong(place, kept, moment):
    """Names what was lost beside the cell in flight, measured again, or is not there at the end."""
    ran, end = lines(place / "ran"), lines(place / "mine.jsonl")
    whole = [json.loads(line)["key"] for line in kept]
    if end[: len(kept)] != kept or len({json.loads(line)["key"] for line in end}) != CELLS:
        yield f"{moment}: {end}"
    if len(ran) > CELLS + 1 or any(ran.count(key) > 1 for key in whole):
        yield f"{moment}: {ran}"


@pytest.mark.skipif(sys.platform != "linux", reason="cells are forked on Linux")
def test_a_kill_at_any_line_loses_only_the_cell_in_flight(tmp_path):
    result = outcome(kill_and_go_on, tmp_path, 120)
    assert result.get("faults") == [], result
    assert result["moments"] > 200


def test_a_kill_while_a_line_is_written_loses_only_that_line(tmp_path):
    config, (record, *_) = Config("mine", (), output=str(tmp_path)), recorded()
    for length in range(0, 60, 7):
        results = results_of(replace(config, name=str(length)))
        results.append(record | {"key": "a"})
        torn = json.dumps({"key": "b", "value": "é" * 20}, ensure_ascii=False).encode()[:length]
        with results.path.open("ab") as file:
            file.write(torn)
        results.append(record | {"key": "c"})
        assert list(results.read()) == ["a", "c"]
