"""Reads what to compare from a YAML file and the command line, strictly.

A misspelt key or value is a `ConfigError` that offers the nearest right one: a comparison that
silently ran with a default instead would still print a table.

    recipes.py        the file             the command line
    data, size, ...   models: [{name:..}]  --model resnet50 --batch-size 16
           └─────────────────┴──────────────────────┘  the later wins
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonargparse
import yaml

from zoo.catalog import list_models, model_arguments
from zoo.errors import LONGEST, ConfigError, nearest, shortened, shortened_text
from zoo.harness.naming import run_name
from zoo.harness.recipes import recipe
from zoo.harness.values import (
    Declared,
    Key,
    check_checkpoint,
    check_keys,
    check_memory_limit,
    check_path,
    check_size,
    declared,
    typed,
)

FRONT = "python test_memory_optimized.py"
EPILOG = """\
examples:
  {program}
  {program} --model resnet50 densenet121 --batch-size 16 --checkpoint sqrt
  {program} configs/lstm_wikitext_shape.yaml
  {program} --compare results-of-last-week.jsonl --tolerance 0.02

exit code: 0 exact, and saved what the config says; 1 not so, a cell failed, or a peak has grown
since --compare; 2 no such config, key or value; 130 interrupted, and the same command goes on"""

# lists and mappings in each other; the keys of a config take four levels
DEEPEST = 32
Data = Literal["photographs", "digits", "volume", "text", "stream"]


@dataclass(frozen=True)
class ModelConfig:
    """One model to compare, and on what."""

    name: str
    data: Annotated[Data, Key("photographs, digits, volume, text (N, T) or stream (T, N)")]
    batch_size: Annotated[int, Key("samples in a batch", least=1, unit="samples")]
    size: Annotated[
        int | list[int],
        Key(
            "side of the images, sides of a volume or length of the text: 224, [64, 64, 32]",
            unit="pixels, voxels or tokens",
        ),
    ]
    arguments: Annotated[dict[str, Any], Key("arguments of the model: {drop_rate: 0.1}")]
    cuda_batch_size: Annotated[
        int | None, Key("samples in a batch on CUDA", least=1, unit="samples")
    ] = None
    optimizer: Annotated[Literal["sgd", "adamw"], Key("sgd (momentum 0.9) or adamw")] = "sgd"
    checkpoint: Annotated[
        bool | int | str, Key("true, a number of segments, sqrt, blocks, cheap or a plan's text")
    ] = True
    repeats: Annotated[
        int, Key("timed pairs of steps, baseline and checkpointed", least=1, unit="pairs")
    ] = 5
    largest_ratio: Annotated[
        float,
        Key(
            "the worst activation peak of tensors to accept, relative to the baseline's",
            least=0,
            unit="ratio of bytes",
        ),
    ] = 1.0


@dataclass(frozen=True)
class Config:
    """What to compare and how."""

    name: str
    models: tuple[ModelConfig, ...]
    steps: Annotated[
        int, Key("optimizer steps whose digests are compared", least=2, unit="steps")
    ] = 3
    device: Annotated[Literal["cpu", "cuda"], Key("cpu or cuda")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], Key("float32, or bfloat16 by autocast")] = (
        "float32"
    )
    output: Annotated[str, Key("the folder for results and reports")] = "results"
    seed: Annotated[int, Key("of weights, batches and dropout", least=0)] = 0
    threads: Annotated[
        int, Key("CPU threads, 0 for as many as there are cores", least=0, unit="threads")
    ] = 0
    timeout: Annotated[
        int, Key("seconds after which a cell has failed", least=1, unit="seconds")
    ] = 1800
    frontier: Annotated[
        bool, Key("draw in the report what each budget costs: seconds to a minute per model more")
    ] = False
    fresh: Annotated[bool, Key("measure again what was measured before")] = False
    memory_limit: Annotated[
        int | str | None, Key("what a cell may take: 8GiB; see zoo/harness/limits.py for of what")
    ] = None
    compare: Annotated[
        str | None, Key("results of an earlier run (.jsonl): exit 1 when a peak has grown")
    ] = None
    tolerance: Annotated[float, Key("growth of a peak that --compare accepts", least=0)] = 0.01


MODEL_KEYS = declared(ModelConfig)
RUN_KEYS = declared(Config)

CHECKS: dict[str, Callable[[Any, str], None]] = {
    "checkpoint": check_checkpoint,
    "compare": check_path,
    "memory_limit": check_memory_limit,
    "output": check_path,
    "size": check_size,
}
OTHER_EXPERIMENT = {"data", "batch_size", "size", "arguments", "checkpoint", "device", "dtype"}
"""Keys which, given on the command line, make a config's `largest_ratio` say nothing."""


def load(arguments: Sequence[str] | None = None, program: str = FRONT) -> Config:
    """Reads the config that a command line asks for; `program` is what its help calls it.

    Raises:
        ConfigError: a file, key or value that does not exist or is out of range.
    """
    given = _command_line(sys.argv[1:] if arguments is None else arguments, program)
    _check_options(given)
    path = find_config(str(given.pop("config")))
    return read(path, given.pop("model", ()), given)


