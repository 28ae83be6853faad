"""A Ctrl-C at any line of a forward or a backward leaves the thread as it was."""

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import assert_same, frozen
from zoo._torch import count_dispatch_modes, excluded_keys, included_keys, top_saved_tensors_hooks
from zoo.engine.devices import DRAWING, read_streams
from zoo.engine.kernel_settings import read_settings
from zoo.engine.recompute import recorders
from zoo.engine.segments import thread

# rooms whose lines run in each step
ROOMS = ("/zoo/engine/", *(f"/zoo/tracing/{name}" for name in ("planned", "forward", "plan_cache")))


class Block(nn.Module):
    """Draws, normalizes, writes in place, and chooses its kernels by settings of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            h = self.norm(self.linear(x))
        finally:
            torch.use_deterministic_algorithms(False)
        return x + nn.functional.dropout(h.relu_(), 0.5)


class Nested(nn.Module):
    """Segments inside of segments, by `zoo.recompute`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return zoo.recompute(self.blocks[1], self.blocks[0](x) * 2)  # type: ignore[no-any-return]

        return zoo.recompute(inner, x).sin()  # type: ignore[no-any-return]


def planned() -> nn.Module:
    torch.manual_seed(0)
    return zoo.checkpoint(nn.Sequential(*(Block(4) for _ in range(2))), 2)


def nested() -> nn.Module:
    torch.manual_seed(0)
    return Nested()


def state_of_thread() -> dict[str, Any]:
    """Returns all that a forward or a backward changes while it runs."""
    return {
        "modes": count_dispatch_modes(),
        "hooks": top_saved_tensors_hooks(False),
        "keys": (str(included_keys()), str(excluded_keys())),
        "functions": (torch._C._get_torch_function_state(), torch._C._len_torch_function_stack()),
        "grad": torch.is_grad_enabled(),
        "settings": read_settings(),
        "thread": (thread.segment, thread.conductor, thread.replaying, thread.origin),
        "recording": recorders.mode.recording,
    }


def train(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.rand(6, 4, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, [p.grad for p in model.parameters()], read_streams()]


def batched(model: nn.Module) -> list[Any]:
    """Takes the gradients of several outputs by one backward under vmap."""
    torch.manual_seed(1)
    x = torch.rand(6, 4, requires_grad=True)
    out = model(x)
    vectors = torch.eye(4).reshape(4, 1, 4).expand(4, 6, 4)
    return [torch.autograd.grad(out, x, vectors, is_grads_batched=True), read_streams()]


@functools.cache
def is_in_rooms(file: str) -> bool:
    return any(room in file for room in ROOMS)


Line = tuple[CodeType, int]


class Interrupt:
    """Raises KeyboardInterrupt before a line of zoo's, the n-th that runs.

    Given one line it sees no other, which takes half the time.
    """

    def __init__(self, at: int, only: Line | None = None) -> None:
        self.at, self.only, self.places = at, only, list[Line]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        is_seen = self.is_in_rooms(code.co_filename) if self.only is None else code is self.only[0]
        return self.line if is_seen else None

    def is_in_rooms(self, file: str) -> bool:
        """Returns whether lines of a file are seen."""
        return is_in_rooms(file)

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Is called before each line of a function in the rooms."""
        if event == "line" and (self.only is None or frame.f_lineno == self.only[1]):
            self.places.append((frame.f_code, frame.f_lineno))
            if len(self.places) - 1 == self.at:
                raise KeyboardInterrupt
        return self.line

    def during(self, function: Callable[[], object]) -> None:
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)


# lines at which a test has interrupted a step, by what makes its model
interrupted: defaultdict[Callable[[], nn.Module], set[Line]] = defaultdict(set)


def last_times(
    make: Callable[[], nn.Module], function: Callable[[], object]
) -> Iterator[Interrupt]:
    """Yields what interrupts each line as it runs for the last time, but those of earlier tests."""
    every = Interrupt(-1)
    every.during(function)
    for line, times in Counter(every.places).items():
        if line not in interrupted[make]:
            interrupted[make].add(line)
            yield Interrupt(times - 1, line)


@pytest.mark.parametrize(("make", "train"), [(planned, train), (nested, train), (planned, batched)])
def test_an_interrupt_at_any_line_is_undone(
    make: Callable[[], nn.Module], train: Callable[[nn.Module], list[Any]]
) -> None:
    """Ctrl-C at any line | | modes and random state restored"""
    model = make()
    for _ in range(3):
        train(model)
    before, buffers = state_of_thread(), [buffer.clone() for buffer in model.buffers()]

    def step() -> list[Any]:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        return train(model)

    expected = frozen(step())
    for number, interrupt in enumerate(last_times(make, step)):
        interrupt.during(step)
        assert state_of_thread() == before, interrupt.only
        assert not DRAWING._is_owned(), "other threads would wait for ever"
        # a whole step takes long
        if number % 20 == 0:
            assert_same(frozen(step()), expected)
    assert_same(frozen(step()), expected)
