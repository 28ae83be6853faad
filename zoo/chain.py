"""A chain is a module that lists its steps instead of writing a forward.

`torch.nn.Sequential` is the nearest relative; it cannot hand several tensors on, cannot offer the
inside of its blocks as steps, and cannot be run by a plan. A chain runs its steps in order over a
*state*, a tuple of tensors: each step takes what the step before it returned. What is kept in
memory meanwhile is decided by the runner that `policy.options` makes; without one a chain is an
ordinary module.
"""

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Union

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registries

from zoo.errors import ArgumentError, WeightsError, nearest
from zoo.planner.plan import Plan

State = tuple[Tensor | None, ...]
Step = Callable[..., Any]
Steps = Sequence[Union[Step, "Steps"]]
# where a module keeps the hooks of its calls
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# those of all modules; others of torch's registries only say more about these
GLOBAL_HOOKS = (
    registries._global_forward_pre_hooks,
    registries._global_forward_hooks,
    registries._global_backward_pre_hooks,
    registries._global_backward_hooks,
)


class Runner(Protocol):
    """Runs the steps of a chain in training; `plan` is what it decided, None before it did."""

    plan: Plan | None

    def __call__(self, chain: "Chain", outline: "Outline", inputs: State) -> Any:
        """Runs the outlined steps over the inputs; returns what the last one returned."""


@dataclass(frozen=True)
class Outline:
    """The fine steps of a chain in order, and for each the number of the block it belongs to.

    `whole` are the steps that are each worth a segment: one that calls a module of several parts (a
    block that is compiled, or has hooks), or runs kernels that a write in place holds together.
    """

    steps: tuple[Step, ...]
    blocks: tuple[int, ...]
    whole: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.steps)

    def names(self, model: nn.Module) -> list[str]:
        """Names each step by its module's path in the chain and its own name."""
        return step_names(model, self.steps)

    def without_loss(self) -> "Outline":
        """Returns the steps of the model alone, as these are."""
        return self


class Chain(nn.Module):
    """A module given by its steps.

    Subclasses list them: `steps` where the list is always the same, `steps_for` where it depends on
    the inputs (a sequence's length). An entry is

    - a function or bound method: one step, the smallest thing that a plan keeps or recomputes;
    - a chain or an `nn.Sequential`: its own steps take its place, and it counts as one block;
    - a list or tuple of entries: likewise one block.

    A step takes the state as arguments and returns a tensor or a tuple of tensors (None allowed in
    a tuple). It never writes its inputs in place.

    A chain or Sequential that has forward or backward hooks of its own is run as one step, by
    calling it, so that its hooks fire as in any module; so is a chain with a plan of its own.
    """

    # parts of another library's names of weights, as regular expressions, and ours, in this order
    renames: ClassVar[Mapping[str, str]] = {}
    runner: Runner | None

    def __init__(self) -> None:
        super().__init__()
        self.runner = None

    def steps(self) -> Steps:
        """Lists the steps; a subclass says which."""
        raise self._stepless()

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the steps for these inputs; `steps()` unless a subclass says otherwise."""
        return self.steps()

    def forward(self, *inputs: Tensor | None) -> Any:
        """Runs the steps in order and returns what the last one returned."""
        found = outline(self.steps_for(*inputs))
        if not found.steps:
            raise self._stepless()
        if self.runner is None or not torch.is_grad_enabled():
            return fold(found.steps, inputs)
        return self.runner(self, found, inputs)

    def _stepless(self) -> ArgumentError:
        return ArgumentError(
            f"{type(self).__name__} lists no steps; give it a method steps(self) that returns them "
            "in order, modules or functions"
        )

    def returned(self, *state: Any) -> Any:
        """Returns what a forward makes of the state that its last step leaves: the state itself.

        A subclass whose forward returns it in another form says so here, and is planned for with a
        loss of what it returns.
        """
        return state if len(state) > 1 else state[0]

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None for plain training and before a first forward decides one."""
        return self.runner.plan if self.runner is not None else None

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames the keys of another library's weights for this model, by `renames`, if any."""
        names = {key: key for key in state_dict}
        for theirs, ours in self.renames.items():
            names = {key: re.sub(theirs, ours, name) for key, name in names.items()}
        return {names[key]: v for key, v in state_dict.items()} if self.renames else state_dict

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights as `nn.Module` does, but loads all or nothing.

        Raises:
            WeightsError: keys are missing, unknown or of another shape; the model is unchanged.
        """
        if isinstance(state_dict, Mapping):
            state_dict = self.translate(state_dict)
        check_weights(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def outline(steps: Steps) -> Outline:
    """Flattens a list of steps, chains, Sequentials and groups to fine steps and their blocks."""
    found = [(step, block) for block, entry in enumerate(steps) for step in _fine(entry)]
    whole = frozenset(place for place, (step, _) in enumerate(found) if has_parts(step))
    return Outline(tuple(step for step, _ in found), tuple(block for _, block in found), whole)


def spread(*stages: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of stages (`nn.Sequential`, `nn.ModuleList`) as entries of a list of steps.

    A Sequential that has hooks of its own stays whole, so that they fire.
    """
    for stage in stages:
        is_whole = isinstance(stage, nn.Sequential) and is_hooked(stage)
        yield from (stage,) if is_whole else stage.children()


