"""Writes a comparison as one HTML file that needs nothing else: no network, no server, no torch.

Every number in it is a `<data>` element with the exact value; one that stands in the results says
where, as a path into the JSON that the page carries. Pictures are bokeh's, each with a table.

    page.html   what the page says        step_axis.py     what the pictures show, in numbers
    page.css    how it looks              interactive.py   the pictures
    page.js     draws, paints, zooms
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zoo.plan import Plan
from zoo.report.chain_axis import chain_axis
from zoo.report.files import models_csv, timings_csv, to_csv
from zoo.report.heading import Heading
from zoo.report.interactive import (
    CATEGORIES,
    MARKS,
    RESIDENT,
    RUNS,
    categories_picture,
    frontier_picture,
    memory_picture,
    plan_picture,
    spoken,
)
from zoo.report.rows import Row, rows
from zoo.report.step_axis import highest
from zoo.report.words import OFTEN
from zoo.units import format_bytes, format_seconds

Comparison = Mapping[str, Any]
HERE = Path(__file__).parent
KINDS = ("baseline", "checkpointed")


def write_page(comparisons: Sequence[Comparison], heading: Heading, path: Path) -> Path:
    """Writes the page of a comparison and returns its path; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparisons, heading), encoding="utf-8")
    return path


def page(comparisons: Sequence[Comparison], heading: Heading) -> str:
    """Returns the page of a comparison: HTML."""
    loader = FileSystemLoader(HERE)
    writer = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    found = rows(comparisons)
    sections = [Section(number, *pair) for number, pair in enumerate(zip(comparisons, found))]  # noqa: B905
    pictures = {place: drawn for section in sections for place, drawn in section.pictures.items()}
    return writer.get_template("page.html").render(
        heading=heading,
        sections=sections,
        environment=_environment(comparisons),
        faults=[fault for row in found for fault in row.faults],
        files=_files(comparisons, found, heading),
        pictures=_packed(json.dumps(pictures, separators=(",", ":"))),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=_library(),
        size=lambda path: _size(comparisons, path),
        number=_number,
        words=format_bytes,
        seconds=format_seconds,
        categories=CATEGORIES,
        kinds=KINDS,
    )


class Section:
    """What the page says of one model; parts that were not recorded are None or empty."""

    def __init__(self, number: int, comparison: Comparison, row: Row) -> None:
        self.number, self.comparison, self.row = number, comparison, row
        self.id = f"model-{number}"
        self.timelines = {
            kind: comparison[kind]["timeline"] for kind in KINDS if "timeline" in comparison[kind]
        }
        self.chain = comparison["baseline"].get("chain")
        self.frontier = comparison["baseline"].get("frontier")
        self.plan: str | None = comparison["checkpointed"].get("plan")
        self.missing = {
            f"{kind}, {what}": why
            for kind in KINDS
            for what, why in comparison[kind].get("missing", {}).items()
        }

    @property
    def parsed(self) -> Plan | None:
        """The plan, where it is one for the chain that is known."""
        if self.plan is None or self.chain is None:
            return None
        found = Plan.parse(self.plan)
        return found if len(found.flatten()) == len(self.chain["names"]) else None

    @property
    def often(self) -> list[tuple[str, str, int]]:
        """How often steps run: a color, words, and how many steps."""
        runs = [min(count, 4) for count in self.parsed.runs()] if self.parsed else []
        return [(RUNS[count], OFTEN[count], runs.count(count)) for count in sorted(set(runs))]

    @property
    def steps(self) -> list[tuple[str, str, int, str]]:
        """Rows of a table: the steps, or blocks of a long chain; names, saved bytes, runs."""
        if self.parsed is None or self.chain is None:
            return []
        names, saved, runs = self.chain["names"], self.chain["saved"], self.parsed.runs()
        found = []
        for part in chain_axis(names, self.chain["blocks"]).columns:
            often = sorted({runs[step] for step in part})
            numbers = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
            size = sum(saved[step] for step in part)
            found.append((numbers, spoken(part, names), size, " or ".join(map(str, often))))
        return found

    @property
    def saving(self) -> float | None:
        """The share of the baseline's step peak that is saved."""
        return None if self.row.step_ratio is None else 1 - self.row.step_ratio

    @property
    def categories(self) -> list[str]:
        """The categories that occur."""
        found = {name for timeline in self.timelines.values() for name in timeline["bytes"]}
        return [name for name in CATEGORIES if name in found]

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The most bytes in each phase of each run."""
        found = {kind: highest(timeline) for kind, timeline in self.timelines.items()}
        names = dict.fromkeys(phase for sizes in found.values() for phase in sizes)
        order = ("forward", "recompute", "backward", "optimizer")
        return {
            name: {kind: sizes[name] for kind, sizes in found.items() if name in sizes}
            for name in sorted(names, key=lambda name: order.index(name) if name in order else -1)
        }

    @property
    def measured(self) -> dict[str, tuple[int, float]]:
        """Peak and time ratio of both runs, as far as they were measured."""
        peak, time = self.row.peak, self.row.time
        found = {} if peak.baseline is None else {"baseline": (peak.baseline, 1.0)}
        if peak.checkpointed is not None and time is not None:
            found["checkpointed"] = peak.checkpointed, time.median
        return found

    @property
    def schemes(self) -> list[tuple[str, str, int]]:
        """The classic schemes: mark, name, and position among them."""
        names = self.frontier["schemes"] if self.frontier else {}
        marks = [*MARKS.values()] * (len(names) // len(MARKS) + 1)
        return [(mark, name, place) for place, (mark, name) in enumerate(zip(marks, names))]  # noqa: B905

    @cached_property
    def pictures(self) -> dict[str, Any]:
        """The pictures under the ids of their places."""
        found: dict[str, Any] = {}
        if self.timelines:
            found["memory"] = memory_picture(self.timelines)
            found["activations"] = memory_picture(self.timelines, without=RESIDENT)
            most = max(timeline["peak"]["bytes"] for timeline in self.timelines.values())
            for kind, timeline in self.timelines.items():
                found[kind] = categories_picture(timeline, most)
        if self.parsed is not None and self.chain is not None:
            found["plan"] = plan_picture(self.chain, self.parsed)
        if self.frontier and self.frontier["optimal"]:
            found["frontier"] = frontier_picture(self.frontier, self.measured)
        return {f"{self.id}-{name}": picture for name, picture in found.items()}


def _size(comparisons: Sequence[Comparison], path: str) -> Markup:
    """Writes the bytes at a path such as '0/baseline/memory/peak'; a name's own / is ~1."""
    value: Any = comparisons
    for part in (text.replace("~1", "/").replace("~0", "~") for text in path.split("/")):
        value = value[int(part)] if isinstance(value, list | tuple) else value[part]
    text = format_bytes(value)
    return Markup('<data value="{}" data-from="{}">{}</data>').format(value, path, text)


