"""`zoo compare` and `zoo report` say the same of the same results, also in several processes."""

import io
import json
import multiprocessing
import os
import re
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch.multiprocessing import start_processes

from tests.harness.command_line import load
from tests.processes import IMPORTED
from zoo.cli.comparison import in_ranks, is_one_of_many
from zoo.cli.main import run
from zoo.errors import ConfigError
from zoo.harness.comparison_cells import expand
from zoo.harness.results import Results, comparisons
from zoo.report.rows import rows

PLAN = "(0-37) 38"


def records(*arguments, loss="a", peak=400, whole=1000):
    """What the cells of a config would leave: a checkpointed peak of `peak` for `whole`.

    Those of versions without a third variant.
    """
    found = []
    for cells in expand(load([*arguments, "--no-optimizer-in-backward"])):
        timing = replace(cells["timing"], plan=PLAN)
        for kind, cell in (*list(cells.items())[:2], ("timing", timing)):
            # as a file of before tensors were counted holds it
            measured = {"peak": 1000, "activation_peak": peak if kind == "checkpointed" else whole}
            found.append({
                "key": cell.key(), "kind": kind, "cell": asdict(cell), "status": "done",
                "seconds": 1.0, "parameters": 7, "memory": measured,
                "digests": [{"loss": loss if kind == "checkpointed" else "a"}],
                "plan": PLAN if kind == "checkpointed" else None,
                "step_seconds": {"baseline": [1.0, 1.0], "checkpointed": [1.5, 1.5]},
            })  # fmt: skip
    return found


def with_third(found, *arguments, checkpoint=True):
    """The records of one model, and those of its third variant as the cells would leave them."""
    baseline, checkpointed, timing = found
    cell = expand(load(arguments))[0]["optimizer_in_backward"]
    cell = replace(cell, model=replace(cell.model, checkpoint=checkpoint))
    third = checkpointed | {
        "key": cell.key(), "kind": cell.kind, "cell": asdict(cell), "memory": {"peak": 250},
    }  # fmt: skip
    seconds = timing["step_seconds"] | {"optimizer_in_backward": [1.25, 1.25]}
    return [baseline, checkpointed, third, timing | {"step_seconds": seconds}]


@pytest.fixture
def results(tmp_path):
    def write(found, name="mine"):
        file = Results(tmp_path / f"{name}.jsonl")
        for record in found:
            file.append(record)
        return file.path

    return write


def test_the_report_of_results_has_their_rows(command, results, tmp_path):
    path = results(records("--model", "resnet18", "vnet"))
    told = command("report", str(path), "--json")
    (found,) = json.loads(told.out)
    assert told.code == 0
    assert [row["model"] for row in found["models"]] == ["resnet18", "vnet"]
    numbers = ("activation_peak_ratio", "exact", "time_ratio_median", "faults")
    for row in found["models"]:
        assert [row[name] for name in numbers] == [0.4, True, 1.5, []]
    assert {row["time_ratio"] for row in found["timings"]} == {1.5}
    page = (tmp_path / "mine" / "report.md").read_text()
    assert found["report"] == str(tmp_path / "mine" / "report.html")
    assert "| resnet18" in page
    assert "| vnet" in page


def test_a_report_says_what_was_trained_and_by_which_command(command, results, tmp_path):
    path = results(records("--model", "resnet18", "vnet"), "quick-resnet18-vnet")
    command("report", str(path))
    text = (tmp_path / "quick-resnet18-vnet" / "report.md").read_text()
    assert text.startswith("# Training resnet18 and vnet with and without checkpointing: quick\n")
    assert "`zoo compare quick --model resnet18 vnet`" in text


def test_the_report_of_three_variants_has_them_in_every_file(command, results, tmp_path):
    asked = ("--model", "resnet18")
    path = results(with_third(records(*asked), *asked))
    told = command("report", str(path), "--json")
    ((row,),) = (found["models"] for found in json.loads(told.out))
    assert told.code == 0
    assert (row["peak_ratio"], row["peak_ratio_optimizer_in_backward"]) == (1.0, 0.25)
    assert row["time_ratio_median_optimizer_in_backward"] == 1.25
    numbers = ("activation_peak_ratio", "time_ratio_median", "exact")
    assert [row[name] for name in numbers] == [0.4, 1.5, True]
    told = command("report", str(path))
    assert "+ optimizer" in told.out
    assert "(0.250)" in told.out
    folder = tmp_path / "mine"
    assert "| 250 B (0.250) |" in re.sub(" +", " ", (folder / "report.md").read_text())
    assert "peak_ratio_optimizer_in_backward" in (folder / "models.csv").read_text()
    assert "−75.0 %" in (folder / "report.html").read_text()


