"""Makes the notebooks: `python -m notebooks.build` runs each from a fresh kernel and writes it.

A notebook is written once, as a script of cells (jupytext's percent format). A translation holds
the prose and the texts in the code, so that both languages run the same code:

    sources/01_name.py           cells with names        ->  01_name.ipynb
    sources/zh_CN/01_name.md     its Chinese paragraphs  ->  zh_CN/01_name.ipynb

Each paragraph of a translation stands below `<!-- NAME DIGEST -->`: the cell that it translates and
the digest of the English text as it was then. Below `<!-- phrases -->` each line `ENGLISH => TEXT`
replaces a string of the code, such as a title or a sentence around numbers. What is missing or
older is an error, which shows the line to write. Jupytext reads the cells and nbclient runs them;
pairing files, as Jupytext can, would copy the code into each language.
"""

import argparse
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
ENGLISH, LANGUAGES = "en", ("en", "zh_CN")
SECONDS_PER_CELL = 900
FENCES = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PHRASES = "<!-- phrases -->\n"
# a comment or a docstring, which stay; or another string
STRING = re.compile(r'#.*|"""[\s\S]*?"""|"((?:[^"\\\n]|\\.)*)"')
# two words, without what is computed: for a reader
WORDS = re.compile(r"[^\W\d_]{2,},? [^\W\d_(]")
COMPUTED = re.compile(r"{[^{}]*}")
HEADING = re.compile(r"^<!-- ([\w-]+) ([0-9a-f]{8}) -->$", re.MULTILINE)


class NotebookError(Exception):
    """A source or a translation that makes no notebook, and what to write instead."""


def sources() -> list[Path]:
    """Lists the scripts of all notebooks, in their order."""
    return sorted(SOURCES.glob("[0-9]*.py"))


def translation_of(source: Path, language: str) -> Path:
    """Returns where a notebook's prose in another language lies, whether it is there or not."""
    return SOURCES / language / f"{source.stem}.md"


def notebook_of(source: Path, language: str) -> Path:
    """Returns where the notebook is written."""
    return (HERE if language == ENGLISH else HERE / language) / f"{source.stem}.ipynb"


def languages(source: Path) -> list[str]:
    """Lists the languages that a notebook is there in; English is always one."""
    return [lan for lan in LANGUAGES if lan == ENGLISH or translation_of(source, lan).exists()]


def read(source: Path) -> NotebookNode:
    """Reads a script as a notebook without outputs, whose cells have their names as ids.

    Raises:
        NotebookError: a cell without a name, or with that of another.
    """
    cells = jupytext.read(source).cells
    names = [cell.metadata.get("name") for cell in cells]
    for cell, name in zip(cells, names, strict=True):
        if name is None or names.count(name) > 1:
            raise NotebookError(
                f'{source.name}: a cell needs a name of its own, as in `# %% name="peak"`; '
                f"got {name!r} above {cell.source[:60]!r}"
            )
    return _new("notebook", cells=[_plain(cell) for cell in cells], metadata=_METADATA)


_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def _plain(cell: NotebookNode) -> NotebookNode:
    """Copies text and name of a cell, and nothing that differs from run to run."""
    kind = "code_cell" if cell.cell_type == "code" else "markdown_cell"
    return _new(kind, source=cell.source, id=cell.metadata["name"])


def _new(kind: str, **contents: Any) -> NotebookNode:
    made: NotebookNode = getattr(nbformat.v4, f"new_{kind}")(**contents)
    return made


def digest(text: str) -> str:
    """Returns eight characters that change with the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def paragraphs(translation: str) -> dict[str, tuple[str, str]]:
    """Reads a translation: for each cell's name the digest that it was made from, and its text."""
    _, *parts = HEADING.split(translation.partition(PHRASES)[0])
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: (made_from, text.strip()) for name, made_from, text in triples}


