"""What code makes of its own numbers can be read while planning; what depends on data cannot."""

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import zoo
from tests.profiling.models import Repeated, profile
from tests.training import images, needs_numpy
from zoo.errors import ArgumentError
from zoo.profiling.fake_tensors import MOST, FakeTensorFixes, as_data
from zoo.profiling.optimizer_memory import optimizer_bytes

pytestmark = pytest.mark.usefixtures("without_fork")


def read(make: Callable[[Tensor], Any], data: Tensor | None = None) -> Any:
    """Calls a function of data under fake tensors, as planning calls a loss."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FakeTensorFixes(mode):
        return make(torch.empty(2, 3) if data is None else data)


def squares(x: Tensor) -> list[int]:
    return (torch.arange(4) ** 2).reshape(2, 2).T.flatten().tolist()


def written_in_place(x: Tensor) -> list[float]:
    numbers = torch.zeros(4)
    numbers[1:3].add_(1)
    return numbers.mul_(2).tolist()


def widened(x: Tensor) -> list[float]:
    return torch.ones(2, 1).expand(2, 10**12)[:, 7].tolist()


@pytest.mark.parametrize(
    "make",
    [
        squares,
        written_in_place,
        widened,
        lambda x: torch.arange(2, x.ndim + 3).tolist(),
        lambda x: torch.tensor([[1, 2], [3, 4]]).tolist(),
        lambda x: x.new_tensor([1.0, 2.0]).sum().item(),
        lambda x: torch.zeros_like(x).tolist(),
        lambda x: x.new_full((2,), 3.0).tolist(),
        lambda x: (torch.eye(2) @ torch.full((2,), 0.5)).tolist(),
        lambda x: torch.linspace(0, 1, 5).double().tolist(),
        lambda x: bool((torch.ones(3, requires_grad=True) > 0).all()),
        lambda x: [int(size) for size in torch.tensor(x.shape)],
        lambda x: torch.arange(MOST).sum().item(),
    ],
)
def test_a_constant_is_read_as_it_is_without_fake_tensors(make: Callable[[Tensor], Any]) -> None:
    assert read(make) == make(torch.empty(2, 3))


def overwritten(x: Tensor) -> Any:
    numbers = torch.zeros(2, 3)
    row = numbers[0]
    row.copy_(x[0])
    return numbers.tolist()


def mixed(x: Tensor) -> Any:
    numbers = torch.zeros(6)
    torch.add(x.flatten(), 1, out=numbers)
    return numbers.sum().item()


@pytest.mark.parametrize(
    "make",
    [
        overwritten,
        mixed,
        lambda x: x.sum().item(),
        lambda x: (torch.zeros(3) * x).tolist(),
        lambda x: torch.rand(2).tolist(),
        lambda x: torch.zeros(2).uniform_().tolist(),
        lambda x: torch.empty(2).tolist(),
        lambda x: F.dropout(torch.ones(9)).tolist(),
        lambda x: torch.arange(MOST + 1).tolist(),
        lambda x: torch.eye(2).to_sparse().sum().item(),
        lambda x: as_data(torch.ones(2)).tolist(),
    ],
)
def test_numbers_of_data_and_of_chance_stay_unknown(make: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentOutputException):
        read(make)


def test_numbers_that_the_code_has_are_read_and_weights_are_data() -> None:
    assert read(lambda x: x.item(), torch.tensor(3)) == 3
    assert read(lambda x: x.max().item(), torch.tensor([1, 2])) == 2
    with pytest.raises(DataDependentOutputException):
        read(lambda x: x.max().item(), torch.ones(2, requires_grad=True))


def test_on_another_device_than_is_here_a_constant_is_read() -> None:
    assert read(lambda x: torch.arange(3, device="meta").tolist()) == [0, 1, 2]


def flat(outputs: Tensor) -> Tensor:
    """Averages over all dimensions but the first, as MONAI's losses list them."""
    dimensions = torch.arange(1, outputs.ndim).tolist()
    return (outputs.square().mean(dimensions) * torch.tensor([1.0, 2.0])).sum()


@needs_numpy
def test_what_is_read_changes_no_number_of_a_plan() -> None:
    def unread(outputs: Tensor) -> Tensor:
        torch.arange(1, outputs.ndim)
        return (outputs.square().mean([1, 2, 3]) * torch.tensor([1.0, 2.0])).sum()

    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 2, 3)), images(2, 4, 16)
    options: dict[str, Any] = {"memory_budget": 1.0, "device": "a100"}
    found, other = (zoo.plan(model, x, loss=loss, **options) for loss in (flat, unread))
    assert found == other
    assert zoo.plan(model, x, loss=flat, memory_budget=1.0).predicted_peak > 0


@needs_numpy
@pytest.mark.parametrize("name", ["DiceLoss", "DiceCELoss"])
def test_monais_usual_losses_are_planned_with(name: str) -> None:
    try:
        losses: Any = importlib.import_module("monai.losses")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"monai: {error}")
    loss = getattr(losses, name)(to_onehot_y=True, softmax=True)
    model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 3, 1))
    x, labels = torch.randn(1, 1, 8, 8, 8), torch.randint(0, 3, (1, 1, 8, 8, 8))
    given: Any = {"memory_budget": 1.0, "holds_outputs": True}
    inside = zoo.plan(model, x, loss=lambda scores: loss(scores, labels), **given)
    assert inside.predicted_peak > zoo.plan(model, x, **given).predicted_peak
    found = zoo.anatomy(model, x, loss=lambda scores: loss(scores, labels), device="meta")
    assert found.baseline.peak > 0


