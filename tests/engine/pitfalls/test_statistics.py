"""Statistics and other buffers that a forward moves: moved once, and replayed as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.training import (
    WAYS,
    Call,
    Forward,
    Way,
    assert_exact,
    assert_trains,
    net,
    pictures,
    rows,
    state_of,
    train_by,
)


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_moves_once(way: Way) -> None:
    """BatchNorm's statistics and count | updated twice, pytorch#96136 | once

    pytorch#96136, pytorch#62471, efficient_densenet#73, YOLO-Master#262.
    """
    assert_trains(lambda: net(nn.BatchNorm1d(4)), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_a_cumulative_average_moves_once(way: Way) -> None:
    """BatchNorm with `momentum=None` | each batch averaged twice | once

    pytorch-pfn-extras#117: momentum=None averages over all batches.
    """
    assert_trains(lambda: net(nn.BatchNorm1d(4, momentum=None)), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_without_moving_statistics(way: Way) -> None:
    """Regression guard: frozen statistics, none, and no parameters."""
    assert_trains(lambda: net(nn.BatchNorm1d(4).eval()), way=way)
    assert_trains(lambda: net(nn.BatchNorm1d(4, track_running_stats=False)), way=way)
    assert_trains(lambda: net(nn.BatchNorm1d(4, affine=False)), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_instance_norm_moves_once(way: Way) -> None:
    """InstanceNorm with statistics | updated twice | once

    Fairscale's patch_batchnorm and pytorch-pfn-extras skip _InstanceNorm.
    """
    norm = nn.InstanceNorm2d
    assert_trains(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), norm(4, track_running_stats=True), nn.GELU()),
        pictures,
        way,
    )


@pytest.mark.parametrize("way", WAYS)
def test_statistics_move_once_without_gradients(way: Way) -> None:
    """fairscale#1035: recalibration of statistics in training mode under no_grad."""

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4))
        with torch.no_grad():
            output = way(call, model, *rows())
        return output, state_of(model), train_by(call, model, rows, way, 1)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("iterations", [1, 2])
def test_spectral_norm_iterates_once(way: Way, iterations: int) -> None:
    """spectral norm, both APIs | iterates again: other weights | once

    As pytorch#96136: the power iteration of the parametrization.
    """
    norm = parametrizations.spectral_norm
    assert_trains(
        lambda: net(norm(nn.Linear(4, 4), n_power_iterations=iterations), nn.Dropout(0.3)), way=way
    )


@pytest.mark.parametrize("way", WAYS)
def test_spectral_norm_as_a_hook_iterates_once(way: Way) -> None:
    """As pytorch#96136: the older form, a forward pre-hook that sets the weight."""
    assert_trains(lambda: net(nn.utils.spectral_norm(nn.Linear(4, 4))), way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_weight_norm_keeps_its_gradients(way: Way, norm: Callable[..., nn.Module]) -> None:
    """The older form sets a weight with history in a forward pre-hook."""
    assert_trains(lambda: net(norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)), way=way)


@pytest.mark.parametrize("where", ["forward", "forward and backward", "two segments"])
def test_cached_parametrizations(where: str) -> None:
    """`parametrize.cached` computes a weight once for several uses."""

    def program(call: Call) -> Any:
        model = net(parametrizations.spectral_norm(nn.Linear(4, 4)))
        with parametrize.cached():
            loss = call(model, *rows()).square().sum()
            if where == "two segments":
                loss = loss + call(model, *rows()).square().sum()
            if where != "forward":
                loss.backward()
        if where == "forward":
            loss.backward()
        return loss, state_of(model)

    assert_exact(program)


