"""A program that trains a model, what a plan of it is predicted to take, and what it takes.

A step is counted in its steady state: with what the step before has left in the model, in the
optimizer and in gradients that are accumulated.
"""

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, UntypedStorage, nn

import zoo
from zoo.api.plan import planner_for
from zoo.engine import devices
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner
from zoo.profiling.tensor_spec import storages_of, tensors_in

# bytes of an allocation between two steps; no program makes one of this size
MARK = 40009

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def mean_square(outputs: Any) -> Tensor:
    """Returns a loss of all tensors that a model returns."""
    leaves = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
    return sum((leaf.float().square().mean() for leaf in leaves), torch.zeros(()))


def own_loss(outputs: Any) -> Tensor:
    """Returns the loss of a model that gets its labels."""
    return outputs["loss"]  # type: ignore[no-any-return]


@dataclass
class Program:
    """A model, and how it is trained.

    Attributes:
        inputs: arguments in a tuple, or keyword arguments in a dict.
        around: makes what the forward and the loss are inside of, such as autocast.
        options: those of the planner.
        make_optimizer: makes the optimizer of a list of parameters.
    """

    model: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss: Callable[[Any], Tensor] = mean_square
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)
    make_optimizer: MakeOptimizer = sgd

    @functools.cached_property
    def planner(self) -> StepPlanner:
        """What plans the step; all kernels take the same time, so that each run has its plans."""
        with self.around():
            planner = planner_for(
                self.model,
                self.inputs,  # type: ignore[arg-type]
                loss=self.loss,
                optimizer=self.make_optimizer,
                measured=False,
                **self.options,
            )
            kernels = planner.step.profile.kernels(timed=False)
        same = [None if cost is None else cost._replace(seconds=1e-3) for cost in kernels]
        return StepPlanner(planner.step.with_kernels(same), planner.offload)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model, which may step in the backward."""
        optimizer = self.make_optimizer([*self.model.parameters()])
        if self.options.get("optimizer_in_backward"):
            zoo.optimizer_in_backward(self.model, optimizer)
        return optimizer

    def step(self) -> None:
        """Trains a step, in which variables hold the outputs and the loss."""
        if not self.options.get("accumulates"):
            self.optimizer.zero_grad()
        with self.around():
            if isinstance(self.inputs, tuple):
                outputs = self.model(*self.inputs)
            else:
                outputs = self.model(**self.inputs)
            loss = self.loss(outputs)
        if self.options.get("holds_outputs") is False:
            del outputs
        loss.backward()
        self.optimizer.step()

    def predicted(self, plan: Plan) -> int:
        """Returns the bytes of a step's peak by a plan of the model, from a dry step."""
        assert self.planner.judge.judgement(plan) is not None
        return self.planner.point(plan).peak

    def taken(self, plan: Plan) -> int:
        """Puts a plan in force and returns the bytes that the third step takes at its peak."""
        zoo.checkpoint(self.model, plan)
        self.step()
        if not self.options.get("accumulates"):
            self.optimizer.zero_grad()
        before = self._resident()
        with devices.cpu_events() as events:
            self.step()
            torch.empty(MARK, dtype=torch.uint8)
            self.step()
        after = self._resident()
        # the frees of what was there before are no events
        there = sum(size.nbytes() for key, size in before.items() if key in after)
        return there + peak_behind_mark([size for _, _, size in events])

    def _resident(self) -> dict[int, UntypedStorage]:
        """Returns the storages that are there between steps, of which events may not tell."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        targets = getattr(self.loss, "keywords", {})
        owned = *self.model.parameters(), *self.model.buffers(), *gradients
        given = tensors_in((self.optimizer.state, self.inputs, targets))
        return {s._cdata: s for tensor in (*owned, *given) for s in storages_of(tensor)}


def peak_behind_mark(sizes: Sequence[int]) -> int:
    """Returns the most bytes at a time behind the mark, of all those that the events are of."""
    totals = [*itertools.accumulate(sizes)]
    return max(totals[sizes.index(MARK) + 2 :])


def library(name: str) -> Any:
    """Imports a library that may be missing."""
    return importlib.import_module(name)


def image(batch: int, size: int, channels: int = 3) -> tuple[Tensor]:
    return (torch.rand(batch, channels, size, size),)


def words(batch: int, length: int, vocabulary: int = 500) -> Tensor:
    return torch.randint(5, vocabulary, (batch, length))


def labelled(batch: int, length: int) -> dict[str, Tensor]:
    tokens = words(batch, length)
    return {"input_ids": tokens, "labels": tokens}
