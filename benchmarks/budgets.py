"""Plans for budgets, and the CPU seconds to find them: of this checkout and of another one.

    python benchmarks/budgets.py --against ../before              # both tables: 20 minutes, 1 core
    python benchmarks/budgets.py --against ../before --tables plans --models "zoo resnet50"

`plans`: for each model 13 budgets, shares of the baseline's peak: the time of the plan over that of
the baseline, and in brackets how many dry steps were run for it. A dry step judges the plan of the
other checkout, too, so that one measure gives both times. The other time follows behind a mark:

    >    this plan takes more than 1.02 times as long
    -    there is no plan, and the other one keeps to the budget
    ~    so, and the budget is within 0.4 % of the other's least peak
    !    the other plan exceeds the budget

`seconds`: of the CPU, processes that were forked included, for a plan of 80 % of the baseline's
peak; then, of another process, those of the trace, of a first dry step and of later ones.

Seconds of kernels are estimates for an A100, the same in each run. The two checkouts take turns, in
a process for each number. Linux alone counts the seconds of dry steps.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import planning
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import zoo
from zoo.api.plan import planner_for
from zoo.errors import BudgetError
from zoo.planner import schemes
from zoo.planner.dry_step import DryStep
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner
from zoo.report.escaping import markdown_table

SHARES = (0.3, 0.36, 0.42, 0.48, 0.54, 0.6, 0.66, 0.72, 0.78, 0.84, 0.9, 0.95, 0.98)
SLOWER, NEAR = 1.02, 1.004
# the budget whose planning is counted in seconds
SHARE = 0.8
BATCHES = 16
TABLES = "plans", "seconds"
HERE = Path(__file__).resolve().parents[1]
Built = planning.Built
Json = dict[str, Any]


def of_zoo(name: str, *shape: int, **sizes: int) -> Callable[[], Built]:
    """Returns what builds a model of the project for images, or for tokens (N, T)."""

    def build() -> Built:
        model = getattr(zoo, name)(**sizes)
        if len(shape) > 2:
            return model, torch.rand(shape)
        tokens = torch.zeros(shape, dtype=torch.long)
        return model, {"tokens": tokens, "targets": tokens}

    return build


def of_library(name: str, library: str) -> Callable[[], Built]:
    """Returns what builds a model of `benchmarks/models.py`, with a larger batch."""

    def build() -> Built:
        subjects = models.subjects()
        subject = next(one for one in subjects if (one.name, one.library) == (name, library))
        model, arguments, keywords = subject.build()
        return model, pytree.tree_map_only(Tensor, larger, keywords or arguments)

    return build


def larger(inputs: Tensor) -> Tensor:
    """Repeats inputs, so that activations take most of the memory."""
    return inputs.repeat(BATCHES, *[1] * (inputs.ndim - 1))


GPT2 = {"vocabulary": 1000, "positions": 64, "width": 128, "depth": 6, "heads": 4}
LIBRARIES = (
    *((name, "torchvision") for name in ("resnet18", "convnext_tiny", "efficientnet_b0")),
    *((name, "timm") for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")),
    *((name, "transformers") for name in ("gpt2", "bert", "llama", "t5")),
    ("LSTM by hand", "torch"),
)
SMALL: dict[str, Callable[[], Built]] = {
    "zoo resnet50": of_zoo("resnet50", 8, 3, 224, 224),
    "zoo densenet121": of_zoo("densenet121", 8, 3, 128, 128),
    "zoo lstm": of_zoo("lstm", 20, 35, vocabulary=1000),
    "zoo vit_tiny": of_zoo("vit_tiny_patch16", 8, 3, 224, 224),
    "zoo gpt2": of_zoo("gpt2_small", 16, 64, **GPT2),
    **{f"{library} {name}": of_library(name, library) for name, library in LIBRARIES},
}
NAMES = "Llama of 64 layers, width 64", "densenet264, batch 4", "resnet1001, batch 8"
LARGE = {name: planning.ROWS[name].build for name in NAMES}


def planner_of(built: Built) -> StepPlanner:
    """Traces a model; seconds of its kernels are estimates."""
    model, inputs = built
    return planner_for(model, inputs, optimizer=None, device="a100", measured=False)


def step_of(planner: StepPlanner) -> Any:
    """Returns the counted step; in another checkout the planner may be that itself."""
    return getattr(planner, "step", planner)


class Judge:
    """Runs dry steps, each of them once, and notes those that were asked for."""

    def __init__(self, run: Callable[[DryStep], Any]) -> None:
        self.run, self.logs, self.asked = run, dict[DryStep, Any](), set[DryStep]()

    def __call__(self, step: DryStep) -> Any:
        key = step._replace(cuts=tuple(step.cuts))
        self.asked.add(key)
        if key not in self.logs:
            self.logs[key] = self.run(step)
        return self.logs[key]


def plans(built: Built, asked: Json) -> Json:
    """Returns a model's plans for budgets in bytes, or for `SHARES` of its own baseline.

    Plans of the other checkout that are among what is `asked` are judged, too.
    """
    planner = planner_of(built)
    outline = step_of(planner).outline
    judge = None if outline.dry_step is None else Judge(outline.dry_step)
    # the outline is frozen
    vars(outline)["dry_step"] = judge
    budgets = asked.get("budgets") or [int(share * planner.baseline.peak) for share in SHARES]
    others = asked.get("plans") or [None] * len(budgets)
    rows: list[Json] = []
    for budget, other in zip(budgets, others, strict=True):
        if judge is not None:
            judge.asked.clear()
            planner.judge._known.clear()
        row = {"budget": budget}
        with contextlib.suppress(BudgetError):
            report = planner.report(budget, None)
            row |= {"plan": report.plan.to_json(), "time": report.predicted_time_ratio}
        row["judgements"] = 0 if judge is None else len(judge.asked)
        if other is not None:
            point = planner.point(Plan.from_json(other))
            row |= {"other time": point.time_ratio, "other peak": point.peak}
        rows.append(row)
    return {"rows": rows, "least": planner.least.peak}


def seconds(built: Built, _: Json) -> Json:
    """Returns the seconds of the CPU for a plan of `SHARE` of the baseline's peak."""
    start = spent()
    planner = planner_of(built)
    with contextlib.suppress(BudgetError):
        planner.report(SHARE, None)
    return {"seconds": spent() - start}


