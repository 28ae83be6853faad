"""A config says exactly what is compared; what it does not say rightly, it says in an error."""

import configparser
import re
from itertools import pairwise

import pytest

from tests.harness.command_line import load
from zoo.errors import ArgumentError, ConfigError
from zoo.harness.comparison_cells import expand
from zoo.harness.config import MODEL_KEYS, RUN_KEYS, config_folder

SHIPPED = sorted(config_folder().glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_open_with_their_command(path):
    assert load([str(path)]).models
    default = "python test_memory_optimized.py" if path.stem == "default" else str(path.name)
    assert default in path.read_text().splitlines()[0]


def test_the_default_compares_all_families_and_judges_each():
    models = load([]).models
    families = [re.split(r"\d|_", model.name)[0] for model in models]
    assert families == ["resnet", "densenet", "vnet", "unet", "vit", "gpt", "llama", "lstm"]
    assert {model.data for model in models} == {"photographs", "volume", "text", "stream"}
    assert all(model.largest_ratio < 1 for model in models)


def test_the_command_line_of_the_readme():
    line = "--model resnet50 densenet121 --batch-size 16 --checkpoint sqrt --device cuda"
    config = load(line.split())
    assert [model.name for model in config.models] == ["resnet50", "densenet121"]
    assert {(model.batch_size, model.checkpoint) for model in config.models} == {(16, "sqrt")}
    assert config.device == "cuda"


def test_a_config_is_found_by_its_name_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = ["quick", "quick.yaml", "configs/quick.yaml"]
    assert [load([name]).name for name in named] == ["quick"] * 3


def test_later_sources_win(write):
    path = write("steps: 7\nseed: 2\nmodels: [{name: resnet18, batch_size: 3}, resnet34]")
    config = load([path, "--steps", "9", "--size", "64"])
    assert (config.steps, config.seed) == (9, 2)
    assert [model.batch_size for model in config.models] == [3, 4]
    assert [model.size for model in config.models] == [64, 64]


def test_arguments_of_the_command_line_join_those_of_the_file(write):
    path = write("models: [{name: lstm, arguments: {hidden: 8, drop_rate: 0.1}}]")
    (model,) = load([path, "--arguments", "{drop_rate: 0.5}"]).models
    assert model.arguments == {"hidden": 8, "drop_rate": 0.5}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ([], "default"),
        (["--output", "there", "--fresh", "--timeout=9", "--tolerance=0.5"], "default"),
        (["--no-optimizer-in-backward"], "default"),
        (["--deterministic"], "default-deterministic=True"),
        (["--model", "vnet", "lstm"], "default-vnet-lstm"),
        (["--model=vnet", "--steps=5"], "default-vnet-steps=5"),
        (["quick", "--batch-size", "16"], "quick-batch_size=16"),
    ],
)
def test_a_command_line_of_its_own_has_results_of_its_own(line, name):
    assert load(line).name == name


def test_the_optimizer_in_the_backward_is_measured_unless_left_out(write):
    path = write("models: [vnet]\noptimizer_in_backward: false")
    given = ([], ["--no-optimizer-in-backward"], [path])
    assert [load(line).optimizer_in_backward for line in given] == [True, False, False]
    with pytest.raises(ArgumentError, match=r"Did you mean --no-optimizer-in-backward"):
        load(["--optimizer-in-backward"])


def test_algorithms_are_deterministic_where_that_is_asked_for(write):
    path = write("models: [vnet]\ndeterministic: true")
    configs = [load(line) for line in ([], ["--deterministic"], [path])]
    assert [config.deterministic for config in configs] == [False, True, True]
    found = [{cell.deterministic for cell in expand(config)[0].values()} for config in configs]
    assert found == [{False}, {True}, {True}]


def test_two_spellings_of_a_value_share_a_name():
    assert load(["--size=[64, 6, 4]"]).name == load(["--size=[64,6,  4]"]).name


def test_no_two_command_lines_share_a_name():
    lines = [["--size=[64, 64]"], ["--size=[64,  6, 4]"], ["--size=[64, 6, 4]", "--steps=4"]]
    long = [["--model", *["resnet18"] * count] for count in (30, 31)]
    names = [load(line).name for line in (*lines, *long)]
    assert len(set(names)) == 5
    assert all(len(name) < 120 and not set(name) & set(" /[],:") for name in names)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("4", 4), ("sqrt", "sqrt"), ("(0-1) 2", "(0-1) 2")]
)
def test_checkpoint_takes_what_the_models_take(text, value):
    (model,) = load(["--model", "resnet18", "--checkpoint", text]).models
    assert model.checkpoint is value or model.checkpoint == value


