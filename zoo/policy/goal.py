"""What a plan is to reach, from a user's options, which are read and checked here.

    checkpoint=True                 the least peak of all plans that recompute nothing twice
    a number, a scheme's name       segments of blocks
    a plan, or its report           that plan
    memory_budget=, max_overhead=   the least time within bytes; the least peak within a time

Each may have a part of what the backward needs on the host until then, `Offload`.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from zoo.errors import ArgumentError, BudgetError, needed, shortened
from zoo.planner import schemes
from zoo.planner.json_reader import read_file
from zoo.planner.offload_choices import segments_of
from zoo.planner.plan import Plan, first_step
from zoo.policy.plan_report import PlanReport
from zoo.units import SIZES, at_least, exact_bytes, parse_bytes, parse_ratio

Checkpoint = bool | int | str | Plan | PlanReport | tuple[Any, ...]
# more segments than any model has blocks
MOST_SEGMENTS = 2**40
Budget = int | float | str
OffloadOption = bool | Collection[int]
Overhead = float | str
BUDGETS = (
    f"{SIZES}, a share of the baseline's peak as 0.6 or '60%', or 'device' for what is free there"
)


@dataclass(frozen=True)
class Offload:
    """Whether a part of what the backward needs lies on the host until then.

    Attributes:
        is_on: whether it may.
        host_budget: the most bytes there; None for as many as that takes.
        items: the first steps of the items of a given plan that are offloaded; None for those that
            a planner chooses for a budget, and for all segments of a plan that is made for none.
    """

    is_on: bool = False
    host_budget: int | None = None
    items: frozenset[int] | None = None

    @classmethod
    def of(cls, offload: OffloadOption, host_budget: int | str | None) -> "Offload":
        """Reads the options of a user.

        Raises:
            ArgumentError: steps that are no numbers, a budget without offloading, or in a wrong
                form.
        """
        items = None if isinstance(offload, bool) else _steps(offload)
        is_on = offload is True or bool(items)
        if host_budget is None:
            return cls(is_on, None, items)
        if not is_on:
            raise ArgumentError(
                f"host_budget={shortened(host_budget)} limits what offload=True copies to the "
                "host; pass both, or leave it out"
            )
        return cls(True, parse_bytes(host_budget, "host_budget"), items)

    def named_in(self, plan: Plan | None) -> "Offload":
        """Returns the same, checked against its plan; None if that is yet to be made.

        Raises:
            ArgumentError: steps are named, and the plan has no such items.
        """
        if not self.items:
            return self
        if plan is None:
            raise ArgumentError(
                f"offload={shortened(sorted(self.items))} names steps of a plan, and this one is "
                "yet to be made; pass offload=True, or to zoo.checkpoint that plan beside offload="
            )
        firsts = [*map(first_step, plan)]
        if unknown := sorted(self.items.difference(firsts)):
            raise ArgumentError(
                f"offload= names step {unknown[0]}, with which no segment and no kept step of the "
                f"plan begins; these do: {shortened(firsts)}. Name some of them, or pass "
                "offload=True"
            )
        return self

    def of_plan(self, plan: Plan) -> frozenset[int]:
        """Returns the items of a plan that the user named, or all segments."""
        if not self.is_on:
            return frozenset()
        return segments_of(plan) if self.items is None else self.items

    def allows(self, needed: int) -> bool:
        """Returns whether the host may hold so many bytes."""
        return self.host_budget is None or needed <= self.host_budget

    def check(self, needed: int, title: str) -> None:
        """Raises BudgetError if a plan copies more to the host than the budget allows."""
        if self.host_budget is not None and not self.allows(needed):
            raise BudgetError(
                f"offloading {title} needs {exact_bytes(needed)} of host memory; host_budget is "
                f"{exact_bytes(self.host_budget)}. Raise it to {at_least(needed)!r}, lower the "
                "batch size, or leave offload= out",
                self.host_budget,
                needed,
            )


NO_OFFLOAD = Offload()


def _steps(offload: Collection[int]) -> frozenset[int]:
    steps = None if isinstance(offload, str) or not isinstance(offload, Iterable) else [*offload]
    if steps is None or any(type(step) is not int or step < 0 for step in steps):
        raise ArgumentError(
            f"offload={shortened(offload)} is neither True nor False, nor the steps that a report "
            "names, as report.offloads"
        )
    return frozenset(steps)


def goal_for(
    checkpoint: Checkpoint,
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    offload: Offload = NO_OFFLOAD,
) -> "Goal | None":
    """Returns the goal of the options of `zoo.checkpoint`; None for False.

    Raises:
        ArgumentError: no such option, or a budget beside another option.
        PlanError: a malformed plan.
    """
    goal = _goal_of(checkpoint, memory_budget, max_overhead)
    if goal is None:
        if offload.is_on:
            raise ArgumentError(
                "offload=True copies what a plan names to the host, and checkpoint=False has none; "
                "take checkpoint=True, another option or a budget, or leave offload= out"
            )
        return None
    if goal.report is not None and goal.report.offloaded:
        # otherwise it would break the budget that it was made for
        own = frozenset(goal.report.offloads)
        if offload.items not in (None, own):
            raise ArgumentError(
                f"offload={shortened(sorted(offload.items))} beside a report whose plan offloads "
                f"{shortened(sorted(own))} would break its budget; leave offload= out, or pass "
                "report.plan"
            )
        offload = replace(offload, is_on=True, items=own)
    return replace(goal, offload=offload.named_in(goal.plan))


def _goal_of(
    checkpoint: Checkpoint, memory_budget: Budget | None, max_overhead: Overhead | None
) -> "Goal | None":
    checkpoint = parse_checkpoint(checkpoint)
    bounded = memory_budget is not None or max_overhead is not None
    report = checkpoint if isinstance(checkpoint, PlanReport) else None
    checkpoint = plan_or_option(checkpoint)
    if checkpoint == "auto" or (bounded and checkpoint is False):
        return Goal("auto", *parse_bounds(memory_budget if bounded else "device", max_overhead))
    if bounded:
        bound = "max_overhead" if memory_budget is None else "memory_budget"
        raise ArgumentError(
            f"{bound}= goes with checkpoint='auto'; got checkpoint={checkpoint!r}, which does not "
            "use it"
        )
    if checkpoint is False:
        return None
    if isinstance(checkpoint, tuple | list):
        return Goal(Plan(checkpoint), report=report)
    if not isinstance(checkpoint, int):
        schemes.check_name(checkpoint)
    elif checkpoint < 1:
        raise ArgumentError(f"checkpoint={checkpoint}: choose 1 segment or more, or False")
    return Goal(checkpoint)


@dataclass(frozen=True)
class Goal:
    """What a plan is to reach.

    Attributes:
        choice: True, "auto" for bounds, a number of segments, a scheme's name or a Plan.
        memory_budget: of "auto", in bytes, as a share of the baseline's peak, or "device".
        max_overhead: of "auto", as a share of the baseline's time.
        report: the report that a given plan comes from; None without one.
        offload: what lies on the host until the backward.
    """

    choice: Any
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    report: PlanReport | None = None
    offload: Offload = NO_OFFLOAD

    @property
    def plan(self) -> Plan | None:
        """The plan, if one was given."""
        return self.choice if isinstance(self.choice, Plan) else None

    @property
    def is_count(self) -> bool:
        """Whether it is a number of segments, which may exceed the number of blocks."""
        return self.choice is not True and isinstance(self.choice, int)

    @property
    def binds_first_step(self) -> bool:
        """Whether the first training step must run by a plan: a budget, or a plan of the user's."""
        return self.plan is not None or self.is_bounded

    @property
    def is_bounded(self) -> bool:
        """Whether it is a budget or an overhead, for which each kind of kernel is measured."""
        return bool(self.choice == "auto")

    @property
    def is_for_bytes(self) -> bool:
        """Whether steps are to keep to a budget, which may be that of a report."""
        of_report = self.report is not None and self.report.budget is not None
        return of_report or self.memory_budget is not None