def test_a_third_variant_belongs_to_the_option_that_chose_its_plan():
    asked = ("--model", "vnet")
    for checkpoint, has_one in ((True, True), ("sqrt", False)):
        found = comparisons(with_third(records(*asked), *asked, checkpoint=checkpoint))
        assert ["optimizer_in_backward" in entry for entry in found] == [has_one]


def test_the_report_says_which_lines_it_passes_over(command, results, tmp_path):
    found = [*records("--model", "resnet18"), *records("--model", "vnet")]
    path = results([*found[:4], found[4] | {"status": "nonsense"}, found[5]])
    told = command("report", str(path))
    assert told.code == 0
    assert "line 5, is passed over: status should be 'done', 'failed', 'does" in told.out
    assert "| resnet18" in (tmp_path / "mine" / "report.md").read_text()


def test_the_report_shows_an_earlier_run_beside_the_results(command, results, tmp_path):
    now = results(records("--model", "resnet18"))
    before = results(records("--model", "resnet18", "vnet", peak=500), "before")
    told = command("report", str(now), "--compare", str(before))
    assert told.code == 0
    assert "resnet18 checkpointed: activation peak 500 B → 400 B (−20.00 %), -100 bytes" in told.out
    folder = tmp_path / "mine"
    assert "500 B → 400 B (−20.00 %)" in (folder / "report.md").read_text()
    assert "resnet18 checkpointed" in (folder / "compared.csv").read_text()
    assert "In the earlier run only: vnet" in (folder / "report.html").read_text()
    told = command("report", str(now), "--compare", str(before), "--json")
    ((_, checkpointed),) = (found["compared"] for found in json.loads(told.out))
    assert checkpointed["activation_peak_bytes_before"] == 500


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no such file"), ([], "holds no result; give the .jsonl of a run"),
     (records("--model", "vnet"), "holds none of these cells (it begins with vnet): models")],
)  # fmt: skip
def test_an_earlier_run_that_compares_nothing_is_a_usage_error(
    command, results, tmp_path, content, said
):
    now, before = results(records("--model", "resnet18")), tmp_path / "before.jsonl"
    if content is not None:
        before.touch()
        results(content, "before")
    told = command("report", str(now), "--compare", str(before))
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert f"--compare '{before}'" in told.err
    assert said in told.err
    assert not (tmp_path / "mine").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full is Linux's")
def test_a_full_disk_names_the_file_and_what_to_do(tmp_path):
    file = Results(tmp_path / "mine.jsonl")
    file.path.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"mine.jsonl' cannot be written to: No space left.*room"):
        file.append({})


def test_a_terminal_of_ascii_gets_the_same_words_in_plain_signs(results, monkeypatch):
    path = results(records("--model", "resnet18", "vnet"))
    words = {}
    # the second is a terminal's in the locale C
    for errors, encoding in (("strict", "utf-8"), ("surrogateescape", "ascii"),
                             ("strict", "ascii"), ("strict", "latin-1")):  # fmt: skip
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(["report", str(path)]) == 0
        assert stream.errors == errors
        words[encoding] = stream.buffer.getvalue().decode(encoding)
    assert "×" in words["utf-8"]
    assert "→" in words["utf-8"]
    assert "->" in words["ascii"]
    assert "?" not in words["ascii"]
    assert "×" in words["latin-1"]
    numbers = {re.sub(r"[^\d.]+", " ", text) for text in words.values()}
    assert len(numbers) == 1


def test_a_folder_of_results_gives_a_report_each(command, results, tmp_path):
    results(records("--model", "resnet18"), "one")
    results(records("--model", "vnet", loss="b"), "two")
    told = command("report", str(tmp_path), "--output", str(tmp_path / "docs"))
    assert told.code == 1
    assert "vnet is not exact: it differs in loss from step 1 on" in told.out
    assert all((tmp_path / "docs" / name / "report.md").is_file() for name in ("one", "two"))


