"""Other libraries' models by `zoo.checkpoint`: which work, exactly or not, and what they save.

    python benchmarks/models.py                      # the table below, random weights, small inputs
    python benchmarks/models.py resnet50 gpt2        # some of it
    python benchmarks/models.py --count 50           # so many small ones drawn from timm's list
    python benchmarks/models.py --write              # into docs/models.csv and docs/models.md; an
                                                     # interrupted run goes on where it stopped
    python benchmarks/models.py --page               # docs/models.md from the CSV as it is

Each model trains two steps plainly and two by `checkpoint=True`; outputs, gradients, parameters,
buffers and the random state are compared bit for bit. In a cell the first number is the peak of
activations over that of plain training, as the allocator counts it; the second the floating point
operations of a step beyond those of plain training, over these.

- *switch*: the library's own checkpointing, where it has any.
- *at its memory*: the plan of fewest operations that is measured to take no more than the switch.
- *a budget*: half way between the least peak of a whole step and plain training's; the first number
  is the peak over the budget.

`True` asks for the least peak of the whole step, so it keeps more activations where weights, their
gradients and kernels' workspaces outweigh them, as in `r3d_18` on 4×32×32: at the peak 2.8 MiB are
activations, 6.8 MiB a workspace, 253 MiB weights and gradients.
"""

import argparse
import contextlib
import copy
import csv
import functools
import gc
import io
import json
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from zoo.api.checkpoint import outline_of
from zoo.api.plan import planner_for
from zoo.invocation import Invocation
from zoo.profiling.kernel_costs import flop_formulas
from zoo.profiling.peak_memory import gradient_addresses, measure_step, trace
from zoo.profiling.tensor_spec import tensors_in
from zoo.tracing.switches import switch_of

DRAWN = 50
RESULTS = Path("results/models.jsonl")
Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


@dataclass
class Subject:
    """A model, and what it is called with."""

    name: str
    library: str
    build: Build


@dataclass
class Cost:
    """The activation peak in bytes and the floating point operations of a step."""

    bytes: int
    flops: int

    def beside(self, plain: "Cost") -> str:
        return f"{self.bytes / plain.bytes:.3f}, +{self.flops / plain.flops - 1:.1%}"


def image(size: int, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, 3, size, size),)


def from_torchvision(name: str, size: int = 64) -> Build:
    def build() -> Any:
        import torchvision

        return torchvision.models.get_model(name, weights=None), image(size), {}

    return build


def detector() -> Any:
    import torchvision

    build = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    return build(weights=None, weights_backbone=None).backbone, image(96), {}


def video(frames: int, size: int) -> Any:
    import torchvision

    return (
        torchvision.models.video.r3d_18(weights=None),
        (torch.randn(1, 3, frames, size, size),),
        {},
    )


def from_timm(name: str, smaller: int = 128) -> Build:
    def build() -> Any:
        import timm

        model = timm.create_model(name)
        sizes = [model.default_cfg["input_size"][1:]]
        if not model.default_cfg.get("fixed_input_size"):
            sizes.insert(0, (smaller, smaller))
        for size in sizes:
            # some take one size only and do not say so
            with contextlib.suppress(Exception), torch.no_grad():
                model.eval()(torch.randn(1, 3, *size))
                break
        return model, (torch.randn(2, 3, *size),), {}

    return build


def from_transformers(kind: str, config: str, **settings: Any) -> Build:
    def build() -> Any:
        import transformers

        made = getattr(transformers, config)(**settings)
        if hasattr(made, "use_cache"):
            made.use_cache = False
        model = getattr(transformers, kind)(made)
        if "image_size" in settings:
            return model, (), {"pixel_values": torch.randn(2, 3, 32, 32)}
        tokens = torch.randint(3, 90, (2, 32))
        if "num_mel_bins" in settings:
            features = torch.randn(2, settings["num_mel_bins"], 100)
            return model, (), {"input_features": features, "labels": tokens}
        return model, (), {"input_ids": tokens, "labels": tokens}

    return build


def from_monai(name: str, size: int, **settings: Any) -> Build:
    def build() -> Any:
        import monai.networks.nets

        model = getattr(monai.networks.nets, name)(**settings)
        return model, (torch.randn(1, 1, size, size, size),), {}

    return build


