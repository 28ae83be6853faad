"""The charts of a report as data: axes, layers, texts, and colors by their role in `page.css`.

`plot.py` draws them with matplotlib into files, `interactive.py` with bokeh for the page.

    memory       bytes over a training step: both runs, their peaks marked
    categories   bytes of one run, stacked by what they are for
    plan         what each step saves, kept or recomputed; the segments below
    frontier     least time for each peak, the classic schemes, what was measured
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

from zoo.planner.plan import Plan
from zoo.report.chain_axis import Label, chain_axis, segments
from zoo.report.markdown import visible
from zoo.report.step_axis import EDGES, PARTS, recomputes, step_axis, totals
from zoo.units import BINARY, format_bytes

Timeline = Mapping[str, Any]
Spot = tuple[float, float]
Tips = Mapping[str, Sequence[str]]

RESIDENT = ("parameters", "buffers", "optimizer state", "inputs", "gradients")
# in the order in which they are stacked, from below
CATEGORIES = (*RESIDENT, "saved activations", "recomputed", "temporaries", "unseen")
# by how often a step runs in a training step: its color, and words; 4 stands for all above
RUNS = {
    1: ("kept", "kept"),
    2: ("again", "recomputed"),
    3: ("again-twice", "recomputed twice"),
    4: ("again-often", "recomputed more often"),
}
SHAPES = ("square", "triangle", "diamond", "inverted_triangle", "plus")
# a longer range of memory is drawn on a logarithmic axis, a slower plan at the upper edge
WIDE, SLOW = 8, 2.0
# between bars, in steps
GAP = 0.06


@dataclass(frozen=True)
class Axis:
    """The limits of an axis; `labels` replace its numbers, `numbers` are a smaller second row."""

    start: float
    stop: float
    title: str = ""
    format: str = "%g"
    log: bool = False
    grid: bool = True
    labels: Sequence[Label] = ()
    numbers: Sequence[Label] = ()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What is drawn in one color; `tips` are columns of text that a pointer above it shows."""

    color: str
    name: str = ""
    tips: Tips = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bars(Layer):
    """Rectangles: (left, right, bottom, top)."""

    boxes: Sequence[tuple[float, ...]]
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class Steps(Layer):
    """A curve that keeps its height up to the next x; `alpha` fills it down to `low`."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    alpha: float = 0.0
    width: float = 2.0
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Marks(Layer):
    """Marks; `text` stands beside the first, except where a pointer can ask for the tips.

    `group` names them in the legend of a picture that has the texts.
    """

    spots: Sequence[Spot]
    shape: str = "circle"
    size: float = 8
    text: str = ""
    group: str = ""
    below: bool = False


@dataclass(frozen=True)
class Chart:
    """Layers, the first at the back, those with a name in the legend; `height` is in pixels."""

    x: Axis
    y: Axis
    layers: Sequence[Layer]
    height: int = 300


def scale(most: int) -> tuple[int, str]:
    """Returns what bytes are divided by when the most of them is so large, and that unit."""
    power = min(max(most.bit_length() - 1, 0) // 10, len(BINARY) - 1)
    return 1024**power, BINARY[power]


def memory_chart(timelines: Mapping[str, Timeline], *, without: Sequence[str] = ()) -> Chart:
    """Shows the bytes of runs over their step, less some categories, with the peaks marked."""
    shown = {name: totals(timeline, without) for name, timeline in timelines.items()}
    x, y, divisor, layers = _step(max(map(max, shown.values())))
    spans = recomputes(timelines["checkpointed"]) if "checkpointed" in timelines else []
    if spans:
        boxes = [(*span, y.start, y.stop) for span in spans]
        layers.append(Bars(color="in-recompute", name="recomputation", boxes=boxes, behind=True))
    peaks = []
    for name, sizes in shown.items():
        places, events = _places(timelines[name])
        tips = {name: [*map(format_bytes, [*sizes, sizes[-1]])], "event": events}
        layers.append(
            Steps(
                color=name, name=name, x=places, y=_scaled([*sizes, sizes[-1]], divisor),
                low=[0.0] * len(places), alpha=0.1, tips=tips,
            )
        )  # fmt: skip
        most = max(sizes)
        spot = places[sizes.index(most)], most / divisor
        text = f"peak {format_bytes(most)}"
        peaks.append(Marks(color=name, spots=[spot], text=text, below=name == "checkpointed"))
    return Chart(x, y, [*layers, *peaks])


def categories_chart(timeline: Timeline, highest: int) -> Chart:
    """Shows the categories of one run, stacked, on an axis up to `highest` bytes."""
    x, y, divisor, layers = _step(highest)
    places, events = _places(timeline)
    top, tips = [0] * len(places), {"event": events}
    for name in CATEGORIES:
        if name not in timeline["bytes"]:
            continue
        sizes = [*timeline["bytes"][name], timeline["bytes"][name][-1]]
        low, top = top, [below + size for below, size in zip(top, sizes, strict=True)]
        layers.append(
            Steps(
                color=name.replace(" ", "-"), name=name, x=places, y=_scaled(top, divisor),
                low=_scaled(low, divisor), alpha=1.0, width=0,
            )
        )  # fmt: skip
        # the pointer's list is in the order of the areas, the topmost first
        tips = {name: [*map(format_bytes, sizes)], **tips}
    peak = timeline["peak"]
    spot = step_axis(timeline).place(peak["point"]), peak["bytes"] / divisor
    layers += [
        Steps(color="faint", x=places, y=_scaled(top, divisor), width=1, tips=tips),
        Marks(color="ink", spots=[spot], text=f"peak {format_bytes(peak['bytes'])}"),
    ]
    return Chart(x, y, layers)


def plan_chart(plan: Plan, chain: Mapping[str, Any]) -> Chart:
    """Shows what each step of a chain saves, by how often it runs, and the segments below.

    `chain` holds "names", "blocks" (their numbers) and "saved" (bytes), an entry for each step.
    """
    names, saved = [*map(visible, chain["names"])], chain["saved"]
    axis, depth = chain_axis(names, chain["blocks"]), plan.depth()
    most = max((sum(saved[step] for step in column) for column in axis.columns), default=0)
    divisor, unit = scale(most)
    layers: list[Layer] = []
    runs = [min(count, len(RUNS)) for count in plan.runs()]
    tops = [0] * len(axis.columns)
    for count in sorted(set(runs)):
        (color, words), number = RUNS[count], runs.count(count)
        parts = [[step for step in column if runs[step] == count] for column in axis.columns]
        sizes = [sum(saved[step] for step in part) for part in parts]
        lows, tops = tops, [low + size for low, size in zip(tops, sizes, strict=True)]
        drawn = [place for place, part in enumerate(parts) if part]
        boxes = [
            (*_sides(axis.columns[place], axis.edges, GAP),
             *_scaled((lows[place], tops[place]), divisor))
            for place in drawn
        ]  # fmt: skip
        tips = {
            "step": [spoken(parts[place], names) for place in drawn],
            "saves": [format_bytes(sizes[place]) for place in drawn],
            "is": [words] * len(drawn),
        }
        name = f"{words}: {number} step{'s' * (number != 1)}"
        layers.append(Bars(color=color, name=name, boxes=boxes, tips=tips))
    height = most / divisor or 1.0
    thickness = height * min(0.05, 0.4 / max(depth, 1))
    for level in range(depth):
        low, high = -(level + 1.35) * thickness, -(level + 0.75) * thickness
        spans = [range(start, stop) for start, stop, at in segments(plan) if at == level]
        boxes = [(*_sides(span, axis.edges, 2 * GAP), low, high) for span in spans]
        tips = {
            "segment of steps": [f"{span[0]} to {span[-1]}" for span in spans],
            "depth": [str(level + 1)] * len(spans),
        }
        layers.append(Bars(color=RUNS[min(level + 2, len(RUNS))][0], boxes=boxes, tips=tips))
    kind = "step" if len(axis.columns) == len(names) else "block"
    return Chart(
        Axis(0, axis.edges[-1], grid=False, labels=axis.stages, numbers=axis.numbers),
        Axis(-(depth + 0.8) * thickness, 1.05 * height, f"saved by each {kind} ({unit})"),
        layers,
    )


def frontier_chart(
    frontier: Mapping[str, Any], measured: Mapping[str, tuple[int, float]] | None = None
) -> Chart:
    """Shows the least time for each peak, the classic schemes, and what was measured, by name.

    `frontier` holds pairs of peak bytes and time ratio, "optimal" in a list by rising peak and
    "schemes" by name, and the bytes of "baseline" and of "lower_bound".
    """
    curve, whole, bound = frontier["optimal"], frontier["baseline"], frontier["lower_bound"]
    measured = measured or {}
    schemes = zip(frontier["schemes"].items(), cycle(SHAPES), strict=False)
    marks = [
        ("best plan", curve, "kept", "circle", 5),
        ("baseline", [(whole, 1.0)], "ink", "circle", 9),
        ("least memory", curve[:1], "kept", "circle", 9),
        *((visible(name), [spot], "scheme", shape, 9) for (name, spot), shape in schemes),
        *((f"measured: {kind}", [spot], kind, "ring", 13) for kind, spot in measured.items()),
    ]
    peaks, times = zip(*(spot for _, spots, *_ in marks for spot in spots), strict=True)
    divisor, unit = scale(whole)
    title = f"{'' if measured else 'predicted '}peak of a training step ({unit})"
    x = _memory_axis(min(bound, *peaks) / divisor, max(peaks) / divisor, title)
    # the best plans come first; how slow the others are is seen
    cut = max([SLOW, *(1.1 * time for time in times[len(curve) + 2 :])])
    least, most = min(times), min(cut, max(times))
    height = max(most - least, 0.02)
    low, high = least - 0.08 * height, least + 1.15 * height
    edge = high - 0.03 * (high - low)

    stairs = [*curve, (whole, curve[-1][1]), (whole, 1.0)]
    layers: list[Layer] = [
        Bars(
            color="below", name="below any plan", behind=True,
            boxes=[(x.start, bound / divisor, low, high)],
        ),
        Steps(color="faint", x=[bound / divisor] * 2, y=[low, high], width=1.2, dashed=True),
        Steps(color="baseline", x=[x.start, x.stop], y=[1, 1], width=1.2),
        Steps(
            color="kept", name="least time for each budget", width=2.4,
            x=_scaled((peak for peak, _ in stairs), divisor), y=[time for _, time in stairs],
        ),
    ]  # fmt: skip
    for name, spots, color, shape, size in marks:
        peak, time = spots[0]
        # at 1 and 1 numbers say nothing; the best plans are too many
        told = f"\n×{peak / max(whole, 1):.2f} memory, ×{time:.2f} time"
        texts = {"best plan": "", "baseline": name}
        layers.append(
            Marks(
                color=color, name=name, size=size, text=texts.get(name, name + told),
                group="classic schemes" if color == "scheme" else "",
                # where it is too high, it stands at the upper edge and points there
                shape="triangle" if name == "least memory" and time > edge else shape,
                spots=[
                    (round(peak / divisor, 4), min(round(time, 5), edge)) for peak, time in spots
                ],
                tips={
                    "plan": [name] * len(spots),
                    "peak": [format_bytes(peak) for peak, _ in spots],
                    "time": [f"×{time:.3f}" for _, time in spots],
                },
            )
        )  # fmt: skip
    return Chart(x, Axis(low, high, "time; the baseline is ×1", "×%.2f"), layers)


def spoken(part: Sequence[int], names: Sequence[str]) -> str:
    """Names a step, or the first and last of several in a row."""
    return names[part[0]] if len(part) == 1 else f"{names[part[0]]} to {names[part[-1]]}"


def _step(highest: int) -> tuple[Axis, Axis, int, list[Layer]]:
    """Returns axes over a training step, what bytes are divided by, and the backward's shade."""
    divisor, unit = scale(highest)
    parts = zip(PARTS, pairwise(EDGES), strict=True)
    labels = [Label(part, left, right) for part, (left, right) in parts]
    x = Axis(EDGES[0], EDGES[-1], grid=False, labels=labels)
    # room for the text above the peak
    y = Axis(0, 1.16 * highest / divisor or 1, f"allocated ({unit})")
    box = EDGES[1], EDGES[2], y.start, y.stop
    return x, y, divisor, [Bars(color="in-backward", name="backward", boxes=[box], behind=True)]


def _places(timeline: Timeline) -> tuple[list[float], list[str]]:
    """Returns where points lie, and their events; and the end, up to which nothing changes."""
    axis = step_axis(timeline)
    events = [*timeline["points"], timeline["length"]]
    return [*map(axis.place, timeline["points"]), EDGES[-1]], [*map(str, events)]


def _scaled(sizes: Iterable[int], divisor: int) -> list[float]:
    return [round(size / divisor, 4) for size in sizes]


def _sides(span: range, edges: Sequence[float], gap: float) -> tuple[float, float]:
    """Returns where the bar over some steps begins and ends, a little apart from the next."""
    left, right = edges[span.start], edges[span.stop]
    gap = min(gap, gap * (right - left))
    return round(left + gap, 5), round(right - gap, 5)


def _memory_axis(left: float, right: float, title: str) -> Axis:
    """Returns an axis with room for names, more of it on the right."""
    if right > WIDE * left > 0:
        ratio = right / left
        return Axis(left / ratio**0.08, right * ratio**0.16, title, log=True)
    width = right - left or right
    return Axis(left - 0.08 * width, right + 0.16 * width, title)
