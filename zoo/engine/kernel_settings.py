"""Global settings of torch that choose among kernels: a replay runs with those of the forward.

Before each kernel a recording reads the settings that its operator heeds, and all of them if one
has changed. Settings that act above the recorded kernels are not here: the choice of an attention
kernel (heeded only inside of the fused inference layers), the fast path of
`nn.MultiheadAttention`, the order of an `einsum`, semi-structured sparsity.
"""

import functools
from collections.abc import Callable, Iterator
from operator import call, itemgetter
from typing import Any, NamedTuple

import torch

from zoo._torch import CPU_SETTINGS, CUDA_SETTINGS, precision_of, set_grad_enabled, set_precision
from zoo.engine.nondeterministic_kernels import TABLE as NONDETERMINISTIC

Settings = tuple[Any, ...]

# parts of the names of the kernels that heed a setting
CONVOLUTIONS = ("conv",)
RECURRENT = ("rnn", "lstm", "gru")
LINEAR_ALGEBRA = ("linalg", "cholesky", "geqrf", "ormqr", "triangular_solve", "lu_solve", "lstsq")
ATTENTION = ("attention",)
# matrix products, and kernels that contain some
PRODUCTS = (
    "mm", "addm", "linear", "dot", "mv", "cdist", "euclidean", "trilinear",
    *CONVOLUTIONS, *RECURRENT, *LINEAR_ALGEBRA, *ATTENTION,
)  # fmt: skip
# without gradients these call all others, attention included
FUSED_LAYERS = ("multi_head_attention", "transformer_encoder_layer")
MEMORY = ("::empty", "::new_empty")
CHOSEN = (*PRODUCTS, *FUSED_LAYERS, "gelu", "cumsum", "scatter", "index", "put", "quantized")
HEEDED_BY = {
    "cudnn_benchmark": (*CONVOLUTIONS, *RECURRENT),
    "cudnn_benchmark_limit": (*CONVOLUTIONS, *RECURRENT),
    "cudnn_deterministic": (*CONVOLUTIONS, *RECURRENT),
    "cudnn_depthwise_kernel": CONVOLUTIONS,
    "cudnn_enabled": (*CONVOLUTIONS, *RECURRENT, *ATTENTION),
    "miopen_immediate": CONVOLUTIONS,
    "nnpack_enabled": CONVOLUTIONS,
    "qengine": ("quantized",),
    "deterministic_fill_uninitialized_memory": MEMORY,
    "linalg_preferred_backend": LINEAR_ALGEBRA,
    "rocm_fa_preferred_backend": ATTENTION,
    "flash_sdp_enabled": FUSED_LAYERS,
    "mem_efficient_sdp_enabled": FUSED_LAYERS,
    "math_sdp_enabled": FUSED_LAYERS,
    "math_sdp_allow_fp16_bf16_reduction": FUSED_LAYERS,
    "cudnn_sdp_enabled": FUSED_LAYERS,
}


