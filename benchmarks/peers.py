"""Ways to train in less memory, side by side: what each was asked for, takes, costs and changes.

    OMP_NUM_THREADS=1 python benchmarks/peers.py                  # prints docs/benchmarks.md
    OMP_NUM_THREADS=1 python benchmarks/peers.py --write          # writes it and its CSV
    OMP_NUM_THREADS=1 python benchmarks/peers.py --models LSTM    # some of it

It needs the `test` extra. An interrupted run goes on where it stopped; `--fresh` begins anew. Peers
that are installed take part, those of `OTHERS` too, which do not train here and say why.

Each cell is a training in a process of its own, beside a plain one from the same weights and seeds:

- *of plain*: the allocator's peak of the third step, with weights, gradients and optimizer state,
  over plain training's; *activations* are the same without those.
- *operations*: floating point operations of a step over plain training's: products, convolutions,
  attention, LSTMs. Norms and activation functions count nothing.
- *time*: CPU seconds of a step over those of a plain one beside it, median of interleaved rounds.
- *bits*: whether loss, gradients, buffers, parameters and random state are the plain ones, bit for
  bit, after each of three steps; if not, the first that differs.
- *to start*: CPU seconds until the second step is done beyond those of two later steps.
- *budget*: bytes of the whole step. `torch.compile` is asked for a share of the saved activations
  and promises no peak; zoo is asked for the bytes that this share leaves of plain training's peak.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import random
import re
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from models import Flops, turn_on
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM as Llama,
)

import zoo
from zoo.engine.devices import read_streams
from zoo.harness.environment import proc_entry
from zoo.harness.optimizers import OPTIMIZERS
from zoo.harness.processes import outcome
from zoo.profiling.kernel_costs import flop_formulas
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.tensor_spec import tensors_in
from zoo.tracing.switches import turn_transformers
from zoo.units import format_bytes
from zoo.verification.state_comparison import Record, first_difference, record

STEPS, ROUNDS, TIMEOUT = 3, 3, 1800.0
RESULTS, PAGE = Path("results/peers.jsonl"), Path(__file__).parents[1] / "docs" / "benchmarks.md"
TABLE = PAGE.with_suffix(".csv")
Loss = Callable[[Any], Tensor]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Loss]
Rows = list[tuple[nn.Module, list[nn.Module]]]
aten = torch.ops.aten


class Operations(Flops):
    """Counts also what torch has no formula for, and inside of compiled code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run: by default torch runs what it was compiled from instead."""
        return True


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flops(*tensors: Tensor, **_: Any) -> int:
    return sdpa_backward_flop_count(*(tensor.shape for tensor in tensors[:4]))


def lstm_flops(inputs: Tensor, to_gates: Tensor, from_state: Tensor, *_: Any, **__: Any) -> int:
    """Counts the products of a layer: (T, N, inputs), (4 H, inputs), (4 H, H)."""
    return 2 * inputs.shape[0] * inputs.shape[1] * (to_gates.numel() + from_state.numel())


Operations.formulas = {
    **flop_formulas(),
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    aten.mkldnn_rnn_layer: lstm_flops,
    aten.mkldnn_rnn_layer_backward: lambda *given, **named: 2 * lstm_flops(*given, **named),
}


class LanguageModel(nn.Module):
    """Embeds words, reads them by two layers of an LSTM, predicts the next."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def from_torchvision(name: str, *shape: int) -> Built:
    return classifier(torchvision.models.get_model(name, weights=None, num_classes=100), shape)


def from_timm(name: str, *shape: int, **settings: Any) -> Built:
    return classifier(timm.create_model(name, num_classes=100, **settings), shape)


def classifier(model: nn.Module, shape: tuple[int, ...]) -> Built:
    targets = torch.randint(0, 100, shape[:1])
    return model, (torch.randn(shape),), {}, partial(F.cross_entropy, target=targets)


def from_transformers(
    kind: Any, config: Any, *shape: int, vocabulary: int = 4000, **settings: Any
) -> Built:
    model = kind(config(vocab_size=vocabulary, use_cache=False, **settings))
    tokens = torch.randint(0, vocabulary, shape)
    return model, (), {"input_ids": tokens, "labels": tokens}, lambda outputs: outputs.loss


