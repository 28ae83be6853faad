"""`make gpu`: rows are never lost, what is missing is said before anything runs; docs/gpu.md."""

import importlib
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.documents import ROOT

FACTS = {"machine": "a card", "torch": "2.11.0", "commit": "abc", "n": 1}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def rows(gpu, tmp_path):
    return gpu.Rows(tmp_path / "rows.jsonl", FACTS)


def written(rows):
    return [json.loads(line) for line in rows.path.read_text("utf-8").splitlines()]


def run(gpu, rows, seconds):
    return gpu.Run(rows, "soft", "fork", time.monotonic() + seconds)


def job(gpu, part="speed", variants=("True",)):
    return gpu.Job(part, "net", variants, "soft")


def test_what_was_measured_before_a_limit_is_kept(gpu, rows):
    def measure(job, write):
        write(part="speed", case=job.case, ms=1.0)
        time.sleep(600)

    assert not run(gpu, rows, gpu.LEAST + 1).done(measure, job(gpu))
    assert written(rows) == [{"part": "speed", "case": "net", "ms": 1.0, **FACTS}]


def test_a_process_that_ends_by_itself_is_a_row_and_others_follow(gpu, rows):
    assert run(gpu, rows, 600).done(lambda *_: os._exit(3), job(gpu))
    (row,) = written(rows)
    assert row["error"] == "its process ended with code 3"


def test_no_case_begins_with_no_time_left(gpu, rows):
    assert not run(gpu, rows, 1).done(lambda *_: None, job(gpu))
    assert not rows.path.exists()


def test_what_has_a_row_of_this_commit_is_not_measured_again(gpu, rows):
    rows.write(part="speed", case="net", variant="baseline", ms=1.0)
    rows.write(part="speed", case="net", variant="plan", error="out of memory")
    other = gpu.Rows(rows.path, FACTS | {"commit": "another"})
    other.write(part="speed", case="net", variant="True", ms=2.0)

    asked = job(gpu, variants=("baseline", "True", "plan"))
    assert run(gpu, rows, 1).without_known(asked).variants == ("True", "plan")


def test_a_family_is_compared_as_a_whole(gpu, rows):
    rows.write(part="families", case="net", variant="baseline", losses=[1.0])
    asked = job(gpu, "families", ("baseline", "True"))
    assert run(gpu, rows, 1).without_known(asked).variants == asked.variants
    rows.write(part="families", case="net", variant="True", differing=0)
    assert run(gpu, rows, 1).without_known(asked).variants == ()


def test_what_is_missing_is_said_in_a_sentence_each(gpu, monkeypatch):
    assert list(gpu.lacking(("tests",))) == []
    monkeypatch.setitem(gpu.NEEDED, "tests", ("pytest", "nothing_of_this_name"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.13.1+cu117")
    library, torch = gpu.lacking(("tests",))
    assert library.startswith("the part tests needs nothing_of_this_name, which is not installed")
    assert re.match(r"zoo needs torch 2\.\d+ or later; 1\.13\.1\+cu117 is installed", torch)


def test_a_pre_release_counts_as_its_release(gpu):
    assert gpu.numbers("2.13.0a0+8145d630e8.nv26.06") == gpu.numbers("2.13") > gpu.numbers("2.9")


def called(*words):
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *words],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sped",), "there is no part 'sped'; there are tests, families, budgets, speed, graphs, "),
        (("speed", "--device", "gpu"), "nothing is measured: there is no device 'gpu' that works "),
    ],
)
def test_bad_input_is_one_sentence_before_anything_runs(words, said, tmp_path):
    result = called(*words, "--rows", str(tmp_path / "rows.jsonl"))
    assert result.returncode == 1
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith(said)
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


TESTS = """
def test_passes(): pass
def test_fails(): assert 1 == 2
"""


