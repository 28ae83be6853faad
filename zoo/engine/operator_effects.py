"""What each of torch's operators does to its arguments: which it writes, draws for, aliases.

A schema tells nearly all of it. What no schema tells is listed here by name and was found by
`tests/operators.py`, which runs torch's own database of operators with and without a recording.
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

# what operators take beside tensors, generators and lists of these
CONSTANTS = (
    int | float | complex | str | bool | None | torch.dtype | torch.device | torch.layout
    | torch.memory_format
)  # fmt: skip
# namespaces whose operators in C++ do what their schemas say, and nothing else. All others may run
# a user's Python or another process's data, so their results are kept and they never run twice
KERNELS = frozenset({"aten", "quantized", "torchvision"})
# higher-order operators, all of torch 2.11 to 2.14. Each runs once and as a whole, whatever it
# calls: its results are kept, and no replay calls it. One of FOREIGN, or in none of these, may
# write what it is given without counting a version, so that all of that counts as written
FUNCTIONS = frozenset({  # call the program's functions, or a graph of them
    "associative_scan", "autograd_function_apply", "cond", "control_deps", "custom_function_call",
    "dynamo_bypassing_wrapper", "flat_apply", "flex_attention", "flex_attention_backward",
    "flex_gemm", "foreach_map", "hints_wrapper", "invoke_leaf_function", "invoke_quant",
    "invoke_quant_packed", "invoke_subgraph", "local_map_hop", "map_impl", "run_const_graph",
    "scan", "strict_mode", "switch", "tag_activation_checkpoint", "trace_wrapped",
    "while_loop", "while_loop_stack_output", "wrap", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
})  # fmt: skip
WRAPPED = frozenset({  # call one operator that they are given, or none
    "_export_tracepoint", "auto_functionalized", "auto_functionalized_v2",
    "graphsafe_run_with_rng_state", "inline_asm_elementwise", "out_dtype", "print",
    "register_hook", "run_and_save_rng_state", "run_dtensor_rng_op", "run_with_rng_state",
    "triton_kernel_wrapper_functional", "with_effects",
})  # fmt: skip
FOREIGN = frozenset({  # run compiled code or objects of other languages
    "aoti_call_delegate", "call_torchbind", "executorch_call_delegate", "inductor_compiled_code",
    "triton_kernel_wrapper_mutation",
})  # fmt: skip
# all that arguments and results of a kernel are beside tensors, as schemas write it: no object that
# an operator could change, and of texts those alone that say how to compute with tensors
PLAIN_TYPES = re.compile(
    r"(List\[|Optional\[)*"
    r"(Tensor|Scalar|number|int|float|bool|str|complex|Device|Generator|ScalarType|Layout"
    r"|MemoryFormat|SymInt)\]*(\[\d*\])?\??"
)
# it says which stream uses the memory of its argument, and writes nothing there
MARKING = "aten::record_stream"
# kernels for these keys run above dispatch modes, so once, or make no numbers
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
# their results have no content until something writes it, which may be code that no mode sees
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
         "aten::new_empty", "aten::new_empty_strided"}  # fmt: skip
# likewise their results are made to be written
CONSTANT = {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::ones", "aten::ones_like",
            "aten::new_ones", "aten::full", "aten::full_like", "aten::new_full"}  # fmt: skip
# they write their first argument without reading it, as do those that draw, and `out=`
OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::index_put_", "aten::index_copy_",
               "aten::index_fill_", "aten::scatter_"}  # fmt: skip
# kernels that are called often, and that call no operator for which autocast casts
LEAVES = {f"aten::{name}" for name in (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy",
    "_unsafe_view", "add", "add_", "cat", "clone", "copy_", "div", "div_", "embedding", "gelu",
    "gelu_backward", "max_pool2d_with_indices", "mul", "mul_", "native_batch_norm",
    "native_dropout", "native_layer_norm", "native_layer_norm_backward", "neg", "relu", "relu_",
    "sigmoid", "sigmoid_backward", "silu", "silu_backward", "sub", "sub_", "tanh", "tanh_backward",
    "threshold_backward",
)}  # fmt: skip
# an operator's kernel, or a function that calls it
Kernel = Callable[..., PyTree]
# position and name of an argument
Argument = tuple[int, str]
# arguments that are written although the schema of some version of torch does not say so
RUNNING: tuple[Argument, ...] = ((3, "running_mean"), (4, "running_var"))
UNDECLARED: dict[str, tuple[Argument, ...]] = {
    "aten::rrelu_with_noise": ((1, "noise"),),
    "aten::rrelu_with_noise_": ((1, "noise"),),
    "aten::_cudnn_rnn": ((15, "dropout_state"),),
    "aten::batch_norm_gather_stats": RUNNING,
    "aten::batch_norm_gather_stats_with_counts": RUNNING,
}
# of these where they have a rate, at this place, and train, at the next: else they draw nothing
DROPPING = {"aten::_cudnn_rnn": 11}
# of kernels that call operators, and are called by functions for which autocast may cast: these
CALLERS: dict[str, tuple[str, ...]] = {
    "aten::_cdist_forward": ("aten::cdist",),
    "aten::_euclidean_dist": ("aten::cdist",),
    "aten::_trilinear": ("aten::bilinear",),
    "aten::linalg_pinv": ("aten::linalg_pinv", "aten::pinverse"),
}
# what results and arguments come in beside single tensors
SEQUENCES = {list, tuple}
# norms that update their statistics in training, and do not read them then
NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
STATISTICS = (3, 4)
TRAINING = 5


# not a named tuple, whose fields take three times as long to read
@dataclass(frozen=True, slots=True)
class Effects:
    """What a recording must know about an operator."""

    detaches: bool = False  # it returns the memory of its argument to a tensor that may outlive it
    ignored: bool = False  # it makes no storage and writes none: a view, a number, a question
    opaque: bool = False  # nothing is known about it, so what it returns is kept
    foreign: bool = False  # it may write all that it is given, without counting a version
    reshapes: bool = False  # it changes the size or strides of its first argument in place
    writes: tuple[Argument, ...] = ()  # arguments that it writes
    seeded: bool = False  # it draws from a random stream
    lists: bool = False  # it writes lists of tensors
    makes: bool = False  # it returns storages of its own
    empty: bool = False  # its result has no content yet
    blank: bool = False  # its result is made to be written, and may be by code that no mode sees
    heeded: HeededSettings | None = None  # settings that decide which kernel it runs
    norm: bool = False  # it updates statistics in training, without reading them
    overwrites: bool = False  # it does not read what it writes
    leaf: bool = False  # its kernel is known to call no operator for which autocast casts
    varies: Nondeterminism | None = None  # when its kernel may return other bits in a replay
    simple: bool = False  # it makes its results, always the same ones, and does nothing else
    dropping: int | None = None  # the place of a rate without which it writes no argument

    def keeps_results(self, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether no replay calls the kernel, so that what it makes and writes is kept."""
        return self.opaque or (self.varies is not None and self.varies.applies(args, kwargs))