def test_a_report_that_cannot_be_written_says_so(command, results, tmp_path):
    path = results(records("--model", "resnet18"))
    (tmp_path / "file").touch()
    told = command("report", str(path), "--output", str(tmp_path / "file"))
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "cannot be written" in told.err


def test_of_several_runs_the_last_counts_and_experiments_are_kept_apart():
    first, other = ("--model", "resnet18"), ("--model", "resnet18", "--batch-size", "9")
    found = comparisons(
        [*records(*first), *records(*other, peak=300), *records(*first, peak=500, whole=2000)]
    )
    assert [(row.batch, row.ratio(peak="activation_peak")) for row in rows(found)] == [
        ("4×224×224", 0.25),
        ("9×224×224", 0.3),
    ]
    assert all(entry["baseline"]["cell"]["model"]["batch_size"] in (4, 9) for entry in found)


def test_plans_of_one_model_share_its_baseline():
    both = [*records("--model", "vnet"), *records("--model", "vnet", "--checkpoint", "sqrt")]
    found = rows(comparisons(both))
    assert [(row.checkpoint, row.ratio(peak="activation_peak")) for row in found] == [
        ("true", 0.4),
        ("sqrt", 0.4),
    ]


def test_a_cell_without_a_result_is_a_fault():
    baseline, checkpointed, _ = records("--model", "vnet")
    (found,) = rows(comparisons([baseline, checkpointed]))
    assert (found.ratio(peak="activation_peak"), found.faults) == (
        0.4,
        ("vnet timing failed: there is no result",),
    )
    assert comparisons([baseline]) == []


def test_compare_prints_its_rows_as_json_alone(command, monkeypatch, tmp_path):
    made = comparisons(records("--model", "vnet"))
    monkeypatch.setattr("zoo.cli.comparison.run", lambda config, console: made)
    told = command("compare", "--model", "vnet", "--json", "--output", str(tmp_path))
    (row,) = json.loads(told.out)["models"]
    (expected,) = rows(made)
    assert (row["model"], row["activation_peak_ratio"]) == ("vnet", 0.4)
    assert row["peak_bytes_baseline"] == expected.peaks["peak"]["baseline"]
    assert "vnet" in told.err
    told = command("compare", "--model", "vnet", "--output", str(tmp_path))
    assert told.err == ""
    assert told.out.endswith("report.html\n")


def told():
    print("an answer")
    print("and a complaint", file=sys.stderr)
    return int(os.environ["RANK"])


def process(rank, port, folder):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    assert is_one_of_many()
    with open(f"{folder}/{rank}", "w") as file:
        sys.stdout = sys.stderr = file
        code = in_ranks(told)
    # cells choose their device by it
    Path(f"{folder}/code{rank}").write_text(f"{code} {os.environ['LOCAL_RANK']}")


@pytest.mark.parametrize("world", [1, 2])
def test_each_process_has_a_folder_of_its_own(command, monkeypatch, tmp_path, world):
    found = []

    def run(config, console):
        found.append(config.output)
        return comparisons(records("--model", "vnet"))

    monkeypatch.setattr("zoo.cli.comparison.run", run)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    told = command("compare", "--model", "vnet", "--output", str(tmp_path))
    folder = str(tmp_path / "rank1") if world > 1 else str(tmp_path)
    assert (told.code, found) == (0, [folder])
    assert f"report:  {folder}{os.sep}" in told.out


def test_each_process_reports_in_turn(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # imports torch once for both, and for other tests' groups of processes
    multiprocessing.set_forkserver_preload(IMPORTED)
    start_processes(process, (port, str(tmp_path)), nprocs=2, start_method="forkserver")
    words, others = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert not others
    first, second = words.split("rank 1 of 2\n")
    for part in (first, second):
        assert "an answer" in part
        assert "and a complaint" in part
    codes = [(tmp_path / f"code{rank}").read_text() for rank in range(2)]
    assert codes == ["1 0", "1 1"]


@pytest.mark.parametrize("world", ["", "1"])
def test_one_process_is_not_one_of_many(world, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert not is_one_of_many()