@needs_numpy
def test_a_loss_that_reads_its_targets_is_planned_with() -> None:
    labels = torch.tensor([0, 2])

    def loss(scores: Tensor) -> Tensor:
        return (scores.reshape(2, 3) - F.one_hot(labels).expand(2, 3)).square().mean()

    found = zoo.plan(nn.Linear(4, 3), torch.rand(2, 4), memory_budget=1.0, loss=loss)
    assert found.predicted_peak > 0


@needs_numpy
def test_targets_on_meta_are_no_constants() -> None:
    labels = torch.empty(2, dtype=torch.long, device="meta")

    def loss(scores: Tensor) -> Tensor:
        return scores.sum() * labels.max().item()

    with pytest.raises(ArgumentError, match=r"reads a number .* or leave loss= out"):
        zoo.plan(nn.Linear(4, 3), torch.rand(2, 4), memory_budget=1.0, loss=loss)


class Gate(torch.autograd.Function):
    """Reads the gradient that it gets, which has no value while planning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if gradient.max().item() < 2 else gradient / 2


def test_a_backward_that_reads_its_gradient_is_planned_for() -> None:
    x = images().requires_grad_()
    costs = profile(Repeated(nn.Tanh(), Gate.apply, nn.Tanh()), x).costs()
    # what the last function gives it, and what it gives the first
    assert costs.gradients[1:3] == (x.nbytes, x.nbytes)


class ReadsConstant(nn.Module):
    """Reads a constant in its forward, also in the recomputation of a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(torch.arange(3).sum().item()):
            x = self.layer(x).tanh()
        return x


@needs_numpy
def test_a_model_that_reads_a_constant_is_planned_and_taken_apart_with_its_recomputation() -> None:
    model = nn.Sequential(ReadsConstant(), ReadsConstant())
    x = torch.rand(64, 4)
    assert zoo.plan(model, x, memory_budget=1.0).predicted_peak > 0
    found = zoo.anatomy(model, x, checkpoint="blocks", device="meta")
    assert found.planned.activation_peak < found.baseline.activation_peak


class Counting(torch.optim.SGD):
    """Counts its steps in a constant and reads it."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", torch.zeros(1)).add_(1)
            if state["count"].item() > 0:
                state["mean"] = parameter.grad.clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_saves_statistics_of_the_type_that_real_ones_have(
    dtype: torch.dtype, affine: bool
) -> None:
    weights = [torch.ones(5) if affine else None for _ in range(4)]
    call = functools.partial(torch.native_batch_norm, training=True, momentum=0.1, eps=1e-5)
    real = call(torch.ones(2, 5, 3, dtype=dtype), *weights)
    fake = read(lambda x: call(x, *weights), torch.ones(2, 5, 3, dtype=dtype))
    assert [tensor.dtype for tensor in fake] == [tensor.dtype for tensor in real]


def test_an_optimizer_that_reads_its_own_count_is_counted() -> None:
    assert optimizer_bytes(Counting, [nn.Parameter(torch.rand(25))]).state == 104


class Experts(nn.Module):
    """Multiplies rows by the matrix of their expert, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.experts = nn.Linear(16, 16), nn.Parameter(torch.rand(4, 16, 16))

    def forward(self, rows: Tensor) -> Tensor:
        ends = torch.arange(4, 17, 4, dtype=torch.int32)
        return nn.functional.grouped_mm(self.layer(rows), self.experts, offs=ends).sin()


@needs_numpy
def test_a_kernel_that_takes_more_than_torch_says_of_fakes_is_planned_with() -> None:
    rows = torch.rand(16, 16)
    with pytest.raises(RuntimeError, match=r"BFloat16|BF16"):
        Experts().to("meta")(rows.to("meta"))  # else torch's rule is right, and ours can go
    report = zoo.plan(Experts(), rows, max_overhead=0.5)
    assert any("grouped_mm" in name for name in report.names)


def test_what_neither_a_fake_nor_a_real_kernel_takes_raises_the_error_of_the_fake() -> None:
    with FakeTensorMode() as mode, FakeTensorFixes(mode):
        rows = torch.empty(16, 16)
        with pytest.raises(RuntimeError, match=r"BFloat16|BF16"):
            nn.functional.grouped_mm(rows, torch.empty(4, 15, 16))


def test_torch_s_log_is_as_before_after_blocks_that_overlap() -> None:
    """As those of two threads that plan at once, of which the first ends first."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    first, second = (FakeTensorFixes(FakeTensorMode()) for _ in range(2))
    entered = threading.Event(), threading.Event()

    def other() -> None:
        entered[0].wait()
        with second:
            entered[1].set()
            ended.wait()

    ended, thread = threading.Event(), threading.Thread(target=other)
    thread.start()
    with first:
        entered[0].set()
        entered[1].wait()
    assert log.disabled
    ended.set()
    thread.join()
    assert not log.disabled
