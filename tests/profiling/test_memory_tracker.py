"""A tracked step has every allocation in it, under the right name, and is the step it would be."""

import functools
import inspect
import json
import pickle
import pickletools
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import _memory_viz
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import zoo
from tests.profiling.models import KIB, Exponentials
from tests.training import ResidualBlock, Residuals, assert_same, everything, images, train
from zoo.errors import ArgumentError
from zoo.profiling.memory_tracker import StorageLifetime, StorageRecorder
from zoo.profiling.peak_memory import measure_step, trace
from zoo.profiling.source_location import block_of
from zoo.profiling.timeline import CATEGORIES, Allocation, Mark, Timeline


class Training:
    """Something to track: a model, its optimizer and a step of both."""

    def __init__(self, model, *inputs):
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(*self.inputs).square().mean().backward()
        self.optimizer.step()

    def tracked(self, **options):
        self.optimizer.zero_grad()
        with zoo.track(
            self.model, optimizer=self.optimizer, inputs=self.inputs, **options
        ) as timeline:
            self.step()
        return timeline


def chain(plan=False):
    torch.manual_seed(0)
    return zoo.checkpoint(Residuals(), plan)


PLANS = [False, True, "sqrt", zoo.Plan(((0, 1, (2, 3, 4)), 5, (6, 7, 8), *range(9, 11)))]


@pytest.mark.parametrize("plan", PLANS)
def test_the_peak_is_the_allocators_to_the_byte(plan):
    training = Training(chain(plan), images(8, size=16))
    measured = measure_step(training.step, training.model, training.optimizer, training.inputs)
    timeline = training.tracked(allocator=True)
    # small tensors that the engine keeps from step to step are found when they are read
    kept = timeline.by("category")["inputs"] - training.inputs[0].nbytes
    assert 0 <= kept < 1000
    assert timeline.peak == measured.peak + kept
    assert timeline.activation_peak == measured.activation_peak
    assert timeline.kernel_workspace == timeline.peak - timeline.tensor_peak >= 0
    assert timeline.tensor_peak <= training.tracked().peak <= timeline.peak
    assert 0 < timeline.tensor_activation_peak <= timeline.activation_peak
    assert timeline.activation_peak - timeline.tensor_activation_peak <= max(
        timeline.total(["kernel workspace"])
    )


@pytest.mark.parametrize("plan", PLANS)
def test_tracking_keeps_nothing_alive(plan):
    training = Training(chain(plan), images(8, size=16))
    assert trace(training.tracked).peak == trace(training.step).peak


class Three(nn.Module):
    """Looks in the end whether its first result is gone."""

    def forward(self, x):
        x = x + 1
        made = weakref.ref(x)
        x = x * 2
        self.gone = made() is None
        return x


def test_a_state_goes_when_the_next_is_there_though_the_stack_was_read():
    model = Three()
    with zoo.track(model):
        model(torch.ones(4))
    assert model.gone


@pytest.mark.parametrize("plan", PLANS)
def test_a_tracked_training_is_bit_for_bit_the_untracked_one(plan):
    batch = functools.partial(lambda: (images(),))
    model = chain(plan)
    forward = zoo.track(model)(model.__call__)
    assert_same(train(model, batch, forward=forward), train(chain(plan), batch))


def test_each_category_holds_what_it_should():
    training = Training(Exponentials(count=3))
    timeline = training.tracked()
    curves = timeline.curves()
    most = {name: max(curve) / KIB for name, curve in curves.items() if max(curve)}
    assert most["parameters"] == most["optimizer state"] == most["gradients"] == 16
    assert most["buffers"] == 2
    # three results and the small ones of the loss
    assert 3 * 16 <= most["saved activations"] < 3 * 16 + 17
    assert "recomputed" not in most
    assert set(most) == {
        "parameters", "buffers", "optimizer state", "gradients", "saved activations", "temporaries",
    }  # fmt: skip
    assert curves["gradients"][0] == 0 < curves["gradients"][-1]


