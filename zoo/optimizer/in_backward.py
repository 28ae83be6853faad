"""The optimizer step inside of the backward pass: each gradient is used and freed at once.

Also called `optimizer_in_bwd` (torchtune), or fusing the optimizer step into the backward pass (a
tutorial of torch's); LOMO (arXiv:2306.09782) does it for its own optimizer. Here it is the user's:
for one parameter at a time `optimizer.param_groups` is a group of that parameter alone, and the
optimizer's own step runs. The training loop stays as it is:

    backward    gradient of W3 complete -> step for W3, freed; of W2 -> step for W2, freed; ...
    step()      checks that it was so; hooks and learning rate schedulers see one step, as always
    zero_grad() drops the marks that stand in `.grad` for what was freed

A weight that the backward is yet to read (`pending_reads`) is updated when the backward ends. If a
hook may read all gradients before the step, `step()` updates all. An error refuses everything that
would give other numbers than `backward(); step(); zero_grad()`.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zoo._torch import (
    HOOKS_OF_ALL_STEPS,
    Args,
    DisableAutocast,
    Kwargs,
    Operator,
    PyTree,
    current_backward,
    pytree,
    queue_callback,
)
from zoo.engine.pending_reads import (
    Holders,
    PendingReads,
    fewest,
    forget_saved,
    holders_of,
    note_saved,
)
from zoo.errors import ArgumentError, OptimizerError, shortened
from zoo.optimizer.independence import (
    STEP_AFTER,
    check_independent,
    check_state,
    step_alone,
    step_of,
)

_log = logging.getLogger("zoo")
HANDLE = "the handle that zoo.optimizer_in_backward returned"
REMOVE = f"call remove() of {HANDLE}"


class FreedGradient(Tensor):
    """The mark in `.grad` of a parameter whose gradient the optimizer has used and freed.

    It has the gradient's shape and no memory. Whatever reads or writes it (clipping by a norm, a
    GradScaler, a second backward that would add to it) raises OptimizerError. Zeros may be written
    after the step.

    Attributes:
        is_zero: whether zeros were written.
    """

    is_zero: bool
    _sparse_axes: int
    _before_zeros: Callable[[], Callable[[], None] | None]

    @staticmethod
    def __new__(
        cls,
        parameter: Tensor,
        before_zeros: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> "FreedGradient":
        """Makes the mark of a parameter of any shape and type.

        `before_zeros` is a weak reference to a function that is called before zeros are written.
        """
        like = {"strides": parameter.stride(), "dtype": parameter.dtype, "device": parameter.device}
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        mark: FreedGradient = make(cls, parameter.size(), **like)
        gradient = parameter.grad
        is_sparse = gradient is not None and gradient.is_sparse
        mark._sparse_axes = gradient.sparse_dim() if gradient is not None and is_sparse else 0
        mark.is_zero, mark._before_zeros = False, before_zeros
        return mark

    def zeros(self, parameter: Tensor) -> Tensor:
        """Returns a gradient of zeros, sparse as the freed one was."""
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return zeros.to_sparse(self._sparse_axes) if self._sparse_axes else zeros

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Returns shape and dtype, without numbers."""
        return f"FreedGradient({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Refuses every kernel but zeros, and `detach`, which returns the same object."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in ZEROS:
            return cls._write_zeros(func, args)
        raise OptimizerError(
            f"{func} uses a gradient that the optimizer has used in the backward and freed "
            "(zoo.optimizer_in_backward). Call optimizer.step() and optimizer.zero_grad() after "
            "each backward; for what needs all gradients at once (clipping by a global norm, a "
            f"GradScaler, accumulation over several backwards) {REMOVE}"
        )

    @classmethod
    def _write_zeros(cls, func: Operator, args: Args) -> PyTree:
        gradients = pytree.tree_leaves(args)
        marks = [gradient for gradient in gradients if isinstance(gradient, cls)]
        for mark in marks:
            if (before := mark._before_zeros()) is not None:
                before()
        for gradient in gradients:
            if not isinstance(gradient, cls):
                gradient.zero_()
        for mark in marks:
            mark.is_zero = True
        return args[0] if func is ZEROS[0] else None


