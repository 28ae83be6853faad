"""Seconds that a kernel should take on a device that may not be here: a roofline.

A kernel takes as long as its arithmetic or its traffic, whichever is longer, and a while to start.
The numbers are vendors' peaks; a plan needs only how steps compare. Where the device is here,
`kernel_costs` measures instead.

Sources: NVIDIA's data sheets of the H200, H100 (SXM), A100 (80 GB, SXM), L4, T4 and V100 (SXM2) and
the Ada architecture's white paper; dense numbers, with float32 products in TF32 where there is one
for `torch.set_float32_matmul_precision("high")` and for cuDNN's convolutions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zoo.errors import ArgumentError, nearest, shortened


@dataclass(frozen=True)
class Device:
    """A device by its peaks: operations a second for each size of number, bytes a second.

    `operations` maps the bytes of a number (8, 4, 2) to operations a second; `start` is the seconds
    between one kernel and the next that an eager program needs.
    """

    operations: Mapping[int, float]
    bandwidth: float
    start: float

    def seconds(self, work: Iterable[tuple[int, int]], dtype: torch.dtype) -> float:
        """Returns the seconds of kernels given as (operations, bytes), for numbers of a type."""
        size = min(self.operations, key=lambda known: abs(known - dtype.itemsize))
        rate = self.operations[size]
        return sum(
            max(operations / rate, moved / self.bandwidth) + self.start
            for operations, moved in work
        )


DEVICES: dict[str, Device] = {
    "nvidia-h200": Device({8: 67e12, 4: 494e12, 2: 989e12}, 4.8e12, 5e-6),
    "nvidia-h100": Device({8: 67e12, 4: 494e12, 2: 989e12}, 3.35e12, 5e-6),
    "a100": Device({8: 19.5e12, 4: 156e12, 2: 312e12}, 2.039e12, 5e-6),
    "rtx-4090": Device({8: 1.29e12, 4: 82.6e12, 2: 165.2e12}, 1.008e12, 5e-6),
    "l4": Device({8: 0.47e12, 4: 60e12, 2: 121e12}, 0.3e12, 5e-6),
    "t4": Device({8: 0.25e12, 4: 8.1e12, 2: 65e12}, 0.32e12, 5e-6),
    "v100": Device({8: 7.8e12, 4: 15.7e12, 2: 125e12}, 0.9e12, 5e-6),
    # two cores with AVX2 and one channel of memory: a small machine, not any one
    "cpu": Device({8: 5e10, 4: 1e11, 2: 1e11}, 1.5e10, 5e-6),
}

_MOVE = " For the device that is here, move model and inputs to it and leave device= out"


def device_named(name: str) -> Device:
    """Returns a device of the table.

    Raises:
        ArgumentError: it is not in the table.
    """
    if name not in DEVICES:
        is_here = str(name).partition(":")[0] in ("cuda", "mps", "xpu")
        hint = _MOVE if is_here else nearest(str(name), DEVICES)
        raise ArgumentError(
            f"device={shortened(name)} is not in the table: {', '.join(DEVICES)}.{hint}"
        )
    return DEVICES[name]
