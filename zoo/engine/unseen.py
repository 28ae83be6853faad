"""Work at the side of a training, planning above all, that nobody who watches it is to see.

Counters of operations and profilers of modules would take a step on fake tensors for one of the
model's, and the search for NaN would read numbers that a fake tensor does not have.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from zoo.engine.global_hooks import silenced


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hides the block from dispatch modes, hooks for all modules and anomaly detection.

    Inside of a mode for fake tensors all modes stay: nothing there is for real.
    """
    modes = _disable_current_modes() if active_fake_mode() is None else contextlib.nullcontext()
    with modes, silenced(), torch.autograd.set_detect_anomaly(False):
        yield
