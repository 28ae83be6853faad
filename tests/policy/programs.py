"""Training steps of many kinds of small models, what a plan predicts for them and what they take.

python -m tests.policy.programs              # predicted and taken, for some plans of each
python -m tests.policy.programs gpt2 bert    # of some
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.policy.trained import Program, image, labelled, library, own_loss, words
from tests.policy.variants import ENCODER, HEADS, VARIANTS
from tests.traces import tracing_once
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner

# ---- models of this file


class Residual(nn.Module):
    """Two convolutions with norms and a skip, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(out)) + x)


class DensePreActivation(nn.Module):
    """Concatenates what norm, activation and convolution make to what they read."""

    def __init__(self, width: int, growth: int, count: int) -> None:
        super().__init__()
        widths = [width + growth * number for number in range(count)]
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, widths))
        self.layers = nn.ModuleList(nn.Conv2d(w, growth, 3, padding=1) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return x


class Hourglass(nn.Module):
    """Hands the result of each of its layers to one behind the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.silu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).tanh()
        return x


class TiedWords(nn.Module):
    """Attends with dropout between an embedding and a head that share their weight."""

    def __init__(self, vocabulary: int = 300, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 128, 0.1, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def next_word(logits: Tensor, *, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Tagger(nn.Module):
    """Reads embedded words by two recurrent layers, in both directions or in one."""

    def __init__(self, kind: Callable[..., nn.Module], *, bidirectional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 48)
        self.layers = kind(48, 32, 2, bidirectional=bidirectional, dropout=0.1)
        self.head = nn.Linear(64 if bidirectional else 32, 96)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        outputs, state = self.layers(self.embedding(tokens))
        return self.head(torch.tanh(outputs)), state


class Cells(nn.Module):
    """Calls cells in a loop over times, and stacks what a head makes of each state."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(32, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 1)


class InPlace(nn.Module):
    """Writes what it made, and views of it, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 8, 1, 1)
        for layer in self.layers:
            x = layer(x).relu_()
            x = x.add(1)
            x[:, :2] *= 0.5
            x = x.sigmoid_()
        return x


class Keeping(nn.Module):
    """Keeps a result until the next step replaces it: detached, or with its graph."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.detached = detached
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 2:
                self.kept = x.detach().exp() if self.detached else x.exp()
        return x


class Averaging(nn.Module):
    """Replaces a large buffer, writes a small one, and returns several results."""

    queue: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("queue", torch.zeros(4000, 128))
        self.register_buffer("average", torch.zeros(128))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.queue = torch.cat([x, self.queue[: -len(x)]])
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = F.gelu(x - self.average)
        y = self.last(x)
        return {"hidden": x, "outputs": (y, y.sin(), y.detach().cos())}


class Cubed(torch.autograd.Function):
    """x ** 3, whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.square = x * x
        return ctx.square * x  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * ctx.square * gradients[0] + 0 * x  # type: ignore[no-any-return]


class Custom(nn.Module):
    """Calls a function with a backward of its own twice after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Cubed.apply(Cubed.apply(torch.tanh(layer(x))))  # type: ignore[no-untyped-call]
        return x


class Scales(nn.Module):
    """Has many small parameters and a large state."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(64) for _ in range(6))
        self.shifts = nn.ParameterList(torch.zeros(1, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = F.silu(x * scale + shift)
        return x


class Experts(nn.Module):
    """Sends each row to the two of four layers that a router scores highest, up to a capacity."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 8)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        _, chosen = weights.topk(2, -1)
        chosen_weights = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
        best, rows = chosen_weights.T.topk(len(x) // 2)
        hidden = torch.bmm(x[rows], self.up).relu()
        results = torch.bmm(hidden, self.down) * best[..., None]
        return x.index_add(0, rows.flatten(), results.flatten(0, 1))


class Offset(nn.Module):
    """A sum hands one gradient to several parameters; a weight is read as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.one, self.other = (nn.Parameter(torch.rand(400, 128)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.one + self.other
        return (x.sin() @ self.linear.weight.T).cos()


class Queries(nn.Module):
    """Attends causally by torch's own kernel, whose arguments share a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = self.queries(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x


class Potential(nn.Module):
    """Returns energies and forces, which are gradients that its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(3, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energies = self.layers(x)
        (gradient,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        return energies, -gradient


class Checkpointed(nn.Module):
    """Has a block that `torch.utils.checkpoint` recomputes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.last = linears(2, width), linears(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))  # type: ignore[no-any-return]


class OnHost(nn.Module):
    """Saves the tensors of two layers by `save_on_cpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


class Largest(nn.Module):
    """Takes the largest number of each column of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 64), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).max(1)[0])  # type: ignore[no-any-return]


