"""In groups of two and four processes a plan changes no bit, whatever wraps the model.

By name: DistributedDataParallel, also with a static graph, unused parameters, `no_sync`, and
wrapped before `zoo.checkpoint`, which then takes the model or the wrapper; a norm of all processes;
FSDP2 and tensor parallelism before and after `zoo.checkpoint`; a pipeline of parts of a model; one
plan for all.
"""

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.accelerator import collectives
from tests.groups import CHECKS, IN_FOUR
from tests.processes import Failures, failures_in

ON_CPU = torch.get_default_device().type == "cpu"
# for each number of processes the checks; four take minutes where each kernel copies
NAMES: dict[int, Sequence[str]] = {2: [*CHECKS], 4: IN_FOUR if ON_CPU else ()}

pytestmark = pytest.mark.skipif(
    not ON_CPU and collectives.missing() is not None, reason=str(collectives.missing())
)


@pytest.fixture(scope="module")
def failures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """Returns what starts a number of processes once, and asks them."""

    @functools.cache
    def started(world: int) -> Failures:
        folder = tmp_path_factory.mktemp("processes")
        return failures_in(world, "tests.groups", folder, NAMES[world])

    return started


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in NAMES.items() for name in names]
)
def test_it_holds_in_each_process(
    world: int, name: str, failures_of: Callable[[int], Failures]
) -> None:
    """DDP, `find_unused_parameters` | "ready only once", if reentrant | exact
    ranks that plan by their own clocks | | one plan for all
    """
    failures = failures_of(world)(name)
    assert not any(failures), "\n".join(failures)
