"""What ends a step of a drawn model early: an interrupt at a line of the engine, a dropped graph.

interrupt   KeyboardInterrupt before a drawn line; the thread is as it was, and so is the model,
            once its state is loaded: the next steps are exact
fate        graphs that are dropped, some after a part of a backward: no more tensors and nodes
            of autograd's stay than of plain training's
"""

import contextlib
import copy
import gc
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tests.engine.pitfalls import test_dropped_graphs as graphs
from tests.engine.test_interrupts import Interrupt, state_of_thread
from tests.training import plain
from zoo.engine.devices import read_streams, set_streams

FATES: dict[str, Callable[..., list[Any]]] = {
    "dropped": graphs.dropped,
    "after a backward": graphs.after_a_backward,
    "retained": graphs.retained,
    "a part of it": graphs.a_part_of_it,
}


class Living(NamedTuple):
    """What lives of some graphs that were dropped."""

    tensors: int
    nodes: int


def dropped(fate: str, forward: Callable[[], Tensor], weight: Tensor) -> Living:
    """Drops graphs; returns how many tensors come with the last ones, and nodes with all.

    All take the same path where that goes by chance, since another one may hold more. The first
    may make what stays once, such as the plan of that path: only what lives after the last ones and
    never did before counts.
    """
    with graphs.without_collection():
        counts, nodes = list[int](), list[Any]()
        own, chance = random.getstate(), read_streams()
        for _ in range(5):
            random.setstate(own)
            set_streams(chance)
            with contextlib.suppress(Exception):
                nodes += FATES[fate](plain, lambda *_: forward(), weight, weight)
            weight.grad = None
            # by its type: a weak proxy asked for its class asks an object that may be gone
            counts.append(sum(issubclass(type(found), Tensor) for found in gc.get_objects()))
        more = max(counts[-1] - max(counts[1:-1]), 0)
        return Living(more, sum(mark() is not None for mark in nodes))


def interrupted(step: Callable[[], object], restore: Callable[[], None], where: float) -> None:
    """Interrupts a step before one of the lines of the engine that it runs.

    A step that plain training refuses has its lines until then.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):
            step()

    before, every = state_of_thread(), Interrupt(-1)
    every.during(quietly)
    restore()
    interrupt = Interrupt(int(where * len(every.places)))
    interrupt.during(quietly)
    restore()
    changed = {name: now for name, now in state_of_thread().items() if now != before[name]}
    assert not changed, interrupt.places[-1]


def restoring(model: Any, batch: Tensor, optimizer: Any) -> Callable[[], None]:
    """Returns what restores a drawn model and all random streams to what they are now."""
    state, shared = copy.deepcopy(model.state_dict()), model.shared
    kept = {name: getattr(shared, name) for name in ("calls", "steps", "carried", "left")}
    flags = [(part, part.training) for part in model.modules()]
    means = [(block, block.mean) for block in model.blocks]
    drawn = [(block.generator, block.generator.get_state()) for block in model.blocks]
    streams, own, seen = read_streams(), random.getstate(), [*shared.seen]

    def restore() -> None:
        shared.seen[:] = seen
        for name, value in kept.items():
            setattr(shared, name, value)
        for part, training in flags:
            part.training = training
        for block, mean in means:
            block.mean = mean
        for generator, value in drawn:
            generator.set_state(value)
        model.load_state_dict(state)
        optimizer.zero_grad()
        batch.grad = None
        set_streams(streams)
        random.setstate(own)

    return restore
