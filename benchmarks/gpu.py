"""Measures on a GPU what docs/gpu.md shows, in parts of minutes, a row as soon as it is known.

    python benchmarks/gpu.py --device cuda speed budgets      # or make gpu DEVICE=cuda PART=speed
    python benchmarks/gpu.py --device soft                    # all parts, small, in software

The parts are tests, families, budgets, speed, graphs, batches and offload (`gpu_parts.py`). A part
that has taken `--seconds` stops, and the same command goes on with what has no row yet. Each case
runs in a process of its own; what fails there is a row, too. `python docs/gpu.py ROWS` takes the
rows over.

It needs torch, einops and NumPy; the tests pytest, the other parts timm, torchvision and
transformers. Where PYTORCH_ALLOC_CONF is not set, the allocator's segments are expandable.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_rows import Job, Rows, key_of

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "families", "budgets", "speed", "graphs", "batches", "offload")
SOFTWARE, CONF = "soft", "PYTORCH_ALLOC_CONF"
NEEDED = {
    "": ("torch", "einops", "numpy"),
    "tests": ("pytest",),
    **dict.fromkeys(PARTS[1:], ("timm", "torchvision", "transformers")),
}
# a case is not begun with fewer seconds left; a probe of the device takes at most so many
LEAST, PATIENCE = 8.0, 120.0
# what pytest ends with where it could not begin: an error inside, wrong options
UNUSABLE = (3, 4)
Function = Callable[..., None]


def main() -> None:
    """Checks what is here, then runs the parts."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--device", default=SOFTWARE, help="cuda, xpu, ...; default: in software")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each part")
    parser.add_argument("--rows", type=Path, help="default: build/gpu-DEVICE.jsonl")
    parser.add_argument("--commit", help="of this code; default: what git says")
    parser.add_argument("--tests", default="tests/accelerator", help="files for the part tests")
    parser.add_argument("--fresh", action="store_true", help="measure again what has rows")
    given = parser.parse_args()
    parts = given.parts or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if fault := next(lacking(parts), None):
        sys.exit(fault)
    if given.device != SOFTWARE and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(CONF, "expandable_segments:True")
    # so that torch, asked whether there is a GPU, leaves CUDA to the processes that are forked
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    method, facts = device_facts(given.device)
    facts |= {"commit": given.commit or described()}
    path = given.rows or ROOT / "build" / f"gpu-{given.device}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if given.fresh:
        path.unlink(missing_ok=True)
    rows = Rows(path, facts)
    for number, part in enumerate(parts):
        # what imports took counts for the first part
        began = time.monotonic() if number else started
        run = Run(rows, given.device, method, began + given.seconds)
        run.tests(given.tests.split()) if part == "tests" else run.part(part)
    print(f"rows are in {path}; `python docs/gpu.py {path}` takes them over", file=sys.stderr)
    sys.exit(any("error" in row or row.get("failed") for row in rows.latest()))


def lacking(parts: Iterable[str]) -> Iterator[str]:
    """Yields in a sentence each what is missing here."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the one given may be older
        yield f"zoo needs Python 3.11 or later; this is {sys.version.split()[0]}"
    for part in ("", *parts):
        for name in NEEDED[part]:
            if importlib.util.find_spec(name) is None:
                who = f"the part {part}" if part else "zoo"
                yield f"{who} needs {name}, which is not installed for {sys.executable}"
    (least,) = re.findall(r"^ *torch>=(.+)$", (ROOT / "setup.cfg").read_text("utf-8"), re.M)
    here = importlib.metadata.version("torch")
    if numbers(here) < numbers(least):
        yield f"zoo needs torch {least} or later; {here} is installed for {sys.executable}"


def numbers(version: str) -> list[int]:
    """Returns the numbers of a release: of 2.13.0a0+x, too, which counts as 2.13."""
    release = re.match(r"[\d.]*\d", version)
    return [int(part) for part in release[0].split(".")[:2]] if release else []


def described() -> str:
    """Returns what git calls this commit, with '+changes' where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def device_facts(kind: str) -> tuple[str, dict[str, Any]]:
    """Returns how processes start that use a device, and its name, versions and n; or exits."""
    if kind == SOFTWARE:
        software = importlib.import_module("tests.accelerator.software")
        if (fault := software.missing()) is not None:
            print(f"nothing is measured on {kind}: {fault}")
            sys.exit(0)
        software.register()
        software.offer()
    reasons = {}
    # a fork shares what was imported; where a library of those uses the device, it cannot be forked
    for method in ("fork", "spawn"):
        receiver, sender = multiprocessing.get_context(method).Pipe(duplex=False)
        child = start(method, probe, kind, sender)
        sender.close()
        found = {"reason": f"it did not answer in {PATIENCE:g} s"}
        if receiver.poll(PATIENCE):
            found = receiver.recv()
        child.kill()
        child.join()
        if "reason" not in found:
            return method, found
        reasons[method] = found["reason"]
    sys.exit(
        f"nothing is measured: there is no device {kind!r} that works here "
        f"({reasons['spawn']}); --device {SOFTWARE} measures in software"
    )