def parse_checkpoint(option: Checkpoint) -> Checkpoint:
    """Reads text of a `checkpoint=` option, the same in Python and on a command line.

    It is "true", "false", "auto", digits, a scheme's name, a plan such as "(0-1) 2", or the name of
    a .json file: of a `PlanReport`, or of a plan alone. What is no text is returned as it is.

    Raises:
        ArgumentError: no such option.
        PlanError: a malformed plan.
    """
    if not isinstance(option, str):
        return option
    text = option.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal() and len(text) <= len(str(MOST_SEGMENTS)):
        return int(text)
    if text.endswith(".json"):
        saved = read_file(text)
        is_plan = saved.lstrip().startswith("[")
        return Plan.from_json(saved) if is_plan else PlanReport.from_json(saved)
    if any(character in text for character in "()-"):
        return Plan.parse(text)
    if text != "auto":
        schemes.check_name(text)
    return text


def plan_or_option(option: Any) -> Any:
    """Returns a parsed `checkpoint=` option; for a report its plan alone, without its budget.

    None stays None.
    """
    option = parse_checkpoint(option)
    return option.plan if isinstance(option, PlanReport) else option


def parse_bounds(memory_budget: Any, max_overhead: Any) -> tuple[Budget | None, float | None]:
    """Reads a budget and an overhead.

    Raises:
        ArgumentError: not exactly one is given, in a wrong form, or planning for it needs a package
            that is not installed.
    """
    if (memory_budget is None) == (max_overhead is None):
        raise ArgumentError(
            f"one of memory_budget and max_overhead must be given; got {memory_budget!r} and "
            f"{max_overhead!r}"
        )
    optimal_planner()
    if max_overhead is not None:
        return None, parse_overhead(max_overhead)
    return parse_budget(memory_budget), None


def parse_budget(value: Any) -> Budget:
    """Reads a memory budget, the same in Python and on a command line.

    Returns an int of bytes; a float, the share of the baseline's peak; or "device".

    Raises:
        ArgumentError: it is none of BUDGETS.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text.lower() == "device":
        return "device"
    is_share = isinstance(value, Real) and not isinstance(value, Integral)
    # text such as 8.5GiB is no number, and one such as 512 is bytes
    if is_share or text.endswith("%") or ("." in text and parse_ratio(text) is not None):
        share = parse_ratio(value)
        # NaN compares False
        if share is None or not 0 < share <= 1:
            raise ArgumentError(
                f"memory_budget={shortened(value)} is no share of the baseline's peak, which is "
                f"above 0 and up to 1; write {BUDGETS}"
            )
        return share
    return parse_bytes(value, "memory_budget", BUDGETS)


def parse_overhead(value: Any) -> float:
    """Reads an overhead: 0.2 or '20%' for a fifth more time; raises ArgumentError for others."""
    ratio = parse_ratio(value)
    if ratio is None or not 0 <= ratio < math.inf:
        raise ArgumentError(
            f"max_overhead={shortened(value)} must be a number, 0 or more; 0.2 or '20%' allows a "
            "fifth more time than the baseline's"
        )
    return ratio


def optimal_planner() -> Any:
    """Returns `planner.optimal`, which needs numpy; raises ArgumentError if that is missing."""
    return needed("zoo.planner.optimal", "planning for a budget", ArgumentError, "plan")
