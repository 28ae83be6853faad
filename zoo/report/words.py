"""The words of a report, the same for terminal, Markdown, pictures and page."""

from zoo.report.rows import Pair, Row
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
        row.model,
        row.batch,
        MISSING if row.parameters is None else f"{row.parameters / 1e6:.2f} M",
        _change(row.peak),
        _change(row.activation_peak),
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
    return f"×{row.time.median:.2f} [{row.time.lower:.2f}, {row.time.upper:.2f}]"


def _change(pair: Pair[int | None]) -> str:
    return f"{_bytes(pair.baseline)} → {_bytes(pair.checkpointed)}"


def _bytes(count: int | None) -> str:
    return MISSING if count is None else format_bytes(count)
