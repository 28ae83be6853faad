"""Writes docs/gpu.md from docs/gpu.jsonl, the rows that `benchmarks/gpu.py` measured on a GPU.

    python docs/gpu.py                                    # make gpu-page; needs no GPU
    python docs/gpu.py build/gpu-cuda.jsonl               # first takes over the parts in that file
    python docs/gpu.py build/gpu-soft.jsonl --to build/gpu.md    # a page of that file alone

A table is of one machine, version and commit. A part that a file has replaces the one that was
there, whole.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zoo.report.escaping import markdown_table
from zoo.units import format_bytes

DOCS = Path(__file__).parent
ROWS, PAGE = DOCS / "gpu.jsonl", DOCS / "gpu.md"
Row = dict[str, Any]
Rows = list[Row]
FACTS = ("machine", "torch", "cudnn", "commit", "n", "conf", "script", "beside")
HEAD = """\
# On a GPU

[Index](README.md) · [CUDA](cuda.md) · [Budgets](budgets.md) · [Exactness](exactness.md)

`make gpu DEVICE=cuda` measures rows, which [gpu.jsonl](gpu.jsonl) holds, and `make gpu-page` writes
this page from them; no GPU is needed for that. What stands above a table holds for all of it: the
machine, the versions, the commit of this repository, and of how many runs the numbers are. A number
of one run has no spread; do not read much into small differences. Inputs are random numbers.

