"""Small models as people train them: other optimizers and types, norms, recurrent layers, NumPy.

transformers, in float32 with AdamW and in bfloat16 with one optimizer each
optimizers, of a model whose peak is in their step
norms in one to three dimensions, with and without running statistics
recurrent layers of all kinds
inputs and buffers that NumPy owns, inputs made under `inference_mode`
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.policy.trained import (
    MakeOptimizer,
    Program,
    labelled,
    library,
    mean_square,
    own_loss,
    words,
)

BFLOAT16: Any = functools.partial(torch.autocast, "cpu", torch.bfloat16)

# ---- optimizers


class SmallStates(torch.optim.Optimizer):
    """Keeps momentum in 8 bits with a scale for each row, and variances in float16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float())

    def _update(self, parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["codes"] = torch.full_like(parameter, 128, dtype=torch.uint8)
            state["scale"] = torch.zeros(len(parameter), dtype=torch.float16)
            state["variance"] = torch.zeros_like(parameter, dtype=torch.float16)
        scale = state["scale"].float().view(-1, *[1] * (parameter.ndim - 1))
        momentum = (state["codes"].float() - 128) * scale
        momentum.mul_(0.9).add_(gradient, alpha=0.1)
        variance = state["variance"].float().mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        state["variance"].copy_(variance)
        scale = momentum.abs().flatten(1).amax(1) if momentum.ndim > 1 else momentum.abs()
        state["scale"].copy_(scale / 127)
        divisor = state["scale"].float().clamp(min=1e-8).view(-1, *[1] * (parameter.ndim - 1))
        state["codes"] = (momentum / divisor + 128).round().clamp(0, 255).to(torch.uint8)
        parameter.addcdiv_(momentum, variance.sqrt().add_(1e-4), value=-1e-3)


def transformers_adafactor(parameters: list[Any]) -> torch.optim.Optimizer:
    return library("transformers.optimization").Adafactor(parameters)  # type: ignore[no-any-return]


adamw = torch.optim.AdamW
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "adamw of lists": functools.partial(adamw, foreach=True),
    "adamw one by one": functools.partial(adamw, foreach=False),
    "fused adamw": functools.partial(adamw, fused=True),
    "fused sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "fused adagrad": functools.partial(torch.optim.Adagrad, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adafactor": torch.optim.Adafactor,
    "adafactor of lists": functools.partial(torch.optim.Adafactor, foreach=True),
    "transformers' adafactor": transformers_adafactor,
    "small states": SmallStates,
}
OF_MATRICES: dict[str, MakeOptimizer] = {"muon": lambda p: torch.optim.Muon(p, lr=0.01)}


