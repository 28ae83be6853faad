"""The environment of a measurement, without which a number cannot be compared with another."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from zoo.engine.devices import name_of, uuid_of
from zoo.version import __version__

CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")  # kHz


def environment(device: str) -> dict[str, str | int | float | None]:
    """Describes versions, code, device, threads, clock and load; unknown values are None."""
    processor = proc_entry("cpuinfo", "model name") or platform.processor() or platform.machine()
    return {
        "zoo": __version__,
        "commit": commit(Path(__file__).parents[1]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": name_of(device) or processor,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "clock_mhz": clock(device),
        # runnable processes in the last minute: more than `threads` means that others were busy
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


@cache
def commit(folder: Path) -> str | None:
    """Returns the commit of a folder's files, with '+changes' if they differ from it.

    None if git does not track them, as in an installed package.
    """
    git = ("git", "-C", str(folder))
    if not _output(*git, "ls-files", "."):
        return None
    changed = "+changes" if _output(*git, "status", "--porcelain", ".") else ""
    return _output(*git, "rev-parse", "--short=12", "HEAD") + changed


def clock(device: str) -> float | None:
    """Returns the current clock of an NVIDIA GPU or of the first core, in MHz; None if unknown."""
    if device != "cpu":
        # nvidia-smi counts all GPUs, torch only those in CUDA_VISIBLE_DEVICES
        query = ("--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
        text = _output("nvidia-smi", *query, f"--id=GPU-{uuid_of(device)}")
    elif CLOCK.is_file():
        return float(CLOCK.read_text()) / 1000
    else:
        text = proc_entry("cpuinfo", "cpu MHz")
    try:
        return float(text)
    except ValueError:
        return None


def proc_entry(file: str, name: str) -> str:
    """Returns the first entry of a name in a file of Linux's /proc; '' if there is none."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.is_file() else []
    entries = (line.removeprefix(name) for line in lines if line.startswith(name))
    return next(entries, "").strip(" \t:")


def _output(*command: str) -> str:
    """Returns the output of a command; '' if the command is missing or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()
