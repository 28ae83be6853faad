"""Breaks each guard of the engine in turn and sees whether its tests notice: `make mutants`.

A guard is taken out of a copy of the package, and tests run on the copy until the first fails: the
files that hold the guard, then all of the engine's. One that none notices is a survivor, and the
exit code is then 1.

    python -m tests.mutants                    # all, about an hour on one core
    python -m tests.mutants random version     # those whose name has one of these words
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ENGINE = Path("tests/engine")
PASSED, FAILED = 0, 1


class Mutant(NamedTuple):
    """A guard, the text of the engine's file that becomes another, and the tests that hold it."""

    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "a write by code that no mode sees is noticed by the version",
        "recording.py",
        "if value.counter == counter and (value.blank is None or is_still(tensor, value.blank)):",
        "if value.blank is None or is_still(tensor, value.blank):",
        (
            "test_saved.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "memory that foreign code filled is not taken for what made it",
        "recording.py",
        "if value.counter == counter and (value.blank is None or is_still(tensor, value.blank)):",
        "if value.counter == counter:",
        ("test_fingerprint.py",),
    ),
    Mutant(
        "a storage from outside is copied before a kernel writes it",
        "recording.py",
        "            if reader.is_read and reader.copy is None and is_plain(reader.tensor):\n",
        "            if False:\n",
        (
            "pitfalls/test_state.py",
            "pitfalls/test_statistics.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "after a write a storage from outside is another version",
        "recording.py",
        "            self.known.pop(id(reader.tensor), None)\n"
        "            reader = reader.earlier\n"
        "        self.storages[id(storage)] = weakref.ref(storage), None\n",
        "            reader = reader.earlier\n",
        (
            "pitfalls/test_state.py",
            "pitfalls/test_statistics.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "a small tensor from outside is copied when it is read",
        "recording.py",
        "if tensor.is_leaf and not tensor.requires_grad and is_small(tensor):",
        "if False:",
        ("test_recording.py",),
    ),
    Mutant(
        "a big tensor from outside is not copied",
        "recording.py",
        "return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)",
        "return is_plain(tensor)",
        ("test_recording.py",),
    ),
    Mutant(
        "a frozen weight is not copied",
        "recording.py",
        "    if isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter):\n"
        "        return False\n",
        "",
        ("test_recording.py",),
    ),
    Mutant(
        "versions of what comes from outside are checked",
        "recording.py",
        "        check_version(self.tensor, self.version)\n",
        "",
        (
            "test_saved.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "another storage in the place of one that was freed is another",
        "recording.py",
        "value = known[1] if known is not None and known[0]() is storage else None",
        "value = known[1] if known is not None else None",
        ("test_recording.py",),
    ),
    Mutant(
        "a norm that is replayed writes no statistics",
        "recording.py",
        "given = self._without_statistics(args) if is_norm else args",
        "given = args",
        (
            "test_schedule.py",
            "pitfalls/test_statistics.py",
        ),
    ),
    Mutant(
        "statistics are copied before a norm writes them",
        "recording.py",
        "if tensor is not None:\n                self.recording.before_write(tensor)",
        "pass",
        ("pitfalls/test_statistics.py",),
    ),
    Mutant(
        "a norm in evaluation reads its statistics",
        "recording.py",
        "is_norm = effects.norm and args[TRAINING]",
        "is_norm = effects.norm",
        (
            "test_schedule.py",
            "pitfalls/test_statistics.py",
        ),
    ),
    Mutant(
        "kernels of lists count versions",
        "recording.py",
        "            # kernels of lists count no version below a mode\n"
        "            torch.autograd.graph.increment_version(written)",
        "            pass",
        ("test_saved.py",),
    ),
    Mutant(
        "kernels of lists that write what comes from outside count versions",
        "recording.py",
        "        out = func(*args, **kwargs)\n"
        "        if effects.lists:\n"
        "            torch.autograd.graph.increment_version(written)\n"
        "        return out\n"
        "\n"
        "    def _run_opaque",
        "        return func(*args, **kwargs)\n\n    def _run_opaque",
        (
            "test_saved.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "what an unknown kernel writes comes from outside",
        "recording.py",
        "        for tensor in written:\n"
        "            self.recording.forget(tensor)\n"
        "        return out",
        "        return out",
        ("test_recording.py",),
    ),
    Mutant(
        "what is resized comes from outside",
        "recording.py",
        "            self.recording.forget(args[0])\n        return func(*args, **kwargs)",
        "            pass\n        return func(*args, **kwargs)",
        (
            "test_recording.py",
            "test_operators.py",
        ),
    ),
    Mutant(
        "a tensor that is written and read by one kernel is both",
        "recording.py",
        "targets.pop(id(value), None)",
        "targets.get(id(value))",
        (
            "test_recording.py",
            "test_saved.py",
        ),
    ),
    Mutant(
        "what is saved is told before it is written",
        "recording.py",
        "                handle.before_write()\n",
        "                pass\n",
        ("test_saved.py",),
    ),
    Mutant(
        "a replay inside of a forward is not recorded",
        "recording.py",
        "if effects.ignored or recording.replaying:",
        "if effects.ignored:",
        (
            "test_replay.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a tensor of a class of its own is taken apart",
        "recording.py",
        "            # its own dispatch takes it apart, and the parts come here again\n"
        "            return NotImplemented",
        "            pass",
        (
            "pitfalls/test_layouts.py",
            "pitfalls/test_distributed.py",
        ),
    ),
    Mutant(
        "what is outside lets go of its graph",
        "recording.py",
        "            found.cut()\n",
        "            pass\n",
        (
            "test_recording.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "what is outside and written by a forward is freed with it",
        "recording.py",
        "        self.outside.clear()\n        self.known.clear()\n",
        "",
        (
            "test_recording.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a kernel is told whether its argument requires a gradient",
        "recording.py",
        "        if value.trains is trains:\n"
        "            return value\n"
        "        if value.trains is None:\n"
        "            value.trains = trains\n"
        "            return value\n",
        "        return value\n",
        (
            "test_recording.py",
            "pitfalls",
        ),
    ),
    Mutant(
        "a block that is compiled stays compiled",
        "recording.py",
        "    keeps_compiled = True",
        "    keeps_compiled = False",
        (
            "test_recording.py",
            "pitfalls/test_compile.py",
        ),
    ),
    Mutant(
        "memory without content is made anew without reading a model of it",
        "recording.py",
        "        if effects.empty:\n"
        "            return self._run_empty(func, effects, args, kwargs)\n",
        "",
        ("test_replay.py",),
    ),
    Mutant(
        "a conjugated tensor is conjugated in its replay",
        "recording.py",
        "            found = torch._conj(found)",
        "            pass",
        (
            "test_recording.py",
            "test_operators.py",
        ),
    ),
    Mutant(
        "a negated tensor is negated in its replay",
        "recording.py",
        "return torch._neg_view(found) if self.negative else found",
        "return found",
        (
            "test_recording.py",
            "test_operators.py",
        ),
    ),
    Mutant(
        "a saved tensor shares the version of what was saved",
        "recording.py",
        "    with (\n"
        "        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),\n"
        "        torch._C._DisableTorchDispatch(),\n"
        "    ):\n"
        "        found = tensor.detach()",
        "    found = tensor.detach()",
        ("test_saved.py",),
    ),
    Mutant(
        "a view is made on the storage of its base in a replay",
        "recording.py",
        "            value.base = None\n",
        "            pass\n",
        (
            "test_recording.py",
            "test_operators.py",
        ),
    ),
    Mutant(
        "a tensor that is kept was not written since",
        "recording.py",
        "        check_version(self.tensor, self.version)\n        return self.tensor",
        "        return self.tensor",
        (
            "test_saved.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a tensor that is kept does not hold its own graph",
        "recording.py",
        "            self.tensor = detached(self.tensor).requires_grad_(self.tensor.requires_grad)",
        "            pass",
        (
            "test_saved.py",
            "test_recompute.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "a tensor whose object is gone was not written since",
        "saved.py",
        "        if self.is_written:\n",
        "        if False:\n",
        ("test_saved.py",),
    ),
    Mutant(
        "a tensor that is replayed was not written since",
        "saved.py",
        "            check_version(self.counter, self.version)\n",
        "            pass\n",
        ("test_saved.py",),
    ),
    Mutant(
        "a replay has the numbers of the forward",
        "saved.py",
        "if self.fingerprint is not None and not self.fingerprint.matches(tensor):",
        "if False:",
        ("test_fingerprint.py",),
    ),
    Mutant(
        "what foreign code wrote after it was saved is noticed",
        "saved.py",
        "            self.fingerprint = fingerprint(original)\n        value",
        "            pass\n        value",
        ("test_fingerprint.py",),
    ),
    Mutant(
        "a write that counts no version is what the backward reads",
        "saved.py",
        "        self.latest, self.fingerprint = value, None",
        "        pass",
        (
            "test_saved.py",
            "pitfalls/test_changes.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a nested segment is given what it starts from",
        "saved.py",
        "part.given = {value: _made(value) for value in values}",
        "part.given = {}",
        (
            "test_schedule.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "the segments around a nested one are replayed before it",
        "saved.py",
        "    for part in reversed(waiting):\n        _fill(part)",
        "    _fill(segment)",
        (
            "test_schedule.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a segment makes what the segments inside of it start from",
        "saved.py",
        "            found |= given_to(part)\n    return found",
        "            pass\n    return found",
        (
            "test_schedule.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a retained graph holds no replayed tensors",
        "saved.py",
        "            elif _is_graph_kept():\n                self.tensor = None",
        "",
        (
            "test_recompute.py",
            "test_replay.py",
        ),
    ),
    Mutant(
        "what a nested segment was given is freed",
        "saved.py",
        "        if not _is_graph_kept():\n            segment.given = None",
        "        pass",
        (
            "test_recording.py",
            "test_replay.py",
            "test_schedule.py",
        ),
    ),
    Mutant(
        "a nested segment of a retained graph keeps what it was given",
        "saved.py",
        "        if not _is_graph_kept():\n            segment.given = None",
        "        segment.given = None",
        (
            "test_replay.py",
            "test_schedule.py",
        ),
    ),
    Mutant(
        "what a replay left and nobody took is freed with the backward",
        "saved.py",
        "        thread.opened.append(weakref.ref(waiting[-1]))",
        "        pass",
        (
            "test_saved.py",
            "test_recording.py",
            "test_recompute.py",
            "test_replay.py",
        ),
    ),
    Mutant(
        "a look at a saved tensor leaves nothing",
        "saved.py",
        "            if torch._C._current_graph_task_id() == -1:\n"
        "                clear(self.segment)\n"
        "            elif",
        "            if",
        (
            "test_recompute.py",
            "test_saved.py",
        ),
    ),
    Mutant(
        "two backwards at once take turns",
        "saved.py",
        "with self.segment.recording.lock:",
        "with contextlib.nullcontext():",
        ("test_recompute.py",),
    ),
    Mutant(
        "what a replay made is freed with it",
        "saved.py",
        "            for value in node.results:\n                value.made = None",
        "            pass",
        (
            "test_recording.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "what nested segments need is not pruned",
        "saved.py",
        "    for part in inner(segment):\n        found += _all_living(part)\n    return found",
        "    return found",
        (
            "test_schedule.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "what no saved tensor needs is pruned",
        "saved.py",
        "segment.recording.close([node for node, _ in found])",
        "segment.recording.close(segment.recording.nodes)",
        (
            "test_recording.py",
            "test_replay.py",
        ),
    ),
    Mutant(
        "a schedule of one segment is not that of its parts",
        "saved.py",
        "    if not segment.inner:\n        segment.scheduled = len(handles), found",
        "    segment.scheduled = len(handles), found",
        (
            "test_schedule.py",
            "test_replay.py",
        ),
    ),
    Mutant(
        "offsets identify the sizes of a nested tensor",
        "saved.py",
        "self.packed = [pack(part) if _has_gradient(part) else part for part in parts]",
        "self.packed = [pack(part) if isinstance(part, Tensor) else part for part in parts]",
        ("pitfalls/test_layouts.py",),
    ),
    Mutant(
        "of a freed saved tensor nothing is replayed",
        "saved.py",
        "    given = segment.given or {}\n"
        "    waiting = [handle for handle in living(segment) if handle.tensor is None]",
        "    given = segment.given or {}\n    waiting = living(segment)",
        (
            "test_replay.py",
            "test_schedule.py",
        ),
    ),
    Mutant(
        "a replay draws what the forward drew",
        "replay.py",
        "                streams.draw_as(node.draws)",
        "                pass",
        (
            "test_schedule.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "random streams go on after a replay as if there had been none",
        "replay.py",
        "        streams.restore()\n",
        "        pass\n",
        (
            "test_schedule.py",
            "test_recompute.py",
            "pitfalls/test_randomness.py",
        ),
    ),
    Mutant(
        "a kernel runs under the settings that it had",
        "replay.py",
        "                    write_settings(node.settings, present)\n",
        "                    pass\n",
        ("test_replay.py",),
    ),
    Mutant(
        "settings are put back after a replay",
        "replay.py",
        "            write_settings(before, read_settings())",
        "            pass",
        ("test_replay.py",),
    ),
    Mutant(
        "autocast in the backward does not reach a replay",
        "replay.py",
        "torch._C._DisableAutocast()",
        "contextlib.nullcontext()",
        (
            "test_schedule.py",
            "pitfalls/test_ambient.py",
        ),
    ),
    Mutant(
        "a program's function modes do not see a replay",
        "replay.py",
        "            _without_function_modes(),\n",
        "",
        (
            "pitfalls/test_ambient.py",
            "pitfalls/test_transforms.py",
        ),
    ),
    Mutant(
        "an in-place kernel is replayed on scratch",
        "replay.py",
        "    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())",
        "    return tensor",
        (
            "test_schedule.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "what is read later is not written in place",
        "replay.py",
        "if not isinstance(target, Outside) and target.value in drops:",
        "if not isinstance(target, Outside):",
        (
            "test_recording.py",
            "test_saved.py",
        ),
    ),
    Mutant(
        "a result stays until its last reader",
        "replay.py",
        "    read = set(wanted) | there\n",
        "    read = set()\n",
        (
            "test_recompute.py",
            "test_schedule.py",
        ),
    ),
    Mutant(
        "a result is dropped after its last reader",
        "replay.py",
        "    for value in drops:\n        value.made = None",
        "    pass",
        ("test_replay.py",),
    ),
    Mutant(
        "only what is needed is replayed",
        "replay.py",
        "        if needed.isdisjoint(results):\n            continue\n",
        "",
        ("test_replay.py",),
    ),
    Mutant(
        "a replay inside of a forward is hidden from its recording",
        "replay.py",
        "        around.replaying = True",
        "        pass",
        (
            "test_replay.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "a forward that goes on after a replay is recorded again",
        "replay.py",
        "            around.replaying = earlier",
        "            pass",
        (
            "test_replay.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "what FSDP2 freed is gathered for a replay",
        "replay.py",
        "            elif type(value) is Outside and value.geometry is None:",
        "            elif False:",
        ("pitfalls/test_distributed.py",),
    ),
    Mutant(
        "what was gathered for a replay is freed after it",
        "sharded.py",
        "            module.reshard()",
        "            pass",
        ("pitfalls/test_distributed.py",),
    ),
    Mutant(
        "a generator of the program's own is given again",
        "generators.py",
        'given = kwargs.get("generator")',
        "given = None",
        ("pitfalls/test_randomness.py",),
    ),
    Mutant(
        "a generator given by place is given again",
        "generators.py",
        "            if isinstance(value, Generator):",
        "            if False:",
        (
            "pitfalls/test_randomness.py",
            "test_recording.py",
        ),
    ),
    Mutant(
        "a stream goes on from where it was before the first kernel",
        "generators.py",
        "if id(generator) not in self.before:",
        "if True:",
        (
            "test_schedule.py",
            "pitfalls/test_randomness.py",
        ),
    ),
    Mutant(
        "noise that a kernel writes without saying so is known",
        "operators.py",
        "    written = (*writes, *undeclared)\n",
        "    written = writes\n",
        (
            "test_recompute.py",
            "test_operators.py",
        ),
    ),
    Mutant(
        "a norm writes its statistics without saying so",
        "operators.py",
        "norm=name in NORMS,",
        "norm=False,",
        (
            "test_schedule.py",
            "pitfalls/test_statistics.py",
        ),
    ),
    Mutant(
        "kernels that draw are known",
        "operators.py",
        "seeded = torch.Tag.nondeterministic_seeded in operator.tags",
        "seeded = False",
        ("test_schedule.py",),
    ),
    Mutant(
        "an operator of another library never runs twice",
        "operators.py",
        'if name.partition("::")[0] not in KERNELS:',
        "if False:",
        ("test_recording.py",),
    ),
    Mutant(
        "a collective may write any of its arguments",
        "operators.py",
        'if not schema.name.startswith("c10d"):',
        "if True:",
        (
            "pitfalls/test_distributed.py",
            "test_distributed.py",
        ),
    ),
    Mutant(
        "the default dtype is a setting",
        "operators.py",
        "        torch.get_default_dtype(),\n",
        "        torch.float32,\n",
        ("test_replay.py",),
    ),
    Mutant(
        "the number of threads is a setting",
        "operators.py",
        "        torch.get_num_threads(),\n",
        "        1,\n",
        ("test_replay.py",),
    ),
    Mutant(
        "determinism is a setting",
        "operators.py",
        "            torch._C._get_deterministic_algorithms(),\n"
        "            torch._C._get_deterministic_algorithms_warn_only(),\n",
        "            False,\n            False,\n",
        ("test_replay.py",),
    ),
    Mutant(
        "kernels that settings choose are known",
        "operators.py",
        "chosen=any(part in name for part in CHOOSING),",
        "chosen=False,",
        ("test_replay.py",),
    ),
    Mutant(
        "a segment is closed on an exception",
        "recompute.py",
        "        if part is None:\n            return\n        thread.segment = self.around",
        "        if part is None or raised[0] is not None:\n"
        "            return\n"
        "        thread.segment = self.around",
        (
            "test_recompute.py",
            "test_recording.py",
            "test_faults.py",
        ),
    ),
    Mutant(
        "a forward without gradients is not recorded",
        "recompute.py",
        "return torch.is_grad_enabled() and not is_transformed() and _hooks_are_allowed()",
        "return not is_transformed() and _hooks_are_allowed()",
        (
            "test_recording.py",
            "test_recompute.py",
        ),
    ),
    Mutant(
        "under torch.func a function just runs",
        "recompute.py",
        "        torch._C._are_functorch_transforms_active()\n        or forward_ad",
        "        forward_ad",
        (
            "test_recompute.py",
            "pitfalls/test_transforms.py",
        ),
    ),
    Mutant(
        "where hooks for saved tensors are forbidden a function just runs",
        "recompute.py",
        "and not is_transformed() and _hooks_are_allowed()",
        "and not is_transformed()",
        ("test_saved.py",),
    ),
    Mutant(
        "a user's hooks for saved tensors get them",
        "recompute.py",
        "        if hooks is not None and hooks[0] is not pack:\n            return\n",
        "",
        ("test_saved.py",),
    ),
    Mutant(
        "where a plan is in force a segment of the model is none",
        "recompute.py",
        "if not records() or thread.conductor is not None:",
        "if not records():",
        ("test_ranges.py",),
    ),
    Mutant(
        "what is saved before a turn and read after it is kept",
        "ranges.py",
        "        pending = self._pending() if len(self.open) > shared else ()\n",
        "        pending = ()\n",
        ("test_ranges.py",),
    ),
    Mutant(
        "what is saved before a turn and read in another segment belongs to that",
        "ranges.py",
        "                handle.move_to(self.open[-1])\n",
        "                handle.keep()\n",
        ("test_ranges.py", "../tracing/test_entry.py"),
    ),
    Mutant(
        "a kernel that is not the script's is noticed",
        "ranges.py",
        "if place < len(script.operators) and script.operators[place] is func:",
        "if place < len(script.operators):",
        ("test_ranges.py",),
    ),
    Mutant(
        "another script of the same beginning goes on",
        "ranges.py",
        "                self.script = script\n"
        "                self._turn(script.path_at(place), fresh=True)\n"
        "                return\n",
        "                pass\n",
        ("test_ranges.py",),
    ),
    Mutant(
        "after a stray each block is a segment",
        "ranges.py",
        "        if not self.synchronized:\n            self._turn((-1,), fresh=True)\n",
        "",
        ("test_ranges.py",),
    ),
    Mutant(
        "the plan holds again where the forward comes to a known block",
        "ranges.py",
        "if known is not None and (known != self.place or not self.synchronized):",
        "if False:",
        ("test_ranges.py",),
    ),
    Mutant(
        "segments are closed at the end of a forward",
        "ranges.py",
        "        while self.open:\n            self._close()\n        self._settle()",
        "        self._settle()",
        ("test_ranges.py",),
    ),
    Mutant(
        "a replay during a forward does not count as its kernels",
        "ranges.py",
        'if thread.replaying or getattr(func, "namespace", "") == "prim":',
        'if getattr(func, "namespace", "") == "prim":',
        ("test_ranges.py",),
    ),
    Mutant(
        "segments that two paths share stay open",
        "ranges.py",
        "            shared += 1\n",
        "            pass\n",
        ("test_ranges.py",),
    ),
    Mutant(
        "a forward inside of a user's hooks is not cut",
        "ranges.py",
        "return records() and hooks is None and thread.segment is None and "
        "thread.conductor is None",
        "return records() and thread.segment is None and thread.conductor is None",
        ("test_ranges.py",),
    ),
    Mutant(
        "a part of a pruned range is closed",
        "ranges.py",
        "        if not self.open:\n            prune(part)\n",
        "",
        ("test_ranges.py",),
    ),
    Mutant(
        "a saved tensor that gets other memory has its numbers",
        "recording.py",
        "if handle is not None and handle.original() is tensor and not handle.is_result:",
        "if False:",
        ("test_saved.py",),
    ),
    Mutant(
        "a saved result that gets other memory keeps its own",
        "recording.py",
        "handle.original() is tensor and not handle.is_result:",
        "handle.original() is tensor:",
        ("test_saved.py",),
    ),
    Mutant(
        "a tensor without a gradient has no fingerprint",
        "fingerprint.py",
        "if not _thread.on or not tensor.requires_grad or not tensor.is_cpu:",
        "if not _thread.on or not tensor.is_cpu:",
        ("test_fingerprint.py",),
    ),
    Mutant(
        "a tensor with gaps has no fingerprint",
        "fingerprint.py",
        "if isinstance(tensor, FakeTensor) or not tensor.is_contiguous():",
        "if isinstance(tensor, FakeTensor):",
        ("test_fingerprint.py",),
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
    holders = [str(ENGINE / name) for name in mutant.tests]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("zoo", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "setup.cfg", folder)
        path = folder / "zoo" / "engine" / mutant.file
        path.write_text(changed(path.read_text(), mutant))
        others = [f"--ignore={holder}" for holder in holders]
        return _failed(folder, mutant, holders) or _failed(folder, mutant, [str(ENGINE), *others])


def _failed(folder: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """Returns the first of some tests that fails, '' if none does."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"{mutant.guard}: pytest ended with {run.returncode}\n{run.stdout}")
    # of tests in several processes, what these share fails where an assertion ends one of them
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split()[1] if lines else ""


def changed(text: str, mutant: Mutant) -> str:
    """Returns the text of a file without the guard.

    Raises:
        RuntimeError: the guard is not in the file, or more than once.
    """
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.guard}: its text is not once in {mutant.file}")
    text = text.replace(mutant.old, mutant.new)
    if "contextlib" in mutant.new and "import contextlib" not in text:
        text = text.replace("\nimport ", "\nimport contextlib\nimport ", 1)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