def _number(value: float, text: str) -> Markup:
    """Writes a number that follows from those of the results."""
    return Markup('<data value="{}">{}</data>').format(value, text)


def _environment(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    records = [comparison[kind] for comparison in comparisons for kind in KINDS]
    found: Mapping[str, Any] = next((each for each in records if each.get("environment")), {})
    cell = {key: found.get("cell", {}).get(key) for key in ("dtype", "seed", "steps")}
    known = {**found.get("environment", {}), **cell, "measured": found.get("finished")}
    return {key: value for key, value in known.items() if value is not None}


def _files(
    comparisons: Sequence[Comparison], found: Sequence[Row], heading: Heading
) -> list[tuple[str, str, Markup]]:
    """Returns for each file in the page its name, what it holds, and itself as a link."""
    results = {"name": heading.name, "command": heading.command, "comparisons": comparisons}
    everything = base64.b64encode(json.dumps(results).encode()).decode()
    link = Markup(f"data:application/json;base64,{everything}")
    tables = [
        ("models.csv", "a line per model", models_csv(found)),
        ("timings.csv", "a line per timed pair of steps", timings_csv(found)),
        ("memory.csv", "bytes over the step by category", _memory_csv(comparisons)),
    ]
    return [
        (f"{heading.name}.json", "everything", link),
        *(
            (name, what, Markup(f"data:text/csv,{quote(text, safe=',:/')}"))
            for name, what, text in tables
        ),
    ]


def _memory_csv(comparisons: Sequence[Comparison]) -> str:
    return to_csv(
        {"model": comparison["model"]["name"], "run": kind, "event": event}
        | {name: timeline["bytes"].get(name, [0] * (place + 1))[place] for name in CATEGORIES}
        for comparison in comparisons
        for kind in KINDS
        if (timeline := comparison[kind].get("timeline"))
        for place, event in enumerate(timeline["points"])
    )


def _packed(text: str) -> Markup:
    """Writes text as gzip in base64: what stands in a page by the megabyte, and no one reads."""
    return Markup(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


@cache
def _library() -> Markup:
    """Returns bokeh's script, the part that draws, packed: no widgets, no tables."""
    # without the line that follows it, which tells the console the level of its messages
    return _packed(Resources(mode="inline", components=["bokeh"]).js_raw[0])
