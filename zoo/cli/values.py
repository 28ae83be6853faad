"""Parses the text of an option into a value of the library: functions for argparse's `type`.

Budgets, overheads, optimizers and plans are parsed by the library itself.

A wrong text raises a ZooError, which `Parser` shows after the option's name.
"""

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zoo.engine.devices import accelerator, nearest_device
from zoo.errors import ArgumentError, nearest, shortened
from zoo.profiling.kernel_costs import DEVICES, rated_name
from zoo.profiling.optimizer_memory import maker_of
from zoo.report.pictures import check_picture, plots
from zoo.units import shape_text

# a mistyped axis must not overflow
LARGEST = 2**40
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
}
# torch's devices, on which a command runs steps; and devices with known peak rates
TORCH_DEVICES = ("cpu", accelerator() or "cuda")
RATED = [name for name in DEVICES if name not in TORCH_DEVICES]


@dataclass(frozen=True)
class RandomInput:
    """Shape and dtype of an input; integers are drawn from 0 to `below` - 1.

    `name` is that of the forward's argument, or with the key of a dict that is the argument:
    "batch.ids"; "" for a positional one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int = 2
    name: str = ""

    def random(self, device: str) -> Tensor:
        """Returns a random tensor: standard normal, integers or booleans."""
        dtype = self.dtype or torch.float32
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=device)
        below = 2 if dtype is torch.bool else self.below
        return torch.randint(below, self.shape, device=device).to(dtype)


def shapes(specs: Iterable[RandomInput | None]) -> list[list[int] | None]:
    """Returns the shapes of inputs for JSON."""
    return [None if spec is None else list(spec.shape) for spec in specs]


def shapes_text(shapes: Iterable[Sequence[int] | None]) -> str:
    """Formats shapes: '8×128, none, scalar'."""
    return ", ".join("none" if shape is None else shape_text(shape) for shape in shapes)


def number(text: str, least: int = 0) -> int:
    """Parses a whole number."""
    value = -1
    if text.isdecimal():
        # int() refuses thousands of digits
        value = int(text) if len(text) <= 30 else LARGEST + 1
    if not least <= value <= LARGEST:
        limit = f"up to {LARGEST}" if value > LARGEST else f"from {least}"
        raise ArgumentError(f"takes a whole number {limit}; got {shortened(text)}")
    return value


# a whole number from 1
count = functools.partial(number, least=1)


def optimizer(text: str) -> str:
    """Checks the name of an optimizer."""
    maker_of(text)
    return text


def device(text: str, others: Sequence[str] = ()) -> str:
    """Parses the name of one of torch's devices, present or not, or one of `others`."""
    with contextlib.suppress(RuntimeError):
        if text in others or torch.device(text).type != "meta":
            return text
    names = [*TORCH_DEVICES, *others]
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    raise ArgumentError(f"takes {listed}; got {shortened(text)}.{nearest_device(text, names)}")


def rated_device(text: str) -> str:
    """Parses the name of one of torch's devices, or of one that need not be present."""
    # "cpu" is this one, here
    is_rated = text not in TORCH_DEVICES
    return (is_rated and rated_name(text)) or device(text, RATED)


def shape(text: str) -> RandomInput | None:
    """Parses '8,128', or with a name and a dtype 'ids=8,128:int64' ('batch.ids=...'), or 'none'."""
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"(?:([^\W\d]\w*(?:\.\w+)?)=)?(\d{1,30}(?:,\d{1,30})*)(?::(.*))?", text)
    lengths = tuple(map(int, match[2].split(","))) if match else ()
    if match is None or not all(0 < length <= LARGEST for length in lengths):
        raise ArgumentError(
            f"takes a shape such as 32,3,224,224 or 8,128:int64; got {shortened(text)}"
        )
    name, dtype = match[1] or "", match[3]
    if dtype is not None and dtype not in DTYPES:
        near, dtypes = nearest(dtype, DTYPES), ", ".join(DTYPES)
        raise ArgumentError(f"does not know the dtype {dtype!r}.{near} It takes {dtypes}")
    return RandomInput(lengths, DTYPES[dtype] if dtype else None, name=name)


def file(text: str) -> str:
    """Parses the path of a file to write; a wrong folder is refused before any work is done."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        code = errno.EISDIR if path.is_dir() else errno.ENOENT
        raise ArgumentError(f"{text!r} cannot be written: {os.strerror(code)}")
    return text


def picture(text: str) -> str:
    """Parses the path of a picture to write: .svg, .png or .pdf; matplotlib must be installed."""
    check_picture(text)
    plots()
    return file(text)
