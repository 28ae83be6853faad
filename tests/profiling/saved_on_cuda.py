"""What operators save for their backward on the CPU and on CUDA: `python -m` prints this table.

| operator | CPU, bytes | CUDA, bytes | node on CUDA |
| --- | ---: | ---: | --- |
| attention 2×4×256×64, float16 | 270,336 | 270,360 | ScaledDotProductFlashAttention |
| the same with dropout | 7,864,320 | 270,360 | ScaledDotProductFlashAttention |
| attention 2×4×256×64, float32 | 532,480 | 532,496 | ScaledDotProductEfficientAttention |
| the same with dropout | 7,340,032 | 532,480 | ScaledDotProductEfficientAttention |
| the same with a mask | 532,480 | 532,496 | ScaledDotProductEfficientAttention |
| the same by `SDPBackend.MATH` | 3,145,728 | 3,145,728 | UnsafeView |
| that with dropout | 7,340,032 | 5,767,168 | UnsafeView |
| `LayerNorm`, 64×256 | 512 | 512 | NativeLayerNorm |
| the same in float16 | 256 | 512 | NativeLayerNorm |
| `RMSNorm`, 64×256 | 65,792 | 256 | FusedRmsNorm |
| `GroupNorm(8)`, 4×64×16×16 | 256 | 256 | NativeGroupNorm |
| the same in float16 | 128 | 128 | NativeGroupNorm |
| `BatchNorm2d` without cuDNN, 4×64×16×16 | 512 | 512 | NativeBatchNorm |
| `Dropout`, 64×256 | 65,536 | 16,384 | NativeDropout |
| `cross_entropy`, 64×1000 | 256,004 | 256,004 | NllLoss |
| `Softmax`, 64×256 | 65,536 | 65,536 | Softmax |
| `GELU`, 64×256 | 0 | 0 | Gelu |
| `MaxPool2d(2)`, 4×64×16×16 | 131,072 | 131,072 | MaxPool2DWithIndices |
| `LSTM(64, 64)` without cuDNN, 20×8×64 | 696,320 | 575,488 | Stack |

Bytes are those of storages that autograd holds after a forward, inputs and parameters left out; the
CPU's of an LSTM were measured with AVX-512. docs/gpu.md says what follows for a plan made without
a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.profiling import cuda_runtime

Case = Callable[[str], tuple[Callable[[], Any], list[Tensor]]]


def attention(
    backend: SDPBackend | None, dtype: torch.dtype, dropout: float = 0.0, *, is_masked: bool = False
) -> Case:
    def case(device: str) -> Any:
        given = [
            torch.zeros(2, 4, 256, 64, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        ]
        mask = torch.zeros(2, 1, 256, 256, device=device, dtype=dtype) if is_masked else None

        def run() -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*given, mask, dropout)

        return run, [*given, *([mask] if mask is not None else [])]

    return case


def module(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    def case(device: str) -> Any:
        made = make().to(device, dtype)
        x = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
        return lambda: made(x), [x, *made.parameters(), *made.buffers()]

    return case


def cross_entropy(device: str) -> Any:
    logits = torch.zeros(64, 1000, device=device, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long, device=device)
    return lambda: F.cross_entropy(logits, targets), [logits, targets]


HALF = torch.float16
CASES: dict[str, Case] = {
    "attention 2×4×256×64, float16": attention(None, HALF),
    "the same with dropout": attention(None, HALF, 0.1),
    "attention 2×4×256×64, float32": attention(None, torch.float32),
    "the same with dropout ": attention(None, torch.float32, 0.1),
    "the same with a mask": attention(None, torch.float32, is_masked=True),
    "the same by `SDPBackend.MATH`": attention(SDPBackend.MATH, torch.float32),
    "that with dropout": attention(SDPBackend.MATH, torch.float32, 0.1),
    "`LayerNorm`, 64×256": module(lambda: nn.LayerNorm(256), 64, 256),
    "the same in float16": module(lambda: nn.LayerNorm(256), 64, 256, dtype=HALF),
    "`RMSNorm`, 64×256": module(lambda: nn.RMSNorm(256), 64, 256),
    "`GroupNorm(8)`, 4×64×16×16": module(lambda: nn.GroupNorm(8, 64), 4, 64, 16, 16),
    "the same in float16 ": module(lambda: nn.GroupNorm(8, 64), 4, 64, 16, 16, dtype=HALF),
    "`BatchNorm2d` without cuDNN, 4×64×16×16": module(lambda: nn.BatchNorm2d(64), 4, 64, 16, 16),
    "`Dropout`, 64×256": module(lambda: nn.Dropout(0.1), 64, 256),
    "`cross_entropy`, 64×1000": cross_entropy,
    "`Softmax`, 64×256": module(lambda: nn.Softmax(-1), 64, 256),
    "`GELU`, 64×256": module(nn.GELU, 64, 256),
    "`MaxPool2d(2)`, 4×64×16×16": module(lambda: nn.MaxPool2d(2), 4, 64, 16, 16),
    "`LSTM(64, 64)` without cuDNN, 20×8×64": module(lambda: nn.LSTM(64, 64), 20, 8, 64),
}


def saved(case: Case, device: str) -> tuple[str, int]:
    """Returns the node that an operator leaves, and the bytes of new storages that it saves."""
    run, given = case(device)
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    result = result[0] if isinstance(result, tuple) else result
    known = {tensor.untyped_storage()._cdata for tensor in given}
    new = (tensor for key, tensor in found.items() if key not in known)
    held = sum(tensor.untyped_storage().nbytes() for tensor in new if tensor.device.type == device)
    return result.grad_fn.name(), held


def bytes_on(device: str) -> dict[str, tuple[str, int]]:
    """Returns what each operator leaves and saves on a device."""
    with torch.backends.cudnn.flags(enabled=False):
        return {name: saved(case, device) for name, case in CASES.items()}


def table() -> list[str]:
    """Returns the rows of the table, in Markdown."""
    name = __name__ if __name__ != "__main__" else "tests.profiling.saved_on_cuda"
    program = f"from {name} import bytes_on\nprint(json.dumps(bytes_on('cuda')))"
    on_cuda = cuda_runtime.run(program)
    rows = ["| operator | CPU, bytes | CUDA, bytes | node on CUDA |", "| --- | ---: | ---: | --- |"]
    for case, (_, here) in bytes_on("cpu").items():
        node, there = on_cuda[case]
        kernel = node.removesuffix("Backward0")
        rows.append(f"| {case.strip()} | {here:,} | {there:,} | {kernel} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
