"""A plugin of pytest for `benchmarks/gpu.py`: rows of what passed and failed, and a limit of time.

A file's row is written when its last test is over, that of a failure at once. A file that cannot be
imported since a package is missing is skipped, by that package's name.
"""

import importlib.util
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_rows import Rows


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path)
    parser.addoption("--facts", type=json.loads, default={})
    parser.addoption("--seconds", type=float)
    if importlib.util.find_spec("pytest_timeout") is None:
        # which setup.cfg sets and pytest would not know
        parser.addini("timeout", "nothing: there is no pytest-timeout here")


def pytest_configure(config: pytest.Config) -> None:
    rows = Rows(config.getoption("--rows"), config.getoption("--facts"))
    config.pluginmanager.register(Writer(rows, time.monotonic() + config.getoption("--seconds")))


class Writer:
    """Counts a file's outcomes and writes them when another file's tests begin, or at the end."""

    def __init__(self, rows: Rows, until: float) -> None:
        self.rows, self.until = rows, until
        # files that ran to their end before
        self.known = {row["case"] for row in rows.known() if "passed" in row and "cut" not in row}
        self.file, self.counts = "", Counter[str]()
        self.stopped = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.failed:
            return
        text = str(report.longrepr)
        package = re.search(r"No module named '(\w+)", text)
        told = {"skipped": f"{report.nodeid} needs {package[1]}, which is not installed here"}
        failed = {"error": text.strip().splitlines()[-1][:300]}
        self.rows.write(part="tests", case=report.nodeid, **(told if package else failed))

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known = [item for item in items if item.nodeid.partition("::")[0] in self.known]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item not in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self.file:
            self.flush()
            self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            lines = (crash or str(report.longrepr)).strip().splitlines()
            # of an error in another process the last line says what it was
            told = lines[-1] if "Traceback" in crash else " ".join(lines)
            self.rows.write(part="tests", case=report.nodeid, error=" ".join(told.split())[:300])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if time.monotonic() > self.until:
            self.stopped = f"time was up after {item.nodeid}"
            item.session.shouldstop = self.stopped
        return result

    def pytest_sessionfinish(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Writes the row of the file whose tests ran last."""
        if self.counts:
            outcomes: dict[str, Any] = {name: self.counts[name] for name in ("passed", "failed")}
            outcomes["skipped_tests"] = self.counts["skipped"]
            outcomes |= {"cut": self.stopped} if self.stopped else {}
            self.rows.write(part="tests", case=self.file, **outcomes)
        self.counts = Counter()
