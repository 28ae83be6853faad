"""Traces a model's forward ahead of its first step: shape propagation that leaves nothing behind.

The user's forward runs on fake tensors in a forked process, or on a copy of the model where this
process cannot be forked (`profiling.isolation`). A forward that reads data which fake tensors do
not have runs there on real tensors instead, zeros where the inputs have no data, if all of it is
small.
"""

import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from zoo._torch import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from zoo.chain import Chain
from zoo.engine.operands import detached
from zoo.engine.recording import KernelMode, thread
from zoo.engine.sharded import is_spread
from zoo.errors import ArgumentError, ZooError, shortened
from zoo.invocation import (
    Invocation,
    Loss,
    UnknownTargets,
    kernel_device,
    own_loss,
    place_of,
    with_loss_errors,
)
from zoo.profiling.fake_tensors import SMALL, FakeTensorFixes, NumbersNeeded, copied, put_tensors
from zoo.profiling.isolation import isolated
from zoo.profiling.progress import shown
from zoo.profiling.source_location import line_of_traceback
from zoo.profiling.tensor_spec import TensorSpec, tensors_in
from zoo.tracing.tracer import Graph, Tracer, plain

# on real tensors: bytes of parameters, buffers and inputs, and bytes that kernels return
LARGEST = 1 << 28
MOST_MADE = 1 << 30
# namespaces of operators that wait for other processes
COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
# what operators raise on fake tensors alone, and what it says where the kind is a common one
OF_FAKES = (NotImplementedError, UnsupportedFakeTensorException, UnsupportedOperatorException)
SAID_OF_FAKES = (
    "data pointer", ".numpy()", "data is not allocated yet", "shape_env must not be None"
)  # fmt: skip


class TraceError(ArgumentError):
    """A model's forward cannot be traced ahead of a training step.

    Attributes:
        raised: whether the forward raised an error of its own, so that it may take other inputs.
    """

    raised = False


def graph_of(model: nn.Module, given: Invocation, loss: Loss | None = None) -> Graph:
    """Returns the graph of a training forward of a model, and of its loss.

    The inputs may be meta, fake or real tensors. Without `loss` it is the one that the model
    returns by that name, if it does.

    Raises:
        ArgumentError: the model or the loss raises on these inputs, or reads data of tensors that
            only a real step has.
    """
    name = type(model).__name__
    if any(map(is_spread, model.parameters())):
        raise ArgumentError(
            f"the parameters of {name} are spread over processes (DTensor), so that its forward "
            "cannot be traced ahead; plan before they are, or choose checkpoint=True or a scheme"
        )
    if any(map(is_lazy, model.parameters())):
        raise ArgumentError(
            f"{name} has lazy parameters, which have no size yet; call it once before"
        )
    forward = _Forward(model, given, loss)
    # `set_stance` would, in each forked process
    importlib.import_module("torch._dynamo")
    with shown("tracing the forward"):
        return forward.isolated(forward.on_fakes) or forward.isolated(forward.on_real_tensors)  # type: ignore[return-value]


