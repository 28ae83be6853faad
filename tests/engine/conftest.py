"""On an accelerator the replays of every test of the engine are compared with its forward."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

import zoo


@pytest.fixture(autouse=True)
def checks_replays() -> Iterator[None]:
    is_elsewhere = torch.get_default_device().type != "cpu"
    with zoo.check_replays() if is_elsewhere else contextlib.nullcontext():
        yield
