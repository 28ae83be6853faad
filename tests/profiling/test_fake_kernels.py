"""The rules for results on fake tensors say what torch says."""

import functools
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo._torch import FakeTensor, FakeTensorMode
from zoo.profiling.fake_results import (
    ALIKE,
    IN_PLACE,
    MAKERS,
    POINTWISE,
    result_by_rule,
)
from zoo.profiling.tensor_spec import tensors_in

aten = torch.ops.aten
SHAPES = ((2, 4, 6, 8), (2, 4, 6, 1), (2, 4, 1, 1), (2, 4, 6, 8))


def fakes(mode: FakeTensorMode) -> list[Tensor]:
    """Makes tensors of several layouts."""
    with mode:
        dense = [torch.empty(shape) for shape in SHAPES]
        return [
            *dense,
            dense[0].to(memory_format=torch.channels_last),
            dense[0].transpose(1, 2),
            dense[1].transpose(1, 2),
            dense[0].expand(1, 2, 4, 6, 8)[0].permute(3, 0, 2, 1),
            dense[0][:, ::2],
            dense[0][:, 1:3],
            dense[0][:, :2],
            torch.empty(2, 4, 6, 8, dtype=torch.float64),
            torch.empty(2, 4, 6, 8, dtype=torch.int64),
        ]


