"""`torch.jit.trace` of segments and inside of them: as without."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.training import Call, assert_exact, plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Calls(nn.Module):
    """Calls a layer, with itself as key and value if it is one of attention."""

    def __init__(self, layer: nn.Module, call: Call = plain) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.call(lambda x: self.layer(x, x, x)[0], x).sin()
        y = self.call(self.layer, x)
        return (y[0] if isinstance(y, tuple) else y).sin()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "convolution": (lambda: nn.Conv2d(3, 3, 1), (1, 3, 8, 8)),
    "norm": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "attention": (lambda: nn.MultiheadAttention(4, 2), (3, 2, 4)),
    "lstm": (lambda: nn.LSTM(4, 4), (3, 2, 4)),
}


def traced(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = torch.jit.trace(module, (x,), check_trace=False)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_inside_of_a_segment(name: str) -> None:
    make, shape = LAYERS[name]

    def program(call: Call) -> list[Tensor | None]:
        module, x = Calls(make()), torch.rand(shape, requires_grad=True)

        def traces_and_calls(x: Tensor) -> Tensor:
            function = traced(module, x.detach())
            # a traced module hands numbers to operators that take tensors
            assert "graph" in str(function.inlined_graph)  # type: ignore[attr-defined]
            return function(x).exp()

        call(traces_and_calls, x).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters()), *module.buffers()]

    assert_exact(program)


@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_of_a_segment(name: str) -> None:
    make, shape = LAYERS[name]

    def program(call: Call) -> list[Tensor | None]:
        x = torch.rand(shape, requires_grad=True)
        function = traced(Calls(make().eval(), call), x.detach())
        function(x).sum().backward()
        return [x.grad]

    assert_exact(program)


def test_zoo_is_imported_inside_of_a_trace() -> None:
    program = """
import torch
class Imports(torch.nn.Module):
    def forward(self, x):
        import zoo.models.lstm
        return zoo.recompute(torch.sin, x)
torch.jit.trace(Imports(), torch.rand(3))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
