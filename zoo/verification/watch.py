"""Finds where in a chain two trainings part: what each step returned, in its forward and replayed.

Watching costs as much memory as the baseline's activations, so it is no part of a verification: a
pair that was found to differ trains once more, up to the step of training in question.
"""

import contextlib
import dataclasses
import functools
from typing import Any

from torch import Tensor, nn

from zoo.chain import Outline, Runner, State, Step, fold, step_names
from zoo.engine.saved import pack, unpack
from zoo.errors import RecomputeError
from zoo.measure.memory import tensors_in
from zoo.verification.records import same, same_bits
from zoo.verification.report import Difference, Place


class Watch:
    """Runs a chain as another runner would and notes what each of its steps returned.

    Which of these is to blame, in this order:

        a step returned something else than the baseline's        its output
        its kernels, replayed, make something else than it        what changed in between
        the gradient of an output is another than the baseline's  the last in the chain: it is the
                                                                  first in the backward
        the step that moves the buffer in question
    """

    def __init__(self, runner: Runner | None, first: Difference) -> None:
        self.runner = runner
        self.plan = runner.plan if runner is not None else None
        self.buffer = first.name if first.kind == "buffer" else None
        self.names: list[str] = []
        self.outputs: dict[int, list[Tensor]] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.unlike: set[int] = set()
        self.moving: set[int] = set()

    def __call__(self, chain: nn.Module, outline: Outline, inputs: State) -> Any:
        """Runs the steps as the runner in its place would have, each of them watched."""
        self.names = step_names(chain, outline.steps)
        steps: list[Step] = [
            functools.partial(self._run, chain, number, step)
            for number, step in enumerate(outline.steps)
        ]
        if self.runner is None:
            return fold(steps, inputs)
        outline = dataclasses.replace(outline, steps=tuple(steps))
        return self.runner(chain, outline, inputs)  # type: ignore[arg-type]

    def place(self, other: "Watch") -> Place | None:
        """Returns the first step of the chain that differs between a baseline and another."""
        if other.names != self.names:
            return None
        outputs = [
            number
            for number, tensors in self.outputs.items()
            if not same(tensors, other.outputs.get(number, []))
        ]
        gradients = [
            number
            for (number, tensor), gradient in self.gradients.items()
            if not same([gradient], [other.gradients.get((number, tensor), gradient[:0])])
        ]
        found = (
            (min(outputs, default=None), "whose output differs"),
            (min(other.unlike, default=None), "whose replay makes something else"),
            (max(gradients, default=None), "whose output gets another gradient"),
            (min(self.moving | other.moving, default=None), "which moves this buffer"),
        )
        return next(
            (
                Place(number, self.names[number], what)
                for number, what in found
                if number is not None
            ),
            None,
        )

    def _run(self, chain: nn.Module, number: int, step: Step, *state: Any) -> Any:
        before = self._moved(chain)
        value = step(*state)
        if number in self.outputs:
            return value
        tensors = tensors_in(value)
        self.outputs[number] = [tensor.detach().clone() for tensor in tensors]
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad and not any(tensor is given for given in state):
                note = functools.partial(self._note, (number, position), pack(tensor))
                tensor.register_hook(note)  # type: ignore[no-untyped-call]
        if before is not None and not same_bits(before, self._moved(chain)):
            self.moving.add(number)
        return value

    def _note(self, key: tuple[int, int], packed: Any, gradient: Tensor) -> None:
        """Notes the gradient of an output, and whether a replay makes that output again."""
        number, position = key
        self.gradients.setdefault(key, gradient.detach().clone())
        # one that was written since cannot be made again, and need not be
        with contextlib.suppress(RecomputeError):
            if not same_bits(unpack(packed), self.outputs[number][position]):
                self.unlike.add(number)

    def _moved(self, chain: nn.Module) -> Any:
        buffers = dict(chain.named_buffers()) if self.buffer is not None else {}
        return buffers[self.buffer].detach().clone() if self.buffer in buffers else None