class _Forward:
    """A forward to be traced; `is_apart` where nothing that it changes is seen afterwards."""

    def __init__(self, model: nn.Module, given: Invocation, loss: Loss | None) -> None:
        self.model, self.given = model, given
        self.device = kernel_device(model)
        self.loss = own_loss if loss is None else with_loss_errors(loss, self.device)

    def isolated(self, trace: Callable[[bool], Graph | None]) -> Graph | None:
        """Traces where it leaves nothing behind; raises TraceError for anything raised there."""

        def traced(is_apart: bool) -> Graph | None:
            try:
                return trace(is_apart)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise self._trace_error(error) from None

        name = type(self.model).__name__
        return isolated(  # type: ignore[no-any-return]
            traced,
            # not the forward raised it but the graph, on its way here
            lambda text: TraceError(
                f"{name} cannot be traced ahead ({text}). zoo.checkpoint without a budget traces a "
                "real training step instead"
            ),
            fires_hooks=True,
        )

    def on_fakes(self, is_apart: bool) -> Graph | None:
        """Traces on fake tensors; None where the forward needs data that these do not have."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        on_meta = place_of(self.model).type == "meta"
        fixes = FakeTensorFixes(mode, strict=True, moves_meta=on_meta)
        fake = functools.cache(functools.partial(self._fake, fixes))
        owned = (*self.model.parameters(), *self.model.buffers())
        fakes = {id(tensor): fake(tensor) for tensor in owned}
        model = self.model if is_apart else copy.deepcopy(self.model, {**fakes})
        if is_apart:
            put_tensors(model, fakes)
        try:
            with mode, fixes, fixes.told():
                graph = self._traced(model, self.given.map(fake), None)
        except BaseException as error:
            if isinstance(error, UnknownTargets) or not (fixes.asked or _is_of_fakes(error)):
                raise
            return None
        return None if fixes.asked else graph

    def on_real_tensors(self, is_apart: bool) -> Graph:
        """Traces on real tensors.

        Raises:
            NumbersNeeded: it would take much memory, or the model has no data itself.
        """
        owned = [*self.model.parameters(), *self.model.buffers()]
        size = sum(tensor.nbytes for tensor in (*owned, *self.given.tensors))
        if size > LARGEST or not all(map(_has_data, owned)):
            raise NumbersNeeded

        def real(tensor: Tensor) -> Tensor:
            known = _has_data(tensor)
            made = tensor.detach().clone() if known else self._spec(tensor).empty().zero_()
            return made.requires_grad_(tensor.requires_grad)

        model = self.model if is_apart else copy.deepcopy(self.model)
        return self._traced(model, self.given.map(real), MOST_MADE)

    def _traced(self, model: nn.Module, given: Invocation, most_made: int | None) -> Graph:
        for module in model.modules():
            if isinstance(module, Chain):
                module.runner = None
        tracer = Tracer(model, sees_lifetimes=True)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            saved_tensors_hooks(_saved, lambda tensor: tensor),
            # marks tell it where blocks begin; a plan in force leaves the forward as it is
            mock.patch.object(thread, "conductor", tracer),
            _Limits(most_made),
            tracer,
        ):
            outputs = given.on(model)
            tracer.note_outputs(outputs)
            tracer.note_loss(self.loss(outputs))
        return tracer.graph

    def _fake(self, fixes: FakeTensorFixes, tensor: Tensor) -> Tensor:
        """Returns a fake tensor like a given one, with the numbers of one that is no parameter."""
        with fixes.mode:
            fake = self._spec(tensor).empty()
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
                # marks that libraries leave on parameters
                vars(fake).update(vars(tensor))
            fake.requires_grad_(tensor.requires_grad)
        if _has_data(tensor) and tensor.numel() <= SMALL and not tensor.requires_grad:
            fixes.know(fake, copied(tensor))
        elif tensor.is_meta and not tensor.dim() and not tensor.is_floating_point():
            # a counter, such as that of batches, which begins to count when it gets data
            fixes.know(fake, torch.zeros((), dtype=tensor.dtype))
        return fake

    def _spec(self, tensor: Tensor) -> TensorSpec:
        """Describes a tensor; one on the meta device as if it were where the kernels are."""
        device = self.device if tensor.is_meta else tensor.device
        return TensorSpec.of(plain(tensor))._replace(device=device, requires_grad=False)

    def _trace_error(self, error: BaseException) -> TraceError:
        """Says what a forward raised."""
        name = type(self.model).__name__
        if isinstance(error, ZooError):
            return TraceError(str(error))
        if isinstance(error, NumbersNeeded):
            return TraceError(
                f"the forward of {name} reads numbers out of tensors, which have none while it is "
                "traced ahead. zoo.checkpoint without a budget traces the first training step "
                "instead, in which they have."
            )
        if isinstance(error, SystemExit):
            code = "" if error.code is None else shortened(error.code)
            return TraceError(
                f"the forward of {name} called sys.exit({code}), so there is no answer"
            )
        line = line_of_traceback(error)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        where = f" ({line})" if line else ""
        refused = TraceError(f"{name} does not take these inputs: {text}{where}")
        refused.raised = True
        return refused


def _saved(tensor: Tensor) -> Tensor:
    """Saves a tensor as an engine's hooks do: no kernel, and nothing holds the tensor itself."""
    return tensor if tensor.is_leaf and tensor.requires_grad else detached(tensor)


def _has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _is_of_fakes(error: BaseException) -> bool:
    """Says whether an error is one that real tensors would not have raised."""
    return isinstance(error, OF_FAKES) or any(words in str(error) for words in SAID_OF_FAKES)


class _Limits(KernelMode):
    """Refuses to wait for other processes, and to let kernels return more than some bytes."""

    def __init__(self, most_made: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_made, self.made = most_made, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in COLLECTIVE:
            raise ArgumentError(
                f"the forward calls {func}, for which other processes would wait, so that it "
                "cannot be traced ahead. Plan before the model is distributed"
            )
        result = func(*args, **(kwargs or {}))
        if self.most_made is not None and not getattr(func, "is_view", False):
            self.made += sum(tensor.nbytes for tensor in tensors_in(result))
            if self.made > self.most_made:
                raise NumbersNeeded
        return result
