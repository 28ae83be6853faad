"""What a config may say, for editors and for readers, from the dataclasses that read it.

python -m zoo.harness.schema      writes configs/schema.json and docs/configs.md again
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from zoo.catalog import list_models
from zoo.harness.config import MODEL_KEYS, RUN_KEYS, Config, ModelConfig, config_folder
from zoo.harness.recipes import RECIPES
from zoo.harness.values import Declared

Schema = dict[str, Any]

TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    NoneType: "null",
}
BY_MODEL = "by model"
PAGE = """\
# Configs

A config is a YAML file that says what `zoo compare` trains, and how. `configs/` holds some; each
opens with its command and the result to expect. `python -m zoo.harness.schema` writes this page and
[configs/schema.json](../configs/schema.json) from the code. A line such as

```yaml
# yaml-language-server: $schema=schema.json
```

has editors complete keys and mark mistakes. `zoo compare` refuses mistakes and offers the nearest
right key.

A key of a run stands at the top of the file, a key of a model below `models:`; every one of them is
also an option of the command line, `--batch-size 16`, which wins over the file.

## Keys of a run

{run}

## Keys of a model

{model}

## What a model is trained on where nothing is said

The first pattern that fits the name counts.

{recipes}
"""


def json_schema() -> Schema:
    """Returns the JSON schema (draft 7) of a config file."""
    named = {"name": {"enum": list_models(), "description": "a name of `zoo list`"}}
    model = _object({**named, **_properties(MODEL_KEYS, ModelConfig)}, ["name"])
    models = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [{"enum": list_models()}, model]},
        "description": "the models to compare, by name or with keys of their own",
    }
    found = _object({"models": models, **_properties(RUN_KEYS, Config)}, ["models"])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "a comparison of zoo",
        **found,
    }


def schema_text() -> str:
    """Returns the schema as the file has it."""
    return json.dumps(json_schema(), indent=1) + "\n"


def page() -> str:
    """Returns the page that documents every key."""
    return PAGE.format(
        run=_table(RUN_KEYS, Config), model=_table(MODEL_KEYS, ModelConfig), recipes=_recipes()
    )


def _object(properties: Mapping[str, Schema], required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def _properties(keys: Iterable[Declared], config: type) -> dict[str, Schema]:
    defaults = _defaults(config)
    return {entry.name: _property(entry, defaults[entry.name]) for entry in keys}


def _property(entry: Declared, default: Any) -> Schema:
    found = _type(entry.hint, entry.key.least)
    unit = f" ({entry.key.unit})" if entry.key.unit else ""
    found["description"] = f"{entry.key.text}{unit}"
    return found if default is MISSING else {**found, "default": default}


def _type(hint: Any, least: float | None) -> Schema:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(kind, least) for kind in get_args(hint)]}
    found: Schema = {"type": TYPES[origin]}
    if origin is list:
        found["items"] = _type(get_args(hint)[0], least)
    if origin in (int, float) and least is not None:
        found["minimum"] = least
    return found


def _defaults(config: type) -> dict[str, Any]:
    return {entry.name: entry.default for entry in fields(config)}


def _table(keys: Iterable[Declared], config: type) -> str:
    defaults = _defaults(config)
    rows = [
        (
            f"`{entry.name}`",
            _words(_type(entry.hint, entry.key.least)),
            entry.key.unit or "-",
            _shown(defaults[entry.name]),
            entry.key.text,
        )
        for entry in keys
    ]
    return _table_of(("key", "type", "unit", "default", "meaning"), rows)


def _words(found: Schema) -> str:
    """Says a type in words: 'integer from 1, or null'."""
    if "anyOf" in found:
        return " or ".join(_words(kind) for kind in found["anyOf"])
    if "enum" in found:
        return ", ".join(f"`{value}`" for value in found["enum"])
    if "items" in found:
        return f"array of {_words(found['items'])}s"
    return f"{found['type']} from {found['minimum']}" if "minimum" in found else str(found["type"])


def _shown(default: Any) -> str:
    return BY_MODEL if default is MISSING else f"`{json.dumps(default)}`"


def _recipes() -> str:
    names = list(dict.fromkeys(key for _, keys in RECIPES for key in keys))
    rows = [
        (f"`{pattern}`", *(str(keys.get(name, "-")) for name in names)) for pattern, keys in RECIPES
    ]
    return _table_of(("model", *(f"`{name}`" for name in names)), rows)


def _table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table of words: every column begins at the left."""
    lines = (f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))
    return "\n".join(lines)


def write() -> None:
    """Writes both files of a checkout again."""
    folder = config_folder()
    (folder / "schema.json").write_text(schema_text(), encoding="utf-8")
    docs = folder.parent / "docs"
    docs.mkdir(exist_ok=True)
    (docs / "configs.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
