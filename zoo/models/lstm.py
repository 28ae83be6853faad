"""Word language models: LSTM (Zaremba et al. 2014, arXiv:1409.2329) and GRU (arXiv:1406.1078).

torch's word_language_model example runs `nn.LSTM` over the whole text and then decodes all of it,
tokens x vocabulary numbers at once. Here time is cut into chunks, and with targets the logits and
losses of a chunk follow before the next chunk:

    for each chunk of time
        x = embedding(tokens)
        for each layer
            x, state = layer(x, state)
        for each chunk of its tokens
            total = total + loss(decoder(x), targets)

Without targets all chunks are decoded at once. Chunks embed their own tokens: views of one
embedding would each save all of it.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo._torch import HAS_MKLDNN, JIT_TRACER, DispatchKeySet, ExcludeKeys
from zoo.errors import ArgumentError, InputError
from zoo.layers.apply import Apply
from zoo.layers.checks import IGNORED, check_arguments, check_choice, check_tokens
from zoo.layers.language_head import HEADS, ChunkedLoss, Head, choose_chunk_tokens, make_head
from zoo.layers.weight_sharing import SharedWeight
from zoo.models.model import Model

State = Tensor | tuple[Tensor, ...]

# the import may be one inside of `torch.jit.trace`, which takes no operator that returns a bool
with ExcludeKeys(DispatchKeySet(JIT_TRACER)):
    # under autocast oneDNN's LSTM takes no float16, and bfloat16 on processors with AVX-512 alone
    _HAS_BFLOAT16 = HAS_MKLDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WordLanguageModel(Model):
    """Tokens (T, N), state -> logits (T, N, V), state; with targets (T, N) -> mean loss (), state.

    The state is (hidden, cell) of an LSTM and hidden of a GRU, each (layers, N, hidden); None is
    zeros. The one returned goes in with the next batch, once detached by `model.detach(state)`.
    Targets of -100 are ignored. Dropout follows the embedding and each layer. `tied` makes the
    embedding's weight the decoder's (arXiv:1608.05859). `head` is that of `GPT2`: "inplace",
    "plain" or "fused".

    `chunk_steps` is the length of a chunk of time; `chunk_tokens` tokens are decoded at a time.
    None, for either, chooses by the shape of each input: about sqrt(T) steps, and so many tokens
    that their logits take no more than the activations of a chunk of time. Other `chunk_steps` sum
    the weights' gradients in another order: equal up to rounding.

    Embedding and decoder are drawn from (-0.1, 0.1), the decoder's bias is zero, as in torch's
    example; the layers are torch's own.

    Raises:
        ArgumentError: a size below 1, a rate outside [0, 1), tied where embedding is not hidden.
        InputError: in the forward, tokens, targets or a state of another shape or type.
    """

    recurrent: ClassVar[type[nn.LSTM] | type[nn.GRU]]
    block_patterns: ClassVar = ("chunk", "loss.chunk")

    def __init__(
        self,
        *,
        vocabulary: int = 33278,
        embedding: int = 200,
        hidden: int = 200,
        layers: int = 2,
        drop_rate: float = 0.2,
        tied: bool = False,
        chunk_steps: int | None = None,
        chunk_tokens: int | None = None,
        head: str = "inplace",
    ) -> None:
        super().__init__()
        self.name = self.recurrent.__name__.lower()
        check_arguments(self.name, vocabulary=vocabulary, embedding=embedding, hidden=hidden)
        check_arguments(self.name, layers=layers, drop_rate=drop_rate)
        check_arguments(self.name, chunk_steps=chunk_steps, chunk_tokens=chunk_tokens)
        check_choice(self.name, "head", head, HEADS)
        if tied and embedding != hidden:
            raise ArgumentError(
                f"{self.name} with tied=True needs an embedding as wide as hidden, which the "
                f"decoder reads; got embedding={embedding} and hidden={hidden}"
            )
        self.chunk_steps, self.chunk_tokens, self.head = chunk_steps, chunk_tokens, head
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.dropout = nn.Dropout(drop_rate)
        widths = [embedding] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(self.recurrent(width, hidden) for width in widths)
        self.decoder = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.embedding.weight
        self.chunk, self.loss, self.hidden = Apply(), ChunkedLoss(), hidden

    def forward(
        self, tokens: Tensor, state: State | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Returns the logits (T, N, V), or with targets the mean loss (), and the state after."""
        vocabulary, weight = self.embedding.num_embeddings, self.embedding.weight
        check_tokens(self.name, tokens, targets, "TN", vocabulary=vocabulary)
        chunk_steps = self.chunk_steps or _choose_chunk_steps(len(tokens))
        words, carried = SharedWeight(weight), self._begin(state, tokens.shape[1])
        run = partial(self.chunk, self.recur, words.embedding(self.embedding), carried)
        chunks = torch.split(tokens, chunk_steps)
        if targets is None:
            result = self.decoder(torch.cat([*map(run, chunks)]))
        else:
            head = self._head(words, chunks[0].numel())
            total = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
            if head.chunk_tokens is None:
                total = self.loss(total, head, torch.cat([*map(run, chunks)]), targets)
            else:
                for chunk, wanted in zip(chunks, torch.split(targets, chunk_steps), strict=True):
                    total = self.loss(total, head, run(chunk), wanted)
            result = total / (targets != IGNORED).sum()
        if self.recurrent is nn.GRU:
            return result, torch.cat(carried)
        return result, tuple(map(torch.cat, zip(*carried, strict=True)))

    def recur(
        self, embedding: Callable[[Tensor], Tensor], carried: list[Any], tokens: Tensor
    ) -> Any:
        """Runs a chunk of time: tokens (t, N) -> x (t, N, hidden), and carries the states on."""
        x = self.dropout(embedding(tokens))
        for number, layer in enumerate(self.layers):
            x, carried[number] = layer(*_cast(layer, x, carried[number]))
            x = self.dropout(x)
        return x

    @staticmethod
    def detach(state: State) -> State:
        """Returns the same state without its graph: the next batch's backward ends there."""
        return state.detach() if isinstance(state, Tensor) else tuple(map(Tensor.detach, state))

    def _begin(self, state: State | None, batch: int) -> list[Any]:
        """Returns the state of each layer (1, N, hidden); zeros where there is none."""
        names = ["hidden"] if self.recurrent is nn.GRU else ["hidden", "cell"]
        shape = (len(self.layers), batch, self.hidden)
        tensors = (state,) if isinstance(state, Tensor) else tuple(state or ())
        tensors = tensors or (self.embedding.weight.new_zeros(shape),) * len(names)
        got = [None if tensor is None else (*tensor.shape,) for tensor in tensors]
        if got != [shape] * len(names):
            raise InputError(
                f"{self.name} takes as state {' and '.join(names)} of {shape} for {batch} texts; "
                f"got {got}. Pass what the last batch returned, or None to begin with zeros"
            )
        layers = [torch.split(tensor, 1) for tensor in tensors]
        return [*layers[0]] if self.recurrent is nn.GRU else [*zip(*layers, strict=True)]

    def _head(self, words: SharedWeight, tokens: int) -> Head:
        """Makes the head of a forward in which a chunk of time has so many tokens."""
        vocabulary, width = len(self.embedding.weight), len(self.layers) * self.hidden
        chunk = self.chunk_tokens or choose_chunk_tokens(tokens, width, vocabulary)
        is_tied = self.decoder.weight is self.embedding.weight
        weight = words if is_tied else SharedWeight(self.decoder.weight)
        return make_head(self.head, weight, chunk, self.decoder)


