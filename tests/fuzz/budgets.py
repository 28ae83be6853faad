"""Random programs by random budgets: none is exceeded, and every bit is that of plain training.

A budget lies between the least that a plan needs for the largest inputs and the baseline. A program
trains three steps on each of its sizes, one size after the other. What a step takes is what the
allocator hands out from the model's forward on, after a plan is made, to the end of the optimizer's
step, with what was there before.

A program trains the parameters that get gradients: a budget counts those of others, too, which
would hide by how much a step is above it. Where a forward is traced ahead all is known, and no step
may exceed the budget. Where the backward turns out to be inside of autocast, those from the third
one on may not, and where nothing is known ahead only bits are compared.

Not drawn: lines that take four rows alone, those whose state has the size of a batch, recurrent
layers and lines of a kernel for each row, which take long where there are many rows.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, UntypedStorage

import zoo
from tests.fuzz import lines as fuzz_lines, programs as fuzz_programs
from tests.fuzz.lines import LINES, WIDTH
from tests.fuzz.programs import (
    Block,
    Model,
    Program,
    Shared,
    is_limit,
    left_by,
    loss_of,
    programs,
)
from tests.training import assert_same, frozen
from zoo._torch import active_fake_mode
from zoo.api.plan import planner_for
from zoo.engine import devices
from zoo.engine.kernel_segments import Conductor
from zoo.errors import ZooError
from zoo.policy import decision
from zoo.profiling.tensor_spec import storages_of, tensors_in

# training steps on each size of the inputs
STEPS = 3
# a step may take so much of what was asked: predictions are as near
MOST = 1.001
SIZES = ((512,), (512, 256), (256, 512), (384, 512, 256))
AUTOCAST = ("nothing", "forward", "step")
SLOW = frozenset(
    {"lstm", "gru", "write stale rows", "write unbound", "write turned", "attend", "from a thread"}
)
OF_A_SIZE = frozenset({"instance norm", "carry", "compiled", "backward on a thread"})

# in warnings that a step may take more
WARNED = ("planned for without the bytes of loss=", "chosen by the costs of its steps")

sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False)
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


@dataclass(frozen=True)
class Budgeted:
    """A program, and the budget by which it trains.

    Attributes:
        share: where the budget lies between the least and the baseline.
        in_bytes: whether it is asked for in bytes, not as a share of the baseline.
        names_optimizer: whether SGD is named; otherwise AdamW trains, which is assumed.
        accumulates: whether a step has two backwards.
        autocast: what is inside of bfloat16 autocast.
        sizes: the rows of the inputs, one size after the other.
    """

    program: Program
    share: float
    in_bytes: bool
    names_optimizer: bool
    accumulates: bool
    autocast: str
    sizes: tuple[int, ...]


class Exceeded(AssertionError):
    """A step takes more than its budget."""


class Outcome(NamedTuple):
    """How a program kept to a budget: in which way, and in how many measured steps."""

    kind: str
    steps: int = 0


@functools.cache
def left_out() -> frozenset[str]:
    """Returns the lines that are not drawn."""
    found = {*SLOW, *OF_A_SIZE}
    torch.manual_seed(0)
    for name, line in LINES.items():
        if name in found:
            continue
        with rows_of(16):
            block = Block((), Shared(), "")
            one, other = torch.rand(2, 16, WIDTH, requires_grad=True).unbind()
            try:
                line(block, one * 1, other * 1)
            except Exception:
                found.add(name)
    return frozenset(found)


@contextlib.contextmanager
def rows_of(count: int) -> Iterator[None]:
    """Lets lines take so many rows."""
    modules = fuzz_lines, fuzz_programs
    with contextlib.ExitStack() as patched:
        for module in modules:
            patched.enter_context(mock.patch.object(module, "ROWS", count))
        yield


@st.composite
def budgeted(draw: st.DrawFn) -> Budgeted:
    """Draws programs and their budgets."""
    program = draw(programs(ways=("checkpoint",), left_out=left_out()))
    # of these a budget knows nothing, or nothing is planned
    program = dataclasses.replace(
        program, backward="once", around="nothing", between="nothing", steps_in_backward=False,
        fate=None, interrupt=None, offloads=False,
    )  # fmt: skip
    sizes = draw(st.sampled_from(SIZES))
    return Budgeted(
        program,
        draw(st.floats(0.02, 0.98)),
        draw(st.booleans()) or sizes[0] < max(sizes),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(AUTOCAST)),
        sizes,
    )


def check_budget(description: Budgeted) -> Outcome:
    """Trains a model plainly and by its budget; raises Exceeded, or where a bit differs."""
    plain = Training(description)
    plain.record()
    trained = plain.stepped()
    expected = Training(description, trained).record()
    if isinstance(expected[-1], str) or not trained:
        return Outcome("refused as plain")
    ahead = None
    with contextlib.suppress(ZooError):
        ahead = Training(description, trained).bounds()
    if ahead is None:
        asked, budget = None, description.share
    else:
        least, baseline = ahead
        asked = int(least + description.share * (baseline - least))
        # the share is rounded to bytes
        budget = asked if description.in_bytes else min((asked + 1) / baseline, 1.0)
    with _warnings_noted() as warnings:
        training = Training(description, trained, budget)
        try:
            found = training.record()
        except ZooError:
            # a budget below the least, which nothing tells ahead
            if asked is None:
                return Outcome("refused")
            raise
    if isinstance(found[-1], str) and is_limit(description.program, found[-1]):
        return Outcome("refused as documented")
    assert_same(found, expected)
    if asked is None:
        return Outcome("traced in a step")
    from_step = 2 if description.autocast == "step" else 0
    for number, taken in enumerate(training.taken):
        if number >= from_step and taken is not None and taken > MOST * asked + 1:
            text = "; ".join(warnings)
            if any(limit in text for limit in WARNED):
                return Outcome("exceeded with a warning")
            raise Exceeded(
                f"step {number} takes {taken:,} of {asked:,}, {taken / asked - 1:.2%} more; least "
                f"{least:,}, baseline {baseline:,}; all {training.taken}; {text}"
            )
    return Outcome("kept", sum(taken is not None for taken in training.taken))


class Training:
    """Training of a described model, plain or by a budget, and the bytes that its steps take."""

    def __init__(
        self,
        description: Budgeted,
        trained: Collection[str] | None = None,
        budget: int | float | None = None,
    ) -> None:
        self.description, self.budget = description, budget
        self.taken: list[int | None] = []
        self._seed()
        with rows_of(max(description.sizes)):
            self.model = Model(description.program)
        for name, parameter in self.model.named_parameters():
            if trained is not None and name not in trained:
                parameter.requires_grad_(False)
        make = sgd if description.names_optimizer else adamw
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters())
        if budget is not None:
            zoo.checkpoint(self.model, memory_budget=budget, **self._options())

    def _options(self) -> dict[str, Any]:
        named = {"optimizer": self.optimizer} if self.description.names_optimizer else {}
        return {"loss": loss_of, "accumulates": self.description.accumulates, **named}

    @staticmethod
    def _seed() -> None:
        torch.manual_seed(1)
        random.seed(0)

    def stepped(self) -> frozenset[str]:
        """Returns the names of the parameters that an optimizer has updated."""
        state = self.optimizer.state
        return frozenset(name for name, p in self.model.named_parameters() if p in state)

    def bounds(self) -> tuple[int, int]:
        """Returns the least that a plan needs for the largest inputs, and the baseline.

        Nothing may have been trained yet.

        Raises:
            ZooError: nothing can be planned ahead.
        """
        rows = max(self.description.sizes)
        # with a loss= no variable holds the outputs
        options = {"optimizer": adamw, "holds_outputs": False, **self._options()}
        autocast = self._autocast("forward", "step")
        with rows_of(rows), autocast:
            planner = planner_for(self.model, self.batch(rows), **options)
            return planner.lowest().peak, planner.baseline.peak

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, requires_grad=self.description.program.input_gradient)

    def record(self) -> list[Any]:
        """Trains; returns what each step leaves, at last the error that ended it."""
        record: list[Any] = []
        for number, rows in enumerate(itertools.chain(*([n] * STEPS for n in self.sizes))):
            self.model.shared.steps = number
            batch = self.batch(rows)
            try:
                with rows_of(rows):
                    loss = self._measured(batch)
            except Exception as error:
                if isinstance(error, ZooError) and not record:
                    raise
                return [*record, f"{type(error).__name__}: {error}"]
            record.append(frozen([loss, *left_by(self.model, batch)]))
        return record

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.description.sizes

    def _autocast(self, *ways: str) -> AbstractContextManager[Any]:
        """Returns autocast where the description has it in one of these ways."""
        if self.description.autocast in ways:
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def _step(self, batch: Tensor) -> Tensor:
        with self._autocast("step"):
            for _ in range(1 + self.description.accumulates):
                # an earlier batch would not be held
                batch.grad = None
                with self._autocast("forward"):
                    loss = loss_of(self.model(batch))
                loss.backward()
        self.optimizer.step()
        return loss

    def _measured(self, batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        if self.budget is None:
            return self._step(batch)
        before = self._resident(batch)
        with events_of_steps() as events:
            loss = self._step(batch)
        after = self._resident(batch)
        if not events:
            self.taken.append(None)
            return loss
        # the frees of what was there before are no events
        there = sum(size.nbytes() for key, size in before.items() if key in after)
        own = itertools.accumulate(size for *_, size in events[0])
        self.taken.append(there + max(own, default=0))
        return loss

    def _resident(self, batch: Tensor) -> dict[int, UntypedStorage]:
        shared = self.model.shared
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        owned = *self.model.parameters(), *self.model.buffers(), *gradients
        given = tensors_in((self.optimizer.state, batch, shared.held, shared.left))
        return {s._cdata: s for tensor in (*owned, *given) for s in storages_of(tensor)}


@contextlib.contextmanager
def events_of_steps() -> Iterator[list[Any]]:
    """Yields a list that gets the allocator's events from the first planned forward on.

    Before it a plan may be made, which measures kernels by the same profiler.
    """
    run: Callable[..., Any] = Conductor.run
    found: list[Any] = []
    own_process = os.getpid()
    with contextlib.ExitStack() as profiled:

        def measured(self: Conductor, function: Callable[[], Any]) -> Any:
            # in a forked process, and in the forward of a dry step, there is nothing to measure
            if not found and active_fake_mode() is None and os.getpid() == own_process:
                found.append(profiled.enter_context(devices.cpu_events()))
            return run(self, function)

        with mock.patch.object(Conductor, "run", measured):
            yield found


@contextlib.contextmanager
def _warnings_noted() -> Iterator[list[str]]:
    """Yields a list that gets what is logged as a warning."""
    noted: list[str] = []
    # each is logged once in a process
    decision._warn_of_costs.cache_clear()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zoo")
    level, log.level = log.level, logging.WARNING
    log.addHandler(handler)
    try:
        yield noted
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
