"""The command line as a whole: help, mistakes, Ctrl-C, exit codes."""

import contextlib
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo
from zoo.cli.interrupts import end_on_interrupt
from zoo.cli.main import COMMANDS, run
from zoo.cli.parser import Parser
from zoo.errors import BudgetError, RecomputeError

RESIDUALS = ("tests.training:Residuals", "--input", "4,4,8,8")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_shows_an_example_and_the_exit_codes(command, name):
    told = command(name, "--help")
    assert (told.code, told.err) == (0, "")
    assert re.search(rf"examples?:\n  zoo {name}", told.out)
    assert re.search(r"exit code: 0 .*130 interrupted", told.out, re.DOTALL)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_the_help_lists_every_command(command, arguments):
    told = command(*arguments)
    assert told.code == 0
    assert all(f"  {name} " in told.out for name in COMMANDS)


def examples(text):
    """Finds command lines in a document or a help text."""
    found = re.findall(r"^ *zoo ((?!COMMAND)[a-z-]+ ?.*?)(?:  +#.*)?$", text, re.MULTILINE)
    return [shlex.split(line) for line in found if line.split()[0] in COMMANDS]


def is_understood(arguments, command, monkeypatch):
    """Whether a command line can be read, and its config found; it is not run."""

    def read(parser, given):
        Parser.parse_args(parser, given)
        raise KeyboardInterrupt

    def start(config, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(Parser, "parse", read)
    monkeypatch.setattr("zoo.cli.comparison.run", start)
    # an example names results that the reader has
    monkeypatch.setattr("zoo.cli.comparison.read_earlier", lambda config: None)
    return command(*arguments).code == 130


def test_every_command_line_of_the_documents_can_be_read(command, monkeypatch, tmp_path):
    found = examples((Path(__file__).parents[2] / "docs" / "command-line.md").read_text())
    monkeypatch.chdir(tmp_path)
    assert command("plan", *RESIDUALS, "--max-overhead", "1", "--save", "plan.json").code == 0
    assert {arguments[0] for arguments in found} == set(COMMANDS)
    for arguments in found:
        assert is_understood(arguments, command, monkeypatch), arguments


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_help_text_can_be_read(command, monkeypatch, name):
    found = examples(command(name, "--help").out.partition("example")[2])
    assert found
    for arguments in found:
        assert is_understood(arguments, command, monkeypatch), arguments


MISTAKES = [
    (["plna"], "there is no command 'plna'. Did you mean plan"),
    (["--jsn"], "there is no option '--jsn'"),
    (["list", "resnt*"], r"no model matches 'resnt\*'. Did you mean .*resnet"),
    (["list", "a", "b"], "unrecognized arguments: b"),
    (["info", "resnet19"], "there is no model 'resnet19'. Did you mean .*resnet1"),
    (["info"], "the following arguments are required: model"),
    (["info", "resnet18", "--input", "2,4,64,64"], "ResNet was built for 3 channels; got 4"),
    (["info", "resnet18", "--input", "2,x"], "--input: takes a shape such as .*got '2,x'"),
    (["info", "resnet18", "--input", "2,3:int46"], "know the dtype 'int46'. Did you mean int64"),
    (["info", "resnet18", "--input", "2,3,64,64", "--size", "64"], "give it alone"),
    (["info", "resnet18", "--args", "clases=3"], "'clases'. Did you mean classes"),
    (["info", "resnet18", "--args", "3"], "have names: classes=10; got 3"),
    (["info", "torch.nn.Lin", "--input", "2"], "has no 'Lin'. Did you mean .*Linear"),
    (["info", "torhc.nn.Linear", "--input", "2"], "no module 'torhc' here. Did you mean .*torch"),
    (
        ["info", "torch..Linear", "--input", "2"],
        "is not an import path; write package.module:Name or",
    ),
    (["info", "torch.nn.Linear"], "is not in the catalog; give its inputs: --input"),
    (["info", "torch.nn.Linear", "--input", "2"], "cannot be built: TypeError: .*in_features"),
    (["info", "torch.pi", "--input", "2"], "is a value of type float, which cannot be called"),
    (["info", "torch.Size", "--input", "2"], "makes a value of type Size, not a torch.nn.Module"),
    (["info", "torch.nn.Linear", "--args", "3", "4", "--input", "2,5"], "RuntimeError: "),
    (["plan", *RESIDUALS], "one of the arguments --memory-budget --max-overhead is required"),
    (["plan", *RESIDUALS, "--memory-budget", "8GBi"], "'8GBi' is no size; write bytes"),
    (["plan", *RESIDUALS, "--memory-budget", "1.5"], "='1.5' is no share of the baseline's"),
    (["plan", *RESIDUALS, "--memory-budget", "0%"], "='0%' is no share of the baseline"),
    (["plan", *RESIDUALS, "--max-overhead", "-1"], "must be a number, 0 or more; 0.2 or '20%'"),
    (["plan", *RESIDUALS, "--max-overhead", "nan"], "='nan' must be a number, 0 or more"),
    (["plan", *RESIDUALS, "--memory-bugdet", "1"], "no option --memory-bugdet. Did you mean --mem"),
    (["plan", *RESIDUALS, "--max-overhead=1", "--device", "a10"], "Did you mean a100"),
    (
        ["plan", *RESIDUALS, "--max-overhead=1", "--optimizer", "adm"],
        "'adm' is no optimizer. Did you mean adam",
    ),
    (["plan", *RESIDUALS, "--max-overhead=1", "--save", "/no/x"], "'/no/x' cannot be written: No"),
    (
        ["plan", *RESIDUALS, "--max-overhead=1", "--plot", "x.gif"],
        "'x.gif' is no picture; end it with .svg",
    ),
    # said before any work: there is no such model either
    (["plan", "resnt", "--max-overhead=1", "--save", "/"], "--save: '/' cannot be written: Is a"),
    (["plan", *RESIDUALS, "--memory-budget", "-8GiB"], "memory_budget='-8GiB' is no size"),
    (["plan", *RESIDUALS, "--max-overhead=1", "--device", "cdua"], r"Did you mean cuda, cpu\?"),
    (["frontier", *RESIDUALS, "--points", "0"], "--points: takes a whole number from 1; got '0'"),
    (["frontier", "resnt", "--csv", "/no/x"], "--csv: '/no/x' cannot be written: No such"),
    (["frontier", "resnt", "--plot", "/no/x.svg"], "--plot: '/no/x.svg' cannot be written: No"),
    (["anatomy", "resnt", "--save", "/no/x"], "--save: '/no/x' cannot be written: No such"),
    (["anatomy", "resnt", "--plot", "x.txt"], "'x.txt' is no picture; end it with .svg"),
    (["info", "resnet18", "--input", "-2,3"], "--input: takes a shape such as .*got '-2,3'"),
    (["anatomy", *RESIDUALS, "--device", "gpu"], "Did you mean cuda"),
    (["compare", "--device", "gpu"], "got 'gpu'. Did you mean cuda"),
    (["info", "no/mine.py:Net", "--input", "2"], "there is no file 'no/mine.py'"),
    (["info", "mine.py", "--input", "2"], "mine.py is a file; name what makes .*, as mine.py:Net"),
    (["anatomy", *RESIDUALS, "--device", "cdua"], "takes cpu or cuda.*Did you mean cuda"),
    (["anatomy", *RESIDUALS, "--checkpoint", "sqr"], "is no scheme.*Did you mean sqrt"),
    (["anatomy", *RESIDUALS, "--checkpoint", "no.json"], "'no.json' cannot be read: No such"),
    (["anatomy", *RESIDUALS, "--holders", "-3"], "takes a whole number from 0; got '-3'"),
    (["max-batch", *RESIDUALS], "one of the arguments --memory-budget is required"),
    (
        ["max-batch", *RESIDUALS, "--memory-budget", "50%"],
        "a share .* which grows with",
    ),
    (["max-batch", *RESIDUALS, "--memory-budget", "1MB", "--vary", "7"], "no dimension"),
    (["max-batch", *RESIDUALS, "--memory-budget", "1MB", "--multiple-of", "x"], "number from 1"),
    (["verify", "torch.nn.ReLU", "--input", "2"], "depends on nothing that requires"),
    (["verify", "resnet18", "--checkpoint", "(0-1"], "leaves 1 segment"),
    (["verify", *RESIDUALS, "--checkpoint", "(0-1) 2"], "covers 3 steps but"),
    (["verify", "resnet18", "--device", "nowhere"], "--device: takes cpu or .*; got 'nowhere'"),
    (["verify", "resnet18", "--device", "mps"], "--device mps cannot be used here"),
    (["verify", "resnet18", "--size", "1", "2", "3"], "--size takes 1 or 2 numbers"),
    (["verify", "resnet18", "--steps", "0"], "--steps: takes a whole number from 1; got '0'"),
    (["verify", "resnet18", "--batches", "2"], "no option --batches. Did you mean --batch-size"),
    (["compare", "--batchsize", "3"], "no option --batchsize. Did you mean --batch-size"),
    (["compare", "qick"], "there is no config 'qick'. Did you mean quick"),
    (["compare", "--model", "resnet51"], r"no model 'resnet51'\. Did you mean .*resnet50"),
    (["report", "nowhere"], "there are no results in 'nowhere'"),
    (["report", "setup.cfg"], "'setup.cfg' holds no results of a comparison"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=str)
def test_a_mistake_is_one_sentence_and_exit_code_2(command, arguments, message):
    told = command(*arguments)
    assert (told.code, told.out) == (2, "")
    assert re.fullmatch(rf"zoo.*: .*{message}.*\n", told.err), told.err


@pytest.mark.parametrize("name", ["plan", "frontier", "anatomy"])
def test_a_package_that_a_picture_needs_is_missed_before_any_work(command, monkeypatch, name):
    monkeypatch.delitem(sys.modules, "zoo.report.matplotlib_charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # there is no such model either
    more = ["--max-overhead", "1"] if name == "plan" else []
    told = command(name, "resnt", *more, "--plot", "x.svg")
    assert (told.code, told.out) == (2, "")
    assert re.search(r"a picture needs .*pip install 'zoo-checkpoint\[compare\]'", told.err)


LONG = "a" * 100_000


@pytest.mark.parametrize(
    "arguments",
    [[LONG], [f"--{LONG}"], ["list", LONG], ["list", f"--{LONG}"], ["list", "a", LONG],
     ["info", LONG], ["info", f"{LONG}.x"], ["info", f"torch.{LONG}"], ["info", f"{LONG}."],
     *(["info", path, "--input", "2"] for path in (f"{LONG}.x", f"torch.{LONG}", f"{LONG}.")),
     ["info", "resnet18", "--args", LONG], ["info", "resnet18", "--args", f"{LONG}=1"],
     ["info", "torch.nn.ReLU", "--input", LONG], ["info", "resnet18", "--input", f"2:{LONG}"],
     ["info", "torch.nn.ReLU", "--args", f"{LONG}=1", "--input", "2"],
     ["plan", *RESIDUALS, "--memory-budget", LONG], ["plan", *RESIDUALS, "--max-overhead", LONG],
     ["plan", *RESIDUALS, "--max-overhead=1", "--device", LONG],
     ["plan", *RESIDUALS, "--max-overhead=1", "--optimizer", LONG],
     ["plan", *RESIDUALS, "--max-overhead=1", "--save", LONG],
     ["plan", *RESIDUALS, "--max-overhead=1", "--plot", LONG],
     ["anatomy", *RESIDUALS, "--device", LONG], ["anatomy", *RESIDUALS, "--checkpoint", LONG],
     ["verify", *RESIDUALS, "--device", LONG], ["verify", *RESIDUALS, "--steps", LONG],
     ["compare", LONG], ["compare", "--model", LONG], ["compare", "--compare", LONG],
     ["compare", "--output", LONG], ["report", LONG]],
    ids=lambda arguments: " ".join(arguments)[:60],
)  # fmt: skip
def test_a_mistake_of_any_length_is_a_short_sentence(command, arguments):
    told = command(*arguments)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert len(told.err) < 1_200


def test_every_command_has_a_mistake_here():
    assert {arguments[0] for arguments, _ in MISTAKES} >= set(COMMANDS)


@contextlib.contextmanager
def heard():
    """Ctrl-C raises; a shell has its background jobs ignore it."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command_with_130_and_no_traceback(command, monkeypatch, name):
    def interrupted(arguments):
        signal.raise_signal(signal.SIGINT)

    module = importlib.import_module(f"zoo.cli.{COMMANDS[name][0]}")
    monkeypatch.setattr(module, f"run_{name.replace('-', '_')}", interrupted)
    with heard():
        told = command(name)
    assert (told.code, told.out, told.err) == (130, "", f"zoo {name}: interrupted\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BudgetError("too little"), 1),
        (RecomputeError("refused"), 1),
        (MemoryError(), 1),
        (torch.OutOfMemoryError("CUDA"), 1),
        (ModuleNotFoundError("no rich", name="rich"), 2),
        (ValueError("two\nlines " + "and more " * 99), 2),
    ],
)
def test_what_a_command_raises_decides_the_exit_code(command, monkeypatch, error, code):
    def fails(arguments):
        raise error

    monkeypatch.setattr("zoo.cli.models.run_list", fails)
    told = command("list")
    assert (told.code, told.err.count("\n")) == (code, 1)
    assert len(told.err) < 400
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run(["list"])


# stands in the place of torch: Ctrl-C comes while a library that catches everything is imported
INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    print("caught", flush=True)
    raise SystemExit(0)
"""


def test_a_program_of_the_commands_name_does_about_ctrl_c_what_it_did(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bin/zoo"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "bin/zoo"])
    with heard():
        end_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        importlib.reload(zoo)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (["-m", "zoo", "list"], (130, "", "zoo: interrupted\n")),
        (["{}/zoo", "list"], (130, "", "zoo: interrupted\n")),
        (["{}/program.py", "zoo"], (0, "caught\n", "")),
    ],
)
def test_ctrl_c_during_the_imports_ends_the_command_and_no_other_program(tmp_path, start, said):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    (tmp_path / "zoo").write_text("from zoo.cli.main import run")
    (tmp_path / "program.py").write_text("import zoo")
    root = Path(__file__).parents[2]
    with heard():
        done = subprocess.run(
            [sys.executable, *(part.format(tmp_path) for part in start)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root)))},
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == said


def test_a_reader_who_has_read_enough_gets_no_traceback():
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "list"], stdout=written, stderr=subprocess.PIPE, check=False
    )
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("layer", "count"), [("GRU", 108), ("LSTM", 144)])
def test_info_of_a_layer_that_makes_tensors_of_its_own(
    layer: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its state is on the CPU, where its parameters are on the meta device."""
    assert run(["info", f"torch.nn.{layer}", "--args", "3", "4", "--input", "2,2,3"]) == 0
    assert f"{count} parameters" in capsys.readouterr().out
