"""The helper of accelerate: the bits of plain training, also from a state that it saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.integrations.networks import Network, data, same
from zoo.optimizer.in_backward import attached_to

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

accelerate = pytest.importorskip("accelerate")
integration = pytest.importorskip("zoo.integrations.accelerate")


def train(folder: Path, first: int = 0, **options: Any) -> Any:
    """Trains two epochs, or the second from the state after the first; False is plain training."""
    accelerate.utils.set_seed(0)
    accelerator, model = accelerate.Accelerator(cpu=True), Network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, batches = integration.prepare(
        accelerator, model, optimizer, data(), **options
    )
    if first:
        accelerator.load_state(str(folder / str(first)))
    for epoch in range(first, 2):
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        accelerator.save_state(str(folder / str(epoch + 1)))
    accelerator.free_memory()
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("options", [{}, {"memory_budget": "99%"}])
def test_training_has_the_bits_of_plain_training(
    options: Any, in_backward: bool, tmp_path: Path
) -> None:
    options = options | {"optimizer_in_backward": in_backward}
    plain = train(tmp_path / "plain", checkpoint=False)
    model = train(tmp_path / "saving", **options)
    assert same(plain, model)
    assert zoo.plan_of(model) is not None
    assert (attached_to(model.parameters()) is not None) is in_backward
    assert same(plain, train(tmp_path / "saving", first=1, **options))


def test_what_needs_all_gradients_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zoo.OptimizerError, match="gradient_accumulation_steps=2 needs all grad"):
        integration.prepare(accelerator, model, optimizer, optimizer_in_backward=True)