def allocator_settings() -> str:
    return os.environ.get(CONF, os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def start(method: str, function: Function, *given: Any) -> Any:
    child: Any = multiprocessing.get_context(method).Process(target=function, args=given)
    child.start()
    return child


def probe(kind: str, sender: Any) -> None:
    """Sends the facts of a device; runs in a process of its own."""
    import torch

    try:
        torch.ones(1, device=kind).sum().item()
        if kind == "cpu":
            raise ValueError("the CPU has no memory statistics of its own")
        name = torch.get_device_module(kind).get_device_name()
        facts = {"machine": name, "torch": torch.__version__, "n": 1}
        if kind == "cuda":
            facts |= {"cudnn": torch.backends.cudnn.version()}
        sender.send(facts)
    except Exception as error:
        sender.send({"reason": str(error).strip().partition("\n")[0].rstrip(".")})


@dataclass
class Run:
    """A part on a device, until a moment."""

    rows: Rows
    device: str
    method: str
    until: float

    def part(self, part: str) -> None:
        """Runs the jobs of a part one after the other."""
        parts = importlib.import_module("gpu_parts")
        small = self.device == SOFTWARE
        waiting = list(parts.jobs(part, self.device, allocator_settings(), small=small))
        while waiting:
            job = waiting.pop(0)
            if reason := self.reason_to_skip(job):
                self.rows.write(part=part, case=job.case, skipped=reason, conf=job.conf)
                continue
            left = self.without_known(job)
            if left.variants and not self.done(parts.measure, left):
                names = ", ".join(dict.fromkeys([job.case, *(other.case for other in waiting)]))
                told = f"# {part}: time is up; the same command goes on with {names}"
                print(told, file=sys.stderr, flush=True)
                return
            if part == "families" and not job.deterministic and self.differs(job):
                waiting.append(replace(job, deterministic=True))

    def reason_to_skip(self, job: Job) -> str:
        """Returns in a sentence why a case is left out here; '' if it is not."""
        for name in job.needs:
            if importlib.util.find_spec(name) is None:
                return f"{job.case} needs {name}, which is not installed here"
        if job.only_on and self.device not in job.only_on:
            return f"{job.case} has kernels for {' and '.join(job.only_on)} only"
        return ""

    def done(self, function: Function, job: Job) -> bool:
        """Runs a job in a process; False where no time was left for it."""
        left = self.until - time.monotonic()
        if left < LEAST:
            return False
        child = start(self.method, function, job, self.rows.write)
        child.join(None if left == float("inf") else left)
        if child.is_alive():
            child.kill()
            child.join()
            return False
        if child.exitcode:
            reason = f"its process ended with code {child.exitcode}"
            self.rows.write(part=job.part, case=job.case, error=reason, conf=job.conf)
        return True

    def without_known(self, job: Job) -> Job:
        """Returns a job with the variants that have no row yet; families compare all or none."""
        known = {key_of(row) for row in self.rows.known()}
        left = [name for name in job.variants if job.key(name) not in known]
        left = list(job.variants) if left and job.part == "families" else left
        return replace(job, variants=tuple(left))

    def differs(self, job: Job) -> bool:
        """Returns whether the baseline of a family did not repeat its own numbers."""
        key = job.key("baseline again")
        return any(row.get("differing") for row in self.rows.known() if key_of(row) == key)

    def tests(self, files: list[str]) -> None:
        """Runs the tests, which write a row for each file and each failure (`gpu_tests.py`)."""
        left = self.until - time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "gpu_tests", "-q"]
        command += ["--device", self.device, "--continue-on-collection-errors"]
        facts = json.dumps(self.rows.facts | {"conf": allocator_settings()})
        command += ["--rows", str(self.rows.path.absolute()), "--facts", facts]
        command += ["--seconds", str(left)]
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        pytest = subprocess.Popen([*command, *files], cwd=ROOT, env=env)
        try:
            # it stops by itself, unless a test hangs
            pytest.wait(None if left == float("inf") else left + LEAST)
        except subprocess.TimeoutExpired:
            pytest.kill()
            pytest.wait()
            reason = f"a test did not end within {left:.0f} s of the part"
            self.rows.write(part="tests", case="all", error=reason)
            return
        if pytest.returncode in UNUSABLE:
            reason = f"pytest ended with code {pytest.returncode}, and printed why"
            self.rows.write(part="tests", case="all", error=reason)


if __name__ == "__main__":
    main()
