"""Compares the plans for a budget with each block and sqrt(n) segments.

    python benchmarks/planner.py                 # all models, real steps: half an hour on 2 cores
    python benchmarks/planner.py resnet50
    python benchmarks/planner.py --on-paper      # only what the planner predicts

`at its memory` is the plan of least time whose predicted peak is no larger than the scheme's; `at
its time` that of least peak that is predicted to take no longer. Both are chosen from seconds
measured step by step.

Activations are fractions of keeping everything: allocator bytes of one step, gradients of
parameters left out. Operations are those of a whole training step, counted by torch's flop counter.
Times are ratios to keeping everything within a round of steps, one of each plan: median, and in
brackets the quartiles. `bits` says whether loss, gradients and buffers are those of keeping
everything. With these the C library keeps its pages, and times stand still:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999 python benchmarks/planner.py
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from zoo.api.checkpoint import outline_of
from zoo.harness.training import step_digests
from zoo.invocation import Invocation
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.optimal import frontier
from zoo.planner.plan import Plan
from zoo.planner.schemes import each_block, sqrt
from zoo.policy.training_step import Profile
from zoo.profiling.peak_memory import gradient_addresses, trace
from zoo.tracing.planned_forward import PatchedForward

ROUNDS = 5


def words(*shape: int, vocabulary: int = 10_000) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape)


def text(*shape: int, vocabulary: int = 10_000) -> tuple[Tensor, None, Tensor]:
    tokens, targets = words(*shape, vocabulary=vocabulary)
    return tokens, None, targets


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "resnet50": (zoo.resnet50, lambda: (torch.rand(8, 3, 224, 224),)),
    "resnet1001": (zoo.resnet1001, lambda: (torch.rand(8, 3, 32, 32),)),
    "densenet121": (zoo.densenet121, lambda: (torch.rand(4, 3, 224, 224),)),
    "densenet201": (zoo.densenet201, lambda: (torch.rand(4, 3, 224, 224),)),
    "vnet": (zoo.vnet, lambda: (torch.rand(1, 1, 64, 64, 64),)),
    "vit_base_patch16": (zoo.vit_base_patch16, lambda: (torch.rand(4, 3, 224, 224),)),
    "gpt2_small": (lambda: zoo.gpt2_small(vocabulary=10_000), lambda: words(1, 256)),
    "lstm": (lambda: zoo.lstm(vocabulary=10_000), lambda: text(60, 10)),
}


class Subject:
    """A model whose steps are run by one plan or another."""

    def __init__(self, build: Callable[[], nn.Module], make: Callable[[], tuple[Any, ...]]) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = build(), make()
        self.outline = outline_of(self.model, Invocation(self.inputs))
        self.profile = Profile(self.model, self.outline)
        # forwards by the plans that were in force before
        self.patches: dict[Plan, PatchedForward] = {}
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    @functools.cached_property
    def costs(self) -> StepCosts:
        """The costs of its steps, with kernels measured on this machine."""
        return self.profile.costs(kernels=self.profile.kernels())

    def plans(self) -> dict[str, Plan]:
        """Returns the plans to compare by their names."""
        best = frontier(self.costs)
        found = {"keep everything": Plan.keep_all(len(self.costs))}
        blocks = self.outline.blocks
        schemes = {
            "each block": each_block(blocks, self.outline.whole),
            "sqrt(n) segments": sqrt(blocks),
        }
        for name, plan in schemes.items():
            found[name] = plan
            result = simulate(found[name], self.costs)
            small = [point.plan for point in best if point.peak <= result.peak]
            seconds = result.recomputed_seconds
            fast = [point.plan for point in best if point.recomputed_seconds <= seconds]
            found |= {f"{name}: at its memory": small[-1], f"{name}: at its time": fast[0]}
        return found | {"least": best[0].plan}

    def with_plan(self, plan: Plan) -> "Subject":
        """Puts a plan in force on the model as it was built, from the next forward on."""
        zoo.uncheckpoint(self.model)
        if plan in self.patches:
            self.patches[plan].install()
        else:
            zoo.checkpoint(self.model, plan, inputs=self.inputs)
            self.patches[plan] = vars(self.model)["forward"]
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        return self

    def step(self) -> Tensor:
        """Runs forward and backward."""
        result = self.model(*self.inputs)
        result = result[0] if isinstance(result, tuple) else result
        loss: Tensor = result if result.ndim == 0 else result.square().mean()
        loss.backward()
        return loss.detach()

    def bits(self) -> dict[str, str]:
        """Returns digests of what a step computes."""
        return step_digests(self.model, self.step())

    def activations(self) -> int:
        """Measures the bytes of activations at the peak of a step."""
        return trace(self.step).activation_peak(gradient_addresses(self.model))

    def operations(self) -> int:
        """Counts the floating point operations of a step."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return int(counter.get_total_flops())

    def seconds(self) -> float:
        """Times a step."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def predicted(plans: Mapping[str, Plan], costs: StepCosts) -> dict[str, list[str]]:
    """Returns what the planner says of each plan: activations, time."""
    whole = sum(costs.seconds) + sum(costs.seconds_backward)
    found = {name: simulate(plan, costs) for name, plan in plans.items()}
    baseline = found["keep everything"].peak
    return {
        name: [f"{result.peak / baseline:.3f}", f"x{1 + result.recomputed_seconds / whole:.3f}"]
        for name, result in found.items()
    }


def measured(plans: Mapping[str, Plan], subject: Subject, rounds: int) -> dict[str, list[str]]:
    """Returns what real steps say of each plan: activations, time, operations, bits."""
    bits = {name: subject.with_plan(plan).bits() for name, plan in plans.items()}
    peaks = {name: subject.with_plan(plan).activations() for name, plan in plans.items()}
    operations = {name: subject.with_plan(plan).operations() for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            seconds[name].append(subject.with_plan(plan).seconds())
    first = "keep everything"
    return {
        name: [
            f"{peaks[name] / peaks[first]:.3f}",
            ratio(seconds[name], seconds[first]),
            f"x{operations[name] / operations[first]:.3f}",
            "same" if bits[name] == bits[first] else "DIFFERENT",
        ]
        for name in plans
    }


def ratio(some: list[float], others: list[float]) -> str:
    """Returns the median of the ratios and their quartiles as text."""
    ratios = [one / other for one, other in zip(some, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"x{middle:.3f} [{low:.3f}, {high:.3f}]"


def compare(name: str, rounds: int) -> None:
    """Prints the table of one model; no rounds leave out real steps."""
    subject = Subject(*MODELS[name])
    plans = subject.plans()
    rows = predicted(plans, subject.costs)
    heads = [f"{name}, {len(subject.costs)} steps", "predicted activations", "time"]
    if rounds:
        heads += ["measured activations", "time", "operations", "bits"]
        for key, cells in measured(plans, subject, rounds).items():
            rows[key] += cells
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for key, cells in rows.items():
        print(f"| {key} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"all, or some of {', '.join(MODELS)}")
    parser.add_argument("--on-paper", action="store_true", help="run no steps")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps timed of each plan")
    chosen = parser.parse_args()
    for model in chosen.models or MODELS:
        compare(model, 0 if chosen.on_paper else chosen.rounds)
