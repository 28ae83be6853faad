"""Random streams: the replay has what the forward drew, and the streams go on as without."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_trains,
    generator,
    net,
    rows,
    state_of,
)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_in_several_segments(way: Way) -> None:
    """dropout in several segments | exact | exact

    pytorch#14253: the same masks, and the same stream afterwards.
    """

    def program(call: Call) -> Any:
        parts = [net(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(rate)) for rate in (0.2, 0.7)]
        for part in parts:
            part[-1] = nn.Linear(4, 4)
        (x,) = rows()
        way(call, parts[1], way(call, parts[0], x)).square().sum().backward()
        return torch.rand(3), x.grad, [state_of(part) for part in parts]

    assert_exact(program)


@pytest.mark.parametrize("layer", [nn.RReLU(0.01, 0.9), nn.AlphaDropout(0.4), nn.Dropout1d(0.4)])
@pytest.mark.parametrize("way", WAYS)
def test_layers_that_draw(layer: nn.Module, way: Way) -> None:
    """RReLU, which writes its noise late | may lack it, pytorch#193671 | exact

    pytorch#193671: RReLU writes its noise after the operation has saved it.
    """
    assert_trains(lambda: net(nn.Linear(4, 4), layer, nn.Linear(4, 4)), way=way)


shared = generator()


class Drawing(nn.Module):
    """Multiplies by noise of a generator, which subclasses find in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.start()

    def start(self) -> None:
        self.generator = generator(3)

    def noise(self, y: Tensor) -> Tensor:
        return torch.rand(y.shape, generator=self.generator)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.tanh(y * self.noise(y))


class InADict(Drawing):
    def start(self) -> None:
        self.generators = {"noise": [generator(3)]}

    def noise(self, y: Tensor) -> Tensor:
        return torch.rand(y.shape, generator=self.generators["noise"][0])


class Global(Drawing):
    def start(self) -> None:
        shared.manual_seed(3)

    def noise(self, y: Tensor) -> Tensor:
        return torch.rand(y.shape, generator=shared)