def rows_of_tests(folder, seconds="100"):
    """Runs the tests in a folder by the plugin and returns the rows."""
    path = folder / "rows.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "--rows", str(path), "--seconds"]
    command += [seconds, "--continue-on-collection-errors", "-q", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = os.environ | {"PYTHONPATH": paths}
    subprocess.run([*command, "."], cwd=folder, env=env, capture_output=True, check=False)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_tests_leave_a_row_for_each_file_and_each_failure(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("import nothing_of_this_name")
    skipped, failure, counted = rows_of_tests(tmp_path)
    assert (
        skipped["skipped"] == "test_two.py needs nothing_of_this_name, which is not installed here"
    )
    assert failure["case"] == "test_one.py::test_fails"
    assert failure["error"].startswith("assert 1 == 2")
    assert (counted["passed"], counted["failed"]) == (1, 1)


def test_tests_stop_at_a_limit_and_go_on_with_the_file_that_was_cut(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text(TESTS)
    (cut,) = rows_of_tests(tmp_path, "0")
    assert (cut["case"], cut["passed"], cut["failed"]) == ("test_one.py", 1, 0)
    assert cut["cut"] == "time was up after test_one.py::test_passes"
    cases = [row["case"] for row in rows_of_tests(tmp_path)[1:] if "passed" in row]
    assert cases == ["test_one.py", "test_two.py"]
    assert len(rows_of_tests(tmp_path)) == 5, "all files are known"


@pytest.fixture
def docs():
    return runpy.run_path(str(ROOT / "docs" / "gpu.py"))


def test_the_page_is_what_its_rows_give(docs):
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert page == docs["page"](docs["read"](ROOT / "docs" / "gpu.jsonl")), "run `make gpu-page`"


def test_all_numbers_of_the_page_say_what_they_were_measured_on(docs):
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    shown = re.findall(r"^(.*)\n\n(?:\| model|Compared: |\d+ of \d+ plans|\d+ passed)", page, re.M)
    assert len(shown) >= 8
    assert all(re.match(r"One .+, torch .+, commit .+, n = \d+ run.*:$", line) for line in shown)


@pytest.mark.parametrize("part", ["speed", "graphs"])
def test_what_was_left_out_is_said(docs, part):
    left_out = {"part": part, "case": "LSTM", "skipped": "no kernels", **FACTS, "conf": ""}
    times = {"ms": 1.0, "cpu_ms": 1.0, "steps": 1, "eager_ms": 2.0, "graph_ms": 1.0, "replays": 3}
    sizes = {"size": "1×8", "dtype": "float32", "allocated": 512, "reserved": 512}
    row = left_out | {"case": "GPT-2", "variant": "baseline", **times, **sizes}
    del row["skipped"]
    assert "- Left out: no kernels." in docs["page"]([left_out, row])


def test_a_part_of_a_new_run_replaces_the_one_that_was_there(docs):
    old = [{"part": "speed", "case": "a"}, {"part": "budgets", "case": "b"}]
    new = [{"part": "speed", "case": "c"}]
    assert docs["replaced"](old, new) == [{"part": "budgets", "case": "b"}, *new]


def test_the_last_row_of_a_key_is_shown(docs, tmp_path):
    path = Path(tmp_path / "rows.jsonl")
    lines = [{"part": "speed", "case": "a", "error": "x"}, {"part": "speed", "case": "a", "ms": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert docs["read"](path) == lines[1:]


def test_a_step_that_ran_eagerly_has_no_time_of_a_graph(docs):
    facts = {"machine": "GPU", "torch": "2", "commit": "c", "n": 1, "case": "net", "size": "8"}
    eager = {"part": "speed", "ms": 1.0, "cpu_ms": 1.0, "allocated": 1, "replays": 0}
    of_graphs = {"part": "graphs", "eager_ms": 1.0, "graph_ms": 1.0, "replays": 0}
    rows = [
        facts | eager | {"variant": "True, CUDA graph"},
        facts | of_graphs | {"variant": "baseline"},
    ]
    sections = dict(part.split("\n", 1) for part in docs["page"](rows).split("\n## "))
    assert "| no graph |" in re.sub(" +", " ", sections["Time and memory"])
    assert "| 1.00→no graph |" in re.sub(" +", " ", sections["CUDA graphs"])
