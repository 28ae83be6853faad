"""Kernels that call operators see autocast and lazy conjugation as outside of dispatch modes."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.training import WAYS, Call, Way, assert_exact, assert_same, rows, state_of


@torch.library.custom_op("zoo_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies by an operator that autocast casts for."""
    return (x @ weight).to(x.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.T, x.T @ gradient


product.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("zoo_tests::rotated", mutates_args=())
def rotated(x: Tensor) -> Tensor:
    """Goes through a conjugate that it makes itself."""
    return (torch.complex(x, x + 1).conj() * (2 + 1j)).imag.clone()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return product(x.sin(), self.weight).exp()


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sin(), x.cos()).float().exp()


class Teacher(nn.Module):
    """Its layers take one kernel each without gradients, of which they are part of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            batch = x.detach()[None]
            target = (
                self.encoder(batch) + self.attention(batch, batch, batch, need_weights=False)[0]
            )
        return (self.layer(x).float() * target[0].float().sin()).exp()


class Warp(nn.Module):
    """Its grid comes from a product that a kernel calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.image = nn.Linear(4, 6), nn.Parameter(torch.rand(6, 1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.layer(x).view(6, 2, 3)
        grid = F.affine_grid(theta, [6, 1, 4, 4], align_corners=False)
        return F.grid_sample(self.image, grid.float(), align_corners=False).flatten(1).exp()


class Distances(nn.Module):
    """Autocast casts for the function, whose kernel then multiplies without it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(4, 4), nn.Parameter(torch.rand(30, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.layer(x).repeat(5, 1), self.codes).sin()


class BackwardInside(nn.Module):
    """Its forward differentiates what must be replayed for that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = Bilinear(), Bilinear().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        given = x.detach().requires_grad_()
        score = (given * self.frozen(x)).sin() * self.layer(given)
        (gradient,) = torch.autograd.grad(score.sum(), given, create_graph=True)
        return y * gradient.float()


KINDS = [Custom, Bilinear, Teacher, Warp, Distances, BackwardInside]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_call_others_under_autocast(
    kind: Callable[[], nn.Module], way: Way, dtype: torch.dtype
) -> None:
    """custom operators under autocast | exact | exact

    Two steps: what a replay casts is not in autocast's cache for the next.
    """

    def program(call: Call) -> Any:
        model, (x,) = kind(), rows()
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = way(call, model, x).square().mean()
            loss.backward()
            losses.append(loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 if parameter.grad is None else parameter.grad)
        return losses, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("option", [True, "blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_forward_under_autocast_from_its_first_step_on(
    kind: Callable[[], nn.Module], option: Any
) -> None:
    """The first one is traced, which is one more mode around each kernel."""
    records: list[Any] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, (x,) = nn.Sequential(nn.LayerNorm(4), kind()), rows()
        if is_planned:
            zoo.checkpoint(model, option)
        losses = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        records.append([*losses, *(parameter.grad for parameter in model.parameters())])
    assert_same(*records)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracked_step_under_autocast(kind: Callable[[], nn.Module]) -> None:
    """The tracker is one more mode, too."""
    records: list[Any] = []
    for is_tracked in (False, True):
        torch.manual_seed(0)
        model, (x,) = nn.Sequential(nn.LayerNorm(4), kind()), rows()
        with zoo.track(model) if is_tracked else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        records.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_same(*records)


def test_a_region_without_autocast_inside_of_one_with_it() -> None:
    def program(call: Call) -> Any:
        model, (x,) = Bilinear(), rows()

        def function(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = model(x)
            return y + model(x)

        with torch.autocast("cpu", torch.bfloat16):
            y = call(function, x)
        y.sum().backward()
        return y, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.pinv,
        lambda x: torch.linalg.pinv(x @ x.mH, hermitian=True),
        torch.linalg.matrix_exp,
        lambda x: product(x.real, x.conj().imag) * x,
        lambda x: torch.linalg.lstsq(x[:, :3], x)[1].repeat(4),
    ],
)
def test_kernels_that_call_others_on_complex_numbers(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    def program(call: Call) -> Any:
        x = torch.rand(4, 4, dtype=dtype).requires_grad_()
        y = call(lambda x: function(x.sin()) * 2, x)
        y.abs().sum().backward()
        return y, x.grad

    assert_exact(program)


@pytest.mark.parametrize("function", [torch.linalg.pinv, torch.pinverse])
def test_a_kernel_that_autocast_casts_for_by_one_name_alone_is_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    (x,) = rows()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(zoo.RecomputeError, match="pinverse differ under autocast"),
    ):
        zoo.recompute(lambda x: function(x.sin()), x)

    def program(call: Call) -> Any:
        (x,) = rows()

        def without(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return function(x.sin())

        with torch.autocast("cpu", torch.bfloat16):
            y = call(without, x)
        y.sum().backward()
        return y, x.grad

    assert_exact(program)


def test_a_custom_operator_that_conjugates_inside() -> None:
    def program(call: Call) -> Any:
        layer, (x,) = nn.Linear(4, 4), rows()
        y = call(lambda x: layer(rotated(x.detach())).sin(), x)
        y.sum().backward()
        return y, state_of(layer)

    assert_exact(program)


def test_a_replay_leaves_autocast_as_it_was() -> None:
    model, (x,) = Bilinear(), rows()
    with torch.autocast("cpu", torch.float16):
        y = zoo.recompute(lambda x: model(x).sin(), x)
    earlier = torch.get_autocast_dtype("cpu")
    # not in a backward, after whose operations torch puts back much of what they changed
    assert y.grad_fn._saved_self.shape == y.shape  # type: ignore[union-attr]
    assert torch.get_autocast_dtype("cpu") is earlier is not torch.float16
    assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
