"""The words of a report, the same for terminal, Markdown, pictures and page."""

from zoo.report.rows import UNFIT, Pair, Row, quotient
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
    "of tensors alone",
    "step time [quartiles]",
    "exact",
)

CAPTION = (
    "step peak and activation peak: the allocator's, kernel workspaces included; of tensors alone: "
    "the same on every machine, what largest_ratio judges; (ratio) to the baseline"
)


def words(row: Row) -> list[str]:
    """Returns a row's cells in the order of `COLUMNS`."""
    return [
        row.label,
        row.batch,
        MISSING if row.parameters is None else f"{row.parameters / 1e6:.2f} M",
        _change(row.peak, row.fits),
        _change(row.activation_peak, row.fits),
        _change(row.tensor_activation_peak, row.fits),
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
    between = "" if row.quartiles is None else " [{:.2f}, {:.2f}]".format(*row.quartiles)
    return f"×{row.time.median:.2f}{between} n={len(row.time_ratios)}"


def _change(pair: Pair[int | None], fits: Pair[bool]) -> str:
    baseline = size_or_why(pair.baseline, fits.baseline)
    ratio = quotient(pair)
    share = "" if ratio is None else f" ({ratio:.3f})"
    return f"{baseline} → {size_or_why(pair.checkpointed, fits.checkpointed)}{share}"


def size_or_why(count: int | None, fits: bool) -> str:
    """Writes bytes, or why there are none."""
    if count is not None:
        return format_bytes(count)
    return MISSING if fits else UNFIT
