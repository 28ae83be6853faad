"""A memory budget for your own model: `zoo.checkpoint(model, memory_budget="8GiB")`.

    pip install 'zoo-checkpoint[examples]'
    python examples/memory_budget.py

Trains a ResNet of timm's, a U-Net of MONAI's and, by its Trainer, a GPT-2 of transformers', each
plainly and within a budget below plain training's peak. Exits with 1 unless each keeps to it and
ends with the bits of plain training.
"""

import copy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from monai.networks.nets import UNet
from torch import Tensor, nn

import zoo

# of the peak of plain training
SHARE = 0.8
STEPS = 3


def resnet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Returns a model of timm's and a batch of images and labels."""
    model = timm.create_model("resnet14t", num_classes=10)
    return model, (torch.rand(16, 3, 96, 96), torch.randint(10, (16,)))


def unet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Returns a model of MONAI's and a batch of volumes and masks."""
    model = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    return model, (torch.rand(2, 1, 32, 32, 32), torch.randint(2, (2, 32, 32, 32)))


def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Trains in a loop of your own; returns the peak bytes of the last step."""
    inputs, targets = batch
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(STEPS - 1):
        step()
    with zoo.track(model, optimizer=optimizer, inputs=batch, allocator=True) as timeline:
        step()
    return timeline.peak


def train_by_trainer(model: Any, tokens: Tensor) -> int:
    """Trains by the Trainer; returns the peak bytes of the last step."""

    class Measure(transformers.TrainerCallback):
        """Tracks the memory of the last step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == STEPS - 1:
                optimizer = given["optimizer"]
                self.tracked = zoo.track(model, optimizer=optimizer, allocator=True)
                self.timeline = self.tracked.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == STEPS:
                self.tracked.__exit__(None, None, None)

    measure = Measure()
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=len(tokens),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        transformers.Trainer(model, settings, train_dataset=rows, callbacks=[measure]).train()
    return measure.timeline.peak


def gpt2() -> tuple[nn.Module, Tensor]:
    """Returns a model of transformers' and a batch of tokens."""
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=128, n_layer=4, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), torch.randint(256, (8, 128))


EXAMPLES: dict[str, tuple[Callable[[], Any], Callable[..., int]]] = {
    "timm": (resnet, train),
    "monai": (unet, train),
    "transformers": (gpt2, train_by_trainer),
}


def compare(make: Callable[[], Any], fit: Callable[..., int]) -> tuple[bool, str]:
    """Trains plainly and within a budget; says whether it was kept and every bit agrees."""
    torch.manual_seed(0)
    plain, batch = make()
    model = copy.deepcopy(plain)
    torch.manual_seed(1)
    peak = fit(plain, batch)
    budget = int(SHARE * peak)
    model = zoo.checkpoint(model, memory_budget=budget, optimizer="adamw")
    torch.manual_seed(1)
    taken = fit(model, batch)
    is_equal = all(
        torch.equal(one, other)
        for one, other in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    text = f"plain {peak >> 20} MiB, budget {budget >> 20}, taken {taken >> 20}"
    bits = "bit for bit as plain" if is_equal else "other bits"
    return is_equal and taken <= budget, f"{text}, {bits}"


def main() -> int:
    """Compares all three."""
    results = []
    for name, example in EXAMPLES.items():
        is_right, text = compare(*example)
        print(f"{name}: {text}")
        results.append(is_right)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
