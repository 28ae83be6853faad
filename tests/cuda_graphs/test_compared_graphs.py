"""The cells of a comparison that train as CUDA graphs, on graphs in software."""

import functools
from typing import Any

import pytest

from tests.cuda_graphs.software_graphs import SoftwareGraphs
from zoo.cuda_graphs import graphed_step
from zoo.harness.comparison_cells import GRAPHS, Cell, Kind, expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.training import Training
from zoo.harness.worker import work
from zoo.report.rows import differences

pytestmark = pytest.mark.usefixtures("without_fork")

SMALL = {"vocabulary": 500, "embedding": 8, "hidden": 8, "drop_rate": 0.5, "chunk_steps": 5}
DEEP = {"vocabulary": 100, "width": 16, "depth": 2, "heads": 2, "drop_rate": 0.1}
MODELS = {
    "lstm": ModelConfig("lstm", "stream", 4, 10, SMALL, repeats=1),
    "gpt2_small": ModelConfig("gpt2_small", "text", 2, 16, DEEP, repeats=1, optimizer="adamw"),
}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> SoftwareGraphs:
    """The CPU has graphs."""
    made = SoftwareGraphs()
    monkeypatch.setattr(graphed_step, "graphs_on", lambda device: made)
    return made


def cells(name: str = "lstm", dtype: str = "float32") -> dict[Kind, Cell]:
    """Returns the cells of a small model."""
    (entry,) = expand(Config("mine", (MODELS[name],), steps=2, cuda_graph=True, dtype=dtype))
    return entry


@functools.cache
def done(kind: Kind, name: str = "lstm", dtype: str = "float32") -> Any:
    """Works on a cell once, without what a report draws."""
    return work(cells(name, dtype)[kind], lambda *_: {})


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *((kind, "lstm", "float32") for kind in GRAPHS),
        ("checkpointed_graph", "gpt2_small", "bfloat16"),
    ],
)
def test_replays_are_the_eager_steps_of_the_baseline(kind: Kind, name: str, dtype: str) -> None:
    eager, found = done("baseline", name, dtype), done(kind, name, dtype)
    lost = {"gradients"} if kind == "optimizer_in_backward_graph" else set()
    expected = [{part: step[part] for part in {*step} - lost} for step in eager["digests"]]
    assert len(expected) == 2 + 1 + graphed_step.WARM_UPS
    assert differences(expected, found["digests"]) == []
    assert found["memory"]["peak"] > found["parameters"]
    assert len(found["replay_seconds"]) == 1


def test_a_stale_learning_rate_is_not_exact(
    graphs: SoftwareGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a mutant: the graph has another rate than the eager steps
    capture, trainings = graphs.capture, []
    as_graph = Training.as_graph

    def noted(self: Training) -> Any:
        trainings.append(self)
        return as_graph(self)

    def stale(*arguments: Any) -> Any:
        (group,) = trainings[-1].optimizer.param_groups
        rate, group["lr"] = group["lr"], 2 * group["lr"]
        try:
            return capture(*arguments)
        finally:
            group["lr"] = rate

    monkeypatch.setattr(Training, "as_graph", noted)
    monkeypatch.setattr(graphs, "capture", stale)
    monkeypatch.setattr(graphed_step.CapturedStep, "_check", lambda self, eager, captured: None)
    found = work(cells()["checkpointed_graph"])
    assert (
        differences(done("baseline")["digests"], found["digests"])[0] == "parameters from step 5 on"
    )


def test_a_step_that_cannot_be_a_graph_has_the_reason_as_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer_loss = Training.outer_loss

    def waiting(self: Training, batch: Any) -> Any:
        batch.inputs.sum().item()
        return outer_loss(self, batch)

    monkeypatch.setattr(Training, "outer_loss", waiting)
    found = work(cells()["baseline_graph"])
    assert found["status"] == "refused"
    assert "reads numbers of a tensor" in found["reason"]
    assert found["environment"]
