"""What the tests share: run a program or train a model twice, and compare every bit that is left.

    assert_exact(lambda call: [call(model, x), ...])
    assert_same(train(zoo.checkpoint(make()), batch), train(make(), batch))

A program gets `call`, calls its segments by it, and returns what it wants compared. Compared beside
that are all random streams. Both runs start from the same seed.
"""

import dataclasses
import functools
import importlib
import importlib.util
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoo
from zoo.api.track import CopiedStep, mean_of
from zoo.engine.devices import read_streams
from zoo.invocation import Invocation
from zoo.profiling.peak_memory import measure_step
from zoo.verification.state_comparison import record, same_bits

Record = dict[str, Any]
Call = Callable[..., Any]
Program = Callable[[Call], Any]
Way = Callable[..., Any]

# `make oldest` and `make newest` run where `pip install .` brought no extras
has_numpy = importlib.util.find_spec("numpy") is not None
needs_numpy = pytest.mark.skipif(not has_numpy, reason="planning for a budget needs NumPy")
numpy: Any = importlib.import_module("numpy") if has_numpy else None
PLAIN = int | float | str | bytes | frozenset | torch.Size | torch.dtype | torch.device
COPIES: list[tuple[type, Callable[[Any], Any]]] = [
    (set, set),
    (torch.Generator, torch.Generator.get_state),
    (random.Random, random.Random.getstate),
    *([(numpy.ndarray, lambda array: (str(array.dtype), array.tolist()))] if has_numpy else []),
]


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the function: the baseline."""
    return function(*args, **kwargs)


def assert_exact(program: Program) -> None:
    """Asserts that a program leaves the same bits with recomputation as without."""
    expected = outcome(program, plain)
    assert_same(outcome(program, zoo.recompute), expected)


def assert_trains(
    make: Callable[[], nn.Module],
    batch: Callable[[], Sequence[Any]] | None = None,
    way: Way | None = None,
    steps: int = 3,
) -> None:
    """Asserts that a model trains the same bits with recomputation as without."""
    assert_exact(lambda call: train_by(call, make(), batch or rows, way or module, steps))


def outcome(program: Program, call: Call) -> Any:
    """Returns what a program returns, and where it leaves the random streams."""
    torch.manual_seed(0)
    random.seed(0)
    if has_numpy:
        numpy.random.seed(0)
    return frozen([program(call), read_streams()])


def train(
    model: nn.Module,
    inputs: Callable[[], Sequence[Any]],
    steps: int = 3,
    forward: Callable[..., Any] | None = None,
    seed: int | None = 0,
) -> Record:
    """Trains and records what each step leaves: outputs, loss, gradients, state, random streams."""
    if seed is not None:
        torch.manual_seed(seed)
    optimizer: Any = None
    records: Record = {}
    for step in range(steps):
        batch = inputs()
        output = (forward or model)(*batch)
        if optimizer is None:  # a lazy model has its parameters only now
            optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, foreach=False)
        optimizer.zero_grad()
        loss = output.float().square().mean()
        loss.backward()
        assert loss.isfinite()
        records |= everything(model, f"{step} ", batch, output, loss)
        optimizer.step()
    return records | everything(model, "end ")


def train_by(
    call: Call, model: nn.Module, inputs: Callable[[], Sequence[Any]], way: Way, steps: int
) -> list[Any]:
    """Trains a model that a program hands over in some way; returns what each step leaves."""
    forward = functools.partial(way, call, model)
    return [train(model, inputs, steps, forward, None), state_of(model)]


def everything(
    model: nn.Module, prefix: str = "", inputs: Sequence[Any] = (), outputs: Any = (),
    loss: Any = None,
) -> Record:  # fmt: skip
    """Copies what `zoo.verify` compares, but for private attributes, which a compiler may add."""
    return {
        f"{prefix}{kind} {name}": frozen(value)
        for (kind, name), value in record(model, inputs, outputs, loss, read_streams()).items()
        if kind != "attribute" or not name.rpartition(".")[2].startswith("_")
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    """Copies the state of a model, and whatever its modules have as public attributes."""
    attributes = {
        f"{name}.{key}": frozen(value)
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if key[0] != "_"
    }
    recorded = record(model, (), (), torch.zeros(()), {})
    tensors = {" ".join(key): frozen(v) for key, v in recorded.items() if key[0] != "attribute"}
    return {"attributes": attributes, **tensors}


def gradients(model: nn.Module) -> dict[str, Any]:
    """Copies the gradients of the parameters."""
    return {name: frozen(value.grad) for name, value in model.named_parameters()}


def frozen(value: Any) -> Any:
    """Copies a value deeply, so that later changes do not reach it and it can be compared."""
    if isinstance(value, Tensor):
        with torch.utils._python_dispatch._disable_current_modes():
            return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: frozen(part) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        return [frozen(part) for part in value]
    for kind, copied in COPIES:
        if isinstance(value, kind):
            return copied(value)
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, frozen(vars(value))]
    return value if value is None or isinstance(value, PLAIN) else type(value).__name__


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two tensors agree in every bit, in strides, and in whether they train."""
    if actual.layout is not expected.layout or actual.requires_grad is not expected.requires_grad:
        return False
    if expected.is_nested:
        actual, expected = actual.detach().to_dense(), expected.detach().to_dense()
    if expected.layout is torch.strided and actual.stride() != expected.stride():
        return False
    return same_bits(expected, actual)


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Asserts that two frozen values agree in every bit."""
    assert type(actual) is type(expected), where
    if isinstance(expected, Tensor):
        assert is_same(actual, expected), f"{where}: {actual} instead of {expected}"
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{where}: {actual.keys() ^ expected.keys()}"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(actual[number], value, f"{where}.{number}")
    else:
        # a float that is not a number is not itself
        assert repr(actual) == repr(expected) if isinstance(expected, float) else actual == expected


class Counting(TorchFunctionMode):
    """Counts the functions that are called around it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def module(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over the module itself."""
    return call(model, *inputs)


def nested(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over a function with a segment inside."""
    return call(lambda *inputs: call(model, *inputs).sin(), *inputs)


WAYS = [module, nested]


def elsewhere(function: Callable[[], object]) -> None:
    """Calls a function on another thread, where modes of this one see nothing, and waits for it."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Forward(nn.Module):
    """A function as a module, with the modules that it calls."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def rows(count: int = 6) -> list[Tensor]:
    """(count, 4) whose columns and rows differ in scale, so that wrong statistics show."""
    scale = torch.tensor([1.0, 3.0, 10.0, 0.3])
    shift = torch.arange(count, dtype=torch.float32).view(-1, 1)
    return [(torch.randn(count, 4) * scale + shift).requires_grad_()]


def pictures() -> list[Tensor]:
    """A batch of small images, which wants a gradient."""
    return [images(3, size=5).requires_grad_()]


def net(*middle: nn.Module) -> nn.Sequential:
    """A network of rows with these layers in its middle, and nonlinear around them."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *middle, nn.Tanh(), nn.Linear(4, 3))


class ResidualBlock(nn.Module):
    """All that recomputation can get wrong: statistics, masks, skips, writes in place."""

    def __init__(self, channels: int, rate: float, momentum: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, momentum=momentum)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu_(self.norm(self.conv(x)))) + x


class Residuals(nn.Module):
    """A small model of blocks."""

    def __init__(self, blocks: int = 3, channels: int = 4, rate: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ResidualBlock(channels, rate, None if number % 2 else 0.1) for number in range(blocks)
        )
        self.fc = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


def images(count: int = 4, channels: int = 4, size: int = 6) -> Tensor:
    """Batches whose channels and samples differ in scale, so that wrong statistics show."""
    scale = torch.tensor([1.0, 10.0, 100.0, 0.1])[:channels].view(1, -1, 1, 1)
    shift = torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1)
    return torch.randn(count, channels, size, size) * scale + shift


def generator(seed: int = 0) -> torch.Generator:
    """Returns a random stream for the device that tests run on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def peak_by_own_plan(model: nn.Module, x: Tensor, make: Any) -> int:
    """The allocator's peak bytes in the second training step of a model, by the plan in force."""
    optimizer = make(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    return measure_step(step, model, optimizer, [x]).peak


def real_peak(
    model: nn.Module, inputs: Any, make: Any, loss: Any = None, *, plan: Any = None
) -> int:
    """The allocator's peak bytes in a steady training step of a copy of a model."""
    step = CopiedStep(model, Invocation.of(inputs), make, loss or mean_of, fake=False)
    return step.peak(plan)
