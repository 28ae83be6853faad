"""Dry steps: training steps of a traced model on the tensors of its trace, by a plan.

They run where the trace ran: in the forked process, or on the copies. Nothing of the model's size
is allocated. The log of a step says what it would take (`planner.dry_step`); since the engine runs
it, all that the engine does is in it.
"""

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from zoo._torch import Operator, PyTree, replaced
from zoo.engine.devices import PackedState, RandomStream, SetAsideState
from zoo.engine.host_memory import HostMemory
from zoo.engine.kernel_segments import Conductor, PlannedBranch
from zoo.engine.segments import thread
from zoo.engine.storages import copies
from zoo.engine.tensor_state import detached
from zoo.errors import ZooError
from zoo.invocation import Invocation, kernel_device
from zoo.loss import Loss
from zoo.planner.dry_step import AutocastLeft, DryStep, OnHost, Row
from zoo.planner.step_events import StepEvents
from zoo.profiling.cast_cache import CastCache, autocast_left, caches_casts
from zoo.profiling.cudnn_recurrent import dropout_state_made
from zoo.profiling.step_ledger import StepLedger
from zoo.profiling.step_mode import roots_of
from zoo.profiling.tensor_spec import CallKey, tensors_held_by


class NotFollowedError(ZooError):
    """A forward does not follow its plan in a second step, as one that counts its calls."""


@dataclass
class DrySteps:
    """The traced model, and what its dry steps need.

    Attributes:
        model, invocation: on the tensors of the trace.
        events: of the traced forward and its loss.
        dispatched, positions: as in `StepRecorder`. On fake tensors autograd regenerates written
            views by operators that real ones do not dispatch.
        kernels: the numbers of the kernels of the trace, as in `StepLedger`.
        running: the modes of a traced forward, and those of its backward.
        earlier: returns the storages that the program holds of the step before.
        constants: storages that the functions of the step hold, such as targets.
        has_dropout_state: whether the step draws by the state of cuDNN's dropout, which a program
            makes in its first step.
        is_forked: whether this process has been forked for the trace.
    """

    model: nn.Module
    invocation: Invocation
    loss: Loss
    events: StepEvents
    dispatched: Sequence[Operator]
    positions: Sequence[int]
    kernels: dict[CallKey, int]
    running: Callable[[], AbstractContextManager[object]]
    in_backward: Callable[[], AbstractContextManager[object]]
    earlier: Callable[[], list[UntypedStorage]]
    constants: Sequence[UntypedStorage]
    has_dropout_state: bool
    is_forked: bool

    def log(self, step: DryStep) -> list[Row]:
        """Runs a step and returns its log.

        Raises:
            NotFollowedError: the forward calls other operators than the traced one.
        """
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.running())
            casts = None
            if self.is_forked:
                if self.events.casts:
                    # each training step enters autocast anew; a second forward inside of it finds
                    # the casts of the first, here as in the trace
                    torch.clear_autocast_cache()
            elif caches_casts():
                # here autocast has the program's casts in its cache, and those of the trace
                casts = entered.enter_context(CastCache().in_place_of_torchs())
            ledger = StepLedger(self.kernels, shares_casts=casts is not None)
            ledger.note_owned(self.model, self.invocation.tensors, self.constants)
            if self.has_dropout_state:
                ledger.note_storage(dropout_state_made(kernel_device(self.model)))
            ledger.note_earlier(self.earlier())
            self.earlier = ledger.remaining
            entered.enter_context(_resizing(ledger))
            entered.enter_context(_keeping_states(ledger))
            entered.enter_context(replaced(copies, "note", ledger.note_storage))
            host = HostMemory() if step.offloads else None
            with ledger:
                outputs = self._forward(step, ledger, casts or contextlib.nullcontext(), host)
                ledger.targets = []
                loss = self.loss(outputs)
            targets, ledger.targets = ledger.targets, None
            tensors = tensors_held_by(outputs)
            # outputs themselves, since a replay takes the original of a tensor that exists; not the
            # graph of the loss, whose saved tensors no hook frees
            held = [*(tensors if step.holds_outputs else []), *map(detached, targets)]
            held += [] if loss is None else [detached(loss)]
            ledger.note_returned(held)
            roots = roots_of(tensors, loss)
            # from here on only the graph holds them
            del outputs, loss, tensors
            entered.enter_context(self.in_backward())
            if step.leaves_autocast:
                ledger.note(AutocastLeft())
                if self.is_forked:
                    torch.clear_autocast_cache()
                elif casts is not None:
                    casts.forget()
                entered.enter_context(autocast_left(kernel_device(self.model)))
            attributes = ledger.run_backward(roots)
            # with what the program holds now
            log, ledger.rows = ledger.rows, []
            if host is not None:
                log.append(OnHost(host.peak))
            del held, attributes
        return log

    def _forward(
        self,
        step: DryStep,
        ledger: StepLedger,
        inside: AbstractContextManager[object],
        host: HostMemory | None,
    ) -> PyTree:
        """Runs the forward by the plan; within it a mode may be `inside` of the engine's."""
        count = self.events.model_operators
        end = self.positions[count] if count < len(self.positions) else len(self.dispatched)
        at = [*self.positions[:count], end]
        branch = PlannedBranch(
            self.dispatched[:end],
            [at[cut] for cut in step.cuts],
            step.plan,
            {visit: at[index] for visit, index in self.events.visits.items()},
            offloads=step.offloads,
            has_backward=self.events.has_backward,
        )
        conductor = Conductor([branch], ledger.hooks(), host)
        ledger.operator = functools.partial(_operator_of, conductor, at)
        # what only fake tensors dispatch
        others = {*range(end)}.difference(at)

        def regenerates(operator: Operator) -> bool:
            index = conductor.index - 1
            is_here = thread.conductor is conductor and not thread.replaying
            return is_here and index in others and self.dispatched[index] is operator

        ledger.regenerates = regenerates

        def forward() -> PyTree:
            with inside:
                return self.invocation.on(self.model)

        outputs = conductor.run(forward)
        if conductor.lost:
            raise NotFollowedError("its forward calls other operators in its second step")
        return outputs


