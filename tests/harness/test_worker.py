"""A worker measures what its cell says."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zoo
from tests.traces import tracing_once
from zoo.harness import run, worker
from zoo.harness.comparison_cells import again, expand
from zoo.harness.config import Config, ModelConfig, find_config, read
from zoo.harness.results import parse
from zoo.harness.run import run_cell
from zoo.harness.worker import work
from zoo.optimizer.in_backward import FreedGradient
from zoo.report.rows import EXACT, differences
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans", "traces_once")

ROOT = Path(__file__).parents[2]
SMALL = {"vocabulary": 500, "embedding": 8, "hidden": 8, "drop_rate": 0.5, "chunk_steps": 5}
MODEL = ModelConfig("lstm", "stream", 4, 10, SMALL, repeats=3)
MEASURE = """
import json
from tests.harness.test_worker import memory_of_vnet
from zoo.profiling import isolation
isolation.can_fork = lambda: False
print(json.dumps(memory_of_vnet(threads=4)))
"""
(CELLS,) = expand(Config("mine", (MODEL,), steps=2))
TRACE_OF = tracing_once({}, str)


@pytest.fixture
def traces_once(monkeypatch):
    """Traces a model once for all variants and optimizers."""
    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", TRACE_OF)


@functools.cache
def done(kind, dtype="float32", optimizer=MODEL.optimizer):
    """Works on a cell of each kind once; nobody writes the result."""
    cell = CELLS[kind]
    return work(replace(cell, dtype=dtype, model=replace(cell.model, optimizer=optimizer)))


def test_checkpointed_digests_equal_the_baselines():
    baseline, checkpointed = done("baseline"), done("checkpointed")
    assert len(baseline["digests"]) == 2
    assert differences(baseline["digests"], checkpointed["digests"]) == []
    assert baseline["plan"] is None
    assert "(" in checkpointed["plan"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_digests_with_the_optimizer_in_the_backward_equal_the_baselines(optimizer, dtype):
    baseline, third = (
        done(kind, dtype, optimizer)["digests"] for kind in ("baseline", "optimizer_in_backward")
    )
    # all but the gradients, which are freed
    assert [{*step} for step in third] == [{"loss", "buffers", "parameters", "rng"}] * 2
    assert [step | {"gradients": None} for step in third] == [
        step | {"gradients": None} for step in baseline
    ]


def test_the_gradients_are_gone_from_the_peak_with_the_optimizer_in_the_backward():
    """Wide layers and few samples: at the checkpointed peak nearly all gradients are there."""
    wide = {"width": 64, "heads": 4, "vocabulary": 100, "depth": 8}
    model = ModelConfig("gpt2_small", "text", 1, 8, wide)
    (cells,) = expand(Config("mine", (model,), steps=2))
    checkpointed, third = (work(cells[kind]) for kind in ("checkpointed", "optimizer_in_backward"))
    memory, gradients = checkpointed["memory"], checkpointed["memory"]["resident"]["gradients"]
    assert third["memory"]["resident"] == memory["resident"] | {"gradients": 0}
    assert memory["peak"] - third["memory"]["peak"] > 0.8 * gradients
    assert memory["tensor_peak"] - third["memory"]["tensor_peak"] > 0.8 * gradients
    assert "activation_peak" not in third["memory"]
    held, freed = (cell["timeline"]["bytes"]["gradients"] for cell in (checkpointed, third))
    assert max(held) == gradients
    assert 0 < max(freed) < 0.2 * gradients
    assert freed[-1] == 0


def test_the_curves_of_all_variants_begin_at_the_same_bytes():
    curves = [done(kind)["timeline"]["bytes"] for kind in ("baseline", *EXACT)]
    first, *others = ({name: sizes[0] for name, sizes in curve.items()} for curve in curves)
    assert first["gradients"] == 0 < first["parameters"]
    for other in others:
        assert other == dict.fromkeys(other, 0) | first


def test_each_step_moves_every_kind_that_a_language_model_has():
    first, second = done("baseline")["digests"]
    assert {kind for kind in first if first[kind] != second[kind]} == {
        "loss",
        "gradients",
        "parameters",
        "rng",
    }


def test_another_seed_is_another_training():
    other = work(replace(CELLS["baseline"], seed=1))
    assert len(differences(done("baseline")["digests"], other["digests"])) >= 4


def test_memory_counts_what_the_optimizer_and_the_gradients_hold():
    result = done("baseline")
    resident = result["memory"]["resident"]
    assert resident["parameters"] == 4 * result["parameters"]
    assert resident["gradients"] == resident["optimizer"] == resident["parameters"]
    # tokens and targets are two views of the same 11 rows
    assert resident["inputs"] == 11 * 4 * 8


def memory_of_vnet(threads):
    changes = {"batch_size": 2, "size": 16, "steps": 2, "threads": threads}
    (cells,) = expand(read(find_config("quick"), ["vnet"], changes))
    kinds = ("baseline", "checkpointed")
    return [work(cells[kind], lambda *_: {})["memory"] for kind in kinds]


def test_the_bytes_of_tensors_are_those_of_any_processor_and_threads():
    """Kernel workspaces are not: those of oneDNN's convolutions go by instructions and threads."""
    others = "ALL" if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else "AVX2"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": others}
    command = [sys.executable, "-c", MEASURE]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    found = [memory_of_vnet(threads=1), json.loads(printed)]
    names = ("tensor_peak", "tensor_activation_peak")
    tensors = [[memory[name] for memory in pair for name in names] for pair in found]
    assert tensors[0] == tensors[1]
    assert all(memory["tensor_peak"] <= memory["peak"] for pair in found for memory in pair)


