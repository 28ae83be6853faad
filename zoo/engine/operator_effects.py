"""Effects of torch's operators: the arguments that they write, random draws, aliases.

Schemas tell most of it. Tables here list by name what no schema tells; `tests/operators.py` found
it, which runs torch's own database of operators with and without a recording.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo._torch import (
    PYTHON_KERNELS,
    Args,
    Kwargs,
    Operator,
    PyTree,
    dispatch_table,
    has_kernel,
    pytree,
)
from zoo.engine.kernel_settings import HeededSettings, heeded_by
from zoo.engine.nondeterministic_kernels import Nondeterminism, nondeterminism_of

# types of arguments beside tensors, generators and lists of these
CONSTANTS = (
    int | float | complex | str | bool | None | torch.dtype | torch.device | torch.layout
    | torch.memory_format
)  # fmt: skip
# namespaces whose C++ operators do only what their schemas say. All others may run a user's Python
# or read another process's data: their results are kept, and they never run twice
KERNELS = frozenset({"aten", "quantized", "torchvision"})
# all higher-order operators of torch 2.11 to 2.14. Each runs once and as a whole, whatever it
# calls: its results are kept, and no replay calls it. One in FOREIGN, or in none of the three, may
# write its arguments without counting a version, so that all of them count as written
FUNCTIONS = frozenset({  # call the program's functions, or a graph of them
    "associative_scan", "autograd_function_apply", "cond", "control_deps", "custom_function_call",
    "dynamo_bypassing_wrapper", "flat_apply", "flex_attention", "flex_attention_backward",
    "flex_gemm", "foreach_map", "hints_wrapper", "invoke_leaf_function", "invoke_quant",
    "invoke_quant_packed", "invoke_subgraph", "local_map_hop", "map_impl", "run_const_graph",
    "scan", "strict_mode", "switch", "tag_activation_checkpoint", "trace_wrapped",
    "while_loop", "while_loop_stack_output", "wrap", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
})  # fmt: skip
WRAPPED = frozenset({  # call one operator, an argument, or none
    "_export_tracepoint", "auto_functionalized", "auto_functionalized_v2",
    "graphsafe_run_with_rng_state", "inline_asm_elementwise", "out_dtype", "print",
    "register_hook", "run_and_save_rng_state", "run_dtensor_rng_op", "run_with_rng_state",
    "triton_kernel_wrapper_functional", "with_effects",
})  # fmt: skip
FOREIGN = frozenset({  # run compiled code or objects of other languages
    "aoti_call_delegate", "call_torchbind", "executorch_call_delegate", "inductor_compiled_code",
    "triton_kernel_wrapper_mutation",
})  # fmt: skip
# types of arguments and results in schemas that no operator can change; a `str` is one only beside
# a tensor, where it says how to compute (see `is_kernel`)
PLAIN_TYPES = re.compile(
    r"(List\[|Optional\[)*"
    r"(Tensor|Scalar|number|int|float|bool|str|complex|Device|Generator|ScalarType|Layout"
    r"|MemoryFormat|SymInt)\]*(\[\d*\])?\??"
)
# marks the memory of its argument as used by a stream, and writes nothing there
MARKING = "aten::record_stream"
# kernels for these keys run above dispatch modes, and so once, or compute nothing
ABOVE = (
    "Autograd",
    "Autocast",
    "FuncTorch",
    "Batched",
    "VmapMode",
    "Functionalize",
    "Python",
    "Tracer",
    "Meta",
)
# their results are uninitialized until something writes them, perhaps code that no mode sees
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
         "aten::new_empty", "aten::new_empty_strided"}  # fmt: skip
# their results are made to be written, too
CONSTANT = {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::ones", "aten::ones_like",
            "aten::new_ones", "aten::full", "aten::full_like", "aten::new_full"}  # fmt: skip
# they write their first argument without reading it, as do those that draw, and `out=`
OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::index_put_", "aten::index_copy_",
               "aten::index_fill_", "aten::scatter_"}  # fmt: skip
# frequent kernels that call no operator for which autocast casts
LEAVES = {f"aten::{name}" for name in (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy",
    "_unsafe_view", "add", "add_", "cat", "clone", "copy_", "div", "div_", "embedding", "gelu",
    "gelu_backward", "max_pool2d_with_indices", "mul", "mul_", "native_batch_norm",
    "native_dropout", "native_layer_norm", "native_layer_norm_backward", "neg", "relu", "relu_",
    "sigmoid", "sigmoid_backward", "silu", "silu_backward", "sub", "sub_", "tanh", "tanh_backward",
    "threshold_backward",
)}  # fmt: skip
# Python's, which stand for a tensor in the place of an operator's first one (`with_tensors`)
NUMBERS = {int, float, complex, bool}
# an operator's kernel, or a function that calls it
Kernel = Callable[..., PyTree]
# position and name of an argument
Argument = tuple[int, str]
# arguments that are written without a declaration in the schema of some version of torch
RUNNING: tuple[Argument, ...] = ((3, "running_mean"), (4, "running_var"))
UNDECLARED: dict[str, tuple[Argument, ...]] = {
    "aten::rrelu_with_noise": ((1, "noise"),),
    "aten::rrelu_with_noise_": ((1, "noise"),),
    "aten::_cudnn_rnn": ((15, "dropout_state"),),
    "aten::batch_norm_gather_stats": RUNNING,
    "aten::batch_norm_gather_stats_with_counts": RUNNING,
}
# position of the rate of dropout, followed by whether to train: if either is 0 they draw nothing
DROPPING = {"aten::_cudnn_rnn": 11}
# kernels that call operators, and the functions that call them, for which autocast may cast
CALLERS: dict[str, tuple[str, ...]] = {
    "aten::_cdist_forward": ("aten::cdist",),
    "aten::_euclidean_dist": ("aten::cdist",),
    "aten::_trilinear": ("aten::bilinear",),
    "aten::linalg_pinv": ("aten::linalg_pinv", "aten::pinverse"),
}
# types of nested results and arguments
SEQUENCES = {list, tuple}
# norms that update their statistics in training without reading them
NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
STATISTICS = (3, 4)
TRAINING = 5


# not a named tuple: reading a field of one takes three times as long
@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of an operator that a recording must know."""

    detaches: bool = False  # it returns a tensor of its argument's memory that may outlive it
    ignored: bool = False  # it makes and writes no storage: a view, a number, a query
    opaque: bool = False  # nothing is known about it, so its results are kept
    foreign: bool = False  # it may write all of its arguments without counting a version
    reshapes: bool = False  # it changes the size or strides of its first argument in place
    writes: tuple[Argument, ...] = ()  # arguments that it writes
    seeded: bool = False  # it draws from a random stream
    lists: bool = False  # it writes lists of tensors
    makes: bool = False  # it returns storages of its own
    empty: bool = False  # its result is uninitialized
    blank: bool = False  # its result is made to be written, perhaps by code that no mode sees
    heeded: HeededSettings | None = None  # settings that decide which kernel it runs
    norm: bool = False  # it updates statistics in training, without reading them
    overwrites: bool = False  # it does not read what it writes
    leaf: bool = False  # its kernel is known to call no operator for which autocast casts
    varies: Nondeterminism | None = None  # when its kernel may return other bits in a replay
    simple: bool = False  # it makes its results deterministically, and does nothing else
    dropping: int | None = None  # position of a rate: at 0 it writes no argument

    def keeps_results(self, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether no replay calls the kernel, so that its results and writes are kept."""
        return self.opaque or (self.varies is not None and self.varies.applies(args, kwargs))


# by id, since an operator's hash is a Python function; the list keeps the operators alive
EFFECTS: dict[int, Effects] = {}
_OPERATORS: list[Operator] = []
# names of operators by the ids of their kernels
_NAMES: dict[int, str] = {}


def effects_of(operator: Operator) -> Effects:
    """Returns the effects of an operator, cached."""
    effects = EFFECTS.get(id(operator))
    if effects is None:
        effects = EFFECTS[id(operator)] = _read(operator)
        _OPERATORS.append(operator)
    return effects


def with_tensors(operator: Operator, args: Args) -> Args:
    """Returns positional arguments with tensors where an operator takes no numbers in their place.

    A traced module of TorchScript calls operators with tensors that torch hands to a dispatch mode
    as the numbers that they hold.
    """
    if not hasattr(operator, "_schema"):
        return args
    kinds = operator._schema.arguments
    return tuple(
        torch.tensor(value) if type(value) in NUMBERS and str(kind.type) == "Tensor" else value
        for value, kind in zip(args, kinds, strict=False)
    )


def is_view(operator: Operator) -> bool:
    """Returns whether an operator returns a view of its argument; False for higher-order ones."""
    return bool(getattr(operator, "is_view", False))


@dataclass(slots=True)
class PythonKernels:
    """The registry of kernels in Python as last seen; libraries add and remove some.

    Attributes:
        count: the number of kernels.
        later: those registered since zoo was imported.
        operators: torch's operators, without overloads, for which another library registered one.
    """

    count: int = -1
    later: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()


_python = PythonKernels()
# these compute nothing or are torch's own, and are never removed
_AT_FIRST = frozenset(
    name for name in PYTHON_KERNELS if name.endswith("/Meta") or name.startswith("prims/")
)


def notice_python_kernels() -> None:
    """Drops cached effects if Python has registered or removed a kernel since the last call."""
    if len(PYTHON_KERNELS) == _python.count and _python.later <= PYTHON_KERNELS:
        return
    _python.count, _python.later = len(PYTHON_KERNELS), frozenset(PYTHON_KERNELS - _AT_FIRST)
    _python.operators = frozenset(filter(None, map(_python_override, _python.later)))
    EFFECTS.clear()


def _python_override(entry: str) -> str | None:
    """Returns the operator for which a library registered a Python kernel; None if torch did."""
    space, name, key = entry.split("/")
    if space not in KERNELS or key.startswith(ABOVE) or key.endswith("Meta"):
        return None
    operator = f"{space}::{name}"
    own, by_others = (f"{torch.__path__[0]}/{part}" for part in ("", "_library/"))
    for line in dispatch_table(operator).splitlines():
        location = line.partition("registered at ")[2]
        if line.startswith((f"{key}:", f"{key}[")) and location.startswith(own):
            return operator if location.startswith((by_others, f"{own}library.py")) else None
    return operator


def is_kernel(operator: Operator) -> bool:
    """Returns whether an operator does only what its schema says, so that it may run twice.

    It is torch's own, takes and returns tensors and plain values, reads no file, and runs no Python
    function that a program registered for it or for an operator that it may call.
    """
    schema = operator._schema
    if operator.namespace not in KERNELS:
        return False
    types = [str(part.type) for part in (*schema.arguments, *schema.returns)]
    if not all(map(PLAIN_TYPES.fullmatch, types)):
        return False
    # a string without a tensor beside it names something outside of the program
    reads = any("Tensor" in str(part.type) and not part.is_out for part in schema.arguments)
    if "str" in types and not reads:
        return False
    overridden = _python.operators
    name = operator.name()
    # torch's own operators call no library's
    is_near = any(other.startswith("aten::") for other in overridden)
    calls_others = is_near and has_kernel(name, "CompositeExplicitAutograd")
    return not calls_others and name not in overridden


def _read(operator: Operator) -> Effects:
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return Effects(opaque=True, foreign=operator.name() not in FUNCTIONS | WRAPPED)
    name = schema.name
    if name == MARKING:
        return Effects(ignored=True)
    if torch.Tag.inplace_view in operator.tags or name == "aten::resize_":
        return Effects(reshapes=True, writes=((0, "self"),))
    arguments = [(position, argument.name) for position, argument in enumerate(schema.arguments)]
    infos = [argument.alias_info for argument in schema.arguments]
    is_written = [info is not None and info.is_write for info in infos]
    writes = [*itertools.compress(arguments, is_written)]
    if not is_kernel(operator):
        # collectives write without saying so
        is_collective = name.startswith("c10d")
        return Effects(opaque=True, writes=tuple(arguments if is_collective else writes))
    # newer versions of torch declare some of them
    written = tuple(dict.fromkeys((*writes, *UNDECLARED.get(name, ()))))
    makes = any(
        "Tensor" in str(result.type) and result.alias_info is None for result in schema.returns
    )
    if not makes and not written:
        return Effects(ignored=True, detaches=name == "aten::detach")
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    varies = nondeterminism_of(operator)
    return Effects(
        writes=written,
        seeded=seeded,
        lists=bool(writes) and name.startswith("aten::_foreach"),
        makes=makes,
        empty=name in EMPTY,
        blank=name in EMPTY or name in CONSTANT,
        heeded=heeded_by(name),
        norm=name in NORMS,
        overwrites=name in OVERWRITING
        or (seeded and name not in UNDECLARED)
        or (
            any(is_written)
            and all(a.is_out for a in itertools.compress(schema.arguments, is_written))
        ),
        leaf=name in LEAVES,
        varies=varies,
        simple=not (written or seeded or varies or name in NORMS or name in EMPTY),
        dropping=DROPPING.get(name),
    )


def flat(out: PyTree) -> Sequence[PyTree]:
    """Returns the results of a kernel, some of which may be lists, in one sequence."""
    if type(out) not in SEQUENCES:
        return (out,)
    is_flat = SEQUENCES.isdisjoint(map(type, out))
    return (*out,) if is_flat else [part for parts in out for part in flat(parts)]


def bytes_returned(result: PyTree) -> int:
    """Returns the bytes of the tensors that an operator returned."""
    if isinstance(result, Tensor):
        return result.numel() * result.itemsize
    return sum(map(bytes_returned, result)) if isinstance(result, tuple | list) else 0


def written_by(effects: Effects, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors that a kernel is known to write."""
    if effects.foreign:
        return tensor_leaves((args, kwargs))
    rate = effects.dropping
    if rate is not None and not all(args[rate : rate + 2]):
        return []
    written: list[Tensor] = []
    for position, name in effects.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            written.append(value)
        elif value is not None:
            written += tensor_leaves(value)
    return written


def tensor_leaves(tree: PyTree) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def statistics_of(effects: Effects, args: Args) -> dict[int, Tensor]:
    """Returns the running statistics that a norm updates, by position; none in evaluation."""
    if not (effects.norm and args[TRAINING]):
        return {}
    return {index: args[index] for index in STATISTICS if args[index] is not None}


# cuDNN's networks share a dropout state per device. torch makes it from a random number in the
# first call after a program seeds, and in none of the calls that follow
DROPOUT_STATE = torch.ops.aten._cudnn_init_dropout_state.default
EMPTY_NUMBER = torch.ops.aten.empty.memory_format
DRAWN_NUMBER = torch.ops.aten.random_.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
# autograd calls it for a result that it saves, unless there are hooks for saved tensors
DETACH = torch.ops.aten.detach.default


def is_counted(operator: Operator, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether a plan knows a forward by this operator, among others.

    It does not by those that only some forwards of the same path call. What a program does with a
    number that it reads shows in the operators that follow; one in a message decides nothing, and
    `f"{tensor}"` reads it of a real tensor only.
    """
    is_free = operator is DETACH or operator is READ_NUMBER
    return not is_free and not makes_dropout_state(operator, args, kwargs)


def makes_dropout_state(operator: Operator, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether an operator is part of making the state of cuDNN's dropout."""
    if operator is EMPTY_NUMBER:
        # its arguments are no tensors
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        return dtype is torch.int64 and not args[0] and device is not None and device.type == "cuda"
    if operator is DRAWN_NUMBER:
        return args[0].dtype is torch.int64 and not args[0].shape and bool(args[0].is_cuda)
    return operator is DROPOUT_STATE


@functools.cache
def name_of(operator: Operator) -> str:
    """Names an operator; higher-order operators have no overloads."""
    return str(operator) if hasattr(operator, "_schema") else f"higher_order.{operator.name()}"


def name_of_kernel(kernel: object) -> str:
    """Names the operator of a kernel, which does not hold it."""
    if id(kernel) not in _NAMES:
        _NAMES.update(
            {id(getattr(operator, "_op", operator)): name_of(operator) for operator in _OPERATORS}
        )
    return _NAMES.get(id(kernel), getattr(kernel, "__name__", "a kernel"))


@functools.cache
def resolved(name: str) -> Operator:
    """Returns the operator of a name."""
    if name.startswith("higher_order."):
        operator: Operator = getattr(torch.ops.higher_order, name.partition(".")[2])
        return operator
    space, packet, overload = name.split(".")
    function: Operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return function
