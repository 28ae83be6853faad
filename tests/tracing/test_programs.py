"""Training programs as people write them: a plan changes none of their numbers, nor what they do.

Each program is built twice, trained for four steps with and without a plan, and changes something
between its steps. Everything is compared bit for bit, and what the code counts, logs or keeps too.
"""

import asyncio
import collections
import copy
import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zoo
from tests.training import assert_same, everything, images
from zoo.engine.kernel_segments import PlannedBranch
from zoo.tracing import planned_forward

STEPS = 4


def nothing(step: int) -> None:
    """Changes nothing."""


def vectors() -> tuple[Any, ...]:
    return (torch.randn(4, 6, requires_grad=True),)


def mean_square(output: Any) -> Tensor:
    return output.float().square().mean()


@dataclasses.dataclass
class Program:
    """A model and how it is trained.

    Attributes:
        change: is called before each step with its number.
        seen: returns what the program left outside of its tensors.
        call: runs the model, or more around it.
    """

    model: nn.Module
    change: Callable[[int], Any] = nothing
    seen: Callable[[], Any] = list
    inputs: Callable[[], tuple[Any, ...]] = vectors
    loss: Callable[[Any], Tensor] = mean_square
    call: Callable[..., Any] | None = None

    def train(self) -> dict[str, Any]:
        """Trains and returns what each step left."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        record: dict[str, Any] = {}
        for step in range(STEPS):
            self.change(step)
            optimizer.zero_grad()
            inputs = self.inputs()
            loss = self.loss((self.call or self.model)(*inputs))
            loss.backward()
            record |= everything(self.model, f"{step} ", inputs, (), loss)
            optimizer.step()
        return record | everything(self.model, "end ")


class Block(nn.Module):
    """A layer, what a program does with its result, and a dropout."""

    def __init__(self, act: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.sin(self.act(self, torch.tanh(self.linear(x))))).exp()


def layers(act: Callable[[Block, Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(*(Block(act) for _ in range(3)))


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[build.__name__] = build
    return build


def all_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every plan be one segment around the whole forward."""

    def whole(operators: Any, boundaries: Any, _: Any, *others: Any) -> PlannedBranch:
        return PlannedBranch(
            operators, boundaries, zoo.Plan([tuple(range(len(boundaries)))]), *others
        )

    monkeypatch.setattr(planned_forward, "PlannedBranch", whole)


