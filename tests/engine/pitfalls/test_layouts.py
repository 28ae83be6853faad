"""Tensors that are no dense blocks of numbers: sparse, nested, quantized, and classes of users."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import zoo
from tests.training import WAYS, Call, Forward, Way, assert_exact, frozen, net, rows, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*[Qq]uantiz"),
]

FORMS = ["to_sparse", "to_sparse_csr", "to_sparse_csc"]


class Graph(nn.Module):
    """Multiplies by an adjacency that is no dense tensor."""

    def __init__(self, form: str, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        adjacency = getattr(torch.eye(6) * 2, form)()
        if place == "buffer":
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        adjacency = self.adjacency if given is None else given
        return torch.tanh(torch.sparse.mm(adjacency, self.linear(x)))


@pytest.mark.parametrize("place", ["buffer", "attribute", "argument", "keyword"])
@pytest.mark.parametrize("form", FORMS)
def test_a_sparse_adjacency(form: str, place: str) -> None:
    """They have no storage, and the compressed ones cannot be compared."""

    def program(call: Call) -> Any:
        model, (x,) = Graph(form, place), rows()
        adjacency = model.adjacency if place in ("argument", "keyword") else None
        y = call(model, x, given=adjacency) if place == "keyword" else call(model, x, adjacency)
        y.square().sum().backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    assert_exact(program)


def test_a_sparse_tensor_with_a_gradient() -> None:
    """Made inside, of values with a history, and passed in."""

    def program(call: Call) -> Any:
        (x,), indices = rows(), torch.tensor([[0, 2, 5], [1, 1, 3]])
        values = torch.rand(3).requires_grad_()
        given = torch.sparse_coo_tensor(indices, values.sin(), (6, 4)).coalesce()

        def function(x: Tensor, given: Tensor) -> Tensor:
            own = torch.sparse_coo_tensor(indices, x[:3, 0].exp(), (6, 6))
            y = torch.sparse.mm(own, x.sin()) + torch.sparse.mm(given, x[:4].cos())
            return (y + given.to_dense()).tanh()

        call(function, x, given).square().sum().backward()
        return x.grad, values.grad

    assert_exact(program)


def coordinates(values: Tensor) -> Tensor:
    indices = torch.tensor([[0, 1, 2, 3, 5], [1, 2, 0, 4, 5]])
    return torch.sparse_coo_tensor(indices, values, (6, 6), is_coalesced=True)


def compressed(values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3, 4, 4, 5]), torch.tensor([1, 2, 0, 4, 5]), values, (6, 6)
    )


def its_source(values: Tensor, given: Tensor) -> None:
    values.mul_(3)


def its_values(values: Tensor, given: Tensor) -> None:
    given.values().add_(1)


def itself(values: Tensor, given: Tensor) -> None:
    given.mul_(2)


def its_structure(values: Tensor, given: Tensor) -> None:
    given.add_(torch.eye(6).to_sparse() if given.is_sparse else torch.eye(6).to_sparse_csr())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("make", [coordinates, compressed])
@pytest.mark.parametrize("write", [its_source, its_values, itself, its_structure])
def test_a_sparse_tensor_written_after_it_was_read(
    write: Callable[..., None], make: Callable[[Tensor], Tensor], made_inside: bool, way: Way
) -> None:
    """It shares its memory with the values that it was made of, and no version."""

    def program(call: Call) -> Any:
        layer, values, x = nn.Linear(4, 4), torch.rand(5), torch.rand(6, 4)

        def forward(x: Tensor) -> Tensor:
            own = values.sin() if made_inside else values
            given = make(own)
            h = layer(given @ x)
            write(own, given)
            return h.sin() * (given @ x).cos()

        way(call, Forward(forward, layer), x).square().sum().backward()
        return values, state_of(layer)

    assert_exact(program)


@pytest.mark.parametrize("make", [coordinates, compressed])
def test_a_sparse_tensor_whose_memory_is_written_after_the_forward(
    make: Callable[[Tensor], Tensor],
) -> None:
    layer, values = nn.Linear(4, 4), torch.rand(5)
    given = make(values)
    loss = zoo.recompute(lambda x: layer(given @ x).sin(), torch.rand(6, 4)).sum()
    values.mul_(2)
    with pytest.raises(zoo.RecomputeError, match="changed in place after"):
        loss.backward()
    assert layer.weight.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_of_tables(way: Way) -> None:
    def program(call: Call) -> Any:
        bag, layer = nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 4)
        words, starts = torch.randint(9, (7,)), torch.tensor([0, 2, 5])
        model = Forward(lambda words: layer(bag(words, starts).sin()).exp())
        way(call, model, words).sum().backward()
        return bag.weight.grad.coalesce().to_dense(), state_of(layer)

    assert_exact(program)


def pairs(numbers: Tensor) -> Tensor:
    return torch.view_as_complex(numbers.view(-1, 2, 2))


def an_imaginary_part(numbers: Tensor) -> None:
    pairs(numbers).conj().imag.mul_(2)


def an_imaginary_part_as_a_result(numbers: Tensor) -> None:
    torch.exp(numbers[:, :2], out=pairs(numbers).conj().imag)


def a_negative(numbers: Tensor) -> None:
    negative = torch._neg_view(numbers)
    negative.sin_()
    numbers.cos_()
    negative[:, 1] = 3


def a_conjugate(numbers: Tensor) -> None:
    pairs(numbers).conj().mul_(2 + 1j)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "write", [an_imaginary_part, an_imaginary_part_as_a_result, a_negative, a_conjugate]
)
def test_writes_through_negative_and_conjugate_views(
    write: Callable[[Tensor], None], depth: int, read_before: bool
) -> None:
    """What lies in memory is not what the view shows; an inner segment writes a copy of it."""

    def program(call: Call) -> Any:
        (x,), constants = rows(), torch.rand(6, 4)

        def outer(x: Tensor) -> Tensor:
            numbers = constants.sin()

            def inner(x: Tensor) -> Tensor:
                y = x * numbers.clone() if read_before else x
                write(numbers)
                return y * numbers * pairs(numbers).imag.repeat(1, 2)

            return call(inner, x) if depth == 2 else inner(x)

        call(outer, x).sum().backward()
        return x.grad

    assert_exact(program)


def jagged(*parts: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([*parts], layout=torch.jagged)


def strided(*parts: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([*parts])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [jagged, strided])
def test_nested_tensors(make: Callable[..., Tensor], depth: int, inside: bool) -> None:
    """Made in the segment, or passed to it; a layer of them, and a table of parts after it."""

    def program(call: Call) -> Any:
        layer, (one,), (two,) = nn.Linear(4, 4), rows(2), rows(3)

        def function(*parts: Tensor) -> Tensor:
            both = make(*parts) if len(parts) > 1 else parts[0]
            y = call(layer, both) if depth == 2 else layer(both)
            return torch.nested.to_padded_tensor(torch.sin(y), 0.0).tanh()

        parts = (one * 1, two * 1)
        call(function, *(parts if inside else [make(*parts)])).sum().backward()
        return one.grad, two.grad, state_of(layer)

    assert_exact(program)


def test_parts_of_nested_tensors() -> None:
    """Their storage was made by a kernel whose result has no sizes and strides of its own."""

    def program(call: Call) -> Any:
        (one,), (two,) = rows(2), rows(3)

        def function(*parts: Tensor) -> Tensor:
            return torch.cat([part.exp().sin() for part in strided(*parts).unbind()])

        call(function, one, two).sum().backward()
        return one.grad, two.grad

    assert_exact(program)


def test_quantized_tensors() -> None:
    """A table of eight bits, passed in, kept on a module, and made inside."""

    def program(call: Call) -> Any:
        linear, (x,) = nn.Linear(4, 4), rows()
        table = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8)
        model = nn.Module()
        model.table = table

        def function(x: Tensor, given: Tensor) -> Tensor:
            y = linear(x).sin() @ given.dequantize() @ model.table.dequantize()
            own = torch.quantize_per_tensor(y.detach(), 0.05, 0, torch.quint8)
            return (y * own.dequantize()).exp()

        call(lambda x, t: call(function, x, t).sin(), x * 0.1, table).sum().backward()
        return x.grad, state_of(linear)

    assert_exact(program)


def test_training_for_quantization() -> None:
    """Fake quantization with observers that move, per tensor and per channel."""

    def program(call: Call) -> Any:
        model, (x,) = nn.Linear(4, 4), rows()
        scale, point = torch.tensor([0.1]).requires_grad_(), torch.zeros(1).requires_grad_()
        low, high = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        sizes, points = torch.ones(4), torch.zeros(4, dtype=torch.int32)
        size, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
        on = torch.ones(1, dtype=torch.long)

        def function(x: Tensor) -> Tensor:
            y = torch.fused_moving_avg_obs_fake_quant(
                model(x), on, on, low, high, size, zero, 0.1, 0, 255, 0, False, False
            )
            y = torch.fake_quantize_per_channel_affine(y, sizes, points, 1, -8, 7)
            return torch._fake_quantize_learnable_per_tensor_affine(y, scale, point, 0, 9, 1.0)

        for _ in range(3):
            call(lambda x: call(function, x).sin().exp(), x).sum().backward()
        return x.grad, scale.grad, point.grad, low, high, size, zero, state_of(model)

    assert_exact(program)


class Scaled(Tensor):
    """A wrapper of two tensors: numbers, and what they are multiplied with."""

    numbers: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            dtype=numbers.dtype,
            device=numbers.device,
            requires_grad=numbers.requires_grad,
        )

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *context: Any) -> "Scaled":
        return Scaled(parts["numbers"], parts["scale"])

    def dense(self) -> Tensor:
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Scaled(func(args[0].numbers), func(args[0].scale))
        args, kwargs = pytree.tree_map_only(Scaled, Scaled.dense, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.sin, torch.ops.aten.mm)
        return Scaled(out, torch.full((), 2.0)) if keeps else out


@pytest.mark.parametrize("place", ["argument", "item", "closure", "parameter", "inside"])
@pytest.mark.parametrize("depth", [1, 2])
def test_wrapper_subclasses(depth: int, place: str) -> None:
    """sparse, nested, quantized tensors, subclasses | exact | exact; some are kept

    Taken apart by their own dispatch: their parts are recorded, and saved part by part.
    """

    def program(call: Call) -> Any:
        (x,), layer = rows(), nn.Linear(4, 4)
        wrapped = Scaled(torch.rand(6, 4), torch.full((), 3.0))
        if place == "parameter":
            layer.table = nn.Parameter(wrapped)

        def function(x: Tensor, given: Any = None) -> Tensor:
            if place == "inside":
                other: Any = Scaled(x.detach().sin(), torch.full((), 0.5))
            else:
                kept = {"closure": wrapped, "parameter": getattr(layer, "table", None)}
                other = given[0] if place == "item" else kept.get(place, given)
            y = layer(x) * other
            return (y.sin() * y).exp().sum(1)

        given = {"argument": wrapped, "item": [wrapped]}.get(place)
        if place == "item" or depth == 1:
            loss = call(function, x * 0.1, given)
        else:
            loss = call(lambda x: call(function, x, given).sin(), x * 0.1)
        loss = loss.sum()
        if isinstance(loss, Scaled):
            loss = loss.dense()
        loss.backward()
        grads = [x.grad, *[parameter.grad for parameter in layer.parameters()]]
        return [grad.dense() if isinstance(grad, Scaled) else grad for grad in grads]

    assert_exact(program)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_wrapper_that_is_written_after_the_forward_is_refused(is_saved: bool) -> None:
    """A write of a wrapper counts a version of it, and none of the parts that a replay reads."""
    x, table = rows(128)[0], TwoTensor(torch.rand(128, 128), torch.rand(128, 128))
    function = torch.mul if is_saved else torch.add
    y = zoo.recompute(lambda x: function(x.sum(1), table).tanh(), x)
    table[0, 40].zero_()  # where no sample is
    with pytest.raises(zoo.RecomputeError, match=r"changed in place .* \(version 0, now 1\)"):
        y.sum().backward()


def test_a_wrapper_that_is_written_after_it_was_saved_is_refused() -> None:
    """As in the baseline."""
    x = TwoTensor(torch.rand(3), torch.rand(3)).requires_grad_()
    y = zoo.recompute(lambda x: x.exp().mul_(2), x)
    with pytest.raises(zoo.RecomputeError, match="changed in place"):
        y.sum().backward()


def test_a_wrapper_is_freed_with_its_graph() -> None:
    (x,), seen = rows(), []

    def function(x: Tensor) -> Any:
        wrapped = Scaled(x.detach().sin(), torch.full((), 0.5))
        seen.append(weakref.ref(wrapped.numbers))
        return (x * wrapped).sin()

    y = zoo.recompute(function, x)
    assert seen[0]() is None
    del y


class Tagged(Tensor):
    """A tensor of a class of the user's, with an attribute."""

    unit = "m"