class Volumes(nn.Sequential):
    def __init__(self, norm: Callable[[int], nn.Module], width: int = 8) -> None:
        super().__init__(
            nn.Conv3d(1, width, 3, padding=1),
            norm(width),
            nn.LeakyReLU(0.1),
            nn.Conv3d(width, width, 3, padding=1),
            norm(width),
            nn.PReLU(width),
            nn.Conv3d(width, 2, 1),
        )


def residuals(count: int = 3, width: int = 16) -> nn.Sequential:
    blocks = (Residual(width) for _ in range(count))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks)


def linears(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(p for _ in range(count) for p in (nn.Linear(width, width), nn.GELU())))


def attention(width: int = 64, dropout: float = 0.1) -> nn.Sequential:
    layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout)
    return nn.Sequential(*(layer(batch_first=True) for _ in range(3)))


def tied_words() -> Program:
    tokens = words(8, 64, 300)
    return Program(TiedWords(), (tokens,), functools.partial(next_word, target=tokens.clone()))


def instance_norm(width: int) -> nn.Module:
    return nn.InstanceNorm3d(width, affine=True, track_running_stats=True)


HALF: Any = functools.partial(torch.autocast, "cpu", torch.bfloat16)
VOLUME = (1, 1, 24, 24, 24)

OWN: dict[str, Callable[[], Program]] = {
    "residuals": lambda: Program(residuals(), image(8, 32)),
    "dense pre-activation": lambda: Program(DensePreActivation(8, 8, 4), image(8, 32, 8)),
    "hourglass": lambda: Program(Hourglass(), image(8, 48, 8)),
    "instance norm": lambda: Program(Volumes(instance_norm), (torch.rand(VOLUME),)),
    "group norm": lambda: Program(
        Volumes(functools.partial(nn.GroupNorm, 4)), (torch.rand(VOLUME),)
    ),
    "attention": lambda: Program(attention(), (torch.rand(8, 64, 64),)),
    "tied words": tied_words,
    "lstm": lambda: Program(Tagger(nn.LSTM, bidirectional=False), (words(48, 32, 300),)),
    "lstm both ways": lambda: Program(Tagger(nn.LSTM, bidirectional=True), (words(48, 32, 300),)),
    "gru both ways": lambda: Program(Tagger(nn.GRU, bidirectional=True), (words(10, 96, 300),)),
    "lstm cells": lambda: Program(Cells(nn.LSTMCell), (torch.rand(128, 12, 32),)),
    "gru cells": lambda: Program(Cells(nn.GRUCell), (torch.rand(128, 12, 32),)),
    "in place": lambda: Program(InPlace(), image(8, 48, 1)),
    "keeping": lambda: Program(Keeping(detached=True), (torch.rand(2000, 96),)),
    "keeping with its graph": lambda: Program(Keeping(detached=False), (torch.rand(2000, 96),)),
    "several outputs": lambda: Program(Averaging(), (torch.rand(2000, 64),)),
    "outputs dropped": lambda: Program(
        linears(4, 128), (torch.rand(1000, 128),), options={"holds_outputs": False}
    ),
    "custom function": lambda: Program(Custom(), (torch.rand(1500, 96),)),
    "small parameters": lambda: Program(Scales(), (torch.rand(4000, 64),)),
    "shared gradients": lambda: Program(Offset(), (torch.rand(400, 128),)),
    "experts": lambda: Program(nn.Sequential(Experts(), Experts()), (torch.rand(1024, 64),)),
    "queries": lambda: Program(Queries(), (torch.rand(8, 128, 64),)),
    "potential": lambda: Program(Potential(), (torch.rand(600, 3),)),
    "autocast": lambda: Program(attention(), (torch.rand(8, 64, 64),), around=HALF),
    "autocast of convolutions": lambda: Program(residuals(2), image(8, 32), around=HALF),
    "torch's checkpoint": lambda: Program(Checkpointed(), (torch.rand(6000, 96),)),
    # small, so that the random states that it keeps matter
    "states of torch's checkpoint": lambda: Program(Checkpointed(16), (torch.rand(2000, 16),)),
    "accumulated": lambda: Program(
        linears(5, 192), (torch.rand(600, 192),), options={"accumulates": True}
    ),
    "optimizer in the backward": lambda: Program(
        linears(5, 192), (torch.rand(400, 192),), options={"optimizer_in_backward": True}
    ),
}


