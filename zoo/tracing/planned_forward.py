"""The patched `forward` of a model and of its blocks while a plan is in force.

It is an instance attribute; nothing else of a module changes: class, names, hooks, state dict. The
original forward runs, once and as it is written. The patch opens and closes segments between its
kernels (`engine.kernel_segments`), by a plan for the operators that were traced:

    first forward with gradients   traced while it runs block by block, then planned
    every later one                by the plan, as long as the operators are the same
    other operators, or more       by another known plan that fits, else block by block; traced for
      bytes than a budget allows     the next such forward, unless many paths were
    larger arguments, a budget     by a known plan, if a dry step keeps to the budget; else planned
    parameters without a size      block by block; the next forward counts as the first
    the planning fails             an error in the first step; later block by block, with a warning
    no plan keeps to the budget    an error in the first step; later the plan of the least peak

For a budget or a user's own plan, and for zoo's own models, the first forward is traced ahead
instead. A deep copy or a pickle keeps the option and plans anew; shallow copies, such as those of
`nn.DataParallel`, go by the plans of the original. If `torch.compile` compiles the model, each
block is recomputed.
"""

import contextlib
import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parameter import is_lazy

from zoo._torch import (
    Args,
    FakeTensor,
    Kwargs,
    Operator,
    PyTree,
    active_fake_mode,
    compile_time,
    compiler_callback,
    is_exporting,
    is_profiling,
    queue_callback,
    sequence_number,
)
from zoo.engine.host_memory import HostMemory
from zoo.engine.kernel_segments import (
    Conductor,
    PlannedBranch,
    conducts,
    fastest_branch,
    reason_for_plain,
)
from zoo.engine.operator_effects import resolved
from zoo.engine.recompute import recompute
from zoo.engine.replay import without_modes
from zoo.engine.segments import thread
from zoo.engine.sharded import is_spread
from zoo.engine.tensor_state import is_dense
from zoo.errors import ArgumentError, BudgetError, PlanError
from zoo.invocation import InputSpec, Invocation, needs_gradients
from zoo.models.model import Model
from zoo.planner.event_costs import Outline
from zoo.planner.plan import Plan, RoomyPlan
from zoo.planner.schemes import SegmentsError
from zoo.policy.decision import SLOWER, known_plan_for, plans_for, step_of
from zoo.policy.goal import Goal
from zoo.policy.judge import EITHER, INSIDE, OUTSIDE, Sides
from zoo.policy.training_step import CountedStep, TrainingStep
from zoo.profiling.cast_cache import caches_casts
from zoo.profiling.isolation import PLANNING, can_fork
from zoo.profiling.optimizer_memory import OptimizerBytes
from zoo.profiling.progress import shown
from zoo.profiling.tensor_spec import tensors_held_by
from zoo.tracing.forward_patch import BlockMark, Patch, is_compiled
from zoo.tracing.isolated_trace import (
    RealStep,
    RunsLaterError,
    StepTrace,
    TraceError,
    step_trace_of,
)
from zoo.tracing.partition import partition, paths_of
from zoo.tracing.pending_forwards import LOOKS, PendingForwards, nodes_of
from zoo.tracing.plan_cache import EAGER, InputKind, LastForward, PlanCache
from zoo.tracing.switches import check_switches
from zoo.units import exact_bytes, format_bytes

# the fewest bytes of an output of which a warning says that a variable holds it
LEAST_HELD = 1 << 20
_log = logging.getLogger("zoo")


