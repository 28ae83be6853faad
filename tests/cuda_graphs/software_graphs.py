"""Graphs in software on the CPU, with real numbers: what a CUDA graph keeps is kept, and no more.

A capture runs a step, writes down its kernels with their arguments, and undoes what they wrote. A
replay calls these kernels again: on the same memory, with the numbers that Python gave them then,
and no Python of the step. Random numbers are drawn as in a CUDA graph: a kernel that found the
generator as another left it in the capture does so in each replay.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zoo._torch import BelowAutograd, DisableTorchDispatch, pytree
from zoo.cuda_graphs.batch import detached
from zoo.cuda_graphs.step_observer import Observation
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import storage_of

# what autograd calls before it copies
COPIED = "aten.new_empty_strided.default"


class SoftwareGraphs:
    """In the place of `zoo.cuda_graphs.capture.DeviceGraphs`."""

    def pool(self) -> str:
        """Returns what stands for a pool."""
        return "pool"

    def run_eagerly(self, step: Callable[[], Any]) -> Any:
        """Runs a step."""
        return step()

    def capture(
        self, observe: Callable[[], Observation], pool: str, generators: Iterable[torch.Generator]
    ) -> tuple["SoftwareGraph", Observation, Any]:
        """Captures a step, whose kernels change nothing."""
        assert pool == "pool"
        graph = SoftwareGraph()
        before = torch.get_rng_state()
        try:
            with _Kernels(graph):
                captured = observe()
                outputs = detached(captured.take_outputs())
            # of gradients, which autograd takes as they are where no graph holds them
            names = ["", *(call.name for call in captured.calls)]
            pairs = zip(names, captured.calls, strict=False)
            captured.calls = [call for before, call in pairs if COPIED not in (before, call.name)]
        finally:
            with DisableTorchDispatch():
                graph.left = key_of(torch.get_rng_state())
                torch.set_rng_state(before)
                graph.found = key_of(before)
                for storage, content in graph.before.values():
                    storage.copy_(content)
        return graph, captured, outputs


def key_of(state: Tensor) -> bytes:
    """Returns a state of the generator as a key."""
    return bytes(state.tolist())


class SoftwareGraph:
    """The kernels of a capture."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Any], Any]] = []
        # storages from outside, with what was in them
        self.before: dict[int, tuple[Any, Any]] = {}
        self.found = self.left = b""

    def replay(self) -> None:
        """Calls the kernels."""
        states = {self.found: torch.get_rng_state()}
        with torch.no_grad(), BelowAutograd():
            for func, args, kwargs, outs, draw in self.calls:
                if draw is not None:
                    torch.set_rng_state(states[draw[0]])
                results = pytree.tree_leaves(func(*args, **kwargs))
                if draw is not None:
                    states[draw[1]] = torch.get_rng_state()
                for out, result in zip(outs, results, strict=True):
                    if isinstance(out, Tensor) and storage_of(out) is not storage_of(result):
                        out.copy_(result)
        torch.set_rng_state(states[self.left])


class _Kernels(KernelMode):
    """Writes kernels down."""

    def __init__(self, graph: SoftwareGraph) -> None:
        super().__init__()
        self.graph = graph
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        assert torch.Tag.data_dependent_output not in func.tags, f"capturing: {func}"
        for tensor in given:
            storage = storage_of(tensor)
            if storage._cdata not in self.own and storage._cdata not in self.graph.before:
                with DisableTorchDispatch():
                    self.graph.before[storage._cdata] = storage, storage.clone()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        found = key_of(torch.get_rng_state()) if draws else b""
        out = func(*args, **kwargs or {})
        draw = (found, key_of(torch.get_rng_state())) if draws else None
        known = {storage_of(one)._cdata for one in given}
        outs = pytree.tree_leaves(out)
        self.own |= {
            number
            for one in outs
            if isinstance(one, Tensor) and (number := storage_of(one)._cdata) not in known
        }
        # arguments and results are held: a graph keeps its memory
        self.graph.calls.append((func, args, kwargs or {}, outs, draw))
        return out
