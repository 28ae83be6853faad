"""docs/errors.md quotes messages as torch and zoo raise them; its claims turn out as it says."""

import functools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.documents import ROOT
from tests.training import Call, assert_same, plain

pytestmark = pytest.mark.usefixtures("without_fork")

UNAVAILABLE = (ImportError, RuntimeError)
PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")
BY_TORCH, BY_ZOO = PAGE.partition("## zoo's own errors")[::2]
reentrant = functools.partial(checkpoint, use_reentrant=True)
by_torch = functools.partial(checkpoint, use_reentrant=False)


def inputs() -> Tensor:
    return torch.rand(6, 4, requires_grad=True)


def size_that_goes_on(call: Call) -> None:
    layer, sizes = nn.Linear(4, 4), iter((2, 3))
    call(lambda x: layer(x[: next(sizes)]).tanh(), inputs()).sum().backward()


def eval_before_the_backward(call: Call) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    loss = call(block, inputs()).sum()
    block.eval()
    loss.backward()


def in_place_at_the_start(call: Call) -> None:
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    call(block, nn.Linear(4, 4)(inputs())).square().sum().backward()


def first_block(call: Call) -> None:
    with warnings.catch_warnings(action="error"):
        call(nn.Linear(4, 4), torch.rand(6, 4)).sum().backward()


def dict_of_outputs(call: Call) -> None:
    layer = nn.Linear(4, 4)
    call(lambda x: {"logits": layer(x)}, inputs())["logits"].sum().backward()


def gradient_of_the_input(call: Call) -> None:
    x = inputs()
    torch.autograd.grad(call(nn.Linear(4, 4), x).sum(), x)


def keyword_arguments(call: Call) -> None:
    call(lambda x, *, scale: x * scale, inputs(), scale=2.0).sum().backward()


