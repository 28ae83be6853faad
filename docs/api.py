"""Writes docs/api.md from the docstrings of what `zoo` exports: `python docs/api.py`.

Signatures are those of the source, with its short names for types, which a table explains. Tools
that make sites of docstrings (griffe, pdoc, Sphinx) are left out: one page that reads well on a
code host takes no more than this file.
"""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from inspect import ismodule
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import zoo
import zoo.api.plan_rank
import zoo.invocation
import zoo.loss
import zoo.policy.budget
import zoo.policy.options
import zoo.profiling.optimizer_memory
import zoo.sizing.size_estimate
from zoo.catalog.factories import OPTIONS, list_models, model_arguments

TARGET = Path(__file__).parent / "api.md"
HEADER = """\
# API

[Index](README.md) · [Guide](guide.md) · [Recipes](recipes.md) · [Exactness](exactness.md)

All that `import zoo` gives. `python docs/api.py` writes this page from the docstrings.
"""


class Group(NamedTuple):
    """A part of the page: its title, what it says first, and the modules whose names it holds."""

    title: str
    words: str
    modules: tuple[str, ...]


MODELS = Group(
    "Models",
    "Each name is a function, `zoo.resnet50(...)`, and what `zoo.create` takes. All arguments are "
    "keywords; beside its own every model takes those of `zoo.create`.",
    ("zoo.catalog", "zoo.layers"),
)
GROUPS = (
    MODELS,
    Group(
        "Checkpointing",
        "",
        (
            *("zoo.api.checkpoint", "zoo.cuda_graphs", "zoo.engine", "zoo.optimizer"),
            "zoo.planner.plan",
        ),
    ),
    Group(
        "Planning",
        "Before a step is run; inputs and models may be on the meta device.",
        ("zoo.api.plan", "zoo.api.plan_rank", "zoo.sizing", "zoo.policy.plan_report"),
    ),
    Group(
        "Measuring and verifying",
        "",
        ("zoo.profiling", "zoo.api.track", "zoo.api.verify", "zoo.version"),
    ),
    Group(
        "Errors",
        "Each is also the built-in exception that Python or torch would have raised there.",
        ("zoo.errors",),
    ),
)
TYPES: dict[str, ModuleType] = {
    "Budget": zoo.policy.budget,
    "Checkpoint": zoo.policy.options,
    "Inputs": zoo.invocation,
    "Loss": zoo.loss,
    "MakeOptimizer": zoo.profiling.optimizer_memory,
    "Strategy": zoo.api.plan_rank,
    "Vary": zoo.sizing.size_estimate,
}


def page() -> str:
    """Returns the page."""
    exported = [name for name, value in vars(zoo).items() if name[0] != "_" and not ismodule(value)]
    parts = [HEADER]
    for group in GROUPS:
        names = [name for name in exported if group_of(name) is group]
        parts.append("\n\n".join(_group(group, names)))
    parts.append(f"## Types in signatures\n\n{_types()}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def group_of(name: str) -> Group:
    """Returns the group that holds a name: that of the module which defines it.

    Raises:
        LookupError: none does.
    """
    module = getattr(zoo, name).__module__
    found = [
        (len(prefix), group)
        for group in GROUPS
        for prefix in group.modules
        if f"{module}.".startswith(f"{prefix}.")
    ]
    if name in list_models():
        return MODELS
    if not found:
        raise LookupError(f"zoo.{name} is of {module}; name that in a group of docs/api.py")
    return max(found, key=lambda pair: pair[0])[1]


def _group(group: Group, names: list[str]) -> Iterator[str]:
    yield f"## {group.title}"
    if group.words:
        yield textwrap.fill(group.words, 100)
    if group is MODELS:
        yield _models([name for name in names if name in list_models()])
    if group.title == "Errors":
        yield _errors(names)
        return
    # functions before classes
    for name in sorted(names, key=lambda name: (inspect.isclass(getattr(zoo, name)), name)):
        if name not in list_models():
            yield from _entry(f"zoo.{name}", getattr(zoo, name))


def _models(names: Iterable[str]) -> str:
    rows = []
    for name in names:
        own = (p for key, p in model_arguments(name).items() if key not in OPTIONS)
        arguments = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={_default(p.default)}" for p in own
        )
        rows.append((f"`{name}`", _first(getattr(zoo, name)), f"`{arguments}`"))
    return _table(("name", "what it is", "its own arguments"), rows)


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def _errors(names: Iterable[str]) -> str:
    rows = []
    for name in sorted(names, key=lambda name: (name != "ZooError", name)):
        kind = getattr(zoo, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append((f"`zoo.{name}`", bases, _first(kind)))
    return _table(("error", "is a", "what it says"), rows)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if not inspect.isclass(value):
        yield f"```python\n{name}{_signature(value)}\n```"
    yield markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        members = [f"- {_member(key, found)}" for key, found in _members(value)]
        if members:
            yield "Methods and properties:\n\n" + "\n".join(members)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields what a class defines for its users and documents, in the order of the source."""
    for name, found in vars(kind).items():
        function = getattr(found, "func", None) or getattr(found, "fget", None) or found
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, found


def _member(name: str, found: Any) -> str:
    function = getattr(found, "func", None) or getattr(found, "fget", None)
    if function is not None:
        return f"`.{name}`: {_first(function)}"
    function = getattr(found, "__func__", found)
    return f"`.{name}{_signature(function, math.inf)}`: {_first(function)}"


def _signature(function: Any, width: float = 90) -> str:
    """Returns the signature as the source has it, an argument to a line where it is long."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    given.args = [argument for argument in given.args if argument.arg not in ("self", "cls")]
    arguments = [_spaced(argument) for argument in _split(ast.unparse(given))]
    returns = f" -> {ast.unparse(node.returns)}".replace("'", "") if node.returns else ""
    short = f"({', '.join(arguments)}){returns}".replace("'", '"')
    if len(short) + len(node.name) < width:
        return short
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"(\n{lines}){returns}".replace("'", '"')


def _spaced(argument: str) -> str:
    """Returns `name: type = value` for `name: 'type'=value`."""
    return re.sub(r"^([^=]*: )'?([^=']*)'?(=|$)", r"\1\2\3", argument).replace("=", " = ", 1)


def _split(arguments: str) -> list[str]:
    """Splits at the commas that are inside of no brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([written[0], re.sub(r"[^|]+", "---", written[0]), *written[1:]])


def _first(value: Any) -> str:
    """Returns the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def markdown(docstring: str) -> str:
    """Turns a docstring's sections (`Raises:`) into lists; all else is Markdown already."""
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


def _types() -> str:
    rows = []
    for name, module in TYPES.items():
        found = re.search(rf"^{name} = (.*)$", inspect.getsource(module), re.MULTILINE)
        assert found is not None, f"{name} is no longer of {module.__name__}"
        rows.append((f"`{name}`", f"`{found[1]}`".replace("|", "\\|")))
    return _table(("name", "stands for"), rows)


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
