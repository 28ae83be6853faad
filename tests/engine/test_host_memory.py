"""Offloading is exact in every order of an accelerator's streams, and gives back what it takes.

pytest tests/engine/test_host_memory.py                   the CPU: a memory-mapped file
pytest --device soft tests/engine/test_host_memory.py     streams that are asynchronous
"""

import copy
import functools
import gc
import linecache
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import start_processes

import zoo
from tests import processes
from tests.accelerator import software
from tests.engine.test_interrupts import Interrupt, state_of_thread
from tests.traces import Traces, tracing_once
from tests.training import assert_same, elsewhere, frozen, gradients, outcome, plain
from zoo.engine import devices, host_memory
from zoo.engine.host_memory import HostMemory, OffloadedStorage, Offloading
from zoo.engine.operands import external_of
from zoo.errors import ArgumentError, BudgetError
from zoo.planner.plan import first_step
from zoo.tracing.planned_forward import patched_forward

DEVICE = torch.get_default_device()
STATE = 64 << 10
HAS_STREAMS, IS_SOFTWARE = DEVICE.type != "cpu", DEVICE.type == software.NAME
pytestmark = pytest.mark.usefixtures("without_fork")
ORDERS = ["late-0", "early-0", *(f"random-{seed}" for seed in range(6))]


def set_order(order: str) -> None:
    name, _, seed = order.partition("-")
    if IS_SOFTWARE:
        torch.get_device_module(DEVICE).set_order(name, int(seed or 0))


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    set_order("late")
    yield
    set_order("synchronous")


class Block(nn.Module):
    """Writes in place, draws, and has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(128), nn.Linear(128, 128)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu_(self.linear(self.norm(x))).sin())


# of models of the same modules with the same hook
TRACES: Traces = {}


@pytest.fixture(autouse=True)
def _traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_of = tracing_once(TRACES, lambda model: (repr(model), getattr(model, "hook", None)))
    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", trace_of)


def nothing(number: int, x: Tensor) -> None:
    """Does nothing with a state."""


class Net(nn.Module):
    """Blocks of states of 64 KiB; `hook` gets each state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.hook: Callable[[int, Tensor], Any] = nothing

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            self.hook(number, x)
        return x


def batch() -> Tensor:
    return torch.randn(128, 128) * torch.logspace(-2, 2, 128)


@functools.cache
def steps_of(kind: type[Net]) -> int:
    return len(zoo.chain_of(kind(), batch().requires_grad_()).names)


def net(option: Any = "blocks", **options: Any) -> Net:
    """Returns a model with offloading; "kept" and "mixed" offload what kept steps save, too."""
    options = {"offload": option is not False, **options}
    if option in ("kept", "mixed"):
        count = steps_of(Net)
        threes = [tuple(range(n, min(n + 3, count))) for n in range(0, count, 3)]
        mixed = [i for n, three in enumerate(threes) for i in ([three] if n % 2 else three)]
        option = zoo.Plan([*(range(count) if option == "kept" else mixed)])
        options["offload"] = [*map(first_step, option)]
    torch.manual_seed(1)
    return zoo.checkpoint(Net(), option, **options)


def host_of(model: nn.Module) -> HostMemory:
    host = getattr(patched_forward(model), "host", None)
    assert isinstance(host, HostMemory)
    return host


def held(model: nn.Module) -> int:
    """Returns the bytes on the host."""
    return host_of(model).offloaded


Step = Callable[[Net], Any]


def trained(model: Net, step: Step, steps: int = 3) -> Any:
    """Returns what steps of a model leave."""

    def program(_: Any) -> Any:
        left = [[step(model), gradients(model)] for _ in range(steps)]
        return left, [*model.named_buffers()]

    return outcome(program, plain)


def assert_exact_by(step: Step, option: Any = "blocks", **options: Any) -> Net:
    """Asserts that steps leave the same bits with offloading as without a plan; returns the model.

    In the end nothing is left on the host but a last copy, which the next forward waits for.
    """
    model = net(option, **options)
    assert_same(trained(model, step), trained(net(False), step))
    assert host_of(model).peak >= STATE
    host_of(model).settle()
    assert held(model) == 0
    return model


