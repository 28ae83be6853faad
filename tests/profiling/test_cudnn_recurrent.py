"""LSTMs and GRUs of cuDNN: what they return on fake tensors, and how they are planned and trained.

The program in software runs torch's own CUDA code, and of cuDNN what tells which masks a backward
gets: see `cuda_runtime.c`.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.profiling import cuda_runtime
from zoo._torch import FakeTensor, FakeTensorMode
from zoo.engine.operator_effects import effects_of, written_by
from zoo.profiling.cudnn_recurrent import Network
from zoo.profiling.fake_tensors import FakeTensorFixes

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
LSTM = 2
# layers, hidden, T, N, dtype, dropout, and the bytes of the reserve on an H200 (cuDNN 9.19)
RECORDED = [
    (1, 650, 35, 20, torch.float32, 0.0, 9_100_256),
    (2, 650, 35, 20, torch.float32, 0.5, 20_077_152),
    (2, 650, 70, 20, torch.float32, 0.5, 40_154_016),
    (2, 650, 35, 40, torch.float32, 0.5, 40_154_016),
    (2, 650, 35, 20, torch.float16, 0.5, 10_067_168),
    (1, 256, 100, 32, torch.float32, 0.0, 16_384_256),
    (1, 256, 100, 32, torch.bfloat16, 0.0, 8_192_256),
]


@pytest.mark.parametrize("recorded", RECORDED)
def test_the_estimate_of_a_reserve_is_what_was_recorded(recorded: Any) -> None:
    layers, hidden, length, batch, dtype, dropout, size = recorded
    sizes = hidden, LSTM, hidden, 0, layers, 1, length * batch
    assert Network(*sizes, dtype, dropout, True).reserve_bytes() == size


def fake_call(dropout: float, reserve: bool = True) -> tuple[Any, list[Any]]:
    """Calls the kernel of two layers on fake tensors of a device that is not here."""

    def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made: Tensor = FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), CUDA)
        return made

    mode = FakeTensorMode()
    shapes = [(2600, 650), (2600, 650), (2600,), (2600,)] * 2
    x, flat, hidden = fake(35, 20, 650), fake(6_770_400), fake(2, 20, 650)
    state = fake(6_488_064, dtype=torch.uint8)
    settings = LSTM, 650, 0, 2, False, dropout, reserve, False, [], state
    weights = [fake(*shape) for shape in shapes]
    with mode, FakeTensorFixes(mode):
        args = [x, weights, 4, flat, hidden, hidden, *settings]
        return aten._cudnn_rnn.default(*args), args


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is here is asked")
def test_without_the_device_the_reserve_is_estimated() -> None:
    (output, hidden, cell, reserve, flat), args = fake_call(0.5)
    assert (output.shape, hidden.shape, cell.shape) == ((35, 20, 650), (2, 20, 650), (2, 20, 650))
    assert reserve.nbytes == 20_077_152
    assert flat is args[3]
    assert {one.device for one in (output, hidden, cell, reserve)} == {CUDA}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is here is asked")
@pytest.mark.parametrize("is_flat", [True, False])
def test_a_buffer_that_the_weights_lie_in_is_no_new_memory(is_flat: bool) -> None:
    """torch 2.11 does not find it for fake tensors, and a fake of it may stand for each weight."""
    mode, network = FakeTensorMode(), Network(32, LSTM, 32, 0, 1, 1, 40, torch.float32, 0.0, True)
    shapes = [(128, 32), (128, 32), (128,), (128,)]
    weights = []
    for shape, place in zip(shapes, network.offsets[0], strict=True):
        made = torch.empty(network.weights if is_flat else shape, device="meta")
        if is_flat:
            made = made[place : place + math.prod(shape)].view(shape)
        weights.append(FakeTensor(mode, made, CUDA))
    x, hidden = (
        FakeTensor(mode, torch.empty(shape, device="meta"), CUDA)
        for shape in ((5, 8, 32), (1, 8, 32))
    )
    settings = LSTM, 32, 0, 1, False, 0.0, True, False, [], None
    with mode, FakeTensorFixes(mode):
        *_, flat = aten._cudnn_rnn.default(x, weights, 4, None, hidden, hidden, *settings)
    assert flat.shape == (network.weights,)
    storages = {weight.untyped_storage()._cdata for weight in weights}
    assert (flat.untyped_storage()._cdata in storages) is is_flat


def test_without_a_rate_or_training_the_state_of_the_dropout_is_not_written() -> None:
    effects = effects_of(aten._cudnn_rnn.default)
    calls = [fake_call(*given)[1] for given in [(0.5, True), (0.0, True), (0.5, False)]]
    written = [written_by(effects, args, {}) for args in calls]
    assert [[one is args[15] for one in found] for found, args in zip(written, calls, strict=True)]
    assert [len(found) for found in written] == [1, 0, 0]


COMMON = """
import ctypes, warnings, zoo
from torch import nn
from tests.profiling.test_cudnn_recurrent import *

warnings.simplefilter("error")
# torch itself leaves weights in bfloat16 as they are
warnings.filterwarnings("ignore", "RNN module weights")

