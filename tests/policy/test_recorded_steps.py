"""Budgets hold on CUDA: what is predicted today, beside what a real GPU took."""

import pytest

from tests.policy.recorded_steps import MODELS, steps
from tests.profiling import cuda_runtime

CASES = [step["case"] for model in MODELS.values() for step in model["steps"]]


@pytest.mark.parametrize("case", CASES)
def test_what_is_predicted_is_what_a_gpu_took_and_at_most_half_a_percent_more(case: str) -> None:
    for library in ("timm", "transformers", "numpy"):
        pytest.importorskip(library)
    if reason := cuda_runtime.missing():
        pytest.skip(reason)
    (step,) = (step for step in steps() if step.case == case)
    print(f"{step.case}: {step.predicted:,} predicted, {step.taken:,} taken")
    assert 0 <= step.above <= 0.005, step
