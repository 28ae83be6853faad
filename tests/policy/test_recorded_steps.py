"""Budgets hold on CUDA: what is predicted today, beside what a real GPU took."""

import pytest

from tests.policy.recorded_steps import MODELS, steps
from tests.profiling import cuda_runtime


@pytest.mark.parametrize("model", MODELS)
def test_what_is_predicted_is_what_a_gpu_took_and_at_most_half_a_percent_more(model: str) -> None:
    for library in ("timm", "transformers", "numpy"):
        pytest.importorskip(library)
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    for step in steps(model):
        print(f"{step.case}: {step.predicted:,} predicted, {step.taken:,} taken")
        assert 0 <= step.above <= 0.005, step