class Setting(NamedTuple):
    """A global setting of torch that changes what kernels compute.

    Attributes:
        read, write: functions that get and set it.
        kernels: parts of the names of operators that heed it; "" is all, () a default of others.
        own: returns the value to restore later, if that is not the one that `read` returns.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    kernels: tuple[str, ...]
    own: Callable[[], Any] | None = None


# their product is 0 if this thread flushes denormal numbers
DENORMAL, ONE = 5e-324, 1.0


def _flushes_denormal() -> bool:
    """Returns whether this thread flushes denormal numbers to 0 (`torch.set_flush_denormal`)."""
    return DENORMAL * ONE == 0


def _own_precision(*key: str) -> str:
    """Reads the precision set for a backend and operation; "none" if it follows a general one.

    cuDNN's begin with values of their own that follow a general one as soon as that is set.
    """
    library_all, every = (key[0], "all"), ("generic", "all")
    is_set = key == every or not _goes_by(key, every)
    if is_set and key[1] != "all" and not _goes_by(library_all, every):
        is_set = not _goes_by(key, library_all)
    is_set |= precision_of(*key) != precision_of(*library_all)
    return str(precision_of(*key)) if is_set else "none"


def _goes_by(key: tuple[str, ...], general: tuple[str, ...]) -> bool:
    """Changes a general precision to see whether another follows it; torch does not tell."""
    before, own = precision_of(*key), precision_of(*general)
    try:
        set_precision(*general, "tf32" if before != "tf32" else "ieee")
        return bool(precision_of(*key) != before)
    finally:
        set_precision(*general, own)


def _precisions(library: str, **kinds: tuple[str, ...]) -> Iterator[Setting]:
    for kind, kernels in kinds.items():
        functions = precision_of, set_precision, _own_precision
        read, write, own = (functools.partial(function, library, kind) for function in functions)
        yield Setting(f"{library} {kind} precision", read, write, kernels, own)


def _of_library(settings: dict[str, tuple[Any, Any]], kernels: tuple[str, ...]) -> list[Setting]:
    return [Setting(name, *pair, HEEDED_BY.get(name, kernels)) for name, pair in settings.items()]


_ALL_KERNELS = ("",)
_DETERMINISTIC = (*CHOSEN, *MEMORY, *NONDETERMINISTIC)
_PRECISE = {"conv": CONVOLUTIONS, "rnn": RECURRENT, "matmul": PRODUCTS}
_OF_CPU = (
    # these concern all kernels
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, _ALL_KERNELS),
    Setting("threads", torch.get_num_threads, torch.set_num_threads, _ALL_KERNELS),
    Setting("flush denormal", _flushes_denormal, torch.set_flush_denormal, _ALL_KERNELS),
    Setting(
        "deterministic", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
        _DETERMINISTIC,
    ),
    # the CPU's LSTM kernel rounds differently without gradients
    Setting("grad", torch.is_grad_enabled, set_grad_enabled, _DETERMINISTIC),
    *_of_library(CPU_SETTINGS, CHOSEN),
    *_precisions("mkldnn", **_PRECISE),
)  # fmt: skip
_OF_CUDA = (
    *_of_library(CUDA_SETTINGS, PRODUCTS),
    # the more general first: the initial values of cuDNN's cannot be set again
    *_precisions("generic", all=()),
    *_precisions("cuda", all=(), **_PRECISE),
)
TABLE = (*_OF_CPU, *_OF_CUDA)
_CPU_READERS, _READERS = ([setting.read for setting in part] for part in (_OF_CPU, TABLE))


def uses_cuda() -> bool:
    """Returns whether this process uses CUDA, whose settings come last then."""
    return torch.cuda.is_initialized()  # type: ignore[no-any-return,no-untyped-call]


def read_settings() -> Settings:
    """Reads all settings; the first three concern all kernels."""
    return tuple(map(call, _READERS if uses_cuda() else _CPU_READERS))


def write_settings(wanted: Settings, restore: list[Callable[[], object]]) -> None:
    """Writes the settings that differ from the present ones.

    Functions that restore the present values are added to `restore`, to be called last first.
    """
    for setting, value in zip(TABLE, wanted, strict=False):
        if setting.read() != value:
            restore.append(functools.partial(setting.write, (setting.own or setting.read)()))
            setting.write(value)


class HeededSettings:
    """The settings that an operator's kernels heed beside those that all kernels heed."""

    __slots__ = ("on_cpu", "with_cuda")

    def __init__(self, name: str) -> None:
        self.on_cpu, self.with_cuda = _readers(name, _OF_CPU), _readers(name, TABLE)

    def are_in(self, settings: Settings) -> bool:
        """Returns whether their present values are those in settings that were read before."""
        is_with_cuda = uses_cuda()
        if is_with_cuda is not (len(settings) > len(_OF_CPU)):
            return False
        readers, values_in = self.with_cuda if is_with_cuda else self.on_cpu
        are_equal: bool = tuple(map(call, readers)) == values_in(settings)
        return are_equal


def _readers(name: str, table: tuple[Setting, ...]) -> tuple[list[Callable[[], Any]], Any]:
    # at least two, deterministic mode and grad mode: `itemgetter` returns a tuple
    positions = [position for position, setting in enumerate(table) if _heeds(name, setting)]
    return [table[position].read for position in positions], itemgetter(*positions)


def _heeds(name: str, setting: Setting) -> bool:
    return any(part and part in name for part in setting.kernels)


def heeded_by(name: str) -> HeededSettings | None:
    """Returns the settings that an operator's kernels heed; None if only those of all kernels."""
    return HeededSettings(name) if any(_heeds(name, setting) for setting in TABLE) else None
