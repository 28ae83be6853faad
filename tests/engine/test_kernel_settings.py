"""Each setting that chooses among kernels is in a replay what it was in the forward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from zoo.engine import kernel_settings
from zoo.engine.kernel_settings import TABLE, Setting, heeded_by, read_settings
from zoo.engine.segments import thread

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="settings are those of a process"
)

SQUARE = torch.eye(4) * 2 + 0.1


def quantized(x: Tensor) -> Tensor:
    rounded = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8)
    return x * torch.ops.quantized.add(rounded, rounded, 0.2, 0).dequantize()


# a kernel for each group of those that heed a setting, by a part of its name
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "conv": lambda x: F.conv1d(x[None], torch.ones(4, 4, 1)),
    "mm": lambda x: x @ SQUARE,
    "linalg": lambda x: torch.linalg.inv_ex(x @ x.t() + 4 * SQUARE)[0],
    "lstm": lambda x: nn.LSTM(4, 4)(x)[0],
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    "quantized": quantized,
    "::empty": lambda x: x * torch.empty_like(x).fill_(2),
}  # fmt: skip
# what is neither the other truth value nor the next number
OTHERS: dict[str, Any] = {
    "default dtype": torch.float64,
    "qengine": next(n for n in torch._C._supported_qengines() if n != torch._C._get_qengine()),
    "linalg_preferred_backend": torch._C._LinalgBackend.Cusolver,
    "blas_preferred_backend": torch._C._BlasBackend.Cublaslt,
    "rocm_fa_preferred_backend": torch._C._ROCmFABackend.AOTriton,
    "cudnn_depthwise_kernel": "native",
    "sm_carveout_experimental": 2,
}
# heeded inside of layers that need no gradient
OF_INFERENCE = "sdp"
# what has tests elsewhere: without gradients nothing is saved (test_ambient), and nobody reads
# whether denormal numbers are flushed but by a product
ELSEWHERE = {"grad", "flush denormal"}


def other(setting: Setting) -> Any:
    """Returns another value of a setting than the present one."""
    value = setting.read()
    if setting.name in OTHERS:
        return OTHERS[setting.name]
    if isinstance(value, tuple):
        return tuple(not part for part in value)
    if isinstance(value, str):
        return "ieee" if value != "ieee" else "tf32"
    return not value if isinstance(value, bool) else value + 1


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads a setting in each replayed kernel that heeds it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.setting, self.found = setting, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread.replaying and any(part in func.name() for part in self.setting.kernels):
            self.found.append(self.setting.read())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def restored(setting: Setting) -> Iterator[None]:
    value = (setting.own or setting.read)()
    try:
        setting.write(other(setting))
    except RuntimeError as error:
        pytest.skip(str(error))
    setting.write(value)
    try:
        yield
    finally:
        setting.write(value)


def program_for(setting: Setting) -> Callable[[Tensor], Tensor]:
    if setting.kernels == ("",):
        return torch.sin
    parts = setting.kernels
    return next(KERNELS[n] for n in KERNELS if any(part in n or n in part for part in parts))


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's settings can be read and written without a GPU; kernels of the CPU ignore them."""
    monkeypatch.setattr(kernel_settings, "uses_cuda", lambda: True)


def as_parameters(settings: list[Setting]) -> Any:
    names = [setting.name.replace(" ", "_") for setting in settings]
    return pytest.mark.parametrize("setting", settings, ids=names)


DIRECT = as_parameters(
    [s for s in TABLE if s.kernels and OF_INFERENCE not in s.name and s.name not in ELSEWHERE]
)


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@DIRECT
def test_a_setting_is_that_of_the_forward_in_each_replayed_kernel(setting: Setting) -> None:
    program = program_for(setting)
    x = torch.rand(4, 4, requires_grad=True)
    before = setting.read()
    with restored(setting):
        setting.write(other(setting))
        expected = setting.read()
        assert expected != before
        y = zoo.recompute(lambda x: program(x.sin()).exp().sin(), x)
    assert setting.read() == before
    with Reads(setting) as reads:
        y.sum().backward()
    assert reads.found
    assert all(value == expected for value in reads.found)
    assert setting.read() == before


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@DIRECT
def test_a_setting_that_changes_inside_of_a_segment_is_that_of_each_kernel(
    setting: Setting,
) -> None:
    program = program_for(setting)

    def function(x: Tensor) -> Tensor:
        y = program(x).exp()
        setting.write(other(setting))
        return program(y.to(x.dtype).reshape(-1)[:16].view(4, 4)).exp().sin()

    x = torch.rand(4, 4, requires_grad=True)
    before = setting.read()
    with restored(setting):
        y = zoo.recompute(function, x)
        expected = setting.read()
    with Reads(setting) as reads:
        y.sum().backward()
    assert set(map(repr, reads.found)) == {repr(before), repr(expected)}
    assert setting.read() == before


@pytest.mark.usefixtures("with_cuda")
@as_parameters([setting for setting in TABLE if OF_INFERENCE in setting.name])
def test_what_layers_of_an_inference_heed_is_known_to_be_another(setting: Setting) -> None:
    heeded = heeded_by("aten::_transformer_encoder_layer_fwd")
    known = read_settings()
    assert heeded is not None
    assert heeded.are_in(known)
    with restored(setting):
        setting.write(other(setting))
        assert not heeded.are_in(known)


def test_a_device_that_comes_into_use_brings_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    heeded = heeded_by("aten::mm")
    assert heeded is not None
    known = read_settings()
    monkeypatch.setattr(kernel_settings, "uses_cuda", lambda: not torch.cuda.is_initialized())
    assert not heeded.are_in(known)
    assert heeded.are_in(read_settings())


def test_most_kernels_heed_none_but_those_of_all() -> None:
    for name in ("aten::add", "aten::relu", "aten::native_batch_norm", "aten::_softmax"):
        assert heeded_by(name) is None
