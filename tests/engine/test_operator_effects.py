"""What may run twice: operators that do what their schemas say, and nothing else."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.training import Call, assert_same as assert_equal, outcome, plain
from zoo._torch import scoped_library
from zoo.engine.operator_effects import effects_of

Function = Callable[[Tensor], Tensor]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "numbers"


def by_itself(x: Tensor, read: Tensor) -> Tensor:
    return x * (read * 2)


def written(x: Tensor, read: Tensor) -> Tensor:
    read.add_(1)
    return x * (read * 2)


def written_with_what_is_made(x: Tensor, read: Tensor) -> Tensor:
    read[:2].mul_(x.detach()[:2].exp())
    return x * read.sin()


@pytest.mark.parametrize("use", [by_itself, written, written_with_what_is_made])
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_read_and_written_once(use: Any, shared: bool, file: Path) -> None:
    def run(call: Call) -> list[Any]:
        numpy.ones(4, numpy.float32).tofile(file)
        x = torch.ones(4, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            return use(x, torch.from_file(str(file), shared=shared, size=4))

        y = call(function, x)
        left = numpy.fromfile(file, numpy.float32)
        numpy.full(4, 7, numpy.float32).tofile(file)
        y.sum().backward()
        return [y, x.grad, left, numpy.fromfile(file, numpy.float32)]

    assert_equal(outcome(run, zoo.recompute), outcome(run, plain))


class Counted:
    """A kernel in Python that counts its calls."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self.kernel, self.calls = kernel, 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.kernel(*args) + self.calls


def to_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.tanh(x.detach().numpy()))


def a_sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid().exp()


def inside_of_another_operator(x: Tensor) -> Tensor:
    """`celu` calls `elu` where no dispatch mode sees it."""
    return F.celu(x, 0.5).exp()


@pytest.fixture
def overridden(request: pytest.FixtureRequest) -> Iterator[Counted]:
    name, kernel, key = request.param
    counted = Counted(kernel)
    with scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        # that it overrides one of torch's
        warnings.simplefilter("ignore")
        library.impl(name, counted, key)
        yield counted


def an_elu(x: Tensor, *rest: Any) -> Tensor:
    return to_numpy(x)


@pytest.mark.parametrize(
    ("overridden", "function"),
    [
        (("sigmoid", to_numpy, "CPU"), a_sigmoid),
        (("sigmoid", to_numpy, "CompositeExplicitAutograd"), a_sigmoid),
        (("elu", an_elu, "CPU"), inside_of_another_operator),
    ],
    indirect=["overridden"],
)
def test_a_kernel_in_python_runs_once(overridden: Counted, function: Function) -> None:
    found = []
    for call in (plain, zoo.recompute):
        overridden.calls = 0
        x = torch.linspace(-1, 1, 6).requires_grad_()
        y = call(function, x)
        calls = overridden.calls
        y.sum().backward()
        assert overridden.calls == calls
        found.append([y.detach(), x.grad])
    assert_equal(found[1], found[0])


@pytest.mark.filterwarnings("ignore")
def test_an_operator_is_known_anew_when_python_gives_it_a_kernel_or_takes_it_away() -> None:
    sine, cosine = torch.ops.aten.sin.default, torch.ops.aten.cos.default

    def opaque() -> list[bool]:
        zoo.recompute(lambda x: x.sin().cos(), torch.ones(2, requires_grad=True))
        return [effects_of(operator).opaque for operator in (sine, cosine)]

    assert opaque() == [False, False]
    for name, expected in (("sin", [True, False]), ("cos", [False, True])):
        with scoped_library("aten", "IMPL") as library:
            library.impl(name, lambda x: x + 1, "CPU")
            assert opaque() == expected
    assert opaque() == [False, False]


@pytest.mark.filterwarnings("ignore")
def test_kernels_of_a_library_leave_torchs_as_they_are() -> None:
    """torchvision registers kernels for autocast, in Python; others register operators' own."""
    vision = pytest.importorskip("torchvision")
    with scoped_library("quantized", "IMPL") as library:
        library.impl("relu6", lambda x, inplace: x + 1, "CPU")
        zoo.recompute(F.celu, torch.ones(2, requires_grad=True))
        assert vision.__version__
        for operator in (torch.ops.aten.celu, torch.ops.aten.empty_like, torch.ops.torchvision.nms):
            assert not effects_of(operator.default).opaque
        assert effects_of(torch.ops.quantized.relu6.default).opaque


@pytest.mark.parametrize(
    ("operator", "may_run_twice"),
    [
        (torch.ops.aten.from_file.default, False),
        (torch.ops.aten.from_file.out, False),
        (torch.ops.quantized.linear_dynamic.default, False),
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.gelu.default, True),
        (torch.ops.aten.div.Tensor_mode, True),
        (torch.ops.aten.scatter_reduce.two, True),
        (torch.ops.aten._foreach_add_.List, True),
        (torch.ops.aten.convolution.default, True),
        (torch.ops.aten.linalg_qr.default, True),
    ],
)
def test_what_may_run_twice_is_told_by_its_schema(operator: Any, may_run_twice: bool) -> None:
    assert effects_of(operator).opaque is not may_run_twice


def test_an_operator_that_marks_memory_writes_nothing() -> None:
    assert effects_of(torch.ops.aten.record_stream.default).ignored
