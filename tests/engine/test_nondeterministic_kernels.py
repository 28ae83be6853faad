"""Kernels that may not repeat their bits keep their results, and only where they may not."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.engine.kernels import replayed
from tests.training import Call, assert_exact
from zoo._torch import FakeTensorMode
from zoo.engine.nondeterministic_kernels import (
    GRAIN,
    TABLE,
    Nondeterminism,
    _warn_of_benchmark,
    nondeterminism_of,
)
from zoo.engine.operator_effects import effects_of, resolved

KIND = torch.get_default_device().type
on_accelerator = pytest.mark.skipif(KIND == "cpu", reason="needs one: pytest --device soft")
on_cpu = pytest.mark.skipif(KIND != "cpu", reason="concerns the CPU's kernels")

INDEX = (0, 2, 2, 1, 0, 3)


@pytest.fixture(autouse=True)
def _chooses_freely() -> Iterator[None]:
    """Other tests on a GPU ask cuDNN for algorithms that repeat themselves."""
    with torch.backends.cudnn.flags(deterministic=False):
        yield


def index() -> Tensor:
    return torch.tensor(INDEX)


def written_out(x: Tensor) -> Tensor:
    out = torch.empty(4, 3)
    with torch.no_grad():
        torch.index_add(torch.zeros(4, 3), 0, index(), x.detach()[:, :3], out=out)
    return x[:4, :3] * out


def of_a_list(x: Tensor) -> Tensor:
    return torch.zeros(4, 5).index_put([index()], x.sin(), accumulate=True)


def in_half(x: Tensor) -> Tensor:
    with torch.autocast(KIND, torch.bfloat16):
        return torch.zeros(4, 4, dtype=torch.bfloat16).index_add(0, index(), x @ x.t()[:, :4])


# by the operator, what reads x (6, 5) by it and hands on something whose bits it decides
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_add": lambda x: torch.zeros(4, 5).scatter_add(0, index()[:, None].expand(6, 5), x),
    "scatter_add_": lambda x: torch.zeros(4, 5).scatter_add_(0, index()[:, None].expand(6, 5), x),
    "index_add": lambda x: torch.zeros(4, 5).index_add(0, index(), x),
    "index_add_": lambda x: (x * 2)[:4].clone().index_add_(0, index(), x),
    "index_put": of_a_list,
    "index_put_": lambda x: torch.zeros(4, 5).index_put_((index(),), x),
    "index_copy": lambda x: torch.zeros(4, 5).index_copy(0, index(), x),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_": lambda x: (x * 2).cumsum_(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "scatter_reduce": lambda x: torch.ones(4, 5).scatter_reduce(
        0, index()[:, None].expand(6, 5), x, "mean"),
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(1).values,
    "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "max": lambda x: x.max(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "mode": lambda x: x.mode(1).values,
    "median": lambda x: x.median(1).values,
    "_unique2": lambda x: x * torch.unique(index()).sum(),
    "nonzero": lambda x: x * (x.detach() > 0).nonzero().sum(),
    "multinomial": lambda x: x * torch.multinomial(x.detach().abs() + 1, 2).sum(),
    "convolution": lambda x: F.conv_transpose1d(x[:, :, None], torch.ones(5, 2, 3) / 7),
}  # fmt: skip
# those that deterministic mode changes nothing about
ALWAYS = {"logcumsumexp", "kthvalue", "median"}


def around(name: str) -> Callable[[Tensor], Tensor]:
    """Returns a program with a kernel of this name between others, whose backward reads them."""
    return lambda x: PROGRAMS[name](x.sin()).exp().sin()


class Wandering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each call of an operator return other bits than the one before."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == self.name:
            self.calls += 1
            # not the places beside values, which backwards read by
            (found[0] if isinstance(found, tuple) else found).add_(self.calls)
        return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_that_does_not_repeat_its_bits_is_not_replayed(name: str) -> None:
    """On the CPU the same kernels repeat them, and are."""
    x = torch.rand(6, 5, requires_grad=True)
    names = replayed(zoo.recompute(around(name), x).sum().backward)
    assert (name in names) is (KIND == "cpu")
    assert "exp" in names


@on_accelerator
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_first_call(name: str) -> None:
    calls = []

    def program(call: Call) -> Any:
        x = torch.rand(6, 5, requires_grad=True)
        with Wandering(name) as mode:
            y = call(around(name), x)
            y.sum().backward()
        calls.append(mode.calls)
        return y, x.grad

    assert_exact(program)
    # a backward may call it, too
    assert calls[0] == calls[1]


@on_accelerator
@pytest.mark.parametrize("program", [written_out, of_a_list, in_half])
def test_what_it_writes_elsewhere_is_kept(program: Callable[[Tensor], Tensor]) -> None:
    name = "index_put" if program is of_a_list else "index_add"

    def wandering(call: Call) -> Any:
        x = torch.rand(6, 5, requires_grad=True)
        with Wandering(name):
            y = call(lambda x: program(x.sin()).exp().sin(), x)
            y.sum().backward()
        return y, x.grad

    assert_exact(wandering)


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@on_accelerator
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_deterministic_mode_it_is_replayed_where_that_helps(name: str) -> None:
    x = torch.rand(6, 5, requires_grad=True)
    # what has no deterministic kernel is refused otherwise
    with deterministic(warn_only=name in ALWAYS):
        loss = zoo.recompute(around(name), x).sum()
    assert (name in replayed(loss.backward)) is (name not in ALWAYS)


@on_accelerator
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_torch_warns_alone_it_is_kept(name: str) -> None:
    x = torch.rand(6, 5, requires_grad=True)
    with deterministic(warn_only=True):
        loss = zoo.recompute(around(name), x).sum()
    assert name not in replayed(loss.backward)


@on_accelerator
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_a_product_of_scattered_numbers_has_no_deterministic_kernel() -> None:
    x = torch.rand(6, 5, requires_grad=True)
    places = index()[:, None].expand(6, 5)
    with deterministic():
        row = effects_of(torch.ops.aten.scatter_reduce.two).varies
        assert row is not None
        assert row.applies((x, 0, places, x, "prod"), {})
        assert not row.applies((x, 0, places, x, "sum"), {})


@on_accelerator
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("scatter_add", lambda x: x * torch.zeros(4).long().scatter_add(0, index(), index())[1]),
        ("cumsum", lambda x: x * index().cumsum(0)[:, None]),
        ("index_put_", lambda x: (x * 2).index_put_((x.detach() > 0.5,), torch.tensor(3.0))),
        ("index_put_", lambda x: (x * 2).index_put_((index(),), torch.tensor(3.0))),
        ("scatter", lambda x: x.scatter(0, index()[:, None], 3.0)),
        ("scatter_reduce", lambda x: x.scatter_reduce(0, index()[:, None], x, "amax")),
        ("convolution", lambda x: F.conv1d(x[:, :, None], torch.ones(2, 5, 1) / 7)),
    ],
)
def test_what_is_the_same_in_any_order_is_replayed(name: str, function: Any) -> None:
    x = torch.rand(6, 5, requires_grad=True)
    loss = zoo.recompute(lambda x: function(x.sin()).exp().sin(), x).sum()
    assert name in replayed(loss.backward)


@on_accelerator
def test_a_transposed_convolution_is_replayed_where_cudnn_is_deterministic() -> None:
    x = torch.rand(6, 5, requires_grad=True)
    for dtype, is_deterministic, expected in (
        (torch.float32, False, 0), (torch.float32, True, 1), (torch.bfloat16, False, 1),
    ):  # fmt: skip
        with torch.backends.cudnn.flags(deterministic=is_deterministic):
            y = zoo.recompute(
                lambda x: (
                    F.conv_transpose1d(x.sin()[:, :, None], torch.ones(5, 2, 3, dtype=x.dtype))
                    .exp()
                    .sin()
                ),
                x.to(dtype),
            )
        assert replayed(y.sum().backward)["convolution"] == expected  # fmt: skip


@on_accelerator
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_convolution_is_kept_where_each_thread_chooses_its_algorithm(
    is_deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_benchmark.cache_clear()
    x = torch.rand(6, 5, requires_grad=True)
    for is_tuned in (True, True, False):
        with torch.backends.cudnn.flags(benchmark=is_tuned, deterministic=is_deterministic):
            y = zoo.recompute(
                lambda x: F.conv1d(x.sin()[:, :, None], torch.ones(2, 5, 1)).exp().sin(), x
            )
        assert replayed(y.sum().backward)["convolution"] == (not is_tuned)
    (warning,) = caplog.messages
    assert "cudnn.benchmark is on" in warning


@on_accelerator
def test_a_product_with_a_sparse_matrix_is_kept() -> None:
    x = torch.rand(5, 4, requires_grad=True)
    try:
        matrix = torch.rand(6, 5).relu().to_sparse()
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"no sparse tensors on {KIND}: {str(error)[:60]}")
    loss = zoo.recompute(lambda x: torch.sparse.mm(matrix, x.sin()).exp().sin(), x).sum()
    names = replayed(loss.backward)
    assert "exp" in names
    assert not {"mm", "addmm", "_sparse_mm", "_sparse_addmm"} & set(names)


@on_accelerator
def test_gradients_that_a_forward_takes_are_kept() -> None:
    table = torch.rand(4, 5, requires_grad=True)

    def forces(x: Tensor) -> Tensor:
        energy = (F.embedding(index(), table) * x).sin().sum()
        (force,) = torch.autograd.grad(energy, table, create_graph=True)
        return force.exp().sin()

    x = torch.rand(6, 5, requires_grad=True)
    names = replayed(zoo.recompute(forces, x).sum().backward)
    assert "embedding_dense_backward" not in names


def other_rows() -> list[str]:
    return [name for name in TABLE if name.startswith("aten::")]


@pytest.mark.parametrize("name", other_rows())
def test_each_row_of_the_table_is_an_operator_of_this_torch(name: str) -> None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operators = [getattr(torch.ops.aten, form, None) for form in (packet, f"{packet}_")]
    found = [operator for operator in operators if operator is not None]
    assert found
    if overload:
        assert any(overload in operator.overloads() for operator in found)


def test_the_table_holds_in_place_and_for_every_overload() -> None:
    for name in ("aten.topk.values", "aten.scatter_add.out", "aten.index_add_.default",
                 "aten.max.dim_max", "aten.scatter_.src"):  # fmt: skip
        assert isinstance(nondeterminism_of(resolved(name)), Nondeterminism)
    for name in ("aten.max.default", "aten.max.other", "aten.scatter.value", "aten.add_.Tensor"):
        assert nondeterminism_of(resolved(name)) is None


@pytest.mark.parametrize("place", ["cpu", "cuda", "xpu"])
def test_a_fake_tensor_counts_as_one_of_its_device(place: str) -> None:
    with FakeTensorMode(), torch.device("cpu"):
        x = torch.empty(3, 4, device="cpu")
        x.fake_device = torch.device(place, 0) if place != "cpu" else torch.device("cpu")  # type: ignore[attr-defined]
        topk = effects_of(torch.ops.aten.topk.default)
        cummax = effects_of(torch.ops.aten.cummax.default)
        assert (
            topk.keeps_results((x, 2), {}) is cummax.keeps_results((x, 1), {}) is (place != "cpu")
        )
        with deterministic():
            assert not topk.keeps_results((x, 2), {})
            assert cummax.keeps_results((x, 1), {}) is (place != "cpu")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NUMBERS = torch.arange(2 * GRAIN, device="cpu") % 7


@on_cpu
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("index_put", lambda x: torch.zeros(7).index_put([NUMBERS], x, accumulate=True)),
        ("index_put", lambda x: torch.zeros(7).index_put([NUMBERS], x)),
        ("index_copy", lambda x: torch.zeros(7).index_copy(0, NUMBERS, x)),
        ("put", lambda x: torch.zeros(7).put(NUMBERS, x, accumulate=True)),
    ],
)
def test_what_threads_of_the_cpu_write_at_once_is_kept(name: str, function: Any) -> None:
    x = torch.rand(2 * GRAIN, requires_grad=True)
    for count, is_replayed in ((1, True), (2, False)):
        with threads(count):
            loss = zoo.recompute(lambda x: function(x.sin()).exp().sin(), x).sum()
        assert (name in replayed(loss.backward)) is is_replayed


@on_cpu
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("index_put", lambda x: torch.zeros(7).index_put([NUMBERS[:40]], x[:40], accumulate=True)),
        ("index_put", lambda x: torch.zeros(7).double().index_put(
            [NUMBERS], x.double(), accumulate=True)),
        ("index_put", lambda x: x.index_put([x.detach() > -2], NUMBERS * 1.0)),
        ("index_add", lambda x: torch.zeros(7).index_add(0, NUMBERS, x)),
        ("scatter_add", lambda x: torch.zeros(7).scatter_add(0, NUMBERS, x)),
        ("cumsum", lambda x: x.cumsum(0)),
    ],
)  # fmt: skip
def test_what_one_thread_of_the_cpu_writes_is_replayed(name: str, function: Any) -> None:
    x = torch.rand(2 * GRAIN, requires_grad=True)
    with threads(2):
        loss = zoo.recompute(lambda x: function(x.sin()).exp().sin(), x).sum()
    assert name in replayed(loss.backward)


@on_cpu
def test_the_median_of_an_expanded_tensor_is_kept() -> None:
    """The kernel sorts it in place, where its elements are one."""

    def function(x: Tensor) -> Tensor:
        return (x * x.sin().expand(500, 1000).median(0).indices).exp().sin()

    x = torch.rand(1, 1000, requires_grad=True)
    assert "median" not in replayed(zoo.recompute(function, x).sum().backward)
