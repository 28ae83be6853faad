"""Bytes and seconds as people read them; everything else in `zoo` keeps plain ints and floats."""

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Writes bytes with a binary unit and four digits at most: 1536 -> '1.50 KiB'."""
    power = min(max(abs(count).bit_length() - 1, 0) // 10, len(BINARY) - 1)
    if not power:
        return f"{count} B"
    size = count / 1024**power
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """Writes seconds as '12.3 ms' or '1.23 s'."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
