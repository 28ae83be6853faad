"""Watches one forward on fake tensors and writes down what it did: a tape.

Three things are seen: calls of modules and looks at their attributes (methods of `nn.Module` are
replaced meanwhile, as `torch.fx` does), calls of torch functions (a `TorchFunctionMode`, which sees
Python's level: what autograd will see, not the kernels below), and what these take and return,
tensor by tensor. The values are fake, but the Python code is the real one and takes the branches
that it takes.

A module is inlined, so that its inside can be cut, or a leaf that is called as a whole. It becomes
a leaf (`Opaque`) when its own code does what a tape cannot repeat:

    reads a number out of a tensor            its next run may read another (but see `foreseen`)
    uses a tensor that came from nowhere      from_numpy, an attribute that is no buffer
    changes an attribute, a list, a buffer    a replay would not
    draws from Python's or NumPy's generators, switches autocast, registers hooks on tensors
"""

import contextlib
import enum
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from zoo.adapter.foreseen import Foreseen
from zoo.adapter.tape import Attribute, Call, Tape, Value, flattened, leaves_of, mapped, tensors_of
from zoo.engine.notes import PLAIN, version_of
from zoo.engine.snapshot import BOOKKEEPING, Snapshot
from zoo.errors import ZooError
from zoo.measure.places import model_line

# torch's own that are written in Python over other modules, and worth to be cut
COMPOSED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
# of torch's own books only the children and tensors say what a forward does
UNSEEN = (BOOKKEEPING | {"__dict__", "__class__", "forward"}) - {
    "_modules", "_parameters", "_buffers",
}  # fmt: skip
# what tells a number that is in a tensor
READERS = frozenset(
    (
        "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__",
        "__array__", "__repr__", "__format__", "equal", "allclose", "is_nonzero",
        "__contains__", "data_ptr",
    )
)  # fmt: skip
# what leaves something on a tensor that a second tensor would not have
MARKERS = frozenset(
    (
        "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "backward", "set_",
        "requires_grad_", "__set__", "__setattr__", "share_memory_",
    )
)  # fmt: skip
CONSTANTS = (
    PLAIN | torch.layout | torch.memory_format | torch.Size | complex | range | enum.Enum
)  # fmt: skip


class Opaque(Exception):
    """Says that a module's own code cannot be put on a tape; `raised` is what it raised, if so."""

    def __init__(self, path: str, reason: str, raised: Exception | None = None) -> None:
        super().__init__(reason)
        self.path, self.reason, self.raised = path, reason, raised

    @classmethod
    def of(cls, path: str, raised: Exception) -> "Opaque":
        """Says that a module's own code raised on fake tensors."""
        return cls(path, f"on fake tensors raises {line_of(raised)}", raised)


def is_composed(module: nn.Module) -> bool:
    """Says whether a module's forward is Python over other modules, and so may be inlined."""
    if not module._modules or isinstance(module, torch.jit.ScriptModule):
        return False
    if getattr(module, "_compiled_call_impl", None) is not None:
        return False
    return isinstance(module, COMPOSED) or not any(
        base.__module__.startswith(("torch.nn.modules.", "torch._dynamo"))
        for base in type(module).__mro__
        if base is not nn.Module
    )


def is_constant(leaf: Any) -> bool:
    """Says whether a value is the same each time that equal code makes it."""
    return (
        isinstance(leaf, CONSTANTS)
        or leaf is Ellipsis
        or (callable(leaf) and not isinstance(leaf, nn.Module))
    )


