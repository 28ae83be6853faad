"""The device that tests run on: the CPU, or what `pytest --device` names.

    pytest --device soft tests/engine      the software accelerator, built by a compiler
    pytest --device cuda tests/engine      one that is here

Tests name no device, so that torch's default device is where they run.

Also keeps what the imports made out of garbage collection: a million objects, which each measured
step would visit, and each forked process copy.
"""

import gc
import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import software

# tests that hold the CPU's own, by a part of their names, and why they say nothing of a device
OF_THE_CPU = {
    "OfNumpy": "NumPy's arrays are on the CPU",
    "test_streams_that_move_before_the_backward": "NumPy's arrays are on the CPU",
    "drops_with_other_draws_between-3": "seeds the CPU's generator alone",
    "drops_few-0": "a state of the CPU's generator takes more bytes than these draws",
    "test_a_mask_is_drawn_once_more": "counts the kernels that the CPU draws by",
    "test_threads_that_train_at_once_draw": "names the CPU's stream, which its threads share",
}
# what the software accelerator has no kernel for
OF_OTHER_DEVICES = {"lstm": "torch's kernel of an LSTM's cell is for CUDA and XPU"}


# the files that take the longest, longest first
LONG = (
    "test_memory_optimized.py", "test_budget.py", "test_ranks.py", "test_docs.py",
    "test_max_size.py", "test_recorded_steps.py", "test_packaging.py", "test_groups.py",
    "test_commands.py", "test_examples.py", "test_options.py", "test_worker.py", "test_verify.py",
    "test_every.py", "test_kill.py", "test_lstm.py", "test_optimal.py", "test_sizes.py",
    "test_emulated_captures.py", "test_processes.py", "test_run.py", "test_graphed_step.py",
    "test_host_memory.py", "test_least.py", "test_exact.py", "test_interrupts.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors are: cpu, soft, cuda, ...")
    if importlib.util.find_spec("pytest_timeout") is None:
        # setup.cfg sets it, and without the plugin it would be an error
        parser.addini("timeout", "is not kept without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device == software.NAME:
        if (fault := software.missing()) is not None:
            pytest.exit(f"nothing runs with --device {device}: {fault}", returncode=0)
        software.register()
        software.offer()
    if device != "cpu":
        torch.set_default_device(device)


def pytest_collection_finish() -> None:
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _forgets_compiled_frames() -> Iterator[None]:
    """A frame that the compiler gave up in one file would run uncompiled in the next ones."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def _freezes_imports() -> Iterator[None]:
    """A file's tests may have imported more."""
    yield
    _freeze()


@pytest.fixture(autouse=True)
def _freezes_what_was_collected() -> Iterator[None]:
    """A test that collected everything visits what it left once more, and no later test does."""
    before = gc.get_stats()[-1]["collections"]
    yield
    if gc.get_stats()[-1]["collections"] > before:
        _freeze()


@pytest.fixture
def without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in this process, as one that uses a device does: plans are the same.

    That takes half the time, since a forked process starts with what torch and fake tensors cache
    and what it adds is lost. Files that ask what plans take, not what planning leaves behind, use
    it.
    """
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    # what a copied model does beside its steps matters to no such test
    monkeypatch.setattr("zoo.profiling.isolation.MOST_HERE", 1000)


@pytest.fixture
def few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Knows the least time at 100 amounts of memory instead of 500, and plans for 40 budgets.

    Of each kind three are tracked for a rank instead of ten, and four are shown instead of twelve.
    That takes a fraction of the time, and what holds for the best of many plans holds for these.
    Without NumPy nothing is planned.
    """
    if importlib.util.find_spec("numpy") is None:
        return
    monkeypatch.setattr("zoo.policy.proposals.MOST", 3)
    monkeypatch.setattr("zoo.policy.budget.SHOWN", 4)
    monkeypatch.setattr("zoo.planner.optimal.VALUES", 0)
    monkeypatch.setattr("zoo.planner.optimal._count_of_plans", lambda steps: 40)


@pytest.fixture(autouse=True)
def _leaves_the_thread_as_it_was() -> Iterator[None]:
    """A mode that a test leaves behind changes what all later ones of its process compute."""
    before = _state_of_thread()
    yield
    assert _state_of_thread() == before


def _state_of_thread() -> tuple[object, ...]:
    return (
        torch._C._get_torch_function_state(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    # so that no process waits at the end for another one's long file
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    device = config.getoption("--device")
    if device == "cpu":
        return
    reasons = OF_THE_CPU | (OF_OTHER_DEVICES if device == software.NAME else {})
    for item in items:
        for part, reason in reasons.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
