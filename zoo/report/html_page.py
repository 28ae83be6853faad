"""A comparison as one HTML file that needs nothing else: no network, no server, no torch.

Every number in it is a `<data>` element with the exact value; one that stands in the results says
where, as a path into the JSON that the page carries. Each chart has a table.

    page.html   what the page says        charts.py        what the charts show
    page.css    how it looks              interactive.py   their bokeh models
    page.js     draws, paints, zooms
"""

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zoo.planner.plan import Plan
from zoo.report import charts
from zoo.report.chain_axis import chain_axis
from zoo.report.interactive import interactive
from zoo.report.rows import (
    DEFINITIONS,
    KINDS,
    MISSING,
    VARIANTS,
    Comparison,
    Heading,
    Row,
    rows,
    variants,
)
from zoo.report.text_report import models_csv, timings_csv, to_csv
from zoo.report.two_runs import ABOUT, COLUMNS, TITLE, TwoRuns, as_entries
from zoo.units import format_bytes

HERE = Path(__file__).parent


def page(comparisons: Sequence[Comparison], heading: Heading, runs: TwoRuns | None = None) -> str:
    """Returns the page of a comparison, beside an earlier run if one is given: HTML."""
    table = rows(comparisons)
    sections = [
        {"number": number, "id": f"model-{number}", "row": row, **_section(comparison, row)}
        for number, (comparison, row) in enumerate(zip(comparisons, table, strict=True))
    ]
    pictures = {
        f"{section['id']}-{name}": interactive(chart)
        for section in sections
        for name, chart in section["charts"].items()
    }
    writer = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return writer.get_template("page.html").render(
        heading=heading,
        sections=sections,
        environment=_environment(comparisons),
        files=_files(comparisons, table, heading, runs),
        runs=runs,
        about_runs=(TITLE, ABOUT, COLUMNS),
        pictures=_packed(json.dumps(pictures, separators=(",", ":"))),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=_library(),
        size=lambda path: _size(comparisons, path),
        number=Markup('<data value="{}">{}</data>').format,
        words=format_bytes,
        legend=_legend,
        shapes=charts.SHAPES,
        kinds=KINDS,
        variants=variants(table),
        color=charts.color_of,
        definitions=DEFINITIONS,
        categories=charts.MEANINGS,
    )


def _section(comparison: Comparison, row: Row) -> dict[str, Any]:
    """Returns what the page says of one model; parts that were not recorded are None or empty."""
    chain, frontier = (comparison["baseline"].get(name) for name in ("chain", "frontier"))
    timelines = {
        kind: comparison[kind]["timeline"]
        for kind in row.variants
        if "timeline" in comparison[kind]
    }
    text = comparison["checkpointed"].get("plan")
    plan = Plan.parse(text) if text is not None and chain is not None else None
    # a plan for another chain is not drawn
    if plan is not None and len(plan.flatten()) != len(chain["names"]):
        plan = None
    measured = {} if row.peak.baseline is None else {"baseline": (row.peak.baseline, 1.0)}
    # plans free no gradients early: the third variant is none of the frontier's
    if row.peak.checkpointed is not None and (time := row.times["checkpointed"].spread):
        measured["checkpointed"] = row.peak.checkpointed, time.median
    drawn: dict[str, charts.Chart] = {}
    if timelines:
        drawn["memory"] = charts.memory_chart(timelines)
        drawn["activations"] = charts.memory_chart(timelines, without=charts.RESIDENT)
        most = max(timeline["peak"]["bytes"] for timeline in timelines.values())
        for kind, timeline in timelines.items():
            drawn[kind] = charts.categories_chart(timeline, most)
    if plan is not None:
        drawn["plan"] = charts.plan_chart(plan, chain)
    if frontier and frontier["optimal"]:
        drawn["frontier"] = charts.frontier_chart(frontier, measured)
    recorded = set().union(*(timeline["bytes"] for timeline in timelines.values()))
    return {
        "comparison": comparison,
        "timelines": timelines,
        "chain": chain,
        "plan": text,
        "charts": drawn,
        "steps": [] if plan is None else _steps(plan, chain),
        "measured": measured,
        "frontier": frontier,
        "numbers": [f"#{VARIANTS[kind]}" for kind in timelines],
        "headline": _headline(row),
        "bars": _bars(row),
        "phases": charts.phase_peaks(timelines),
        "categories": [name for name in charts.CATEGORIES if name in recorded],
        "missing": {
            f"{kind}, {what}": why
            for kind in row.variants
            for what, why in comparison[kind].get("missing", {}).items()
        },
    }


def _bars(row: Row) -> list[tuple[str, float]]:
    """Returns the step peak of each variant as a part of the largest."""
    sizes = {kind: getattr(row.peak, kind) for kind in row.variants}
    known = {kind: size for kind, size in sizes.items() if size is not None}
    return [(kind, size / max(1, *known.values())) for kind, size in known.items()]