def unet(batch: int = 1, side: int = 32) -> Built:
    # a machine with a GPU may have no MONAI, and the others of these models
    from monai.networks.nets import BasicUNet

    shape = batch, side, side, side
    volume, targets = torch.randn(batch, 1, *shape[1:]), torch.randint(0, 2, shape)
    loss = partial(F.cross_entropy, target=targets)
    return BasicUNet(), (volume,), {}, loss


def lstm() -> Built:
    words = torch.randint(0, 4000, (80, 16))
    return (
        LanguageModel(4000, 256),
        (words,),
        {},
        lambda outputs: F.cross_entropy(outputs.flatten(0, 1), words.flatten()),
    )


def stages(name: str, model: Any) -> Rows:
    """Lists what runs in a row in timm's networks of stages, which lie in one Sequential."""
    every = getattr(model, name)
    return [(every, [part for stage in every for part in (stage.downsample, *stage.blocks)])]


@dataclass(frozen=True)
class Model:
    """A model of others: its blocks by the name of their class, and its library's own switch.

    `rows` maps containers to the modules that run in a row in them, for `checkpoint_sequential`;
    `dtype` is that of autocast around forward and loss, if any.
    """

    build: Callable[[], Built]
    size: str
    blocks: str
    optimizer: str = "sgd"
    switch: Callable[[Any], object] | None = None
    rows: Callable[[Any], Rows] | None = None
    dtype: torch.dtype | None = None


BERT = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
BERT |= {"num_hidden_layers": 4}
LLAMA, GPT2 = BERT | {"num_hidden_layers": 8}, {"n_embd": 128, "n_layer": 4, "n_head": 4}


MODELS: dict[str, Model] = {
    "ResNet-50": Model(
        partial(from_timm, "resnet50", 6, 3, 128, 128), "timm, 6×3×128×128", "Bottleneck",
        switch=turn_on,
        rows=lambda m: [(s, [*s]) for s in (m.layer1, m.layer2, m.layer3, m.layer4)],
    ),
    "DenseNet-121": Model(
        partial(from_torchvision, "densenet121", 4, 3, 96, 96), "torchvision, 4×3×96×96",
        "_DenseBlock", switch=turn_on,
        rows=lambda m: [(m.features, [*m.features])],
    ),
    "ViT-Ti/16": Model(
        partial(from_timm, "vit_tiny_patch16_224", 8, 3, 128, 128, img_size=128),
        "timm, 8×3×128×128", "Block", "adamw", turn_on, lambda m: [(m.blocks, [*m.blocks])],
    ),
    "Swin-T at half its width": Model(
        partial(from_timm, "swin_tiny_patch4_window7_224", 2, 3, 224, 224, embed_dim=48),
        "timm, 2×3×224×224", "SwinTransformerBlock", "adamw", turn_on,
        partial(stages, "layers"),
    ),
    "ConvNeXt-Atto": Model(
        partial(from_timm, "convnext_atto", 4, 3, 128, 128), "timm, 4×3×128×128", "ConvNeXtBlock",
        "adamw", turn_on, partial(stages, "stages"),
    ),
    "GPT-2 of 4 layers": Model(
        partial(from_transformers, GPT2LMHeadModel, GPT2Config, 4, 128, **GPT2),
        "transformers, width 128, 4×128 tokens", "GPT2Block", "adamw", turn_on,
    ),
    "Llama of 8 layers": Model(
        partial(from_transformers, Llama, LlamaConfig, 4, 128, **LLAMA),
        "transformers, width 128, 4×128 tokens", "LlamaDecoderLayer", "adamw", turn_on,
    ),
    "BERT of 4 layers": Model(
        partial(from_transformers, BertForMaskedLM, BertConfig, 4, 128, **BERT),
        "transformers, width 128, 4×128 tokens", "BertLayer", "adamw", turn_on,
    ),
    "U-Net": Model(unet, "MONAI's BasicUNet, 1×1×32×32×32", "TwoConv"),
    "LSTM": Model(lstm, "torch, 2 layers of width 256, 80×16 words", "LSTM"),
}  # fmt: skip


