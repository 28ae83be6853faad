"""Text of a command line as values of the library: each function is the `type` of an option.

A wrong text raises an error of zoo's, which `Parser` shows below the option's name.
"""

import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zoo.errors import ArgumentError, nearest, shortened
from zoo.planner.plan import Plan
from zoo.planner.schemes import check_name
from zoo.planner.serialization import read_file
from zoo.policy.budget import Budget, check_bounds
from zoo.policy.options import Checkpoint
from zoo.policy.report import PlanReport
from zoo.profiling.timeline import PICTURES

# a mistyped axis must not end in an overflow
LARGEST = 2**40
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
}


@dataclass(frozen=True)
class InputSpec:
    """Shape and type of an input; integers are drawn from 0 up to, not including, `below`.

    `name` is that of the argument of the forward; "" where the order says which.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int = 2
    name: str = ""

    def random(self, device: str) -> Tensor:
        """Returns a tensor of random numbers: standard normal, integers or booleans."""
        dtype = self.dtype or torch.float32
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=device)
        below = 2 if dtype is torch.bool else self.below
        return torch.randint(below, self.shape, device=device).to(dtype)


def shapes(specs: Iterable[InputSpec | None]) -> list[list[int] | None]:
    """Returns the shapes of inputs, as JSON has them."""
    return [None if spec is None else list(spec.shape) for spec in specs]


def shapes_text(found: Iterable[Sequence[int] | None]) -> str:
    """Writes shapes as people read them: '8×128, none, 8×128'."""
    return ", ".join("none" if shape is None else "×".join(map(str, shape)) for shape in found)


def count(text: str) -> int:
    """Reads a whole number from 1."""
    return _integer(text, least=1)


def number(text: str) -> int:
    """Reads a whole number from 0."""
    return _integer(text, least=0)


def ratio(text: str) -> float:
    """Reads a number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ArgumentError(f"takes a number from 0, such as 0.2; got {text!r}")
    return value


def size(text: str) -> Budget:
    """Reads a memory budget: '8GiB', bytes, 'device', or a fraction such as '0.5' or '50%'."""
    value: Budget = text
    if re.fullmatch(r"\d*\.?\d+%|\d*\.\d+", text):
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    check_bounds(value, None)
    return value


def shape(text: str) -> InputSpec | None:
    """Reads a shape, '8,128', maybe with name and type, 'input_ids=8,128:int64'; 'none' is None."""
    if text.lower() == "none":
        return None
    found = re.fullmatch(r"(?:([^\W\d]\w*)=)?(\d{1,30}(?:,\d{1,30})*)(?::(.*))?", text)
    lengths = tuple(map(int, found[2].split(","))) if found else ()
    if found is None or not all(0 < length <= LARGEST for length in lengths):
        raise ArgumentError(
            f"takes a shape such as 32,3,224,224 or 8,128:int64; got {shortened(text)}"
        )
    name, dtype = found[1] or "", found[3]
    if dtype is None:
        return InputSpec(lengths, name=name)
    if dtype not in DTYPES:
        near, known = nearest(dtype, DTYPES), ", ".join(DTYPES)
        raise ArgumentError(f"knows no type {dtype!r}.{near} It takes {known}")
    return InputSpec(lengths, DTYPES[dtype], name=name)


def plan(text: str) -> Checkpoint:
    """Reads what `zoo.create` takes, or a file: of `zoo plan --save`, or of a plan alone."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return _integer(text, least=0)
    if text.endswith(".json"):
        saved = read_file(text)
        is_plan = saved.lstrip().startswith("[")
        return Plan.from_json(saved) if is_plan else PlanReport.from_json(saved)
    if any(character in text for character in "()-"):
        return Plan.parse(text)
    if text != "auto":
        check_name(text)
    return text


def file(text: str) -> str:
    """Reads the path of a file to write, which is refused before the work if it has no place."""
    place = Path(text)
    if place.is_dir() or not place.parent.is_dir():
        wrong = errno.EISDIR if place.is_dir() else errno.ENOENT
        raise ArgumentError(f"{text!r} cannot be written: {os.strerror(wrong)}")
    return text


def picture(text: str) -> str:
    """Reads the path of a picture to write: .svg, .png or .pdf."""
    if Path(text).suffix.lower() not in PICTURES:
        raise ArgumentError(f"{text!r} must end in one of {', '.join(PICTURES)}")
    return file(text)


def _integer(text: str, least: int) -> int:
    number = -1
    if text.isdecimal():
        # Python refuses to read thousands of digits
        number = int(text) if len(text) <= 30 else LARGEST + 1
    if not least <= number <= LARGEST:
        limit = f"up to {LARGEST}" if number > LARGEST else f"from {least}"
        raise ArgumentError(f"takes a whole number {limit}; got {shortened(text)}")
    return number
