"""How far the plans for a budget are from the best that any schedule could do.

    python benchmarks/bounds.py                  # all models of benchmarks/planner.py, on paper
    python benchmarks/bounds.py resnet50 vnet

A schedule here runs whole steps, each as often as it likes and in any order, and holds any tensors
in between. When the backward comes to a step, some of the tensors that it and the steps before it
saved are there. Each other one is made again afterwards, by the step that makes it, from tensors
that are there or are made again, too. The fewest seconds of such steps, within the bytes that are
left, are a mixed integer program, which is solved for the moments at which most bytes are too many.
It asks for no memory between these moments. So no schedule is faster, and the best one may be
slower than the bound.

Seconds are estimates from peak rates of an A100 and bytes are those of activations; nothing runs.
The shares are of the activations of keeping everything; overheads are seconds of recomputation over
the seconds of a step without. Source of the program: Checkmate (Jain et al. 2020,
arXiv:1910.02653), of which it is a part.
"""

import argparse
import operator
from collections.abc import Iterator

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.planner import MODELS, Subject
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.optimal import frontier
from zoo.planner.plan import Plan
from zoo.profiling.kernel_costs import DEVICES

SHARES = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1)
# moments for which the program is solved, and seconds for each
MOMENTS, SECONDS = 3, 20.0


def least_recomputation(costs: StepCosts, peak: int) -> float:
    """Returns seconds that every schedule recomputes whose bytes do not exceed `peak`."""
    makers = makers_of(costs)
    excess = {step: _bytes_at(costs, makers, step) - peak for step in range(len(costs))}
    moments = sorted(excess, key=excess.__getitem__)[-MOMENTS:]
    return max(_least_from(costs, makers, step, peak) for step in moments)


def makers_of(costs: StepCosts) -> dict[int, int]:
    """Returns the step that makes each storage; what comes from outside has none."""
    makers: dict[int, int] = {}
    for step, saved in enumerate(costs.saved):
        for storage in (saved | costs.live[step + 1]) - costs.live[0]:
            makers.setdefault(storage, step)
    for storage in costs.held_until_end:
        # an output that no step reads
        makers.setdefault(storage, len(costs) - 1)
    return makers


def _bytes_at(costs: StepCosts, makers: dict[int, int], step: int) -> int:
    """Returns the bytes in the backward of a step if everything is kept."""
    needed = costs.held_until_end.union(*costs.saved[: step + 1]) & makers.keys()
    return costs.bytes_of(needed) + costs.gradients[step + 1] + costs.backward[step]


def _least_from(costs: StepCosts, makers: dict[int, int], last: int, peak: int) -> float:
    """Returns the fewest seconds that are recomputed from the backward of step `last` on.

    The variables are 1 or 0: each storage is there; each step runs again until its last tensor is
    saved; each runs again to its end.
    """
    storages = [storage for storage, maker in makers.items() if maker <= last]
    there = {storage: place for place, storage in enumerate(storages)}
    starts = len(storages)
    ends = starts + last + 1
    needed = costs.held_until_end.union(*costs.saved[: last + 1]) & there.keys()

    def remade(storage: int) -> dict[int, int]:
        maker = makers[storage]
        return {there[storage]: 1, (starts if storage in costs.saved[maker] else ends) + maker: 1}

    rows = [(remade(storage), 1) for storage in needed]
    for step in range(last + 1):
        rows.append(({starts + step: 1, ends + step: -1}, 0))
        for storage in _read(costs, step) & there.keys():
            rows.append((remade(storage) | {starts + step: -1}, 0))
    entries = [(row, column, value) for row, (line, _) in enumerate(rows)
               for column, value in line.items()]  # fmt: skip
    at, columns, values = zip(*entries, strict=True)
    shape = len(rows), ends + last + 1
    logic = LinearConstraint(
        coo_array((values, (at, columns)), shape).tocsr(), [least for _, least in rows], np.inf
    )
    steps = [0.0] * (2 * (last + 1))
    room = peak - costs.gradients[last + 1] - costs.backward[last]
    memory = LinearConstraint(
        np.array([[costs.sizes[s] / 2**20 for s in storages] + steps]), -np.inf, room / 2**20
    )
    until = costs.seconds_until_saved[: last + 1]
    rest = map(operator.sub, costs.seconds[: last + 1], until)
    whole = sum(costs.seconds) or 1.0
    must = costs.saved[last] | costs.held_until_end
    found = milp(
        [0.0] * starts + [seconds / whole for seconds in (*until, *(max(r, 0.0) for r in rest))],
        integrality=np.ones(shape[1]),
        bounds=([float(s in must) for s in storages] + steps, 1),
        constraints=[logic, memory],
        options={"time_limit": SECONDS, "mip_rel_gap": 1e-3},
    )
    bound = found.mip_dual_bound
    return 0.0 if bound is None or found.status == 2 else max(bound, 0.0) * whole


def _read(costs: StepCosts, step: int) -> frozenset[int]:
    """Returns storages that a step surely reads: inputs that it saves, or that nothing reads later.

    Its state may hold more, which it only hands on.
    """
    given = costs.live[step]
    return given & costs.saved[step] | given - costs.live[step + 1]


def lines(name: str, costs: StepCosts) -> Iterator[str]:
    """Yields the rows of a model."""
    seconds = sum(costs.seconds) + sum(costs.seconds_backward)
    whole, best = simulate(Plan.keep_all(len(costs)), costs).peak, frontier(costs)
    for share in SHARES:
        within = [point for point in best if point.peak <= share * whole]
        if not within:
            break
        ours = within[-1].recomputed_seconds / seconds
        least = least_recomputation(costs, int(share * whole)) / seconds
        # the program may find none in its time
        bound = f"{least:.1%} | {ours - least:.1%}" if least or not ours else "- | -"
        yield f"| {name} | {share:.1f} | {ours:.1%} | {bound} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"all, or some of {', '.join(MODELS)}")
    chosen = parser.parse_args().models or MODELS
    print("| model | activations | overhead of the plan | of any schedule | difference |")
    print("|---|---:|---:|---:|---:|")
    for name in chosen:
        for line in lines(name, Subject(*MODELS[name]).profile.costs(DEVICES["a100"])):
            print(line, flush=True)


if __name__ == "__main__":
    main()
