"""A plan for one size of the inputs serves smaller ones: nothing is planned or measured again."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.tracing.models import Net
from tests.training import Residuals, assert_same, images, needs_numpy, train
from zoo._torch import FakeTensorMode
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.chain import Chain, Steps
from zoo.invocation import InputSpec, Invocation
from zoo.profiling import chain_profile, isolation, log_profile
from zoo.profiling.peak_memory import measure_step

Inputs = Callable[[int], tuple[Tensor, ...]]
BUDGET = {"checkpoint": "auto", "memory_budget": "8MiB"}


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, shape), torch.randint(0, 50, shape)


def lstm() -> Chain:
    return zoo.lstm(vocabulary=50, embedding=8, hidden=8, chunk_steps=5)


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "chain": (Residuals, lambda count: (images(count),)),
    "gpt2": (
        functools.partial(zoo.gpt2_small, depth=2, width=32, heads=2, vocabulary=50),
        lambda count: tokens(count, 12),
    ),
    "any module": (Net, lambda count: (images(count),)),
}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the processes that are forked to plan, and the times that kernels are measured."""
    done: list[str] = []

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(isolation, "in_fork")
    count(chain_profile, "measure_kernels")
    count(log_profile, "measure_kernels")
    return done


def works(model: nn.Module, inputs: Inputs, counts: Sequence[int], work: list[str]) -> list[bool]:
    """Trains on batches of these sizes; says for each whether anything was planned or measured."""
    found = []
    for count in counts:
        work.clear()
        outputs = model(*inputs(count))
        outputs.square().sum().backward()
        found.append(bool(work))
    return found


@pytest.mark.parametrize(
    "option", [{"checkpoint": True}, pytest.param(BUDGET, marks=needs_numpy)], ids=["true", "auto"]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_last_batch_of_an_epoch_costs_nothing(name: str, option: Any, work: list[str]) -> None:
    build, inputs = MODELS[name]
    model = zoo.checkpoint(build(), **option)
    assert works(model, inputs, (4, 4, 3, 4, 3, 2), work) == [True, *[False] * 5]


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_planned_size_that_covers_a_batch_serves_it(
    name: str, work: list[str]
) -> None:
    build, inputs = MODELS[name]
    model, plans = zoo.checkpoint(build()), {}
    # the plan of a traced forward is in force from the next one on
    for count in (2, 2, 8, 8, 4, 4):
        works(model, inputs, [count], work)
        plans[count] = zoo.plan_of(model)
    assert plans[8] is not plans[2]
    assert plans[4] is plans[8]
    assert works(model, inputs, [1, 2, 3, 5], work) == [False] * 4
    for count in (1, 2, 3, 5):
        works(model, inputs, [count], work)
        assert zoo.plan_of(model) is plans[2 if count <= 2 else 8]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_which_more_is_trained_is_planned_for_anew(name: str, work: list[str]) -> None:
    build, inputs = MODELS[name]
    model = zoo.checkpoint(build())
    first, *_ = model.parameters()
    first.requires_grad_(False)
    assert works(model, inputs, [4, 4], work) == [True, False]
    first.requires_grad_(True)
    assert works(model, inputs, [4, 4], work) == [True, False]


def test_a_new_head_counts_as_trained_and_the_old_one_is_freed(work: list[str]) -> None:
    model = zoo.checkpoint(Net())
    assert works(model, lambda n: (images(n),), [4, 4], work) == [True, False]
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    old = weakref.ref(model.get_submodule(last))
    new = copy.deepcopy(old()).requires_grad_(False)
    model.set_submodule(last, new)
    assert works(model, lambda n: (images(n),), [4, 4], work) == [True, False]
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("build", [Residuals, Net])
def test_of_plans_that_overlap_the_smaller_serves(build: Any, work: list[str]) -> None:
    model = zoo.checkpoint(build())
    plans = {}
    # (3, 6) goes by the plan for (8, 6), and is no size that a plan was made for
    for count, size, is_planned in (
        (8, 6, True), (3, 6, False), (2, 8, True), (4, 6, False), (2, 6, False),
    ):  # fmt: skip
        inputs = functools.partial(images, size=size)
        assert works(model, lambda n, inputs=inputs: (inputs(n),), [count], work) == [is_planned]
        plans[count, size] = zoo.plan_of(model)
    assert plans[4, 6] is plans[3, 6] is plans[8, 6] is not plans[2, 8]
    assert plans[2, 6] is plans[2, 8]


def test_larger_in_one_dimension_is_planned(work: list[str]) -> None:
    model = put_in_force(Residuals(), True)
    for count, size in ((4, 6), (3, 8), (5, 4)):
        assert works(model, lambda n, size=size: (images(n, size=size),), [count], work) == [True]


def test_another_number_of_steps_is_planned_for_itself(work: list[str]) -> None:
    model = put_in_force(lstm(), True)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, None, targets)[0]

    # of chunks of 5: 13 and 12 are three, 10 is two
    found = [works(loss, lambda _, n=n: tokens(n, 2), [0], work)[0] for n in (13, 12, 10, 9)]
    assert found == [True, False, True, False]


def test_other_steps_of_the_same_number_are_planned_for_themselves(work: list[str]) -> None:
    class Chooses(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

        def steps_for(self, *inputs: Tensor | None) -> Steps:
            x = inputs[0]
            assert x is not None
            return [torch.sin, self.long if len(x) > 2 else self.twice, torch.cos]

        def twice(self, x: Tensor) -> Tensor:
            return self.short(x, x)

    model = put_in_force(Chooses(), True)
    assert works(model, lambda n: (torch.rand(n, 4),), (4, 3, 2, 1), work) == [
        True, False, True, False,
    ]  # fmt: skip


@needs_numpy
@pytest.mark.parametrize("name", ["chain", "any module"])
def test_smaller_batches_keep_to_the_budget(name: str) -> None:
    build = {
        "chain": functools.partial(Residuals, blocks=12),
        "any module": functools.partial(Net, 16, 12),
    }[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(count: int) -> int:
        inputs = torch.rand(count, 4, 32, 32)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return measure_step(step, model, optimizer, [inputs]).peak

    without = {count: peak(count) for count in (8, 7, 4, 1)}
    budget = without[8] * 6 // 10
    zoo.checkpoint(model, memory_budget=budget)
    with_plan = {count: peak(count) for count in without}
    assert max(with_plan.values()) <= budget < without[7]
    assert sorted(with_plan.values(), reverse=True) == list(with_plan.values())


@pytest.mark.parametrize("name", ["chain", "any module"])
def test_every_bit_is_that_of_the_baseline(name: str) -> None:
    build, _ = MODELS[name]

    def batches() -> Callable[[], list[Tensor]]:
        counts = iter([2, 4, 4, 3, 2, 1])
        return lambda: [images(next(counts) + 1).requires_grad_()]

    plain = build()
    model = zoo.checkpoint(copy.deepcopy(plain))
    assert_same(train(model, batches(), 6), train(plain, batches(), 6))


def test_ranks_on_devices_of_one_type_ask_for_the_same_plan() -> None:
    with FakeTensorMode():
        here, there = (
            InputSpec.of(Invocation((torch.empty(2, 3, device=f"cuda:{rank}"),)), nn.Identity())
            for rank in range(2)
        )
    assert here == there
