"""Bytes and seconds of kernels: each different one runs for real once, or is estimated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from tests.profiling.models import Repeated, profile
from tests.training import Residuals, images
from zoo.cli.values import rated_device
from zoo.engine.operator_effects import resolved
from zoo.errors import ArgumentError
from zoo.planner.costs import StepCosts
from zoo.profiling import kernel_costs as kernels
from zoo.profiling.kernel_costs import DEVICES, device_named, measure_kernels
from zoo.profiling.tensor_spec import KernelSpec

CPU = torch.device("cpu")
RELU = torch.ops.aten.relu.default


class Median(nn.Module):
    """Its kernel sorts a copy that no tensor of Python shows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.median(x)


def costs(model: nn.Module, *inputs: Tensor, timed: bool = True) -> StepCosts:
    found = profile(model, *inputs)
    return found.costs(kernels=found.kernels() if timed else ())


def test_what_a_kernel_allocates_inside_is_seen_where_it_runs() -> None:
    x = torch.rand(1 << 16, requires_grad=True)
    assert costs(Median(), x, timed=False).forward[0] == 4
    assert costs(Median(), x).forward[0] == x.nbytes + 4


def test_a_profile_with_kernels_leaves_everything_as_it_was() -> None:
    model, x = Residuals(), images().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    costs(model, x)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), x))


def test_bytes_without_workspaces_are_those_of_fake_tensors() -> None:
    model, x = Residuals(), images().requires_grad_()
    fake, real = costs(model, x, timed=False), costs(model, x)
    assert fake.sizes == real.sizes
    assert fake.saved == real.saved
    pairs = zip(fake.forward + fake.backward, real.forward + real.backward, strict=True)
    assert all(one <= other for one, other in pairs)
    assert all(map(float.__gt__, real.seconds, [0.0] * len(real)))
    assert all(map(float.__ge__, real.seconds, real.seconds_until_saved))