def transformer() -> Any:
    model = nn.Transformer(64, 4, 3, 3, 128, batch_first=True)
    return model, (torch.randn(2, 20, 64), torch.randn(2, 16, 64)), {}


class Tagger(nn.Module):
    """Embeds words, reads them by an LSTM, labels each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 10)
        self.lstm = nn.LSTM(32, 32, 2, dropout=0.2)

    def forward(self, words: Tensor) -> tuple[Tensor, Any]:
        outputs, state = self.lstm(self.embed(words))
        return self.head(outputs), state


class UNet(nn.Module):
    """Halves and doubles, with skips."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(self.block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self.block(a + b, a) for a, b in reversed(pairs[1:]))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def block(self, before: int, after: int) -> nn.Module:
        conv = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            x = block(nn.functional.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)


def turn_on(model: nn.Module) -> None:
    """Turns a model's own checkpointing on."""
    switch = switch_of(model)
    assert switch is not None, f"{type(model).__name__} has no checkpointing of its own"
    switch.turn(True)


def subjects() -> list[Subject]:
    small = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 4}
    small |= {"num_attention_heads": 4, "intermediate_size": 256}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    gpt2 = {"vocab_size": 99, "n_embd": 64, "n_layer": 4, "n_head": 4}
    t5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 3}
    t5["num_heads"] = 4
    whisper = {
        "vocab_size": 99, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3,
        "num_mel_bins": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "max_source_positions": 50, "max_target_positions": 50,
    }  # fmt: skip
    vit = {k: v for k, v in small.items() if k != "vocab_size"} | {"image_size": 32}
    named = [
        Subject(name, "torchvision", from_torchvision(name))
        for name in (
            "resnet18", "resnet50", "convnext_tiny", "efficientnet_b0", "swin_t",
            "mobilenet_v3_large",
        )
    ]  # fmt: skip
    swin = {"in_channels": 1, "out_channels": 2, "feature_size": 12}
    return [
        *named,
        Subject("densenet121", "torchvision", from_torchvision("densenet121")),
        Subject("fasterrcnn's backbone", "torchvision", detector),
        Subject("r3d_18", "torchvision", functools.partial(video, 8, 112)),
        Subject("r3d_18 on 4×32×32", "torchvision", functools.partial(video, 4, 32)),
        *(
            Subject(name, "timm", from_timm(name))
            for name in (
                "resnet50", "vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224",
                "efficientnet_b0", "densenet121", "eva02_tiny_patch14_224",
            )
        ),
        Subject("gpt2", "transformers",
                from_transformers("GPT2LMHeadModel", "GPT2Config", **gpt2, **ends)),
        Subject("bert", "transformers",
                from_transformers("BertForMaskedLM", "BertConfig", **small)),
        Subject("llama", "transformers",
                from_transformers("LlamaForCausalLM", "LlamaConfig", **small)),
        Subject("t5", "transformers",
                from_transformers("T5ForConditionalGeneration", "T5Config", **t5, **ends)),
        Subject("vit", "transformers",
                from_transformers("ViTForImageClassification", "ViTConfig", patch_size=8, **vit)),
        Subject("whisper", "transformers",
                from_transformers("WhisperForConditionalGeneration", "WhisperConfig", **whisper,
                                  **ends)),
        Subject("mamba", "transformers",
                from_transformers("MambaForCausalLM", "MambaConfig", vocab_size=99, hidden_size=64,
                                  num_hidden_layers=3, state_size=8)),
        Subject("VNet", "MONAI", from_monai("VNet", 32)),
        Subject("UNet", "MONAI", from_monai("UNet", 32, spatial_dims=3, in_channels=1,
                out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)),
        Subject("SwinUNETR", "MONAI", from_monai("SwinUNETR", 64, **swin)),
        Subject("nn.Transformer", "torch", transformer),
        Subject("U-Net by hand", "torch", lambda: (UNet(), image(64), {})),
        Subject("LSTM by hand", "torch",
                lambda: (Tagger(), (torch.randint(100, (40, 4)),), {})),
    ]  # fmt: skip