@pytest.mark.parametrize(
    "wrapper", [zoo.recompute, functools.partial(checkpoint, use_reentrant=False)]
)
def test_what_a_recomputation_makes_is_recomputed_whoever_runs_it(wrapper):
    model = Exponentials(count=4)
    with zoo.track(model) as timeline:
        wrapper(model).backward(gradient=torch.ones(4 * KIB))
    assert [mark.phase for mark in timeline.phases][:2] == ["forward", "recompute"]
    # each exp but perhaps the last is recomputed
    assert max(timeline.curves()["recomputed"]) in (3 * 16 * KIB, 4 * 16 * KIB)
    # the output, the gradient that it is given, and a copy of the buffer
    assert max(timeline.curves()["saved activations"]) <= (2 * 16 + 2) * KIB


@pytest.mark.parametrize("keep", [None, False])
@pytest.mark.parametrize("wrapper", [zoo.recompute, lambda function: function()])
def test_a_backward_that_is_differentiated_is_no_recomputation(wrapper, keep):
    model = Exponentials(count=2)
    with zoo.track(model) as timeline:
        total = wrapper(model).sum()
        (gradient,) = torch.autograd.grad(
            total, model.parameters(), create_graph=True, retain_graph=keep
        )
    phases = {a.phase for a in timeline.allocations if a.dtype} - {"before", "other"}
    own = {"recompute"} if wrapper is zoo.recompute else set()
    assert phases == {"forward", "backward"} | own
    assert gradient.requires_grad


def test_a_recomputation_is_one_though_its_graph_is_retained():
    model = Exponentials(count=2)
    with zoo.track(model) as timeline:
        checkpoint(model, use_reentrant=False).sum().backward(retain_graph=True)
    assert max(timeline.curves()["recomputed"])


def test_the_phases_follow_each_other():
    training = Training(chain(), images())
    # torch's plain AdamW allocates in its step, the fused kernels do not
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    with zoo.track(training.model) as timeline:
        training.step()
        training.step()
    phases = [mark.phase for mark in timeline.phases if mark.phase != "other"]
    assert phases == ["forward", "backward", "optimizer"] * 2


def test_gradients_from_before_are_there_from_the_start():
    model = Exponentials()
    model().sum().backward()
    with zoo.track(model) as timeline:
        model().sum().backward()
    assert timeline.curves()["gradients"][0] == 16 * KIB
    model.zero_grad()
    with zoo.track(model) as timeline:
        model().sum().backward()
    assert timeline.curves()["gradients"][0] == 0
    assert timeline.curves()["gradients"][-1] == 16 * KIB


def test_gradients_that_go_right_after_the_backward_were_gradients():
    model = Exponentials()
    with zoo.track(model) as timeline:
        model().sum().backward()
        model.zero_grad()
    assert max(timeline.curves()["gradients"]) == 16 * KIB


@pytest.mark.parametrize("plan", [False, True])
def test_gradients_that_the_optimizer_frees_in_the_backward_were_gradients(plan):
    training = Training(chain(plan), images())
    whole = training.tracked(allocator=True)
    zoo.optimizer_in_backward(training.model, training.optimizer)
    training.step()
    found = training.tracked(allocator=True)
    largest = max(4 * parameter.numel() for parameter in training.model.parameters())
    gradients = found.curves()["gradients"]
    assert largest <= max(gradients) < max(whole.curves()["gradients"])
    assert gradients[-1] == 0
    # none of them is taken for an activation
    assert found.tensor_activation_peak == whole.tensor_activation_peak


def test_an_optimizer_that_was_not_named_is_met_in_its_step():
    training = Training(Exponentials())
    with zoo.track(training.model) as timeline:
        training.step()
    assert set(timeline.curves()["optimizer state"]) == {16 * KIB}


def test_inputs_are_found_and_those_given_count_though_nothing_reads_them():
    model, x, unread = nn.Linear(4, 4), torch.ones(64, 4), torch.ones(KIB)
    with zoo.track(model, inputs={"other": [unread]}) as timeline:
        model(x)
    assert timeline.curves()["inputs"][0] == 64 * 4 * 4 + 4 * KIB


