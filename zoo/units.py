"""Bytes, seconds and counts as people read them; all else in `zoo` keeps plain ints and floats."""

import math
import re
from collections.abc import Iterable
from numbers import Integral, Real

from zoo.errors import ArgumentError, shortened

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB")
# a prefix alone is binary, as for coreutils and Slurm
PREFIXES = ("K", "M", "G", "T")
UNITS = {
    **{unit.lower(): 1024**power for power, unit in enumerate(BINARY)},
    **{unit.lower(): 1024**power for power, unit in enumerate(PREFIXES, 1)},
    **{unit.lower(): 1000**power for power, unit in enumerate(DECIMAL)},
}
SIZES = "bytes as an int, '8GiB' or '8G' (2^30 each), or '8GB' (10^9)"
# the largest of the 64-bit integers in which allocators count
LARGEST = 2**63 - 1


def format_bytes(count: int) -> str:
    """Writes bytes with a binary unit and four digits at most: 1536 -> '1.50 KiB'."""
    size, unit, digits = _in_unit(count)
    return f"{size:.{digits}f} {unit}"


def exact_bytes(count: int) -> str:
    """Writes bytes for people and to the byte: '1.50 KiB (1536 bytes)'."""
    return f"{format_bytes(count)} ({count} bytes)"


def at_least(count: int) -> str:
    """Writes a short size of so many bytes or up to a hundredth more, as `parse_bytes` reads it."""
    size, unit, digits = _in_unit(count)
    return f"{math.ceil(size * 10**digits) / 10**digits:.{digits}f}{unit}"


def unit_of(count: int) -> tuple[int, str]:
    """Returns the largest binary unit of which there is one: how many bytes it is, its name."""
    power = min(max(abs(count).bit_length() - 1, 0) // 10, len(BINARY) - 1)
    return 1024**power, BINARY[power]


def _in_unit(count: int) -> tuple[float, str, int]:
    """Returns bytes in the largest binary unit of which there is one, the unit, and digits."""
    divisor, unit = unit_of(count)
    size = count / divisor
    return size, unit, 0 if divisor == 1 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2


def format_seconds(seconds: float) -> str:
    """Writes seconds as '12.3 ms' or '1.23 s'."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shape_text(shape: Iterable[int]) -> str:
    """Writes the shape of a tensor: '8×3×224×224'; 'scalar' if it has no dimensions."""
    return "×".join(map(str, shape)) or "scalar"


def plural(count: int, noun: str) -> str:
    """Writes a count and its noun: '1 step', '2 steps', '3 losses'."""
    many = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def parse_bytes(value: object, what: str = "size", accepted: str = SIZES) -> int:
    """Reads bytes: an int, or text such as '8GiB' or '8G' (2^30 each), '8 GB' (10^9) or '512'.

    Upper and lower case are the same. `accepted` is what an error says to write.

    Raises:
        ArgumentError: it is none of these, not above 0, or 2^63 and more.
    """
    count = _bytes(value)
    if count is None:
        units = ", ".join(dict.fromkeys((*BINARY, *DECIMAL, *PREFIXES)))
        raise ArgumentError(
            f"{what}={shortened(value)} is no size; write {accepted}; units are {units}"
        )
    if count <= 0:
        raise ArgumentError(f"{what}={shortened(value)} must be above 0")
    if count > LARGEST:
        raise ArgumentError(
            f"{what}={shortened(value)} is more than any memory; write at most {LARGEST} bytes"
        )
    return count


def _bytes(value: object) -> int | None:
    """Returns the bytes that a value stands for; None where it is no size."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    text = value.strip() if isinstance(value, str) else ""
    match = re.fullmatch(r"(\d+)(\.\d+)?\s*([a-zA-Z]*)", text)
    unit = (match[3].lower() or "b") if match else ""
    if not match or unit not in UNITS or (unit == "b" and match[2]):
        return None
    # a float of hundreds of digits is infinite
    return int(min(float(match[1] + (match[2] or "")) * UNITS[unit], 2.0 * LARGEST))


def parse_ratio(value: object) -> float | None:
    """Reads 0.5, '0.5' or '50%'; returns None for what is no number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    text = value.strip() if isinstance(value, str) else ""
    # at most some hundred digits, since a float of more is infinite
    match = re.fullmatch(r"(\d{1,300}\.?\d{0,300}|\.\d{1,300})\s*(%?)", text)
    return float(match[1]) / (100 if match[2] else 1) if match else None
