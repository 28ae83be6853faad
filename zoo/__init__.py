"""Activation checkpointing that is exact: the same training in a fraction of the memory.

    import zoo
    model = zoo.resnet50(checkpoint=True)

Also called gradient checkpointing or rematerialization. A plan says which steps of a
model keep their activations and which are recomputed, and nothing else changes. See README.md.
"""

# before torch, which takes a second to import
from zoo.cli import interrupts as _interrupts

# isort: split
from zoo.api.checkpoint import (
    chain_of as chain_of,
    checkpoint as checkpoint,
    plan_of as plan_of,
    uncheckpoint as uncheckpoint,
)
from zoo.api.plan import frontier as frontier, plan as plan
from zoo.api.plan_rank import RankReport as RankReport, plan_rank as plan_rank
from zoo.api.track import Anatomy as Anatomy, anatomy as anatomy, track as track
from zoo.api.verify import verify as verify
from zoo.catalog.factories import (
    create as create,
    densenet100 as densenet100,
    densenet121 as densenet121,
    densenet161 as densenet161,
    densenet169 as densenet169,
    densenet190 as densenet190,
    densenet201 as densenet201,
    densenet264 as densenet264,
    gpt2_large as gpt2_large,
    gpt2_medium as gpt2_medium,
    gpt2_small as gpt2_small,
    gpt2_xl as gpt2_xl,
    gru as gru,
    list_models as list_models,
    llama3_1_8b as llama3_1_8b,
    llama3_2_1b as llama3_2_1b,
    llama3_2_3b as llama3_2_3b,
    llama_tiny as llama_tiny,
    lstm as lstm,
    qwen3_0_6b as qwen3_0_6b,
    qwen3_1_7b as qwen3_1_7b,
    resnet18 as resnet18,
    resnet34 as resnet34,
    resnet50 as resnet50,
    resnet101 as resnet101,
    resnet110 as resnet110,
    resnet152 as resnet152,
    resnet164 as resnet164,
    resnet1001 as resnet1001,
    resnet1202 as resnet1202,
    resnext50_32x4d as resnext50_32x4d,
    resnext101_32x8d as resnext101_32x8d,
    unet as unet,
    vit_base_patch16 as vit_base_patch16,
    vit_large_patch16 as vit_large_patch16,
    vit_small_patch16 as vit_small_patch16,
    vit_tiny_patch16 as vit_tiny_patch16,
    vnet as vnet,
    wide_resnet50_2 as wide_resnet50_2,
    wide_resnet101_2 as wide_resnet101_2,
)
from zoo.cuda_graphs.graphed_step import (
    GraphedStep as GraphedStep,
    make_graphed_step as make_graphed_step,
)
from zoo.engine.recompute import recompute as recompute
from zoo.engine.replay_check import check_replays as check_replays
from zoo.errors import (
    ArgumentError as ArgumentError,
    BudgetError as BudgetError,
    ConfigError as ConfigError,
    DeterminismError as DeterminismError,
    FileError as FileError,
    GraphError as GraphError,
    InputError as InputError,
    Interrupted as Interrupted,
    ModelNameError as ModelNameError,
    OptimizerError as OptimizerError,
    PlanError as PlanError,
    RecomputeError as RecomputeError,
    VerifyError as VerifyError,
    WeightsError as WeightsError,
    ZooError as ZooError,
)
from zoo.layers.transformer import TransformerBlock as TransformerBlock
from zoo.optimizer.in_backward import (
    OptimizerInBackward as OptimizerInBackward,
    optimizer_in_backward as optimizer_in_backward,
)
from zoo.planner.plan import Plan as Plan
from zoo.policy.plan_report import Frontier as Frontier, PlanReport as PlanReport
from zoo.profiling.timeline import Timeline as Timeline
from zoo.sizing.max_size import (
    Largest as Largest,
    largest as largest,
    max_batch_size as max_batch_size,
)
from zoo.version import __version__ as __version__

# what is imported above, without the packages that it comes from
__all__ = [
    name
    for name, value in vars().items()
    if name == "__version__" or (name[0] != "_" and type(value) is not type(_interrupts))
]

# another program may have the command's name, too
_interrupts.raise_on_interrupt()
