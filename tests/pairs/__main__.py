"""Trains every ordered pair of kinds by every pair of options, in both precisions.

    make pairs                             all of them, which takes an hour or two
    python -m tests.pairs --minutes 10     as many as that allows, in random order

Expected: `9800 of 9800 pairs, none differed`. At the first that differs its kinds, options and
precision are printed, and the exit status is 1.
"""

import argparse
import itertools
import random
import time

from tests.pairs.kinds import KINDS
from tests.pairs.programs import OPTIONS, PRECISIONS, assert_plans_change_nothing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pairs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases = [*itertools.product(KINDS, KINDS, OPTIONS, OPTIONS, PRECISIONS)]
    random.Random(arguments.seed).shuffle(cases)
    end, count = time.monotonic() + 60 * arguments.minutes, 0
    for first, second, *options, dtype in cases:
        try:
            assert_plans_change_nothing((KINDS[first], KINDS[second]), options, dtype)
        except BaseException:
            print(f"{first} in front of {second} by {options} in {dtype}", flush=True)
            raise
        count += 1
        if time.monotonic() > end:
            break
    print(f"{count} of {len(cases)} pairs, none differed")


if __name__ == "__main__":
    main()
