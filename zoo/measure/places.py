"""Where in a model the running code belongs: step, module and line, read from the stack.

Hooks on modules would see calls of modules only, not a chain's steps, would be left open when a
second run stops early, and would be one more thing that the model has while it is watched. Here
nothing is attached: the calls that are under way stand on Python's stack.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo.chain import Source, Titled, fold, step_name

_CALL = nn.Module._wrapped_call_impl.__code__
_FOLD = fold.__code__
_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ZOO = os.path.dirname(os.path.dirname(__file__)) + os.sep
# these files run models, they are none
_RUNNERS = tuple(
    _ZOO + name
    for name in (
        "adapter",
        "engine",
        "measure",
        "tracing",
        "chain.py",
        "checkpointing.py",
        "entry.py",
    )
)
# zoo's own training loop, in which nobody would look for a tensor
_LOOP = _ZOO + "tracking.py"


class Place(NamedTuple):
    """Block, step, path of the module and "file:line"; each "" where there is none."""

    block: str = ""
    step: str = ""
    module: str = ""
    line: str = ""


NOWHERE = Place()
_UNWRITTEN = Source(0, "")


class Places:
    """Names the places of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.homes: dict[str, str] = {}
        self.lines: dict[tuple[str, str], str] = {}
        self.inside = False

    def here(self, frame: FrameType | None) -> Place:
        """Describes the place of a frame, and sets `inside` where it lies in the model."""
        module = line = below = None
        step, is_cut = "", False
        self.inside = False
        while frame is not None and (line is None or not (step or module == "")):
            code = frame.f_code
            if code is _CALL:
                path = self.paths.get(id(_local(frame, "self")))
                if path is not None:
                    self.inside = True
                    module = path if module is None and not step else module
            elif code is _FOLD:
                running = _local(frame, "step")
                source = _source(running, below)
                self.inside = True
                if not step:
                    step, is_cut = step_name(running, self.paths), source is not _UNWRITTEN
                    module = self.paths.get(source.module) if module is None else module
                line = line or source.line or None
            elif line is None:
                line = self._line(frame, step, module or "")
            below, frame = frame, frame.f_back
        # steps that were cut out of a model are in the blocks of its modules, as without a plan
        home = module if is_cut and module is not None else step or module
        return self._place(step, module or "", line, "" if home is None else self._block(home))

    def of_module(self, path: str, known: Place = NOWHERE) -> Place:
        """Describes the place of a module that is not running; `known` says more than its path."""
        block = self.homes.get(path) or self._block(path)
        return Place(block, known.step, path, known.line)

    def _block(self, path: str) -> str:
        return block_of(path) or type(self.model).__name__

    def _line(self, frame: FrameType, step: str, module: str) -> str | None:
        if frame.f_code in _BACKWARDS:
            # there the loss is, and not what runs again
            return self.lines.get((step, module), "")
        return _line_at(frame)

    def _place(self, step: str, module: str, line: str | None, block: str) -> Place:
        if line is None:
            # a backward on a thread of its own, whose stack begins there
            line = self.lines.get((step, module), "")
        elif step or module:
            self.lines.setdefault((step, module), line)
        if step and module:
            self.homes.setdefault(module, block)
        return Place(block, step, module, line)


def modules_around(
    frame: FrameType | None, paths: Mapping[int, str]
) -> tuple[tuple[str, ...], str]:
    """Returns the paths of the modules that run around a frame, outermost first, and its line.

    `paths` are those of the modules by their ids. The line is "file:line" of the innermost
    code that is not torch's; "" where no module runs.
    """
    found: list[str] = []
    line = None
    while frame is not None:
        if frame.f_code is _CALL:
            path = paths.get(id(_local(frame, "self")))
            if path is not None:
                found.append(path)
        elif line is None:
            line = _line_at(frame)
        frame = frame.f_back
    return tuple(reversed(found)), line if line and found else ""


def line_of_traceback(error: BaseException) -> str:
    """Returns "file:line" of the model's code that raised an error; "" where none did."""
    found, step = "", error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if filename != _LOOP and not _is_hidden(filename):
            found = f"{_shown(filename)}:{step.tb_lineno}"
        step = step.tb_next
    return found


def is_differentiated(frame: FrameType | None) -> bool:
    """Says whether the backward that a frame is in makes a graph of itself: `create_graph`."""
    while frame is not None and frame.f_code not in _BACKWARDS:
        frame = frame.f_back
    return frame is not None and bool(_local(frame, "create_graph"))


def block_of(path: str) -> str:
    """Returns the block that a step or module belongs to: 'layer1.0.bn1' -> 'layer1.0'."""
    parts = path.partition("(")[0].split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1]) or path


def _local(frame: FrameType, name: str) -> Any:
    values = frame.f_locals
    value = values[name]
    if sys.version_info < (3, 13):
        # a copy that the frame keeps: tensors in it would live longer
        values.clear()
    return value


def _line_at(frame: FrameType) -> str | None:
    """Returns "file:line" of a frame, None for a runner's, "" for that of the loop around them."""
    filename = frame.f_code.co_filename
    if filename == _LOOP:
        return ""
    return None if _is_hidden(filename) else f"{_shown(filename)}:{frame.f_lineno}"


def _source(step: Any, frame: FrameType | None) -> Source:
    """Returns where the call was written that a step repeats now, in a frame of its function."""
    if frame is None or not isinstance(step, Titled) or not step.sources:
        return _UNWRITTEN
    source: Source = step.sources[_local(frame, "place")]
    return source


@functools.cache
def _is_hidden(filename: str) -> bool:
    return filename.startswith((_TORCH, *_RUNNERS, contextlib.__file__, "<"))


@functools.cache
def _shown(filename: str) -> str:
    for root in (os.getcwd(), *sorted(sys.path, key=len, reverse=True)):
        if root and filename.startswith(os.path.join(root, "")):
            return os.path.relpath(filename, root)
    return filename
