"""The model of the CUDA caching allocator: its rules, and torch's own allocator beside it."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.profiling import cuda_runtime, recorded_snapshot, saved_on_cuda
from zoo.errors import ArgumentError
from zoo.profiling.caching_allocator import (
    CUBLAS_WORKSPACE,
    MIB,
    AllocatedBlock,
    CachingAllocator,
    in_blocks,
    rounding_of,
    segment_bytes,
    with_rests,
)
from zoo.profiling.timeline import WORKSPACE, Allocation, Mark, Timeline

SEEDS = range(6)
# a fraction of the 80 GiB of the runtime in software that is exact
LIMIT = 1280 * MIB

# requests and frees by turns: what is drawn goes by a seed
PROGRAM = """
def play(requests, limit):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / (80 << 30))
    blocks, found = {}, []
    for number, size in requests:
        try:
            if size:
                blocks[number] = torch.cuda.caching_allocator_alloc(size)
            elif number in blocks:
                torch.cuda.caching_allocator_delete(blocks.pop(number))
        except torch.OutOfMemoryError:
            found.append("refused")
        requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
        found.append([requested, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    for block in blocks.values():
        torch.cuda.caching_allocator_delete(block)
    return found

torch.cuda.init()
"""


def requests(seed: int, count: int = 300) -> list[tuple[int, int]]:
    """Returns numbered requests of 1 byte to 64 MiB; a size of 0 frees the block of the number."""
    draw = random.Random(seed)
    made: list[tuple[int, int]] = []
    alive: list[int] = []
    for number in range(count):
        if alive and draw.random() < 0.45:
            made.append((alive.pop(draw.randrange(len(alive))), 0))
        else:
            alive.append(number)
            # sizes that come again find blocks of their own size
            size = int(2 ** draw.uniform(0, 26)) if draw.random() < 0.7 else 3 * MIB
            made.append((number, size))
    return made


def play(made: list[tuple[int, int]], limit: int | None) -> list[Any]:
    """Returns the bytes requested, allocated and reserved after each of these requests."""
    allocator, found = CachingAllocator(limit), list[Any]()
    blocks = dict[int, AllocatedBlock]()
    for number, size in made:
        try:
            if size:
                blocks[number] = allocator.allocate(size)
            elif number in blocks:
                allocator.free(blocks.pop(number))
        except ArgumentError:
            found.append("refused")
        counts = (allocator.requested, allocator.allocated, allocator.reserved)
        found.append([count.now for count in counts])
    return found


@pytest.mark.parametrize(
    ("size", "block"), [(1, 512), (512, 512), (513, 1024), (40000, 40448), (MIB, MIB)]
)
def test_a_block_is_rounded_up_to_512_bytes(size: int, block: int) -> None:
    assert CachingAllocator().allocate(size).size == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_a_segment_goes_by_the_size_of_its_first_block(block: int, segment: int) -> None:
    assert segment_bytes(block) == segment
    allocator = CachingAllocator()
    allocator.allocate(block)
    assert allocator.reserved.now == segment


def test_a_request_of_a_byte_less_than_a_mebibyte_is_small_and_of_a_byte_more_is_large() -> None:
    small, large = CachingAllocator(), CachingAllocator()
    small.allocate(MIB - 511)
    large.allocate(MIB + 1)
    assert (small.reserved.now, large.reserved.now) == (2 * MIB, 20 * MIB)


def test_small_and_large_blocks_share_no_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(8 * MIB))
    allocator.allocate(512)
    assert allocator.reserved.now == 22 * MIB


def test_a_large_block_is_cut_where_more_than_a_mebibyte_is_left() -> None:
    for size, kept in ((11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(12 * MIB))
        assert allocator.allocate(size).size == kept


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 16)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(14 * MIB).address == blocks[2].address


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_reserved_holds_what_is_allocated_and_that_what_is_requested(seed: int) -> None:
    for requested, allocated, reserved in play(requests(seed), None):
        assert requested <= allocated <= reserved


@pytest.mark.parametrize("seed", SEEDS)
def test_once_all_is_freed_each_segment_is_one_block(seed: int) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for _, size in requests(seed) if size]
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        allocator.free(block)
    assert allocator.small | allocator.large == allocator.segments
    assert sum(allocator.segments.values()) == allocator.reserved.now
    assert allocator.allocated.now == allocator.requested.now == 0
    allocator.release_cached()
    assert allocator.reserved.now == 0
    assert allocator.reserved.peak >= allocator.allocated.peak > 0


def test_blocks_between_others_are_no_room_for_a_larger_one() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(6 * MIB)
    # 10 MiB are free in the first segment, 5 and 5
    assert allocator.reserved.now == 40 * MIB
    allocator.free(blocks[1])
    allocator.allocate(9 * MIB)
    assert allocator.reserved.now == 40 * MIB


def test_a_block_counts_with_the_rest_that_is_not_split_off() -> None:
    """Exactly where it has a segment of its own; of shared segments with a 64th more."""
    draw = random.Random(5)
    for _ in range(300):
        size = int(2 ** draw.uniform(9, 28))
        taken = CachingAllocator().allocate(size).size
        if size <= MIB or size > 10 * MIB:
            assert with_rests(size) == taken
        else:
            assert with_rests(size) == taken + in_blocks(taken // 64)
        # where every block is split, as with expandable segments
        assert in_blocks(size) == rounding_of("cuda", splits_all=True)(size) <= taken
    assert rounding_of("cpu")(4097) == 4097


def test_at_the_limit_segments_without_a_used_byte_are_given_back_first() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.allocate(24 * MIB))
    kept = allocator.allocate(512)
    allocator.allocate(32 * MIB)
    assert allocator.reserved.now == 34 * MIB
    with pytest.raises(ArgumentError, match=r"20\.0 MiB .* 34\.0 MiB .* of 40\.0 MiB"):
        allocator.allocate(2 * MIB)
    allocator.free(kept)


def test_the_snapshot_that_a_user_of_a_gpu_published() -> None:
    """https://discuss.pytorch.org/t/178671: X @ W + b, with the workspace of cuBLAS."""
    allocator = CachingAllocator()
    for size in (40000, 40, 4000, 8519680):
        allocator.allocate(size)
    product = allocator.allocate(40)
    allocator.allocate(40)
    allocator.free(product)
    assert allocator.allocated.now == 45568 + 8519680
    assert allocator.reserved.now == 2097152 + 20971520
    assert sorted(allocator.small.values()) == [512, 2051072]
    assert [*allocator.large.values()] == [12451840]


def test_a_step_has_its_tensors_and_a_workspace_for_each_thread() -> None:
    lives = [
        Allocation(100, 0, None, "parameters"),
        Allocation(600, 1, 4, "saved activations"),
        Allocation(5000, 2, 3, WORKSPACE),
        Allocation(700, 5, 6, "temporaries"),
    ]
    timeline = Timeline(
        length=6, phases=[Mark(1, "forward"), Mark(4, "backward")], allocations=lives
    )
    peaks = timeline.on_cuda(workspace=2 * MIB)
    assert peaks.requested == 100 + 700 + 4 * MIB
    assert peaks.allocated == 512 + 1024 + 4 * MIB
    assert (peaks.reserved, peaks.workspaces) == (22 * MIB, 4 * MIB)
    assert timeline.on_cuda(workspace=0) == (800, 1536, 2 * MIB, 0)
    with pytest.raises(ArgumentError, match=r"of 21\.0 MiB .* are reserved"):
        timeline.on_cuda(2 * MIB, limit=21 * MIB)


@pytest.fixture(scope="module")
def of_torch() -> Any:
    """What torch's own allocator says after each request, without a limit and with one."""
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    games = [(requests(seed), limit) for seed in SEEDS for limit in (80 << 30, LIMIT, 160 * MIB)]
    return games, cuda_runtime.run(
        f"{PROGRAM}\nprint(json.dumps([play(*game) for game in {games!r}]))"
    )


def test_torchs_own_allocator_takes_the_same_bytes_after_each_request(of_torch: Any) -> None:
    games, found = of_torch
    assert [play(*game) for game in games] == found
    # some are refused, and not all
    assert 0 < sum("refused" in answers for answers in found) < len(found)


TRACKED = """
import zoo
from torch import nn

def tracked(model, given):
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model, given = model.to("cuda"), given.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.cuda.reset_peak_memory_stats()
    with zoo.track(model, optimizer=optimizer, inputs=given) as timeline:
        model(given).sum().backward()
        optimizer.step()
    peaks = torch.cuda.memory_stats()
    counted = [peaks[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")]
    return [list(timeline.on_cuda()[:3]), counted]

def perceptron():
    blocks = [[nn.Linear(130, 130), nn.GELU(), nn.LayerNorm(130)] for _ in range(4)]
    return nn.Sequential(*sum(blocks, []))

def transformer():
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

steps = (perceptron, torch.rand(301, 130)), (transformer, torch.rand(8, 100, 128))
print(json.dumps([tracked(make(), given) for make, given in steps]))
"""


def test_a_tracked_step_is_predicted_as_torch_counts_it() -> None:
    """Workspaces of cuBLAS are counted from where the phase begins, in torch from a product on."""
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    for predicted, counted in cuda_runtime.run(TRACKED):
        for ours, torchs in zip(predicted, counted, strict=True):
            assert torchs <= ours <= 1.01 * torchs


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
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
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
    return [planner.fixed.libraries, planner.kernels_measured]

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
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    dense, norm, *planned = cuda_runtime.run(MEASURED, SOFTWARE_CUDA_MAJOR=major)
    assert dense == [2 * size, True]
    assert norm == [0, True]
    sizes = 2 * CUBLAS_WORKSPACE, 64 * MIB, 0
    assert planned[:2] == [[sizes[0], False], [sizes[1], False]]
    assert planned[2][0] == 0


def test_the_workspace_of_cublas_is_larger_on_hopper() -> None:
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    program = "torch.zeros(8, 8, device='cuda') @ torch.zeros(8, 8, device='cuda')"
    counted = "print(torch.cuda.memory_allocated())"
    taken = [cuda_runtime.run(f"{program}\n{counted}", SOFTWARE_CUDA_MAJOR=m) for m in "89"]
    assert taken == [CUBLAS_WORKSPACE, 32 * MIB]


RECORDED = """
from torch import nn
model = nn.Sequential(nn.Linear(700, 700), nn.GELU(), nn.Dropout(0.1), nn.Linear(700, 700)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
torch.cuda.memory._record_memory_history()
for rows in (500, 3000, 900):
    model(torch.rand(rows, 700, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rows == 3000:
        torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(path)
print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
"""


def test_a_recorded_snapshot_is_played_again_block_for_block(tmp_path: Path) -> None:
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    path = tmp_path / "snapshot.pickle"
    counted = cuda_runtime.run(f"path = {str(path)!r}\n{RECORDED}")
    replay = recorded_snapshot.Replay(recorded_snapshot.read(path))
    assert replay.play() > 100
    assert [replay.allocator.allocated.now, replay.allocator.reserved.now] == counted


def test_the_table_of_the_module_is_what_torch_saves_here() -> None:
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    assert saved_on_cuda.__doc__ is not None
    # what an LSTM saves on the CPU goes by the processor
    rows = [row for row in saved_on_cuda.table() if "LSTM" not in row]
    assert [row for row in rows if row not in saved_on_cuda.__doc__.splitlines()] == []
