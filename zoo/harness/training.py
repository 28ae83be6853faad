"""A model in training as the cells run it: real batches, an optimizer, one step at a time.

Gradients are None between steps (`set_to_none=True`, the default), so that a step's peak is that of
a training loop that leaves nothing lying around. The optimizers are torch's fused ones: the others
allocate copies of a parameter, which in a language model would hide the activations' peak.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.catalog import create
from zoo.harness.config import ModelConfig
from zoo.harness.data import Batch
from zoo.plan import Plan
from zoo.planner.schemes import NAMES


class Training:
    """Trains one model of a config. The same seed gives the same weights and the same steps.

    `checkpoint` is what `zoo.create` takes, or a plan's text; `dtype` is float32, or bfloat16 for
    autocast. A model of stream data keeps its state from step to step.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: bool | int | str, device: str, dtype: str, seed: int
    ) -> None:
        torch.manual_seed(seed)
        model = create(config.name, checkpoint=_option(checkpoint), **config.arguments)
        self.model = model.to(device).train()
        self.optimizer = OPTIMIZERS[config.optimizer](self.model)
        self.device, self.half = device, dtype == "bfloat16"
        self._loss = {"text": self._next, "stream": self._carry}.get(config.data, self._classify)
        self._state: Any = None

    def step(self, batch: Batch) -> Tensor:
        """Runs forward, backward and optimizer on a batch and returns the loss ()."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _classify(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch.inputs), batch.targets)

    def _next(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(batch.inputs, batch.targets)
        return loss

    def _carry(self, batch: Batch) -> Tensor:
        model: Any = self.model
        loss, state = model(batch.inputs, self._state, batch.targets)
        self._state = model.detach(state)
        return loss  # type: ignore[no-any-return]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}


def _option(checkpoint: bool | int | str) -> bool | int | str | Plan:
    if isinstance(checkpoint, str) and checkpoint not in NAMES:
        return Plan.parse(checkpoint)
    return checkpoint