class PlannedBlock(BlockMark):
    """The forward of a block of a model with a plan, which also runs where no plan is in force."""

    def __init__(self, module: nn.Module, path: str, notices: "Notices") -> None:
        super().__init__(module, path)
        self.notices = notices

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the block."""
        if is_exporting():
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            # a block that is compiled alone is not recomputed
            if self.notices.is_compiled:
                return recompute(self.__wrapped__, *args, **kwargs)
            return self.__wrapped__(*args, **kwargs)
        forward = self.of_copy(sys._getframe(1))
        if forward is None and thread.conductor is None:
            return self._run_alone(args, kwargs)
        return self._run(forward or self.__wrapped__, args, kwargs)

    def _run_alone(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Runs the block where no plan is in force; warns if another method trains it.

        It is recomputed if the model's forward has returned already, as one that yields does.
        """
        if self.notices.runs_later and conducts():
            return recompute(self.__wrapped__, *args, **kwargs)
        before = sequence_number()
        outputs = self.__wrapped__(*args, **kwargs)
        is_trained = sequence_number() != before and conducts()
        # frames are walked until the warning is logged, not at each later call
        if is_trained and "outside" not in self.notices.logged and not self._is_in_forward():
            self.notices.warn(
                "outside",
                "%s runs its block %s in another method than its forward, where no plan is in "
                "force: call the model itself, give its forward the work of that method, or put "
                "zoo.checkpoint on the module in it whose forward is called",
                self.path,
            )
        return outputs

    def _is_in_forward(self) -> bool:
        """Returns whether the model's forward runs as it is written; it may begin in no_grad."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is PatchedForward._run.__code__:
                return frame.f_locals["self"].notices is self.notices
            frame = frame.f_back
        return False


@dataclass
class Notices:
    """Warnings about a model, `name`; each is logged once."""

    name: str
    logged: set[str] = field(default_factory=set)
    # whether the forward of the model is being compiled
    is_compiled: bool = False
    # whether the blocks run when the forward has returned
    runs_later: bool = False

    def warn(self, what: str, text: str, *values: object) -> None:
        """Logs a warning, whose first value is the model's name."""
        if what not in self.logged:
            self.logged.add(what)
            _log.warning(text, self.name, *values)


class TracedForward(NamedTuple):
    """A traced forward: its arguments, their spec, the trace and the operators without the loss."""

    invocation: Invocation
    spec: InputSpec
    trace: StepTrace
    operators: Sequence[Operator]


