"""The optimizers of comparisons and benchmarks, by name.

They are torch's fused ones: others allocate copies of a parameter, which in a language model would
hide the activations' peak.
"""

from collections.abc import Callable
from functools import partial

import torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.05, fused=True),
}
