"""Programs that call functions by way of torch: higher-order operators, `torch.func`, hooks.

Each runs plainly, in a segment, by blocks and with a budget, and leaves the same bits.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import _higher_order_ops
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import zoo
from zoo.engine.operator_effects import FOREIGN, FUNCTIONS, WRAPPED, effects_of
from zoo.errors import RecomputeError

higher = torch.ops.higher_order
Program = Callable[[Tensor], Tensor]
PROGRAMS: dict[str, Program] = {}
# torch compiles what higher-order operators call, and its compiler warns
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("without_fork")]


def program(function: Program) -> Program:
    """Adds a function of a tensor that requires a gradient to the programs."""
    PROGRAMS[function.__name__] = function
    return function


def doubled(x: Tensor) -> Tensor:
    return x.sin() * x


def graph(function: Callable[[Tensor], Any]) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(function)


@program
def scanned(x: Tensor) -> Tensor:
    last, every = scan(lambda c, t: ((c / 2 + t).tanh(), (c * t).sin()), torch.zeros(8), x)
    return every + last


@program
def scanned_in_parallel(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b + a, x.tanh(), 0, combine_mode="generic")


@program
def branching(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@program
def looping(x: Tensor) -> Tensor:
    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))
    return x * y


@program
def mapping(x: Tensor) -> Tensor:
    return mapped(lambda row, total: row.sin() * total, x, x.sum())


@program
def of_another_type(x: Tensor) -> Tensor:
    ones = torch.ones(4, 4, dtype=torch.int8)
    return x.exp() * out_dtype(torch.ops.aten.mm.default, torch.int32, ones, ones).sum()


@program
def wrapped(x: Tensor) -> Tensor:
    y = higher.wrap(doubled, x) + higher.wrap_with_set_grad_enabled(False, doubled, x)
    y = higher.tag_activation_checkpoint(graph(doubled), y, use_reentrant=False)
    return higher.dynamo_bypassing_wrapper(lambda function: function, doubled, y)


@program
def in_a_subgraph(x: Tensor) -> Tensor:
    return higher.invoke_subgraph(graph(lambda a: (a.sin() * a,)), "one", x)[0]


@program
def with_random_state(x: Tensor) -> Tensor:
    draw = torch.ops.aten.bernoulli.p
    state, mask = higher.run_and_save_rng_state(draw, x, 0.5)
    return x * mask.detach() + x.sin() * higher.run_with_rng_state(state, draw, x, 0.5).detach()


@program
def written_in_a_wrap(x: Tensor) -> Tensor:
    state = torch.ones(8)
    y = x + state
    higher.wrap(lambda one: one.mul_(2), state)
    return y.sin() + state


@program
def forward_mode(x: Tensor) -> Tensor:
    return jvp(doubled, (x,), (torch.ones_like(x),))[1] + vmap(jacfwd(torch.sin))(x).sum(1)


@program
def batched(x: Tensor) -> Tensor:
    return vmap(lambda row: row.sin() * row.sum() * torch.rand(()), randomness="different")(x)


@program
def gradients(x: Tensor) -> Tensor:
    output, pull = vjp(doubled, x)
    per_row = vmap(grad(lambda row: doubled(row).sum()))(x)
    return per_row * x + pull(output)[0].cos() + vmap(jacrev(doubled))(x).sum(1)


@program
def called_with_other_weights(x: Tensor) -> Tensor:
    weights = {"weight": torch.ones(8, 8) / 9, "bias": torch.zeros(8)}
    return functional_call(nn.Linear(8, 8), weights, (x,)).sin()


@program
def without_hooks(x: Tensor) -> Tensor:
    with disable_saved_tensors_hooks("none here"):
        y = x.exp() * x
        with disable_saved_tensors_hooks("nor here"):
            y = y.sin() * x
        y = zoo.recompute(doubled, y)
    return y.cos() * x


@program
def without_hooks_until_an_error(x: Tensor) -> Tensor:
    try:
        with disable_saved_tensors_hooks("none here"):
            y = x.exp()
            raise KeyError
    except KeyError:
        return y.sin() * y


@program
def stacked_out(x: Tensor) -> Tensor:
    rows = torch.empty(x.shape)
    torch.stack([row.detach() for row in x.unbind(0)], out=rows)
    joined = torch.empty(0)
    torch.cat([row.detach() for row in x.split(1)], out=joined)
    plus = torch.add(x.detach(), 1, out=torch.empty(0))
    return x * rows + joined.sin() * x + plus


@program
def conjugated(x: Tensor) -> Tensor:
    z = torch.complex(x, x.sin()).conj()
    return z.imag.resolve_neg() * z.real + torch.view_as_real(z.resolve_conj()).prod(-1)


@program
def resized(x: Tensor) -> Tensor:
    scratch = SCRATCH.resize_(2, *x.shape)
    scratch[0].copy_(x.detach())
    y = x * scratch[0].sin()
    SCRATCH.resize_(0)
    return y


SCRATCH = torch.empty(0)


class Model(nn.Module):
    def __init__(self, function: Program) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last(self.function(h)).sin()


def steps(model: nn.Module, call: Callable[..., Tensor], count: int = 1) -> list[Tensor]:
    """Returns all bits that equal training steps leave."""
    found = []
    for _ in range(count):
        torch.manual_seed(1)
        model.zero_grad()
        output = call(torch.linspace(-0.5, 1, 40).view(5, 8))
        output.sum().backward()
        found += [output, *(weight.grad.clone() for weight in model.parameters())]
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_exact(name: str) -> None:
    torch.manual_seed(0)
    model = Model(PROGRAMS[name])
    try:
        expected = steps(model, model)
    except AssertionError as error:
        pytest.skip(f"a higher-order operator that this torch cannot run in eager mode: {error}")
    found = {"recompute": steps(model, lambda x: zoo.recompute(model, x))}
    # the first step of the first is traced, so that the plan is in force in the second
    found["blocks"] = steps(zoo.checkpoint(model, "blocks"), model, 2)
    found["auto"] = steps(zoo.checkpoint(model, "auto", max_overhead=9.0), model)
    for way, bits in found.items():
        assert all(map(torch.equal, bits, expected * 2)), way
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_each_higher_order_operator_is_in_the_table() -> None:
    """One of a newer torch is kept whole, as one that may write what it is given."""
    for module in pkgutil.iter_modules(torch._higher_order_ops.__path__):
        importlib.import_module(f"torch._higher_order_ops.{module.name}")
    known = FUNCTIONS | WRAPPED | FOREIGN
    assert known >= _higher_order_ops.keys(), "add them to zoo.engine.operator_effects"
    assert len(known) == len(FUNCTIONS) + len(WRAPPED) + len(FOREIGN)
    for name, operator in _higher_order_ops.items():
        effects = effects_of(operator)
        assert effects.opaque, name
        assert effects.foreign is (name in FOREIGN), name


def test_what_foreign_code_writes_is_kept_as_it_was() -> None:
    """A Triton kernel, say, counts no version of what it writes."""

    class Writing(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("zoo_tests_writing")

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x)

    writing = Writing()

    @writing.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
    def _write(x: Tensor) -> Tensor:
        x.detach().numpy()[:] = 3
        return torch.ones(())

    writing.py_autograd_impl(_write)
    if "zoo_tests_writing" in _higher_order_ops:
        del _higher_order_ops["zoo_tests_writing"]

    def function(x: Tensor) -> Tensor:
        state = torch.arange(4.0)
        y = (x + state).sin() * x
        writing(state)
        return y + (x * state).exp()

    found = []
    for call in (function, lambda x: zoo.recompute(function, x)):
        x = torch.rand(4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        call(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_hooks_of_one_saved_tensor_are_refused_in_a_segment() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y.grad_fn._raw_saved_result.register_hooks(lambda t: t, lambda t: t)
        return y

    x = torch.rand(3, requires_grad=True)
    function(x).sum().backward()
    with pytest.raises(RecomputeError, match=r"`register_hooks` of one saved tensor.*around that"):
        zoo.recompute(function, x)


def test_hooks_of_the_program_around_disabled_ones_are_refused_by_torch() -> None:
    def function(x: Tensor) -> Tensor:
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            disable_saved_tensors_hooks("none here"),
        ):
            return x.exp()

    for call in (function, lambda x: zoo.recompute(function, x)):
        with pytest.raises(RuntimeError, match="none here"):
            call(torch.rand(3, requires_grad=True))
