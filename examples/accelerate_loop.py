"""Accelerate: a loop of your own, on one process or many, that resumes to the same bits.

    pip install 'zoo-checkpoint[examples]'
    python examples/accelerate_loop.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Trains a classifier of digits plainly, checkpointed, and checkpointed from the middle on, and exits
with 1 unless all three end with the same bits.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from digits import Classifier, loader, report
from torch import Tensor, nn

from zoo.integrations.accelerate import prepare

EPOCHS = 2


def fit(
    accelerator: Accelerator, folder: Path, checkpoint: Any, first: int = 0
) -> dict[str, Tensor]:
    """Trains from an epoch on, whose states lie in `folder`, and returns the weights at the end."""
    set_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, batches = prepare(
        accelerator, model, optimizer, loader(), checkpoint=checkpoint
    )
    if first:
        accelerator.load_state(str(folder / str(first)))
    for epoch in range(first, EPOCHS):
        batches.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        # with the random states of all processes
        accelerator.save_state(str(folder / str(epoch + 1)))
    found = accelerator.unwrap_model(model).state_dict()
    accelerator.free_memory()
    return found


def main() -> int:
    """Compares the three trainings."""
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as name:
        # one for all processes, that of the first
        folder = Path(broadcast_object_list([name])[0])
        runs = {
            "plain": fit(accelerator, folder / "plain", False),
            "checkpointed": fit(accelerator, folder / "all", True),
            "resumed": fit(accelerator, folder / "all", True, first=1),
        }
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return report(runs)


if __name__ == "__main__":
    sys.exit(main())
