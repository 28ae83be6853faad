"""Runs command lines in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from zoo.cli.main import run


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def ask(*arguments: str) -> Told:
        code = run(arguments)
        told = capsys.readouterr()
        return Told(code, told.out, told.err)

    return ask
