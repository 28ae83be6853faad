"""The words of a report, the same for terminal, Markdown, pictures and page."""

from zoo.report.rows import UNFIT, Pair, Row
from zoo.units import BINARY, format_bytes

MISSING = "—"
# by how often a step runs in one training step; 4 stands for all above
OFTEN = {1: "kept", 2: "run again", 3: "run three times", 4: "run more often"}

COLUMNS = (
    "model",
    "batch",
    "parameters",
    "step peak",
    "activation peak",
    "ratio",
    "step time [quartiles]",
    "exact",
)


def words(row: Row) -> list[str]:
    """Returns a row's cells in the order of `COLUMNS`."""
    return [
        row.label,
        row.batch,
        MISSING if row.parameters is None else f"{row.parameters / 1e6:.2f} M",
        _change(row.peak, row.fits),
        _change(row.activation_peak, row.fits),
        MISSING if row.ratio is None else f"{row.ratio:.3f}",
        _time(row),
        MISSING if row.exact is None else "yes" if row.exact else "NO",
    ]


def scale(most: int) -> tuple[int, str]:
    """Returns what bytes are divided by when the most of them is so large, and that unit."""
    power = min(max(most.bit_length() - 1, 0) // 10, len(BINARY) - 1)
    return 1024**power, BINARY[power]


def _time(row: Row) -> str:
    if row.time is None:
        return MISSING
    median = f"×{row.time.median:.2f}"
    # one pair has no spread
    if len(row.time_ratios) == 1:
        return median
    return f"{median} [{row.time.lower:.2f}, {row.time.upper:.2f}]"


def _change(pair: Pair[int | None], fits: Pair[bool]) -> str:
    baseline = size_or_why(pair.baseline, fits.baseline)
    return f"{baseline} → {size_or_why(pair.checkpointed, fits.checkpointed)}"


def size_or_why(count: int | None, fits: bool) -> str:
    """Writes bytes, or why there are none."""
    if count is not None:
        return format_bytes(count)
    return MISSING if fits else UNFIT
