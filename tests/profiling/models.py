"""A model whose saved tensors are easily counted, for tests of traced and of tracked steps."""

import torch
from torch import nn

KIB = 1024


class Exponentials(nn.Module):
    """`count` exponentials in a row of a weight of 16 KiB: each saves its result."""

    def __init__(self, count=3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * KIB))
        self.register_buffer("offset", torch.zeros(KIB // 2))
        self.count = count

    def forward(self):
        value = self.weight
        for _ in range(self.count):
            value = value.exp()
        return value
