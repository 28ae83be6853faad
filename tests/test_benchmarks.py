"""benchmarks/: a cell sees what differs and what it costs; the largest batch is found."""

import importlib
import mmap
import re
import time
from functools import partial

import pytest
import torch
from torch import nn

from tests.documents import ROOT
from zoo.profiling.isolation import ForkedCall, in_fork

UNAVAILABLE = (ImportError, RuntimeError)


@pytest.fixture
def peers(monkeypatch, tmp_path):
    """The script, with one tiny model whose norms have statistics, and no results yet."""
    for library in ("torchvision", "timm", "transformers", "monai"):
        pytest.importorskip(library, exc_type=UNAVAILABLE)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("peers")
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results" / "peers.jsonl")
    monkeypatch.setitem(script.MODELS, "tiny", script.Model(tiny, "", "Block"))
    return script


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Sigmoid())


def tiny():
    def loss(outputs):
        return outputs.square().mean()

    return nn.Sequential(*(Block() for _ in range(4))), (torch.randn(8, 4, 32, 32),), {}, loss


def test_a_cell_names_the_first_bit_that_differs_and_counts_what_is_recomputed(peers):
    plain, theirs, ours = (
        peers.measure(peers.Cell("tiny", method, rounds=2))
        for method in ("plain", "torch, each block", "zoo, True")
    )
    assert plain["bits"] == ours["bits"] == ""
    assert re.match(r"buffer 0\.1\.running_mean by .*, step 1$", theirs["bits"])
    for result in (theirs, ours):
        assert result["activations"] < plain["activations"]
        assert result["taken"] < plain["taken"]
    # every block's convolution but none of the backward's two products for each
    assert plain["operations"] * 1.3 < theirs["operations"] <= plain["operations"] * 1.4
    assert plain["operations"] <= ours["operations"] <= theirs["operations"]


def test_a_budget_is_asked_for_in_bytes_and_kept_or_refused(peers):
    plain = peers.measure(peers.Cell("tiny", "plain", rounds=2))
    asked = plain["taken"] - plain["activations"] // 4
    kept = peers.measure(peers.Cell("tiny", "zoo, budget 0.5", asked, rounds=2))
    assert kept["taken"] <= asked
    refused = peers.measure(peers.Cell("tiny", "zoo, budget 0.5", 1000, rounds=2))
    assert refused["status"] == "refused"


def test_operations_inside_of_compiled_code_are_counted(peers):
    """By default torch runs the model itself under a mode, which recomputes nothing."""
    cell = partial(peers.Cell, "tiny", rounds=2)
    plain, compiled = map(peers.measure, (cell("plain"), cell("torch.compile, budget 0.05")))
    assert compiled["operations"] > plain["operations"]


def test_a_crash_is_a_cell_s_result_and_what_is_known_is_not_run_again(peers):
    known = {}
    peers.run([peers.Cell("no such model", "plain")], known, 1)
    assert known["no such model", "plain"]["reason"] == "KeyError: 'no such model'"
    with peers.RESULTS.open("a") as file:
        file.write('{"model": "broke')
    assert peers.earlier() == known
    peers.run([peers.Cell("no such model", "plain")], known, 1)
    assert len(peers.RESULTS.read_text().splitlines()) == 2


def test_the_table_has_each_method_of_each_model_and_the_page_is_made_of_it(peers):
    said, lines = peers.read_table()
    cells = {(line["model"], line["method"]) for line in lines}
    models = [model for model in peers.MODELS if model != "tiny"]
    expected = {(model, name) for model in models for name in peers.methods_of(model)}
    assert expected <= cells
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert page == peers.page(said, lines), "run `python benchmarks/peers.py --page`"


def test_the_page_of_models_is_made_of_its_table(peers):
    models = importlib.import_module("models")
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert page == models.page(*models.read()), "run `python benchmarks/models.py --page`"


def test_what_is_measured_becomes_lines_that_read_back(peers, monkeypatch, tmp_path):
    names = ("asked", "taken", "activations", "operations", "time", "start")
    cell = {**dict.fromkeys(names, 2**20), "status": "done", "bits": ""}
    known = {("tiny", name): cell for name in peers.methods_of("tiny")}
    monkeypatch.setattr(peers, "TABLE", tmp_path / "table.csv")
    peers.write_table("Measured here.", peers.lines_of(["tiny"], known))
    said, lines = peers.read_table()
    assert [line["method"] for line in lines] == peers.methods_of("tiny")
    assert "Measured here." in peers.page(said, lines)


