"""The memory timeline of a training step, as data: the lifetime of every allocation.

`memory_tracker` records one; reading, comparing and drawing it needs no torch. Time is counted in
events: point 0 has only the allocations that are older than the step, and each allocation or
release makes the next point.

    point        0     1     2     3     4
    weight       XXXXXXXXXXXXXXXXXXXXXXXXXXX        start 0, end None
    activation         XXXXXXXXXXXXXXX              start 1, end 4
    gradient                       XXXXXXXXX        start 3, end None
    phase        forward     backward               from 0, from 2
"""

import bisect
import functools
import itertools
import json
import math
import operator
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ArgumentError
from zoo.files import write_file
from zoo.planner.json_reader import read, read_file, read_json, read_row
from zoo.profiling.caching_allocator import Rounding
from zoo.report.escaping import to_csv
from zoo.report.pictures import plots
from zoo.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKSPACE = "kernel workspace"
# in the order in which they are stacked: those that no plan changes are at the bottom
CATEGORIES = (
    *("parameters", "buffers", "optimizer state", "inputs", "gradients"),
    *("saved activations", "recomputed", "temporaries", WORKSPACE),
)
RESIDENT = frozenset(CATEGORIES[:5])
# what is offloaded (`engine.host_memory`): bytes beside those of the device
HOST = "on the host"
VERSION = 1
MOST_BLOCKS = 16  # in a table
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Allocation:
    """The lifetime of one storage.

    Attributes:
        bytes: its size.
        start: the point of its allocation; 0 if it is older than the step.
        end: the point of its release; None if it outlives the step.
        category: one of `CATEGORIES`; `HOST` while it is offloaded.
        phase: the phase of the step that allocated it; "before" if it is older.
        block: the block of the model that allocated it, or that a parameter belongs to: the path of
            a module, the model's class for code in no block; "" for none.
        module: the path of the module, likewise.
        line: "file:line" of the program, outside torch; in the backward, the forward's line.
        shape, dtype: those of the first tensor that used it.
        name: that of the parameter or buffer; for a gradient, that of its parameter.
    """

    bytes: int
    start: int
    end: int | None
    category: str
    phase: str = ""
    block: str = ""
    module: str = ""
    line: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    name: str = ""

    @property
    def home(self) -> str:
        """The block, or the phase if it was allocated outside of the model."""
        return self.block or self.phase

    @property
    def place(self) -> str:
        """The most specific name for its origin."""
        return self.name or self.module or self.phase


@dataclass(frozen=True)
class Mark:
    """A phase and the point at which it begins."""

    point: int
    phase: str


# a curve over the width of a page shows no more points
POINTS = 240
HOLDER_FIELDS = ("bytes", "category", "shape", "dtype", "place", "phase", "line")


