"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382), as timm computes it.

torchvision's `StochasticDepth` draws in a scripted function; this is the same layer in plain torch.
"""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops whole samples of a residual branch in training: (N, ...) -> the same shape.

    Each is dropped with probability `rate`; the others are scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Drops samples in training."""
        if not self.training:
            return branch
        keep = 1 - self.rate
        mask = branch.new_empty((len(branch),) + (1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask.div_(keep)

    def extra_repr(self) -> str:
        """Shows the rate."""
        return f"rate={self.rate}"


def drop_path_rates(rate: float, blocks: int) -> list[float]:
    """Returns rates that rise linearly from 0 at the first block to `rate` at the last."""
    return [rate * block / max(blocks - 1, 1) for block in range(blocks)]
