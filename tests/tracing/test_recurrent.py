"""A recurrent network whose layers are kernels of their own is cut between its layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import real_peak
from zoo.invocation import Invocation
from zoo.planner.event_costs import Outline
from zoo.planner.plan import Plan
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import block_paths, partition

pytestmark = pytest.mark.usefixtures("without_fork")


class Words(nn.Module):
    """Embeds words, reads them by a recurrent network, and has a word of five for each."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 8, **options: Any) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(20, width), kind(width, width, 2, **options)
        self.head = nn.Linear(width * (2 if self.recurrent.bidirectional else 1), 5)

    def forward(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        read: Any = self.embed(words)
        if lengths is not None:
            read = nn.utils.rnn.pack_padded_sequence(read, lengths, enforce_sorted=False)
        outputs, _ = self.recurrent(read)
        if lengths is not None:
            outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs)
        return self.head(outputs)  # type: ignore[no-any-return]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "both directions": {"dropout": 0.3, "bidirectional": True},
    "without bias": {"bias": False, "bidirectional": True},
}
WORDS = torch.arange(24).view(6, 4) % 20
LENGTHS = torch.tensor([6, 2, 4, 2])


def outline_of(model: nn.Module, *inputs: Any) -> Outline:
    return partition(model, step_trace_of(model, Invocation(inputs, {})), block_paths(model))


def layers_of(model: nn.Module, outline: Outline) -> list[set[str]]:
    """Returns for each step the layers, and their directions, whose matrices it reads."""
    names = [name for name, _ in model.named_parameters()]
    ends = ("l0", "l1", "l0_reverse", "l1_reverse")
    read = ([names[n] for n in step if "weight_" in names[n]] for step in outline.parameters)
    return [{end for end in ends for name in step if name.endswith(f"_{end}")} for step in read]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_step_computes_two_layers(
    kind: type[nn.RNNBase], options: dict[str, Any], is_packed: bool
) -> None:
    inputs = (WORDS, LENGTHS) if is_packed else (WORDS,)
    for dtype in (torch.float32, torch.float64):
        model = Words(kind, **options).to(dtype)
        layers = layers_of(model, outline_of(model, *inputs))
        assert all(len(step) <= 1 for step in layers)
        count = 4 if model.recurrent.bidirectional else 2
        assert len({name for step in layers for name in step}) == count
        # one for the product of all that the layer reads, and one for its loop in time
        assert sum(map(bool, layers)) <= 2 * count


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["dropout", "both directions"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_each_layer_is_recomputed_alone_with_the_bits_of_the_baseline(
    kind: type[nn.RNNBase], name: str, is_packed: bool
) -> None:
    inputs = (WORDS, LENGTHS) if is_packed else (WORDS,)
    count = len(outline_of(Words(kind, **OPTIONS[name]), *inputs))
    for plan in (Plan([(step,) for step in range(count)]), True):
        assert zoo.verify(Words(kind, **OPTIONS[name]), inputs, plan, steps=2).exact


@pytest.mark.parametrize(
    ("dtype", "options", "share"),
    [
        (torch.float32, {"dropout": 0.2}, 0.7),
        (torch.float32, {"dropout": 0.2, "bidirectional": True}, 0.55),
        (torch.float64, {"dropout": 0.2}, 0.75),
    ],
)
def test_a_language_model_of_lstms_saves_bytes_by_true(
    dtype: torch.dtype, options: dict[str, Any], share: float
) -> None:
    def loss(logits: Tensor) -> Tensor:
        targets = torch.arange(logits.shape[0] * logits.shape[1]) % 5
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    model, words = Words(nn.LSTM, 32, **options).to(dtype), torch.arange(160).view(40, 4) % 20
    taken = real_peak(model, words, None, loss, plan=True)
    assert taken <= share * real_peak(model, words, None, loss)


def test_a_product_and_its_bias_are_one_step() -> None:
    # a product of rows that are not dense, whose bias is added by a kernel of its own
    assert len(outline_of(nn.Linear(4, 5), torch.randn(2, 3, 4).transpose(0, 1))) == 1
