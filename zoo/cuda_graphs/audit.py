"""When a step runs eagerly instead of being replayed, to see whether its graph still holds.

Audits come as pairs of consecutive calls, the first soon after a capture. The distances to later
ones grow to `check_every` calls, and are drawn between half and one and a half of that, so that no
period of the program keeps away from them.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

# replays before the first audit
FIRST_DISTANCE = 4


class AuditSchedule:
    """Chooses calls to audit; the same ones in each process."""

    def __init__(self, check_every: int | None) -> None:
        self.check_every = check_every
        self._random = random.Random(0)
        self.restart()

    def restart(self) -> None:
        """Begins anew, with the first distance."""
        self._distance = min(FIRST_DISTANCE, self.check_every or FIRST_DISTANCE)
        self._calls = self._distance * [False] + [True, True]

    def is_due(self) -> bool:
        """Called once for each call; returns whether that is to be audited."""
        if self.check_every is None:
            return False
        if not self._calls:
            low, high = (self._distance + 1) // 2, self._distance * 3 // 2
            self._calls = self._random.randint(low, high) * [False] + [True, True]
            self._distance = min(self._distance * 5 // 4 + 1, self.check_every)
        return self._calls.pop(0)


class Ranks:
    """The processes that train a model together, which learn of a difference all at once.

    They audit the same calls, whether or not each of them has a graph there: none may wait for the
    verdict of a process that does not come.
    """

    def __init__(self, models: Sequence[nn.Module], check_every: int | None) -> None:
        modules = (module for model in models for module in model.modules())
        parallel = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self.group: Any = parallel[0].process_group if parallel else None
        self.are_many = bool(parallel) and distributed.get_world_size(self.group) > 1
        self.schedule, self._captures = AuditSchedule(check_every), 0

    def learn(self, difference: str | None, captures: int, device: torch.device) -> str | None:
        """Exchanges verdicts; returns the difference here, or where there is another.

        A capture in any of them lets the audits of all begin anew.
        """
        differs = (distributed.get_rank(self.group) + 1) * (difference is not None)
        verdict = torch.tensor([differs, captures - self._captures], device=device)
        self._captures = captures
        distributed.all_reduce(verdict, distributed.ReduceOp.MAX, self.group)
        differing, captured = verdict.tolist()
        if differing or captured:
            self.schedule.restart()
        there = f"the step of rank {differing - 1} differs from its graph, as its error says"
        return difference or (there if differing else None)
