"""Captures of planned steps on emulated CUDA, which refuses what CUDA refuses there.

Kernels do nothing: these tests count launches, and compare the seeds and offsets with which the
kernels of a dropout were launched.
"""

import re
from importlib.util import find_spec
from typing import Any

import pytest

from tests.documents import ROOT, snippets
from tests.profiling import cuda_runtime
from zoo.units import format_bytes

COMMON = """
import ctypes, zoo
from torch import nn
from torch.nn.functional import cross_entropy

runtime = ctypes.CDLL(None)
kernels, copies = (
    (ctypes.c_size_t * 3).in_dll(runtime, name) for name in ("software_kernels", "software_copies")
)
torch.backends.cudnn.enabled = False

def launched(call, *given, counts=kernels):
    "Returns kernels that were launched, captured and replayed during a call; or copies."
    before = [*counts]
    call(*given)
    return [now - then for now, then in zip(counts, before)]

def work(call, *given):
    "Returns kernels and copies that were launched, captured and replayed during a call."
    of_copies = []
    of_kernels = launched(lambda: of_copies.extend(launched(call, *given, counts=copies)))
    return of_kernels, of_copies

def draws():
    "Returns captured, seed, offset and offset in the graph of each dropout's launch."
    found = ctypes.POINTER(ctypes.c_ulonglong)()
    count = runtime.software_draws(ctypes.byref(found))
    return [found[4 * place : 4 * place + 4] for place in range(count)]

class Block(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(rate)
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.second(self.dropout(nn.functional.gelu(self.first(self.norm(x)))))

class Program:
    "A model of four blocks, its optimizer and its step; `after` is called with the loss."

    def __init__(self, checkpoint="blocks", rate=0.5, make=None, after=lambda loss: None):
        self.model = nn.Sequential(*(Block(rate) for _ in range(4))).cuda()
        zoo.checkpoint(self.model, checkpoint)
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.optimizer = make(self.model.parameters())
        self.after = after

    def step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.after(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def graphed(self):
        return zoo.make_graphed_step(self.step, model=self.model, optimizer=self.optimizer)

x, found = torch.zeros(512, 64, device="cuda"), {}
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """What the programs below find, in one process."""
    if reason := cuda_runtime.missing(cuda_runtime.OLDEST):
        pytest.skip(reason)
    parts = [
        MEMORY,
        ASKING,
        IN_BACKWARD,
        EVENTS,
        MASKS,
        CALLABLES,
        APART,
        REFUSED,
        WAITING,
        OPTIMIZERS,
        VERIFIED,
        PAGE,
        FAMILIES,
    ]
    # the oldest torch runs where `pip install .` brought no extras
    if find_spec("yaml") is not None:
        parts.append(COMPARED)
    return cuda_runtime.run("\n".join((COMMON, *parts, "print(json.dumps(found))")))


COMPARED = """
from zoo.harness.comparison_cells import GRAPHS, expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness import worker

sizes = {"vocabulary": 100, "depth": 2, "width": 64, "heads": 2}
model = ModelConfig("gpt2_small", "text", 4, 128, sizes, repeats=1)
options = {"device": "cuda", "cuda_graph": True, "optimizer_in_backward": False}
(cells,) = expand(Config("", (model,), steps=2, **options))
del cells["timing"]
measured = {kind: worker.work(cell, lambda *_: {})["memory"] for kind, cell in cells.items()}
found["compared"] = [[measured[GRAPHS[kind]], measured[kind]] for kind in cells if kind in GRAPHS]
"""


def test_the_peak_of_a_compared_graph_is_that_of_its_step_and_of_a_batch(found: Any) -> None:
    pytest.importorskip("yaml")
    assert len(found["compared"]) == 2
    for eager, graph in found["compared"]:
        batch = 2 * 4 * 128 * 8
        assert 0 <= graph["peak"] - eager["peak"] - batch < 1024
        assert graph["reserved_peak"] >= graph["peak"]


FAMILIES = """
from zoo.models.densenet import DenseNet
from zoo.models.resnet import ResNet, basic

