"""The config of a comparison, validated by pydantic: a YAML file and options of a command line.

A misspelt key or value raises a `ConfigError` that suggests the nearest valid one: a comparison
that silently ran with a default instead would still print a table.

    default_configs.py   the file             the command line
    data, size, ...      models: [{name:..}]  --model resnet50 --batch-size 16
           └────────────────────┴──────────────────────┘  the later wins
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic.dataclasses import dataclass

from zoo.catalog.factories import check_name, model_arguments
from zoo.catalog.libraries import is_of_library
from zoo.engine.devices import accelerator, nearest_device
from zoo.errors import (
    ArgumentError,
    ConfigError,
    ModelNameError,
    PlanError,
    nearest,
    shortened,
    shortened_text,
)
from zoo.harness.default_configs import recipe, sample_for
from zoo.planner.plan import Plan
from zoo.planner.schemes import NAMES
from zoo.units import parse_bytes

T = TypeVar("T")
# the most levels of lists and mappings in a config (its own keys take four), and the most values,
# those of an alias counted at each use
DEEPEST, MOST = 32, 10_000


def _check_plan(value: str) -> str:
    if value not in NAMES:
        try:
            Plan.parse(value)
        except PlanError:
            raise ConfigError(
                f"it takes true, false, a number of segments, {', '.join(NAMES)} or a plan such as "
                f"'(0-1) 2'; got {shortened(value)}.{nearest(value, NAMES)}"
            ) from None
    return value


def _check_device(value: str) -> str:
    try:
        torch.device(value, 0)
    except RuntimeError:
        devices = dict.fromkeys(("cpu", accelerator() or "cuda", "cuda", "xpu", "mps"))
        raise ConfigError(
            f"it takes cpu or a kind of device that torch knows, such as cuda; got "
            f"{shortened(value)}.{nearest_device(value, devices)}"
        ) from None
    return value


def _check_path(value: str) -> str:
    """Raises ConfigError for a path that no system accepts, whether or not the file exists."""
    try:
        with contextlib.suppress(OSError):
            os.stat(value)
    except ValueError as error:
        raise ConfigError(f"{shortened(value)} is not a path: {error}") from None
    return value


def _validate(value: Any, validate: Callable[[Any], Any]) -> Any:
    reasons = []
    for reading in _readings(value):
        try:
            return validate(reading)
        except ValidationError as error:
            reasons.append(reason(error.errors(include_url=False), reading))
    raise ValueError(reasons[0])


def _readings(value: Any) -> list[Any]:
    """Returns the possible readings of a value: text of a command line may also be YAML."""
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError, ValueError):
            parsed = _parse_yaml(value)
            return [value] if isinstance(parsed, str) else [parsed, value]
    return [value]


def reason(faults: Sequence[Any], value: Any) -> str:
    """Words pydantic's errors: 'should be a valid integer or be a valid list; got 0.5'."""
    own = [fault["ctx"]["error"] for fault in faults if fault["type"] == "value_error"]
    if own:
        return f"is wrong: {own[0]}"
    words = dict.fromkeys(re.sub(r"^\w+ should ", "", fault["msg"]) for fault in faults)
    text = " or ".join(words).replace("greater than or equal to", "at least")
    choices = re.findall(r"'([^']+)'", text) if faults[0]["type"] == "literal_error" else ()
    near = nearest(value, choices) if isinstance(value, str) else ""
    return f"should {text}; got {shortened(value)}{near and f'.{near}'}"


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Count | Annotated[list[Count], Field(min_length=1, max_length=3)]
Checkpoint = bool | Count | Annotated[str, AfterValidator(_check_plan)]
DeviceName = Annotated[str, AfterValidator(_check_device)]
FilePath = Annotated[str, AfterValidator(_check_path)]
Memory = Annotated[
    int,
    BeforeValidator(partial(parse_bytes, what="memory_limit"), json_schema_input_type=int | str),
]
Data = Literal["photographs", "digits", "volume", "text", "stream"]


