"""Digests of everything that a training step leaves behind, to compare two runs bit for bit.

Comparing tensors would need both models in one process, whose allocations would then no longer be
those of a training run. A digest per kind and step also tells where two runs part:

    step      1     2     3
    loss      4f1c  9b02  c7d1        differs at step 2 in gradients first: the backward is wrong
    gradients 11aa  e09c  ...         differs in buffers first: statistics were updated twice
    buffers   53b7  53b8  ...         differs in rng: dropout was drawn again
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

Named = tuple[str, Tensor | None]


def step_digests(model: nn.Module, loss: Tensor) -> dict[str, str]:
    """Returns the digest of each kind after a step: loss, gradients, buffers, parameters, rng."""
    parameters = list(model.named_parameters())
    return {
        "loss": digest([("loss", loss)]),
        "gradients": digest((name, parameter.grad) for name, parameter in parameters),
        "buffers": digest(model.named_buffers()),
        "parameters": digest(parameters),
        "rng": digest(_random_states()),
    }


def digest(tensors: Iterable[Named]) -> str:
    """Returns the SHA-256 of names, types, shapes and raw bytes, so that -0.0 differs from 0.0."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        if tensor is None:
            total.update(f"{name} None".encode())
            continue
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(raw.numpy().data)
    return total.hexdigest()


def _random_states() -> list[Named]:
    states: list[Named] = [("cpu", torch.get_rng_state())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += [(f"cuda:{i}", state) for i, state in enumerate(torch.cuda.get_rng_state_all())]
    return states
