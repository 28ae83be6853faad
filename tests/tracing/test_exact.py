"""Any module trains by any option bit for bit as it trains without."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoo
from tests.tracing.models import Net, Reader, Skipper, Tagger, Teacher, UNet
from tests.training import Counting, assert_same, images, needs_numpy, train
from zoo.profiling.peak_memory import trace


def pictures() -> list[Tensor]:
    return [images().requires_grad_()]


def pairs() -> list[Tensor]:
    return [images(2, size=16), torch.rand(2, 1, 1, 1)]


def tokens() -> list[Tensor]:
    return [torch.randint(20, (6, 3))]


def sequences() -> list[Tensor]:
    return [torch.randn(2, 5, 16), torch.randn(2, 4, 16)]


def first(model: nn.Module) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Any:
        output = model(*inputs)
        if isinstance(output, dict):
            return output["logits"]
        return output[0] if isinstance(output, tuple) else output

    return forward


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sequence[Tensor]]]] = {
    "net": (Net, pictures),
    "unet": (UNet, pairs),
    "lstm": (Tagger, tokens),
    "layer drop, off": (Skipper, pictures),
    "transformer": (lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), sequences),
}


def check(model: nn.Module, inputs: Callable[[], Sequence[Tensor]], option: Any) -> nn.Module:
    other = zoo.checkpoint(copy.deepcopy(model), option)
    assert_same(
        train(other, inputs, forward=first(other)), train(model, inputs, forward=first(model))
    )
    return other


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("option", [True, 2, "sqrt", "blocks", "cheap"])
@pytest.mark.parametrize("name", MODELS)
def test_every_option_is_exact(name: str, option: Any) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    check(build(), inputs, option)


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("option", [True, 2, 4, "sqrt", "blocks", "cheap"])
@pytest.mark.parametrize("averages", ["list", "each"])
def test_what_a_forward_writes_where_it_ends(averages: str, option: Any) -> None:
    check(Teacher(averages), lambda: [torch.rand(8, 16)], option)


class Late(nn.Module):
    """Writes at its end, without counting a version, what autograd saved of its first blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        results = [part(x) for part in self.parts]
        found = torch.stack(results).sin().mean()
        for result in results:
            result.data.mul_(0.9)
        return found


@pytest.mark.parametrize("option", [True, "sqrt", "blocks", "cheap"])
def test_a_late_write_that_counts_no_version_reaches_what_was_saved(option: Any) -> None:
    check(Late(), lambda: [torch.rand(8, 16)], option)


class Gate(nn.Module):
    """Ends with a write to a view, whose result autograd saves when the view is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 1:].sigmoid_()
        return y


class Rotation(Gate):
    """Reads, without a gradient, a view whose history autograd has to make anew."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.linear(x).view(-1, 2)) * 1
        real, imaginary = y.real, y.imag
        imaginary.mul_(2)
        self.seen = real.detach()
        return torch.stack([real, imaginary], 1).tanh().view(-1, 16)


@pytest.mark.parametrize("option", [True, "blocks"])
@pytest.mark.parametrize("block", [Gate, Rotation])
def test_writes_to_views_in_blocks(block: type[nn.Module], option: Any) -> None:
    check(nn.Sequential(*(block() for _ in range(3))), lambda: [torch.rand(8, 16)], option)