# by the ids of operators, whose hash is a Python function; the second holds them
KNOWN: dict[int, Effects] = {}
_OPERATORS: list[Operator] = []
# by the ids of their kernels
_NAMES: dict[int, str] = {}


def effects_of(operator: Operator) -> Effects:
    """Returns what an operator does, from a table after the first time."""
    found = KNOWN.get(id(operator))
    if found is None:
        found = KNOWN[id(operator)] = _read(operator)
        _OPERATORS.append(operator)
    return found


def is_view(operator: Operator) -> bool:
    """Returns whether an operator returns a view of its argument; higher-order ones do not say."""
    return bool(getattr(operator, "is_view", False))


@dataclass(slots=True)
class PythonKernels:
    """What is known of the kernels that are Python functions, which come and go.

    Attributes:
        count: how many there were.
        later: those that were not there when zoo was imported, none of which was removed.
        operators: torch's operators, without overloads, that another library gave such a kernel.
    """

    count: int = -1
    later: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()


_python = PythonKernels()
# they make no numbers or are torch's own, and are never removed
_AT_FIRST = frozenset(
    name for name in PYTHON_KERNELS if name.endswith("/Meta") or name.startswith("prims/")
)


def notice_python_kernels() -> None:
    """Forgets what operators do where Python registered or removed a kernel since."""
    if len(PYTHON_KERNELS) == _python.count and _python.later <= PYTHON_KERNELS:
        return
    _python.count, _python.later = len(PYTHON_KERNELS), frozenset(PYTHON_KERNELS - _AT_FIRST)
    _python.operators = frozenset(filter(None, map(_given_by_python, _python.later)))
    KNOWN.clear()


