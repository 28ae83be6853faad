"""What is committed is what the sources make. `make check-notebooks` runs them; this does not."""

import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.build import ENGLISH, LANGUAGES, languages, notebook_of, read, sources, written
from tests.documents import ROOT
from zoo.report.notebook import WORDS

BOTH = [(source, language) for source in sources() for language in languages(source)]
MOST_BYTES = 600 * 1024
MOST_LINES = 12


def cells(notebook: NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]


def committed(source: Path, language: str) -> NotebookNode:
    return nbformat.read(notebook_of(source, language), as_version=4)


@pytest.mark.parametrize(("source", "language"), BOTH)
def test_a_notebook_is_that_of_its_source_and_translation(source: Path, language: str) -> None:
    assert cells(committed(source, language)) == cells(written(source, language))


@pytest.mark.parametrize(("source", "language"), BOTH)
def test_every_code_cell_ran_in_its_order_and_none_warned(source: Path, language: str) -> None:
    code = [cell for cell in committed(source, language).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize(("source", "language"), BOTH)
def test_a_notebook_names_no_folder_of_the_machine_and_is_small(
    source: Path, language: str
) -> None:
    text = notebook_of(source, language).read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert not re.findall(r"(?:/tmp|/home|/root|/usr|/work|site-packages)/\S+", text)


@pytest.mark.parametrize("source", sources())
def test_prose_has_three_exercises_with_folded_answers(source: Path) -> None:
    prose = [c.source for c in written(source, ENGLISH).cells if c.cell_type == "markdown"]
    assert sum(text.count("<details>") for text in prose) == 3
    assert sum("What to remember" in text for text in prose) == 1


def test_there_is_no_notebook_without_a_source() -> None:
    folder = notebook_of(sources()[0], ENGLISH).parent
    made = {notebook_of(source, language) for source, language in BOTH}
    assert set(folder.rglob("*.ipynb")) == made


def test_every_notebook_is_there_in_every_language() -> None:
    assert {source.stem: languages(source) for source in sources()} == {
        source.stem: list(LANGUAGES) for source in sources()
    }


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("source", sources())
def test_a_cell_is_short(source: Path) -> None:
    lines = {
        cell.id: sum(bool(line.strip()) for line in cell.source.splitlines())
        for cell in code_of(read(source))
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize(("source", "language"), BOTH)
def test_one_of_the_first_three_cells_shows_a_result(source: Path, language: str) -> None:
    outputs = [out for cell in code_of(committed(source, language))[:3] for out in cell.outputs]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("source", sources())
def test_pictures_in_chinese_notebooks_are_chinese(source: Path) -> None:
    outputs = [out for cell in code_of(committed(source, "zh_CN")) for out in cell.outputs]
    pictures = ["".join(out.get("data", {}).get("image/svg+xml", "")) for out in outputs]
    texts = {text for picture in pictures for text in re.findall(r"<text [^>]*>([^<]*)", picture)}
    assert not texts & set(WORDS["zh_CN"])
    assert any("\u4e00" <= letter <= "\u9fff" for text in texts for letter in text)


def test_recorded_times_of_a_gpu_are_those_that_it_took() -> None:
    (cell,) = (c for source in sources() for c in code_of(read(source)) if c.id == "recorded")
    names: dict[str, Any] = {}
    exec(cell.source, names)
    rows = map(json.loads, (ROOT / "docs/gpu.jsonl").read_text("utf-8").splitlines())
    keys = ("case", "size", "variant", "eager_ms", "graph_ms")
    recorded = [tuple(map(row.get, keys)) for row in rows if row["part"] == "graphs"]
    assert [row for row in names["RECORDED"] if row not in recorded] == []


def test_all_notebooks_install_alike() -> None:
    assert len({code_of(read(source))[0].source for source in sources()}) == 1


@pytest.mark.parametrize(
    ("there", "checkout", "asked"),
    [
        (True, True, None),
        (False, True, ["{root}[notebooks]"]),
        (False, False, ["--find-links=.", "zoo-checkpoint[notebooks]"]),
    ],
)
def test_what_is_missing_comes_from_the_checkout_or_else_a_wheel_or_the_index(
    there: bool,
    checkout: bool,
    asked: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "notebooks" / "zh_CN"
    folder.mkdir(parents=True)
    if checkout:
        (tmp_path / "zoo").mkdir()
        (tmp_path / "zoo" / "version.py").touch()
    calls: list[Any] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace() if there else None)
    monkeypatch.setattr(subprocess, "run", lambda words, check: calls.append(words))
    exec(code_of(read(sources()[0]))[0].source, {})
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    assert calls == ([] if asked is None else [[*pip, *(a.format(root=tmp_path) for a in asked)]])