@dataclass
class Timeline:
    """Every allocation of a tracked step, and the phases of the step.

    Empty until the tracked block ends. With `allocator` memory of no tensor has the category
    "kernel workspace", and the peak is exact to the byte. `error` is the exception that ended the
    block, "" for none. `reserved_peak` is the most bytes that the device's allocator reserved
    meanwhile; None on the CPU and for fake tensors.
    """

    title: str = ""
    device: str = ""
    length: int = 0
    allocator: bool = False
    error: str = ""
    phases: list[Mark] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    reserved_peak: int | None = None

    def counted_by(self, rounding: Rounding) -> "Timeline":
        """Returns the same timeline with bytes as an allocator counts them.

        `zoo.profiling.caching_allocator` has the roundings.
        """
        allocations = [
            a if a.category == HOST else replace(a, bytes=rounding(a.bytes))
            for a in self.allocations
        ]
        return replace(self, allocations=allocations)

    def curves(self) -> dict[str, list[int]]:
        """Returns the bytes of each category at the points 0 to `length`."""
        return {category: self.total([category]) for category in CATEGORIES}

    def total(self, categories: Iterable[str] = CATEGORIES) -> list[int]:
        """Returns the bytes of these categories together at the same points."""
        chosen = frozenset(categories)
        changes = [0] * (self.length + 1)
        for allocation in self.allocations:
            if allocation.category in chosen:
                changes[allocation.start] += allocation.bytes
                if allocation.end is not None:
                    changes[allocation.end] -= allocation.bytes
        return list(itertools.accumulate(changes))

    @property
    def host_peak(self) -> int:
        """The most bytes on the host at once."""
        return max(self.total([HOST]))

    @property
    def peak(self) -> int:
        """The most bytes allocated at once."""
        return max(self.total())

    @property
    def peak_point(self) -> int:
        """The first point at the peak."""
        return self.total().index(self.peak)

    @property
    def tensor_peak(self) -> int:
        """The most bytes of tensors at once."""
        return max(self.total(CATEGORIES[:-1]))

    @property
    def activation_peak(self) -> int:
        """The peak of all but parameters, buffers, optimizer state, inputs and gradients."""
        return max(self.total(category for category in CATEGORIES if category not in RESIDENT))

    @property
    def tensor_activation_peak(self) -> int:
        """`activation_peak` without kernel workspaces."""
        return max(self.total(name for name in CATEGORIES[:-1] if name not in RESIDENT))

    @property
    def kernel_workspace(self) -> int | None:
        """The peak less `tensor_peak`; None without the allocator's events."""
        return self.peak - self.tensor_peak if self.allocator else None

    def phase_at(self, point: int) -> str:
        """Returns the phase at a point."""
        return next((mark.phase for mark in reversed(self.phases) if mark.point <= point), "")

    def by(self, attribute: str, point: int | None = None) -> dict[str, int]:
        """Returns the bytes at a point (the peak by default), by "category", "block", "module" ...

        Raises:
            ArgumentError: allocations have no such attribute.
        """
        if attribute not in _ATTRIBUTES:
            raise ArgumentError(
                f"allocations have no attribute {attribute!r}, but {', '.join(_ATTRIBUTES)}"
            )
        sizes: Counter[str] = Counter()
        for allocation in self.at(point):
            sizes[getattr(allocation, attribute)] += allocation.bytes
        return dict(sizes)

    def at(self, point: int | None = None) -> list[Allocation]:
        """Lists the allocations at a point (the peak by default), the largest first."""
        point = self.peak_point if point is None else point
        alive = [
            a for a in self._on_device() if a.start <= point and (a.end is None or point < a.end)
        ]
        return sorted(alive, key=lambda allocation: -allocation.bytes)

    def _on_device(self) -> list[Allocation]:
        return [a for a in self.allocations if a.category != HOST]

    def holders(self, count: int = 10, *, resident: bool = False) -> list[Allocation]:
        """Lists the largest allocations at the peak; `resident`: also parameters and the like."""
        return [a for a in self.at() if resident or a.category not in RESIDENT][:count]

    def blocks(self, *, resident: bool = False) -> dict[str, int]:
        """Returns each block's bytes at the peak: activations, or with `resident` the others."""
        sizes = dict.fromkeys((a.home for a in self.allocations), 0)
        for a in self.at():
            if (a.category in RESIDENT) is resident:
                sizes[a.home] += a.bytes
        return sizes

    def table(self, holders: int = 10) -> str:
        """Writes the timeline as text: categories, blocks and the largest tensors at the peak."""
        parts = [self.heading, _lines(self._by_category()), _lines(self._by_block())]
        if holders:
            parts.append(_lines(self._by_tensor(holders)))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.table()

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws categories over time, the peak marked, to an SVG, PNG or PDF file or into Axes.

        Raises:
            ArgumentError: matplotlib is missing, or a path has another ending.
        """
        title = f"Memory of a training step of {self.title}"
        subtitle = self.heading.removeprefix(f"{self.title} ")
        plots().draw_timeline(target, self.summary(), title, subtitle)

    def summary(self, points: int = POINTS) -> dict[str, Any]:
        """Returns what a report draws: about `points` of the points, including the peaks."""
        curves = {name: curve for name, curve in self.curves().items() if any(curve)}
        total = self.total()
        activations = self.total(name for name in CATEGORIES if name not in RESIDENT)
        peak, host = self.peak_point, self.total([HOST])
        chosen = sorted({0, peak, activations.index(max(activations)), *_extremes(total, points)})
        phases = itertools.groupby(self.phases, key=lambda mark: mark.phase)
        return {
            "length": self.length,
            "allocator": self.allocator,
            "points": chosen,
            "bytes": {name: [curve[point] for point in chosen] for name, curve in curves.items()},
            **({"host": [host[point] for point in chosen]} if any(host) else {}),
            "phases": [[next(marks).point, phase] for phase, marks in phases],
            "places": _places(self.allocations, chosen),
            "peak": {
                "point": peak,
                "bytes": self.peak,
                "phase": self.phase_at(peak),
                "categories": {name: curve[peak] for name, curve in curves.items()},
            },
            "holders": [
                {name: getattr(allocation, name) for name in HOLDER_FIELDS}
                for allocation in self.holders()
            ],
        }

    def to_json(self) -> str:
        """Writes the timeline as JSON: allocations are rows under the names of their columns."""
        lists = {
            "phases": [astuple(mark) for mark in self.phases],
            "allocations": [astuple(allocation) for allocation in self.allocations],
        }
        return json.dumps({"version": VERSION, "columns": _ATTRIBUTES, **vars(self), **lists})

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Reads what `to_json` wrote; raises ArgumentError for anything else."""
        return read_json(text, "timeline", ArgumentError, _timeline)

    def save(self, path: str | Path) -> None:
        """Writes the timeline to a file, as JSON."""
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Timeline":
        """Reads a file that `save` wrote.

        Raises:
            FileError: the file does not exist or cannot be read.
            ArgumentError: the file holds no timeline.
        """
        return cls.from_json(read_file(path))

    def save_memory_viz(self, path: str | Path) -> None:
        """Writes a snapshot for https://pytorch.org/memory_viz, where "Active Memory" draws it.

        Its format is that of `torch.cuda.memory._snapshot`, for any device; its frames name the
        category, the module and the line. Each allocation has its own address, in the order of
        their starts, since a timeline has no addresses.
        """
        # the page reads no later protocol of pickle
        write_file(path, pickle.dumps(_snapshot(self._on_device()), protocol=4))

    def to_csv(self) -> str:
        """Writes one row for each point: the point, its phase, the bytes of each category."""
        curves = self.curves() | ({HOST: self.total([HOST])} if self.host_peak else {})
        return to_csv(
            {"point": n, "phase": self.phase_at(n), **{name: curves[name][n] for name in curves}}
            for n in range(self.length + 1)
        )

    @property
    def heading(self) -> str:
        """One line: model, device, the peak and its time."""
        point = self.peak_point
        phase = f" in the {self.phase_at(point)}" if self.phase_at(point) else ""
        peak = f"peak {format_bytes(self.peak)}{phase}, at event {point} of {self.length}"
        reserved = self.reserved_peak
        reserved_text = "" if reserved is None else f"; {format_bytes(reserved)} reserved at most"
        host = f"; {format_bytes(self.host_peak)} on the host at most" if self.host_peak else ""
        return f"{self.title} on {self.device}: {peak}{reserved_text}{host}"

    def _by_category(self) -> Rows:
        at_most = {category: max(curve) for category, curve in self.curves().items()}
        shown = [category for category in CATEGORIES[:-1] if at_most[category]]
        rows = _rows([*shown, *[WORKSPACE] * self.allocator], [self.by("category"), at_most])
        missing: Rows = [] if self.allocator else [(WORKSPACE, "not measured", "")]
        return [("category", "at the peak", "at most"), *rows, *missing]

    def _by_block(self) -> Rows:
        resident, activations = self.blocks(resident=True), self.blocks()
        shown = _largest(Counter(resident) + Counter(activations))
        head = ("block, at the peak", "parameters and other residents", "activations")
        return [head, *_rows(shown, [resident, activations])]

    def _by_tensor(self, count: int) -> Rows:
        rows: Rows = [("largest at the peak", "", "shape", "made in", "block", "", "")]
        for a in self.holders(count):
            shape = f"{a.shape} {a.dtype}" if a.dtype else ""
            origin = a.place if a.place != a.home else ""
            rows.append((format_bytes(a.bytes), a.category, shape, a.phase, a.home, origin, a.line))
        return rows


