"""What a comparison with a draw says is known only where no draw could say otherwise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zoo


class Asking(nn.Module):
    """Takes the branch that a condition on a draw says, in either of which it computes."""

    def __init__(self, says: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.says = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), says

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if self.says(torch.rand([])) else self.layers(x) * 2


KNOWN: list[Callable[[Tensor], Tensor]] = [
    lambda draw: draw < 0,
    lambda draw: draw >= 0.0,
    lambda draw: draw > 1,
    lambda draw: draw <= 1.0,
    lambda draw: torch.ge(draw, False),
    lambda draw: torch.lt(draw, -1),
]
OPEN: list[Callable[[Tensor], Tensor]] = [
    lambda draw: draw < 0.5,
    lambda draw: draw <= 0,
    lambda draw: draw < torch.zeros([]),
    lambda draw: draw == 0,
    lambda draw: (draw < 0).logical_not_(),
    lambda draw: draw.sub_(0.5) < 0,
    lambda draw: draw - 0.5 < 0,
    lambda draw: torch.randn([]) < 0,
]


@pytest.mark.parametrize("says", KNOWN)
def test_a_branch_that_no_draw_changes_is_followed(says: Callable[[Tensor], Tensor]) -> None:
    found = zoo.chain_of(Asking(says), torch.rand(2, 4))
    assert found.reason is None
    assert any("rand" in name for name in found.names)
    assert any("mul" in name for name in found.names) != bool(says(torch.rand([])))


@pytest.mark.parametrize("says", OPEN)
def test_any_other_is_not(says: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(zoo.ArgumentError, match="reads a number out of a tensor by __bool__"):
        zoo.chain_of(Asking(says), torch.rand(2, 4))
