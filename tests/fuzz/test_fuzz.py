"""Random models by random plans train bit for bit as without."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.programs import Program, check_program, programs


# models that cannot be planned for, and hooks where no gradient comes
@pytest.mark.filterwarnings("ignore")
@settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(programs())
def test_a_random_program_by_a_random_plan_trains_as_without(description: Program) -> None:
    check_program(description)
