"""Results on fake tensors are those of real kernels: layout, type, bytes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import one_hot

import zoo
from tests.training import needs_numpy
from zoo._torch import FakeTensorMode
from zoo.errors import ArgumentError
from zoo.profiling.fake_tensors import FakeTensorFixes
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.tensor_spec import KernelSpec, TensorSpec, key_of, tensors_in

aten = torch.ops.aten


def dense() -> Tensor:
    return torch.rand(2, 8, 6, 4)


def last() -> Tensor:
    return dense().to(memory_format=torch.channels_last)


def volumes() -> Tensor:
    return torch.rand(2, 8, 4, 3, 2).to(memory_format=torch.channels_last_3d)


def turned() -> Tensor:
    return torch.rand(2, 8, 4, 6).transpose(2, 3)


def rows() -> Tensor:
    """Channels come last by a permutation, as in a ConvNeXt."""
    return dense().permute(0, 2, 3, 1)


def agrees(call: Callable[..., Any], *given: Tensor) -> None:
    """Asserts that a kernel returns on fake tensors what it returns on real ones, each time."""
    real = [*map(TensorSpec.of, tensors_in(call(*given)))]
    with FakeTensorMode() as mode, FakeTensorFixes(mode):
        fakes = [*map(mode.from_tensor, given)]
        first, again = tensors_in(call(*fakes)), tensors_in(call(*fakes))
    assert [*map(TensorSpec.of, first)] == [*map(TensorSpec.of, again)] == real
    storages = {tensor.untyped_storage()._cdata for tensor in first}
    assert storages.isdisjoint(tensor.untyped_storage()._cdata for tensor in again)


@pytest.mark.parametrize("make", [dense, last, volumes])
@pytest.mark.parametrize(
    ("dtype", "affine"),
    [
        (torch.float32, torch.float32),
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None),
    ],
)
def test_group_norms(make: Callable[[], Tensor], dtype: torch.dtype, affine: Any) -> None:
    x, weights = make().to(dtype), () if affine is None else torch.ones(2, 8, dtype=affine)
    sizes = 2, 8, x[0, 0].numel(), 4

    def norm(x: Tensor, *weights: Tensor) -> Any:
        return aten.native_group_norm.default(x, *(weights or (None, None)), *sizes, 1e-5)

    def backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, *weights: Tensor) -> Any:
        others = (weights or (None,))[0], *sizes, [True, bool(weights), bool(weights)]
        return aten.native_group_norm_backward.default(gradient, x, mean, scale, *others)

    agrees(norm, x, *weights)
    _, *saved = norm(x, *weights)
    for gradient in (x, x.contiguous()):
        agrees(backward, gradient, x, *saved, *weights)


@pytest.mark.parametrize("make", [dense, last, turned])
def test_batch_norms(make: Callable[[], Tensor]) -> None:
    x, weights = make(), torch.ones(4, 8)

    def norm(x: Tensor, weights: Tensor) -> Any:
        return aten.native_batch_norm.default(x, *weights, True, 0.1, 1e-5)

    def backward(gradient: Tensor, x: Tensor, weights: Tensor) -> Any:
        scale, _, *others = weights
        others += others
        return aten.native_batch_norm_backward.default(
            gradient, x, scale, *others, True, 1e-5, [True, True, True]
        )

    agrees(norm, x, weights)
    for gradient in (x, x.contiguous()):
        agrees(backward, gradient, x, weights)


@pytest.mark.parametrize("make", [dense, last, turned, rows])
def test_the_gradient_of_a_layer_norm(make: Callable[[], Tensor]) -> None:
    x = make()

    def backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Any:
        others = x.shape[-1:], mean, scale, None, None, [True, False, False]
        return aten.native_layer_norm_backward.default(gradient, x, *others)

    _, *saved = aten.native_layer_norm.default(x, x.shape[-1:], None, None, 1e-5)
    for gradient in (x, x.contiguous()):
        agrees(backward, gradient, x, *saved)


@pytest.mark.parametrize("make", [dense, last, turned])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.roll.default(x, [1], [2]),
        lambda x: aten.roll.default(x, [1, 2], [2, 3]),
        lambda x: aten.channel_shuffle.default(x, 2),
        aten.log_sigmoid_forward.default,
        lambda x: aten.reflection_pad2d_backward.default(F.pad(x, [1] * 4), x, [1] * 4),
        lambda x: aten.replication_pad2d_backward.default(F.pad(x, [1] * 4), x, [1] * 4),
    ],
)
def test_what_keeps_a_layout(call: Callable[..., Any], make: Callable[[], Tensor]) -> None:
    agrees(call, make())


class Attention(nn.Module):
    """Reshapes what a group norm returns, which takes a copy or none, by its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.mix = nn.GroupNorm(4, 8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(self.first(x)).flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(*self.mix(pixels)[:, None].chunk(3, -1))


def test_a_plan_for_channels_last_is_for_the_forward_that_comes() -> None:
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    torch.manual_seed(0)
    x = torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last)
    model = Attention().to(memory_format=torch.channels_last)
    report = zoo.plan(model, x, max_overhead=9.0, device="a100")
    assert report.plan.depth() > 0
    zoo.checkpoint(model, report)
    for _ in range(3):
        model(x).sum().backward()
        assert zoo.plan_of(model) == report.plan


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.binary_cross_entropy,
        F.l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
    ],
)
def test_losses(loss: Callable[..., Tensor], reduction: str) -> None:
    """A reduced one of the first four keeps the memory of the losses of all elements."""
    x, y = torch.rand(2, 6, 4), torch.rand(2, 6, 4)
    agrees(lambda x, y: loss(x, y, reduction=reduction), x, y)
    keeps_all = loss(x, y).untyped_storage().nbytes() == x.nbytes
    assert keeps_all is (loss.__name__ in KEEPING)  # else torch changed, and our rule can go


