"""Lightning: a callback that puts a plan in force while it fits, and resumes to the same bits.

    pip install 'zoo-checkpoint[examples]'
    python examples/lightning_callback.py

Trains a classifier of digits plainly, checkpointed, and checkpointed from the middle on, and exits
with 1 unless all three end with the same bits. `ActivationCheckpointing` is all that your own code
needs.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from digits import Classifier, loader, report
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from zoo.integrations.lightning import ActivationCheckpointing

EPOCHS = 2


class Digits(lightning.LightningModule):
    """A LightningModule as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def on_train_epoch_start(self) -> None:
        # Lightning counts an epoch behind which it resumes twice, and tells the sampler so
        self.trainer.train_dataloader.sampler.set_epoch(self.current_epoch)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(folder: Path, checkpoint: Any, resume: Path | None = None) -> dict[str, Tensor]:
    """Trains, saves after each epoch, and returns the weights at the end."""
    lightning.seed_everything(0, verbose=False)
    module = Digits()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[ActivationCheckpointing("net", checkpoint), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=resume)
    return module.state_dict()


def main() -> int:
    """Compares the three trainings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "plain": fit(folder / "plain", False),
            "checkpointed": fit(folder / "all", True),
            "resumed": fit(folder / "rest", True, folder / "all" / "epoch=0.ckpt"),
        }
    return report(runs)


if __name__ == "__main__":
    sys.exit(main())