class PatchedForward(Patch):
    """A model's forward that runs by a plan where gradients are recorded, in any mode.

    Under `no_grad`, `torch.func`, `torch.export` or a tracer, inside another segment, and where
    nothing needs a gradient, the original forward runs.

    Attributes:
        goal: what the plans are to reach.
        training: how the program trains the model.
        patterns: the modules that the user named as blocks.
        latest: the branch that the last forward ran by, or that was planned after it; None before
            the first.
        traced: the forward that was planned for last, if `keeps_trace`: other options can be
            planned for it.
    """

    def __init__(
        self,
        module: nn.Module,
        goal: Goal,
        training: TrainingStep,
        patterns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(module)
        self.goal, self.training, self.patterns = goal, training, patterns
        self.notices = Notices(type(module).__name__)
        blocks = {path: module.get_submodule(path) for path in paths_of(module, patterns)}
        # the kernels of a compiled block are invisible
        self.marks = [
            PlannedBlock(block, path, self.notices)
            for path, block in blocks.items()
            if not is_compiled(block)
        ]
        if blocks and not self.marks:
            self.notices.warn(
                "compiled blocks",
                "all blocks of %s are compiled, and what a compiled block saves is kept: leave the "
                "blocks that a plan shall recompute uncompiled",
            )
        self.cache = self._new_cache()
        # of a budget in bytes; a copy has its own
        self.pending: PendingForwards | None = None
        # the structure of the arguments for which an optimizer's bytes were counted, and these
        self.counted: tuple[object, OptimizerBytes | None] = None, None
        offload = goal.offload
        # a copy or a pickle has host memory of its own
        self.host = HostMemory(offload.host_budget) if offload.is_on else None
        self.latest: PlannedBranch | None = None
        self.keeps_trace = False
        self.traced: TracedForward | None = None
        # whether a step ran: from then on a failed planning is a warning, and ends no training
        self.has_run = False
        # whether gradients came from neither parameters nor arguments
        self.has_hidden_gradients = False
        # whether backwards run outside of an autocast that is around the forward; None before one
        # has run
        self.leaves_autocast: bool | None = None

    def _new_cache(self) -> PlanCache:
        return PlanCache(1.0) if self._is_judged else PlanCache()

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {
            "cache": self._new_cache(),
            "pending": None,
            "counted": (None, None),
            "latest": None,
            "traced": None,
            "has_run": False,
            "leaves_autocast": None,
        }

    def install(self) -> None:
        """Installs this, and the marks of the blocks."""
        for mark in self.marks:
            mark.install()
        super().install()

    def uninstall(self) -> None:
        """Restores the original forwards of the model and of its blocks."""
        super().uninstall()
        for mark in self.marks:
            mark.uninstall()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the forward: by the plan where gradients are recorded, else as it is written."""
        if torch.compiler.is_compiling():
            if is_exporting():
                return self.__wrapped__(*args, **kwargs)
            if self.marks:
                if self.goal.binds_first_step:
                    compile_time()(_warn_of_blocks_alone)
                # the marks of the blocks recompute them
                self.notices.is_compiled = True
                outputs = self.__wrapped__(*args, **kwargs)
                self.notices.is_compiled = False
                return outputs
            uncompiled = torch.compiler.disable(self._run_uncompiled)
            return uncompiled(args, kwargs)
        if is_exporting():
            return self.__wrapped__(*args, **kwargs)
        forward = self.of_copy(sys._getframe(1))
        run = self._run
        if compiler_callback() is not None:
            # the compiler gave up the frame that calls this, and is to leave the planner alone
            run = torch.compiler.disable(self._run)
            if not self.marks:
                self._warn_of_compiler()
        return run(Invocation(args, kwargs), forward or self.__wrapped__, forward is not None)

    def _run_uncompiled(self, args: Args, kwargs: Kwargs) -> PyTree:
        self._warn_of_compiler()
        return self._run(Invocation(args, kwargs), self.__wrapped__, is_copy=False)

    def _warn_of_compiler(self) -> None:
        self.notices.warn(
            "compiled",
            "%s has no blocks, and runs uncompiled: a plan takes the kernels of the forward apart, "
            "which a compiler hides. Take the plan off with zoo.uncheckpoint to compile it",
        )

    def _run(self, invocation: Invocation, forward: Callable[..., PyTree], is_copy: bool) -> PyTree:
        """Runs the original forward, of the module or of a copy that shares this."""
        if not conducts() or self.module() is None:
            if (reason := reason_for_plain()) is not None:
                self.notices.warn("plain", "%s runs without its plan: %s", reason)
            return invocation.on(forward)
        if not self._is_trained(invocation):
            before = sequence_number()
            outputs = invocation.on(forward)
            self.has_hidden_gradients = sequence_number() != before
            return outputs
        pending = None if is_copy else self._pending()
        if pending is not None:
            self._update_training(pending)
        outputs = self._run_planned(invocation, forward, is_copy)
        self.has_run = True
        if pending is not None:
            held, casts = (self.latest.holds, self.latest.casts) if self.latest else (0, 0)
            pending.add(tensors_held_by(outputs), held, casts)
            # a plan that was made for another device predicts nothing here
            if pending.most_before >= 0 and self.latest is not None and self.latest.peak:
                self._watch_taken(pending, outputs, self.latest.peak)
        # a backward inside may follow ones outside; a plan for inside fits both
        if self.leaves_autocast is not False and self.goal.is_bounded and caches_casts():
            self._watch_autocast(outputs)
        if not self.training.holds_outputs:
            self._watch(outputs)
        return outputs

    def _pending(self) -> PendingForwards | None:
        if self.pending is None and self.goal.is_for_bytes:
            budget = self.goal.memory_budget
            in_bytes = budget if isinstance(budget, int) else 0
            of_report = 0 if self.goal.report is None else self.goal.report.budget or 0
            self.pending = PendingForwards(self.module(), in_bytes, of_report)
        return self.pending

    def _update_training(self, pending: PendingForwards) -> None:
        """Updates what a step is planned with, as a forward begins; drops plans if it changed."""
        running, training = pending.begin(), self.training
        if running > training.forwards:
            then = "The next ones are planned for as many as it runs, which forwards= says ahead"
            if not self._is_judged:
                then = "Plan for as many with forwards= of zoo.plan"
            self.notices.warn(
                f"more than {training.forwards} forwards",
                "%s runs %d forwards or more before a backward, and its budget was planned for %d: "
                "this step may take more. %s",
                running,
                training.forwards,
                then,
            )
        if not (self._is_judged and pending.begins_step):
            return
        found = replace(training, forwards=pending.usual(training.forwards), after=pending.after)
        if pending.budget:
            found = replace(found, others=pending.others(training.others), unseen=pending.unseen)
        found = found.in_data_parallel(self.module())
        if found != training:
            self.training, self.cache = found, self._new_cache()
            pending.note_planned()
            if self.has_run:
                _log.info(
                    "%s: planned again, since a step holds other memory than before",
                    self.notices.name,
                )

    def _watch_taken(self, pending: PendingForwards, outputs: PyTree, predicted: int) -> None:
        """Has the end of the backward compare what the step has taken with what was predicted."""
        known = pending.most_before, pending.unseen, predicted
        compare = functools.partial(self._note_taken, *known)
        for node in nodes_of(tensors_held_by(outputs)):
            node.register_prehook(lambda _: queue_callback(compare))

    def _note_taken(self, before: int, unseen: int, predicted: int) -> None:
        """Warns if a step took more than its budget; the next ones are planned for what is left."""
        pending = self.pending
        taken = None if pending is None else pending.most_since(before)
        # of a plan that breaks the budget a warning was logged
        if taken is None or pending is None or not predicted <= pending.limit < taken:
            return
        pending.unseen = unseen + taken - predicted
        then = "The next steps are planned for what is left"
        if not pending.budget:
            then = "zoo.checkpoint(model, memory_budget=...) plans the next steps for what is left"
        self.notices.warn(
            "taken",
            "a training step of %s took %s, and its budget is %s: %s were predicted, and not what "
            "was not known ahead, such as tensors that the training loop holds, or other models. "
            "%s",
            exact_bytes(taken),
            exact_bytes(pending.limit),
            exact_bytes(predicted),
            then,
        )

    def _watch_autocast(self, outputs: PyTree) -> None:
        """Has the backward tell whether it runs inside of an autocast, which holds casts then."""
        for node in nodes_of(tensors_held_by(outputs)):
            node.register_prehook(self._note_autocast)

    def _note_autocast(self, _: object) -> None:
        leaves = not caches_casts()
        if leaves == self.leaves_autocast or self.leaves_autocast is False:
            return
        had_left, kinds = self.leaves_autocast, [*self.cache.kinds.values()]
        self.leaves_autocast = leaves
        for kind in kinds if leaves else ():
            # the faster ones first; those of other paths stay
            others = [branch for branch in kind.branches if branch not in kind.outside]
            kind.branches, kind.outside = [*kind.outside, *others], []
        if not leaves and (had_left or not all(kind.fits_autocast for kind in kinds)):
            # planned for again, with what the backward holds
            self.cache = self._new_cache()
            self.notices.warn(
                "autocast",
                "the backward of %s runs inside of autocast, which holds its casts of weights "
                "meanwhile: this step may take more than its budget by their bytes, and the next "
                "ones are planned for anew. Leave the autocast before loss.backward()",
            )

    def _watch(self, outputs: PyTree) -> None:
        """Makes the backward warn of outputs that variables hold, which the plan counts as freed.

        When the autograd node of an output runs, the loss has released its saved tensors of it.
        """
        for output in tensors_held_by(outputs):
            if output.grad_fn is not None and output.nbytes >= LEAST_HELD:
                check = functools.partial(self._warn_if_held, weakref.ref(output))
                output.grad_fn.register_prehook(check)

    def _warn_if_held(self, reference: "weakref.ref[torch.Tensor]", _: object) -> None:
        if (output := reference()) is not None:
            self.notices.warn(
                "outputs",
                "what %s returned is held by a variable in the backward (%s), and its plan counts "
                "it until the loss: a step may take so much more than the budget. Pass "
                "holds_outputs=True to zoo.checkpoint or zoo.plan, or write "
                "loss(model(x)).backward()",
                format_bytes(output.nbytes),
            )

    def _run_planned(
        self, invocation: Invocation, forward: Callable[..., PyTree], is_copy: bool
    ) -> PyTree:
        spec = self._spec(invocation)
        kind = self.cache.kind_of(spec)
        kind.forwards += 1
        if kind.lacks_branch:
            module = self.module()
            if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
                # block by block: this forward gives lazy parameters their sizes
                return Conductor([], host=self.host).run(lambda: invocation.on(forward))
        self._prepare(invocation, kind, spec, forward)
        if self.pending is not None:
            self.pending.note_most_before()
        if self._is_to_be_planned(kind, spec) and not is_copy:
            return self._trace(invocation, spec, kind)
        if is_copy and not kind.branches:
            self.notices.warn(
                "copy",
                "a copy of %s, by copy.copy or nn.DataParallel, runs block by block until there is "
                "a plan: run a training step of the model itself before, or take a memory budget",
            )
        branches = kind.branches[::-1]
        conductor = Conductor(branches, host=self.host)
        outputs = conductor.run(lambda: invocation.on(forward))
        kind.took_no_branch = conductor.lost or conductor.outgrown
        if conductor.outgrown:
            self.notices.warn(
                "outgrown",
                "a forward of %s makes larger tensors than its plan has room for, and went on "
                "block by block, which may take more than the budget: sizes that no tensor among "
                "the arguments shows are known only then. The next of this kind is planned for",
            )
        if self.host is not None and self.host.is_full:
            refused = f" ({self.host.error_text})" if self.host.error_text else ""
            self.notices.warn(
                "host",
                "the host has no room for all that a plan of %s offloads: what goes beyond %s "
                "stays on its device, so that a step may take more than was planned%s. %s, or "
                "lower the batch size",
                format_bytes(self.host.allocated),
                refused,
                "Free host memory" if refused else "Raise host_budget=",
            )
        if conductor.kept_draws:
            self.notices.warn(
                "draws",
                "the backward of %s cannot draw its random numbers again, since it may not be in "
                "the CUDA graph that the forward is captured into, or a device does not tell the "
                "state of its generator: the results are kept, and take %s beside its plan. "
                "zoo.make_graphed_step captures both into one graph, which keeps none of them",
                format_bytes(conductor.kept_draws),
            )
        if (used := conductor.branch) is not None and len(kind.branches) > 1:
            # the next forward begins with the fastest that would have served this one
            sizes = conductor.sizes_returned()
            first = fastest_branch(branches, used.operators, sizes) or used
            # not in place: during a sort other threads would find the list empty
            kind.branches = sorted(kind.branches, key=lambda branch: branch is first)
        self.latest = conductor.branch
        if self.goal.is_bounded and self._is_to_be_planned(kind, spec):
            comes_again = kind.comes_again(conductor.path_hash) or conductor.outgrown
            if comes_again or self.cache.plannings(spec) < EAGER:
                self._trace_last(invocation, kind)
            else:
                kind.took_no_branch = False
        return outputs

    def _prepare(
        self,
        invocation: Invocation,
        kind: InputKind,
        spec: InputSpec,
        forward: Callable[..., PyTree],
    ) -> None:
        """Plans for a forward that begins, if it is to be planned for and was traced, or may be."""
        if self._is_to_be_planned(kind, spec):
            if kind.last_forward is not None:
                self._plan_last_forward(spec, kind)
            elif not kind.branches and self._is_planned_ahead():
                self._plan_first(invocation, kind, forward)
        elif self._is_judged and kind.pays(spec):
            before, kind.branches = kind.branches, []
            self._plan_first(invocation, kind, forward)
            kind.branches = kind.branches or before
        if not (kind.branches or self.cache.may_plan(spec)):
            kind.branches = self.cache.largest(spec)

    def _trace_last(self, invocation: Invocation, kind: InputKind) -> None:
        """Traces a forward that took no known path, to be planned for before the next.

        If it takes one on fake tensors, for whose class it may ask, it is traced on real ones. If
        neither tells its path, the next forward is traced as it runs, whatever it does.
        """
        for on_real_tensors in (False, True):
            with contextlib.suppress(ArgumentError):
                trace = self._trace_ahead(invocation, on_real_tensors=on_real_tensors)
                operators, sizes = _operators_of(trace)
                if fastest_branch(kind.branches, operators, dict(enumerate(sizes))) is not None:
                    continue
                # another forward of this kind may never come, so that no data is held for it
                last = LastForward.of(invocation.without_data(), trace, self.module())
                self.cache.note_last_forward(kind, last)
                return

    def _plan_last_forward(self, spec: InputSpec, kind: InputKind) -> None:
        """Plans for the last forward, which went by no known plan."""
        assert kind.last_forward is not None, "there is one"
        last, kind.last_forward = kind.last_forward, None
        if not last.is_of(self.module()):
            # blocks were added or removed since, so that the next forward is traced anew
            return
        try:
            self._plan_traced(last.invocation, spec, last.trace)
        except (ArgumentError, BudgetError, PlanError) as error:
            self._go_by_blocks(kind, error)

    def _is_to_be_planned(self, kind: InputKind, spec: InputSpec) -> bool:
        """Returns whether a forward is traced, since no branch is known for it, and planned for."""
        is_new = kind.lacks_branch and kind.can_be_planned
        # under a profiler no kernel can be measured
        waits = self.has_run and self.goal.is_bounded and is_profiling()
        # new sizes of a known path are judged whenever they come
        may_be_known = self._is_judged and not kind.branches
        return is_new and not waits and (may_be_known or self.cache.may_plan(spec))

    @property
    def _is_judged(self) -> bool:
        """Whether a plan is in force only for sizes for which it keeps to a budget."""
        return self.goal.memory_budget is not None

    def _is_trained(self, invocation: Invocation) -> bool:
        own = self.module()
        return self.has_hidden_gradients or without_modes(needs_gradients, own, invocation)

    def _spec(self, invocation: Invocation) -> InputSpec:
        """Returns the properties that a plan depends on."""
        return without_modes(InputSpec.of, invocation, self.module())

    @shown("zoo.checkpoint")
    def plan_ahead(self, invocation: Invocation) -> None:
        """Makes a plan for arguments like these now."""
        check_switches(self.module())
        self._plan_traced(invocation, self._spec(invocation), self._trace_ahead(invocation))

    def _trace_ahead(self, invocation: Invocation, *, on_real_tensors: bool = False) -> StepTrace:
        with PLANNING:
            trace = functools.partial(
                step_trace_of, is_judged=self.goal.is_bounded, on_real_tensors=on_real_tensors
            )
            return without_modes(trace, self.module(), invocation, self.training.loss)

    def _plan_traced(self, invocation: Invocation, spec: InputSpec, trace: StepTrace) -> None:
        self.plan_for(TracedForward(invocation, spec, trace, _operators_of(trace)[0]))

    def _plan_enlarged(self, invocation: Invocation, kind: InputKind) -> bool:
        """Plans for larger arguments than a kind's, which grow, so that the next ones need nothing.

        Returns whether that plan serves these, too, in little more time.
        """
        # elsewhere user code would run in this process, or processes would get plans of other sizes
        in_group = distributed.is_available() and distributed.is_initialized()
        may_grow = self.has_run and isinstance(self.goal.memory_budget, int)
        if not may_grow or in_group or not can_fork():
            return False
        spec, found = self._spec(invocation), None
        if without_modes(_is_resizable, invocation, spec):
            found = self.cache.enlarged(spec)
        if found is None:
            return False
        larger, before = found
        with contextlib.suppress(ArgumentError, BudgetError, PlanError):
            given = without_modes(invocation.resized, larger.sizes)
            trace = self._trace_ahead(given)
            self._plan_for(TracedForward(given, larger, trace, _operators_of(trace)[0]), before)
        enlarged = self.cache.kind_of(larger)
        if not enlarged.branches:
            del self.cache.kinds[larger]
            self.cache.refused += 1
            return False
        kind.go_by(enlarged)
        return True

    def _plan_first(
        self, invocation: Invocation, kind: InputKind, forward: Callable[..., PyTree]
    ) -> None:
        """Makes a plan for the first forward; one that raises an error raises it as unplanned.

        For a kind of inputs that comes later, a plan that is not found is a warning.
        """
        try:
            with PLANNING:
                # another thread may have made it meanwhile
                if not (kind.branches or self._plan_enlarged(invocation, kind)):
                    self.plan_ahead(invocation)
                return
        except (ArgumentError, BudgetError, PlanError) as error:
            refused = error
        binds = self.goal.binds_first_step or isinstance(refused, RunsLaterError)
        if isinstance(refused, TraceError) and not binds:
            # a real step may be traced
            return
        runs_later = isinstance(refused, RunsLaterError)
        if self.has_run or runs_later or self._is_of_another_path(refused):
            self._go_by_blocks(kind, refused)
            return
        if isinstance(refused, TraceError) and refused.raised:
            Conductor([]).run(lambda: invocation.on(forward))
            name = type(self.module()).__name__
            refused = TraceError(
                f"the forward of {name} runs, and its trace ahead of the first training step does "
                f"not: {refused}. zoo.checkpoint without a budget or a plan of your own traces the "
                "first step itself"
            )
        raise refused

    def _is_of_another_path(self, error: Exception) -> bool:
        """Returns whether a report is for other steps, as of other arguments than a trainer's."""
        return self.goal.report is not None and type(error) is PlanError

    def _go_by_blocks(self, kind: InputKind, error: Exception) -> None:
        """Warns that inputs of this kind run block by block from now on."""
        self.latest, kind.can_be_planned = None, False
        if isinstance(error, RunsLaterError):
            self.notices.runs_later = True
            what = (
                "each of its blocks is recomputed as it runs" if self.marks else "it saves nothing"
            )
            self.notices.warn("later", "no plan is in force on %s, and %s: %s", what, error)
            return
        text = "%s runs block by block: its forward cannot be planned for (%s)"
        _log.warning(text, self.notices.name, error)

    def _is_planned_ahead(self) -> bool:
        """Returns whether the first forward is traced ahead, so that it runs by a plan, too.

        So is that of a model of zoo, which has no side effects, and one for which a number of
        segments may be refused.
        """
        if active_fake_mode() is not None:
            # a step on fake tensors takes no memory
            return False
        can_be_real = self.goal.plan is not None or not self.goal.binds_first_step
        if can_be_real and any(map(is_spread, self.module().parameters())):
            # spread parameters cannot be traced ahead
            return False
        goal = self.goal
        # a step that only fits with offloading must not run without it
        is_first = goal.binds_first_step or goal.is_count or goal.offload.is_on
        return is_first or isinstance(self.module(), Model)

    def _trace(self, invocation: Invocation, spec: InputSpec, kind: InputKind) -> PyTree:
        """Runs the forward block by block, traces it and plans for the next; warns on failure."""
        check_switches(self.module())
        step = without_modes(RealStep, self.module(), invocation)
        conductor = without_modes(Conductor, [], step.recorder.hooks())
        with step:
            outputs = conductor.run(lambda: invocation.on(self.__wrapped__))
        try:
            trace = without_modes(step.trace, outputs)
            is_fake = without_modes(_has_fake_gradients, self.module())
            assert not is_fake, "a trace leaves the gradients of the program as they were"
            trace.events.visits = conductor.visits
            self.plan_for(TracedForward(invocation, spec, trace, conductor.operators))
            if self.training.loss is not None:
                self.notices.warn(
                    "loss",
                    "%s takes another path, which is planned for without the bytes of loss=: its "
                    "steps may take so much more than the budget",
                )
        except (ArgumentError, BudgetError, PlanError) as error:
            refusals = SegmentsError, BudgetError
            is_refused = self.goal.binds_first_step or isinstance(error, refusals)
            runs_on = self.has_run or isinstance(error, RunsLaterError)
            if not runs_on and is_refused and not self._is_of_another_path(error):
                raise
            self._go_by_blocks(kind, error)
        return outputs

    def plan_for(self, traced: TracedForward) -> None:
        """Plans for a traced forward, unless there is a plan that serves it."""
        with PLANNING:
            self._plan_for(traced)

    def _plan_for(
        self, traced: TracedForward, before: Sequence[PlannedBranch] | None = None
    ) -> None:
        """Plans for a traced forward.

        A plan that is to serve smaller sizes, too, may take little more time than those branches
        which are in force there `before`.
        """
        _, spec, trace, operators = traced
        self.traced = traced if self.keeps_trace else None
        kind = self.cache.kind_of(spec)
        # the operators of a loss come after the forward's
        sizes = [call.bytes for call in trace.events.operators[: len(operators)]]
        sizes += [0] * (len(operators) - len(sizes))
        kind.took_no_branch = False
        if fastest_branch(kind.branches, operators, dict(enumerate(sizes))) is not None:
            # another forward took no branch
            return
        known = self.cache.known(spec, operators) if self._is_judged else []
        if not (known or (before is None and self._counts_path(kind, spec))):
            return
        outline, plans = without_modes(self._plans_for, traced, known, before)
        if not plans:
            return
        cuts, visits = outline.cuts[: len(outline)], trace.events.visits
        has_backward = trace.events.has_backward
        if self.pending is not None:
            self.pending.looks = LOOKS
        branches = [
            PlannedBranch(
                operators,
                cuts,
                one.plan,
                visits,
                sizes,
                one.room,
                one.offloads,
                has_backward,
                one.holds,
                one.casts,
                one.peak,
            )
            for one in plans
        ]
        pairs = [*zip(branches, plans, strict=True)]
        fitting = [branch for branch, plan in pairs if not plan.leaves_autocast]
        new = fitting or branches
        kind.fits_autocast &= bool(fitting)
        kind.outside = [*(b for b in branches[::-1] if b not in fitting), *kind.outside]
        kind.spec, kind.branches = spec, [*kind.branches, *reversed(new)]
        self.latest = branches[0]

    def _counts_path(self, kind: InputKind, spec: InputSpec) -> bool:
        """Counts a path that is to be planned for; returns whether it is."""
        most, count = self.cache.most, self.cache.plannings(spec)
        if not self.cache.may_plan(spec):
            kind.branches = kind.branches or self.cache.largest(spec)
            kind.can_be_planned = bool(kind.branches)
            return False
        kind.plannings += 1
        if count + 1 == most:
            self.notices.warn(
                "plannings",
                "%s was planned for %d times, as its inputs or its path differ. Few more paths of "
                "arguments like these are planned for: what goes by none of these plans goes block "
                "by block",
                most,
            )
        if count:
            again = "%s: another path or larger inputs, planned again (%d of %d)"
            _log.info(again, self.notices.name, count + 1, most)
        return True

    @torch.enable_grad()
    def _plans_for(
        self,
        traced: TracedForward,
        known: Sequence[PlannedBranch],
        before: Sequence[PlannedBranch] | None,
    ) -> tuple[Outline, Sequence[RoomyPlan]]:
        """Returns the plans of a traced forward: one of its path in other sizes if that serves.

        There are none if they take much more time than those of smaller sizes `before`.
        """
        invocation, spec, trace, _ = traced
        module = self.module()
        sides: Sides = OUTSIDE
        if self.goal.is_bounded and self.leaves_autocast is not True and caches_casts():
            sides = EITHER if self.leaves_autocast is None else INSIDE
        structure, optimizer = self.counted
        counted = optimizer if structure == spec.structure else None

        def step_on(outline: Outline) -> CountedStep:
            return step_of(self.goal, self.training, (module, outline, invocation.tensors), counted)

        cut = functools.partial(partition, module, trace, paths_of(module, self.patterns))
        most = math.inf
        if known:
            cuts = known[0].boundaries
            alike = [branch for branch in known if branch.boundaries == cuts]
            of_branches = [RoomyPlan(branch.plan, offloads=branch.offloads) for branch in alike]
            outline = cut((*cuts,))
            step = step_on(outline)
            if before is not None:
                times = (_time_ratio(step, b.plan) for b in before if b.boundaries == cuts)
                most = SLOWER * min(times, default=0.0)
            plan = known_plan_for(self.goal, step, sides, of_branches)
            if plan is not None:
                if _time_ratio(step, plan.plan) > most:
                    return outline, []
                _log.debug("%s: judged for %s", self.notices.name, step.title)
                return outline, [plan]
        outline = cut()
        step = step_on(outline)
        # what others hold may be less in the next step
        may_break = before is None and (self.has_run or self.training.beside > 0)
        plans = plans_for(self.goal, step, sides, has_run=may_break)
        if before is not None and _time_ratio(step, plans[0].plan) > most:
            return outline, []
        if known:
            _log.info("%s: planned again for %s", self.notices.name, step.title)
        if self.goal.is_bounded:
            self.counted = spec.structure, step.optimizer_bytes
        if self.pending is not None and self.pending.budget:
            fixed, peak = step.fixed, plans[0].peak
            self.pending.resident = fixed.parameters + fixed.buffers + fixed.optimizer
            if peak > self.pending.budget:
                self.pending.require_room(peak - fixed.beside_activations)
        return outline, plans


def _is_resizable(invocation: Invocation, spec: InputSpec) -> bool:
    """Returns whether all tensors that a spec describes are dense arguments."""
    tensors = invocation.tensors
    sizes = tuple(tuple(tensor.shape) for tensor in tensors)
    return sizes == spec.sizes and all(map(is_dense, tensors))


def _time_ratio(step: CountedStep, plan: Plan) -> float:
    """Returns how many times the baseline's time a plan takes, by the costs of the steps."""
    return step.point(step.with_loss(plan)).time_ratio


def _operators_of(trace: StepTrace) -> tuple[list[Operator], list[int]]:
    """Returns the operators of a traced forward without its loss, and the bytes of each."""
    calls = trace.events.operators[: trace.events.model_operators]
    return [resolved(call.operator) for call in calls], [call.bytes for call in calls]


def _has_fake_gradients(module: nn.Module) -> bool:
    real = (p for p in module.parameters() if not isinstance(p, FakeTensor))
    return any(isinstance(p.grad, FakeTensor) for p in real)


def _warn_of_blocks_alone(_: object) -> None:
    """Warns while a model is compiled that its budget, or its plan, is not in force."""
    _log.warning(
        "a model with a memory budget or a plan of its own is compiled as a whole: each of its "
        "blocks is recomputed, which may take more than the budget. Compile its blocks before "
        "zoo.checkpoint to have the plan in force"
    )


def patched_forward(model: nn.Module) -> PatchedForward | None:
    """Returns the patch of a model's forward; None if no plan is in force."""
    patch = vars(model).get("forward")
    # a copy that shares it runs as it is written
    return patch if isinstance(patch, PatchedForward) and patch.module() is model else None


def named_steps(model: nn.Module) -> Sequence[str] | None:
    """Returns the modules that the user named as blocks."""
    patched = patched_forward(model)
    return None if patched is None else patched.patterns


def goal_of(model: nn.Module) -> Goal | None:
    """Returns the goal of the plans that are in force on a model; None without one."""
    patched = patched_forward(model)
    return None if patched is None else patched.goal
