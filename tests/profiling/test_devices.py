import pytest
import torch

from zoo.errors import ArgumentError
from zoo.profiling.devices import DEVICES, device_named


@pytest.mark.parametrize("name", DEVICES)
def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_traffic(name: str) -> None:
    device = DEVICES[name]
    rate = device.operations[4]
    arithmetic = device.seconds([(int(rate), 8)], torch.float32)
    traffic = device.seconds([(0, int(device.bandwidth))], torch.float32)
    assert arithmetic == pytest.approx(1, rel=1e-3)
    assert traffic == pytest.approx(1, rel=1e-3)
    both = device.seconds([(int(rate), int(device.bandwidth)), (0, 0)], torch.float32)
    assert both == pytest.approx(1 + 2 * device.start, rel=1e-3)


def test_half_precision_is_as_fast_as_the_device_makes_it() -> None:
    a100 = device_named("a100")
    work = [(10**15, 0)]
    assert a100.seconds(work, torch.float32) > 1.9 * a100.seconds(work, torch.bfloat16)


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"device='h200'.*Did you mean nvidia-h200"):
        device_named("h200")
