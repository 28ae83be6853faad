"""What planning takes: seconds and resident memory, each row in processes of its own.

    python benchmarks/planning.py                  # all rows, three times: ten minutes on 2 cores
    python benchmarks/planning.py --rounds 1 --rows resnet50

For `checkpoint=True` a row compares the first training step by a plan, which is planned in it, with
the first step of plain training: forward, backward and a step of SGD. For a budget it times the
call of `zoo.plan`, which runs no step. Seconds are medians over the rounds, with the least and the
most. Memory is the largest resident set of the process, and of any that it forked, in that step or
call; next to it that of a plain training step, where one runs. Both hold torch and the model.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import zoo
from zoo.harness.environment import proc_entry
from zoo.harness.processes import outcome
from zoo.report.escaping import markdown_table
from zoo.units import format_bytes

TIMEOUT = 1800.0
PLAIN, TRUE, BUDGET = "plain", "True", "budget"
Built = tuple[nn.Module, Any]


def image(build: Callable[[], nn.Module], *shape: int) -> Built:
    return build(), torch.rand(shape)


def encoder(layers: int) -> Built:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, layers), torch.rand(4, 64, 64)


def llama(layers: int, *shape: int, device: str = "cpu", **sizes: int) -> Built:
    """Builds transformers' Llama of a number of layers, and tokens of a shape."""
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
        tokens = torch.zeros(shape, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def gpt2_xl() -> Built:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))
        tokens = torch.zeros((1, 1024), dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
LARGE = {"num_key_value_heads": 8, "vocab_size": 128_256}
# by name: the model and what it is called with, and what `zoo.plan` is asked for; None for `True`
ROWS: dict[str, tuple[Callable[[], Built], dict[str, Any] | None]] = {
    "encoder of 100 layers, width 64": (partial(encoder, 100), None),
    "Llama of 64 layers, width 64": (partial(llama, 64, 4, 64, **SMALL), None),
    "densenet264, batch 4": (partial(image, zoo.densenet264, 4, 3, 224, 224), None),
    "resnet1001, batch 8": (partial(image, zoo.resnet1001, 8, 3, 32, 32), None),
    "resnet50, batch 8": (partial(image, zoo.resnet50, 8, 3, 224, 224), None),
    "resnet50, batch 8, 60 %": (
        partial(image, zoo.resnet50, 8, 3, 224, 224),
        {"memory_budget": 0.6},
    ),
    "GPT-2 XL on meta, A100": (gpt2_xl, {"max_overhead": 0.2, "device": "a100"}),
    "Llama of 80 layers on meta, A100": (
        partial(
            llama,
            80,
            1,
            4096,
            device="meta",
            hidden_size=8192,
            intermediate_size=28_672,
            num_attention_heads=64,
            **LARGE,
        ),
        {"max_overhead": 0.2, "device": "a100"},
    ),
    "Llama of 126 layers on meta, A100": (
        partial(
            llama,
            126,
            1,
            4096,
            device="meta",
            hidden_size=16_384,
            intermediate_size=53_248,
            num_attention_heads=128,
            **LARGE,
        ),
        {"max_overhead": 0.2, "device": "a100"},
    ),
}


@dataclass(frozen=True)
class Cell:
    """What one process measures: a row by a way to train or to plan."""

    row: str
    way: str


def measure(cell: Cell) -> dict[str, Any]:
    """Returns the seconds and the largest resident set of a first step, or of a call."""
    torch.manual_seed(0)
    build, asked = ROWS[cell.row]
    model, inputs = build()
    if cell.way == BUDGET:
        assert asked is not None
        return spent(lambda: zoo.plan(model, inputs, **asked))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if cell.way == TRUE:
        model = zoo.checkpoint(model)

    def step() -> None:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss: Tensor = outputs.square().mean() if isinstance(outputs, Tensor) else outputs.loss
        loss.backward()
        optimizer.step()

    return spent(step)


def spent(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs what plans, and returns its seconds and the largest resident set meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the largest set so far is forgotten
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    own = int(proc_entry("self/status", "VmHWM").split()[0])
    forked = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"seconds": seconds, "memory": max(own, forked) * 1024}


def lines(rows: list[str], rounds: int) -> Iterator[list[str]]:
    """Yields for each row what planning takes."""
    for row in rows:
        build_only = ROWS[row][1] is not None
        ways = (BUDGET,) if build_only else (PLAIN, TRUE)
        if build_only and "meta" not in row:
            ways = (PLAIN, BUDGET)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                found[way].append(outcome(measure, Cell(row, way), TIMEOUT))
        failed = [result["reason"] for way in ways for result in found[way] if "reason" in result]
        if failed:
            yield [row, failed[0], "", "", ""]
            continue
        taken = found[ways[-1]]
        plain = found.get(PLAIN)
        planning = [result["seconds"] for result in taken]
        if TRUE in found and plain:
            start = statistics.median(result["seconds"] for result in plain)
            planning = [seconds - start for seconds in planning]
        yield [
            row,
            f"{statistics.median(result['seconds'] for result in plain):.1f}" if plain else "",
            f"{statistics.median(planning):.1f} [{min(planning):.1f}, {max(planning):.1f}]",
            format_bytes(max(result["memory"] for result in plain)) if plain else "",
            format_bytes(max(result["memory"] for result in taken)),
        ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of names; all if none")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = [row for row in ROWS if row.startswith(tuple(arguments.rows))]
    columns = ["planned", "plain step, s", "planning, s", "plain step, memory", "planning, memory"]
    print(markdown_table(columns, list(lines(rows, arguments.rounds))))


if __name__ == "__main__":
    main()