def test_timing_takes_as_many_pairs_as_asked():
    seconds = work(CELLS["timing"])["step_seconds"]
    assert [len(values) for values in seconds.values()] == [3, 3, 3]
    assert min(map(min, seconds.values())) > 0


def test_variants_take_turns_so_that_a_disturbance_hurts_both_alike(monkeypatch):
    order = []

    def seconds(training, batch):
        training.step(batch)
        is_freed = any(isinstance(p.grad, FreedGradient) for p in training.model.parameters())
        order.append("C" if is_freed else "A" if patched_forward(training.model) is None else "B")
        return float(len(order))

    monkeypatch.setattr(worker, "_seconds", seconds)
    result = work(CELLS["timing"])
    assert "".join(order) == "ABCCBAABC"
    assert result["step_seconds"] == {
        "baseline": [1, 6, 7],
        "checkpointed": [2, 5, 8],
        "optimizer_in_backward": [3, 4, 9],
    }
    order.clear()
    result = work(replace(CELLS["timing"], optimizer_in_backward=False))
    assert "".join(order) == "ABBAAB"
    assert result["step_seconds"] == {"baseline": [1, 4, 5], "checkpointed": [2, 3, 6]}


def test_what_is_timed_is_the_plan_of_the_cell(monkeypatch):
    plans = []
    monkeypatch.setattr(worker, "_seconds", lambda training, batch: plans.append(plan(training)))
    steps = done("checkpointed")["plan"]
    work(replace(CELLS["timing"], plan=steps))
    assert set(plans) == {None, steps}


def plan(training):
    found = zoo.plan_of(training.model)
    return found if found is None else found.text()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizers_and_types(optimizer, dtype):
    baseline, checkpointed = (
        done(kind, dtype, optimizer)["digests"] for kind in ("baseline", "checkpointed")
    )
    assert differences(baseline, checkpointed) == []


def settings(*_):
    """What is in force while a cell trains, in the place of what a report draws."""
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    return {"settings": [mode, benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]}


def work_telling(cell):
    return work(cell, also=settings)


@pytest.mark.parametrize("kind", ["baseline", "checkpointed", "baseline_again"])
def test_deterministic_algorithms_are_in_force_in_the_process_of_a_cell(kind, monkeypatch):
    # torch.testing, which other tests import, sets it for the whole process
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(run, "work", work_telling)
    (plain,), (asked,) = (
        expand(Config("mine", (MODEL,), steps=2, deterministic=wanted)) for wanted in (False, True)
    )
    for cells, expected in ((plain, [0, False, None]), (asked, [2, False, ":4096:8"])):
        cell = again(cells["baseline"]) if kind == "baseline_again" else cells[kind]
        record = run_cell(cell, timeout=600)
        assert record["settings"] == expected
        assert parse(json.dumps(record)) == json.loads(json.dumps(record))
    assert settings()["settings"][0] == 0


def test_a_timing_is_that_of_deterministic_algorithms(monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "_seconds", lambda *_: seen.append(settings()["settings"][0]))
    work(replace(CELLS["timing"], deterministic=True))
    assert set(seen) == {2}
    assert settings()["settings"][0] == 0


def test_a_baseline_that_is_trained_again_is_not_drawn():
    found = work(again(CELLS["baseline"]))
    assert found["digests"] == done("baseline")["digests"]
    assert not {"timeline", "steps", "missing"} & {*found}


def test_a_fresh_process_measures_the_same():
    record = run_cell(CELLS["baseline"], timeout=600)
    here = done("baseline")
    assert record["status"] == "done"
    assert record["memory"] == here["memory"]
    assert record["digests"] == here["digests"]