class Training:
    """A model trained by a way to save memory, or plainly."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(0)
        self.of = model
        self.model, self.args, self.kwargs, self.loss = model.build()
        self.model.train()
        self.optimizer = OPTIMIZERS[model.optimizer](self.model.parameters())
        # what is called in the place of the model
        self.call: Callable[..., Any] = self.model

    def blocks(self) -> dict[str, nn.Module]:
        """Returns the blocks by their paths."""
        modules = self.model.named_modules()
        return {path: block for path, block in modules if type(block).__name__ == self.of.blocks}

    def autocast(self) -> torch.autocast:
        """Returns a context in which forward and loss run in the model's dtype, if it has one."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, self.of.dtype, enabled=self.of.dtype is not None)

    def step(self, seed: int) -> Tensor:
        """Runs forward, backward and optimizer."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            outputs = self.call(*self.args, **self.kwargs)
            loss = self.loss(outputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self, loss: Tensor) -> Record:
        """Returns what a step left, without the switches that a method sets on modules."""
        state = record(self.model, (), None, loss, read_streams())
        return {key: value for key, value in state.items() if key[0] != "attribute"}


@dataclass(frozen=True)
class Cell:
    """One training: a model, a method, and the bytes that it is asked to keep to."""

    model: str
    method: str
    asked: int | None = None
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Method:
    """A way to save memory: how a training is put under it, and where it is documented.

    `share`: the share of the activations that it is asked to keep. `beside`: asked for the bytes
    that this other method took. `models` that it `applies` to: all of the table, if not said.
    """

    apply: Callable[[Training, int | None], object]
    source: str = ""
    applies: Callable[[Model], bool] = bool
    share: float | None = None
    beside: str | None = None
    models: tuple[str, ...] = tuple(MODELS)


def wrapped(way: Callable[..., Any], training: Training, asked: int | None = None) -> None:
    """Has each block's forward called by a way to checkpoint it."""
    for block in training.blocks().values():
        block.forward = partial(way, block.forward)


MATMULS = [
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]  # fmt: skip
by_block = partial(checkpoint, use_reentrant=False)
save_matmuls = partial(by_block, context_fn=partial(create_selective_checkpoint_contexts, MATMULS))


def in_segments(training: Training, asked: int | None) -> None:
    """Runs all blocks in a row in the place of the first, by `checkpoint_sequential`."""
    assert training.of.rows is not None
    rows = training.of.rows(training.model)
    every: Any = [module for _, modules in rows for module in modules]
    for container, _ in rows:
        container.forward = lambda value: value
    rows[0][0].forward = lambda value: checkpoint_sequential(
        every, round(math.sqrt(len(every))), value, use_reentrant=False
    )


def on_cpu(training: Training, asked: int | None) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return training.model(*args, **kwargs)

    training.call = call


def compiled(
    share: float, backend: str, solver: str, training: Training, asked: int | None
) -> None:
    import torch._functorch.config
    import torch._inductor.config

    torch._functorch.config.activation_memory_budget = share
    torch._functorch.config.activation_memory_budget_solver = solver
    torch._inductor.config.compile_threads = 1
    training.call = torch.compile(training.model, backend=backend)


def by_fairscale(training: Training, asked: int | None) -> None:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    for block in training.blocks().values():
        checkpoint_wrapper(block)


def by_deepspeed(training: Training, asked: int | None) -> None:
    import deepspeed

    wrapped(deepspeed.checkpointing.checkpoint, training)


def by_torch_remat(training: Training, asked: int | None) -> None:
    import torch_remat

    for path, block in training.blocks().items():
        block.forward = torch_remat.checkpoint(region_name=path)(block.forward)


def by_xformers(training: Training, asked: int | None) -> None:
    from xformers.checkpoint import checkpoint as way

    wrapped(way, training)


def by_budget(training: Training, asked: float | None, *, offload: bool = False) -> zoo.PlanReport:
    """Plans for a budget in bytes, or for a share of the baseline's peak."""
    with training.autocast():
        report = zoo.plan(
            training.model,
            training.kwargs or training.args,
            memory_budget=asked,
            optimizer=OPTIMIZERS[training.of.optimizer],
            loss=training.loss,
            holds_outputs=True,
            offload=offload,
        )
    zoo.checkpoint(training.model, report)
    return report