def stages(built: Built, _: Json) -> Json:
    """Returns the seconds of the CPU for a trace, and for each of some dry steps."""
    at = [spent()]
    planner = planner_of(built)
    at.append(spent())
    step = step_of(planner)
    blocks = step.outline.blocks
    for plan in (Plan.keep_all(step.steps), schemes.each_block(blocks), schemes.sqrt(blocks)):
        assert planner.judge.judgement(plan) is not None, "the trace is kept for it"
        at.append(spent())
    return {"seconds": [after - before for before, after in itertools.pairwise(at)]}


def spent() -> float:
    """Returns the seconds of the CPU that this process and those that it forked have taken."""
    gc.collect()
    users = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    ended = sum(sum(resource.getrusage(user)[:2]) for user in users)
    alive = (path.read_text() for path in Path("/proc/self").glob("task/*/children"))
    children = (Path("/proc", child, "stat") for child in "".join(alive).split())
    # four fields behind the name: of the child itself, and of its own children that have ended
    fields = (child.read_text().rpartition(")")[2].split()[11:15] for child in children)
    return ended + sum(map(int, itertools.chain(*fields))) / os.sysconf("SC_CLK_TCK")


TASKS: dict[str, Callable[[Built, Json], Json]] = {
    "plans": plans,
    "seconds": seconds,
    "stages": stages,
}


def serve(task: str) -> None:
    """Reads a model and what else is asked, and prints the result of a task."""
    asked = json.load(sys.stdin)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs = (SMALL | LARGE)[asked["model"]]()
    print(json.dumps(TASKS[task]((model.train(), inputs), asked)))


def run(checkout: Path, task: str, **asked: Any) -> Json:
    """Runs a task in a process of its own, by the code of a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--task", task],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def mark_of(row: Json, other: Json, least: int) -> str:
    """Returns how a plan stands beside that of the other checkout; "" if nothing is to be said."""
    if "time" not in other:
        return ""
    if row["other peak"] > row["budget"]:
        return "!"
    if "time" not in row:
        return "~" if row["budget"] <= NEAR * least else "-"
    return ">" if row["time"] > SLOWER * row["other time"] else ""


def line_of_plans(name: str, against: Path | None) -> list[str]:
    """Returns the plans of a model."""
    other = run(against, "plans", model=name) if against else {"rows": [{}] * len(SHARES)}
    rows, given = other["rows"], "plans" if against else ""
    options = {
        "budgets": [row["budget"] for row in rows],
        "plans": [row.get("plan") for row in rows],
    }
    found = run(HERE, "plans", model=name, **(options if given else {}))["rows"]
    line = [name]
    for row, before in zip(found, rows, strict=True):
        mark = mark_of(row, before, other.get("least", 0))
        behind = f" {mark} {row['other time']:.3f}" if mark else ""
        time = f"{row['time']:.3f}" if "time" in row else ""
        line.append(f"{time} ({row['judgements']}){behind}".strip())
    return line


def line_of_seconds(name: str, against: Path | None, rounds: int) -> list[str]:
    """Returns what planning of a model takes."""
    checkouts = [path for path in (against, HERE) if path is not None]
    results: dict[Path, list[float]] = {path: [] for path in checkouts}
    for _ in range(rounds):
        for path in checkouts:
            results[path].append(run(path, "seconds", model=name)["seconds"])
    here = statistics.median(results[HERE])
    other = statistics.median(results[against]) if against else None
    trace, first, *later = run(HERE, "stages", model=name)["seconds"]
    return [
        name,
        "" if other is None else f"{other:.1f}",
        f"{here:.1f}",
        "" if other is None else f"{here / other:.2f}",
        *(f"{value:.2f}" for value in (trace, first, statistics.mean(later))),
    ]


def main() -> None:
    """Prints the tables, a line after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument(
        "--tables", nargs="+", choices=["plans", "seconds"], default=["plans", "seconds"]
    )
    parser.add_argument("--models", nargs="+", choices=[*SMALL, *LARGE])
    parser.add_argument("--rounds", type=int, default=1, help="of the seconds; their median counts")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        serve(arguments.task)
        return
    against = arguments.against and arguments.against.resolve()
    if "plans" in arguments.tables:
        chosen = [name for name in SMALL if name in (arguments.models or SMALL)]
        columns = ["model", *(f"{share:.0%}" for share in SHARES)]
        print(markdown_table(columns, [line_of_plans(name, against) for name in chosen]))
    if "seconds" in arguments.tables:
        columns = ["model", "other, s", "this, s", "ratio", "trace", "first dry step", "later ones"]
        chosen = arguments.models or [*SMALL, *LARGE]
        lines = [line_of_seconds(name, against, arguments.rounds) for name in chosen]
        print(markdown_table(columns, lines))


if __name__ == "__main__":
    main()