class Calling(nn.Module):
    """Has a layer that the forward does not use."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.used, self.unused, self.call = nn.Linear(4, 4), nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.used, x)


def unused_parameters(call: Call) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Calling(call), find_unused_parameters=True)
        model(inputs()).sum().backward()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("program", "raises", "message"),
    [
        (size_that_goes_on, by_torch, "Recomputed values for the following tensors have different"),
        (eval_before_the_backward, by_torch, "A different number of tensors was saved during the"),
        (in_place_at_the_start, by_torch, "one of the variables needed for gradient computation"),
        (first_block, reentrant, "None of the inputs have requires_grad=True"),
        (unused_parameters, reentrant, "Expected to mark a variable ready only once"),
        (dict_of_outputs, reentrant, "element 0 of tensors does not require grad"),
        (gradient_of_the_input, reentrant, "torch.utils.checkpoint is incompatible with .grad()"),
        (keyword_arguments, reentrant, "Unexpected keyword arguments"),
    ],
)
def test_torch_raises_what_the_page_quotes_and_zoo_does_not(
    program: Callable[[Call], None],
    raises: Call,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert message in BY_TORCH
    with pytest.raises((RuntimeError, ValueError, UserWarning), match=re.escape(message)):
        program(raises)
    program(zoo.recompute)
    if raises is reentrant:
        program(by_torch)


def changed_in_place() -> None:
    x = torch.rand(2, 4, requires_grad=True).clone()
    y = zoo.recompute(nn.Linear(4, 4), x).sum()
    x.zero_()
    y.backward()


def changed_by_numpy() -> None:
    x = torch.rand(2, 4, requires_grad=True)
    y = zoo.recompute(lambda x: x.exp().tanh(), x).sum()
    x.detach().numpy()[:] *= 2
    y.backward()


def impossible_budget() -> None:
    image = torch.empty(1, 3, 64, 64, device="meta")
    zoo.plan(zoo.resnet18(), image, memory_budget="1MiB", device="a100")


def plan_of_another_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    zoo.checkpoint(model, "(0-1) 2-4")(torch.rand(2, 4))


def checkpoints_itself() -> None:
    timm = pytest.importorskip("timm", exc_type=UNAVAILABLE)
    model = timm.create_model("resnet10t")
    model.set_grad_checkpointing()
    zoo.checkpoint(model)


def compiled_before() -> None:
    zoo.checkpoint(torch.compile(nn.Linear(4, 4)))


class ReadsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def numbers_for_a_budget() -> None:
    model = nn.Sequential(nn.Linear(3000, 30000), ReadsNumbers())  # too large to be run for it
    zoo.plan(model, torch.rand(2, 3000), memory_budget=0.9)


def clipped_after_the_optimizer_in_the_backward() -> None:
    model = nn.Linear(4, 4)
    zoo.optimizer_in_backward(model, torch.optim.SGD(model.parameters()))
    model(inputs()).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(x) * Counts.calls


def differs_from_itself() -> None:
    zoo.verify(Counts(4, 4), torch.rand(2, 4)).check()


PROGRAMS = [
    *(changed_in_place, changed_by_numpy, impossible_budget, plan_of_another_model),
    *(checkpoints_itself, compiled_before, numbers_for_a_budget),
    *(clipped_after_the_optimizer_in_the_backward, differs_from_itself),
]
QUOTED = re.findall(r"^\| `(\w+Error): ([^`]+)`", BY_ZOO, re.MULTILINE)


def test_every_message_of_zoo_s_that_is_quoted_has_a_program() -> None:
    assert len(QUOTED) == len(PROGRAMS)


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [(program, *quoted) for program, quoted in zip(PROGRAMS, QUOTED, strict=False)],
)
def test_zoo_raises_what_the_page_quotes(
    program: Callable[[], None], kind: str, message: str
) -> None:
    with pytest.raises(zoo.ZooError) as raised:
        program()
    assert kind in [base.__name__ for base in type(raised.value).__mro__]
    assert message.removeprefix("... ") in str(raised.value).replace("`", "")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


def two_replicas_in_threads(call: Call) -> tuple[Any, Any]:
    """Returns gradients and statistics, as of `nn.DataParallel`, whose replicas share weights."""
    torch.manual_seed(0)
    model, other = Block(), Block()
    other.linear, other.norm.weight, other.norm.bias = (
        model.linear,
        model.norm.weight,
        model.norm.bias,
    )
    losses: list[Any] = [None, None]

    def forward(number: int, replica: nn.Module, batch: Tensor) -> None:
        losses[number] = call(replica, batch).square().sum()

    parts = zip((0, 1), (model, other), torch.rand(2, 8, 4), strict=True)
    threads = [threading.Thread(target=forward, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(losses).backward()
    return [p.grad for p in model.parameters()], list(model.buffers())


def test_replicas_in_threads_are_exact_and_torch_moves_their_statistics_twice() -> None:
    gradients, statistics = two_replicas_in_threads(plain)
    for call, moves_once in ((by_torch, False), (zoo.recompute, True)):
        found = two_replicas_in_threads(call)
        assert_same(found[0], gradients)
        assert all(map(torch.equal, found[1], statistics)) is moves_once


def test_a_decorated_forward_of_the_whole_model_saves_nothing() -> None:
    parts = nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
    x = torch.rand(4096, 16)

    def peak(forward: Callable[[Tensor], Tensor]) -> int:
        with zoo.track(model, inputs=x) as timeline:
            forward(x).sum().backward()
        return timeline.activation_peak

    model = nn.Sequential(*(nn.Sequential(*parts) for _ in range(8)))
    baseline, decorated = peak(model), peak(functools.partial(by_torch, model))
    zoo.checkpoint(model)(x).sum().backward()
    assert decorated > 0.9 * baseline
    assert peak(model) < 0.4 * baseline


def test_without_the_random_state_dropout_draws_another_mask() -> None:
    def gradient(call: Call) -> Tensor | None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
        call(block, inputs()).square().sum().backward()
        return block[0].weight.grad

    expected = gradient(plain)
    careless = functools.partial(by_torch, preserve_rng_state=False)
    assert_same(gradient(by_torch), expected)
    assert not torch.equal(gradient(careless), expected)


def test_only_one_momentum_undoes_a_second_update_and_no_momentum_its_count() -> None:
    def moved(call: Call, momentum: float) -> nn.BatchNorm1d:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        call(nn.Sequential(norm, nn.Linear(4, 4)), torch.rand(8, 4)).sum().backward()
        return norm

    expected, half = moved(plain, 0.1), moved(by_torch, 1 - 0.9**0.5)
    torch.testing.assert_close(half.running_mean, expected.running_mean)
    off = [
        (moved(by_torch, m).running_mean - expected.running_mean).abs().max()
        for m in (0.1, 0.1**0.5)
    ]
    assert off[1] > off[0] > 0.01
    assert half.num_batches_tracked == 2 * expected.num_batches_tracked


def test_the_cheap_scheme_recomputes_no_product_and_blocks_about_a_third() -> None:
    def operations(option: Any) -> int:
        model = zoo.checkpoint(zoo.resnet18(classes=10), option)
        images = torch.rand(2, 3, 32, 32)
        model(images).sum().backward()
        with FlopCounterMode(display=False) as counter:
            model(images).sum().backward()
        return counter.get_total_flops()

    baseline = operations(False)
    assert operations("cheap") == baseline
    assert 1.25 < operations("blocks") / baseline < 1.4
