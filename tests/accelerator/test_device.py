"""Exactness, memory and plans on an accelerator: `pytest --device soft` or one that is here."""

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from tests.accelerator import software
from tests.training import (
    Record,
    Residuals,
    assert_exact,
    assert_same,
    frozen,
    gradients,
    images,
    needs_numpy,
    peak_by_own_plan,
    plain,
    train,
)
from zoo.engine import devices
from zoo.engine.devices import read_streams
from zoo.engine.recompute import recompute
from zoo.errors import ArgumentError, DeterminismError
from zoo.policy.budget import free_on
from zoo.profiling.isolation import can_fork
from zoo.profiling.optimizer_memory import optimizer_bytes
from zoo.profiling.peak_memory import measure_step, spending, trace
from zoo.report.rows import rows

KIND = torch.get_default_device().type
COUNT = torch.accelerator.device_count() if KIND != "cpu" else 0
IS_SOFTWARE = software.NAME == KIND
KIB = 1 << 10

pytestmark = pytest.mark.skipif(KIND == "cpu", reason="needs an accelerator: pytest --device soft")
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two devices")
needs_software = pytest.mark.skipif(not IS_SOFTWARE, reason="sets what only software lets it set")


def device(index: int) -> torch.device:
    return torch.device(KIND, index)


def drops(*layers: int) -> nn.Sequential:
    """Layers with dropout, each on the device of an index, with copies between them."""
    torch.manual_seed(3)
    return nn.Sequential(*(Dropping(index) for index in layers))


class Dropping(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.place = device(index)
        self.linear = nn.Linear(8, 8, device=self.place)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x.to(self.place)).sin(), 0.5).exp()


@pytest.mark.parametrize("index", range(max(COUNT, 1)))
def test_dropout_is_drawn_again_on_each_device(index: int) -> None:
    def program(call: Callable[..., Any]) -> Any:
        model, x = drops(index, index), torch.ones(4, 8, device=device(index), requires_grad=True)
        y = call(model, x)
        y.sum().backward()
        return y, x.grad, gradients(model)

    assert_exact(program)


@needs_two
def test_two_devices_in_one_model_each_draw_from_their_own_stream() -> None:
    def program(call: Callable[..., Any]) -> Any:
        model, x = drops(0, 1, 0, 1), torch.ones(4, 8, device=device(0), requires_grad=True)
        y = call(model, x)
        # other draws between forward and backward
        others = [torch.rand(3, device=device(index)) for index in (0, 1)]
        y.sum().backward()
        return y, x.grad, gradients(model), others

    assert_exact(program)


@pytest.mark.parametrize("index", range(max(COUNT, 1)))
def test_a_backward_leaves_the_streams_as_they_were(index: int) -> None:
    model = drops(index)
    y = recompute(model, torch.ones(4, 8, device=device(index)))
    torch.rand(5, device=device(index))
    before = frozen(read_streams())
    y.sum().backward()
    assert_same(frozen(read_streams()), before)


@needs_two
def test_what_is_made_on_the_current_device_is_made_there_again() -> None:
    def noisy(x: Tensor) -> Tensor:
        noise = torch.rand(4, 8, device=KIND)
        assert noise.device == device(1)
        return (x * noise.to(x.device)).sin().exp()

    def program(call: Callable[..., Any]) -> Any:
        x = torch.ones(4, 8, device=device(0), requires_grad=True)
        with torch.accelerator.device_index(1):
            y = call(noisy, x)
        y.sum().backward()
        return y, x.grad

    assert_exact(program)


