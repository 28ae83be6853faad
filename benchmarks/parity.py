"""Says whether a plain `zoo` model costs what the library's own model costs.

    python benchmarks/parity.py            # all models
    python benchmarks/parity.py resnet50

For each model: peak bytes of one training step (allocator events) and time, ours over theirs. The
two alternate step by step in one process, in the order A B B A, so that a noisy machine hurts both
alike; the ratio is the median of the pairs. Needs the `test` extra.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zoo
from zoo.profiling.peak_memory import trace
from zoo.units import format_bytes

PAIRS = 10
Pair = tuple[nn.Module, nn.Module, tuple[Tensor, ...]]


def resnet50() -> Pair:
    import torchvision

    return zoo.resnet50(), torchvision.models.resnet50(), (torch.randn(4, 3, 224, 224),)


def densenet121() -> Pair:
    import torchvision

    return zoo.densenet121(), torchvision.models.densenet121(), (torch.randn(4, 3, 224, 224),)


def vit_base_patch16() -> Pair:
    import timm

    theirs = timm.create_model("vit_base_patch16_224")
    return zoo.vit_base_patch16(), theirs, (torch.randn(4, 3, 224, 224),)


def gpt2_small() -> Pair:
    import transformers

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(attn_implementation="sdpa")
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens, use_cache=False).logits

    return zoo.gpt2_small(), Scores(), (torch.randint(0, 50257, (1, 256)),)


def vnet() -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from monai.networks.nets import VNet

    theirs = VNet(out_channels=2, dropout_prob_up=(0.5, 0.5))
    return zoo.vnet(), theirs, (torch.randn(1, 1, 64, 64, 64),)


MODELS: dict[str, Callable[[], Pair]] = {
    function.__name__: function
    for function in (resnet50, densenet121, vit_base_patch16, gpt2_small, vnet)
}


def compare(name: str) -> None:
    """Prints one line: peaks, their ratio, the ratio of times with its quartiles."""
    torch.manual_seed(0)
    ours, theirs, inputs = MODELS[name]()
    steps = [lambda model=model: step(model, inputs) for model in (ours.train(), theirs.train())]
    for run in steps:
        run()
    peaks = [trace(run).peak for run in steps]
    ratios = []
    for pair in range(PAIRS):
        order = steps if pair % 2 else steps[::-1]
        seconds = {run: timed(run) for run in order}
        ratios.append(seconds[steps[0]] / seconds[steps[1]])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name:18} peak {format_bytes(peaks[0]):>9} against {format_bytes(peaks[1]):>9}: "
        f"x{peaks[0] / peaks[1]:.3f}   time x{middle:.3f} [{low:.3f}, {high:.3f}]",
        flush=True,
    )


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    model(*inputs).square().mean().backward()


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        compare(chosen)
