"""What a stranger's model does beside computing changes neither the exit code nor the JSON."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.test_results import records
from zoo.cli.main import run
from zoo.harness.results import Results

COMMANDS = {
    "info": [],
    "plan": ["--memory-budget", "1GiB"],
    "frontier": [],
    "anatomy": [],
    "max-batch": ["--memory-budget", "4KiB"],
    "verify": [],
}
# ends where `place` says; its linear layer works everywhere else
ENDING = """
import sys
import torch

if {place!r} == "import":
    {end}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        if {place!r} == "constructor":
            {end}

    def forward(self, x):
        if {place!r} == "forward":
            {end}
        return self.linear(x)
"""
SAYS = "called sys\\.exit\\({}\\), so there is no result"


@pytest.fixture
def model(monkeypatch, tmp_path, request):
    """Writes a module into the folder of the command and returns its import path."""

    def model(text):
        name = f"model_of_others_{abs(hash((request.node.name, text)))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        return f"{name}:Net"

    return model


@pytest.mark.parametrize("place", ["import", "constructor", "forward"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_ends_the_program_is_no_answer(command, model, name, place):
    path = model(ENDING.format(place=place, end="sys.exit(0)"))
    told = command(name, path, "--input", "2,3", *COMMANDS[name])
    assert (told.code, told.out) == (2, "")
    assert re.fullmatch(rf"zoo {name}: .*{SAYS.format(0)}.*\n", told.err), told.err


@pytest.mark.parametrize(
    ("end", "argument"),
    [
        ("sys.exit()", ""),
        ("sys.exit(False)", "False"),
        ("sys.exit(1)", "1"),
        ("sys.exit('please install foo')", "'please install foo'"),
        ("sys.exit([1, 2])", r"\[1, 2\]"),
        ("sys.exit('a' * 100_000)", r"'a+\.\.\.a+'"),
        ("import argparse; argparse.ArgumentParser().parse_args(['x'])", "2"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--help'])", "0"),
    ],
)
def test_the_argument_of_its_exit_is_repeated(command, model, end, argument):
    told = command("verify", model(ENDING.format(place="import", end=end)), "--input", "2,3")
    assert told.code == 2
    said = told.err.splitlines()[-1]
    assert re.fullmatch(f"zoo verify: .*{SAYS.format(argument)}.*", said), said
    assert len(said) < 400


def test_an_error_that_no_program_expects_is_a_sentence(command, model):
    end = "raise type('Stop', (BaseException,), {})('enough')"
    told = command("info", model(ENDING.format(place="constructor", end=end)), "--input", "2,3")
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "Stop: enough" in told.err


def test_a_traceback_shows_who_ended_the_program(model, monkeypatch):
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    path = model(ENDING.format(place="forward", end="sys.exit(0)"))
    with pytest.raises(Exception, match=r"sys\.exit\(0\)") as raised:
        run(["verify", path, "--input", "2,3"])
    assert isinstance(raised.value.__cause__, SystemExit)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["list", "--help"], ["list", "--json", "-h"],
                  ["compare", "--help"], ["compare", "--json", "--help"], ["--version"]],
)  # fmt: skip
def test_a_help_that_is_asked_for_is_an_answer(command, arguments):
    told = command(*arguments)
    assert (told.code, told.err) == (0, "")
    assert told.out


PRINTS = """
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        print("constructor")

    def forward(self, x):
        print("forward")
        return self.linear(x)
"""
# each in its own way, some of them past Python and one as the process ends
PRINTS_MORE = """
import atexit, ctypes, os, subprocess

print("import")
print("stream", file=sys.stdout)
sys.__stdout__.write("original\\n")
os.write(1, b"descriptor\\n")
subprocess.run(["echo", "program"], check=True)
ctypes.CDLL(None).puts(b"library")
atexit.register(print, "end")
"""
WORDS = {
    "import", "constructor", "stream", "original", "descriptor", "program", "library",
    "end",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_with_json_what_a_model_prints_goes_to_stderr(command, model, name):
    path = model(PRINTS)
    told = command(name, path, "--input", "2,3", *COMMANDS[name], "--json")
    assert told.code == 0
    assert json.loads(told.out)
    # a look ahead of a step is silent
    runs = name in ("anatomy", "verify", "max-batch")
    assert "constructor" in told.err.split()
    assert ("forward" in told.err.split()) is runs
    plainly = command(name, path, "--input", "2,3", *COMMANDS[name])
    assert ("forward" in plainly.out.splitlines()) is runs


def test_with_json_the_processs_stdout_is_one_document(model):
    path = model(PRINTS + PRINTS_MORE)
    asked = "-m", "zoo", "info", path, "--input", "2,3", "--json"
    done = python(*asked, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "Net"
    assert set(done.stderr.split()) >= WORDS


# runs commands one after the other, each in a process forked from one that has imported torch
FORKS = """
import json, os, runpy, sys
import zoo.cli.main

for arguments in json.loads(sys.argv[1]):
    if not os.fork():
        sys.argv[1:] = arguments
        runpy.run_module("zoo", run_name="__main__", alter_sys=True)
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="a file that is always full is Linux's")
def test_a_full_disk_behind_stdout_is_a_sentence(tmp_path):
    file = Results(tmp_path / "mine.jsonl")
    for record in records():
        file.append(record)
    asked_for = [["list"], ["list", "--json"], ["list", "--help"], ["report", str(tmp_path)]]
    with FULL.open("w") as full:
        done = python("-c", FORKS, json.dumps(asked_for), stdout=full)
    assert done.returncode == 0
    told = done.stderr.splitlines()
    for arguments, (said, code) in zip(
        asked_for, zip(told[::2], told[1::2], strict=True), strict=True
    ):
        assert code == "exit code 2"
        said_by = f"zoo {arguments[0]}: stdout cannot be written: No space left"
        assert said.startswith(said_by)


def python(*arguments, stdout):
    """Runs Python in a process of its own."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": root},
    )
