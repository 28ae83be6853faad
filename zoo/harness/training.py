"""The training step of a cell, and SHA-256 digests of the state after it.

Gradients are None between steps (`set_to_none=True`, the default), so that a step's peak is that of
a training loop that keeps nothing it does not need.

Comparing tensors would need both models in one process, whose allocations would then no longer be
those of a training run. A digest per kind and step also shows where two trainings diverge:

    step      1     2     3
    loss      4f1c  9b02  c7d1        differs at step 2 in gradients first: the backward is wrong
    gradients 11aa  e09c  ...         differs in buffers first: statistics were updated twice
    buffers   53b7  53b8  ...         differs in rng: dropout was drawn again

With the optimizer in the backward there are no gradients after a step; its digests have none.

The loss of another library's model is the one that it returns for labels, or the cross-entropy of
the first tensor that it returns, if that has a logit for each class, or else a mean square.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.api.checkpoint import uncheckpoint
from zoo.api.track import floating_in
from zoo.catalog.factories import create
from zoo.catalog.libraries import is_of_library
from zoo.cuda_graphs.graphed_step import GraphedStep, make_graphed_step
from zoo.engine.devices import read_streams
from zoo.harness.comparison_cells import Cell, Kind
from zoo.harness.data import Batch
from zoo.harness.default_configs import sample_for
from zoo.harness.optimizers import OPTIMIZERS
from zoo.invocation import Inputs, Invocation
from zoo.loss import own_loss
from zoo.optimizer.in_backward import FreedGradient, OptimizerInBackward, optimizer_in_backward
from zoo.planner.plan import Plan
from zoo.policy.goal import Goal
from zoo.policy.training_step import TrainingStep
from zoo.tracing.planned_forward import PatchedForward, patched_forward
from zoo.tracing.switches import switch_of
from zoo.verification.state_comparison import bits

# see profiling.source_location: lines of this file are not the model's
IS_TRAINING_LOOP = True


class Training:
    """Trains the model of a cell. The same seed gives the same weights and the same steps.

    With stream data the model's state is carried from step to step.
    """

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(cell.seed)
        model = create(cell.model.name, checkpoint=cell.checkpoint, **cell.model.arguments)
        self.model: Any = model.to(cell.device).train()
        self.optimizer = OPTIMIZERS[cell.model.optimizer](self.model.parameters())
        half = cell.dtype == "bfloat16"
        self.autocast = torch.autocast(cell.device, torch.bfloat16, enabled=half)
        self._config, self._state = cell.model, None
        own = in_backward = patched_forward(self.model)
        if cell.plan_in_backward is not None:
            goal = Goal(Plan.parse(cell.plan_in_backward))
            in_backward = PatchedForward(self.model, goal, TrainingStep())
        self._patches = {"checkpointed": own, "optimizer_in_backward": in_backward}
        self.library = switch_of(self.model) if cell.library_checkpointing else None
        self._handle: OptimizerInBackward | None = None
        self._run: Callable[..., tuple[Tensor, Any]] = self._train

    def switch(self, variant: Kind) -> None:
        """Switches to a variant: by the plan or not, by the library's own checkpointing, ..."""
        if self._handle is not None:
            self._handle.remove()
        uncheckpoint(self.model)
        if self.library is not None:
            self.library.turn(variant == "library_checkpointing")
        if (patch := self._patches.get(variant)) is not None:
            patch.install()
        in_backward = variant == "optimizer_in_backward"
        self._handle = optimizer_in_backward(self.model, self.optimizer) if in_backward else None

    def step(self, batch: Batch) -> Tensor:
        """Runs forward, backward and optimizer on a batch and returns the loss ()."""
        loss, self._state = self._run(batch.inputs, batch.targets, self._state)
        return loss

    def as_graph(self) -> GraphedStep:
        """Makes steps from now on those of a CUDA graph; raises GraphError if they cannot be."""
        for group in self.optimizer.param_groups:
            # a fused optimizer counts its steps on the device with or without
            group.update({"capturable": True} if "capturable" in group else {})
        # what it leaves is compared with eager steps all the same
        graphed = make_graphed_step(
            self._train, model=self.model, optimizer=self.optimizer, check_every=None
        )
        self._run = graphed
        return graphed

    def arguments(self, batch: Batch) -> Inputs:
        """Returns the model's arguments: a batch, and the state after the previous one."""
        return batch.arguments(self._config, self._state)

    def outer_loss(self, batch: Batch) -> Callable[[Any], Tensor] | None:
        """Returns the loss function for the model's outputs; None if the model returns its loss."""
        model = self._config
        if is_of_library(model.name):
            classes = sample_for(model.name, model.arguments).classes
            return partial(library_loss, classes=classes, targets=batch.targets)
        is_text = model.data in ("text", "stream")
        return None if is_text else partial(F.cross_entropy, target=batch.targets)

    def _train(self, inputs: Tensor, targets: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss, state = self._loss(Batch(inputs, targets), state)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), state

    def _loss(self, batch: Batch, state: Any) -> tuple[Tensor, Any]:
        # local to this method, so that logits do not outlive the forward
        returned = Invocation.of(batch.arguments(self._config, state)).on(self.model)
        if self._config.data == "stream":
            returned, state = returned
            state = self.model.detach(state)
        loss = self.outer_loss(batch)
        return returned if loss is None else loss(returned), state


def library_loss(outputs: Any, classes: int, targets: Tensor) -> Tensor:
    """Returns a loss for whatever another library's model returns."""
    own = own_loss(outputs)
    if own is not None:
        return own  # type: ignore[no-any-return]
    first, *others = floating_in(outputs)
    if first.shape == (len(targets), classes, *targets.shape[1:]) and classes > 1:
        return F.cross_entropy(first, targets)
    return torch.stack([tensor.float().square().mean() for tensor in (first, *others)]).sum()


def step_digests(model: nn.Module, loss: Tensor) -> dict[str, str]:
    """Returns the digest of each kind after a step: loss, gradients, buffers, parameters, rng.

    Without gradients if the optimizer has freed them.
    """
    parameters = list(model.named_parameters())
    gradients = [(name, parameter.grad) for name, parameter in parameters]
    are_freed = any(isinstance(gradient, FreedGradient) for _, gradient in gradients)
    # torch's generators only: no cell seeds Python's and NumPy's
    streams = [pair for pair in read_streams().items() if isinstance(pair[1], Tensor)]
    return {
        "loss": digest([("loss", loss)]),
        **({} if are_freed else {"gradients": digest(gradients)}),
        "buffers": digest(model.named_buffers()),
        "parameters": digest(parameters),
        "rng": digest(streams),
    }


def digest(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and raw bytes, so that -0.0 differs from 0.0."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        if tensor is None:
            total.update(f"{name} None".encode())
        else:
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(bits(tensor).cpu().reshape(-1).numpy().data)
    return total.hexdigest()