# ---- other libraries' models


def from_timm(name: str, *inputs: int, **settings: Any) -> Callable[[], Program]:
    def build() -> Program:
        return Program(library("timm").create_model(name, **settings), image(*inputs))

    return build


def from_class(module: str, name: str, *inputs: int, **settings: Any) -> Callable[[], Program]:
    """Builds a model of fewer layers than those that a library has names for."""

    def build() -> Program:
        return Program(getattr(library(module), name)(**settings), image(*inputs))

    return build


def resnet() -> Program:
    models = library("torchvision.models.resnet")
    return Program(models.ResNet(models.BasicBlock, [1, 1, 1, 1], 10), image(8, 64))


def mobilenet() -> Program:
    models = library("torchvision.models.mobilenetv3")
    layer = functools.partial(models.InvertedResidualConfig, dilation=1, width_mult=1.0)
    layers = [
        layer(16, 3, 32, 16, False, "RE", 1),
        layer(16, 5, 64, 24, True, "HS", 2),
        layer(24, 5, 96, 24, True, "HS", 1),
    ]
    return Program(models.MobileNetV3(layers, 128, 10), image(8, 64))


def efficientnet() -> Program:
    models = library("torchvision.models.efficientnet")
    layers = [
        models.FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        models.MBConvConfig(4, 3, 2, 16, 24, 2),
        models.MBConvConfig(4, 5, 1, 24, 32, 1),
    ]
    return Program(models.EfficientNet(layers, 0.2, num_classes=10), image(8, 64))


def from_transformers(
    kind: str, config: str, batch: int = 4, length: int = 64, **settings: Any
) -> Callable[[], Program]:
    def build() -> Program:
        transformers = library("transformers")
        made = getattr(transformers, config)(vocab_size=500, **settings)
        if hasattr(made, "use_cache"):
            made.use_cache = False
        return Program(getattr(transformers, kind)(made), labelled(batch, length), own_loss)

    return build


def from_monai(name: str, **settings: Any) -> Callable[[], Program]:
    def build() -> Program:
        model = getattr(library("monai.networks.nets"), name)(**settings)
        return Program(model, (torch.rand(VOLUME),))

    return build


