"""In groups of two and four processes a plan changes no bit, whatever wraps the model.

By name: DistributedDataParallel, also with a static graph, unused parameters, `no_sync`, and
wrapped before `zoo.checkpoint`, which then takes the model or the wrapper; a norm of all processes;
FSDP2 and tensor parallelism before and after `zoo.checkpoint`; a pipeline of parts of a model; one
plan for all.
"""

import pytest
import torch

from tests.accelerator import collectives
from tests.groups import CHECKS
from tests.processes import Failures, failures_in

ON_CPU = torch.get_default_device().type == "cpu"
# four processes take minutes where each kernel copies
WORLDS = [2, 4] if ON_CPU else [2]

pytestmark = pytest.mark.skipif(
    not ON_CPU and collectives.missing() is not None, reason=str(collectives.missing())
)


@pytest.fixture(scope="module", params=WORLDS)
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return failures_in(request.param, "tests.groups", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_in_each_process(name: str, failures: Failures) -> None:
    """DDP, `find_unused_parameters` | "ready only once", if reentrant | exact
    ranks that plan by their own clocks | | one plan for all
    """
    assert not any(failures(name)), "\n".join(failures(name))
