"""Every private name of torch that zoo uses, each under a name that says what it is.

Private names may go with any release. So they are looked up here, once, when zoo is imported, and
one that is missing is an error that names it and the versions of torch which have it. Attributes of
tensors and modules (`_version`, `_parameters`) and operators of `torch.ops` are not among them.
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch

OLDEST = "2.11"
_WAY_OUT = f"Install torch {OLDEST} or later, or a newer zoo"
if torch.torch_version.TorchVersion(torch.__version__) < f"{OLDEST}.0a0":
    raise ImportError(f"zoo needs torch {OLDEST} or later; this is {torch.__version__}")

try:
    from torch import _conj as conj, _neg_view as neg_view
    from torch._C import (
        DisableTorchFunction,
        DispatchKey,
        DispatchKeySet,
        _are_functorch_transforms_active as are_functorch_transforms_active,
        _AutoDispatchBelowAutograd as BelowAutograd,
        _autograd,
        _current_autograd_node as current_node,
        _current_graph_task_id,
        _DisableAutocast as DisableAutocast,
        _disabled_torch_dispatch_impl as disabled_torch_dispatch,
        _DisableTorchDispatch as DisableTorchDispatch,
        _dispatch_dump as dispatch_table,
        _dispatch_has_kernel_for_dispatch_key as has_kernel,
        _dispatch_tls_is_dispatch_key_excluded as is_key_excluded,
        _dispatch_tls_is_dispatch_key_included as is_key_included,
        _dispatch_tls_local_exclude_set as excluded_keys,
        _dispatch_tls_local_include_set as included_keys,
        _EnableTorchFunction as EnableTorchFunction,
        _ExcludeDispatchKeyGuard as ExcludeKeys,
        _ForceDispatchKeyGuard as ForceDispatchKeyGuard,
        _get_dispatch_mode as get_dispatch_mode,
        _has_mkldnn as HAS_MKLDNN,
        _is_any_autocast_enabled as is_any_autocast_enabled,
        _is_tracing as is_tracing,
        _len_torch_dispatch_stack as count_dispatch_modes,
        _set_grad_enabled as set_grad_enabled,
        _storage_Use_Count as storage_holders,
        _TorchDispatchModeKey,
        _will_engine_execute_node,
    )
    from torch._C._autograd import (
        SavedTensor,
        _get_current_graph_task_keep_graph,
        _get_sequence_nr as sequence_number,
        _saved_tensors_hooks_disable,
        _saved_tensors_hooks_enable,
        _top_saved_tensors_default_hooks as top_saved_tensors_hooks,
    )
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_callback
    from torch._C._functorch import is_legacy_batchedtensor as is_legacy_batched
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as no_transforms
    from torch._guards import active_fake_mode
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorConverter,
        FakeTensorMode,
        in_kernel_invocation_manager as in_kernel_invocation,
        unset_fake_temporarily,
    )
    from torch.library import _impls as PYTHON_KERNELS, _scoped_library as scoped_library
    from torch.optim.optimizer import (
        _global_optimizer_post_hooks as HOOKS_AFTER_ALL_STEPS,
        _global_optimizer_pre_hooks as HOOKS_OF_ALL_STEPS,
    )
    from torch.utils import _pytree as pytree
    from torch.utils._foreach_utils import (
        _get_foreach_kernels_supported_devices as devices_with_kernels_of_lists,
    )
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes as disable_current_modes,
        _get_current_dispatch_mode_stack as dispatch_modes,
        is_traceable_wrapper_subclass,
    )
except ImportError as error:
    raise ImportError(
        f"zoo uses a private name that torch {torch.__version__} does not have: {error}. {_WAY_OUT}"
    ) from error


def _private(path: str) -> Any:
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError as error:
        raise ImportError(
            f"zoo uses torch.{path}, which torch {torch.__version__} does not have. {_WAY_OUT}"
        ) from error


# tensors and plain values, in lists, tuples and dictionaries of any depth
PyTree: TypeAlias = Any
# arguments of an operator or a module
Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]
# the operator that a dispatch mode gets; one of higher order has neither `_op` nor a schema
Operator = OpOverload[..., PyTree]

FAKE_MODE = _TorchDispatchModeKey.FAKE
# the key of the mode by which `make_fx` and higher-order operators write graphs
PROXY_MODE = _TorchDispatchModeKey.PROXY
# those of the modes that make tensors without numbers: fake, functional and proxy ones
_MODES_OF_TRACERS = FAKE_MODE, _TorchDispatchModeKey.FUNCTIONAL, PROXY_MODE
# the key of the vmap around a backward of several gradients at once
VMAP_OF_GRADIENTS: DispatchKey = _private("_C._parse_dispatch_key")("VmapMode")
# the key of `torch.jit.trace`
JIT_TRACER: DispatchKey = _private("_C._parse_dispatch_key")("Tracer")
# names that torch's own stubs lack
function_state: Callable[[], object] = _private("_C._get_torch_function_state")
set_function_state: Callable[[object], None] = _private("_C._set_torch_function_state")
RestoreKeys: type[AbstractContextManager[None]] = _private("_C._RestorePythonTLSSnapshot")
function_modes: Callable[[], list[Any]] = _private("overrides._get_current_function_mode_stack")
are_saved_tensors_hooks_enabled: Callable[[], bool] = _private(
    "_C._autograd._saved_tensors_hooks_is_enabled"
)


def _offset_of_storage_pointer() -> int:
    """Returns where in a tensor of C++ the address of its storage is, in bytes from the start."""
    tensor = torch.empty(1)
    words = (ctypes.c_size_t * 16).from_address(tensor._cdata)
    storage = tensor.untyped_storage()._cdata
    if storage not in words:
        raise ImportError(
            f"zoo does not find the storage of a tensor of torch {torch.__version__}. {_WAY_OUT}"
        )
    return [*words].index(storage) * ctypes.sizeof(ctypes.c_size_t)


OFFSET_OF_STORAGE_POINTER = _offset_of_storage_pointer()


def _settings(*names: str, optional: bool = False) -> dict[str, tuple[Any, Any]]:
    """Returns for each name how to read and to write it."""
    there = [name for name in names if not optional or hasattr(torch._C, f"_set_{name}")]
    return {name: (_private(f"_C._get_{name}"), _private(f"_C._set_{name}")) for name in there}


def _settings_of_several(*names: str) -> dict[str, tuple[Any, Any]]:
    return {
        name: (read, lambda values, write=write: write(*values))
        for name, (read, write) in _settings(*names).items()
    }


# settings that choose among kernels, by name: how to read and to write each
CPU_SETTINGS = {
    **_settings(
        "mkldnn_enabled", "mkldnn_deterministic", "cpu_allow_fp16_reduced_precision_reduction",
        "nnpack_enabled", "qengine", "deterministic_fill_uninitialized_memory",
    ),
    **{
        f"{kind}_enabled": (_private(f"_C._get_{kind}_enabled"), _private(f"_C._set_sdp_use_{use}"))
        for kind, use in (
            ("flash_sdp", "flash"), ("mem_efficient_sdp", "mem_efficient"), ("math_sdp", "math"),
            ("cudnn_sdp", "cudnn"),
        )
    },
    **_settings("math_sdp_allow_fp16_bf16_reduction"),
}  # fmt: skip
CUDA_SETTINGS = {
    **_settings(
        "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation",
        "linalg_preferred_backend", "blas_preferred_backend",
    ),
    **_settings_of_several(
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
    ),
    # settings that only some versions and builds have
    **_settings(
        "cudnn_depthwise_kernel", "cublaslt_prefer_grouped_gemm", "sm_carveout_experimental",
        "rocm_fa_preferred_backend", "miopen_immediate",
        optional=True,
    ),
}  # fmt: skip
if hasattr(torch._C, "_cuda_set_cudnn_benchmark_limit"):
    CUDA_SETTINGS["cudnn_benchmark_limit"] = (
        torch._C._cuda_get_cudnn_benchmark_limit, torch._C._cuda_set_cudnn_benchmark_limit,
    )  # fmt: skip
if hasattr(torch._C, "_cuda_tunableop_enable"):
    CUDA_SETTINGS["tunableop"] = (
        torch._C._cuda_tunableop_is_enabled, torch._C._cuda_tunableop_enable,
    )  # fmt: skip
    CUDA_SETTINGS["tunableop_tuning"] = (
        torch._C._cuda_tunableop_tuning_is_enabled, torch._C._cuda_tunableop_tuning_enable,
    )  # fmt: skip
# the precision of a library's operation in float32 ("conv"), or of all of them ("all")
precision_of: Any = _private("_C._get_fp32_precision_getter")
set_precision: Any = _private("_C._set_fp32_precision_setter")
_queue_callback: Any = _private("autograd.Variable._execution_engine.queue_callback")
_is_profiling_here: Any = _private("autograd._profiler_enabled")
_private("autograd.profiler._is_profiler_enabled")
note_profiling: Any = _private("autograd.profiler._set_is_profiler_enabled")
_private("compiler._is_exporting_flag")
# whether `torch.export` runs: the compiler of torch 2.11 takes torch's own question for True
# wherever it is asked
is_exporting = functools.partial(getattr, torch.compiler, "_is_exporting_flag")


def tracer_modes() -> tuple[object, ...]:
    """Returns the modes of this thread that make tensors without numbers, None for each missing."""
    return tuple(map(get_dispatch_mode, _MODES_OF_TRACERS))


# the module that asks a forward for what TorchScript compiles
SCRIPT_COMPILER = "torch._jit_internal"


def is_profiling() -> bool:
    """Returns whether torch's profiler is at work, in this thread or in another."""
    return _is_profiling_here() or torch.autograd.profiler._is_profiler_enabled


