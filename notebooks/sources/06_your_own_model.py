# %% [markdown] name="question"
# # 6. How do you put your own model on a budget?
#
# Your model was written by you, or comes from timm or Hugging Face. It has dictionaries, keyword
# arguments, loops and branches, and nobody wrote it with memory in mind. You have a GPU with so
# many gigabytes. How do you train it there, and how do you know that nothing else has changed?
#
# The last part is a list of errors that checkpointing is known for, each made to happen, with what
# to do about it. Come here when you meet one.

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
import random
import textwrap
import warnings

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the profiler warns of memory older than itself

import matplotlib.pyplot as plt
import timm
import torch
import transformers
from IPython.display import Markdown
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as plain_checkpoint

import zoo

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"timm {timm.__version__}, transformers {transformers.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")

plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}
BLUE, ORANGE, GRAY = "#1f6fb4", "#d9731a", "#8a8a8a"
MIB = 2**20

# %% [markdown] name="yours"
# ## Your own model
#
# Here is one as people write them: convolutions with BatchNorm first, attention afterwards, a
# keyword argument, and a dictionary as its result. It does not inherit from anything of `zoo`.

# %% name="model"


class Block(nn.Module):
    """Two convolutions with norms beside a shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(out)))


class Yours(nn.Module):
    """Looks at images with convolutions, then lets the places attend to one another."""

    def __init__(self, width=32, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images, *, labels=None):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        tokens = F.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        for layer in self.attention:
            tokens = layer(tokens)
        scores = self.head(tokens.mean(1))
        loss = F.cross_entropy(scores, labels) if labels is not None else None
        return {"loss": loss, "scores": scores}


def yours():
    """Builds the same model each time, with the same weights."""
    torch.manual_seed(0)
    return Yours().to(device)


images = torch.rand(8, 3, 64, 64, device=device)
labels = torch.arange(8, device=device)

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# 1. Parameters, gradients, AdamW's state, activations: which share of the peak of a training step
#    are the activations?
# 2. One line will be added: `zoo.checkpoint(model)`. Which share of the peak is left?

# %% name="guess"
guess_share = 0.5  # of the peak are activations: change it
guess_left = 0.5  # of the peak is left after the one line: change it

# %% name="measure"


def train_step(model, optimizer):
    """Takes one step of training and returns the loss."""
    optimizer.zero_grad()
    loss = model(images, labels=labels)["loss"]
    loss.backward()
    optimizer.step()
    return loss.item()


def measured(model):
    """Trains for two steps and returns the timeline of the second."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)  # the same dropout masks each time
    train_step(model, optimizer)
    with zoo.track(
        model, optimizer=optimizer, inputs=(images, labels), allocator=device == "cpu"
    ) as timeline:
        train_step(model, optimizer)
    return timeline


before = measured(yours())
model = zoo.checkpoint(yours())  # the one line; the same object comes back
after = measured(model)
for name, timeline in (("as it is", before), ("zoo.checkpoint(model)", after)):
    print(f"{name:22} peak {timeline.peak / MIB:6.1f} MiB, "
          f"activations {timeline.activation_peak / MIB:6.1f} MiB")  # fmt: skip
Markdown(
    f"You said {guess_share:.0%} and {guess_left:.0%}. Activations are "
    f"**{before.activation_peak / before.peak:.0%}** of the peak, and one line leaves "
    f"**{after.peak / before.peak:.0%}** of it."
)

# %% name="over-time"


def until_the_optimizer(timeline):
    """Bytes over forward and backward; the optimizer makes many small numbers behind them."""
    end = next(mark.point for mark in timeline.phases if mark.phase == "optimizer")
    return [size / MIB for size in timeline.total()[:end]]


figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for timeline, color, name in ((before, GRAY, "as it is"), (after, ORANGE, "zoo.checkpoint(model)")):
    sizes = until_the_optimizer(timeline)
    axes.fill_between(range(len(sizes)), sizes, color=color, alpha=0.25, linewidth=0)
    axes.plot(sizes, color=color, linewidth=1.2, label=name)
