"""What people train with around a model: mixed precision, the compiler, memory formats, DDP."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.adapter.models import Net
from tests.training import assert_same, images, train


def batch() -> list[Tensor]:
    return [images()]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return zoo.checkpoint(copy.deepcopy(plain), "blocks"), plain


def test_channels_last_is_kept() -> None:
    def wide() -> list[Tensor]:
        return [images().to(memory_format=torch.channels_last)]

    model, plain = (module.to(memory_format=torch.channels_last) for module in pair())
    assert_same(train(model, wide), train(plain, wide))


def test_a_model_that_is_compiled_afterwards_runs_by_its_plan() -> None:
    model, plain = pair()
    compiled = torch.compile(model, backend="eager")
    assert_same(train(model, batch, forward=compiled.__call__), train(plain, batch))
    assert model.forward.plan.depth() == 1


def test_a_model_that_was_compiled_before_is_refused() -> None:
    with pytest.raises(zoo.ArgumentError, match=r"call zoo\.checkpoint on the model before"):
        zoo.checkpoint(torch.compile(Net(), backend="eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
def test_compiled_blocks_are_called_as_a_whole() -> None:
    model, plain = pair()
    for module in (*model.blocks, *plain.blocks):
        module.norm.momentum = 0.1
        module.compile(backend="eager")
    assert_same(train(model, batch), train(plain, batch))


@pytest.fixture
def process_group(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_distributed_data_parallel(process_group: None, settings: dict[str, bool]) -> None:
    model, plain = pair()
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
