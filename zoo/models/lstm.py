"""Word language models: LSTM (Zaremba et al. 2014, arXiv:1409.2329) and GRU (arXiv:1406.1078).

torch's word_language_model example runs `nn.LSTM` over the whole text and then decodes all of it,
tokens x vocabulary numbers at once. Here time is cut into chunks, and each layer's chunk is a step.
With targets, a chunk's logits and losses follow before the next chunk.

    state after              the chunk's                      chunks to come         carried on
    begin      total count |                                | tokens targets | ... | h1 h2 c1 c2
    embed      total count | x (t, N, E) targets            | tokens targets | ... | h1 h2 c1 c2
    recur(0)   total count | x (t, N, H) targets            | tokens targets | ... | h1'h2 c1'c2
    divide     total count | x targets | x targets | ...    | tokens targets | ... | h1'h2'c1'c2'
    add_loss   total count | x targets | ...                | tokens targets | ... | h1'h2'c1'c2'
    finish     loss, hidden, cell

Without targets, total, count and targets are None, and all chunks are decoded at once. Chunks embed
their own tokens: views of one embedding would each save all of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import ceil, isqrt
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from zoo._torch import HAS_MKLDNN
from zoo.chain import Chain, State, Steps
from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import IGNORED, check_arguments, check_choice, check_tokens
from zoo.layers.language_head import HEADS, choose_chunk_tokens, make_head
from zoo.layers.weight_sharing import SharedWeight

Carried = Tensor | tuple[Tensor, ...]

# under autocast oneDNN's LSTM takes no float16, and bfloat16 on processors with AVX-512 alone
_HAS_BFLOAT16 = HAS_MKLDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WordLanguageModel(Chain):
    """Tokens (T, N), state -> logits (T, N, V), state; with targets (T, N) -> mean loss (), state.

    The state is (hidden, cell) of an LSTM and hidden of a GRU, each (layers, N, hidden); None is
    zeros. The one returned goes in with the next batch, once detached by `model.detach(state)`.
    Targets of -100 are ignored. Dropout follows the embedding and each layer. `tied` makes the
    embedding's weight the decoder's (arXiv:1608.05859). `head` is that of `GPT2`: "inplace",
    "plain" or "fused".

    `chunk_steps` is the length of a chunk of time; `chunk_tokens` tokens are decoded at a time.
    None, for either, chooses by the shape of each input, the same with and without a plan: about
    sqrt(T) steps, and so many tokens that their logits take no more than the activations of a chunk
    of time (`layers.language_head.choose_chunk_tokens`). Other `chunk_steps` sum the weights'
    gradients in another order: equal up to rounding.

    Embedding and decoder are drawn from (-0.1, 0.1), the decoder's bias is zero, as in torch's
    example; the layers are torch's own.

    Raises:
        ArgumentError: a size below 1, a rate outside [0, 1), tied where embedding is not hidden.
        InputError: in the forward, tokens, targets or a state of another shape or type.
    """

    recurrent: ClassVar[type[nn.LSTM] | type[nn.GRU]]
    carries: ClassVar[tuple[str, ...]]

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
        self.hidden = hidden
        self.carried = layers * len(self.carries)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, state: Carried | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor, Carried]:
        """Returns the logits (T, N, V), or with targets the mean loss (), and the state after."""
        tensors = () if state is None else (state,) if isinstance(state, Tensor) else tuple(state)
        return self.returned(*super().forward(tokens, targets, *tensors))

    def returned(self, *state: Any) -> tuple[Tensor, Carried]:
        """result, hidden, cell -> result, (hidden, cell)"""
        result, *after = state
        return result, tuple(after) if len(after) > 1 else after[0]

    @staticmethod
    def detach(state: Carried) -> Carried:
        """Returns the same state without its graph: the next batch's backward ends there."""
        if isinstance(state, Tensor):
            return state.detach()
        return tuple(tensor.detach() for tensor in state)

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Checks tokens, targets and state and lists the steps for a text of this length."""
        tokens, targets, *state = cast(tuple[Any, ...], inputs)
        vocabulary = self.embedding.num_embeddings
        check_tokens(self.name, tokens, targets, "TN", vocabulary=vocabulary)
        length, batch = tokens.shape
        self._check_state(state, batch)
        chunk_steps = self.chunk_steps or _choose_chunk_steps(length)
        chunk_tokens = self.chunk_tokens or choose_chunk_tokens(
            min(chunk_steps, length) * batch, len(self.layers) * self.hidden, vocabulary
        )
        begin = partial(self.begin, chunk_steps)
        words = SharedWeight(self.embedding.weight)
        layers = [(partial(self.recur, layer), self.drop) for layer in range(len(self.layers))]
        body: Steps = [partial(self.embed, words.embedding(self.embedding)), self.drop, *layers]
        whole: list[Steps] = [[body, self.set_aside]] * ceil(length / chunk_steps)
        if targets is None:
            return [begin, *whole, [self.decode, self.finish]]
        tied = self.decoder.weight is self.embedding.weight
        decoder = words if tied else SharedWeight(self.decoder.weight)
        head = make_head(self.head, decoder, chunk_tokens, self.decoder)
        end: Steps = [head.mean, self.finish]
        if head.chunk_tokens is None:
            return [begin, *whole, [self.join, head.add_loss], end]
        chunks: list[Steps] = []
        for start in range(0, length, chunk_steps):
            size = min(chunk_steps, length - start) * batch
            losses: list[Steps] = [[head.add_loss]] * ceil(size / chunk_tokens)
            chunks += [[body, partial(self.divide, chunk_tokens)], *losses]
        return [begin, *chunks, end]

    def begin(self, chunk_steps: int, tokens: Any, targets: Any, *state: Any) -> State:
        """tokens (T, N), targets, state -> total, count, tokens (t, N), targets, ..., carried"""
        weight = self.embedding.weight
        zeros = weight.new_zeros((len(self.layers), tokens.shape[1], self.hidden))
        state = state or (zeros,) * len(self.carries)
        carried = [part for tensor in state for part in tensor.split(1)]
        chunks = tokens.split(chunk_steps)
        wanted, total, count = [None] * len(chunks), None, None
        if targets is not None:
            wanted, count = targets.split(chunk_steps), (targets != IGNORED).sum()
            total = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
        pairs = chain.from_iterable(zip(chunks, wanted, strict=True))
        return (total, count, *pairs, *carried)

    def embed(self, embedding: Callable[[Tensor], Tensor], *state: Any) -> State:
        """..., tokens (t, N), ... -> ..., x (t, N, embedding), ..."""
        total, count, tokens, *rest = state
        return (total, count, embedding(tokens), *rest)

    def drop(self, total: Any, count: Any, x: Tensor, *rest: Any) -> State:
        """..., x (t, N, C), ... -> ..., dropout(x), ..."""
        return (total, count, self.dropout(x), *rest)

    def recur(self, layer: int, total: Any, count: Any, x: Tensor, *rest: Any) -> State:
        """..., x (t, N, C), ... -> ..., x (t, N, hidden), ... and this layer's hidden and cell."""
        chunks, carried = rest[: -self.carried], list(rest[-self.carried :])
        own = slice(layer, None, len(self.layers))
        inputs = x, *carried[own]
        x, *before = _cast(inputs) if self.recurrent is nn.LSTM else inputs
        x, after = self.layers[layer](x, tuple(before) if len(before) > 1 else before[0])
        carried[own] = [after] if isinstance(after, Tensor) else after
        return (total, count, x, *chunks, *carried)

    def divide(self, chunk_tokens: int, *state: Any) -> State:
        """..., x (t, N, hidden), targets (t, N), ... -> ..., x (tokens, hidden), targets, ..."""
        total, count, x, targets, *rest = state
        parts = (part.flatten(0, 1).split(chunk_tokens) for part in (x, targets))
        return (total, count, *chain.from_iterable(zip(*parts, strict=True)), *rest)

    def set_aside(self, total: Any, count: Any, x: Any, targets: Any, *rest: Any) -> State:
        """..., x (t, N, hidden), targets, others, carried -> ..., others, x, targets, carried"""
        return (total, count, *rest[: -self.carried], x, targets, *rest[-self.carried :])

    def join(self, total: Any, count: Any, *rest: Any) -> State:
        """..., x (t, N, hidden), targets, x, targets, ... -> ..., x (tokens, hidden), targets"""
        pairs, carried = rest[: -self.carried], rest[-self.carried :]
        return (total, count, *(torch.cat(pairs[i::2]).flatten(0, 1) for i in (0, 1)), *carried)

    def decode(self, *state: Any) -> State:
        """None, None, x (t, N, hidden), None, x, None, ..., carried -> logits (T, N, V), carried"""
        return (self.decoder(torch.cat(state[2 : -self.carried : 2])), *state[-self.carried :])

    def finish(self, result: Tensor, *carried: Tensor) -> State:
        """result, carried -> result, hidden (layers, N, hidden), cell"""
        starts = range(0, self.carried, len(self.layers))
        return (result, *(torch.cat(carried[start:][: len(self.layers)]) for start in starts))

    def _check_state(self, state: Sequence[Tensor | None], batch: int) -> None:
        shape = (len(self.layers), batch, self.hidden)
        got = [None if tensor is None else (*tensor.shape,) for tensor in state]
        if got and got != [shape] * len(self.carries):
            raise InputError(
                f"{self.name} takes as state {' and '.join(self.carries)} of {shape} for {batch} "
                f"texts; got {got}. Pass what the last batch returned, or None to begin with zeros"
            )