def usual(model: Net) -> Any:
    y = model(batch().requires_grad_())
    y.square().mean().backward()
    return y


@pytest.mark.parametrize("order", ORDERS if IS_SOFTWARE else ORDERS[:1])
@pytest.mark.parametrize("option", ["blocks", True, 4, "nested", "kept", "mixed"])
def test_a_training_leaves_the_same_bits_in_every_order(option: Any, order: str) -> None:
    set_order(order)
    if option == "nested":
        last = steps_of(Net) - 1
        third = last // 3
        inner = tuple(range(third, 2 * third))
        option = ((*range(third), inner), tuple(range(2 * third, last)), last)
    # a batch that the program drops is offloaded, too
    assert_exact_by(usual, option)


def test_all_are_on_their_way_back_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    away, before_read = [], OffloadedStorage.before_read

    def noted(self: OffloadedStorage) -> None:
        away.append(self.is_away)
        before_read(self)

    monkeypatch.setattr(OffloadedStorage, "before_read", noted)
    usual(net())
    assert away
    assert not any(away)
    away.clear()
    usual(net("kept"))
    # the backward of the first of kept steps that left begins with its own
    assert sum(away) <= 1 < len(away)


def test_slabs_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB", STATE)
    model = net()
    usual(model)
    usual(model)
    allocated, peak = host_of(model).allocated, host_of(model).peak
    usual(model)
    assert (host_of(model).allocated, host_of(model).peak) == (allocated, peak)


