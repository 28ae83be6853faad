"""Bytes of an optimizer: its state, and the temporaries of its step.

It steps on fake parameters, so that Adam's two copies of a large model are counted, not allocated.
A kernel of one parameter that may take a workspace, as a product or an operation on several dtypes,
runs for real, alone (`kernel_costs`). Kernels of lists and fused ones count without.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo._torch import (
    Args,
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    devices_with_kernels_of_lists,
)
from zoo.engine.operator_effects import resolved
from zoo.engine.recorder import KernelMode
from zoo.errors import ArgumentError, nearest, shortened
from zoo.optimizer.independence import optimizer_like, step_alone
from zoo.planner.step_events import Allocated, Freed, KernelRun
from zoo.profiling.caching_allocator import Rounding, rounding_of
from zoo.profiling.fake_tensors import FakeTensorFixes
from zoo.profiling.isolation import isolated
from zoo.profiling.kernel_costs import measure_kernels
from zoo.profiling.step_mode import Form, UpdateBytes, form_of
from zoo.profiling.step_recorder import StepRecorder
from zoo.profiling.tensor_spec import CPU, KernelSpec, TensorSpec, tensors_in
from zoo.units import plural

# after so many steps an optimizer does the same in each: RAdam rectifies from its sixth step on
LATE = 1000
# operators that read a number of a tensor, and that cast
READ = torch.ops.aten._local_scalar_dense.default
CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})
# kernels of lists of parameters, which would take the memory of all
OF_LISTS = ("aten._foreach", "aten._fused", "aten._amp_foreach")

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
# the values of `optimizer=`
OptimizerOption = MakeOptimizer | torch.optim.Optimizer | str
OPTIMIZERS: dict[str, MakeOptimizer | None] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": None,
}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer: its state, and the peak of a step above the state.

    `updates` are the bytes of a step for one parameter, by its shape and dtype, if the optimizer
    steps in the backward; else None. `name` is that of its class, "" where there is none.
    """

    state: int = 0
    step: int = 0
    updates: UpdateBytes | None = None
    name: str = ""


def maker_of(option: Any, model: nn.Module | None = None) -> MakeOptimizer | None:
    """Returns a function that makes an optimizer for a list of parameters; None for none.

    The option is a name, the same in Python and on a command line; a class, or a function of the
    list; or an optimizer of the model's parameters: then the function makes others like it, whose
    groups hold the parameters at the same positions among those that are trained.

    Raises:
        ArgumentError: it is none of these, or an optimizer of other parameters.
    """
    if is_optimizer(option) and model is not None:
        return maker_for(option, [p for p in model.parameters() if p.requires_grad])
    if isinstance(option, str) and option.lower() in OPTIMIZERS:
        return OPTIMIZERS[option.lower()]
    if option is None or (callable(option) and not is_optimizer(option)):
        return option  # type: ignore[no-any-return]
    near = nearest(option, OPTIMIZERS) if isinstance(option, str) else ""
    raise ArgumentError(
        f"optimizer={shortened(option)} is no optimizer.{near} It takes "
        f"{', '.join(map(repr, OPTIMIZERS))}, a class such as torch.optim.AdamW, a function of the "
        "list of parameters, or an optimizer of the model's parameters"
    )