def test_text_that_spells_a_number_is_one_where_a_number_is_taken(write):
    path = write('steps: "4"\ntolerance: 1e-3\nmodels: [resnet18]')
    config = load([path, "--output", "5", "--size", "[64, 32]", "--largest-ratio", "1e-1"])
    assert (config.steps, config.tolerance, config.output) == (4, 0.001, "5")
    assert (config.models[0].size, config.models[0].largest_ratio) == ([64, 32], 0.1)
    assert load([write('output: "a #1"\nmodels: [vnet]')]).output == "a #1"


def test_every_package_and_the_configs_are_installed():
    root = config_folder().parent
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    folders = {path.parent.relative_to(root) for path in root.glob("zoo/**/__init__.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"zoo.configs"}
    assert set(setup["options"]["packages"].split()) == packages


def test_a_floor_holds_for_the_experiment_that_it_was_written_for(write):
    path = write("models: [{name: resnet18, largest_ratio: 0.3}]")
    floors = [
        load([path, *more]).models[0].largest_ratio
        for more in ([], ["--repeats=9"], ["--checkpoint=2"], ["--deterministic"])
    ]
    assert floors == [0.3, 0.3, 1.0, 1.0]
    assert load([path, "--largest-ratio=0.4"]).models[0].largest_ratio == 0.4
    both = ["--dtype=bfloat16", "--largest-ratio=0.4"]
    assert load([path, "--device=cuda"]).models[0].largest_ratio == 1.0
    assert load([path, *both]).models[0].largest_ratio == 0.4


def test_cuda_takes_its_own_batch_size_unless_told():
    sizes = [
        load(["--model", "resnet18", "--device", *more]).models[0].batch_size
        for more in (["cpu"], ["cuda"], ["cuda", "--batch-size", "5"])
    ]
    assert sizes == [4, 64, 5]


def test_a_vision_transformer_is_built_for_the_size_it_is_given():
    (model,) = load(["--model", "vit_tiny_patch16", "--size", "96"]).models
    assert model.arguments == {"image_size": 96}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 2\nmodels: [resnet18]", "no key 'step'. Did you mean steps"),
        ("models: [{name: resnet18, batchsize: 2}]", "no key 'batchsize'. Did you mean batch_size"),
        ("models: [resnet5O]", "no model 'resnet5O'. Did you mean resnet50"),
        ("models: [{name: vnet, arguments: {clases: 2}}]", "'clases'. Did you mean classes"),
        ("models: [{name: resnet18, optimizer: adam}]", "'sgd' or 'adamw'; got 'adam'.*mean adamw"),
        ("models: [{name: resnet18, batch_size: few}]", "should be a valid integer; got 'few'"),
        ("models: [{name: resnet18, batch_size: 0}]", "batch_size should be at least 1; got 0"),
        ("models: [{name: resnet18, size: [1, 0]}]", r"size .* at least 1; got \[1, 0"),
        ("models: [{name: resnet18, checkpoint: sqtr}]", "got 'sqtr'. Did you mean sqrt"),
        ("models: [{name: resnet18, checkpoint: 0}]", "be at least 1 .*; got 0"),
        ("models: [{name: resnet18, arguments: [1]}]", "arguments should be a valid dict"),
        ("models: [resnet18]\nmemory_limit: 8GiBs", "memory_limit='8GiBs' is no size; write bytes"),
        ("models: [resnet18]\ntolerance: -1", "tolerance should be at least 0; got -1"),
        ("models: [resnet18]\ntolerance: .nan", "tolerance should be a finite number; got nan"),
        ("models: [resnet18]\ntolerance: .inf", "tolerance should be a finite number; got inf"),
        ("models: [resnet18]\ntolerance: -.inf", "tolerance should be a finite number; got -inf"),
        ("models: [{name: vnet, largest_ratio: .nan}]", "largest_ratio should be a finite number"),
        ("models: [{name: vnet, largest_ratio: .inf}]", "largest_ratio should be a finite number"),
        (f"models: [resnet18]\ntolerance: {10**400}", "a valid number; got 100+.*00$"),
        ("models: [resnet18]\nsteps: null", "steps should be a valid integer; got None"),
        ("models: [{name: resnet18, arguments: null}]", "arguments should be a valid dict"),
        ("models: [resnet18]\nthreads: -1", "threads should be at least 0; got -1"),
        (
            "models: [resnet18]\ndevice: cdua",
            "torch knows, such as cuda; got 'cdua'. Did you mean cuda",
        ),
        ("models: []", "lists no models"),
        ("models: [{batch_size: 2}]", "a model is a name or a mapping with one"),
        ("- resnet18", "holds no keys"),
        ("models: [", "is not YAML"),
        ("models: [resnet18]\nsteps: 3\nsteps: 2", "line 1 has 'steps' twice"),
        ("models: " + "[" * 3000, "is not YAML: it nests deeper than 32 levels"),
        ("models:" + "".join(f"\n{' ' * n}- " for n in range(40)), "it nests deeper than"),
        ("a: [" + "".join(f"&a{n} [" for n in range(40)) + "]" * 41, "nests deeper than 32 levels"),
        ("models: [resnet18]\nseed: " + "9" * 5000, "is not YAML: .*5000 digits"),
        ('models: [resnet18]\noutput: "a\\0b"', r"'a\\x00b' is not a path: embedded null byte"),
        ('models: [resnet18]\ncompare: "\\0"', r"'\\x00' is not a path: embedded null byte"),
        ('models: [resnet18]\noutput: "\\ud800"', r"'\\ud800' is not a path: .*surrogates"),
    ],
    ids=lambda text: text[:60].encode("ascii", "backslashreplace").decode(),
)
def test_what_is_wrong_is_said_with_the_nearest_right_one(write, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load([write(text)])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchsize", "2"], "no option --batchsize. Did you mean --batch-size"),
        (["--dtype", "float16"], "^--dtype should be 'float32' or 'bfloat16'; got 'float16'"),
        (["--model", "resnet18", "--steps", "many"], "^--steps should be a valid integer; got 'm"),
        (["--tolerance", "-1"], "^--tolerance should be at least 0; got -1"),
        (["--model", "resnet5O"], "^--model resnet5O: there is no model .*Did you mean resnet50"),
        (["--batch-size", "0"], "^--batch-size should be at least 1; got 0"),
        (["--size", "[0]"], "^--size should be .*at least 1"),
        (["--checkpoint", "sqtr"], "^--checkpoint is wrong: it takes .*Did you mean sqrt"),
        (["--tolerance", ".nan"], "^--tolerance should be a finite number"),
        (["--tolerance", ".inf"], "^--tolerance should be a finite number"),
        (["--largest-ratio", "nan"], "^--largest-ratio should be a"),
        (["--memory-limit", "much"], "^--memory-limit .*'much' is no size"),
        (["quik"], "no config 'quik'. Did you mean quick"),
        (["--model"], "expected at least one argument"),
    ],
)
def test_the_command_line_is_as_strict(arguments, message):
    with pytest.raises((ConfigError, ArgumentError), match=message):
        load(arguments)