def widening(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Module:
    """Returns layers of different sizes, which outweigh the activations of a few rows."""
    widths = (64, 256, 96, 384, 64)
    layers = [nn.Linear(*pair, bias=bias) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype)


def stepping(make: MakeOptimizer, dtype: torch.dtype = torch.float32, **layers: bool) -> Program:
    rows = torch.rand(16, 64, dtype=dtype)
    return Program(widening(dtype, **layers), (rows,), make_optimizer=make)


# ---- transformers

ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
HEADS = {"num_attention_heads": 4}
Batch = Callable[[torch.dtype], dict[str, Tensor]]


def tokens(_dtype: torch.dtype) -> dict[str, Tensor]:
    return labelled(4, 64)


def pictures(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(8, 3, 48, 48, dtype=dtype), "labels": words(1, 8, 10)[0]}


def sounds(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "input_features": torch.rand(2, 20, 160, dtype=dtype),
        "labels": words(2, 24),
    }


TRANSFORMERS: dict[str, tuple[str, str, Batch, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig", sounds,
        {"vocab_size": 500, "num_mel_bins": 20, "d_model": 64, "encoder_layers": 1,
         "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 80,
         "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig", pictures,
        {**ENCODER, **HEADS, "image_size": 48, "patch_size": 8, "num_labels": 10},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", tokens, {"vocab_size": 500, **ENCODER, **HEADS}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config", tokens,
        {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1,
         "num_heads": 4, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    ),
    "llama": (
        "LlamaForCausalLM", "LlamaConfig", tokens,
        {"vocab_size": 500, **ENCODER, **HEADS, "num_key_value_heads": 2},
    ),
    "qwen": (
        "Qwen3ForCausalLM", "Qwen3Config", tokens,
        {"vocab_size": 500, **ENCODER, **HEADS, "num_key_value_heads": 2, "head_dim": 16},
    ),
}  # fmt: skip


def from_transformers(
    name: str,
    make: MakeOptimizer = adamw,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Program:
    kind, config, batch, sizes = TRANSFORMERS[name]
    transformers = library("transformers")
    made = getattr(transformers, config)(**sizes)
    made.use_cache = False
    model = getattr(transformers, kind)(made).to(dtype).train()
    return Program(model, batch(dtype), own_loss, make_optimizer=make, **settings)


IN_BFLOAT16 = {
    "whisper": "adafactor",
    "vit": "fused adamw",
    "bert": "small states",
    "t5": "transformers' adafactor",
    "llama": "adamw of lists",
    "qwen": "adamw one by one",
}

# ---- norms

SIDES = {1: (512,), 2: (24, 24), 3: (8, 8, 8)}


class Normed(nn.Sequential):
    """Convolves, norms and activates twice."""

    def __init__(self, norm: Callable[[int], nn.Module], dimensions: int) -> None:
        convolution = getattr(nn, f"Conv{dimensions}d")
        super().__init__(
            convolution(2, 8, 3, padding=1), norm(8), nn.SiLU(),
            convolution(8, 8, 3, padding=1), norm(8), nn.ReLU(),
        )  # fmt: skip


def normed(kind: str, dimensions: int, **settings: Any) -> Program:
    name = kind if kind == "GroupNorm" else f"{kind}{dimensions}d"
    groups = (4,) if kind == "GroupNorm" else ()
    norm = functools.partial(getattr(nn, name), *groups, **settings)
    return Program(Normed(norm, dimensions), (torch.rand(8, 2, *SIDES[dimensions]),))


# ---- recurrent layers


class Recurrent(nn.Module):
    """Reads sequences of numbers, padded or packed."""

    def __init__(self, kind: str, lengths: Tensor | None = None, **settings: Any) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(32, 48, 2, batch_first=True, **settings)
        self.head = nn.LazyLinear(64)
        self.lengths = lengths

    def forward(self, x: Tensor) -> Tensor:
        if self.lengths is not None:
            packed = pack_padded_sequence(x, self.lengths, batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        else:
            x = self.layers(x)[0]
        return self.head(x).tanh()  # type: ignore[no-any-return]


def recurrent(
    kind: str,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    around: Any = None,
    **settings: Any,
) -> Program:
    model = Recurrent(kind, lengths, **settings).to(dtype)
    x = torch.rand(48, 6, 32, dtype=dtype)
    with torch.no_grad():
        model(x)
    return Program(model, (x,), **({} if around is None else {"around": around}))


LENGTHS = torch.arange(48) // 16 + 4
BOTH: dict[str, Any] = {"bidirectional": True}

# ---- tensors that are made elsewhere


class Shifted(nn.Module):
    """Adds a table, which NumPy owns, to what it is given, and scales some of it by a mask."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        table = torch.rand(1000, 96).numpy()
        self.register_buffer("table", torch.from_numpy(table))
        self.first, self.last = nn.Linear(96, 128), nn.Linear(128, 96)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = F.gelu(self.first(x + self.table)) * mask
        return torch.tanh(self.last(x)) - self.table


def of_numpy() -> Program:
    x, mask, target = torch.rand(1000, 96), torch.rand(1000, 1) > 0.5, torch.rand(1000, 96)
    given = (torch.from_numpy(x.numpy().copy()), torch.from_numpy(mask.numpy().copy()))
    loss = functools.partial(F.mse_loss, target=torch.from_numpy(target.numpy().copy()))
    return Program(Shifted(), given, loss)


def of_inference() -> Program:
    with torch.inference_mode():
        given = torch.rand(1000, 96), torch.rand(1000, 1) > 0.5
    # autograd saves no mask that was made so
    return Program(Shifted(), (given[0], given[1].clone()), mean_square)


VARIANTS: dict[str, Callable[[], Program]] = {
    **{
        f"transformers {name}, float32": functools.partial(from_transformers, name)
        for name in TRANSFORMERS
    },
    **{
        f"transformers {name}, bfloat16, {optimizer}": functools.partial(
            from_transformers, name, OPTIMIZERS[optimizer], torch.bfloat16
        )
        for name, optimizer in IN_BFLOAT16.items()
    },
    "transformers llama, autocast": lambda: from_transformers("llama", around=BFLOAT16),
    **{name: functools.partial(stepping, make) for name, make in OPTIMIZERS.items()},
    **{
        f"{name}, bfloat16": functools.partial(stepping, OPTIMIZERS[name], torch.bfloat16)
        for name in ("adamw", "fused adamw", "adafactor", "transformers' adafactor", "small states")
    },
    "adafactor in the backward": lambda: Program(
        widening(),
        (torch.rand(16, 64),),
        options={"optimizer_in_backward": True},
        make_optimizer=torch.optim.Adafactor,
    ),
    "muon": functools.partial(stepping, OF_MATRICES["muon"], bias=False),
    **{
        f"{kind} in {dimensions}d{' with statistics' if tracked else ''}": functools.partial(
            normed, kind, dimensions, track_running_stats=tracked
        )
        for kind in ("BatchNorm", "InstanceNorm")
        for dimensions in SIDES
        for tracked in (True, False)
    },
    **{
        f"GroupNorm in {dimensions}d": functools.partial(normed, "GroupNorm", dimensions)
        for dimensions in SIDES
    },
    "rnn both ways": lambda: recurrent("RNN", **BOTH),
    "rnn of relu": lambda: recurrent("RNN", nonlinearity="relu"),
    "lstm with projections": lambda: recurrent("LSTM", proj_size=24),
    "lstm with projections both ways": lambda: recurrent("LSTM", proj_size=24, **BOTH),
    "gru with dropout": lambda: recurrent("GRU", dropout=0.2),
    "packed rnn": lambda: recurrent("RNN", LENGTHS),
    "packed lstm": lambda: recurrent("LSTM", LENGTHS),
    "packed lstm both ways": lambda: recurrent("LSTM", LENGTHS, **BOTH),
    "packed gru both ways": lambda: recurrent("GRU", LENGTHS, **BOTH),
    "lstm in bfloat16": lambda: recurrent("LSTM", dtype=torch.bfloat16, **BOTH),
    "gru in bfloat16": lambda: recurrent("GRU", dtype=torch.bfloat16, **BOTH),
    "lstm in float16": lambda: recurrent("LSTM", dtype=torch.float16),
    "lstm in doubles": lambda: recurrent("LSTM", dtype=torch.float64),
    "lstm in autocast": lambda: recurrent("LSTM", around=BFLOAT16, **BOTH),
    "gru in autocast": lambda: recurrent("GRU", around=BFLOAT16),
    "packed lstm in autocast": lambda: recurrent("LSTM", LENGTHS, around=BFLOAT16),
    "arrays of NumPy": of_numpy,
    "inputs of inference": of_inference,
}
