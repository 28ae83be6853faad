"""How the CUDA caching allocator counts storages: the rules of plans, and torch's own allocator.

It runs on the emulated CUDA of `tests.profiling.cuda_runtime`.
"""

import random

import pytest

from tests.profiling import cuda_runtime, saved_on_cuda
from zoo.profiling.caching_allocator import (
    CUBLAS_WORKSPACE,
    MIB,
    OWN_SEGMENT,
    SMALL,
    in_blocks,
    rounding_of,
    with_rests,
)


@pytest.fixture(autouse=True)
def _on_emulated_cuda() -> None:
    if reason := cuda_runtime.missing():
        pytest.skip(reason)


ALLOCATED = """
def allocated(size):
    torch.cuda.empty_cache()
    block = torch.cuda.caching_allocator_alloc(size)
    found = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(block)
    return found

torch.cuda.init()
"""


def test_a_block_counts_with_the_rest_that_is_not_split_off() -> None:
    """Exactly where it has a segment of its own; of shared segments with a 64th more."""
    draw = random.Random(5)
    edges = (
        1,
        512,
        513,
        MIB - 511,
        MIB,
        MIB + 1,
        OWN_SEGMENT - 512,
        OWN_SEGMENT,
        OWN_SEGMENT + 512,
        21 * MIB,
    )
    sizes = [*edges, *(int(2 ** draw.uniform(9, 28)) for _ in range(300))]
    found = cuda_runtime.run(f"{ALLOCATED}\nprint(json.dumps([*map(allocated, {sizes})]))")
    for size, taken in zip(sizes, found, strict=True):
        if in_blocks(size) <= SMALL or in_blocks(size) >= OWN_SEGMENT:
            assert with_rests(size) == taken
        else:
            assert with_rests(size) == taken + in_blocks(taken // 64)
        # where every block is split, as with expandable segments
        assert in_blocks(size) == rounding_of("cuda", splits_all=True)(size) <= taken
    assert rounding_of("cpu")(4097) == 4097


PLANNED = """
import zoo
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(130, 515), nn.Linear(515, 130), nn.LayerNorm(130)
    def forward(self, x):
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))

def trained(budget):
    "Plans on the CPU and trains on the device."
    model, given = nn.Sequential(*[Block() for _ in range(6)]), torch.rand(301, 130)
    report = zoo.plan(model, given, memory_budget=budget, device="a100")
    torch.cuda.reset_peak_memory_stats()
    model, given = zoo.checkpoint(model.to("cuda"), report.plan), given.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        outputs = model(given)
        loss = outputs.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del outputs, loss
    counted = torch.cuda.memory_stats()
    counted = [counted[f"{name}_bytes.all.peak"] for name in ("requested", "allocated")]
    return [report.predicted_peak, report.plan.depth(), *counted]

# the forward's workspace of cuBLAS and the backward's are there from then on
torch.mm(*torch.rand(2, 8, 8, device="cuda", requires_grad=True)).sum().backward()
held = torch.cuda.memory_allocated()
print(json.dumps([held, [trained(budget) for budget in (1.0, 0.95, 0.91)]]))
"""


def test_a_step_on_cuda_keeps_to_what_was_planned_without_it() -> None:
    pytest.importorskip("numpy")
    held, found = cuda_runtime.run(PLANNED)
    assert held == 2 * CUBLAS_WORKSPACE
    for predicted, _, requested, allocated in found:
        assert requested < allocated <= predicted <= 1.01 * allocated
    assert [depth > 0 for _, depth, *_ in found] == [False, True, True]


MEASURED = """
import zoo
from zoo.api.plan import planner_for
from torch import nn

def found(model, given, where="cuda", **options):
    planner = planner_for(model.to(where), given.to(where), **options)
    return [planner.step.fixed.libraries, bool(planner.step.kernels)]

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(x).tanh()

dense, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.rand(32, 64)
planned = [found(dense, x, "cpu", device=name) for name in ("a100", "h200", "cpu")]
print(json.dumps([found(dense, x), found(Norm(), x), *planned]))
"""


@pytest.mark.parametrize(("major", "size"), [("8", CUBLAS_WORKSPACE), ("9", 32 * MIB)])
def test_workspaces_of_libraries_are_measured_where_the_model_is(major: str, size: int) -> None:
    """Two of them where a kernel multiplies; without the device those of the table."""
    dense, norm, *planned = cuda_runtime.run(MEASURED, SOFTWARE_CUDA_MAJOR=major)
    assert dense == [2 * size, True]
    assert norm == [0, True]
    sizes = 2 * CUBLAS_WORKSPACE, 64 * MIB, 0
    assert planned[:2] == [[sizes[0], False], [sizes[1], False]]
    assert planned[2][0] == 0


RESERVED = """
import zoo
from torch import nn
from zoo.profiling.peak_memory import measure_step

model, x = nn.Linear(2000, 2000), torch.rand(300, 2000)
def tracked(model, x):
    with zoo.track(model, inputs=x) as timeline:
        model(x).sum().backward()
    counted = measure_step(lambda: model(x).sum().backward(), model, None, [x])
    return [timeline.reserved_peak, counted.reserved_peak, "reserved" in timeline.heading]
found = [tracked(model, x), tracked(model.cuda(), x.cuda())]
print(json.dumps([found, torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()]))
"""


def test_reserved_memory_is_told_where_there_is_any() -> None:
    (on_cpu, on_cuda), reserved, allocated = cuda_runtime.run(RESERVED)
    assert on_cpu == [None, None, False]
    assert on_cuda == [reserved, reserved, True]
    assert reserved > allocated


def test_the_table_of_the_module_is_what_torch_saves_here() -> None:
    assert saved_on_cuda.__doc__ is not None
    # what an LSTM saves on the CPU goes by the processor
    rows = [row for row in saved_on_cuda.table() if "LSTM" not in row]
    assert [row for row in rows if row not in saved_on_cuda.__doc__.splitlines()] == []
