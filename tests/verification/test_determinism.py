"""Deterministic algorithms are in force inside of the block alone, however it ends."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import images
from zoo._torch import compiler_settings
from zoo.errors import DeterminismError
from zoo.verification.determinism import CUBLAS, deterministic_algorithms

CUDNN = torch.backends.cudnn


def settings() -> dict[str, Any]:
    return {
        "mode": torch.get_deterministic_debug_mode(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "compiler": compiler_settings().deterministic,
        "benchmark": CUDNN.benchmark,
        "cudnn": CUDNN.deterministic,
        "cublas": os.environ.get(CUBLAS),
    }


@pytest.fixture(params=["torch's own", "a user's"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was set before, by torch or by a user."""
    own = request.param == "torch's own"
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", own)
    if own:
        monkeypatch.delenv(CUBLAS, raising=False)
    else:
        monkeypatch.setenv(CUBLAS, ":4096:2")
        torch.use_deterministic_algorithms(True, warn_only=True)
    with CUDNN.flags(benchmark=not own):
        yield settings()
    torch.use_deterministic_algorithms(False)


def test_all_that_torch_needs_is_set_inside(before: dict[str, Any]) -> None:
    with deterministic_algorithms():
        assert settings() == {
            "mode": 2,
            "fills": before["fills"],
            "compiler": True,
            "benchmark": False,
            "cudnn": True,
            "cublas": ":4096:8",
        }
    assert settings() == before


def test_a_workspace_that_serves_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with deterministic_algorithms():
        assert os.environ[CUBLAS] == ":16:8"
    assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("fault", [ValueError, RuntimeError, KeyboardInterrupt, SystemExit])
def test_all_is_restored_after_what_ends_the_block(
    before: dict[str, Any], fault: type[BaseException]
) -> None:
    with pytest.raises(fault, match=r"^here$"), deterministic_algorithms():
        raise fault("here")
    assert settings() == before


def test_all_is_restored_where_one_cannot_be_set(
    before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "use_deterministic_algorithms", interrupted)
        with pytest.raises(KeyboardInterrupt), deterministic_algorithms():
            pass
    assert settings() == before


def test_nothing_is_set_where_it_is_not_wanted(before: dict[str, Any]) -> None:
    with deterministic_algorithms(False):
        assert settings() == before


class Puts(nn.Module):
    """Uses an operator without a deterministic algorithm, also on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.put(x, torch.tensor([1]), torch.ones(1))


def forward() -> None:
    Puts()(images())


def backward() -> None:
    x = images().requires_grad_()
    x.register_hook(Puts())
    x.sum().backward()


def wrapped() -> None:
    try:
        forward()
    except RuntimeError as error:
        raise ValueError("Net does not take these inputs") from error


@pytest.mark.parametrize("uses", [forward, backward, wrapped])
def test_an_operator_that_has_none_is_named_in_one_sentence(
    before: dict[str, Any], uses: Any
) -> None:
    with (
        pytest.raises(
            DeterminismError,
            match=r"^torch has no deterministic algorithm for put_, which deterministic=True "
            r"\(--deterministic\) needs: leave that out, or have the model compute",
        ),
        deterministic_algorithms(),
    ):
        uses()
    assert settings() == before
