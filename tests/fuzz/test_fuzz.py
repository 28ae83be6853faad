"""A random chain by a random plan trains bit for bit as the plain chain does."""

from hypothesis import HealthCheck, given, settings

from tests.fuzz.chains import Description, check, descriptions


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(descriptions())
def test_a_random_chain_by_a_random_plan_trains_as_without(description: Description) -> None:
    check(description)