TORCH = "https://docs.pytorch.org/docs/stable/checkpoint.html"
COMPILE = "https://pytorch.org/blog/activation-checkpointing-techniques/"
TRANSFORMERS = "https://huggingface.co/docs/transformers/grad_checkpointing"
SWITCHES = {
    "set_grad_checkpointing": (
        "https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/_manipulate.py"
    ),
    "memory_efficient": "https://docs.pytorch.org/vision/stable/models/densenet.html",
    "activation_checkpointing_enable": TRANSFORMERS,
}
HOOKS = "https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks"
FAIRSCALE = "https://github.com/facebookresearch/fairscale"
DEEPSPEED = "https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html"
TORCH_REMAT, CKPTPLAN = (
    f"https://pypi.org/project/{name}/" for name in ("torch-remat", "ckptplan")
)
XFORMERS = "https://github.com/facebookresearch/xformers/blob/main/xformers/checkpoint.py"
ROCKMATE = "https://github.com/topal-team/rockmate"
KNAPSACK = "https://github.com/pytorch/pytorch/issues/197871"
PEAKS = "https://github.com/pytorch/pytorch/issues/197838"
DP, SLIDING = "dp", "dp_knapsack_sliding_hirschberg"
# what compiles takes long; fairscale and the like checkpoint each block, too
SOME = ("ResNet-50", "ViT-Ti/16", "GPT-2 of 4 layers", "Llama of 8 layers", "U-Net", "LSTM")
PUBLIC, WRAPPED = ("Llama of 8 layers",), ("DenseNet-121",)
SHARES = (0.05, 0.15, 0.3, 0.5)
FEW = SHARES[:-1]


OWN, BY_BLOCK = "the library's own switch", "torch, each block"


def compiling(share: float, backend: str = "aot_eager", solver: str = DP, **limits: Any) -> Method:
    return Method(partial(compiled, share, backend, solver), COMPILE, share=share, **limits)


def planning(**limits: Any) -> Method:
    return Method(by_budget, **limits)


def has_switch(model: Model) -> bool:
    return model.switch is not None


METHODS: dict[str, Method] = {
    "plain": Method(lambda training, _: None),
    BY_BLOCK: Method(partial(wrapped, by_block), TORCH),
    "torch, √n segments": Method(in_segments, TORCH, lambda model: model.rows is not None),
    "torch, selective: matmuls saved": Method(partial(wrapped, save_matmuls), TORCH, models=SOME),
    "torch, save_on_cpu": Method(on_cpu, HOOKS, models=PUBLIC),
    OWN: Method(lambda training, _: training.of.switch(training.model), applies=has_switch),
    "transformers, every_n_layers=2": Method(
        lambda training, _: turn_transformers(training.model, every_n_layers=2),
        TRANSFORMERS, models=PUBLIC,
    ),
    "fairscale, each block": Method(by_fairscale, FAIRSCALE, models=WRAPPED),
    "DeepSpeed, each block": Method(by_deepspeed, DEEPSPEED, models=WRAPPED),
    "torch_remat, each block": Method(by_torch_remat, TORCH_REMAT, models=WRAPPED),
    "xformers, each block": Method(by_xformers, XFORMERS, models=WRAPPED),
    "torch.compile, Inductor, budget 0.5": compiling(0.5, "inductor", models=PUBLIC),
    "torch.compile, budget 0.5": compiling(0.5, models=SOME),
    **{f"torch.compile, budget {share:g}": compiling(share, models=PUBLIC) for share in FEW},
    **{
        f"torch.compile, budget {share:g}, sliding": compiling(share, solver=SLIDING, models=PUBLIC)
        for share in SHARES
    },
    "zoo, True": Method(lambda training, _: zoo.checkpoint(training.model)),
    "zoo, budget 0.5": planning(share=0.5, models=SOME),
    **{f"zoo, budget {share:g}": planning(share=share, models=PUBLIC) for share in FEW},
    "zoo, at the memory of torch, each block": planning(
        beside=BY_BLOCK, applies=lambda model: model.switch is None
    ),
    f"zoo, at the memory of {OWN}": planning(applies=has_switch, beside=OWN),
}  # fmt: skip