class _Interpreted(threading.local):
    """The backward that this thread runs node by node, without autograd's engine: its number.

    It is below -1, so that it is none of the engine's; -1 outside of one.
    """

    backward = -1
    callbacks: list[Callable[[], object]]


_interpreted = _Interpreted()
_interpreted_backwards = itertools.count(-2, -1)


@contextlib.contextmanager
def interpreted_backward() -> Iterator[None]:
    """Makes the block a backward for all that asks for it, as one that autograd's engine runs."""
    before = _interpreted.backward
    _interpreted.backward, _interpreted.callbacks = next(_interpreted_backwards), []
    try:
        yield
    finally:
        callbacks, _interpreted.backward = _interpreted.callbacks, before
        for callback in callbacks:
            callback()


def current_backward() -> int:
    """Returns the number of the backward that runs on this thread; -1 outside of one."""
    task: int = _current_graph_task_id()
    return _interpreted.backward if task == -1 else task


def queue_callback(callback: Callable[[], object]) -> None:
    """Calls a function when the current backward is over."""
    if _current_graph_task_id() == -1:
        _interpreted.callbacks.append(callback)
    else:
        _queue_callback(callback)


def is_graph_kept() -> bool:
    """Returns whether a backward of autograd's engine runs here, and keeps its graph."""
    return _current_graph_task_id() != -1 and bool(_get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Returns whether the current backward runs an autograd node.

    Code that calls autograd nodes by itself, without the engine, calls them all.
    """
    return _current_graph_task_id() == -1 or bool(_will_engine_execute_node(node))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of a class, a module or an object inside the block."""
    own = vars(owner)
    before, has_own = own.get(name), name in own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def watch_hooks_of_saved_tensors(
    before_disable: Callable[[], object],
    after_enable: Callable[[], object],
    before_register: Callable[[Any], object],
) -> None:
    """Makes torch call these where a program disables the hooks for saved tensors or adds to them.

    torch refuses both while any hooks are set. `before_disable` is called before the hooks are
    disabled, as `torch.func.grad` does, `after_enable` after they were enabled again, and
    `before_register` with the packed value of a saved tensor that is to have hooks of its own.
    """
    module: Any = torch._C._autograd
    kind = module.SavedTensor
    disable, enable = module._saved_tensors_hooks_disable, module._saved_tensors_hooks_enable
    register = kind.register_hooks

    @functools.wraps(disable)
    def disabled(*args: Any, **kwargs: Any) -> None:
        before_disable()
        disable(*args, **kwargs)

    @functools.wraps(enable)
    def enabled() -> None:
        enable()
        after_enable()

    @functools.wraps(register)
    def registered(saved: Any, *hooks: Any) -> Any:
        before_register(saved.data)
        return register(saved, *hooks)

    module._saved_tensors_hooks_disable = disabled
    module._saved_tensors_hooks_enable = enabled
    kind.register_hooks = registered


def wrap_jit_traces(wrap: Callable[[Any], Any]) -> None:
    """Makes `torch.jit.trace` call, in place of its own functions, what `wrap` makes of them."""
    own: Any = torch._C
    for owner, kind in ((own, "function"), (own.ScriptModule, "method")):
        for name in (f"_create_{kind}_from_trace", f"_create_{kind}_from_trace_with_dict"):
            setattr(owner, name, wrap(getattr(owner, name)))


def compile_time() -> Any:
    """Returns torch's `comptime`, which calls functions while compiling; imports the compiler."""
    from torch._dynamo.comptime import comptime  # noqa: PLC0415

    return comptime


def no_graph_error() -> Any:
    """Returns the class of the error by which a frame is not compiled; imports the compiler."""
    from torch._dynamo.exc import Unsupported  # noqa: PLC0415

    return Unsupported


def clear_blas_workspaces() -> None:
    """Frees the workspaces that cuBLAS holds; its next product allocates one.

    A build without CUDA has none.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Lets a device's allocator free the memory of a capture that has failed.

    torch 2.11 holds it for the capture forever. torch 2.14 has ended that itself, and raises here.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def has_expandable_segments(device: torch.device) -> bool:
    """Returns whether the allocator of a device, which is in use, has expandable segments."""
    memory: Any = getattr(torch.get_device_module(device), "memory", None)
    snapshot: Any = getattr(memory, "_snapshot", dict)
    return bool(snapshot().get("allocator_settings", {}).get("expandable_segments"))


@contextlib.contextmanager
def allocator_history(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Yields a list that has the events of a device's caching allocator when the block has ended.

    It stays empty where the allocator keeps no history.
    """
    entries: list[dict[str, Any]] = []
    memory: Any = getattr(torch.get_device_module(device), "memory", None)
    record = getattr(memory, "_record_memory_history", None)
    if record is None:
        yield entries
        return
    record(enabled="all", context=None)
    try:
        yield entries
        histories = memory._snapshot()["device_traces"]
        entries += histories[device.index] if device.index < len(histories) else []
    finally:
        record(enabled=None)


class _CompilerStandIn(types.ModuleType):
    """In place of `torch._dynamo`: has its settings, and imports the compiler for anything else."""

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        path = Path(torch.__file__).parent / "_dynamo" / "config.py"
        spec: Any = importlib.util.spec_from_file_location("torch._dynamo.config", path)
        self.config = importlib.util.module_from_spec(spec)
        self.source = _Sources("torch._dynamo.source")
        # `inspect` asks each module, and torch asks `inspect` in the middle of imports
        self.__file__ = self.source.__file__ = str(path)
        self._modules = {module.__name__: module for module in (self, self.config, self.source)}
        sys.modules.update(self._modules)
        spec.loader.exec_module(self.config)

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """Returns the function: nothing is compiled here."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Does nothing; the step of each optimizer of torch calls it."""

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            sys.modules.pop(module, None)
        self._modules.clear()
        return getattr(importlib.import_module("torch._dynamo"), name)


class _Sources(types.ModuleType):
    """In place of the compiler's module of sources: any name is a class, which is never used."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {"__init__": lambda *_, **__: None, "name": name})


def leave_out_compiler() -> None:
    """Keeps fake tensors from importing the compiler for its settings and names: a second.

    Only for a process of one thread that ends soon.
    """
    if "torch._dynamo" in sys.modules:
        return
    _CompilerStandIn()
    make = FakeTensorConverter.from_real_tensor

    def untraced(self: Any, *args: Any, **others: Any) -> Any:
        # to trace it would import the compiler, too
        return make(self, *args, **others | {"trace": False})

    FakeTensorConverter.from_real_tensor = untraced  # type: ignore[method-assign]


def compiler_settings() -> Any:
    """Returns the settings of torch's compiler, whose first import takes a second."""
    return importlib.import_module("torch._inductor.config")


def fake_store() -> Any:
    """Makes a store for a process group of simulated ranks."""
    # a module of tests, which imports much
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    return FakeStore()
