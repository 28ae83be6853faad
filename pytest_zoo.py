"""A pytest fixture that fails a test which takes too much memory, on CPU and CUDA.

    def test_a_step_fits(memory_budget):
        with memory_budget("2GiB"):
            step()

pytest finds it once zoo is installed. It lies beside the package, not in it, because pytest loads
it at every start, and `import zoo` would load torch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from zoo.profiling.peak_memory import Spending

Budget = Callable[..., AbstractContextManager["Spending"]]


@pytest.fixture
def memory_budget(record_property: Callable[[str, object], None]) -> Budget:
    """Bounds what a block allocates at once: `with memory_budget("2GiB"): step()`.

    The budget is bytes, or text such as "2GiB" or "500MB", for what the block allocates, not for
    what was there before; `zoo.profiling.peak_memory` has the details. Without `device="cpu"`,
    "cuda" or "cuda:1" it holds for the CPU and for each accelerator in use. `with ... as spent`
    gives the measured bytes afterwards: `spent.peak`, and by device `spent.peaks`; they also go
    into the JUnit XML of `pytest --junit-xml` as `peak_bytes_cpu`.

    The test fails with the measured peak; an exception of the block is passed on as it is.
    """

    @contextmanager
    def memory_budget(budget: int | str, device: str | None = None) -> Iterator["Spending"]:
        from zoo.profiling.peak_memory import spending
        from zoo.units import parse_bytes

        __tracebackhide__ = True
        limit = parse_bytes(budget, "memory_budget")
        with spending(device) as spent:
            yield spent
        for place, peak in spent.peaks.items():
            record_property(f"peak_bytes_{place}", peak)
        above = [place for place, peak in spent.peaks.items() if peak > limit]
        if above:
            pytest.fail("; ".join(_sentence(spent, place, limit) for place in above))

    return memory_budget


def _sentence(spent: "Spending", place: str, limit: int) -> str:
    """Says what was measured, what was allowed, and where to look."""
    from zoo.units import format_bytes

    peak = spent.peaks[place]
    held = ", ".join(format_bytes(size) for size in spent.largest.get(place, [])[:3])
    blocks = f" (largest then: {held})" if held else ""
    return (
        f"the block allocated {format_bytes(peak)} at once on {place}{blocks}, {peak - limit:,} B "
        f"more than its memory_budget of {format_bytes(limit)}; zoo.track tells who holds them"
    )