def test_a_holder_is_named_by_module_and_line():
    model = chain()
    with zoo.track(model) as timeline:
        model(images(8, size=16)).sum().backward()
    normalize = next(a for a in timeline.allocations if a.module == "blocks.1.norm" and a.line)
    _, start = inspect.getsourcelines(ResidualBlock.forward)
    assert normalize.line == f"tests/training.py:{start + 1}"
    assert normalize.block == "blocks.1"
    back = [
        a for a in timeline.allocations if a.phase == "backward" and a.module == "blocks.1.norm"
    ]
    assert {a.line for a in back} == {normalize.line}
    assert any(a.category == "gradients" and a.name == "blocks.1.norm.weight" for a in back)


def test_modules_of_a_recomputation_are_named_as_in_the_forward():
    def modules(plan):
        model = chain(plan)
        model(images())  # decides
        with zoo.track(model) as timeline:
            model(images()).sum().backward()
        return {a.module for a in timeline.allocations if a.phase in ("forward", "recompute")}

    assert modules("sqrt") == modules(False)


def test_what_is_recomputed_was_made_where_the_model_was_called_not_its_backward():
    model = zoo.checkpoint(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), "sqrt")
    model(torch.ones(4, 8))  # decides
    with zoo.track(model) as timeline:
        total = model(torch.ones(4, 8)).sum()
        total.backward()
    made = [a for a in timeline.allocations if a.phase in ("forward", "recompute") and a.module]
    assert {a.phase for a in made} == {"forward", "recompute"}
    (line,) = {a.line for a in made}
    assert line.startswith("tests/profiling/test_memory_tracker.py:")


class Stop(BaseException):
    """Ends a step somewhere."""


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_exception_leaves_nothing_behind_and_the_timeline_so_far(where):
    training = Training(chain("sqrt"), images())

    def stop(*_):
        raise Stop

    def step():
        output = training.model(*training.inputs)
        if where == "forward":
            stop()
        if where == "backward":
            output.register_hook(stop)
        output.sum().backward()
        training.optimizer.step()

    training.optimizer.register_step_pre_hook(stop)
    tracker = zoo.track(training.model)
    with pytest.raises(Stop):
        tracker(step)()
    timeline = tracker.timeline
    assert timeline.error == "Stop()"
    assert timeline.phases[-1].phase == where
    assert timeline.peak > 0
    assert _get_current_dispatch_mode() is None
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    assert not torch.autograd.profiler._is_profiler_enabled


def test_the_model_is_as_it_was_and_no_end_is_noted_after_the_block():
    training = Training(chain(True), images())
    before = everything(training.model)
    attributes = {name: set(vars(module)) for name, module in training.model.named_modules()}
    with zoo.track(training.model) as timeline:
        kept = training.model(*training.inputs).detach()
    ends = [allocation.end for allocation in timeline.allocations]
    del kept
    assert [allocation.end for allocation in timeline.allocations] == ends
    assert attributes == {n: set(vars(module)) for n, module in training.model.named_modules()}
    named = {f"parameter {k}": v for k, v in training.model.named_parameters()}
    assert all(torch.equal(before[name], value) for name, value in named.items())


def test_a_decorated_function_leaves_its_latest_timeline():
    model = Exponentials()
    tracker = zoo.track(model)

    @tracker
    def step(factor):
        return (model() * factor).sum()

    assert step(2.0) == 2 * model().sum()
    first = tracker.timeline
    step(3.0)
    assert first.peak == tracker.timeline.peak > 0
    assert tracker.timeline is not first


def test_sparse_gradients_and_resized_storages_are_seen():
    model = nn.Embedding(100, 64, sparse=True)
    with zoo.track(model) as timeline:
        model(torch.tensor([1, 2])).sum().backward()
        grown = torch.empty(10)
        grown.resize_(KIB)
        del grown
    gradients = [a for a in timeline.allocations if a.category == "gradients"]
    assert sum(a.bytes for a in gradients) == 2 * 64 * 4 + 2 * 8
    assert any(a.bytes == 4 * KIB and a.end is not None for a in timeline.allocations)


