"""Tests on small tensors whether an optimizer updates each parameter independently.

Most do: SGD, Adam and the like. LBFGS does not, nor does one that reads a norm of all gradients or
counts its steps in a group. No list of names can tell, so two copies of the optimizer take the same
steps, with all parameters at once and with one at a time, and are compared bit for bit.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo._torch import Args, Kwargs, Operator, PyTree, TorchDispatchMode, pytree
from zoo.engine.tensor_state import storage_of
from zoo.errors import OptimizerError

STEPS = 3
STEP_AFTER = "leave out zoo.optimizer_in_backward and call step() after the backward"


def step_alone(optimizer: Optimizer, group: dict[str, Any], *parameters: Tensor) -> None:
    """Takes the optimizer's step for some parameters of a group, without the hooks of a step."""
    groups, others = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], list(parameters)
    try:
        _step(optimizer)
    finally:
        optimizer.param_groups, group["params"] = groups, others


def _step(optimizer: Optimizer) -> None:
    step_of(optimizer)(optimizer)


def step_of(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Returns the step of an optimizer's class without torch's wrapper for hooks."""
    step: Callable[[Optimizer], object] = type(optimizer).step
    own: Callable[[Optimizer], object] = getattr(step, "__wrapped__", step)
    return own if getattr(step, "hooked", False) else step


def check_independent(optimizer: Optimizer) -> None:
    """Raises OptimizerError for an optimizer that does not update each parameter by itself."""
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{name}(differentiable=True) makes its step part of a graph; {STEP_AFTER}"
        )
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise OptimizerError(f"{name} steps another optimizer; pass that one, or {STEP_AFTER}")
    try:
        try:
            is_independent = _is_independent(optimizer, sparse=False)
        except RuntimeError:
            # SparseAdam takes no other gradients
            is_independent = _is_independent(optimizer, sparse=True)
    except Exception as error:
        raise OptimizerError(
            f"{name} cannot step for one parameter at a time ({type(error).__name__}: {error}); "
            f"{STEP_AFTER}"
        ) from error
    check_state(optimizer)
    if not is_independent:
        raise OptimizerError(
            f"{name} looks at several parameters at once: a step for each by itself gives other "
            f"numbers; {STEP_AFTER}"
        )


def _is_independent(optimizer: Optimizer, sparse: bool) -> bool:
    def twin() -> Optimizer:
        groups = optimizer.param_groups
        small = [{**group, "params": _small_parameters(group["params"])} for group in groups]
        return optimizer_like(optimizer, small)

    whole, single = twins = twin(), twin()
    with _Reads(optimizer) as reads:
        for number in range(STEPS):
            for each in twins:
                _make_gradients(each, number, sparse)
            _step(whole)
            for group in single.param_groups:
                for parameter in group["params"]:
                    step_alone(single, group, parameter)
    return reads.nothing and all(
        torch.equal(value, other) if isinstance(value, Tensor) else value == other
        for value, other in zip(_written(whole), _written(single), strict=True)
    )


def _storages(optimizer: Optimizer) -> set[int]:
    """Returns the ids of the storages of all parameters."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {id(storage) for p in parameters if (storage := storage_of(p)) is not None}


def check_state(optimizer: Optimizer) -> None:
    """Raises OptimizerError if the state of a parameter shares another parameter's memory."""
    storages = _storages(optimizer)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            storage = storage_of(value) if isinstance(value, Tensor) else None
            if id(storage) in storages and storage is not storage_of(parameter):
                raise OptimizerError(
                    f"{type(optimizer).__name__} has in the state {name!r} of a parameter "
                    f"{tuple(parameter.shape)} the memory of another parameter, which may be "
                    f"updated first; keep a copy there, or {STEP_AFTER}"
                )


class _Reads(TorchDispatchMode):
    """Detects whether a step of a twin reads the parameters of the original optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = _storages(optimizer)
        self.nothing = True

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and checks its arguments."""
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(storage_of(tensor)) in self.storages:
                self.nothing = False
        return func(*args, **kwargs or {})


def _written(optimizer: Optimizer) -> list[Any]:
    """Lists what steps write: parameters, values of groups, and attributes such as a step count."""
    numbers = {name: v for name, v in vars(optimizer).items() if isinstance(v, int | float)}
    return pytree.tree_leaves([optimizer.param_groups, numbers])


def optimizer_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns an optimizer like this one for other groups, without state and hooks."""
    # torch's copy leaves out hooks, but also attributes of a user's class
    other = copy.copy(optimizer)
    vars(other).update({k: v for k, v in vars(optimizer).items() if k not in vars(other)})
    # a scheduler replaces `step` by one that is bound to its own optimizer
    vars(other).pop("step", None)
    other.state, other.param_groups = defaultdict(dict), groups
    return other


def _small_parameters(parameters: list[Tensor]) -> list[Tensor]:
    """Returns two small parameters for each number of axes, dtype and device among these."""
    forms = dict.fromkeys((p.ndim, p.dtype, p.device) for p in parameters if not p.is_meta)
    return [
        nn.Parameter(_numbers(axes, number).to(device, dtype))
        for axes, dtype, device in forms
        for number in (1, 2)
    ]


def _numbers(axes: int, number: int) -> Tensor:
    return torch.arange(1.0, 2**axes + 1).sin().reshape((2,) * axes) * number


def _make_gradients(optimizer: Optimizer, step: int, sparse: bool) -> None:
    """Gives parameters gradients of unequal sizes, so that a norm of them all would show."""
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            gradient = _numbers(parameter.ndim, step + 1) * 10.0 ** (number % 3)
            gradient = gradient.to(parameter.device, parameter.dtype)
            parameter.grad = gradient.to_sparse(1) if sparse and gradient.ndim else gradient
