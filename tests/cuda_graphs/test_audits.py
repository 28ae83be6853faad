"""Audits meet every period of a program, train rightly, and leave what replays leave."""

import copy
import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.cuda_graphs import ranks
from tests.cuda_graphs.adverse_steps import Deep, step_reading
from tests.cuda_graphs.software_graphs import SoftwareGraphs
from tests.processes import results_in
from zoo.cuda_graphs import graphed_step, step_observer
from zoo.cuda_graphs.audit import AuditSchedule, Ranks

pytestmark = pytest.mark.usefixtures("without_fork")


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has graphs."""
    made = SoftwareGraphs()
    monkeypatch.setattr(graphed_step, "graphs_on", lambda device: made)


def audited(schedule: AuditSchedule, calls: int) -> list[int]:
    """Returns the calls that a schedule audits."""
    return [call for call in range(calls) if schedule.is_due()]


def test_audits_come_in_pairs_first_soon_and_then_as_often_as_is_asked() -> None:
    calls = audited(AuditSchedule(256), 100_000)
    assert calls[:2] == [4, 5]
    assert all(second == first + 1 for first, second in zip(calls[::2], calls[1::2], strict=True))
    distances = [later - earlier for earlier, later in zip(calls[1::2], calls[2::2], strict=False)]
    assert all(distance < 20 for distance in distances[:4])
    assert all(128 <= distance - 1 <= 384 for distance in distances[20:])
    assert len({*distances[20:]}) > 50
    assert audited(AuditSchedule(None), 1000) == []
    assert audited(AuditSchedule(1), 9)[:4] == [1, 2, 4, 5]


@pytest.mark.parametrize("period", range(2, 101))
def test_no_period_keeps_away_from_audits(period: int) -> None:
    calls = audited(AuditSchedule(16), 20_000)
    # what happens in each call of a period but one, and in one alone
    assert {call % period for call in calls} == {*range(period)}


def test_a_schedule_is_the_same_in_each_process_and_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    assert audited(AuditSchedule(256), 5000) == audited(AuditSchedule(256), 5000)
    assert torch.equal(torch.get_rng_state(), state)


class Model(nn.Module):
    """Keeps its latest output, and the mean of all in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) -> (N, 4)."""
        output = self.layers(x)
        with torch.no_grad():
            self.mean.lerp_(output.mean(0), 0.1)
            self.latest = output.detach().clone()
        return output  # type: ignore[no-any-return]


def batch(number: int) -> Tensor:
    """Returns the batch of a number, (6, 8)."""
    return torch.rand(6, 8, generator=torch.Generator().manual_seed(number))


def trained(
    check_every: int | None, read: Callable[[Model], Any], micro: int = 1, graphed: bool = True
) -> Any:
    """Trains a model for 40 calls; returns the step, and what is read after each."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, is_last: bool) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    options: Any = {"model": model, "optimizer": optimizer, "check_every": check_every}
    train: Any = zoo.make_graphed_step(step, **options) if graphed else step
    found = []
    for number in range(40):
        found.append(train(batch(number), number % micro == micro - 1).detach().clone())
        found += [tensor.clone() for tensor in read(model) if tensor is not None]
    return train, [*found, *model.parameters(), model.mean, torch.get_rng_state()]


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize(
    "read",
    [
        lambda model: [],
        lambda model: [model.latest],
        lambda model: [parameter.grad for parameter in model.parameters()],
    ],
    ids=["nothing", "attribute", "gradients"],
)
def test_audits_leave_what_replays_do_where_they_do(read: Any, micro: int) -> None:
    train, of_graph = trained(3, read, micro)
    without, _ = trained(None, read, micro)
    _, eager = trained(None, read, micro, graphed=False)
    assert train.audits > 7
    assert train.replays > 10
    assert (train.eager, train.captures) == (without.eager, without.captures)
    assert all(torch.equal(one, two) for one, two in zip(of_graph, eager, strict=True))


def test_memory_after_an_audit_is_that_of_replays() -> None:
    addresses: list[list[int]] = []

    def read(model: Model) -> list[Tensor]:
        grads = [parameter.grad for parameter in model.parameters()]
        addresses.append([grad.data_ptr() for grad in grads if grad is not None])
        return []

    train, _ = trained(3, read, 2)
    assert train.audits > 7
    # after the captures; the second of two leaves no gradient
    assert len({tuple(found) for found in addresses[12:]}) == 2


