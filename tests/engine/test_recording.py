"""The forward of a segment: Python runs once, every kind of kernel is recorded, little is kept."""

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

import zoo
from tests.engine.kernels import Made, bytes_left
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_same,
    gradients,
    module,
    net,
    outcome,
    pictures,
    plain,
    rows,
    state_of,
    train_by,
)
from zoo.engine import segments
from zoo.engine.operator_effects import UNDECLARED, effects_of
from zoo.profiling.peak_memory import trace

Function = Callable[[Tensor], Any]


# in place


def chain_in_place(x: Tensor) -> Tensor:
    y = x * 0.5
    y.add_(1).mul_(2)
    z = y.neg_().exp_() + x
    return z.mul_(0.5).tanh_() * x


def two_views_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[0].mul_(3)
    y[:, 1:3].add_(y[:, :2].detach())
    y.t()[2].exp_()
    return y.sin() * y.cos()


def a_view_of_a_view(x: Tensor) -> Tensor:
    y = (x * 1).view(2, 12)
    y[1].view(3, 4)[::2].neg_()
    y.unsqueeze(0).squeeze_().sigmoid_()
    return y.exp().view(6, 4)


def by_index(x: Tensor) -> Tensor:
    y = x.sin()
    y[[0, 2, 0]] = x[1:4] * 2
    y[y > 0.5] *= 0.25
    y.index_put_((torch.tensor([3]),), x[5], accumulate=True)
    return y.exp()


def by_scatter(x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2, 0], [3, 0, 1, 1]])
    y = x.cos().scatter_add_(0, index, x[:2] * 3).scatter_(1, index[:1] % 4, 0.5)
    return y.index_add_(0, torch.tensor([1, 1]), x[:2]).tanh()


def filled_row_by_row(x: Tensor) -> Tensor:
    y = torch.empty(6, 4)
    for number, row in enumerate(x):
        y[number] = row.sin() * number
    return y.exp().sum(1)


def filled_zeros(x: Tensor) -> Tensor:
    y = torch.zeros(6, 8)
    y[:, ::2] = x.sin()
    y[:, 1::2] = x.cos()
    return y.tanh() @ y.t()


def partly_without_gradients(x: Tensor) -> Tensor:
    y = x * 3
    with torch.no_grad():
        y.detach()[1:3].mul_(0.5)
    return y.sin() + x


def through_data_before_it_is_read(x: Tensor) -> Tensor:
    y = x * 2
    y.data.clamp_(-1, 1)
    return y.sin().exp()


def through_data_after_it_was_saved(x: Tensor) -> Tensor:
    """The baseline's gradient is of the numbers written, as no version tells."""
    y = x.sin()
    z = y.exp() * y
    y.data.mul_(3)
    return z * y.tanh()


def a_view_through_data_after_it_was_saved(x: Tensor) -> Tensor:
    y = (x * 0.5).exp()
    z = y * y.sin()
    y.data[1:3].zero_()
    return z.cos()


def data_replaced(x: Tensor) -> Tensor:
    y = x.sin()
    y.data = torch.ones_like(y) * 0.3
    return y.exp() * x


def set_in_place(x: Tensor) -> Tensor:
    y = torch.zeros(0)
    y.set_((x.detach() * 2).untyped_storage(), 0, (6, 4), (4, 1))
    return (x * y.sin()).exp()