class Averaging(nn.Module):
    """Keeps a moving average and a token counter in place, and may use them."""

    def __init__(self, feeds: bool = True, wide: int = 1) -> None:
        super().__init__()
        self.feeds = feeds
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(wide, 4))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.5).add_(y.mean(0), alpha=0.5)
            self.tokens += x.shape[0]
        return torch.tanh(y - self.average.mean(0) / self.tokens) if self.feeds else torch.tanh(y)


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_is_only_kept_moves_once(way: Way) -> None:
    """torchtitan#3686 (tokens // 2), NeMo Automodel#3247."""
    assert_trains(lambda: Averaging(feeds=False), way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wide", [1, 5000])
def test_a_buffer_that_feeds_the_output_is_seen_as_it_was(way: Way, wide: int) -> None:
    """moving averages, observers, codebooks | wrong gradients | exact

    Observers, FP8 amax (TransformerEngine#24), codebooks: a small and a big buffer.
    """
    assert_trains(lambda: Averaging(wide=wide), way=way)


class Codebook(nn.Module):
    """Vector quantization by a codebook that moves towards its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        hits = F.one_hot(nearest, 8).to(y)
        self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
        self.codes.copy_(0.5 * self.codes + 0.5 * (hits.t() @ y.detach()) / self.counts[:, None])
        return y * self.codes[nearest] + (self.codes[nearest] - y).detach() * y


@pytest.mark.parametrize("way", WAYS)
def test_a_codebook_moves_once(way: Way) -> None:
    """Buffers that feed the output: VQ-VAE's moving average."""
    assert_trains(Codebook, way=way)


class Functional(nn.Module):
    """Calls F.batch_norm on buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.linear(x), self.mean, self.variance, training=True)
        return torch.tanh(y * self.variance.clone())


def norm(h: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(h, mean, variance, training=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_statistics_that_the_segment_makes(times: int, read_before: bool, way: Way) -> None:
    """A norm writes them without saying so: who reads them later has them as it left them."""

    def program(call: Call) -> Any:
        layer, (x,) = nn.Linear(4, 4), rows()

        def forward(x: Tensor) -> Tensor:
            mean, variance = x.detach().mean(0), x.detach().var(0)
            h = layer(x)
            if read_before:
                h = (h * mean).sin() * variance.exp()
            for _ in range(times):
                h = norm(h, mean, variance)
                h = (h * mean).sin() * variance.exp()
            return h

        way(call, Forward(forward, layer), x).square().sum().backward()
        return x.grad, state_of(layer)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", [False, True])
def test_statistics_that_move_in_few_channels(made: bool, way: Way) -> None:
    """Empty channels keep their mean: bytes of them do not tell that a norm wrote the others."""

    def program(call: Call) -> Any:
        layer, buffers = nn.Linear(4, 1), [torch.zeros(2048), torch.ones(2048)]
        (x,) = rows()

        def forward(x: Tensor) -> Tensor:
            mean, variance = [buffer + 0 for buffer in buffers] if made else buffers
            h = F.pad(layer(x), (100, 1947))
            before = (h + mean).sin()
            h = norm(h, mean, variance)
            return before + (h + mean).sin()

        way(call, Forward(forward, layer), x).square().sum().backward()
        return x.grad, state_of(layer), buffers

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_buffers_that_a_functional_call_moves(way: Way) -> None:
    def program(call: Call) -> Any:
        layer, bn, (x,) = nn.Linear(4, 4), nn.BatchNorm1d(4), rows()

        def forward(x: Tensor) -> Tensor:
            copies = {name: buffer.clone() for name, buffer in bn.named_buffers()}
            h = torch.func.functional_call(bn, copies, (layer(x),))
            return (h * copies["running_mean"]).sin() * copies["running_var"].exp()

        way(call, Forward(forward, layer), x).square().sum().backward()
        return x.grad, state_of(layer), state_of(bn)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_functional_batch_norm_moves_its_buffers_once(way: Way) -> None:
    """`F.batch_norm` on your own buffers | updated twice | once

    pytorch#96136 without a norm that could be recognized.
    """
    assert_trains(Functional, way=way)


class Lazy(nn.Module):
    """Creates its buffer in the first call, and replaces rather than changes it later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", y.detach().abs().mean(0))
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean(0)
        return torch.tanh(y / self.scale)


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_created_in_the_first_call(way: Way) -> None:
    """register_buffer in the forward, and a buffer that is assigned anew."""
    assert_trains(Lazy, way=way)


@pytest.mark.parametrize("way", WAYS)
def test_lazy_modules_are_initialized_once(way: Way) -> None:
    """LazyLinear and LazyBatchNorm1d change their class in the first call."""
    assert_trains(lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()), way=way)


@pytest.mark.parametrize("kind", [Averaging, Functional, Codebook])
def test_the_backward_bumps_no_version_that_a_graph_saved(kind: type[nn.Module]) -> None:
    """The buffers after the backward are the same objects in the same version."""

    def program(call: Call) -> Any:
        model = kind()
        output = call(model, *rows())
        weight = torch.rand(()).requires_grad_()
        kept = sum((weight * buffer.float()).sum() for buffer in model.buffers())
        found = [(id(buffer), buffer._version) for buffer in model.buffers()]
        output.square().sum().backward()
        assert found == [(id(buffer), buffer._version) for buffer in model.buffers()]
        kept.backward()
        return weight.grad, state_of(model)

    assert_exact(program)