def test_a_generator_of_ones_own_is_set_back() -> None:
    def program(call: Callable[..., Any]) -> Any:
        own = torch.Generator(device=device(COUNT - 1)).manual_seed(5)
        x = torch.ones(4, 8, device=device(COUNT - 1), requires_grad=True)

        def noisy(x: Tensor) -> Tensor:
            return (x * torch.rand(4, 8, generator=own, device=x.device)).sin().exp()

        y = call(noisy, x)
        y.sum().backward()
        return y, x.grad, own.get_state()

    assert_exact(program)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "another device": (lambda x: x + x.cpu(), "on the same device"),
    "a weight elsewhere": (
        lambda x: F.conv1d(x[None], x[None].cpu()),
        "same device|should be the same",
    ),
    "a generator of the CPU": (
        lambda x: x.bernoulli(generator=torch.Generator()),
        f"Expected a '{KIND}' device type for generator but found 'cpu'",
    ),
    "NumPy": (Tensor.numpy, f"can't convert {KIND}:0 device type tensor to numpy"),
    "pinned memory": (lambda x: x.cpu().to(x.device).pin_memory(), "only dense CPU tensors"),
    "a product of integers": (lambda x: x.long() @ x.long(), "not implemented for 'Long'"),
    "oneDNN": (Tensor.to_mkldnn, "Could not run 'aten::to_mkldnn'"),
    "determinism": (torch.histc, "does not have a deterministic implementation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_is_refused(name: str) -> None:
    """So that tests which hold on the software accelerator do not fail on a GPU by themselves."""
    call, message = REFUSED[name]
    x, before = torch.ones(2, 2, device=device(0)), torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode("error")
        with pytest.raises((RuntimeError, TypeError), match=message):
            call(x)
    finally:
        torch.set_deterministic_debug_mode(before)


def test_what_a_gpu_takes_from_the_cpu_is_taken() -> None:
    x = torch.arange(4.0, device=device(0))
    number, indices = torch.tensor(2.0, device="cpu"), torch.tensor([3, 1], device="cpu")
    assert (x * number)[indices].tolist() == [6.0, 2.0]


def test_an_address_on_a_device_is_none_of_the_hosts() -> None:
    place = torch.ones(4, device=device(0)).data_ptr()
    library, (reading, writing) = ctypes.CDLL(None, use_errno=True), os.pipe()
    try:
        # the system reads for the call, and fails where the process would end
        assert library.write(writing, ctypes.c_void_p(place), 4) == -1
        assert ctypes.get_errno() == errno.EFAULT
    finally:
        os.close(reading)
        os.close(writing)


@needs_software
def test_the_streams_of_the_software_accelerator_are_not_the_cpus() -> None:
    torch.manual_seed(0)
    host, there = torch.rand(9, device="cpu"), torch.rand(9, device=device(1))
    assert not torch.equal(host, there.cpu())


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the software accelerator, from which a test takes what others lack."""
    found = torch.get_device_module(KIND)
    yield found
    monkeypatch.undo()


@needs_software
def test_a_stream_that_only_the_module_reads_and_sets_will_do(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `torch.mps`, which shows no generator."""
    monkeypatch.setattr(module, "default_generators", ())
    assert isinstance(devices.default_stream(device(1)), devices.StreamOfModule)
    test_two_devices_in_one_model_each_draw_from_their_own_stream()


@needs_software
def test_where_a_stream_cannot_be_set_the_draws_are_kept_and_a_comparison_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, generators = module.get_rng_state, module.default_generators
    monkeypatch.setattr(module, "default_generators", ())
    monkeypatch.delattr(module, "set_rng_state")
    model, x = drops(1), torch.ones(4, 8, device=device(1))
    found = []
    for call in (plain, recompute):
        generators[1].manual_seed(7)
        y = call(model, x)
        model.zero_grad(set_to_none=True)
        y.sum().backward()
        found.append(frozen([y, gradients(model), get(device(1))]))
    assert_same(found[1], found[0])
    message = f"random numbers on {KIND}:0 cannot be drawn again: torch.{KIND} has neither"
    with pytest.raises(ArgumentError, match=message):
        zoo.verify(model, x)


@needs_two
@pytest.mark.parametrize("index", [0, 1])
def test_the_peak_of_a_block_is_that_of_its_device(index: int) -> None:
    other = torch.empty(100 * KIB, dtype=torch.uint8, device=device(1 - index))
    with spending() as spent:
        block = torch.empty(64 * KIB, dtype=torch.uint8, device=device(index))
        del block
        kept = torch.empty(16 * KIB, dtype=torch.uint8, device=device(index))
    assert spent.peaks[str(device(index))] == 64 * KIB
    assert spent.peaks[str(device(1 - index))] == 0
    with spending(str(device(index))) as alone:
        again = torch.empty(32 * KIB, dtype=torch.uint8, device=device(index))
    assert alone.peaks == {str(device(index)): 32 * KIB}
    del other, kept, again
    before = devices.peak(device(index))
    with spending("cpu") as elsewhere:
        torch.empty(16 * KIB, dtype=torch.uint8, device="cpu")
    assert list(elsewhere.peaks) == ["cpu"]
    assert devices.peak(device(index)) == before > devices.allocated(device(index))


@pytest.mark.parametrize("index", range(max(COUNT, 1)))
def test_the_peak_of_a_step_is_that_of_its_tensors(index: int) -> None:
    """On the software accelerator kernels have no workspace, so the tracker sees every byte."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Dropout(0.3)).to(device(index))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # the engine copies inputs of up to 16 KiB, which no tracker sees
    x = torch.randn(128, 64, device=device(index))

    def step() -> None:
        recompute(model, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    memory = measure_step(step, model, optimizer, [x])
    with zoo.track(model, optimizer=optimizer, inputs=[x]) as timeline:
        step()
    assert timeline.device == str(device(index))
    if IS_SOFTWARE:
        assert memory.peak == timeline.tensor_peak
        assert memory.activation_peak is None
    else:
        assert memory.peak >= timeline.tensor_peak


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        functools.partial(torch.optim.AdamW, foreach=False),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.RMSprop,
    ],
)
def test_a_step_of_the_optimizer_takes_what_it_was_counted_to_take(make: Any) -> None:
    """On an accelerator torch steps by kernels of lists, with a copy of all weights."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(KIND)
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.rand(2, 64, device=KIND)).sum().backward()
        with spending(KIND) as spent:
            optimizer.step()
    assert optimizer_bytes(make, model.parameters()).step == spent.peak


