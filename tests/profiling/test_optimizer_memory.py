import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import needs_numpy
from zoo.errors import ArgumentError
from zoo.optimizer.independence import step_alone
from zoo.profiling import optimizer_memory as optimizer
from zoo.profiling.isolation import can_fork
from zoo.profiling.optimizer_memory import (
    OPTIMIZERS,
    MakeOptimizer,
    OptimizerBytes,
    maker_of,
    optimizer_bytes,
)
from zoo.profiling.peak_memory import resident_bytes, trace

MAKES: list[MakeOptimizer] = [
    torch.optim.AdamW,
    functools.partial(torch.optim.AdamW, foreach=True),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    torch.optim.RMSprop,
    torch.optim.RAdam,
    torch.optim.Adafactor,
    functools.partial(torch.optim.Adafactor, foreach=True),
]


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", MAKES)
def test_the_bytes_are_those_of_a_real_optimizer(make: MakeOptimizer) -> None:
    model, numbers = network(), 8
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(8):
        model(torch.rand(2, 64)).sum().backward()
        record = trace(optimizer.step)
    found = optimizer_bytes(make, model.parameters())
    assert found.state == resident_bytes(model, optimizer).optimizer
    assert found.step <= record.peak <= found.step + 8 * numbers, "but for numbers in C++"


def test_parameters_keep_their_versions() -> None:
    """A graph of an earlier forward holds them to those."""
    model = network()
    loss = model(torch.rand(2, 64)).square().sum()
    before = [parameter._version for parameter in model.parameters()]
    optimizer_bytes(torch.optim.AdamW, model.parameters())
    assert [parameter._version for parameter in model.parameters()] == before
    loss.backward()


def test_no_optimizer_and_no_gradients_need_nothing() -> None:
    assert optimizer_bytes(None, network().parameters()) == OptimizerBytes(0, 0)
    assert optimizer_bytes(torch.optim.AdamW, [torch.ones(3)]) == OptimizerBytes(0, 0)


def adam_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups, of which one has a state of three tensors; a scheduler patches its step."""
    first, *others = (p for p in model.parameters() if p.requires_grad)
    groups = [{"params": others}, {"params": [first], "amsgrad": True}]
    made = torch.optim.AdamW(groups, **options)
    torch.optim.lr_scheduler.ConstantLR(made)
    return made


def test_an_optimizer_counts_by_its_groups_and_is_left_as_it_was() -> None:
    model = network()
    made, before = adam_of(model), copy.deepcopy(model.state_dict())
    make = maker_of(made, model)
    assert make is not None
    for in_backward in (False, True):
        found = optimizer_bytes(make, model.parameters(), in_backward)
        trained = copy.deepcopy(model)
        real = adam_of(trained)
        for parameter in trained.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        real.step()
        assert found.state == resident_bytes(trained, real).optimizer
        assert not made.state
    assert zoo.verify(model, torch.randn(2, 64), optimizer=made, steps=2).exact
    assert not made.state
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_of_a_part_of_the_model_counts_that_part() -> None:
    model = network()
    last = model[1].weight
    make = maker_of(torch.optim.SGD([last], momentum=0.9), model)
    assert optimizer_bytes(make, model.parameters()).state == last.nbytes


@pytest.mark.parametrize("name", ["adamw", "AdamW", "adam", "sgd", "none"])
def test_an_optimizer_has_a_name(name: str) -> None:
    known = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "none": None}
    make = maker_of(name)
    assert make is known.get(name.lower(), OPTIMIZERS["sgd"])


@needs_numpy
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("adm", "'adm' is no optimizer. Did you mean adam"),
        (3, "=3 is no optimizer. It takes 'adamw', 'adam', 'sgd', 'none', a class"),
        (torch.optim.SGD(network().parameters()), "holds 3 parameters that this model does not"),
    ],
    ids=["name", "number", "other model"],
)
def test_what_is_no_optimizer_of_the_model_is_refused(option: Any, message: str) -> None:
    model, x = network(), torch.randn(2, 64)
    asked: list[Callable[..., Any]] = [
        functools.partial(zoo.plan, max_overhead=1.0),
        zoo.frontier,
        functools.partial(zoo.largest, memory_budget="1GiB"),
        zoo.anatomy,
        zoo.verify,
        functools.partial(zoo.plan_rank, max_overhead=1.0, world_size=2),
    ]
    for function in asked:
        with pytest.raises(ArgumentError, match=message):
            function(model, x, optimizer=option)


def test_an_optimizer_that_takes_no_such_gradients_is_refused() -> None:
    with pytest.raises(ArgumentError, match="SparseAdam cannot step on fake tensors"):
        optimizer_bytes(torch.optim.SparseAdam, network().parameters())


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    def parameters() -> list[Tensor]:
        return list(network().parameters())

    with pytest.raises(ArgumentError, match="LBFGS cannot step on fake tensors"):
        optimizer_bytes(torch.optim.LBFGS, parameters())


@pytest.mark.parametrize("device", ["cuda", None])
def test_for_a_gpu_that_is_not_here_the_step_takes_a_copy_of_the_weights(
    device: str | None,
) -> None:
    """There torch's default is kernels of lists."""
    layers = [nn.Linear(64, 64, device="meta") for _ in range(8)]
    parameters = list(nn.Sequential(*layers).parameters())
    found = optimizer_bytes(torch.optim.AdamW, parameters, device=device)
    weights = sum(p.nbytes for p in parameters)
    assert (found.step >= weights) == (device == "cuda")


