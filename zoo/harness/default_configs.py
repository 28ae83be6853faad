"""The default data and sizes for each model: real data of the model's kind, in small sizes.

A config that names only `resnet18`, or `--model vit_tiny_patch16`, gets its keys from here; the
first pattern that matches the name counts.
"""

from fnmatch import fnmatchcase
from typing import Any

_CIFAR = {"data": "digits", "size": 32, "batch_size": 8, "accelerator_batch_size": 128}
_IMAGENET = {"data": "photographs", "size": 224, "batch_size": 4, "accelerator_batch_size": 64}
_TEXT = {"data": "text", "size": 512, "batch_size": 1, "accelerator_batch_size": 8}
_VOLUME = {"data": "volume", "size": 64, "batch_size": 1, "accelerator_batch_size": 4}
_WORDS = {"data": "stream", "size": 200, "batch_size": 10, "accelerator_batch_size": 80}

RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, _CIFAR) for name in ("resnet110", "resnet164", "resnet1001", "resnet1202")),
    *((name, _CIFAR) for name in ("densenet100", "densenet190")),
    ("vit_*", _IMAGENET | {"optimizer": "adamw"}),
    *((pattern, _TEXT) for pattern in ("gpt2*", "llama*", "qwen*")),
    ("lstm*", _WORDS),
    ("gru*", _WORDS),
    *((pattern, _VOLUME) for pattern in ("vnet*", "unet*")),
    ("*", _IMAGENET),
)


def recipe(name: str) -> dict[str, Any]:
    """Returns the default keys for a model of the catalog."""
    return dict(next(keys for pattern, keys in RECIPES if fnmatchcase(name, pattern)))