def resized(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.ones(3).mul_(2).resize_(6, 4).fill_(0.7)
        y.add_(x.detach())
    return (x * y).sin().exp()


def transposed_in_place(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.detach().clone()
    z.t_().unsqueeze_(0)
    return (z[0] @ y).exp()


def written_and_transposed_in_place(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.detach().clone().mul_(2).t_()
    return (z @ y).exp()


def swapped_halves(x: Tensor) -> Tensor:
    """Reads what it overwrites, through the same storage."""
    y = x.detach().clone()
    half = y[:3].clone()
    y[:3] = y[3:]
    y[3:] = half
    return (y * x).sin().exp()


def overlapping(x: Tensor) -> Tensor:
    y = (x * 1).view(-1)
    windows = y.as_strided((11, 4), (2, 1)).sin()
    return windows.exp().sum(0)


# results of their own kind


def unsafe_chunks(x: Tensor) -> Tensor:
    one, two = x.sin().unsafe_chunk(2, 1)
    one.mul_(2)
    three, four, five = x.cos().unsafe_split(2, 0)
    return (one.exp() * two).sum() + (three * four * five.sigmoid()).sum()


def conjugate(x: Tensor) -> Tensor:
    y = torch.complex(x, x.sin())
    z = y.conj() * y.exp()
    return (z.conj().mH @ y.resolve_conj()).abs().log1p()


def negative(x: Tensor) -> Tensor:
    y = torch.complex(x, x.cos()).conj()
    return y.imag.exp() * y.imag.sin() + torch.view_as_real(y.resolve_conj())[..., 1]


def written_conjugate(x: Tensor) -> Tensor:
    y = torch.complex(x, x.sin()) * 1
    y.conj().mul_(2j)
    y.conj()[0] = 1 + 1j
    return y.abs().exp()


def of_another_type(x: Tensor) -> Tensor:
    bits = x.detach().view(torch.int32)
    y = (bits & 0x7FFFFFFF).view(torch.float32)
    return (x * y).sin() * y.view(torch.int16).float().view(6, 8).mean()


def written_as_another_type(x: Tensor) -> Tensor:
    y = x.detach() * 1
    y.view(torch.int32).bitwise_and_(0x7FFF0000)
    return (x * y).sin().exp()


def by_out(x: Tensor) -> Tensor:
    with torch.no_grad():
        y, z = torch.empty(6, 4), torch.zeros(4, 4)
        torch.mul(x, 2, out=y)
        torch.matmul(y.t(), y, out=z)
        values, places = torch.empty(6), torch.empty(6, dtype=torch.long)
        torch.max(y, 1, out=(values, places))
    return ((x @ z).sin() * values[:, None]).exp() + x.gather(1, places[:, None])


def by_out_that_grows(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty(0)
        torch.add(x, 1, out=y)
    return (x * y).sin().exp()


def lists(x: Tensor) -> Tensor:
    parts = torch._foreach_mul(list(x.sin().unbind(0)), 2.0)
    with torch.no_grad():
        torch._foreach_add_([part.detach() for part in parts[:2]], 1.0)
    total, *others = torch.meshgrid(parts[0], parts[1], indexing="ij")
    return (total * others[0]).exp().sum() + torch.stack(parts).tanh().sum()


def sorted_and_unique(x: Tensor) -> Tensor:
    values, places = x.sin().sort(1, descending=True)
    _, inverse, counts = torch.unique(places, return_inverse=True, return_counts=True)
    return (values * inverse.float()).exp() * counts.float()


def read_numbers(x: Tensor) -> Tensor:
    y = x.sin()
    scale = y.abs().max().item()
    if y.mean() > -2:
        y = y[: int(torch.count_nonzero(y > -2).clamp(1, 3))]
    return (y * scale).exp()


def of_nothing(x: Tensor) -> Tensor:
    return (torch.cat([x[:0].sin(), x.cos()]).exp() * x[0, 0].sin()).sum(0)


def expanded(x: Tensor) -> Tensor:
    y = x[:, :1].sin().expand(6, 4)
    return (y.exp() * x.mean().expand(4)).tanh()


PROGRAMS: list[Function] = [
    chain_in_place, two_views_in_place, a_view_of_a_view, by_index, by_scatter, filled_row_by_row,
    filled_zeros, partly_without_gradients, through_data_before_it_is_read,
    through_data_after_it_was_saved, a_view_through_data_after_it_was_saved, data_replaced,
    set_in_place, resized, transposed_in_place, written_and_transposed_in_place,
    swapped_halves, overlapping, unsafe_chunks,
    conjugate, negative, written_conjugate, of_another_type, written_as_another_type, by_out,
    by_out_that_grows, lists, sorted_and_unique, read_numbers, of_nothing, expanded,
]  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("function", PROGRAMS)
def test_kernels_of_every_kind(function: Function, depth: int) -> None:
    """With what follows them in the segment, and over two backwards."""

    def program(call: Call) -> Any:
        def inner(x: Tensor) -> Any:
            return call(function, x) if depth == 2 else function(x)

        (x,) = rows()
        loss = call(lambda x: inner(x.sigmoid()).sin().sum(), x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss, x.grad

    assert_exact(program)


CELLS: list[tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = [
    (lambda: nn.LSTMCell(4, 4), rows),
    (lambda: nn.GRUCell(4, 4), rows),
    (lambda: nn.LSTM(4, 3, 2, bidirectional=True, dropout=0.3), rows),
    (lambda: nn.GRU(4, 3, 2, dropout=0.3), rows),
    (lambda: nn.LSTM(4, 5, proj_size=2), rows),
    (lambda: nn.EmbeddingBag(9, 4, mode="max"), lambda: [torch.randint(9, (3, 5))]),
    (nn.CTCLoss, lambda: [torch.randn(9, 2, 5).log_softmax(2).requires_grad_(),
        torch.randint(1, 5, (2, 3)), torch.tensor([9, 7]), torch.tensor([3, 2])]),
    (lambda: nn.MultiheadAttention(4, 2, dropout=0.2), lambda: rows() * 3),
    (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6], 1.0), lambda: [*rows(), torch.arange(6)]),
    (lambda: nn.FractionalMaxPool2d(2, output_size=3), pictures),
    (lambda: nn.MaxPool2d(2, return_indices=True), pictures),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("make", "batch"), CELLS)
def test_layers_whose_kernels_return_lists_or_several_tensors(make: Any, batch: Any) -> None:
    def program(call: Call) -> Any:
        model, inputs = make(), batch()
        with torch.no_grad():
            inputs = [inputs[0] if value is inputs[0] else value for value in inputs]
        output = call(model, *inputs)
        tensors = [
            leaf
            for leaf in torch.utils._pytree.tree_leaves(
                tuple(output) if isinstance(output, tuple) else output
            )
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        sum(leaf.square().sum() for leaf in tensors).backward()
        return output, [value.grad for value in inputs], state_of(model)

    assert_exact(program)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_kernel_that_asks_whether_its_argument_requires_a_gradient() -> None:
    """One of a sparse product returns the places of its maxima then, which its gradient reads."""
    weights = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr()

    def program(call: Call) -> Any:
        (x,) = rows(3)
        call(lambda x: torch.sparse.mm(weights, x * 2, reduce="amax").sin(), x).sum().backward()
        return x.grad

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_python_runs_once(way: Way) -> None:
    """In the forward and in three backwards, whatever the way to call it."""
    calls: list[str] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net(nn.BatchNorm1d(4), nn.Dropout(0.3))
            for name, part in self.layers.named_children():
                part.register_forward_hook(lambda *seen, name=name: calls.append(name))

        def forward(self, x: Tensor) -> Any:
            calls.append("forward")
            return self.layers(x).sin()

    loss = way(zoo.recompute, Noting(), *rows()).sum()
    expected = ["forward", *map(str, range(6))]
    assert calls == expected
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
    assert calls == expected


def test_a_custom_function_runs_once() -> None:
    calls: list[str] = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            calls.append("forward")
            ctx.save_for_backward(x, x * x)
            return x * x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            calls.append("backward")
            _, square = ctx.saved_tensors
            return gradients[0] * 3 * square

    (x,) = rows()
    zoo.recompute(lambda x: Cube.apply(x.sin()).exp(), x).sum().backward()
    assert calls == ["forward", "backward"]


def test_a_custom_operator_runs_once_and_its_result_is_kept() -> None:
    """custom operators | run twice | once, results kept

    Nothing is known about it: it may draw numbers or ask another process.
    """
    calls: list[int] = []
    with torch.library._scoped_library("zoo_tests", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lambda x: (calls.append(1), x * len(calls))[1], "CPU")
        (x,) = rows()
        loss = zoo.recompute(
            lambda x: (torch.ops.zoo_tests.counted(x.detach().sin()) * x).exp(), x
        ).sum()
        loss.backward()
        assert calls == [1]
        (expected,) = torch.autograd.grad((x.detach().sin() * x).exp().sum(), x)
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("name", UNDECLARED)
def test_what_kernels_write_without_saying_so_is_known(name: str) -> None:
    """Also those of devices that are not here; the places are those of this torch."""
    operator = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    names = [argument.name for argument in operator._schema.arguments]
    assert {(names.index(argument), argument) for _, argument in UNDECLARED[name]} <= {
        *effects_of(operator).writes
    }


# memory

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout(0.3),
            nn.Conv2d(4, 2, 1), nn.GELU(),
        ),
        pictures,
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8), rows),
    "recurrent": (lambda: nn.LSTM(4, 3, 2, dropout=0.2), rows),
    "spectral": (lambda: net(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), rows),
    "in place": (lambda: Applied(two_views_in_place), rows),
    "by data": (lambda: Applied(through_data_after_it_was_saved), rows),
    "complex": (lambda: Applied(conjugate), rows),
    "lists": (lambda: Applied(lists), rows),
    "by out": (lambda: Applied(by_out), rows),
    "index": (lambda: Applied(by_index), rows),
}  # fmt: skip


OUTSIDE = {
    "index": ["lift_fresh"],
    "spectral": ["set_"],
    "recurrent": ["zeros", "set_"],
}


class Applied(nn.Module):
    """Calls a function on what a linear layer makes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x).sin())


@pytest.fixture
def without_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_segment_stays_in_memory(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the forward its output alone, after the backward the gradients alone.

    The forward leaves what comes from outside, too: constants out of Python's numbers, zeros that
    nobody wrote, and copies of small ones and of vectors that a power iteration writes. A draw
    that takes fewer bytes than a random state would stay in its place.
    """
    monkeypatch.setattr(segments, "PACKED_SIZE", 0)
    make, batch = MODELS[name]
    named = OUTSIDE.get(name, [])
    model, inputs = make(), batch()

    def nested(*inputs: Tensor, depth: int = depth) -> Any:
        if depth == 1:
            return model(*inputs)
        return zoo.recompute(lambda *inputs: nested(*inputs, depth=depth - 1), *inputs)

    with Made() as made:
        y = zoo.recompute(nested, *inputs)
        y = y[0] if isinstance(y, tuple) else y
        # buffers that the forward moved are the model's
        theirs = [*model.parameters(), *model.buffers()]
        left = [name for name in made.alive(y, *theirs) if name.split()[0] not in named]
        assert left == []
        loss = y.square().sum()
        loss.backward()
        del y, loss
        theirs += [parameter.grad for parameter in model.parameters()]
        assert made.alive(inputs[0].grad, *theirs) == []


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", MODELS)
def test_nothing_stays_where_a_graph_is_dropped(name: str) -> None:
    make, batch = MODELS[name]
    model, inputs = make(), batch()
    with Made() as made:
        zoo.recompute(lambda *inputs: zoo.recompute(model, *inputs), *inputs)
        assert made.alive(*model.buffers()) == []


@pytest.mark.usefixtures("without_collector")
def test_nothing_stays_after_an_error_in_the_forward() -> None:
    model, (x,) = net(nn.BatchNorm1d(4)), rows()

    def function(x: Tensor) -> Tensor:
        model(x).sin().exp()
        raise KeyError("fault")

    with Made() as made:
        with contextlib.suppress(KeyError):
            zoo.recompute(lambda x: zoo.recompute(function, x.sin()), x)
        assert made.alive(*model.buffers()) == []


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("keep", [True, False])
def test_what_a_user_keeps_is_all_that_stays(keep: bool) -> None:
    (x,), kept = rows(), list[Tensor]()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        kept.extend([y[1:]] * keep)
        return y.exp().tanh()

    with Made() as made:
        y = zoo.recompute(function, x)
        assert made.alive(y, *kept) == []
        y.sum().backward(retain_graph=True)
        assert made.alive(y, x.grad, *kept) == []


def test_a_storage_that_comes_in_the_place_of_a_freed_one_is_another() -> None:
    """Python gives its object the identity of the freed one, as it is the next of its size."""

    def function(x: Tensor) -> Tensor:
        products = []
        for _ in range(20):
            made = x * 2
            made.sum()
            del made
            other = torch.from_numpy(numpy.full(x.shape, 3.0, dtype=numpy.float32))
            # by now Python has an object for its storage
            other.untyped_storage()
            other.add_(1)
            products.append(x.sin() * other)
        return torch.stack(products).sum(0)

    def program(call: Call) -> Any:
        (x,) = rows()
        call(function, x).sum().backward()
        return x.grad

    assert_exact(program)


@pytest.mark.usefixtures("without_collector")
def test_what_is_made_in_inference_mode_is_freed_as_without() -> None:
    """A teacher inside of a segment: autograd saves none of it."""
    (x,), most = rows(), list[int]()

    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = x.detach()
            for _ in range(9):
                target = (target @ target.T @ target).tanh()
                most.append(len(made.alive()))
        return (x - target.clone()).square()

    with Made() as made:
        zoo.recompute(function, x).sum().backward()
    assert max(most) <= 4


@pytest.mark.usefixtures("without_collector")
def test_what_only_kernels_read_that_no_gradient_needs_is_freed() -> None:
    (x,), big = rows(), [torch.rand(1 << 13)]

    def function(x: Tensor) -> Tensor:
        metric = (big[0] * x.sum()).mean()
        return x.sin().exp() + metric.detach()

    y = zoo.recompute(function, x)
    reference = StorageWeakRef(big[0].untyped_storage())
    big.clear()
    assert reference.expired()
    y.sum().backward()


def test_a_forward_without_gradients_is_not_recorded() -> None:
    model = net(nn.BatchNorm1d(4))
    with torch.no_grad():
        assert bytes_left(lambda: zoo.recompute(model, *rows())) == 0
    y = zoo.recompute(model.requires_grad_(False), torch.rand(3, 4))
    assert y.grad_fn is None


def test_a_forward_without_gradients_copies_nothing() -> None:
    """Not even what it reads before it writes it, which a replay would need as it was."""
    average = torch.rand(100_000)

    def function(x: Tensor) -> Tensor:
        y = (average * x).sum()
        average.mul_(0.9)
        return y

    with torch.no_grad():
        peak = trace(lambda: zoo.recompute(function, torch.rand(1))).peak
        assert peak == trace(lambda: function(torch.rand(1))).peak


def test_big_tables_that_stay_are_not_copied() -> None:
    """A parameter, a frozen one, a buffer, a closure's and statistics of a norm."""
    size = 100_000
    model = nn.BatchNorm1d(size)
    model.weight.requires_grad_(False)
    model.register_buffer("table", torch.rand(size))
    other = torch.rand(size)

    def function(x: Tensor) -> Tensor:
        return (model(x.expand(2, size) * other) * model.table).sum(1).sin().exp()

    x, outputs = torch.rand(2, 1).requires_grad_(), list[Tensor]()
    assert bytes_left(lambda: outputs.append(zoo.recompute(function, x))) < size


def test_frozen_weights_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 4)).requires_grad_(False)
    (x,), outputs = rows(), list[Tensor]()
    assert bytes_left(lambda: outputs.append(zoo.recompute(model, x))) < 1_000


