"""The software accelerator: a device of two indices in host memory, built from `software.cpp`.

A process has one device of this kind (torch's PrivateUse1), and once it is there it is what
`torch.accelerator` names, for good. So only a process of its own loads it: `pytest --device soft`.
Those that it starts load it as vendors' devices are loaded: `import torch` finds its entry point.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "soft"
ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("software.cpp")
BUILD = ROOT / "build" / "accelerator"
# in which order streams run what is queued on them: at once, or as late or as early as they may
ORDERS = ("synchronous", "late", "early", "random")


def missing() -> str | None:
    """Says what keeps the accelerator from being built here; None where nothing does."""
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"there is no C++ compiler {compiler} here"


def built() -> Path:
    """Compiles the accelerator where that was not done before; half a minute, once a torch."""
    content = SOURCE.read_bytes() + torch.__version__.encode()
    library = BUILD / f"software-{hashlib.sha256(content).hexdigest()[:12]}.so"
    if not library.exists():
        # imported late since it looks for CUDA
        from torch.utils import cpp_extension  # noqa: PLC0415

        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        headers = [f"-I{path}" for path in cpp_extension.include_paths()]
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        command = [os.environ.get("CXX", "c++"), "-O0", "-std=c++20", "-fPIC", "-shared"]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(
            [*command, *headers, str(SOURCE), "-o", str(fresh), *folders, *libraries], check=True
        )
        fresh.replace(library)
    return library


def register() -> types.ModuleType:
    """Makes the accelerator a device of this process, `soft`, and returns its module."""
    if hasattr(torch, NAME):
        return getattr(torch, NAME)
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return getattr(torch, NAME)


def offer() -> None:
    """Has processes that this one starts find the accelerator when they import torch."""
    entry = BUILD / "zoo_software-0.dist-info"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-software\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = {__name__}:register\n")
    places = [str(ROOT), str(BUILD), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def _module() -> types.ModuleType:
    """Returns what a device's module has, as `torch.cuda` and `torch.xpu`."""
    found: Any = types.ModuleType(f"torch.{NAME}")
    index_of, statistics = torch.accelerator.current_device_index, torch.accelerator.memory_stats
    generators = tuple(map(torch.ops.zoo_software.default_generator, (0, 1)))

    def is_initialized() -> bool:
        return any(statistics(index)["allocation.all.allocated"] for index in (0, 1))

    def generator(device: Any) -> torch.Generator:
        place = torch.device(device) if isinstance(device, str) else device
        index = place.index if isinstance(place, torch.device) else place
        return generators[index_of() if index is None else index]

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        generator(device).set_state(state)

    def manual_seed_all(seed: int) -> None:
        for one in generators:
            one.manual_seed(seed)

    @contextlib.contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = index_of()
        place = torch.device(NAME, chosen) if isinstance(chosen, int) else torch.device(chosen)
        torch.accelerator.set_device_index(before if place.index is None else place.index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    found.device = device
    found.is_available = lambda: True
    found.is_initialized = is_initialized
    found.default_generators = generators
    found.device_count = lambda: 2
    found.current_device = index_of
    found.set_device = torch.accelerator.set_device_index
    found.Stream = functools.partial(torch.Stream, NAME)
    found.Event = functools.partial(torch.Event, NAME)
    found.stream = lambda stream: stream  # which is a context itself
    found.current_stream = torch.accelerator.current_stream
    found.synchronize = torch.accelerator.synchronize
    found._is_in_bad_fork = lambda: False
    found._lazy_init = lambda: None  # without one torch 2.11 synchronizes no device
    found.manual_seed_all = manual_seed_all
    found.get_rng_state = lambda device=NAME: generator(device).get_state()
    found.set_rng_state = set_rng_state
    found.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    found.get_device_name = lambda device=None: "software accelerator"
    found.set_total_memory = torch.ops.zoo_software.set_total
    found.set_order = lambda order, seed=0: torch.ops.zoo_software.set_order(
        ORDERS.index(order), seed
    )
    return found
