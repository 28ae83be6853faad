"""Text of a command line as numbers, shapes and plans: each function is the `type` of an option."""

import errno
import functools
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from zoo.checkpointing import Checkpoint
from zoo.errors import ArgumentError, ZooError, nearest, shortened
from zoo.measure.drawing import PICTURES
from zoo.plan import Plan
from zoo.plan_report import PlanReport
from zoo.planner.schemes import check_name
from zoo.planning import Budget
from zoo.serialization import read_file
from zoo.units import parse_bytes

Value = TypeVar("Value")

# a mistyped axis must not end in an overflow
LARGEST = 2**40
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
}


@dataclass(frozen=True)
class Spec:
    """A tensor to be: its shape and type; values of whole numbers are from 0 and below `below`.

    `name` is that of the argument that it is for; "" where its place says so.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int = 2
    name: str = ""

    def meta(self) -> Tensor:
        """Returns a tensor without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def random(self, device: str | torch.device) -> Tensor:
        """Returns a tensor of random numbers, normal or whole."""
        dtype = self.dtype or torch.float32
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=device)
        below = 2 if dtype is torch.bool else self.below
        return torch.randint(below, self.shape, device=device).to(dtype)


def shapes(specs: Iterable[Spec | None]) -> list[list[int] | None]:
    """Returns the shapes of tensors to be, as JSON has them."""
    return [None if entry is None else list(entry.shape) for entry in specs]


def words(found: Iterable[Sequence[int] | None]) -> str:
    """Writes shapes as people read them: '8×128, none, 8×128'."""
    return ", ".join("none" if shape is None else "×".join(map(str, shape)) for shape in found)


def _option(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Lets argparse show the sentence of an error, which of others it says only 'invalid value'."""

    @functools.wraps(read)
    def value(text: str) -> Value:
        try:
            return read(text)
        except ZooError as error:
            raise ArgumentTypeError(str(error)) from error

    return value


@_option
def positive(text: str) -> int:
    """Reads a whole number from 1."""
    return _number(text)


@_option
def whole(text: str) -> int:
    """Reads a whole number from 0."""
    return _number(text, least=0)


@_option
def ratio(text: str) -> float:
    """Reads a number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ArgumentError(f"takes a number from 0, such as 0.2; got {text!r}")
    return value


@_option
def budget(text: str) -> Budget:
    """Reads a memory budget: '8GiB', bytes, 'device', or a fraction such as '0.5' or '50%'."""
    number = text.removesuffix("%")
    if text == "device":
        return text
    if number != text or _is_share(text):
        share = float(number) / (100 if number != text else 1) if _is_number(number) else 0
        if not 0 < share <= 1:
            raise ArgumentError(
                f"{shortened(text)} is no fraction of plain training; write 0.5 or 50%, a size "
                "such as '8GiB', or 'device'"
            )
        return share
    return parse_bytes(text)


@_option
def size(text: str) -> int | str:
    """Reads a memory budget that is no fraction: '8GiB', bytes, or 'device'."""
    if text.endswith("%") or _is_share(text):
        raise ArgumentError(
            f"{shortened(text)} is no size but a fraction of plain training, which grows with the "
            "batch; write a size such as '8GiB', bytes, or 'device'"
        )
    return text if text == "device" else parse_bytes(text)


@_option
def spec(text: str) -> Spec | None:
    """Reads the shape of an input, '8,128', with or without a type and a name; 'none' for None.

    With both it is 'input_ids=8,128:int64'.
    """
    if text.lower() == "none":
        return None
    name, equals, shape = text.partition("=")
    if not equals:
        name, shape = "", text
    sizes, colon, dtype = shape.partition(":")
    numbers = sizes.split(",")
    is_shape = all(0 < _whole_number(number) <= LARGEST for number in numbers)
    if not is_shape or (equals and not name.isidentifier()):
        raise ArgumentError(
            f"takes a shape such as 32,3,224,224 or 8,128:int64; got {shortened(text)}"
        )
    if colon and dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ArgumentError(f"knows no type {dtype!r}.{nearest(dtype, DTYPES)} It takes {known}")
    return Spec(tuple(map(int, numbers)), DTYPES.get(dtype), name=name)


@_option
def checkpoint(text: str) -> Checkpoint:
    """Reads what `zoo.create` takes, or a file: of `zoo plan --save`, or of a plan alone."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return _number(text, least=0)
    if text == "auto":
        return text
    if text.endswith(".json"):
        return _saved(text)
    if any(character in text for character in "()-"):
        return Plan.parse(text)
    check_name(text)
    return text


@_option
def destination(text: str) -> str:
    """Reads the path of a file to write; that it has no place is said before the work is done."""
    place = Path(text)
    if place.is_dir() or not place.parent.is_dir():
        wrong = errno.EISDIR if place.is_dir() else errno.ENOENT
        raise ArgumentError(f"{text!r} cannot be written: {os.strerror(wrong)}")
    return text


@_option
def picture(text: str) -> str:
    """Reads the path of a picture to write: .svg, .png or .pdf."""
    if Path(text).suffix.lower() not in PICTURES:
        raise ArgumentError(f"{text!r} must end in one of {', '.join(PICTURES)}")
    return destination(text)


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Returns what reads one of these words."""
    known = list(choices)

    @_option
    def read(text: str) -> str:
        if text not in known:
            near = nearest(text, known)
            raise ArgumentError(f"takes {' or '.join(known)}; got {text!r}.{near}")
        return text

    return read


def _saved(path: str) -> PlanReport | Plan:
    text = read_file(path)
    return Plan.from_json(text) if text.lstrip().startswith("[") else PlanReport.from_json(text)


def _number(text: str, least: int = 1) -> int:
    number = _whole_number(text)
    if number > LARGEST:
        raise ArgumentError(f"takes a whole number up to {LARGEST}; got {shortened(text)}")
    if number < least:
        raise ArgumentError(f"takes a whole number from {least}; got {shortened(text)}")
    return number


def _whole_number(text: str) -> int:
    """Returns what decimal digits say, -1 for other text, and of many digits a number too large."""
    if not text.isdecimal():
        return -1
    # Python refuses to read some thousands
    return int(text) if len(text) <= 30 else LARGEST + 1


def _is_share(text: str) -> bool:
    """Says whether a text is a number with a point and no unit."""
    return "." in text and _is_number(text)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()
