"""A fault at any point of a training step leaves what it leaves in the baseline.

A point is the begin or the end of a module's forward, a gradient on its way through the backward,
and a kernel that is replayed there:

    forward       0 1 | 2 3 | ...                         calls, seen by baseline and plan alike
    backward      a gradient, 0 1 2 (a replay), a gradient, ...

At a forward's call or a gradient the baseline is interrupted at the same one. During a replay,
which the baseline does not have, it is interrupted at the gradient that came last.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import zoo
from tests.training import Record, assert_same, everything, images
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.engine.kernel_settings import read_settings
from zoo.engine.segments import thread
from zoo.models.densenet import DenseNet
from zoo.models.preactivation_resnet import PreactivationResNet, basic
from zoo.models.vit import ViT
from zoo.planner.plan import Plan

pytestmark = pytest.mark.usefixtures("without_fork")

MOST = 16
ERRORS: list[Callable[[str], BaseException]] = [
    RuntimeError,
    KeyboardInterrupt,
    torch.OutOfMemoryError,
]
FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], list[Tensor]]]] = {
    "resnet": (
        lambda: PreactivationResNet(basic, 1, 5, drop_rate=0.2, drop_path_rate=0.3),
        lambda: [images(3, 3, 8) / 20],
    ),
    "densenet": (
        lambda: DenseNet(4, (2, 2), 5, drop_rate=0.2, small_images=True),
        lambda: [images(3, 3, 8) / 20],
    ),
    "lstm": (
        lambda: zoo.lstm(vocabulary=20, embedding=6, hidden=6, chunk_steps=4, chunk_tokens=5),
        lambda: [torch.randint(0, 20, (6, 2)), None, torch.randint(0, 20, (6, 2))],
    ),
    "vnet": (lambda: zoo.vnet(width=2, drop_rate=0.3), lambda: [torch.rand(2, 1, 16, 16, 16)]),
    "vit": (
        lambda: ViT(
            width=8, depth=3, heads=2, classes=5, image_size=32, drop_rate=0.2, drop_path_rate=0.3
        ),
        lambda: [images(2, 3, 32) / 20],
    ),
    "gpt2": (
        lambda: zoo.gpt2_small(depth=2, width=8, heads=2, vocabulary=20, chunk_tokens=7),
        lambda: [torch.randint(0, 20, (2, 8)), torch.randint(0, 20, (2, 8))],
    ),
}


@dataclass(frozen=True)
class Point:
    """Where a training step can be interrupted: what happens there, and the how manieth such."""

    phase: str
    number: int


class Replays(TorchDispatchMode):
    """Sees each kernel that is replayed."""

    def __init__(self, pass_point: Callable[[str], None]) -> None:
        super().__init__()
        self.pass_point = pass_point

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread.replaying:
            self.pass_point("replay")
        return func(*args, **(kwargs or {}))


class Watched:
    """A model whose points are counted; at one of them an error is raised, if any is given."""

    def __init__(self, model: nn.Module, inputs: Callable[[], Sequence[Any]]) -> None:
        self.model, self.inputs = model, inputs
        for part in model.modules():
            part.forward = functools.partial(self.run, part.forward)  # type: ignore[method-assign]
        self.start = {key: value.clone() for key, value in model.state_dict().items()}
        self.flags = {name: part.training for name, part in model.named_modules()}
        self.buffers = dict(model.named_buffers())
        self.settings = read_settings()
        self.forget()

    def forget(self, fault: Point | None = None, error: BaseException | None = None) -> None:
        """Begins to count anew."""
        self.points, self.passed = list[Point](), Counter[str]()
        self.fault, self.error = fault, error

    def run(self, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
        self.pass_point("forward")
        value = forward(*given, **options)
        self.pass_point("forward")
        for tensor in value if isinstance(value, tuple) else [value]:
            known = any(tensor is other for other in given)
            if isinstance(tensor, Tensor) and tensor.requires_grad and not known:
                tensor.register_hook(lambda gradient: self.pass_point("gradient"))
        return value

    def pass_point(self, phase: str) -> None:
        point = Point(phase, self.passed[phase])
        self.passed[phase] += 1
        self.points.append(point)
        if point == self.fault:
            assert self.error is not None
            raise self.error

    def step(self, fault: Point | None = None, error: BaseException | None = None) -> Record:
        """Runs forward and backward from the start's state, to the fault; returns what it left."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        self.forget(fault, error)
        torch.manual_seed(0)
        output = self.call(*self.inputs())
        loss = output.square().mean()
        with Replays(self.pass_point):
            loss.backward()
        return everything(self.model)

    def interrupted(self, fault: Point, error: BaseException) -> Record:
        with pytest.raises(type(error), match="injected") as raised:
            self.step(fault, error)
        assert raised.value is error
        self.check_surroundings()
        return everything(self.model)

    def call(self, *inputs: Any) -> Tensor:
        output = self.model(*inputs)
        return output[0] if isinstance(output, tuple) else output

    def check_surroundings(self) -> None:
        """Asserts that buffers, flags, hooks and the thread's modes are those of before."""
        assert all(value is self.buffers[name] for name, value in self.model.named_buffers())
        assert {name: part.training for name, part in self.model.named_modules()} == self.flags
        for part in self.model.modules():
            assert not any(hooks(part))
        assert not any(value for name, value in vars(torch_modules).items() if _is_hooks(name))
        assert (thread.segment, thread.replaying) == (None, False)
        assert read_settings() == self.settings
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not _get_current_dispatch_mode_stack()
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def hooks(part: nn.Module) -> list[Any]:
    return [value for name, value in vars(part).items() if name.endswith("_hooks")]


