"""One plan for all processes of a group: `checkpoint="auto"` times its steps, and clocks differ.

Any plan is exact, so each process might keep its own, but for collectives inside of steps: these
run again in the second run, and must come in the same order everywhere. So the process that comes
first writes its plan into the store that the default group was made with, and all others that plan
for the same steps and inputs take it:

    rank 0    asks, finds nothing, plans, writes
    rank 1    asks, finds nothing, plans, writes too late and gets what rank 0 wrote
    rank 2    asks, finds that

No broadcast: nobody waits for a process that never has such inputs, as where lengths of text differ
or each process has another part of the model.
"""

import hashlib
from collections.abc import Callable

from torch import distributed

from zoo.plan import Plan


def agreed(question: str, decide: Callable[[], Plan]) -> Plan:
    """Returns the plan that the first process to ask this question decided; alone, just decides."""
    if not distributed.is_available() or not distributed.is_initialized():
        return decide()
    store = distributed.distributed_c10d._get_default_store()
    key = f"zoo/{hashlib.sha256(question.encode()).hexdigest()}"
    if store.check([key]):
        return Plan.parse(store.get(key).decode())
    found = decide().text()
    return Plan.parse(store.compare_set(key, "", found).decode())