@dataclass(frozen=True, config={"strict": True, "use_attribute_docstrings": True})
class ModelConfig:
    """One model to compare, and on what."""

    name: str
    data: Data
    """photographs, digits, volume, text (N, T) or stream (T, N)"""
    batch_size: Count
    """samples in a batch"""
    size: Size
    """pixels of an image's side, voxels of a volume's sides, tokens of a text: 224, [64, 64, 32]"""
    arguments: dict[Any, Any]
    """arguments of the model: {drop_rate: 0.1}"""
    accelerator_batch_size: Count | None = None
    """samples in a batch on devices other than the CPU"""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd (momentum 0.9) or adamw"""
    checkpoint: Checkpoint = True
    """true, a number of segments, sqrt, blocks, cheap or a plan's text"""
    repeats: Count = 5
    """timed rounds of steps, each variant once"""
    largest_ratio: Share = 1.0
    """the worst peak of the whole step to accept, in bytes relative to the baseline's"""

    _validate = field_validator("*", mode="wrap")(_validate)


@dataclass(frozen=True, config={"strict": True, "use_attribute_docstrings": True})
class Config:
    """What to compare and how."""

    name: str
    models: tuple[ModelConfig, ...]
    steps: Annotated[int, Field(ge=2)] = 3
    """optimizer steps whose digests are compared"""
    device: DeviceName = "cpu"
    """cpu, or a kind of device that torch knows: cuda, xpu, mps, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 by autocast"""
    output: FilePath = "results"
    """the folder for results and reports"""
    seed: Natural = 0
    """of weights, batches and dropout"""
    deterministic: bool = False
    """train by torch's deterministic algorithms, for baselines that do not repeat their numbers"""
    threads: Natural = 0
    """CPU threads, 0 for as many as there are cores"""
    timeout: Count = 1800
    """seconds after which a cell has failed"""
    frontier: bool = False
    """draw in the report what each budget costs: seconds to a minute per model more"""
    optimizer_in_backward: bool = True
    """measure a third variant: checkpointed, with the optimizer in the backward"""
    cuda_graph: bool = False
    """train each variant as a CUDA graph, too (zoo.make_graphed_step), on devices that have them"""
    library_checkpointing: bool = True
    """measure other libraries' models by their own checkpointing, too, where they have any"""
    fresh: bool = False
    """measure again what was measured before"""
    memory_limit: Memory | None = None
    """memory that a cell may take: 8GiB; zoo/harness/processes.py says what counts"""
    compare: FilePath | None = None
    """results of an earlier run (.jsonl), for the report; exit 1 when a peak has grown"""
    tolerance: Share = 0.01
    """growth of a peak that --compare accepts"""

    _validate = field_validator("*", mode="wrap")(_validate)


