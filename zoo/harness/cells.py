"""Cells: the parts of a comparison that each run in a process of their own.

Each model of a config becomes three. One that ran before, with the same key, need not run again.

    baseline       steps with digests, the last with its memory traced, nothing checkpointed
    checkpointed   the same with the plan
    timing         one model with and without its plan on the same batches, step by step in turn
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch

from zoo.harness.config import Config, ModelConfig
from zoo.units import parse_bytes

Kind = Literal["baseline", "checkpointed", "timing"]
KINDS: Sequence[Kind] = get_args(Kind)


@dataclass(frozen=True)
class Cell:
    """One process's work; `memory_limit` is in bytes, `plan` is set where it need not be made."""

    kind: Kind
    model: ModelConfig
    steps: int
    repeats: int
    device: str
    dtype: str
    seed: int
    threads: int
    memory_limit: int | None = None
    frontier: bool = False
    plan: str | None = None

    def key(self) -> str:
        """Names the measurement: results of the same key, from the same code, are the same."""
        fields = json.dumps(asdict(self), sort_keys=True)
        content = f"{fields} torch {torch.__version__} zoo {_source_digest()}"
        return f"{self.model.name}/{self.kind}/{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def expand(config: Config) -> list[dict[Kind, Cell]]:
    """Returns the cells of each model of a config."""
    return [{kind: _cell(kind, model, config) for kind in KINDS} for model in config.models]


def timed_by(plan: str | None, cell: Cell) -> Cell:
    """Returns a timing cell that runs just the plan that was measured, and need not make it."""
    return replace(cell, plan=plan)


def _cell(kind: Kind, model: ModelConfig, config: Config) -> Cell:
    # what a kind does not use is left out of its key: one baseline serves every plan, and a floor
    # is judged after measuring
    repeats = model.repeats
    model = replace(model, largest_ratio=1.0, cuda_batch_size=None, repeats=1)
    if kind == "baseline":
        model = replace(model, checkpoint=False)
    return Cell(
        kind=kind,
        model=model,
        steps=0 if kind == "timing" else config.steps,
        repeats=repeats if kind == "timing" else 0,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        # kernels take scratch memory for each thread: DenseNet-121's peak is 18 % larger with two
        threads=config.threads or torch.get_num_threads(),
        memory_limit=_bytes(config.memory_limit),
        frontier=config.frontier and kind == "baseline",
    )


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size, "memory_limit")


@cache
def _source_digest() -> str:
    """Digests what a result depends on: the package's code without the report."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if "report" not in path.relative_to(package).parts:
            total.update(path.read_bytes())
    return total.hexdigest()[:12]
