"""Modules of torch's layers, drawn from a description: what nobody thought of writing down.

A description is plain data, so that Hypothesis can shrink it and a failing example can be read:

    layer     one module and its options; a convolution or norm may be followed by an in-place ReLU
    block     a module of layers in order; or an earlier block's layers once more
    model     blocks over a state, then a head that always trains

    state       a block takes           and returns
    plain       y                       layers(y)
    residual    y, skip                 layers(y), skip; a closing one adds them up, twice
    dense       mixture of all features layers(mixture), one more feature

Ingredients that a recomputation could move are listed apart, as `STATEFUL`. A drawn plan is fitted
to the steps of the drawn model (`tests.fuzz.plans`).
"""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import assume, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm as hooked_spectral_norm

import zoo
from tests.fuzz.plans import Shape, Stretched, shapes, stretched_plan
from tests.training import Record, assert_same, everything, images, train
from zoo.engine import segments
from zoo.layers.drop_path import DropPath
from zoo.planner.plan import Plan

CHANNELS, SIZE, CLASSES = 4, 6, 3
STEPS = 3
STATELESS = (
    "convolution", "linear", "batch_norm", "instance_norm", "layer_norm", "group_norm",
    "dropout", "channel_dropout", "drop_path", "rrelu", "activation",
)  # fmt: skip
STATEFUL = (
    "spectral_norm", "hooked_spectral_norm", "moving_average", "replaced_average", "counter",
    "log", "function_norm", "generator", "python_random",
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One module: its kind and options, whether ReLU follows in place, and how it is set."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    relu: bool = False
    frozen: bool = False
    evaluated: bool = False


@dataclass(frozen=True)
class DrawnBlock:
    """Layers in order, run `times` times; or those of block `again` instead."""

    layers: tuple[Layer, ...]
    again: int | None = None
    times: int = 1
    closes: bool = False


@dataclass(frozen=True)
class Description:
    """A model, its inputs and its plan, which is made ahead or by a first step block by block."""

    blocks: tuple[DrawnBlock, ...]
    plan: Plan
    cuts: tuple[float, ...]
    is_ahead: bool
    state: str
    axes: int
    dtype: torch.dtype
    autocast: bool
    input_gradient: bool
    tied: bool
    keeps_draws: bool


def layers(kinds: tuple[str, ...], axes: int) -> st.SearchStrategy[Layer]:
    """Draws layers of these kinds for signals (N, C, L) or images (N, C, H, W)."""
    return st.sampled_from(kinds).flatmap(lambda kind: _layers(kind, axes))


def _layers(kind: str, axes: int) -> st.SearchStrategy[Layer]:
    options = st.fixed_dictionaries({name: st.sampled_from(v) for name, v in _choices(kind)})
    relu = st.booleans() if kind in MAKES_NEW else st.just(False)
    evaluated = st.sampled_from([False, False, True]) if "norm" in kind else st.just(False)
    frozen = st.sampled_from([False, False, True])
    return st.builds(Layer, st.just(kind), options, relu, frozen, evaluated)


MAKES_NEW = {"convolution", "linear", "batch_norm", "instance_norm", "layer_norm", "group_norm"}


def _choices(kind: str) -> list[tuple[str, list[Any]]]:
    affine, momentum = ("affine", [True, False]), ("momentum", [0.1, 0.7, None])
    choices = {
        "convolution": [("bias", [True, False]), ("weight_norm", [False, False, True])],
        "batch_norm": [affine, momentum, ("track_running_stats", [True, True, False])],
        "instance_norm": [affine, ("momentum", [0.1, 0.7])],
        "layer_norm": [("elementwise_affine", [True, False])],
        "group_norm": [affine, ("num_groups", [1, 2])],
        "activation": [("name", ["relu", "gelu", "tanh", "prelu", "sigmoid"])],
    }
    rates = {"dropout", "channel_dropout", "drop_path", "generator", "python_random"}
    return choices.get(kind, [("rate", [0.1, 0.5])] if kind in rates else [])


@st.composite
def descriptions(draw: st.DrawFn, stateful: tuple[str, ...] = STATEFUL) -> Description:
    """Draws models of one to eight blocks and a head, with ingredients of `stateful` among them."""
    axes = draw(st.sampled_from([1, 2]))
    kinds = layers(STATELESS + stateful, axes)
    blocks: list[DrawnBlock] = []
    for number in range(draw(st.integers(1, 8))):
        times, closes = draw(st.sampled_from([1, 1, 1, 2])), draw(st.booleans())
        if number and draw(st.sampled_from([False, False, False, True])):
            blocks.append(DrawnBlock((), draw(st.integers(0, number - 1)), times, closes))
        else:
            drawn = draw(st.lists(kinds, min_size=1, max_size=3))
            blocks.append(DrawnBlock(tuple(drawn), None, times, closes))
    autocast = draw(st.sampled_from([False, False, True]))
    dtype = torch.float32 if autocast else draw(st.sampled_from([torch.float32, torch.float64]))
    return Description(
        tuple(blocks), *draw(shapes(most=12)), draw(st.sampled_from([False, False, False, True])),
        draw(st.sampled_from(["plain", "residual", "dense"])), axes, dtype, autocast,
        draw(st.booleans()), draw(st.sampled_from([False, False, True])), draw(st.booleans()),
    )  # fmt: skip


class Block(nn.Module):
    """Runs layers some times: y, and a skip if there is one, (N, C, ...) -> the same."""

    def __init__(self, layers: nn.Module, times: int, closes: bool) -> None:
        super().__init__()
        self.layers, self.times, self.closes = layers, times, closes

    def forward(self, y: Tensor, skip: Tensor | None = None) -> Any:
        for _ in range(self.times):
            y = self.layers(y)
        if skip is None:
            return y
        return (y + skip, y + skip) if self.closes else (y, skip)


class Drawn(nn.Module):
    """The model of a description: (N, C, L) or (N, C, H, W) -> (N, classes)."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.state = description.state
        self.blocks = nn.ModuleList()
        self.mixers = nn.ModuleList()
        for number, block in enumerate(description.blocks):
            if block.again is None:
                layers = nn.Sequential(*(build(v, description.axes) for v in block.layers))
            else:
                layers = self.blocks[block.again].layers
            self.blocks.append(Block(layers, block.times, block.closes))
            if self.state == "dense":
                inputs = (number + 1) * CHANNELS
                self.mixers.append(_convolution(description.axes)(inputs, CHANNELS, 1))
        self.head = nn.Linear(CHANNELS, CLASSES)
        if description.tied:
            self.tie()
        self.to(description.dtype)

    def tie(self) -> None:
        """Gives all plain convolutions the first one's weight."""
        plain = [
            module
            for module in self.blocks.modules()
            if type(module) in (nn.Conv1d, nn.Conv2d) and "weight" in module._parameters
        ]
        for module in plain:
            module.weight = plain[0].weight

    def forward(self, x: Tensor) -> Tensor:
        state = (x, x) if self.state == "residual" else (x,)
        for number, block in enumerate(self.blocks):
            if self.state == "dense":
                state = (*state, block(self.mixers[number](torch.cat(state, 1))))
            else:
                found = block(*state)
                state = found if isinstance(found, tuple) else (found,)
        features = torch.stack([value.to(self.head.weight.dtype) for value in state]).sum(0)
        return torch.tanh(self.head(features.flatten(2).mean(2)))


def build(layer: Layer, axes: int) -> nn.Module:
    """Builds a layer's module."""
    module = BUILDERS[layer.kind](axes, **layer.options)
    module.train(not layer.evaluated)
    module.requires_grad_(not layer.frozen)
    return nn.Sequential(module, nn.ReLU(inplace=True)) if layer.relu else module


def _convolution(axes: int) -> Callable[..., nn.Module]:
    return nn.Conv1d if axes == 1 else nn.Conv2d


def _build_convolution(axes: int, weight_norm: bool = False, **options: Any) -> nn.Module:
    module = _convolution(axes)(CHANNELS, CHANNELS, 3, padding=1, **options)
    return parametrizations.weight_norm(module) if weight_norm else module


def _build_activation(axes: int, name: str) -> nn.Module:
    kinds = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
    return kinds[name]() if name in kinds else nn.PReLU(CHANNELS)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "convolution": _build_convolution,
    "linear": lambda axes: nn.Linear(SIZE, SIZE),
    "batch_norm": lambda axes, **o: (nn.BatchNorm1d if axes == 1 else nn.BatchNorm2d)(
        CHANNELS, **o
    ),
    "instance_norm": lambda axes, **o: (nn.InstanceNorm1d if axes == 1 else nn.InstanceNorm2d)(
        CHANNELS, track_running_stats=True, **o
    ),
    "layer_norm": lambda axes, **o: nn.LayerNorm(SIZE, **o),
    "group_norm": lambda axes, num_groups, affine: nn.GroupNorm(
        num_groups, CHANNELS, affine=affine
    ),
    "dropout": lambda axes, rate: nn.Dropout(rate),
    "channel_dropout": lambda axes, rate: (nn.Dropout1d if axes == 1 else nn.Dropout2d)(rate),
    "drop_path": lambda axes, rate: DropPath(rate),
    "rrelu": lambda axes: nn.RReLU(),
    "activation": _build_activation,
    "spectral_norm": lambda axes: parametrizations.spectral_norm(_build_convolution(axes)),
    "hooked_spectral_norm": lambda axes: hooked_spectral_norm(_build_convolution(axes)),
    "moving_average": lambda axes: MovingAverage(),
    "replaced_average": lambda axes: ReplacedAverage(),
    "counter": lambda axes: Counter(),
    "log": lambda axes: Log(),
    "function_norm": lambda axes: FunctionNorm(),
    "generator": lambda axes, rate: OwnGenerator(rate),
    "python_random": lambda axes, rate: PythonRandom(rate),
}


