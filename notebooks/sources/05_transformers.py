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
# on Colab this installs what the notebook needs; anywhere else it does nothing
import subprocess
import sys

if "google.colab" in sys.modules:
    wanted = "zoo-checkpoint[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %% name="versions"
import os
import platform
import pydoc_data.topics
import time

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the profiler warns of memory older than itself

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch import nn
from torch.nn import functional as F

import zoo
from zoo.profiling.block_peak import spending

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")

plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}
BLUE, ORANGE, GREEN, GRAY = "#1f6fb4", "#d9731a", "#2c8a57", "#8a8a8a"
MIB = 2**20

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


class Explicit(nn.Module):
    """softmax(q kᵀ / √d) v, spelled out: (N, T, C) -> (N, T, C)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens):
        count, length, width = tokens.shape
        q, k, v = self.qkv(tokens).view(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).reshape(count, length, width)

    def attend(self, q, k, v):
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v


class Kernel(Explicit):
    """The same by torch's attention kernel."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def activation_peak(model, *inputs, amp=False):
    """Runs forward and backward twice; returns the most bytes of activations in the second."""

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            loss = model(*inputs).float().square().mean()
        loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    with zoo.track(model, inputs=inputs, allocator=device == "cpu") as timeline:
        step()
    return timeline.activation_peak


# %% [markdown] name="predict"
# ## Your guess, before you look
#
# Six such layers in a row. You double the number of tokens.
#
# 1. By what factor do the activations grow when attention is spelled out?
# 2. And with the kernel?
# 3. A third candidate spells attention out, but runs each layer again in the backward
#    (`zoo.recompute`). Will it be as good as the kernel?

# %% name="guess"
guess_spelled_out = 2  # times as many bytes for twice the tokens: change it
guess_kernel = 2  # and with the kernel: change it

# %% name="lengths"