class InPlace(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        return torch.empty_like(y).bernoulli_(0.6, generator=self.generator)


class ByPlace(Drawing):
    """Of this operator the generator is no keyword."""

    def noise(self, y: Tensor) -> Tensor:
        return torch.poisson(torch.full_like(y, 3.0), self.generator)


class OfPython(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        return torch.full_like(y, random.random())


class OfPythonsOwn(Drawing):
    def start(self) -> None:
        self.stream = random.Random(4)

    def noise(self, y: Tensor) -> Tensor:
        return torch.full_like(y, self.stream.random())


class OfNumpy(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        return torch.from_numpy(numpy.random.rand(*y.shape)).float()


class OfNumpysOwn(Drawing):
    def start(self) -> None:
        self.stream = numpy.random.default_rng(4)

    def noise(self, y: Tensor) -> Tensor:
        return torch.from_numpy(self.stream.random(tuple(y.shape))).float()


class Layerdrop(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(6):
            y = torch.tanh(self.linear(y)) if random.random() < 0.5 else y * 1.5
        return y


class Forked(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return torch.rand_like(y)


class ForkedAndSeeded(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        first = torch.rand_like(y)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return first * torch.rand_like(y)


class Seeding(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        first = torch.rand_like(y)
        torch.manual_seed(11)
        return first * torch.rand_like(y)


class WithoutGradients(Drawing):
    def noise(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.gumbel_softmax(torch.randn_like(y), hard=True) + 0.1


KINDS = [
    Drawing, InADict, Global, InPlace, ByPlace, OfPython, OfPythonsOwn, OfNumpy, OfNumpysOwn,
    Layerdrop, Forked, ForkedAndSeeded, Seeding, WithoutGradients,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_streams_of_every_kind(kind: type[nn.Module], way: Way) -> None:
    """Python's and NumPy's `random` | other numbers; drawn twice | drawn once

    preserve_rng_state knows torch's default generators only; layerdrop of transformers.
    """
    assert_trains(kind, way=way)


@pytest.mark.parametrize("kind", [OfPythonsOwn, OfNumpysOwn])
def test_a_stream_of_its_own_goes_on_as_without(kind: type[Drawing]) -> None:
    """a random stream of your own making | other numbers; drawn twice | drawn once

    The object's own state after the backward.
    """

    def program(call: Call) -> Any:
        model: Any = kind()
        call(model, *rows()).sum().backward()
        return model.stream.random()

    assert_exact(program)


@pytest.mark.parametrize("where", ["argument", "keyword", "list", "closure"])
def test_a_generator_that_is_passed(where: str) -> None:
    """a `torch.Generator` of your own | other numbers; advances twice | exact

    A generator as an argument, or as a variable of a closure.
    """

    def program(call: Call) -> Any:
        own = generator(5)

        def draw(x: Tensor, other: Any = None, *, keyword: Any = None) -> Tensor:
            found = keyword or (other[0] if isinstance(other, list) else other) or own
            return torch.tanh(x * torch.rand(x.shape, generator=found)).exp()

        (x,) = rows()
        other = generator(6)
        places = {"argument": other, "list": [other]}
        keywords = {"keyword": other} if where == "keyword" else {}
        call(draw, x, places.get(where), **keywords).sum().backward()
        return x.grad, own, other

    assert_exact(program)


@pytest.mark.parametrize("between", ["draw", "seed", "nothing"])
def test_streams_that_move_before_the_backward(between: str) -> None:
    """seeds set before `backward()` | exact | exact

    Numbers drawn, or streams seeded, between forward and backward.
    """

    def program(call: Call) -> Any:
        model = net(nn.Dropout(0.5), OfPython(), OfNumpy(), Drawing())
        loss = call(model, *rows()).square().sum()
        if between == "draw":
            torch.rand(5), random.random(), numpy.random.rand(2)
            torch.rand(3, generator=model[5].generator)
        elif between == "seed":
            torch.manual_seed(9), random.seed(9), numpy.random.seed(9)
            model[5].generator.manual_seed(9)
        loss.backward()
        return state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_attention(rate: float) -> None:
    """The kernel of scaled_dot_product_attention depends on the grad mode."""

    def program(call: Call) -> Any:
        x = torch.randn(2, 2, 16, 8).requires_grad_()
        layer = nn.Linear(8, 24)

        def function(x: Tensor) -> Tensor:
            query, key, value = layer(x).chunk(3, -1)
            return F.scaled_dot_product_attention(query, key, value, dropout_p=rate)

        call(function, x).square().sum().backward()
        return x.grad, state_of(layer)

    assert_exact(program)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_transformer_encoder_layers(training: bool, way: Way) -> None:
    """In eval mode the layer takes a fast path when no gradient is needed."""

    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True).train(training)

    assert_trains(make, lambda: [torch.randn(2, 5, 8).requires_grad_()], way)


def test_lstm_with_dropout_between_its_layers() -> None:
    """Language models: (h, c) in and out, in chunks of time."""

    def program(call: Call) -> Any:
        lstm, carried, total = nn.LSTM(4, 5, 2, dropout=0.4), None, torch.zeros(())
        inputs = [torch.randn(3, 2, 4).requires_grad_() for _ in range(3)]
        for x in inputs:
            output, carried = call(lstm, x, carried)
            total = total + output.square().sum()
        total.backward()
        return total, state_of(lstm), [x.grad for x in inputs]

    assert_exact(program)


def test_threads_that_train_at_once_draw_and_draw_again_one_at_a_time() -> None:
    """They share the CPU's stream, which a replay sets to an earlier state and back."""

    # an initialization draws outside of segments
    models = [
        nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
        for _ in range(4)
    ]

    def trains(seed: int) -> None:
        model, x = (
            models[seed],
            torch.rand(4000, 8, generator=torch.Generator("cpu").manual_seed(seed)),
        )
        for _ in range(100):
            # a mask that differs is noticed in the backward
            zoo.recompute(model, x).tanh().sum().backward()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            for done in [executor.submit(trains, seed) for seed in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