axes.set(xlabel="allocations and frees, one after the other", ylabel="MiB", ylim=0, xlim=0)
axes.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown] name="how"
# How did it know where to cut? It watched the kernels of the first training forward and wrote them
# down as a row of *steps*. From the next forward on it lets go of what the plan does not keep. Your
# code runs as you wrote it, once; in the backward the kernels are replayed, not your code.
# `zoo.chain_of` shows the steps.

# %% name="chain"
found = zoo.chain_of(yours(), {"images": images, "labels": labels})
print(*str(found).splitlines()[:14], "...", sep="\n")

# %% [markdown] name="trust"
# ## Do not trust, verify
#
# Does it train as before? `zoo.verify` trains two copies on the same batches, one plainly and one
# checkpointed, and compares all that training leaves: every weight, gradient, running statistic and
# random number must be the same. Not close: the same.
#
# Before that it trains the plain model against itself, since what is not deterministic would
# otherwise be blamed on checkpointing. Where something differs it names the tensor and the step.
# `zoo.verify(...).check()` raises in that case: put it into your tests.

# %% name="verify"
batch = {"images": images, "labels": labels}
print(textwrap.fill(str(zoo.verify(yours(), batch, steps=2)), 96))

# %% [markdown] name="budget"
# ## A budget
#
# You rarely want the *least* memory. You want your step to *fit*, and to lose no more time than it
# must. Say what you have: `memory_budget="2GiB"`. The budget is for the whole step: parameters,
# gradients, optimizer state, inputs and activations. Our model is small, so are our budgets.
#
# **Predict:** is there a budget that cannot be met? What should the library do then?

# %% name="budgets"
room = before.peak - after.peak
budgets = [before.peak - int(share * room) for share in (0, 0.5, 0.9)]
kept = []
for budget in budgets:
    timeline = measured(zoo.checkpoint(yours(), memory_budget=budget))
    kept.append(timeline.peak)
    print(f"budget {budget / MIB:6.1f} MiB   measured {timeline.peak / MIB:6.1f} MiB   "
          f"{'kept' if timeline.peak <= budget else 'not kept'}")  # fmt: skip

# %% name="too-small"
try:
    zoo.checkpoint(yours(), memory_budget="4MiB", inputs={"images": images, "labels": labels})
except zoo.BudgetError as error:
    print(textwrap.fill(f"{type(error).__name__}: {error}", 96))

# %% [markdown] name="report"
# ## The report
#
# Before you rent a GPU you want to know what you will get. `zoo.plan` says it from shapes alone,
# for a device that is not here. timm's ResNet-50 with a batch of 32 on an A100, in 2 GiB:

# %% name="plan"
report = zoo.plan(
    timm.create_model("resnet50"),
    torch.empty(32, 3, 224, 224, device="meta"),
    memory_budget="2GiB",
    device="a100",
)
Markdown(report.table())

# %% name="plan-picture"
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
report.plot(axes)
plt.show()

# %% [markdown] name="largest"
# ## The largest batch
#
# Or the question the other way round: how large a batch fits? Trying until it crashes needs the
# GPU, and an afternoon. `zoo.largest` looks at sizes on paper.
#
# **Predict:** by what factor does the largest batch of a ResNet-18 grow in 8 GiB when it may run
# things again? More or less than the activations shrink?

# %% name="batches"
batches = {}
for option in (False, "auto"):
    found = zoo.largest(
        zoo.resnet18(), torch.empty(1, 3, 224, 224, device="meta"), memory_budget="8GiB",
        checkpoint=option, device="a100", multiple_of=16, verify=False,
    )  # fmt: skip
    batches[option] = found
    print(textwrap.fill(f"checkpoint={option!r}: {found}", 96))
plain, auto = batches[False], batches["auto"]
Markdown(
    f"The batch grows from {plain.size} to **{auto.size}**, × {auto.size / plain.size:.1f}, at "
    f"× {auto.predicted_time_ratio:.2f} of the time per image."
)

