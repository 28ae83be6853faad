"""The order in which a plan replays: docs/how-it-works.md draws what runs here."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.documents import ROOT
from tests.training import plain

PAGE = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
DRAWN = re.findall(
    r"^[\w√ ]+: (.+)\nforward +(.+)\nbackward +(.+)\n(\d+) results at the peak, (\d+) runs",
    PAGE,
    re.MULTILINE,
)


class Step(nn.Module):
    """Logs its number when it runs, and when its gradient is done."""

    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__()
        self.number, self.log, self.linear = str(number), log, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.number)
        y = self.linear(x).tanh_()  # in place: both kernels are one step
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda *_: self.log.append(self.number))
        return y


class Replays(TorchDispatchMode):
    """Logs +3 when the product of step 3 is called."""

    def __init__(self, steps: Any, log: list[str]) -> None:
        super().__init__()
        self.numbers = {step.linear.bias.data_ptr(): step.number for step in steps}
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.log.append(f"+{self.numbers[args[0].data_ptr()]}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("text", "forward", "backward", "peak", "runs"), DRAWN)
def test_a_plan_runs_as_it_is_drawn(
    text: str, forward: str, backward: str, peak: str, runs: str
) -> None:
    log: list[str] = []
    plan = zoo.Plan.parse(text)
    model = zoo.checkpoint(nn.Sequential(*(Step(number, log) for number in range(9))), plan)
    x = torch.rand(8192, 64)
    total = model(x).sum()
    assert " ".join(log) == forward
    log.clear()
    with Replays(model, log):
        total.backward()
    assert " ".join(log) == backward
    with zoo.track(model, inputs=x) as timeline:
        model(x).sum().backward()
    assert round(timeline.activation_peak / x.nbytes) == int(peak)
    assert sum(plan.runs()) == int(runs)


def test_three_plans_are_drawn() -> None:
    assert len(DRAWN) == 3


def test_a_replay_leaves_out_the_product_that_ends_a_segment() -> None:
    model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), torch.rand(8, 64)

    def operations(call: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            call(model, x).sum().backward()
        return counter.get_total_flops()

    assert operations(zoo.recompute) == operations(plain)
