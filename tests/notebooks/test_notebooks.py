"""What is committed is what the sources make. `make check-notebooks` runs them; this does not."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.build import ENGLISH, LANGUAGES, languages, notebook_of, sources, written

BOTH = [(source, language) for source in sources() for language in languages(source)]
MOST_BYTES = 600 * 1024


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
