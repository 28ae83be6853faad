"""Lines of a forward that a second run of Python, a trace or a recording could get wrong.

A line gets its block and two tensors (4, 6), and returns another one, or writes one of them and
returns None. Nearly all lines are one expression.

Writes that torch does not see go, as docs/limitations.md says, into what the line made and nobody
saved yet, or into what the model holds until its next forward. Two go into a drawn tensor, most
elements of it: a segment may refuse that.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.training import elsewhere

ROWS, WIDTH = 4, 6


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda one, other: (one.sin() * other).tanh() + one, backend="aot_eager")


class Sine(torch.autograd.Function):
    """Saves what is no input and no result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope


def _in_half(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.linear(one).float()


def _filled(block: Any, one: Tensor, other: Tensor) -> Tensor:
    table = torch.zeros(ROWS, WIDTH)
    table[:, ::2] = 0.5
    return one * table + table


def _product_into(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = torch.empty(ROWS, WIDTH)
    torch.mul(one.detach(), 0.7, out=found)
    return found * other


def _added_list(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.detach() * 0.5
    torch._foreach_add_([found, found.new_zeros(2)], 0.25)
    return found * other


def _halves(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = torch.empty(ROWS, WIDTH)
    found[:2], found[2:] = one[:2], other[2:].sin()
    return found


def _by_numpy(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = torch.empty(ROWS, WIDTH)
    found.numpy()[:] = one.detach().float().numpy() * 0.5
    return found.mul_(0.5) * other


def _halves_written(block: Any, one: Tensor, other: Tensor) -> None:
    torch._foreach_add_([one[:2], one[2:]], 0.25)


def _halves_written_without_grad(block: Any, one: Tensor, other: Tensor) -> Tensor:
    def function(found: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_mul_([found[:2], found[2:], found[:, 1:3]], 0.5)
        return one * found

    # written in a segment inside of the one that made it
    found: Tensor = block.shared.call(function, other.detach() * 2)
    return found


def _overlapping_written(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found, added = one * 0.9, other.detach()
    torch._foreach_add_([found[:3], found[1:]], [added[1:], added[:3]])
    return found.tanh()


def _split_into(block: Any, one: Tensor, other: Tensor) -> Tensor:
    def function(found: Tensor) -> Tensor:
        torch.split_copy(one.detach(), 2, out=(found[2:], found[:2]))
        return found * other

    found: Tensor = block.shared.call(function, one.detach() * 2)
    return found


def _unbound_into(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = other.detach() * 0.5
    torch.unbind_copy(one.detach().to(found.dtype), out=[*found.flip(0).unbind()])
    torch.unbind_copy(one.detach().to(found.dtype)[1:], out=[*found[:3].unbind()])
    return found.sin() * one


def _extremes_into(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.detach() * 0.5
    torch.aminmax(other.detach().to(found.dtype), dim=0, out=(found[0], found[2]))
    return found.sin() * one


def _sorted_into(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = torch.ones(2 * ROWS, WIDTH, dtype=one.dtype)
    places = torch.zeros(ROWS, WIDTH, dtype=torch.long)

    def function(found: Tensor) -> Tensor:
        torch.max(one.detach(), 1, keepdim=True, out=(found[:ROWS, :1], places[:, :1]))
        torch.sort(one.detach(), 1, out=(found[ROWS:], places))
        return (found[:ROWS] + found[ROWS:]).sin() * other

    made: Tensor = block.shared.call(function, found)
    return made


def _halves_copied(block: Any, one: Tensor, other: Tensor) -> None:
    torch._foreach_copy_([one[:2], one[2:]], [other[2:], other[:2]])


def _read_and_written(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 2
    read = found.exp().clamp(max=3)
    found[1:].mul_(read[1:])
    return found.sin() * read


def _set_column(block: Any, one: Tensor, other: Tensor) -> None:
    one[:, 1] = 0.25


def _set_diagonal(block: Any, one: Tensor, other: Tensor) -> None:
    one.diagonal().fill_(0.25)


def _written_by_data(block: Any, one: Tensor, other: Tensor) -> Tensor:
    # of this block's own: after a segment nobody sees such a write, as docs/limitations.md says
    found = one.tanh()
    found.data.mul_(0.9)
    return found * other


def _moved_rows(block: Any, one: Tensor, other: Tensor) -> None:
    one.t()[2:4].sub_(0.1)


def _averaged(block: Any, one: Tensor, other: Tensor) -> Tensor:
    block.mean.lerp_(one.detach().mean(0), 0.3)
    return one * (1 + block.mean)


def _replaced(block: Any, one: Tensor, other: Tensor) -> Tensor:
    last, block.mean = block.mean, one.detach().mean(0)
    return other * last.cos()


def _counted(block: Any, one: Tensor, other: Tensor) -> Tensor:
    block.shared.calls += 1
    return one * (1 + 0.01 * block.shared.calls)


def _logged(block: Any, one: Tensor, other: Tensor) -> Tensor:
    block.shared.seen.append(one.detach().sum().item())
    return one / (1 + len(block.shared.seen) % 3)


def _left(block: Any, one: Tensor, other: Tensor) -> None:
    block.shared.left = one


def _taken(block: Any, one: Tensor, other: Tensor) -> Tensor:
    left = block.shared.left
    return one if left is None else one + left.sin()


def _carried(block: Any, one: Tensor, other: Tensor) -> Tensor:
    last, block.shared.carried = block.shared.carried, one.detach()
    return one + 0.1 * last * other


def _hooked(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 1.25
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient * 0.5)
        found.register_hook(block.shared.note)
    return found.sin()


def _lossy(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor * 0.5, lambda tensor: tensor * 1.5):
        return one.sin() * other


def _sloped(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with torch.enable_grad():
        there = one.detach().requires_grad_()
        (found,) = torch.autograd.grad((there.sin() * other.detach()).sum(), there)
    return one + found


def _differentiated(block: Any, one: Tensor, other: Tensor) -> Tensor:
    if not one.requires_grad:
        return one
    found = one.sin().exp()
    (slope,) = torch.autograd.grad(found.sum(), one, retain_graph=True)
    return found * slope


def _without_grad(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.linear(other).exp().clamp(max=2)
    return one * scale


def _tagged(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found: Any = one * 0.75
    found.tag = getattr(one, "tag", 0) + 1
    return found * found.tag


def _read(block: Any, one: Tensor, other: Tensor) -> None:
    # an external reader of the graph: what is saved is looked at before the backward
    found = one.sin().exp()
    if found.grad_fn is not None:
        block.shared.seen.append(found.grad_fn._saved_result.sum().item())


class Squashed(torch.autograd.Function):
    """Writes its argument, and says so; saves what it wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * (1 - x)


class Pair(torch.autograd.Function):
    """Saves inputs and a result, reads them twice, and has a result without a gradient."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        found = (one * other).sin()
        copied = found * 2
        ctx.save_for_backward(one, other, found)
        ctx.mark_non_differentiable(copied)
        return found, copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
        assert len(ctx.saved_tensors) == 3
        one, other, found = ctx.saved_tensors
        slope = gradient * one + found if ctx.needs_input_grad[1] else None
        return gradient * other * (1 - found), slope


class Below(torch.autograd.Function):
    """Returns a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = x * 0.01
        found[1:] += gradient
        return found


class Waves(torch.autograd.Function):
    """Takes no zeros for missing gradients, and keeps a tensor as an attribute."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)
        ctx.x = inputs[0].detach()

    @staticmethod
    def backward(ctx: Any, of_sine: Tensor | None, of_cosine: Tensor | None) -> Tensor | None:
        sine, cosine = ctx.saved_tensors
        if of_sine is None or of_cosine is None:
            return None if of_sine is None else of_sine * cosine
        return of_sine * cosine - of_cosine * sine + ctx.x * 0.01


class Again(torch.autograd.Function):
    """Computes again in its backward what it did not save, with a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin().tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad(x.sin().tanh(), x, gradient)
        return found


def _complex(one: Tensor) -> Tensor:
    return torch.view_as_complex(one.clone(memory_format=torch.contiguous_format).view(ROWS, -1, 2))


def _parts(numbers: Tensor) -> Tensor:
    return torch.cat([numbers.real, numbers.imag], 1)


def _of_two(block: Any, one: Tensor, other: Tensor) -> Tensor:
    pair: Any = TwoTensor(one.detach().clone(), other.detach().clone())
    pair.mul_(0.5)
    return ((pair + 1).sin() * pair).b * one


def _from_a_thread(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found: list[Tensor] = []
    elsewhere(lambda: found.append(other.detach().cos()))
    return one * found[0]


def _backward_on_a_thread(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with torch.enable_grad():
        there = one.detach().requires_grad_()
        loss = block.shared.call(lambda x: (x.sin() * x).tanh(), there).sum()
    elsewhere(loss.backward)
    assert there.grad is not None
    return other + there.grad


def _raised(block: Any, one: Tensor, other: Tensor) -> Tensor:
    made: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        made.append(x.sin().tanh())
        raise KeyError

    with contextlib.suppress(KeyError):
        block.shared.call(function, one * 0.9)
    return made[0] * other


def _inferred(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = other.detach().sin() * 2
    return one + scale


def _by_arrays(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor.detach().numpy(), torch.from_numpy):
        return one.sin() * other.cos()


def _on_cpu(block: Any, one: Tensor, other: Tensor) -> Tensor:
    with save_on_cpu():
        return (one * other).tanh()


def _prehooked(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.sin()
    if found.grad_fn is not None:
        found.grad_fn.register_prehook(lambda gradients: tuple(g * 0.9 for g in gradients))
    return found * other


def _rows_written(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 0.9
    found[:, 1:].sigmoid_()
    return found


def _stale_view(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 0.9
    view = found[1:]
    found.mul_(0.5)
    return torch.cat([view.sin(), found[:1]])


def _stale_rows(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 0.9
    rows = found.unbind(0)
    with torch.no_grad():
        found.mul_(0.5)
    return found.tanh() * rows[-1].detach()


def _other_memory(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 0.9
    read = found.tanh()
    found.data = found.data * 0.5
    return read + found.sin() * other


def _view_of_other_memory(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 0.9
    view = found[1:]
    read = view.sin()
    view.data = view.detach() * 0.5
    found.mul_(0.5)
    return found + read.detach().mean() * view.detach().mean()


def _turned(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.sin()
    read = found.exp()
    found.t_()
    read = read + found.t()
    found.t_()
    return read * found


def _resized(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = torch.ones(2, WIDTH)
    found.resize_(ROWS, WIDTH)
    found[:1].fill_(0.2)
    found[1:] = other[1:].detach()
    return one * found


def _imaginary_part(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = _complex(one)
    found.imag.mul_(0.5)
    return _parts(found)


def _conjugate(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = _complex(one)
    found.conj().mul_(0.3 + 0.1j)
    return _parts(found.sin() * found.conj())


def _given_other_memory(block: Any, one: Tensor, other: Tensor) -> None:
    one.data = one.data * 0.5


def _weight_of_other_memory(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = F.linear(one, block.shared.weight)
    block.shared.weight.data = block.shared.weight.detach() * 0.99
    return found + F.linear(other, block.shared.weight)


def _numpy_into_made(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.detach().float() * 0.5
    read = found.exp()
    found.numpy()[:] *= 0.9
    return (found.sin() + read) * other


def _dlpack_into_made(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.detach() * 0.5
    read = found.exp()
    torch.from_dlpack(found)[1:].neg_()
    return (found + read).sin() * other


def _numpy_into_held(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.float().tanh()
    block.shared.held.append(found)
    found.detach().numpy()[1:] *= 0.5
    return found * other


def _data_into_held(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.sin().exp()
    block.shared.held.append(found)
    read = found * other
    found.data.mul_(0.5)
    return read + found.detach().mean()


def _numpy_into_drawn(block: Any, one: Tensor, other: Tensor) -> None:
    block.shared.held.append(one)
    one.detach().numpy()[:] *= 0.9


def _dlpack_into_drawn(block: Any, one: Tensor, other: Tensor) -> None:
    block.shared.held.append(one)
    torch.from_dlpack(one.detach()).mul_(0.9)


def _averaged_in_place(block: Any, one: Tensor, other: Tensor) -> None:
    with torch.no_grad():
        one.lerp_(other, 0.1)


def _unrolled(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one * 1
    if not found.requires_grad:
        return found
    for _ in range(3):
        energy = (block.linear(found).tanh() * other).sum()
        found = found - 0.1 * torch.autograd.grad(energy, found, create_graph=True)[0]
    return found


def _module_hooked(block: Any, one: Tensor, other: Tensor) -> Tensor:
    linear, note = block.linear, block.shared.note
    hooks = [
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        linear.register_forward_hook(lambda module, args, out: out.sin() * other),
        linear.register_full_backward_pre_hook(lambda module, found: (found[0] * 0.9,)),
        linear.register_full_backward_hook(lambda module, found, out: note(out[0])),
    ]
    try:
        return linear(one) + linear(other)
    finally:
        for hook in hooks:
            hook.remove()


def _hooked_together(block: Any, one: Tensor, other: Tensor) -> Tensor:
    first, second = one.sin(), other.exp().clamp(max=3)
    trained = [value for value in (first, second) if value.requires_grad]
    if trained:
        torch.autograd.graph.register_multi_grad_hook(
            trained, lambda found: [block.shared.note(v) for v in found if v is not None]
        )
    return first * second


def _retained(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.sin()
    if found.requires_grad:
        found.retain_grad()
        block.shared.held.append(found)
    return found * other


def _accumulated(block: Any, one: Tensor, other: Tensor) -> Tensor:
    def note(weight: Tensor) -> None:
        assert weight.grad is not None
        block.shared.note(weight.grad)

    found: Tensor = block.linear(one)
    block.shared.hooks.append(block.linear.weight.register_post_accumulate_grad_hook(note))
    return found


def _view_without_graph(block: Any, one: Tensor, other: Tensor) -> Tensor:
    found = one.sin()
    with torch.no_grad():
        view = found.view(-1)
    return view.view(ROWS, WIDTH).sin() + found


def _moved_back(block: Any, one: Tensor, other: Tensor) -> None:
    one.unsqueeze_(0)
    one.squeeze_(0)


Line = Callable[[Any, Tensor, Tensor], Tensor | None]
MAKES: dict[str, Line] = {
    "linear": lambda block, one, other: block.linear(one),
    "tied": lambda block, one, other: F.linear(one, block.shared.weight),
    "layer norm": lambda block, one, other: block.layer_norm(one),
    "batch norm": lambda block, one, other: block.batch_norm(one),
    "mean norm": lambda block, one, other: block.mean_norm(one),
    "instance norm": lambda block, one, other: block.instance_norm(one[None])[0],
    "group norm": lambda block, one, other: block.group_norm(one),
    "norm of buffers": lambda block, one, other: F.batch_norm(one, block.mean, block.variance,
                                                              training=True),
    "weight norm": lambda block, one, other: block.weight_norm(one),
    "spectral norm": lambda block, one, other: block.spectral_norm(one),
    "hooked norm": lambda block, one, other: block.hooked_norm(one),
    "prelu": lambda block, one, other: block.prelu(one),
    "drop path": lambda block, one, other: block.drop_path(one),
    "dropout": lambda block, one, other: F.dropout(one, 0.3, True),
    "rrelu": lambda block, one, other: F.rrelu(one, training=True),
    "gelu": lambda block, one, other: F.gelu(one),
    "tanh": lambda block, one, other: torch.tanh(one),
    "exp": lambda block, one, other: one.sin().exp(),
    "softmax": lambda block, one, other: one.softmax(1),
    "multiply": lambda block, one, other: one.sigmoid() * other,
    "add": lambda block, one, other: one + other,
    "attend": lambda block, one, other: F.scaled_dot_product_attention(one[None], other[None],
                                                                       one[None])[0],
    "lstm": lambda block, one, other: block.lstm(one)[0],
    "cat": lambda block, one, other: torch.cat([other.chunk(2, 1)[1], one.split(3, 1)[0]], 1),
    "where": lambda block, one, other: torch.where(one > 0, other, one * 0.5),
    "sort": lambda block, one, other: one.sort(0).values + other.amax(1, keepdim=True),
    "cumsum": lambda block, one, other: one.cumsum(0) / 4,
    "mask": lambda block, one, other: one.masked_fill(torch.ones(ROWS, WIDTH).tril() == 0, 0.1),
    "half": lambda block, one, other: (one.bfloat16() * 1.5).float(),
    "autocast": _in_half,
    "generator": lambda block, one, other: one * torch.rand(ROWS, WIDTH,
                                                            generator=block.generator),
    "custom": lambda block, one, other: Sine.apply(one),
    "filled": _filled,
    "gru": lambda block, one, other: block.gru(one[None])[0][0],
    "embedding": lambda block, one, other: block.embedding(one.argmax(1) % 3) + other,
    "frozen": lambda block, one, other: one * block.frozen,
    "attend to itself": lambda block, one, other: one @ (one.t() @ other).softmax(1),
    "normalize": lambda block, one, other: F.normalize(one, dim=1),
    "deviation": lambda block, one, other: one.std(0) * other,
    "double": lambda block, one, other: one.double().sin().float(),
    "fft": lambda block, one, other: torch.fft.fft(one).abs() / 3,
    "alpha dropout": lambda block, one, other: F.alpha_dropout(one, 0.2, True),
    "whole channels": lambda block, one, other: F.feature_alpha_dropout(one, 0.3, True),
    "gumbel": lambda block, one, other: F.gumbel_softmax(one),
    "permute": lambda block, one, other: one[torch.randperm(ROWS)],
    "normal": lambda block, one, other: one + torch.empty_like(one).normal_(),
    "bernoulli": lambda block, one, other: one * torch.bernoulli(torch.full((ROWS, WIDTH), 0.5)),
    "halves": _halves,
    "numpy": _by_numpy,
    "a pair": lambda block, one, other: sum(Pair.apply(one, other)),
    "a view of its own": lambda block, one, other: torch.cat([Below.apply(one), other[:1]]),
    "waves": lambda block, one, other: Waves.apply(one)[0] * other,
    "both waves": lambda block, one, other: torch.cat(Waves.apply(one), 1)[:, 3:9],
    "computed again": lambda block, one, other: Again.apply(one) * other,
    "complex": lambda block, one, other: _parts(_complex(one) * _complex(other).conj()),
    "complex sine": lambda block, one, other: _parts(_complex(one).sin().conj()),
    "of two": _of_two,
    "unfolded": lambda block, one, other: one.unfold(1, 2, 2).sin().sum(2).repeat(1, 2),
    "convolution": lambda block, one, other: F.conv1d(one[:, None], other[:2, None, :3],
                                                      padding=1).sum(1),
    "checkpoint": lambda block, one, other: checkpoint(
        lambda x: F.dropout(x.sin(), 0.3).tanh(), one, use_reentrant=False),
    "inferred": _inferred,
    "by arrays": _by_arrays,
    "on the cpu": _on_cpu,
    "from a thread": _from_a_thread,
}  # fmt: skip
WRITES: dict[str, Line] = {
    "relu": lambda block, one, other: torch.relu_(one + other),
    "scale": lambda block, one, other: one.mul_(0.5),
    "add": lambda block, one, other: one.add_(other.detach(), alpha=0.3),
    "column": _set_column,
    "transposed": _moved_rows,
    "detached": lambda block, one, other: one.detach().mul_(0.9),
    "data": _written_by_data,
    "out": _product_into,
    "list": _added_list,
    "copied": lambda block, one, other: torch.empty_like(one).copy_(other) * one,
    "mask": lambda block, one, other: one.masked_fill_(other > 0.5, 0.5),
    "clamp": lambda block, one, other: one.clamp_(-1, 1),
    "diagonal": _set_diagonal,
    "dropout": lambda block, one, other: F.dropout(one, 0.3, True, inplace=True),
    "read": _read_and_written,
    "index": lambda block, one, other: one.clone().index_add_(0, torch.tensor([0, 2]), other[:2]),
    "squashed": lambda block, one, other: Squashed.apply(one * 0.9),
    "squashed itself": lambda block, one, other: Squashed.apply(one),
    "rows": _rows_written,
    "stale view": _stale_view,
    "stale rows": _stale_rows,
    "other memory": _other_memory,
    "view of other memory": _view_of_other_memory,
    "turned": _turned,
    "moved back": _moved_back,
    "resized": _resized,
    "imaginary": _imaginary_part,
    "conjugate": _conjugate,
    "average": _averaged_in_place,
    "other type": lambda block, one, other: one.copy_(other.mean().double()),
    "put": lambda block, one, other: one.index_put_((torch.tensor([0, 2, 0]),), other[:3],
                                                    accumulate=True),
    "product": lambda block, one, other: one.addcmul_(other.mean(), other[0], value=0.3),
    "rrelu": lambda block, one, other: F.rrelu(one, training=True, inplace=True),
    "given other memory": _given_other_memory,
    "weight of other memory": _weight_of_other_memory,
}  # fmt: skip
# a kernel writes several views of one tensor
SEVERAL: dict[str, Line] = {
    "halves": _halves_written,
    "halves without grad": _halves_written_without_grad,
    "overlapping": _overlapping_written,
    "split": _split_into,
    "unbound": _unbound_into,
    "extremes": _extremes_into,
    "sorted": _sorted_into,
    "copied halves": _halves_copied,
}
UNSEEN: dict[str, Line] = {
    "numpy": _numpy_into_made,
    "dlpack": _dlpack_into_made,
    "numpy, held": _numpy_into_held,
    "data, held": _data_into_held,
    "numpy, drawn": _numpy_into_drawn,
    "dlpack, drawn": _dlpack_into_drawn,
}
VIEWS: dict[str, Line] = {
    "whole": lambda block, one, other: one[:],
    "flat": lambda block, one, other: one.reshape(-1).view(ROWS, WIDTH),
    "transposed twice": lambda block, one, other: one.t().t(),
    "detached view": lambda block, one, other: one.detach(),
    "expanded": lambda block, one, other: one[:1].expand(ROWS, WIDTH),
    "unbound": lambda block, one, other: one.unbind(0)[2].expand(ROWS, WIDTH),
    "strided": lambda block, one, other: one.as_strided(
        one.shape, one.stride(), one.storage_offset()
    ),
    "permuted": lambda block, one, other: one.view(ROWS, 2, 3).transpose(1, 2).reshape(ROWS, WIDTH),
    "data": lambda block, one, other: one.sin().data,
    "without graph": _view_without_graph,
}
PYTHON: dict[str, Line] = {
    "python random": lambda block, one, other: one * (0.5 + random.random()),
    "average": _averaged,
    "replace": _replaced,
    "count": _counted,
    "log": _logged,
    "leave": _left,
    "take": _taken,
    "carry": _carried,
    "hook": _hooked,
    "lossy hooks": _lossy,
    "no grad": _without_grad,
    "tag": _tagged,
    "read": _read,
    "segment": lambda block, one, other: block.shared.call(torch.sin, one.exp().clamp(max=3)),
    "raise": _raised,
    "prehook": _prehooked,
    "module hooks": _module_hooked,
    "hook of two": _hooked_together,
    "retained gradient": _retained,
    "accumulated": _accumulated,
}
# a backward inside of the forward
INNER: dict[str, Line] = {
    "slope": _sloped,
    "gradient": _differentiated,
    "backward on a thread": _backward_on_a_thread,
    "unrolled": _unrolled,
}
COMPILED: dict[str, Line] = {"compiled": lambda block, one, other: _compiled()(one, other)}
LINES = (
    MAKES | VIEWS | PYTHON | INNER | COMPILED
    | {f"write {name}": line for name, line in (WRITES | SEVERAL).items()}
    | {f"unseen {name}": line for name, line in UNSEEN.items()}
)  # fmt: skip