KEEPING = {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}


@pytest.mark.parametrize("make", [lambda: torch.rand(2, 18, 48), lambda: torch.rand(2, 18, 4)])
def test_columns_that_are_folded(make: Callable[[], Tensor]) -> None:
    """What is folded keeps the memory of its columns."""
    columns = make()
    size = (8, 6) if columns.shape[-1] == 48 else (2, 2)
    agrees(lambda x: F.fold(x, size, 3, padding=1), columns)


def test_a_step_with_a_loss_over_pixels_takes_what_is_predicted() -> None:
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 4, 3, padding=1), torch.rand(4, 1, 64, 64)

    def loss(outputs: Tensor) -> Tensor:
        return F.mse_loss(outputs, torch.zeros_like(outputs))

    def step() -> None:
        outputs = model(x)
        loss(outputs).backward()

    predicted = zoo.plan(
        model, x, max_overhead=9.0, optimizer=None, loss=loss, holds_outputs=True
    ).baseline_peak
    step()
    measured = measure_step(step, model, None, [x]).peak
    assert 0.99 * predicted <= measured <= predicted


class Embedded(nn.Module):
    """Embeds tokens as products of one-hot rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.table = classes, nn.Linear(16, 32)
        self.mix = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = one_hot(tokens, self.classes).float()
        return self.mix(self.table(rows))  # type: ignore[no-any-return]


TOKENS = torch.arange(32).reshape(2, 16) % 16


@pytest.mark.parametrize(
    ("classes", "planned"),
    [(16, TOKENS.to("meta")), (16, TOKENS), (-1, TOKENS)],
    ids=["unknown", "known", "counted"],
)
def test_a_plan_of_one_hot_rows_is_for_the_forward_that_comes(
    classes: int, planned: Tensor
) -> None:
    """For them torch itself calls other kernels on fake tensors than on real ones."""
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    model, before = Embedded(classes), torch._C._dispatch_dump_table("aten::one_hot")
    report = zoo.plan(model, planned, max_overhead=9.0, device="a100")
    assert torch._C._dispatch_dump_table("aten::one_hot") == before
    zoo.checkpoint(model, report)
    for _ in range(3):
        model(TOKENS).sum().backward()
        assert zoo.plan_of(model) == report.plan


@needs_numpy
def test_one_hot_rows_of_unknown_classes_need_numbers() -> None:
    model = Embedded(-1).to("meta")
    with pytest.raises(ArgumentError, match="reads numbers out of tensors"):
        zoo.plan(model, TOKENS.to("meta"), max_overhead=9.0, device="a100")


def test_what_is_remembered_is_of_numbers_of_the_same_type() -> None:
    """Numbers that are equal make other results if their types differ."""
    with FakeTensorMode() as mode, FakeTensorFixes(mode):
        x = torch.zeros(3, dtype=torch.int64)
        for number in (2, 2.0, 2, True, math.nan):
            assert (x**number).dtype == torch.result_type(x, number)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_what_is_remembered_is_of_the_default_type(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    with FakeTensorMode() as mode, FakeTensorFixes(mode):
        x = torch.ones(3, dtype=torch.int64)
        torch.sin(x)
        try:
            torch.set_default_dtype(default)
            assert torch.sin(x).dtype is default
        finally:
            torch.set_default_dtype(before)


def test_calls_have_one_key_wherever_their_tensors_lie() -> None:
    whole = torch.rand(4, 6)
    calls: list[tuple[Any, ...]] = [
        (whole[:2], whole[:2]),
        (whole[2:], torch.rand(2, 6)),
        (whole[:2], 1),
        (whole[:2], 1.0),
        (whole[:2], True),
        (whole[:2].double(), 1),
        (whole[:, :2].t(), 1),
    ]
    keys = [key_of(aten.add.Tensor, call, {}) for call in calls]
    assert keys[0] == keys[1]
    assert len({*keys}) == len(calls) - 1
    specs = [KernelSpec.of(aten.add.Tensor, call, {}) for call in calls]
    assert [spec and spec.key for spec in specs] == keys
