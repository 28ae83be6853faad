"""Where a result was measured: without it a number cannot be compared with another."""

import platform
from pathlib import Path

import torch

from zoo.version import __version__


def environment(device: str) -> dict[str, str | int]:
    """Describes versions, device and threads of this process."""
    return {
        "zoo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def device_name(device: str) -> str:
    """Names the GPU or the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
