"""The device that tests run on: the CPU, or what `pytest --device` names.

    pytest --device soft tests/engine      the software accelerator, built by a compiler
    pytest --device cuda tests/engine      one that is here

Tests name no device, so that torch's default device is where they run.
"""

import pytest
import torch

from tests.accelerator import software


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors are: cpu, soft, cuda, ...")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device == software.NAME:
        if (fault := software.missing()) is not None:
            pytest.exit(
                f"--device {device}: {fault}", returncode=pytest.ExitCode.NO_TESTS_COLLECTED
            )
        software.register()
        software.offer()
    if device != "cpu":
        torch.set_default_device(device)