def _schemas(config: type) -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each key that a file may set, with its default."""
    schemas = TypeAdapter(config).json_schema()["properties"]
    return {key: schemas[key] for key in schemas if key not in ("name", "models")}


MODEL_KEYS, RUN_KEYS = _schemas(ModelConfig), _schemas(Config)
KEYS = MODEL_KEYS | RUN_KEYS

# keys that change no number in a result
HOW_NOT_WHAT = {
    *("output", "timeout", "fresh", "frontier", "compare", "tolerance"),
    *("optimizer_in_backward", "library_checkpointing", "cuda_graph"),
}
# keys which, given on the command line, invalidate a config's `largest_ratio`
OTHER_EXPERIMENT = {
    *("data", "batch_size", "size", "arguments", "checkpoint", "device", "dtype", "deterministic")
}


def option(key: str) -> tuple[str, bool]:
    """Returns the option that sets a key on a command line, and whether it takes no value.

    The option of a key that is on by default turns it off.
    """
    is_flag = KEYS[key].get("type") == "boolean"
    start = "--no-" if is_flag and KEYS[key]["default"] else "--"
    return start + key.replace("_", "-"), is_flag


def read(path: Path, names: Sequence[str], override: Mapping[str, Any]) -> Config:
    """Reads a file. `names` selects models; `override` holds keys of every model or of the run.

    Raises:
        ConfigError: a key or value that does not exist or is out of range.
    """
    for name in names:
        _check_name(name, f"--model {shortened_text(name)}")
    raw = _read_yaml(path)
    _check_keys(raw, ["models", *RUN_KEYS], path.name)
    entries = _entries(raw.pop("models", None), path.name)
    if names:
        by_name = {name: [entry for entry in entries if entry["name"] == name] for name in names}
        entries = [entry for name in names for entry in by_name[name] or [{"name": name}]]
    changes = {key: value for key, value in override.items() if key in MODEL_KEYS}
    run_changes = {key: value for key, value in override.items() if key in RUN_KEYS}
    if override.keys() & OTHER_EXPERIMENT:
        changes.setdefault("largest_ratio", 1.0)
    config = _build(Config, {"name": "", "models": (), **raw}, path.name)
    config = _build(partial(replace, config), run_changes)
    models = tuple(_model(entry, changes, config.device, path.name) for entry in entries)
    return replace(config, name=_run_name(path.stem, names, override), models=models)


def find_config(name: str) -> Path:
    """Finds a config by its path or the name of a shipped one; raises ConfigError for neither."""
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
    """Returns the folder of the package's configs: inside it, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _run_name(config: str, models: Sequence[str], changes: Mapping[str, Any]) -> str:
    """Names a run: the results of --model vnet --steps 5 go to default-vnet-steps=5."""
    values = {key: _readings(changes[key])[0] for key in sorted(changes) if key not in HOW_NOT_WHAT}
    whole = "-".join([config, *models, *(f"{key}={value}" for key, value in values.items())])
    readable = re.sub(r"[^\w.=-]+", "_", whole)
    if readable == whole and len(whole) <= 100:
        return whole
    # different command lines must have different names
    return f"{readable[:100]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _build(make: Callable[..., T], values: Mapping[str, Any], file: str = "") -> T:
    """Makes a part of a config; errors name the key in the file, or the option."""
    try:
        return make(**values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = str(fault["loc"][0])
        where = f"{file}: {key}" if file else option(key)[0]
        raise ConfigError(f"{where} {fault['ctx']['error']}") from None


def _check_keys(raw: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for name in raw:
        if name not in keys:
            near = nearest(str(name), keys) or f" It takes {', '.join(keys)}"
            raise ConfigError(f"{where} has no key {shortened(name)}.{near}")


def _check_name(name: str, where: str) -> None:
    try:
        check_name(name)
    except ModelNameError as error:
        raise ConfigError(f"{where}: {error}") from error


def _entries(entries: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where} lists no models; write 'models:' and below it '- name: ...'")
    models = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    for entry in models:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(
                f"{where}: a model is a name or a mapping with one; got {shortened(entry)}"
            )
    return models


def _model(
    entry: Mapping[str, Any], changes: Mapping[str, Any], device: str, file: str
) -> ModelConfig:
    name = entry["name"]
    where = f"{file}, {shortened_text(name)}"
    _check_name(name, where)
    _check_keys(entry, ["name", *MODEL_KEYS], where)
    # the arguments decide what the model takes, and that what is not said
    unsaid: dict[str, Any] = {"data": "text", "size": 1, "batch_size": 1, "arguments": {}}
    of_file = _build(ModelConfig, unsaid | dict(entry), where)
    model = _build(partial(replace, of_file), changes)
    arguments = {**of_file.arguments, **model.arguments}
    if not is_of_library(name):
        _check_keys(arguments, list(model_arguments(name)), f"{where}, arguments")
    try:
        defaults, sample = recipe(name, arguments), sample_for(name, arguments)
    except ArgumentError as error:
        raise ConfigError(f"{where}: {error}") from error
    said = {*entry, *changes}
    model = replace(model, **{key: value for key, value in defaults.items() if key not in said})
    if device != "cpu" and "batch_size" not in changes:
        model = replace(model, batch_size=model.accelerator_batch_size or model.batch_size)
    if sample.size_argument:
        arguments = {sample.size_argument: model.size, **arguments}
    return replace(model, arguments=arguments)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads safe YAML and refuses duplicate keys: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"the mapping at line {line} has {shortened(key)} twice")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


# YAML 1.1, which PyYAML reads, takes 1e-3 for text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = _parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no keys; write 'models:' and below it '- name: ...'")
    return raw


def _parse_yaml(text: str) -> Any:
    """Parses YAML; raises YAMLError or ValueError for any other text."""
    try:
        content = yaml.load(text, _Loader)
        # an alias may name a list of aliases, and so on: walking through all would never end
        if sum(1 for _ in islice(_values(content), MOST + 1)) <= MOST:
            return content
    except RecursionError:
        pass
    raise yaml.YAMLError(f"it nests deeper than {DEEPEST} levels or holds over {MOST} values")


def _values(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth > DEEPEST:
        raise RecursionError
    yield value
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    if isinstance(parts, list | tuple | set):
        for part in parts:
            yield from _values(part, depth + 1)