@pytest.fixture
def batches(peers, monkeypatch):
    """The script that searches for the largest batch, with one tiny model."""
    script = importlib.import_module("largest_batch")

    def model(batch):
        def build():
            layers, _, settings, loss = tiny()
            return layers, (torch.randn(batch, 4, 32, 32),), settings, loss

        return peers.Model(build, "", "Block")

    monkeypatch.setitem(script.MODELS, "tiny", (model, model))
    return script


def test_the_largest_batch_is_the_last_that_fits(batches):
    """Every answer that there can be."""
    for limit in range(len(batches.SIZES) + 1):
        for first in range(8):
            asked = []

            def fits(index, limit=limit, asked=asked):
                asked.append(index)
                return index < limit

            assert batches.last(fits, first) == max(limit, first) - 1
            assert len(asked) == len(set(asked)) <= 24


def test_batches_are_four_for_each_power_of_two(batches):
    assert batches.SIZES[:15] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28]


def test_a_plan_reaches_a_larger_batch_within_the_same_bytes(batches):
    ask = partial(batches.Search, "tiny", device="cpu", budget=2**19)
    plain, block, ours = map(
        batches.search, map(ask, ("plain", batches.peers.BY_BLOCK, "zoo, True"))
    )
    assert plain["batch"] < block["batch"] <= ours["batch"]
    assert max(found["peak"] for found in (plain, block, ours)) <= 2**19
    larger = batches.SIZES[batches.SIZES.index(plain["batch"]) + 1]
    assert batches.attempt(ask("plain"), larger).peak > 2**19
    as_fast = partial(ask, "zoo", first=plain["batch"])
    planned = batches.search(as_fast(least=0.01 * plain["rate"]))
    assert plain["batch"] < planned["batch"]
    assert planned["peak"] <= 2**19
    # no plan is so fast
    assert batches.search(as_fast(least=1e12)) == {"status": "none is as fast"}


def test_the_search_explains_itself(batches, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["largest_batch.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        batches.main()
    assert "default: 90% of the free" in capsys.readouterr().out


def test_the_memory_of_planning_is_that_of_the_call_or_of_what_it_forked(monkeypatch):
    pytest.importorskip("transformers", exc_type=UNAVAILABLE)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spent = importlib.import_module("planning").spent
    large = 200 * 2**20

    def fill():
        # not from an allocator, which may have memory left
        with mmap.mmap(-1, large) as memory:
            for page in range(0, large, mmap.PAGESIZE):
                memory[page] = 1

    # in a child, which has no earlier children of its own; the order is part of the test
    runs = (fill, lambda: None, lambda: in_fork(fill))
    here, nothing, forked = in_fork(lambda: [spent(run)["memory"] for run in runs])
    assert here - nothing > large // 2, "what was freed before a call is not its own"
    assert forked - nothing > large // 2


@pytest.fixture
def budgets(peers, monkeypatch):
    """The script of plans for budgets, with a tiny model."""
    script = importlib.import_module("budgets")
    monkeypatch.setitem(script.SMALL, "tiny", lambda: tiny()[:2])
    return script


def test_each_budget_has_a_plan_within_it_and_those_of_another_checkout_are_judged(budgets):
    model, inputs = budgets.SMALL["tiny"]()
    asked = budgets.plans((model, inputs), {})
    rows = [row for row in asked["rows"] if "plan" in row]
    assert rows, "no budget is kept"
    limits = [row["budget"] for row in asked["rows"]]
    again = budgets.plans(
        (model, inputs), {"budgets": limits, "plans": [row.get("plan") for row in asked["rows"]]}
    )
    for row in (row for row in again["rows"] if "plan" in row):
        assert row["judgements"] > 0
        assert row["other time"] == row["time"]
        assert row["other peak"] <= row["budget"]


def test_a_plan_is_marked_by_how_it_stands_beside_the_other(budgets):
    def mark(other_peak, **here):
        row = {"budget": 100, "other time": 1.1, "other peak": other_peak, **here}
        return budgets.mark_of(row, {"time": 1.1}, least=50)

    assert [mark(101), mark(100), mark(100, time=1.2), mark(100, time=1.12)] == ["!", "-", ">", ""]
    assert budgets.mark_of({"budget": 100}, {}, least=100) == ""
    near = {"budget": 100, "other time": 1.1, "other peak": 100}
    assert budgets.mark_of(near, {"time": 1.1}, least=100) == "~"


def test_the_seconds_of_a_process_that_is_alive_are_counted(budgets):
    def work():
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass

    before = budgets.spent()
    child = ForkedCall(work, lambda _: None)
    child.receive()
    alive = budgets.spent() - before
    child.close()
    assert 0.25 < alive < 5
    assert budgets.spent() - before >= alive - 0.1
