"""A fixed part of torch's own database of operators, with and without a recording.

`make operators` runs all of it.
"""

import zlib
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's database of operators needs expecttest")
pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="this torch comes without its database of operators",
    exc_type=ImportError,
)

import tests.operators
from tests.operators import Outcome, dtypes_of, one_of, op_db, quietly, samples_of

PARTS = 8


def two_of(info: Any) -> list[torch.dtype]:
    """Returns an operator's first data type and one of the others, which depends on its name."""
    first, *others = dtypes_of(info) or [None]
    place = zlib.crc32(info.full_name.encode()) % max(len(others), 1)
    return [dtype for dtype in (first, *others[place : place + 1]) if dtype is not None]


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_are_replayed_bit_for_bit(part: int) -> None:
    found = Outcome()
    for info in op_db:
        if zlib.crc32(info.name.encode()) % PARTS == part:
            for dtype in two_of(info):
                found.add(quietly(info, dtype, lambda i=info, d=dtype: one_of(i, d, among=5)))
    assert found.differing == []
    assert sorted(found.undeclared) == [], "these kernels write arguments that no schema declares"
    assert found.exact > 300
    # the rest returns views of arguments, or tensors without storage
    assert found.replayed > 0.95 * found.exact


def test_a_write_that_no_schema_declares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.operators, "NORMS", set())
    found = Outcome()
    for info in op_db:
        if info.name == "nn.functional.batch_norm" and torch.float32 in dtypes_of(info):
            found.add(quietly(info, torch.float32, lambda i=info: samples_of(i, torch.float32, 3)))
    assert found.undeclared == {
        "aten::native_batch_norm writes running_mean",
        "aten::native_batch_norm writes running_var",
    }


def test_operators_without_a_data_type_on_the_cpu() -> None:
    # the first two are of CUDA alone, and the others know none but very short numbers
    assert {info.name for info in op_db if not dtypes_of(info)} <= {
        "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward",
        "nn.functional.batch_norm", "torch._scaled_mm", "torch._scaled_mm_v2",
    }  # fmt: skip