class Rows(nn.Module):
    """Its blocks are Sequentials in a list, and it keeps what they returned on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.means = []
        for row in self.rows:
            x = x + row(x)
            self.means.append(x.mean())
        return x * sum(self.means)


def test_sequentials_in_a_row_are_blocks_where_there_are_no_others() -> None:
    model = check(Rows(), pictures, True)
    assert zoo.plan_of(model).depth() == 1
    names = zoo.chain_of(Rows(), images()).names
    assert [f"rows.{row}.0" in names for row in range(4)] == [True, True, True, False]


def test_a_number_that_is_read_out_of_a_tensor_does_not_coarsen_the_plan() -> None:
    """a branch on a number of a tensor | | exact, planned"""
    names = zoo.chain_of(Reader(), images()).names
    assert len(names) == len(zoo.chain_of(Net(), images()).names)
    assert set(names) >= {"blocks.0.conv", "blocks.3.drop"}


@pytest.mark.parametrize("rate", [0.5, 1.0, 1e-9])
@pytest.mark.parametrize("option", [True, "blocks", "sqrt"])
def test_a_branch_that_a_draw_decides_is_exact(rate: float, option: Any) -> None:
    """a branch on a random number (layerdrop) | another branch | exact"""
    check(Skipper(rate), pictures, option)


class Asking(nn.Module):
    """Takes the branch that a condition on a draw says, in either of which it computes."""

    def __init__(self, says: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.says = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), says

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x).sin()
        return y.exp() if self.says(torch.rand([])) else (y * 2).cos().exp() * y


@pytest.mark.parametrize(
    "says",
    [
        lambda draw: draw < 0,
        lambda draw: draw >= 0.0,
        lambda draw: draw < 0.5,
        lambda draw: draw == 0,
        lambda draw: draw.sub_(0.5) < 0,
        lambda draw: (draw < 0.5).logical_not_(),
        lambda draw: torch.randn([]) < 0,
    ],
)
def test_a_comparison_with_a_draw_is_exact(says: Callable[[Tensor], Tensor]) -> None:
    check(Asking(says), lambda: [torch.randn(2, 4, requires_grad=True)], True)


def test_layer_drop_may_be_switched_on_later() -> None:
    model, plain = zoo.checkpoint(Skipper()), Skipper()
    plain.load_state_dict(model.state_dict())
    for rate in (0.0, 0.5, 0.0):
        model.rows.rate = plain.rows.rate = rate
        assert_same(train(model, pictures), train(plain, pictures))
    assert zoo.plan_of(model).depth() > 0


def test_a_nested_plan_is_exact() -> None:
    steps = len(zoo.chain_of(Net(), images()).names)
    plan = zoo.Plan([0, (1, (2, 3, (4, 5), 6), 7, 8), (9, (10, 11)), *range(12, steps)])
    assert zoo.plan_of(check(Net(), pictures, plan)).depth() == 3


def test_inputs_that_another_model_made_warn_of_nothing() -> None:
    # as in a GAN's step of the generator; torch warns of the `.grad` of what is no leaf
    made = images() * torch.ones((), requires_grad=True)
    model = zoo.checkpoint(Net())
    for _ in range(2):
        first(model)(made).sum().backward(retain_graph=True)


class Recurrence(nn.Module):
    """Writes its states into one tensor, so that nothing can be cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[0]), torch.empty_like(x)
        for place, row in enumerate(x):
            states[place] = state = self.cell(row, state)
        return states


def test_a_block_that_a_write_in_place_holds_together_is_a_segment() -> None:
    model = check(nn.Sequential(*(Recurrence() for _ in range(3))), rows_of_states, "blocks")
    plan = zoo.plan_of(model)
    assert plan is not None
    assert len(plan) == 3
    assert plan.depth() == 1


def test_a_block_that_makes_no_more_than_its_result_is_none() -> None:
    blocks = (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)) for _ in range(3))
    model = check(nn.Sequential(*blocks), pictures, "blocks")
    assert zoo.plan_of(model) == (0, 1, 2)


def rows_of_states() -> list[Tensor]:
    return [torch.randn(5, 2, 4)]


@pytest.mark.parametrize("build", [Net, Reader, Skipper])
def test_less_memory_is_taken(build: Callable[..., Net]) -> None:
    inputs = torch.rand(4, 4, 32, 32)

    def deep() -> nn.Module:
        torch.manual_seed(0)
        model = build()
        rows = model.rows if isinstance(model, Skipper) else model.blocks
        rows.extend(copy.deepcopy(rows[0]) for _ in range(8))
        return model

    def peak(model: nn.Module) -> int:
        model(inputs).sum().backward()  # plans
        return trace(lambda: model(inputs).sum().backward()).peak

    assert peak(zoo.checkpoint(deep())) < 0.5 * peak(deep())


