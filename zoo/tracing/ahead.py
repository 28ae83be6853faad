"""The graph of a model ahead of its first step, with nothing of the look left behind.

The user's forward runs on fake tensors in a forked process: what it counts, caches, draws, prints
or takes from an iterator, it does there. Where a process cannot be forked, since a device is in
use, it runs on a copy of the model here.

    this process     fork ---------------------------------- a graph, or what was raised
    the other one       fake parameters, forward, loss, end

A forward that reads numbers which fake tensors do not have runs in the other process on real
tensors, zeros where the inputs have no numbers, if all of it is small.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from zoo._torch import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from zoo.engine.recording import KernelMode
from zoo.engine.references import detached
from zoo.errors import ArgumentError, ZooError, shortened
from zoo.invocation import Invocation, Loss, UnknownTargets, own_loss, place_of, with_loss_errors
from zoo.profiling.allocator import tensors_in
from zoo.profiling.fake_tensors import SMALL, FakeTensorFixes, NumbersNeeded, copied
from zoo.profiling.isolation import NO_FORK, Died, Raised, can_fork, in_fork
from zoo.profiling.sharded import is_spread
from zoo.profiling.source_location import line_of_traceback
from zoo.tracing.graph import Graph
from zoo.tracing.patched_forward import take_back_all
from zoo.tracing.tracer import Tracer, spec_of
from zoo.verification.training_record import random_state_restored

# bytes of parameters, buffers and inputs, and bytes that kernels make, with which it runs for real
LARGEST = 1 << 28
MOST_MADE = 1 << 30
# other processes would wait for this one, or it for them
COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
# what operators raise that real tensors would not
OF_FAKES = (NotImplementedError, UnsupportedFakeTensorException, UnsupportedOperatorException)
LATER = (
    "Only a look ahead lacks them: zoo.checkpoint without a budget needs none, and plans by the "
    "first step that runs for real."
)


def graph_of(model: nn.Module, given: Invocation, loss: Loss | None = None) -> Graph:
    """Returns the graph of a training forward of a model, and of its loss.

    The inputs may be meta, fake or real tensors. Without `loss` it is the one that the model
    returns by that name, if it does.

    Raises:
        ArgumentError: the model or the loss raises on these inputs, or reads numbers out of tensors
            that only a real step has.
    """
    if any(map(is_spread, model.parameters())):
        raise ArgumentError(
            f"the parameters of {type(model).__name__} are spread over processes (DTensor); look "
            "ahead at the model before they are"
        )
    if any(map(is_lazy, model.parameters())):
        raise ArgumentError(
            f"{type(model).__name__} has parameters without a size; call it once, then look ahead"
        )
    look = _Look(model, given, loss)
    run = _in_fork if can_fork() else _here
    found = _found(look, run)
    if isinstance(found, Refusal) and NO_FORK in found.text:
        # a backward inside of the forward, whose threads stayed in this process
        found = _found(look, _here)
    if isinstance(found, Refusal):
        raise TraceError(found)
    assert found is not None
    return found


class Refusal(NamedTuple):
    """Why there is no graph; whether the forward raised it, which may take other inputs."""

    text: str
    raised: bool = False


class TraceError(ArgumentError):
    """A model's forward cannot be traced ahead of a step; `raised` as in `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.raised = refusal.raised


def _found(look: "_Look", run: "Run") -> "Answer":
    found = run(look, look.on_fakes)
    return run(look, look.on_zeros) if found is None else found


# a graph, None where numbers are missing, or what went wrong
Answer = Graph | Refusal | None
Attempt = Callable[[bool], Graph | None]
Run = Callable[["_Look", Attempt], Answer]


