"""Finds out whether a model checkpoints itself, by the switches that libraries have."""

from torch import nn

from zoo.errors import ArgumentError

# the attribute that is true while it is on, and how to turn it off
SWITCHES = {
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
    "gradient_checkpointing": "model.gradient_checkpointing_disable()",
    "memory_efficient": "building it with memory_efficient=False",
    "use_checkpoint": "building it with use_checkpoint=False",
    "with_cp": "building it with with_cp=False",
}


def check_switches(model: nn.Module) -> None:
    """Raises ArgumentError when a model's own checkpointing is on: both would run everything twice.

    torch's, which the models call, also folds statistics twice.
    """
    for path, module in model.named_modules():
        for name, way in SWITCHES.items():
            if vars(module).get(name) is True:
                where = f"{path}.{name}" if path else name
                raise ArgumentError(
                    f"{type(model).__name__} checkpoints itself ({where} is True). Turn that off "
                    f"by {way}, then zoo.checkpoint takes its place"
                )