def masks():
    "Returns what backwards have read in their reserves since the last call."
    found = ctypes.POINTER(ctypes.c_ulonglong)()
    count = ctypes.CDLL(None).software_masks(ctypes.byref(found))
    return [found[n] % 256 for n in range(count)]

class Model(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.dropout = nn.Linear(64, 64), nn.Dropout(0.1)
        wide = options.get("proj_size", 64) * (2 if "bidirectional" in options else 1)
        self.one, self.mix = kind(64, 64, **options), nn.Linear(wide, 64)
        self.other = kind(64, 64, **options)

    def forward(self, x):
        x = self.mix(self.dropout(self.one(self.dropout(self.first(x)))[0]))
        return self.other(x)[0]

def trained(model, x):
    optimizer, counted = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(3)
    for _ in range(4):
        masks()
        torch.cuda.reset_peak_memory_stats()
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # those of kernels that planning measured come first
        counted.append(masks()[-2:])
    offset = torch.cuda.default_generators[0].get_offset()
    return [counted, offset], torch.cuda.memory_stats()["requested_bytes.all.peak"]
"""
# without dropout first: its state stays
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("GRU", {"num_layers": 2, "bidirectional": True}),
    ("RNN", {"num_layers": 3, "bias": False}),
    ("LSTM", {"num_layers": 2, "proj_size": 16}),
    ("LSTM", {"num_layers": 2, "dropout": 0.3}),
    ("GRU", {"num_layers": 2, "dropout": 0.3, "batch_first": True}),
]
DTYPES = torch.float32, torch.float16, torch.bfloat16
STATE = 108 * 2048 * 24

AGREEMENT = """
import itertools
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.profiling.tensor_spec import TensorSpec

def described(results):
    "Describes tensors, and which of them lie in one storage."
    leaves, storages = torch.utils._pytree.tree_leaves(results), {}
    # a storage itself is an argument, the same of both; in words it would list each of its bytes
    leaves = [leaf.nbytes() if isinstance(leaf, torch.UntypedStorage) else leaf for leaf in leaves]
    return [str(leaf) if not isinstance(leaf, Tensor) else str(TensorSpec.of(leaf)._replace(
        storage=storages.setdefault(leaf.untyped_storage()._cdata, len(storages)),
    )) for leaf in leaves]

class Compared(TorchDispatchMode):
    "Calls cuDNN's kernels on fake tensors, too."
    pairs = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not ("aten._cudnn_rnn" in str(func) or func is aten.set_.source_Storage):
            return func(*args, **(kwargs or {}))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        one = lambda tensor: mode.from_tensor(tensor.detach())
        given = torch.utils._pytree.tree_map_only(Tensor, one, args)
        with mode, FakeTensorFixes(mode):
            fake = func(*given)
        real = func(*args)
        self.pairs.append([str(func), described((real, args)), described((fake, given))])
        return real

for (name, options), dtype, needs in itertools.product(KINDS, DTYPES, (True, False)):
    model = getattr(nn, name)(64, 64, **options).to("cuda", dtype)
    x = torch.zeros(7, 5, 64, device="cuda", dtype=dtype, requires_grad=needs)
    with Compared():
        model(x)[0].sum().backward()
        model.flatten_parameters()
        model.eval()(x)
print(json.dumps(Compared.pairs))
"""


def run(program: str) -> Any:
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    return cuda_runtime.run(f"{COMMON}\n{program}")


def test_fake_results_are_those_of_the_kernels() -> None:
    """Shapes, strides, bytes, and which of the results lie in one storage."""
    found = run(AGREEMENT)
    assert {name.split(".")[1] for name, *_ in found} == {
        "_cudnn_rnn", "_cudnn_rnn_backward", "_cudnn_rnn_flatten_weight", "set_"
    }  # fmt: skip
    for name, real, fake in found:
        assert (name, fake) == (name, real)


TRAINED = """
torch.mm(*torch.rand(2, 8, 8, device="cuda", requires_grad=True)).sum().backward()
rows = []
for name, options in KINDS:
    for dtype in DTYPES[::2]:
        x = torch.zeros(100, 64, 64, device="cuda", dtype=dtype)
        held = torch.cuda.memory_stats()["requested_bytes.all.current"] - x.nbytes

        def make():
            return Model(getattr(nn, name), **options).to("cuda", dtype)

        plain, _ = trained(make(), x)
        by_default, _ = trained(model := zoo.checkpoint(make()), x)
        depths = [zoo.plan_of(model).depth()]
        del model
        model = make()
        report = zoo.plan(model, x, optimizer=torch.optim.SGD, max_overhead=9.0)
        by_report, peak = trained(zoo.checkpoint(model, report.plan), x)
        depths.append(zoo.plan_of(model).depth())
        # the workspaces of cuBLAS are held from the first product on
        predicted = report.predicted_peak - report.fixed.libraries
        rows.append([depths, plain, by_default, by_report, predicted, peak - held])
        del model, report
print(json.dumps(rows))
"""


def test_by_a_plan_they_train_with_the_masks_of_plain_training_in_what_was_predicted() -> None:
    """Nor does it draw other numbers, which would show in the offset of the stream."""
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    rows = run(TRAINED)
    for (_, options), found in zip((kind for kind in KINDS for _ in range(2)), rows, strict=True):
        depths, plain, by_default, by_report, predicted, taken = found
        assert min(depths) > 0
        assert by_default == by_report == plain
        counts, _ = plain
        assert counts == [[2, 1], [4, 3], [6, 5], [8, 7]] if "dropout" in options else [[0, 0]] * 4
        # the state of a dropout, which the model before has made
        more = STATE if "dropout" in options else 0
        assert taken <= predicted <= 1.12 * taken + more


PACKED = """
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix = nn.Linear(64, 64), nn.Linear(64, 64)
        self.one = nn.LSTM(64, 64, num_layers=2, dropout=0.3)

    def forward(self, inputs):
        x, lengths = inputs
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x).sin().cos(), lengths)
        return self.mix(nn.utils.rnn.pad_packed_sequence(self.one(packed)[0])[0])