images = torch.zeros(2, 3, 32, 32, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
tokens = (torch.zeros(16, 2, dtype=torch.long, device="cuda"),) * 2
voxels = (torch.zeros(2, 1, 16, 16, 16, device="cuda"),)
classify = lambda model, x, y: cross_entropy(model(x), y)
small = {"vocabulary": 100}
MODELS = {
    "resnet": (
        lambda: ResNet(basic, (1, 1), 10, drop_path_rate=0.2), images, classify
    ),
    "densenet": (
        lambda: DenseNet(4, (2, 2), 10, small_images=True, drop_rate=0.2), images, classify
    ),
    "vit_tiny_patch16": (
        lambda: zoo.vit_tiny_patch16(classes=10, image_size=32, depth=3, drop_rate=0.1),
        images, classify,
    ),
    "gpt2_small": (
        lambda: zoo.gpt2_small(**small, positions=16, depth=3, width=64, heads=2),
        tokens, lambda model, x, y: model(x, y),
    ),
    "lstm": (
        lambda: zoo.lstm(**small, embedding=32, hidden=32),
        tokens, lambda model, x, y: model(x, targets=y)[0],
    ),
    "vnet": (
        lambda: zoo.vnet(width=2), voxels, lambda model, x: model(x).float().mean()
    ),
}

def rows(name):
    build, batch, loss_of = MODELS[name]
    torch.backends.cudnn.enabled = name == "lstm"
    for checkpoint in ("blocks", True) if name not in ("densenet", "vnet") else (True,):
        model = zoo.checkpoint(build(), checkpoint).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(*batch):
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
        yield [work(train, *batch) for _ in range(6)]

found["families"] = {name: [*rows(name)] for name in MODELS}
torch.backends.cudnn.enabled = False
"""


def test_steps_of_all_families_are_captured_and_replayed(found: Any) -> None:
    assert len(found["families"]) == 6
    for name, plans in found["families"].items():
        for calls in plans:
            _, _, (eager, *none), first, *replays = (kernels for kernels, _ in calls)
            # torch 2.11 fills a seed and an offset where a capture begins, too
            around, in_replay = first[0], replays[0][0]
            assert none == [0, 0], name
            # the batch in and the loss out are copied; every kernel of an eager step is replayed
            assert first == [around, eager, eager], name
            assert replays == [[in_replay, 0, eager]] * 2, name
            assert in_replay <= around <= 4 < eager, name


def test_copies_of_what_is_written_later_are_in_the_graph(found: Any) -> None:
    # such as those of a batch's classes, and of masks, which no dispatch mode sees
    for name, plans in found["families"].items():
        for calls in plans:
            _, _, eager, first, *replays = (copies for _, copies in calls)
            # an eager step copies its loss out, too
            of_step = eager[0] - 1
            assert first[1:] == [of_step, of_step], name
            assert [replay[1:] for replay in replays] == [[0, of_step]] * 2, name
    of_language_model, *_ = found["families"]["gpt2_small"]
    assert of_language_model[-1][1][2] > 0


MASKS = """
program, seen = Program(), []
train = program.graphed()
for number in range(6):
    offset = torch.cuda.default_generators[0].get_offset()
    train(x)
    advanced = torch.cuda.default_generators[0].get_offset() - offset
    seen.append([advanced, draws()])
found["masks"] = seen
"""


def are_same_masks(draws: list[list[int]]) -> bool:
    """Returns whether the replays in a backward drew what the forward did, the last first."""
    half = len(draws) // 2
    return draws[half:] == draws[:half][::-1]


def test_replayed_dropouts_of_a_graph_draw_the_numbers_of_its_forward(found: Any) -> None:
    _, second, third, captured, *replays = found["masks"]
    for _, draws in (second, third, captured):
        assert len(draws) == 8
        assert len({tuple(draw) for draw in draws}) == 4
        assert are_same_masks(draws)
    # in the capture offsets count from where a replay begins, and as many follow as eagerly
    assert [within for captured, _, _, within in captured[1]] == [0, 4, 8, 12, 12, 8, 4, 0]
    assert all(captured for captured, *_ in captured[1])
    assert {advanced for advanced, _ in (second, third, captured, *replays)} == {16}


CALLABLES = """
import logging
from zoo.engine import devices

said = []
logging.getLogger("zoo").addHandler(handler := logging.Handler())
handler.emit = lambda record: said.append(record.getMessage())

def captured_draws():
    draws()
    torch.cuda.make_graphed_callables(Program().model, (x.clone().requires_grad_(),))
    return [draw for draw in draws() if draw[0]]

found["callables"] = [captured_draws()]
# a mutant: draws are replayed in any graph
current_capture, devices.current_capture = devices.current_capture, lambda device: None
with devices.whole_step_captured():
    found["callables"].append(captured_draws())
devices.current_capture = current_capture
found["said"] = [line for line in said if "cannot draw" in line]
"""


def test_the_graph_of_a_backward_draws_nothing(found: Any) -> None:
    draws, of_mutant = found["callables"]
    # results of the forward's dropouts are kept, in `torch.cuda.make_graphed_callables`
    assert [within for *_, within in draws] == [0, 4, 8, 12]
    # else a second graph would draw, from a seed and an offset that are not the forward's
    assert [within for *_, within in of_mutant] == [0, 4, 8, 12, 12, 8, 4, 0]


def test_a_forward_captured_alone_says_once_what_it_keeps_beside_its_plan(found: Any) -> None:
    (line,) = found["said"]
    # of each of four dropouts the result and the mask
    assert f"take {format_bytes(4 * 512 * 256 * (4 + 1))} beside its plan" in line


APART = """
program, stream, graph = Program(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    for _ in range(3):
        program.step(x)
    loss = program.model(x).sum()
    try:
        with torch.cuda.graph(graph, stream=stream):
            loss.backward()
    except zoo.RecomputeError as error:
        found["apart"] = str(error)
del loss
"""


def test_a_draw_from_before_a_capture_is_not_replayed_in_it(found: Any) -> None:
    assert "captured into a CUDA graph that the forward is not in" in found["apart"]


REFUSED = """
import random
ways = {
    "item": lambda loss: loss.item(),
    "cpu": lambda loss: loss.cpu(),
    "print": lambda loss: str(loss),
    "branch": lambda loss: loss if loss > 0 else None,
    "new": lambda loss: loss * torch.tensor([2.0], device="cuda"),
    "host": lambda loss: loss + torch.zeros(512, 64).to("cuda"),
    "random": lambda loss: random.random(),
    "synchronize": lambda loss: torch.cuda.synchronize(),
    "event": lambda loss: torch.cuda.current_stream().synchronize(),
    "fork": lambda loss: torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    or torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()),
}

def refused(after):
    program = Program(after=after)
    train = program.graphed()
    for _ in range(3):
        train(x)
    before = torch.cuda.memory_allocated()
    try:
        train(x)
        return "captured"
    except zoo.GraphError as error:
        text = str(error)
    left = [
        torch.cuda.memory_allocated() - before,
        torch.cuda.is_current_stream_capturing(),
        torch.cuda.current_stream() == torch.cuda.default_stream(),
        any(parameter.grad is not None for parameter in program.model.parameters()),
    ]
    # goes on eagerly, and as a graph once nothing is in its way
    program.after = lambda loss: None
    replayed = [launched(train, x)[2] > 0 for _ in range(6)]
    return [text, left, replayed[-1]]

found["refused"] = {name: refused(after) for name, after in ways.items()}
"""
REASONS = {
    "item": "aten._local_scalar_dense.default reads numbers of a tensor",
    "cpu": "aten._to_copy.default copies between the host and cuda:0",
    # torch prints where no mode sees it
    "print": "the step cannot be captured: .* capturing.*; take what waits",
    "branch": "reads numbers of a tensor",
    "new": "aten.lift_fresh.default puts numbers of Python on cuda:0",
    "host": "aten._to_copy.default copies between the host and cuda:0",
    "random": "draws random numbers on the host",
    "synchronize": "the step cannot be captured: .* capturing.*; take what waits",
    "event": "the step cannot be captured: .* capturing.*; take what waits",
    "fork": "the step cannot be captured: .* capturing.*; take what waits",
}


def test_what_a_capture_does_not_allow_is_refused_and_leaves_nothing_behind(found: Any) -> None:
    assert found["refused"].keys() == REASONS.keys()
    for name, (text, left, replays) in found["refused"].items():
        assert re.search(REASONS[name], text), text
        assert "\n" not in text
        assert left[0] <= 0, name
        assert left[1:] == [False, True, False], name
        assert replays, name


WAITING = """
from zoo.engine import replay
call = replay._call

def waits(kernel, drops):
    "A mutant: a replay waits for the device."
    call(kernel, drops)
    torch.cuda.current_stream().synchronize()

replay._call = waits
train = Program(rate=0.0).graphed()
try:
    for _ in range(4):
        train(x)
    found["waiting"] = ""
except zoo.GraphError as error:
    found["waiting"] = str(error)
replay._call = call
"""


def test_a_replay_that_waits_for_the_device_would_be_noticed(found: Any) -> None:
    assert "cannot be captured" in found["waiting"]


OPTIMIZERS = """
def refusal(make, scaler=None):
    program = Program(make=make)
    if scaler is not None:
        model, optimizer = program.model, program.optimizer

        def step(x):
            with torch.autocast("cuda", torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        program.step = step
    try:
        train = program.graphed()
        return [launched(train, x)[2] > 0 for _ in range(6)]
    except zoo.GraphError as error:
        return str(error)

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW

def by_rate(parameters, rate, **options):
    optimizer = SGD(parameters, **options)
    # the optimizer itself would compare it with 0, for which no kernel runs here
    optimizer.param_groups[0]["lr"] = rate
    return optimizer

rate = torch.tensor(0.1)
found["optimizers"] = [
    refusal(AdamW),
    refusal(lambda parameters: AdamW(parameters, capturable=True)),
    refusal(lambda parameters: AdamW(parameters, fused=True, capturable=True)),
    refusal(torch.optim.Adagrad),
    refusal(lambda parameters: by_rate(parameters, rate.cuda())),
    refusal(lambda parameters: by_rate(parameters, rate.cuda(), fused=True)),
    refusal(lambda parameters: by_rate(parameters, rate)),
    refusal(SGD, torch.amp.GradScaler("cuda")),
    refusal(lambda parameters: SGD(parameters, fused=True), torch.amp.GradScaler("cuda")),
]
"""


def test_what_reads_on_the_host_is_refused_with_a_way_out(found: Any) -> None:
    plain, capturable, fused, adagrad, tensor, in_kernel, on_host, *scaled = found["optimizers"]
    assert "AdamW(..., capturable=True)" in plain
    assert "on the host with a tensor () from before the step" in adagrad
    assert "reads numbers of a tensor" in tensor
    assert "on the host with a tensor () from before the step" in on_host
    assert "reads numbers of a tensor" in scaled[0]
    assert "use bfloat16, which needs no GradScaler to decide whether to step" in scaled[0]
    # a fused optimizer is told on the device whether to step
    assert capturable == fused == in_kernel == scaled[1] == [False] * 3 + [True] * 3


ASKING = """
def asking(program):
    "A library's way: another path in a capture."
    step = program.step

    def asked(x):
        return step(x * 2 if torch.cuda.is_current_stream_capturing() else x)

    return asked

program = Program()
program.step = asking(program)
train = program.graphed()
found["asking"] = [launched(train, x) for _ in range(4)]
# a mutant: it is told
from contextlib import nullcontext
from zoo.cuda_graphs import capture
hidden, capture._capture_hidden = capture._capture_hidden, lambda module: nullcontext()
program = Program()
program.step = asking(program)
train = program.graphed()
try:
    for _ in range(4):
        train(x)
except zoo.GraphError as error:
    found["asking"].append(str(error))
capture._capture_hidden = hidden
"""


def test_a_capture_is_what_the_step_did_eagerly(found: Any) -> None:
    *_, (eager, _, _), first, told = found["asking"]
    assert first[1:] == [eager, eager]
    assert "does in its capture what it did not do eagerly: it runs aten." in told


MEMORY = """
def bytes_of(checkpoint):
    program = Program(checkpoint)
    train = program.graphed()
    for _ in range(3):
        train(x)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(x)
    peak = torch.cuda.max_memory_allocated() - before
    seen = set()
    for _ in range(4):
        train(x)
        seen.add(torch.cuda.memory_allocated())
    train.reset()
    return [peak, len(seen), torch.cuda.memory_allocated() - before]

found["memory"] = [bytes_of(False), bytes_of("blocks")]
"""


def test_a_graph_takes_the_memory_of_its_plan_and_frees_it(found: Any) -> None:
    (plain, *of_plain), (planned, *of_planned) = found["memory"]
    assert planned < 0.9 * plain
    # no replay takes more, and without graphs all of it is free
    for sizes, left in (of_plain, of_planned):
        assert sizes == 1
        assert left <= 0


IN_BACKWARD = """
from zoo.optimizer import in_backward
# it tries the optimizer, for which no kernel runs here
in_backward.check_independent = lambda optimizer: None
program = Program()
zoo.optimizer_in_backward(program.model, program.optimizer)
train = program.graphed()
found["in backward"] = [launched(train, x) for _ in range(6)]
del program, train
"""


def test_an_optimizer_in_the_backward_is_captured(found: Any) -> None:
    *_, (eager, _, _), first, second, third = found["in backward"]
    assert first[1:] == [eager, eager]
    assert second == third == [second[0], 0, eager]
    assert second[0] <= first[0]


(SNIPPET,) = snippets((ROOT / "docs" / "cuda-graphs.md").read_text("utf-8"))
PAGE = f"""
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec({SNIPPET.code!r}, {{"__name__": "__main__"}})
found["page"] = printed.getvalue()
"""


def test_the_program_of_the_page_is_captured(found: Any) -> None:
    assert found["page"] == "eager 3, captures 1, replays 3\n"


VERIFIED = """
import importlib
verification = importlib.import_module("zoo.api.verify")
# no kernel runs here whose numbers could be compared
first_difference, verification.first_difference = verification.first_difference, lambda *_: None
report = zoo.verify(Program(False).model, x, cuda_graph=True)
verification.first_difference = first_difference
found["verified"] = [report.steps, report.replays]
"""


def test_the_step_that_verify_compares_is_captured(found: Any) -> None:
    assert found["verified"] == [6, 3]


EVENTS = """
program = Program(rate=0.0)
scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, 8, 0.5)
train, rows = program.graphed(), []
for number in range(24):
    rows.append(launched(train, x if number % 8 < 7 else x[:7]))
    scheduler.step()
found["scheduler"] = [rows, train.captures]
"""


def test_a_scheduler_and_a_last_batch_run_eagerly_and_are_captured_anew(found: Any) -> None:
    rows, captures = found["scheduler"]
    ways = "".join("c" if captured else "r" if replayed else "e" for _, captured, replayed in rows)
    # three warm-ups; the last batch of an epoch, of which there are too few until the third; two
    # calls by another learning rate
    assert ways == "eeecrrre" + "eecrrrre" + "eecrrrre"
    assert captures == 3
