"""Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929), as timm computes them.

Parameter names, initialization (the same weights from the same seed), outputs and gradients are
those of timm's `vit_*_patch16_224`; its weights load with `load_state_dict`. Deviations from the
paper are timm's: no hidden layer before the classifier, and dropout only in front of it.
"""

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import check_arguments, check_images
from zoo.layers.drop_path import drop_path_rates
from zoo.layers.transformer import TransformerBlock
from zoo.models.model import Model

PATCH = 16


class ViT(Model):
    """A vision transformer on patches of 16 x 16: images (N, C, H, W) -> logits (N, classes).

    H and W are `image_size`, a multiple of 16. `drop_rate` is the dropout before the classifier,
    `drop_path_rate` the stochastic depth of the last block, rising linearly from 0 at the first.

    Raises:
        ArgumentError: a size below 1, heads that do not divide the width, an image size that 16
            does not divide, or a rate outside [0, 1).
        InputError: at the call, an input of another shape, size or type.
    """

    block_patterns: ClassVar = ("blocks.*",)

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
        check_arguments("ViT", width=width, depth=depth, classes=classes, in_channels=in_channels)
        check_arguments("ViT", image_size=image_size)
        check_arguments("ViT", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        if image_size % PATCH:
            raise ArgumentError(
                f"ViT cuts images into patches of {PATCH}; image_size {image_size} is not a "
                f"multiple. Take {image_size // PATCH * PATCH or PATCH}"
            )
        self.image_size = image_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (image_size // PATCH) ** 2, width))
        self.patch_embed = nn.ModuleDict()
        self.patch_embed["proj"] = nn.Conv2d(in_channels, width, PATCH, stride=PATCH)
        depths = drop_path_rates(drop_path_rate, depth)
        blocks = (TransformerBlock(width, heads, drop_path_rate=rate) for rate in depths)
        self.blocks = nn.Sequential(*blocks)
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

    def forward(self, *inputs: Tensor) -> Tensor:
        """Reads the class token behind the blocks: images (N, C, H, W) -> logits (N, classes)."""
        patches = self.patch_embed["proj"]
        tokens = self.norm(self.blocks(self.embed_positions(patches(self._checked(inputs)))))
        return cast(Tensor, self.head(self.head_drop(tokens[:, 0])))

    def embed_positions(self, patches: Tensor) -> Tensor:
        """(N, width, h, w) -> tokens (N, 1 + h w, width): class token first, positions added."""
        tokens = rearrange(patches, "n c h w -> n (h w) c")
        first = self.cls_token.expand(len(tokens), -1, -1)
        return torch.cat([first, tokens], dim=1) + self.pos_embed

    def _checked(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the images; raises InputError unless the network takes them."""
        images = check_images("ViT", inputs, self.patch_embed["proj"])
        (height, width), size = images.shape[2:], self.image_size
        if height != size or width != size:
            raise InputError(
                f"this ViT takes images of {size} x {size}; got {height} x {width}. Resize them or "
                "build with image_size=..."
            )
        return images


def _truncated_normal(tensor: Tensor) -> None:
    """Draws as timm does; torch 2.14's own `trunc_normal_` draws other numbers."""
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.uniform_(-1, 1).erfinv_().mul_(0.02 * sqrt(2)).clamp_(-2, 2)


# millions of parameters, and arguments
SIZES = {
    "vit_tiny_patch16": (5.7, {"width": 192, "depth": 12, "heads": 3}),
    "vit_small_patch16": (22.1, {"width": 384, "depth": 12, "heads": 6}),
    "vit_base_patch16": (86.6, {"width": 768, "depth": 12, "heads": 12}),
    "vit_large_patch16": (304.3, {"width": 1024, "depth": 24, "heads": 16}),
}
