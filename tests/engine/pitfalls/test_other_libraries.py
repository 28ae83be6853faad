"""What other libraries test their checkpointing by, with `zoo.recompute` in its place.

torchgpipe 0.0.5 and fairscale 0.4.13 ship no tests of it with their packages; the programs are
written anew after what they promise. timm's switch calls `zoo.recompute` itself.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import zoo
from tests.training import Call, assert_exact, assert_same, outcome, plain, state_of


class Logged(torch.autograd.Function):
    """Notes when it runs, as torchgpipe's tests do; the log is compared, too."""

    @staticmethod
    def forward(context: Any, name: str, log: list[str], phony: Tensor, x: Tensor) -> Tensor:
        context.name, context.log = name, log
        log.append(f"{name}:forward")
        return x.detach()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        context.log.append(f"{context.name}:backward")
        return None, None, None, grad


def logged(name: str, log: list[str]) -> Callable[[Tensor], Tensor]:
    phony = torch.zeros(0, requires_grad=True)
    return lambda x: Logged.apply(name, log, phony, x)  # type: ignore[no-any-return, no-untyped-call]


def test_segments_run_in_order_and_once() -> None:
    """Of torchgpipe: a chain of segments; nothing of them runs a second time."""

    def program(call: Call) -> Any:
        log: list[str] = []
        x = torch.rand(1, requires_grad=True)
        for name in "abc":
            x = call(logged(name, log), x)
        x.backward()
        return log

    assert_exact(program)
    forwards, backwards = [f"{name}:forward" for name in "abc"], [f"{n}:backward" for n in "cba"]
    assert outcome(program, zoo.recompute)[0] == [*forwards, *backwards]


def test_a_segment_whose_inputs_need_no_gradient() -> None:
    """Of torchgpipe and fairscale: its parameters get theirs all the same, and only these."""

    def program(call: Call) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        y = call(model, torch.rand(3, 2))
        untrained = call(nn.Tanh(), torch.rand(3, 2))
        y.sum().backward()
        return y, untrained, [p.grad for p in model.parameters()]

    assert_exact(program)


def test_outputs_without_a_gradient_stay_so() -> None:
    """Of torchgpipe: a detached output beside one that is trained, and a mask between segments."""

    def program(call: Call) -> Any:
        model = nn.Linear(2, 2)

        def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = model(x)
            return y.detach(), y, y > 0

        still, y, mask = call(both, torch.rand(3, 2, requires_grad=True))
        second = call(lambda y, mask, still: y.masked_fill(mask, 2) * still, y, mask, still)
        second.sum().backward()
        return still, y, mask, second, state_of(model)

    assert_exact(program)


def test_random_numbers_are_drawn_once() -> None:
    """Of torchgpipe: draws in and between segments, and the stream that is left."""

    def program(call: Call) -> Any:
        x = torch.rand(3, requires_grad=True)
        y = call(lambda x: x * torch.rand(3), x)
        between = torch.rand(3)
        z = call(nn.Dropout(), y * between)
        z.sum().backward()
        return y, z, x.grad, torch.rand(3)

    assert_exact(program)


class Wrapped(nn.Module):
    """A module whose forward is a segment, as fairscale's checkpoint_wrapper makes it."""

    def __init__(self, call: Call, module: nn.Module) -> None:
        super().__init__()
        self.call, self.module = [call], module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call[0](self.module, *args, **kwargs)


class Mixed(nn.Module):
    """Takes tensors and values by position and by name; returns a structure of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(
        self, x: Tensor, scale: float, *, skip: Tensor | None = None, name: str = "h"
    ) -> tuple[OrderedDict[str, Tensor], list[Any]]:
        h = self.norm(self.linear(x)) * scale
        h = h if skip is None else h + skip
        return OrderedDict({name: h, "twice": 2 * h}), [name, None, 3, x.shape[0], h.relu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_wrapped_module_takes_and_returns_any_structure(
    dtype: torch.dtype, offloads: bool
) -> None:
    """Of fairscale: keywords, values that are no tensors, a dict in a tuple, offloading."""

    def program(call: Call) -> Any:
        model = nn.ModuleList(Wrapped(call, Mixed()) for _ in range(2)).to(dtype)
        x = torch.rand(5, 4, dtype=dtype, requires_grad=True)
        around = torch.autograd.graph.save_on_cpu() if offloads else torch.enable_grad()
        with around:
            named, (_, none, *_, skip) = model[0](x, 0.5)
            assert none is None
            named, rest = model[1](named["h"], 2.0, skip=skip, name="g")
        (named["g"] * named["twice"]).float().sum().backward()
        return [*named.items()], rest, x.grad, [state_of(part.module) for part in model]

    assert_exact(program)


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, momentum=None),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.LayerNorm(4),
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_statistics_of_wrapped_norms_move_once(norm: Callable[[], nn.Module]) -> None:
    """Of fairscale, which patches norms for this: nested wrappers, train and eval in turn."""

    def program(call: Call) -> Any:
        inner = Wrapped(call, nn.Sequential(nn.Linear(4, 4), norm(), nn.ReLU()))
        model = Wrapped(call, nn.Sequential(inner, nn.Dropout(0.2), norm()))
        found = []
        for step in range(3):
            x = torch.rand(4, 4, requires_grad=True)
            y = model.train(step != 1)(x)
            y.square().sum().backward()
            found += [y, x.grad, dict(inner.module.named_buffers())]
        return found

    assert_exact(program)


TIMM = {
    "resnet10t": 32,
    "vit_tiny_patch16_224": 32,
    "convnext_atto": 32,
    "mobilenetv3_small_050": 64,
}


@pytest.mark.parametrize("name", TIMM)
def test_the_switch_of_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of timm: outputs, gradients and statistics with set_grad_checkpointing()."""
    timm = pytest.importorskip("timm")
    calls: list[Any] = []

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        return zoo.recompute(function, *args, **kwargs)

    monkeypatch.setattr(torch_checkpoint, "checkpoint", counted)
    monkeypatch.setenv("TIMM_REENTRANT_CKPT", "0")
    size = {"img_size": TIMM[name]} if "vit" in name else {}

    def program(call: Call) -> Any:
        model = timm.create_model(name, num_classes=3, drop_path_rate=0.1, **size)
        model.set_grad_checkpointing(call is not plain)
        found = []
        for _ in range(2):
            y = model(torch.rand(2, 3, TIMM[name], TIMM[name]))
            y.square().sum().backward()
            found.append(y)
        parameters = [p.grad for p in model.parameters()]
        return found, parameters, [*model.buffers()]

    expected = outcome(program, plain)
    assert not calls
    assert_same(outcome(program, counted), expected)
    assert calls