@pytest.mark.parametrize("way", WAYS)
def test_subclasses_without_a_dispatch_of_their_own(way: Way) -> None:
    def program(call: Call) -> Any:
        model = net(nn.Dropout(0.3), nn.BatchNorm1d(4))
        x = torch.randn(6, 4).as_subclass(Tagged)
        x.unit = "km"
        x.requires_grad_()
        y = way(call, model, x)
        y.square().sum().backward()
        return type(y).__name__, type(x.grad).__name__, frozen(x.grad), state_of(model)

    assert_exact(program)


class Noted(Tagged):
    """Its constructor takes what is to be noted, too."""

    def __init__(self, data: Any, note: str = "") -> None:
        self.note = note


@pytest.mark.parametrize("kind", [Tagged, Noted, torch.Tensor])
@pytest.mark.parametrize("way", WAYS)
def test_a_class_is_called_with_a_tensor_that_the_segment_made(
    way: Way, kind: type[Tensor]
) -> None:
    def program(call: Call) -> Any:
        def forward(x: Tensor) -> Tensor:
            y = kind(torch.tanh(x) * 2)
            one, none = kind(x.exp().detach()), kind([0.5, 1.5, 2.5, 3.5])
            z = (y.sin() * one + none).as_subclass(Tensor)
            return z * z.exp()

        (x,) = rows()
        way(call, Forward(forward), x).square().sum().backward()
        return x.grad, [type(kind(x)).__name__, getattr(kind(x), "note", None)]

    assert_exact(program)


