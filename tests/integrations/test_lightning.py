"""The callback of Lightning: the bits of plain training, also from a checkpoint of Lightning's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.integrations.networks import Network, data, same
from zoo.optimizer.in_backward import attached_to

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

lightning = pytest.importorskip("lightning", exc_type=(ImportError, RuntimeError))
callbacks = pytest.importorskip("zoo.integrations.lightning")
IN_BACKWARD = {"optimizer_in_backward": True}


class Module(lightning.LightningModule):
    """As people write it; `seen` holds which optimizer stepped in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = Network(), set[Any]()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        self.seen.add(attached_to(self.parameters()) is not None)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(folder: Path, *extra: Any, resume: Path | None = None, **options: Any) -> Any:
    lightning.seed_everything(0, verbose=False)
    module = Module()
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[*extra, saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=resume)
    return module


@pytest.mark.parametrize(
    "options", [{}, IN_BACKWARD, {"memory_budget": "99%"}, {"memory_budget": "99%"} | IN_BACKWARD]
)
def test_training_has_the_bits_of_plain_training(options: Any, tmp_path: Path) -> None:
    saving = callbacks.ActivationCheckpointing("net", **options)
    plain, model = fit(tmp_path / "plain"), fit(tmp_path / "saving", saving)
    assert same(plain, model)
    assert saving.plan is not None
    assert model.seen == {"optimizer_in_backward" in options}
    # taken off again
    assert zoo.plan_of(model.net) is None
    assert attached_to(model.parameters()) is None


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("options", [{}, IN_BACKWARD])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    options: Any, tmp_path: Path
) -> None:
    whole, resumed = (callbacks.ActivationCheckpointing("net", **options) for _ in range(2))
    expected = fit(tmp_path / "whole", whole)
    # nothing but the checkpoint knows the random state
    resume = tmp_path / "whole" / "epoch=0.ckpt"
    assert same(expected, fit(tmp_path / "resumed", resumed, resume=resume))


def test_what_needs_all_gradients_or_a_wrong_part_is_refused(tmp_path: Path) -> None:
    in_backward = callbacks.ActivationCheckpointing("net", **IN_BACKWARD)
    for name, value in {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}.items():
        with pytest.raises(zoo.OptimizerError, match=f"{name}={value} needs all gradients at once"):
            fit(tmp_path / name, in_backward, **{name: value})
    with pytest.raises(zoo.ArgumentError, match=r"no module 'nett'\. Did you mean net"):
        fit(tmp_path / "part", callbacks.ActivationCheckpointing("nett"))
