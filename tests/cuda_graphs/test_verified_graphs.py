"""`zoo.verify(cuda_graph=True)` says whether replays of a graph are the baseline's steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.cuda_graphs.software_graphs import SoftwareGraphs
from zoo.cuda_graphs import graphed_step
from zoo.cuda_graphs.capture import CapturedStep

pytestmark = pytest.mark.usefixtures("without_fork")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has graphs."""
    made = SoftwareGraphs()
    monkeypatch.setattr(graphed_step, "graphs_on", lambda device: made)


def model() -> nn.Module:
    """Returns a model with statistics and dropout."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def batch(number: int) -> Tensor:
    """Returns the input of a step, (6, 8)."""
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("checkpoint", [True, "blocks"])
def test_replays_are_compared_bit_for_bit(checkpoint: Any, in_backward: bool) -> None:
    report = zoo.verify(
        model(), batch, checkpoint, cuda_graph=True, optimizer_in_backward=in_backward
    )
    assert report.exact
    assert (report.steps, report.replays) == (6, 3)
    assert " as a CUDA graph, " in str(report)
    assert "after each of 6 training steps, the last 3 of them replays: " in str(report)
    assert report.compared["parameter gradient"] == len([*model().parameters()])


@pytest.mark.usefixtures("graphs")
def test_a_graph_of_a_stale_batch_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # a mutant: the batch is not copied to where the graph reads it
    replay = CapturedStep.replay

    def stale(self: CapturedStep, batch: Any) -> Any:
        return replay(self, self.static)

    monkeypatch.setattr(CapturedStep, "replay", stale)
    report = zoo.verify(model(), batch, cuda_graph=True)
    assert report.exact is False
    assert report.first is not None
    # the fourth step is captured with its own batch
    assert (report.first.kind, report.first.training_step) == ("output", 5)


@pytest.mark.usefixtures("graphs")
def test_a_step_that_cannot_be_a_graph_is_refused() -> None:
    with pytest.raises(zoo.GraphError, match="reads numbers of a tensor and waits"):
        zoo.verify(model(), batch, loss=lambda out: out.sum() * out.sum().item(), cuda_graph=True)


@pytest.mark.usefixtures("graphs")
def test_other_shapes_in_each_step_are_no_graph() -> None:
    with pytest.raises(zoo.GraphError, match=r"0 of 3 .*: the batches differ in .* there are 5\. "):
        zoo.verify(model(), lambda number: batch(0)[: 2 + number % 5], cuda_graph=True)


def test_a_device_without_graphs_is_named() -> None:
    with pytest.raises(zoo.ArgumentError, match=r"this Sequential is on cpu\. Move it to a GPU"):
        zoo.verify(model(), batch, cuda_graph=True)
