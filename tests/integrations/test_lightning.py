"""The callback of Lightning: the bits of plain training, also from a checkpoint of Lightning's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zoo
from tests.integrations.networks import Network, data, same
from zoo.optimizer.in_backward import attached_to

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

lightning = pytest.importorskip("lightning", exc_type=(ImportError, RuntimeError))
callbacks = pytest.importorskip("zoo.integrations.lightning")
IN_BACKWARD = {"optimizer_in_backward": True}


class Module(lightning.LightningModule):
    """As people write it; `seen` holds which optimizer stepped in the backward."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = Network(), set[Any]()

    def training_step(self, batch: Any, _: int) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["a"][0] + batch["b"][0], batch["b"][1]
        self.seen.add(attached_to(self.parameters()) is not None)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self) -> None:
        # Lightning leaves it out behind the checkpoint of an epoch's last batch
        if self.draws:
            torch.rand(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(
    folder: Path,
    *extra: Any,
    resume: Path | None = None,
    loader: Callable[[], Any] = data,
    **options: Any,
) -> Any:
    """Returns the module after two epochs; saves after each, and after each step."""
    # nothing but the checkpoint knows the random state
    lightning.seed_everything(0 if resume is None else 1, verbose=False)
    module, every = Module(), lightning.pytorch.callbacks.ModelCheckpoint
    savings = (
        every(folder, "{epoch}", save_top_k=-1),
        every(folder, "{step}", save_top_k=-1, every_n_train_steps=1),
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[*extra, *savings], logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader(), ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
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
    resume = tmp_path / "whole" / "epoch=0.ckpt"
    assert same(expected, fit(tmp_path / "resumed", resumed, resume=resume))


class Noisy(TensorDataset):
    """Draws a number for each example, from the stream of its process."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.rand(8), y


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(*data().dataset.tensors), 256, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "of its own generator": lambda: loader(
        shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "with workers": lambda: loader(shuffle=True, num_workers=2, multiprocessing_context="fork"),
    "several": lambda: {name: loader(shuffle=True) for name in "ab"},
}


# a loader that cannot resume by itself, whose batches are passed over
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_resumes_to_the_same_bits_with_any_loader_from_any_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str, resume: Path | None = None) -> Any:
        saving = callbacks.ActivationCheckpointing("net", "blocks")
        return fit(tmp_path / folder, saving, resume=resume, loader=LOADERS[name])

    expected = run("whole")
    for step in ("step=2", "epoch=0", "step=6"):
        assert same(expected, run(step, tmp_path / "whole" / f"{step}.ckpt")), step
    monkeypatch.setattr(Module, "draws", False)
    assert same(run("again"), run("last", tmp_path / "again" / "step=4.ckpt"))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("state", [{"plan": [1]}, {"streams": 3}])
def test_a_checkpoint_of_another_version_resumes_and_says_what_it_lacks(
    state: Any, tmp_path: Path
) -> None:
    fit(tmp_path / "whole", callbacks.ActivationCheckpointing("net"))
    path = tmp_path / "whole" / "epoch=0.ckpt"
    saved = torch.load(path)
    (key,) = [key for key in saved["callbacks"] if key.startswith("ActivationCheckpointing")]
    saved["callbacks"][key] = state
    torch.save(saved, path)
    resumed = callbacks.ActivationCheckpointing("net")
    with pytest.warns(UserWarning, match="saved with another version of zoo"):
        fit(tmp_path / "resumed", resumed, resume=path)
    assert resumed.plan is not None


def test_what_needs_all_gradients_or_a_wrong_part_is_refused(tmp_path: Path) -> None:
    in_backward = callbacks.ActivationCheckpointing("net", **IN_BACKWARD)
    for name, value in {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}.items():
        with pytest.raises(zoo.OptimizerError, match=f"{name}={value} needs all gradients at once"):
            fit(tmp_path / name, in_backward, **{name: value})
    with pytest.raises(zoo.ArgumentError, match=r"no module 'nett'\. Did you mean net"):
        fit(tmp_path / "part", callbacks.ActivationCheckpointing("nett"))