# %% [markdown] name="libraries"
# ## timm and Hugging Face
#
# Nothing changes: build the model as its library says, hand it to `zoo.checkpoint`. The models here
# are small and have random weights, so that nothing is downloaded.
#
# One rule: switch the library's *own* checkpointing off. Two at once would run things three times,
# so `zoo` refuses.

# %% name="theirs"
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=256,
)  # fmt: skip
tokens = torch.randint(500, (8, 64), device=device)
pixels = torch.rand(4, 3, 96, 96, device=device)
theirs = {
    "timm resnet18": (timm.create_model("resnet18", num_classes=10), {"x": pixels}),
    "timm convnext_atto": (timm.create_model("convnext_atto", num_classes=10), {"x": pixels}),
    "transformers BERT": (
        transformers.BertForMaskedLM(config).train(),
        {"input_ids": tokens, "labels": tokens},
    ),
}


def peak_of(model, inputs):
    """Runs forward and backward twice; returns the activation bytes of the second."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with zoo.track(model, inputs=inputs, allocator=device == "cpu") as timeline:
            outputs = model(**inputs)
            loss = outputs.loss if "labels" in inputs else outputs.logsumexp(1).mean()
            loss.backward()
    return timeline.activation_peak


for name, (model, inputs) in theirs.items():
    exact = zoo.verify(model.to(device), inputs, steps=2).exact
    kept, again = peak_of(model, inputs), peak_of(zoo.checkpoint(model), inputs)
    print(f"{name:20} {kept / MIB:6.1f} -> {again / MIB:5.1f} MiB   exact: {exact}")

# %% name="own-switch"
model = timm.create_model("resnet18", num_classes=10)
model.set_grad_checkpointing()
try:
    zoo.checkpoint(model)
except zoo.ArgumentError as error:
    print(textwrap.fill(f"{type(error).__name__}: {error}", 96))

# %% [markdown] name="unfollowable"
# Some code goes another way from batch to batch: it reads a number out of a tensor and decides by
# it. A plan holds as long as the kernels are those that it was made for. From the first other one
# each block is a segment, and the next forward that goes the new way has a plan of its own.

# %% name="fallback"


class Decides(Yours):
    """Leaves blocks out where the picture is dark."""

    def forward(self, images, *, labels=None):
        if images.mean().item() < 0.1:
            return {"loss": None, "scores": self.head(self.stem(images).mean((2, 3)))}
        return super().forward(images, labels=labels)


print(zoo.chain_of(Decides().to(device), images))

# %% [markdown] name="many"
# ## More than one GPU
#
# - **DistributedDataParallel:** first `zoo.checkpoint(model)`, then
#   `DistributedDataParallel(model)`. Nothing else. `find_unused_parameters=True` works
#   too, as the cell `ready` below shows.
# - **SyncBatchNorm:** convert first, then checkpoint. What other GPUs sent is kept, so that nobody
#   is asked twice.
# - **FSDP2** (`fully_shard`): inside of a segment and around it. FSDP1 inside of a segment is
#   refused.
# - A budget is for *one* device: parameters count as they lie there. When they will be spread over
#   many, plan for one of them before: `zoo.plan_rank(model, inputs, world_size=64, ...)`.
# - `checkpoint="auto"` decides once for all processes of a group, so that all have the same plan.

# %% [markdown] name="trouble"
# ## When it goes wrong: errors by their text
#
# All of these come from `torch.utils.checkpoint`, which you may meet in your own code, in a library
# or in a tutorial. Each cell makes one happen, prints its text, and then does the same thing with
# `zoo`.
#
# ### "Recomputed values for the following tensors have different metadata"
#
# The second run was not the first: here a layer drops tokens, and asks Python's `random` how many.
# torch saves its own random state and not Python's, so that the second run drops another number.

# %% name="metadata"


def first_lines(error, count=3):
    """Prints the beginning of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    for line in [f"{type(error).__name__}: {lines[0]}", *lines[1:count]]:
        print(textwrap.shorten(line, 150))