def fold(steps: Sequence[Step], state: State) -> Any:
    """Runs steps over a state and returns what the last one returned: the plain forward."""
    value: Any = state
    for step in steps:
        value = step(*(value if isinstance(value, tuple) else (value,)))
    return value


def step_names(chain: nn.Module, steps: Sequence[Step]) -> list[str]:
    """Names each step by its module's path in the chain and its own name: 'layer1.0.normalize'."""
    paths = {id(module): path for path, module in chain.named_modules()}
    return [step_name(step, paths) for step in steps]


def check_weights(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Raises WeightsError, before anything is loaded, when a state dict does not fit a model."""
    if not isinstance(state_dict, Mapping):
        raise WeightsError(f"a state dict maps names to tensors; got {type(state_dict).__name__}")
    own = model.state_dict()
    missing = sorted(own.keys() - state_dict.keys()) if strict else []
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    unknown = sorted(state_dict.keys() - own.keys()) if strict else []
    shapes, others = [], []
    for key, value in state_dict.items():
        wanted = own.get(key)
        if isinstance(wanted, Tensor) and not isinstance(value, Tensor):
            others.append(f"{key} ({type(value).__name__})")
        elif isinstance(wanted, Tensor) and value.shape != wanted.shape:
            shapes.append(f"{key} {tuple(value.shape)} instead of {tuple(wanted.shape)}")
    kinds = "missing", "unknown", "of another shape", "no tensor"
    faults = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
        for what, keys in zip(kinds, (missing, unknown, shapes, others), strict=True)
        if keys
    ]
    if faults:
        hint = nearest(unknown[0], missing) if unknown and missing else ""
        raise WeightsError(
            f"these weights do not fit {type(model).__name__}: {'; '.join(faults)}.{hint} "
            "Nothing was loaded."
        )


def _fine(entry: Any) -> Iterator[Step]:
    is_open = not isinstance(entry, nn.Module) or not is_hooked(entry)
    if isinstance(entry, Chain) and entry.runner is None and is_open:
        entry = tuple(entry.steps())
    if isinstance(entry, list | tuple) or (type(entry) is nn.Sequential and is_open):
        for part in entry:
            yield from _fine(part)
    else:
        yield entry


def has_parts(step: Step) -> bool:
    """Says whether a step is a module that holds others, and no chain with a plan of its own."""
    has_plan = isinstance(step, Chain) and step.runner is not None
    return isinstance(step, nn.Module) and bool(step._modules) and not has_plan


def is_hooked(module: nn.Module) -> bool:
    """Says whether calling a module does more than its forward."""
    return any(getattr(module, name) for name in HOOKS)


def step_name(step: Step, paths: Mapping[int, str]) -> str:
    """Names a step; `paths` are those of the chain's modules by their ids."""
    if isinstance(step, functools.partial):
        known = {} if isinstance(step.func, types.MethodType) else paths
        given = (known.get(id(v), str(v) if isinstance(v, int | str) else "") for v in step.args)
        shown = ", ".join(filter(None, given))
        return f"{step_name(step.func, paths)}({shown})" if shown else step_name(step.func, paths)
    if isinstance(step, nn.Module):
        return paths.get(id(step), type(step).__name__)
    owner = getattr(step, "__self__", None)
    name = getattr(step, "__name__", type(step).__name__).strip("_")
    path = paths.get(id(owner), "")
    return f"{path}.{name}" if path else name
