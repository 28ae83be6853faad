"""Helpers of the models' tests: seeded runs, bytes that autograd saves, peaks and blocks."""

import contextlib
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zoo
from zoo.profiling.peak_memory import measure_step, trace


@contextlib.contextmanager
def saved_storages():
    """Yields the bytes of each storage that autograd keeps for the backward of the block."""
    sizes = {}

    def note(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


def run(model, *shape, training=True):
    """Logits, buffers and gradients by name, and bytes kept for the backward, of a seeded run."""
    torch.manual_seed(1)
    images = torch.randn(*shape, requires_grad=True)
    with saved_storages() as sizes:
        logits = model.train(training)(images)
    inputs = {"images": images, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(logits.pow(2).sum(), inputs.values())
    named = dict(zip(inputs, gradients, strict=True))
    return {"logits": logits.detach(), **named, **dict(model.named_buffers())}, sum(sizes.values())


def text():
    """Tokens (3, 20) and their next tokens, the last ones ignored as Hugging Face does."""
    tokens = torch.randint(101, (3, 20), generator=torch.Generator().manual_seed(5))
    return tokens, F.pad(tokens[:, 1:], (0, 1), value=-100)


def blocks_of(model, *inputs):
    """The names of the steps of each block, in order."""
    steps, blocks = zoo.chain_of(model, inputs), {}
    for block, name in zip(steps.blocks, steps.names, strict=True):
        blocks.setdefault(block, []).append(name)
    return list(blocks.values())


def peaks(model):
    """The most bytes at once in a training step and in inference, above what was there before."""
    images = torch.randn(4, 3, 64, 64)
    model(images).sum().backward()  # gradients of parameters exist from here on
    step = trace(lambda: model.train()(images).sum().backward())
    with torch.no_grad():
        return step.peak, trace(lambda: model.eval()(images)).peak


class _MapKernels(TorchDispatchMode):
    """Counts the kernels that return maps, of 4 axes, in memory that they were not given."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        arguments = {_storage(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        returned = kernel(*args, **(kwargs or {}))
        maps = [value for value in tree_leaves(returned) if torch.is_tensor(value)]
        if any(value.ndim == 4 and _storage(value) not in arguments for value in maps):
            name = kernel.overloadpacket.__name__
            kind = next((kind for kind in ("convolution", "norm", "pool") if kind in name), name)
            self.kernels[kind] += 1
        return returned


def maps_made(model, images):
    """How many kernels of each kind make maps in a forward; the others write in place."""
    with _MapKernels() as mode:
        model(images)
    return dict(mode.kernels)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def shake(model):
    """Moves statistics and affine weights off 0 and 1, so that a norm left out or swapped shows."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_mean, module.running_var):
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def language_step_peak(build, shape, **arguments):
    """The peak of a second training step of a language model under `checkpoint=True`, in bytes."""
    torch.manual_seed(0)
    model, tokens = build(checkpoint=True, **arguments), torch.randint(5000, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        result = model(tokens, targets=tokens)
        (result[0] if isinstance(result, tuple) else result).backward()
        optimizer.step()

    step()
    return measure_step(step, model, optimizer, [tokens]).peak