def drawn(count: int) -> Iterator[Subject]:
    """Yields small models of timm, of each family at most two."""
    import timm

    names = timm.list_models()
    random.Random(0).shuffle(names)
    families: dict[str, int] = {}
    for name in names:
        family = timm.models.model_entrypoint(name).__module__
        if families.get(family, 0) == 2 or not count:
            continue
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name).parameters())
        except Exception:
            continue
        if size < 8e6:
            families[family] = families.get(family, 0) + 1
            count -= 1
            yield Subject(name, "timm", from_timm(name, 64))


def loss_of(output: Any) -> Tensor:
    """Sums every element of every tensor that needs a gradient, each with its own weight."""
    total: Any = 0.0
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            weights = torch.arange(tensor.numel(), dtype=torch.float32).cos().view(tensor.shape)
            total = total + (tensor.float() * weights).sum() / max(tensor.numel(), 1) ** 0.5
    return total  # type: ignore[no-any-return]


def record(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Trains two steps and returns all that they leave."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        found |= {f"{step} output {n}": tensor.detach().clone() for n, tensor in enumerate(tensors)}
        loss_of(output).backward()
        del output, tensors
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{step} gradient {name}"] = parameter.grad.clone()
        optimizer.step()
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    return found | {"rng": torch.get_rng_state()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Names the first tensor that differs, '' when none does."""
    if one.keys() != other.keys():
        return "other tensors"
    same = functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    return next((name for name in one if not same(one[name], other[name])), "")


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating point operations by torch's formulas."""

    formulas: Mapping[Any, Callable[..., int]] = flop_formulas()
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := self.formulas.get(func._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def cost(model: nn.Module, args: Any, kwargs: Any) -> Cost:
    """Measures one step, after one that plans and allocates."""

    def step() -> None:
        loss_of(model(*args, **kwargs)).backward()

    step()
    model.zero_grad(set_to_none=True)
    taken = trace(step).activation_peak(gradient_addresses(model))
    with Flops() as flops:
        step()
    return Cost(taken, flops.total)


def at_most(model: nn.Module, args: Any, kwargs: Any, most: int) -> tuple[nn.Module, Cost] | None:
    """Puts the plan of fewest operations in force whose step is measured to take no more bytes.

    Of the planner's, the last of rising peaks that still does; beside it `"cheap"` and `True`.
    """
    points = candidates(model, args, kwargs)

    def measured(plan: Any) -> Cost:
        return cost(zoo.checkpoint(model, plan), args, kwargs)

    found = [(taken, plan) for plan in ["cheap", True] if (taken := measured(plan)).bytes <= most]
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        taken = measured(points[middle])
        if taken.bytes <= most:
            found.append((taken, points[middle]))
            low = middle + 1
        else:
            high = middle
    if not found:
        return None
    taken, plan = min(found, key=lambda pair: pair[0].flops)
    return zoo.checkpoint(model, plan), taken


def by_budget(model: nn.Module, args: Any, kwargs: Any, plain: Cost) -> tuple[nn.Module, str]:
    """Puts in force what the planner finds for a budget, and says what a step by it takes."""
    ahead = planner_for(
        zoo.uncheckpoint(model),
        Invocation(args, kwargs),
        optimizer=None,
        loss=loss_of,
    )
    points = ahead.frontier().optimal
    budget = (points[0].peak + points[-1].peak) // 2
    planned = zoo.checkpoint(model, ahead.report(budget, None))
    taken = cost(planned, args, kwargs)
    peak = measure_step(
        lambda: loss_of(model(*args, **kwargs)).backward(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        tensors_in((args, kwargs)),
    ).peak
    # rounded up, so that 1.000 is within
    share = math.ceil(1000 * peak / budget) / 1000
    return planned, f"{share:.3f}, +{taken.flops / plain.flops - 1:.1%}"


def candidates(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Returns the planner's plans by rising peak."""
    # not above: other checkouts lack them, to which this one's plans are compared
    from zoo.planner.optimal import frontier
    from zoo.policy.training_step import Profile

    # a model that returns its loss is traced with it, and a plan ends before it
    outline = outline_of(zoo.uncheckpoint(model), Invocation(args, kwargs)).without_loss()
    found = Profile(model, outline)
    points = frontier(found.costs(kernels=found.kernels()))
    return [point.plan for point in points]


def row(subject: Subject, budget: bool = True) -> list[str]:
    """Trains a model each way and returns a line of the table."""
    torch.manual_seed(0)
    model, args, kwargs = subject.build()
    model.train()
    expected = record(copy.deepcopy(model), args, kwargs)
    if difference(record(copy.deepcopy(model), args, kwargs), expected):
        return [subject.name, subject.library, *[""] * 5, "not deterministic itself"]
    plain = cost(copy.deepcopy(model), args, kwargs)
    own, switched = None, copy.deepcopy(model)
    if switch := switch_of(switched):
        try:
            switch.turn(True)
            own = cost(switched, args, kwargs)
        except Exception as error:
            print(f"# {subject.name}: its own switch fails: {error}", file=sys.stderr)
    del switched, switch
    ours = copy.deepcopy(model)
    try:
        zoo.checkpoint(ours)
        found = difference(record(ours, args, kwargs), expected)
    except zoo.ZooError as error:
        return [subject.name, subject.library, "refused", *[""] * 4, str(error)]
    plan = zoo.plan_of(ours)
    count = "blocks" if plan is None else f"{len(plan.runs())}"
    least = cost(ours, args, kwargs)
    same = "-"
    if budget and own is not None and plan is not None:
        best = at_most(ours, args, kwargs, own.bytes)
        if best is not None:
            planned, taken = best
            found = found or difference(
                record(with_weights(planned, model), args, kwargs), expected
            )
            same = taken.beside(plain)
    kept = "-"
    if budget and plan is not None:
        planned, kept = by_budget(ours, args, kwargs, plain)
        found = found or difference(record(with_weights(planned, model), args, kwargs), expected)
    return [
        subject.name,
        subject.library,
        count,
        "-" if own is None else own.beside(plain),
        least.beside(plain),
        same,
        kept,
        f"no: {found}" if found else "yes",
    ]


def with_weights(model: nn.Module, other: nn.Module) -> nn.Module:
    """Gives a model the weights and buffers of another."""
    model.load_state_dict(other.state_dict())
    model.zero_grad(set_to_none=True)
    return model


COLUMNS = ("model", "library", "steps", "switch", "True", "at its memory", "a budget", "exact")
HEAD = (f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|")
DOCS = Path(__file__).parents[1] / "docs"
TABLE, PAGE = DOCS / "models.csv", DOCS / "models.md"


def tried(subject: Subject, budget: bool) -> list[str]:
    """Returns a line, whatever happens, and keeps it in a file."""
    try:
        cells = row(subject, budget)
    except Exception as error:
        said = " ".join(f"no: {type(error).__name__}: {error}".split())[:160]
        cells = [subject.name, subject.library, *[""] * 5, said]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps([subject.library, subject.name, budget, cells]) + "\n")
    return cells


def table(
    chosen: Iterable[Subject], budget: bool, known: Mapping[Any, list[str]]
) -> list[list[str]]:
    """Prints a table line by line and returns its rows."""
    rows = []
    print("\n".join(HEAD), flush=True)
    for subject in chosen:
        cells = known.get((subject.library, subject.name, budget)) or tried(subject, budget)
        rows.append(cells)
        print("| " + " | ".join(cells) + " |", flush=True)
        gc.collect()
    print(f"\n{exactness(rows)} {summary(rows)}" if budget else f"\n{exactness(rows)}", flush=True)
    return rows


def exactness(rows: Sequence[Sequence[str]]) -> str:
    """Says how many models are exact, and names those that are not."""
    verdicts = [row for row in rows if "not deterministic" not in row[-1]]
    wrong = [f"{row[0]} ({row[-1]})" for row in verdicts if row[-1] != "yes"]
    said = f"{len(verdicts) - len(wrong)} of {len(verdicts)} exact"
    return f"{said}, but: {'; '.join(wrong)}." if wrong else f"{said}."


def earlier() -> dict[Any, list[str]]:
    """Returns the lines of a run that was interrupted."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {
        (library, name, budget): cells for library, name, budget, cells in map(json.loads, lines)
    }


def summary(rows: Sequence[Sequence[str]]) -> str:
    """Says in how many rows a plan does as well as the model's switch, and keeps to its budget."""
    beside = [(_numbers(cells[3]), _numbers(cells[5])) for cells in rows if _numbers(cells[3])]
    as_good = sum(bool(ours) and all(map(float.__le__, ours, switch)) for switch, ours in beside)
    budgets = [kept for cells in rows if (kept := _numbers(cells[6]))]
    within = sum(peak <= 1 for peak, _ in budgets)
    return (
        f"{as_good} of {len(beside)} models with a switch of their own take, by a plan, at most "
        f"its memory for at most its operations. {within} of {len(budgets)} keep to the budget."
    )


def _numbers(cell: str) -> tuple[float, ...]:
    """Reads '0.470, +32.6%' -> (0.47, 32.6); a cell without numbers is empty."""
    return tuple(map(float, cell.replace("%", "").split(", "))) if "," in cell else ()


def origin() -> str:
    """Says with what the rows were measured."""
    names = ("torch", "torchvision", "timm", "transformers", "monai")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"Measured on a CPU, one thread ({versions})."


def write(said: Sequence[str], tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """Writes the CSV: tables one below the other, each with a comment where it is from."""
    with TABLE.open("w", newline="") as file:
        for words, rows in zip(said, tables, strict=True):
            file.write(f"# {words}\n")
            csv.writer(file, lineterminator="\n").writerows((COLUMNS, *rows))


def read() -> tuple[list[str], list[list[list[str]]]]:
    """Reads what `write` wrote."""
    parts = re.split(r"^# (.+)\n", TABLE.read_text(), flags=re.MULTILINE)[1:]
    tables = [list(csv.reader(io.StringIO(part)))[1:] for part in parts[1::2]]
    return parts[::2], tables


def page(said: Sequence[str], tables: Sequence[Sequence[Sequence[str]]]) -> str:
    """Returns the document: a section for each library, and what the drawn models came to."""
    rows = tables[0]
    parts = [
        "# Other libraries' models",
        "[Index](README.md) · [Benchmarks](benchmarks.md) · [Guide](guide.md)",
        f"{exactness(rows)} {summary(rows)} {said[0]} `python benchmarks/models.py --write` "
        "measures anew; every row is in [models.csv](models.csv).",
        __doc__[__doc__.index("Each model trains") :].strip(),
    ]
    shown = [
        COLUMNS.index(name) for name in ("model", "switch", "True", "at its memory", "a budget")
    ]
    for library in dict.fromkeys(row[1] for row in rows):
        lines = [COLUMNS, ["---"] * len(COLUMNS), *(row for row in rows if row[1] == library)]
        cells = ([line[index] for index in shown] for line in lines)
        parts += [f"## {library}", "\n".join(f"| {' | '.join(line)} |" for line in cells)]
    for words, others in zip(said[1:], tables[1:], strict=True):
        parts += [
            "## Small models of timm",
            "Drawn from `timm.list_models()`: of each family at most two, up to 8 million weights. "
            f"{exactness(others)} {words}",
        ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Prints the tables; the exit code is 1 when a model is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models of the table; all if none")
    parser.add_argument("--count", type=int, default=0, help="small models of timm instead")
    parser.add_argument("--write", action="store_true", help="all into docs/models.md")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the CSV")
    parser.add_argument("--fresh", action="store_true", help=f"try again what is in {RESULTS}")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(*read()))
        return 0
    warnings.simplefilter("ignore")
    # what kernels allocate inside depends on it
    torch.set_num_threads(1)
    known = {} if given.fresh or not given.write else earlier()
    wanted: list[tuple[Iterable[Subject], bool]] = []
    if given.write or not given.count:
        wanted.append(([s for s in subjects() if s.name in (given.names or [s.name])], True))
    if given.write or given.count:
        wanted.append((drawn(given.count or DRAWN), False))
    tables: list[list[list[str]]] = []
    for chosen, budget in wanted:
        tables.append(table(chosen, budget, known))
        if given.write:
            said = [origin()] * len(tables)
            write(said, tables)
            PAGE.write_text(page(said, tables))
    return int(any(row[-1].startswith("no:") for rows in tables for row in rows))


if __name__ == "__main__":
    sys.exit(main())
