"""transformers' Trainer: activation checkpointing in the place of its own.

    from zoo.integrations.transformers import ActivationCheckpointingCallback
    saving = ActivationCheckpointingCallback(memory_budget="8GiB")
    transformers.Trainer(model, arguments, callbacks=[saving])

`gradient_checkpointing` of the arguments stays off. The Trainer's checkpoints hold the random
state, so that a run that resumes from one ends with the bits of one that was not stopped.
"""

from typing import Any

import transformers
from transformers.utils import logging

from zoo.api.checkpoint import plan_of, uncheckpoint
from zoo.errors import OptimizerError
from zoo.integrations.budget import checkpoint_with
from zoo.optimizer.in_backward import OptimizerInBackward, optimizer_in_backward
from zoo.planner.plan import Plan
from zoo.policy.goal import Checkpoint

_log = logging.get_logger("transformers.zoo")
# a method of the Trainer that reads all gradients, for its log
NORM = "_get_grad_norm"


class ActivationCheckpointingCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Runs the Trainer's model by a plan while it trains.

    Attributes:
        plan: the plan that it trains by, once there is one.

    Args:
        checkpoint: what `zoo.checkpoint` takes, and so are the other options; a budget counts the
            Trainer's optimizer.
        in_backward_of: the Trainer that the callback is added to, to also update each parameter in
            the backward (`zoo.optimizer_in_backward`): without clipping (`max_grad_norm=0`) or
            accumulation of gradients, and without their norm in its log.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None = None,
        *,
        in_backward_of: transformers.Trainer | None = None,
        **options: Any,
    ) -> None:
        self.checkpoint, self.trainer, self.options = checkpoint, in_backward_of, options
        self.plan: Plan | None = None
        self._handle: OptimizerInBackward | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Puts the plan in force; the optimizer has the state of a resumed run by now."""
        model, wrapped = given["model"], given["optimizer"]
        optimizer = getattr(wrapped, "optimizer", wrapped)
        if self.trainer is not None:
            for option, off in {"max_grad_norm": 0, "gradient_accumulation_steps": 1}.items():
                if (value := getattr(args, option)) != off:
                    raise OptimizerError(
                        f"{option}={value!r} needs all gradients at once, which an optimizer in "
                        f"the backward frees one by one; take {option}={off}, or leave out "
                        "in_backward_of"
                    )
            self._handle = optimizer_in_backward(model, optimizer)
            if hasattr(self.trainer, NORM):
                setattr(self.trainer, NORM, lambda *_, **__: None)
        checkpoint_with(model, self.checkpoint, optimizer, self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Says the plan, as soon as there is one."""
        if self.plan is None and (plan := plan_of(given["model"])) is not None:
            self.plan = plan
            if state.is_world_process_zero:
                _log.info(str(plan).splitlines()[0])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Takes the plan off."""
        if self._handle is not None:
            self._handle.remove()
            vars(self.trainer).pop(NORM, None)
            self._handle = None
        uncheckpoint(given["model"])