def _operator_of(conductor: Conductor, positions: Sequence[int]) -> int:
    """Returns the number of the operator of a forward that runs; behind them that of the loss."""
    index = conductor.index - (thread.conductor is conductor)
    return max(bisect.bisect_right(positions, index) - 1, 0)


@contextlib.contextmanager
def _keeping_states(ledger: StepLedger) -> Iterator[None]:
    """Notes in a ledger the states of random streams that are kept on this thread.

    The engine keeps some, and torch's own checkpointing one for each call: no operator makes them.
    """
    pack, set_aside = PackedState.__init__, SetAsideState.__init__
    read: Callable[[], Tensor] = torch.get_rng_state
    own_thread = threading.get_ident()

    def packed(self: PackedState, state: Tensor, device: torch.device) -> None:
        pack(self, state, device)
        if threading.get_ident() == own_thread:
            ledger.note_state(self.words)

    def put_aside(self: SetAsideState, stream: RandomStream) -> None:
        set_aside(self, stream)
        if self.own is None and threading.get_ident() == own_thread:
            ledger.note_state(self.state)

    def noted() -> Tensor:
        state = read()
        if threading.get_ident() == own_thread:
            ledger.note_state(state)
        return state

    with (
        replaced(PackedState, "__init__", packed),
        replaced(SetAsideState, "__init__", put_aside),
        replaced(torch, "get_rng_state", noted),
    ):
        yield


def _resizing(ledger: StepLedger) -> AbstractContextManager[object]:
    """Notes in a ledger storages whose memory is freed, or allocated anew, by another way."""
    resize: Callable[[UntypedStorage, int], UntypedStorage] = UntypedStorage.resize_
    own_thread = threading.get_ident()

    def resized(storage: UntypedStorage, size: int) -> UntypedStorage:
        result = resize(storage, size)
        if threading.get_ident() == own_thread:
            ledger.note_resized(storage)
        return result

    return replaced(UntypedStorage, "resize_", resized)
