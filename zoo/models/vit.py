"""Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929), as timm computes them.

Parameter names, initialization (the same weights from the same seed), outputs and gradients are
those of timm's `vit_*_patch16_224`; its weights load with `load_state_dict`. Deviations from the
paper are timm's: no hidden layer before the classifier, and dropout only in front of it.
"""

from math import sqrt
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.chain import Chain, Steps, spread
from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import check_input, check_positive, check_rate, only_input
from zoo.layers.drop_path import drop_path_rates
from zoo.layers.transformer import TransformerBlock

PATCH = 16


class ViT(Chain):
    """Cuts an image into patches and lets them attend to one another: (N, C, H, W) -> (N, classes).

    `depth` blocks of `width` channels in `heads` heads. H and W are `image_size`, a multiple of 16;
    C is `in_channels`. `drop_rate` is the dropout before the classifier, `drop_path_rate` the
    stochastic depth of the last block, rising linearly from 0 at the first.

    Raises:
        ArgumentError: a size below 1, heads that do not divide the width, an image size that 16
            does not divide, or a rate outside [0, 1).
        InputError: at the call, an input of another shape, size or type.
    """

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        classes: int = 1000,
        in_channels: int = 3,
        image_size: int = 224,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive("ViT", width=width, depth=depth, classes=classes, in_channels=in_channels)
        check_positive("ViT", image_size=image_size)
        check_rate("ViT", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        _check_patches(image_size)
        patches = (image_size // PATCH) ** 2
        self.in_channels = in_channels
        self.image_size = image_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + patches, width))
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(in_channels, width, PATCH, stride=PATCH)}
        )
        rates = drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, drop_path_rate=rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(width, classes)
        self.initialize()

    def initialize(self) -> None:
        """Draws the weights in timm's order: normal of 0.02, biases zero, the class token 1e-6."""
        _truncated_normal(self.pos_embed)
        nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _truncated_normal(module.weight)
                nn.init.zeros_(module.bias)

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Checks images (N, C, H, W) and lists the steps."""
        images = only_input("ViT", inputs)
        check_input("ViT", images, "N C H W", self.in_channels, self.cls_token)
        if tuple(images.shape[2:]) != (self.image_size, self.image_size):
            raise InputError(
                f"this ViT takes images of {self.image_size} x {self.image_size}; got "
                f"{images.shape[2]} x {images.shape[3]}. Resize them or build with image_size=..."
            )
        return self.steps()

    def steps(self) -> Steps:
        """Lists the patches, their positions, the blocks and the classifier."""
        return [self.embed, self.place, *spread(self.blocks), self.classify]

    def embed(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> patches (N, width, H / 16, W / 16)."""
        patches: Tensor = self.patch_embed["proj"](images)
        return patches

    def place(self, patches: Tensor) -> Tensor:
        """(N, width, h, w) -> tokens (N, 1 + h w, width): class token first, positions added."""
        tokens = rearrange(patches, "n c h w -> n (h w) c")
        first = self.cls_token.expand(len(tokens), -1, -1)
        return torch.cat([first, tokens], dim=1) + self.pos_embed

    def classify(self, tokens: Tensor) -> Tensor:
        """(N, T, width) -> logits (N, classes), from the class token."""
        logits: Tensor = self.head(self.head_drop(self.norm(tokens)[:, 0]))
        return logits


def vit_tiny_patch16(*, width: int = 192, depth: int = 12, heads: int = 3, **arguments: Any) -> ViT:
    """Builds ViT-Ti/16: 12 blocks of 192, 5.7 million parameters; the arguments are ViT's."""
    return ViT(width=width, depth=depth, heads=heads, **arguments)


def vit_small_patch16(
    *, width: int = 384, depth: int = 12, heads: int = 6, **arguments: Any
) -> ViT:
    """Builds ViT-S/16: 12 blocks of 384, 22.1 million parameters; the arguments are ViT's."""
    return ViT(width=width, depth=depth, heads=heads, **arguments)


def vit_base_patch16(
    *, width: int = 768, depth: int = 12, heads: int = 12, **arguments: Any
) -> ViT:
    """Builds ViT-B/16: 12 blocks of 768, 86.6 million parameters; the arguments are ViT's."""
    return ViT(width=width, depth=depth, heads=heads, **arguments)


def vit_large_patch16(
    *, width: int = 1024, depth: int = 24, heads: int = 16, **arguments: Any
) -> ViT:
    """Builds ViT-L/16: 24 blocks of 1024, 304.3 million parameters; the arguments are ViT's."""
    return ViT(width=width, depth=depth, heads=heads, **arguments)


def _truncated_normal(tensor: Tensor) -> None:
    """Fills with timm's draws: torch 2.14's own `trunc_normal_` draws otherwise."""
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.uniform_(-1, 1).erfinv_().mul_(0.02 * sqrt(2)).clamp_(-2, 2)


def _check_patches(image_size: int) -> None:
    if image_size % PATCH:
        raise ArgumentError(
            f"ViT cuts images into patches of {PATCH}; image_size {image_size} is not a multiple. "
            f"Take {image_size // PATCH * PATCH or PATCH}"
        )