class _Look:
    """A forward to be traced, on fake or on real tensors; `apart` where nobody sees the model."""

    def __init__(self, model: nn.Module, given: Invocation, loss: Loss | None) -> None:
        self.model, self.given, self.loss = model, given, loss
        self.kind = type(model).__name__
        self.place = place_of(model)

    def on_fakes(self, apart: bool) -> Graph | None:
        """Traces on fake tensors; None where the forward needs numbers that these do not have."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        constants = FakeTensorFixes(mode, strict=True)
        fakes = self._fakes(mode, constants)
        model = _replaced(self.model, fakes) if apart else copy.deepcopy(self.model, dict(fakes))
        fake = functools.partial(self._fake, fakes, mode, constants)
        try:
            with mode, constants, constants.told():
                found = self._traced(model, self.given.map(fake))
        except UnknownTargets:
            raise
        except BaseException as error:
            if constants.asked or _is_of_fakes(error):
                return None
            raise
        return None if constants.asked else found

    def on_zeros(self, apart: bool) -> Graph:
        """Traces on real tensors.

        Raises:
            NumbersNeeded: it would take much, or the model has no numbers itself.
        """
        owned = [*self.model.parameters(), *self.model.buffers()]
        size = sum(tensor.nbytes for tensor in (*owned, *self.given.tensors))
        if size > LARGEST or not all(map(_has_numbers, owned)):
            raise NumbersNeeded
        model = self.model if apart else copy.deepcopy(self.model)
        with _Limited():
            return self._traced(model, self.given.map(self._real))

    def _traced(self, model: nn.Module, given: Invocation) -> Graph:
        loss = own_loss if self.loss is None else with_loss_errors(self.loss, self.place)
        take_back_all(model)
        tracer = Tracer(model)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            saved_tensors_hooks(_saved, _same),
            _visits_noted(tracer),
            _Alone(),  # type: ignore[no-untyped-call]
            tracer,
        ):
            outputs = given.on(model)
            tracer.note_outputs(outputs)
            if (found := loss(outputs)) is not None:
                tracer.note_loss(found)
        return tracer.graph

    def _fakes(self, mode: FakeTensorMode, constants: FakeTensorFixes) -> dict[int, Tensor]:
        """Makes fake tensors for the model's own; returns them by the ids of these."""
        found: dict[int, Tensor] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._fake(found, mode, constants, tensor)
        return found

    def _fake(
        self,
        known: dict[int, Tensor],
        mode: FakeTensorMode,
        constants: FakeTensorFixes,
        tensor: Tensor,
    ) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = made = _faked(mode, tensor, self.place)
            if _has_numbers(tensor) and tensor.numel() <= SMALL and not tensor.requires_grad:
                constants.know(made, copied(tensor))
            elif tensor.is_meta and not tensor.dim() and not tensor.is_floating_point():
                # a counter, such as that of batches, which begins to count when it gets numbers
                constants.know(made, torch.zeros((), dtype=tensor.dtype))
        return known[id(tensor)]

    def _real(self, tensor: Tensor) -> Tensor:
        if _has_numbers(tensor):
            made = tensor.detach().clone()
        else:
            place = self.place if tensor.is_meta else tensor.device
            made = spec_of(tensor)._replace(device=place, requires_grad=False).empty().zero_()
        return made.requires_grad_(tensor.requires_grad)

    def told(self, error: BaseException) -> Refusal:
        """Says what a forward raised."""
        if isinstance(error, ZooError):
            return Refusal(str(error))
        if isinstance(error, NumbersNeeded):
            return Refusal(
                f"the forward of {self.kind} reads numbers out of tensors that have none yet. "
                f"{LATER}"
            )
        if isinstance(error, SystemExit):
            argument = "" if error.code is None else shortened(error.code)
            return Refusal(
                f"the forward of {self.kind} called sys.exit({argument}), so there is no answer"
            )
        line = line_of_traceback(error)
        text = " ".join(str(error).split())[:400]
        where = f" ({line})" if line else ""
        kind = type(error).__name__
        return Refusal(f"{self.kind} does not take these inputs: {kind}: {text}{where}", True)

    def answer(self, attempt: Attempt, apart: bool) -> Answer:
        """Makes an attempt, and returns also what it raised."""
        try:
            return attempt(apart)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self.told(error)


def _saved(tensor: Tensor) -> Tensor:
    """Saves a tensor as an engine's hooks do: no kernel, and no cycle with its own history."""
    return tensor if tensor.is_leaf else detached(tensor)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _visits_noted(tracer: Tracer) -> Iterator[None]:
    hook = register_module_forward_pre_hook(lambda module, _: tracer.note_visit(module))
    try:
        yield
    finally:
        hook.remove()


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _faked(mode: FakeTensorMode, tensor: Tensor, place: torch.device) -> Tensor:
    """Returns a fake tensor of the same kind; at a place for one on the meta device."""
    spec = spec_of(tensor)._replace(requires_grad=False)
    if tensor.is_meta:
        spec = spec._replace(device=place)
    with mode:
        made = spec.empty()
        if not isinstance(tensor, nn.Parameter):
            return made.requires_grad_(tensor.requires_grad)
        made = nn.Parameter(made, tensor.requires_grad)
    # marks that libraries leave on parameters
    vars(made).update(vars(tensor))
    return made


def _replaced(model: nn.Module, made: Mapping[int, Tensor]) -> nn.Module:
    """Puts other tensors in the place of a model's own, also where lists on modules hold them."""

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            return made.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(other, value))
        return {key: other(part) for key, part in value.items()} if type(value) is dict else value

    for module in list(model.modules()):
        for name, value in list(vars(module).items()):
            if type(value) in (list, tuple) or isinstance(value, Tensor):
                vars(module)[name] = other(value)
            elif type(value) is dict and name != "_modules":
                value.update(other(value))
    return model


def _is_of_fakes(error: BaseException) -> bool:
    """Says whether an error is one that real tensors would not have raised."""
    text = str(error)
    return isinstance(error, OF_FAKES) or "data pointer" in text or ".numpy()" in text


class _Alone(KernelMode):  # type: ignore[no-untyped-call]
    """Refuses to wait for other processes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in COLLECTIVE:
            raise ArgumentError(
                f"the forward calls {func}, for which other processes would wait. Look ahead at "
                "the model before it is distributed"
            )
        return func(*args, **(kwargs or {}))


class _Limited(KernelMode):
    """Gives up when kernels have made many bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.made += sum(tensor.nbytes for tensor in tensors_in(result))
        if self.made > MOST_MADE:
            raise NumbersNeeded
        return result


# in another process, or in this one


def _in_fork(look: _Look, attempt: Attempt) -> Answer:
    found: Answer | Died | Raised = in_fork(lambda: look.answer(attempt, True))
    if isinstance(found, Raised):
        # the graph itself, on its way here
        return Refusal(f"{look.kind} cannot be planned ahead: {found.kind}: {found.text}")
    if not isinstance(found, Died):
        return found
    return Refusal(
        f"the forward of {look.kind} ended the process in which it was looked at ahead "
        f"(status {found.status}). zoo.checkpoint without a budget looks at a real step instead."
    )


def _here(look: _Look, attempt: Attempt) -> Answer:
    with random_state_restored():
        return look.answer(attempt, False)
