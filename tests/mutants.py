"""Breaks each guard of the engine in turn and sees whether its tests notice: `make mutants`.

A guard is taken out of a copy of the package, and tests run on the copy until the first fails: the
files that hold the guard, then all of the engine's. One that none notices is a survivor, and the
exit code is then 1.

    python -m tests.mutants                    # all, about an hour on one core
    python -m tests.mutants random version     # those whose name has one of these words
"""

import os
import shutil
import signal
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


# of each file: the guard, its text, what that becomes, and the tests that hold it
GUARDS: dict[str, list[tuple[str, str, str, str]]] = {
    "recording.py": [
        (
            "what is alive is not made again",
            "        home = value.home()\n        if home is None or",
            "        home = value.home()\n        if True or",
            "test_inner_gradients",
        ),
        (
            "what was detached lies where its source did",
            "            value.share(None)\n",
            "",
            "test_inner_gradients",
        ),
        (
            "what is alive was not written",
            "storage_of(base) is home and self._has_version(value, base):",
            "storage_of(base) is home:",
            "test_inner_gradients",
        ),
        (
            "a backward inside of a forward holds nothing that was made for it",
            "            self.storages[id(storage)] = ReplayedCopy(value, storage, tensor)\n",
            "            return\n",
            "test_inner_gradients",
        ),
        (
            "what a replay made and a backward wrote is from outside",
            "        is_known &= type(value) is not ReplayedCopy\n",
            "",
            "test_inner_gradients",
        ),
        (
            "a graph inside of a forward is gone before that ends",
            "        if self.is_replayed:\n            found.cut(detached)\n",
            "",
            "test_inner_gradients",
        ),
        (
            "kernels that Python registers later are noticed",
            "        notice_python_kernels()\n",
            "        pass\n",
            "test_operator_effects",
        ),
        (
            "a schedule without handles is none that was made",
            "        self.scheduled_for = -1\n",
            "        self.scheduled_for = 0\n",
            "test_recompute",
        ),
        (
            "what another geometry is given to was read as it was",
            "            else:\n                self.before_write(args[0])\n",
            "",
            "pitfalls/test_structure",
        ),
        (
            "a replay inside of a forward has the keys of its kernels",
            "            return with_present_keys(func, args, kwargs)(*args, **kwargs)\n",
            "            return func._op(*args, **kwargs)\n",
            "test_dispatch_keys",
        ),
        (
            "statistics that the segment made come from outside once a norm wrote them",
            "        if isinstance(latest, Value):\n            self.lose(tensor)\n",
            "",
            "pitfalls/test_statistics",
        ),
        (
            "parts of sparse tensors are copied before recorded memory is written",
            "        if value.readers:\n",
            "        if False:\n",
            "pitfalls/test_layouts",
        ),
        (
            "a sparse tensor is copied before it is written",
            "            for part in parts_of(tensor):\n                self.before_write(part)\n",
            "",
            "pitfalls/test_layouts",
        ),
        (
            "a sparse tensor that was written is another one",
            "            and not found.is_copied\n",
            "",
            "pitfalls/test_layouts",
        ),
        (
            "what is made in inference mode is freed",
            "        if tensor.is_inference():\n",
            "        if False:\n",
            "test_recording",
        ),
        (
            "memory without content is the same in a replay",
            "            fill(out.untyped_storage(), mark)\n",
            "            pass\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a kernel keeps the random state that no recorded one left",
            "                and is_same_state(last.state, state)\n",
            "",
            "test_generators",
        ),
        (
            "draws are kept while all of a segment take less than a state",
            "        self.drawn += written[0].nbytes\n        return self.drawn <= PACKED_SIZE\n",
            "        return written[0].nbytes <= PACKED_SIZE\n",
            "test_generators",
        ),
        (
            "a random state is that of the innermost segment",
            "                and last.node.index >= segment.first\n",
            "",
            "test_generators",
        ),
        (
            "a write by code that no mode sees is noticed by the version",
            "        if holder.counter == counter:\n            return True\n",
            "        return True\n",
            "test_fingerprint pitfalls/test_unseen_writes",
        ),
        (
            "memory that foreign code filled is not taken for what made it",
            '    return value.blank is None or (value.blank != b"" and value.blank == '
            "sample(storage))\n",
            "    return True\n",
            "test_fingerprint",
        ),
        (
            "what a kernel writes may have been written by foreign code",
            "            is_known = value.blank == sample(storage)\n",
            "            is_known = True\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "memory that a kernel filled in part is not known",
            "            value.blank = sample(storage)\n        value.before",
            "            pass\n        value.before",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a copy is of the version that is read",
            "if other.version == found.version and other.is_as_read()",
            "if True",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a reader that was given other memory is not copied",
            "        is_still_there &= storage_of(reader.tensor) is storage\n",
            "",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a weight that is read without gradients has a sample",
            " or not (tensor.requires_grad and torch.is_grad_enabled()):",
            " or not tensor.requires_grad:",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a weight that is read without gradients later has a sample, too",
            "                    found.sample = bytes_of(found.tensor)\n",
            "                    pass\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "what was written unseen is not copied as it was read",
            "is_still_there = reader.version == version_of(reader.tensor) and",
            "is_still_there =",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a kernel that writes and reads memory from outside is not replayed",
            " or (None in values and _is_given_twice(written, values, args, kwargs))",
            "",
            "pitfalls/test_aliases",
        ),
        (
            "what a kernel makes of a tensor without a version is kept",
            "                if not found.is_read and value.is_inference():\n",
            "                if False:\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a storage from outside is copied before a kernel writes it",
            "            hold_readers(earlier_of(latest), storage, tensor)\n",
            "            pass\n",
            "pitfalls/test_state pitfalls/test_statistics test_recording",
        ),
        (
            "after a write a storage from outside is another version",
            "            self.known.pop(id(tensor_of), None)\n        self.forget(tensor)\n",
            "            pass\n",
            "pitfalls/test_state pitfalls/test_statistics test_recording",
        ),
        (
            "a small tensor from outside is copied when it is read",
            "        if not tensor.requires_grad and is_small(tensor):",
            "        if False:",
            "test_recording",
        ),
        (
            "an input with a gradient that a replay reads is compared, too",
            "if type(tensor) is not Parameter or not (tensor",
            "if not (tensor",
            "pitfalls/test_unseen_writes",
        ),
        (
            "memory that is exchanged is held for a replay",
            "            found.memory = memory_of(tensor)\n",
            "            pass\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a big tensor from outside is not copied",
            "return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)",
            "return is_plain(tensor)",
            "test_recording",
        ),
        (
            "a frozen weight is not copied",
            "    if _is_parameter(tensor) or _is_parameter(tensor._base):\n        return False\n",
            "",
            "test_recording",
        ),
        (
            "another storage in the place of one that was freed is another",
            "return found if found is not None and found.home() is storage else None",
            "return found",
            "test_recording",
        ),
        (
            "a norm that is replayed writes no statistics",
            "elif statistics := statistics_of(effects, args):",
            "elif False:",
            "test_executor pitfalls/test_statistics",
        ),
        (
            "statistics are copied before a norm writes them",
            "            self.before_write(tensor)\n            is_alike",
            "            is_alike",
            "pitfalls/test_statistics",
        ),
        (
            "a norm in evaluation reads its statistics",
            "if not (effects.norm and args[TRAINING]):",
            "if not effects.norm:",
            "test_executor pitfalls/test_statistics",
        ),
        (
            "kernels of lists count versions",
            "        if effects.lists:\n",
            "        if False:\n",
            "test_saved_tensors",
        ),
        (
            "kernels of lists count versions where the plan keeps",
            "        if effects.lists:\n",
            "        if effects.lists and self.recording is not None:\n",
            "test_kernel_segments",
        ),
        (
            "what is saved is told before it is written",
            "            handle.before_write()\n        if value.readers:\n",
            "            pass\n        if value.readers:\n",
            "test_saved_tensors",
        ),
        (
            "what is saved is told before it gets another geometry",
            "            handle.before_write()\n        if self._has_version(value, tensor):\n",
            "            pass\n        if self._has_version(value, tensor):\n",
            "test_saved_tensors",
        ),
        (
            "what is saved is kept before it is written unrecorded",
            "                handle.lose(storage_of(tensor))\n",
            "                pass\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a replay inside of a forward is not recorded",
            "        if thread.replaying:\n",
            "        if False:\n",
            "test_replay",
        ),
        (
            "a tensor of a class of its own is taken apart",
            "            # its own dispatch takes it apart, and the parts come here again\n"
            "            self.note_wrappers(args, kwargs)\n            return NotImplemented",
            "            pass",
            "pitfalls/test_layouts pitfalls/test_distributed",
        ),
        (
            "what is outside lets go of its graph",
            "            found.earlier = None\n            found.cut(detach)\n",
            "            found.earlier = None\n",
            "pitfalls/test_dropped_graphs",
        ),
        (
            "what is outside and written by a forward is freed with it",
            "del self.outside, self.storages, self.known,",
            "del self.storages,",
            "test_recording test_recompute",
        ),
        (
            "a kernel is told whether its argument requires a gradient",
            "        if value.trains is None:\n            value.trains = trains\n"
            "        if value.trains is trains:\n            return value\n",
            "        return value\n",
            "test_recording pitfalls",
        ),
        (
            "a block that is compiled stays compiled",
            "    keeps_compiled = True",
            "    keeps_compiled = False",
            "test_recording pitfalls/test_compile",
        ),
        (
            "memory without content is made anew without reading a model of it",
            "        if effects.empty:\n"
            "            return self._run_empty(func, effects, args, kwargs)\n",
            "",
            "test_replay",
        ),
        (
            "what is resized comes from outside",
            "                self.recording.forget(args[0])\n",
            "                pass\n",
            "test_recording pitfalls/test_unseen_writes",
        ),
        (
            "a view is made on the storage of its base in a replay",
            "        value.base = no_tensor\n",
            "",
            "test_recording",
        ),
        (
            "what nested segments need is not pruned",
            "        for part in self.inner():\n            found += part.all_handles()\n",
            "",
            "test_executor test_recompute",
        ),
        (
            "a saved tensor that gets other memory has its numbers",
            "if handle is not None and handle.original() is tensor and not handle.is_result:",
            "if False:",
            "test_saved_tensors",
        ),
        (
            "a saved result that gets other memory keeps its own",
            "handle.original() is tensor and not handle.is_result:",
            "handle.original() is tensor:",
            "test_saved_tensors",
        ),
    ],
    "operands.py": [
        (
            "a tensor in the storage of a negative view is not negative itself",
            " or base.is_neg()",
            "",
            "pitfalls/test_layouts",
        ),
        (
            "a sparse tensor of which a part was written is put together from copies",
            "        if not self.is_copied:\n",
            "        if self.tensor is not None:\n",
            "pitfalls/test_layouts",
        ),
        (
            "a sparse tensor whose memory was written after the forward is refused",
            "if part.geometry is None and sample(part.tensor.untyped_storage()) != found:",
            "if False:",
            "pitfalls/test_layouts",
        ),
        (
            "marks are small numbers of any type",
            " & 0x3F3F3F3F3F3F3F3F",
            " % (1 << 64)",
            "pitfalls/test_unseen_writes",
        ),
        (
            "memory that was exchanged is not read",
            "self.home is not None and self.home() is not tensor.untyped_storage()",
            "False",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a conjugated tensor is conjugated in its replay",
            "            found = conj(found)",
            "            pass",
            "test_recording test_operators",
        ),
        (
            "a negated tensor is negated in its replay",
            "return neg_view(found) if self.negative else found",
            "return found",
            "test_recording test_operators",
        ),
        (
            "a saved tensor shares the version of what was saved",
            "return detached if is_below or count_dispatch_modes() else Tensor.detach",
            "return Tensor.detach",
            "test_saved_tensors",
        ),
        (
            "a tensor that is kept was not written since",
            "            check_version(tensor, self.version)\n",
            "            pass\n",
            "test_saved_tensors test_recompute",
        ),
        (
            "a part of a wrapper has the version of the wrapper",
            "        if self.wrapper is not None:\n            check_version(*self.wrapper)\n",
            "",
            "pitfalls/test_layouts",
        ),
        (
            "a tensor that is kept does not hold the graph that it gets later",
            "weakref.ref(tensor), detach(tensor)",
            "weakref.ref(tensor), tensor",
            "pitfalls/test_dropped_graphs",
        ),
        (
            "a view is not asked for its history",
            "    if (base := tensor._base) is not None:\n",
            "    if (base := tensor._base) is not None and False:\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "what got other memory before it went is not taken for what it was",
            "return self.storage.value != self.home",
            "return False",
            "pitfalls/test_unseen_writes",
        ),
        (
            "what NumPy wrote is not taken for what a kernel read",
            "return self.sample is None or self.sample == bytes_of(self.tensor)",
            "return True",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a tensor without a gradient has no fingerprint",
            "if not tensor.requires_grad or isinstance(tensor, FakeTensor):",
            "if isinstance(tensor, FakeTensor):",
            "test_fingerprint",
        ),
        (
            "a tensor with gaps has no fingerprint",
            "return read(tensor) if _thread.on and tensor.is_contiguous() else None",
            "return read(tensor) if _thread.on else None",
            "test_fingerprint",
        ),
    ],
    "saved_tensors.py": [
        (
            "a backward inside of a forward asks for its own saved tensors",
            "        if self.operations is None:\n            return found\n",
            "        return found\n",
            "test_inner_gradients",
        ),
        (
            "an inner segment is given what this backward needs",
            "        return self.operations is None or self.given_to(segment) <= given.keys()\n",
            "        return True\n",
            "test_inner_gradients",
        ),
        (
            "what code that no mode sees wrote is made again",
            "        if not there.found:\n            raise\n",
            "        raise\n",
            "test_inner_gradients",
        ),
        (
            "a copy that a backward inside saved is refused where its source is written",
            "        if self.is_copy:\n",
            "        if False:\n",
            "test_inner_gradients",
        ),
        (
            "a backward inside of a forward leaves nothing for those after it",
            "            clear(segment)\n    segment.scheduled, ",
            "            pass\n    segment.scheduled, ",
            "test_inner_gradients",
        ),
        (
            "a saved wrapper has a version of its own",
            "        if self.counted is not None:\n            check_version(*self.counted)\n",
            "",
            "pitfalls/test_layouts",
        ),
        (
            "a program's function modes do not see a replay",
            "                with without_modes():\n",
            "                if True:\n",
            "pitfalls/test_ambient pitfalls/test_transforms",
        ),
        (
            "an argument whose history was made anew is no result",
            'base is None or hasattr(made_by, "apply") or _is_just_written(base, made_by)',
            "True",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a tensor whose object is gone was not written since",
            "        if self.is_written:\n",
            "        if False:\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a saved tensor that somebody holds is the one that is there",
            "        self.tensor = tensor = self._as_it_is(tensor)\n",
            "        self.tensor = tensor\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "memory that is left of a saved tensor was not written since",
            "self.is_written = self.fingerprint != read_memory(",
            "self.is_written = False and read_memory(",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a tensor that is replayed was not written since",
            "            check_version(self.counter, self.version)\n",
            "            pass\n",
            "test_saved_tensors",
        ),
        (
            "a replay has the numbers of the forward",
            "elif before is not None and before != read(tensor):",
            "elif False:",
            "test_fingerprint",
        ),
        (
            "what foreign code wrote after it was saved is noticed",
            "                self.fingerprint = fingerprint(original)\n",
            "                pass\n",
            "test_fingerprint",
        ),
        (
            "a write that counts no version is what the backward reads",
            "        self.reference, self.fingerprint = view, None\n",
            "        pass\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a nested segment is given what it starts from",
            "part.given = {value: (made, made._version) for value, made in there "
            "if made is not None}",
            "part.given = {}",
            "test_executor test_recompute",
        ),
        (
            "what a nested segment starts from was not written by a backward",
            "any(tensor._version != made for tensor, made in given.values())",
            "False",
            "pitfalls/test_unseen_writes",
        ),
        (
            "a replayed tensor that a backward wrote is refused to the next",
            "            if tensor._version != self.filled:\n",
            "            if False:\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "the segments around a nested one are replayed before it",
            "    for part in reversed(waiting):\n        _fill(part, request)",
            "    _fill(handle.segment, request)",
            "test_executor test_recompute",
        ),
        (
            "a segment makes what the segments inside of it start from",
            "        goals = goals_of(self.waiting(segment)).union(*map(self.given_to, parts))\n",
            "        goals = goals_of(self.waiting(segment))\n",
            "test_executor test_recompute",
        ),
        (
            "a retained graph holds no replayed tensors",
            "            elif is_graph_kept():\n                self.tensor = None",
            "",
            "test_recompute test_replay",
        ),
        (
            "what a nested segment was given is freed",
            "        if not _is_graph_kept():\n            segment.given = None",
            "        pass",
            "test_recompute",
        ),
        (
            "a nested segment of a retained graph keeps what it was given",
            "        if not _is_graph_kept():\n            segment.given = None",
            "        segment.given = None",
            "test_replay",
        ),
        (
            "what a replay left and nobody took is freed with the backward",
            "        thread.opened.append(weakref.ref(waiting[-1]))",
            "        pass",
            "test_saved_tensors test_recording test_recompute test_replay",
        ),
        (
            "a look at a saved tensor leaves nothing",
            "            if current_backward() == -1:\n"
            "                clear(self.segment)\n"
            "            elif",
            "            if",
            "test_saved_tensors",
        ),
        (
            "two backwards at once take turns",
            "with self.segment.recording.lock:",
            "with contextlib.nullcontext():",
            "test_recompute",
        ),
        (
            "what a replay made is freed with it",
            "        for value in (*made, *given, *alive):\n",
            "        for value in given:\n",
            "test_recording test_recompute",
        ),
        (
            "what no saved tensor needs is pruned",
            "segment.recording.close([node for node, _ in found])",
            "segment.recording.close(segment.recording.nodes)",
            "test_recording test_replay",
        ),
        (
            "offsets identify the sizes of a nested tensor",
            "self.packed = [pack(part) if _has_gradient(part) else part for part in parts]",
            "self.packed = [pack(part) if isinstance(part, Tensor) else part for part in parts]",
            "pitfalls/test_layouts",
        ),
        (
            "of a freed saved tensor nothing is replayed",
            "    return [handle for handle in segment.living() if handle.tensor is None]\n",
            "    return segment.living()\n",
            "test_replay test_executor",
        ),
        (
            "a replay inside of a forward is hidden from its recording",
            "        thread.replaying = True\n",
            "        pass\n",
            "test_replay",
        ),
        (
            "an interrupt at the end of a replay leaves the thread recording",
            "                    # once more, where an interrupt has cut it short\n"
            "                    thread.replaying = around\n",
            "                    pass\n",
            "test_interrupts",
        ),
        (
            "a saved tensor that is detached in place is refused",
            "            check_history(self.original())\n",
            "            pass\n",
            "pitfalls/test_changes",
        ),
        (
            "what was gathered for a replay is freed after it",
            "            module.reshard()\n",
            "            pass\n",
            "pitfalls/test_distributed",
        ),
    ],
    "replay.py": [
        (
            "a vmap around a backward of several gradients does not see a replay",
            "    if batches:\n",
            "    if False:\n",
            "pitfalls/test_transforms",
        ),
        (
            "a copy that a kernel writes is conjugate where the tensor is",
            "    return Geometry(tensor).of_storage(storage, tensor.device)\n",
            "    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)\n"
            "    place = tensor.storage_offset(), tensor.size(), tensor.stride()\n"
            "    return found.set_(storage, *place)\n",
            "pitfalls/test_layouts",
        ),
        (
            "a kernel that keeps no random state is replayed after the one that left it",
            "        drawing.update(node.follows)\n",
            "",
            "test_generators",
        ),
        (
            "a replay draws what the forward drew",
            "                draw_as(node.draws, changed.streams)",
            "                pass",
            "test_executor test_recompute",
        ),
        (
            "random streams go on after a replay as if there had been none",
            "[*self.streams.values(), *reversed(self.settings)]",
            "[*reversed(self.settings)]",
            "test_executor test_recompute pitfalls/test_randomness",
        ),
        (
            "a kernel runs under the settings that it had",
            "                    write_settings(node.settings, changed.settings)\n",
            "                    pass\n",
            "test_replay",
        ),
        (
            "settings are put back after a replay",
            "[*self.streams.values(), *reversed(self.settings)]",
            "[*self.streams.values()]",
            "test_replay",
        ),
        (
            "autocast in the backward does not reach a replay",
            "DisableAutocast()",
            "contextlib.nullcontext()",
            "test_executor pitfalls/test_ambient",
        ),
        (
            "an in-place kernel is replayed on scratch",
            "    return Geometry(tensor).of_storage(storage, tensor.device)\n",
            "    return tensor\n",
            "test_recompute",
        ),
        (
            "what is read later is not written in place",
            "    if value not in drops and all(value is not other for other, _ in before):\n",
            "    if False:\n",
            "test_recompute",
        ),
        (
            "arguments that share memory share the copy of it",
            " and all(value is not other for other, _ in before)",
            "",
            "pitfalls/test_aliases",
        ),
        (
            "a view of what requires a gradient is written without a history",
            "        value.now().requires_grad_(False)\n",
            "        pass\n",
            "pitfalls/test_autograd",
        ),
        (
            "a result stays until its last reader",
            "    read = {*wanted}\n",
            "    read = set()\n",
            "test_recompute test_executor",
        ),
        (
            "a result is dropped after its last reader",
            "    for value in drops:\n        value.made = None",
            "    pass",
            "test_replay",
        ),
        (
            "only what is needed is replayed",
            "        if needed.isdisjoint(node.results) and node not in drawing:\n"
            "            continue\n",
            "",
            "test_replay",
        ),
        (
            "what FSDP2 freed is gathered for a replay",
            "            if outside.geometry is None:",
            "            if False:",
            "pitfalls/test_distributed",
        ),
    ],
    "pending_reads.py": [
        (
            "a replay that is to come reads weights",
            "any(segment is not None and waiting_in(segment) for segment in segments)",
            "any(False for segment in segments)",
            "../optimizer/test_in_backward",
        ),
        (
            "operations hold weights that they saved",
            "return any(one.is_saved for one in held) or ",
            "return ",
            "../optimizer/test_in_backward",
        ),
        (
            "views and detached tensors hold weights",
            "or now.of_storage > of_storage + views",
            "",
            "../optimizer/test_in_backward",
        ),
    ],
    "compiled_segments.py": [
        (
            "a graph that writes what a segment reads is not compiled",
            "written = segment.reads & segment.written_since",
            "written = set()",
            "pitfalls/test_compile",
        ),
        (
            "a segment reads what the graph wrote before",
            "written |= segment.reads & watch.written & set(names)",
            "pass",
            "pitfalls/test_compile",
        ),
        (
            "a segment that runs twice writes nothing",
            "for storage in segment.writes:",
            "for storage in ():",
            "pitfalls/test_compile",
        ),
        (
            "a segment that runs twice draws nothing",
            "if segment.draws:",
            "if False:",
            "pitfalls/test_compile",
        ),
    ],
    "dispatch_keys.py": [
        (
            "a kernel of a function that autocast casts for runs without autocast",
            "callers = CALLERS.get(name, (overload,))",
            "callers = (overload,)",
            "test_dispatch_keys",
        ),
        (
            "kernels under autocast may call operators",
            "    if is_lazy or is_cast:\n",
            "    if is_lazy:\n",
            "test_dispatch_keys",
        ),
        (
            "custom operators may call operators",
            "is_lazy = effects.opaque or ",
            "is_lazy = ",
            "test_dispatch_keys",
        ),
        (
            "kernels of complex numbers may call operators",
            "effects.opaque or (args and isinstance(args[0], Tensor) and args[0].is_complex())",
            "effects.opaque",
            "test_dispatch_keys",
        ),
        (
            "a kernel that calls operators sees autocast as without a recording",
            "            keys = keys | DispatchKeySet(_KEYS[key])\n",
            "",
            "test_dispatch_keys",
        ),
        (
            "a kernel that calls operators resolves conjugate tensors as without a recording",
            "keys, dtypes = _LAZY if is_lazy else _NONE, {}",
            "keys, dtypes = _NONE, {}",
            "test_dispatch_keys",
        ),
        (
            "a replay casts to the type of the forward",
            "                torch.set_autocast_dtype(kind, dtype)\n            with",
            "                pass\n            with",
            "test_dispatch_keys",
        ),
        (
            "a replay leaves the type that autocast casts to",
            "            for kind, dtype in earlier:\n",
            "            for kind, dtype in ():\n",
            "test_dispatch_keys",
        ),
        (
            "a replay leaves no cast in autocast's cache",
            "            torch.set_autocast_cache_enabled(False)\n",
            "",
            "test_dispatch_keys",
        ),
    ],
    "devices.py": [
        (
            "a peak is that of its device",
            'return int(_asked(device, "max_memory_allocated")())',
            'return int(_asked(torch.device(device.type, 0), "max_memory_allocated")())',
            "../accelerator",
        ),
        (
            "what has no index was on the current device",
            "    return torch.device(device.type, current())\n",
            "    return torch.device(device.type, 0)\n",
            "../accelerator",
        ),
        (
            "a packed random state keeps what stands behind its words",
            "        ctypes.memmove(place + SIZE - TAIL, tail, TAIL)\n",
            "",
            "test_generators",
        ),
        (
            "a generator of the program's own is given again",
            "values = (*args, *kwargs.values())\n",
            "values = tuple(args)\n",
            "pitfalls/test_randomness",
        ),
        (
            "a generator given by place is given again",
            "values = (*args, *kwargs.values())\n",
            "values = tuple(kwargs.values())\n",
            "pitfalls/test_randomness",
        ),
        (
            "a stream goes on from where it was before the first kernel",
            "if id(stream) not in restore:",
            "if True:",
            "test_executor pitfalls/test_randomness",
        ),
        (
            "the stream of a second device is restored",
            "if id(stream) not in restore:",
            "if id(stream) not in restore and stream.device.index != 1:",
            "../accelerator",
        ),
    ],
    "operator_effects.py": [
        (
            "what a kernel writes without saying so is known",
            "written = tuple(dict.fromkeys((*writes, *UNDECLARED.get(name, ()))))",
            "written = tuple(writes)",
            "test_recording",
        ),
        (
            "a norm writes its statistics without saying so",
            "norm=name in NORMS,",
            "norm=False,",
            "test_executor pitfalls/test_statistics",
        ),
        (
            "kernels that draw are known",
            "seeded = torch.Tag.nondeterministic_seeded in operator.tags",
            "seeded = False",
            "test_executor",
        ),
        (
            "an operator of another library never runs twice",
            "if operator.namespace not in KERNELS:",
            "if False:",
            "test_recording",
        ),
        (
            "an operator that reads a file never runs twice",
            'if "str" in types and not reads:',
            "if False:",
            "test_operator_effects",
        ),
        (
            "an operator whose kernel is a user's Python never runs twice",
            "return not calls_others and name not in overridden",
            "return not calls_others",
            "test_operator_effects",
        ),
        (
            "an operator that may call a user's Python never runs twice",
            "return not calls_others and name not in overridden",
            "return name not in overridden",
            "test_operator_effects",
        ),
        (
            "a collective may write any of its arguments",
            'is_collective = name.startswith("c10d")',
            "is_collective = False",
            "pitfalls/test_distributed test_distributed",
        ),
        (
            "a kernel that may not repeat its bits is not replayed",
            "return self.opaque or (self.varies is not None and self.varies.applies(args, kwargs))",
            "return self.opaque",
            "test_nondeterministic_kernels",
        ),
        (
            "kernels that settings choose are known",
            "heeded=heeded_by(name),",
            "heeded=None,",
            "test_kernel_settings test_replay",
        ),
    ],
    "nondeterministic_kernels.py": [
        (
            "deterministic mode does not help all kernels",
            "return not (self.is_avoidable and _is_deterministic())",
            "return not _is_deterministic()",
            "test_nondeterministic_kernels",
        ),
        (
            "threads of the CPU share what is large",
            "return count >= GRAIN and torch.get_num_threads() > 1",
            "return False",
            "test_nondeterministic_kernels",
        ),
        (
            "a mask names no element twice",
            "values.numel() > 1 and not all(index.dtype in MASKS for index in given)",
            "values.numel() > 1",
            "test_nondeterministic_kernels",
        ),
    ],
    "replay_check.py": [
        (
            "a replay on a device has the numbers of the forward",
            "differs = found != torch.cat(",
            "differs = found != found + 0 * torch.cat(",
            "test_replay_check",
        ),
        (
            "a difference stays until it is read",
            "                    flags.logical_or_(differs)\n",
            "                    flags.copy_(differs)\n",
            "test_replay_check",
        ),
        (
            "flags are read after each so many backwards",
            "self.backwards % self.every == 0",
            "False",
            "test_replay_check",
        ),
    ],
    "kernel_settings.py": [
        (
            "a precision that goes by a general one still does after a replay",
            "(setting.own or setting.read)()",
            "setting.read()",
            "test_replay",
        ),
        (
            "the precision that cuDNN begins with is not taken for none",
            "    is_set |= precision_of(*place) != precision_of(*library_all)\n",
            "",
            "test_kernel_settings",
        ),
        (
            "the settings of a device that comes into use are read",
            "if is_with_cuda is not (len(settings) > len(_OF_CPU)):",
            "if False:",
            "test_kernel_settings",
        ),
        (
            "the default dtype is a setting",
            "torch.get_default_dtype, ",
            "lambda: torch.float32, ",
            "test_replay",
        ),
        (
            "whether a backward may follow is a setting",
            '    Setting("grad", torch.is_grad_enabled, set_grad_enabled, _DETERMINISTIC),\n',
            "",
            "pitfalls/test_ambient",
        ),
        (
            "the number of threads is a setting",
            "torch.get_num_threads, ",
            "lambda: 1, ",
            "test_replay",
        ),
        (
            "determinism is a setting",
            "torch.get_deterministic_debug_mode, ",
            "lambda: 0, ",
            "test_replay",
        ),
    ],
    "recompute.py": [
        (
            "a segment is closed on an exception",
            "        if part is None:\n            return\n        thread.segment, part.end",
            "        if part is None or raised[0] is not None:\n"
            "            return\n"
            "        thread.segment, part.end",
            "test_recompute test_recording test_faults",
        ),
        (
            "a forward without gradients is not recorded",
            "        torch.is_grad_enabled()\n        and not are_functorch",
            "        not are_functorch",
            "test_recording",
        ),
        (
            "under torch.func a function just runs",
            "        and not are_functorch_transforms_active()\n",
            "",
            "test_recompute",
        ),
        (
            "where hooks for saved tensors are forbidden a function just runs",
            "        and bool(are_saved_tensors_hooks_enabled())",
            "        and bool(torch._C._autograd)",
            "test_saved_tensors",
        ),
        (
            "a user's hooks for saved tensors get them",
            "        if hooks is not None and hooks[0] is not pack:\n            return\n",
            "",
            "test_saved_tensors",
        ),
        (
            "where a plan is in force a segment of the model is none",
            "if not records() or thread.conductor is not None:",
            "if not records():",
            "test_kernel_segments",
        ),
    ],
    "kernel_segments.py": [
        (
            "what closed segments saved is known by its memory, also where nobody has the tensor",
            "                if home is not None:\n",
            "                if home is not None and handle.original() is not None:\n",
            "pitfalls/test_unseen_writes",
        ),
        (
            "what a closed segment saved is kept before it is written late",
            "                    handle.lose(storage)\n",
            "                    pass\n",
            "../tracing/test_exact",
        ),
        (
            "what a forward writes where it ends is copied for its segments",
            "        hold_readers(readers, storage, tensor)\n",
            "",
            "../tracing/test_exact",
        ),
        (
            "what is saved before a turn and read after it is kept",
            "        pending = self._pending() if len(self.path) > shared else []\n",
            "        pending: list[Handle] = []\n",
            "test_kernel_segments",
        ),
        (
            "what is saved before a turn and read in another segment belongs to that",
            "                handle.move_to(thread.segment)\n",
            "                handle.keep()\n",
            "test_kernel_segments ../tracing/test_traced_steps",
        ),
        (
            "a kernel that is not the script's is noticed",
            "if place >= len(script.operators) or script.operators[place] is not func:",
            "if place >= len(script.operators):",
            "test_kernel_segments",
        ),
        (
            "another script of the same beginning goes on",
            "                self.script = script\n"
            "                self._turn(script.path_at(self.place - 1), fresh=True)\n"
            "                return\n",
            "                pass\n",
            "test_kernel_segments",
        ),
        (
            "after a stray each block is a segment",
            "        if not self.synchronized:\n            self._turn((-1,), fresh=True)\n",
            "",
            "test_kernel_segments",
        ),
        (
            "the plan holds again where the forward comes to a known block",
            "if known is not None and (known != self.place or not self.synchronized):",
            "if False:",
            "test_kernel_segments",
        ),
        (
            "segments are closed at the end of a forward",
            "        while thread.segment is not None:\n            self._close()\n",
            "",
            "test_kernel_segments",
        ),
        (
            "a replay during a forward does not count as its kernels",
            "is_look or thread.replaying or not all",
            "is_look or not all",
            "test_kernel_segments",
        ),
        (
            "segments that two paths share stay open",
            "shared = 0 if fresh else len(list(same))",
            "shared = 0",
            "test_kernel_segments",
        ),
        (
            "a forward inside of a user's hooks is not cut",
            "return records() and hooks is None and thread.segment is None and "
            "thread.conductor is None",
            "return records() and thread.segment is None and thread.conductor is None",
            "test_kernel_segments",
        ),
        (
            "a part of a pruned range is closed",
            "            prune(part)\n",
            "            pass\n",
            "test_kernel_segments",
        ),
    ],
}
MUTANTS = [
    Mutant(guard, file, old, new, tuple(tests.split()))
    for file, guards in GUARDS.items()
    for guard, old, new, tests in guards
]


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
    files = [ENGINE / name for name in mutant.tests]
    holders = [str(file if (ROOT / file).is_dir() else file.with_suffix(".py")) for file in files]
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
    is_there = any("accelerator" in test or "replay_check" in test for test in tests)
    device = ["--device", "soft"] if is_there else []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *device, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode < 0:
        return f"{signal.Signals(-run.returncode).name} in {' '.join(tests)}"
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