def measure(cell: Cell) -> dict[str, Any]:
    """Trains a model by a method, and plainly beside it; runs in a process of its own."""
    warnings.simplefilter("ignore")
    # what kernels allocate inside depends on it
    torch.set_num_threads(1)
    own, other = Training(MODELS[cell.model]), Training(MODELS[cell.model])
    started = cpu_seconds()
    try:
        METHODS[cell.method].apply(other, cell.asked)
    except zoo.BudgetError as error:
        return {"status": "refused", "reason": str(error)}
    applied, differs, losses = cpu_seconds() - started, None, []
    for step in range(1, STEPS):
        expected = own.state(own.step(step))
        started = cpu_seconds()
        losses.append(other.step(step))
        applied += cpu_seconds() - started
        differs = differs or first_difference(expected, other.state(losses[-1]), step)
    expected = own.state(own.step(STEPS))
    memory = measure_step(
        lambda: losses.append(other.step(STEPS)),
        other.model,
        other.optimizer,
        tensors_in((other.args, other.kwargs)),
    )
    differs = differs or first_difference(expected, other.state(losses[-1]), STEPS)
    with Operations() as operations:
        other.step(STEPS)
    seconds = [(timed(own), timed(other)) for _ in range(cell.rounds)]
    later = statistics.median(pair[1] for pair in seconds)
    return {
        "status": "done",
        "taken": memory.peak,
        "activations": memory.activation_peak,
        "operations": operations.total,
        "time": statistics.median(other / own for own, other in seconds),
        "bits": "" if differs is None else difference_text(differs),
        "start": max(0.0, applied - (STEPS - 1) * later),
    }


def difference_text(difference: Any) -> str:
    by = f" by {difference.largest:.0e}" if difference.largest else ""
    name = f" {difference.name}" if difference.name != difference.kind else ""
    return f"{difference.kind}{name}{by}, step {difference.training_step}"


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those it waited for, such as a compiler."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(training: Training) -> float:
    started = time.process_time()
    training.step(STEPS)
    return time.process_time() - started


# what neither trains here nor can be given blocks: name -> (what fails, source)
def rockmate() -> None:
    import rockmate  # noqa: F401


def xformers_budget() -> None:
    from xformers.checkpoint import selective_checkpoint_wrapper

    wrapped = selective_checkpoint_wrapper(nn.Linear(4, 4), memory_budget=0.5)
    wrapped(torch.rand(2, 4)).sum().backward()


def ckptplan() -> None:
    from ckptplan import declare_blocks, plan_checkpoints, profile_blocks

    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    blocks = declare_blocks(model, [(f"layer{n}", layer) for n, layer in enumerate(model)])
    given = {"device": "cpu", "dtype": torch.float32}
    profiles = profile_blocks(blocks, (torch.rand(2, 4),), **given)
    target = {"target_kind": "activation_budget_bytes", "target_value": 64}
    plan_checkpoints(profiles, blocks, planner="dynamic_programming", **target)


OTHERS: dict[str, tuple[Callable[[], None], str]] = {
    "rockmate": (rockmate, ROCKMATE),
    "xformers, budget": (xformers_budget, XFORMERS),
    "ckptplan": (ckptplan, CKPTPLAN),
}


def attempt(name: str) -> dict[str, Any]:
    """Runs what is expected to fail; its error is the result of the process."""
    warnings.simplefilter("ignore")
    OTHERS[name][0]()
    return {"status": "done"}


PACKAGES = ("torch", "torchvision", "timm", "transformers", "monai", "fairscale", "deepspeed")
PACKAGES += ("torch_remat", "xformers", "rockmate", "ckptplan")
Key = tuple[str, str]
Known = dict[Key, dict[str, Any]]


def earlier() -> Known:
    """Returns the results of a run that was interrupted; a line that broke off is none."""
    known = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            result = json.loads(line)
            known[result["model"], result["method"]] = result
    return known


def run(cells: Iterable[Cell], known: Known, jobs: int) -> None:
    """Runs the cells that are not known, some at once, and adds what came of them."""
    RESULTS.parent.mkdir(exist_ok=True)

    def one(cell: Cell) -> None:
        function, given = (attempt, cell.method) if cell.model == "" else (measure, cell)
        result = asdict(cell) | outcome(function, given, TIMEOUT)
        result.pop("printed", None)
        known[cell.model, cell.method] = result
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"# {cell.model}: {cell.method}: {result['status']}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [cell for cell in cells if (cell.model, cell.method) not in known]
        try:
            list(pool.map(one, waiting))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def cells_of(models: Iterable[str], known: Known, *, beside: bool) -> list[Cell]:
    """Lists the cells of all methods; those `beside` another's result once that is there."""
    cells = []
    for model in models:
        for name in methods_of(model)[1:]:
            method = METHODS[name]
            asked = asked_bytes(method, model, known)
            if (method.beside is not None) == beside and (asked is not None or not beside):
                cells.append(Cell(model, name, asked))
    return cells


