"""A file of ours is replaced whole or stays as it was."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo.errors import FileError
from zoo.files import replaced_file, write_file

ROOT = Path(zoo.__file__).parent
# what goes on in a file, and what is no file
WRITING = {"files.py", "harness/results.py", "harness/processes.py", "profiling/isolation.py"}


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(_: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ends", "error", "text"),
    [
        (full, FileError, r"plan\.json' cannot be written: No space"),
        (interrupted, KeyboardInterrupt, "^$"),
    ],
)
def test_what_ends_writing_leaves_the_file_that_was_there(
    ends: Any,
    error: type[BaseException],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "plan.json"
    write_file(path, "earlier")
    monkeypatch.setattr("os.fsync", ends)
    with pytest.raises(error, match=text):
        write_file(path, "later" * 9)
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("earlier", [path])


def test_a_link_and_a_mode_stay_and_what_is_no_file_is_written_itself(tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "one", tmp_path / "link", tmp_path / "pipe"
    path.write_text("earlier")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, b"later")
    assert (path.read_text(), link.is_symlink()) == ("later", True)
    assert path.stat().st_mode & 0o777 == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "text")
    assert (os.read(reader, 9), pipe.is_fifo()) == (b"text", True)
    os.close(reader)
    with replaced_file(tmp_path / "new") as file:
        file.write(b"1")
        assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: No such file or directory"):
        write_file(tmp_path / "missing" / "plan.json", "")


def frontier() -> Any:
    return zoo.frontier(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.rand(4, 8))


SAVES: dict[str, Callable[[Path], object]] = {
    "a report": lambda path: zoo.plan(
        nn.Linear(8, 8), torch.rand(4, 8), memory_budget=1.0, optimizer="sgd"
    ).save(path),
    "a picture": lambda path: frontier().plot(path),
}


@pytest.mark.usefixtures("without_fork", "few_plans")
@pytest.mark.parametrize("name", SAVES)
def test_each_saves_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved.svg"
    SAVES[name](path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FileError, match="No space left"):
        SAVES[name](path)
    assert path.read_bytes() == before


def test_nothing_else_in_zoo_writes_a_file() -> None:
    writes = re.compile(r"\.write_(text|bytes)\(|open\([^)]*[\"'][wx]b?[\"']|savefig\((?!new|file)")
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    assert {name for name, text in files.items() if writes.search(text)} <= WRITING
