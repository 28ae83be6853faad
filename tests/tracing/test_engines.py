"""What people train with around a model: mixed precision, the compiler, memory formats, DDP."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.tracing.models import Net
from tests.training import assert_same, images, train

pytestmark = pytest.mark.usefixtures("without_fork")


def batch() -> list[Tensor]:
    return [images()]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return zoo.checkpoint(copy.deepcopy(plain), "blocks"), plain


def test_channels_last_is_kept_also_by_the_replay() -> None:
    def wide() -> list[Tensor]:
        return [images().to(memory_format=torch.channels_last).requires_grad_()]

    model, plain = (module.to(memory_format=torch.channels_last) for module in pair())
    assert_same(train(model, wide), train(plain, wide))
    layouts: list[list[tuple[int, ...]]] = []
    for module in (model, plain):
        found: list[tuple[int, ...]] = []
        for part in module.modules():
            if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3):
                part.register_full_backward_hook(
                    lambda *given, f=found: f.append(given[2][0].stride())
                )
        module(*wide()).sum().backward()
        layouts.append(found)
    assert layouts[0] == layouts[1]
    assert layouts[0][-1] == (4 * 36, 1, 4 * 6, 4)


# the compiler's own
compilers_warnings = pytest.mark.filterwarnings(
    "ignore:The .grad attribute", "ignore:Dynamo does not know how to trace"
)


@compilers_warnings
def test_a_model_that_is_compiled_afterwards_runs_by_blocks() -> None:
    model, plain = pair()
    compiled = torch.compile(model, backend="eager")
    assert_same(train(model, batch, forward=compiled.__call__), train(plain, batch))
    assert zoo.plan_of(model) is None


def test_a_model_that_was_compiled_before_is_refused() -> None:
    with pytest.raises(zoo.ArgumentError, match=r"call zoo\.checkpoint before torch\.compile"):
        zoo.checkpoint(torch.compile(Net(), backend="eager"))


@compilers_warnings
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("option", [True, "blocks", "sqrt"])
def test_compiled_blocks_stay_compiled(backend: str, when: str, option: Any) -> None:
    plain = Net()
    model = copy.deepcopy(plain)
    if when == "after":
        zoo.checkpoint(model, option)
        train(model, batch, 1)
        model.load_state_dict(plain.state_dict())
    for module in (*model.blocks, *plain.blocks):
        module.norm.momentum = 0.1
        module.compile(backend=backend)
    if when == "before":
        zoo.checkpoint(model, option)
    assert_same(train(model, batch), train(plain, batch))
    assert zoo.plan_of(model) is not None


@pytest.mark.parametrize("option", [True, "blocks"])
def test_hooks_on_blocks_change_no_plan(option: Any) -> None:
    model, plain = zoo.checkpoint(Net(), option), Net()
    plain.load_state_dict(model.state_dict())
    bare = zoo.checkpoint(Net(), option)
    bare(images())
    for module in (*model.blocks, *plain.blocks):
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
    assert_same(train(model, batch), train(plain, batch))
    assert zoo.plan_of(model) == zoo.plan_of(bare)


@pytest.fixture
def process_group(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("option", [True, "blocks", 2])
def test_distributed_data_parallel(
    process_group: None, settings: dict[str, bool], option: Any
) -> None:
    model, plain = pair()
    zoo.checkpoint(model, option)
    one, other = (DistributedDataParallel(module, **settings) for module in (model, plain))
    assert_same(train(one, batch), train(other, batch))


def test_half_precision_with_a_scaler() -> None:
    def scaled(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(images()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [value.clone() for value in model.state_dict().values()]

    model, plain = pair()
    for one, other in zip(scaled(model), scaled(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
