"""Traces a model's forward ahead of its first training step, without side effects on the model.

The user's forward runs on fake tensors in a forked process, or on a copy of the model if this
process cannot be forked (`profiling.isolation`). A forward that reads values which fake tensors do
not have runs there on real tensors instead, if all are small; inputs without data become zeros.
"""

import contextlib
import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoo._torch import (
    Args,
    EnableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    active_fake_mode,
    disable_current_modes,
    replaced,
)
from zoo.engine.devices import count_as_seeded
from zoo.engine.operator_effects import DROPOUT_STATE, effects_of, is_view
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.sharded import is_spread
from zoo.engine.tensor_state import is_plain
from zoo.errors import ArgumentError, InputError, ZooError, in_a_line, shortened
from zoo.invocation import Invocation, device_of, kernel_device, sizes_hint
from zoo.loss import Loss, UnknownTargets, own_loss, with_loss_errors
from zoo.models.model import Model
from zoo.planner.dry_step import DryStep, Row
from zoo.planner.step_events import StepEvents
from zoo.profiling.cast_cache import autocast_left, autocasts_here
from zoo.profiling.cudnn_recurrent import flattened
from zoo.profiling.fake_tensors import (
    SMALL,
    FakeTensorFixes,
    NumbersNeeded,
    copied,
    put_tensors,
    refuse_collective,
)
from zoo.profiling.isolation import NO_FORK, isolated_service
from zoo.profiling.progress import shown
from zoo.profiling.source_location import line_of_traceback
from zoo.profiling.step_recorder import StepRecorder
from zoo.profiling.tensor_spec import KernelSpec, TensorSpec, tensors_held_by, tensors_in
from zoo.tracing.dry_steps import DrySteps
from zoo.tracing.forward_patch import BlockMark, is_compiled

T = TypeVar("T")
# the most bytes of parameters, buffers and inputs, and of kernels' results, for a trace on real
# tensors
LARGEST = 1 << 28
MOST_MADE = 1 << 30


class TraceError(ArgumentError):
    """A model's forward cannot be traced ahead of a training step.

    Attributes:
        raised: whether the forward itself raised an error; it may accept other inputs.
    """

    raised = False


class RunsLaterError(TraceError):
    """A forward calls no operator before it returns, as one that yields or awaits."""


class StepTrace(NamedTuple):
    """The log of a training step, as data that can be pickled.

    Attributes:
        events: the operators of the model and of its loss, and the events of forward and backward.
        specs: the different kernel calls by their numbers in the events.
        has_loss: whether a loss is part of the step.
        dry_step: runs a dry step where the trace ran, and returns its log, or a `FailedCall`; None
            for a trace that is not kept for that.
    """

    events: StepEvents
    specs: Sequence[KernelSpec | None]
    has_loss: bool
    dry_step: Callable[[DryStep], Any] | None = None


def step_trace_of(
    model: nn.Module,
    invocation: Invocation,
    loss: Loss | None = None,
    blocks: Iterable[str] = (),
    *,
    is_judged: bool = False,
    on_real_tensors: bool = False,
) -> StepTrace:
    """Returns the trace of a training step of a model: forward, loss and backward.

    The inputs may be meta, fake or real tensors. Without `loss` the loss is the model's output of
    that name, if there is one. `blocks` are paths of modules whose calls are noted. If it
    `is_judged`, dry steps may follow. Of an autocast around the model the backward is outside. A
    forward that cannot run on fake tensors, or is not to, runs `on_real_tensors`.

    Raises:
        ArgumentError: the model or the loss raises an error on these inputs, or reads values that
            only a real training step has.
    """
    forward, name = _Forward(model, invocation, loss, blocks), type(model).__name__
    # without the forward, which has the data of its inputs
    kept: list[DrySteps] = []
    if any(map(is_spread, model.parameters())):
        raise ArgumentError(
            f"the parameters of {name} are spread over processes (DTensor), so that its forward "
            "cannot be traced ahead; plan before the model is distributed, or choose "
            "checkpoint=True or a scheme"
        )
    check_sizes(invocation.tensors)
    if any(map(is_lazy, model.parameters())):
        raise ArgumentError(
            f"{name} has lazy parameters, which have no size yet; call the model once before"
        )
    if forward.may_compile:
        # `set_stance` would, in each forked process
        importlib.import_module("torch._dynamo")
    with shown("tracing the forward"):
        forward.kept = kept if is_judged else None
        serve = functools.partial(_dry_step, kept) if is_judged else None
        result: StepTrace | Failure = Failure()
        if not on_real_tensors:
            result, ask = forward.isolated(forward.on_fakes, serve)
        if not isinstance(result, StepTrace):
            forward.failure = result
            result, ask = forward.isolated(forward.on_real_tensors, serve)
    assert isinstance(result, StepTrace), "the second way has no other"
    return result._replace(dry_step=ask) if is_judged else result


