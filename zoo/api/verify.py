"""Verifies on a user's model that checkpointing changes no bit, or finds what it changes first.

Two copies of a model train side by side from the same random state, one without and one with a
plan, and all state that a step of training leaves is compared bit for bit:

    baseline against itself          differs  ->  nothing is compared; `deterministic` may help
    baseline against checkpointed    differs  ->  the first tensor, and the first module
                                     equal    ->  exact

A pair that differs trains once more, up to the step of training in question, whose outputs,
gradients and recomputations are then recorded: these take as much memory as the baseline's
activations. What a copy shares with its original, through a closure, is not protected.
"""

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import DisableTorchDispatch, PyTree
from zoo.api.checkpoint import checkpoint as put_in_force, plan_of, uncheckpoint
from zoo.api.track import floating_in, optimizer_of, own_copy, train_step
from zoo.cuda_graphs.graphed_step import WARM_UPS, GraphedStep, check_replays, has_graphs
from zoo.engine.devices import random_state_restored, read_streams, set_streams
from zoo.engine.replay_check import OTHER_NUMBERS, checking
from zoo.engine.saved_tensors import pack, unpack
from zoo.engine.unseen_writes import without_fingerprints
from zoo.errors import ArgumentError, RecomputeError
from zoo.invocation import Inputs, Invocation, check_step, device_of
from zoo.loss import Loss
from zoo.optimizer.in_backward import optimizer_in_backward as step_in_backward
from zoo.planner.plan import Plan
from zoo.policy.goal import Checkpoint, goal_for, plan_or_option
from zoo.profiling.cudnn_recurrent import flattened
from zoo.profiling.optimizer_memory import MakeOptimizer, OptimizerOption, maker_of
from zoo.profiling.progress import each, shown
from zoo.profiling.tensor_spec import tensors_in
from zoo.verification.determinism import deterministic_algorithms
from zoo.verification.state_comparison import Record, first_difference, record, same_bits
from zoo.verification.verdict import Difference, ModuleCall, Report

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@shown("zoo.verify")
def verify(
    model: nn.Module,
    inputs: Inputs | Callable[[int], Inputs],
    checkpoint: Checkpoint = True,
    *,
    steps: int = 3,
    loss: Loss | None = None,
    optimizer: OptimizerOption | None = None,
    optimizer_in_backward: bool = False,
    cuda_graph: bool = False,
    deterministic: bool = False,
) -> Report:
    """Trains copies of a model with and without `checkpoint=` and compares every bit.

    The model is left as it was. Four short trainings of copies take place, two at a time. Under
    autocast it verifies autocast.

    Args:
        model: in the mode of the training; plans of its own, and of modules in it, are ignored.
        inputs: as in `zoo.plan`, or a function of the training step's number, from 0 on. Gradients
            of inputs that require them are compared.
        checkpoint: as in `zoo.checkpoint`.
        steps: training steps to compare.
        loss: as in `zoo.plan`; by default a sum of all floating outputs, each element with a weight
            of its own.
        optimizer: as in `zoo.plan`; SGD with momentum by default.
        optimizer_in_backward: trains the copy with a plan so; compares optimizer state, too.
        cuda_graph: trains the copy with a plan by `zoo.make_graphed_step`, until `steps` steps were
            replays.
        deterministic: trains by torch's deterministic algorithms; settings are restored.

    Raises:
        ArgumentError: no module, or other arguments that cannot be verified.
        DeterminismError: with `deterministic`, if an operator has no such algorithm.
        GraphError: with `cuda_graph`, if the step cannot be one.
        OptimizerError: with `optimizer_in_backward`.
        RecomputeError: the engine refuses to train this model.
    """
    check_step(model, "verify", loss)
    if type(steps) is not int or steps < 1:
        raise ArgumentError(f"verify needs at least 1 training step; got steps={steps!r}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            f"this {type(model).__name__} is on the meta device, which has no bits to compare; "
            "move it with model.to_empty(device=...) and give it weights"
        )
    if cuda_graph and not has_graphs(device_of(model)):
        raise ArgumentError(
            f"cuda_graph=True needs a device with CUDA graphs; this {type(model).__name__} is on "
            f"{device_of(model)}. Move it to a GPU, or leave cuda_graph out"
        )
    option = plan_or_option(checkpoint)
    goal_for(option)  # refuses a wrong option before anything is trained
    make = MOMENTUM if optimizer is None else maker_of(optimizer, model)
    with (
        deterministic_algorithms(deterministic),
        random_state_restored() as streams,
        torch.inference_mode(False),
        torch.enable_grad(),
        without_fingerprints(),
    ):
        count = steps + WARM_UPS if cuda_graph else steps
        batches = [_batch(inputs, step) for step in range(count)]
        arguments = model, loss or weighted_sum, make, streams
        training = functools.partial(_Training, *arguments, in_backward=optimizer_in_backward)
        first, plans, compared = _train_pair(training(), training(), batches)
        does_repeat = first is None
        if does_repeat:
            # a graph would not renew what the check keeps in Python
            with contextlib.nullcontext() if cuda_graph else checking() as check:
                other = training(option, cuda_graph=cuda_graph)
                first, plans, compared = _train_pair(training(), other, batches)
            if first is None and other.graphed is not None:
                check_replays(other.graphed, steps)
            if first is None and check is not None and (differing := check.take()):
                note = f"it {OTHER_NUMBERS.partition('.')[0]}"
                first = Difference("replayed tensor", str(differing[0]), steps, note=note)
        if first is not None:
            other = training(False if does_repeat else None)
            call = _first_differing_call(training(), other, plans, batches, first)
            first = dataclasses.replace(first, module=call)
    return Report(
        exact=first is None if does_repeat else None,
        steps=len(batches),
        compared=compared,
        plan=plans[-1],
        first=first,
        model=type(model).__name__,
        checkpoint=repr(Plan(option).text() if isinstance(option, tuple | list) else option),
        optimizer_in_backward=optimizer_in_backward,
        replays=steps if cuda_graph else 0,
        deterministic=deterministic,
    )


