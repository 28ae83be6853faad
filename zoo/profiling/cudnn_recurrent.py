"""The sizes of the buffers of cuDNN's recurrent networks: weights, reserve, dropout's state.

An LSTM or GRU on CUDA is one kernel for all its layers and time steps. Its weights lie in one flat
buffer, and it returns a reserve, which only its own backward reads: most of what it saves.

    weights  W0 R0 (P0) | W1 R1 (P1) | ... | bW0 bR0 | bW1 bR1 | ...    by layer and direction
    reserve  gates and cells of all layers | outputs between layers | masks of the dropout | 256
"""

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo._torch import Args, Kwargs, Operator, PyTree, TorchDispatchMode
from zoo.engine.operator_effects import DROPOUT_STATE

# cuDNN's numbers of the kinds of networks, and the gates of each
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
# parts of a reserve are rounded up to so many bytes, and it has so many more
ALIGNED, MORE = 32, 256
# bytes of a generator's state for a thread, of which a multiprocessor runs so many at once
STATE, THREADS = 24, 2048
# the multiprocessors of an H200
PROCESSORS = 132


class Network(NamedTuple):
    """A call of cuDNN's for all layers of a recurrent network."""

    inputs: int
    mode: int
    hidden: int
    projected: int  # 0 for none
    layers: int
    directions: int
    tokens: int  # T x N, or all of packed sequences
    dtype: torch.dtype
    dropout: float
    trains: bool

    @classmethod
    def of(cls, x: Tensor, settings: Sequence[Any]) -> "Network":
        """Reads the arguments of `_cudnn_rnn` or its backward, from `mode` to `batch_sizes`."""
        mode, hidden, projected, layers, _, dropout, trains, bidirectional, _ = settings
        sizes = mode, hidden, projected, layers, 1 + bidirectional, prod(x.shape[:-1])
        return cls(x.shape[-1], *sizes, x.dtype, dropout, trains)

    @classmethod
    def flattened(cls, dtype: torch.dtype, *settings: Any) -> "Network":
        """Reads the arguments of `_cudnn_rnn_flatten_weight` after the weights."""
        inputs, mode, hidden, projected, layers, _, bidirectional = settings
        return cls(inputs, mode, hidden, projected, layers, 1 + bidirectional, 0, dtype, 0.0, False)

    @property
    def outputs(self) -> int:
        """The width of a direction's output."""
        return self.projected or self.hidden

    @property
    def parts(self) -> list[list[int]]:
        """For each layer and direction the numbers in each of its parameters, as torch has them."""
        gates = GATES[self.mode] * self.hidden
        above = self.directions * self.outputs
        widths = [self.inputs] * self.directions + [above] * self.directions * (self.layers - 1)
        projection = [self.hidden * self.projected] if self.projected else []
        return [
            [gates * width, gates * self.outputs, gates, gates, *projection] for width in widths
        ]

    @property
    def weights(self) -> int:
        """The numbers in the flat buffer of all weights; biases have room even if unused."""
        return sum(map(sum, self.parts))

    @property
    def offsets(self) -> list[list[int]]:
        """Where in the flat buffer each parameter begins."""
        biases = sum(sum(sizes) - 2 * sizes[2] for sizes in self.parts)
        by_part, matrices = [], 0
        for first, second, bias, _, *projection in self.parts:
            offsets = [matrices, matrices + first, biases, biases + bias]
            by_part.append([*offsets, *(matrices + first + second for _ in projection)])
            matrices += first + second + sum(projection)
            biases += 2 * bias
        return by_part

    def reserve_bytes(self) -> int:
        """Estimates the bytes of the reserve, for a device that is not here.

        Of an LSTM exactly what cuDNN 9.19 asked for on an H200, for one layer in float32 and in
        half precision and for two with dropout; an estimate for a GRU, a network without gates,
        projections, two directions, other versions and other devices.
        """
        if not self.trains:
            return 0
        numbers = self.tokens * self.directions * self.hidden
        between = (self.layers - 1) * numbers
        sizes = (
            self.layers * numbers * (GATES[self.mode] + 1) * self.dtype.itemsize,
            between * self.dtype.itemsize,
            -(-between // 8) if self.dropout else 0,
        )
        return MORE + sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def dropout_state_bytes(device: torch.device) -> int:
    """Returns the bytes of a dropout's state; without CUDA those on an H200.

    There 6,488,064 were measured; other devices are taken to need as much per multiprocessor.
    """
    there = device.type == "cuda" and torch.cuda.is_available()
    processors = PROCESSORS
    if there:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * THREADS * STATE


class _DropoutState(TorchDispatchMode):
    """Notes the storage of the state that is made inside of it."""

    storage: torch.UntypedStorage

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        result = func(*args, **(kwargs or {}))
        if func is DROPOUT_STATE:
            self.storage = result.untyped_storage()
        return result


def dropout_state_made(device: torch.device) -> torch.UntypedStorage:
    """Lets torch make the state of dropout on a device, which later calls find."""
    one = torch.zeros(1, 1, 1, device=device)
    settings = False, 2, 0.5, True, False, False
    made = _DropoutState()  # type: ignore[no-untyped-call]
    with made, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights")
        torch.rnn_tanh(one, one.expand(2, 1, 1).contiguous(), [one[0]] * 4, *settings)
    return made.storage


def flattened(model: nn.Module) -> nn.Module:
    """Puts the weights of a copy's networks into flat buffers again; returns the copy.

    A copy has each weight in memory of its own, which cuDNN would copy in each call.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model
