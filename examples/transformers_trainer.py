"""Hugging Face Trainer: a callback in the place of `gradient_checkpointing=True`.

    pip install 'zoo-checkpoint[examples]'
    python examples/transformers_trainer.py

Trains a small GPT-2 on the bytes of Python's own documentation plainly, checkpointed, and
checkpointed from the middle on, and exits with 1 unless all three end with the same bits.
"""

import os
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from digits import report
from torch import Tensor

from zoo.integrations.transformers import ActivationCheckpointingCallback

STEPS = 6
LENGTH = 64


def texts(count: int = 96) -> list[dict[str, Tensor]]:
    """Returns stretches of text as bytes, which a language model predicts from each other."""
    written = "".join(pydoc_data.topics.topics.values()).encode()[: count * LENGTH]
    stretches = torch.tensor(list(written)).view(count, LENGTH)
    return [{"input_ids": stretch, "labels": stretch} for stretch in stretches]


def fit(folder: Path, checkpoint: Any, resume: Path | None = None) -> dict[str, Tensor]:
    """Trains, saves in the middle, and returns the weights at the end."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=4, n_head=4, n_positions=LENGTH,
        # a cache is for generation, and would keep the keys and values of each layer
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    saving = ActivationCheckpointingCallback(checkpoint)
    trainer = transformers.Trainer(model, settings, train_dataset=texts(), callbacks=[saving])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model.state_dict()


def main() -> int:
    """Compares the three trainings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "plain": fit(folder / "plain", False),
            "checkpointed": fit(folder / "all", True),
            "resumed": fit(folder / "rest", True, folder / "all" / f"checkpoint-{STEPS // 2}"),
        }
    return report(runs)


if __name__ == "__main__":
    sys.exit(main())
