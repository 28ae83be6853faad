"""Bytes and seconds as people read them; everything else in `zoo` keeps plain ints and floats."""

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Writes bytes with a binary unit and four digits at most: 1536 -> '1.50 KiB'."""
    size = float(count)
    for unit in BINARY[:-1]:
        if abs(size) < 1024:
            break
        size /= 1024
    else:
        unit = BINARY[-1]
    if unit == "B":
        return f"{count} B"
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Writes seconds as '12.3 ms' or '1.23 s'."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
