"""Random models by random plans train bit for bit as without."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.chains import Description, check, descriptions
from tests.fuzz.foreign import Foreign, check_foreign, foreign


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(descriptions())
def test_a_random_chain_by_a_random_plan_trains_as_without(description: Description) -> None:
    check(description)


# models that cannot be planned for, and hooks where no gradient comes
@pytest.mark.filterwarnings("ignore")
@settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(foreign())
def test_a_random_module_by_a_random_plan_trains_as_without(description: Foreign) -> None:
    check_foreign(description)
