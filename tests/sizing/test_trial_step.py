"""A step that is run for real holds what a training loop holds."""

import functools

import torch
from torch import Tensor, nn

from zoo.invocation import Invocation
from zoo.profiling.allocator import measure_step
from zoo.sizing.trial_step import train_twice

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Named(nn.Module):
    """Returns a loss, which is small, beside logits (N, 4096) that its backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 512), nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits: Tensor = self.last(x)
        return {"loss": self.first(x).exp().sum() + logits.mean(), "logits": logits}


def test_what_the_model_returned_is_held_until_the_optimizer_has_stepped() -> None:
    model, x = Named(), torch.ones(64, 8)
    found = train_twice(model, Invocation.of(x), sgd, None)
    optimizer = sgd(model.parameters())

    def step() -> None:
        outputs = model(x)
        loss = outputs["loss"]
        loss.backward()
        optimizer.step()

    step()
    assert found == measure_step(step, model, optimizer, [x]).peak