def stale(**options: Any) -> tuple[Any, Any, nn.Module]:
    """Returns a graphed step, the number that it reads unseen by guards, and its model."""
    torch.manual_seed(0)
    model, kept = nn.Linear(8, 4), Deep(Deep(1.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    step = step_reading(kept, model, optimizer)
    return zoo.make_graphed_step(step, model=model, optimizer=optimizer, **options), kept, model


def ended(train: Any, model: nn.Module) -> tuple[zoo.GraphError, nn.Module]:
    """Trains until an audit raises; returns its error and the model before that call."""
    for _ in range(100):
        before = copy.deepcopy(model)
        try:
            train(batch(0))
        except zoo.GraphError as error:
            return error, before
    raise AssertionError("none of 100 calls raised")


def test_the_error_has_the_result_of_a_step_that_has_trained_and_the_graph_is_dropped() -> None:
    train, kept, model = stale()
    for _ in range(10):
        train(batch(0))
    kept.get().put(0.5)
    error, twin = ended(train, model)
    assert re.search(r"step is no longer .* in call 1\d: aten\.mul\.Tensor is given", str(error))
    assert "is given 1.0, and 0.5 now (kernel " in str(error)
    assert "The graph was right in call 10; replays since then may" in str(error)
    assert str(error).endswith("or call reset() after a change")
    loss = 0.5 * twin(batch(0)).square().mean()
    loss.backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(error.result, loss)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    counts = train.eager, train.captures
    # of the next calls two calls are compared, the third is captured anew
    for _ in range(4):
        train(batch(0))
    assert (train.eager, train.captures) == (counts[0] + 2, counts[1] + 1)


def test_without_audits_nothing_is_compared() -> None:
    train, kept, _ = stale(check_every=None)
    for number in range(40):
        train(batch(number))
        if number == 10:
            kept.get().put(0.5)
    assert (train.audits, train.replays) == (0, 37)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "often"])
def test_a_wrong_distance_is_named(value: Any) -> None:
    with pytest.raises(zoo.ArgumentError, match="check_every is a number of calls, at least 1"):
        stale(check_every=value)


@pytest.mark.parametrize("mutant", ["numbers", "origins"])
def test_an_audit_that_skips_something_would_be_noticed(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = step_observer.Observation.value

    def skipping(self: Any, leaf: object) -> object:
        found = value(self, leaf)
        is_skipped = isinstance(found, float) if mutant == "numbers" else isinstance(found, tuple)
        return "anything" if is_skipped else found

    def is_noticed() -> bool:
        torch.manual_seed(0)
        kept, model = Deep(1.0), nn.Linear(8, 4)
        weights = [torch.full((), 1.0), torch.full((), 0.5)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            scale: Any = weights[kept.get() != 1.0] if mutant == "origins" else kept.get()
            loss = scale * model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
        try:
            for number in range(12):
                train(batch(number))
                kept.put(1.0 if number < 6 else 0.5)
        except zoo.GraphError:
            return True
        return False

    assert is_noticed()
    monkeypatch.setattr(step_observer.Observation, "value", skipping)
    assert not is_noticed()


def test_all_ranks_learn_of_a_difference_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = Ranks([DistributedDataParallel(nn.Linear(2, 2))], 256)
        assert group.group is not None
        assert not group.are_many
        learn = functools.partial(group.learn, captures=0, device=torch.device("cpu"))
        assert learn(None) is None
        assert learn("here") == "here"
        reduced = []

        def reduce(verdict: Tensor, *_: Any) -> None:
            reduced.append(verdict.clone())
            verdict[0] = 3

        monkeypatch.setattr(distributed, "all_reduce", reduce)
        assert learn(None) == "the step of rank 2 differs from its graph, as its error says"
        assert learn("here") == "here"
        assert [found.tolist() for found in reduced] == [[0, 0], [1, 0]]
    finally:
        distributed.destroy_process_group()


def test_ranks_audit_the_same_calls_whether_or_not_each_has_a_graph() -> None:
    train, *_ = stale()
    exchanged: list[tuple[int, str | None]] = []

    def learn(difference: str | None, captures: int, device: torch.device) -> str | None:
        exchanged.append((train._calls, difference))
        return difference

    train._ranks.are_many, train._ranks.learn = True, learn
    for number in range(12):
        train(batch(number)[: 6 - number % 2])
    # before there is a graph, and where the batch has none
    assert [call for call, _ in exchanged] == [5, 6, 12]
    assert not any(difference for _, difference in exchanged)


def test_an_error_without_a_result_has_none() -> None:
    error = zoo.GraphError("text")
    assert (str(error), error.result) == ("text", None)
    assert str(pickle.loads(pickle.dumps(error))) == "text"


def test_two_processes_raise_in_the_same_call_where_one_of_them_changes(tmp_path: Path) -> None:
    first, second = results_in(2, ranks.trained, tmp_path)
    assert len(first[1]) == len(second[1]) == 1
    assert first[2][0] == second[2][0] >= 40
    assert "the step of rank 1 differs from its graph" in first[1][0]
    assert "aten.mul.Tensor is given 1.0, and 0.5 now" in second[1][0]
    assert len(first[0]) == len(second[0]) == 60
    assert min(first[2][1], second[2][1]) > 10


def test_a_capture_says_what_its_graph_and_audits_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = iter([6 << 20, 8 << 20])
    monkeypatch.setattr(graphed_step, "reserved_bytes", lambda device: next(held))
    train, *_ = stale()
    with caplog.at_level("INFO", logger="zoo"):
        for number in range(6):
            train(batch(number))
    (line,) = caplog.messages
    assert "it takes 2.00 MiB, and eager steps, as audits are, 6.00 MiB" in line
