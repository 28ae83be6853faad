"""Lightning: activation checkpointing of a LightningModule's network while it fits.

    from zoo.integrations.lightning import ActivationCheckpointing
    lightning.Trainer(callbacks=[ActivationCheckpointing("net", memory_budget="8GiB")])

Lightning's own checkpoints lack the random state, so that a resumed run draws other dropout masks.
The callback's state has it (`lightning_resume`): a run that resumes behind an epoch or within one
ends with the bits of one that was not stopped.
"""

from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from zoo.api.checkpoint import plan_of, uncheckpoint
from zoo.errors import ArgumentError, OptimizerError, nearest, shortened
from zoo.integrations.budget import checkpoint_with
from zoo.integrations.lightning_resume import Resumption
from zoo.optimizer.in_backward import OptimizerInBackward, optimizer_in_backward as in_backward
from zoo.planner.plan import Plan
from zoo.policy.goal import Checkpoint


class ActivationCheckpointing(lightning.Callback):  # type: ignore[misc]
    """Runs a part of a LightningModule by a plan in `fit`.

    Attributes:
        plan: the plan that it trains by, once there is one.

    Args:
        part: path of the module whose forward `training_step` calls: "net" for `self.net(x)`.
        checkpoint: what `zoo.checkpoint` takes, and so are the other options; a budget counts the
            optimizer of `configure_optimizers`, if there is one.
        optimizer_in_backward: also updates each parameter in the backward
            (`zoo.optimizer_in_backward`), without clipping and accumulation of gradients.
    """

    def __init__(
        self,
        part: str,
        checkpoint: Checkpoint | None = None,
        *,
        optimizer_in_backward: bool = False,
        **options: Any,
    ) -> None:
        self.part, self.checkpoint, self.options = part, checkpoint, options
        self.optimizer_in_backward = optimizer_in_backward
        self.plan: Plan | None = None
        self._resumption = Resumption()
        self._handles: list[OptimizerInBackward] = []
        self._hooks: list[Any] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Restores the random state that a resumed run's first iterator is made from."""
        self._resumption.begin_fit(trainer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Puts the plan in force; the optimizers have the state of a resumed run by now."""
        parts = dict(module.named_modules())
        if self.part not in parts:
            raise ArgumentError(
                f"this {type(module).__name__} has no module {shortened(self.part)}."
                f"{nearest(self.part, parts)}"
            )
        if self.optimizer_in_backward:
            self._step_in_backward(trainer, module)
        alone = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        checkpoint_with(parts[self.part], self.checkpoint, alone, self.options)
        self._resumption.watch(trainer)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Restores the random state of a resumed run."""
        self._resumption.begin_epoch()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Says the plan, as soon as there is one."""
        if self.plan is None:
            self.plan = plan_of(module.get_submodule(self.part))
            if self.plan is not None:
                rank_zero_info(f"{self.part}: {str(self.plan).splitlines()[0]}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Takes the plan off."""
        self._resumption.unwatch()
        for handle in (*self._handles, *self._hooks):
            handle.remove()
        self._handles, self._hooks = [], []
        uncheckpoint(module)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Takes the plan off, also where a backward was left."""
        for handle in self._handles:
            handle.reset()
        self.on_train_end(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        """Returns the random state, in types that `torch.load(weights_only=True)` admits."""
        return self._resumption.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remembers the random state for the first epoch."""
        self._resumption.load(state_dict)

    def _step_in_backward(self, trainer: Any, module: Any) -> None:
        for option, least in {"gradient_clip_val": 0, "accumulate_grad_batches": 1}.items():
            if (value := getattr(trainer, option) or least) > least:
                raise OptimizerError(
                    f"{option}={value!r} needs all gradients at once, which "
                    "optimizer_in_backward=True frees one by one; leave out either"
                )
        for optimizer in trainer.optimizers:
            # before that of the handle
            self._hooks.append(optimizer.register_step_pre_hook(_train_before))
            self._handles.append(in_backward(module, optimizer))


def _train_before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls the closure, by which Lightning's step runs forward and backward, ahead of the step."""
    closure = kwargs.get("closure")
    if closure is not None:
        with torch.enable_grad():
            closure()
    return args, {**kwargs, "closure": None}