def compare(timelines: Mapping[str, Timeline], holders: int = 10) -> str:
    """Writes timelines side by side, each at its own peak, by category and by block."""
    categories = [timeline.by("category") for timeline in timelines.values()]
    blocks = [timeline.blocks() for timeline in timelines.values()]
    named = [category for category in CATEGORIES if any(category in c for c in categories)]
    shown = _largest(functools.reduce(operator.or_, map(Counter, blocks)))
    parts = [
        "\n".join(f"{name}: {timeline.heading}" for name, timeline in timelines.items()),
        _lines([("category, at the peak", *timelines), *_rows(named, categories)]),
        _lines([("block, activations at the peak", *timelines), *_rows(shown, blocks)]),
    ]
    for name, timeline in timelines.items() if holders else ():
        parts.append(f"{name}\n{_lines(timeline._by_tensor(holders))}")
    return "\n\n".join(parts)


def _snapshot(allocations: Sequence[Allocation]) -> dict[str, Any]:
    """Returns allocations as a snapshot of torch's: the blocks of a single segment."""
    address, blocks, events = 0, list[dict[str, Any]](), list[tuple[int, dict[str, Any]]]()
    for a in sorted(allocations, key=operator.attrgetter("start")):
        file, _, line = a.line.rpartition(":")
        name = f"{a.category}: {a.place}"
        frames = [{"filename": file, "line": int(line) if line.isdecimal() else 0, "name": name}]
        event = {"addr": address, "size": a.bytes, "stream": 0, "frames": frames}
        actions = ("alloc", a.start), ("free_requested", a.end), ("free_completed", a.end)
        # older allocations have no event
        events += [(point, {"action": action, **event}) for action, point in actions if point]
        state = "active_allocated" if a.end is None else "inactive"
        sizes = {"size": a.bytes, "requested_size": a.bytes}
        blocks.append({"address": address, **sizes, "state": state, "frames": frames})
        address += a.bytes
    active = sum(a.bytes for a in allocations if a.end is None)
    segment = {"device": 0, "address": 0, "stream": 0, "segment_type": "large"}
    sizes = {"total_size": address, "allocated_size": active, "active_size": active}
    trace = [event for _, event in sorted(events, key=operator.itemgetter(0))]
    return {"segments": [{**segment, **sizes, "blocks": blocks}], "device_traces": [trace]}