class RealStep:
    """Traces the forward of a real training step inside the `with` block, then its backward.

    The user trains on the outputs of this forward. So the traced backward runs the same graph on
    fake tensors and leaves it as it is: functions with a backward of their own are not called.
    """

    def __init__(self, model: nn.Module, invocation: Invocation) -> None:
        self.recorder = StepRecorder(model, invocation.tensors, is_real=True)
        self.inputs, self.device = invocation.tensors, kernel_device(model)

    def __enter__(self) -> "RealStep":
        self.recorder.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.recorder.__exit__(*raised)  # type: ignore[no-untyped-call]

    def trace(self, outputs: PyTree) -> StepTrace:
        """Returns the trace of the step, whose forward returned these outputs.

        Raises:
            TraceError: sizes of inputs or outputs are no numbers, or the backward fails on fakes.
        """
        self.recorder.note_end_of_model()
        roots = self.recorder.note_ends(tensors_held_by(outputs), None)
        try:
            with on_fakes(), autocast_left(self.device):
                self.recorder.run_backward(roots)
        except Exception as error:
            # the real backward may have none
            check_sizes([*self.inputs, *tensors_held_by(outputs)])
            raise TraceError(
                f"its backward on fake tensors raises {in_a_line(error, 400)}; a real one may not"
            ) from error
        return StepTrace(self.recorder.events, self.recorder.specs, has_loss=False)


def check_sizes(tensors: Iterable[Tensor]) -> None:
    """Raises TraceError if one is nested with a jagged layout, whose length is no number."""
    if any(tensor.layout is torch.jagged for tensor in tensors):
        raise TraceError(
            "sizes of nested tensors with a jagged layout are no numbers, and a plan counts bytes; "
            "pad them, or put zoo.checkpoint on a module that gets their values"
        )


class Failure(NamedTuple):
    """Where a forward failed on fake tensors, as "file:line".

    `error_text` is the error, "" for a forward that reads numbers, which fake tensors lack.
    """

    line: str = ""
    error_text: str = ""


def _dry_step(kept: list[DrySteps], step: DryStep) -> list[Row]:
    """Runs a dry step by a plan, where the forward was traced."""
    with EnableTorchFunction():
        return kept[0].log(step)