def asked_bytes(method: Method, model: str, known: Known) -> int | None:
    if method.beside is not None:
        return known.get((model, method.beside), {}).get("taken")
    if method.share is None or known[model, "plain"]["status"] != "done":
        return None
    plain = known[model, "plain"]
    return int(plain["taken"] - (1 - method.share) * plain["activations"])


COLUMNS = (
    *("model", "size", "method", "asked", "taken", "of plain", "activations", "operations"),
    *("time", "bits", "to start", "budget kept", "error"),
)
Line = dict[str, str]


def lines_of(models: Iterable[str], known: Known) -> list[Line]:
    """Returns a line of the CSV for each cell, and one for each of `OTHERS`."""
    lines = []
    for model in (model for model in models if (model, "plain") in known):
        plain = known[model, "plain"]
        for name in (name for name in methods_of(model) if (model, name) in known):
            cells = shown(known[model, name], plain, METHODS[name])
            lines.append({"model": model, "size": MODELS[model].size, "method": name} | cells)
    for name in (name for name in OTHERS if ("", name) in known):
        lines.append({"method": name, "error": short(known["", name].get("reason", "runs"), 160)})
    return [dict.fromkeys(COLUMNS, "") | line for line in lines]


def origin() -> str:
    """Says where and with what the cells were measured: the first line of the CSV."""
    processor = proc_entry("cpuinfo", "model name") or platform.machine()
    found = {name: installed(name) for name in PACKAGES}
    versions = ", ".join(f"{name} {found[name]}" for name in found if found[name])
    return (
        f"Measured on {os.cpu_count()} cores ({processor}), a thread each, no GPU, with "
        f"{os.getloadavg()[2]:.0f} processes at work; Python {platform.python_version()}, "
        f"{versions}."
    )


