"""A result says where it was measured: code, device, threads, clock."""

import subprocess

import pytest
import torch

from zoo.harness import environment as module
from zoo.harness.environment import clock, commit, environment


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=A", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path, git("rev-parse", "--short=12", "HEAD")


def test_the_commit_is_that_of_the_code_and_tells_of_changes(repository):
    folder, head = repository
    commit.cache_clear()
    assert commit(folder / "package") == head
    commit.cache_clear()
    (folder / "package" / "code.py").write_text("2")
    assert commit(folder / "package") == f"{head}+changes"


def test_code_that_git_does_not_know_has_no_commit(repository):
    installed = repository[0] / "installed"
    installed.mkdir()
    commit.cache_clear()
    assert commit(installed) is None


def test_what_a_number_depends_on_is_there():
    found = environment("cpu")
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["device"]
    assert {"commit", "cores", "clock_mhz", "load", "python", "platform"} <= found.keys()


@pytest.mark.parametrize(("said", "expected"), [("1980", 1980.0), ("", None), ("[N/A]", None)])
def test_the_clock_of_a_gpu_is_asked_for_by_its_identity(monkeypatch, said, expected):
    asked = []
    monkeypatch.setattr(module, "_output", lambda *command: (asked.append(command), said)[1])
    device = type("Device", (), {"uuid": "abc"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    assert clock("cuda") == expected
    assert asked[0][-1] == "--id=GPU-abc"


def test_a_program_that_is_not_there_says_nothing():
    assert module._output("no-such-program-here") == ""
