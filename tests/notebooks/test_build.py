from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError

from notebooks.build import NotebookError, digest, read, run, translated, with_answers

SCRIPT = """\
# %% [markdown] name="question"
# What is it?

# %% name="answer"
1 + 1

# %% [markdown] name="remember"
# Two.
"""


def script(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "01_sum.py"
    path.write_text(text)
    return path


def translation(**changed: str) -> str:
    digests = {"question": digest("What is it?"), "remember": digest("Two.")} | changed
    return "\n".join(f"<!-- {name} {made} -->\n译文 {name}\n" for name, made in digests.items())


def test_a_translation_changes_prose_and_no_code(tmp_path: Path) -> None:
    twin = translated(read(script(tmp_path)), translation())
    assert [cell.source for cell in twin.cells] == ["译文 question", "1 + 1", "译文 remember"]
    assert [cell.id for cell in twin.cells] == ["question", "answer", "remember"]


def test_a_paragraph_older_than_its_source_is_named_with_the_line_to_write(tmp_path: Path) -> None:
    older = translation(remember=digest("Three."))
    message = f"remember was made from {digest('Three.')}: .*<!-- remember {digest('Two.')} -->"
    with pytest.raises(NotebookError, match=message):
        translated(read(script(tmp_path)), older)


@pytest.mark.parametrize("text", ["", f"<!-- question {digest('What is it?')} -->\n\n"])
def test_a_paragraph_without_words_is_missing(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotebookError, match="question is missing: translate it below"):
        translated(read(script(tmp_path)), text)


def test_a_paragraph_of_no_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="gone is no cell with prose: delete it"):
        translated(read(script(tmp_path)), translation(gone="00000000"))


def test_strings_of_the_code_are_those_of_the_translation(tmp_path: Path) -> None:
    code = 'say(f"Two of {len("x")} are here")  # "no text of it"'.replace('"x"', "'x'")
    path = script(tmp_path, SCRIPT.replace("1 + 1", code))
    known = "Two of {len('x')} are here => {len('x')} 个里有两个"
    twin = translated(read(path), f"{translation()}\n<!-- phrases -->\n{known}\n")
    assert twin.cells[1].source == 'say(f"{len(\'x\')} 个里有两个")  # "no text of it"'
    with pytest.raises(NotebookError, match=r"write below .*phrases.*: Two of .* are here => "):
        translated(read(path), f"{translation()}\n<!-- phrases -->\n")
    with pytest.raises(NotebookError, match="no string of the code is 'gone': delete it"):
        translated(read(path), f"{translation()}\n<!-- phrases -->\n{known}\ngone => 没有\n")


def test_code_in_prose_is_copied_not_translated(tmp_path: Path) -> None:
    text = "Print it:\n\n```python\nprint(2)\n```"
    prose = "\n".join(f"# {line}" for line in text.splitlines())
    path = script(tmp_path, SCRIPT.replace("# Two.", prose))
    other = translation(remember=digest(text)) + "\n```python\nprint(3)\n```\n"
    with pytest.raises(NotebookError, match="remember has other code than its source: copy it"):
        translated(read(path), other)
    assert translated(read(path), other.replace("3", "2")).cells[2].source.startswith("译文")


def test_code_in_prose_runs_behind_the_cells(tmp_path: Path) -> None:
    answer = "# ```python\n# assert _ == 2\n# ```"
    path = script(tmp_path, SCRIPT.replace("# Two.", answer))
    assert run(with_answers(read(path))).cells[3].execution_count == 2
    wrong = script(tmp_path, SCRIPT.replace("# Two.", answer.replace("2", "3")))
    with pytest.raises(CellExecutionError, match="assert _ == 3"):
        run(with_answers(read(wrong)))


@pytest.mark.parametrize("text", [SCRIPT.replace(' name="answer"', ""), SCRIPT + SCRIPT])
def test_every_cell_needs_a_name_of_its_own(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotebookError, match="a cell needs a name of its own"):
        read(script(tmp_path, text))


def test_a_notebook_runs_in_a_kernel_of_its_own_that_finds_zoo(tmp_path: Path) -> None:
    code = SCRIPT.replace("1 + 1", "import importlib.util, os\nassert not os.listdir()\n"
                          "importlib.util.find_spec('zoo') is not None")  # fmt: skip
    notebook = run(read(script(tmp_path, code)))
    assert notebook.cells[1].outputs[0].data["text/plain"] == "True"
    assert "metadata" in notebook
    assert notebook.metadata.language_info == {"name": "python"}
