"""Streams of the software accelerator: in every order a program that waits gets its numbers.

One that leaves out a wait, or frees memory that a copy still uses, gets others in some order.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import software

KIND = torch.get_default_device().type
ORDERS = [("late", 0), ("early", 0), *(("random", seed) for seed in range(8))]
# what the program below waits for, and when it frees what it has copied
RULES = (
    "kernels before the copy out", "the copy out before memory is freed",
    "kernels before the copy back", "the copy back", "the copy back before its slab is reused",
)  # fmt: skip

pytestmark = pytest.mark.skipif(KIND != software.NAME, reason="needs pytest --device soft")


@pytest.fixture
def module() -> Iterator[Any]:
    module = torch.get_device_module(KIND)
    yield module
    module.set_order("synchronous")


def swapped(left_out: str | None) -> Tensor:
    """Copies a tensor to the host and back beside kernels; one rule is not kept."""
    main, out, back = torch.accelerator.current_stream(), torch.Stream(KIND), torch.Stream(KIND)

    def wait(stream: torch.Stream, other: torch.Stream, rule: str) -> None:
        if rule != left_out:
            stream.wait_event(other.record_event())

    slab = torch.empty(64, device="cpu", pin_memory=True)
    x = torch.arange(64.0) * 3
    wait(out, main, RULES[0])
    with out:
        slab.copy_(x, non_blocking=True)
    wait(main, out, RULES[1])
    del x
    other = torch.ones(64) * 7
    room = torch.empty(64)
    # the stream of copies back knows of the copy out alone
    back.wait_event(out.record_event())
    wait(back, main, RULES[2])
    with back:
        room.copy_(slab, non_blocking=True)
    wait(out, back, RULES[4])
    with out:
        slab.copy_(other, non_blocking=True)
    wait(main, back, RULES[3])
    y = room + 1
    torch.accelerator.synchronize()
    return torch.stack([y, slab.to(KIND)])


def results(module: Any, left_out: str | None) -> list[bool]:
    expected = torch.stack([torch.arange(64.0) * 3 + 1, torch.full((64,), 7.0)]).cpu()
    found = []
    for order, seed in ORDERS:
        module.set_order(order, seed)
        found.append(torch.equal(swapped(left_out).cpu(), expected))
    return found


def test_a_program_that_waits_gets_its_numbers_in_every_order(module: Any) -> None:
    assert all(results(module, None))


@pytest.mark.parametrize("rule", RULES)
def test_a_program_that_does_not_wait_gets_others(module: Any, rule: str) -> None:
    assert not all(results(module, rule))


@pytest.mark.parametrize("order", ["late", "early"])
def test_pinned_memory_has_the_numbers_once_the_host_has_waited(module: Any, order: str) -> None:
    module.set_order(order)
    slab, x = torch.zeros(4, device="cpu", pin_memory=True), torch.ones(4)
    main = torch.accelerator.current_stream()
    with torch.Stream(KIND) as side:
        side.wait_stream(main)
        slab.copy_(x, non_blocking=True)
    assert slab.tolist() == [1.0 if order == "early" else 0.0] * 4
    while not side.query():
        pass
    assert slab.tolist() == [1.0] * 4


def test_freed_memory_is_given_out_again_at_once(module: Any) -> None:
    module.set_order("late")
    x = torch.ones(1000)
    place = x.data_ptr()
    del x
    y = torch.empty(1000)
    assert y.data_ptr() == place
    assert y.isnan().all()