class Doubled(Tagged):
    """Has a constructor of its own in front of the one that a segment has given."""

    def __new__(cls, data: Tensor) -> Self:
        return super().__new__(cls, data * 2)


def test_a_constructor_is_called_of_an_instance_and_compiled_as_before() -> None:
    zoo.recompute(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
    one = torch.ones(2)
    tagged = Tagged(one)
    assert type(tagged.__new__(Tagged, one)) is type(super(Tagged, tagged).__new__(Tagged, one))
    x = torch.ones(2, requires_grad=True)
    function = torch.compile(lambda x: (Doubled(x.detach()) * x).sum(), backend="aot_eager")
    function(x).backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_class_is_called_in_a_compiled_function_as_before() -> None:
    def function(x: Tensor) -> Tensor:
        return (Tagged(torch.tanh(x)) * 2).sum()

    one, two = (torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2))
    # a segment has seen the class
    zoo.recompute(function, one).backward()
    torch.compile(function, backend="aot_eager", fullgraph=True)(two).backward()
    torch.testing.assert_close(two.grad, one.grad)


CALLS: Counter[str] = Counter()


class Counted(Tensor):
    """Counts the functions that it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[func.__name__] += 1
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_counts_its_functions(way: Way) -> None:
    def program(call: Call) -> Any:
        CALLS.clear()
        x = torch.randn(6, 4).as_subclass(Counted)
        way(call, net(nn.Dropout(0.3)), x * 2).square().sum().backward()
        return dict(CALLS)

    assert_exact(program)


def test_parameters_of_classes_of_the_user() -> None:
    class Weight(nn.Parameter):
        pass

    def program(call: Call) -> Any:
        model, (x,) = nn.Linear(4, 4), rows()
        model.weight = Weight(torch.rand(4, 4))
        call(lambda x: model(model(x).sin()).exp(), x).sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(6, 4).to(torch.float8_e4m3fn),
        lambda: torch.rand(6, 4) > 0.5,
        lambda: torch.randint(9, (6, 4), dtype=torch.uint8),
        lambda: torch.complex(torch.rand(6, 4), torch.rand(6, 4)).conj(),
        lambda: torch._neg_view(torch.rand(6, 4)),
        lambda: torch.rand(6, 4, dtype=torch.float16),
        lambda: torch.rand(4, 6).t(),
        lambda: torch.rand(1, 4).expand(6, 4),
        lambda: torch._efficientzerotensor(6, 4),
        lambda: torch.rand(6, 4, 0),
    ],
)
def test_numbers_of_every_kind(make: Callable[[], Tensor]) -> None:
    """As an argument, in a closure, and written over inside."""

    def program(call: Call) -> Any:
        (x,), given, held = rows(), make(), make()

        def function(x: Tensor, given: Tensor) -> Tensor:
            own = given.clone()
            y = x.sin() * (given + 0 if given.is_complex() else given.float()).sum().abs()
            if own.numel() and own.dtype is not torch.float8_e4m3fn:
                own[0] = own[1]
                y = y + own.to(torch.complex64).abs().sum() * x
            return (y * held.to(torch.complex64).abs().sum()).sin().exp()

        call(lambda x, g: call(function, x, g).tanh(), x, given).sum().backward()
        return x.grad

    assert_exact(program)
