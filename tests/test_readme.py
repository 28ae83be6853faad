import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.documents import ROOT, leads_somewhere, run, snippets

pytestmark = pytest.mark.usefixtures("without_fork")

README = (ROOT / "README.md").read_text("utf-8")
# a word of each way in the table of a GPU, and the way's name in the rows
WAYS = {"checkpointing": "switch", "budget": "plan", "zoo": "True"}
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_snippet_runs_and_the_last_keeps_its_model_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 MiB for a training step by AdamW, of which the baseline takes more than twice as much."""
    monkeypatch.chdir(tmp_path)  # some write files
    found = snippets(README)
    assert len(found) >= 2
    names: dict[str, Any] = {}
    for snippet in found:
        assert run(snippet, "README.md", names) == (snippet.printed or "")
    model, optimizer, batch = names["model"], names["optimizer"], torch.rand(32, 128, 256)

    def peak() -> int:
        optimizer.zero_grad()
        with zoo.track(model, optimizer=optimizer, inputs=batch, allocator=True) as timeline:
            model(batch).sum().backward()
            optimizer.step()
        return timeline.peak

    planned = peak()
    assert planned <= 300 * 2**20
    zoo.uncheckpoint(model)
    assert peak() > 2 * planned


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_names_a_file_that_is_there(page: Path) -> None:
    files = r"(?<![\w/.-])(?:configs|tests|benchmarks|notebooks|docs)/[\w/.-]+\w"
    named = re.findall(files, page.read_text("utf-8"))
    assert named or page.stem not in ("README", "guide", "budgets")
    for name in named:
        assert (ROOT / name).exists(), name


def test_what_the_first_page_links_to_is_there() -> None:
    linked = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    local = [path or image for path, image in linked if "://" not in path]
    assert local
    assert [link for link in local if not leads_somewhere(ROOT / "README.md", link)] == []


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 180


def rows(page: str, model: str) -> list[str]:
    """Returns the rows of a model in the tables of a page."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^\| {model}\b.*$", text, re.MULTILINE)


def test_the_picture_has_the_peaks_of_the_table() -> None:
    (told,) = re.findall(r'alt="([^"]+)"', README)
    (row,) = rows("README.md", "resnet50")
    assert re.findall(r"(\d+) MiB", told) == re.findall(r"(?<=\| )\d+(?= [|(])", row)


def test_the_table_is_that_of_the_report() -> None:
    models = re.findall(r"^\| (\w+).*×\d\.\d\d \|$", README, re.MULTILINE)
    assert len(models) == 8
    for model in models:
        ((first,), (second,)) = rows("README.md", model), rows("docs/default/report.md", model)
        assert re.findall(r"×(\d\.\d\d)", first) == re.findall(r"×(\d\.\d\d)", second)
        peaks = re.findall(r"([\d.]+) MiB", second)[:3]
        rounded = [str(round(float(peak))) for peak in peaks]
        assert re.findall(r"(?<=\| )\d+(?= [|(])", first) == rounded


def test_what_a_gpu_took_are_rows_of_its_page() -> None:
    lines = (ROOT / "docs" / "gpu.jsonl").read_text("utf-8").splitlines()
    graphs = [row for row in map(json.loads, lines) if row["part"] == "graphs"]
    measured = {gpu_cells(row) for row in graphs if "allocated" in row}
    table = README.partition("| a training step on one H200")[2].partition("\n\n")[0]
    shown, model = [], ""
    for line in table.splitlines()[2:]:
        way, *cells = re.findall(r"[^|]+", line.replace(" †", ""))
        heading = re.match(r" \*\*(.+)\*\*: (baseline)", way)
        model = heading[1] if heading else model
        name = heading[2] if heading else next(WAYS[word] for word in WAYS if word in way)
        shown.append((model, name, *(cell.strip() for cell in cells[:4])))
    assert len(shown) == 12
    assert set(shown) <= measured
    of_graphs = (ROOT / "docs" / "cuda-graphs.md").read_text("utf-8")
    ((eager, captured),) = re.findall(r"took (\d+) ms[^|]+? (\d+) ms captured", of_graphs)
    assert ("ResNet-1001, 128×3×32×32", "True", "1.22", "1.80", eager, captured) in measured


def gpu_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns model, way, GiB and milliseconds of a row, as the first page shows them."""
    reserved = row.get("reserved") or row["reserved_expandable"]
    sizes = (f"{count / 2**30:#.3g}" for count in (row["allocated"], reserved))
    times = (f"{row[name]:#.3g}".rstrip(".") for name in ("eager_ms", "graph_ms"))
    model = row["case"].removesuffix(", small batch")
    return f"{model}, {row['size']}", row["variant"], *sizes, *times
