"""Source locations: the module and the line that an operation belongs to, from Python's stack.

Module hooks would not fire at the end of a module that raises, and would change the tracked model.
"""

import ast
import contextlib
import functools
import itertools
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo import layers, models

_CALL = nn.Module._wrapped_call_impl.__code__
_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
# a function of torch that calls others, with much between them
_ATTENTION = nn.functional.multi_head_attention_forward.__code__
_FOLDER = os.path.dirname
_ZOO = _FOLDER(_FOLDER(__file__)) + os.sep
# zoo's own files that compute a model; all others run models
_SHOWN = tuple(folder + os.sep for package in (models, layers) for folder in package.__path__)
_TORCH = _FOLDER(torch.__file__) + os.sep
_HIDDEN = (_TORCH, contextlib.__file__, "<")
# torch's own code that calls functions of torch, and the functions
_CALLERS = tuple(os.path.join(_TORCH, folder, "") for folder in ("nn", "optim"))
_FUNCTIONS = frozenset({nn.functional.__file__, torch.functional.__file__})
_NAMES = frozenset().union(*map(dir, (torch, torch.Tensor, nn.functional, torch.linalg, torch.fft)))
_RUNNER = _CALL.co_filename
# handlers of modes and tensor classes: each calls all functions, or operators, at one instruction
_HANDLERS = ("__torch_function__", "__torch_dispatch__")
# a module of zoo with this global runs a training loop; its lines are not the user's
LOOP = "IS_TRAINING_LOOP"


class Location(NamedTuple):
    """Block, path of the module and "file:line"; each "" where there is none."""

    block: str = ""
    module: str = ""
    line: str = ""


UNKNOWN = Location()


class Locations:
    """Finds source locations in one model; `inside`: the latest frame was in the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.inside = False
        self._lines: dict[str, str] = {}

    def here(self, frame: FrameType | None) -> Location:
        """Returns the location of a frame, and sets `inside`."""
        module = line = None
        self.inside = False
        for caller in _outward(frame):
            code = caller.f_code
            if code is _CALL:
                path = self.paths.get(id(_local(caller, "self")))
                if path is not None:
                    self.inside = True
                    module = path if module is None else module
            elif line is None and code in _BACKWARDS:
                # a recomputation's line is that of its forward, not of the call of backward()
                line = self._lines.get(module or "", "")
            elif line is None:
                line = _line_at(caller)
            if line is not None and module is not None:
                break
        path = module or ""
        if line is None:
            # the stack of a backward's own thread begins there
            line = self._lines.get(path, "")
        elif path:
            self._lines.setdefault(path, line)
        return Location("" if module is None else self._block(path), path, line)

    def of_module(self, path: str, nearby: Location = UNKNOWN) -> Location:
        """Returns the location of a module that is not running; the line is `known`'s."""
        return Location(self._block(path), path, nearby.line)

    def _block(self, path: str) -> str:
        return block_of(path) or type(self.model).__name__


class Instruction(NamedTuple):
    """An instruction of Python that calls a function of torch.

    Attributes:
        code: the code object with the instruction at byte `offset`.
        callers: the offset in the code of each frame around it, the innermost first; not the frame,
            whose memory a later one may get.
        function: the function's name if it is written in Python, and thus has a frame.
    """

    code: CodeType
    offset: int
    callers: tuple[int, ...]
    function: str

    def name(self) -> str | None:
        """Returns the name of the function, "" for an operator of Python such as `+`.

        None if it calls something by a name that no function of torch has, such as each `f` of a
        list: that may be another function the next time.
        """
        return self.function or _called_at(self.code, self.offset)