# a list of ten of a list of ten of ...: 500 bytes that stand for 10 ** 21 values
BOMB = "[" + ", ".join(
    f"&{name} [{', '.join([f'*{before}' if before else 'x'] * 10)}]"
    for before, name in pairwise(["", *"abcdefghijklmnopqrstu"])
) + "]"  # fmt: skip
LONG = "a" * 100_000
SHORT = r"(?s)\A.{1,999}\Z"
# these take any text
FREE = ("output", "compare")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [BOMB, LONG, f"[{LONG}]", f"{{{LONG}: {LONG}}}"], ids=len)
@pytest.mark.parametrize(
    "text",
    ["{}", "- {}", "models: {}", "models: [{}]", "{}: 2", "models: [resnet18]\n{}: 2",
     "models: [{{name: {}}}]", "models: [{{name: vnet, {}: 2}}]",
     "models: [{{name: vnet, arguments: {{{}: 2}}}}]",
     *(f"models: [{{{{name: vnet, {key}: {{}}}}}}]" for key in MODEL_KEYS),
     *(f"models: [vnet]\n{key}: {{}}" for key in RUN_KEYS if key not in FREE)],
)  # fmt: skip
def test_no_value_makes_an_error_long_or_without_end(write, text, value):
    with pytest.raises(ConfigError, match=SHORT):
        load([write(text.format(value))])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [BOMB, LONG], ids=len)
@pytest.mark.parametrize(
    "option", ["{}", "--{}", "--model={}", "--size={}", "--arguments={}", "--tolerance={}", "x {}"]
)
def test_no_argument_makes_an_error_long_or_without_end(option, value):
    with pytest.raises((ConfigError, ArgumentError), match=SHORT):
        load(option.format(value).split(" ", 1))


def test_a_config_may_nest_as_deep_as_is_read(write):
    plan = "[" * 28 + "0" + "]" * 28
    with pytest.raises(ConfigError, match="arguments has no key 'plan'"):
        load([write(f"models: [{{name: resnet18, arguments: {{plan: {plan}}}}}]")])
