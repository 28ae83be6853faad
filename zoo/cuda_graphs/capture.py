"""Captures a training step into a CUDA graph, and replays it.

A capture runs the Python of a step and no kernels; a replay runs the kernels and no Python, and
puts gradients and attributes where the captured step put them.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zoo._torch import PyTree, end_failed_capture
from zoo.cuda_graphs.audit import AuditSchedule
from zoo.cuda_graphs.batch import BatchKind, copy_numbers, detached, own_outputs, static_copy
from zoo.cuda_graphs.guards import Guards
from zoo.cuda_graphs.step_observer import Observation
from zoo.engine.devices import whole_step_captured
from zoo.engine.tensor_state import storage_of
from zoo.errors import GraphError, ZooError
from zoo.invocation import Invocation

# other threads, such as those of a data loader, may go on meanwhile
ERROR_MODE = "thread_local"
# the handle of a pool of memory, by the module of a device
Pool = tuple[int, int]


class DeviceGraphs:
    """The graphs of a device, by its own module, and the stream on which steps are captured."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.device = device

    @functools.cached_property
    def stream(self) -> Any:
        """One for all steps of the device, since libraries keep a workspace for each stream."""
        return self.module.Stream(self.device)

    def pool(self) -> Pool:
        """Returns a pool of memory that several graphs may share."""
        pool: Pool = self.module.graph_pool_handle()
        return pool

    def run_eagerly(self, step: Callable[[], PyTree]) -> PyTree:
        """Runs a step on the stream of the captures, after all before it and before all after."""
        current = self.module.current_stream()
        self.stream.wait_stream(current)
        try:
            with self.module.stream(self.stream):
                return step()
        finally:
            current.wait_stream(self.stream)

    def capture(
        self,
        observe: Callable[[], Observation],
        pool: Pool,
        generators: Iterable[torch.Generator],
    ) -> tuple[Any, Observation, PyTree]:
        """Captures a step; returns the graph, what the step did, and what it returned."""
        graph = self._new_graph(generators)
        failure: BaseException | None = None
        try:
            # torch leaves the stream of a capture that fails in force
            with (
                self.module.stream(self.stream),
                whole_step_captured(),
                _capture_hidden(self.module),
                self._capturing(graph, pool),
            ):
                try:
                    captured = observe()
                    outputs = detached(captured.take_outputs())
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            end_failed_capture(self.device, pool)
            self._end_draws(generators)
            raise _explained(failure or error, error) from failure
        finally:
            # its traceback has this frame, which would keep all of the step alive
            failure = None
        return graph, captured, outputs

    def _new_graph(self, generators: Iterable[torch.Generator]) -> Any:
        graph = self.module.CUDAGraph()
        for generator in generators:
            if generator.device.type == self.stream.device.type:
                graph.register_generator_state(generator)
        return graph

    def _capturing(self, graph: Any, pool: Pool | None) -> Any:
        options = {"pool": pool, "stream": self.stream, "capture_error_mode": ERROR_MODE}
        return self.module.graph(graph, **options)

    def _end_draws(self, generators: Iterable[torch.Generator]) -> None:
        """Captures a single kernel: in torch 2.11 all draws raise from a failure to a success."""
        filled = torch.empty(1, device=self.device)
        # what broke the device, if anything, is told by the error of the capture
        with (
            contextlib.suppress(RuntimeError),
            self.module.stream(self.stream),
            self._capturing(self._new_graph(generators), None),
        ):
            filled.zero_()


@contextlib.contextmanager
def _capture_hidden(module: Any) -> Iterator[None]:
    """Tells the program inside of the block that nothing is captured, but torch and zoo the truth.

    A graph is to be what the step did eagerly: transformers would not use flash attention, say.
    """
    truth = module.is_current_stream_capturing

    def answer() -> bool:
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return bool(asks in ("torch", "zoo") and truth())

    module.is_current_stream_capturing = answer
    try:
        yield
    finally:
        module.is_current_stream_capturing = truth


@functools.cache
def graphs_on(device: torch.device) -> DeviceGraphs | None:
    """Returns the graphs of a device; None if it has none, as the CPU."""
    if device.type in ("cpu", "meta"):
        return None
    has_graphs = hasattr(torch.get_device_module(device), "CUDAGraph")
    return DeviceGraphs(device) if has_graphs else None