@pytest.mark.parametrize("device", ["cuda", None])
@pytest.mark.parametrize("option", [{}, {"foreach": False}, {"fused": True}])
def test_counters_of_steps_count_where_they_are(device: str | None, option: Any) -> None:
    """On the CPU, unless the optimizer is fused (or capturable, which cannot step there)."""
    parameters = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
    make = functools.partial(torch.optim.AdamW, **option)
    found = optimizer_bytes(make, parameters, device=device)
    on_device = device is None or "fused" in option
    a_counter = (512 if device else 4) * on_device
    states = 2 * (512 if device else 256)
    assert found.state == 3 * (states + a_counter)


@pytest.mark.parametrize("make", MAKES)
def test_many_equal_layers_take_no_more_steps_than_one(
    make: MakeOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = 0

    def counted(*args: Any) -> None:
        nonlocal stepped
        stepped += len(args) - 2
        step_alone(*args)

    monkeypatch.setattr(optimizer, "step_alone", counted)
    layers = [nn.Linear(32, 32) for _ in range(30)]
    parameters = list(nn.Sequential(*layers).parameters())
    alone = optimizer_bytes(make, parameters[:2]).state
    one = stepped
    assert optimizer_bytes(make, parameters).state == 30 * alone
    # after a bias there is a weight
    assert stepped - one <= one + 2


in_a_child = pytest.mark.skipif(not can_fork(), reason="a process that uses a device cannot fork")


@in_a_child
def test_making_an_optimizer_leaves_nothing_behind() -> None:
    made: list[Any] = []

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        made.append(parameters)
        torch.rand(3)
        return torch.optim.AdamW(parameters)

    model, stream = network(), torch.get_rng_state()
    assert optimizer_bytes(make, model.parameters()).state > 0
    assert not made
    assert torch.equal(torch.get_rng_state(), stream)


@in_a_child
def test_an_optimizer_that_ends_the_process_ends_only_a_child() -> None:
    with pytest.raises(ArgumentError, match="ended the process"):
        optimizer_bytes(lambda parameters: os._exit(3), network().parameters())


def test_what_making_an_optimizer_raises_is_told() -> None:
    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        raise KeyError("warmup")

    with pytest.raises(ArgumentError, match=r"optimizer= failed .*\(KeyError: 'warmup'\)"):
        optimizer_bytes(make, network().parameters())