def test_the_peak_is_that_of_memray(tmp_path):
    memray = pytest.importorskip("memray")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(12)))
    training = Training(model, torch.randn(2**15, 64))
    timeline = training.tracked(allocator=True)
    path = tmp_path / "step.bin"
    with memray.Tracker(path):
        training.step()
    with memray.FileReader(path) as reader:
        records = reader.get_high_watermark_allocation_records()
        allocated = sum(record.size for record in records)
    before = timeline.total()[0]
    assert abs(before + allocated - timeline.peak) < 0.01 * timeline.peak


def test_only_the_cpus_allocator_is_read_and_only_modules_are_tracked():
    with pytest.raises(ArgumentError, match="the model is on meta"):
        zoo.track(nn.Linear(1, 1, device="meta"), allocator=True)
    with pytest.raises(ArgumentError, match=r"needs a torch\.nn\.Module; got function"):
        zoo.track(lambda: None)


def test_a_block_belongs_to_the_storage_that_was_seen_in_it():
    recorder = StorageRecorder(nn.Module())
    recorder.trail.append((0, "forward", StorageLifetime(0, 0).location))
    recorder.lifetimes = [
        StorageLifetime(64, 25, 31, address=7),
        StorageLifetime(8, 5, None, resident=True, address=9),
    ]
    # the first block at this address is a workspace of the same size
    events = [(10, 7, 64), (15, 7, -64), (20, 7, 64), (22, 1, 512), (23, 1, -512), (30, 7, -64)]
    timeline = Timeline()
    recorder.fill(timeline, events)
    found = [(a.category, a.bytes, a.start, a.end) for a in timeline.allocations]
    assert found == [
        ("temporaries", 64, 3, 6), ("inputs", 8, 0, None),
        ("kernel workspace", 64, 1, 2), ("kernel workspace", 512, 4, 5),
    ]  # fmt: skip
    assert (timeline.peak, timeline.peak_point, timeline.tensor_peak) == (64 + 512 + 8, 4, 72)


def timeline_of_two():
    return Timeline(
        title="Net",
        device="cpu",
        length=3,
        phases=[Mark(0, "forward"), Mark(2, "backward")],
        allocations=[
            Allocation(100, 0, None, "parameters", "before", "fc", "fc", "", (5, 5), "float32"),
            Allocation(64, 1, 3, "saved activations", "forward", "fc", "fc", "net.py:3"),
            Allocation(30, 2, None, "gradients", "backward", "fc", "fc", "", (), "", "fc.bias"),
        ],
    )


def test_a_timeline_is_data():
    timeline = timeline_of_two()
    assert timeline.total() == [100, 164, 194, 130]
    assert (timeline.peak, timeline.phase_at(timeline.peak_point)) == (194, "backward")
    assert timeline.activation_peak == 64
    assert timeline.by("category", 3) == {"parameters": 100, "gradients": 30}
    assert [a.line for a in timeline.holders()] == ["net.py:3"]
    assert Timeline.from_json(timeline.to_json()) == timeline
    rows = timeline.to_csv().splitlines()
    assert rows[3].split(",")[:3] == ["2", "backward", "100"]
    with pytest.raises(ArgumentError, match="no timeline in JSON"):
        Timeline.from_json(json.dumps({"version": 2, "columns": []}))
    with pytest.raises(ArgumentError, match="no attribute 'size', but bytes, start"):
        timeline.by("size")


