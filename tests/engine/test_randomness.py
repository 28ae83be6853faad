"""NumPy's default stream: its state is what NumPy says it is, and is read only when it moved."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.engine.pitfalls.program import Call, assert_exact, compare, frozen, rows
from zoo.engine import randomness
from zoo.engine.randomness import _NumpyStream, _words_of, read_streams, sources


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    """Puts back the generator behind NumPy's functions, and where it stood."""
    generator, state = numpy.random.get_bit_generator(), numpy.random.get_state()
    yield
    numpy.random.set_bit_generator(generator)
    numpy.random.set_state(state)


MOVES: list[Callable[[], object]] = [
    lambda: None,
    numpy.random.rand,
    numpy.random.randn,
    numpy.random.randn,
    lambda: None,
    lambda: numpy.random.rand(1000),
    lambda: numpy.random.seed(7),
    lambda: numpy.random.set_bit_generator(numpy.random.MT19937(1)),
    numpy.random.randn,
    lambda: numpy.random.set_bit_generator(numpy.random.MT19937(1)),
]


@pytest.mark.parametrize("readable", [True, False])
def test_its_state_is_what_numpy_says(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal variates come in pairs, whose second is held back: the words do not show it."""
    if not readable:
        monkeypatch.setattr(randomness, "_words_of", lambda generator: None)
    stream = _NumpyStream(numpy.random)
    for move in MOVES:
        move()
        compare(frozen(stream.read()), frozen(numpy.random.get_state()))


def test_its_state_is_read_only_when_it_moved() -> None:
    stream = _NumpyStream(numpy.random)
    numpy.random.seed(7)
    before = stream.read()
    assert stream.read() is before
    numpy.random.rand()
    assert stream.read() is not before


def test_only_words_that_are_as_documented_are_read() -> None:
    generator: Any = numpy.random.MT19937(1)
    words = _words_of(generator)
    assert [*words][:624] == [*generator.state["state"]["key"]]
    assert words[624] == generator.state["state"]["pos"]
    assert _words_of(numpy.random.PCG64(1)) is None
    other = SimpleNamespace(state=numpy.random.MT19937(2).state, ctypes=generator.ctypes)
    assert _words_of(other) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_normal_variates_that_are_held_back(count: int) -> None:
    """Each segment draws some; an odd number leaves the second of a pair to the next one."""

    def noisy(x: Tensor) -> Tensor:
        return torch.tanh(x * torch.from_numpy(numpy.random.randn(count)).float().sum()).exp()

    def program(call: Call) -> Any:
        (x,) = rows()
        y = call(noisy, call(noisy, call(noisy, x)))
        y = call(lambda y: call(noisy, noisy(y)).sin(), y)
        y.sum().backward()
        return x.grad, numpy.random.randn()

    assert_exact(program)


def test_segments_share_the_states_of_streams_that_do_not_move() -> None:
    """5 KB for torch's, more for Python's and NumPy's: only a segment that draws pays for it."""

    def states() -> dict[str, Any]:
        return {source.name: state for source, state in read_streams(sources([], []))}

    before = states()
    assert all(state is before[name] for name, state in states().items())
    torch.rand(1)
    moved = [name for name, state in states().items() if state is not before[name]]
    assert moved == ["torch"]


def test_a_normal_variate_drawn_after_the_last_saved_tensor() -> None:
    """The second run stops before the draw; the held back half must not come back."""

    def program(call: Call) -> Any:
        (x,) = rows()
        numpy.random.randn()
        y = call(lambda x: x.sin() + numpy.random.randn(), x)
        call(torch.sin, y).sum().backward()
        return x.grad, numpy.random.randn()

    assert_exact(program)


def test_another_kind_of_generator_behind_numpys_functions() -> None:
    def program(call: Call) -> Any:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        (x,) = rows()
        y = call(lambda x: (x * numpy.random.rand()).sin().exp(), x)
        call(lambda y: (y * numpy.random.rand()).sin().exp(), y).sum().backward()
        found = x.grad, numpy.random.rand()
        numpy.random.set_bit_generator(numpy.random.MT19937(1))
        return found

    assert_exact(program)
