"""Draws chains and plans for some minutes and says how many were run: `python -m tests.fuzz`.

    make fuzz MINUTES=10
    python -m tests.fuzz --minutes 10
    python -m tests.fuzz --seed 3 --cases 100 --stateful counter

Expected: `2,137 cases (...) in 1.5 minutes; none differed`. At the first case that differs it
prints the smallest one that still does and exits with 1; the seed draws the same again.
"""

import argparse
import sys
import time
import traceback
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.chains import STATEFUL, Description, check, descriptions

ROUND = 250  # cases between two looks at the clock


@dataclass
class Tally:
    """What was run, each case counted once."""

    cases: set[str] = field(default_factory=set)
    recomputing: int = 0
    steps: int = 0

    def add(self, description: Description) -> None:
        text = repr(description)
        if text not in self.cases:
            self.cases.add(text)
            self.recomputing += description.plan.depth() > 0
            self.steps += len(description.plan.flatten())

    def __str__(self) -> str:
        count = len(self.cases)
        return (
            f"{count:,} cases (all distinct, {self.steps / max(count, 1):.1f} steps on average, "
            f"{self.recomputing:,} with something recomputed)"
        )


def run_round(number: int, stateful: tuple[str, ...], tally: Tally) -> None:
    """Draws and checks cases; raises what the smallest failing one raised."""

    @seed(number)
    @settings(
        deadline=None,
        max_examples=ROUND,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(descriptions(stateful))
    def case(description: Description) -> None:
        check(description)
        tally.add(description)

    case()


def main() -> int:
    """Runs rounds until both the time and the number of cases are reached."""
    arguments = parse()
    torch.set_num_threads(1)  # tensors are small: with more threads a case takes longer
    tally, start, number = Tally(), time.monotonic(), arguments.seed * 1_000_000
    print(f"fuzzing with --seed {arguments.seed}", flush=True)
    while len(tally.cases) < arguments.cases or time.monotonic() - start < 60 * arguments.minutes:
        try:
            run_round(number, arguments.stateful, tally)
        except Exception as error:
            traceback.print_exception(error)
            print(f"{tally}; then the one above differed", flush=True)
            return 1
        number += 1
    print(f"{tally} in {(time.monotonic() - start) / 60:.1f} minutes; none differed", flush=True)
    return 0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=0.0, help="at least so long")
    parser.add_argument("--cases", type=int, default=2_000, help="at least so many (2000)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument(
        "--stateful",
        nargs="*",
        choices=STATEFUL,
        default=STATEFUL,
        help="of the ingredients that a second run could move draw only these (all)",
    )
    arguments = parser.parse_args()
    arguments.stateful = tuple(arguments.stateful)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
