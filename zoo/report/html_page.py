"""A comparison as a self-contained HTML file: no network, no server, no torch.

Every number in it is a `<data>` element with the exact value; a number of the results also has its
path in the JSON that the page embeds. Each chart has a table.

    page.html   what the page says      charts.py       what the charts show
    page.css    how it looks            svg_charts.py   draws them
    page.js     shows a model at a time
"""

import base64
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zoo.planner.plan import Plan
from zoo.report import charts
from zoo.report.escaping import to_csv
from zoo.report.rows import (
    DEFINITIONS,
    EXACT,
    VARIANTS,
    Comparison,
    Heading,
    ModelRow,
    Number,
    first_measured,
    median,
    rows,
    variants,
)
from zoo.report.step_axis import step_axis
from zoo.report.svg_charts import svg
from zoo.report.text_report import csv_files
from zoo.report.two_runs import ABOUT, COLUMNS, TITLE, TwoRuns

HERE = Path(__file__).parent
# the files that a page embeds in addition to the results, and what they hold
FILES = {
    "memory.perfetto.json": "bytes by category for ui.perfetto.dev",
    "memory.csv": "bytes over the step by category",
    "models.csv": "a line per model",
    "timings.csv": "a line per timed pair of steps",
    "compared.csv": "a line per cell of both runs",
}


def page(comparisons: Sequence[Comparison], heading: Heading, runs: TwoRuns | None = None) -> str:
    """Returns the HTML page of a comparison, with an earlier run if one is given."""
    table, results = rows(comparisons), cast(Any, comparisons)
    sections = [*map(_section, comparisons, table)]
    # the first record that says where and how it was measured
    record = first_measured(comparisons)
    cell = {key: record.get("cell", {}).get(key) for key in ("dtype", "seed", "steps")}
    where = {**record.get("environment", {}), **cell, "measured": record.get("finished")}
    writer = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return writer.get_template("page.html").render(
        heading=heading,
        sections=sections,
        environment={key: value for key, value in where.items() if value is not None},
        files=_files(comparisons, table, heading, runs),
        runs=runs,
        about_runs=(TITLE, ABOUT, COLUMNS),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        # a size in the results, by its path of keys
        size=lambda *keys: Number.of_bytes(reduce(operator.getitem, keys, results), *keys),
        number=Number,
        bytes=Number.of_bytes,
        legend=_legend,
        drawn=svg,
        shapes=charts.SHAPES,
        variants=variants(table),
        shows_reserved=any(row.shows_reserved for row in table),
        shows_graphs=any(row.shows_graphs for row in table),
        color=charts.color_of,
        definitions=DEFINITIONS,
        categories=charts.MEANINGS,
    )


def _section(comparison: Comparison, row: ModelRow) -> dict[str, Any]:
    """Returns the page's data of one model; parts that were not recorded are None or empty."""
    records = {kind: comparison[kind] for kind in row.variants}
    timelines = {kind: r["timeline"] for kind, r in records.items() if "timeline" in r}
    steps, frontier = (records["baseline"].get(name) for name in ("steps", "frontier"))
    text = records["checkpointed"].get("plan")
    plan = Plan.parse(text) if text is not None and steps is not None else None
    # a plan for other steps is not drawn
    if plan is not None and len(plan.flatten()) != len(steps["names"]):
        plan = None
    sizes = _sizes(row, "peak")
    bars = {"peak": sizes, "reserved_peak": _sizes(row, "reserved_peak")}
    longest = max(1, *(size for part in bars.values() for size in part.values()))
    # the frontier's plans free no gradients early, so it does not include the third variant
    times = {"baseline": 1.0, "checkpointed": median(row.time_ratios("checkpointed")).value}
    measured = {kind: (sizes[kind], time) for kind, time in times.items() if time and kind in sizes}
    drawn: dict[str, charts.Chart] = {}
    if timelines:
        drawn["memory"] = charts.memory_chart(timelines)
        drawn["activations"] = charts.memory_chart(timelines, without=charts.RESIDENT)
        most = max(timeline["peak"]["bytes"] for timeline in timelines.values())
        for kind, timeline in timelines.items():
            drawn[kind] = charts.categories_chart(timeline, most)
    if plan is not None:
        drawn["plan"] = charts.plan_chart(plan, steps)
    if frontier and frontier["optimal"]:
        drawn["frontier"] = charts.frontier_chart(frontier, measured)
    recorded = set().union(*(timeline["bytes"] for timeline in timelines.values()))
    return {
        "id": f"model-{row.number}",
        "row": row,
        "timelines": timelines,
        "steps": steps,
        "plan": text,
        "charts": drawn,
        "rows": [] if plan is None else _rows(plan, steps),
        "measured": measured,
        "frontier": frontier,
        "numbers": [f"#{VARIANTS[kind]}" for kind in timelines],
        # zoo's last variant that can be compared with the baseline
        "headline": [None, *(kind for kind in EXACT if {kind, "baseline"} <= {*sizes})][-1],
        # step peaks, and what was reserved, as shares of the largest
        "bars": [
            (kind, {name: part[kind] / longest for name, part in bars.items() if kind in part})
            for kind in sizes
        ],
        "starts": _starts(timelines),
        "phases": charts.phase_peaks(timelines),
        "categories": [name for name in charts.CATEGORIES if name in recorded],
        "missing": {
            f"{kind}, {what}": why
            for kind, record in records.items()
            for what, why in record.get("missing", {}).items()
        },
    }