# the operators of `zero_grad(set_to_none=False)`
ZEROS = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)

# called with each parameter whose gradient a backward is about to use and free
_observers: list[Callable[[Tensor], object]] = []
# optimizers that step in the backward now
_ATTACHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def optimizer_in_backward(model: nn.Module, optimizer: Optimizer) -> "OptimizerInBackward":
    """Makes `optimizer` update each parameter of `model` in the backward and free its gradient.

        zoo.optimizer_in_backward(model, optimizer)
        loss(model(x), y).backward()  # updates the parameters
        optimizer.step()              # checks that all is as it would be without
        optimizer.zero_grad()

    Weights, optimizer state and schedulers are bit for bit those of the same loop without this
    call. `.grad` of an updated parameter has no numbers, and its use raises.

    After an exception in a backward all calls raise until weights and optimizer state are loaded
    and `reset()` is called.

    A weight that the backward is yet to read is updated when the backward ends. While there is a
    hook before steps, or a replaced `step`, `step()` updates all weights as without this call, with
    a warning.

    Between a backward and `step()` weights are already new: evaluate, average or save them after
    `step()`. A weight that is read by way of `.data` is not protected.

    Args:
        model: whose parameters the optimizer updates, all or some; also sharded by FSDP2.
        optimizer: any that updates each parameter by itself, which is tried on small tensors.

    Raises:
        ArgumentError: no module, no optimizer, or one that steps in the backward already.
        OptimizerError: the optimizer looks at several parameters at once (LBFGS), takes a closure,
            or gradients are combined after the backward (DDP, FSDP1). Later: a GradScaler; a second
            backward before `step()`; a weight or learning rate changed between the two;
            `create_graph=True`; use of a freed gradient.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"optimizer_in_backward needs a module; got {shortened(model)}")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer_in_backward needs an optimizer, such as "
            f"torch.optim.AdamW(model.parameters()); got {shortened(optimizer)}"
        )
    own = set(_parameters(optimizer))
    if own.isdisjoint(model.parameters()):
        raise ArgumentError(
            f"this {type(optimizer).__name__} updates no parameter of this {type(model).__name__}; "
            "make it of model.parameters() after the model is copied, converted or sharded"
        )
    for other in _ATTACHED:
        if not own.isdisjoint(_parameters(other)):
            raise ArgumentError(
                f"a {type(other).__name__} steps in the backward for these parameters already; "
                f"first {REMOVE}"
            )
    _check_wrappers({cls.__name__ for module in model.modules() for cls in type(module).__mro__})
    check_independent(optimizer)
    return OptimizerInBackward(model, optimizer)


def attached_to(parameters: Iterable[Tensor]) -> Optimizer | None:
    """Returns the optimizer that updates these parameters, as far as trained, in the backward.

    None if no optimizer updates all of them so.
    """
    trained = {p for p in parameters if p.requires_grad} if _ATTACHED else set()
    attached = _ATTACHED if trained else ()
    return next((o for o in attached if trained <= set(_parameters(o))), None)


@contextlib.contextmanager
def observed_gradients(observe: Callable[[Tensor], object]) -> Iterator[None]:
    """Calls a function with each parameter before its gradient is used and freed in the block."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class OptimizerInBackward:
    """The handle of an optimizer that steps in the backward.

    Attributes:
        updated: names of the parameters updated since the last `step()`.
        waited: names of those that the last backward updated at its end.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # by id: references would keep a model's frozen weights as long as the optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # parameters updated since the last step, and their versions then
        self._updated: dict[Tensor, list[Any]] = {}
        # parameters that this backward updates at its end
        self._waiting: dict[Tensor, None] = {}
        self.waited: list[str] = []
        # the reads that this backward has left
        self._reads: PendingReads | None = None
        # reference counts of parameters outside of a forward
        self._holders: dict[Tensor, Holders | None] = {}
        # the backward whose parameters `step()` updates
        self._left_to_step = -1
        self._step_function = step_of(optimizer)
        self._is_warned = self._is_loaded = False
        # parameters with a hook for gradients to be added to zeros, and those with such a gradient
        self._expecting_zeros: set[Tensor] = set()
        self._zeroed: set[Tensor] = set()
        # marks of the updated parameters during the optimizer's own step
        self._stepped: dict[Tensor, FreedGradient] = {}
        # the values of the parameter groups in the backward
        self._values: list[dict[str, Any]] = []
        self._is_stepping = False
        # parameters whose state is in order in `optimizer.state`
        self._sorted: set[Tensor] = set(optimizer.state)
        # the groups of parameters in this backward
        self._groups: dict[Tensor, dict[str, Any]] = {}
        # backwards that have not ended
        self._running: set[int] = set()
        # a backward runs on a thread per device
        self._lock = threading.Lock()
        # parameters with a hook of this handle
        self._hooked: set[Tensor] = set()
        after = optimizer.register_step_post_hook(self._after_step)
        # first, so that other hooks find marks for gradients, not None
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            after,
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load),
            # a function, so that a copy of the model holds no reference to this handle
            model.register_forward_pre_hook(_check_forward),
        ]
        self._hook_parameters()
        self._count_holders()
        _ATTACHED.add(optimizer)

    @property
    def updated(self) -> list[str]:
        """Names of the parameters that were updated since the last `step()`."""
        return list(map(self._name, self._updated))

    def reset(self) -> None:
        """Recovers from a backward that raised: drops its gradients; updated weights stay."""
        self._running.clear()
        self._updated.clear()
        self._waiting.clear()
        self._zeroed.clear()
        self._is_loaded = False
        for parameter in _parameters(self.optimizer):
            parameter.grad = None

    def remove(self) -> None:
        """Returns the step to the optimizer itself.

        Raises:
            OptimizerError: a backward raised, and `reset()` was not called.
        """
        self._check_ended()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in _parameters(self.optimizer):
            forget_saved(parameter)
            if isinstance(mark := parameter.grad, FreedGradient):
                parameter.grad = mark.zeros(parameter) if mark.is_zero else None
        _ATTACHED.discard(self.optimizer)

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter {tuple(parameter.shape)}")

    def _hook_parameters(self) -> None:
        """Hooks parameters without a hook: those in new groups, or frozen until now."""
        for parameter in _parameters(self.optimizer):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                hook: Any = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
                self._hooks.append(hook(self._update))

    def _update(self, parameter: Tensor) -> None:
        """Takes the optimizer's step for one parameter, whose gradient is complete."""
        with self._lock:
            self._add_to_zeros(parameter)
            if self._is_left_to_step():
                return
            self._check_gradient(parameter)
            reads = self._enter_backward()
            if parameter not in self._groups:
                return
            if reads.are_left(parameter, self._holders.get(parameter)):
                self._waiting[parameter] = None
            else:
                self._step(parameter)

    def _step(self, parameter: Tensor) -> None:
        for observe in _observers:
            observe(parameter)
        self._is_stepping = True
        try:
            with torch.no_grad(), DisableAutocast():
                step_alone(self.optimizer, self._groups[parameter], parameter)
        finally:
            self._is_stepping = False
            self._updated[parameter] = self._versions(parameter)
        parameter.grad = FreedGradient(parameter, weakref.WeakMethod(self._before_zeros))

    def _versions(self, parameter: Tensor) -> list[Any]:
        """Returns versions that differ once a parameter or its state is written."""
        state = self.optimizer.state.get(parameter, {}).values()
        tensors = [(id(value), value._version) for value in state if isinstance(value, Tensor)]
        return [parameter._version, len(state), *tensors]

    def _is_left_to_step(self) -> bool:
        """Returns whether `step()` updates all, since a hook may read gradients before."""
        backward: int = current_backward()
        if backward in self._running or self._updated:
            return False
        if backward != self._left_to_step and (what := self._before_steps()) is not None:
            self._left_to_step = backward
            if not self._is_warned:
                self._is_warned = True
                _log.warning(
                    "%s may look at gradients or change the step, so that step() updates the "
                    "weights, not the backward: all gradients exist at once. Remove it, or use a "
                    "hook after the step (register_step_post_hook)",
                    what,
                )
        return backward == self._left_to_step

    def _before_steps(self) -> str | None:
        """Describes the program's code that runs before or instead of the optimizer's step."""
        name, own = type(self.optimizer).__name__, vars(self.optimizer).get("step")
        is_schedule = getattr(own, "_wrapped_by_lr_sched", False)
        if own is not None and not (is_schedule and own.__wrapped__ is type(self.optimizer).step):
            return f"the step of this {name}, which was replaced,"
        if step_of(self.optimizer) is not self._step_function:
            return f"the step of {name}, which was replaced,"
        own_hooks, hooks = self.optimizer._optimizer_step_pre_hooks, HOOKS_OF_ALL_STEPS
        for hook in (*hooks.values(), *own_hooks.values()):
            # zoo's own hooks do not depend on gradients
            if not getattr(hook, "__module__", "").startswith("zoo."):
                return f"a hook before the step of {name} ({shortened(hook)})"
        return None

    def _enter_backward(self) -> PendingReads:
        backward = current_backward()
        if backward in self._running and self._reads is not None:
            return self._reads
        if self._updated or self._waiting:
            self._check_dropped()
            raise self._unfinished("another backward began before step()")
        check_state(self.optimizer)
        self._running.add(backward)
        self._reads = PendingReads()
        groups = self.optimizer.param_groups
        self._groups = {p: group for group in groups for p in group["params"]}
        self._values = [_values(group) for group in groups]
        queue_callback(lambda: self._end_backward(backward))
        return self._reads

    def _end_backward(self, backward: int) -> None:
        """Updates the parameters that the backward still had to read."""
        with self._lock:
            self.waited = list(map(self._name, self._waiting))
            for parameter in self._waiting:
                self._step(parameter)
            self._waiting.clear()
            self._reads = None
            self._running.discard(backward)

    def _count_holders(self) -> None:
        for parameter in _parameters(self.optimizer):
            note_saved(parameter)
            self._holders[parameter] = fewest(self._holders.get(parameter), holders_of(parameter))

    def _before_zeros(self) -> None:
        """Called before zeros are written to a freed gradient; the next one is added to them."""
        if self._updated:
            raise self._unfinished("zero_grad() was called before step()")
        for parameter in self._hooked - self._expecting_zeros:
            if parameter.requires_grad:
                self._expecting_zeros.add(parameter)
                hook: Any = parameter.register_hook
                self._hooks.append(hook(functools.partial(self._expect_zeros, parameter)))

    def _expect_zeros(self, parameter: Tensor, gradient: Tensor) -> None:
        """Called before a gradient is accumulated: replaces a mark, to which it cannot be added."""
        if isinstance(mark := parameter.grad, FreedGradient) and mark.is_zero:
            parameter.grad = None
            self._zeroed.add(parameter)

    def _add_to_zeros(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if parameter in self._zeroed and gradient is not None and not gradient.is_sparse:
            # a sum with zeros has no negative zero
            with torch.no_grad():
                gradient.add_(0)
        self._zeroed.discard(parameter)

    def _check_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if isinstance(gradient, FreedGradient):
            raise OptimizerError(
                f"{self._name(parameter)} has been updated by an earlier backward. Call "
                "optimizer.step() and optimizer.zero_grad() after each backward; to accumulate "
                f"gradients over several {REMOVE}"
            )
        if gradient is not None and gradient.requires_grad:
            raise OptimizerError(
                "a backward with create_graph=True needs the parameters as they were; use "
                f"torch.autograd.grad for it, or {REMOVE}"
            )

    def _check_ended(self) -> None:
        """Raises after a backward that raised."""
        if self._running:
            raise self._unfinished("it did not come to its end")

    def _check_dropped(self) -> None:
        """Raises after a backward whose gradients were dropped before a step."""
        if not all(isinstance(parameter.grad, FreedGradient) for parameter in self._updated):
            raise self._unfinished("zero_grad() was called before step()")

    def _unfinished(self, why: str) -> OptimizerError:
        names, total = self.updated, len([*_parameters(self.optimizer)])
        which = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return OptimizerError(
            f"the last backward has updated {len(names)} of {total} parameters{which}, but {why}. "
            f"Load weights and optimizer state from before it and call reset() of {HANDLE}"
        )

    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        """Leaves to the optimizer's own step the gradients that no backward has used."""
        if self._is_stepping:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise OptimizerError(
                "step(closure) runs the backward itself; call backward() and then step(), or "
                f"{REMOVE}"
            )
        self._check_finished()
        # a step may call its base class's, which runs these hooks again
        stepped: dict[Tensor, FreedGradient] = {}
        for parameter in _parameters(self.optimizer):
            if isinstance(mark := parameter.grad, FreedGradient):
                if not mark.is_zero and parameter not in self._updated:
                    raise OptimizerError(
                        f"step() was called twice after one backward, which has updated "
                        f"{self._name(parameter)}; call zero_grad() and backward() before it"
                    )
                if not mark.is_zero:
                    stepped[parameter] = mark
                parameter.grad = mark.zeros(parameter) if mark.is_zero else None
        self._stepped |= stepped
        self._updated.clear()

    def _check_finished(self) -> None:
        """Refuses a step that would have used other numbers than the backward did."""
        self._check_ended()
        if self._updated and (what := self._before_steps()) is not None:
            raise self._unfinished(f"{what} came before step(); set it before the backward")
        self._check_dropped()
        if self._is_loaded:
            raise self._unfinished("the optimizer's state was loaded before step()")
        for parameter, versions in self._updated.items():
            now = self._versions(parameter)
            if versions != now:
                what = "the optimizer's state of " * (versions[0] == now[0])
                raise self._unfinished(f"{what}{self._name(parameter)} was changed before step()")
        if self._updated and self._values != list(map(_values, self.optimizer.param_groups)):
            raise self._unfinished(
                "a value of a parameter group, such as its learning rate, was changed before "
                "step(); change it before the backward"
            )

    def _after_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        if self._is_stepping:
            return
        for parameter, mark in self._stepped.items():
            parameter.grad = mark
        self._stepped.clear()
        self._zeroed.clear()
        self._count_holders()
        self._sort_state()
        self._hook_parameters()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._check_ended()
        self._sort_state()

    def _after_load(self, optimizer: Optimizer) -> None:
        self._is_loaded = bool(self._updated)

    def _sort_state(self) -> None:
        """Sorts new state in the order of the parameters, as an ordinary step would make it."""
        state = self.optimizer.state
        for parameter in _parameters(self.optimizer):
            if parameter in state and parameter not in self._sorted:
                state[parameter] = state.pop(parameter)
                self._sorted.add(parameter)


class _GroupTensor:
    """A tensor in a parameter group, such as a learning rate that a schedule writes in place.

    Its numbers are compared only if it was written since: reading them waits for the device.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.copy = tensor, tensor._version, tensor.clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _GroupTensor):
            return bool(self.copy.tolist() == other)
        is_still = self.tensor is other.tensor and self.version == other.version
        return is_still or other == self.copy.tolist()


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a group, to be compared with its later values."""
    return {
        name: _GroupTensor(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    } | {"params": [*map(id, group["params"])]}


def _check_wrappers(names: set[str]) -> None:
    """Refuses classes that combine gradients of several processes after the backward."""
    for name in names & {"DistributedDataParallel", "FullyShardedDataParallel"}:
        raise OptimizerError(
            f"{name} combines gradients of several processes when the optimizer has used them "
            f"already; use FSDP2 (fully_shard), or {STEP_AFTER}"
        )


def _check_forward(model: nn.Module, args: object) -> None:
    """Refuses a forward whose gradients the optimizer could not use as they are."""
    if DistributedDataParallel._active_ddp_module is not None:
        _check_wrappers({"DistributedDataParallel"})
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16:
        raise OptimizerError(
            "float16 autocast needs a GradScaler, which divides all gradients after the backward; "
            f"use bfloat16, or {REMOVE}"
        )
