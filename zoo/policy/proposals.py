"""Proposes plans of a training step, by the costs of its steps alone; `policy.judge` judges them.

With offloading they are those that are the best without, the schemes and equal numbers of blocks,
each with nothing and with several sets of its items on the host (`planner.offload_choices`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from zoo.errors import Interrupted
from zoo.planner import schemes
from zoo.planner.costs import Simulation, computed_once
from zoo.planner.least_memory import least_memory
from zoo.planner.offload_choices import COUNT, choices
from zoo.planner.plan import Item, Plan, falling, first_step, thinned
from zoo.policy.goal import Offload, optimal_planner
from zoo.policy.plan_report import Point
from zoo.policy.training_step import CountedStep
from zoo.profiling.progress import each, shown

# amounts of memory in a search for a plan, and in one that tells how good a known plan is
LEVELS, ROUGH = 500, 100
# the most plans of a kind in `trades`, since callers track a whole step for each
MOST = 10
# the deepest nesting of such a plan: with 150 levels single steps are recomputed 11,000 times
DEEPEST = 64
# steps that the search for items to offload simulates in all: some seconds
SIMULATED_STEPS = 300_000


class Proposals:
    """Plans of a step and its loss, with what they take by the costs of the steps.

    `levels`: amounts of memory for which the search has the least time, as in `PlanSearch`.
    """

    def __init__(self, step: CountedStep, offload: Offload, levels: int = LEVELS) -> None:
        self.step, self.offload, self.levels = step, offload, levels
        self._points: dict[Plan, Point] = {}

    @computed_once
    def _search(self) -> Any:
        """The search for the best plans without offloading."""
        with shown(self.step.title):
            costs = self.step.costs_with_gradients
            return optimal_planner().PlanSearch(costs, levels=self.levels, each=each)

    @computed_once
    def best(self) -> list[Point]:
        """The best plans by rising peak and falling time.

        Raises:
            Interrupted: by Ctrl-C, with the best plans so far, unless there is none.
        """
        found: list[Point] = []
        with shown(self.step.title):
            try:
                found += self._without_offloading(self._search.all())
                if self.step.training.forwards > 1:
                    found += [self.step.point(self._in_a_segment(p.plan)) for p in found]
                if self.offload.is_on:
                    # one by one, so that an interrupt loses none
                    for point in self._offloaded([point.plan for point in found]):
                        found.append(point)
            except KeyboardInterrupt as error:
                if isinstance(error, Interrupted):
                    found += self._without_offloading(error.found)
                if not found:
                    raise
                raise Interrupted("interrupted", best_of(found)) from None
        return best_of(found)

    def around(self, fits: Callable[[Point], bool]) -> list[Point]:
        """Returns plans by rising peak and falling time: the best near the last one that fits.

        `fits` holds for low peaks. Where others count, too, these are all of the best ones.

        Raises:
            Interrupted: as `best` does.
        """
        if "best" in vars(self) or self.offload.is_on or self.step.training.forwards > 1:
            return self.best
        try:
            plans = self._search.around(lambda plan: fits(self._point(*plan)))
        except Interrupted as error:
            best = best_of(self._without_offloading(error.found))
            raise Interrupted("interrupted", best) from None
        return best_of(self._without_offloading(plans))

    def _in_a_segment(self, plan: Plan) -> Plan:
        """Returns a plan by which the whole forward runs again, and then by this one.

        Forwards hold nothing but their inputs until the backward reaches them.
        """
        steps = self.step.steps
        inner = tuple(item for item in plan if first_step(item) < steps)
        return Plan([inner, *range(steps, len(self.step.costs))])

    @property
    def lowest(self) -> list[Point]:
        """The lowest of the best plans by rising peak if there is a search, else the least one."""
        has_searched = {"best", "_search"} & vars(self).keys()
        return self.around(lambda _: False) if has_searched else [self.smallest]

    @computed_once
    def smallest(self) -> Point:
        """The plan of least peak, without offloading by a search of its own, which is finer."""
        if self.offload.is_on or self.step.training.forwards > 1:
            # what is offloaded, or held until the last forward is over, decides which plan that is
            return self.best[0]
        least = optimal_planner().least(self.step.costs_with_gradients)
        return self.step.point(_loss_kept(least, self.step.steps))

    @computed_once
    def least_once(self) -> Point:
        """The plan of least peak that recomputes no step more than once, as `checkpoint=True`."""
        plan = least_memory(self.step.costs_with_gradients)
        return self.step.point(_loss_kept(plan, self.step.steps))

    @computed_once
    def trades(self) -> list[Point]:
        """Plans that may be the best if parameters and gradients are sharded; fastest first.

        They are chosen by activations alone, from the best nested plans and from plans that
        recompute single steps.
        """
        costs, steps = self.step.costs, self.step.steps
        nested = optimal_planner().frontier(costs, each=each)
        best = [_loss_kept(point.plan, steps) for point in nested]
        single = schemes.one_by_one(costs, steps)
        keep_all = Plan.keep_all(len(costs))
        chosen = dict.fromkeys([keep_all, *thinned(best, MOST), *thinned(single, MOST)])
        shallow = [plan for plan in chosen if plan.depth() <= DEEPEST]
        points = [*map(self.step.point, shallow)]
        if self.offload.is_on:
            points += thinned(best_of(self._offloaded(shallow))[::-1], 2 * MOST)
        return sorted(points, key=attrgetter("time_ratio"))

    def schemes(self) -> list[Point]:
        """Returns the plans of the classic schemes, those that the host has room for."""
        outline, steps = self.step.outline, self.step.steps
        arguments = self.step.costs.blocks, outline.whole, lambda: self.step.costs
        classic = {name: schemes.named(name, *arguments) for name in schemes.NAMES}
        kept = {name: _loss_kept(plan, steps) for name, plan in classic.items()}
        points = (self.step.point(p, name, self.offload.of_plan(p)) for name, p in kept.items())
        return [point for point in points if self.offload.allows(point.offloaded)]

    def _without_offloading(self, simulated: Sequence[Any]) -> list[Point]:
        points = itertools.starmap(self._point, simulated)
        return list({point.plan: point for point in points}.values())

    def _point(self, plan: Plan, result: Simulation) -> Point:
        """Returns a plan that was found, with a loss that is kept."""
        if plan not in self._points:
            kept = _loss_kept(plan, self.step.steps)
            known = result if kept is plan else None
            self._points[plan] = self.step.point(kept, result=known)
        return self._points[plan]

    def _offloaded(self, best: Sequence[Plan]) -> Iterator[Point]:
        """Yields plans with items on the host, as many as can be simulated in seconds.

        They are the best ones without, and some whose segments do not nest.
        """
        step = self.step
        flat = dict.fromkeys(_loss_kept(plan, step.steps) for plan in self._flat_plans())
        count = max(2, SIMULATED_STEPS // (COUNT * len(step.costs)))
        plans = dict.fromkeys([*thinned(best, count), *thinned([*flat], max(2, count // 4))])
        options = step.costs_with_gradients, step.steps, step.copies, self.offload.host_budget
        for plan in each("plans with offloading", [*plans]):
            for offloads in choices(plan, *options):
                point = step.point(plan, offloads=offloads)
                if point.offloaded > 0 and self.offload.allows(point.offloaded):
                    yield point

    def _flat_plans(self) -> Iterator[Plan]:
        """Yields plans whose segments do not nest, which offload the most."""
        blocks = self.step.costs.blocks
        for name in schemes.NAMES:
            yield schemes.named(name, blocks, self.step.outline.whole, lambda: self.step.costs)
        for count in range(2, len(set(blocks)) + 1):
            yield schemes.segments(blocks, count)


def best_of(points: Iterable[Point]) -> list[Point]:
    """Returns the points that none beats in both peak and time, by rising peak."""
    return falling(points, attrgetter("time_ratio", "peak"), attrgetter("peak"))[::-1]


def _loss_kept(plan: Plan, steps: int) -> Plan:
    """Moves the loss out of a segment that ends with it, since the model does not recompute it."""
    total = len(plan.flatten())
    if total == steps or isinstance(plan[-1], int):
        return plan
    inner = _without_last(plan[-1])
    return Plan([*plan[:-1], *([inner] if inner else []), total - 1])


def _without_last(item: tuple[Item, ...]) -> tuple[Item, ...]:
    last = item[-1]
    rest = _without_last(last) if isinstance(last, tuple) else ()
    return (*item[:-1], rest) if rest else item[:-1]
