"""What `test_groups` runs in each of two and of four processes, on the device of the tests."""

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.tracing.models import Net
from tests.training import Record, Residuals, assert_same, everything, images
from zoo.api.checkpoint import plan_of
from zoo.errors import ArgumentError, OptimizerError
from zoo.planner.plan import RoomyPlan

Wrap = Callable[[nn.Module, Any], nn.Module]


class SharedNorm(nn.Module):
    """Does what SyncBatchNorm does on GPUs, whose own code wants one: a mean of all processes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = all_reduce(x.mean(0)) / distributed.get_world_size()
        self.running.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return x - mean


class Perceptron(nn.Module):
    """Two products that tensor parallelism splits, the second with a sum over processes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, nn.GELU()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Perceptrons(nn.Module):
    """Blocks over the mean of an image, and a layer that only some inputs come to."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron(norm()) for _ in range(4))
        self.seldom = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.seldom(x) if x.shape[0] > 100 else x


class Tabled(Perceptrons):
    """Reads a parameter itself, before any block, as what has positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[:, None, None])


class Recurrent(nn.Module):
    """Reads the mean of an image, or a row, as a sequence of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.RNN(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = (x if x.dim() == 2 else x.mean((2, 3))).unsqueeze(1)
        for layer in self.layers:
            x, _ = layer(x)
        return x.squeeze(1)


def put(model: nn.Module, option: Any) -> nn.Module:
    return model if option is None else zoo.checkpoint(model, option)


def data_parallel(model: nn.Module, option: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(put(model, option), **options)


def each_data_parallel(models: nn.Module, option: Any) -> nn.Module:
    return nn.Sequential(*(data_parallel(model, option) for model in models.children()))


def wrapped_first(model: nn.Module, option: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    put(model, option)
    return wrapped


def wrapped_and_put(model: nn.Module, option: Any) -> nn.Module:
    return put(DistributedDataParallel(model), option)


def shard(model: nn.Module) -> nn.Module:
    for block in getattr(model, "blocks", None) or getattr(model, "convs", ()):
        fully_shard(block)
    return fully_shard(model)


def sharded_after(model: nn.Module, option: Any) -> nn.Module:
    return shard(put(model, option))


def sharded_before(model: nn.Module, option: Any) -> nn.Module:
    return put(shard(model), option)


def split(model: Any, option: Any, first: bool, between: Any = Replicate) -> nn.Module:
    """Splits the products; `between` is how rows are spread outside of them."""
    mesh = init_device_mesh(torch.get_default_device().type, (distributed.get_world_size(),))
    if first:
        put(model, option)
    up, down = ColwiseParallel(input_layouts=between()), RowwiseParallel(output_layouts=between())
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": up, "down": down})
    return model if first else put(model, option)


by_rows = functools.partial(Shard, 0)


def plan_by_rows() -> None:
    """What gathers rows returns wrappers, which wait for it where they are read."""
    model = split(Perceptrons(), 2, False, by_rows)
    model(images()).sum().backward()
    assert max(plan_of(model).runs()) == 2


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(build: Callable[[], nn.Module], wrap: Wrap, option: Any, micro: int) -> Record:
    """Trains two steps of some micro-batches each, other batches and masks in each process."""
    torch.manual_seed(0)
    model = build()
    run = wrap(model, option)
    torch.manual_seed(100 + distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    record: Record = {}
    for step in range(2):
        optimizer.zero_grad()
        for number in range(micro):
            with run.no_sync() if number < micro - 1 else nullcontext():
                loss = run(images()).square().mean()
                loss.backward()
            record[f"{step} {number} loss"] = loss.detach()
        record |= {f"{step} {key}": whole(value) for key, value in everything(model).items()}
        optimizer.step()
    return record


def exact(
    build: Callable[[], nn.Module], wrap: Wrap, option: Any = True, micro: int = 1
) -> Callable[[], None]:
    """Makes a check that a plan changes no bit."""

    def check() -> None:
        assert_same(trained(build, wrap, option, micro), trained(build, wrap, None, micro))

    return check


def as_in_one_process() -> None:
    """Each process has a part of the batch; their mean is the gradient of all of it."""
    torch.manual_seed(0)
    plain, batch = Perceptrons().double(), images(8).double()
    own = batch.chunk(distributed.get_world_size())[distributed.get_rank()]
    for wrap in (data_parallel, sharded_after):
        torch.manual_seed(0)
        model = Perceptrons().double()
        options = {"find_unused_parameters": True} if wrap is data_parallel else {}
        run = wrap(model, True, **options)
        run(own).square().mean().backward()
        plain.zero_grad()
        plain(batch).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-12, atol=1e-14)


class Stage(nn.Module):
    """A block of a model, and its head behind the last: what a process of a pipeline runs."""

    def __init__(self, model: Residuals, block: int, is_last: bool) -> None:
        super().__init__()
        self.block, self.head = model.blocks[block], model.fc if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if self.head is None else self.head(x.mean((2, 3)))


def pipeline() -> None:
    """A block for each process, the head for the last: the bits of one process with all of it."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    plain, batch = Residuals(world, rate=0.0), images()
    torch.manual_seed(0)
    model = Residuals(world, rate=0.0)
    is_last = rank == world - 1
    stage = Stage(model, rank, is_last)
    # of the block, without dropout: a convolution, the norm, the sum; of the head two more
    zoo.checkpoint(stage, ((0, 1, 2), 3, 4) if is_last else ((0, 1, 2),))
    plain(batch).square().mean().backward()
    x = batch.clone()
    if rank:
        distributed.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if is_last:
        y.square().mean().backward()
    else:
        distributed.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        distributed.recv(gradient, rank + 1)
        y.backward(gradient)
    if rank:
        distributed.send(x.grad, rank - 1)
    own = [model.blocks[rank], *([model.fc] if is_last else [])]
    there = [plain.blocks[rank], *([plain.fc] if is_last else [])]
    for ours, theirs in zip(own, there, strict=True):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def collectives() -> None:
    """One of the forward and one of its gradient: a replay has what the other processes sent.

    Also of collectives that write into an argument, which on an accelerator no sample shows.
    """
    x = images().mean((2, 3)).requires_grad_()
    group = distributed.distributed_c10d._get_default_group()
    counts_them = x.device.type == "cpu"

    def in_place(x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        # returns its argument
        distributed.all_reduce(mean)
        # returns no tensor
        distributed.reduce(summed := mean.sin(), 0)
        return torch.tanh(x.sin() - mean * summed).exp()

    def made() -> int:
        return group._get_sequence_number_for_group() if counts_them else 0

    for function, expected in ((SharedNorm(4), [1, 1]), (in_place, [2, 0])):
        results = []
        for call in (lambda function, x: function(x), zoo.recompute):
            counts = [made()]
            y = call(function, x)
            counts.append(made())
            results.append({"gradient": torch.autograd.grad(y.square().sum(), x)[0]})
            counts.append(made())
            if counts_them:
                assert [after - before for before, after in itertools.pairwise(counts)] == expected
        assert_same(*results)


def one_plan() -> None:
    """Clocks differ between processes; here they are made to, by as much as can be."""
    rank, world = distributed.get_rank(), distributed.get_world_size()

    def decide(*given: Any) -> list[RoomyPlan]:
        count = given[1].step.steps
        return [RoomyPlan(zoo.Plan([tuple(range(rank + 1)), *range(rank + 1, count)]))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.policy.decision._budget_plans", decide)
        patch.setattr("zoo.policy.decision._known_plan", lambda *_: None)
        model = zoo.checkpoint(Net(), "auto", memory_budget="1GiB")
        model(images()).sum().backward()
        plans: list[Any] = [None] * world
        distributed.all_gather_object(plans, plan_of(model).text())
        assert len(set(plans)) == 1
        # other inputs in each process: nobody waits for a plan that never comes
        model(images(20 + rank)).sum().backward()
        assert plan_of(model).runs()[: rank + 1] == (2,) * (rank + 1)


def one_looks_ahead() -> None:
    """A process that looks ahead alone must not wait for the others."""
    if distributed.get_rank() == 0:
        with pytest.raises(ArgumentError, match="which waits for other processes"):
            zoo.chain_of(Perceptrons(lambda: SharedNorm(4)), images())


def steps_of_shards() -> None:
    model = shard(Tabled())
    shards = list(model.parameters())
    with pytest.raises(ArgumentError, match=r"spread over.*before the model is distributed"):
        zoo.chain_of(model, images())
    assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))


