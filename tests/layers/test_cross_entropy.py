"""The loss that needs one buffer is `F.cross_entropy` in every bit, whoever asks for gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.engine.recompute import recompute
from zoo.layers.language_head import cross_entropy, cross_entropy_inplace
from zoo.profiling.peak_memory import trace

BOTH = (cross_entropy_inplace, cross_entropy)
Function = Callable[[Tensor, Tensor], Tensor]


def example(rows: int = 70, words: int = 33, dtype: Any = torch.float32) -> tuple[Tensor, Tensor]:
    """Fresh scores (rows, words) with a history, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(rows + words)
    leaf = (8 * torch.randn(rows, words, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(words, (rows,), generator=generator)
    targets[::5] = -100
    return leaf * 1, targets


def with_gradient(function: Function, scores: Tensor, targets: Tensor, **options: Any) -> Any:
    """The loss of seven tenths of the scores' loss, and the scores' gradient."""
    loss = function(scores, targets)
    return loss, torch.autograd.grad(0.7 * loss, scores, **options)[0]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "words"), [(1, 1), (6, 2), (33, 50), (70, 1000), (200, 37)])
def test_is_cross_entropy_bit_for_bit(rows: int, words: int, dtype: torch.dtype) -> None:
    ours, plain = (with_gradient(function, *example(rows, words, dtype)) for function in BOTH)
    same(ours, plain)
    scores, targets = example(rows, words, dtype)
    wide = scores.float() if dtype.itemsize < 4 else scores
    same(ours[0], F.cross_entropy(wide, targets, reduction="sum"))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, -1e30])
def test_is_so_for_scores_that_overflow(value: float) -> None:
    found = []
    for function in BOTH:
        scores, targets = example()
        found.append(
            with_gradient(function, scores.masked_fill(targets[:, None] == 3, value), targets)
        )
    same(*found)


def test_ignored_targets_alone_give_zero() -> None:
    scores, targets = example()
    loss, gradient = with_gradient(cross_entropy_inplace, scores, torch.full_like(targets, -100))
    assert loss == 0
    assert not gradient.any()


def test_the_gradient_lies_in_the_memory_of_the_scores() -> None:
    scores, targets = example()
    place = scores.data_ptr()
    assert with_gradient(cross_entropy_inplace, scores, targets)[1].data_ptr() == place


def test_the_scores_live_on_where_another_backward_may_follow() -> None:
    scores, targets = example()
    before = scores.detach().clone()
    loss, first = with_gradient(cross_entropy_inplace, scores, targets, retain_graph=True)
    same(scores.detach(), before)
    same(torch.autograd.grad(0.7 * loss, scores)[0], first)
    same(first, with_gradient(cross_entropy, *example())[1])


def test_who_reads_the_scores_later_is_told() -> None:
    scores, targets = example()
    other = scores.sin().sum()
    cross_entropy_inplace(scores, targets).backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_can_be_differentiated_twice() -> None:
    found = []
    for function in BOTH:
        scores, targets = example()
        _, gradient = with_gradient(function, scores, targets, create_graph=True)
        found += [(gradient, torch.autograd.grad(gradient.square().sum(), scores)[0])]
    same(*found)


def test_batched_gradients() -> None:
    found = []
    for function in BOTH:
        scores, targets = example()
        loss, ways = function(scores, targets), torch.tensor([1.0, 3.0])
        found.append(torch.autograd.grad(loss, scores, ways, is_grads_batched=True))
    same(*found)


def test_functional_transforms() -> None:
    scores, targets = example()
    scores = scores.detach()
    found = []
    for function in BOTH:
        gradient = torch.func.grad(function)(scores, targets)
        with forward_ad.dual_level():
            dual = function(forward_ad.make_dual(scores, scores.sin()), targets)
            slope = forward_ad.unpack_dual(dual).tangent
        found.append((gradient, slope))
    same(*found)


def test_under_autocast() -> None:
    found = []
    for function in BOTH:
        scores, targets = example()
        weight = torch.linspace(-1, 1, 33 * 33).view(33, 33).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            decoded = scores @ weight
            assert decoded.dtype == torch.bfloat16
            found.append(torch.autograd.grad(function(decoded, targets), [scores, weight]))
    same(*found)


class Counts(TorchDispatchMode):
    """Counts the rows whose logarithms are taken."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rows += len(args[0]) if func is torch.ops.aten._log_softmax.default else 0
        return func(*args, **(kwargs or {}))


def test_a_second_run_gives_the_same_bits_and_ends_before_the_loss() -> None:
    leaf, targets = example()

    def loss(leaf: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_inplace(leaf * 3, targets)

    expected = torch.autograd.grad(loss(leaf, targets), leaf)
    with Counts() as counts:
        found = torch.autograd.grad(recompute(loss, leaf, targets), leaf)
    same(found, expected)
    assert counts.rows == 2 * len(leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_take_little_beside_the_scores(dtype: torch.dtype) -> None:
    scores, targets = example(640, 500, dtype)
    loss: list[Tensor] = []
    size, few = scores.nbytes, 4 * 4 * 500 * 640 // 8
    assert trace(lambda: loss.append(cross_entropy_inplace(scores, targets))).peak < few
    assert trace(lambda: torch.autograd.grad(loss.pop(), scores)).peak < few
    assert trace(lambda: cross_entropy(scores, targets)).peak >= size


def test_without_gradients_there_is_nothing_but_the_loss() -> None:
    scores, targets = example()
    with torch.no_grad():
        loss = cross_entropy_inplace(scores, targets)
    same(loss, cross_entropy(scores, targets).detach())
    assert loss.grad_fn is None
