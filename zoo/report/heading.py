"""What stands above and below a comparison's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.report.escape import visible

WHERE = {"device", "threads", "torch", "python", "zoo"}


@dataclass(frozen=True)
class Heading:
    """The comparison's name, where it was measured, and the command that repeats it."""

    name: str
    setting: str
    command: str

    @property
    def title(self) -> str:
        """The title of a report."""
        return f"Training with and without checkpointing: {self.name}"


def heading(comparisons: Sequence[Mapping[str, Any]], name: str, command: str) -> Heading:
    """Describes a comparison by the first of its records that says where it was measured."""
    records = (record for comparison in comparisons for record in comparison.values())
    measured = (record for record in records if (record.get("environment") or {}).keys() >= WHERE)
    setting = next(map(_setting, measured), "nothing could be measured")
    return Heading(visible(name), visible(setting), visible(command))


def _setting(record: Mapping[str, Any]) -> str:
    environment, cell = record["environment"], record["cell"]
    count = environment["threads"]
    threads = f", {count} thread{'s' * (count != 1)}" if cell["device"] == "cpu" else ""
    return (
        f"{environment['device']}{threads}, {cell['dtype']}, torch {environment['torch']}, "
        f"Python {environment['python']}, zoo {environment['zoo']}"
    )