*True* is `checkpoint=True`, *switch* the library's own way to checkpoint (timm's
`set_grad_checkpointing`, transformers' `activation_checkpointing_enable`), a *plan* one for a share
of the baseline's peak, which stands behind the number.
"""
EXACT = """\
A baseline and each way to train it start from the same weights and seeds. Compared are the losses
of each step, and after the last one parameters, buffers and, in newer rows, gradients and the
random state, bit for bit. Where the baseline, trained twice, does not repeat its own numbers,
nothing can be compared; a row *deterministic* has `torch.use_deterministic_algorithms(True)`.
"""
REPEATED = """\
The gradients of more steps from the same weights and batch, beside those of the first, with nothing
else on the GPU. A script measured this once.
"""
SPEED = """\
Milliseconds of a training step, the median of 7 that were synchronized; in parentheses those until
Python had launched the last kernel. Where both are close, the GPU waits for Python. Then the peak
of `max_memory_allocated` in these steps.
"""
BUDGETS = """\
A plan is asked for a share of the baseline's predicted peak. *Taken* is `max_memory_allocated` in
later steps of a training by that plan; *over* is by how much it exceeds what was asked for.
"""
RESERVED = """\
What runs out is what the allocator has *reserved*, in segments with gaps between the blocks in use.
`PYTORCH_ALLOC_CONF=expandable_segments:True` closes most of them.
"""
GRAPHS = """\
A whole training step (forward, replays in the backward, optimizer), captured into a CUDA graph
after some eager ones, and replayed: no Python runs then. Rows of commit 6b9466f are by a script;
`make gpu PART=graphs` measures [`zoo.make_graphed_step`](api.md#zoomake_graphed_step), and compares
what it leaves with what eager steps do. Peaks are left out: captures shared a process.
"""
SAME = """\
Losses, parameters and buffers after four replays with four new batches, beside those of the eager
baseline:
"""
BATCHES = """\
The largest batch whose training step stays within a budget in bytes, and its samples per second, in
float32, by `benchmarks/largest_batch.py`.
"""
OFFLOAD = """\
Steps whose segments start from tensors in pinned host memory, beside the same without, by *True*
and by a plan for the same share of the baseline's peak. *On the host* is the most that lay there.
The loss is that of one more step after the same steps, and is to be the same in all ways.
"""
# where a step was to be a graph, and ran eagerly
NO_GRAPH = "no graph"
TESTS = "`make test-device DEVICE=cuda`, by file.\n"


def read(path: Path) -> Rows:
    """Returns the last row of each key: an earlier one failed, or was measured anew."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        key = ("part", "case", "variant", "deterministic", "eager_ms", *FACTS)
        found[tuple(str(row.get(name)) for name in key)] = row
    return list(found.values())


def replaced(old: Rows, new: Rows) -> Rows:
    """Returns rows in which the parts that are new replace those that were there."""
    parts = {row["part"] for row in new}
    return [row for row in old if row["part"] not in parts] + new


def page(rows: Rows) -> str:
    """Returns the page."""
    sections: list[tuple[str, str, str, Callable[[Rows], str]]] = [
        ("families", "Exactness", EXACT, exactness),
        ("repeated", "A baseline, repeated", REPEATED, repeated),
        ("speed", "Time and memory", SPEED, speed),
        ("budgets", "Budgets", BUDGETS, budgets),
        ("speed reserved", "Reserved memory", RESERVED, reserved),
        ("graphs", "CUDA graphs", GRAPHS, graphs),
        ("graphs exact", "Exactness of a graph", SAME, exactness),
        ("batches", "The largest batch", BATCHES, batches),
        ("offload", "Offloading", OFFLOAD, offload),
        ("tests", "Tests", TESTS, tests),
    ]
    text = [HEAD]
    for names, title, about, table in sections:
        # the table of reserved memory compares settings of the allocator
        shared = FACTS if table is not reserved else tuple(f for f in FACTS if f != "conf")
        groups: dict[tuple[Any, ...], Rows] = {}
        for row in rows:
            if row["part"] in names.split():
                groups.setdefault(tuple(str(row.get(name)) for name in shared), []).append(row)
        shown = [(caption(group, shared), table(group)) for group in groups.values()]
        if any(made for _, made in shown):
            text += [f"## {title}", about]
            text += [part for pair in shown if pair[1] for part in pair]
    return "\n\n".join(part.strip() for part in text) + "\n"


def caption(rows: Rows, shared: Iterable[str]) -> str:
    """Returns what all rows of a table share, in a sentence."""
    row = rows[0]
    parts = [f"One {row['machine']}", f"torch {row['torch']}"]
    if number := row.get("cudnn"):
        parts.append(f"cuDNN {number // 10000}.{number // 100 % 100}")
    parts += [f"commit {row['commit']}", f"n = {row['n']} run"]
    if "conf" in shared:
        conf = row.get("conf")
        parts.append(f"`PYTORCH_ALLOC_CONF={conf}`" if conf else "`PYTORCH_ALLOC_CONF` not set")
    if beside := row.get("beside"):
        parts.append(f"beside {beside}")
    return f"{', '.join(parts)}:"


def cases(rows: Rows) -> dict[tuple[str, ...], dict[str, Row]]:
    """Returns the rows by model and size, then by variant."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        name = f"{row['case']}{', deterministic' if row.get('deterministic') else ''}"
        found.setdefault((name, size_of(row)), {})[row.get("variant", "")] = row
    if any(map(size_of, rows)):
        return found
    return {(name,): variants for (name, _), variants in found.items()}


def size_of(row: Row) -> str:
    """Returns the size of a case's inputs and its dtype, as far as they are known."""
    return ", ".join(filter(None, (row.get("size"), row.get("dtype"))))


def by_variant(rows: Rows, names: Iterable[str], cell: Callable[[Row, dict[str, Row]], str]) -> str:
    """Returns a table with a row for each case and a column for each variant that there is."""
    found = cases(rows)
    there = [name for name in names if any(name in variants for variants in found.values())]
    if not there:
        return ""
    lines = [
        (*case, *(cell(variants[name], variants) if name in variants else "" for name in there))
        for case, variants in found.items()
        if variants.keys() & set(there)
    ]
    size = ("size",) * (len(lines[0]) - len(there) - 1)
    return markdown_table(("model", *size, *there), lines) + left_out(rows)


def left_out(rows: Rows) -> str:
    """Returns the sentences of what was skipped, and of what failed."""
    told = [f"- Left out: {row['skipped']}." for row in rows if "skipped" in row]
    for row in rows:
        if "error" in row:
            name = ", ".join(filter(None, (row["case"], row.get("variant"))))
            told.append(f"- {name}: failed: {row['error'].rstrip('.')}.")
    return "\n\n" + "\n".join(told) if told else ""


def exactness(rows: Rows) -> str:
    """Returns how many tensors each way leaves other than the baseline does."""

    def cell(row: Row, variants: dict[str, Row]) -> str:
        if "error" in row:
            return "failed"
        if "repeats" in row:
            return "yes" if row["repeats"] else "no"
        if not variants.get("baseline again", {}).get("repeats", True):
            return "cannot be compared"
        equal = f"equal ({row['of']} tensors)"
        return f"{row['differing']} of {row['of']} differ" if row["differing"] else equal

    names = ("baseline again", "True", "True, optimizer in the backward", "blocks", "4 segments")
    compared = [row for row in rows if row.keys() & {"differing", "repeats", "error", "skipped"}]
    text = by_variant(compared, (*names, "2 segments", "switch", "baseline"), cell)
    notes = [f"{row['case']}, {row['variant']}: {row['note']}." for row in rows if "note" in row]
    text = "\n\n".join([text, *notes])
    return text.replace("| baseline again ", "| the baseline repeats itself ") + peaks(rows)


def repeated(rows: Rows) -> str:
    """Returns how many steps of a baseline differ from its first one."""
    lines = [
        (name, f"{variants['baseline']['steps']}", f"{variants['baseline']['differing']}")
        for (name, *_), variants in cases(rows).items()
    ]
    return markdown_table(("model", "steps", "differ from the first"), lines) if lines else ""


def peaks(rows: Rows) -> str:
    """Returns the peaks of the last step that was compared; '' where none were measured."""

    def cell(row: Row, _: dict[str, Row]) -> str:
        return f"{format_bytes(row['allocated'])} ({format_bytes(row['reserved'])})"

    measured = [row for row in rows if "allocated" in row]
    names = ("baseline", "True", "True, optimizer in the backward", "switch")
    told = "The peak of the last of these steps, allocated (reserved):"
    return f"\n\n{told}\n\n{by_variant(measured, names, cell)}" if measured else ""


def speed(rows: Rows) -> str:
    """Returns the times and peaks of each way."""

    def cell(row: Row, _: dict[str, Row]) -> str:
        if "error" in row:
            return "failed"
        if row.get("replays") == 0:
            return NO_GRAPH
        share = f", {row['share']:g}" if "share" in row else ""
        times = f"{row['ms']:.3g} ({row['cpu_ms']:.3g})"
        return f"{times} ms, {format_bytes(row['allocated'])}{share}"

    names = ("baseline", "switch", "blocks", "True", "True, CUDA graph")
    names += ("True, optimizer in the backward", "plan")
    return by_variant(rows, names, cell).replace("| plan ", "| plan, its share ")


def budgets(rows: Rows) -> str:
    """Returns what was asked for, predicted and taken, in MiB."""
    lines = []
    for row in rows:
        if "allocated" in row:
            over = row["allocated"] / row["asked"] - 1
            sizes = ("baseline", "asked", "predicted", "allocated", "reserved")
            shown = [f"{row[name] / 2**20:,.0f}" for name in sizes]
            shown.insert(4, f"{over:+.1%}")
            lines.append((row["case"], size_of(row), f"{row['share']:g}", *shown))
    if not lines:
        return left_out(rows).strip()
    head = ("model", "size", "share", "baseline, predicted, MiB", "asked", "predicted", "taken")
    return markdown_table((*head, "over", "reserved"), lines) + left_out(rows)


def reserved(rows: Rows) -> str:
    """Returns what was reserved by default and with expandable segments, where both are known."""
    found: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in rows:
        if "reserved" in row:
            expands = "expandable_segments:True" in (row.get("conf") or "")
            found.setdefault((row["case"], row["variant"]), {})[expands] = row
    lines = [
        (*key, *(format_bytes(pair[expands][name]) for expands, name in columns))
        for columns in [((False, "allocated"), (False, "reserved"), (True, "reserved"))]
        for key, pair in found.items()
        if len(pair) == 2
    ]
    head = ("model", "way", "allocated", "reserved by default", "with expandable segments")
    return markdown_table(head, lines) if lines else ""


def graphs(rows: Rows) -> str:
    """Returns the times of captured steps, beside those of eager ones."""

    def cell(row: Row, variants: dict[str, Row]) -> str:
        share = f", {row['share']:g}" if "share" in row else ""
        differs = f", {row['differing']} of {row['of']} differ" if row.get("differing") else ""
        if row.get("replays") == 0:
            return NO_GRAPH
        return f"{row['graph_ms']:.3g} ms{share}{differs}" if "graph_ms" in row else "failed"

    eager = [
        {**row, "variant": "baseline, eager", "graph_ms": row["eager_ms"], "replays": None}
        for row in rows
        if row.get("variant") == "baseline" and row.get("eager_ms") is not None
    ]
    return by_variant(
        [*eager, *rows], ("baseline, eager", "baseline", "switch", "True", "plan"), cell
    )


def batches(rows: Rows) -> str:
    """Returns the largest batch by each method, and its speed."""

    def cell(row: Row, _: dict[str, Row]) -> str:
        if "rate" not in row:
            return str(row.get("status", "failed"))
        return f"{row['batch']}: {row['rate']:.3g}/s"

    rows = [row | {"variant": row.get("variant", "").replace("plain", "baseline")} for row in rows]
    names = dict.fromkeys(row["variant"] for row in rows if row["variant"])
    budget = next((row["budget"] for row in rows if "budget" in row), 0)
    table = by_variant(rows, names, cell)
    return (
        f"Within {format_bytes(budget)}, *batch*: samples per second:\n\n{table}" if table else ""
    )


def offload(rows: Rows) -> str:
    """Returns the rates of copies, and times and bytes with and without offloading."""
    told = []
    copied = {row["variant"]: row for row in rows if row["case"] == "copies" and "ms" in row}
    if copied.keys() >= {"alone", "beside products"}:
        alone, beside = copied["alone"], copied["beside products"]
        told.append(
            f"A copy to the host and back: {alone['bytes_per_second'] / 1e9:.1f} GB/s. Matrix "
            f"products: {alone['ms']:.3g} ms alone, {beside['ms']:.3g} ms beside it."
        )

    def cell(row: Row, _: dict[str, Row]) -> str:
        if "error" in row:
            return "failed"
        host = f", {format_bytes(row['host'])} on the host" if row["host"] else ""
        return f"{row['ms']:.3g} ms, {format_bytes(row['allocated'])}{host}, loss {row['loss']:.9g}"

    others = [row for row in rows if row["case"] != "copies"]
    names = ("baseline", "True", "True, offload", "plan", "plan, offload")
    table = by_variant(others, names, cell)
    return "\n\n".join([*told, table] if table else told)


def tests(rows: Rows) -> str:
    """Returns how many tests passed, by file, and what failed."""
    counted = [row for row in rows if "passed" in row]
    names = ("passed", "failed", "skipped_tests")
    lines = [(row["case"], *(str(row[name]) for name in names)) for row in counted]
    if not lines:
        return ""
    lines.append(("all", *(str(sum(row[name] for row in counted)) for name in names)))
    return markdown_table(("file", "passed", "failed", "skipped"), lines) + left_out(rows)


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=Path, help="files whose parts are taken over")
    parser.add_argument("--to", type=Path, help="writes a page of these files alone, and no rows")
    given = parser.parse_args()
    new = [row for path in given.rows for row in read(path)]
    if given.to:
        given.to.write_text(page(new), "utf-8")
        return
    rows = replaced(read(ROWS), new)
    ROWS.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8")
    PAGE.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