def write_table(said: str, lines: Iterable[Line]) -> None:
    """Writes the CSV: a comment that says where it is from, then a line for each cell."""
    with TABLE.open("w", newline="") as file:
        file.write(f"# {said}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_table() -> tuple[str, list[Line]]:
    with TABLE.open(newline="") as file:
        return file.readline().removeprefix("# ").strip(), list(csv.DictReader(file))


def page(said: str, lines: list[Line]) -> str:
    """Returns the document that a table makes: what stands in its lines, and no more."""
    legend = __doc__[__doc__.index("Each cell is") :].strip()
    won, beside = at_their_memory(lines)
    parts = [
        "# Benchmarks",
        "[Index](README.md) · [Comparison](comparison.md) · [Models](models.md) · "
        "[On a GPU](gpu.md)",
        f"{won} Every cell is in [benchmarks.csv](benchmarks.csv).",
        f"{said} `OMP_NUM_THREADS=1 python benchmarks/peers.py --write` measures it anew.",
        legend,
        "## At the memory of each library's own switch",
        BESIDE,
        beside,
        "## Each method",
        IN_SHORT,
        summary(lines),
        "## Two public cases of budgets",
        public(lines),
        "## What does not run here",
        NOT_HERE,
        missing(lines),
    ]
    return "\n\n".join(parts) + "\n"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def methods_of(model: str) -> list[str]:
    """Lists the methods that a model is trained by."""
    return [
        name
        for name, method in METHODS.items()
        if model in method.models and method.applies(MODELS[model])
    ]


def shown(result: Mapping[str, Any], plain: Mapping[str, Any], method: Method) -> Line:
    asked = "" if result["asked"] is None else format_bytes(result["asked"])
    if method.share is not None and method.source:
        asked = f"{method.share:g} ({asked})"
    if result["status"] != "done":
        return {"asked": asked, "error": f"{result['status']}: {short(result['reason'])}"}
    has_budget = method.share is not None or method.beside is not None
    return {
        "asked": asked,
        "taken": format_bytes(result["taken"]),
        "of plain": f"{result['taken'] / plain['taken']:.3f}",
        "activations": f"{result['activations'] / plain['activations']:.3f}",
        "operations": f"{result['operations'] / plain['operations']:.3f}",
        "time": f"{result['time']:.2f}",
        "bits": result["bits"] or "equal",
        "to start": f"{result['start']:.1f}",
        "budget kept": ("yes" if kept(result, plain, method) else "no") if has_budget else "",
    }


def short(reason: str, limit: int = 100) -> str:
    """Returns the beginning of a reason; of zoo's refusal the bytes that it needs."""
    if least := re.search(r"needs at least [\d.]+ \w+", reason):
        return least[0]
    return reason if len(reason) <= limit else reason[: limit - 1].rsplit(" ", 1)[0] + " …"


def kept(result: Mapping[str, Any], plain: Mapping[str, Any], method: Method) -> bool:
    """Says whether a budget was kept: bytes of the step, or a share of the activations."""
    if not method.source:
        return bool(result["taken"] <= result["asked"])
    assert method.share is not None
    return bool(result["activations"] <= method.share * plain["activations"])


BESIDE = (
    "*Switch* is the library's own ({switches}), `torch.utils.checkpoint` of each block where it "
    "has none; then zoo by `checkpoint=True`, and within the bytes that the switch took. Cells are "
    "share of plain training's peak, operations, time, and *differs* where bits do."
).format(switches=", ".join(f"[`{name}`]({link})" for name, link in SWITCHES.items()))
IN_SHORT = """\
Medians over the models that a method trains. Their numbers differ, so that rows compare only as far
as the models are the same."""


def at_their_memory(lines: list[Line]) -> tuple[str, str]:
    """Says how zoo compares within the bytes that a peer took, and draws a row for each model."""
    cells = {(line["model"], line["method"]): line for line in lines}
    rows: list[tuple[str, ...]] = []
    less: dict[str, list[bool]] = {"time": [], "operations": []}
    for model in dict.fromkeys(line["model"] for line in lines if line["model"]):
        peer = OWN if (model, OWN) in cells else BY_BLOCK
        within = cells.get((model, f"zoo, at the memory of {peer}"))
        switch = cells.get((model, peer))
        if switch is None or within is None:
            continue
        for column, known in less.items():
            if within[column] and switch[column]:
                known.append(float(within[column]) < float(switch[column]))
        true = cells[model, "zoo, True"]
        plain, size = cells[model, "plain"]["taken"], switch["size"]
        rows.append((f"{model} ({size})", plain, *map(drawn, (switch, true, within))))
    wrong = sum("differs" in row[2] for row in rows)
    time, operations = (f"{sum(known)} of {len(known)}" for known in less.values())
    return (
        f"At the memory of a library's own switch zoo takes less time in {time} models and fewer "
        f"operations in {operations}. It changes no bit; the switch does in {wrong}.",
        words_table(("model", "plain", "switch", "zoo, True", "zoo, its memory"), rows),
    )


def drawn(line: Line) -> str:
    if line["error"]:
        return line["error"]
    numbers = [line["of plain"]]
    numbers += [f"×{line[key]}" if line[key] else "-" for key in ("operations", "time")]
    return ", ".join([*numbers, *([] if line["bits"] == "equal" else ["differs"])])


def words_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a table without padding."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def summary(lines: list[Line]) -> str:
    """Returns a row for each method: medians over the models that it trains, if several."""
    rows = []
    for name, method in METHODS.items():
        own = [line for line in lines if line["model"] and line["method"] == name]
        done = [line for line in own if not line["error"]]
        # one model's number beside a median of ten compares the models
        if len(done) < 2:
            continue
        refused = len(own) - len(done)
        has_budget = any(line["budget kept"] for line in done)
        within = sum(line["budget kept"] == "yes" for line in done)
        medians = [
            statistics.median(float(line[key]) for line in done if line[key])
            for key in ("of plain", "operations", "time", "to start")
        ]
        rows.append((
            linked(name, method.source),
            f"{len(done)} of {len(own)}" + (f", {refused} refused" if refused else ""),
            str(sum(line["bits"] == "equal" for line in done)),
            f"{within} of {len(done)}" if has_budget else "",
            f"{medians[0]:.3f}",
            f"×{medians[1]:.3f}",
            f"×{medians[2]:.2f}",
            f"{medians[3]:.1f} s",
        ))  # fmt: skip
    head = ("method", "trains", "equal", "budget kept", "of plain", "operations", "time")
    return words_table((*head, "to start"), rows)


def linked(name: str, source: str) -> str:
    return f"[{name}]({source})" if source else name


def public(lines: list[Line]) -> str:
    """Returns what budgets give that are asked of torch.compile and of zoo: both public cases."""
    ways = {
        f"torch.compile, `{DP}`": "torch.compile, budget {:g}",
        f"torch.compile, `{SLIDING}`": "torch.compile, budget {:g}, sliding",
        "zoo": "zoo, budget {:g}",
    }
    cells = {(line["model"], line["method"]): line for line in lines}
    rows = []
    for model in PUBLIC:
        for way, name in ways.items():
            given = [cells.get((model, name.format(share))) for share in SHARES]
            if any(given):
                rows.append((way, *map(peak_text, given)))
    exceeded = {solver: exceeding(solver) for solver in (DP, SLIDING)}
    return (
        f"[pytorch#197838]({PEAKS}): a smaller share may take more, as the partitioner counts what "
        "is saved, not what the backward holds at once; its documents promise no peak. "
        f"[pytorch#197871]({KNAPSACK}): `{SLIDING}` may save more than it was allowed: of "
        f"{PROBLEMS} small random problems `{DP}` broke its limit in {exceeded[DP]}, this one in "
        f"{exceeded[SLIDING]}. {PUBLIC[0]}; columns are the shares of plain activations asked for, "
        "cells what the step's peak took, and operations:\n\n"
        + words_table(("asked of", *(f"{share:g}" for share in SHARES)), rows)
    )


PROBLEMS = 300


def exceeding(name: str) -> int:
    """Counts the random problems of up to ten items whose solution is above its limit."""
    from torch._functorch._activation_checkpointing import knapsack

    solve = knapsack.dp_knapsack if name == DP else knapsack.dp_knapsack_sliding_hirschberg
    draw, count = random.Random(0), 0
    for _ in range(PROBLEMS):
        # in units of the solvers, so that nothing is rounded
        sizes = [draw.randint(1, 20) for _ in range(draw.randint(2, 10))]
        seconds, limit = [draw.random() for _ in sizes], draw.randint(1, 40)
        _, saved, _ = solve([size * 1e-4 for size in sizes], seconds, limit * 1e-4)
        count += sum(sizes[index] for index in saved) > limit
    return count


def peak_text(line: Line | None) -> str:
    if line is None:
        return ""
    if line["error"]:
        return line["error"].partition(":")[0]
    return f"{line['activations']}, ×{line['operations']}"


NOT_HERE = """\
`pip install fairscale deepspeed torch_remat xformers` adds these peers, `rockmate` and `ckptplan`
what they answer; `--no-deps` where one wants another torch (ckptplan below 2.14). The `rkgb` that
Rockmate needs lacks a part on the package index; from its repository, as of December 2024, Rockmate
imports and then asks for an NVIDIA driver."""


def missing(lines: list[Line]) -> str:
    """Returns the errors of what did not train any model."""
    failed = [line for line in lines if line["error"] and not line["error"].startswith("refused")]
    known = {name: method.source for name, method in METHODS.items()}
    known |= {name: source for name, (_, source) in OTHERS.items()}
    names = (
        linked(line["method"], known[line["method"]])
        + (f" ({line['model']})" if line["model"] else "")
        for line in failed
    )
    errors = (line["error"].removeprefix("failed: ") for line in failed)
    return words_table(("what", "its error"), list(zip(names, errors, strict=True)))


def main() -> None:
    """Runs what is not known yet and prints or writes the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--write", action="store_true", help=f"into docs/{PAGE.name}")
    parser.add_argument("--fresh", action="store_true", help=f"try again what is in {RESULTS}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, a thread each")
    parser.add_argument("--page", action="store_true", help=f"write it from {TABLE.name}, as it is")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(*read_table()))
        return
    if given.fresh:
        RESULTS.unlink(missing_ok=True)
    known = earlier()
    run([Cell(model, "plain") for model in given.models], known, given.jobs)
    run([Cell("", name) for name in OTHERS], known, given.jobs)
    for beside in (False, True):
        run(cells_of(given.models, known, beside=beside), known, given.jobs)
    said, lines = origin(), lines_of(given.models, known)
    if given.write:
        write_table(said, lines)
        PAGE.write_text(page(said, lines))
    else:
        print(page(said, lines))


if __name__ == "__main__":
    main()
