"""Breaks functions by rule and sees whether their tests notice: `make mutants`.

A mutant differs from a function of zoo in one node of its syntax tree. It is written to a copy of
the package, and tests run on the copy until the first fails: the files that hold the function, then
all of its folder. One that none notices is a survivor, and the exit code is then 1.

    python -m tests.mutants                         # all of GUARDS, about an hour on one core
    python -m tests.mutants Recording. test_replay  # those whose function or test has such a word
    python -m tests.mutants --every replay.schedule # any function, by each rule at each node

GUARDS names a change by a rule and by names: the smallest node that has them all and that the rule
changes, or each of them where several are as small.

    drop      a statement does nothing        without  an element, argument or operand is left out
    never     a condition or value is False   empty    an iteration or display has no element
    always    a condition or value is True    bare     f(x) becomes x, `with f():` a plain block
    none      a value is None                 other    True becomes False, a number one more
    put       the statement of REPLACEMENTS comes in the place of one: what no rule makes
"""

import ast
import copy
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
ENGINE = Path("tests/engine")
PASSED, FAILED = 0, 1
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Raise, ast.Return)
BLOCKS = {ast.If: "test", ast.While: "test", ast.For: "iter", ast.With: "items"}
DISPLAYS = (ast.List, ast.ListComp, ast.Set, ast.SetComp, ast.Dict, ast.DictComp, ast.Tuple)
HOLDERS = (ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.keyword)
CONDITIONS = {"test", "ifs", "operand"}
PARTS = {"elts", "args", "keywords", "items", "targets"}
# by the files of tests that hold them: the changes of each function
GUARDS = {
    "../accelerator": """
        devices.indexed: put current device
        devices.peak: put max_memory_allocated""",
    "../test_groups": """
        operator_effects._read: never c10d""",
    "../optimizer/test_in_backward": """
        PendingReads._is_held: never of_storage
        PendingReads.are_left: never waiting_in, never any""",
    "../tracing/test_exact": """
        Conductor._keep_late: drop mark_external, drop hold_readers""",
    "../tracing/test_graphs_in_front": """
        TracedGraph.is_in_front: never node self _in_front
        TracedGraph.note_kernel: drop hooked
        autograd_interpreter._gradients_of: never incoming is_in_front
        saved_tensors._check_modes: never new""",
    "pitfalls/test_aliases": """
        Recorder._run: never _is_given_twice
        replay._scratch: always all""",
    "pitfalls/test_ambient": """
        kernel_settings: without Setting is_grad_enabled""",
    "pitfalls/test_ambient pitfalls/test_transforms": """
        saved_tensors.unpack_handle: bare without_modes""",
    "pitfalls/test_autograd": """
        replay._scratch: drop requires_grad_""",
    "pitfalls/test_changes": """
        saved_tensors.unpack_handle: drop check_history""",
    "pitfalls/test_compile": """
        compiled_segments._refused: none written_since, drop reads, empty writes, never draws""",
    "pitfalls/test_distributed": """
        replay.external_tensors: never geometry
        saved_tensors._replay_kernels: drop reshard""",
    "pitfalls/test_dropped_graphs": """
        External.detach_graph: bare detach
        Storages.close: drop detach_graph""",
    "pitfalls/test_layouts": """
        Geometry.on: never is_neg
        PackedWrapper.__init__: put pack
        PackedWrapper.unpack: drop version_check
        External._unchanged: drop wrapper
        Storages._refer_external: always is_copied
        Storages.before_write: drop parts_of
        Storages.target: never readers
        SparseExternal.resolve: never is_copied, never geometry
        replay._copy: put of_storage""",
    "pitfalls/test_layouts pitfalls/test_distributed": """
        Recorder.__torch_dispatch__: never has_own_storage types types""",
    "pitfalls/test_randomness": """
        devices.draws_of: without values kwargs, without args""",
    "pitfalls/test_state pitfalls/test_statistics test_recording": """
        Storages.before_write: drop hold_readers, drop pop, drop forget""",
    "pitfalls/test_statistics": """
        Recorder._leave_out_statistics: drop before_write
        Storages.before_write: drop isinstance""",
    "pitfalls/test_structure": """
        Recorder._before_reshape: drop before_write""",
    "pitfalls/test_transforms": """
        replay.without_modes: never VMAP_OF_GRADIENTS""",
    "pitfalls/test_unseen_writes": """
        Handle._as_it_is: never fingerprint
        Handle.take_replayed: bare _as_it_is
        Handle.is_result: always base
        Handle.look_for_writes: drop reference
        Original.is_replaced: never value
        External.is_as_read: always sample
        External.resolve: never self
        Recording._before_read: drop sample, never is_inference
        recorder._run_empty: drop write_mark
        Storages.before_read: always version, always is_grad_enabled, never Parameter
        Storages.before_read: drop memory
        Storages.mark_external: drop mark_external
        Storages.target: always blank
        Storages.written: drop blank
        Request.has_inputs: never any
        unseen_writes.new_mark: put number next
        saved_tensors.unpack_handle: never handle, never _version
        storages.hold_readers: drop is_still_there, always version
        tensor_state.roles_of: never base""",
    "test_dispatch_keys": """
        KernelWithKeys.__call__: drop torch, empty earlier, drop set_autocast_cache_enabled
        Recorder.__torch_dispatch__: put with_present_keys
        dispatch_keys._casts: put callers CALLERS
        dispatch_keys.kernel_of: never is_cast, never opaque, never args
        dispatch_keys.with_present_keys: drop keys, never is_lazy""",
    "test_executor": """
        operator_effects._read: never nondeterministic_seeded""",
    "test_executor pitfalls/test_ambient": """
        replay.replay: without DisableAutocast""",
    "test_executor pitfalls/test_randomness": """
        devices.draw_as: always restore""",
    "test_executor pitfalls/test_statistics": """
        Recorder._run: never statistics
        operator_effects._read: none NORMS
        operator_effects.statistics_of: always args""",
    "test_executor test_recompute": """
        Request.inputs_of: without inputs_of
        Segment.all_handles: drop inner
        replay._run: drop draw_as
        saved_tensors._replay_kernels: empty tensor _version
        saved_tensors.replay_for: put reversed waiting""",
    "test_executor test_recompute pitfalls/test_randomness": """
        Changes.restore: without values""",
    "test_fingerprint": """
        Handle.take_replayed: never before
        Handle.look_for_writes: drop fingerprint
        unseen_writes.fingerprint: never requires_grad
        Value.is_untouched: always self""",
    "test_fingerprint pitfalls/test_unseen_writes": """
        Value.has_version: always holder version version""",
    "../accelerator/test_offload test_host_memory": """
        Offloading.add: drop append others, drop pop
        Conductor.note_saved: drop add
        Conductor.__torch_dispatch__: drop add _saved_ahead
        Conductor._is_offloaded: always offloads step_at""",
    "test_host_memory": """
        OffloadedStorage.leave: drop wait_for_kernels
        OffloadedStorage.come_back: drop wait_for_kernels, drop resize_, drop append
        OffloadedStorage.before_read: drop come_back_here, drop settle, drop is_leaving
        OffloadedStorage.settle: drop wait, drop resize_, drop remove
        Copied.wait: drop event stream, never owner
        Slab.room: always pieces
        Slab.piece: drop used, drop add
        External._unchanged: drop before_read
        Offloading.__init__: drop settle
        Offloading._leave: drop append moving
        Offloading.copy_out: drop settle, always _are_alone
        Offloading._come_back: drop come_back_here
        DeviceTransfers.take: without MemoryError
        HostMemory.after_fork: drop give_up
        HostMemory.before_fork: drop give_up
        HostMemory.room: without allocated
        host_memory._are_alone: always first, always all
        host_memory._holders: without storage getrefcount""",
    "test_generators": """
        PackedState.state: drop memmove
        Recording.note_draws: always is_same_state, always index
        Segment.count_draw: drop drawn
        replay.schedule: drop update""",
    "test_inner_gradients": """
        Handle.before_write: never is_copy
        Storages._refer_external: drop is_replayed
        Storages.note_copy: drop ReplayedCopy
        Storages.note_detach: drop share
        Storages.still_there: always value
        Storages.target: drop is_known
        Request.has_inputs: always operations
        Request.waiting: put compress
        saved_tensors._replay_segment: never reused
        saved_tensors._prune: drop clear""",
    "test_interrupts": """
        saved_tensors.unpack_handle: drop replaying around""",
    "test_jit_traces": """
        operator_effects.with_tensors: never NUMBERS kind""",
    "test_kernel_segments": """
        Conductor.__torch_dispatch__: never replaying
        Conductor._advance: never func
        Conductor._close: drop prune, drop _saved
        Conductor._leave: drop segment
        Conductor._switch_branches: never operators
        Conductor._switch_segments: never shared path, always fresh
        Conductor.enter: drop synchronized, never index
        kernel_segments.conducts: always hooks
        segment.__enter__: never conductor""",
    "test_kernel_segments ../tracing/test_traced_steps": """
        Conductor._switch_segments: put move_to""",
    "test_kernel_settings": """
        HeededSettings.are_in: never is_with_cuda
        kernel_settings._own_precision: drop is_set""",
    "test_kernel_settings test_replay": """
        operator_effects._read: none heeded_by""",
    "test_nondeterministic_kernels": """
        Effects.keeps_results: never varies
        Nondeterminism.applies: always is_avoidable
        nondeterministic_kernels._is_shared: never count
        nondeterministic_kernels._puts: always all""",
    "test_operator_effects": """
        Recorder.__enter__: drop notice_python_kernels
        operator_effects.is_kernel: never str, always name, always calls_others""",
    "test_recompute": """
        segment._leave: drop part end parent
        Segment.__init__: put scheduled_for
        recompute.records: always are_functorch_transforms_active
        replay._scratch: never value
        saved_tensors: bare lock
        saved_tensors._replay_kernels: drop is_graph_kept""",
    "test_recompute test_executor": """
        replay.schedule: empty wanted""",
    "test_recompute test_replay": """
        saved_tensors.unpack_handle: drop is_graph_kept""",
    "test_recording": """
        Storages._refer_external: never is_inference
        Storages.before_read: never is_small
        Storages.find: always storage home
        Storages.reshape: drop base
        operator_effects._read: without UNDECLARED
        operator_effects.is_kernel: never namespace
        recompute.records: always is_grad_enabled
        storages.is_small: always bool, drop _is_parameter""",
    "test_recording pitfalls": """
        Value.refer: always self requires_grad requires_grad""",
    "test_recording pitfalls/test_compile": """
        Recorder: never keeps_compiled""",
    "test_recording pitfalls/test_unseen_writes": """
        Recorder._before_reshape: drop forget""",
    "test_recording test_operators": """
        Geometry.of_storage: drop view, never negative""",
    "test_recording test_recompute": """
        Storages.close: without self externals, without self current
        saved_tensors._replay_kernels: empty results inputs reused""",
    "test_recording test_replay": """
        saved_tensors._prune: put close""",
    "test_replay": """
        Changes.restore: without reversed
        Recorder.__torch_dispatch__: never replaying
        Recorder._run: drop empty
        kernel_settings: without set_default_dtype get_default_dtype, without set_num_threads
        kernel_settings: without set_deterministic_debug_mode _DETERMINISTIC
        kernel_settings.write_settings: never own
        replay._run: drop replayed
        replay._run: drop write_settings
        replay.schedule: never isdisjoint
        saved_tensors._replay_kernels: never is_graph_kept, drop replaying""",
    "test_replay test_executor": """
        saved_tensors.waiting_in: always tensor""",
    "test_replay_check": """
        ReplayCheck.compare: put differs, put logical_or_
        ReplayCheck.end_backward: never every""",
    "test_shared_memory": """
        Handle._as_it_is: drop is_untouched
        Handle.is_result: never is_function was_result
        Storages.watch_detached: drop watched
        saved_tensors._prune: drop look_at_detached""",
    "test_slices": """
        External._is_written_beside: never numel, always digest
        Handle.before_write: drop _keep_memory
        Storages.target: never ReplayedCopy
        unseen_writes.is_slice: never itemsize""",
    "test_saved_tensors": """
        saved_tensors.unpack_handle: drop check_version, never current_backward
        Recorder._run_unrecorded: never lists
        Handle.keep_if_replaced: never tensor, always is_result
        Storages.reshape: drop before_write
        Storages.target: drop before_write
        tensor_state.detach_here: never count_dispatch_modes is_below
        recompute.records: always are_saved_tensors_hooks_enabled
        segment.__enter__: drop hooks""",
    "test_saved_tensors test_recompute": """
        External._unchanged: drop tensor""",
    "test_saved_tensors test_recording test_recompute test_replay": """
        saved_tensors.replay_for: drop append""",
    "test_wrapper_subclasses": """
        KeptWrapper.__init__: never is_result
        KeptWrapper.unpack: drop check_version
        saved_tensors.pack: always is_wrapper""",
}
REPLACEMENTS = {
    "put scheduled_for": "self.scheduled_for = 0",
    "put number next": "number = ~next(_marks) % (1 << 64)",
    "put with_present_keys": "return func._op(*args, **kwargs)",
    "put compress": "return handles",
    "put reversed waiting": "_replay_segment(handle.segment, request)",
    "put close": "segment.recording.close(segment.recording.kernels)",
    "put pack": "self.packed = {k: pack(p) if type(p) is Tensor else p for k, p in parts.items()}",
    "put of_storage": "return tensor",
    "put callers CALLERS": "callers = (overload,)",
    "put max_memory_allocated": "return torch.get_device_module(device).max_memory_allocated(0)",
    "put current device": "return torch.device(device.type, 0)",
    "put differs": "differs = replayed_bytes != replayed_bytes",
    "put logical_or_": "flags.copy_(differs)",
    "put move_to": "handle.keep()",
}