def test_a_snapshot_for_memory_viz_has_every_byte_at_its_time(tmp_path):
    """Replayed as the page does: what has no alloc was there, what no free has stays."""
    timeline = Training(chain(True), images()).tracked(allocator=True)
    timeline.save_memory_viz(tmp_path / "step.pickle")
    written = (tmp_path / "step.pickle").read_bytes()
    snapshot = pickle.loads(written)
    (events,), (segment,) = snapshot["device_traces"], snapshot["segments"]
    made = {event["addr"] for event in events if event["action"] == "alloc"}
    freed = {event["addr"]: event["size"] for event in events if event["action"] != "alloc"}
    address, bytes_now = 0, sum(size for place, size in freed.items() if place not in made)
    for block in segment["blocks"]:
        assert block["address"] == address
        address += block["size"]
        if block["state"] == "active_allocated" and block["address"] not in made:
            bytes_now += block["size"]
    total = [bytes_now]
    for event in events:
        if event["action"] != "free_requested":
            total.append(total[-1] + event["size"] * (1 if event["action"] == "alloc" else -1))
    assert total == timeline.total()
    (frame,) = max(events, key=lambda event: event["size"])["frames"]
    assert frame["filename"].endswith(".py")
    assert frame["name"].partition(": ")[0] in CATEGORIES
    # torch's own reader takes it; the page's reads these opcodes only
    assert f"{len(events)} entries" in _memory_viz.trace(snapshot)
    assert _memory_viz.segsum(snapshot)
    known = {
        "PROTO", "APPEND", "APPENDS", "NONE", "BINGET", "BININT", "BININT1", "BININT2", "LONG1",
        "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG_BINGET", "MARK", "MEMOIZE", "SETITEMS",
        "SETITEM", "SHORT_BINUNICODE", "BINUNICODE", "STOP",
    }  # fmt: skip
    assert {code.name for code, _, _ in pickletools.genops(written)} <= known


def test_a_timeline_is_written_and_drawn(tmp_path):
    timeline = timeline_of_two()
    text = timeline.table()
    assert "Net on cpu: peak 194 B in the backward, at event 2 of 3" in text
    assert "not measured" in text
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    timeline.plot(tmp_path / "net.svg")
    drawn = (tmp_path / "net.svg").read_text()
    assert "<svg" in drawn
    timeline.plot(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn
    with pytest.raises(ArgumentError, match=r"'net\.xyz' is no picture; end it with \.svg"):
        timeline.plot("net.xyz")


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("layer1.0.bn1", "layer1.0"), ("fc", "fc"), ("up.2.units.0.conv", "up.2"),
        ("features.block1.layer2.reduce", "features.block1.layer2"), ("recur(0)", "recur(0)"),
    ],
)  # fmt: skip
def test_a_block_is_named_by_the_path(path, block):
    assert block_of(path) == block


def test_to_ask_a_fake_tensor_where_it_is_is_no_operation(monkeypatch):
    begin, operations = StorageRecorder._begin_operation, []

    def counted(recorder, frame):
        operations.append(frame)
        return begin(recorder, frame)

    monkeypatch.setattr(StorageRecorder, "_begin_operation", counted)
    with FakeTensorMode(), zoo.track(nn.Linear(1, 1)):
        x = torch.ones(3)
        assert len(operations) == 1
        # what torch's own code in C++ asks, at least once for each tensor of a backward
        assert torch.ops.prim.device.default(x) == torch.device("cpu")
        assert len(operations) == 1


def test_the_step_that_decides_a_plan_takes_no_more_than_the_next() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    other, model = (zoo.checkpoint(nn.Sequential(*blocks), "blocks") for _ in range(2))
    inputs, peaks = torch.rand(512, 64), []
    other(inputs)  # what a process looks up once, in tensors of a few bytes
    for _ in range(2):
        with zoo.track(model) as timeline:
            model(inputs).sum().backward()
        model.zero_grad()
        peaks.append(timeline.peak)
    assert peaks[0] == peaks[1], "the fake tensors of planning count as memory"


@pytest.mark.parametrize("model", [nn.Linear(64, 64), nn.Tanh()])
def test_a_programs_own_fake_tensors_count_whatever_the_model_is_made_of(model: nn.Module) -> None:
    with zoo.track(model) as timeline, FakeTensorMode(allow_non_fake_inputs=True):
        outputs = model(torch.rand(512, 64, requires_grad=True))
        outputs.sum().backward()
    model.zero_grad()
    assert [a.bytes for a in timeline.allocations if a.shape == outputs.shape] == [512 * 64 * 4] * 3
