"""`zoo.make_graphed_step`: a whole training step as a CUDA graph, guarded and audited.

`torch.cuda.make_graphed_callables` captures a forward and a backward, and leaves it to the program
to notice when they no longer hold. Here all that the step does is one graph. Each call looks first
at what can be named (`guards`); now and then one runs the step itself, and compares (`audit`):

    call      kind of batch      Python around it         the step
    1, 2, 3   new                                         runs eagerly, and is observed
    4         the same           as in the last calls     is captured, then replayed
    5         the same           the same                 is replayed: no Python, a copied batch
    6         the same           another learning rate    runs eagerly, later captured anew
    n         the epoch's last   the same                 runs eagerly, as it is rare
    8, 9      the same           the same                 runs eagerly, and is compared
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zoo._torch import PyTree, is_traceable_wrapper_subclass
from zoo.cuda_graphs.audit import AuditSchedule, Ranks
from zoo.cuda_graphs.batch import BatchKind, check_batch, detached, in_own_memory, own_outputs
from zoo.cuda_graphs.capture import CapturedStep, DeviceGraphs, Pool, graphs_on, reserved_bytes
from zoo.cuda_graphs.guards import Guards
from zoo.cuda_graphs.step_observer import Observation
from zoo.errors import ArgumentError, GraphError, shortened
from zoo.invocation import Invocation, device_of
from zoo.units import format_bytes

# eager calls of a kind before a capture; the second is the first that begins with the optimizer's
# state, the third shows that nothing changes from one to the next
WARM_UPS = 3
# as torch asks for its DistributedDataParallel, which sets up its buckets meanwhile
WARM_UPS_OF_DDP = 11
# a kind that is less than one in so many calls runs eagerly
RARE = 16
# graphs and kinds that are kept, the least recently used is dropped first
MOST_GRAPHS, MOST_KINDS = 8, 64
# ways in which calls of a kind may begin that are remembered, as those of micro-batches
MOST_TRIALS = 4
# calls beyond the warm-ups that each change something until their kind counts as unstable; of so
# many later calls two in a row are looked at
PATIENCE, LOOK_EVERY = 6, 32
CHANGED = """{} is no longer what its CUDA graph does, in call {}: {}. This call is right, and the \
next ones run eagerly until they are captured anew. Go back to what was saved before; keep what \
changes in a tensor on the device, pass it with the batch, or call reset() after a change"""
_log = logging.getLogger("zoo")


@dataclass
class Kind:
    """The calls with batches of a kind.

    Attributes:
        trials: the latest eager calls, of which no two began alike.
        obstacles: how many of the latest calls met one: one that plans, say, counts for nothing.
        changing: why the latest call could not be captured.
        misses: how many could not since the latest capture.
    """

    calls: int = 0
    trials: deque[Observation] = field(default_factory=lambda: deque(maxlen=MOST_TRIALS))
    obstacles: int = 0
    changing: str = ""
    misses: int = 0


class GraphedStep:
    """A training step that is replayed as a CUDA graph.

    Attributes:
        eager, captures, replays: how many calls ran eagerly, captured a graph, replayed one.
        audits: how many calls ran eagerly in the place of a replay, and were compared with it.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        check_every: int | None = None,
    ) -> None:
        self.step, self.models, self.optimizers = step, models, optimizers
        self.eager = self.captures = self.replays = self.audits = self._calls = 0
        self.check_every, self._ranks = check_every, Ranks(models, check_every)
        self._warm_ups = WARM_UPS_OF_DDP if self._ranks.group is not None else WARM_UPS
        self._name = getattr(step, "__name__", type(step).__name__)
        self.reset()
        self._is_warned = False
        self._check_program()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains one step; returns what the step returns, in tensors of its own.

        Raises:
            GraphError: a graph cannot do what the step does, and nothing of this call has run; or
                an audit has noticed a change, and what the step returns is in `result`.
        """
        batch, device = Invocation(args, kwargs), device_of(self.models[0])
        graphs = graphs_on(device)
        if graphs is None:
            self.eager += 1
            return detached(batch.on(self.step))
        check_batch(batch, device)
        if torch.is_autocast_enabled(device.type):
            raise GraphError(
                f"{self._name} is called under autocast, whose casts of weights would outlive the "
                "step; enter torch.autocast inside of the step"
            )
        self._calls += 1
        is_shared = self._ranks.are_many and self._ranks.schedule.is_due()
        outputs, difference = self._train(graphs, batch, is_shared)
        if is_shared:
            difference = self._ranks.learn(difference, self.captures, device)
        if difference is not None:
            self._graphs.clear()
            for kind in self._kinds.values():
                kind.trials.clear()
            raise GraphError(CHANGED.format(self._name, self._calls, difference), result=outputs)
        return outputs

    def _train(
        self, graphs: DeviceGraphs, batch: Invocation, is_shared: bool
    ) -> tuple[PyTree, str | None]:
        """Trains one step; returns what it returns, and how it differed from its graph."""
        if torch.is_anomaly_enabled():
            # which looks at each gradient, as no replay does
            self.eager += 1
            return own_outputs(graphs.run_eagerly(functools.partial(batch.on, self.step))), None
        described = BatchKind.of(batch)
        kind = self._kinds[described] = self._kinds.pop(described, Kind())
        kind.calls += 1
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        alike = (graph for graph in reversed(self._graphs) if graph.kind == described)
        captured = next((graph for graph in alike if graph.state.change() is None), None)
        if captured is not None:
            if is_shared if self._ranks.are_many else captured.schedule.is_due():
                self.audits += 1
                return captured.audit(graphs, in_own_memory(batch), self._calls)
        elif (trial := self._trial_to_capture(kind)) is not None:
            captured = self._capture(graphs, kind, trial, batch)
        if captured is None:
            return own_outputs(self._run_eagerly(graphs, kind, in_own_memory(batch))), None
        self.replays += 1
        self._graphs.sort(key=lambda graph: graph is captured)
        return captured.replay(batch), None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has graphs of its own, which it captures anew."""
        return vars(self) | {"_kinds": {}, "_graphs": [], "_pool": None}

    def reason(self) -> str:
        """Returns why calls ran eagerly that were not the first ones; '' if none did."""
        if len(self._kinds) > 1:
            return f"the batches differ in shapes or values, of which there are {len(self._kinds)}"
        return "".join(kind.changing for kind in self._kinds.values())

    def reset(self) -> None:
        """Drops all graphs and their memory; the next calls run eagerly, as the first ones did."""
        # the most recently used last
        self._kinds: dict[BatchKind, Kind] = {}
        self._graphs: list[CapturedStep] = []
        self._pool: Pool | None = None

    def _trial_to_capture(self, kind: Kind) -> Observation | None:
        """Returns the eager call that began as this one does, if a graph of it would be right."""
        if kind.calls <= self._warm_ups or not kind.trials:
            return None
        if kind.obstacles > 1:
            # so that a program that goes on after a change is looked at anew
            self._kinds.popitem()
            obstacle = kind.trials[-1].obstacle
            raise GraphError(f"{self._name} cannot be a CUDA graph: {obstacle}")
        if kind.calls * RARE < sum(each.calls for each in self._kinds.values()):
            return None
        trials = (trial for trial in reversed(kind.trials) if trial.is_repeated)
        return next((trial for trial in trials if trial.state.change() is None), None)

    def _capture(
        self, graphs: DeviceGraphs, kind: Kind, trial: Observation, batch: Invocation
    ) -> CapturedStep:
        self._check_program()
        before = reserved_bytes(device := device_of(self.models[0]))
        # torch 2.11 captures no more into the pool of a capture that has failed
        pool, self._pool = self._pool or graphs.pool(), None
        captured = CapturedStep(
            graphs, self.step, batch, state=self._state(), eager=trial, pool=pool
        )
        captured.right, captured.schedule = self._calls, AuditSchedule(self.check_every)
        self._pool = pool
        self._graphs = [*self._graphs, captured][-MOST_GRAPHS:]
        kind.misses, self.captures = 0, self.captures + 1
        kind.trials.clear()
        shapes = shortened([tuple(tensor.shape) for tensor in batch.tensors])
        text = "%s: captured a CUDA graph for %s; it takes %s, and eager steps, as audits are, %s"
        sums = map(format_bytes, (reserved_bytes(device) - before, before))
        _log.info(text, self._name, shapes, *sums)
        return captured

    def _state(self) -> Guards:
        parts = self.models, self.optimizers
        model, optimizer = (each[0] if len(each) == 1 else each for each in parts)
        # what is walked first names what others share with it
        roots = {"model": model, "optimizer": optimizer, self._name: self.step}
        return Guards(roots, device_of(self.models[0]))

    def _run_eagerly(self, graphs: DeviceGraphs, kind: Kind, batch: Invocation) -> PyTree:
        self.eager += 1
        run = functools.partial(graphs.run_eagerly, functools.partial(batch.on, self.step))
        is_unstable = kind.misses >= self._warm_ups + PATIENCE
        if is_unstable and kind.misses % LOOK_EVERY > 1:
            kind.misses += 1
            return run()
        changes = [(trial.state.change(), trial) for trial in reversed(kind.trials)]
        earlier = next((trial for change, trial in changes if change is None), None)
        trial = Observation(run, self._state(), batch.tensors)
        # anew in each call: another may read what an earlier one has replaced unread
        trial.state.forget({location.name for location in trial.replaced})
        if earlier is None:
            kind.changing = f"{changes[0][0]} changes from call to call" if changes else ""
        else:
            kind.trials.remove(earlier)
            kind.changing = earlier.difference(trial) or ""
            trial.is_repeated = not kind.changing
        kind.trials.append(trial)
        kind.obstacles = 0 if trial.obstacle is None else kind.obstacles + 1
        kind.misses += not trial.is_repeated
        if is_unstable and kind.changing and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%s runs eagerly, not as a CUDA graph: %s. Keep what changes in tensors on the "
                "device that are written in place, such as lr=torch.tensor(0.1, device=...) of an "
                "optimizer with capturable=True or fused=True, or pass it with the batch",
                self._name,
                kind.changing,
            )
        return trial.take_outputs()

    def _check_program(self) -> None:
        """Refuses what no graph can do, by its name, where the device has graphs."""
        devices = {p.device for model in self.models for p in model.parameters()}
        if all(graphs_on(device) is None for device in devices):
            return
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            whole = "and a graph is one of kernels on one device; move all of it there"
            raise GraphError(f"the model is on {names}, {whole}")
        for optimizer in self.optimizers:
            if not all(group.get("capturable", True) for group in optimizer.param_groups):
                name = type(optimizer).__name__
                raise GraphError(
                    f"{name} counts its steps on the host, which replays would not do; make it "
                    f"with {name}(..., capturable=True)"
                )
        for model in self.models:
            if any(map(is_traceable_wrapper_subclass, model.parameters())):
                raise GraphError(
                    f"parameters of {type(model).__name__} are spread over processes, which gather "
                    "them into memory that changes from step to step; use DistributedDataParallel"
                )
            if any(getattr(module, "find_unused_parameters", False) for module in model.modules()):
                raise GraphError(
                    "DistributedDataParallel(find_unused_parameters=True) looks for them on the "
                    "host in each step, which replays would not do; leave it out"
                )


