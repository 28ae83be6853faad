"""What a comparison with a random number says whatever is drawn.

Layer drop reads a draw in each forward, also where it is off:

    if torch.rand([]) < self.layerdrop:    # layerdrop = 0.0: never
        continue

A uniform draw lies between 0 and 1, so this branch is the same next time, and to ask for it reads
no number out of a tensor. The draw itself stays on the tape, since the stream goes on by it.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.engine.notes import version_of

UNIFORM = frozenset((torch.rand, torch.rand_like))
ENDS = (0.0, 1.0)
ORDERS = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge,
}  # fmt: skip


class Foreseen:
    """Draws and what is known of comparisons with them; tensors are known until they are written.

    Whoever notes a tensor keeps it alive.
    """

    def __init__(self) -> None:
        self.draws: dict[int, int] = {}
        self.answers: dict[int, tuple[int, bool]] = {}

    def note(self, function: Any, args: Sequence[Any], result: Any) -> None:
        """Notes a call that drew uniformly, or that compared such a draw with a number."""
        if function in UNIFORM:
            self.draws[id(result)] = version_of(result)
            return
        order = ORDERS.get(getattr(function, "__name__", "").strip("_"))
        if order is None or len(args) != 2 or not self._is_drawn(args[0]):
            return
        if isinstance(args[1], int | float):
            # a comparison with a number changes its mind once, and here it has not by either end
            said = {order(end, args[1]) for end in ENDS}
            if len(said) == 1:
                self.answers[id(result)] = version_of(result), said.pop()

    def answer(self, value: Any) -> bool | None:
        """Returns what a tensor says as a condition, None where that depends on the draw."""
        version, answer = self.answers.get(id(value), (None, None))
        return answer if answer is not None and version_of(value) == version else None

    def _is_drawn(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.draws.get(id(value)) == version_of(value)
