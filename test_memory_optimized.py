"""Compares training with and without checkpointing here: memory, time, and whether all is exact.

Three variants of each model: the baseline, checkpointed, and checkpointed with the optimizer in the
backward, which `--no-optimizer-in-backward` leaves out.

    python test_memory_optimized.py
    python test_memory_optimized.py configs/lstm_wikitext_shape.yaml
    python test_memory_optimized.py --model resnet50 densenet121 --batch-size 16 --checkpoint sqrt
    python test_memory_optimized.py --compare results-of-last-week.jsonl --tolerance 0.02
    torchrun --nproc-per-node 2 test_memory_optimized.py    # a report for each of two processes

`zoo compare` is the same. Exit code 0: exact, and saved what the config says; 1: not so, a cell
failed, or a peak is larger than in the results to compare with; 2: no such config, key or value;
130: interrupted, and the same command goes on. Under pytest this file asserts the same on small
inputs.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

try:
    from zoo.cli.comparison import in_ranks, is_one_of_many, run_compare
    from zoo.cli.main import exit_code
    from zoo.harness.comparison_cells import expand
    from zoo.harness.config import config_folder, read
    from zoo.harness.worker import work
    from zoo.invocation import InputSpec
    from zoo.report.rows import rows
    from zoo.tracing.isolated_trace import StepTrace, step_trace_of
except ModuleNotFoundError as missing:
    print(f"this needs {missing.name}: pip install 'zoo-checkpoint[compare]'", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

FILE = "test_memory_optimized.py"


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison that a command line asks for and returns the exit code."""

    def command() -> int:
        return exit_code(FILE, lambda: run_compare(arguments, f"python {FILE}"))

    return in_ranks(command) if is_one_of_many() else command()


def pytest_generate_tests(metafunc: Any) -> None:
    """Gives each family of configs/quick.yaml a test; pytest itself need not be there otherwise."""
    config = read(config_folder() / "quick.yaml", (), {"steps": 2})
    pairs = list(zip(config.models, expand(config), strict=True))
    metafunc.parametrize(("model", "cells"), pairs, ids=[model.name for model in config.models])


def test_checkpointing_changes_no_bit_and_saves_memory(
    model: Any, cells: Any, monkeypatch: Any
) -> None:
    """Runs a family's variants here, each as the comparison does in a process of its own."""
    traces: dict[Any, StepTrace] = {}

    def traced(model: Any, given: Any, loss: Any, **judged: bool) -> StepTrace:
        """Traces once for both variants: a plan differs with the optimizer, a trace does not."""
        sizes = InputSpec.of(given, model).sizes
        if sizes not in traces:
            traces[sizes] = step_trace_of(model, given, loss, **judged)
        return traces[sizes]

    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", traced)
    # plans are the same, in half the time
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    kinds = [kind for kind in cells if kind != "timing"]
    # what the page draws is not asserted
    measured = {kind: work(cells[kind], also=lambda *_: {}) for kind in kinds}
    records = {kind: {"status": "done", **measured[kind]} for kind in kinds}
    (row,) = rows([{"model": asdict(model), **records, "timing": {"status": "done"}}])
    assert row.variants == ["baseline", "checkpointed", "optimizer_in_backward"]
    assert row.exact
    assert not row.faults
    assert (
        row.peaks["tensor_peak"]["optimizer_in_backward"]
        <= row.peaks["tensor_peak"]["checkpointed"]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
