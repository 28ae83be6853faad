"""The optimizer step inside of the backward pass: each gradient is used and freed at once.

Also called `optimizer_in_bwd` (torchtune), or fusing the optimizer step into the backward pass (a
tutorial of torch's); LOMO (arXiv:2306.09782) does it for its own optimizer. Here it is the user's:
for one parameter at a time `optimizer.param_groups` is a group of that parameter alone, and the
optimizer's own step runs. The training loop stays as it is:

    backward    gradient of W3 complete -> step for W3, freed; of W2 -> step for W2, freed; ...
    step()      checks that it was so; hooks and learning rate schedulers see one step, as always
    zero_grad() drops the marks that stand in `.grad` for what was freed

What would use other numbers than `backward(); step(); zero_grad()` is refused by an error.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zoo._torch import DisableAutocast, current_backward, queue_callback
from zoo.errors import ArgumentError, OptimizerError, shortened
from zoo.optimizer.independence import STEP_AFTER, check_independent, step_alone

HANDLE = "the handle that zoo.optimizer_in_backward returned"
REMOVE = f"call remove() of {HANDLE}"


class FreedGradient(Tensor):
    """Stands in `.grad` of a parameter whose gradient the optimizer has used and freed.

    It has the gradient's shape and no memory. Whatever reads or writes it (clipping by a norm, a
    GradScaler, a second backward that would add to it) raises OptimizerError.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor) -> "FreedGradient":
        """Makes that of a parameter of any shape and type."""
        like = {"strides": parameter.stride(), "dtype": parameter.dtype, "device": parameter.device}
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, parameter.size(), **like)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Says what it is, without numbers."""
        return f"FreedGradient({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses every kernel but `detach`, which returns the same object: it has no history."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise OptimizerError(
            f"{func} uses a gradient that the optimizer has used in the backward and freed "
            "(zoo.optimizer_in_backward). Call optimizer.step() and optimizer.zero_grad() after "
            "each backward; for what needs all gradients at once (clipping by a global norm, a "
            f"GradScaler, accumulation over several backwards) {REMOVE}"
        )


# optimizers that step in the backward now
_ATTACHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def optimizer_in_backward(model: nn.Module, optimizer: Optimizer) -> "OptimizerInBackward":
    """Has `optimizer` update each parameter of `model` in the backward and free its gradient.

        optimizer = torch.optim.AdamW(model.parameters())
        zoo.optimizer_in_backward(model, optimizer)
        for x, y in data:
            loss(model(x), y).backward()  # updates the parameters
            optimizer.step()              # checks that all is as it would be without
            optimizer.zero_grad()

    Weights, optimizer state, its `state_dict` and schedulers are bit for bit those of the same loop
    without this call; a few gradients exist at once in place of all. `.grad` of an updated
    parameter is a tensor of the same shape without numbers or memory, whose use raises.

    After an exception in a backward the parameters that `updated` of the handle names have taken
    the step, the others have not. `step()`, `state_dict()`, `remove()` and the next backward raise
    until weights and optimizer state are loaded and `reset()` is called.

    Between a backward and `step()` weights are already new: evaluate, average or save them after
    `step()`. A weight whose numbers are read by way of `.data` is not protected.

    Args:
        model: whose parameters the optimizer updates, all or some; also sharded by FSDP2.
        optimizer: of torch.optim or another that updates each parameter by itself. That is tried
            on small tensors. Groups, foreach, fused and schedulers as they are.

    Returns:
        A handle: `remove()` takes it off again.

    Raises:
        ArgumentError: no module, no optimizer, or one that steps in the backward already.
        OptimizerError: the optimizer looks at several parameters at once (LBFGS), takes a closure,
            or gradients are combined after the backward (DistributedDataParallel, the older
            FullyShardedDataParallel). Later: float16 autocast, whose GradScaler scales gradients;
            a second backward before `step()`; a weight or a learning rate that is changed
            between the two; `create_graph=True`; any use of a gradient that was freed.
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
    """Returns the optimizer that updates all of these in the backward, so far as they are trained.

    None where there is no such optimizer, or it updates only some of them.
    """
    trained = {p for p in parameters if p.requires_grad} if _ATTACHED else set()
    attached = _ATTACHED if trained else ()
    return next((found for found in attached if trained <= set(_parameters(found))), None)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class OptimizerInBackward:
    """The handle of an optimizer that steps in the backward.

    Attributes:
        updated: names of the parameters that were updated by backwards since the last `step()`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # by id: to hold them would keep a model's frozen weights as long as the optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # parameters updated since the last step, with their versions after it
        self._updated: dict[Tensor, int] = {}
        # those whose step the optimizer's own is about to check
        self._stepped: list[Tensor] = []
        # what the groups said in the backward
        self._values: list[dict[str, Any]] = []
        self._is_stepping = False
        # parameters whose state has its place in `optimizer.state`
        self._sorted: set[Tensor] = set(optimizer.state)
        # the groups of parameters in this backward
        self._groups: dict[Tensor, dict[str, Any]] = {}
        # backwards that have not come to their end
        self._running: set[int] = set()
        # devices have threads of their own in a backward
        self._lock = threading.Lock()
        # parameters with a hook of this handle
        self._hooked: set[Tensor] = set()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            # a copy of the model is to hold no reference to this
            model.register_forward_pre_hook(_check_forward),
        ]
        self._hook_parameters()
        _ATTACHED.add(optimizer)

    @property
    def updated(self) -> list[str]:
        """Names of the parameters that were updated since the last `step()`."""
        return list(map(self._name, self._updated))

    def reset(self) -> None:
        """Goes on after a backward that raised: drops its gradients; what it updated stays."""
        self._running.clear()
        self._updated.clear()
        for parameter in _parameters(self.optimizer):
            parameter.grad = None

    def remove(self) -> None:
        """Has the optimizer step by itself again.

        Raises:
            OptimizerError: a backward raised, and `reset()` was not called.
        """
        self._check_ended()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in _parameters(self.optimizer):
            if isinstance(parameter.grad, FreedGradient):
                parameter.grad = None
        _ATTACHED.discard(self.optimizer)

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter {tuple(parameter.shape)}")

    def _hook_parameters(self) -> None:
        """Hooks parameters that have none yet: of new groups, or frozen until now."""
        for parameter in _parameters(self.optimizer):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                hook: Any = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
                self._hooks.append(hook(self._update))

    def _update(self, parameter: Tensor) -> None:
        """Takes the optimizer's step for one parameter, whose gradient is complete."""
        with self._lock:
            self._check_gradient(parameter)
            self._enter_backward()
            if parameter not in self._groups:
                return
            self._is_stepping = True
            try:
                with torch.no_grad(), DisableAutocast():
                    step_alone(self.optimizer, self._groups[parameter], parameter)
            finally:
                self._is_stepping = False
                self._updated[parameter] = parameter._version
            parameter.grad = FreedGradient(parameter)

    def _enter_backward(self) -> None:
        backward = current_backward()
        if backward in self._running:
            return
        if self._updated:
            self._check_dropped()
            raise self._unfinished("another backward began before step()")
        self._running.add(backward)
        groups = self.optimizer.param_groups
        self._groups = {p: group for group in groups for p in group["params"]}
        self._values = [_values(group) for group in groups]
        queue_callback(lambda: self._running.discard(backward))

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
        """Refuses to go on after a backward that raised."""
        if self._running:
            raise self._unfinished("it did not come to its end")

    def _check_dropped(self) -> None:
        """Refuses to go on after a backward whose gradients were dropped before a step."""
        if not all(isinstance(parameter.grad, FreedGradient) for parameter in self._updated):
            raise self._unfinished("zero_grad() was called before step()")

    def _unfinished(self, why: str) -> OptimizerError:
        names, total = self.updated, len([*_parameters(self.optimizer)])
        return OptimizerError(
            f"the last backward has updated {len(names)} of {total} parameters "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), but {why}. "
            f"Load weights and optimizer state from before it and call reset() of {HANDLE}"
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Has the optimizer's own step find the gradients that no backward has used."""
        if self._is_stepping:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise OptimizerError(
                "step(closure) runs the backward itself; call backward() and then step(), or "
                f"{REMOVE}"
            )
        self._check_finished()
        for parameter in _parameters(self.optimizer):
            if isinstance(parameter.grad, FreedGradient):
                if parameter not in self._updated:
                    raise OptimizerError(
                        f"step() was called twice after one backward, which has updated "
                        f"{self._name(parameter)}; call zero_grad() and backward() before it"
                    )
                parameter.grad = None
        # a step may call that of its base class, whose hooks are these, too
        self._stepped = [*self._updated]
        self._updated.clear()

    def _check_finished(self) -> None:
        """Refuses a step that would have found other numbers than the backward did."""
        self._check_ended()
        self._check_dropped()
        for parameter, version in self._updated.items():
            if version != parameter._version:
                raise self._unfinished(f"{self._name(parameter)} was changed before step()")
        if self._updated and self._values != list(map(_values, self.optimizer.param_groups)):
            raise self._unfinished(
                "a value of a parameter group, such as its learning rate, was changed before "
                "step(); change it before the backward"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_stepping:
            return
        for parameter in self._stepped:
            parameter.grad = FreedGradient(parameter)
        self._stepped.clear()
        self._sort_state()
        self._hook_parameters()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._check_ended()
        self._sort_state()

    def _sort_state(self) -> None:
        """Brings new state into the order of the parameters, in which a step of all makes it."""
        state = self.optimizer.state
        for parameter in _parameters(self.optimizer):
            if parameter in state and parameter not in self._sorted:
                state[parameter] = state.pop(parameter)
                self._sorted.add(parameter)


class _GroupTensor:
    """A tensor in a parameter group, such as a learning rate that a schedule writes in place.

    Its numbers are compared only if it was written since: to read them waits for its device.
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
    """Returns the values of a group, comparable with those that it has later."""
    return {
        name: _GroupTensor(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _check_wrappers(names: set[str]) -> None:
    """Refuses classes that combine gradients of several processes after the backward."""
    for name in names & {"DistributedDataParallel", "FullyShardedDataParallel"}:
        raise OptimizerError(
            f"{name} combines gradients of several processes when the optimizer has used them "
            f"already; use FSDP2 (fully_shard), or {STEP_AFTER}"
        )


def _check_forward(model: nn.Module, args: Any) -> None:
    """Refuses a forward whose gradients would not be the optimizer's, before any is made."""
    if DistributedDataParallel._active_ddp_module is not None:
        _check_wrappers({"DistributedDataParallel"})
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16:
        raise OptimizerError(
            "float16 autocast needs a GradScaler, which divides all gradients after the backward; "
            f"use bfloat16, or {REMOVE}"
        )
