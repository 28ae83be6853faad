"""The optimizer in the backward: every bit of `backward(); step(); zero_grad()`, or an error."""

import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zoo
from tests.training import Residuals, images
from zoo.errors import ArgumentError, OptimizerError
from zoo.optimizer.in_backward import FreedGradient
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork")

Make = Callable[[Iterable[Any]], optim.Optimizer]


def matrices(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.ndim == 2]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "Adam with a tensor": lambda p: optim.Adam(p, torch.tensor(0.01)),
    "AdamW": optim.AdamW,
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "Adafactor": optim.Adafactor,
    "Muon": lambda p: optim.Muon(matrices(p)),
    "of a user": lambda p: Own(p, 0.05, momentum=0.9),
}


def bits(value: Any) -> Any:
    """Returns nested states with bytes in the place of tensors, and the order of dicts."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(key, bits(part)) for key, part in value.items()]
    return [bits(part) for part in value] if isinstance(value, list | tuple) else value


def trained(
    model: nn.Module,
    make: Make,
    in_backward: bool,
    steps: int = 8,
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> Any:
    """Trains a copy of a model with a schedule and returns the bits of all that is left."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    optimizer = make(model.parameters())
    schedule = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if in_backward:
        zoo.optimizer_in_backward(model, optimizer)
    for _ in range(steps):
        forward(model, images()).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return bits([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_a_step_after_the_backward(name: str) -> None:
    model = Residuals(2)
    expected = trained(model, OPTIMIZERS[name], False)
    assert trained(model, OPTIMIZERS[name], True) == expected
    assert trained(zoo.checkpoint(model), OPTIMIZERS[name], True) == expected


def test_sparse_gradients() -> None:
    def run(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Embedding(20, 4, sparse=True)
        optimizer = optim.SparseAdam(model.parameters())
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        for _ in range(3):
            model(torch.randint(20, (5,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


class Tied(nn.Module):
    """A weight used twice, one that is frozen, one that nothing uses, and groups of two rates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        return self.second(torch.tanh(self.frozen(zoo.recompute(self.first, x))))

    def groups(self, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
        weights, others = [], []
        for parameter in parameters:
            (weights if parameter.ndim > 1 else others).append(parameter)
        return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.3}]


def test_groups_and_weights_that_are_tied_frozen_or_unused() -> None:
    model = Tied()
    found = [
        trained(model, lambda p: optim.SGD(model.groups(p), momentum=0.9), way)
        for way in (True, False)
    ]
    assert found[0] == found[1]


def test_bfloat16_autocast() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model = zoo.checkpoint(Residuals())
    found = [trained(model, optim.AdamW, way, forward=forward) for way in (True, False)]
    assert found[0] == found[1]


def test_parameters_that_train_later_and_groups_that_come_later() -> None:
    def run(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = Tied()
        optimizer = optim.AdamW([*model.frozen.parameters(), *model.first.parameters()])
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        for step in range(6):
            if step == 2:
                model.frozen.requires_grad_()
            if step == 4:
                optimizer.add_param_group({"params": [model.second.bias], "lr": 0.1})
            model(images()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        return bits([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


@pytest.mark.parametrize("begins", [True, False])
def test_a_state_dict_goes_on_in_the_other_way(begins: bool) -> None:
    def run(ways: tuple[bool, bool]) -> Any:
        torch.manual_seed(0)
        states: list[Any] = []
        for way in ways:
            model = Tied()
            optimizer = optim.AdamW(model.parameters())
            if way:
                zoo.optimizer_in_backward(model, optimizer)
            if states:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            for _ in range(3):
                model(images()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        return bits(states)

    assert run((begins, not begins)) == run((False, False))


def test_hooks_of_a_step_are_called_once_a_step() -> None:
    model = Tied()
    optimizer = optim.SGD(model.parameters(), 0.1)
    zoo.optimizer_in_backward(model, optimizer)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(images()).sum().backward()
    assert calls == []
    optimizer.step()
    assert calls == ["after"]


def test_few_gradients_exist_at_once() -> None:
    """Of 16 layers; the backward holds one, and what a product takes."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
    size, peaks = 128 * 128 * 4, []
    for in_backward in (False, True):
        optimizer = optim.SGD(model.parameters(), 0.1)
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        loss = model(torch.rand(1, 128)).sum()
        peaks.append(trace(loss.backward).peak)
        optimizer.zero_grad()
    assert peaks[0] >= 16 * size
    assert peaks[1] <= 3 * size


def stepping(make: Make = lambda p: optim.SGD(p, 0.1)) -> tuple[nn.Module, optim.Optimizer, Any]:
    model = Tied()
    optimizer = make(model.parameters())
    return model, optimizer, zoo.optimizer_in_backward(model, optimizer)


def backward(model: nn.Module) -> None:
    model(images()).square().mean().backward()


USES: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "read": lambda model: model.first.bias.grad.abs().max().item(),
    "another backward": backward,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("steps", [True, False])
def test_a_freed_gradient_is_refused(use: str, steps: bool) -> None:
    model, optimizer, _ = stepping()
    backward(model)
    if steps:
        optimizer.step()
    before = bits(model.state_dict())
    with pytest.raises(OptimizerError, match="uses a gradient that the optimizer has used"):
        USES[use](model)
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_of_zeros(of_model: bool, foreach: bool) -> None:
    """A weight without a gradient is stepped by zeros then, and no gradient is a negative zero."""

    def run(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = Tied()
        optimizer = optim.SGD(
            model.parameters(), 0.1, momentum=0.9, weight_decay=0.1, foreach=foreach
        )
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        for step in range(5):
            part = model if step % 2 else model.first
            x = images() if step % 2 else -torch.zeros(2, 4)
            (part(x) * -0.0 if step == 2 else part(x)).square().sum().backward()
            optimizer.step()
            (model if of_model else optimizer).zero_grad(set_to_none=step == 3)
        return bits([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


def test_zeros_of_sparse_gradients() -> None:
    def run(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Embedding(20, 4, sparse=True) for _ in range(2))
        optimizer = optim.SparseAdam(model.parameters())
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        for step in range(4):
            model[step % 2](torch.randint(20, (5,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return bits([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)


def test_zeros_before_the_step_are_refused_and_zeros_outlive_the_handle() -> None:
    model, optimizer, handle = stepping()
    backward(model)
    with pytest.raises(OptimizerError, match=r"3 of 7 .*zero_grad\(\) was called before step\(\)"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    handle.remove()
    assert not model.first.weight.grad.any()


class Old(optim.SGD):
    """Writes through `.data`, which counts no version, as many older optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])


class Layers(nn.Module):
    """Three layers, of which each kind of `reads` reads weights whose gradients come first."""

    def __init__(self, reads: Callable[["Layers", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.reads = reads

    def net(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self, x)


class ByClosure(torch.autograd.Function):
    """Saves a weight that is none of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Layers) -> Tensor:
        ctx.save_for_backward(model.c.weight)
        return x @ model.c.weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0].t(), None


def self_conditioned(model: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        given = model.net(x)
    return model.net(x * given)


def self_conditioned_in_segments(model: Layers, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        with torch.no_grad():
            given = model.net(x)
        h = zoo.recompute(lambda x: model.a(x).tanh() * given, x)
        h = zoo.recompute(lambda x: model.b(x).tanh(), h)
        return zoo.recompute(lambda x: model.c(x).tanh().sin(), h)

    return zoo.recompute(outer, x)


def dropped(model: Layers, x: Tensor) -> Tensor:
    model.kept = model.net(x).tanh()
    return model.net(x) * model.kept.detach().exp()


def detached(model: Layers, x: Tensor) -> Tensor:
    return model.net(zoo.recompute(lambda x: (x @ model.c.weight.detach()).tanh().sin(), x))


def view(model: Layers, x: Tensor) -> Tensor:
    return model.net((x @ model.c.weight.detach()[2:6].t()).exp().sum(1, keepdim=True) * x)


def frozen_for_a_part(model: Layers, x: Tensor) -> Tensor:
    model.c.requires_grad_(False)
    x = x * model.c.weight[0] * model.c.bias
    model.c.requires_grad_(True)
    return model.net(x)


def by_closure(model: Layers, x: Tensor) -> Tensor:
    return model.net(zoo.recompute(lambda x: ByClosure.apply(x, model).sin(), x))


def target(model: Layers, x: Tensor) -> Tensor:
    def averaged(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = model.a.weight * 0.1 + model.b.weight * 0.9
        return (x @ weight).tanh() * model.net(x)

    return zoo.recompute(averaged, x)


READS = [
    self_conditioned, self_conditioned_in_segments, dropped, detached, view, frozen_for_a_part,
    by_closure, target,
]  # fmt: skip


@pytest.mark.parametrize("reads", READS, ids=lambda reads: reads.__name__)
@pytest.mark.parametrize("kind", [Old, optim.SGD])
def test_weights_that_are_read_after_their_gradients(kind: Any, reads: Any) -> None:
    """They are updated when the backward ends, and no replay or operation reads a new one."""

    def run(in_backward: bool, checkpoint: Any, retain: bool = False) -> Any:
        torch.manual_seed(0)
        model = Layers(reads)
        optimizer = kind(model.parameters(), 0.1)
        if checkpoint:
            zoo.checkpoint(model, checkpoint)
        handle = zoo.optimizer_in_backward(model, optimizer) if in_backward else None
        found = []
        for _ in range(2):
            x = torch.rand(5, 8, requires_grad=True)
            model(x).square().sum().backward(retain_graph=retain)
            optimizer.step()
            optimizer.zero_grad()
            found.append(x.grad)
        waited = [] if handle is None else handle.waited
        return bits([*found, *model.parameters()]), waited

    expected, _ = run(False, None)
    waits = []
    for checkpoint in (None, True, "blocks"):
        found, waited = run(True, checkpoint)
        assert found == expected
        waits += waited
    assert waits
    assert run(True, True, retain=True)[0] == expected


@pytest.mark.parametrize("checkpoint", [None, True, "blocks"])
def test_other_weights_do_not_wait(checkpoint: Any) -> None:
    """Held aliases, tied weights and segments in segments do not make them wait."""
    model = Layers(lambda model, x: zoo.recompute(lambda x: zoo.recompute(model.net, x).sin(), x))
    model.b.weight = model.a.weight
    held = model.state_dict()
    optimizer = optim.AdamW(model.parameters())
    if checkpoint:
        zoo.checkpoint(model, checkpoint)
    handle = zoo.optimizer_in_backward(model, optimizer)
    for _ in range(2):
        loss = model(torch.rand(5, 8, requires_grad=True)).square().sum()
        loss.backward()
        assert (len(handle.updated), handle.waited) == (5, [])
        optimizer.step()
        optimizer.zero_grad()
    assert len(held) == 6


def clip(optimizer: optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def warm_up(optimizer: optim.Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


def replaced(optimizer: optim.Optimizer) -> None:
    step = optimizer.step

    def clipped(self: optim.Optimizer) -> Any:
        clip(self)
        return step()

    optimizer.step = types.MethodType(clipped, optimizer)  # type: ignore[method-assign]


def of_all(optimizer: optim.Optimizer) -> Any:
    return register_optimizer_step_pre_hook(clip)


BEFORE_STEPS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "clipping": lambda optimizer: optimizer.register_step_pre_hook(clip),
    "warm-up": lambda optimizer: optimizer.register_step_pre_hook(warm_up),
    "of all optimizers": of_all,
    "replaced": replaced,
}


@pytest.mark.parametrize("when", ["before", "after", "later"])
@pytest.mark.parametrize("kind", BEFORE_STEPS)
def test_what_comes_before_a_step(kind: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """All gradients are there for it, wherever it is registered, and one warning says so."""

    def run(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model = Tied()
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        registered = BEFORE_STEPS[kind](optimizer) if when == "before" else None
        if in_backward:
            zoo.optimizer_in_backward(model, optimizer)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(4):
            if step == {"before": -1, "after": 0, "later": 2}[when]:
                registered = BEFORE_STEPS[kind](optimizer)
            for _ in range(1 + (step == 3)):  # gradients are accumulated as ever
                backward(model)
            optimizer.step()
            with warnings.catch_warnings():  # torch's, of a step that was replaced
                warnings.simplefilter("ignore", UserWarning)
                schedule.step()
            optimizer.zero_grad()
        if registered is not None:
            registered.remove()
        return bits([model.state_dict(), optimizer.state_dict()])

    assert run(True) == run(False)
    said = [text for text in caplog.messages if "the weights, not the backward" in text]
    assert len(said) == 1


def test_what_comes_between_backward_and_step_is_refused() -> None:
    """Before it is called; a state that is loaded, or written, would be stepped from."""

    def written(optimizer: optim.Optimizer) -> None:
        next(iter(optimizer.state.values()))["momentum_buffer"].zero_()

    def loaded(optimizer: optim.Optimizer) -> None:
        optimizer.load_state_dict(before)

    cases = [
        (BEFORE_STEPS["clipping"], "a hook before the step of SGD .* came before"),
        (written, "the optimizer's state of .* was changed before"),
        (loaded, "the optimizer's state was loaded before"),
    ]
    for change, message in cases:
        model, optimizer, handle = stepping(lambda p: optim.SGD(p, 0.1, momentum=0.9))
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        before = copy.deepcopy(optimizer.state_dict())
        backward(model)
        change(optimizer)
        with pytest.raises(OptimizerError, match=message):
            optimizer.step()
        handle.reset()


def test_hooks_after_a_step_find_marks_for_gradients() -> None:
    """Also one that is older than the handle, which would take None for no gradient."""
    model = Tied()
    optimizer = optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: found.append(model.first.weight.grad))
    zoo.optimizer_in_backward(model, optimizer)
    backward(model)
    optimizer.step()
    assert isinstance(found[0], FreedGradient)


def test_a_gradient_scaler_is_refused() -> None:
    model, optimizer, _ = stepping()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(images()).square().mean()).backward()
    with pytest.raises(OptimizerError, match="a GradScaler"):
        scaler.step(optimizer)
    with torch.autocast("cpu", torch.float16), pytest.raises(OptimizerError, match="float16"):
        model(images())


def test_a_step_twice_or_left_out_is_refused() -> None:
    model, optimizer, handle = stepping()
    backward(model)
    optimizer.step()
    with pytest.raises(OptimizerError, match="called twice after one backward"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match=r"zero_grad\(\) was called before step\(\)"):
        backward(model)
    with pytest.raises(OptimizerError, match=r"zero_grad\(\) was called before step\(\)"):
        optimizer.step()
    handle.reset()
    backward(model)
    optimizer.step()


def test_what_changes_between_backward_and_step_is_refused() -> None:
    model, optimizer, handle = stepping()
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimizerError, match="such as its learning rate, was changed before step"):
        optimizer.step()
    handle.reset()
    backward(model)
    with torch.no_grad():
        model.first.weight.clamp_(-0.1, 0.1)
    with pytest.raises(OptimizerError, match=r"first.weight was changed before step\(\)"):
        optimizer.step()


def test_a_tensor_of_a_group_is_read_only_if_it_was_written() -> None:
    """To read it would wait for its device."""

    class Counted(Tensor):
        reads = 0

        def tolist(self) -> Any:
            Counted.reads += 1
            return super().tolist()

    model, optimizer, _ = stepping()
    note = optimizer.param_groups[0]["note"] = torch.tensor([0.5]).as_subclass(Counted)
    for change, reads in ((note.size, 0), (note.relu_, 2)):
        backward(model)
        change()
        optimizer.step()
        optimizer.zero_grad()
        assert Counted.reads == reads
    backward(model)
    note.neg_()
    with pytest.raises(OptimizerError, match="such as its learning rate, was changed before step"):
        optimizer.step()


def test_a_second_backward_of_other_parameters_is_refused() -> None:
    """Its forward has read updated ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    zoo.optimizer_in_backward(model, optim.SGD(model.parameters(), 0.1))
    model[0](torch.rand(2, 4)).sum().backward()
    with pytest.raises(OptimizerError, match=r"another backward began before step\(\)"):
        model[2](model[0](torch.rand(2, 4)).detach()).sum().backward()


def test_other_steps_are_refused() -> None:
    model, optimizer, _ = stepping()
    with pytest.raises(OptimizerError, match=r"step\(closure\) runs the backward itself"):
        optimizer.step(lambda: 1.0)
    before = bits(model.state_dict())
    with pytest.raises(OptimizerError, match="create_graph=True needs the parameters as they were"):
        model(images()).square().mean().backward(create_graph=True)
    assert bits(model.state_dict()) == before
    optimizer.zero_grad()
    optimizer.step(None)
    backward(model)
    optimizer.step()


class ByGlobalNorm(optim.SGD):
    """Looks at a norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        super().step()


class CountingItself(optim.SGD):
    """Counts its steps beside its groups."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)


class Anchored(optim.SGD):
    """Reads parameters that it does not take from its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self.anchor.mean() * 0.01)


def anchored(parameters: Iterable[Any]) -> optim.Optimizer:
    optimizer = Anchored(parameters, 0.1)
    optimizer.anchor = optimizer.param_groups[0]["params"][0]
    return optimizer


def with_state_of_another(parameters: Iterable[Any]) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, 0.1, momentum=0.9)
    first, second = optimizer.param_groups[0]["params"][:2]
    optimizer.state[second]["other"] = first.detach()
    return optimizer


class Around(optim.SGD):
    """Steps another optimizer."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, 0.1)
        self.inner = optim.SGD(self.param_groups[0]["params"], 0.1)


class Own(optim.SGD):
    """Does what its class does, by the step with hooks."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


class Counting(optim.SGD):
    """Counts its steps in a group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optim.LBFGS, "LBFGS cannot step for one parameter at a time"),
        (lambda p: ByGlobalNorm(p, 0.1), "ByGlobalNorm looks at several parameters at once"),
        (lambda p: CountingItself(p, 0.1), "CountingItself looks at several parameters at once"),
        (Around, "Around steps another optimizer"),
        (anchored, "Anchored looks at several parameters at once"),
        (with_state_of_another, "SGD has in the state 'other' of a parameter .* memory of another"),
        (lambda p: Counting(p, 0.1), "Counting looks at several parameters at once"),
        (lambda p: optim.SGD(p, 0.1, differentiable=True), "makes its step part of a graph"),
    ],
)
def test_optimizers_that_look_at_several_parameters_are_refused(make: Make, message: str) -> None:
    model = Tied()
    optimizer = make(model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=message):
        zoo.optimizer_in_backward(model, optimizer)
    assert bits(optimizer.state_dict()) == bits(before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrong_arguments_are_refused() -> None:
    model, optimizer, handle = stepping()
    for other in (optimizer, optim.SGD(model.parameters(), 0.1)):
        with pytest.raises(ArgumentError, match=r"parameters already; first call remove\(\)"):
            zoo.optimizer_in_backward(model, other)
    with pytest.raises(ArgumentError, match="needs a module"):
        zoo.optimizer_in_backward(optimizer, model)
    with pytest.raises(ArgumentError, match="needs an optimizer, such as"):
        zoo.optimizer_in_backward(model, optim.AdamW)
    with pytest.raises(ArgumentError, match=r"this SGD updates no parameter .* after the model is"):
        zoo.optimizer_in_backward(copy.deepcopy(model), optim.SGD(nn.Linear(2, 2).parameters()))
    handle.remove()


def test_other_ways_to_combine_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, *_ = stepping()
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(OptimizerError, match="DistributedDataParallel combines gradients"):
        model(images())


def test_what_an_exception_leaves_is_named() -> None:
    model, optimizer, handle = stepping()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    hook = model.first.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model)
    hook.remove()
    assert handle.updated == ["second.bias", "first.bias"]
    for call in (optimizer.step, optimizer.state_dict, handle.remove):
        with pytest.raises(OptimizerError, match=r"updated 2 of 7 .*second.bias, first.*its end"):
            call()
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match="Load weights and optimizer state"):
        backward(model)
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    handle.reset()
    assert handle.updated == []
    torch.manual_seed(0)
    backward(model)
    optimizer.step()
    found = bits(model.state_dict())
    model.load_state_dict(before[0])
    handle.remove()
    torch.manual_seed(0)
    backward(model)
    optimizer.step()
    assert bits(model.state_dict()) == found


def test_removed_it_is_an_optimizer_as_before() -> None:
    model, optimizer, handle = stepping()
    backward(model)
    handle.remove()
    handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    before = bits(model.state_dict())
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert bits(model.state_dict()) == before
    optimizer.step()
    assert bits(model.state_dict()) != before


def test_copies_do_not_step() -> None:
    model, optimizer, _ = stepping()
    twins = copy.deepcopy([model, optimizer])
    backward(twins[0])
    assert bits(twins[0].state_dict()) == bits(model.state_dict())
    assert not isinstance(twins[0].first.weight.grad, FreedGradient)
    twins[1].step()


def test_a_freed_gradient_takes_no_memory() -> None:
    parameter = nn.Parameter(torch.rand(1000, 1000))
    made = trace(lambda: setattr(parameter, "grad", FreedGradient(parameter)))
    assert made.peak == 0
    assert repr(parameter.grad) == "FreedGradient((1000, 1000), torch.float32)"
    assert parameter.grad.shape == parameter.shape


def test_frozen_weights_do_not_live_as_long_as_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    optimizer = optim.SGD(model[1].parameters(), lr=0.1)
    zoo.optimizer_in_backward(model, optimizer)
    frozen = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert frozen() is None