def _is_hooks(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def nested(steps: int) -> Plan:
    """Returns a plan with segments in segments, a plain one and kept steps at the end."""
    a, b, c, d, e = (steps * part // 10 for part in (2, 4, 5, 7, 9))
    inner = (*range(a, b), tuple(range(b, c)))
    return Plan([(*range(a), inner, *range(c, d)), tuple(range(d, e)), *range(e, steps)])


def watch(family: str) -> tuple[Watched, Watched, Record]:
    """Builds baseline and checkpointed model of a family, and returns what one step leaves."""
    build, inputs = FAMILIES[family]
    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        pair.append(Watched(build(), inputs))
    baseline, checkpointed = pair
    expected = baseline.step()
    steps = zoo.chain_of(checkpointed.model, tuple(inputs()))
    put_in_force(checkpointed.model, nested(len(steps.names)))
    assert_same(checkpointed.step(), expected)
    return baseline, checkpointed, expected


def chosen(points: Sequence[Point]) -> list[Point]:
    """Returns all points, or when they are many the first and last of each phase and a draw."""
    ends = {p.phase: p for p in points} | {f"{p.phase} first": p for p in reversed(points)}
    others = [point for point in points if point not in ends.values()]
    draw = random.Random(0).sample(others, min(len(others), MOST - len(ends)))
    return [point for point in points if point in draw or point in ends.values()]


def same_point(fault: Point, points: Sequence[Point]) -> Point:
    """Returns where the baseline is interrupted for a fault in the checkpointed model."""
    if fault.phase != "replay":
        return fault
    gradients = [point for point in points[: points.index(fault)] if point.phase == "gradient"]
    return gradients[-1] if gradients else Point("gradient", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_at_any_point_leaves_what_it_leaves_in_the_baseline(family: str) -> None:
    """an exception anywhere | exact | nothing left behind"""
    baseline, checkpointed, after = watch(family)
    points = checkpointed.points
    faults = chosen(points)
    assert {point.phase for point in faults} == {"forward", "replay", "gradient"}
    for number, fault in enumerate(faults):
        error = ERRORS[number % len(ERRORS)]
        expected = baseline.interrupted(same_point(fault, points), error("injected"))
        actual = checkpointed.interrupted(fault, error("injected"))
        if fault.phase == "replay":
            expected, actual = without_gradients(expected), without_gradients(actual)
        assert_same(actual, expected)
        assert_same(checkpointed.step(), after)


def without_gradients(record: Record) -> Record:
    """Leaves out what a backward had reached when it was interrupted."""
    return {key: value for key, value in record.items() if "parameter gradient" not in key}