def modules_around(
    frame: FrameType | None, paths: Mapping[int, str]
) -> tuple[tuple[str, ...], str, Instruction | None]:
    """Returns the paths of the modules whose calls contain a frame, outermost first, and its line.

    `paths` are by the ids of modules. The line is "file:line" of the innermost code that is not
    torch's; "" if no module is running. The instruction is the innermost one that calls a function
    of torch, None for a gradient that the forward takes.
    """
    modules: list[str] = []
    line: str | None = None
    call_frame: FrameType | None = None
    callers: list[int] = []
    function, has_call = "", False
    for caller in _outward(frame):
        code = caller.f_code
        if code is _CALL:
            path = paths.get(id(_local(caller, "self")))
            modules += [] if path is None else [path]
        elif line is None:
            line = _line_at(caller)
        if has_call:
            callers.append(caller.f_lasti)
        elif code in _BACKWARDS:
            has_call = True
        elif code.co_name in _HANDLERS:
            continue
        elif code is _ATTENTION or _calls_functions(code.co_filename):
            has_call = True
            call_frame = caller
        elif code.co_filename in _FUNCTIONS:
            function = code.co_name.lstrip("_")
    call = call_frame and Instruction(call_frame.f_code, call_frame.f_lasti, (*callers,), function)
    return tuple(reversed(modules)), line if line and modules else "", call


@functools.cache
def _calls_functions(filename: str) -> bool:
    """Returns whether a file is code of models: the user's, or modules of torch."""
    if filename.startswith(_TORCH):
        return filename.startswith(_CALLERS) and filename not in _FUNCTIONS | {_RUNNER}
    return _shown(filename) is not None


@functools.cache
def _called_at(code: CodeType, offset: int) -> str | None:
    """Returns the name of the function of torch that an instruction calls, from the source.

    It is "" for an operator and without a source, None for a name that is none of torch's.
    """
    first, last, start, end = next(itertools.islice(code.co_positions(), offset // 2, None))
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [
        linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(call, ast.Call):
        return ""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name if name in _NAMES else None


def line_of_traceback(error: BaseException) -> str:
    """Returns "file:line" of the innermost user code in an error's traceback; "" if none."""
    frames = traceback.walk_tb(error.__traceback__)
    return ([line for frame, number in frames if (line := _line_at(frame, number))] or [""])[-1]


def line_of_frame(frame: FrameType | None) -> str:
    """Returns "file:line" of the innermost user code in a frame's stack; "" if none."""
    return next((line for caller in _outward(frame) if (line := _line_at(caller))), "")


def is_differentiated(frame: FrameType | None) -> bool:
    """Returns whether the backward that contains a frame was called with `create_graph`."""
    backward = next((caller for caller in _outward(frame) if caller.f_code in _BACKWARDS), None)
    return backward is not None and bool(_local(backward, "create_graph"))


def block_of(path: str) -> str:
    """Returns the block that a module belongs to: 'layer1.0.bn1' -> 'layer1.0'."""
    parts = path.split(".")
    end = next((index for index, part in enumerate(parts, 1) if part.isdecimal()), -1)
    return ".".join(parts[:end]) or path


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _local(frame: FrameType, name: str) -> Any:
    values = frame.f_locals
    value = values[name]
    if sys.version_info < (3, 13):
        # the frame keeps this copy, and would keep its tensors alive
        values.clear()
    return value


def _line_at(frame: FrameType, number: int | None = None) -> str | None:
    """Returns "file:line" of a frame; None if its code runs models, "" for zoo's training loops."""
    if LOOP in frame.f_globals:
        return ""
    shown = _shown(frame.f_code.co_filename)
    return None if shown is None else f"{shown}:{frame.f_lineno if number is None else number}"


@functools.cache
def _shown(filename: str) -> str | None:
    is_runner = filename.startswith(_ZOO) and not filename.startswith(_SHOWN)
    if is_runner or filename.startswith(_HIDDEN):
        return None
    for root in (os.getcwd(), *sorted(sys.path, key=len, reverse=True)):
        if root and filename.startswith(os.path.join(root, "")):
            return os.path.relpath(filename, root)
    return filename
