"""Source locations: the module, step and line that an operation belongs to, from Python's stack.

Module hooks would miss a chain's steps, would not fire at the end of a module whose recomputation
stops early, and would change the tracked model.
"""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo import layers, models
from zoo.chain import fold, step_name

_CALL = nn.Module._wrapped_call_impl.__code__
_FOLD = fold.__code__
_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_FOLDER = os.path.dirname
_ZOO = _FOLDER(_FOLDER(__file__)) + os.sep
# zoo's own files that compute a model; all others run models
_SHOWN = tuple(folder + os.sep for package in (models, layers) for folder in package.__path__)
_HIDDEN = (_FOLDER(torch.__file__) + os.sep, contextlib.__file__, "<")
# a module of zoo with this global runs a training loop; its lines are not the user's
LOOP = "IS_TRAINING_LOOP"


class Location(NamedTuple):
    """Block, step, path of the module and "file:line"; each "" where there is none."""

    block: str = ""
    step: str = ""
    module: str = ""
    line: str = ""


UNKNOWN = Location()


class Locations:
    """Finds source locations in one model; `inside`: the latest frame was in the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.inside = False
        self._homes: dict[str, str] = {}
        self._lines: dict[tuple[str, str], str] = {}

    def here(self, frame: FrameType | None) -> Location:
        """Returns the location of a frame, and sets `inside`."""
        module = line = None
        step = ""
        self.inside = False
        for caller in _outward(frame):
            code = caller.f_code
            if code is _CALL:
                path = self.paths.get(id(_local(caller, "self")))
                if path is not None:
                    self.inside = True
                    module = path if module is None and not step else module
            elif code is _FOLD:
                self.inside = True
                step = step or step_name(_local(caller, "step"), self.paths)
            elif line is None and code in _BACKWARDS:
                # a recomputation's line is that of its forward, not of the call of backward()
                line = self._lines.get((step, module or ""), "")
            elif line is None:
                line = _line_at(caller)
            if line is not None and (step or module == ""):
                break
        path = module or ""
        if line is None:
            # the stack of a backward's own thread begins there
            line = self._lines.get((step, path), "")
        elif step or path:
            self._lines.setdefault((step, path), line)
        home = step or module
        block = "" if home is None else self._block(home)
        if step and path:
            self._homes.setdefault(path, block)
        return Location(block, step, path, line)

    def of_module(self, path: str, known: Location = UNKNOWN) -> Location:
        """Returns the location of a module that is not running; step and line are `known`'s."""
        return Location(self._homes.get(path) or self._block(path), known.step, path, known.line)

    def _block(self, path: str) -> str:
        return block_of(path) or type(self.model).__name__


def modules_around(
    frame: FrameType | None, paths: Mapping[int, str]
) -> tuple[tuple[str, ...], str]:
    """Returns the paths of the modules whose calls contain a frame, outermost first, and its line.

    `paths` are by the ids of modules. The line is "file:line" of the innermost code that is not
    torch's; "" if no module is running.
    """
    modules: list[str] = []
    line = None
    for caller in _outward(frame):
        if caller.f_code is _CALL:
            path = paths.get(id(_local(caller, "self")))
            modules += [] if path is None else [path]
        elif line is None:
            line = _line_at(caller)
    return tuple(reversed(modules)), line if line and modules else ""


def line_of_traceback(error: BaseException) -> str:
    """Returns "file:line" of the innermost user code in an error's traceback; "" if none."""
    frames = traceback.walk_tb(error.__traceback__)
    return ([line for frame, number in frames if (line := _line_at(frame, number))] or [""])[-1]


def line_of_frame(frame: FrameType | None) -> str:
    """Returns "file:line" of the innermost user code in a frame's stack; "" if none."""
    return next((line for caller in _outward(frame) if (line := _line_at(caller))), "")


def is_differentiated(frame: FrameType | None) -> bool:
    """Says whether the backward that contains a frame was called with `create_graph`."""
    backward = next((caller for caller in _outward(frame) if caller.f_code in _BACKWARDS), None)
    return backward is not None and bool(_local(backward, "create_graph"))


def block_of(path: str) -> str:
    """Returns the block that a step or module belongs to: 'layer1.0.bn1' -> 'layer1.0'."""
    parts = path.partition("(")[0].split(".")
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
