"""Names a run, so that what a command line asks for besides a config gets results of its own.

    python test_memory_optimized.py                          results/default/
    python test_memory_optimized.py --model vnet --steps 5   results/default-vnet-steps=5/

Without this a quick look at one model would replace the report of the whole comparison.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 100
HOW_NOT_WHAT = {"output", "timeout", "fresh", "frontier", "compare", "tolerance"}
"""Keys that change no number of a result."""


def run_name(config: str, models: Sequence[str], given: Mapping[str, Any]) -> str:
    """Returns a file's name for a config, chosen models and keys given on the command line."""
    keys = [f"{key}={value}" for key, value in sorted(given.items()) if key not in HOW_NOT_WHAT]
    whole = "-".join([config, *models, *keys])
    readable = re.sub(r"[^\w.=-]+", "_", whole)
    if readable == whole and len(whole) <= LONGEST:
        return whole
    # two command lines must not meet in one name
    return f"{readable[:LONGEST]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
