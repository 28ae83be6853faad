import pytest

from tests.traces import tracing_once


@pytest.fixture
def traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a model once for all plans that a test puts in force on it."""
    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", tracing_once({}, id))
