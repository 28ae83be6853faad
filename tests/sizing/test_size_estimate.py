"""Kernel workspaces at a size where nothing runs are those that a trial there shows."""

from collections.abc import Sequence

import pytest
import torch

from tests.profiling.models import profile as made
from tests.profiling.test_kernel_costs import Median
from tests.training import Residuals, images
from zoo.policy.training_step import Profile
from zoo.profiling.kernel_costs import KernelCosts
from zoo.sizing.size_estimate import SizeEstimates, extrapolated, input_sizes, plan_policy


def profile(size: int) -> Profile:
    x = torch.rand(size, requires_grad=True)
    return made(Median(), x)


def test_workspaces_grow_with_the_tensors() -> None:
    small, large = profile(1 << 10), profile(1 << 16)
    found = large.costs(kernels=extrapolated(small.kernels(), small.specs, large.specs))
    real = large.costs(kernels=large.kernels())
    assert found.forward == real.forward == (4 * (1 << 16) + 4,)
    assert found.saved == real.saved
    assert found.backward[0] == pytest.approx(real.backward[0], rel=1e-3)


@pytest.mark.parametrize(
    ("count", "seconds", "ran"),
    [
        (1, 100.0, [1]),
        (64, 0.01, [1, 64]),
        (1000, 0.01, [1, 218]),
        (64, 100.0, [1]),
    ],
)
def test_a_size_that_takes_long_is_extrapolated_from_one_that_takes_less(
    monkeypatch: pytest.MonkeyPatch, count: int, seconds: float, ran: list[int]
) -> None:
    sizes: list[int] = []

    def kernels(found: Profile) -> Sequence[KernelCosts]:
        sizes.append(found.events.sizes[min(found.events.inputs)] // images(1, 4, 8).nbytes)
        return [KernelCosts(seconds * sizes[-1] / len(found.specs), 0) for _ in found.specs]

    monkeypatch.setattr(Profile, "kernels", kernels)
    model = Residuals(1)
    estimates = SizeEstimates(
        model,
        input_sizes(images(1, 4, 8), 0)[0],
        plan_policy(model, False, None),
        max_overhead=None,
        unit=1,
        optimizer=None,
        loss=None,
        device=None,
    )
    for size in (1, count, count):
        assert estimates.needed(size) is not None
    assert sizes == ran
    costs = estimates.planner_of(count).step.costs
    # kernels whose tensors do not grow take no longer
    assert sum(costs.seconds) + sum(costs.seconds_backward) >= seconds * count * 0.8