class Expanded(nn.Module):
    """Hands an expanded tensor on, which has fewer numbers than it shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x[:1].sum().expand(8, 8)


def test_a_state_of_an_expanded_tensor_is_measured() -> None:
    x = torch.rand(8, 8, requires_grad=True)
    # the sum, of one number, and what it is added to
    assert costs(Expanded(), x).forward[-1] == x.itemsize + x.nbytes


def test_each_kind_of_kernel_runs_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    real = kernels._run_between_marks
    monkeypatch.setattr(kernels, "_measured", {})
    monkeypatch.setattr(kernels, "_run_between_marks", lambda spec: runs.append(spec) or real(spec))

    layers = [part for _ in range(20) for part in (nn.Linear(6, 6), torch.tanh)]
    for _ in range(2):
        costs(Repeated(*layers), torch.rand(3, 6, requires_grad=True))
    names = [spec.operator for spec in runs]
    assert names.count("aten.tanh.default") == names.count("aten.tanh_backward.default") == 1
    assert names.count("aten.addmm.default") == 1


def spec(operator: Any, *args: Any) -> KernelSpec:
    found = KernelSpec.of(operator, args, {})
    assert found is not None
    return found


def test_a_kernel_that_takes_no_such_numbers_is_left_to_an_estimate() -> None:
    x = torch.zeros(3, 3)
    specs = [spec(torch.ops.aten.linalg_cholesky.default, x), spec(RELU, x)]
    unknown, known = measure_kernels(specs, CPU)
    assert unknown is None
    assert known is not None
    assert known.seconds > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_run_for_its_workspace_takes_none(dtype: torch.dtype) -> None:
    x, specs = torch.rand(8, 64, 6, dtype=dtype), []
    for func in map(resolved, kernels.WITHOUT_WORKSPACE):
        kinds = [argument.type.kind() for argument in func._schema.arguments]
        for one in (x, x[:, ::2], x[:, :, :2].transpose(0, 1)):
            lists = ([one, one],) * kinds.count("ListType")
            number = (0.5,) if "threshold" in str(func) else ()
            given = *lists, *(one for kind in kinds if kind == "TensorType"), *number
            specs.append(spec(func, *given))
    assert all(map(kernels._takes_no_workspace, specs))
    assert {cost and cost.workspace for cost in measure_kernels(specs, CPU)} == {0}


def test_a_kernel_that_makes_a_tensor_of_an_argument_runs_for_its_workspace() -> None:
    add, x = torch.ops.aten.add.Tensor, torch.rand(8)
    assert not kernels._takes_no_workspace(spec(add, x, 2.0))
    assert not kernels._takes_no_workspace(spec(add, x, x.double()))
    (cost,) = measure_kernels([spec(add, x, x.double())], CPU, timed=False)
    assert cost is not None
    assert cost.workspace > 0


def test_views_of_one_storage_share_it_and_others_are_cut_out_of_theirs() -> None:
    x = torch.rand(100, 10)
    assert spec(torch.ops.aten.add.Tensor, x[3], x[4]).sizes == (x.nbytes,)
    assert spec(RELU, x[3]).sizes == (10 * x.itemsize,)
    assert spec(RELU, x[3]) == spec(RELU, x[7])


def test_writing_kernels_write_nothing_of_the_model_s() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(2)
            return x * self.weight.clone()

    model, x = Counting(), torch.rand(4, requires_grad=True)
    profile(model, x).kernels()
    assert torch.equal(model.weight, torch.ones(4))


def test_a_full_table_forgets_nothing_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_measured", {})
    monkeypatch.setattr(kernels, "MOST_KNOWN", 1)
    specs = [spec(RELU, torch.rand(4)), spec(torch.ops.aten.tanh.default, torch.rand(4))]
    measure_kernels(specs[:1], CPU)
    assert all(measure_kernels(specs, CPU))


@pytest.mark.parametrize("name", DEVICES)
def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_traffic(name: str) -> None:
    device = DEVICES[name]
    rate = device.operations[4]
    arithmetic = device.seconds(int(rate), 8, torch.float32)
    traffic = device.seconds(0, int(device.bandwidth), torch.float32)
    assert arithmetic == pytest.approx(1, rel=1e-3)
    assert traffic == pytest.approx(1, rel=1e-3)
    both = device.seconds(int(rate), int(device.bandwidth), torch.float32)
    assert both == pytest.approx(1 + device.start, rel=1e-6)
    assert device.seconds(0, 0, torch.float32) == device.start


def test_half_precision_is_as_fast_as_the_device_makes_it() -> None:
    a100 = device_named("a100")
    half = a100.seconds(10**15, 0, torch.bfloat16)
    assert a100.seconds(10**15, 0, torch.float32) > 1.9 * half


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_backward_of_a_convolution_takes_two_forwards_whatever_its_groups(
    kind: Any, groups: int
) -> None:
    layer, x = kind(16, 16, 3, padding=1, groups=groups), torch.rand(2, 16, 8, 8)
    formulas = kernels.flop_formulas()
    settings = layer.stride, layer.padding, layer.dilation
    transposed, outwards = kind is nn.ConvTranspose2d, (0, 0)
    call = x, layer.weight, None, *settings, transposed, outwards, groups
    y = torch.ops.aten.convolution(*call)
    once = formulas[torch.ops.aten.convolution](*call, out_val=y)
    assert once == 2 * x.numel() * 16 // groups * 9
    given = y, x, layer.weight, None, *call[3:], [True, True, False]
    back = torch.ops.aten.convolution_backward(*given)
    assert formulas[torch.ops.aten.convolution_backward](*given, out_val=back) == 2 * once


ATTENTION = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize("name", ATTENTION)
def test_grouped_queries_take_as_many_operations_as_if_each_had_its_own_keys(name: str) -> None:
    forward, backward = (
        kernels.flop_formulas()[getattr(torch.ops.aten, name + suffix)]
        for suffix in ("", "_backward")
    )
    query, key, value = (
        torch.empty(2, 8, 10, 16),
        torch.empty(2, 2, 12, 16),
        torch.empty(2, 2, 12, 24),
    )
    whole = [tensor.repeat_interleave(4, 1) for tensor in (key, value)]
    gradient = torch.empty(2, 8, 10, 24)
    assert forward(query, key, value) == forward(query, *whole) == 2 * 2 * 8 * 10 * 12 * (16 + 24)
    assert backward(gradient, query, key, value) == backward(gradient, query, *whole) > 0


def test_a_formula_that_raises_leaves_the_time_to_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, refuse)
    kernels.flop_formulas.cache_clear()
    try:
        layer = nn.Sequential(nn.Linear(6, 6))
        made = profile(layer, torch.rand(3, 6, requires_grad=True))
    finally:
        kernels.flop_formulas.cache_clear()
    found = made.costs(device_named("a100"))
    assert found.flops == (0,)
    assert found.seconds[0] > DEVICES["a100"].start


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"device='h2000' .* h200, h100, a100, .*mean h200"):
        device_named("h2000")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("h100", "h100"),
        ("nvidia-h100", "h100"),
        ("NVIDIA H200", "h200"),
        ("A100", "a100"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_device_has_one_name_however_it_is_spelled(name: str, known: str) -> None:
    assert device_named(name) is DEVICES[known]
    assert rated_device(name) == known


def test_what_torch_asks_of_a_tensor_is_no_kernel() -> None:
    model, x = Residuals(), images()
    specs = profile(model, x).specs
    assert None not in specs
    assert {spec.operator for spec in specs if spec} > {"aten.convolution.default"}
