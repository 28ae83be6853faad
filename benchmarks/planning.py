"""What planning takes: seconds and resident memory, each number of a process of its own.

    python benchmarks/planning.py                    # all rows, three times: five minutes, 2 cores
    python benchmarks/planning.py --rounds 1 --rows "resnet50, batch 8"

For `checkpoint=True` a row compares the first training step by a plan, which is made in it, with
the first step of plain training: forward, backward and a step of SGD. For a budget it times the
call of `zoo.plan`, which runs no step. Seconds are medians over the rounds, with the least and the
most. Memory is the largest resident set of the process in that step or call, or of one that it
forked; next to it that of a plain training step, where one runs. Both hold torch and the model.
Linux alone tells it.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class Row:
    """What is planned: `asked` of `zoo.plan`, or a first step of `checkpoint=True` if it is None.

    A model `on_meta` has no plain step beside it.
    """

    build: Callable[[], Built]
    asked: dict[str, Any] | None = None
    on_meta: bool = False


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
LARGE = {"num_key_value_heads": 8, "vocab_size": 128_256}
B70 = {"hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64, **LARGE}
B405 = {"hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128, **LARGE}
on_a100 = partial(Row, asked={"max_overhead": 0.2, "device": "a100"}, on_meta=True)
resnet50 = partial(image, zoo.resnet50, 8, 3, 224, 224)
ROWS = {
    "encoder of 100 layers, width 64": Row(partial(encoder, 100)),
    "Llama of 64 layers, width 64": Row(partial(llama, 64, 4, 64, **SMALL)),
    "densenet264, batch 4": Row(partial(image, zoo.densenet264, 4, 3, 224, 224)),
    "resnet1001, batch 8": Row(partial(image, zoo.resnet1001, 8, 3, 32, 32)),
    "resnet50, batch 8": Row(resnet50),
    "resnet50, batch 8, 60 %": Row(resnet50, {"memory_budget": 0.6}),
    "GPT-2 XL on meta, A100": on_a100(gpt2_xl),
    "Llama of 80 layers on meta, A100": on_a100(partial(llama, 80, 1, 4096, device="meta", **B70)),
    "Llama of 126 layers on meta, A100": on_a100(
        partial(llama, 126, 1, 4096, device="meta", **B405)
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
    row = ROWS[cell.row]
    model, inputs = row.build()
    if cell.way == BUDGET:
        return spent(lambda: zoo.plan(model, inputs, **(row.asked or {})))
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


def line(name: str, rounds: int) -> list[str]:
    """Returns what planning takes in a row."""
    row = ROWS[name]
    planned = TRUE if row.asked is None else BUDGET
    ways = (planned,) if row.on_meta else (PLAIN, planned)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(max(rounds, 1)):
        for way in ways:
            found[way].append(outcome(measure, Cell(name, way), TIMEOUT))
    for result in (result for way in ways for result in found[way] if "reason" in result):
        return [name, result["reason"], "", "", ""]
    seconds = {way: [result["seconds"] for result in found[way]] for way in ways}
    memory = {way: format_bytes(max(result["memory"] for result in found[way])) for way in ways}
    plain = statistics.median(seconds[PLAIN]) if PLAIN in seconds else None
    first = plain if plain is not None and planned == TRUE else 0.0
    beyond = [taken - first for taken in seconds[planned]]
    return [
        name,
        "" if plain is None else f"{plain:.1f}",
        f"{statistics.median(beyond):.1f} [{min(beyond):.1f}, {max(beyond):.1f}]",
        memory.get(PLAIN, ""),
        memory[planned],
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3, help="at least one")
    arguments = parser.parse_args()
    columns = ["planned", "plain step, s", "planning, s", "plain step, memory", "planning, memory"]
    print(markdown_table(columns, [line(name, arguments.rounds) for name in arguments.rows]))


if __name__ == "__main__":
    main()
