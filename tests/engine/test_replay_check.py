"""On an accelerator a replay that differs is noticed where a check is in force, without waiting."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.engine.kernels import replayed
from zoo.engine.replay_check import SAMPLE, checking, sample_of
from zoo.engine.segments import thread
from zoo.engine.unseen_writes import fingerprint

KIND = torch.get_default_device().type
pytestmark = pytest.mark.skipif(KIND == "cpu", reason="needs an accelerator: pytest --device soft")


@pytest.fixture(autouse=True)
def checks_replays() -> None:
    """None around those of these tests."""


class Differing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has the replays of an operator differ."""

    def __init__(self, name: str = "exp") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if thread.replaying and func.overloadpacket.__name__ == self.name:
            found.mul_(1.5)
        return found


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what reads numbers of a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = found if isinstance(found, tuple) else (found,)
        is_copy = any(isinstance(t, Tensor) and t.is_cpu for t in leaves)
        self.count += is_copy or not isinstance(found, (Tensor, tuple))
        return found


def loss_of(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return zoo.recompute(lambda x: x.sin().to(dtype).exp().cos(), x).float().sum()


def numbers(*size: int) -> Tensor:
    return torch.rand(*size, requires_grad=True)


@pytest.mark.parametrize("size", [(1,), (3,), (5, 7), (200, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_that_differs_is_an_error_at_the_end(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = numbers(*size)

    def steps() -> None:
        with zoo.check_replays():
            with Differing():
                loss_of(x, dtype).backward()
            # until then nothing is said
            assert x.grad is not None

    tensor = f"a replayed tensor {size} {dtype} of aten.exp.default on {KIND}:0 has other numbers"
    with pytest.raises(zoo.RecomputeError, match=re.escape(tensor)):
        steps()


def test_a_replay_that_is_right_is_no_error() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout()
    ).to(memory_format=torch.channels_last)
    with zoo.check_replays(every=1):
        for _ in range(3):
            x = torch.rand(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
            zoo.recompute(lambda x: zoo.recompute(model, x.sin()).sin(), x).sum().backward()


def test_without_a_check_nothing_is_noticed_and_no_kernel_is_added() -> None:
    with Differing():
        loss_of(numbers(9)).backward()
    assert fingerprint(numbers(9)) is None


def test_flags_are_read_after_every_nth_backward() -> None:
    with zoo.check_replays(every=3), Differing():
        loss_of(numbers(9)).backward()
        loss_of(numbers(9)).backward()
        third = loss_of(numbers(9))
        with pytest.raises(zoo.RecomputeError, match=r"of aten.exp.default"):
            third.backward()
    with zoo.check_replays():
        loss_of(numbers(9)).backward()


def test_a_difference_is_not_forgotten_when_the_next_replay_is_right() -> None:
    with checking() as check:
        for wrong in (False, True, False):
            with Differing() if wrong else replaying_as_it_is():
                loss_of(numbers(9)).backward()
    assert [found.operator for found in check.take()] == ["aten.exp.default"]
    assert not check.take()


def replaying_as_it_is() -> Any:
    return Differing("nothing")


def test_only_what_differs_is_named() -> None:
    x, y = numbers(9), numbers(4, 4)
    with checking() as check, Differing("cosh"):
        one, two = zoo.recompute(lambda x, y: (x.sin().exp(), y.cosh().exp()), x, y)
        (one.sum() + two.sum()).backward()
    found = check.take()
    # and what is made of it
    assert [one.operator for one in found] == ["aten.exp.default"]
    assert [one.shape for one in found] == [(4, 4)]


def test_a_backward_waits_for_nothing() -> None:
    with zoo.check_replays():
        loss = loss_of(numbers(300))
        with Waits() as waits:
            loss.backward()
    assert waits.count == 0


def test_a_replay_is_not_recorded_by_those_who_count_kernels() -> None:
    with zoo.check_replays():
        assert replayed(loss_of(numbers(9)).backward) == {"sin": 1, "exp": 1}


def test_a_write_that_torch_does_not_see_is_noticed() -> None:
    def foreign(x: Tensor) -> Tensor:
        y = x * 0.5
        with torch._C._DisableTorchDispatch():
            y.data.mul_(2)
        return y.exp().sin()

    with pytest.raises(zoo.RecomputeError, match="has other numbers"), zoo.check_replays():
        zoo.recompute(foreign, numbers(50)).sum().backward()


def test_a_block_that_fails_raises_its_own_error() -> None:
    def failing() -> None:
        with zoo.check_replays(), Differing():
            loss_of(numbers(9)).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with zoo.check_replays():
        loss_of(numbers(9)).backward()


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_every_is_a_number_of_backwards(every: Any) -> None:
    checks = zoo.check_replays(every=every)
    with pytest.raises(zoo.ArgumentError, match="every= is a number of backwards, 1 at least; got"):
        checks.__enter__()


@pytest.mark.parametrize("count", [1, 7, 16, 17, 40, 1000])
def test_a_sample_lies_in_its_tensor(count: int) -> None:
    base = torch.rand(count + 8, requires_grad=True)
    with checking():
        found = sample_of(base[5 : 5 + count])
    assert found is not None
    content = base[5 : 5 + count].detach().cpu().view(torch.uint8)
    assert len(found) == min(4 * count, SAMPLE)
    stride = 1 if 4 * count <= SAMPLE else ((4 * count - 1) // (SAMPLE - 1) - 1) | 1
    assert torch.equal(found.cpu(), content[::stride][:SAMPLE])


def test_what_has_gaps_has_no_sample() -> None:
    with checking():
        for tensor in (numbers(4, 4)[:, :2], numbers(0), numbers(1).expand(4)):
            assert sample_of(tensor) is None
        turned = sample_of(numbers(4, 4).t())
        assert turned is not None
        assert len(turned) == SAMPLE


def test_verify_names_a_replayed_tensor_whose_difference_reaches_nothing() -> None:
    """Its gradient is zero."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).exp().cos() * 0

    x = torch.rand(3, 4)
    assert zoo.verify(nn.Sequential(Dead()), x, "blocks").exact
    with Differing():
        report = zoo.verify(nn.Sequential(Dead()), x, "blocks")
    assert not report.exact
    assert "replayed tensor (3, 4) torch.float32 of aten.exp.default" in str(report)