def ambient() -> tuple[Any, ...]:
    """Returns what surrounds this thread and decides what functions compute."""
    kinds = ("cpu", "cuda")
    return (
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


class Watch(TorchFunctionMode):
    """Writes the tape of one forward. `leaves` are the modules to be called as a whole."""

    def __init__(
        self, model: nn.Module, leaves: frozenset[nn.Module], inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.model, self.leaves = model, leaves
        self.paths = {module: path for path, module in model.named_modules()}
        self.owners = {
            id(tensor): Attribute(path, name)
            for module, path in reversed(self.paths.items())
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        self.tape = Tape(len(inputs))
        self.stack: list[str] = [""]
        # within a leaf, or within torch
        self.inside = 0
        self.thread = threading.get_ident()
        self.ambient = ambient()
        self.reads: dict[tuple[str, str], None] = {}
        self.numbers: dict[int, int] = {}
        self.origins: list[int] = []
        self.makers: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.foreseen = Foreseen()
        for tensor in inputs:
            self._number(tensor)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Tape:
        """Runs the model's forward and returns its tape."""

        def call(module: nn.Module, *given: Any, **named: Any) -> Any:
            return forward(*given, **named)

        with self._modules_watched(), self:
            output = self._inlined(call, self.model, "", args, kwargs)
        leaves, self.tape.output_spec = pytree.tree_flatten(flattened(output))
        self.tape.output = self._encoded(leaves)
        self.tape.reads = tuple(self.reads)
        return self.tape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Notes a call of a torch function."""
        kwargs = kwargs or {}
        if self._is_elsewhere():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(self.__torch_function__(torch.Tensor.unbind, types, (args[0], 0)))
        return self._function(func, name, args, kwargs)

    def _function(self, func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "__bool__" and (answer := self.foreseen.answer(args[0])) is not None:
            return answer
        self._check(name, given)
        with self._written(given) as written:
            encoded, fault = self._tried((tuple(args), kwargs))
            result = func(*args, **kwargs)
        if tensors_of(result) or written:
            if encoded is None:
                raise fault
            self._note(func, None, encoded, result, written)
            self.foreseen.note(func, args, result)
        return result

    # modules

    @contextlib.contextmanager
    def _modules_watched(self) -> Iterator[None]:
        """Leads every call of a module and every look at its attributes past the watch."""
        call, write = nn.Module.__call__, nn.Module.__setattr__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._called(call, module, args, kwargs)

        def looked(module: Any, name: str) -> Any:
            if name not in UNSEEN and not self._is_elsewhere() and module in self.paths:
                self.reads[self.paths[module], name] = None
            return object.__getattribute__(module, name)

        def written(module: nn.Module, name: str, value: Any) -> None:
            if not self._is_elsewhere() and module in self.paths:
                raise Opaque(self.stack[-1], f"sets the attribute {name}")
            write(module, name, value)

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            function = apply.__get__(None, kind)
            if self._is_elsewhere():
                return function(*args, **kwargs)
            return self._function(function, "", args, kwargs)

        owner: Any = nn.Module
        functions: Any = torch.autograd.Function
        apply = vars(functions)["apply"]
        owner.__call__, owner.__getattribute__, owner.__setattr__ = called, looked, written
        functions.apply = classmethod(applied)
        try:
            yield
        finally:
            owner.__call__, owner.__setattr__ = call, write
            del owner.__getattribute__
            functions.apply = apply

    def _called(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(module)
        if path is None or self._is_elsewhere():
            # one made on the spot, such as a loss: its functions are those of who made it
            return call(module, *args, **kwargs)
        if module in self.leaves or not is_composed(module):
            return self._leaf(call, module, path, args, kwargs)
        return self._inlined(call, module, path, args, kwargs)

    def _leaf(
        self, call: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any
    ) -> Any:
        encoded = self._encoded((tuple(args), kwargs))
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        with self._written(given) as written:
            result = call(module, *args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, Tensor) and not is_constant(leaf):
                kind = type(leaf).__name__
                raise Opaque(self.stack[-1], f"calls {path}, which returns a {kind}")
        self._note(None, path, encoded, result, written)
        return result

    def _inlined(
        self, call: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any
    ) -> Any:
        noted, books, streams = Snapshot(module), _books(module), _streams()
        self.stack.append(path)
        try:
            result = call(module, *args, **kwargs)
        except (Opaque, ZooError):
            raise
        except Exception as error:
            raise Opaque.of(path, error) from error
        finally:
            self.stack.pop()
        if path not in self.tape.inlined:
            self.tape.inlined += (path,)
        if not noted.holds(module) or books != _books(module):
            raise Opaque(path, "changes its attributes")
        if _streams() != streams:
            raise Opaque(path, "draws random numbers of Python or NumPy")
        return result

    # what calls take and return

    def _is_elsewhere(self) -> bool:
        return bool(self.inside) or threading.get_ident() != self.thread

    def _number(self, tensor: Tensor) -> int:
        """Numbers a tensor; one that has a number gets another, by which it goes from now on."""
        number = len(self.origins)
        self.numbers[id(tensor)] = number
        # ids are those of living tensors
        self.alive.append(tensor)
        self.origins.append(self.makers.setdefault(tensor.untyped_storage()._cdata, number))
        return number

    def _encoded(self, value: Any) -> Any:
        """Returns a value with places where tensors are."""
        return mapped(value, self._place)

    def _tried(self, value: Any) -> tuple[Any, Opaque]:
        try:
            return self._encoded(value), Opaque("", "")
        except Opaque as opaque:
            return None, opaque

    def _place(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if (number := self.numbers.get(id(leaf))) is not None:
                return Value(number)
            if id(leaf) in self.owners:
                return self.owners[id(leaf)]
            raise Opaque(self.stack[-1], "uses a tensor that no call of a torch function made")
        if is_constant(leaf):
            return leaf
        raise Opaque(self.stack[-1], f"hands on a {type(leaf).__name__}")

    def _check(self, name: str, given: Sequence[Tensor]) -> None:
        if name in MARKERS:
            raise Opaque(self.stack[-1], f"calls {name} on a tensor")
        if name in READERS and not all(map(_is_written_down, given)):
            raise Opaque(self.stack[-1], f"reads a number out of a tensor by {name}")
        if ambient() != self.ambient:
            raise Opaque(self.stack[-1], "switches autocast, the default type or inference mode")

    @contextlib.contextmanager
    def _written(self, given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yields a list that holds afterwards which of the tensors were written in place."""
        before, written = [version_of(tensor) for tensor in given], list[Tensor]()
        self.inside += 1
        try:
            yield written
        finally:
            self.inside -= 1
        pairs = zip(given, before, strict=True)
        written += [tensor for tensor, version in pairs if version_of(tensor) != version]

    def _note(
        self, func: Any, path: str | None, encoded: Any, result: Any, written: Sequence[Tensor]
    ) -> None:
        for tensor in written:
            if id(tensor) not in self.numbers:
                raise Opaque(self.stack[-1], "writes a parameter or buffer in place")
        args, kwargs = encoded
        writes = frozenset(self.origins[self.numbers[id(tensor)]] for tensor in written)
        results = tuple(map(self._number, tensors_of(result)))
        self.tape.calls.append(
            Call(
                func,
                path,
                args,
                kwargs,
                results,
                within=tuple(self.stack[2:]),
                grad=torch.is_grad_enabled(),
                origins=tuple(self.origins[number] for number in results),
                writes=writes,
                line=model_line(sys._getframe(), Watch.run.__code__),
            )
        )


def line_of(error: Exception) -> str:
    """Returns an error's type and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else ''}"


def _books(module: nn.Module) -> list[tuple[str, int]]:
    """Returns which parameters, buffers and children a module has."""
    found = (*module._parameters.items(), *module._buffers.items(), *module._modules.items())
    return [(name, id(value)) for name, value in found]


def _is_written_down(tensor: Tensor) -> bool:
    """Says whether a tensor is a number that the code itself says: `torch.tensor(3)`."""
    return isinstance(tensor, FakeTensor) and tensor.constant is not None


def _streams() -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), words.tobytes(), rest