@needs_software
def test_a_device_that_does_not_count_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda index: {})
    with pytest.raises(ArgumentError, match=f"devices that count it; got {KIND}:1, whose peak"):
        trace(lambda: None, device(1))
    model = nn.Linear(2, 2, device=device(1))
    with pytest.raises(
        ArgumentError, match=f"device that counts its memory; this model is on {KIND}"
    ):
        zoo.checkpoint(model, memory_budget="device")(torch.ones(2, 2, device=device(1)))


def test_free_memory_is_that_of_the_device() -> None:
    last = device(COUNT - 1)
    before = free_on(last)
    block = torch.empty(8 << 20, dtype=torch.uint8, device=last)
    if IS_SOFTWARE:
        assert before - free_on(last) == block.nbytes
    assert free_on(last) < before


def deep() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers).to(device(COUNT - 1))


@needs_numpy
@needs_software
def test_a_model_trains_in_the_memory_that_the_device_has(module: Any) -> None:
    """Its baseline runs out of memory there."""
    model, x = deep(), torch.randn(512, 64, device=device(COUNT - 1))
    resident = torch.accelerator.memory_allocated(device(COUNT - 1))
    total = resident + 12 * x.nbytes
    planned = zoo.checkpoint(deep(), memory_budget="device")
    module.set_total_memory(COUNT - 1, total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        planned(x).sum().backward()
    finally:
        module.set_total_memory(COUNT - 1, 8 << 30)


def test_a_convolution_has_the_layouts_that_a_plan_counts_with() -> None:
    def layouts() -> list[tuple[int, ...]]:
        x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        weight = torch.randn(6, 4, 3, 3, requires_grad=True)
        y = F.conv2d(x, weight)
        made = torch.autograd.grad(y.sum(), [x, weight])
        return [tensor.stride() for tensor in (y, *made)]

    with FakeTensorMode():
        expected = layouts()
    assert layouts() == expected


@needs_numpy
def test_the_largest_batch_is_measured_on_the_device() -> None:
    # before torch 2.13 AdamW counts its steps on the default device, and not on the parameters'
    with device(COUNT - 1):
        # what cuBLAS holds, whatever the size
        least = zoo.plan(deep(), torch.randn(4, 64), max_overhead=9.0).fixed.libraries
        budget = (4 << 20) + least
        found = zoo.largest(deep(), torch.randn(4, 64), memory_budget=budget)
    assert found.size > 4
    assert found.measured_peak <= budget


@needs_numpy
def test_verify_compares_trainings_on_the_device() -> None:
    assert zoo.verify(deep(), torch.randn(8, 64, device=device(COUNT - 1)))


def test_a_chain_is_planned_whose_norms_read_a_counter_on_the_device() -> None:
    """As BatchNorm without momentum does, which divides by it; a fake tensor has no number."""

    def trained(checkpoint: bool) -> Record:
        torch.manual_seed(0)
        model = zoo.checkpoint(Residuals(), checkpoint)
        assert model.blocks[1].norm.momentum is None
        return train(model, lambda: [images()])

    assert_same(trained(True), trained(False))


class Routed(nn.Module):
    """Picks by `topk`, and sums by kernels whose results are kept: of a gather, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(64, 8), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(2)
        rows = torch.arange(len(x), device=x.device)
        y = self.down(self.up(x).sin().exp().sin())
        y = torch.zeros_like(x).scatter_add(0, (rows // 3)[:, None].expand_as(x), y)
        y = torch.zeros_like(x).index_add_(0, rows // 2, y * weights.sum(-1, keepdim=True))
        return x + (y.sin().exp() * (experts.sum(-1, keepdim=True) + 1)).sin()


@needs_numpy
@needs_software
@pytest.mark.parametrize("share", [0.5, 0.36, 0.34])
def test_a_budget_counts_results_that_no_replay_may_make(share: float) -> None:
    place = device(COUNT - 1)
    model = nn.Sequential(*(Routed() for _ in range(6)), nn.Linear(64, 1)).to(place)
    x = torch.randn(512, 64, device=place)
    make = functools.partial(torch.optim.SGD, lr=0.1)
    report = zoo.plan(model, x, memory_budget=share, optimizer=make)
    zoo.checkpoint(model, report)
    taken = peak_by_own_plan(model, x, make)
    assert 0.998 * report.predicted_peak <= taken <= report.predicted_peak


def test_a_process_that_uses_the_device_is_not_forked() -> None:
    torch.ones(1, device=device(0))
    assert not can_fork()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_device_is_exact(dtype: torch.dtype) -> None:
    def program(call: Callable[..., Any]) -> Any:
        model, x = deep(), torch.ones(4, 64, device=device(COUNT - 1), requires_grad=True)
        with torch.autocast(KIND, dtype):
            y = call(model, x)
            assert y.dtype is dtype
        y.float().sum().backward()
        return y, x.grad, gradients(model)

    assert_exact(program)


# families, and the package that has their data; torch has no kernel for an LSTM's cell on a device
# of this kind
FAMILIES = {
    "densenet100": "sklearn",
    "vnet": "nibabel",
    "vit_tiny_patch16": "sklearn",
    "gpt2_small": "pydoc_data",
}


# what CUDA says of a kernel for which it has no deterministic algorithm
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.filterwarnings("ignore:.*a non-deterministic algorithm")
@pytest.mark.parametrize(
    ("name", "is_deterministic"),
    [*((name, False) for name in FAMILIES), ("gpt2_small", True), ("vnet", True)],
)
def test_a_family_is_compared_on_the_device(name: str, is_deterministic: bool) -> None:
    pytest.importorskip("pydantic", reason="the comparison needs pydantic")
    pytest.importorskip(FAMILIES[name], reason=f"the data of {name} needs {FAMILIES[name]}")
    from zoo.harness.comparison_cells import expand  # noqa: PLC0415
    from zoo.harness.config import config_folder, read  # noqa: PLC0415
    from zoo.harness.worker import work  # noqa: PLC0415

    quick = read(config_folder() / "quick.yaml", (), {})
    config = replace(quick, device=KIND, deterministic=is_deterministic)
    number = [model.name for model in config.models].index(name)
    model, cells = config.models[number], expand(config)[number]
    kinds = [kind for kind in cells if kind != "timing"]
    if name == "vnet" and is_deterministic:
        with torch.device("cpu"), pytest.raises(DeterminismError, match="for nll_loss2d_forward"):
            work(cells["baseline"], also=lambda *_: {})
        return
    # data and cells say where their tensors are
    with torch.device("cpu"):
        measured = {kind: work(cells[kind], also=lambda *_: {}) for kind in kinds}
    assert torch.get_deterministic_debug_mode() == 0
    records = {kind: {"status": "done", **measured[kind]} for kind in kinds}
    (row,) = rows([{"model": asdict(model), **records, "timing": {"status": "done"}}])
    assert row.exact
    assert row.peaks["peak"]["checkpointed"] < row.peaks["peak"]["baseline"]
    assert (
        row.peaks["tensor_peak"]["optimizer_in_backward"]
        <= row.peaks["tensor_peak"]["checkpointed"]
    )