def _choose_chunk_steps(length: int) -> int:
    """Returns about sqrt(length), or 8 where that is more, such that chunks are about as long.

    All chunks' states are held beside one chunk's activations, so their sum is least where neither
    is much larger. The number of chunks is what planning takes.

        length          1   8   9  35  100  200  1000
        chunk_steps     1   8   5   7   10   14    31
    """
    chunks = ceil(length / max(isqrt(length), 8))
    return ceil(length / chunks)


def _cast(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Casts an LSTM's inputs under autocast where oneDNN has no kernel of that type.

    torch chooses oneDNN for float32 and casts later, which ends in "could not create a primitive
    descriptor". For inputs of autocast's type it chooses its own kernel.
    """
    dtype = torch.get_autocast_dtype("cpu")
    has_kernel = dtype is torch.bfloat16 and _HAS_BFLOAT16
    if has_kernel or not torch.is_autocast_enabled("cpu") or inputs[0].device.type != "cpu":
        return inputs
    return tuple(tensor.to(dtype) for tensor in inputs)


class LSTMLanguageModel(WordLanguageModel):
    """LSTM language model: tokens (T, N), (hidden, cell) -> logits (T, N, V), (hidden, cell).

    See `WordLanguageModel`.
    """

    recurrent = nn.LSTM
    carries = ("hidden", "cell")


class GRULanguageModel(WordLanguageModel):
    """GRU language model: tokens (T, N), hidden -> logits (T, N, V), hidden.

    See `WordLanguageModel`.
    """

    recurrent = nn.GRU
    carries = ("hidden",)
