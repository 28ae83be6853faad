"""Shows progress on stderr for work that takes longer than two seconds.

    zoo.largest: ResNet on 48×3×224×224: timing kernels |███       | 31/120 [00:07]

Code only names its current part; a thread reads and shows these names, so that a single long part
is shown, too. Terminals and notebooks show tqdm's bar, which disappears at the end. A pipe, or a
terminal without tqdm, gets a line for each part that the thread finds, and others as its count
rises, more and more seldom. ZOO_PROGRESS=0 in the environment turns progress off. Of many ranks
only the first shows progress; processes that `multiprocessing` started show none.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO, TypeVar

from torch import distributed

from zoo.profiling.kept_interrupts import interrupts_kept

# seconds before anything is shown, and between two lines
DELAY = 2.0
# seconds between two updates of a bar
INTERVAL = 0.5
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
WITHOUT_COUNT = "{desc}[{elapsed}]"
T = TypeVar("T")


@dataclass
class WorkPart:
    """A part of the work: its name, and the label and count of its items, if any."""

    name: str
    label: str = ""
    done: int = 0
    total: int = 0


class _Local(threading.local):
    """The nested parts that a thread is in, the outermost first."""

    def __init__(self) -> None:
        self.parts: list[WorkPart] = []


_local = _Local()


@contextlib.contextmanager
def shown(name: str) -> Iterator[None]:
    """Shows the name of a block of code, once the outermost block has taken two seconds.

    Ctrl-C inside of it is not lost (`kept_interrupts`). Also a decorator.
    """
    parts, ended = _local.parts, threading.Event()
    thread = threading.Thread(target=_show, args=(parts, ended, sys.stderr), daemon=True)
    is_shown = not parts and is_wanted()
    parts.append(WorkPart(name))
    try:
        if is_shown:
            thread.start()
        with interrupts_kept():
            yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        parts.pop()


def each(label: str, items: Collection[T]) -> Iterator[T]:
    """Yields items; shows how many are done in the innermost `shown` block, if there is one."""
    part = _local.parts[-1] if _local.parts else WorkPart("")
    part.label, part.total = label, len(items)
    for part.done, item in enumerate(items):
        yield item
    part.label = ""


def is_wanted() -> bool:
    """Returns whether this process shows progress: the first rank, unless ZOO_PROGRESS=0."""
    if os.environ.get("ZOO_PROGRESS") == "0" or sys.stderr is None:
        return False
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"


def _show(parts: Sequence[WorkPart], ended: threading.Event, file: TextIO) -> None:
    start, latest, printed, due, gap = time.time(), "", "", 0.0, DELAY
    if ended.wait(DELAY):
        return
    # the reader may have closed the pipe
    with contextlib.suppress(OSError, ValueError), _bar(file) as bar:
        while True:
            # copies, since the work goes on
            now = [replace(part) for part in [*parts]]
            if bar is not None:
                last = now[-1] if now else WorkPart("")
                bar.bar_format = BAR if last.label else WITHOUT_COUNT
                if last.total not in (0, bar.total):
                    bar.reset(last.total)
                bar.start_t, bar.n = start, last.done
                bar.set_description_str(f"{_words(now)} ")
            # the name of a function alone tells nothing of its work
            elif len(now) > 1 or (now and (now[0].label or "." not in now[0].name)):
                text, moment = _words(now, with_last_count=True), time.monotonic()
                if (is_new := _words(now) != latest) or (text != printed and moment >= due):
                    print(text, file=file, flush=True)
                    gap = DELAY if is_new else 2 * gap
                    printed, due = text, moment + gap
                latest = _words(now)
            if ended.wait(DELAY if bar is None else INTERVAL):
                return


def _bar(file: TextIO) -> Any:
    """Returns tqdm's bar as a context; one of None for a pipe, or if tqdm is not installed."""
    is_notebook = type(file).__module__.startswith("ipykernel")
    if not (is_notebook or file.isatty()):
        return contextlib.nullcontext()
    try:
        # importing it takes a tenth of a second
        from tqdm.auto import tqdm  # noqa: PLC0415
    except ImportError:
        return contextlib.nullcontext()
    # tqdm's monitor thread would outlive the bar
    kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    return kind(total=1, file=file, leave=False, dynamic_ncols=True, bar_format=WITHOUT_COUNT)


def _words(parts: Sequence[WorkPart], *, with_last_count: bool = False) -> str:
    """Joins the names of the parts and their counts; a bar shows the innermost count itself."""
    words: list[str] = []
    for part in parts:
        # a call that makes another of the same name is one part to its reader
        if part.name not in words[-1:]:
            words.append(part.name)
        if part.label:
            words.append(f"{part.label} {part.done}/{part.total}")
    if parts and parts[-1].label and not with_last_count:
        words[-1] = parts[-1].label
    return ": ".join(words)
