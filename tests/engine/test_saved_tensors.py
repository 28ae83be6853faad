"""Saved tensors: refused where plain training refuses, and what a user's hooks for them get."""

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import zoo
import zoo.engine.recompute as recompute_module
from tests.engine.kernels import Made, replayed
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_same,
    frozen,
    gradients,
    nested,
    net,
    outcome,
    plain,
    rows,
    state_of,
)

Log = list[Any]

# written inside of the segment, after they were saved


def the_result(x: Tensor, log: Log) -> Tensor:
    y = x.sin().exp()
    z = y * 2
    y.add_(1)
    return z


def the_argument(x: Tensor, log: Log) -> Tensor:
    y = x * 3
    z = y.sin()
    y.mul_(2)
    return z.exp()


def one_of_two(x: Tensor, log: Log) -> Tensor:
    y, z = x.sin(), x.cos()
    product = y * z
    z.zero_()
    return product.tanh()


def through_a_view(x: Tensor, log: Log) -> Tensor:
    y = x.sin()
    z = y.exp() * y
    y.t()[0].add_(1)
    return y.cos() + z


def a_view_through_its_base(x: Tensor, log: Log) -> Tensor:
    y = x.sin()
    z = y[1:].exp() * y[1:]
    y[0] = 0
    return z


def through_detach(x: Tensor, log: Log) -> Tensor:
    y = x.sin()
    z = y.exp() * y
    y.detach().mul_(2)
    return z


def by_turning_it(x: Tensor, log: Log) -> Tensor:
    y = x.sin().exp()
    y.t_()
    return y.cos()


def by_out(x: Tensor, log: Log) -> Tensor:
    y = x.detach() * 2
    z = y * x
    torch.add(y, 1, out=y)
    return z.sin()


def by_a_list(x: Tensor, log: Log) -> Tensor:
    y, other = x.detach() * 2, x.detach() * 3
    z = y * x * other
    torch._foreach_add_([y, other], 1.0)
    return z.sin()


def by_a_norm(x: Tensor, log: Log) -> Tensor:
    mean, variance = x.detach().mean(0), x.detach().var(0)
    y = x * mean
    nn.functional.batch_norm(x, mean, variance, training=True)
    with torch.no_grad():
        mean.add_(1)
    return y.sin()


def an_output(x: Tensor, log: Log) -> Tensor:
    y = x.sin().exp()
    log.append(y)
    return y.cos()


def a_kept_view(x: Tensor, log: Log) -> Tensor:
    y = x.sin().exp()
    log.append(y[2])
    return y.tanh() * y


INSIDE = [
    the_result, the_argument, one_of_two, through_a_view, a_view_through_its_base, through_detach,
    by_turning_it, by_out, by_a_list, by_a_norm,
]  # fmt: skip


def refused(call: Call, function: Callable[[Tensor, Log], Tensor], depth: int) -> Any:
    """Runs a program whose backward is refused; returns how far that came."""
    fired, kept, (x,) = list[int](), list[Any](), rows()
    before, after = x * 0.1, nn.Linear(4, 4)
    before.register_hook(lambda gradient: fired.append(1))

    def whole(x: Tensor) -> Any:
        y = function(x.sigmoid(), kept) if depth == 1 else call(function, x.sigmoid(), kept)
        y.register_hook(lambda gradient: fired.append(2))
        return y

    y = call(whole, before)
    loss = after(y.reshape(-1)[:4]).sum()
    for tensor in kept:
        with torch.no_grad():
            tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"in place|inplace") as raised:
        loss.backward()
    return fired, x.grad, state_of(after), raised.type


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("function", [*INSIDE, an_output, a_kept_view])
def test_tensors_written_after_they_were_saved_are_refused_as_without(
    function: Callable[[Tensor, Log], Tensor], depth: int
) -> None:
    """With a version bump, inside or later through what the user kept: at the same place."""
    torch.manual_seed(0)
    *expected, kind = refused(plain, function, depth)
    torch.manual_seed(0)
    *found, own = refused(zoo.recompute, function, depth)
    assert (kind, own) == (RuntimeError, zoo.RecomputeError)
    assert_same(frozen(found), frozen(expected))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", [r"tensor \(6, 4\)", "nested tensor"])
