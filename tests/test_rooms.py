"""The rooms of the package are those that setup.cfg checks and that CONTRIBUTING.md shows."""

import ast
import configparser
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import zoo
from tests.mutants import guards
from zoo._torch import _private

ROOT = Path(__file__).parent.parent


def floors() -> list[set[str]]:
    """Returns the modules of each floor of setup.cfg, the lowest first."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:floors"]["layers"].split("\n")
    return [set(re.findall(r"\w+", layer)) for layer in reversed(layers) if layer]


def test_the_table_of_the_contributors_guide_is_that_of_the_linter() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)/?` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    shown = [{name for floor, name in rows if int(floor) == number} for number in range(len(rows))]
    assert [names for names in shown if names] == floors()


def test_each_module_has_a_floor() -> None:
    entries = [*(ROOT / "zoo").glob("*.py"), *(ROOT / "zoo").glob("*/__init__.py")]
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in entries}
    assert names - {"zoo"} == set().union(*floors())


def test_at_most_ten_files_lie_in_no_folder() -> None:
    assert len(list((ROOT / "zoo").glob("*.py"))) <= 10


def test_private_names_of_torch_are_in_one_file() -> None:
    private = re.compile(
        r"torch\._C\b|from torch\._|import torch\.[\w.]*\._|torch(\.\w+)*\.utils\._|"
        r"_execution_engine|_profiler_enabled"
    )
    found = {path.name for path in (ROOT / "zoo").rglob("*.py") if private.search(path.read_text())}
    assert found == {"_torch.py"}


def test_a_private_name_that_a_torch_lacks_is_named() -> None:
    with pytest.raises(ImportError, match=r"zoo uses torch\._C\._no_such_name, which torch \d"):
        _private("_C._no_such_name")


def test_each_mutant_still_changes_a_function() -> None:
    mutants = list(guards())
    assert len(mutants) > 150
    for mutant in mutants[::12]:
        before = ast.unparse(mutant.module)
        assert mutant.text() not in ("", before), mutant.name
        assert ast.unparse(mutant.module) == before


def test_no_two_classes_have_one_name() -> None:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "zoo").rglob("*.py"))
    names = Counter(n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_hidden_by_a_public_name() -> None:
    modules = {path.stem for path in (ROOT / "zoo").glob("*.py")}
    modules |= {path.parent.name for path in (ROOT / "zoo").glob("*/__init__.py")}
    assert modules.isdisjoint(zoo.__all__)


# prints for each of two models how many files of zoo have functions that its first step calls
WALKS = """
import os, sys, torch, zoo
from torch import nn

root, files = zoo.__path__[0], set()


def called(frame, event, argument):
    if frame.f_code.co_filename.startswith(root):
        files.add(frame.f_code.co_filename)


own = zoo.resnet18(checkpoint=True), lambda model: model
blocks = (nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3))
of_torch = nn.Sequential(*blocks), zoo.checkpoint
for model, start in own, of_torch:
    if not os.fork():
        sys.settrace(called)
        start(model)(torch.rand(2, 3, 32, 32)).sum().backward()
        sys.settrace(None)
        print(len(files), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_first_step_passes_few_files() -> None:
    # a coverage run's own trace function would be replaced here, so in a process of its own
    found = subprocess.run([sys.executable, "-c", WALKS], check=True, stdout=subprocess.PIPE)
    own, of_torch = map(int, found.stdout.split())
    assert 10 < own <= 42
    assert 10 < of_torch <= 46
