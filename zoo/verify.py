"""Proves for a model at hand that checkpointing changes nothing, or says what it changes first.

Two copies of a model train side by side from the same random state, one plainly and one by a plan.
After each step of training everything that the step left is compared bit for bit. Before that the
baseline is run against itself: a kernel that is not deterministic, the clock, or state outside the
model would otherwise be blamed on checkpointing.

    baseline against itself          differs  ->  not deterministic; checkpointing is not judged
    baseline against checkpointed    differs  ->  the first tensor, and the first step of the model
                                     equal    ->  exact

Only when something differs is that pair trained again, and watched: every step's outputs, gradients
and replays. Watching costs memory and so is no part of what is verified.

What a copy shares with its original is not protected: a function kept by a module that reaches the
original through a closure trains the original.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.chain import Chain
from zoo.checkpointing import Checkpoint, runner_for
from zoo.engine.fingerprint import without_fingerprints
from zoo.entry import Invocation, Loss, check_loss
from zoo.errors import ArgumentError
from zoo.measure.memory import tensors_in
from zoo.measure.optimizer import MakeOptimizer, check_maker, made_by
from zoo.plan import Plan
from zoo.plan_report import PlanReport
from zoo.tracing.api import checkpoint as put_in_force
from zoo.tracing.api import plan_of, uncheckpoint
from zoo.verification.records import (
    Name,
    Record,
    attributes,
    encoded,
    first_difference,
    named,
    read_streams,
    set_streams,
)
from zoo.verification.report import Difference, Place, Report
from zoo.verification.watch import Watch


def verify(
    model: nn.Module,
    inputs: Any,
    checkpoint: Checkpoint = True,
    *,
    steps: int = 3,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Report:
    """Trains copies of a model with and without `checkpoint=` and compares every bit.

    The model is left as it is: weights, gradients, buffers, attributes, flags, random state. Four
    short trainings of copies take place, two at a time. Under autocast it verifies autocast.

    Args:
        model: in training mode; a plan of its own is ignored, those of modules in it count.
        inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or a function of the
            step of training, from 0, that returns one of these. Gradients of those that require
            them are compared.
        checkpoint: what `zoo.create` takes.
        steps: steps of training.
        loss: turns what the model returns into a scalar, as in `zoo.plan`; by default a sum over
            every element of every floating output, each with a weight of its own.
        optimizer: is called with the list of parameters; SGD with momentum by default.

    Raises:
        ArgumentError: no module, one in eval mode, or other arguments that cannot be verified.
        RecomputeError: the engine itself refuses to train this model.
    """
    _check_arguments(model, steps)
    check_maker(optimizer or _momentum)
    check_loss(loss)
    runner_for(checkpoint, None, None)  # refuses a wrong option before anything is trained
    streams = read_streams()
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_fingerprints():
            batches = [_batch(inputs, step) for step in range(steps)]
            setting = _Setting(
                model, batches, loss or weighted_sum, optimizer or _momentum, streams
            )
            return _report(setting, checkpoint)
    finally:
        set_streams(streams)


def weighted_sum(outputs: Any) -> Tensor:
    """Sums every element of every floating tensor in `outputs`, each with its own weight -> ().

    The weights are the cosines of 0, 1, 2, ...: unequal, of both signs, none zero. Equal ones
    would give normalized outputs no gradient. Divided by the root of the number of elements, the
    gradients of what all elements share are of the order of 1.
    """
    total: Any = None
    for tensor in tensors_in(outputs):
        if tensor.is_floating_point() or tensor.is_complex():
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.arange(numbers.numel(), dtype=torch.float64).cos()
            kind = torch.promote_types(numbers.dtype, torch.float32)
            weights = weights.to(numbers.device, kind) / max(numbers.numel(), 1) ** 0.5
            part = (numbers.to(kind).reshape(-1) * weights).sum()
            total = part if total is None else total + part.to(total)
    if total is None:
        raise ArgumentError("the model returns no floating tensor; pass loss= a scalar of its own")
    return total  # type: ignore[no-any-return]


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _check_arguments(model: Any, steps: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"verify takes a torch.nn.Module; got {type(model).__name__}")
    if not model.training:
        raise ArgumentError(
            f"this {type(model).__name__} is in eval mode, in which no plan is used; call "
            "model.train() first (modules in it may stay in eval mode)"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"verify needs steps of at least 1; got {steps!r}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            f"this {type(model).__name__} is on the meta device, which has no bits to compare; "
            "move it with model.to_empty(device=...) and give it weights"
        )


def _batch(inputs: Any, step: int) -> Invocation:
    batch = Invocation.of(inputs(step) if callable(inputs) else inputs)
    if any(tensor.is_meta for tensor in batch.tensors):
        raise ArgumentError(
            "these inputs are on the meta device, which has no bits to compare; pass real ones"
        )
    return batch


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(f"loss= returned {got}; return a tensor of one element")
    if not loss.requires_grad:
        raise ArgumentError(
            "the loss depends on nothing that requires a gradient; unfreeze a parameter or "
            "pass inputs.requires_grad_()"
        )
    return loss


def _check_optimizer(optimizer: Any, trained: Sequence[nn.Parameter]) -> None:
    known = set(map(id, trained))
    for group in optimizer.param_groups if optimizer is not None else ():
        if not known.issuperset(map(id, group["params"])):
            raise ArgumentError(
                "optimizer= made an optimizer of other parameters than it was given, which are "
                "those of a copy; write it as lambda parameters: torch.optim.SGD(parameters, ...)"
            )


@dataclass(frozen=True)
class _Setting:
    """What is trained, on what, from which random state."""

    model: nn.Module
    batches: Sequence[Invocation]
    loss: Loss
    optimizer: MakeOptimizer
    streams: Mapping[str, Any]

    def plain(self) -> "_Side":
        """Returns a training without any plan."""
        side = _Side(self, is_plain=True)
        uncheckpoint(side.model)
        return side

    def checkpointed(self, checkpoint: Checkpoint) -> "_Side":
        """Returns a training with the option in force."""
        side = _Side(self)
        put_in_force(side.model, checkpoint)
        return side


class _Side:
    """One of two trainings: a copy of the model, an optimizer and random streams of its own."""

    def __init__(self, setting: _Setting, is_plain: bool = False) -> None:
        # what fails without a plan is not to be blamed on one
        self.call = Invocation.taken_by if is_plain else Invocation.on
        # one copy of both: a loss that is a method of the model, or has state, stays with its side
        self.model, self.loss = _copied(setting.model, setting.loss)
        self.streams = setting.streams
        trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = made_by(setting.optimizer, trained) if trained else None
        _check_optimizer(self.optimizer, trained)
        self.watch: Watch | None = None

    def step(self, batch: Invocation) -> Record:
        """Trains one step and returns what it left: the tensors themselves, not copies."""
        set_streams(self.streams)
        self.model.zero_grad(set_to_none=True)
        inputs = _own(batch)
        outputs = self.call(inputs, self.model)
        loss = _checked(self.loss(outputs))
        torch.autograd.backward(loss)
        if self.optimizer is not None:
            self.optimizer.step()
        self.streams = read_streams()
        return dict(self._left(inputs, outputs, loss))

    def begin_watch(self, first: Difference) -> None:
        """Watches from now on what each step of the chain does."""
        if isinstance(self.model, Chain):
            self.model.runner = self.watch = Watch(self.model.runner, first)

    def _left(self, inputs: Invocation, outputs: Any, loss: Tensor) -> Iterator[tuple[Name, Any]]:
        yield from named("output", _as_dicts(outputs))
        yield ("loss", "loss"), loss
        given = itertools.chain(named("input", inputs.args), named("input", inputs.kwargs))
        for (_, name), value in given:
            if isinstance(value, Tensor) and value.requires_grad:
                yield ("input gradient", name), value.grad
        parameters = list(self.model.named_parameters())
        for name, parameter in parameters:
            if parameter.requires_grad:
                yield ("parameter gradient", name), parameter.grad
        yield from ((("buffer", name), buffer) for name, buffer in self.model.named_buffers())
        yield from ((("parameter", name), parameter) for name, parameter in parameters)
        yield from attributes(self.model)
        yield from ((("random state", name), value) for name, value in encoded(self.streams))


@dataclass
class _Race:
    """Two trainings side by side until something differs."""

    first: Difference | None = None
    plans: list[Plan | None] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    @classmethod
    def run(cls, plain: _Side, other: _Side, batches: Sequence[Any]) -> "_Race":
        """Trains until something differs or the batches end."""
        race = cls()
        for number, batch in enumerate(batches, 1):
            expected, actual = plain.step(batch), other.step(batch)
            race.plans.append(plan_of(other.model))
            race.compared = _count(expected)
            race.first = first_difference(expected, actual, number)
            if race.first is not None:
                break
        return race


def _report(setting: _Setting, checkpoint: Checkpoint) -> Report:
    race = _Race.run(setting.plain(), setting.plain(), setting.batches)
    deterministic = race.first is None
    if deterministic:
        race = _Race.run(setting.plain(), setting.checkpointed(checkpoint), setting.batches)
    first = race.first
    if first is not None:
        again = setting.checkpointed(False) if deterministic else setting.plain()
        first = replace(first, place=_find(setting, again, race.plans, first))
    return Report(
        exact=first is None,
        deterministic=deterministic,
        steps=len(setting.batches),
        compared=race.compared,
        plan=race.plans[-1],
        first=first,
        model=type(setting.model).__name__,
        checkpoint=repr(_written(checkpoint)),
    )


def _written(checkpoint: Checkpoint) -> bool | int | str:
    if isinstance(checkpoint, PlanReport):
        return checkpoint.plan.text()
    return Plan(checkpoint).text() if isinstance(checkpoint, tuple | list) else checkpoint


def _find(
    setting: _Setting, other: _Side, plans: Sequence[Plan | None], first: Difference
) -> Place | None:
    """Trains a pair again, by the same plans, and watches the step after which it differed."""
    plain = setting.plain()
    try:
        for number, (plan, batch) in enumerate(zip(plans, setting.batches, strict=False), 1):
            if plan is not None:
                put_in_force(other.model, plan)
            if number == first.training_step:
                plain.begin_watch(first)
                other.begin_watch(first)
            plain.step(batch)
            other.step(batch)
    except Exception:  # a diagnosis that fails must not hide what it was to explain
        return None
    if plain.watch is None or other.watch is None:
        return None
    return plain.watch.place(other.watch)


def _as_dicts(outputs: Any) -> Any:
    """Returns outputs with dicts in the place of dataclasses, which torch takes for leaves."""

    def as_dict(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        parts = {part.name: getattr(leaf, part.name) for part in dataclasses.fields(leaf)}
        return pytree.tree_map(as_dict, parts)

    return pytree.tree_map(as_dict, outputs)


def _own(batch: Invocation) -> Invocation:
    """Copies the tensors of a batch; one that stands in it twice stays one."""
    copies: dict[int, Tensor] = {}

    def own(leaf: Tensor) -> Tensor:
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return batch.map(own)


def _copied(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    try:
        return copy.deepcopy((model, loss))
    except Exception as error:
        raise ArgumentError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
            "Verify it before its first forward, or detach the tensors that it keeps"
        ) from error


def _count(record: Record) -> dict[str, int]:
    kinds = [kind for kind, _ in record]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