def test_a_storage_in_several_slabs_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB", 3 * STATE // 4)
    model = assert_exact_by(usual)
    assert host_of(model).allocated % (3 * STATE // 4) == 0


def test_what_the_host_has_no_room_for_stays_on_the_device_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zoo.policy.goal.Offload.check", lambda *_: None)
    model = assert_exact_by(usual, host_budget=2 * STATE)
    assert host_of(model).peak == host_of(model).allocated == 2 * STATE
    assert host_of(model).is_full
    (said,) = [text for text in caplog.messages if "host_budget=" in text]
    assert "no room for all that a plan of" in said


def test_each_of_several_tensors_of_a_storage_is_alone() -> None:
    storage = torch.rand(8).untyped_storage()
    externals = [external_of(torch.empty(0).set_(storage)) for _ in range(2)]
    del storage
    assert host_memory._are_alone(externals)
    held = externals[1].tensor
    assert not host_memory._are_alone(externals)
    del held
    assert host_memory._are_alone(externals)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[3:],
    "a detached tensor": Tensor.detach,
    "the storage": Tensor.untyped_storage,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_the_program_holds_stays_on_the_device(name: str) -> None:
    holders: list[Any] = []
    model = net(inputs=batch().requires_grad_())
    model.hook = lambda number, x: holders.append(HOLDERS[name](x)) if number == 1 else None
    assert_same(trained(model, usual), trained(net(False), usual))
    # of six states the first is the input
    assert host_of(model).peak == 4 * STATE


def test_a_tensor_that_a_program_takes_out_of_the_graph_stays() -> None:
    taken: list[tuple[Tensor, Tensor]] = []

    def take(number: int, x: Tensor) -> None:
        waiting = [x.grad_fn] if number == 2 else []
        for node in filter(None, waiting):
            waiting += [other for other, _ in node.next_functions if other not in waiting]
            saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            taken.extend((t, frozen(t)) for t in saved if isinstance(t, Tensor))

    model = net(inputs=batch().requires_grad_())
    model.hook = take
    usual(model)
    assert sum(tensor.nbytes == STATE for tensor, _ in taken) > 2
    for tensor, before in taken:
        assert_same(tensor, before)


def twice(model: Net) -> Any:
    """Two backwards through one graph."""
    y = model(batch().requires_grad_()).square().mean()
    y.backward(retain_graph=True)
    y.backward()
    return y


def of_gradients(model: Net) -> Any:
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    (gradient.square().sum() + model(x).sum()).backward()
    return gradient


def accumulated(model: Net) -> Any:
    """Two forwards before their backwards."""
    first, second = model(batch()), model(batch())
    second.sin().sum().backward()
    first.cos().sum().backward()
    return first, second


class Inner(Net):
    """Has a backward inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.hook, self.found = self.differentiate, list[Tensor]()

    def differentiate(self, number: int, x: Tensor) -> None:
        if number == 3:
            weight = self.blocks[0].linear.weight
            self.found[:] = torch.autograd.grad(x.sum(), weight, retain_graph=True)


def inner(model: Inner) -> Any:
    return [usual(model), *model.found]


def in_another_stream(model: Net) -> Any:
    """Kernels of forward and backward are on a stream that is not the default one."""
    if not HAS_STREAMS:
        return usual(model)
    x = batch()
    stream, main = torch.Stream(DEVICE), torch.accelerator.current_stream()
    stream.wait_stream(main)
    with stream:
        y = model(x)
        y.square().mean().backward()
    main.wait_stream(stream)
    return y


def frozen_in_the_end(model: Net) -> Any:
    """Only some of the segments have gradients."""
    model.blocks[2].requires_grad_(False)
    y = model(batch())
    y.square().mean().backward()
    with torch.no_grad():
        return y, model(batch())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize(
    "step", [twice, of_gradients, accumulated, inner, in_another_stream, frozen_in_the_end]
)
@pytest.mark.parametrize("option", ["blocks", "kept", "mixed"])
def test_other_steps_leave_the_same_bits(
    step: Step, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is inner:
        monkeypatch.setattr("tests.engine.test_host_memory.Net", Inner)
    # warned of once: a backward that makes a graph
    assert_exact_by(step, option)


class StopError(Exception):
    """Ends a step."""


def stop(*_: Any) -> Any:
    raise StopError


def ended_in_forward(model: Net) -> Any:
    model.hook = lambda number, x: stop() if number == 4 else None
    with pytest.raises(StopError):
        model(batch())
    model.hook = nothing
    return usual(model)


def ended_in_backward(model: Net) -> Any:
    model.hook = lambda number, x: x.register_hook(stop) if number == 2 else None
    with pytest.raises(StopError):
        usual(model)
    # a device's thread has let go of the error once it runs another backward
    torch.ones((), requires_grad=True).sin().backward()
    # the error, and with it the graph, is in a cycle of torch's
    gc.collect()
    model.hook = nothing
    return usual(model)


def dropped(model: Net) -> Any:
    model(batch())
    return usual(model)


@pytest.mark.parametrize("option", ["blocks", "kept", "mixed"])
@pytest.mark.parametrize("step", [ended_in_forward, ended_in_backward, dropped])
def test_a_step_that_ends_early_leaves_nothing_on_the_host(step: Step, option: str) -> None:
    model, usual_model = assert_exact_by(step, option), net(option)
    usual(usual_model)
    # the host holds what one forward offloads, not two
    assert host_of(model).peak <= host_of(usual_model).peak


def test_the_next_forward_frees_what_was_under_way() -> None:
    model = net()
    usual(model)
    model(batch())
    (transfers,) = host_of(model)._of_devices.values()
    assert len(transfers.moving) == 1
    Offloading(host_of(model))
    assert not transfers.moving


def test_nothing_is_left_for_the_garbage_collector() -> None:
    model = net()
    usual(model)
    gc.collect()
    gc.disable()
    try:
        y = model(batch())
        host_of(model).settle()
        assert held(model) > 0
        del y
        assert held(model) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_a_host_of_its_own(copied: Callable[[Net], Net]) -> None:
    model = net(host_budget="1MiB")
    usual(model)
    other = copied(model)
    assert host_of(other) is not host_of(model)
    assert host_of(other).limit == 1 << 20
    usual(other)
    assert host_of(other).peak == host_of(model).peak


def test_two_threads_train_by_one_host() -> None:
    model = net().eval()
    x = torch.ones(128, 128)
    first, second = model(x).sin().sum(), model(x).cos().sum()
    elsewhere(first.backward)
    second.backward()
    expected = net(False).eval()
    expected(x).sin().sum().backward()
    expected(x).cos().sum().backward()
    assert held(model) == 0
    assert_same(gradients(model), gradients(expected))


def test_threads_train_at_once_by_one_host() -> None:
    def gradients_of(model: Net) -> list[Tensor]:
        inputs = [torch.full((128, 128), float(n), requires_grad=True) for n in range(1, 5)]

        def gradient(x: Tensor) -> Tensor:
            return [torch.autograd.grad(model(x).sin().sum(), x)[0] for _ in range(4)][-1]

        with ThreadPoolExecutor(len(inputs)) as threads:
            return [*threads.map(gradient, inputs)]

    model = net(False).eval()
    expected = gradients_of(model)
    steps = range(len(zoo.chain_of(model, batch().requires_grad_()).names))
    zoo.checkpoint(model, zoo.Plan(steps), offload=steps)
    assert_same(gradients_of(model), expected)
    host_of(model).settle()
    assert held(model) == 0 < host_of(model).peak


def test_a_storage_that_came_back_is_not_written_into_memory_of_others() -> None:
    """It was copied back for one stream, read on another, and freed at once."""
    host = HostMemory()
    x = torch.ones(STATE // 4) * 3
    storage = OffloadedStorage(x.untyped_storage(), 1, Offloading(host), host.on(x.device))
    storage.leave()
    storage.settle()
    assert storage.is_away
    storage.come_back_here()
    if HAS_STREAMS:
        with torch.Stream(DEVICE):
            storage.before_read()
    else:
        storage.before_read()
    del storage, x
    y = torch.ones(STATE // 4)
    if HAS_STREAMS:
        torch.accelerator.synchronize()
    assert (y == 1).all()


def test_a_step_takes_less_memory_on_the_device() -> None:
    if not HAS_STREAMS:
        pytest.skip("the CPU counts no memory by itself")

    def held_in_backward(model: Net) -> int:
        usual(model)
        x, before = batch(), devices.allocated(DEVICE)
        y = model(x)
        return devices.allocated(DEVICE) - before - y.nbytes

    kept = zoo.checkpoint(Net(), "blocks")
    # of six states the first is the input, and the copy of the last is under way
    assert held_in_backward(net()) == held_in_backward(kept) - 4 * STATE


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too little": (
        {"host_budget": "100KiB"},
        BudgetError,
        r"needs 320 KiB \(327680 bytes\) of host memory; host_budget is 100 KiB",
    ),
    "a budget alone": ({"offload": False, "host_budget": 5}, ArgumentError, "pass both"),
    "no plan": ({"checkpoint": False}, ArgumentError, "checkpoint=False has none"),
    "no such step": (
        {"checkpoint": "(0) (1-5)", "offload": [0, 99]},
        ArgumentError,
        r"names step 99, with which no .* begins; these do: \[0, 1\]",
    ),
    "a step inside": ({"checkpoint": "(0) (1-5)", "offload": [2]}, ArgumentError, "names step 2"),
    "steps of no plan": ({"offload": [1]}, ArgumentError, "this one is yet to be made"),
    "steps for a budget": (
        {"checkpoint": "auto", "memory_budget": 0.9, "offload": [1]},
        ArgumentError,
        "this one is yet to be made",
    ),
    "no bytes": ({"host_budget": "much"}, ArgumentError, "host_budget"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_number(name: str) -> None:
    options, error, message = REFUSED[name]
    options = {"checkpoint": "blocks", "offload": True, "inputs": batch(), **options}
    with pytest.raises(error, match=message):
        zoo.checkpoint(Net(), **options)


def test_a_report_that_offloads_is_refused_without() -> None:
    options: Any = {"optimizer": None, "offload": True, "device": "a100"}
    report = zoo.plan(Net(), torch.rand(4096, 128), memory_budget=0.6, **options)
    assert report.offloads
    model = Net()
    with pytest.raises(ArgumentError, match="offload=False beside a report whose plan offloads"):
        zoo.checkpoint(model, report, offload=False)
    assert patched_forward(model) is None
    zoo.checkpoint(model, report)
    assert host_of(model).peak == 0
    # a plan alone has no budget to break
    zoo.checkpoint(model, report.plan, offload=False)
    assert getattr(patched_forward(model), "host", 0) is None


def test_a_plan_without_anything_to_offload_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.checkpoint(Net(), 2, offload=True, inputs=batch())
    assert "offload= copies nothing of Net to the host" in caplog.text
    usual(model)
    assert host_of(model).peak == 0


def test_what_is_read_without_a_replay_comes_back() -> None:
    """A segment of one product saves what it starts from, and nothing that a replay makes."""

    def gradients_of(offload: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
        zoo.checkpoint(model, "(0) (1) (2) (3) (4) (5)" if offload else False, offload=offload)
        x = batch()
        model(x).square().mean().backward()
        assert not offload or host_of(model).peak == 5 * STATE
        return gradients(model)

    assert_same(gradients_of(True), gradients_of(False))


def squares(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients_by(model: Net, loss: Tensor) -> Any:
    model.zero_grad()
    loss.backward()
    return frozen(gradients(model))


def forks_and_trains(_: int, forks: str) -> None:
    """Asserts that a process and its fork write no memory of each other."""
    torch.set_num_threads(1)
    batches = [batch() for _ in range(3)]
    right = net(False).eval()
    expected = [gradients_by(right, squares(right, x)) for x in batches]
    model = net().eval()
    gradients_by(model, squares(model, batches[0]))
    loss = squares(model, batches[0]) if forks == "before the backward" else None
    here, there = multiprocessing.Pipe()

    def child() -> None:
        mine = squares(model, batches[0]) if loss is None else loss
        there.send("forward")
        there.recv()
        results = [gradients_by(model, mine), gradients_by(model, squares(model, batches[1]))]
        there.send(pickle.dumps(results))

    multiprocessing.get_context("fork").Process(target=child, daemon=True).start()
    there.close()
    here.recv()
    if loss is not None:
        assert_same(gradients_by(model, loss), expected[0])
    assert_same(gradients_by(model, squares(model, batches[1])), expected[1])
    last = squares(model, batches[2])
    here.send("now")
    assert_same(pickle.loads(here.recv()), expected[:2])
    assert_same(gradients_by(model, last), expected[2])
    host_of(model).settle()
    # what both read is gone
    usual(model)
    assert (held(model), host_of(model).allocated) == (0, host_memory.SLAB)


class Gradients(torch.utils.data.Dataset[Any]):
    """Inputs, and the gradients of a model there."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.inputs = [batch() for _ in range(8)]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        x = self.inputs[index]
        return x, gradients_by(self.model, squares(self.model, x))


def loads_and_trains(_: int) -> None:
    """Asserts that workers of a loader compute with the model what it computes here."""
    torch.set_num_threads(1)

    def trained(model: Net) -> Any:
        gradients_by(model.eval(), squares(model, batch()))
        torch.manual_seed(2)
        loader = torch.utils.data.DataLoader(
            Gradients(model), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        return [(there, gradients_by(model, squares(model, x))) for x, there in loader]

    assert_same(trained(net()), trained(net(False)))


@pytest.mark.skipif(HAS_STREAMS, reason="a process that uses a device cannot be forked")
@pytest.mark.parametrize(
    "check",
    [
        (forks_and_trains, "before the forward"),
        (forks_and_trains, "before the backward"),
        (loads_and_trains,),
    ],
    ids=lambda check: f"{check[0].__name__} {check[1:]}",
)
def test_host_memory_is_that_of_its_process(check: tuple[Any, ...]) -> None:
    """In a process in which autograd has no threads for a device, with which none is forked."""
    multiprocessing.set_forkserver_preload(processes.IMPORTED)
    start_processes(check[0], check[1:], start_method="forkserver")


def no_mapping(*_: Any) -> None:
    raise MemoryError("no room for a mapping")


@pytest.mark.skipif(HAS_STREAMS, reason="its memory is pinned")
@pytest.mark.parametrize("where", ["mmap.mmap", "os.posix_fallocate", "tempfile.TemporaryFile"])
@pytest.mark.parametrize("option", ["blocks", "auto"])
def test_a_system_without_host_memory_ends_no_training(
    option: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host_memory.copy_rate.cache_clear()
    monkeypatch.setattr(where, no_mapping)
    model = net(option, **{"memory_budget": 0.9} if option == "auto" else {})
    assert_same(trained(model, usual), trained(net(False), usual))
    assert host_of(model).peak == 0
    said = [text for text in caplog.messages if "MemoryError: no room for a mapping" in text]
    assert len(said) == host_of(model).is_full == 1
    host_memory.copy_rate.cache_clear()


class InCopies(Interrupt):
    """Interrupts lines of offloading, with streams but for those of a `with`.

    A trace that interrupts the end of one keeps its lock, which the thread of a backward waits for.
    """

    def is_in_rooms(self, file: str) -> bool:
        """Returns whether lines of a file are seen: those of one are."""
        return file == host_memory.__file__

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Is called before each line."""
        text = linecache.getline(host_memory.__file__, frame.f_lineno).lstrip()
        is_left_out = HAS_STREAMS and text.startswith("with ")
        return self.line if is_left_out else super().line(frame, event, _)


# of a file that an interrupt left open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("plan", ["0-3 (4-6) 7-9", *["blocks"] * (not HAS_STREAMS)])
def test_an_interrupt_at_any_line_loses_no_slab_and_no_number(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setattr(host_memory, "SLAB", 3 * STATE // 4)
    model = Net()
    del model.blocks[2:]
    offload = True if plan == "blocks" else [*range(5), *range(7, 10)]
    zoo.checkpoint(model, plan, offload=offload, inputs=batch())
    patched = patched_forward(model)
    assert patched is not None

    def step() -> Any:
        torch.manual_seed(0)
        model.zero_grad()
        return usual(model), gradients(model)

    def first_step() -> Any:
        # it allocates the slabs
        patched.host = HostMemory()
        return step()

    expected, before, every = frozen(first_step()), state_of_thread(), InCopies(-1)
    allocated = host_of(model).allocated
    every.during(first_step)
    times = Counter(every.places)
    # the thread of a backward is not traced, as Ctrl-C does not reach it
    assert len(times) > (50 if HAS_STREAMS else 100)
    for place, time in times.items():
        InCopies(time - 1, place).during(first_step)
        if HAS_STREAMS:
            # the frames of the interrupt are in a cycle
            gc.collect()
        assert state_of_thread() == before, place
        assert_same(frozen(step()), expected)
        assert (held(model), host_of(model).allocated) == (0, allocated), place


class Views(Net):
    """Each segment starts from two halves of one storage."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            first, second = x.chunk(2)
            x = block(torch.cat([second.sin(), first.cos()]))
        return x


class Doubled(Block):
    """Saves nothing of what it starts from."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class Written(Net):
    """What a segment started from is written afterwards, before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubled() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for block in self.blocks:
            y = block(x)
            x = y.cos() + x.mul_(0.5)
        return x


@pytest.mark.parametrize("option", ["blocks", "kept", "mixed"])
@pytest.mark.parametrize("kind", [Views, Written])
def test_handles_of_one_storage_and_storages_that_are_written_later_are_exact(
    kind: type[Net], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.test_host_memory.Net", kind)
    assert_exact_by(usual, option)