def _headline(row: Row) -> str | None:
    """Returns the last variant whose step peak can be compared with the baseline's."""
    measured = [kind for kind in row.times if row.peak.ratio_of(kind) is not None]
    return measured[-1] if measured else None


def _steps(plan: Plan, chain: Mapping[str, Any]) -> list[tuple[str, str, int, str, str]]:
    """Returns the steps, or blocks of a long chain: numbers, names, saved bytes, runs, lines."""
    names, saved, runs = chain["names"], chain["saved"], plan.runs()
    lines = charts.lines_of(chain)
    return [
        (
            "-".join(map(str, dict.fromkeys((part[0], part[-1])))),
            charts.spoken(part, names),
            sum(saved[step] for step in part),
            " or ".join(map(str, sorted({runs[step] for step in part}))),
            lines[part[0]],
        )
        for part in chain_axis(names, chain["blocks"]).columns
    ]


def _legend(section: Mapping[str, Any], names: Sequence[str]) -> list[charts.Layer]:
    """Returns the layers of some charts that have a name, one of each."""
    # the chart with most of the categories tells their order
    ordered = sorted((section["charts"][name].layers for name in names), key=len, reverse=True)
    layers = (layer for layers in ordered for layer in layers)
    return list({layer.name: layer for layer in layers if layer.name}.values())


def _size(comparisons: Sequence[Comparison], path: str) -> Markup:
    """Writes the bytes at a path such as '0/baseline/memory/peak'; a name's own / is ~1."""
    value: Any = comparisons
    for part in path.split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        value = value[name] if isinstance(value, Mapping) else value[int(name)]
    if value is None:
        return Markup(MISSING)  # an allocator without a history knows no activation peak
    text = format_bytes(value)
    return Markup('<data value="{}" data-from="{}">{}</data>').format(value, path, text)


def _environment(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Returns where and how the first cell that says it was measured."""
    records = (comparison[kind] for comparison in comparisons for kind in KINDS)
    record: Any = next((record for record in records if record.get("environment")), {})
    cell = {key: record.get("cell", {}).get(key) for key in ("dtype", "seed", "steps")}
    known = {**record.get("environment", {}), **cell, "measured": record.get("finished")}
    return {key: value for key, value in known.items() if value is not None}


def _files(
    comparisons: Sequence[Comparison],
    table: Sequence[Row],
    heading: Heading,
    runs: TwoRuns | None,
) -> list[tuple[str, str, Markup]]:
    """Returns for each file in the page its name, what it holds, and itself as a link."""
    results = {"name": heading.name, "command": heading.command, "comparisons": comparisons}
    everything = base64.b64encode(json.dumps(results).encode()).decode()
    memory = to_csv(
        {"model": comparison["model"]["name"], "run": kind, "event": event}
        | {
            name: timeline["bytes"][name][place] if name in timeline["bytes"] else 0
            for name in charts.CATEGORIES
        }
        for comparison in comparisons
        for kind in VARIANTS
        if (timeline := comparison.get(kind, {}).get("timeline"))
        for place, event in enumerate(timeline["points"])
    )
    traces = {"traceEvents": [*_counters(comparisons)]}
    perfetto = base64.b64encode(json.dumps(traces).encode()).decode()
    tables = [
        ("models.csv", "a line per model", models_csv(table)),
        ("timings.csv", "a line per timed pair of steps", timings_csv(table)),
        ("memory.csv", "bytes over the step by category", memory),
    ]
    if runs is not None:
        tables.append(("compared.csv", "a line per cell of both runs", to_csv(as_entries(runs))))
    return [
        (
            f"{heading.name}.json",
            "everything",
            Markup(f"data:application/json;base64,{everything}"),
        ),
        (
            "memory.perfetto.json",
            "bytes by category for ui.perfetto.dev",
            Markup(f"data:application/json;base64,{perfetto}"),
        ),
        *((name, what, Markup(f"data:text/csv,{quote(text)}")) for name, what, text in tables),
    ]


def _counters(comparisons: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    """Yields Chrome's trace events: a process per model and a counter per variant.

    An allocation or release takes a microsecond; nothing else of a step's time was recorded.
    """
    for number, comparison in enumerate(comparisons):
        name = {"name": comparison["model"]["name"]}
        yield {"name": "process_name", "ph": "M", "pid": number, "args": name}
        for kind, shown in VARIANTS.items():
            timeline = comparison.get(kind, {}).get("timeline", {"points": ()})
            for place, event in enumerate(timeline["points"]):
                sizes = {name: series[place] for name, series in timeline["bytes"].items()}
                yield {"name": shown, "ph": "C", "pid": number, "ts": event, "args": sizes}


def _packed(text: str) -> Markup:
    """Returns text as gzip in base64: what stands in a page by the megabyte, and no one reads."""
    return Markup(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


@cache
def _library() -> Markup:
    """Returns bokeh's script, packed; only the part that draws: no widgets, no tables."""
    # without the line that follows it, which tells the console the level of its messages
    return _packed(Resources(mode="inline", components=["bokeh"]).js_raw[0])