class Iterated(nn.Module):
    """Has a small vector that each forward writes and reads, as spectral norm has."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("u", torch.rand(wide, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.linear.weight.t() @ self.u[0], dim=0)
            self.u[0].copy_(F.normalize(self.linear.weight @ v, dim=0))
        sigma = self.u[0].clone() @ self.linear.weight @ v
        return torch.tanh(self.linear(x) / sigma)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_small_buffers_written_between_forwards(order: list[int]) -> None:
    """Three forwards before the first backward, each on the vectors that the one before left."""

    def program(call: Call) -> Any:
        model, batches = Iterated(), [rows() for _ in range(3)]
        losses = [call(model, *x).square().sum() for x in batches]
        for number in order:
            losses[number].backward()
        return state_of(model), [x.grad for (x,) in batches]

    assert_exact(program)


def test_a_big_buffer_written_between_forwards_is_refused() -> None:
    """It is not copied for what may come; where each forward has its backward, it is exact."""
    model = Iterated(30_000)
    assert_exact(lambda call: train_by(call, Iterated(30_000), rows, module, 3))
    first, second = (zoo.recompute(model, *rows()).sum() for _ in range(2))
    second.backward()
    model.zero_grad()
    with pytest.raises(zoo.RecomputeError, match=r"a tensor \(4,\) .*was changed in place"):
        first.backward()
    assert model.linear.weight.grad is None


def test_a_buffer_written_by_another_segment_and_by_none() -> None:
    """By a segment inside, by one beside it, and between them without any."""

    def program(call: Call) -> Any:
        buffer, (x,) = torch.ones(4), rows()

        def moving(x: Tensor) -> Tensor:
            y = x * buffer.clone()
            buffer.mul_(1.5).add_(x.detach().mean(0))
            return y.sin()

        y = call(lambda x: call(moving, moving(x)).exp(), x)
        buffer.sub_(0.5)
        y = call(moving, y.tanh())
        buffer.zero_()
        y.sum().backward()
        return x.grad, buffer

    assert_exact(program)


def test_a_compiled_block_stays_compiled() -> None:
    """compiled blocks in a segment | exact | kept

    The graph that the compiler made runs once in the forward and is not traced again.
    """

    def counting(name: str) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            compiles.append(name)

            def run(*args: Any) -> Any:
                runs.append(name)
                return graph(*args)

            return torch._functorch.aot_autograd.make_boxed_func(run)

        return compiler

    def program(call: Call) -> Any:
        compiles.clear(), runs.clear()
        torch._dynamo.reset()
        model, (x,) = net(nn.Linear(4, 4), nn.GELU()), rows()
        backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
        block = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            call(lambda x: block(x).exp(), x).sum().backward()
        return x.grad, gradients(model), [*compiles], [*runs]

    compiles: list[str] = []
    runs: list[str] = []
    expected = outcome(program, plain)
    found = outcome(program, zoo.recompute)
    assert_same(found, expected)
    assert runs == ["forward", "backward"] * 3
    torch._dynamo.reset()


def test_a_recorded_kernel_leaves_five_objects_to_the_garbage_collector() -> None:
    x = torch.rand(8, requires_grad=True)

    def tracked(count: int) -> int:
        gc.collect()
        before = len(gc.get_objects())
        y = zoo.recompute(functools.reduce, lambda y, _: y.sigmoid(), range(count), x)
        left = len(gc.get_objects()) - before
        y.sum().backward()
        return left

    gc.disable()
    try:
        tracked(1)
        # itself, its arguments, its result, and of what autograd saves a handle and a reference
        assert tracked(60) - tracked(40) == 5 * 20
    finally:
        gc.enable()