class _Forward:
    """A forward to be traced; `is_forked`: in a forked process, where its side effects end."""

    def __init__(
        self, model: nn.Module, invocation: Invocation, loss: Loss | None, blocks: Iterable[str]
    ) -> None:
        self.model, self.invocation, self.blocks = model, invocation, tuple(blocks)
        self.device = kernel_device(model)
        self.loss = own_loss if loss is None else with_loss_errors(loss, self.device)
        self.failure: Failure | None = None  # why the trace on fake tensors failed
        # where dry steps are kept; None where there are none
        self.kept: list[DrySteps] | None = None
        # one of zoo's own models calls nothing that is compiled, unless it is
        self.may_compile = not isinstance(model, Model) or any(map(is_compiled, model.modules()))

    def isolated(
        self, trace: Callable[[bool], T], serve: Callable[[DryStep], list[Row]] | None
    ) -> tuple[T, Callable[[DryStep], Any]]:
        """Traces in isolation, and serves there; raises TraceError for any error of the trace."""

        def traced(is_forked: bool) -> T:
            try:
                # the forward is the user's, and may need the modes of the program
                with EnableTorchFunction():
                    return trace(is_forked)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if NO_FORK in str(error):
                    raise
                raise self._trace_error(error) from None

        name = type(self.model).__name__
        return isolated_service(
            traced,
            serve,
            # an error not of the forward but of sending the trace to this process
            lambda text: TraceError(
                f"{name} cannot be traced ahead ({text}). zoo.checkpoint without a budget traces a "
                "real training step instead"
            ),
        )

    def on_fakes(self, is_forked: bool) -> "StepTrace | Failure":
        """Traces on fake tensors; returns a `Failure` if the forward may run on real ones."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        on_meta = device_of(self.model).type == "meta"
        fixes = FakeTensorFixes(mode, strict=True, moves_meta=on_meta)
        fake = functools.cache(functools.partial(self._fake, fixes))
        owned = (*self.model.parameters(), *self.model.buffers())
        fakes = {id(tensor): fake(tensor) for tensor in owned}
        model = self.model if is_forked else self._copy(fakes)
        if is_forked:
            put_tensors(model, fakes)
        try:
            with mode, fixes, fixes.constants_readable():
                trace = self._traced(model, self.invocation.map(fake), fixes)
        except BaseException as error:
            if fixes.asked or isinstance(error, NumbersNeeded):
                if isinstance(error, UnknownTargets):
                    raise
                return Failure(line_of_traceback(error))
            is_final = isinstance(error, ZooError) or not isinstance(error, Exception)
            if is_final or NO_FORK in str(error):
                raise
            return Failure(line_of_traceback(error), in_a_line(error, 400))
        return Failure() if fixes.asked else trace

    def on_real_tensors(self, is_forked: bool) -> StepTrace:
        """Traces on real tensors.

        Raises:
            NumbersNeeded: the trace would take much memory, or the model has no data.
        """
        owned = [*self.model.parameters(), *self.model.buffers()]
        size = sum(tensor.nbytes for tensor in (*owned, *self.invocation.tensors))
        if size > LARGEST or not all(map(_has_data, owned)):
            raise NumbersNeeded

        @functools.cache
        def real(tensor: Tensor) -> Tensor:
            with torch.inference_mode(tensor.is_inference()):
                has_data = _has_data(tensor)
                value = tensor.detach().clone() if has_data else self._spec(tensor).empty().zero_()
            return value.requires_grad_(tensor.requires_grad)

        model = self.model if is_forked else flattened(self._copy({}))
        return self._traced(model, self.invocation.map(real))

    def _copy(self, replacements: Mapping[int, Tensor]) -> nn.Module:
        """Returns a copy of the model in which some objects, by their ids, are replaced."""
        try:
            return copy.deepcopy(self.model, {**replacements})
        except Exception as error:
            name = type(self.model).__name__
            raise TraceError(
                f"{name} cannot be copied ({in_a_line(error)}), and this process cannot be forked, "
                "so that its forward cannot be traced ahead. zoo.checkpoint without a budget "
                "traces the first training step instead."
            ) from error

    def _traced(
        self,
        model: nn.Module,
        invocation: Invocation,
        fixes: FakeTensorFixes | None = None,
    ) -> StepTrace:
        self._mark(model)
        recorder = StepRecorder(model, invocation.tensors)
        with _running(model, fixes, self.may_compile), replaced(thread, "conductor", recorder):
            with recorder, recorder.hooks():
                outputs = invocation.on(model)
                recorder.note_end_of_model()
                loss = self.loss(outputs)
            roots = recorder.note_ends(tensors_held_by(outputs), loss)
            has_loss = loss is not None
            if inspect.iscoroutine(outputs):
                # Python warns of one that nothing awaits
                outputs.close()
            # from here on only the graph holds them
            del outputs, loss
            with (
                on_fakes() if fixes is None else fixes.questions_allowed(),
                autocast_left(self.device),
            ):
                recorder.run_backward(roots)
            if self.kept is not None:
                steps = self._dry_steps(model, invocation, recorder, fixes)
                self.kept[:] = [steps]
        return StepTrace(recorder.events, recorder.specs, has_loss)

    def _mark(self, model: nn.Module) -> None:
        """Marks the blocks of a traced model, but those that a plan in force has marked."""
        blocks = {path: model.get_submodule(path) for path in self.blocks}
        for path, block in blocks.items():
            if not (isinstance(vars(block).get("forward"), BlockMark) or is_compiled(block)):
                BlockMark(block, path).install()

    def _dry_steps(
        self,
        model: nn.Module,
        invocation: Invocation,
        recorder: StepRecorder,
        fixes: FakeTensorFixes | None,
    ) -> DrySteps:
        may_compile, autocasts = self.may_compile, autocasts_here()

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            modes = () if fixes is None else (fixes.mode, fixes, fixes.constants_readable())
            with contextlib.ExitStack() as stack:
                for mode in (*autocasts(), *modes, _running(model, fixes, may_compile)):
                    stack.enter_context(mode)
                yield

        return DrySteps(
            model,
            invocation,
            self.loss,
            recorder.events,
            recorder.dispatched,
            recorder.positions,
            recorder.kernels,
            running,
            contextlib.nullcontext if fixes is None else fixes.questions_allowed,
            recorder.remaining,
            recorder.constants,
            any(spec and spec.operator == str(DROPOUT_STATE) for spec in recorder.specs),
            model is self.model,
        )

    def _fake(self, fixes: FakeTensorFixes, tensor: Tensor) -> Tensor:
        """Returns a fake of a tensor; the values are known unless it is a parameter."""
        if tensor.layout is not torch.strided:
            return fixes.mode.from_tensor(tensor)
        # the engine keeps the results of kernels that read one made in inference mode
        with torch.inference_mode(tensor.is_inference()):
            fake = self._spec(tensor).fake(fixes.mode)
        with fixes.mode:
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
                # attributes that libraries set on parameters
                vars(fake).update(vars(tensor))
            fake.requires_grad_(tensor.requires_grad)
        if _has_data(tensor) and tensor.numel() <= SMALL and not tensor.requires_grad:
            fixes.know(fake, copied(tensor))
        elif tensor.is_meta and not tensor.dim() and not tensor.is_floating_point():
            # a counter, such as that of batches, begins at 0
            fixes.know(fake, torch.zeros((), dtype=tensor.dtype))
        return fake

    def _spec(self, tensor: Tensor) -> TensorSpec:
        """Returns the spec of a tensor; one on the meta device counts as on the kernels' device."""
        device = self.device if tensor.is_meta else tensor.device
        return TensorSpec.of(_plain(tensor))._replace(device=device)

    def _trace_error(self, error: BaseException) -> TraceError | InputError:
        """Returns the error to raise for an error of the forward."""
        name = type(self.model).__name__
        if isinstance(error, InputError):
            return error
        if isinstance(error, ZooError):
            return TraceError(str(error))
        if isinstance(error, NumbersNeeded):
            line, error_text = self.failure or Failure()
            at = f" ({line})" if line else ""
            if not error_text:
                return TraceError(
                    f"the forward of {name} reads numbers out of tensors{at}, which have none "
                    "while it is traced ahead. zoo.checkpoint without a budget traces the first "
                    "training step instead, in which they do."
                )
            refused = TraceError(
                f"the forward of {name} is traced ahead on fake tensors, on which it raises "
                f"{error_text}{at}. Where real ones do not, zoo.checkpoint without a budget traces "
                "the first training step instead."
            )
            refused.raised = True
            return refused
        if isinstance(error, SystemExit):
            code = "" if error.code is None else shortened(error.code)
            return TraceError(
                f"the forward of {name} called sys.exit({code}), so there is no result"
            )
        line = line_of_traceback(error)
        where = f" ({line})" if line else ""
        refused = TraceError(
            f"{name} does not take these inputs: {in_a_line(error, 400)}{where}"
            f"{sizes_hint(self.invocation)}"
        )
        refused.raised = True
        return refused