def _given_by_python(entry: str) -> str | None:
    """Returns the operator whose kernel is a Python function, unless torch itself has it so."""
    space, name, key = entry.split("/")
    if space not in KERNELS or key.startswith(ABOVE) or key.endswith("Meta"):
        return None
    operator = f"{space}::{name}"
    own, by_others = (f"{torch.__path__[0]}/{part}" for part in ("", "_library/"))
    for line in dispatch_table(operator).splitlines():
        place = line.partition("registered at ")[2]
        if line.startswith((f"{key}:", f"{key}[")) and place.startswith(own):
            return operator if place.startswith((by_others, f"{own}library.py")) else None
    return operator


def is_kernel(operator: Operator) -> bool:
    """Returns whether an operator does what its schema says, so that it may run twice.

    It is one of torch's own, takes and returns tensors and plain values, reads no file, and runs no
    Python function that a program registered for it or for what it may call.
    """
    schema = operator._schema
    if operator.namespace not in KERNELS:
        return False
    types = [str(part.type) for part in (*schema.arguments, *schema.returns)]
    if not all(map(PLAIN_TYPES.fullmatch, types)):
        return False
    # a text that no tensor comes with names something outside of the program
    reads = any("Tensor" in str(part.type) and not part.is_out for part in schema.arguments)
    if "str" in types and not reads:
        return False
    overridden = _python.operators
    name = operator.name()
    # torch's own operators call no library's
    is_near = any(one.startswith("aten::") for one in overridden)
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
    arguments = [(place, argument.name) for place, argument in enumerate(schema.arguments)]
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
    """Returns the results of a kernel, of which some may be lists, in one sequence."""
    if type(out) not in SEQUENCES:
        return (out,)
    is_flat = SEQUENCES.isdisjoint(map(type, out))
    return (*out,) if is_flat else [part for parts in out for part in flat(parts)]


def written_by(effects: Effects, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors that a kernel writes, as far as that is known."""
    if effects.foreign:
        return tensors_in((args, kwargs))
    rate = effects.dropping
    if rate is not None and not all(args[rate : rate + 2]):
        return []
    written: list[Tensor] = []
    for position, name in effects.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            written.append(value)
        elif value is not None:
            written += tensors_in(value)
    return written


def tensors_in(tree: PyTree) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def statistics_of(effects: Effects, args: Args) -> dict[int, Tensor]:
    """Returns by their positions the running statistics that a norm updates, in training alone."""
    if not (effects.norm and args[TRAINING]):
        return {}
    return {index: args[index] for index in STATISTICS if args[index] is not None}


# cuDNN's networks share a state for their dropout on a device. torch makes it in the first call
# after a program seeds, from a number that it draws, and in none of the calls that follow
DROPOUT_STATE = torch.ops.aten._cudnn_init_dropout_state.default
EMPTY_NUMBER = torch.ops.aten.empty.memory_format
DRAWN_NUMBER = torch.ops.aten.random_.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default


def makes_dropout_state(operator: Operator, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether an operator is one of those that make the state of cuDNN's dropout."""
    if operator is EMPTY_NUMBER:
        # none of the arguments is a tensor
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        return dtype is torch.int64 and not args[0] and device is not None and device.type == "cuda"
    if operator is DRAWN_NUMBER or operator is READ_NUMBER:
        return args[0].dtype is torch.int64 and not args[0].shape and bool(args[0].is_cuda)
    return operator is DROPOUT_STATE


@functools.cache
def name_of(operator: Operator) -> str:
    """Names an operator; higher-order operators have no overloads."""
    return str(operator) if hasattr(operator, "_schema") else f"higher_order.{operator.name()}"


def name_of_kernel(kernel: object) -> str:
    """Names the operator that was called by a kernel, which does not know it."""
    if id(kernel) not in _NAMES:
        _NAMES.update({id(getattr(one, "_op", one)): name_of(one) for one in _OPERATORS})
    return _NAMES.get(id(kernel), getattr(kernel, "__name__", "a kernel"))


@functools.cache
def resolved(name: str) -> Operator:
    """Returns the operator of a name."""
    if name.startswith("higher_order."):
        found: Operator = getattr(torch.ops.higher_order, name.partition(".")[2])
        return found
    space, packet, overload = name.split(".")
    function: Operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return function