inputs = torch.zeros(100, 64, 64, device="cuda"), torch.arange(100, 36, -1)
plain, _ = trained(Packed().cuda(), inputs)
rows = []
for given in ({"checkpoint": True}, {"memory_budget": 0.97}):
    model = zoo.checkpoint(Packed().cuda(), **given)
    found, _ = trained(model, inputs)
    with zoo.track(model) as timeline:
        model(inputs).sum().backward()
    rows.append([zoo.plan_of(model).depth(), found, timeline.peak > 0])
print(json.dumps([plain, rows]))
"""


def test_packed_sequences_are_planned_tracked_and_trained() -> None:
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    (counts, offset), rows = run(PACKED)
    for depth, (found, after), is_tracked in rows:
        assert depth > 0
        assert is_tracked
        assert [steps[-1:] for steps in found] == counts == [[1], [2], [3], [4]]
        assert after == offset


JUDGED = (
    PACKED[: PACKED.index("plain, _")]
    + """
from zoo.api.plan import planner_for
from zoo.planner.plan import Plan

torch.mm(*torch.rand(2, 8, 8, device="cuda", requires_grad=True)).sum().backward()
planner, rows = planner_for(Packed().cuda(), (inputs,), optimizer=torch.optim.SGD), []
plans = [Plan.parse(text) for text in ("0-6", "(0-2) 3-6", "(0-3) (4) 5-6")]
predicted = [planner.point(plan).peak - planner.step.fixed.libraries - STATE for plan in plans]
# makes the state of dropout, which later steps find
trained(Packed().cuda(), inputs)
held = torch.cuda.memory_stats()["requested_bytes.all.current"] - inputs[0].nbytes
for plan, size in zip(plans, predicted):
    _, peak = trained(zoo.checkpoint(Packed().cuda(), plan), inputs)
    rows.append([size, peak - held])
print(json.dumps(rows))
"""
)


def test_a_network_that_is_recomputed_copies_its_state_and_a_backward_no_reserve() -> None:
    """Dry steps find the state as steps of a training do, and keep no graph."""
    pytest.importorskip("numpy", reason="planning for a budget needs NumPy")
    kept, before, recomputed = run(JUDGED)
    for predicted, taken in (kept, before, recomputed):
        assert taken <= predicted <= 1.15 * taken
    assert recomputed[1] > kept[1] > before[1]


FAMILIES = """
rows = []
for kind in ("lstm", "gru"):
    torch.manual_seed(0)
    model = getattr(zoo, kind)(vocabulary=99, embedding=32, hidden=32, checkpoint=True).cuda()
    tokens = torch.zeros(35, 20, dtype=torch.long, device="cuda")
    for _ in range(2):
        model(tokens, None, tokens)[0].backward()
    rows.append(zoo.plan_of(model).depth())
print(json.dumps(rows))
"""


def test_the_families_train_by_a_plan() -> None:
    assert min(run(FAMILIES)) > 0


ALONE = """
from zoo.profiling.kernel_costs import measure_kernels
from zoo.profiling.tensor_spec import KernelSpec, tensors_in
from torch.utils._python_dispatch import TorchDispatchMode

specs, made = [], []
class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "cudnn_rnn" in str(func):
            specs.append(KernelSpec.of(func, args, kwargs or {}))
        if "dropout_state" in str(func):
            made.append(result)
        return result

model, x = nn.LSTM(64, 64, 2, dropout=0.3).cuda(), torch.zeros(9, 8, 64, device="cuda")
with Noted():
    model(x)[0].sum().backward()
    states = [tensor for spec in specs[:2] for tensor in tensors_in(spec.prepared()[1])]
is_made = [any(one is state for one in states) for state in made]
print(json.dumps([[cost is not None for cost in measure_kernels(specs[:2], CUDA)], is_made]))
"""


def test_their_kernels_run_alone_with_a_state_of_the_dropout() -> None:
    measured, is_made = run(ALONE)
    assert measured == [True, True]
    # the program's own, and one for each kernel
    assert is_made == [False, True, True]
