"""What documents the configs is what reads them."""

import re
import runpy

import pytest
import yaml

from tests.harness.command_line import load
from zoo.errors import ConfigError
from zoo.harness.config import MODEL_KEYS, RUN_KEYS, config_folder

ROOT = config_folder().parent
WRITER = runpy.run_path(str(ROOT / "docs" / "configs.py"))
json_schema, page, schema_text = (WRITER[name] for name in ("json_schema", "page", "schema_text"))
SHIPPED = sorted(config_folder().glob("*.yaml"))


@pytest.mark.parametrize(
    ("file", "current"), [("configs/schema.json", schema_text), ("docs/configs.md", page)]
)
def test_the_files_are_current(file, current):
    said = (ROOT / file).read_text(encoding="utf-8")
    assert said == current(), "run `python docs/configs.py`"


def test_every_key_is_in_the_schema_and_on_the_page():
    schema = json_schema()
    model = schema["properties"]["models"]["items"]["anyOf"][-1]
    for keys, known in ((RUN_KEYS, schema), (MODEL_KEYS, model)):
        for key in keys:
            assert known["properties"][key]["description"] in page()
            assert f"| `{key}` " in page()


def test_types_ranges_and_defaults_are_in_the_schema():
    schema = json_schema()
    model = schema["properties"]["models"]["items"]["anyOf"][-1]["properties"]
    assert schema["properties"]["timeout"] == {
        "type": "integer", "minimum": 1, "default": 1800, "title": "Timeout",
        "description": "seconds after which a cell has failed",
    }  # fmt: skip
    assert model["optimizer"]["enum"] == ["sgd", "adamw"]
    assert [kind["type"] for kind in model["size"]["anyOf"]] == ["integer", "array"]
    assert "default" not in model["size"]
    own, others = model["name"]["anyOf"]
    assert "resnet50" in own["enum"]
    assert re.search(others["pattern"], "timm/resnet50")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_fit_the_schema_and_name_it(path):
    text = path.read_text(encoding="utf-8")
    assert "# yaml-language-server: $schema=schema.json\n" in text
    assert fits(yaml.safe_load(text), json_schema())


@pytest.mark.parametrize(
    "text",
    [
        "models: []",
        "models: [resnet51]",
        "models: [{name: vnet, batch_size: 0}]",
        "models: [{name: vnet, batch_size: 1.5}]",
        "models: [{name: vnet, batchsize: 1}]",
        "models: [{name: vnet, optimizer: adam}]",
        "models: [{batch_size: 1}]",
        "models: [vnet]\nstep: 3",
        "models: [vnet]\nfresh: 1",
        "steps: 3",
    ],
)
def test_the_schema_refuses_what_the_harness_refuses(text, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.yaml"):
        load([str(path)])
    assert not fits(yaml.safe_load(text), json_schema())


KINDS = {"integer": int, "number": int | float, "string": str, "boolean": bool, "array": list,
         "object": dict, "null": type(None)}  # fmt: skip


def fits(value, schema):
    """Validates by the words of JSON schema that ours uses."""
    if "anyOf" in schema:
        return any(fits(value, kind) for kind in schema["anyOf"])
    if "enum" in schema or "pattern" in schema:
        return value in schema.get("enum", ()) or is_match(value, schema.get("pattern", "$^"))
    is_kind = isinstance(value, KINDS[schema["type"]])
    if not is_kind or isinstance(value, bool) != (schema["type"] == "boolean"):
        return False
    if isinstance(value, dict):
        return has_keys(value, schema)
    if isinstance(value, list):
        parts = all(fits(part, schema["items"]) for part in value)
        return parts and len(value) >= schema.get("minItems", 0)
    return "minimum" not in schema or value >= schema["minimum"]


def is_match(value, pattern):
    return isinstance(value, str) and re.search(pattern, value) is not None


def has_keys(value, schema):
    if "properties" not in schema:
        return True
    known, needed = schema["properties"], schema["required"]
    assert schema["additionalProperties"] is False
    right = all(name in known and fits(part, known[name]) for name, part in value.items())
    return right and all(name in value for name in needed)
