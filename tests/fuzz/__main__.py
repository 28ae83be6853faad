"""Draws models and plans for some minutes and says how many were run: `python -m tests.fuzz`.

    make fuzz MINUTES=10
    python -m tests.fuzz --minutes 10
    python -m tests.fuzz --seed 3 --cases 100
    python -m tests.fuzz --device soft         the software accelerator, in random orders of streams
    python -m tests.fuzz --budgets 500 --cases 0      models by random budgets alone

Expected: `549 cases (...) in 3.4 minutes; none differed` after `--minutes 3 --cases 300`, with how
many were exact, refused as plain training refuses them, refused by a limit that docs/limitations.md
states, or not planned for. At the first case that differs it prints the smallest one that still
does and exits with 1; the seed draws the same again. Budgets come first: `200 budgets (...): none
exceeded`, with the same seed.
"""

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.accelerator import software
from tests.fuzz import budgets as fuzz_budgets
from tests.fuzz.budgets import Budgeted, budgeted, check_budget
from tests.fuzz.lines import INNER, MAKES, PYTHON, ROWS, SEVERAL, UNSEEN, VIEWS, WIDTH, WRITES
from tests.fuzz.programs import Block, Outcome, Program, Shared, check_program, programs

T = TypeVar("T")
ROUND = 100  # cases between two looks at the clock


@dataclass
class Tally:
    """What was run, each case counted once."""

    cases: set[str] = field(default_factory=set)
    recomputing: int = 0
    offloading: int = 0
    steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, description: Program, outcome: Outcome) -> None:
        text = repr(description)
        if text not in self.cases:
            self.cases.add(text)
            self.recomputing += description.plan.depth() > 0
            self.offloading += outcome.offloads
            self.steps += outcome.steps
            self.kinds[outcome.kind] += 1

    def __str__(self) -> str:
        return (
            f"{len(self.cases):,} cases (all distinct, {self.recomputing:,} by a plan with "
            f"segments, {self.offloading:,} with copies on the host, {self.steps:,} training "
            "steps; "
            f"{', '.join(f'{count:,} {kind}' for kind, count in self.kinds.most_common())})"
        )


def draw(number: int, count: int, described: SearchStrategy[T], check: Callable[[T], None]) -> None:
    """Draws descriptions and checks them; raises what the smallest failing one raised."""

    @seed(number)
    @settings(
        deadline=None,
        max_examples=count,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(described)
    def case(description: T) -> None:
        check(description)

    case()


def run_round(number: int, tally: Tally) -> None:
    """Draws and checks programs by random plans."""
    drawn = programs(compiled=torch.get_default_device().type == "cpu")
    draw(number, ROUND, drawn, lambda program: tally.add(program, check_program(program)))


@dataclass
class BudgetTally:
    """Programs that were trained by a budget, each counted once, and their measured steps."""

    cases: set[str] = field(default_factory=set)
    steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, description: Budgeted, outcome: fuzz_budgets.Outcome) -> None:
        text = repr(description)
        if text not in self.cases:
            self.cases.add(text)
            self.steps += outcome.steps
            self.kinds[outcome.kind] += 1

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        return f"{len(self.cases):,} budgets ({self.steps:,} measured steps; {kinds})"


def run_budgets(number: int, tally: BudgetTally, count: int) -> None:
    """Draws and checks programs by random budgets."""
    draw(number, count, budgeted(), lambda program: tally.add(program, check_budget(program)))


def leave_out_missing_lines() -> None:
    """Leaves out lines that the device has no kernels for."""
    one, other = torch.rand(2, ROWS, WIDTH, requires_grad=True).unbind()
    for lines in (MAKES, VIEWS, WRITES, SEVERAL, PYTHON, INNER, UNSEEN):
        for name, line in [*lines.items()]:
            try:
                made = line(Block((), Shared(), ""), one * 1, other * 1)
                if made is not None and made.requires_grad:
                    made.float().sum().backward()
            except Exception as error:
                print(f"left out: {name} ({type(error).__name__})")
                del lines[name]


def main() -> int:
    """Runs rounds until both the time and the number of cases are reached."""
    arguments = parse()
    if arguments.device == software.NAME:
        # what a step takes is counted on the CPU
        arguments.budgets = 0
        software.register()
        torch.set_default_device(arguments.device)
        leave_out_missing_lines()
    torch.set_num_threads(1)  # tensors are small: with more threads a case takes longer
    # models that cannot be planned for and hooks without gradients are among the cases
    warnings.simplefilter("ignore")
    logging.getLogger("zoo").setLevel(logging.ERROR)
    number = arguments.seed * 1_000_000
    print(f"fuzzing with --seed {arguments.seed}", flush=True)
    budgets, tally, start = BudgetTally(), Tally(), time.monotonic()
    try:
        while len(budgets.cases) < arguments.budgets:
            run_budgets(number, budgets, min(ROUND, arguments.budgets - len(budgets.cases)))
            number += 1
        if arguments.budgets:
            minutes = (time.monotonic() - start) / 60
            print(f"{budgets} in {minutes:.1f} minutes: none exceeded", flush=True)
        start, number = time.monotonic(), arguments.seed * 1_000_000
        while (
            len(tally.cases) < arguments.cases or time.monotonic() - start < 60 * arguments.minutes
        ):
            run_round(number, tally)
            number += 1
    except Exception as error:
        traceback.print_exception(error)
        print(f"{budgets}, {tally}; then the one above differed", flush=True)
        return 1
    print(f"{tally} in {(time.monotonic() - start) / 60:.1f} minutes; none differed", flush=True)
    return 0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=0.0, help="at least so long")
    parser.add_argument("--cases", type=int, default=2_000, help="at least so many (2000)")
    parser.add_argument("--budgets", type=int, default=0, help="programs by random budgets (0)")
    parser.add_argument("--device", choices=("cpu", software.NAME), default="cpu")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
