"""Runs a small program plainly and through `zoo.recompute`, and compares all that it leaves.

    assert_exact(lambda call: [call(model, x), ...])

A program gets `call`, calls its segments by it, and returns what it wants compared. Compared beside
that are the streams of torch, Python and NumPy. Both runs start from the same seed.
"""

import dataclasses
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoo

Call = Callable[..., Any]
Program = Callable[[Call], Any]
Way = Callable[..., Any]

PLAIN = int | float | str | bytes | frozenset | torch.Size | torch.dtype | torch.device
COPIES: list[tuple[type, Callable[[Any], Any]]] = [
    (numpy.ndarray, numpy.copy),
    (set, set),
    (torch.Generator, torch.Generator.get_state),
    (random.Random, random.Random.getstate),
]


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the function: the baseline."""
    return function(*args, **kwargs)


def assert_exact(program: Program) -> None:
    """Asserts that a program leaves the same bits with recomputation as without."""
    expected = outcome(program, plain)
    compare(outcome(program, zoo.recompute), expected)


def assert_trains(
    make: Callable[[], nn.Module],
    batch: Callable[[], Sequence[Any]] | None = None,
    way: Way | None = None,
    steps: int = 3,
) -> None:
    """Asserts that a model trains the same bits with recomputation as without."""
    assert_exact(lambda call: train(call, make(), batch or rows, way or module, steps))


def outcome(program: Program, call: Call) -> dict[str, Any]:
    """Returns what a program returns, and where it leaves the random streams."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    result = frozen(program(call))
    return {
        "result": result,
        "torch": frozen(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": frozen(numpy.random.get_state()),
    }


def train(
    call: Call, model: nn.Module, batch: Callable[[], Sequence[Any]], way: Way, steps: int
) -> list[Any]:
    """Trains and returns, per step: output, loss, gradients of inputs, state of the model."""
    record: list[Any] = []
    optimizer: Any = None
    for _ in range(steps):
        inputs = batch()
        output = way(call, model, *inputs)
        loss = output.float().square().mean()
        if optimizer is None:  # a lazy model has its parameters only now
            optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, foreach=False)
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite()
        gradients = [value.grad for value in inputs if isinstance(value, Tensor)]
        record.append(frozen([output, loss, gradients, state_of(model)]))
        optimizer.step()
    return [*record, state_of(model)]


class Counting(TorchFunctionMode):
    """Counts the functions that are called around it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Copies parameters, gradients, buffers, flags and public attributes."""
    return {
        "parameters": frozen(dict(model.named_parameters())),
        "gradients": gradients(model),
        "buffers": frozen(dict(model.named_buffers())),
        "attributes": {
            name: {key: frozen(value) for key, value in vars(part).items() if key[0] != "_"}
            for name, part in model.named_modules()
        },
    }


def gradients(model: nn.Module) -> dict[str, Any]:
    """Copies the gradients of the parameters."""
    return {name: frozen(value.grad) for name, value in model.named_parameters()}


def frozen(value: Any) -> Any:
    """Copies a value deeply, so that later changes do not reach it and it can be compared."""
    if isinstance(value, Tensor):
        with torch.utils._python_dispatch._disable_current_modes():
            return value.detach().clone(), value.requires_grad
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


def compare(found: Any, expected: Any, where: str = "") -> None:
    """Asserts that two frozen values agree in every bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
        assert expected.layout != torch.strided or found.stride() == expected.stride(), where
    elif isinstance(expected, numpy.ndarray):
        assert (found == expected).all(), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            compare(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            compare(found[number], value, f"{where}.{number}")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), where
    else:
        assert found == expected, where


def module(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over the module itself."""
    return call(model, *inputs)


def closure(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over a function that has the module in its closure."""

    def function(*inputs: Any) -> Any:
        return model(*inputs)

    return call(function, *inputs)


def method(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over a method of an object that holds the module."""
    return call(_Holder(model).run, *inputs)


def nested(call: Call, model: nn.Module, *inputs: Any) -> Any:
    """Hands over a function with a segment inside."""
    return call(lambda *inputs: call(model, *inputs).sin(), *inputs)


WAYS = [module, closure, method, nested]


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


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, *inputs: Any) -> Any:
        return self.model(*inputs)


def rows(count: int = 6) -> list[Tensor]:
    """(count, 4) whose columns and rows differ in scale, so that wrong statistics show."""
    scale = torch.tensor([1.0, 3.0, 10.0, 0.3])
    shift = torch.arange(count, dtype=torch.float32).view(-1, 1)
    return [(torch.randn(count, 4) * scale + shift).requires_grad_()]


def images() -> list[Tensor]:
    """(3, 4, 5, 5) whose channels and samples differ in scale."""
    scale = torch.tensor([1.0, 3.0, 10.0, 0.3]).view(1, -1, 1, 1)
    shift = torch.arange(3.0).view(-1, 1, 1, 1)
    return [(torch.randn(3, 4, 5, 5) * scale + shift).requires_grad_()]


def net(*middle: nn.Module) -> nn.Sequential:
    """A network of rows with these layers in its middle, and nonlinear around them."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *middle, nn.Tanh(), nn.Linear(4, 3))