def phrases(translation: str) -> dict[str, str]:
    """Reads a translation: the strings of the code, and what replaces them."""
    lines = translation.partition(PHRASES)[2].splitlines()
    pairs = (line.partition(" => ") for line in lines if line.strip())
    return {text: words for text, _, words in pairs}


def problems(notebook: NotebookNode, translation: str) -> Iterator[str]:
    """Yields what is missing, older than its source or of no cell in a translation, as lines."""
    prose = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "markdown"}
    found = paragraphs(translation)
    for name, text in prose.items():
        made_from, words = found.get(name, ("", ""))
        if FENCES.findall(words) != FENCES.findall(text) and words:
            yield f"{name} has other code than its source: copy it"
        if made_from != digest(text) or not words:
            state = "is missing" if not words else f"was made from {made_from}"
            yield f"{name} {state}: translate it below <!-- {name} {digest(text)} -->"
    yield from (f"{name} is no cell with prose: delete it" for name in found.keys() - prose.keys())
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    strings = dict.fromkeys(match[1] for text in code for match in STRING.finditer(text))
    known = phrases(translation)
    for string in strings:
        if string and string not in known and WORDS.search(COMPUTED.sub("", string)):
            yield f"a string of the code is missing: write below {PHRASES.strip()}: {string} => "
    yield from (f"no string of the code is {text!r}: delete it" for text in known.keys() - strings)


def translated(notebook: NotebookNode, translation: str) -> NotebookNode:
    """Copies a notebook with the prose of a translation, and its texts in the code.

    Raises:
        NotebookError: a paragraph is missing, or older than its source.
    """
    if wrong := list(problems(notebook, translation)):
        raise NotebookError("\n".join(["the translation is not that of its source", *wrong]))
    found, known = paragraphs(translation), phrases(translation)

    def replaced(string: re.Match[str]) -> str:
        return f'"{known[string[1]]}"' if string[1] in known else string[0]

    copy: NotebookNode = nbformat.from_dict(notebook)
    for cell in copy.cells:
        prose = cell.cell_type == "markdown"
        cell.source = found[cell.id][1] if prose else STRING.sub(replaced, cell.source)
    return copy


def written(source: Path, language: str) -> NotebookNode:
    """Returns a notebook in a language, not yet run."""
    notebook = read(source)
    if language == ENGLISH:
        return notebook
    try:
        return translated(notebook, translation_of(source, language).read_text(encoding="utf-8"))
    except NotebookError as error:
        raise NotebookError(f"{language}/{source.stem}: {error}") from error


def run(notebook: NotebookNode) -> NotebookNode:
    """Runs a notebook in a fresh kernel and an empty folder, and returns it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    surroundings: Mapping[str, str] = os.environ | {
        "PYTHONPATH": str(HERE.parent),
        # a bar would be written into the notebook
        "ZOO_PROGRESS": "0",
        # so would the profiler's warnings of memory that is older than itself
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=dict(surroundings))
    notebook.metadata = nbformat.from_dict(_METADATA)  # the kernel adds its version
    return notebook


def with_answers(notebook: NotebookNode) -> NotebookNode:
    """Adds the code that stands in the prose, such as the exercises' answers, as cells."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    snippets = [snippet for text in prose for snippet in FENCES.findall(text)]
    notebook.cells += [_new("code_cell", source=snippet) for snippet in snippets]
    return notebook


def save(notebook: NotebookNode, path: Path) -> None:
    """Writes a notebook."""
    path.parent.mkdir(exist_ok=True)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the notebooks that are named, or all, and writes them unless told not to."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="beginnings of names, such as 01; default all")
    parser.add_argument(
        "--check", action="store_true", help="run the English ones with the answers, write none"
    )
    options = parser.parse_args(arguments)
    for source in sources():
        if options.names and not source.stem.startswith(tuple(options.names)):
            continue
        for language in [ENGLISH] if options.check else languages(source):
            start = time.perf_counter()
            notebook = written(source, language)
            if options.check:
                run(with_answers(notebook))
            else:
                save(run(notebook), notebook_of(source, language))
            print(f"{source.stem} {language}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
