"""Writes configs/schema.json and the tables of docs/configs.md: `python docs/configs.py`.

Both come from the types that validate a config: a JSON schema for editors, tables for readers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.catalog.factories import list_models
from zoo.catalog.libraries import LIBRARIES
from zoo.harness.config import MODEL_KEYS, RUN_KEYS
from zoo.harness.default_configs import RECIPES

Schema = dict[str, Any]

ROOT = Path(__file__).parents[1]
FILE = ROOT / "configs" / "schema.json"
PAGE = ROOT / "docs" / "configs.md"


def json_schema() -> Schema:
    """Returns the JSON schema (draft 7) of a config file."""
    others = {"type": "string", "pattern": f"^({'|'.join(LIBRARIES)})/."}
    names = [{"enum": list_models()}, others]
    name = {"anyOf": names, "description": "a name of `zoo list`, or of another library's model"}
    models = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [*names, _object("name", name=name, **MODEL_KEYS)]},
        "description": "the models to compare, by name or with keys of their own",
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "a comparison of zoo",
        **_object("models", models=models, **RUN_KEYS),
    }


def schema_text() -> str:
    """Returns the schema as the file has it."""
    return json.dumps(json_schema(), indent=1) + "\n"


def page() -> str:
    """Returns the page that documents every key, with its tables rewritten."""
    names = list(dict.fromkeys(key for _, keys in RECIPES for key in keys))
    patterns: dict[tuple[str, ...], list[str]] = {}
    for pattern, keys in RECIPES:
        cells = tuple(str(keys.get(name, "-")) for name in names)
        patterns.setdefault(cells, []).append(f"`{pattern}`")
    recipes = [(", ".join(named), *cells) for cells, named in patterns.items()]
    tables = iter(
        [
            _key_table(RUN_KEYS),
            _key_table(MODEL_KEYS),
            _table(("model", *(f"`{name}`" for name in names)), recipes),
        ]
    )
    return re.sub(r"(?m)(^\|.*\n)+", lambda _: next(tables), PAGE.read_text(encoding="utf-8"))


def _object(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [required],
        "additionalProperties": False,
    }


def _key_table(keys: dict[str, Schema]) -> str:
    rows = [
        (
            f"`{key}`",
            "; ".join(_values(schema)),
            schema["description"],
        )
        for key, schema in keys.items()
    ]
    return _table(("key", "type; default", "meaning"), rows)


def _values(schema: Schema) -> Iterator[str]:
    """Yields the type of a key and its default, of a boolean the default alone."""
    if schema.get("type") != "boolean":
        yield _type_words(schema)
    if "default" in schema:
        yield f"`{json.dumps(schema['default'])}`"


def _type_words(schema: Schema) -> str:
    """Words a type: 'integer from 1 or null'."""
    if "anyOf" in schema:
        return " or ".join(map(_type_words, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "items" in schema:
        count = f"{schema['minItems']} to {schema['maxItems']}"
        return f"array of {count} ({_type_words(schema['items'])})"
    return f"{schema['type']} from {schema['minimum']}" if "minimum" in schema else schema["type"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table of words: every column begins at the left."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
