"""The rooms of the package are those that setup.cfg checks and that CONTRIBUTING.md shows."""

import configparser
import re
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, changed
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


def test_each_mutant_still_takes_a_guard_out_of_the_engine() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "zoo" / "engine" / mutant.file).read_text()
        assert changed(text, mutant) != text, mutant.guard
