"""Activation checkpointing that is exact: the same training in a fraction of the memory.

    import zoo
    model = zoo.resnet50(checkpoint=True)

Also called gradient checkpointing or rematerialization. A model is a chain of nodes, a plan says
whose activations are saved and whose are recomputed, and nothing else changes. See README.md.
"""

# before torch, which takes a second to import
from zoo.cli import interrupts as _interrupts

# isort: split
from zoo.api.plan import RankReport, frontier, plan, plan_rank
from zoo.api.track import Anatomy, anatomy, track
from zoo.api.verify import verify
from zoo.catalog import (
    create,
    densenet100,
    densenet121,
    densenet161,
    densenet169,
    densenet190,
    densenet201,
    densenet264,
    gpt2_large,
    gpt2_medium,
    gpt2_small,
    gpt2_xl,
    gru,
    list_models,
    lstm,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet110,
    resnet152,
    resnet164,
    resnet1001,
    resnet1202,
    resnext50_32x4d,
    resnext101_32x8d,
    vit_base_patch16,
    vit_large_patch16,
    vit_small_patch16,
    vit_tiny_patch16,
    vnet,
    wide_resnet50_2,
    wide_resnet101_2,
)
from zoo.chain import Chain
from zoo.engine.recompute import recompute
from zoo.errors import (
    ArgumentError,
    BudgetError,
    ConfigError,
    FileError,
    InputError,
    Interrupted,
    ModelNameError,
    OptimizerError,
    PlanError,
    RecomputeError,
    VerifyError,
    WeightsError,
    ZooError,
)
from zoo.layers.transformer import TransformerBlock
from zoo.optimizer.in_backward import OptimizerInBackward, optimizer_in_backward
from zoo.planner.plan import Plan
from zoo.policy.report import Frontier, PlanReport
from zoo.profiling.timeline import Timeline
from zoo.sizing.max_size import Largest, largest, max_batch_size
from zoo.tracing.api import chain_of, checkpoint, plan_of, uncheckpoint
from zoo.version import __version__

# a program of somebody else's may have the command's name, too
_interrupts.raise_on_interrupt()

__all__ = [
    "Anatomy",
    "ArgumentError",
    "BudgetError",
    "Chain",
    "ConfigError",
    "FileError",
    "Frontier",
    "InputError",
    "Interrupted",
    "Largest",
    "ModelNameError",
    "OptimizerError",
    "OptimizerInBackward",
    "Plan",
    "PlanError",
    "PlanReport",
    "RankReport",
    "RecomputeError",
    "Timeline",
    "TransformerBlock",
    "VerifyError",
    "WeightsError",
    "ZooError",
    "__version__",
    "anatomy",
    "chain_of",
    "checkpoint",
    "create",
    "densenet100",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet190",
    "densenet201",
    "densenet264",
    "frontier",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_small",
    "gpt2_xl",
    "gru",
    "largest",
    "list_models",
    "lstm",
    "max_batch_size",
    "optimizer_in_backward",
    "plan",
    "plan_of",
    "plan_rank",
    "recompute",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet110",
    "resnet152",
    "resnet164",
    "resnet1001",
    "resnet1202",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "track",
    "uncheckpoint",
    "verify",
    "vit_base_patch16",
    "vit_large_patch16",
    "vit_small_patch16",
    "vit_tiny_patch16",
    "vnet",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
