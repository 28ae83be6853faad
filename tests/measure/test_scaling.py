"""Bytes that kernels hide, at a size where nothing is run: those that a real run there shows."""

import pytest
import torch

from tests.measure.test_trial import Median
from zoo.chain import outline
from zoo.measure import scaling
from zoo.measure.profile import Profile
from zoo.measure.scaling import Patient


def profile(size: int) -> Profile:
    x = torch.rand(size, requires_grad=True)
    return Profile(Median(), outline(Median().steps_for(x)), (x,))


def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts real runs of single steps: the numbers of elements that they were run on."""
    found: list[int] = []
    real = scaling.run_trial

    def counted(step, kinds, *others):
        found.append(kinds[0].size[0])
        return real(step, kinds, *others)

    monkeypatch.setattr(scaling, "run_trial", counted)
    return found


def test_what_a_step_hides_is_scaled_where_it_would_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "PATIENCE", 0.0)
    patient, small, large = Patient(), profile(1 << 10), profile(1 << 16)
    patient.trials(small)
    ran = runs(monkeypatch)
    scaled, real = large.costs(trials=patient.trials(large)), large.costs(trials=large.trials())
    assert ran == []
    assert scaled.forward == real.forward == (4 * (1 << 16) + 4,)
    assert scaled.saved == real.saved
    assert scaled.backward[0] == pytest.approx(real.backward[0], rel=1e-3)


def test_a_quick_step_is_run_again_for_twice_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Patient()
    patient.trials(profile(1 << 10))
    ran = runs(monkeypatch)
    slow = iter([scaling.PATIENCE * 2] * 3)
    monkeypatch.setattr(Patient, "seconds", lambda *_: next(slow))
    for size in (1 << 11, (1 << 12) - 1, 1 << 12):
        patient.trials(profile(size))
    assert ran == [1 << 11, 1 << 12]