def test_a_refusal_names_the_tensor_that_was_written(what: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.nested.as_nested_tensor([x.exp()]) if "nested" in what else x.exp()
        z = y.sin()
        y.mul_(2)
        return z.unbind()[0]

    y = zoo.recompute(function, *rows())
    with pytest.raises(zoo.RecomputeError, match=f"a {what} that this gradient needs was changed"):
        y.sum().backward()


# come from outside and are written between forward and backward

PLACES = ["input", "item", "keyword", "closure", "parameter", "frozen", "buffer", "view"]


def written_between(call: Call, place: str, depth: int, size: int) -> Any:
    (x,) = rows()
    layer, frozen_layer = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    table = torch.rand(size, 4)
    layer.register_buffer("scale", torch.rand(size, 4))
    y, item, keyword = x * 1, x * 2, x * 3

    def function(y: Tensor, items: list[Tensor], *, keyword: Tensor) -> Tensor:
        z = layer(y) * items[0] * layer.scale[0]
        return (frozen_layer(z.sin()) * keyword).exp() * table[1]

    def whole(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs) if depth == 2 else function(*args, **kwargs)

    loss = call(whole, y, [item], keyword=keyword).sum()
    target = {
        "input": y, "item": item, "keyword": keyword, "closure": table,
        "parameter": layer.weight, "frozen": frozen_layer.weight, "buffer": layer.scale,
        "view": y[1],
    }[place]  # fmt: skip
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(RuntimeError, match=r"in place|inplace") as raised:
        loss.backward()
    gradients = [value.grad for value in (x, *layer.parameters())]
    return raised.type, gradients


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [2, 30_000])
@pytest.mark.parametrize("place", PLACES)
def test_tensors_of_the_outside_that_are_written_are_refused(
    place: str, size: int, depth: int
) -> None:
    """As in plain training, which needs each of these; no gradient came through the segment."""
    assert written_between(plain, place, depth, size)[0] is RuntimeError
    kind, gradients = written_between(zoo.recompute, place, depth, size)
    assert kind is zoo.RecomputeError
    assert gradients == [None] * 3


def test_a_write_that_plain_training_does_not_mind() -> None:
    """Of an output that nobody saved, of what was read under no_grad, and after the backward."""

    def program(call: Call) -> Any:
        (x,), seen, scale = rows(), torch.rand(6, 4), torch.rand(4)
        layer = nn.Linear(4, 4)

        def function(x: Tensor) -> Tensor:
            with torch.no_grad():
                near = (seen > 0.5).sum() * scale.sum()
            return layer(x).sin() + near

        y = call(function, x)
        y.add_(1)
        seen.zero_()
        scale.fill_(3)
        y.square().sum().backward(retain_graph=True)
        middle = x.grad.clone()
        y.sum().backward()
        with torch.no_grad():
            layer.weight.add_(1)
        return middle, x.grad, state_of(layer)

    assert_exact(program)


# a user's hooks


