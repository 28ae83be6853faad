"""No call of the engine waits for a device: one in a step could not be captured, and costs time."""

import ast
from collections.abc import Iterator
from pathlib import Path

import zoo

ROOM = Path(zoo.__file__).parent
# what runs in a training step: forwards by a plan, replays, an optimizer in the backward
IN_A_STEP = ("engine", "optimizer", "loss.py", "invocation.py", "tracing/planned_forward.py")
IN_A_STEP += ("tracing/forward_patch.py", "tracing/plan_cache.py")
# methods of tensors, streams and events, and functions, that wait for a device
WAITING = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "synchronize"),
    *("query", "wait_event", "elapsed_time", "equal", "allclose", "is_nonzero", "empty_cache"),
}
# and where one may be called
ALLOWED = {
    ("engine/devices.py", "_is_packable"): "once in a process, of a state of the CPU's generator",
    ("engine/devices.py", "is_same_state"): "states of generators are on the host",
    ("engine/devices.py", "synchronize"): "for measurements",
    ("engine/host_memory.py", "copy_rate"): "measures copies before the first step",
    ("engine/host_memory.py", "wait"): "a stream waits for another one, not the program",
    ("engine/host_memory.py", "wait_for_kernels"): "the side stream waits, not the program",
    ("engine/replay_check.py", "take"): "after the backwards that zoo.check_replays compares",
    ("optimizer/in_backward.py", "__eq__"): "a learning rate that was written during a step",
    ("optimizer/independence.py", "_is_independent"): "before the first step",
}


def waiting_calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """Yields the functions in which something that waits is called, and the name of that."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in WAITING:
                yield function, name
        inner = node.name if isinstance(node, ast.FunctionDef) else function
        yield from waiting_calls(node, inner)


def test_what_runs_in_a_step_calls_nothing_that_waits() -> None:
    files = [path for name in IN_A_STEP for path in sorted((ROOM / name).rglob("*.py"))]
    files += [ROOM / name for name in IN_A_STEP if name.endswith(".py")]
    assert len(files) > 20
    found = {
        (path.relative_to(ROOM).as_posix(), function): name
        for path in files
        for function, name in waiting_calls(ast.parse(path.read_text("utf-8")))
    }
    assert found.keys() == ALLOWED.keys(), found


def test_a_call_that_waits_is_found() -> None:
    tree = ast.parse("def replay(kernel):\n    return [torch.equal(a, b) for a, b in kernel.pairs]")
    assert [*waiting_calls(tree)] == [("replay", "equal")]
