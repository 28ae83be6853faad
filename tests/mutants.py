"""Breaks each guard of the engine in turn and sees whether its tests notice: `make mutants`.

A guard is taken out of a copy of the package, and the engine's tests run on the copy until the
first fails. One that none notices is a survivor, and the exit code is then 1.

    python -m tests.mutants                  # all, some minutes
    python -m tests.mutants random hook      # those whose name has one of these words
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PASSED = 0
FAILED = 1


class Mutant(NamedTuple):
    """A guard, and the text of the engine's file that becomes another when it is taken out."""

    guard: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "statistics go to scratch",
        "state.py",
        "registry.update(scratch.statistics_of(registry))",
        "scratch.statistics_of(registry)",
    ),
    Mutant(
        "statistics of norms that reading does not find go to scratch",
        "state.py",
        "module._buffers.update(_noted(scratch_statistics_of(module._buffers), storages))",
        "pass",
    ),
    Mutant(
        "statistics that the function reads are given again",
        "state.py",
        "norm=found.norm and (module not in read or has_lazy_buffers(module)),",
        "norm=found.norm,",
    ),
    Mutant(
        "buffers are what they were",
        "state.py",
        "if buffer.differs:",
        "if False:",
    ),
    Mutant(
        "a buffer that is lost is refused",
        "state.py",
        "if buffer.is_lost:",
        "if False:",
    ),
    Mutant(
        "a small buffer's copy is compared, since writes through .data bump no version",
        "buffers.py",
        "self.moved = not torch.equal(self.copy, self.tensor)",
        "pass",
    ),
    Mutant(
        "large buffers that stay as they are are not copied",
        "buffers.py",
        "if not self.moved:\n                self.copy = None",
        "pass",
    ),
    Mutant(
        "attributes of modules are what they were",
        "state.py",
        "not self.snapshot.holds(module)\n            or not (",
        "not (",
    ),
    Mutant(
        "attributes of objects are what they were",
        "state.py",
        "holders: list[Any] = [*self.variables, *self.objects]",
        "holders: list[Any] = [*self.variables]",
    ),
    Mutant(
        "variables are what they were",
        "state.py",
        "holders: list[Any] = [*self.variables, *self.objects]",
        "holders: list[Any] = [*self.objects]",
    ),
    Mutant(
        "what a second run did to state is undone",
        "state.py",
        "for action in reversed(scratch.undo):\n                action()",
        "pass",
    ),
    Mutant(
        "parameters changed since the forward are refused",
        "state.py",
        "if changed := self._parameters_moved():",
        "if changed := set():",
    ),
    Mutant(
        "requires_grad is that of the forward",
        "state.py",
        "if parameter.requires_grad != flag:",
        "if False:",
    ),
    Mutant(
        "children that were exchanged are those of the forward",
        "state.py",
        "or not _identical(self.children, module._modules)",
        "",
    ),
    Mutant(
        "parameters that the forward writes are copied",
        "state.py",
        "self.written = {key: self.copies.get(key) for key in written}",
        "self.written = {}",
    ),
    Mutant(
        "a parameter that is written to another value is refused",
        "writes.py",
        "if not same_values(parameter, copy):",
        "if False:",
    ),
    Mutant(
        "torch's random stream is given again",
        "randomness.py",
        'Source("torch", torch.get_rng_state, torch.set_rng_state, same_state),',
        "",
    ),
    Mutant(
        "Python's random stream is given again",
        "randomness.py",
        'Source("python", random.getstate, random.setstate, eq),',
        "",
    ),
    Mutant(
        "NumPy's random stream is given again",
        "randomness.py",
        "found.append(_of_numpy(numpy))",
        "pass",
    ),
    Mutant(
        "generators of the function's own are given again",
        "randomness.py",
        "found = [*_ALWAYS, *map(_of, generators)]",
        "found = [*_ALWAYS]",
    ),
    Mutant(
        "random streams go on after a second run as if there had been none",
        "randomness.py",
        "for source, state in now:\n            source.write(state)",
        "pass",
    ),
    Mutant(
        "autocast is that of the forward",
        "ambient.py",
        "if autocast.enabled or torch.is_autocast_enabled(autocast.device_type):",
        "if False:",
    ),
    Mutant(
        "the default device is that of the forward",
        "ambient.py",
        "if torch.get_default_device() != self.device:",
        "if False:",
    ),
    Mutant(
        "switches are those of the forward",
        "ambient.py",
        "if now != value:",
        "if False:",
    ),
    Mutant(
        "switches that a stopped run left are put back",
        "ambient.py",
        "stack.callback(_reset, switch, now)",
        "pass",
    ),
    Mutant(
        "hooks that only look fire once",
        "hooks.py",
        "if (place, number) in self.acting.hooks\n",
        "if True\n",
    ),
    Mutant(
        "hooks that act fire again",
        "hooks.py",
        "if (place, number) in self.acting.hooks\n",
        "if False\n",
    ),
    Mutant(
        "a hook that writes what the forward reads acts",
        "acting.py",
        "self.hooks |= self._writers()",
        "pass",
    ),
    Mutant(
        "hooks for all modules that only look fire once",
        "global_hooks.py",
        "return hook(*args) if number in self.acting else None",
        "return hook(*args)",
    ),
    Mutant(
        "hooks that a function registers on its tensors are registered once",
        "state.py",
        ", no_new_hooks(self._tensors()):",
        ":",
    ),
    Mutant(
        "an input changed since the forward is refused",
        "recompute.py",
        "if _version(value) != version:",
        "if False:",
    ),
    Mutant(
        "an input that the function writes to another value is refused",
        "recompute.py",
        "if not same_values(values[number], self.values[number]):",
        "if False:",
    ),
    Mutant(
        "a saved parameter changed since the forward is refused",
        "recompute.py",
        "if version_of(self.tensor) != self.version:",
        "if False:",
    ),
    Mutant(
        "a second run on other parameters is refused",
        "recompute.py",
        "if not same and not same_values(tensor, self.tensor):",
        "if False:",
    ),
    Mutant(
        "a saved tensor of another shape is refused",
        "recompute.py",
        "if kind != self.kind:",
        "if False:",
    ),
    Mutant(
        "a saved tensor of other numbers is refused",
        "recompute.py",
        "if not same_numbers(self.sample, numbers):",
        "if False:",
    ),
    Mutant(
        "a second run that saves too little is refused",
        "recompute.py",
        "        if self.open:\n            raise RecomputeError(",
        "        if False:\n            raise RecomputeError(",
    ),
    Mutant(
        "a second run stops as soon as it may",
        "recompute.py",
        "if not self.target.state.must_end():\n            raise _Full",
        "pass",
    ),
    Mutant(
        "it does not stop before the kernel has written what it saved",
        "recompute.py",
        "self.unsettled = torch._C._autograd._get_sequence_nr() - 1",
        "pass",
    ),
    Mutant(
        "what a stopped backward left is forgotten",
        "recompute.py",
        "_at_end_of_backward(weakref.WeakMethod(self.forget))",
        "pass",
    ),
    Mutant(
        "two threads of a backward do not run a segment at once",
        "recompute.py",
        "self.lock = threading.RLock()",
        "self.lock = contextlib.nullcontext()",
    ),
    Mutant(
        "remembered values are given again",
        "recompute.py",
        "_called(function) if _thread.replay is None else _thread.replay.remembered()",
        "_called(function)",
    ),
    Mutant(
        "the recomputing flag ends with an exception",
        "recompute.py",
        "            _thread.recordings, _thread.replay = earlier\n        if self.open",
        "            pass\n        if self.open",
    ),
    Mutant(
        "iterators go on from where they were",
        "iterators.py",
        "return Position(lambda now: now.__length_hint__(), lambda: copy.copy(kept), value)",
        "return None",
    ),
    Mutant(
        "iterators that cannot be copied are refused",
        "iterators.py",
        "return Position(lambda now: None, lambda: _Spent(value), value)",
        "return None",
    ),
    Mutant(
        "FSDP's whole parameters are taken apart where no backward does",
        "sharded.py",
        "module.reshard()",
        "pass",
    ),
    Mutant(
        "the older FSDP is refused",
        "sharded.py",
        "if isinstance(module, fsdp.FullyShardedDataParallel):",
        "if False:",
    ),
)


def main(words: list[str]) -> int:
    """Runs the mutants that are asked for; returns 1 when one survives."""
    chosen = [m for m in MUTANTS if not words or any(word in m.guard for word in words)]
    survivors = []
    for mutant in chosen:
        start = time.perf_counter()
        found = _found_by(mutant)
        survivors += [] if found else [mutant.guard]
        seconds = time.perf_counter() - start
        print(f"{mutant.guard}: {found or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} guards taken out, {len(chosen) - len(survivors)} noticed")
    return int(bool(survivors))


def _found_by(mutant: Mutant) -> str:
    """Returns the test that notices a mutant, '' if none does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("zoo", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "setup.cfg", folder)
        _change(folder / "zoo" / "engine" / mutant.file, mutant)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [*command, "tests/engine"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": name},
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"{mutant.guard}: pytest ended with {run.returncode}\n{run.stdout}")
    # of tests in several processes, what these share fails where an assertion ends one of them
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split()[1] if lines else ""


def _change(path: Path, mutant: Mutant) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.guard}: its text is not once in {mutant.file}")
    if "contextlib" in mutant.new and "import contextlib" not in text:
        text = text.replace("import sys\n", "import contextlib\nimport sys\n", 1)
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