def _choose_chunk_steps(length: int) -> int:
    """Returns about sqrt(length), at least 8, such that all chunks are about as long.

    All chunks' states are held beside the activations of one: little, if neither is much larger.

        length          1   8   9  35  100  200  1000
        chunk_steps     1   8   5   7   10   14    31
    """
    chunks = ceil(length / max(isqrt(length), 8))
    return ceil(length / chunks)


def _cast(layer: nn.Module, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Casts an LSTM's inputs under autocast where oneDNN has no kernel of that type.

    torch chooses oneDNN for float32 and casts later, which ends in "could not create a primitive
    descriptor". For inputs of autocast's type it chooses its own kernel.
    """
    dtype = torch.get_autocast_dtype("cpu")
    has_kernel = not isinstance(layer, nn.LSTM) or (dtype is torch.bfloat16 and _HAS_BFLOAT16)
    if has_kernel or not torch.is_autocast_enabled("cpu") or x.device.type != "cpu":
        return x, state
    return x.to(dtype), tuple(tensor.to(dtype) for tensor in state)


class LSTMLanguageModel(WordLanguageModel):
    """LSTM language model: tokens (T, N), (hidden, cell) -> logits (T, N, V), (hidden, cell)."""

    recurrent = nn.LSTM


class GRULanguageModel(WordLanguageModel):
    """GRU language model: tokens (T, N), hidden -> logits (T, N, V), hidden."""

    recurrent = nn.GRU