def test_the_first_step_takes_less_memory_too() -> None:
    model, inputs = Net(blocks=12), torch.rand(4, 4, 32, 32)
    plain = trace(lambda: copy.deepcopy(model)(inputs).sum().backward()).peak
    zoo.checkpoint(model)
    assert trace(lambda: model(inputs).sum().backward()).peak < 0.6 * plain


class Jacobian(nn.Module):
    """Has torch.vmap around a backward inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x).detach().requires_grad_()
        found = self.second(self.first(given).tanh()).sin()

        def row(vector: Tensor) -> Tensor:
            return torch.autograd.grad(found, given, vector, retain_graph=True)[0]

        return x + torch.vmap(row)(torch.ones(3, *x.shape)).sum(0) + self.second(x).cos()


@pytest.mark.parametrize("option", [True, "blocks", "cheap"])
def test_a_backward_inside_of_vmap_inside_of_the_forward(option: Any) -> None:
    model = nn.Sequential(*(Jacobian() for _ in range(3)), nn.Linear(4, 4))
    check(model, lambda: [torch.randn(6, 4)], option)


class Mixture(Net):
    """Draws from a distribution whose kernel has no derivative of torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Dirichlet(super().forward(x).exp()).rsample()


class Ragged(nn.Module):
    """Computes with rows of different lengths, which fake tensors cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, *rows: Tensor) -> Tensor:
        x = torch.nested.as_nested_tensor([*rows], layout=torch.jagged)
        for layer in self.layers:
            x = layer(x).sin()
        return torch.nested.to_padded_tensor(x, 0.0)


def ragged() -> list[Tensor]:
    return [torch.randn(3, 4), torch.randn(5, 4)]


@needs_numpy
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("build", "inputs"), [(Mixture, pictures), (Ragged, ragged)])
def test_what_cannot_run_on_fake_tensors_as_it_is_keeps_to_a_budget(
    build: Callable[[], nn.Module], inputs: Callable[[], Sequence[Tensor]]
) -> None:
    model = build()
    other = zoo.checkpoint(copy.deepcopy(model), memory_budget="64MiB")
    assert_same(train(other, inputs, 3), train(model, inputs, 3))


@pytest.mark.parametrize("build", [Net, lambda: zoo.resnet18(classes=4, in_channels=4)])
@pytest.mark.parametrize("option", [True, "blocks"])
def test_a_mode_of_the_user_sees_no_more_functions(
    build: Callable[[], nn.Module], option: Any
) -> None:
    # of another model: whether an optimizer steps in this one's backward is asked then, too
    other = nn.Linear(2, 2)
    attached = zoo.optimizer_in_backward(other, torch.optim.SGD(other.parameters(), 0.1))
    seen = []
    for checkpoint in (False, option):
        model, mode = zoo.checkpoint(build(), checkpoint), Counting()
        with mode:
            for _ in range(3):
                model(images()).square().sum().backward()
        seen.append(mode.calls)
    attached.remove()
    assert seen[0] == seen[1]


class Doubling(TorchFunctionMode):
    """Makes ranges in double precision, as a default device makes them elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {"dtype": torch.float64} if func is torch.arange else {}
        return func(*args, **given, **(kwargs or {}))


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        assert positions.dtype is torch.float64
        return x.sin() + positions.float()


@pytest.mark.parametrize("option", [{}, pytest.param({"memory_budget": "1GiB"}, marks=needs_numpy)])
def test_a_step_is_traced_under_the_modes_of_the_program(option: Any) -> None:
    with Doubling():
        parts = nn.Sequential(nn.Linear(4, 4), *(Positions() for _ in range(3)))
        zoo.checkpoint(parts, **option)(torch.rand(2, 4)).sum().backward()
    assert parts[0].weight.grad is not None
