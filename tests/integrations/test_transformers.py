"""The callback of transformers' Trainer: the bits of plain training, also from its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.integrations.networks import same
from zoo.optimizer.in_backward import attached_to

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

transformers = pytest.importorskip("transformers", exc_type=(ImportError, RuntimeError))
pytest.importorskip("accelerate")
callbacks = pytest.importorskip("zoo.integrations.transformers")
STEPS = 4


def trainer(folder: Path, **settings: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=2, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    given = {"max_grad_norm": 0.0, "save_steps": STEPS // 2, "max_steps": STEPS} | settings
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=1, **given,
    )  # fmt: skip
    rows = torch.randint(64, (32, 32), generator=torch.Generator().manual_seed(0))
    texts = [{"input_ids": row, "labels": row} for row in rows]
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, arguments, train_dataset=texts)


def train(folder: Path, in_backward: bool = False, resume: bool = False, **options: Any) -> Any:
    """Trains with the callback; returns the model, and the callback."""
    made = trainer(folder)
    given = options | ({"in_backward_of": made} if in_backward else {})
    saving = callbacks.ActivationCheckpointingCallback(**given)
    made.add_callback(saving)
    made.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resume else None)
    return made.model, saving


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = trainer(tmp_path_factory.mktemp("plain"))
    made.train()
    return made.model


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("options", [{}, {"memory_budget": "99%"}])
def test_training_has_the_bits_of_plain_training(
    plain: Any, options: Any, in_backward: bool, tmp_path: Path
) -> None:
    model, saving = train(tmp_path, in_backward, **options)
    assert same(plain, model)
    assert saving.plan is not None
    assert zoo.plan_of(model) is None
    assert attached_to(model.parameters()) is None
    # from its own checkpoint, in which the random state is
    resumed, _ = train(tmp_path, in_backward, resume=True, **options)
    assert same(plain, resumed)


def test_what_needs_all_gradients_is_refused(tmp_path: Path) -> None:
    for name, value in {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}.items():
        made = trainer(tmp_path, **{name: value})
        made.add_callback(callbacks.ActivationCheckpointingCallback(in_backward_of=made))
        with pytest.raises(zoo.OptimizerError, match=f"{name}={value} needs all gradients at once"):
            made.train()
