"""Faults, threads, copies, and what is freed when."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_same,
    elsewhere,
    frozen,
    gradients,
    module,
    nested,
    net,
    outcome,
    plain,
    rows,
    state_of,
    train_by,
)
from zoo.profiling.peak_memory import trace


class Checkpointed(nn.Module):
    """A model whose forward calls its body as a segment."""

    def __init__(self, call: Call = zoo.recompute) -> None:
        super().__init__()
        self.call = call
        self.body = net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.call(self.body, x)


class Faulty(nn.Module):
    """Raises in its forward when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("fault")
        return x * 1


ERRORS = [ValueError, KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_in_the_forward(way: Way, error: type[BaseException]) -> None:
    """pytorch#37874, pytorch PR#184018: no state is left behind, and the next step is exact."""

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4), nn.Dropout(0.3), Faulty(), nn.Linear(4, 4))
        model[4].error = error
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(error, match="fault"):
            way(call, model, *rows())
        model[4].error = None
        after = state_of(model), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return after, train_by(call, model, rows, way, 2)

    assert_exact(program)


class FailingKernel(TorchDispatchMode):
    """Raises in the place of one kernel: memory that is used up, Ctrl-C."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = number, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error("fault")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_at_any_kernel_of_the_backward(way: Way, error: type[BaseException]) -> None:
    """Buffers, flags, switches and streams are what the forward left; the next steps are exact."""
    number, completed = 0, False
    while not completed:
        number += 3  # of about 60
        torch.manual_seed(0)
        model = net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))
        twin = copy.deepcopy(model)
        torch.set_default_dtype(torch.float64)
        loss = way(zoo.recompute, model.double(), *rows()).square().sum()
        torch.set_default_dtype(torch.float32)
        before = state_of(model), frozen(torch.get_rng_state())
        with FailingKernel(number, error), contextlib.suppress(error):
            loss.backward()
            completed = True
        model.zero_grad()
        assert_same((state_of(model), frozen(torch.get_rng_state())), before)
        assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)
        twin.load_state_dict(model.float().state_dict())
        assert_same(
            outcome(lambda call, model=model: train_by(call, model, rows, way, 2), zoo.recompute),
            outcome(lambda call, twin=twin: train_by(call, twin, rows, way, 2), plain),
        )
    assert number > 30


def test_two_threads_train_two_models_at_once() -> None:
    """two models in two threads | exact | exact

    pytorch#96764: what is set for a replay is set on one thread.
    """
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]

    results: list[Any] = []
    for call, together in ((plain, False), (zoo.recompute, True)):
        torch.manual_seed(1)
        models = [net(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(2)]
        threads = [threading.Thread(target=work, args=(call, m, batches)) for m in models]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        results.append([state_of(model) for model in models])
    assert_same(results[1], results[0])


def work(call: Call, model: nn.Module, batches: list[Tensor]) -> None:
    for x in batches * 5:
        nested(call, model, x).square().sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_on_another_thread(way: Way) -> None:
    """the backward in another thread | exact | exact

    Thread-local state of autograd, pytorch#96764; autocast is that of the forward.
    """

    def program(call: Call) -> Any:
        model, (x,) = net(nn.BatchNorm1d(4), nn.Dropout(0.3)), rows()
        with torch.autocast("cpu", torch.bfloat16):
            loss = way(call, model, x).float().square().sum()
        elsewhere(loss.backward)
        return x.grad, state_of(model)

    assert_exact(program)


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    through_file,
]


@pytest.mark.parametrize("duplicate", COPIES)
def test_copies_and_pickles_of_a_model_in_training(duplicate: Any) -> None:
    """fairscale#816: independent models, also between forward and backward of the first."""

    def program(call: Call) -> Any:
        model, (x,) = Checkpointed(call), rows()
        train_by(plain, model, rows, module, 1)
        loss = model(x).square().sum()
        twin = duplicate(model)
        found = train_by(plain, twin, rows, module, 2)
        loss.backward()
        return found, x.grad, [gradients(m) for m in (model, twin)], twin.calls

    assert_exact(program)


def test_names_are_those_of_the_baseline() -> None:
    """`deepcopy`, pickle, state-dict names | wrappers rename modules | nothing is wrapped

    pytorch PR#77224, PR#118119, pytorch#108269: nothing is wrapped, by a step neither.
    """
    models = [Checkpointed(call) for call in (plain, zoo.recompute)]
    for model in models:
        train_by(plain, model, rows, module, 1)
    baseline, model = models
    assert [*baseline.state_dict()] == [*model.state_dict()]
    baseline.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(baseline.state_dict(), strict=True)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(baseline, names)()]
    assert repr(model) == repr(baseline)
    assert type(model.get_submodule("body.2")) is nn.BatchNorm1d
    assert vars(model.body).keys() == vars(baseline.body).keys()


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_for_the_garbage_collector(way: Way, backward: bool) -> None:
    """pytorch#154642, pytorch#84413, pytorch#82776: after the backward, or without one."""
    gc.collect()
    gc.disable()
    try:
        model = Carrying()
        loss = way(zoo.recompute, model, *rows()).sum()
        if backward:
            loss.backward()
        alive = weakref.ref(model)
        del model, loss
        assert alive() is None
    finally:
        gc.enable()


class Carrying(nn.Module):
    """Has state of every kind, so that a segment has much to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net(nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.register_buffer("total", torch.zeros(4))
        self.log: list[int] = []
        self.generator = torch.Generator()
        self.layers.register_forward_hook(lambda m, xs, y: y * 2)

    def forward(self, x: Tensor) -> Any:
        self.log.append(1)
        self.total += x.detach().mean(0)
        return self.layers(x + torch.rand(4, generator=self.generator)).exp()


def test_the_peak_does_not_grow() -> None:
    """The peak of step 50 is that of step 3, with the garbage collector off."""
    model = Carrying()
    x = torch.randn(1000, 4)

    def step() -> None:
        nested(zoo.recompute, model, x).sum().backward()

    gc.collect()
    gc.disable()
    try:
        step(), step()
        early = trace(step).peak
        for _ in range(46):
            step()
        assert trace(step).peak == early
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["argument", "keyword", "list", "closure"])
def test_the_inside_is_freed_after_the_forward(form: str) -> None:
    """pytorch#77284: intermediates live neither through keywords nor through closures."""
    x, seen = torch.rand(100).requires_grad_(), Seen()

    def function(y: Any = None, *, key: Any = None) -> Tensor:
        value = y[0] if isinstance(y, list) else y if y is not None else key
        value = x * 2 if value is None else value
        hidden = value.exp()
        seen.note(hidden)
        return hidden.sin().sin()

    positional = {"argument": [x * 2], "list": [[x * 2]]}.get(form, [])
    keywords = {"key": x * 2} if form == "keyword" else {}
    loss = zoo.recompute(function, *positional, **keywords).sum()
    assert not seen.alive()
    loss.backward()
    assert not seen.alive()


class Seen:
    """Holds tensors weakly."""

    def __init__(self) -> None:
        references: list[Any] = []
        self.alive = lambda: [ref for ref in references if not ref.expired()]
        reference = torch.multiprocessing.reductions.StorageWeakRef
        self.note = lambda tensor: references.append(reference(tensor.untyped_storage()))
