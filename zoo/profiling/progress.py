"""Progress of what takes longer than two seconds, on stderr.

    zoo.largest: ResNet on 48×3×224×224: timing kernels |███       | 31/120 [00:07]

What works says only what it is at; a thread looks at that and shows it, so that a long part is
shown, too. A terminal and a notebook have tqdm's bar, which is gone at the end. A pipe has a line
for each part that is found at work, and so has a terminal without tqdm. ZOO_PROGRESS=0 in the
environment shows nothing. Of many ranks the first one shows its progress; other processes that
`multiprocessing` started show none.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from torch import distributed

# seconds before anything is shown, and between two lines
DELAY = 2.0
# seconds between two states of a bar
INTERVAL = 0.5
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
WITHOUT_COUNT = "{desc}[{elapsed}]"
T = TypeVar("T")


@dataclass
class Part:
    """A part of the work: its name, and what it counts, where it does."""

    name: str
    counted: str = ""
    done: int = 0
    total: int = 0

    @property
    def count(self) -> str:
        """How much is done."""
        return f" {self.done}/{self.total}" if self.counted else ""


class _Local(threading.local):
    """The parts that a thread is at, the outermost first."""

    def __init__(self) -> None:
        self.parts: list[Part] = []


_local = _Local()


@contextlib.contextmanager
def shown(name: str) -> Iterator[None]:
    """Shows the name of what the block does, once the outermost block has taken two seconds.

    Also a decorator.
    """
    parts = _local.parts
    is_outermost = not parts
    parts.append(Part(name))
    try:
        with _shown_by_thread(parts) if is_outermost and is_wanted() else contextlib.nullcontext():
            yield
    finally:
        parts.pop()


def each(counted: str, items: Collection[T]) -> Iterator[T]:
    """Yields items; shows how many of them the innermost `shown` block has done."""
    # elsewhere it counts for nobody
    part = _local.parts[-1] if _local.parts else Part("")
    part.counted, part.total = counted, len(items)
    for part.done, item in enumerate(items):
        yield item
    part.counted = ""


def is_wanted() -> bool:
    """Says whether this process shows progress: the first rank, unless ZOO_PROGRESS=0."""
    if os.environ.get("ZOO_PROGRESS") == "0" or sys.stderr is None:
        return False
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _shown_by_thread(parts: Sequence[Part]) -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(parts, ended, sys.stderr), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(parts: Sequence[Part], ended: threading.Event, file: TextIO) -> None:
    start = time.time()
    if ended.wait(DELAY):
        return
    # a reader may close the pipe
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
        pause, show = _bar(file, start, stack) or (DELAY, _lines(file))
        while True:
            # a copy, since the work goes on
            show([*parts])
            if ended.wait(pause):
                return


def _lines(file: TextIO) -> Callable[[Sequence[Part]], None]:
    """Returns what writes a line for parts that are others than before."""
    latest = ""

    def show(parts: Sequence[Part]) -> None:
        nonlocal latest
        line = _words(parts)
        if line not in ("", latest):
            print(line, file=file, flush=True)
        latest = line

    return show


def _bar(
    file: TextIO, start: float, stack: contextlib.ExitStack
) -> tuple[float, Callable[[Sequence[Part]], None]] | None:
    """Returns a pause and what draws a bar; None for a pipe, and where tqdm is not installed."""
    is_notebook = type(file).__module__.startswith("ipykernel")
    if not (is_notebook or file.isatty()):
        return None
    try:
        # it takes a tenth of a second
        from tqdm.auto import tqdm  # noqa: PLC0415
    except ImportError:
        return None
    # tqdm's own thread, which would go on, looks after bars that nobody draws
    kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    look = {"leave": False, "dynamic_ncols": True, "bar_format": WITHOUT_COUNT}
    bar = stack.enter_context(kind(total=1, file=file, **look))

    def show(parts: Sequence[Part]) -> None:
        last = parts[-1] if parts else Part("")
        bar.bar_format = BAR if last.counted else WITHOUT_COUNT
        if last.total not in (0, bar.total):
            bar.reset(last.total)
        bar.start_t, bar.n = start, last.done
        bar.set_description_str(f"{_words(parts)} ")

    return INTERVAL, show


def _words(parts: Sequence[Part]) -> str:
    """Names the parts; of all but the innermost also how much is done."""
    words = [word for part in parts for word in (part.name, part.counted + part.count) if word]
    if parts and parts[-1].counted:
        words[-1] = parts[-1].counted
    return ": ".join(words)