def has_graphs(device: torch.device) -> bool:
    """Returns whether steps on a device are captured, not run as they are."""
    return graphs_on(device) is not None


def check_replays(graphed: GraphedStep, steps: int) -> None:
    """Raises GraphError if fewer than `steps` of the calls were replays."""
    if graphed.replays < steps:
        raise GraphError(
            f"{graphed.replays} of {steps} training steps were replays of a CUDA graph, and others "
            f"ran eagerly: {graphed.reason()}. Keep that as it is from step to step, or leave "
            "cuda_graph out"
        )


def make_graphed_step(
    step: Callable[..., Any],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    check_every: int | None = 256,
) -> GraphedStep:
    """Makes a CUDA graph of a whole training step.

        train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
        for images, labels in batches:
            losses.append(train(images.cuda(), labels.cuda()))

    Each call is one training step: eager, captured or replayed, as docs/cuda-graphs.md says. A
    change that can be named captures anew; any other that changes a kernel or a number is noticed
    by an audit, a call that runs eagerly and is compared. Eight graphs are kept, in one pool of
    memory. Random numbers advance as in eager steps. Without graphs the step runs as it is.

    Args:
        step: takes a batch on the device and does all of a training step.
        model: the model that it trains, or several.
        optimizer: the optimizer that it steps, or several.
        check_every: calls between two audits, on average; fewer after a capture, None for none.

    Raises:
        ArgumentError: no function, module, optimizer or number of calls.
        GraphError: by an audit, with what its step returned as `result`. Or now, or before anything
            of a call has run: the step reads numbers out of tensors (`.item()`, a GradScaler),
            draws random numbers on the host or changes Python values; an optimizer without
            `capturable=True`; a batch on another device, with objects, or that requires gradients.
    """
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not callable(step):
        raise ArgumentError(f"make_graphed_step needs a function of a batch; got {shortened(step)}")
    for value, kind in ((models, nn.Module), (optimizers, Optimizer)):
        for each in value:
            if not isinstance(each, kind):
                raise ArgumentError(
                    f"make_graphed_step needs a torch {kind.__name__}, or several; got "
                    f"{shortened(each)}"
                )
    if not models:
        raise ArgumentError("make_graphed_step needs the model that the step trains; got none")
    if check_every is not None and not (type(check_every) is int and check_every >= 1):
        raise ArgumentError(
            "check_every is a number of calls, at least 1, from one audit to the next, or None for "
            f"no audits; got {shortened(check_every)}"
        )
    return GraphedStep(step, models, optimizers, check_every)