@contextlib.contextmanager
def _running(model: nn.Module, fixes: FakeTensorFixes | None, may_compile: bool) -> Iterator[None]:
    """Runs a forward as in training, uncompiled on fake tensors."""
    # on real tensors higher-order operators compile, as in training: uncompiled, `map` returns
    # another structure
    is_eager = fixes is not None or any(map(is_compiled, model.modules()))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager" if is_eager else "default")
        if may_compile
        else contextlib.nullcontext(),
        # fake tensors refuse collectives themselves, and take no memory
        _Limits() if fixes is None else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def on_fakes() -> Iterator[None]:
    """Runs kernels of the block on fake tensors, which no mode of the program sees."""
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    with disable_current_modes(), mode, FakeTensorFixes(mode):
        yield


def _plain(tensor: Tensor) -> Tensor:
    """Returns a tensor; raises TypeError unless it is a plain strided one."""
    if not is_plain(tensor):
        kinds = {"nested ": tensor.is_nested, "quantized ": tensor.is_quantized}
        kinds["memoryless zero "] = tensor._is_zerotensor()
        kind = next((kind for kind, is_it in kinds.items() if is_it), "")
        way_out = "" if tensor.layout is torch.strided else "; one that is a buffer can be"
        raise TypeError(
            f"a {kind}tensor of {tensor.layout} and class {type(tensor).__name__}{way_out}"
        )
    return tensor


def _has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


class _Limits(KernelMode):
    """Refuses collectives, and kernels that return more than `MOST_MADE` bytes in all.

    The dropout state of cuDNN's networks stays as the program left it.
    """

    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result_bytes = 0
        # devices on which the trace made that state before the program
        self.dropout: set[torch.device] = set()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for device in self.dropout:
            count_as_seeded(device)

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        refuse_collective(func)
        effects = effects_of(func)
        if effects.dropping is not None:
            written = {index for index, _ in effects.writes if args[index] is not None}
            args = tuple(v.clone() if n in written else v for n, v in enumerate(args))
        result = func(*args, **(kwargs or {}))
        if func is DROPOUT_STATE:
            self.dropout.add(result.device)
        if not is_view(func):
            self.result_bytes += sum(tensor.nbytes for tensor in tensors_in(result))
            if self.result_bytes > MOST_MADE:
                raise NumbersNeeded
        return result