def reserved_bytes(device: torch.device) -> int:
    """Returns the bytes that the allocator of a device holds, its graphs' included."""
    read = getattr(torch.get_device_module(device), "memory_reserved", None)
    return 0 if read is None else int(read(device))


def _explained(failure: BaseException, ended: BaseException) -> BaseException:
    """Returns what to raise after a step failed in its capture, which ended with another error."""
    is_refused = "captur" in str(failure) or (failure is not ended and "captur" in str(ended))
    if not is_refused or isinstance(failure, ZooError) or not isinstance(failure, RuntimeError):
        return failure
    return GraphError(
        f"the step cannot be captured: {str(failure).splitlines()[0]}; take what waits for the "
        "device, such as print of a tensor or torch.cuda.synchronize(), out of the step"
    )


class CapturedStep:
    """A graph of a training step, with the memory of its batch and of what it returns.

    Attributes:
        state, record: what the guards saw and the step did when it was captured.
        kind: what its batches have in common.
        schedule, right: when its next audits are, and the last call that was known to be right.
    """

    schedule: AuditSchedule
    right: int

    def __init__(
        self,
        graphs: DeviceGraphs,
        step: Callable[..., PyTree],
        batch: Invocation,
        *,
        state: Guards,
        eager: Observation,
        pool: Pool,
    ) -> None:
        """Captures the step, of which no kernel runs; if that fails, gradients are as before.

        Args:
            eager: what the step did when it began as now.
        """
        unread = eager.state.unread
        self.step, self.static, self.state = step, static_copy(batch), state
        self.kind = BatchKind.of(batch)
        before = [(location, location.read()) for location in state.tensors]
        try:
            for location in state.tensors:
                if location.watched.is_free and location.name in unread:
                    # the step drops it, and its memory is not the pool's
                    location.write(None)
            run = functools.partial(self.static.on, step)
            observe = functools.partial(Observation, run, state, self.static.tensors)
            self.graph, self.record, self.outputs = graphs.capture(observe, pool, state.generators)
            self._check(eager, self.record)
        except BaseException:
            for location, tensor in before:
                if location.read() is not tensor:
                    location.write(tensor)
            raise
        pairs = ((location, location.read(), tensor) for location, tensor in before)
        self.left = [(location, now) for location, now, then in pairs if now is not then]
        state.forget(unread)

    def _check(self, eager: Observation, captured: Observation) -> None:
        """Refuses a capture that is not what the step did eagerly, or did more than replays do."""
        if captured.obstacle is not None:
            raise GraphError(f"the step cannot be a CUDA graph: {captured.obstacle}")
        if (difference := eager.difference(captured)) is not None:
            raise GraphError(
                f"the step does in its capture what it did not do eagerly: {difference}. It may "
                "ask whether it is captured; have it do the same in eager steps"
            )

    def replay(self, batch: Invocation) -> PyTree:
        """Runs the step on a batch; returns what it returns."""
        copy_numbers(self.static, batch)
        self.graph.replay()
        for location, tensor in self.left:
            location.write(tensor)
        return own_outputs(self.outputs)

    def audit(self, graphs: Any, batch: Invocation, call: int) -> tuple[PyTree, str | None]:
        """Runs the step eagerly on a batch, in the place of a replay.

        Returns what the step returns, and how it differed from its graph. What that leaves, such as
        gradients, has the numbers of this step, in the memory that replays write.
        """
        run = functools.partial(graphs.run_eagerly, functools.partial(batch.on, self.step))
        observed = Observation(run, self.state, batch.tensors)
        difference = self.record.difference(observed, "now")
        if observed.obstacle is not None:
            difference = f"{observed.obstacle} ({difference})"
        if difference is not None:
            return detached(observed.take_outputs()), (
                f"{difference}. The graph was right in call {self.right}; replays since then may "
                "have trained by what was so before"
            )
        for location, tensor in self.left:
            if (found := location.read()) is not tensor and storage_of(tensor) is not None:
                tensor.detach().copy_(found.detach())
            location.write(tensor)
        self.right = call
        return own_outputs(observed.take_outputs()), None
