"""What the tests of graphs share: models with their inputs, and a trace of a forward."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.models import Net, UNet
from zoo.invocation import Invocation
from zoo.planner.step_events import Call, StepEvents
from zoo.profiling.step_recorder import StepRecorder


def library(name: str) -> Any:
    """Imports a library for the models that are its own: others are tested without it, too."""
    return importlib.import_module(name)


def traced(model: nn.Module, invocation: Invocation) -> StepEvents:
    """Returns the operators of a forward on real tensors."""
    recorder = StepRecorder(model)
    with recorder:
        invocation.on(model)
    recorder.note_end_of_model()
    return recorder.events


def calls_in(events: StepEvents) -> list[Call]:
    """Returns the operators of a forward but for queries."""
    return [call for call in events.operators if not call.is_query]


def names_in(events: StepEvents) -> list[str]:
    """Returns the names of the operators of a forward."""
    return [call.operator for call in events.operators]


class InPlace(nn.Module):
    """Writes views and earlier results in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        z = y * 2
        z[:, :3].mul_(y[:, 3:6].detach())
        z[:, 5] = 0
        z.t()[1:2].add_(1)
        return self.second(z) + x


class Tied(nn.Module):
    """Reads one weight in two places, a view of it in a third, and writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.decode = nn.Linear(8, 12, bias=False)
        self.decode.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.seen += x.detach().mean((0, 1))
        x = torch.tanh(x * self.seen)
        scale = self.embed.weight[2:10].t().sum()
        return self.decode(x) * scale


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.exp(x.detach())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class Custom(nn.Module):
    """Uses a function of its own, whose kernels run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).abs().max()
        return self.second(Exp.apply(self.first(x) / scale))


class Deciding(nn.Module):
    """Branches by the values of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 0:
            y = y * y.max().item()
        return self.second(F.gelu(y))


class Adapted(nn.Module):
    """Trains behind frozen parameters, from inputs that are told to require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        y.requires_grad_()
        return self.trained(torch.tanh(self.frozen(torch.tanh(y))))


class Mixed(InPlace):
    """Runs under autocast, with casts that are used twice."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x) + self.first(x * 2)
            return self.second(F.softmax(y, 1)).float()


def _rows() -> Tensor:
    return torch.randn(5, 6)


def _tokens() -> Tensor:
    return torch.randint(50, (2, 8))


def _named(model: Callable[[], nn.Module], **extra: Any) -> tuple[Any, Any]:
    return model, lambda: Invocation(kwargs={"input_ids": _tokens(), **extra})


def _gpt2() -> nn.Module:
    gpt2 = library("transformers")
    settings = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50}
    return gpt2.GPT2LMHeadModel(gpt2.GPT2Config(**settings, bos_token_id=0, eos_token_id=0))


_SMALL: Any = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 50,
}  # fmt: skip


def _llama() -> nn.Module:
    llama = library("transformers")
    return llama.LlamaForCausalLM(llama.LlamaConfig(**_SMALL, num_key_value_heads=1))


def _bert() -> nn.Module:
    bert = library("transformers")
    return bert.BertForMaskedLM(bert.BertConfig(**_SMALL))


def _pictures(*shape: int) -> Callable[[], Invocation]:
    return lambda: Invocation((torch.randn(*shape),))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Invocation]]] = {
    "net": (Net, _pictures(4, 4, 6, 6)),
    "unet": (UNet, lambda: Invocation((torch.randn(2, 4, 16, 16), torch.rand(2, 1, 1, 1)))),
    "resnet": (
        lambda: library("torchvision").models.resnet18(weights=None),
        _pictures(2, 3, 32, 32),
    ),
    "densenet": (
        lambda: library("torchvision").models.DenseNet(8, (2, 2), 8),
        _pictures(2, 3, 32, 32),
    ),
    "vit": (
        lambda: library("timm").create_model(
            "vit_tiny_patch16_224", depth=2, drop_rate=0.1, img_size=32
        ),
        _pictures(2, 3, 32, 32),
    ),
    "gpt2": _named(_gpt2),
    "llama": _named(_llama, labels=torch.arange(16).view(2, 8)),
    "bert": _named(_bert, attention_mask=torch.ones(2, 8, dtype=torch.long)),
    "bert with a mask": _named(_bert, attention_mask=torch.arange(16).view(2, 8).clamp(max=1)),
    "monai": (
        lambda: library("monai.networks.nets").UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
        _pictures(1, 1, 16, 16),
    ),
    "lstm": (lambda: nn.LSTM(6, 8, 2, dropout=0.2), _pictures(5, 2, 6)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, 0.1),
        lambda: Invocation((torch.randn(5, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8))),
    ),
    "in place": (InPlace, lambda: Invocation((_rows(),))),
    "tied": (Tied, lambda: Invocation((torch.randint(12, (3, 4)),))),
    "custom": (Custom, lambda: Invocation((_rows(),))),
    "deciding": (Deciding, lambda: Invocation((_rows(),))),
    "adapted": (Adapted, lambda: Invocation((_rows(),))),
    "mixed": (Mixed, lambda: Invocation((_rows(),))),
}