def maker_for(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> MakeOptimizer:
    """Returns a function that makes optimizers like this one; `trained` gives the positions."""
    positions = {id(parameter): position for position, parameter in enumerate(trained)}
    groups = [
        (group, [positions.get(id(p), -1) for p in group["params"] if p.requires_grad])
        for group in optimizer.param_groups
    ]
    if count := sum(indices.count(-1) for _, indices in groups):
        raise ArgumentError(
            f"optimizer= holds {plural(count, 'parameter')} that this model does not train; pass "
            "a class or a function of the list of parameters, or an optimizer of the model's"
        )

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        assert len(parameters) == len(trained), "they are those of a copy of the model"
        return optimizer_like(
            optimizer,
            [
                {**group, "params": [parameters[position] for position in indices]}
                for group, indices in groups
                if indices
            ],
        )

    return make


def is_optimizer(value: object) -> bool:
    """Returns whether a value has a step, parameter groups and a state, as torch's own have."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and isinstance(getattr(value, "state", None), Mapping)
        and isinstance(getattr(value, "param_groups", None), list)
    )


def optimizer_from(make: MakeOptimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    """Returns the optimizer that `make` makes of parameters.

    Raises:
        ArgumentError: it makes none, or does not take a list of parameters.
    """
    try:
        optimizer = make(parameters)
    except TypeError as error:
        raise ArgumentError(
            f"optimizer= is called with a list of parameters, which it does not take: {error}"
        ) from error
    if is_optimizer(optimizer):
        return optimizer
    raise ArgumentError(
        f"optimizer= made no optimizer but a value of type {type(optimizer).__name__}; return one, "
        "as lambda parameters: torch.optim.SGD(parameters, lr=0.1) does"
    )


def optimizer_bytes(
    make: MakeOptimizer | None,
    parameters: Iterable[Tensor],
    in_backward: bool = False,
    device: str | None = None,
    rounding: Rounding | None = None,
) -> OptimizerBytes:
    """Counts the bytes of the optimizer that `make` builds for these parameters; None: no bytes.

    With `in_backward` it steps for each parameter as soon as the gradient is complete. `device` is
    the kind of device that it will step on, if the parameters are on another. On a CUDA device
    each tensor counts as its allocator does.

    Raises:
        ArgumentError: `make` returns no optimizer, raises or ends the process, or a step needs more
            than gradients: a closure, or values of the gradients.
    """
    if make is None:
        return OptimizerBytes(updates={} if in_backward else None)
    tensors = list(parameters)
    kind = device or next((p.device.type for p in tensors), "cpu")
    rounding = rounding or rounding_of(kind)
    recorded = isolated(
        lambda _: _on_fakes(make, tensors, in_backward, device, rounding),
        lambda text: ArgumentError(
            f"optimizer= failed on a list of fake parameters ({text}); pass None and take the "
            "bytes of its state off the budget"
        ),
    )
    own = next((p.device for p in tensors), CPU)
    peaks = recorded.peaks(own if kind == own.type and kind != "meta" else None)
    if not in_backward:
        most = max((peak for _, peak in peaks), default=0)
        return OptimizerBytes(recorded.state, most, name=recorded.name)
    updates: dict[Form, int] = {}
    for form, peak in peaks:
        if form is not None:
            updates[form] = max(updates.get(form, 0), peak)
    return OptimizerBytes(recorded.state, updates=updates, name=recorded.name)


class _Step(NamedTuple):
    """A step of an optimizer, for all parameters or for one of a form.

    Each change is of the bytes that are allocated, or of the kernel that has run. The first ones
    are of the `state` bytes that are there before.
    """

    form: Form | None
    state: int
    changes: list[tuple[int, KernelSpec | None]]


class _Recorded(NamedTuple):
    """An optimizer's class, the bytes of its state, and its steps on fake parameters."""

    name: str
    state: int
    steps: list[_Step]

    def peaks(self, device: torch.device | None) -> list[tuple[Form | None, int]]:
        """Returns the most bytes of each step, with workspaces of a device that is here."""
        specs = [spec for step in self.steps for _, spec in step.changes if spec is not None]
        needed = {repr(spec): spec for spec in specs if _may_take_workspace(spec)}
        costs = [] if device is None else measure_kernels([*needed.values()], device, timed=False)
        known = zip(needed, costs, strict=device is not None)
        workspaces = {text: cost.workspace for text, cost in known if cost is not None}

        def peak(step: _Step) -> int:
            totals = itertools.accumulate(size for size, _ in step.changes)
            beside = (workspaces.get(repr(spec), 0) for _, spec in step.changes)
            most = max(map(sum, zip(totals, beside, strict=True)), default=0)
            return max(most - step.state, 0)

        return [(step.form, peak(step)) for step in self.steps]


def _may_take_workspace(spec: KernelSpec) -> bool:
    """Returns whether a kernel may take memory beside its results, and can run for one parameter.

    A number, that is a tensor without dimensions, is cast for free.
    """
    operator = resolved(spec.operator)
    if operator in CASTS or operator is READ or spec.operator.startswith(OF_LISTS):
        return False
    tensors = [leaf for leaf in spec.leaves if isinstance(leaf, TensorSpec) and leaf.shape]
    return torch.Tag.pointwise not in operator.tags or len({t.dtype for t in tensors}) > 1


class _OnesForNumbers(KernelMode):
    """Takes 1.0 for each floating-point number that an optimizer computes of fake tensors.

    Adafactor reads norms, and compares them; it multiplies by them, and no bytes depend on that.
    """

    def __init__(self, fixes: FakeTensorFixes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixes = fixes

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        result = func(*args, **kwargs or {})
        if isinstance(result, FakeTensor) and result.is_floating_point() and result.numel() == 1:
            self.fixes.know_unless_known(result, 1.0)
        return result


def _on_fakes(
    make: MakeOptimizer,
    tensors: list[Tensor],
    in_backward: bool,
    device: str | None,
    rounding: Rounding,
) -> _Recorded:
    # an optimizer's own numbers, such as its count of steps, are real tensors
    here = torch.get_default_device()
    with (
        torch.device(CPU if here.type == "meta" else here),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        FakeTensorFixes(mode) as fixes,
        _OnesForNumbers(fixes),
    ):
        # not fakes of the parameters: these share their version counters, which a graph may check
        fakes = [
            nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device))
            for p in tensors
            if p.requires_grad
        ]
        if not fakes:
            return _Recorded("", 0, [])
        optimizer = optimizer_from(make, fakes)
        for group in optimizer.param_groups:
            _choose_kernels_of_lists(group, device)
        # without multi-tensor kernels torch's optimizers take one parameter after the other
        are_loops = all("foreach" in g and not g["foreach"] for g in optimizer.param_groups)
        try:
            if in_backward or are_loops:
                state, steps = _steps_by_form(optimizer, in_backward, device, rounding)
            else:
                state, steps = _step_at_once(optimizer, device, rounding)
        except (DataDependentOutputException, TypeError, RuntimeError) as error:
            raise ArgumentError(
                f"{type(optimizer).__name__} cannot step on fake tensors ({error}). Pass "
                "optimizer= one of like state, or None and take its bytes off the budget."
            ) from error
        return _Recorded(type(optimizer).__name__, state, steps)