class MovingAverage(nn.Module):
    """Scales channels by a moving average that it changes in place first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        self.move(x.detach().transpose(0, 1).flatten(1).mean(1).to(self.average.dtype))
        scale = 1 + self.average.tanh()
        return x * scale.view(-1, *[1] * (x.ndim - 2))

    def move(self, mean: Tensor) -> None:
        self.average.lerp_(mean, 0.3)


class ReplacedAverage(MovingAverage):
    """The same with a new tensor in the buffer's place each time."""

    def move(self, mean: Tensor) -> None:
        self.average = self.average.lerp(mean, 0.3)


class Counter(nn.Module):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Log(nn.Module):
    """Notes in a list what it saw, and scales by how much that was."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().float().abs().mean()))
        return x / len(self.seen)


class FunctionNorm(nn.Module):
    """Batch norm called as a function on buffers of a module that is no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("variance", torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


class OwnGenerator(nn.Module):
    """Drops values by a generator that it holds."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator) > self.rate
        return x * mask


class PythonRandom(nn.Module):
    """Skips itself by Python's `random`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * (1 + random.random()) if random.random() > self.rate else x.sigmoid()


def check(description: Description) -> int:
    """Trains the model and a copy by the plan; every bit must agree; returns the steps trained."""
    torch.manual_seed(1)
    model = Drawn(description)
    checkpointed = copy.deepcopy(model)
    expected = trained(model, description)
    finite = (v.isfinite().all() for v in expected.values() if isinstance(v, Tensor))
    # a comparison of what is not finite would show nothing: another case is drawn
    assume(all(finite))
    plan = put_in_force(checkpointed, description)
    # draws as small as these take fewer bytes than a random state and would all be kept
    largest = segments.PACKED_SIZE if description.keeps_draws else 0
    with mock.patch.object(segments, "PACKED_SIZE", largest):
        assert_same(trained(checkpointed, description), expected)
    if not _has(description, "python_random"):
        assert zoo.plan_of(checkpointed) == plan()
    zoo.uncheckpoint(checkpointed)
    assert_same(everything(checkpointed), everything(model))
    assert hooks(checkpointed) == hooks(model)
    return STEPS


def put_in_force(model: Drawn, description: Description) -> Callable[[], Plan]:
    """Puts the plan of a description in force; returns what returns it, fitted to the steps.

    A forward that reads data of a real step cannot be traced ahead: its plan is made after a first
    step, block by block.
    """
    shape = Shape(description.plan, description.cuts)
    if description.is_ahead and not _has(description, "log"):
        with isolated(), _autocast(description):
            steps = zoo.chain_of(model, _inputs(description)[0]).names
        plan = stretched_plan(shape, len(steps))
        zoo.checkpoint(model, plan)
        return lambda: plan
    option = Stretched(shape)
    option.put_in_force(model)
    return lambda: option.made[-1]


def _has(description: Description, kind: str) -> bool:
    return any(layer.kind == kind for block in description.blocks for layer in block.layers)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Starts random streams as `trained` does, and restores them."""
    before, own = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        random.setstate(own)


def _autocast(description: Description) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=description.autocast)


def trained(model: Drawn, description: Description) -> Record:
    """Trains for some steps and records them, and which buffers are the same tensors still."""
    random.seed(0)
    before = dict(model.named_buffers())

    def forward(x: Tensor) -> Tensor:
        with _autocast(description):
            result: Tensor = model(x)
        return result

    record = train(model, functools.partial(_inputs, description), STEPS, forward=forward)
    for name, buffer in model.named_buffers():
        record[f"the same tensor {name}"] = torch.tensor(buffer is before.get(name))
    return record


def hooks(model: nn.Module) -> list[int]:
    """Counts the hooks of each kind of each module."""
    parts = [vars(module) for module in model.modules()]
    return [len(value) for part in parts for name, value in part.items() if name.endswith("_hooks")]


def _inputs(description: Description) -> list[Tensor]:
    x = images(4, CHANNELS, SIZE) / 50
    x = x if description.axes == 2 else x[:, :, 0].contiguous()
    return [x.to(description.dtype).requires_grad_(description.input_gradient)]