LIBRARIES: dict[str, Callable[[], Program]] = {
    "torchvision resnet": resnet,
    "torchvision mobilenet": mobilenet,
    "torchvision efficientnet": efficientnet,
    "torchvision squeezenet": from_class(
        "torchvision.models", "squeezenet1_1", 4, 64, num_classes=10
    ),
    "torchvision shufflenet": from_class(
        "torchvision.models.shufflenetv2", "ShuffleNetV2", 8, 64, num_classes=10,
        stages_repeats=[1, 2, 1], stages_out_channels=[16, 32, 64, 128, 128],
    ),
    "torchvision densenet": from_class(
        "torchvision.models.densenet", "DenseNet", 8, 64, growth_rate=8, block_config=(2, 2),
        num_init_features=16, num_classes=10,
    ),
    "torchvision vit": from_class(
        "torchvision.models.vision_transformer", "VisionTransformer", 8, 64, image_size=64,
        patch_size=8, num_layers=2, num_heads=4, hidden_dim=96, mlp_dim=192, num_classes=10,
    ),
    "timm vit": from_timm(
        "vit_tiny_patch16_224", 8, 64, img_size=64, depth=3, embed_dim=96, patch_size=8
    ),
    "timm swin": from_timm(
        "swin_tiny_patch4_window7_224", 4, 64, img_size=64, window_size=4, embed_dim=48,
        depths=(1, 1), num_heads=(2, 4), num_classes=10,
    ),
    "timm convnext": from_timm(
        "convnext_atto", 8, 64, depths=(1, 1, 2, 1), dims=(24, 48, 64, 96), drop_path_rate=0.2
    ),
    "timm mixer": from_class(
        "timm.models.mlp_mixer", "MlpMixer", 8, 64, img_size=64, num_blocks=3, embed_dim=128,
        patch_size=8, num_classes=10,
    ),
    "timm resnetv2": from_class(
        "timm.models.resnetv2", "ResNetV2", 8, 64, layers=[1, 1, 1], channels=(128, 128, 128),
        num_classes=10, stem_chs=64,
    ),
    "timm poolformer": from_class(
        "timm.models.metaformer", "MetaFormer", 8, 64, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64),
        num_classes=10,
    ),
    "timm deit3": from_timm(
        "deit3_small_patch16_224", 8, 64, img_size=64, depth=2, embed_dim=96, drop_path_rate=0.1
    ),
    "transformers gpt2": from_transformers(
        "GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=1,
    ),
    "transformers bart": from_transformers(
        "BartForConditionalGeneration", "BartConfig", d_model=64, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_position_embeddings=128,
    ),
    "transformers distilbert": from_transformers(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=128
    ),
    "transformers opt": from_transformers(
        "OPTForCausalLM", "OPTConfig", hidden_size=64, num_hidden_layers=2, ffn_dim=128, **HEADS,
        max_position_embeddings=128, word_embed_proj_dim=64,
    ),
    "transformers gpt-neox": from_transformers(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER, **HEADS
    ),
    "transformers electra": from_transformers(
        "ElectraForMaskedLM", "ElectraConfig", embedding_size=64, **ENCODER, **HEADS
    ),
    "monai unet": from_monai(
        "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32),
        strides=(2, 2), num_res_units=1, dropout=0.1,
    ),
    "monai attention unet": from_monai(
        "AttentionUnet", spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16),
        strides=(2,),
    ),
    "monai segresnet": from_monai(
        "SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), in_channels=1
    ),
}  # fmt: skip

PROGRAMS = {**OWN, **LIBRARIES, **VARIANTS}

# programs that take less than is predicted, and why
OVERESTIMATED: dict[str, tuple[Callable[[], Program], str]] = {
    "saved on the host": (
        lambda: Program(OnHost(), (torch.rand(1500, 96),)),
        "a result that the program's own hooks copy when it is saved lives longer in a dry step",
    ),
    "largest": (
        lambda: Program(Largest(), (words(200, 32, 300),)),
        "where a dispatch mode is active, as in a dry step, the backward of `max` scatters out of "
        "place",
    ),
}


@functools.cache
def program(name: str) -> Program:
    """Builds a program of the list."""
    torch.manual_seed(1)
    over = {name: build for name, (build, _) in OVERESTIMATED.items()}
    return (PROGRAMS | over)[name]()


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Traces a model once for all of its plans."""
    trace_of = tracing_once({}, id)
    with mock.patch("zoo.tracing.planned_forward.step_trace_of", trace_of):
        yield


def plans_of(planner: StepPlanner) -> dict[str, Plan]:
    """Returns the plans that are compared of each program."""
    proposals = planner.proposals.best
    points = {
        "baseline": planner.baseline,
        "between": proposals[len(proposals) // 2],
        "least once": planner.least_once,
        "least": planner.least,
    }
    return {name: planner.step.of_model(point).plan for name, point in points.items()}


def main(names: Iterable[str]) -> None:
    """Prints a table."""
    print(f"{'program':34} {'plan':10} {'predicted':>12} {'taken':>12}  taken / predicted")
    with traced_once():
        for name in names:
            made = program(name)
            for kind, plan in plans_of(made.planner).items():
                predicted, taken = made.predicted(plan), made.taken(plan)
                print(f"{name:34} {kind:10} {predicted:12,} {taken:12,}  {taken / predicted:.4f}")


if __name__ == "__main__":
    every = [*PROGRAMS, *OVERESTIMATED]
    chosen = [name for name in every if not sys.argv[1:] or any(s in name for s in sys.argv[1:])]
    main(chosen)
