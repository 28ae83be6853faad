"""Writes docs/api.md from the docstrings of what `zoo` exports: `python docs/api.py`.

Tools that make sites of docstrings (griffe, pdoc, Sphinx) are left out: one page that reads well on
a code host takes no more than this file.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import zoo
from zoo.catalog.factories import OPTIONS, list_models, model_arguments

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "api.md"
HEADER = """\
# API

[Index](README.md)

All that `import zoo` gives, by task. `python docs/api.py` writes this page from the docstrings;
types of arguments stand in the source. Bytes are ints, times seconds. An argument or an attribute
without an explanation means what it does in [`zoo.plan`](#zooplan) or its report. Every function
raises `ArgumentError` for what it does not take: the cases stand in its docstring.
"""


class Group(NamedTuple):
    """A part of the page: its title, what it says first, and the names that it holds."""

    title: str
    words: str
    names: tuple[str, ...] = ()


MODELS = Group(
    "Models",
    "Each size is a function, `zoo.resnet50(...)`, and a name for `zoo.create`. All arguments are "
    "keywords; an argument without a value differs between sizes. Every model also takes those of "
    "`zoo.create`.",
    ("create", "list_models"),
)
INTEGRATIONS = Group(
    "Integrations",
    "Each needs its library ([recipes](recipes.md#lightning-accelerate-hugging-face-trainer)).",
)
ERRORS = Group(
    "Errors",
    "All but `Interrupted` are a `ZooError`, and the built-in exception that Python or torch would "
    "have raised there. [Error messages](errors.md) has their texts.",
    tuple(name for name in vars(zoo) if name.endswith("Error") or name == "Interrupted"),
)
GROUPS = (
    Group(
        "Train my model",
        "",
        (
            *("checkpoint", "recompute", "optimizer_in_backward", "OptimizerInBackward"),
            *("make_graphed_step", "GraphedStep", "plan_of", "uncheckpoint"),
        ),
    ),
    Group(
        "Plan",
        "Before a step is run; inputs and models may be on the meta device.",
        (
            *("plan", "PlanReport", "Plan", "chain_of", "frontier", "Frontier"),
            *("largest", "Largest", "max_batch_size", "plan_rank", "RankReport"),
        ),
    ),
    Group(
        "Measure and verify",
        "",
        ("verify", "check_replays", "anatomy", "Anatomy", "track", "Timeline"),
    ),
    MODELS,
    Group("Layers", "", ("TransformerBlock",)),
    INTEGRATIONS,
    Group(
        "Harness",
        "[Command line](command-line.md), [configs](configs.md), [a pytest "
        "fixture](guide.md#test-memory-in-your-ci).",
    ),
    ERRORS,
)
# methods that mean the same wherever a class has them
SHARED = {
    "to_json": "writes JSON",
    "from_json": "reads it",
    "save": "writes a file",
    "load": "reads it",
    "to_csv": "writes a row for each plan or point",
    "table": "writes Markdown",
    "plot": "draws into a file (.svg, .png, .pdf) or matplotlib Axes",
    "summary": "returns the numbers of the picture",
}


def page() -> str:
    """Returns the page.

    Raises:
        LookupError: no group, or more than one, has a name that `zoo` exports.
    """
    grouped = [name for group in GROUPS for name in group.names]
    exported = [
        name
        for name, value in vars(zoo).items()
        if name[0] != "_" and not inspect.ismodule(value) and name not in list_models()
    ]
    if sorted(grouped) != sorted(exported):
        wrong = set(grouped) ^ set(exported) or "a name twice"
        raise LookupError(f"the groups of docs/api.py do not hold each name once: {wrong}")
    shared = "; ".join(f"`{name}` {words}" for name, words in SHARED.items())
    also = textwrap.fill(f"Where a class has them: {shared}.", 100, break_long_words=False)
    parts = [HEADER, also, *("\n\n".join(_group(group)) for group in GROUPS)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _group(group: Group) -> Iterator[str]:
    yield f"## {group.title}"
    if group.words:
        yield textwrap.fill(group.words, 100, break_long_words=False, break_on_hyphens=False)
    if group is ERRORS:
        yield _errors(group.names)
        return
    if group is MODELS:
        yield _families()
    if group is INTEGRATIONS:
        for file in sorted((ROOT / "zoo" / "integrations").glob("*.py")):
            docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            if ".integrations." in docstring:
                yield f"### zoo.integrations.{file.stem}"
                yield docstring.partition("\n\n")[0]  # the recipes say the rest
    for name in group.names:
        yield from _entry(f"zoo.{name}", getattr(zoo, name))


def _families() -> str:
    """Returns a row for each family: models that say the same of themselves but for their size."""
    families: dict[str, list[str]] = {}
    for name in list_models():
        families.setdefault(_first(getattr(zoo, name)).rpartition(". ")[0], []).append(name)
    rows = []
    for words, names in families.items():
        sizes = ", ".join(f"`{name}` {_parameters(name)}" for name in names)
        rows.append((words, sizes, f"`{', '.join(_own_arguments(names))}`"))
    return _table(("family", "sizes, million parameters", "its own arguments"), rows)


def _parameters(name: str) -> str:
    """Returns the millions of parameters that a model's docstring ends with."""
    return re.findall(r"([\d.]+) million parameters", _first(getattr(zoo, name)))[0]


def _own_arguments(names: Iterable[str]) -> Iterator[str]:
    """Yields the arguments of a family, with the defaults that all of its sizes share."""
    taken = [model_arguments(name) for name in names]
    for key in taken[0]:
        if key not in OPTIONS:
            defaults = {_default(arguments[key].default) for arguments in taken}
            yield f"{key}={defaults.pop()}" if len(defaults) == 1 else key


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def _errors(names: Iterable[str]) -> str:
    lines = []
    for name in sorted(names, key=lambda name: (name != "ZooError", name)):
        kind = getattr(zoo, name)
        bases = ", ".join(
            f"`{base.__name__}`" for base in kind.__bases__ if base is not zoo.ZooError
        )
        lines.append(f"- `{name}` ({bases}): {_first(kind)}")
    return "\n".join(lines)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if not inspect.isclass(value):
        yield f"```python\n{name}{_signature(value)}\n```"
    yield markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value) and not issubclass(value, nn.Module):
        members = dict(_members(value))
        own = [f"- {_member(key, found)}" for key, found in members.items() if key not in SHARED]
        if own:
            yield "\n".join(own)
        if shared := [f"`{key}`" for key in members if key in SHARED]:
            yield f"Also {', '.join(shared)}."


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields what a class defines for its users and documents, in the order of the source."""
    attributes = re.findall(r"^ {4}(\w+(?:, \w+)*):", inspect.getdoc(kind) or "", re.MULTILINE)
    documented = {name for line in attributes for name in line.split(", ")}
    for name, found in vars(kind).items():
        function = getattr(found, "func", None) or getattr(found, "fget", None) or found
        function = getattr(function, "__func__", function)
        is_method = inspect.isfunction(function) and function.__doc__
        if is_method and not name.startswith("_") and name not in documented:
            yield name, found


def _member(name: str, found: Any) -> str:
    function = getattr(found, "func", None) or getattr(found, "fget", None)
    if function is not None:
        return f"`.{name}`: {_first(function)}"
    function = getattr(found, "__func__", found)
    return f"`.{name}{_signature(function)}`: {_first(function)}"


def _signature(function: Any) -> str:
    """Returns the arguments and defaults of a function, without their types."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    given.args = [argument for argument in given.args if argument.arg not in ("self", "cls")]
    for argument in (*given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments = ast.unparse(given).replace("'", '"')
    return "\n    ".join(textwrap.wrap(f"({arguments})", 80, break_long_words=False))


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([written[0], re.sub(r"[^|]+", "---", written[0]), *written[1:]])


def _first(value: Any) -> str:
    """Returns the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def markdown(docstring: str) -> str:
    """Turns a docstring's sections (`Raises:`) into lists; all else is Markdown already."""
    docstring = re.sub(r"\n {4}[\w, ]+: as in `zoo\.plan`\.(?=\n)", "", docstring)
    docstring = re.sub(r"\n {4}ArgumentError: .+(?:\n {8}.+)*", "", docstring)
    docstring = re.sub(r"Raises:\s*\Z", "", docstring)
    return re.sub(
        r"^(\w+):\n((?:(?: {4}.*)?\n?)+)",
        lambda found: f"{found[1]}:\n\n{_items(found[2])}\n\n",
        docstring,
        flags=re.MULTILINE,
    ).strip()


def _items(section: str) -> str:
    entries = re.split(r"\n(?=\S)", textwrap.dedent(section).strip())
    return "\n".join(
        re.sub(r"^(\w+(?:, \w+)*):", r"- `\1`:", " ".join(entry.split())) for entry in entries
    )


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
