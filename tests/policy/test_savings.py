"""What an anatomy says of a step: what a plan saves, and what holds the rest, with the way out."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import Residuals, images

pytestmark = pytest.mark.usefixtures("without_fork")

SGD = torch.optim.SGD


def said(model: nn.Module, x: Tensor, **options: Any) -> list[str]:
    return [*zoo.anatomy(model, x, device="meta", **{"optimizer": SGD, **options}).savings]


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y @ y.t()).exp().sum()


class Deep(nn.Module):
    """Layers whose first result a variable may hold to the end, or an attribute longer."""

    def __init__(self, *, holds: bool = False, keeps: bool = False, returns: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(16))
        self.last, self.holds, self.keeps = nn.Linear(16, returns), holds, keeps

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).repeat(1, 400) if self.holds else None
        self.seen = x.repeat(1, 400) if self.keeps else None
        for layer in self.layers:
            x = layer(x).sigmoid()
        return self.last(x) if mask is None else self.last(x * x)


def test_the_first_sentence_tells_the_peaks_of_the_plan() -> None:
    model, x = Residuals(), images(64, size=16)
    first = said(model, x)[0]
    planned = zoo.anatomy(model, x, device="meta", optimizer=SGD, checkpoint=True)
    assert planned.planned is not None
    assert bytes_in(first)[0] == pytest.approx(planned.baseline.peak, rel=0.01)
    assert bytes_in(first)[1] == pytest.approx(planned.planned.peak, rel=0.01)


def bytes_in(text: str) -> list[float]:
    """Returns the sizes that a sentence names."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) ([KMG]iB)", text)]


CASES: dict[str, tuple[Any, Tensor, dict[str, Any], str]] = {
    "weights": (lambda: nn.Linear(900, 900), torch.rand(2, 900), {}, "no plan changes"),
    "one kernel": (Distances, torch.rand(600, 8), {}, r"one kernel or module, .*savings.py:\d+"),
    "loss": (
        lambda: Deep(returns=4),
        torch.rand(64, 16),
        {"loss": lambda y: y.repeat(200, 40).exp().logsumexp(0).mean()},
        "of the loss: a loss in parts",
    ),
    "outputs": (lambda: Deep(returns=4000), torch.rand(64, 16), {}, "holds_outputs=False"),
    "variables": (lambda: Deep(holds=True), torch.rand(64, 16), {}, "`del` them"),
    "attributes": (lambda: Deep(keeps=True), torch.rand(64, 16), {}, "as in attributes"),
    "kept": (Deep, torch.rand(9000, 16), {}, "plans that keep less"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_holds_the_peak_is_named_first(name: str) -> None:
    build, x, options, text = CASES[name]
    sentences = said(build(), x, **options)
    assert re.search(text, "\n".join(sentences)), sentences


def test_a_step_that_cannot_be_traced_says_why() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not bool(x.any()):
                raise ValueError("no data")
            return self.layer(x)

    (sentence,) = zoo.anatomy(Reading(), torch.ones(4, 4)).savings
    assert sentence.startswith("The step cannot be planned for ahead")
    assert "test_savings.py" in sentence
