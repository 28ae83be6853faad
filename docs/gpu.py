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

[Index](README.md)

Set `PYTORCH_ALLOC_CONF=expandable_segments:True` before the program starts, since the allocator
reserves more than it hands out. Capture the step in a [CUDA graph](cuda-graphs.md) where batches
are small, since Python then takes longer than the kernels. Run `zoo.verify` once, since some
kernels do not repeat their own bits.

All numbers are of one run (n = 1) of a few steps, with random inputs. Trainings of hours and
several GPUs together were not tried. *True* is `checkpoint=True`, *switch*
the library's own checkpointing, a *plan* is for the share of the baseline's peak behind its number.
`make gpu DEVICE=cuda` measures, [gpu.jsonl](gpu.jsonl) holds every row with sizes and versions, and
`make gpu-page` writes this page.

## What a budget counts

A budget bounds `torch.cuda.max_memory_allocated` of a whole training step. It counts

- tensors, in blocks of 512 bytes, and the rests of large blocks that nothing else can use;
- workspaces of kernels, as measured on the device, and two of cuBLAS (32 MiB each on Hopper,
  8.1 MiB elsewhere; `CUBLAS_WORKSPACE_CONFIG` changes that).

It does not count

- gaps: [reserved memory](#reserved-memory) that no block uses;
- the CUDA context, loaded kernels and NCCL, which `nvidia-smi` shows;
- what `torch.backends.cudnn.benchmark = True` tries in the first calls.
"""
WITHOUT = """\
## Planning without the GPU

Plan on the GPU, without `device=`, before you train there. `device="a100"` counts kernels of the
CPU where the model is on the CPU or the meta device. Its prediction is too high for attention with
dropout (14 times the saved bytes and more), for dropout and for RMSNorm. It is too low for
convolutions (no workspaces), for cuDNN's LSTM and BatchNorm (no reserves), and for [operators whose
results are kept](exactness.md#kernels-that-do-not-repeat-themselves). Where CUDA calls another
number of kernels, as for attention with dropout, a report goes block by block, with a warning, and
a bare `zoo.Plan` raises `PlanError`. `python -m tests.profiling.saved_on_cuda` prints what each
operator saves.
"""
EXACT = """\
Compared bit for bit with a baseline: losses, gradients, parameters, buffers and random state after
three steps. *Deterministic* is `torch.use_deterministic_algorithms(True)`.
"""
SPEED = """\
Milliseconds of an eager training step (median of 7), then allocated/reserved GiB at their peaks;
reserved includes what earlier steps left. With small batches the GPU waits for Python.
"""
BUDGETS = """\
Plans for a share of the baseline's peak:
"""
RESERVED = """\
What runs out is what the allocator has *reserved* (`torch.cuda.max_memory_reserved`), in segments
with gaps between the blocks in use. Expandable segments close most gaps. `zoo.track` and the
comparison show reserved bytes beside allocated ones.
"""
GRAPHS = """\
Milliseconds of a training step, eager→captured. A script captured these;
`make gpu PART=graphs` measures [`zoo.make_graphed_step`](cuda-graphs.md), which no GPU has run yet.
ResNet-1001 is in float32 here, as its 18.4 GiB show; plans kept the dropouts of GPT-2.
"""
SAME = """\
After four replays with four new batches, beside the eager baseline:
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
TESTS = "`make test-device DEVICE=cuda`:\n"


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
        ("speed, reserved", "Reserved memory", RESERVED, reserved),
        ("speed", "Time and memory", SPEED, speed),
        ("graphs", "CUDA graphs", GRAPHS, graphs),
        ("graphs, graphs exact", "The same bits in a graph", SAME, exactness),
        ("budgets", "Budgets", BUDGETS, budgets),
        ("families", "Exactness", EXACT, exactness),
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
            if row["part"] in names.split(", "):
                groups.setdefault(tuple(str(row.get(name)) for name in shared), []).append(row)
        shown = [(caption(group, shared), table(group)) for group in groups.values()]
        if any(made for _, made in shown):
            text += [f"## {title}", about]
            text += [part for pair in shown if pair[1] for part in pair]
    text.append(WITHOUT)
    return "\n\n".join(part.strip() for part in text) + "\n"


def caption(rows: Rows, shared: Iterable[str]) -> str:
    """Returns what all rows of a table share, in a sentence."""
    row = rows[0]
    parts = [f"One {row['machine']}", f"torch {row['torch']}"]
    parts += [f"commit {row['commit']}", f"n = {row['n']} run"]
    if "conf" in shared:
        conf = row.get("conf")
        expandable = conf == "expandable_segments:True"
        parts.append("expandable segments" if expandable else conf or "the allocator's defaults")
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
    """Returns in sentences which ways leave the bits of the baseline."""
    of_cases = cases([row for row in rows if row.keys() & {"differing", "repeats"}])
    found = {case: variants for (case, *_), variants in of_cases.items()}
    repeats = {
        case: variants.get("baseline again", {}).get("repeats", True)
        for case, variants in found.items()
    }
    told = f"Compared: {'; '.join(case for case in found if repeats[case])}."
    if others := [case for case in found if not repeats[case]]:
        told += f" Not {'; '.join(others)}, whose baseline does not repeat its own bits."
    names = dict.fromkeys(row["variant"] for row in rows if "differing" in row)
    lines: list[str] = []
    for name in (name for name in names if name != "baseline again"):
        of_way = {case: variants[name] for case, variants in found.items() if name in variants}
        compared = {case: row for case, row in of_way.items() if repeats[case] and "of" in row}
        differ = {case: row for case, row in compared.items() if row["differing"]}
        line = f"- *{name}*: equal in {len(compared) - len(differ)} of {len(compared)}"
        for case, row in differ.items():
            line += f"; {case}: {row['differing']} of {row['of']} tensors differ"
        lines.append(f"{line}.")
    text = "\n\n".join(filter(None, [told if found else "", "\n".join(lines)]))
    return (text + left_out(rows)).strip()


def speed(rows: Rows) -> str:
    """Returns the times and peaks of each way."""

    def cell(row: Row, _: dict[str, Row]) -> str:
        if "error" in row:
            return "failed"
        if row.get("replays") == 0:
            return NO_GRAPH
        share = f", {row['share']:g}" if "share" in row else ""
        sizes = [digits(row[name] / 2**30) for name in ("allocated", "reserved") if name in row]
        return f"{digits(row['ms'])}, {'/'.join(sizes)}{share}"

    names = ("baseline", "switch", "blocks", "True", "True, CUDA graph")
    names += ("True, optimizer in the backward", "plan")
    return by_variant(rows, names, cell).replace("| plan ", "| plan, its share ")


def budgets(rows: Rows) -> str:
    """Returns in sentences how many plans kept to what was asked for, and which did not."""
    taken = [row for row in rows if "allocated" in row]
    if not taken:
        return left_out(rows).strip()
    shares = [row["share"] for row in taken]
    over = {id(row): row["allocated"] / row["asked"] - 1 for row in taken}
    off = max(abs(row["predicted"] / row["allocated"] - 1) for row in taken)
    kept = [row for row in taken if over[id(row)] <= 0]
    models = "; ".join(dict.fromkeys(row["case"] for row in taken))
    text = (
        f"{len(kept)} of {len(taken)} plans for shares of {min(shares):g} to {max(shares):g} kept "
        f"to them. Predicted and taken differ by at most {off:.2%}. Models: {models}."
    )
    for row in taken:
        if row not in kept:
            text += f" {row['case']} at {row['share']:g} took {over[id(row)]:.2%} more than asked."
    return text + left_out(rows)


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
    """Returns the times of eager and of captured steps."""

    def cell(row: Row, _: dict[str, Row]) -> str:
        if "graph_ms" not in row:
            return "failed"
        eager = f"{digits(row['eager_ms'])}→" if row.get("eager_ms") is not None else ""
        if row.get("replays") == 0:
            return f"{eager}{NO_GRAPH}"
        share = f", {row['share']:g}" if "share" in row else ""
        differs = f", {row['differing']} of {row['of']} differ" if row.get("differing") else ""
        return f"{eager}{digits(row['graph_ms'])}{share}{differs}"

    return by_variant(rows, ("baseline", "switch", "True", "plan"), cell)


def digits(number: float) -> str:
    """Returns three digits of a number, and no exponent."""
    return f"{number:#.3g}" if number < 99.95 else f"{number:.0f}"


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
    """Returns how many tests passed, and what failed."""
    counted = [row for row in rows if "passed" in row]
    if not counted:
        return ""
    passed, failed, skipped = (
        sum(row[name] for row in counted) for name in ("passed", "failed", "skipped_tests")
    )
    files = "; ".join(row["case"] for row in counted)
    return f"{passed} passed, {failed} failed, {skipped} skipped: {files}.{left_out(rows)}"


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