def weighted_sum(outputs: PyTree) -> Tensor:
    """Sums every element of every floating tensor in `outputs`, each with its own weight -> ().

    The weights are the cosines of 0, 1, 2, ..., since equal ones would give normalized outputs no
    gradient, divided by the root of the number of elements.
    """
    parts: list[Tensor] = []
    for numbers in floating_in(outputs):
        dtype = torch.promote_types(numbers.dtype, torch.float32)
        # made where they are used: a CUDA graph copies nothing from the host
        wide = torch.float64 if numbers.is_cpu else torch.float32
        weights = torch.arange(numbers.numel(), dtype=wide, device=numbers.device).cos()
        weights = weights.to(dtype) / max(numbers.numel(), 1) ** 0.5
        parts.append((numbers.to(dtype).reshape(-1) * weights).sum())
    return sum((part.to(parts[0]) for part in parts[1:]), parts[0])


def _batch(inputs: Inputs | Callable[[int], Inputs], step: int) -> Invocation:
    batch = Invocation.of(inputs(step) if callable(inputs) else inputs)
    if any(tensor.is_meta for tensor in batch.tensors):
        raise ArgumentError("these inputs are on the meta device and have no bits; pass real ones")
    return batch


class _Training:
    """Trains a copy of a model, with an optimizer and random streams of its own.

    Without `checkpoint` it is the baseline: no plan in any module, and the optimizer's own step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        make: MakeOptimizer | None,
        streams: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        *,
        in_backward: bool,
        cuda_graph: bool = False,
    ) -> None:
        self.graphed: GraphedStep | None = None
        try:
            # at once: a loss that is a method of the model, or has state, stays with its model
            self.model, self.loss = copy.deepcopy((model, loss))
        except Exception as error:
            raise ArgumentError(
                f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
                "Verify it before its first forward, or detach the tensors that it keeps"
            ) from error
        flattened(self.model)
        self.streams, self.recorder = streams, _Recorder()
        self.optimizer = optimizer_of(make, self.model)
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        if not {p for group in groups for p in group["params"]} <= set(self.model.parameters()):
            raise ArgumentError(
                "optimizer= made an optimizer of other parameters than it was given, which are "
                "those of a copy; write it as lambda parameters: torch.optim.SGD(parameters, ...)"
            )
        # an error of the baseline must not blame a plan
        self.is_baseline = checkpoint is None
        self.call = Invocation.taken_by if self.is_baseline else Invocation.on
        # gradients of parameters, which a step in the backward frees
        self.gradients: dict[Tensor, Tensor] = {}
        self.compared = self.optimizer if in_backward else None
        if checkpoint is None:
            uncheckpoint(self.model)
            return
        put_in_force(self.model, checkpoint)
        if self.compared is not None:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    hook: Any = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
                    hook(self._record_gradient)
            step_in_backward(self.model, self.compared)
        if cuda_graph:
            optimizers = () if self.optimizer is None else (self.optimizer,)
            step = functools.partial(_step, self.model, self.loss, self.optimizer)
            self.graphed = GraphedStep(step, (self.model,), optimizers)

    def step(self, batch: Invocation) -> Record:
        """Trains one step and returns the tensors and values that it left, not copies."""
        set_streams(self.streams)
        inputs = own_copy(batch)
        if self.graphed is None:
            outputs, loss = train_step(self.model, inputs, self.loss, self.optimizer, self.call)
        else:
            outputs, loss = inputs.on(self.graphed)
        self.streams = read_streams()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        if self.graphed is None:
            # replays write the same ones again
            self.gradients.clear()
        arguments = (inputs.args, inputs.kwargs)
        return record(self.model, arguments, outputs, loss, self.streams, optimizer=self.compared)

    def _record_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "it has just been accumulated"
        self.gradients[parameter] = parameter.grad.detach().clone()


def _step(
    model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
) -> tuple[PyTree, Tensor]:
    return train_step(model, Invocation(args, kwargs), loss, optimizer, Invocation.on)


def _train_pair(
    baseline: _Training, other: _Training, batches: Sequence[Invocation]
) -> tuple[Difference | None, list[Plan | None], dict[str, int]]:
    """Trains until the two differ or the batches end.

    Returns the first difference, the plan of each step, and how many of a kind were compared.
    """
    plans = []
    for number, batch in enumerate(each("steps of training", batches), 1):
        with shown("the baseline"):
            expected = baseline.step(batch)
        with shown("the baseline again" if other.is_baseline else "with checkpoint="):
            actual = other.step(batch)
        plans.append(plan_of(other.model))
        if (first := first_difference(expected, actual, number)) is not None:
            break
    return first, plans, dict(Counter(kind for kind, _ in expected))


def _first_differing_call(
    baseline: _Training,
    other: _Training,
    plans: Sequence[Plan | None],
    batches: Sequence[Invocation],
    first: Difference,
) -> ModuleCall | None:
    """Trains once more by the same plans, and records the step after which the two differed."""
    buffer = first.name if first.kind == "buffer" else None
    try:
        for number, (plan, batch) in enumerate(zip(plans, batches, strict=False), 1):
            if plan is not None:
                put_in_force(other.model, plan)
            for training in (baseline, other):
                if number == first.training_step:
                    training.recorder.attach(training.model, buffer)
                training.step(batch)
    except Exception:  # a diagnosis that fails must not hide the difference
        return None
    return baseline.recorder.first_differing_call(other.recorder)


class _Recorder:
    """Records what each module of a model returns, and which modules change a buffer.

    A module that returns earlier comes first, so that one inside of another comes before it.
    """

    def __init__(self) -> None:
        # "output" or "gradient", the number of the call, the position among its outputs
        self.recorded: dict[tuple[str, int, int], Tensor] = {}
        self.names: list[str] = []
        self.differing_replays: set[int] = set()
        self.buffer_updates: set[int] = set()

    def attach(self, model: nn.Module, buffer: str | None) -> None:
        """Records from now on what each module does."""
        self.model, self.buffer = model, buffer
        for path, module in model.named_modules():
            # the hooks of a block run inside of the segment that a plan makes of it
            before: list[Tensor | None] = []
            module.register_forward_pre_hook(functools.partial(self._enter, before))
            module.register_forward_hook(
                functools.partial(self._leave, path, before), always_call=True
            )

    def first_differing_call(self, other: "_Recorder") -> ModuleCall | None:
        """Returns the first module call that differs in `other`."""
        if other.names != self.names:
            return None
        differing: dict[str, list[int]] = {"output": [], "gradient": []}
        for key in self.recorded.keys() | other.recorded.keys():
            mine, others = self.recorded.get(key), other.recorded.get(key)
            if mine is None or others is None or not same_bits(mine, others):
                differing[key[0]].append(key[1])
        updates = self.buffer_updates | other.buffer_updates
        # the last gradient in the forward is the first of the backward
        suspects = {
            "whose output differs": min(differing["output"], default=None),
            "whose recomputed output differs": min(other.differing_replays, default=None),
            "whose output's gradient differs": max(differing["gradient"], default=None),
            "which updates this buffer": min(updates, default=None),
        }
        calls = (ModuleCall(n, self.names[n], did) for did, n in suspects.items() if n is not None)
        return next(calls, None)

    def _enter(self, before: list[Tensor | None], *_: object) -> None:
        with DisableTorchDispatch():
            before.append(self._copy_of_buffer())

    def _leave(
        self, path: str, before: list[Tensor | None], module: nn.Module, arguments: Any, value: Any
    ) -> None:
        number = len(self.names)
        self.names.append(path or type(module).__name__)
        old = before.pop()
        inputs = tensors_in(arguments)
        for position, tensor in enumerate(tensors_in(value)):
            # the copy is no kernel of the forward
            with DisableTorchDispatch():
                self.recorded["output", number, position] = tensor.detach().clone()
            if tensor.requires_grad and not any(tensor is other for other in inputs):
                hook = functools.partial(self._record_gradient, number, position, pack(tensor))
                tensor.register_hook(hook)
        with DisableTorchDispatch():
            new = self._copy_of_buffer()
            if old is not None and new is not None and not same_bits(old, new):
                self.buffer_updates.add(number)

    def _record_gradient(self, number: int, position: int, packed: Any, gradient: Tensor) -> None:
        """Records the gradient of an output, and whether a replay computes that output."""
        self.recorded.setdefault(("gradient", number, position), gradient.detach().clone())
        # an output that was written since cannot be recomputed, and need not be
        with contextlib.suppress(RecomputeError):
            if not same_bits(unpack(packed), self.recorded["output", number, position]):
                self.differing_replays.add(number)

    def _copy_of_buffer(self) -> Tensor | None:
        buffers = dict(self.model.named_buffers()) if self.buffer is not None else {}
        return buffers[self.buffer].detach().clone() if self.buffer in buffers else None