class DropsTokens(nn.Module):
    """Keeps so many tokens as a die says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, tokens):
        return self.layers(tokens[:, : random.randint(2, 64)])


layer, some = DropsTokens(), torch.rand(2, 64, 8, requires_grad=True)
random.seed(0)
try:
    plain_checkpoint(layer, some, use_reentrant=False).sum().backward()
except torch.utils.checkpoint.CheckpointError as error:
    first_lines(error)

random.seed(0)
layer(some).sum().backward()
wanted, some.grad = some.grad, None
random.seed(0)
zoo.recompute(layer, some).sum().backward()
print("\nzoo.recompute gives the plain gradient, bit for bit:", torch.equal(some.grad, wanted))

# %% [markdown] name="metadata-why"
# **What to do without `zoo`:** draw outside of the checkpointed function and pass the number in.
# Other causes of the same text: a counter that the forward raises, a cache that it fills, a switch
# from `train()` to `eval()` before the backward. Be glad of this error. When the shapes happen to
# agree there is none, and the gradient is silently wrong.
#
# ### "Expected to mark a variable ready only once"
#
# The reentrant kind of checkpoint (`use_reentrant=True`) runs a backward inside of the backward. A
# `DistributedDataParallel` that looks for unused parameters sees the inner weights twice. One
# process is enough to show it.

# %% name="ready"


class Tower(nn.Module):
    """Two layers, the second checkpointed by a function of your choice, and one that rests."""

    def __init__(self, checkpointed):
        super().__init__()
        self.below, self.above = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def forward(self, x):
        return self.checkpointed(self.above, self.below(x))


def reentrant(function, x):
    """The old kind of checkpoint."""
    return plain_checkpoint(function, x, use_reentrant=True)


if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for name, how in (("reentrant", reentrant), ("zoo.recompute", zoo.recompute)):
    parallel = nn.parallel.DistributedDataParallel(Tower(how), find_unused_parameters=True)
    try:
        parallel(torch.rand(2, 8)).sum().backward()
        print(
            f"{name}: no error, {sum(p.grad is not None for p in parallel.parameters())} gradients"
        )
    except RuntimeError as error:
        print(f"{name}:")
        first_lines(error, 1)
distributed.destroy_process_group()

# %% [markdown] name="ready-why"
# **What to do without `zoo`:** `use_reentrant=False`.
#
# ### "None of the inputs have requires_grad=True. Gradients will be None"
#
# Again the reentrant kind. It looks at the *inputs* to find out whether a gradient is needed. The
# first block gets the images, which need none, so its weights get none either. It is only a
# warning, so that the block stays as it was drawn at random, and training seems to go well.

# %% name="none"
first = nn.Linear(8, 8)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    out = plain_checkpoint(first, torch.rand(2, 8), use_reentrant=True)
print(*(f"{w.category.__name__}: {w.message}" for w in heard), sep="\n")
print("reentrant: a gradient will come back:", out.requires_grad)
zoo.recompute(first, torch.rand(2, 8)).sum().backward()
print("zoo.recompute: the gradient is there:", first.weight.grad is not None)

# %% [markdown] name="none-why"
# **What to do without `zoo`:** `use_reentrant=False`. The advice to call `requires_grad_()` on the
# images makes the warning go away, and costs a gradient of the images that nobody needs.
#
# ### "expected Variable (got dict)"
#
# The reentrant kind is an `autograd.Function`, which returns tensors or tuples of them. Models of
# Hugging Face return dictionaries. Older versions of torch stop with this text. And newer ones?

# %% name="dict"


def as_dict(x):
    """Returns a dictionary, as many models do."""
    return {"scores": first(x)}


x = torch.rand(2, 8, requires_grad=True)
try:
    found = plain_checkpoint(as_dict, x, use_reentrant=True)
    print("reentrant: no error; a gradient will come back:", found["scores"].requires_grad)
except TypeError as error:
    first_lines(error)
found = zoo.recompute(as_dict, x)
print("zoo.recompute: a gradient will come back:", found["scores"].requires_grad)

# %% [markdown] name="dict-why"
# Where there is no error any more, there is no gradient either: what looked like a repair has made
# it worse.
#
# **What to do without `zoo`:** `use_reentrant=False`.
#
# ### No error at all
#
# The worst kind. BatchNorm counts each batch twice, and its running statistics move twice as far;
# training looks fine and evaluation is off.

# %% name="silent"
images_of_8 = torch.rand(4, 8)
for name, how in (
    ("plain training", lambda f, x: f(x)),
    ("torch.utils.checkpoint", lambda f, x: plain_checkpoint(f, x, use_reentrant=False)),
    ("zoo.recompute", zoo.recompute),
):
    norm = nn.BatchNorm1d(8)
    how(nn.Sequential(norm, nn.Linear(8, 8)), images_of_8).sum().backward()
    print(f"{name:24} batches counted: {norm.num_batches_tracked.item()}")

# %% [markdown] name="gpu"
# ## On a GPU
#
# There `memory_budget="device"` stands for what is free at this moment.

# %% name="on-gpu"
if device == "cuda":
    timeline = measured(zoo.checkpoint(yours(), memory_budget="device"))
    print(f"measured {timeline.peak / MIB:.1f} MiB")
else:
    print("skipped: this computer has no GPU that torch can use")

# %% [markdown] name="remember"
# ## What to remember
#
# > - One line for any module: `zoo.checkpoint(model)`. It replaces `forward` and nothing else.
# > - A budget is for the **whole step**: `zoo.checkpoint(model, memory_budget="2GiB")`. One that no
# >   plan keeps is an error that names the least possible.
# > - Ask on paper first: `zoo.plan`, `zoo.largest`, `zoo.anatomy` take meta tensors.
# > - Write the test: `zoo.verify(model, inputs).check()`.
# > - Without `zoo`: `use_reentrant=False`, always. And look at your BatchNorms.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** A layer counts its calls: `self.calls += 1` in its forward. What does the counter say after
# one training step with `plain_checkpoint`, and with `zoo.recompute`?
#
# <details><summary>Answer</summary>
#
# 2 with torch's own, since the forward ran twice. 1 with `zoo`: the forward ran once, and a replay
# calls kernels alone.
#
# ```python
# class Counts(nn.Linear):
#     calls = 0
#
#     def forward(self, x):
#         self.calls += 1
#         return super().forward(x).relu()
#
#
# calls = []
# for how in (lambda f, x: plain_checkpoint(f, x, use_reentrant=False), zoo.recompute):
#     layer = Counts(8, 8)
#     how(layer, torch.rand(2, 8)).square().sum().backward()
#     calls.append(layer.calls)
# print(calls)
# assert calls == [2, 1]
# ```
#
# </details>
#
# **2.** `max_overhead=0.1` asks for the least memory that costs at most a tenth more time. Where
# does its peak lie? Would you ask this way on a shared GPU, or on your own?
#
# <details><summary>Answer</summary>
#
# Between keeping everything and the least. On a shared GPU others are hurt when you take too much:
# ask by `memory_budget`. On your own the memory is there anyway, and time is what you pay: ask by
# `max_overhead`, and spend what it frees on a larger batch.
#
# ```python
# bounded = measured(zoo.checkpoint(yours(), max_overhead=0.1))
# print(f"{bounded.peak / MIB:.1f} MiB of {before.peak / MIB:.1f} MiB")
# assert bounded.peak < before.peak
# ```
#
# </details>
#
# **3.** `DropsTokens` asks Python's `random`. Let it ask `torch.randint` instead. What happens with
# `plain_checkpoint` now, and why?
#
# <details><summary>Answer</summary>
#
# No error, and the right gradient: torch's own random state is saved before the first run and set
# again for the second. That is all that it saves. Python's `random`, NumPy's, and a
# `torch.Generator` of your own are not in it.
#
# ```python
# class AsksTorch(DropsTokens):
#     def forward(self, tokens):
#         return self.layers(tokens[:, : torch.randint(2, 64, ()).item()])
#
#
# plain_checkpoint(AsksTorch(), some, use_reentrant=False).sum().backward()
# ```
#
# </details>