class Book:
    """Hooks that note what they see."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self.packed: list[Any] = []
        self.unpacked: list[Any] = []
        self.change = change

    def pack(self, tensor: Tensor) -> Any:
        self.packed.append([*frozen(tensor), tensor.is_leaf, type(tensor).__name__])
        return len(self.packed) - 1, self.change(tensor)

    def unpack(self, packed: Any) -> Tensor:
        number, tensor = packed
        self.unpacked.append(number)
        return tensor.float() if tensor.is_floating_point() else tensor

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


def quantized(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def model_of(norm: bool = True) -> nn.Sequential:
    return net(nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))


@pytest.mark.parametrize("change", [quantized, Tensor.clone, lambda tensor: tensor])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_user_see_what_they_see_without(way: Way, where: str, change: Any) -> None:
    """Each saved tensor once, in order, and in the backward as often; lossy ones change numbers."""

    def program(call: Call) -> Any:
        model, (x,), book, other = model_of(), rows(), Book(change), Book(change)

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: Tensor) -> Any:
                with other.hooks() if where != "around" else nullcontext():
                    return self.inner(x).sin()

        with book.hooks() if where != "inside" else nullcontext():
            y = way(call, Inside(), x)
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen = [[b.packed, b.unpacked] for b in (book, other)]
        return x.grad, state_of(model), seen

    assert_exact(program)


def test_a_segment_inside_of_hooks_says_once_that_it_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recompute_module._warn_of_hooks.cache_clear()
    zoo.recompute(torch.sin, rows()[0])
    assert not caplog.records
    with save_on_cpu():
        for _ in range(2):
            zoo.recompute(torch.sin, rows()[0])
    assert [r.message.split(",")[0] for r in caplog.records] == [
        "zoo.recompute recomputes nothing here"
    ]


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_user_around_a_part_of_a_segment(way: Way) -> None:
    """What is saved outside of the part is replayed, and inside it is the user's."""

    def program(call: Call) -> Any:
        model, (x,), book = model_of(), rows(), Book(quantized)

        class Partly(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = model[:2](x).exp()
                with book.hooks():
                    y = call(model[2:], y.sin())
                return y.cos().tanh()

        way(call, Partly(), x).sum().backward()
        return x.grad, state_of(model), book.packed, book.unpacked

    assert_exact(program)


@pytest.mark.parametrize(
    "around", [save_on_cpu, lambda: save_on_cpu(pin_memory=False), nullcontext]
)
@pytest.mark.parametrize("inside", [save_on_cpu, nullcontext])
def test_saving_on_the_cpu(
    around: Callable[[], AbstractContextManager[Any]],
    inside: Callable[[], AbstractContextManager[Any]],
) -> None:
    def program(call: Call) -> Any:
        model, (x,) = model_of(), rows()

        def function(x: Tensor) -> Any:
            with inside():
                return call(model, x)

        with around():
            y = call(function, x)
        y.square().sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


def test_hooks_that_are_forbidden() -> None:
    """`disable_saved_tensors_hooks` is in force around the segment: it runs plainly."""

    def program(call: Call) -> Any:
        model, (x,) = model_of(), rows()
        with disable_saved_tensors_hooks("not here"):
            y = call(lambda x: call(model, x), x)
        y.square().sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


def test_hooks_of_the_user_that_raise() -> None:
    def program(call: Call) -> Any:
        model, (x,) = model_of(), rows()

        def pack(tensor: Tensor) -> Tensor:
            raise KeyError("fault")

        with saved_tensors_hooks(pack, pack), pytest.raises(KeyError, match="fault"):
            call(model, x)
        call(model, x).square().sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


def test_a_look_at_saved_tensors() -> None:
    """As tools that draw a graph do, before and after a backward."""

    def looked(call: Call) -> Any:
        torch.manual_seed(0)
        (x,), found = rows(), []
        y = call(lambda x: (x.sin() * x.cos()).exp(), x)
        found.append(y.grad_fn._saved_result)
        product = y.grad_fn.next_functions[0][0]
        found += [product._saved_self, product._saved_other]
        found.append(product.next_functions[0][0]._saved_self)
        y.sum().backward(retain_graph=True)
        found.append(product._saved_other)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = product._saved_other
        return frozen([*found, x.grad])

    assert_same(looked(zoo.recompute), looked(plain))


def test_a_graph_that_others_hold_gives_all_its_tensors() -> None:
    """Only a part of the graph is used, and a part of it twice."""

    def program(call: Call) -> Any:
        model, (x,) = model_of(), rows()
        middle: Log = []

        def function(x: Tensor) -> Tensor:
            middle.append(model[:3](x))
            return model[3:](middle[0]).exp()

        y = call(function, x)
        found = [torch.autograd.grad(y.sum(), middle[0], retain_graph=True)]
        found.append(torch.autograd.grad(middle[0].square().sum(), x, retain_graph=True))
        del y
        middle[0].sum().backward()
        return found, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_gradients(way: Way, order: int) -> None:
    def program(call: Call) -> Any:
        model, (x,) = model_of(norm=False), rows()
        y, found = way(call, model, x).square().sum(), []
        for _ in range(order):
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(gradient)
            y = gradient.square().sum()
        y.backward()
        return found, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("create", [True, False])
def test_nothing_waits_for_the_garbage_collector(create: bool) -> None:
    """After a backward of a part, one that creates a graph, and one that fails."""
    model, (x,) = model_of(norm=False), rows()

    def left() -> list[str]:
        with Made() as made:
            y = nested(zoo.recompute, model, x)
            found = torch.autograd.grad(y.sum(), x, create_graph=create, retain_graph=True)
            if create:
                found[0].square().sum().backward()
            z = nested(zoo.recompute, model, x)
            z.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                z.sum().backward()
            del y, z, found
            return made.alive(x.grad, *[parameter.grad for parameter in model.parameters()])

    left()  # what torch imports in the first of all is not of interest
    gc.collect()
    gc.disable()
    try:
        assert left() == []
    finally:
        gc.enable()


def test_what_a_backward_passed_is_freed_while_it_goes_on() -> None:
    """A chain of segments holds the tensors of one of them at a time, of a retained graph, too."""
    (x,), counts = rows(), list[int]()

    def part(y: Tensor) -> Tensor:
        return y.sin().exp().tanh().cos().sigmoid()

    with Made() as made:
        y = x * 1
        for _ in range(6):
            y = zoo.recompute(part, y)
            y.register_hook(lambda gradient: counts.append(len(made.alive())))
        y.sum().backward()
    # where a segment begins, nothing of the one before is left but its input
    assert max(counts) <= counts[0] + 2


def test_saved_tensors_that_are_asked_for_one_by_one_are_replayed_once() -> None:
    """Outside of a backward each look replays; in a backward one replay is for all."""
    y = zoo.recompute(lambda x: x.sin().exp().tanh(), *rows())
    assert replayed(lambda: y.grad_fn._saved_result)["tanh"] == 1
    assert replayed(lambda: y.sum().backward())["tanh"] == 1


def test_a_look_outside_of_a_backward_leaves_no_memory() -> None:
    (x,) = rows()
    y = zoo.recompute(lambda x: x.sin().exp().tanh().cos(), x)
    with Made() as made:
        assert y.grad_fn._saved_self.shape == x.shape
        assert made.alive() == []


def other_numbers(x: Tensor, w: Tensor) -> Tensor:
    t = x * 2
    u = t.sin()
    t.data = t.detach() * 3
    return u * w + t.cos()


def numbers_from_outside(x: Tensor, w: Tensor) -> Tensor:
    t = x * 2
    u = t.sin()
    t.data = torch.ones(5)
    return u * w + t.cos()


def of_a_result(x: Tensor, w: Tensor) -> Tensor:
    """The operation that made it has saved the memory, the one that read it the tensor."""
    t = (x * 2).exp()
    u = t * w
    t.data = torch.full((5,), 0.5)
    return u + t * t


def without_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    t = torch.zeros(5)
    u = t * w
    t.data = x.detach() + 1
    return u + t * w * x


def twice(x: Tensor, w: Tensor) -> Tensor:
    t = x.detach().clone()
    u = t * w
    t.data = t * 2
    v = (t * x).sin()
    t.data = t + 1
    return u + v * t


def read_no_more(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    t = x * 2
    u = t.sin() * w
    t.data = torch.ones(5)
    return u, t


@pytest.mark.parametrize(
    "function",
    [other_numbers, numbers_from_outside, of_a_result, without_a_gradient, twice, read_no_more],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_tensor_that_gets_other_memory_by_data_has_its_numbers(function: Any, depth: int) -> None:
    found = []
    for times in (0, depth):
        x, w = (torch.linspace(0.1, 1, 5, requires_grad=True) for _ in range(2))
        call = function
        for _ in range(times):
            call = functools.partial(zoo.recompute, call)
        out = call(x, w)
        out = out if isinstance(out, tuple) else (out,)
        sum(part.square().sum() for part in out).backward()
        found.append(frozen([*out, x.grad, w.grad]))
    assert_same(*found)


def row_view(x: Tensor) -> Tensor:
    return x[1:]


def one_of_several(x: Tensor) -> Tensor:
    return x.unbind(0)[0]


@pytest.mark.parametrize("view", [row_view, one_of_several])
def test_a_view_whose_base_was_written_gets_no_new_history(view: Any) -> None:
    """Autograd makes it when it is asked for, which may be an error, and numbers it then."""

    def program(call: Call) -> Any:
        x = torch.ones(3, 4, requires_grad=True)

        def function(x: Tensor) -> tuple[Tensor, ...]:
            base = x * 1
            v = view(base)
            saved = v.sin()
            v.data = torch.ones_like(v)
            base.mul_(0.5)
            return base, v, saved

        base, v, saved = call(function, x)
        later = base.sin()
        later.sum().backward()
        order = later.grad_fn._sequence_nr() - v.grad_fn._sequence_nr() if view is row_view else 0
        return x.grad, order, saved

    assert_same(outcome(program, zoo.recompute), outcome(program, plain))


@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_of_half_precision_with_whole_statistics(affine: bool) -> None:
    """The kernel adds up in another precision where nothing of the norm is of another type."""
    found = []
    for call in (lambda function, x: function(x), zoo.recompute):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, affine=affine)
        x = torch.randn(4, 4, 6, requires_grad=True)
        y = call(lambda x, norm=norm: norm(x.bfloat16()).sin(), x)
        y.float().square().sum().backward()
        found.append(frozen([y, x.grad, *norm.buffers()]))
    assert_same(*found)


# which torch triggers itself, for each tensor of a graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_backward_by_compiled_autograd_is_as_without_it() -> None:
    eager = functools.partial(torch.compile, backend="eager")

    def program(call: Call) -> Any:
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        loss = nested(call, layer, torch.ones(4, 8)).square().sum()
        with nullcontext() if call is plain else torch._dynamo.compiled_autograd._enable(eager):
            loss.backward()
        return gradients(layer)

    torch._dynamo.reset()
    assert_exact(program)