def described(result: Any, inputs: list[Tensor]) -> list[Any]:
    """Describes results, and which of the inputs they lie in."""
    storages = [tensor.untyped_storage()._cdata for tensor in inputs]
    return [
        (
            type(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
            tensor.untyped_storage()._cdata in storages,
        )
        for tensor in tensors_in(result)
    ]


def agrees(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Asserts that a rule says what torch says; returns whether there is a rule."""
    inputs = tensors_in(args)
    mode = next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), FakeTensorMode())
    ruled = result_by_rule(mode, func, args, kwargs)
    if ruled is NotImplemented:
        return False
    with mode:
        # raises where torch refuses what the rule takes
        expected = func(*args, **kwargs)
    assert described(ruled, inputs) == described(expected, inputs)
    return True


@pytest.mark.parametrize("func", sorted(POINTWISE | IN_PLACE, key=str), ids=str)
def test_arithmetic(func: Any) -> None:
    count = sum(argument.type.kind() == "TensorType" for argument in func._schema.arguments)
    mode = FakeTensorMode()
    is_with_number = func is aten.threshold_backward.default or "Scalar" in str(func)
    others = (0.5,) if is_with_number else ()
    found = []
    for tensors in itertools.product(fakes(mode), repeat=count):
        found.append(agrees(func, *tensors, *others))
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize("size", [2, 3.0, 0.5])
def test_arithmetic_with_a_number(size: float) -> None:
    # an integer tensor times a fraction is of another type: torch is asked
    mode = FakeTensorMode()
    assert sum(agrees(aten.mul.Tensor, tensor, size) for tensor in fakes(mode)) == 11


def test_arithmetic_with_a_complex_number_asks_torch() -> None:
    assert not any(agrees(aten.mul.Tensor, tensor, 1j) for tensor in fakes(FakeTensorMode()))


@pytest.mark.parametrize("axes", [2, 3])
def test_products(axes: int) -> None:
    shapes = (6, 4), (4, 6), (4, 4), (4,)
    with FakeTensorMode():
        tensors = [torch.empty(*(2,) * (axes - 2), *shape) for shape in shapes]
        tensors += [tensors[0].mT, tensors[0].double()]
    product = aten.mm.default if axes == 2 else aten.bmm.default
    found = [agrees(product, *pair) for pair in itertools.product(tensors, repeat=2)]
    assert any(found)
    assert not all(found)
    if axes == 2:
        triples = itertools.product(tensors, repeat=3)
        assert 0 < sum(agrees(aten.addmm.default, *three) for three in triples) < len(tensors) ** 3


def test_losses_of_scores() -> None:
    with FakeTensorMode():
        scores = [torch.empty(6, 5), torch.empty(5, 6).t(), torch.empty(6, 5).bfloat16()]
        scores += [torch.empty(6), torch.empty(2, 3, 5)]
        targets, one, ones = torch.zeros(6).long(), torch.empty(()), torch.empty(6)
        weight = torch.empty(5)
    softmax, of_softmax = aten._log_softmax.default, aten._log_softmax_backward_data.default
    found = [agrees(softmax, x, dim, False) for x in scores for dim in range(-1, x.ndim)]
    pairs = itertools.product(scores[:3], scores[:2])
    found += [agrees(of_softmax, *pair, dim, torch.float32) for pair in pairs for dim in (0, 1)]
    of_picked = functools.partial(agrees, aten.nll_loss_backward.default)
    for x in scores[:2]:
        found += [of_picked(one, x, targets, by, 2, -100, one) for by in (None, weight)]
        found.append(of_picked(ones, x, targets, None, 0, -100, one))
    assert sum(found) == 6


@pytest.mark.parametrize("dim", [0, 1, -1, 4])
def test_concatenation(dim: int) -> None:
    tensors = fakes(FakeTensorMode())
    tensors += [tensors[0][:, :0], tensors[0][0, 0, 0, :0]]
    found = [agrees(aten.cat.default, pair, dim) for pair in itertools.product(tensors, repeat=2)]
    assert any(found) is (dim < 4)
    assert not all(found)


def test_views() -> None:
    found = [
        agrees(func, tensor, *others)
        for tensor in fakes(FakeTensorMode())
        for func, *others in (
            (aten.slice.Tensor, 1, 1, 3),
            (aten.permute.default, [0, 3, 1, 2]),
            (aten.unsqueeze.default, 0),
            (aten.expand.default, [5, *tensor.shape]),
            (aten.select.int, 1, 1),
            (aten.detach.default,),
            (aten.as_strided.default, [2, 4], [1, 2], 1),
            (aten._unsafe_view.default, tensor.shape),
            (aten.split.Tensor, 1, 1),
            (aten.unbind.int, 1),
        )
    ]
    assert all(found)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False},
    {"dtype": torch.int64, "layout": torch.strided},
    {"device": torch.device("meta")},
)
FORMATS = (None, torch.contiguous_format, torch.preserve_format, torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert agrees(aten.empty_strided.default, [3, 4], [1, 5], dtype=dtype, device=cpu)


@pytest.mark.parametrize("func", sorted(MAKERS, key=str), ids=str)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_tensors_of_a_size(func: Any, default: torch.dtype, request: Any) -> None:
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(default)
    is_new = func._schema.name.startswith("aten::new_")
    found = [
        agrees(func, *first, size, **options)
        for first in ([[tensor] for tensor in fakes(FakeTensorMode())] if is_new else [[]])
        for size in ([], [0, 3], [1, 3, 1], [2, 3, 4])
        for options in OPTIONS
    ]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize("func", sorted(ALIKE, key=str), ids=str)
def test_tensors_like_others(func: Any) -> None:
    found = [
        agrees(func, tensor, **options, memory_format=memory_format)
        for tensor in (*fakes(FakeTensorMode()), *matrices(FakeTensorMode()))
        for options in (OPTIONS if func is not aten.clone.default else OPTIONS[:1])
        for memory_format in FORMATS
        if not (memory_format is torch.channels_last and tensor.ndim != 4)
    ]
    assert any(found)
    assert not all(found)


def matrices(mode: FakeTensorMode) -> list[Tensor]:
    """Makes matrices of several layouts and types, and others."""
    with mode:
        square = torch.empty(4, 4)
        return [
            square,
            square.t(),
            torch.empty(8, 4)[::2],
            torch.empty(1, 4),
            torch.empty(4, 0),
            square.double(),
            square.to(torch.int64),
            torch.empty(4),
            torch.empty(3, 4, 4),
        ]


@pytest.mark.parametrize("dtypes", itertools.product([torch.float32, torch.bfloat16], repeat=2))
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_as_the_kernel_is(dtypes: Any, affine: bool, training: bool) -> None:
    """Not as its decomposition, which makes gradients that nobody asked for."""
    mode, found = FakeTensorMode(), []

    def is_as_the_kernel(func: Any, *args: Any) -> bool:
        fake_args = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
        ruled = result_by_rule(mode, func, fake_args, {})
        if ruled is NotImplemented:
            return False
        real = func(*args)
        assert [one is None for one in ruled] == [other is None for other in real]
        assert [one[1:] for one in described(ruled, [])] == [
            other[1:] for other in described(real, [])
        ]
        return True

    dtype, of_weights = dtypes
    if dtype is torch.float32 and of_weights is torch.bfloat16:  # there is no such kernel
        return
    x, ones = torch.rand(2, 4, 6, 8).to(dtype), torch.ones(4, dtype=of_weights)
    weights = (ones, ones) if affine else (None, None)
    statistics = (ones.clone(), ones.clone())
    for given in (x, x.transpose(2, 3)):
        args = (given, *weights, *statistics, training, 0.1, 1e-5)
        found.append(is_as_the_kernel(aten.native_batch_norm.default, *args))
        _, *saved = aten.native_batch_norm.default(*args)
        for wanted in itertools.product([True, False], repeat=3):
            others = (weights[0], *statistics, *saved, training, 1e-5, list(wanted))
            if not training and not affine:
                continue
            found.append(
                is_as_the_kernel(aten.native_batch_norm_backward.default, given, given, *others)
            )
    assert any(found) is training
    assert not all(found)


def test_a_first_step_imports_no_compiler_and_a_later_import_does() -> None:
    # the fake kernel of a LayerNorm, which the second has, imports torch.distributed.tensor
    program = (
        "import sys, torch, zoo\n"
        "for build in zoo.resnet18, lambda **o: zoo.vit_tiny_patch16(image_size=32, **o):\n"
        "    model = build(checkpoint=True)\n"
        "    model(torch.rand(2, 3, 32, 32)).sum().backward()\n"
        "    assert zoo.plan_of(model)\n"
        "    assert 'torch._dynamo' not in sys.modules\n"
        # as the process does that plans, a fork of this one; what asks for more gets it
        "from zoo._torch import leave_out_compiler; leave_out_compiler()\n"
        "import torch._dynamo.config; assert torch._dynamo.config.cache_size_limit > 0\n"
        "import torch._dynamo.utils\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(())) == 2"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