def _rows(names: Iterable[str], columns: Sequence[Mapping[str, int]]) -> Rows:
    return [(name, *(format_bytes(column.get(name, 0)) for column in columns)) for name in names]


def _largest(sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the largest sizes, in the order of `sizes`."""
    largest = set(sorted(sizes, key=lambda name: -sizes[name])[:MOST_BLOCKS])
    return [name for name in sizes if name in largest and sizes[name]]


_ATTRIBUTES = tuple(entry.name for entry in fields(Allocation))


@dataclass
class _TimelineJson:
    """The JSON of a timeline."""

    version: int
    columns: tuple[str, ...]
    title: str
    device: str
    length: int
    allocator: bool
    error: str
    phases: list[Any]
    allocations: list[Any]
    reserved_peak: int | None = None


def _timeline(values: Any) -> Timeline:
    """Makes a timeline from parsed JSON; raises ValueError for anything else."""
    stored = read(_TimelineJson, values)
    if stored.version != VERSION:
        raise ValueError(f"its version is {stored.version}; this zoo reads version {VERSION}")
    phases = [read_row(Mark, ("point", "phase"), row) for row in stored.phases]
    allocations = [read_row(Allocation, stored.columns, row) for row in stored.allocations]
    length = stored.length
    # each allocation makes at most two events; a larger length would make curves of any size
    if not 0 <= length <= 2 * len(allocations):
        raise ValueError(f"{len(allocations)} allocations cannot make {length} events")
    for point in (point for a in allocations for point in (a.start, a.end or 0)):
        if not 0 <= point <= length:
            raise ValueError(f"an allocation is at point {point}, but its length is {length}")
    leading = stored.title, stored.device, length, stored.allocator, stored.error
    return Timeline(*leading, phases, allocations, stored.reserved_peak)


def _lines(rows: Rows) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _places(allocations: Sequence[Allocation], points: Sequence[int]) -> dict[str, Any]:
    """Returns module and line of the latest allocation at each point, without repeats."""
    births = sorted((a.start, (a.module, a.line)) for a in allocations if a.start)
    starts = [start for start, _ in births]
    # before the step's first allocation there is none
    latest = [bisect.bisect_right(starts, point) for point in points]
    origins = [births[number - 1][1] if number else ("", "") for number in latest]
    names = list(dict.fromkeys(origins))
    numbers = {origin: number for number, origin in enumerate(names)}
    return {"names": list(map(list, names)), "at": list(map(numbers.__getitem__, origins))}


def _extremes(total: list[int], points: int) -> Iterator[int]:
    """Yields the points of most and of fewest bytes in each stretch, so that both are drawn."""
    stretch = max(math.ceil(2 * len(total) / points), 1)
    for start in range(0, len(total), stretch):
        part = range(start, min(start + stretch, len(total)))
        yield max(part, key=total.__getitem__)
        yield min(part, key=total.__getitem__)
    yield len(total) - 1
