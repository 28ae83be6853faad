# %% [markdown] name="question"
# # 5. What is left to save in a transformer?
#
# Everybody knows that attention is the problem: every token looks at every other token, so that
# twice the tokens take four times the memory. Today's attention *kernels* have solved that. They
# never write the big matrix down.
#
# So what is left? And how do the usual four tricks go together: checkpointing, half precision
# (AMP), gradient accumulation and `torch.compile`?
#
# You need notebook 1 (what activations are) and notebook 2 (what checkpointing does).

# %% name="install"
# where zoo is missing: installs it from this checkout, from a wheel in this folder or the index
import importlib.util
import subprocess
import sys
from pathlib import Path

here = Path.cwd()
roots = [root for root in (here, *here.parents) if (root / "zoo" / "version.py").exists()]
wanted = [f"{roots[0]}[notebooks]"] if roots else ["--find-links=.", "zoo-checkpoint[notebooks]"]
if not all(map(importlib.util.find_spec, ("zoo", "timm", "transformers", "nilearn"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)

# %% name="setup"
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import zoo
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# A small GPT-2 reads real text, Python's own help pages, byte by byte: 16 sequences of 64 bytes.
# One training step, as it is (the *baseline*) and with `checkpoint=True`.

# %% name="payoff"
text = "\n".join(topics.values()).encode("ascii", "ignore")
data = torch.tensor(list(text), device=device)
starts = torch.arange(16, device=device) * (len(data) // 17)
windows = data[starts[:, None] + torch.arange(65, device=device)]
inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
torch.manual_seed(0)
sizes = {"depth": 4, "width": 128, "heads": 4, "vocabulary": 256, "positions": 64}
gpt = zoo.gpt2_small(**sizes, drop_rate=0.0).to(device)
step = zoo.anatomy(gpt, (inputs, targets), checkpoint=True)
notebook.chart("A training step of a small GPT-2", step)

# %% [markdown] name="two-ways"
# ## Attention, written in two ways
#
# `Explicit` is the formula as it stands in the paper. `Kernel` asks torch for the same thing in one
# call, `scaled_dot_product_attention`. It goes over the tokens tile by tile, keeps one number per
# row of the matrix, and computes the tiles again in the backward.
#
# (Does this remind you of something? It *is* checkpointing, inside of a kernel.)

# %% name="attention"
HEADS, WIDTH = 4, 128


class Explicit(nn.Linear):
    """softmax(q kᵀ / √d) v, spelled out: (N, T, C) -> (N, T, C)."""

    def forward(self, tokens):
        q, k, v = super().forward(tokens).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q, k, v):
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


# %% name="kernel"
class Kernel(Explicit):
    """The same by torch's attention kernel."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Recomputed(Explicit):
    """Spelled out, and recomputed in the backward."""

    def forward(self, tokens):
        return zoo.recompute(super().forward, tokens)


# %% name="tracked"
def tracked(model, *inputs, amp=False):
    """Tracks the second forward and backward: the first decides the plan."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with zoo.track(model, inputs=inputs) as timeline:
            with torch.autocast(device, torch.bfloat16, enabled=amp):
                loss = model(*inputs).float().square().mean()
            loss.backward()
    return timeline


# %% [markdown] name="predict"
# ## Your guess, before you look
#
# Six such layers in a row. You double the number of tokens.
#
# 1. By what factor do the activations grow when attention is spelled out?
# 2. And with the kernel?
# 3. A third candidate spells attention out, but recomputes each layer in the backward
#    (`zoo.recompute`). Will it be as good as the kernel?

# %% name="guess"
guess_spelled_out = 2  # times as many bytes for twice the tokens: change it
guess_kernel = 2  # and with the kernel: change it

# %% name="lengths"
LENGTHS, MIB = (64, 128, 256, 512, 1024), 2**20
kinds = {"spelled out": Explicit, "kernel": Kernel, "spelled out, recomputed": Recomputed}
candidates, grown = {}, {}
for name, kind in kinds.items():
    torch.manual_seed(0)
    layers = (kind(WIDTH, 3 * WIDTH) for _ in range(6))
    candidates[name] = nn.Sequential(*layers).to(device)
    texts = [torch.rand(1, length, WIDTH, device=device) for length in LENGTHS]
    grown[name] = [tracked(candidates[name], t).activation_peak / MIB for t in texts]
notebook.curves("Activations of six layers, at most (MiB)", "tokens", LENGTHS, grown, log="xy")

# %% name="growth"
last = {name: sizes[-1] for name, sizes in grown.items()}
growth = {name: sizes[-1] / sizes[-2] for name, sizes in grown.items()}
rows = [[name, f"{last[name]:.1f} MiB", f"×{growth[name]:.1f}"] for name in grown]
table([f"{LENGTHS[-1]} tokens", "activations", f"times those of {LENGTHS[-2]}"], *rows)
say(
    f"You said ×{guess_spelled_out} and ×{guess_kernel}. Recomputing saves a factor of "
    f"{last['spelled out'] / last['spelled out, recomputed']:.1f}, the kernel one of "
    f"**{last['spelled out'] / last['kernel']:.1f}**."
)

# %% [markdown] name="rounding"
# Recomputing saves since only one layer's matrix is there at a time, but that one still grows with
# the square of the length. **First take the kernel, then checkpoint the rest.**
#
# The kernel adds numbers in another order, so it agrees with the formula up to rounding.
# Recomputing is different: the same operations in the same order. It must agree in every bit.


# %% name="gradients"
def gradients(model, *inputs):
    """Returns the gradients of all weights."""
    model.zero_grad(set_to_none=True)
    model(*inputs).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(found, wanted):
    """The largest difference of two lists of tensors, relative to the largest number in each."""
    pairs = zip(found, wanted, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# %% name="exactness"
tokens = torch.rand(1, 256, WIDTH, device=device)
wanted = gradients(candidates["spelled out"], tokens)
found = {name: gradients(model, tokens) for name, model in candidates.items()}
table(
    ["gradients", "same bits as spelled out", "relative difference"],
    *(
        [name, all(map(torch.equal, these, wanted)), f"{distance(these, wanted):.0e}"]
        for name, these in found.items()
    ),
)

# %% [markdown] name="left"
# ## What is left
#
# Take a vision transformer, with the kernel. Here is one of its blocks, cut into the steps that
# `zoo` finds in it, by the names of their modules. `attn.qkv` is the matrix that makes queries,
# keys and values; `scaled_dot_product_attention` is the kernel; `mlp.fc1` a matrix to four times
# the width; `add` an addition, one step with the matrix before it.
#
# **Predict:** what keeps more bytes for the backward, the attention or the layers of the MLP?

# %% name="block"
vit = zoo.vit_tiny_patch16()
report = zoo.plan(vit, torch.empty(8, 3, 224, 224, device="meta"), memory_budget=1.0, device="a100")
middle, saved = report.blocks[len(report.blocks) // 2], {}
for name, size, block in zip(report.names, report.saved, report.blocks, strict=True):
    if block == middle:
        saved[" ".join(part.split(".", 2)[-1] for part in name.split())] = size / MIB
notebook.bars("", {"saved for the backward by each step of a block, batch of 8 (MiB)": saved})
shares = {name: size / sum(saved.values()) for name, size in saved.items()}
mlp = sum(share for name, share in shares.items() if name.startswith("mlp"))
attention = shares["scaled_dot_product_attention"]
say(f"The layers of the MLP: **{mlp:.0%}**. The famous attention: {attention:.0%}.")

# %% [markdown] name="amp"
# ## Half precision
#
# Under `torch.autocast` matrix products are done in bfloat16: two bytes per number in place of
# four. No loss scaling is needed with bfloat16, as its exponents go as far as those of float32.
#
# **Predict:** does it halve the activations? And what do you get when you checkpoint as well:
# is it the product of both savings?

# %% name="precisions"
torch.manual_seed(0)
vit = zoo.vit_tiny_patch16(depth=6, width=96, image_size=160, classes=10).to(device)
images = torch.rand(12, 3, 160, 160, device=device)
OPTIONS = {"baseline": False, "cheap": "cheap", "checkpoint=True": True}
halves = {"float32": False, "bfloat16": True}
steps, exact = {}, {}
for precision, amp in halves.items():
    for name, option in OPTIONS.items():
        steps[precision, name] = tracked(zoo.checkpoint(vit, option), images, amp=amp)
        exact[precision, name] = [parameter.grad.clone() for parameter in vit.parameters()]

# %% name="precisions-drawn"
peaks = {key: step.activation_peak / MIB for key, step in steps.items()}
panels = {
    f"{precision}: activations, at most (MiB)": {name: peaks[precision, name] for name in OPTIONS}
    for precision in halves
}
notebook.bars("", panels)
same = [
    all(map(torch.equal, exact[precision, name], exact[precision, "baseline"]))
    for precision, name in exact
]
say(f"Gradients with the bits of the baseline of the same precision: {sum(same)} of {len(same)}.")


# %% name="kinds"
def by_type(timeline):
    """Returns the shares of number formats in the activations at the peak."""
    parts = {}
    for part in timeline.holders(10**6):
        parts[part.dtype] = parts.get(part.dtype, 0) + part.bytes
    whole = sum(parts.values())
    return ", ".join(f"{kind!s}: {size / whole:.0%}" for kind, size in parts.items())


rows = [[*key, f"{peaks[key]:.1f} MiB", by_type(step)] for key, step in steps.items()]
table(["", "plan", "activations, at most", "of these"], *rows)

# %% name="halves"
baseline = peaks["float32", "baseline"]
product = peaks["bfloat16", "baseline"] / baseline * peaks["float32", "checkpoint=True"] / baseline
say(
    f"bfloat16 alone: ×{peaks['bfloat16', 'baseline'] / baseline:.2f}, and not ×{1 / 2}. "
    f"Checkpointing alone: ×{peaks['float32', 'checkpoint=True'] / baseline:.2f}. "
    f"Both: ×{peaks['bfloat16', 'checkpoint=True'] / baseline:.2f}; the product would be "
    f"×{product:.2f}."
)

# %% [markdown] name="accumulation"
# They do not multiply. Norms and what is handed from block to block stay in float32: that is what
# a checkpoint keeps, and bfloat16 does not make it smaller. And autocast keeps a second, short copy
# of each weight until it ends, which nothing recomputes. What is recomputed uses the kernels of the
# forward, the short ones, too: the bits are the same.
#
# ## Gradient accumulation
#
# The other way to save: cut the batch into parts, run forward and backward for one part after the
# other, and let the gradients add up. There is no BatchNorm in a transformer, so the result is
# that of the whole batch, up to rounding.
#
# Here is the GPT-2 of the beginning. The batch has 16 sequences.
#
# **Predict:** which takes less, the baseline in 4 parts of 4, or 1 part of 16 by `checkpoint=True`?
# Which of them has to do more work?


# %% name="parts"
def run(parts):
    gpt.zero_grad(set_to_none=True)
    for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        (gpt(some, wanted) / parts).backward()


def accumulated(parts, checkpoint):
    """Runs a batch in parts; returns (activation bytes, gradients)."""
    zoo.checkpoint(gpt, checkpoint)
    run(parts)
    with zoo.track(gpt, inputs=(inputs, targets)) as timeline:
        run(parts)
    return timeline.activation_peak, [parameter.grad.clone() for parameter in gpt.parameters()]


# %% name="parts-table"
from torch.utils.flop_counter import FlopCounterMode

PIECES, rows, found = (1, 2, 4, 8), [], {}
for parts in PIECES:
    for option in (False, True):
        size, these = found[parts, option] = accumulated(parts, option)
        with FlopCounterMode(display=False) as work:
            run(parts)
        off = [distance(these, found[way][1]) for way in ((parts, False), (1, False))]
        name = f"{parts} × {16 // parts}, `checkpoint={option}`"
        flops = f"{work.get_total_flops() / 1e9:.2f}"
        rows.append([name, format_bytes(size), flops, *(f"{way:.0e}" for way in off)])

# %% name="parts-drawn"
table(["parts × sequences", "activations", "GFLOP", "off the same parts", "off one part"], *rows)
names = [f"{parts} × {16 // parts}" for parts in PIECES]
notebook.bars("Parts × sequences in a part", {
    f"checkpoint={way}: activations, at most (MiB)": {
        name: found[parts, way][0] / MIB for name, parts in zip(names, PIECES, strict=True)
    } for way in (False, True)
})  # fmt: skip

# %% name="parts-words"
say(
    f"The baseline in 4 parts: {format_bytes(found[4, False][0])}. One part by `checkpoint=True`: "
    f"{format_bytes(found[1, True][0])}, for more operations. "
    f"Both together: **{format_bytes(found[4, True][0])}**."
)

# %% [markdown] name="accumulation-answer"
# Accumulation does no operation twice, but its kernels work on smaller pieces, which a GPU likes
# less. Checkpointing changes no bit; accumulation changes the rounding.
#
# ## torch.compile
#
# The compiler sees the whole step and has an opinion of its own on what to keep. A model
# with a plan goes through it: the compiler then recomputes each block. Two things to know:
#
# - Call `zoo.checkpoint` first and `torch.compile` second.
# - Compiled kernels may round differently with a plan and without. The backend `"aot_eager"`, which
#   takes the graph apart and runs torch's own kernels, gives the same bits. It is also the quick
#   one, so we use it here. On a GPU leave `backend` out.
#
# `zoo.track` looks into every operation, which the compiler does not allow. So here the bytes are
# those that a forward saves for the backward, as torch's own hooks see them.


# %% name="saved"
def saved_bytes(model):
    """Counts the bytes that a forward saves for its backward, weights aside."""
    weights, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in weights)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gradients(model, images)
    return sum(saved.values())


# %% name="compiled"
torch.manual_seed(0)
short = zoo.vit_tiny_patch16(depth=3, width=96, image_size=160, classes=10).to(device)
wanted, rows = gradients(short, images), []
for option in (False, True):
    zoo.checkpoint(short, option)
    compiled = torch.compile(short, backend="aot_eager", fullgraph=True)
    same = all(map(torch.equal, gradients(compiled, images), wanted))
    rows.append([f"`checkpoint={option}`", format_bytes(saved_bytes(compiled)), same])
table(["compiled", "saved for the backward", "same bits as eager"], *rows)

# %% [markdown] name="gpu"
# ## On a GPU
#
# There the kernel is a "flash" kernel, and memory is what torch's caching allocator hands out. The
# same question again: 4,096 tokens, six layers, bfloat16.

# %% name="on-gpu"
if device == "cuda":
    tokens = torch.rand(1, 4096, WIDTH, device=device)
    peaks = {name: tracked(model, tokens, amp=True) for name, model in candidates.items()}
    table(["", "activations"], *([n, format_bytes(t.activation_peak)] for n, t in peaks.items()))
else:
    say(
        "Skipped, as there is no GPU here. It would show the activations of the three candidates "
        "for 4,096 tokens in bfloat16 on the GPU."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - Use `scaled_dot_product_attention`. It turns the square of the length into the length itself,
# >   in every layer. Checkpointing alone cannot do that.
# > - After that the **perceptron** holds most of the memory, and not attention.
# > - bfloat16 saves less than half of the activations, and its savings and those of checkpointing
# >   do not multiply: what a checkpoint keeps stays in float32.
# > - Accumulation and checkpointing both make the peak smaller and go together. Accumulation
# >   changes the rounding; checkpointing changes no bit.
# > - `zoo.checkpoint` comes before `torch.compile`.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** In a language model no token sees the ones behind it. Give the kernel `is_causal=True`. Do
# its bytes change?
#
# <details><summary>Answer</summary>
#
# No. It leaves out the tiles that nobody sees, which saves time. Spelled out, a mask is one more
# tensor of tokens × tokens, and filling it in makes one more copy of the matrix.
#
# ```python
# class Causal(Kernel):
#     def attend(self, q, k, v):
#         return F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
#
# some = torch.rand(1, 512, WIDTH, device=device)
# pair = [kind(WIDTH, 3 * WIDTH).to(device) for kind in (Kernel, Causal)]
# sizes = [tracked(model, some).activation_peak for model in pair]
# print(*(f"{size / MIB:.2f} MiB" for size in sizes))
# assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]
# ```
#
# </details>
#
# **2.** Give GPT-2 the vocabulary of the real one, 50,257 words. What is the largest tensor of a
# training step now?
#
# <details><summary>Answer</summary>
#
# The logits: one number per token and word. They are larger than all blocks together. That is why
# the models of `zoo` deal with them some tokens at a time (`chunk_tokens`) and write the gradient
# over them; notebook 3 looks into this.
#
# ```python
# real = zoo.gpt2_small(
#     depth=4, width=128, heads=4, vocabulary=50257, positions=64, chunk_tokens=1024
# )
# paper = torch.empty(16, 64, dtype=torch.long, device="meta")
# step = zoo.anatomy(real, (paper, paper)).baseline
# largest = step.holders(1)[0]
# print(f"{largest.bytes / MIB:.0f} of {step.activation_peak / MIB:.0f} MiB of activations")
# assert largest.bytes == 16 * 64 * 50257 * 4
# ```
#
# </details>
#
# **3.** Switch dropout on. Are the gradients with `checkpoint=True` still those of the
# baseline?
#
# <details><summary>Answer</summary>
#
# Yes, from the same seed. A replay draws the masks of the forward again, and afterwards the random
# numbers go on as if there had been none.
#
# ```python
# dropping = zoo.gpt2_small(
#     depth=2, width=128, heads=4, vocabulary=256, positions=64, drop_rate=0.1
# ).to(device)
# found = []
# for option in (False, True):
#     zoo.checkpoint(dropping, option).zero_grad(set_to_none=True)
#     torch.manual_seed(1)
#     dropping(inputs, targets).backward()
#     found.append([parameter.grad.clone() for parameter in dropping.parameters()])
# assert all(map(torch.equal, *found))
# ```
#
# </details>
#
# **Next:** [6. Your own model](06_your_own_model.ipynb)