def read(path: Path, names: Sequence[str], override: Mapping[str, Any]) -> Config:
    """Reads a file. `names` chooses models; `override` holds keys of every model or of the run."""
    raw = _yaml(path)
    check_keys(raw, ["models", *_names(RUN_KEYS)], path.name)
    entries = _entries(raw.pop("models", None), path.name)
    if names:
        entries = [entry for name in names for entry in _entries_of(name, entries)]
    run = {**raw, **{name: override[name] for name in _names(RUN_KEYS) if name in override}}
    changes = {name: override[name] for name in _names(MODEL_KEYS) if name in override}
    if override.keys() & OTHER_EXPERIMENT:
        changes.setdefault("largest_ratio", 1.0)
    on_cuda = run.get("device") == "cuda"
    models = tuple(_model(entry, changes, on_cuda, path.name) for entry in entries)
    found = typed(run, RUN_KEYS, path.name)
    for check in sorted(CHECKS.keys() & found.keys()):
        CHECKS[check](found[check], path.name)
    return Config(run_name(path.stem, names, override), models, **found)


def find_config(name: str) -> Path:
    """Finds a config: a path, or the name of one that comes with the package.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    if os.path.isfile(name):  # a Path's own fails where the name is too long for any file
        return path
    shipped = {entry.stem: entry for entry in sorted(config_folder().glob("*.yaml"))}
    if path.stem in shipped and str(path.parent) in (".", "configs"):
        return shipped[path.stem]
    raise ConfigError(
        f"there is no config {shortened(name)}.{nearest(path.stem, shipped)} "
        f"Give the path of a YAML file or one of {', '.join(shipped)}"
    )


def config_folder() -> Path:
    """Returns where the package's configs are: inside it, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _command_line(arguments: Sequence[str], program: str) -> dict[str, Any]:
    options = [_option(name) for name in ("model", *_names(MODEL_KEYS), *_names(RUN_KEYS))]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in (*options, "--help"):
            near = nearest(name, options)
            raise ConfigError(f"there is no option {shortened_text(name)}.{near} Try --help")
    try:
        found = _parser(program).parse_args(list(arguments)).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ConfigError(shortened_text(" ".join(str(error).split()), 4 * LONGEST)) from None
    return {name: value for name, value in found.items() if value is not None}


def _check_options(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a wrong value under the name of its option, not under the file's."""
    for name in given.get("model", ()):
        _check_name(name, f"--model {shortened_text(name)}")
    for entry in (*MODEL_KEYS, *RUN_KEYS):
        where = _option(entry.name)
        found = typed(given, [entry], where)
        for check in CHECKS.keys() & found.keys():
            CHECKS[check](found[check], where)


@cache
def _parser(program: str) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog=program,
        description="Compares training with and without checkpointing: memory, time, exactness.",
        exit_on_error=False,
        # jsonargparse's own would call each value "type: Any, default: null"
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG.format(program=program),
    )
    parser.add_argument("config", nargs="?", default="default", help="a YAML file")
    parser.add_argument("--model", nargs="+", type=str, metavar="NAME", help="only these models")
    for entry in (*MODEL_KEYS, *RUN_KEYS):
        option, text = _option(entry.name), _help(entry)
        if entry.hint is bool:
            parser.add_argument(option, action="store_true", default=None, help=text)
        else:
            parser.add_argument(option, type=Any, metavar="VALUE", help=text)
    return parser


def _model(
    entry: Mapping[str, Any], changes: Mapping[str, Any], on_cuda: bool, where: str
) -> ModelConfig:
    name = entry["name"]
    where = f"{where}, {shortened_text(name)}"
    _check_name(name, where)
    check_keys(entry, ["name", *_names(MODEL_KEYS)], where)
    values = _merge(recipe(name), entry, changes)
    if on_cuda and "batch_size" not in changes:
        values["batch_size"] = values.get("cuda_batch_size") or values["batch_size"]
    model = ModelConfig(name, **typed(values, MODEL_KEYS, where))
    known = model_arguments(name)
    check_keys(model.arguments, list(known), f"{where}, arguments")
    check_checkpoint(model.checkpoint, where)
    check_size(model.size, where)
    if "image_size" in known and "image_size" not in model.arguments:
        return replace(model, arguments={"image_size": model.size, **model.arguments})
    return model


def _check_name(name: str, where: str) -> None:
    if name not in list_models():
        raise ConfigError(f"{where}: no model has this name.{nearest(name, list_models())}")


def _merge(
    usual: Mapping[str, Any], entry: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    values = {"arguments": {}, **usual, **entry, **changes}
    if isinstance(entry.get("arguments"), dict) and isinstance(values["arguments"], dict):
        values["arguments"] = {**entry["arguments"], **values["arguments"]}
    return values


def _entries(entries: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where} lists no models; write 'models:' and below it '- name: ...'")
    found = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    for entry in found:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(
                f"{where}: a model is a name or a mapping with one; got {shortened(entry)}"
            )
    return found


def _entries_of(name: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["name"] == name] or [{"name": name}]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads safe YAML in which no key stands twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping as a dict."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(
                f"line {node.start_mark.line + 1} ff. hold the key {shortened(twice)} twice"
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no keys; write 'models:' and below it '- name: ...'")
    return raw


def _check_depth(text: str) -> None:
    """Raises YAMLError where brackets or indents nest deeper than any config's do.

    PyYAML makes some calls for each level, until Python's stack ends; it tells them apart without.
    """
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} nests deeper than the {DEEPEST} levels that are "
                "read"
            )


def _help(entry: Declared) -> str:
    default = getattr(Config, entry.name, getattr(ModelConfig, entry.name, None))
    return entry.key.text if default is None else f"{entry.key.text} [{default}]"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _names(keys: Iterable[Declared]) -> list[str]:
    return [entry.name for entry in keys]
