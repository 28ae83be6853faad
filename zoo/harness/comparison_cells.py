"""Cells of a comparison: the units of work that each run in a process of their own.

Each model of a config has four or five. A cell whose key has a result is not measured again.

    baseline                steps with digests, the last with its memory traced, no recomputation
    checkpointed            the same with the plan
    optimizer_in_backward   the same with its own plan and `zoo.optimizer_in_backward`, unless the
                            config leaves it out
    library_checkpointing   the baseline with the checkpointing of its own library, timm's say,
                            where there is one, unless the config leaves it out
    timing                  one model as each of these on the same batches, step by step in turn

others if the config asks for CUDA graphs:

    baseline_graph          steps with digests by `zoo.make_graphed_step`, the memory of the one
                            that is captured, and the times of replays
    checkpointed_graph, optimizer_in_backward_graph
                            the same by the plans of these variants

and one where a training of zoo's differs from the baseline:

    baseline_again          the baseline once more, which may differ from itself
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from zoo.catalog.factories import create_on_meta
from zoo.catalog.libraries import is_of_library
from zoo.cuda_graphs.graphed_step import WARM_UPS
from zoo.harness.config import Config, ModelConfig
from zoo.planner.plan import Plan
from zoo.planner.schemes import NAMES
from zoo.tracing.switches import switch_of

Graph = Literal["baseline_graph", "checkpointed_graph", "optimizer_in_backward_graph"]
Kind = Literal[
    "baseline",
    "checkpointed",
    "optimizer_in_backward",
    "library_checkpointing",
    "timing",
    "baseline_again",
    Graph,
]
# the cells of each model
KINDS: Sequence[Kind] = ("baseline", "checkpointed", "optimizer_in_backward", "timing")
# and those of CUDA graphs, with what each trains as a graph
GRAPHS: Mapping[Kind, Kind] = {
    "baseline_graph": "baseline",
    "checkpointed_graph": "checkpointed",
    "optimizer_in_backward_graph": "optimizer_in_backward",
}
# those that train without a plan
UNPLANNED = ("baseline", "library_checkpointing")
# steps before one that is captured; the first of a stream has no state from before
EAGER_STEPS = 1 + WARM_UPS


@dataclass(frozen=True)
class Cell:
    """The work of one process; `memory_limit` in bytes, `plan` replaces the model's `checkpoint`.

    `optimizer_in_backward` adds that variant, with `plan_in_backward`, to the timed ones;
    `library_checkpointing` says that this cell trains that variant, among others.
    """

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
    optimizer_in_backward: bool = False
    plan_in_backward: str | None = None
    deterministic: bool = False
    library_checkpointing: bool = False

    @property
    def checkpoint(self) -> bool | int | str | Plan:
        """The `checkpoint=` argument for `zoo.create`."""
        chosen = self.plan or self.model.checkpoint
        return Plan.parse(chosen) if isinstance(chosen, str) and chosen not in NAMES else chosen

    def key(self) -> str:
        """Identifies the measurement by its options and code: equal keys give equal results."""
        fields = json.dumps(asdict(self), sort_keys=True)
        content = f"{fields} torch {torch.__version__} zoo {_source_digest()}"
        return f"{self.model.name}/{self.kind}/{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def is_key(self, key: str) -> bool:
        """Returns whether a key is this cell's; that of a timing has plans not known before."""
        prefix = f"{self.model.name}/{self.kind}/"
        return key.startswith(prefix) if self.kind == "timing" else key == self.key()

    def __str__(self) -> str:
        return f"{self.model.name} {self.kind.replace('_', ' ')}"


def expand(config: Config) -> list[dict[Kind, Cell]]:
    """Returns the cells of each model of a config, in the order in which they run."""
    return [_cells(model, config) for model in config.models]


def _cells(model: ModelConfig, config: Config) -> dict[Kind, Cell]:
    by_library = config.library_checkpointing and has_switch(model.name, model.arguments)
    kinds = [*KINDS, *(GRAPHS if config.cuda_graph else ())]
    if not config.optimizer_in_backward:
        kinds = [kind for kind in kinds if GRAPHS.get(kind, kind) != "optimizer_in_backward"]
    if by_library:
        kinds.insert(kinds.index("timing"), "library_checkpointing")
    return {kind: _cell(kind, model, config, by_library) for kind in kinds}


def _cell(kind: Kind, model: ModelConfig, config: Config, by_library: bool) -> Cell:
    # options that a kind does not use are constants, so that they do not change its key: one
    # baseline serves every plan, and largest_ratio is judged after measuring
    unused: dict[str, Any] = {"largest_ratio": 1.0, "accelerator_batch_size": None, "repeats": 1}
    is_timing, is_graph = kind == "timing", kind in GRAPHS
    return Cell(
        kind=kind,
        model=replace(
            model,
            checkpoint=GRAPHS.get(kind, kind) not in UNPLANNED and model.checkpoint,
            **unused,
        ),
        steps=0 if is_timing else config.steps + EAGER_STEPS * config.cuda_graph,
        repeats=model.repeats if is_timing or is_graph else 0,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        # kernels take a workspace per thread: DenseNet-121's peak is 18 % larger with two threads
        threads=config.threads or torch.get_num_threads(),
        memory_limit=config.memory_limit,
        frontier=config.frontier and kind == "baseline",
        optimizer_in_backward=config.optimizer_in_backward and is_timing,
        deterministic=config.deterministic,
        library_checkpointing=by_library and kind in ("library_checkpointing", "timing"),
    )


def again(baseline: Cell) -> Cell:
    """Returns the cell that trains a baseline once more."""
    return replace(baseline, kind="baseline_again", frontier=False)


def has_switch(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a model of another library has its own checkpointing to switch on."""
    return is_of_library(name) and switch_of(create_on_meta(name, **arguments)) is not None


@cache
def _source_digest() -> str:
    """Returns a digest of the code that results depend on: the package without the report."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if package / "report" not in path.parents:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