def _starts(timelines: Mapping[str, charts.Timeline]) -> str:
    """Says which curves begin with gradients, as in older results; "" if all begin alike."""
    sizes = {
        kind: timeline["bytes"].get("gradients", [0])[0] for kind, timeline in timelines.items()
    }
    holding = [VARIANTS[kind] for kind, size in sizes.items() if size]
    if not 0 < len(holding) < len(sizes):
        return ""
    return f" Gradients of the step before are at the start of: {', '.join(holding)}."


def _sizes(row: ModelRow, peak: str) -> dict[str, int]:
    """Returns a peak of each variant that has it."""
    sizes = ((kind, row.peaks[peak][kind]) for kind in row.variants)
    return {kind: size for kind, size in sizes if size is not None}


def _rows(plan: Plan, outline: Mapping[str, Any]) -> list[tuple[str, str, int, str, str]]:
    """Returns steps, or blocks of many steps: numbers, names, saved bytes, runs, lines."""
    names, saved, runs = outline["names"], outline["saved"], plan.runs()
    lines = charts.lines_of(outline)
    return [
        (
            "-".join(map(str, dict.fromkeys((part[0], part[-1])))),
            charts.spoken(part, names),
            sum(saved[step] for step in part),
            " or ".join(map(str, sorted({runs[step] for step in part}))),
            lines[part[0]],
        )
        for part in step_axis(names, outline["blocks"]).columns
    ]


def _legend(section: Mapping[str, Any], names: Sequence[str]) -> list[charts.Layer]:
    """Returns the named layers of some charts, each name once."""
    # in the order of the chart with the most of them
    ordered = sorted((section["charts"][name].layers for name in names), key=len, reverse=True)
    layers = (layer for layers in ordered for layer in layers)
    return list({layer.name: layer for layer in layers if layer.name}.values())


def _files(
    comparisons: Sequence[Comparison],
    table: Sequence[ModelRow],
    heading: Heading,
    runs: TwoRuns | None,
) -> list[tuple[str, str, str]]:
    """Returns the name, the description and the link of each file in the page."""
    results = {"name": heading.name, "command": heading.command, "comparisons": comparisons}
    memory = (
        {"model": comparison["model"]["name"], "run": kind, "event": event}
        | {name: sizes.get(name, 0) for name in charts.CATEGORIES}
        for comparison in comparisons
        for kind, event, sizes in _points(comparison)
    )
    texts = {
        f"{heading.name}.json": json.dumps(results),
        "memory.perfetto.json": json.dumps({"traceEvents": [*_counters(comparisons)]}),
        "memory.csv": to_csv(memory),
        **csv_files(table, runs),
    }
    links = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    return [
        (name, FILES.get(name, "everything"), f"data:;base64,{link}")
        for name, link in links.items()
    ]


def _points(comparison: Comparison) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yields the variant, the event and the bytes by category of each recorded point."""
    for kind in VARIANTS:
        timeline = comparison.get(kind, {}).get("timeline", {"points": ()})
        for index, event in enumerate(timeline["points"]):
            yield kind, event, {name: sizes[index] for name, sizes in timeline["bytes"].items()}


def _counters(comparisons: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    """Yields Chrome's trace events: a process per model and a counter per variant.

    Each allocation or release takes a microsecond, since times were not recorded.
    """
    for number, comparison in enumerate(comparisons):
        name = {"name": comparison["model"]["name"]}
        yield {"name": "process_name", "ph": "M", "pid": number, "args": name}
        for kind, event, sizes in _points(comparison):
            yield {"name": VARIANTS[kind], "ph": "C", "pid": number, "ts": event, "args": sizes}
