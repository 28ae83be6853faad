"""Processes that torchrun started each report, in folders of their own, and fail together."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import multiprocessing

from zoo.cli.ranks import in_ranks, is_one_of_many


def told(arguments: Sequence[str]) -> int:
    print(" ".join(arguments))
    print("and a complaint", file=sys.stderr)
    return int(os.environ["RANK"])


def process(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "4,7",
    }  # fmt: skip
    assert is_one_of_many()
    with open(f"{folder}/{rank}", "w") as file:
        sys.stdout = sys.stderr = file
        code = in_ranks(["--model", "resnet18", "--output", "there"], "compare", told)
    Path(f"{folder}/code{rank}").write_text(f"{code} {os.environ['CUDA_VISIBLE_DEVICES']}")


def test_each_process_reports_in_turn(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(process, (port, str(tmp_path)), nprocs=2)
    words, others = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert not others
    first, second = words.split("rank 1 of 2\n")
    for rank, part in enumerate((first, second)):
        assert f"--model resnet18 --output there --output there{os.sep}rank{rank}" in part
        assert "and a complaint" in part
    codes = [(tmp_path / f"code{rank}").read_text() for rank in range(2)]
    assert codes == ["1 4", "1 7"]


@pytest.mark.parametrize("world", ["", "1"])
def test_one_process_is_not_one_of_many(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert not is_one_of_many()
