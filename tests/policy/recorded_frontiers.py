"""Frontiers with and without offloading, by the seconds that kernels took on an H200.

    python -m tests.policy.recorded_frontiers             three models: some minutes
    python -m tests.policy.recorded_frontiers "ViT-B/16, 128"

A line is a budget, as a share of the baseline's predicted peak: the least predicted time of any
plan within it, as a ratio to the baseline's, without and with offloading, and the bytes on the host
by the latter. Kernels take what `recorded_steps.json` has of them, and copies pass beside them at
the rate of the H200's link (`zoo.profiling.kernel_costs`). No step ran by these plans.
"""

import json
import sys
from typing import Any

from tests.policy.recorded_steps import MODELS
from tests.profiling import cuda_runtime

NAMES = "timm ResNet-50, 256", "ViT-B/16, 128", "HF GPT-2, 16x1024"
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
Best = tuple[float, int] | None


def frontiers(name: str) -> list[list[Best]]:
    """Returns time and bytes on the host for each share, without and with offloading.

    It runs on emulated CUDA.
    """
    # imported late, since only the process on emulated CUDA needs torch's CUDA
    import torch  # noqa: PLC0415

    from tests.policy.recorded_steps import planner_of  # noqa: PLC0415
    from zoo.planner.costs import CopyRate  # noqa: PLC0415
    from zoo.policy.budget import StepPlanner  # noqa: PLC0415
    from zoo.policy.goal import Offload  # noqa: PLC0415
    from zoo.policy.training_step import CountedStep  # noqa: PLC0415
    from zoo.profiling.kernel_costs import rated_device  # noqa: PLC0415

    device: Any = rated_device("h200", torch.device("meta"))
    CountedStep.copies = CopyRate(device.to_host)
    planner = planner_of(name)
    offloading = StepPlanner(planner.step, Offload(is_on=True))
    return [[_fastest(one, share) for share in SHARES] for one in (planner, offloading)]


def _fastest(planner: Any, share: float) -> Best:
    within = [p for p in planner.points if p.peak <= share * planner.baseline.peak]
    return min(((point.time_ratio, point.offloaded) for point in within), default=None)


def recorded(name: str) -> list[list[Best]]:
    """Returns `frontiers` of a model, from a process on emulated CUDA."""
    program = "from tests.policy.recorded_frontiers import frontiers\n"
    # an H200 is a Hopper: compute capability 9.0
    found: list[list[Best]] = cuda_runtime.run(
        f"{program}print(json.dumps(frontiers({json.dumps(name)})))", SOFTWARE_CUDA_MAJOR="9"
    )
    return found


def main() -> None:
    """Prints the table."""
    print("| model | of the baseline | time without | time with | on the host, GiB |")
    print("|---|--:|--:|--:|--:|")
    for name in sys.argv[1:] or NAMES:
        assert "seconds" in MODELS[name], f"no seconds of {name} were recorded"
        for share, kept, offloaded in zip(SHARES, *recorded(name), strict=True):
            times = (f"×{best[0]:.3f}" if best else "-" for best in (kept, offloaded))
            host = f"{offloaded[1] / 2**30:.2f}" if offloaded else "-"
            print(f"| {name} | ×{share:.2f} | {' | '.join(times)} | {host} |", flush=True)


if __name__ == "__main__":
    main()