class Again(nn.Module):
    """Runs a layer again in the backward instead of keeping what it saved."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, tokens):
        return zoo.recompute(self.layer, tokens)


LAYERS, LENGTHS = 6, (64, 128, 256, 512, 1024)
torch.manual_seed(0)
candidates = {
    "spelled out": nn.Sequential(*(Explicit() for _ in range(LAYERS))),
    "spelled out, run again": nn.Sequential(*(Again(Explicit()) for _ in range(LAYERS))),
    "kernel": nn.Sequential(*(Kernel() for _ in range(LAYERS))),
}
bytes_by_length = {
    name: [activation_peak(m.to(device), torch.rand(1, t, WIDTH, device=device)) for t in LENGTHS]
    for name, m in candidates.items()
}
print("tokens".ljust(24), *(f"{length:>10}" for length in LENGTHS))
for name, sizes in bytes_by_length.items():
    print(name.ljust(24), *(f"{size / MIB:6.1f} MiB" for size in sizes))

# %% name="plot-lengths"
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, sizes), color in zip(bytes_by_length.items(), (BLUE, ORANGE, GREEN), strict=True):
    axes.loglog(LENGTHS, [size / MIB for size in sizes], "o-", color=color, base=2)
    axes.annotate(name, (LENGTHS[-1], sizes[-1] / MIB), (8, 0), textcoords="offset points",
                  va="center", color=color)  # fmt: skip
axes.set(xlabel="tokens", ylabel="activations at the peak, MiB", xlim=(56, 2900), xticks=LENGTHS)
axes.set_xticks(LENGTHS, LENGTHS)
axes.yaxis.set_major_formatter("{x:g}")
plt.show()

# %% name="growth"
growth = {name: sizes[-1] / sizes[-2] for name, sizes in bytes_by_length.items()}
ratio = {
    name: bytes_by_length["spelled out"][-1] / sizes[-1] for name, sizes in bytes_by_length.items()
}
Markdown(
    f"You said × {guess_spelled_out} and × {guess_kernel}.\n\n"
    f"From {LENGTHS[-2]} to {LENGTHS[-1]} tokens: × {growth['spelled out']:.1f} spelled out, "
    f"× {growth['kernel']:.1f} with the kernel. Running each layer again saves a factor of "
    f"{ratio['spelled out, run again']:.1f}, since only one layer's matrix is there at a time, but "
    f"that one still grows by × {growth['spelled out, run again']:.1f}. The kernel saves "
    f"{ratio['kernel']:.0f}. **First take the kernel, then checkpoint the rest.**"
)

# %% [markdown] name="rounding"
# The kernel adds numbers in another order, so it agrees with the formula up to rounding. Running
# again is different: the same operations in the same order. It must agree in every bit.

# %% name="exactness"


def distance(found, wanted):
    """The largest difference of two lists of tensors, relative to the largest number in each."""
    pairs = zip(found, wanted, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def gradients(model, tokens):
    """Returns the gradients of all weights."""
    model.zero_grad(set_to_none=True)
    model(tokens).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


weights = candidates["spelled out"].state_dict()
candidates["kernel"].load_state_dict(weights)
candidates["spelled out, run again"].load_state_dict(
    {key.replace(".", ".layer.", 1): value for key, value in weights.items()}
)
tokens = torch.rand(1, 256, WIDTH, device=device)
wanted = gradients(candidates["spelled out"], tokens)
for name in ("kernel", "spelled out, run again"):
    found = gradients(candidates[name], tokens)
    same = all(map(torch.equal, found, wanted))
    print(f"{name:24} same bits: {same!s:6} relative difference: {distance(found, wanted):.0e}")

# %% [markdown] name="left"
# ## What is left
#
# Take a vision transformer, with the kernel. Here is one of its blocks, cut into the five steps
# that `zoo` runs it in. `project` is a norm and the matrix that makes queries, keys and values;
# `attend` is the kernel; `merge` a matrix and an addition; `widen` a norm and a matrix to four
# times the width; `narrow` the activation, a matrix and an addition.
#
# **Predict:** which of the five keeps the most bytes for the backward?

# %% name="block"
vit = zoo.vit_tiny_patch16()
report = zoo.plan(vit, torch.empty(8, 3, 224, 224, device="meta"), memory_budget=1.0, device="a100")
PARTS = ("project", "attend", "merge", "widen", "narrow")
middle = report.blocks[len(report.blocks) // 2]
saved = {
    name.rsplit(".", 1)[-1]: size
    for name, size, block in zip(report.names, report.saved, report.blocks, strict=True)
    if block == middle
}
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars = axes.barh(list(saved), [size / MIB for size in saved.values()], color=BLUE)
axes.bar_label(bars, [f"{size / sum(saved.values()):.0%}" for size in saved.values()], padding=4)
axes.invert_yaxis()
axes.set(xlabel="MiB that the step saves for the backward, batch of 8")
plt.show()
most = max(saved, key=saved.get)
Markdown(f"**`{most}`** keeps the most: {saved[most] / sum(saved.values()):.0%} of a block. "
         f"The famous `attend` keeps {saved['attend'] / sum(saved.values()):.0%}.")  # fmt: skip

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
OPTIONS = {False: "keep everything", "cheap": "keep the products", True: "as little as possible"}


def same_gradients(amp, checkpoint):
    """Compares all gradients with those of keeping everything, bit for bit."""
    found = []
    for option in (False, checkpoint):
        zoo.checkpoint(vit, option).zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            vit(images).float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in vit.parameters()])
    return all(map(torch.equal, *found))


peaks = {}
for amp in (False, True):
    for option, words in OPTIONS.items():
        peaks[amp, option] = activation_peak(zoo.checkpoint(vit, option), images, amp=amp)
        print(f"{'bfloat16' if amp else 'float32 '}  {words:22} {peaks[amp, option] / MIB:6.1f} MiB"
              f"   same bits as keeping everything: {same_gradients(amp, option)}")  # fmt: skip

# %% name="halves"
baseline = peaks[False, False]
Markdown(
    f"bfloat16 alone: × {peaks[True, False] / baseline:.2f}, and not × {1 / 2}. Norms and what is "
    "handed from block to block stay in float32, and autocast keeps a second, short copy of each "
    f"weight until it ends. Checkpointing alone: × {peaks[False, True] / baseline:.2f}. Both: "
    f"× {peaks[True, True] / baseline:.2f}. A replay calls the short kernels of the forward, so "
    "that its bits are the same."
)

# %% [markdown] name="accumulation"
# ## Gradient accumulation
#
# The other way to save: cut the batch into parts, run forward and backward for one part after the
# other, and let the gradients add up. There is no BatchNorm in a transformer, so the result is
# that of the whole batch, up to rounding.
#
# Here is a small GPT-2 that reads real text, Python's own help pages, byte by byte. The batch has
# 16 sequences.
#
# **Predict:** which takes less, 4 parts of 4 that keep everything, or 1 part of 16 by
# `checkpoint=True`? Which of them has to do more work?

# %% name="text"
text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
data = torch.tensor(list(text))
starts = torch.arange(16) * (len(data) // 17)
windows = data[starts[:, None] + torch.arange(65)].to(device)
inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
print("...", text[5000:5300].decode(), "...")

torch.manual_seed(0)
gpt = zoo.gpt2_small(depth=4, width=128, heads=4, vocabulary=256, positions=64, drop_rate=0.0).to(
    device
)

# %% name="parts"


def accumulated(parts, checkpoint):
    """Runs a batch in parts; returns (activation bytes, gradients)."""
    zoo.checkpoint(gpt, checkpoint)

    def run():
        gpt.zero_grad(set_to_none=True)
        for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            (gpt(some, wanted) / parts).backward()

    run()
    gpt.zero_grad(set_to_none=True)
    with zoo.track(gpt, inputs=(inputs, targets), allocator=device == "cpu") as timeline:
        run()
    return timeline.activation_peak, [parameter.grad.clone() for parameter in gpt.parameters()]


PIECES = (1, 2, 4, 8)
table = {(parts, ck): accumulated(parts, ck) for parts in PIECES for ck in (False, True)}
print("parts   keep everything   checkpoint=True   same bits   differs from one part by at most")
for parts in PIECES:
    (kept, expected), (again, found) = table[parts, False], table[parts, True]
    same = all(map(torch.equal, expected, found))
    off = distance(expected, table[1, False][1])
    print(f"{parts:5} {kept / MIB:13.1f} MiB {again / MIB:13.1f} MiB   {same!s:9}   {off:.0e}")

# %% name="plot-parts"
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for shift, (checkpoint, color, name) in enumerate(
    ((False, BLUE, "keep everything"), (True, ORANGE, "checkpoint=True"))
):
    places = [index + 0.4 * shift - 0.2 for index in range(len(PIECES))]
    sizes = [table[parts, checkpoint][0] / MIB for parts in PIECES]
    axes.bar_label(axes.bar(places, sizes, 0.36, color=color, label=name), fmt="%.1f", fontsize=9)
axes.set_xticks(range(len(PIECES)), [f"{parts} × {16 // parts}" for parts in PIECES])
axes.set(xlabel="parts × sequences in a part", ylabel="activations at the peak, MiB")
axes.legend(frameon=False)
plt.show()
in_parts, at_once = table[4, False][0], table[1, True][0]
Markdown(
    f"4 parts that keep everything: {in_parts / MIB:.1f} MiB. One part by `checkpoint=True`: "
    f"{at_once / MIB:.1f} MiB. Accumulation does no operation twice, but its kernels work on "
    "smaller pieces, which a GPU likes less. They go together: "
    f"{table[4, True][0] / MIB:.1f} MiB with both."
)

# %% [markdown] name="compile"
# ## torch.compile
#
# The compiler sees the whole step and has an opinion of its own on what to keep. A plan goes
# through it: the compiler then runs the plan's segments again. Two things to know:
#
# - Decide the plan before. One training forward does it.
# - Compiled kernels may round differently with a plan and without. The backend `"aot_eager"`, which
#   takes the graph apart and runs torch's own kernels, gives the same bits. It is also the quick
#   one, so we use it here. On a GPU leave `backend` out.
#
# `zoo.track` looks into every operation, which the compiler does not allow. So here the bytes are
# those that the allocator hands out during the step, gradients included.

# %% name="compiled"
torch.manual_seed(0)
short = zoo.vit_tiny_patch16(depth=3, width=96, image_size=160, classes=10).to(device)
crops = torch.rand(8, 3, 160, 160, device=device)


def gradients_of(function):
    """Returns the gradients of the short model by one step of a function."""
    short.zero_grad(set_to_none=True)
    function(crops).square().mean().backward()
    return [parameter.grad.clone() for parameter in short.parameters()]


wanted = gradients_of(short)
for option in (False, True):
    zoo.checkpoint(short, option)
    short(crops)  # decides the plan
    start = time.perf_counter()
    compiled = torch.compile(short, backend="aot_eager", fullgraph=True)
    same = all(map(torch.equal, gradients_of(compiled), wanted))
    seconds = time.perf_counter() - start
    with spending(device) as spent:
        gradients_of(compiled)
    print(f"checkpoint={option!s:5} {spent.peak / MIB:6.1f} MiB   same bits as eager: {same}   "
          f"compiled in {seconds:.0f} s")  # fmt: skip

# %% [markdown] name="gpu"
# ## On a GPU
#
# There the kernel is a "flash" kernel, and memory is what torch's caching allocator hands out. The
# same question again: 4,096 tokens, six layers, bfloat16.

# %% name="on-gpu"
if device == "cuda":
    for name, model in candidates.items():
        size = activation_peak(model, torch.rand(1, 4096, WIDTH, device=device), amp=True)
        print(f"{name:24} {size / MIB:8.1f} MiB")
else:
    print("skipped: this computer has no GPU that torch can use")

# %% [markdown] name="remember"
# ## What to remember
#
# > - Use `scaled_dot_product_attention`. It turns the square of the length into the length itself,
# >   in every layer. Checkpointing alone cannot do that.
# > - After that the **perceptron** holds most of the memory, and not attention.
# > - bfloat16 saves less than half of the activations. With checkpointing it saves more than either
# >   does alone.
# > - Accumulation and checkpointing both make the peak smaller and go together. Accumulation
# >   changes the rounding; checkpointing changes no bit.
# > - Under `torch.compile`, decide the plan before you compile.

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
# sizes = [activation_peak(kind().to(device), some) for kind in (Kernel, Causal)]
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
# The scores: one number per token and word. They are larger than all blocks together. That is why
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
# **3.** Switch dropout on. Are the gradients with `checkpoint=True` still those of keeping
# everything?
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
