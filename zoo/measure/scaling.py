"""What the steps take for real at a size where running them would take minutes.

A kernel's hidden bytes and its seconds grow at most as the tensors at hand do: oneDNN's convolution
reorders its input, its output and its weights, and only the first two grow with a batch.

    size 8, run for real         size 240
    a tensor    32 MiB             960 MiB    x30
    hidden       9 MiB             270 MiB    x30

So what a smaller size took is multiplied by as much as that tensor grows which grows most. Steps
that are quick are run again for tensors of twice the bytes: a kernel that is chosen anew for larger
tensors was a small one.
"""

import functools
import math
from dataclasses import dataclass

import torch

from zoo.measure.profile import Profile, Sample
from zoo.measure.step import StepRun
from zoo.measure.trial import Trial, run_trial

# seconds that a run of all kinds of steps may take at a size, about
PATIENCE = 2.0
# a quick step is not run again for tensors of less than so many times the bytes
TWICE = 2


@dataclass(frozen=True)
class _Known:
    """A step that was run for real: the bytes of its storages, on fake tensors, for real."""

    sizes: tuple[int, ...]
    run: StepRun
    trial: Trial

    def scaled(self, sizes: tuple[int, ...], run: StepRun) -> Trial:
        """Returns what the step would take with storages of so many bytes."""
        trial, ratio = self.trial, self.ratio(sizes)
        hidden = (
            max(trial.forward - self.run.forward, 0),
            max(trial.kept - sum(self.run.new_sizes), 0),
            max(trial.backward - self.run.backward, 0),
        )
        forward, kept, backward = (math.ceil(count * ratio) for count in hidden)
        return Trial(
            forward=run.forward + forward,
            kept=sum(run.new_sizes) + kept,
            backward=run.backward + backward,
            seconds=trial.seconds * ratio,
            seconds_until_saved=trial.seconds_until_saved * ratio,
            seconds_backward=trial.seconds_backward * ratio,
        )

    def ratio(self, sizes: tuple[int, ...]) -> float:
        """Returns how many times as large that storage is which grows most."""
        pairs = zip((sum(self.sizes), *self.sizes), (sum(sizes), *sizes), strict=False)
        return max((there / here for here, there in pairs if here), default=1.0)


class Patient:
    """Runs the steps of a model at several sizes for real, those that take long at smaller ones."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def seconds(self, profile: Profile) -> float:
        """Returns about how long one run of all steps takes, infinite where nothing is known."""
        if len(self._known) != len(profile.runs):
            return math.inf
        return sum(_seconds(self._scaled(step, profile)) for step in range(len(self._known)))

    def trials(self, profile: Profile) -> tuple[Trial, ...]:
        """Returns what each step takes; where nothing is known, all are run."""
        if PATIENCE < self.seconds(profile) < math.inf:
            return profile.trials(functools.partial(self._run_or_scale, profile))
        return self.run(profile)

    def run(self, profile: Profile) -> tuple[Trial, ...]:
        """Runs all steps, however long they take, and knows them from now on."""
        found = profile.trials()
        known = [
            _Known(profile.sizes_at(step), run, trial)
            for step, (run, trial) in enumerate(zip(profile.runs, found, strict=True))
        ]
        if sum(map(_bytes, known)) > sum(map(_bytes, self._known)):
            self._known = known
        return found

    def _scaled(self, step: int, profile: Profile) -> Trial:
        return self._known[step].scaled(profile.sizes_at(step), profile.runs[step])

    def _run_or_scale(
        self, profile: Profile, step: int, sample: Sample, device: torch.device
    ) -> Trial:
        scaled, sizes = self._scaled(step, profile), profile.sizes_at(step)
        is_quick = _seconds(scaled) <= PATIENCE / len(self._known)
        if not is_quick or self._known[step].ratio(sizes) < TWICE:
            return scaled
        trial = run_trial(*sample, device)
        self._known[step] = _Known(sizes, profile.runs[step], trial)
        return trial


def _seconds(trial: Trial) -> float:
    return trial.seconds + trial.seconds_backward


def _bytes(step: _Known) -> int:
    return sum(step.sizes)
