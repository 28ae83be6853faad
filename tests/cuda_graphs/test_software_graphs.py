"""The graphs in software: numbers of all families, and faults of a log that are noticed."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.cuda_graphs import software_graphs
from tests.cuda_graphs.software_graphs import KernelLog, SoftwareGraphs
from zoo.cuda_graphs import graphed_step
from zoo.models.densenet import DenseNet

pytestmark = pytest.mark.usefixtures("without_fork")


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has graphs."""
    made = SoftwareGraphs()
    monkeypatch.setattr(graphed_step, "graphs_on", lambda device: made)


def words(number: int) -> tuple[Tensor, ...]:
    """Returns the tokens of a batch, (2, 16)."""
    return (torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(number)),)


def images(number: int) -> tuple[Tensor, ...]:
    """Returns the images of a batch, (2, 3, 32, 32), and their classes."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(2, 3, 32, 32, generator=generator), torch.tensor([number % 10, 2])


def voxels(number: int) -> tuple[Tensor, ...]:
    """Returns the volumes of a batch, (2, 1, 16, 16, 16)."""
    return (torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(number)),)


def llama() -> nn.Module:
    """Returns a small Llama of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def create(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Returns what makes a small model of zoo."""
    return lambda: zoo.create(name, **options)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns the loss of a classifier."""
    return nn.functional.cross_entropy(model(x), y)


Family = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]
FAMILIES: dict[str, Family] = {
    "llama": (llama, words, lambda model, x: model(input_ids=x, labels=x).loss),
    "gpt2": (
        create("gpt2_small", vocabulary=100, positions=16, depth=2, width=32, heads=2),
        words,
        lambda model, x: model(x, x),
    ),
    "lstm": (
        create("lstm", vocabulary=100, embedding=16, hidden=16),
        lambda number: (words(number)[0].T.contiguous(),),
        lambda model, x: model(x, targets=x)[0],
    ),
    "vit": (
        create(
            *("vit_tiny_patch16",),
            **{"image_size": 32, "classes": 10, "depth": 3, "drop_rate": 0.1},
            drop_path_rate=0.1,
        ),
        images,
        classify,
    ),
    "resnet": (create("resnet18", classes=10, drop_path_rate=0.1), images, classify),
    "densenet": (
        lambda: DenseNet(4, (2, 2), 10, drop_rate=0.2, small_images=True),
        images,
        classify,
    ),
    "vnet": (create("vnet", width=2), voxels, lambda model, x: model(x).float().square().mean()),
}


@functools.cache
def eager(family: str) -> list[Tensor]:
    """Returns what the baseline's six steps leave."""
    return trained(family, False, graphed=False)


def trained(family: str, checkpoint: Any, graphed: bool) -> list[Tensor]:
    """Returns losses, weights, buffers and the state of the generator after six calls."""
    make, batch, loss_of = FAMILIES[family]
    torch.manual_seed(0)
    model = zoo.checkpoint(make().train(), checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train: Any = step
    if graphed:
        train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
    torch.manual_seed(1)
    losses = [train(*batch(number)).detach() for number in range(6)]
    if graphed:
        assert (train.eager, train.captures, train.replays) == (3, 1, 3)
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("family", "checkpoint"),
    [
        *((name, True) for name in FAMILIES),
        *((name, "blocks") for name in ("llama", "gpt2", "vit")),
    ],
)
def test_graphed_steps_of_all_families_are_eager_ones_bit_for_bit(
    family: str, checkpoint: Any
) -> None:
    for graphed, expected in zip(trained(family, checkpoint, True), eager(family), strict=True):
        torch.testing.assert_close(graphed, expected, rtol=0, atol=0)


def test_a_log_that_holds_results_is_of_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # a mutant: zoo finds the results alive then, and replays none of them
    dispatch, held = KernelLog.__torch_dispatch__, []

    def holding(self: KernelLog, *args: Any) -> Any:
        held.append(dispatch(self, *args))
        return held[-1]

    monkeypatch.setattr(KernelLog, "__torch_dispatch__", holding)
    with pytest.raises(zoo.GraphError, match="does in its capture what it did not do eagerly"):
        trained("gpt2", True, graphed=True)


def test_a_log_without_copies_of_storages_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # a mutant: a replay would read the tokens of the batch that was captured
    @contextlib.contextmanager
    def unlogged(log: KernelLog) -> Iterator[None]:
        yield

    monkeypatch.setattr(software_graphs, "logged_storage_copies", unlogged)
    with pytest.raises(AssertionError, match=r"nothing in the log made this \(2, 16\) tensor"):
        trained("gpt2", True, graphed=True)
