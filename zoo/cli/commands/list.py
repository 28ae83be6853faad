"""`zoo list`: the models of the catalog."""

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import zoo.catalog
from zoo.catalog import list_models, model_arguments
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.subject import usual_inputs
from zoo.cli.values import shapes, words
from zoo.errors import ArgumentError, nearest, shortened
from zoo.report.markdown import markdown_table


def main(arguments: Sequence[str]) -> Answer:
    """Lists names that match a pattern, each with what it is."""
    parser = Parser("list", "Lists the models of the catalog.", ["", "'resnet*' --json"])
    parser.add_argument(
        "pattern", nargs="?", default="*", help="as a shell has them: 'resnet*'; default: all"
    )
    options = parser.parse(arguments)
    names = list_models(options.pattern)
    if not names:
        near = nearest(options.pattern, list_models())
        raise ArgumentError(f"no model matches {shortened(options.pattern)}.{near}")
    found = [_described(name) for name in names]
    rows = [(entry["name"], entry["kind"], words(entry["inputs"])) for entry in found]
    return answer(options, markdown_table(("model", "kind", "inputs unless said"), rows), found)


def _described(name: str) -> dict[str, Any]:
    builder = inspect.unwrap(getattr(zoo.catalog, name))
    return {
        "name": name,
        "kind": get_type_hints(builder)["return"].__name__,
        "inputs": shapes(usual_inputs(name, {})),
        "arguments": list(model_arguments(name)),
    }