def budget_of_shards() -> None:
    model = shard(Net())
    with pytest.raises(ArgumentError, match=r"spread over.*before the model is distributed"):
        zoo.plan(model, images(), memory_budget=0.9)
    model = zoo.checkpoint(split(Perceptrons(), None, True), memory_budget=0.9)
    with pytest.raises(ArgumentError, match=r"spread over.*before the model is distributed"):
        model(images())


def optimizer_in_backward(option: Any) -> None:
    """The shards, and the state of their optimizer, after steps with and without."""
    found: list[Record] = []
    for way in (False, True):
        torch.manual_seed(0)
        model = sharded_after(Perceptrons(), option)
        torch.manual_seed(100 + distributed.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        if way:
            zoo.optimizer_in_backward(model, optimizer)
        for _ in range(3):
            model(images()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({key: whole(value) for key, value in model.state_dict().items()})
        for number, state in optimizer.state_dict()["state"].items():
            found[-1] |= {f"{number} {key}": whole(value) for key, value in state.items()}
    assert_same(*found)
    model(images()).square().mean().backward()
    with pytest.raises(OptimizerError, match="uses a gradient that the optimizer has used"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(AssertionError, match=r"got .*FreedGradient"):
        model(images()).square().mean().backward()


def optimizer_in_backward_of_a_wrapper() -> None:
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptimizerError, match="DistributedDataParallel combines gradients"):
        zoo.optimizer_in_backward(wrapped, optimizer)
    zoo.optimizer_in_backward(model, optimizer)
    with pytest.raises(OptimizerError, match="DistributedDataParallel combines gradients"):
        wrapped(images())


unused = functools.partial(data_parallel, find_unused_parameters=True)
static = functools.partial(data_parallel, static_graph=True)
CHECKS: dict[str, Callable[[], None]] = {
    "data parallel": exact(Net, data_parallel),
    "two data parallel": exact(lambda: nn.Sequential(Recurrent(), Recurrent()), each_data_parallel),
    "static graph": exact(Net, static, "sqrt"),
    "wrapped first": exact(Net, wrapped_first, 3),
    "sharded after": exact(Net, sharded_after),
    "sharded before": exact(Net, sharded_before, "sqrt"),
    "unused": exact(Perceptrons, unused),
    "accumulated": exact(Net, data_parallel, micro=3),
    "wrapper": exact(Net, wrapped_and_put),
    "synchronized": exact(lambda: Perceptrons(lambda: SharedNorm(4)), unused),
    "tensor parallel after": exact(Perceptrons, functools.partial(split, first=True)),
    "tensor parallel before": exact(Perceptrons, functools.partial(split, first=False), "blocks"),
    "tensor parallel by rows": exact(
        Perceptrons, functools.partial(split, first=False, between=by_rows)
    ),
    "plan of tensor parallel by rows": plan_by_rows,
    "sharded after of Tabled": exact(Tabled, sharded_after),
    "sharded before of Tabled": exact(Tabled, sharded_before, 2),
    "steps of shards": steps_of_shards,
    "one process": as_in_one_process,
    "pipeline": pipeline,
    "collectives": collectives,
    "one plan": one_plan,
    "one looks ahead": one_looks_ahead,
    "budget of shards": budget_of_shards,
    "optimizer in the backward": functools.partial(optimizer_in_backward, None),
    "optimizer in the backward, checkpointed": functools.partial(optimizer_in_backward, True),
    "optimizer in the backward of a wrapper": optimizer_in_backward_of_a_wrapper,
}
# once for each way to spread a model
IN_FOUR = (
    "data parallel", "sharded after", "sharded before", "synchronized", "tensor parallel before",
    "tensor parallel by rows", "steps of shards", "pipeline", "collectives", "one plan",
    "budget of shards", "optimizer in the backward",
)  # fmt: skip
