"""A program of torch's CUDA code without a GPU, on the runtime in software of `cuda_runtime.c`.

The allocator, the choice of kernels and what autograd saves are those of the torch that is
installed; kernels do nothing, and cuDNN is off, since it asks the driver itself.
"""

import atexit
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from zoo import _torch

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".c")
BUILD = ROOT / "build" / "cuda_runtime"
# what the runtime's headers include and its wheel lacks: words of a compiler for CUDA
WORDS = """
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDART_CB
#define CUDART_DEVICE
#define __host__
#define __device__
"""
# it answers what this torch asks of a GPU; another may ask for more, and save other tensors
VERSION = "2.14."
# the oldest, of which it answers what captures ask
OLDEST = f"{_torch.OLDEST}."
# what changes the sizes of blocks and workspaces
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


def headers() -> Path:
    """Returns the folder where pip puts the headers of the CUDA runtime that torch is built for."""
    major = str(torch.version.cuda).partition(".")[0]
    return Path(torch.__file__).parents[1] / "nvidia" / f"cu{major}" / "include"


def missing(*others: str) -> str | None:
    """Says why torch's CUDA code cannot run here; None where it can.

    `others` are versions of torch for which a program is known to run, beside `VERSION`.
    """
    if sys.platform != "linux" or torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if not torch.__version__.startswith((VERSION, *others)):
        return f"the runtime in software is for torch {VERSION}*; this is {torch.__version__}"
    if torch.cuda.is_available():
        return "there is a GPU here"
    if not (headers() / "driver_types.h").exists():
        return f"{headers()} has no headers of the CUDA runtime"
    return None if shutil.which("cc") else "there is no C compiler cc here"


@functools.cache
def built() -> Path:
    """Compiles the runtime where that was not done before."""
    content = SOURCE.read_bytes() + torch.__version__.encode()
    library = BUILD / f"runtime-{hashlib.sha256(content).hexdigest()[:12]}.so"
    if not library.exists():
        words = BUILD / "crt" / "host_defines.h"
        words.parent.mkdir(parents=True, exist_ok=True)
        words.write_text(WORDS)
        fresh = library.with_suffix(f".{os.getpid()}")
        # under this name torch looks for the driver
        flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        folders = [f"-I{headers()}", f"-I{BUILD}"]
        subprocess.run(["cc", *flags, *folders, SOURCE, "-o", fresh], check=True)
        fresh.replace(library)
    return library


# forks a process for each request, a line of JSON, since importing torch takes seconds
SERVER = """
import json, os, sys, traceback
import pytest, torch, zoo.api.plan

for line in sys.stdin:
    program, environment, output = json.loads(line)
    if not (child := os.fork()):
        os.environ.update(environment)
        os.dup2(os.open(output, os.O_WRONLY), 1)
        try:
            names = {"__name__": "__main__", "json": json, "torch": torch}
            exec(compile(program, "<program>", "exec"), names)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        # without what torch does where a process ends: threads of autograd may still run
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Starts the process that others are forked from; it ends with this one."""
    variables = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    variables |= {"LD_PRELOAD": str(built()), "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=variables, **pipes)
    # closes the pipe, at whose end the server ends, and waits for it
    atexit.register(server.communicate)
    return server


def run(program: str, **environment: str) -> Any:
    """Runs a program on the device "cuda"; returns what it prints as JSON."""
    server = _server()
    assert server.stdin is not None, "it is a pipe"
    assert server.stdout is not None, "it is a pipe"
    with tempfile.NamedTemporaryFile() as output:
        server.stdin.write(f"{json.dumps([program, environment, output.name])}\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        assert code == "0", f"the program ended with {code or 'its server'}"
        return json.loads(output.read())
