"""What each step of a chain costs, as numbers: the only thing that a planner looks at.

Bytes are counted by distinct storage. States share storage (a skip connection is handed on by many
steps, DenseNet's features by all that follow), so a sum over shapes would count it many times.
"""

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepCosts:
    """The costs of a chain of n steps for one kind of input.

    Storages of parameters, buffers and the chain's inputs are left out: no plan can change them.
    A recomputation that ends with a step stops when its last tensor is saved: `until_saved`.

    Attributes:
        sizes: bytes of each storage; the sets below hold indices into it.
        live: for each of the n + 1 states (before step 0, ..., after the last) its storages.
        saved: for each step, the storages that autograd saves for its backward.
        forward: for each step, the largest number of new bytes during its forward.
        forward_until_saved: the same, until saved.
        backward: for each step, the largest number of new bytes during its backward, parameter
            gradients included but for those that several steps sum up in one buffer.
        gradients: for each of the n + 1 states, bytes of its gradient.
        flops: for each step, floating point operations of its forward.
        flops_until_saved: the same, until saved.
        seconds: for each step, seconds of its forward, or any numbers in proportion to them:
            planners compare seconds only with each other.
        seconds_until_saved: the same, until saved.
        seconds_backward: for each step, seconds of its backward; the same under every plan.
        blocks: for each step, the number of its block.
        parameter_gradients: for each of the n + 1 states, bytes of the gradients of parameters that
            exist when the backward comes to it; none where it is empty.
        returned: storages that the caller holds until the backward is over: what the chain returned
            to it. Empty where nobody does. A recomputation that makes one again makes another.
        gradients_made: for each step, bytes of such gradients that its forward makes beside the
            bytes above; none where it is empty.
        draws: for each step, how many of its kernels draw random numbers; none where it is empty.
    """

    sizes: tuple[int, ...]
    live: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]
    forward: tuple[int, ...]
    forward_until_saved: tuple[int, ...]
    backward: tuple[int, ...]
    gradients: tuple[int, ...]
    flops: tuple[int, ...]
    flops_until_saved: tuple[int, ...]
    seconds: tuple[float, ...]
    seconds_until_saved: tuple[float, ...]
    seconds_backward: tuple[float, ...]
    blocks: tuple[int, ...]
    parameter_gradients: tuple[int, ...] = ()
    returned: frozenset[int] = frozenset()
    gradients_made: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.saved)

    def with_parameter_gradients(self) -> "StepCosts":
        """Returns costs whose peaks hold the gradients of parameters, from when they exist."""
        if not self.parameter_gradients:
            return self
        made = self.gradients_made or (0,) * len(self)
        return replace(
            self,
            forward=tuple(map(operator.add, self.forward, made)),
            forward_until_saved=tuple(map(operator.add, self.forward_until_saved, made)),
            gradients=tuple(map(operator.add, self.gradients, self.parameter_gradients)),
            parameter_gradients=(),
            gradients_made=(),
        )

    def newly_saved(self) -> tuple[int, ...]:
        """Returns for each step the bytes that it saves and no step before it did."""
        known: set[int] = set()
        found = []
        for storages in self.saved:
            found.append(self.bytes_of(storages - known))
            known |= storages
        return tuple(found)

    def bytes_of(self, storages: Collection[int]) -> int:
        """Returns the bytes of a set of storages."""
        return sum(map(self.sizes.__getitem__, storages)) if storages else 0
