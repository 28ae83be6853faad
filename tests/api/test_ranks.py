"""What is predicted for a rank is what it takes, to the byte, and nothing is left behind."""

import functools
import json
import re
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import zoo
from tests.accelerator.test_offload import PLANS, Block
from tests.api.ranks import CASES, IN_BACKWARD, MODELS, peaks, split
from tests.processes import results_in
from tests.tracing.models import Net
from zoo.api.plan import planner_for
from zoo.api.track import CopiedStep, mean_of
from zoo.errors import ArgumentError
from zoo.invocation import Invocation
from zoo.planner.costs import simulate
from zoo.planner.offload_choices import segments_of
from zoo.units import format_bytes

pytestmark = pytest.mark.usefixtures("without_fork")


@pytest.fixture(autouse=True)
def _two_plans(few_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind, for each of which a step is tracked."""
    monkeypatch.setattr("zoo.policy.proposals.MOST", 2)


# bytes of the gradients of a block of `Net(16)`
BLOCK = 4 * sum(parameter.numel() for parameter in Net(16).blocks[0].parameters())


def report(name: str, way: str, world: int, **bounds: Any) -> zoo.RankReport:
    build, inputs = MODELS[name]
    with torch.device("meta"):
        model, given = build(), inputs()
    strategy = split if way == "tensor parallel" else way.partition(",")[0]
    bounds["optimizer_in_backward"] = way == IN_BACKWARD
    return zoo.plan_rank(model, given, world_size=world, strategy=strategy, **bounds)


@pytest.mark.parametrize("world", CASES)
def test_a_rank_takes_what_is_predicted(world, tmp_path):
    planned = {case: report(*case, world, max_overhead=0.5) for case in CASES[world]}
    predicted = {}
    for case, found in planned.items():
        assert found.predicted_peak < found.baseline_peak
        predicted |= {
            (*case, False): found.baseline_peak,
            (*case, found.plan): found.predicted_peak,
        }
    ranks = results_in(world, functools.partial(peaks, list(predicted)), tmp_path)
    for (_, way, plan), said, taken in zip(predicted, predicted.values(), ranks[0], strict=True):
        # in a replay the gradients of the block behind it may still be under way to other ranks
        under_way = BLOCK if way.startswith("fsdp2") and plan else 0
        assert said <= taken <= said + under_way


def net() -> tuple[nn.Module, torch.Tensor]:
    return Net(8, blocks=1), torch.zeros(4, 4, 16, 16)


plan = functools.partial(zoo.plan_rank, world_size=4)


@pytest.mark.parametrize("fake", [True, False])
def test_a_tracked_step_takes_so_much_less_where_it_is_offloaded(fake):
    model, x = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(64, 8)), torch.rand(2048, 64)
    plan = zoo.Plan.parse(PLANS["kept steps between"])
    costs = planner_for(model, x, measured=False).step.costs_with_gradients
    kept, offloaded = (simulate(plan, costs, offloads=items) for items in ((), segments_of(plan)))
    step = CopiedStep(model, Invocation.of(x), torch.optim.SGD, mean_of, fake=fake)
    less = step.track(plan).tensor_peak - step.track(plan, True).tensor_peak
    assert less == kept.peak - offloaded.peak > 0


def test_an_anatomy_shows_what_lies_on_the_host_over_time():
    model, x = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(64, 8)), torch.rand(2048, 64)
    found = zoo.anatomy(model, x, checkpoint="blocks", offload=True, device="meta")
    kept = zoo.anatomy(model, x, checkpoint="blocks", device="meta").planned
    zoo.checkpoint(model, "blocks", offload=True)
    own = zoo.anatomy(model, x, device="meta").planned
    assert own.total(["on the host"]) == found.planned.total(["on the host"])
    # of four states the copy of the last is under way until the backward
    assert own.host_peak == 3 * x.nbytes
    assert own.peak == max(map(sum, zip(*own.curves().values(), strict=True))) < kept.peak
    assert "; 1.50 MiB on the host at most" in own.table()
    assert zoo.Timeline.from_json(own.to_json()) == own
    assert max(own.summary()["host"]) == own.host_peak
    assert kept.host_peak == found.baseline.host_peak == 0


def test_a_rank_offloads_what_its_host_has_room_for():
    model, x = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(64, 8)), torch.rand(2048, 64)
    kept = plan(model, x, max_overhead=0.2)
    found = plan(model, x, max_overhead=0.2, offload=True)
    assert found.predicted_peak < kept.predicted_peak
    assert found.alone.offloaded > 0
    assert f"| on its host                | {format_bytes(found.alone.offloaded)} |" in str(found)
    same = plan(model, x, max_overhead=0.2, offload=True, host_budget=1)
    assert same.predicted_peak == kept.predicted_peak
    with pytest.raises(ArgumentError, match="pass both"):
        plan(model, x, memory_budget=0.5, host_budget=1)


def test_a_budget_is_kept_to_and_the_least_one_works():
    model, x = net()
    some = plan(model, x, memory_budget=0.75)
    assert some.predicted_peak <= some.budget == some.baseline_peak * 3 // 4
    assert sum(some.at_peak.values()) == some.predicted_peak
    with pytest.raises(zoo.BudgetError, match=r"4 by fsdp2 needs at least .* \(1000 bytes\)") as no:
        plan(model, x, memory_budget=1000)
    enough = re.search(r"Raise the budget to '(.*?)'", str(no.value))[1]
    assert (no.value.budget, no.value.baseline) == (1000, some.baseline_peak)
    least = plan(model, x, memory_budget=enough)
    assert least.predicted_peak == no.value.least
    assert least.predicted_peak <= least.budget
    with pytest.raises(zoo.BudgetError):
        plan(model, x, memory_budget=least.predicted_peak - 1)


def test_an_optimizer_in_the_backward_frees_the_shards_of_gradients():
    """Where these are most of what a rank holds, the peak is lower by nearly all of them."""
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5))), torch.zeros(1, 256)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    first, other = (
        plan(model, x, max_overhead=0, strategy=shard_each, optimizer_in_backward=way)
        for way in (False, True)
    )
    # one of five layers is gathered, with its gradient
    assert 0.5 * sum(sizes) / 4 <= first.predicted_peak - other.predicted_peak <= sum(sizes) / 4
    assert other.alone.fixed.gradients == 0
    between = (first.predicted_peak + other.predicted_peak) // 2
    with pytest.raises(zoo.BudgetError, match="With the optimizer in the backward it needs") as no:
        plan(model, x, memory_budget=between, strategy=shard_each)
    assert f"({other.predicted_peak} bytes)" in str(no.value)
    kept = plan(model, x, memory_budget=between, strategy=shard_each, optimizer_in_backward=True)
    assert kept.predicted_peak <= between


def shard_each(model: nn.Module) -> None:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)


def test_the_best_plans_of_one_process_are_not_the_only_ones(monkeypatch):
    monkeypatch.setattr("zoo.policy.proposals.MOST", 3)
    # its gradients and optimizer's state leave nothing to save, and a rank's are small
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4))
    model = nn.Sequential(*(Residual(block) for block in blocks))
    found = plan(model, torch.zeros(64, 256), world_size=64, max_overhead=9)
    assert found.predicted_peak < found.baseline_peak
    assert found.plan.depth()


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


def test_a_model_that_reads_a_parameter_itself_without_gradients_by_a_loss_with_targets_on_meta():
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model = zoo.gpt2_small(width=16, depth=1, heads=2, vocabulary=9, positions=8)
    images = torch.zeros(1, 3, 32, 32)
    sizes = {"depth": 1, "width": 16, "heads": 2, "image_size": 32, "classes": 5}
    with torch.no_grad():
        plan(model, (tokens,), max_overhead=9, loss=lambda s: s[..., 0].sum() + tokens.sum())
        plan(zoo.vit_tiny_patch16(**sizes), images, max_overhead=9)


def test_what_it_says_can_be_read_and_its_plan_put_in_force(tmp_path):
    model, x = net()
    found = plan(model, x, max_overhead=9, strategy="ddp")
    assert "on each of 4 ranks, ddp" in str(found)
    assert "buckets of gradients" in str(found)
    assert json.loads(found.to_json())["predicted_peak"] == found.predicted_peak
    found.save(tmp_path / "plan.json")
    saved = zoo.PlanReport.load(tmp_path / "plan.json")
    assert saved.plan == found.plan
    zoo.checkpoint(model, saved)(x).sum().backward()


def refuses(model: nn.Module) -> None:
    model.register_forward_pre_hook(print)
    torch.rand(1)
    raise OSError("no")


class Remembers(Net):
    """Keeps a wide result until it ends its next forward; it may drop it."""

    kept, is_kept = None, True

    def forward(self, x):
        y = super().forward(x)
        wide = y.detach().repeat(1, 512)
        self.kept = wide if self.is_kept else None
        return y


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_a_step_leaves_counts_in_the_next_one(strategy):
    taken = []
    for Remembers.is_kept in (False, True):
        model, x = Remembers(), torch.randn(64, 4, 4, 4)
        rank = zoo.plan_rank(model, x, world_size=2, strategy=strategy, memory_budget="1GiB")
        alone = zoo.plan(model, x, memory_budget="1GiB").baseline_peak
        taken.append((rank.baseline_peak, rank.predicted_peak, alone))
    more, more_by_plan, more_alone = (b - a for a, b in zip(*taken, strict=True))
    assert more == more_by_plan == more_alone > 64 * 512


@pytest.mark.parametrize("strategy", ["fsdp2", refuses])
def test_nothing_is_left_behind(strategy):
    model, x = net()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    try:
        plan(model, x, max_overhead=0.5, strategy=strategy, optimizer_in_backward=True)
    except OSError:
        assert strategy is refuses
    assert not distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), stream)
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert type(model) is Net
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_group_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(f"{tmp_path}/store")
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(zoo.ArgumentError, match="there is a process group already"):
            plan(*net(), max_overhead=1)
        assert distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size=0 must be a number from 1"),
        ({"strategy": "fsdp"}, "'fsdp' is neither 'fsdp2' nor 'ddp' nor a function"),
        ({"strategy": "ddp", "optimizer_in_backward": True}, "combines gradients after an optim"),
        ({"strategy": ["ddp"]}, "is neither 'fsdp2' nor 'ddp' nor a function"),
        ({"memory_budget": "device"}, "what is free here; for a rank that is elsewhere"),
        ({"memory_budget": 0.5, "max_overhead": 1}, "one of memory_budget and max_overhead"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    bounds = {} if "memory_budget" in options else {"max_overhead": 1}
    with pytest.raises(zoo.ArgumentError, match=message):
        plan(*net(), **bounds, **options)