@pytest.mark.parametrize("option", [True, "whole"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_it_does_without(
    name: str, option: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "whole":
        all_replayed(monkeypatch)
    records, seen = [], []
    for is_planned in (False, True):
        torch.manual_seed(0)
        made = PROGRAMS[name]()
        if is_planned:
            zoo.checkpoint(made.model)
        records.append(made.train())
        seen.append(made.seen())
    assert_same(records[1], records[0])
    assert seen[1] == seen[0]
    assert (zoo.plan_of(made.model) is None) is (name in NOT_PLANNED)


# hooks of a user's around a model keep what they return
NOT_PLANNED = {"lossy_hooks_around"}


# settings that change between steps


class Schedule:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> float:
        return 1.0 / (1 + self.step)


@program
def a_schedule_object() -> Program:
    schedule = Schedule()
    return Program(
        layers(lambda block, x: x * schedule()), lambda step: setattr(schedule, "step", step)
    )


@program
def a_dropout_hidden_in_a_list() -> Program:
    hidden = [nn.Dropout(0.1)]

    def change(step: int) -> None:
        hidden[0].p = 0.1 * step
        hidden[0].train(step != 3)

    return Program(layers(lambda block, x: hidden[0](x)), change)


@program
def an_activation_that_is_replaced() -> Program:
    model = layers(lambda block, x: x)

    def change(step: int) -> None:
        for block in model:
            block.act = [lambda _, x: x.relu(), lambda _, x: F.gelu(x)][step % 2]

    return Program(model, change)


@program
def children_that_are_replaced() -> Program:
    model = layers(lambda block, x: x)

    def change(step: int) -> None:
        if step == 0:
            model[0].linear.register_forward_hook(lambda module, args, out: out * 3)
        elif step == 1:
            model[1].linear = nn.Linear(6, 6)
        elif step == 2:
            model[2].linear.forward = torch.sigmoid

    return Program(model, change)


# errors that the code handles, and numbers that it reads


@program
def a_number_that_is_read_in_a_try() -> Program:
    def act(block: Block, x: Tensor) -> Tensor:
        try:
            value = x.sum().item()
        except Exception:
            value = 0.5
        return x * value

    return Program(layers(act))


@program
def a_loop_that_an_error_ends() -> Program:
    """Ponders, each sample until it has had enough, as adaptive computation time does."""

    def act(block: Block, x: Tensor) -> Tensor:
        try:
            for _ in range(10):
                x = torch.tanh(block.linear(x))
                if x.mean() < 0:
                    raise StopIteration
        except StopIteration:
            return x * 2
        return x

    return Program(layers(act))


@program
def an_early_exit() -> Program:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x.sigmoid())
            self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block, head in zip(self.net, self.heads, strict=True):
                x = block(x)
                logits = head(x)
                if logits.softmax(1).amax() > 0.9:
                    break
            return logits

    return Program(Exits())


@program
def a_mixture_of_experts() -> Program:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(1).topk(2)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, place = (chosen == number).nonzero(as_tuple=True)
                if len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
            return x + out.tanh()

    return Program(nn.Sequential(Experts(), Experts(), nn.Dropout(0.3), Experts()))


@program
def a_loss_over_chosen_rows() -> Program:
    class Mined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            hard = y[y.square().sum(1) > y.square().sum(1).median()]
            return hard.exp().clamp(max=10) if len(hard) else y

    return Program(Mined())


# random streams


@program
def own_generators() -> Program:
    python, numpy, torch_own = random.Random(3), np.random.default_rng(3), torch.Generator()

    def act(block: Block, x: Tensor) -> Tensor:
        x = x * python.random() + float(numpy.normal())
        return x * (torch.rand(x.shape, generator=torch_own) < 0.7)

    def seen() -> Any:
        return python.random(), numpy.normal(), torch_own.get_state().tolist()

    return Program(layers(act), seen=seen)


@program
def a_seed_set_inside() -> Program:
    def act(block: Block, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return F.dropout(x, 0.5)

    return Program(layers(act))


@program
def a_stream_that_is_forked_inside() -> Program:
    def act(block: Block, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.1)

    return Program(layers(act))


@program
def a_state_that_is_set_inside() -> Program:
    def act(block: Block, x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        x = F.dropout(x, 0.5)
        torch.set_rng_state(before)
        return x + torch.rand_like(x)

    return Program(layers(act))


# what code counts, keeps, caches and prints


@program
def iterators() -> Program:
    scales, count = itertools.cycle([1.0, 2.0, 3.0]), itertools.count(1)
    made = (k for k in range(99))
    return Program(
        layers(lambda block, x: x * next(scales) + next(count) * next(made)),
        seen=lambda: (next(scales), next(count), next(made)),
    )


@functools.lru_cache(maxsize=64)
def table(rows: int, width: int) -> Tensor:
    return torch.arange(rows * width, dtype=torch.float32).view(rows, width).sin()


@program
def a_cached_table() -> Program:
    table.cache_clear()
    counts = itertools.cycle([4, 3, 5])

    def seen() -> Any:
        # as the evaluation of another model would use it
        return [table(rows, 6).sum().item() for rows in (3, 4, 5)], table.cache_info().misses

    return Program(
        layers(lambda block, x: x + table(len(x), 6)), seen=seen,
        inputs=lambda: (torch.randn(next(counts), 6),),
    )  # fmt: skip


@program
def tags_on_outputs() -> Program:
    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = layers(lambda block, x: x * getattr(x, "weighting", 1.0)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.net(x * getattr(x, "weighting", 1.0))
            y.tag = {"calls": self.calls}
            return y

    tags: list[int] = []

    def loss(y: Any) -> Tensor:
        tags.append(y.tag["calls"])
        return y.square().mean() * y.tag["calls"]

    weightings = itertools.cycle([None, 2.0, 3.0])

    def inputs() -> tuple[Any, ...]:
        x = vectors()[0]
        if (weighting := next(weightings)) is not None:
            x.weighting = weighting
        return (x,)

    return Program(Tagged(), seen=lambda: tags, inputs=inputs, loss=loss)


@program
def activations_kept_on_the_module() -> Program:
    """As for a penalty on activations, added to the loss later."""

    def act(block: Block, x: Tensor) -> Tensor:
        block.kept = x.exp()
        return block.kept * 2

    model = layers(act)
    return Program(
        model, loss=lambda y: y.square().mean() + sum(block.kept.abs().mean() for block in model)
    )


@program
def a_state_handed_on() -> Program:
    """Truncated backpropagation through time, with the state on the module."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state = nn.LSTM(6, 6, 2, dropout=0.2), None

        def forward(self, x: Tensor) -> Tensor:
            out, state = self.cell(x.unsqueeze(0), self.state)
            self.state = tuple(part.detach() for part in state)
            return out.exp().squeeze(0)

    model = Memory()
    return Program(model, lambda step: setattr(model, "state", None) if step == 3 else None)


@program
def a_cache_of_keys_and_values() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm = nn.Linear(6, 18), nn.LayerNorm(6)

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
            cache += [key, value]
            keys, values = torch.cat(cache[::2]), torch.cat(cache[1::2])
            return x + F.scaled_dot_product_attention(query, keys, values)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleList(Attention() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            caches: list[list[Tensor]] = [[] for _ in self.net]
            outs = []
            for part in x.split(2):
                y = part
                for layer, cache in zip(self.net, caches, strict=True):
                    y = layer(y, cache)
                outs.append(y)
            return torch.cat(outs)

    return Program(Decoder())


# autograd within


@program
def lossy_hooks_around() -> Program:
    model = layers(lambda block, x: x)

    def call(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return model(x)

    return Program(model, call=call)


@program
def lossy_hooks_inside() -> Program:
    def act(block: Block, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return x.exp().sin()

    return Program(layers(act))


@program
def a_gradient_inside_of_the_forward() -> Program:
    """Forces are gradients of an energy by positions, and are trained for, too."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = self.net(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force + energy

    return Program(Forces())


@program
def a_backward_inside_of_the_forward() -> Program:
    """Sharpens what it was given by a step against itself."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            probe = x.detach().clone().requires_grad_()
            self.net(probe).square().mean().backward(inputs=[probe])
            return self.net(x - 0.1 * probe.grad)

    return Program(Inner())


@program
def a_gradient_penalty() -> Program:
    model = layers(lambda block, x: x * 0.1)

    def call(x: Tensor) -> Tensor:
        score = model(x).mean()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score + (gradient.norm(dim=1) - 1)

    return Program(model, call=call)


@program
def meta_learning_by_functional_call() -> Program:
    """MAML: an inner step on weights of its own, through which the outer loss is derived."""
    model = layers(lambda block, x: x * 0.1)

    def call(x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {
            name: weight - 0.1 * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
        return torch.func.functional_call(model, fast, (x,))

    return Program(model, call=call)


@program
def meta_learning_through_a_part() -> Program:
    """Calls the forward of a container, which is a part of the model."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = layers(lambda block, x: x * 0.1), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.body.forward(x)
            inner = self.head(y).square().mean()
            weight, bias = torch.autograd.grad(
                inner, list(self.head.parameters()), create_graph=True
            )
            return F.linear(y, self.head.weight - weight, self.head.bias - bias)

    return Program(Learner())


@program
def a_derivative_of_ones_own() -> Program:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.save_for_backward(x.exp())
            ctx.scale = scale
            return (x * scale).round()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            (grown,) = ctx.saved_tensors
            return gradient * grown * ctx.scale, None

    scales = itertools.count(1)
    return Program(layers(lambda block, x: Straight.apply(x, 1.0 * next(scales))))


# modules of other kinds


@program
def compiled_by_torchscript() -> Program:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.norm(self.linear(x)))
            return y * torch.tanh(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parts = [torch.jit.script(Scripted()) for _ in range(3)]
    return Program(nn.Sequential(*parts, nn.Dropout(0.2), Block(lambda block, x: x)))


@program
def quantization_aware_training() -> Program:
    """ConvBn fused as in quantization-aware training, whose statistics freeze on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.ao.nn.intrinsic import qat  # noqa: PLC0415
        from torch.ao.quantization import get_default_qat_qconfig  # noqa: PLC0415

        config = get_default_qat_qconfig("fbgemm")
        blocks = [
            qat.ConvBnReLU2d(4, 4, 3, padding=1, momentum=0.1, qconfig=config) for _ in range(3)
        ]
    model = nn.Sequential(*blocks)

    def change(step: int) -> None:
        if step == 2:
            model.apply(qat.freeze_bn_stats)
        if step == 3:
            for block in model:
                block.weight_fake_quant.disable_observer()

    return Program(model, change, inputs=lambda: (images().requires_grad_(),))


@program
def normalized_weights() -> Program:
    """Spectral norm writes its vectors in the forward; parametrized weights may be cached."""
    linear = [nn.Linear(6, 6) for _ in range(3)]
    torch.nn.utils.parametrizations.spectral_norm(linear[0])
    torch.nn.utils.parametrizations.weight_norm(linear[1])
    torch.nn.utils.parametrizations.orthogonal(linear[2])
    model = nn.Sequential(*linear, nn.Tanh(), linear[0], Block(lambda block, x: x))

    def call(x: Tensor) -> Tensor:
        with torch.nn.utils.parametrize.cached():
            return model(x) + model(x * 2)

    return Program(model, call=call)


# arguments of other kinds


@dataclasses.dataclass(slots=True)
class Batch:
    pixels: Tensor
    scale: float = 1.0
    mask: Tensor | None = None


@program
def slotted_dataclasses() -> Program:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)

        def forward(self, batch: Batch) -> Batch:
            y = self.net(batch.pixels) * batch.scale
            return Batch(y if batch.mask is None else y * batch.mask, batch.scale + 1)

    counts = itertools.count(1)

    def inputs() -> tuple[Any, ...]:
        count = next(counts)
        return (Batch(*vectors(), float(count), torch.rand(4, 1) if count % 2 else None),)

    return Program(
        Takes(), inputs=inputs, loss=lambda batch: batch.pixels.square().mean() * batch.scale
    )


@program
def sparse_arguments() -> Program:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            for block in self.net:
                x = torch.sparse.mm(adjacency, block(x)).tanh()
            return x

    def inputs() -> tuple[Any, ...]:
        return *vectors(), (torch.rand(4, 4) > 0.5).float().to_sparse()

    return Program(Graph(), inputs=inputs)


@program
def nested_arguments() -> Program:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.net:
                x = torch.sin(layer(x))
            return torch.nested.to_padded_tensor(x, 0.0).exp()

    counts = itertools.cycle([2, 3])

    def inputs() -> tuple[Any, ...]:
        parts = [torch.randn(next(counts), 6), torch.randn(4, 6)]
        return (torch.nested.nested_tensor(parts, layout=torch.jagged),)

    return Program(Ragged(), inputs=inputs)


class Marked(Tensor):
    """A tensor that takes part in torch's functions by itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[getattr(func, "__name__", "")] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


CALLS: collections.Counter[str] = collections.Counter()


@program
def tensors_of_a_class_of_their_own() -> Program:
    CALLS.clear()

    def inputs() -> tuple[Any, ...]:
        return (torch.randn(4, 6).as_subclass(Marked),)

    def loss(y: Any) -> Tensor:
        assert isinstance(y, Marked)
        return y.as_subclass(Tensor).square().mean()

    return Program(
        layers(lambda block, x: x), seen=lambda: (CALLS["sin"], CALLS["tanh"]), inputs=inputs,
        loss=loss,
    )  # fmt: skip


# programs that look like none of these


@program
def a_queue_of_earlier_outputs() -> Program:
    """Contrast against a bank of earlier keys, which the forward overwrites in a ring, as MoCo."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)
            self.register_buffer("bank", torch.randn(12, 6))
            self.register_buffer("end", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            keys = F.normalize(self.net(x), dim=1)
            logits = keys @ self.bank.clone().T
            with torch.no_grad():
                end = int(self.end)
                self.bank[end : end + len(x)] = keys
                self.end.fill_((end + len(x)) % 12)
            return logits.exp()

    return Program(Contrast())


@program
def a_teacher_that_follows_its_student() -> Program:
    """The forward moves the teacher's weights in place towards the student's."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
            self.momentum = 0.9

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
                for old, new in pairs:
                    old.lerp_(new, 1 - self.momentum)
                target = self.teacher(x)
            return self.net(x) - target.detach()

    model = Student()
    return Program(model, lambda step: setattr(model, "momentum", 0.9 - 0.2 * step))


@program
def a_temperature_that_the_backward_moves() -> Program:
    """A hook on a gradient counts, and the next forward computes with the count."""
    count = [0]

    def note(gradient: Tensor) -> Tensor:
        count[0] += 1
        return gradient * (1 + 0.01 * count[0])

    def act(block: Block, x: Tensor) -> Tensor:
        y = F.gumbel_softmax(x, tau=1 + 0.1 * count[0])
        y.register_hook(note)
        return y

    return Program(layers(act), seen=lambda: count)


@program
def a_network_that_grows() -> Program:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)
            self.depth, self.fade = 1, 1.0

        def forward(self, x: Tensor) -> Tensor:
            for block in self.net[: self.depth]:
                before, x = x, block(x)
            return before + self.fade * (x - before)

    model = Grows()

    def change(step: int) -> None:
        model.depth, model.fade = 1 + step // 2, 0.5 + 0.5 * (step % 2)

    return Program(model, change)


@program
def parts_that_run_on_other_threads() -> Program:
    """Two towers at once, of which one runs on another thread."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())
            self.right = layers(lambda block, x: x)

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                left = pool.submit(self.left, x)
                return left.result() * self.right(x)

    return Program(Towers())


@program
def a_forward_of_coroutines() -> Program:
    """Stages hand each other parts by generators and by asyncio: their kernels take turns."""

    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)

        def parts(self, block: nn.Module, source: Iterator[Tensor]) -> Iterator[Tensor]:
            for part in source:
                yield block(part)

        async def half(self, x: Tensor) -> Tensor:
            for block in self.net:
                x = block(x)
                await asyncio.sleep(0)
            return x

        async def both(self, x: Tensor) -> list[Tensor]:
            return await asyncio.gather(self.half(x), self.half(x * 2))

        def forward(self, x: Tensor) -> Tensor:
            source = iter(x.split(1))
            for block in self.net:
                source = self.parts(block, source)
            loop = asyncio.new_event_loop()
            try:
                return torch.cat(list(source)) + sum(loop.run_until_complete(self.both(x)))
            finally:
                loop.close()

    return Program(Staged())


@program
def writes_into_slices() -> Program:
    """Coupling layers that write halves of one tensor in place."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.scale = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, ::2] += self.shift(y[:, 1::2].clone()).tanh()
            y[:, 1::2] *= self.scale(y[:, ::2].clone()).exp()
            y.clamp_(-5, 5)
            return y

    return Program(nn.Sequential(*(Coupling() for _ in range(4))))


@program
def precision_that_changes_by_the_step() -> Program:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.kind = layers(lambda block, x: x), torch.float32

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.kind is torch.bfloat16):
                y = self.net(x)
            with torch.autocast("cpu", enabled=False):
                return y.double() * torch.get_default_dtype().itemsize

    model = Mixed()

    def change(step: int) -> None:
        model.kind = (torch.float32, torch.bfloat16)[step % 2]

    return Program(model, change)


@program
def one_model_called_by_another_many_times() -> Program:
    """A hypernetwork makes the weights of a small one, which goes on until it settles."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 36))
            self.small = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.make(x.mean(0)).view(6, 6) / 6
            state, rounds = torch.zeros_like(x), 0
            while rounds < 6:
                after = torch.func.functional_call(
                    self.small, {"weight": weight, "bias": self.small.bias}, (state + x,)
                ).tanh()
                if (after - state).abs().amax() < 0.05:
                    break
                state, rounds = after, rounds + 1
            return state * rounds

    return Program(Hyper())


@program
def freezing_and_thawing() -> Program:
    model = layers(lambda block, x: x)

    def change(step: int) -> None:
        model[0].requires_grad_(step > 1)
        model[1].linear.weight.requires_grad_(step != 3)
        model[2].drop.train(step % 2 == 0)

    return Program(model, change)


@program
def adversarial_examples() -> Program:
    """Attacks the model by its own gradients before each step, in training mode."""
    model = layers(lambda block, x: x)

    def call(x: Tensor) -> Tensor:
        attack = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(model(x.detach() + attack).square().mean(), attack)
            attack = (attack + 0.1 * gradient.sign()).detach().requires_grad_()
        return model(x + attack.detach())

    return Program(model, call=call)


@program
def losses_that_share_a_forward() -> Program:
    """Two heads whose losses go backward one after the other over the graph they share."""
    model = layers(lambda block, x: x)

    def call(x: Tensor) -> Tensor:
        y = model(x)
        y.exp().clamp(max=5).mean().backward(retain_graph=True)
        y[:2].sin().sum().backward(retain_graph=True)
        return y

    return Program(model, call=call)


@program
def micro_batches_that_are_accumulated() -> Program:
    """All forwards of a step run before its first backward, in sizes that differ."""
    model = layers(lambda block, x: x)

    def call(x: Tensor) -> Tensor:
        outputs = [model(part) for part in x.split([1, 3])]
        outputs[1].square().mean().backward()
        return outputs[0]

    return Program(model, call=call)


@program
def a_model_within_a_model() -> Program:
    """Calls itself on what it returned, and a part of itself from outside."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(lambda block, x: x)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            y = self.net(x)
            return y if depth == 0 else self(y.tanh(), depth - 1)

    model = Recursive()
    return Program(model, call=lambda x: model(x) + model.net[0](x))


def test_a_lightning_module_under_its_trainer(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = layers(lambda block, x: x * (1 + block.rate)), []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (1 + self.global_step)

        def training_step(self, batch: Any, number: int) -> Tensor:
            for block in self.net:
                block.rate = 0.1 * self.trainer.current_epoch
            loss = self(batch[0]).square().mean()
            self.log("loss", loss)
            self.losses.append(loss.detach().clone())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def losses(is_planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Lit()
        if is_planned:
            zoo.checkpoint(model)
        data = torch.utils.data.TensorDataset(torch.randn(10, 6))
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=True,
            default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, 4))
        assert (zoo.plan_of(model) is not None) is is_planned
        return [*model.losses, *model.state_dict().values(), torch.get_rng_state()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = losses(True), losses(False)
    for actual, expected in zip(one, other, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
