"""The globals of torch by which it chooses among kernels: a replay has those of the forward.

A recording reads before each kernel what that kernel heeds, by the names of operators, and all of
them where one of these has changed. What chooses above the recorded kernels is none of these:
which kind of attention runs (heeded inside of the fused layers of an inference alone), the fast
path of `nn.MultiheadAttention`, the order of an `einsum`, semi-structured sparsity.
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
# with those that multiply matrices inside
PRODUCTS = (
    "mm", "addm", "linear", "dot", "mv", "cdist", "euclidean", "trilinear",
    *CONVOLUTIONS, *RECURRENT, *LINEAR_ALGEBRA, *ATTENTION,
)  # fmt: skip
# these call all others, attention included, where nothing needs a gradient
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
    """A global of torch that changes what kernels compute.

    Attributes:
        read, write: what is set now, and how to set it.
        kernels: parts of the names of the operators that heed it; "" for all, none for what others
            go by.
        own: reads what is to be written again later, where that is not what is read.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    kernels: tuple[str, ...]
    own: Callable[[], Any] | None = None


# their product is 0 where this thread takes denormal numbers for it
DENORMAL, ONE = 5e-324, 1.0


def _flushes_denormal() -> bool:
    """Returns whether this thread takes denormal numbers for 0 (`torch.set_flush_denormal`)."""
    return DENORMAL * ONE == 0


def _own_precision(*place: str) -> str:
    """Reads the precision that was set for some kernels; "none" where they go by another one.

    Those of cuDNN begin with one of their own that goes with any other one, once that is set.
    """
    library_all, every = (place[0], "all"), ("generic", "all")
    is_set = place == every or not _goes_by(place, every)
    if is_set and place[1] != "all" and not _goes_by(library_all, every):
        is_set = not _goes_by(place, library_all)
    is_set |= precision_of(*place) != precision_of(*library_all)
    return str(precision_of(*place)) if is_set else "none"


def _goes_by(place: tuple[str, ...], general: tuple[str, ...]) -> bool:
    """Tries whether a precision changes with a more general one; torch does not tell."""
    before, own = precision_of(*place), precision_of(*general)
    try:
        set_precision(*general, "tf32" if before != "tf32" else "ieee")
        return bool(precision_of(*place) != before)
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
    # an LSTM's kernel on the CPU rounds otherwise where it keeps nothing for a backward
    Setting("grad", torch.is_grad_enabled, set_grad_enabled, _DETERMINISTIC),
    *_of_library(CPU_SETTINGS, CHOSEN),
    *_precisions("mkldnn", **_PRECISE),
)  # fmt: skip
_OF_CUDA = (
    *_of_library(CUDA_SETTINGS, PRODUCTS),
    # the more general ones first: those of cuDNN begin with one that cannot be written again
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
    """Puts settings in force, writing only those that differ from the present ones.

    What writes again what was set before is added to `restore`, to be called last first.
    """
    for setting, value in zip(TABLE, wanted, strict=False):
        if setting.read() != value:
            restore.append(functools.partial(setting.write, (setting.own or setting.read)()))
            setting.write(value)


class HeededSettings:
    """The settings, beside those of all kernels, that the kernels of an operator heed."""

    __slots__ = ("on_cpu", "with_cuda")

    def __init__(self, name: str) -> None:
        self.on_cpu, self.with_cuda = _readers(name, _OF_CPU), _readers(name, TABLE)

    def are_in(self, settings: Settings) -> bool:
        """Returns whether they are set now as in settings that were read before."""
        is_with_cuda = uses_cuda()
        if is_with_cuda is not (len(settings) > len(_OF_CPU)):
            return False
        readers, values_in = self.with_cuda if is_with_cuda else self.on_cpu
        found: bool = tuple(map(call, readers)) == values_in(settings)
        return found


def _readers(name: str, table: tuple[Setting, ...]) -> tuple[list[Callable[[], Any]], Any]:
    # two at least: whatever heeds one heeds deterministic mode and grad mode
    places = [place for place, setting in enumerate(table) if _heeds(name, setting)]
    return [table[place].read for place in places], itemgetter(*places)


def _heeds(name: str, setting: Setting) -> bool:
    return any(part and part in name for part in setting.kernels)


def heeded_by(name: str) -> HeededSettings | None:
    """Returns the settings that an operator's kernels heed; None where these are all kernels'."""
    return HeededSettings(name) if any(_heeds(name, setting) for setting in TABLE) else None