def _choose_kernels_of_lists(group: dict[str, Any], device: str | None) -> None:
    """Sets foreach= to torch's default for real parameters; for fakes torch never chooses it.

    Multi-tensor kernels hold temporaries of all parameters at once: about a copy of the weights.
    """
    is_default = group.get("foreach", False) is None
    if is_default and not group.get("fused") and not group.get("differentiable"):
        kinds = {device or parameter.device.type for parameter in group["params"]}
        if kinds.issubset(devices_with_kernels_of_lists()):
            group["foreach"] = True


def _step_at_once(
    optimizer: torch.optim.Optimizer, device: str | None, rounding: Rounding
) -> tuple[int, list[_Step]]:
    """Steps for all parameters; returns the bytes of the state, and the step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    _make_late(optimizer)
    state = _state_bytes(optimizer.state, rounding, _are_counters_on_host(optimizer, device))
    return state, [_recorded(optimizer, rounding, optimizer.step)]


def _steps_by_form(
    optimizer: torch.optim.Optimizer, in_backward: bool, device: str | None, rounding: Rounding
) -> tuple[int, list[_Step]]:
    """Steps for one parameter of each shape and dtype; others of the form take the same."""
    state, steps, on_host = 0, list[_Step](), _are_counters_on_host(optimizer, device)
    for group in optimizer.param_groups:
        forms = [form_of(parameter) for parameter in group["params"]]
        samples = dict(zip(forms, group["params"], strict=True))
        step = functools.partial(step_alone, optimizer, group)
        for form, sample in samples.items():
            sample.grad = torch.empty_like(sample)
            step(sample)
            state += forms.count(form) * _state_bytes(optimizer.state[sample], rounding, on_host)
        _make_late(optimizer)
        if in_backward:
            for form, sample in samples.items():
                steps.append(_recorded(optimizer, rounding, step, sample, form=form))
            continue
        # the variables of a loop still hold the temporaries of the previous parameter
        for run in dict.fromkeys(itertools.pairwise(forms)) or [forms[:1]]:
            parameters = map(samples.__getitem__, run)
            steps.append(_recorded(optimizer, rounding, step, *parameters))
    return state, steps


def _make_late(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            state["step"] = state["step"] + LATE


def _are_counters_on_host(optimizer: torch.optim.Optimizer, device: str | None) -> bool:
    """Returns whether the counters of steps stay on the CPU, as those of torch's Adam do.

    They are where the parameters are if the optimizer is fused or capturable.
    """
    kinds = {device or p.device.type for group in optimizer.param_groups for p in group["params"]}
    on_device = (group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return not kinds <= {"cpu", "meta"} and not any(on_device)


def _state_bytes(state: Any, rounding: Rounding, counters_on_host: bool) -> int:
    tensors = tensors_in(state)
    if counters_on_host:
        tensors = [t for t in tensors if t.ndim or t.device.type != "cpu"]
    sizes = {id(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(map(rounding, sizes.values()))


def _recorded(
    optimizer: torch.optim.Optimizer,
    rounding: Rounding,
    step: Callable[..., PyTree],
    *parameters: Tensor,
    form: Form | None = None,
) -> _Step:
    recorder = StepRecorder()
    # a step may replace its state
    state = recorder.note_earlier(tensors_in(optimizer.state))
    with recorder:
        step(*parameters)
    events = recorder.events.rounded(rounding)
    changes: list[tuple[int, KernelSpec | None]] = []
    for _, event in events.forward:
        if isinstance(event, Allocated | Freed):
            sign = 1 if isinstance(event, Allocated) else -1
            changes.append((sign * events.sizes[event.storage], None))
        elif isinstance(event, KernelRun):
            changes.append((0, recorder.specs[event.number]))
    return _Step(form, sum(events.sizes[number] for number in state), changes)