class Site(NamedTuple):
    """A place in a syntax tree, and the nodes that a rule has in place of its node."""

    rule: str
    node: ast.AST
    parent: ast.AST
    field: str
    place: int | None
    new: list[Any]


class Mutant(NamedTuple):
    """A function and a change of it, where in which file that is, and the tests that hold it."""

    name: str
    file: Path
    module: ast.Module
    site: Site
    tests: tuple[str, ...]

    def text(self) -> str:
        """Returns the text of the file with the change; '' where that is no Python."""
        _, _, parent, field, place, new = self.site
        before = getattr(parent, field)
        after = new[0] if place is None else [*before[:place], *new, *before[place + 1 :]]
        setattr(parent, field, after)
        try:
            text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(self.module)))
            compile(text, self.name, "exec")
        except SyntaxError:
            return ""
        finally:
            setattr(parent, field, before)
        return text


def sites_of(function: ast.AST) -> Iterator[Site]:
    """Yields all that the rules can change in a function, a class or a module."""
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST):
                    for rule, new in _changes(node, parent, field):
                        yield Site(rule, node, parent, field, index, new)


def _changes(node: ast.AST, parent: ast.AST, field: str) -> Iterator[tuple[str, list[Any]]]:
    """Yields the rules that change a node, with the nodes that come in its place."""
    if isinstance(node, SIMPLE) or type(node) in BLOCKS:
        yield "drop", [ast.Pass()]
    is_value = field == "value" and isinstance(parent, HOLDERS) and isinstance(node, ast.expr)
    if is_value or field in CONDITIONS or (isinstance(parent, ast.BoolOp) and field == "values"):
        yield "never", [ast.Constant(False)]
        yield "always", [ast.Constant(True)]
    if is_value:
        yield "none", [ast.Constant(None)]
    if field in PARTS and isinstance(node, ast.expr | ast.keyword | ast.withitem):
        yield "without", []
    if isinstance(parent, ast.BinOp) and isinstance(node, ast.expr):
        yield "without", [parent.right if node is parent.left else parent.left]
    if field == "iter":
        yield "empty", [ast.Tuple([], ast.Load())]
    if isinstance(node, DISPLAYS):
        kind = type(node).__name__.removesuffix("Comp").lower()
        yield "empty", [ast.Call(ast.Name(kind, ast.Load()), [], [])]
    if isinstance(node, ast.Call) and node.args:
        yield "bare", [node.args[0]]
    if isinstance(node, ast.With):
        yield "bare", node.body
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "other", [ast.Constant(not node.value)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "other", [ast.Constant(node.value + 1)]


def _names(node: ast.AST) -> Counter[str]:
    """Counts the names in a node, of a compound statement those in its head."""
    fields = ("id", "attr", "arg", "value")
    parts = (part for head in _heads(node) for part in ast.walk(head))
    found = (getattr(part, field, None) for part in parts for field in fields)
    return Counter(name for name in found if isinstance(name, str))


def _heads(node: ast.AST) -> list[ast.AST]:
    head = getattr(node, BLOCKS[type(node)]) if type(node) in BLOCKS else node
    return head if isinstance(head, list) else [head]


def smallest(sites: Sequence[Site], names: Sequence[str]) -> list[Site]:
    """Returns the sites of the smallest nodes that have all the names."""
    having = [
        (sum(1 for head in _heads(site.node) for _ in ast.walk(head)), site)
        for site in sites
        if Counter(names) <= (_names(site.node) or _names(site.parent))
    ]
    return [site for size, site in having if size == min(size for size, _ in having)]


@functools.cache
def functions() -> dict[str, list[tuple[Path, ast.Module, ast.AST]]]:
    """Returns zoo's modules, `module.function`s, classes and `Class.method`s by their names."""
    found: dict[str, list[tuple[Path, ast.Module, ast.AST]]] = {}
    for file in sorted((ROOT / "zoo").rglob("*.py")):
        module = ast.parse(file.read_text())
        named: list[tuple[str, ast.AST]] = [(file.stem, module)]
        for part in module.body:
            if isinstance(part, ast.FunctionDef):
                named.append((f"{file.stem}.{part.name}", part))
            elif isinstance(part, ast.ClassDef):
                methods = [method for method in part.body if isinstance(method, ast.FunctionDef)]
                named += [(part.name, part), *((f"{part.name}.{m.name}", m) for m in methods)]
        for name, node in named:
            found.setdefault(name, []).append((file.relative_to(ROOT), module, node))
    return found


def mutants_of(name: str, changes: Sequence[str] = (), tests: Sequence[str] = ()) -> list[Mutant]:
    """Returns the mutants of a function, all that the rules make where no changes are named.

    Raises:
        LookupError: no function or several have the name, or a change fits nothing in it.
    """
    if len(found := functions().get(name, [])) != 1:
        raise LookupError(f"zoo has {len(found)} functions of the name {name}; one is needed")
    [(file, module, function)] = found
    sites = list(sites_of(function))
    chosen = [(f"{site.rule} {' '.join(_names(site.node))}", site) for site in sites]
    if changes:
        chosen = [(change, site) for change in changes for site in _chosen(sites, name, change)]
    return [Mutant(f"{name}: {what}", file, module, site, (*tests,)) for what, site in chosen]


def _chosen(sites: Sequence[Site], function: str, change: str) -> list[Site]:
    rule, *names = change.split()
    # another statement is put where one can be dropped
    made_by = "drop" if rule == "put" else rule
    found = smallest([site for site in sites if site.rule == made_by], names)
    if not found:
        raise LookupError(f"{change!r} fits nothing in {function}")
    if rule == "put":
        found = [site._replace(new=ast.parse(REPLACEMENTS[change]).body) for site in found]
    return found


def guards() -> Iterator[Mutant]:
    """Yields the mutants of GUARDS."""
    for tests, block in GUARDS.items():
        for line in block.strip().splitlines():
            name, changes = line.strip().split(": ")
            yield from mutants_of(name, changes.split(", "), tests.split())


def main(words: list[str]) -> int:
    """Runs the mutants that are asked for; returns 1 when one survives."""
    if words[:1] == ["--every"]:
        chosen = [mutant for name in words[1:] for mutant in mutants_of(name)]
    else:
        chosen = [
            m for m in guards() if not words or any(w in f"{m.name} {m.tests}" for w in words)
        ]
    chosen = [mutant for mutant in chosen if mutant.text()]
    survivors = 0
    for mutant in chosen:
        start = time.perf_counter()
        found = _found_by(mutant)
        survivors += not found
        seconds = time.perf_counter() - start
        print(f"{mutant.name}: {found or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - survivors} noticed")
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
        if (built := ROOT / "build" / "accelerator").is_dir():
            shutil.copytree(built, folder / "build" / "accelerator")
        (folder / mutant.file).write_text(mutant.text())
        others = [f"--ignore={holder}" for holder in holders]
        room = ROOT / "tests" / mutant.file.parent.name
        rest = str(room.relative_to(ROOT)) if room.is_dir() else "tests"
        found = _failed(folder, mutant, holders) if holders else ""
        return found or _failed(folder, mutant, [rest, *others])


def _failed(folder: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """Returns the first of some tests that fails, '' if none does."""
    words = "accelerator", "host_memory", "replay_check", "test_groups"
    is_there = any(word in test for word in words for test in tests)
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
        raise RuntimeError(f"{mutant.name}: pytest ended with {run.returncode}\n{run.stdout}")
    # of tests in several processes, what these share fails where an assertion ends one of them
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split()[1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
