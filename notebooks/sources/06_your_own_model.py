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
import timm
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en", "timm", "transformers")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# A vision transformer of timm, as it is (the *baseline*) and after one line,
# `zoo.checkpoint(model)`. It is the same object, with the same code, parameters and names.

# %% name="payoff"
pixels = torch.rand(8, 3, 224, 224, device=device)
theirs = zoo.checkpoint(timm.create_model("vit_tiny_patch16_224", num_classes=10).to(device))
step = zoo.anatomy(theirs, pixels, optimizer=None)
notebook.chart("Forward and backward of timm's ViT-Ti/16", step)

# %% [markdown] name="yours"
# ## Your own model
#
# Here is one as people write them: convolutions with BatchNorm first, attention afterwards, a
# keyword argument, and a dictionary as its result. It does not inherit from anything of `zoo`.


# %% name="block"
class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(out)))


# %% name="layers"
class Layers(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, classes)


# %% name="model"
class Yours(Layers):
    def forward(self, images, *, labels=None):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        tokens = F.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        for layer in self.attention:
            tokens = layer(tokens)
        logits = self.head(tokens.mean(1))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


# %% name="build"
def yours():
    """Builds the same model each time, with the same weights."""
    torch.manual_seed(0)
    return Yours().to(device)


images = torch.rand(8, 3, 64, 64, device=device)
labels = torch.arange(8, device=device)
batch = {"images": images, "labels": labels}

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
model = zoo.checkpoint(yours())  # the one line; the same object comes back
step = zoo.anatomy(model, batch)  # with AdamW, and once more without the line
before, after = step.baseline, step.planned
notebook.chart("A training step of your own model", step)
say(
    f"You said {guess_share:.0%} and {guess_left:.0%}. Activations are "
    f"**{before.activation_peak / before.peak:.0%}** of the peak, and one line leaves "
    f"**{after.peak / before.peak:.0%}** of it: {format_bytes(after.peak)} of "
    f"{format_bytes(before.peak)}."
)

# %% [markdown] name="how"
# How did it know where to cut? It watched the kernels of the first training forward and wrote them
# down as a row of *steps*. From the next forward on it lets go of what the plan does not keep. Your
# code runs as you wrote it, once; in the backward the kernels are replayed, not your code.
# `zoo.chain_of` shows the steps.

# %% name="chain"
found = zoo.chain_of(yours(), batch)
print(*str(found).splitlines()[:14], "...", sep="\n")

# %% [markdown] name="trust"
# ## Do not trust, verify
#
# Does it train as before? `zoo.verify` trains two copies on the same batches, a baseline and one
# checkpointed, and compares all that training leaves: every weight, gradient, running statistic and
# random number must be the same. Not close: the same.
#
# Before that it trains the baseline against itself, since what is not deterministic would
# otherwise be blamed on checkpointing. Where something differs it names the tensor and the step.
# `zoo.verify(...).check()` raises in that case: put it into your tests.

# %% name="verify"
print(zoo.verify(yours(), batch, steps=2))

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
rows = []
for share in (0.5, 0.9):
    budget = before.peak - int(share * room)
    model = zoo.checkpoint(yours(), memory_budget=budget, optimizer="adamw")
    peak = zoo.anatomy(model, batch).planned.peak
    rows.append([*map(format_bytes, (budget, peak)), f"{peak / budget:.1%}"])
table(["budget", "peak, measured", "of the budget"], *rows)

# %% name="too-small"
try:
    zoo.checkpoint(yours(), memory_budget="4MiB", inputs=batch, optimizer="adamw")
except zoo.BudgetError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown] name="too-small-answer"
# A plan is made from what tensors take and from what the kernels were seen to take when they were
# tried. What a kernel takes at the moment of the step can differ by a little: where the last
# column says more than 100 %, the allocator gave out that much more. Leave a few per cent of room.

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
notebook.chart("What ResNet-50 saves, and what is recomputed", report)
say(
    f"Predicted peak {format_bytes(report.predicted_peak)}, of "
    f"{format_bytes(report.baseline_peak)} for the baseline; "
    f"time ×{report.predicted_time_ratio:.2f}."
)

# %% [markdown] name="largest"
# ## The largest batch
#
# Or the question the other way round: how large a batch fits? Trying until it crashes needs the
# GPU, and an afternoon. `zoo.largest` estimates the sizes instead.
#
# **Predict:** by what factor does the largest batch of a ResNet-18 grow in 8 GiB when it may
# recompute? More or less than the activations shrink?

# %% name="batches"
image = torch.empty(1, 3, 224, 224, device="meta")
plain, auto = (
    zoo.largest(
        zoo.resnet18(), image, memory_budget="8GiB", checkpoint=option, device="a100",
        multiple_of=16, verify=False,
    )
    for option in (False, "auto")
)  # fmt: skip
print(plain, auto, sep="\n")

# %% name="shrink"
few = torch.empty(16, 3, 224, 224, device="meta")  # its kernels run here once: a small batch
parts = zoo.anatomy(zoo.resnet18(), few, checkpoint=True)
shrink = parts.baseline.activation_peak / parts.planned.activation_peak

# %% name="batches-words"
grown = auto.size / plain.size
word = (
    "more than" if grown > 1.03 * shrink else "less than" if grown < shrink / 1.03 else "as much as"
)
say(
    f"The batch grows from {plain.size} to **{auto.size}**, ×{grown:.2f}, at "
    f"×{auto.predicted_time_ratio:.2f} of the time. For one batch, `checkpoint=True` "
    f"makes the activations ×{shrink:.2f} smaller. So the batch grows "
    f"{word} the activations shrink."
)

# %% [markdown] name="libraries"
# ## timm and Hugging Face
#
# Nothing changes: build the model as its library says, hand it to `zoo.checkpoint`. The models here
# are small and have random weights, so that nothing is downloaded.
#
# One rule: switch the library's *own* checkpointing off. Two at once would recompute twice, so
# `zoo` refuses.

# %% name="theirs"
import transformers

sizes = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=256))
convnext = timm.create_model("convnext_atto", num_classes=10)
tokens = torch.randint(500, (8, 64), device=device)
foreign = {
    "timm convnext_atto": (convnext.to(device), {"x": pixels[:4, :, :96, :96].contiguous()}),
    "transformers BERT": (bert.to(device).train(), {"input_ids": tokens, "labels": tokens}),
}

# %% name="theirs-table"
rows = []
for name, (model, inputs) in foreign.items():
    exact = zoo.verify(model, inputs, steps=2).exact
    step = zoo.anatomy(model, inputs, checkpoint=True)
    sizes = [format_bytes(part.activation_peak) for part in (step.baseline, step.planned)]
    rows.append([name, *sizes, exact])
table(["activations, at most", "baseline", "`zoo.checkpoint`", "exact"], *rows)

# %% name="own-switch"
model = timm.create_model("resnet18", num_classes=10)
model.set_grad_checkpointing()
try:
    zoo.checkpoint(model)
except zoo.ArgumentError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown] name="unfollowable"
# Some code goes another way from batch to batch: it reads a number out of a tensor and decides by
# it. A plan holds as long as the kernels are those that it was made for. From the first other one
# each block is a segment, and the next forward that goes the new way has a plan of its own.


# %% name="fallback"
class Decides(Yours):
    """Leaves blocks out where the picture is dark."""

    def forward(self, images, *, labels=None):
        if images.mean().item() < 0.1:
            return {"loss": None, "logits": self.head(self.stem(images).mean((2, 3)))}
        return super().forward(images, labels=labels)


for brightness in (1.0, 0.01):
    steps = str(zoo.chain_of(Decides().to(device), images * brightness)).splitlines()[0]
    print(f"brightness {brightness}: {steps}")

# %% [markdown] name="many"
# ## More than one GPU
#
# - **DistributedDataParallel:** first `zoo.checkpoint(model)`, then
#   `DistributedDataParallel(model)`. Nothing else. `find_unused_parameters=True` works
#   too, as the cell `ready` below shows.
# - **DataParallel:** replicas go by the plans of the model; train one step of the model itself
#   before, or give it a budget.
# - **SyncBatchNorm:** convert first, then checkpoint. What other GPUs sent is kept, so that nobody
#   is asked twice.
# - **FSDP2** (`fully_shard`): inside of a segment and around it. FSDP1 inside of a segment is
#   exact, too, but what it gathered in the forward is kept until the backward: prefer FSDP2, whose
#   weights are freed and gathered again.
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
# The recomputation was not the forward: here a layer drops tokens, and asks Python's `random` how
# many. torch saves its own random state and not Python's, so that the recomputation drops another
# number.

# %% name="trouble-setup"
import random
import textwrap
import warnings

from torch import distributed
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch


def first_line(error):
    """Prints the beginning of an error."""
    print(textwrap.shorten(f"{type(error).__name__}: {error}", 150))


# %% name="metadata"
class DropsTokens(nn.Linear):
    """Keeps so many tokens as a die says."""

    def forward(self, tokens):
        return super().forward(tokens[:, : random.randint(2, 64)]).relu()


layer, some = DropsTokens(8, 8), torch.rand(2, 64, 8, requires_grad=True)
random.seed(0)
try:
    checkpoint_of_torch(layer, some, use_reentrant=False).sum().backward()
except torch.utils.checkpoint.CheckpointError as error:
    first_line(error)

# %% name="metadata-zoo"
found = []
for how in (lambda layer, x: layer(x), zoo.recompute):
    random.seed(0)
    some.grad = None
    how(layer, some).sum().backward()
    found.append(some.grad)
say(f"`zoo.recompute` gives the gradient of the baseline, bit for bit: {torch.equal(*found)}.")

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


# %% name="tower"
class Tower(nn.Module):
    """Two layers, the second checkpointed by a function of your choice, and one that rests."""

    def __init__(self, how):
        super().__init__()
        self.below, self.above, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.how = how

    def forward(self, x):
        return self.how(self.above, self.below(x))


def reentrant(function, x):
    return checkpoint_of_torch(function, x, use_reentrant=True)


# %% name="ready"
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for how in (reentrant, zoo.recompute):
    parallel = nn.parallel.DistributedDataParallel(Tower(how), find_unused_parameters=True)
    try:
        parallel(torch.rand(2, 8)).sum().backward()
        print(f"{how.__name__}: {sum(p.grad is not None for p in parallel.parameters())} gradients")
    except RuntimeError as error:
        first_line(error)
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
    out = reentrant(first, torch.rand(2, 8))
print(*(f"{w.category.__name__}: {w.message}" for w in heard), sep="\n")
zoo.recompute(first, torch.rand(2, 8)).sum().backward()
rows = [["reentrant", out.requires_grad], ["`zoo.recompute`", first.weight.grad is not None]]
table(["is there a gradient?", ""], *rows)

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
    return {"logits": first(x)}


for how in (reentrant, zoo.recompute):
    try:
        found = how(as_dict, torch.rand(2, 8, requires_grad=True))
        print(f"{how.__name__}: requires_grad={found['logits'].requires_grad}")
    except TypeError as error:
        first_line(error)

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
ways = {
    "baseline": lambda f, x: f(x),
    "torch.utils.checkpoint": lambda f, x: checkpoint_of_torch(f, x, use_reentrant=False),
    "zoo.recompute": zoo.recompute,
}
counts = {name: nn.BatchNorm1d(8) for name in ways}
for name, norm in counts.items():
    ways[name](nn.Sequential(norm, nn.Linear(8, 8)), torch.rand(4, 8)).sum().backward()
rows = [[name, norm.num_batches_tracked.item()] for name, norm in counts.items()]
table(["", "batches counted"], *rows)

# %% [markdown] name="gpu"
# ## On a GPU
#
# There `memory_budget="device"` stands for what is free at this moment.

# %% name="on-gpu"
if device == "cuda":
    model = zoo.checkpoint(yours(), memory_budget="device", optimizer="adamw")
    peak = zoo.anatomy(model, batch).planned.peak
    say(f"The peak within what is free on the GPU: {format_bytes(peak)}.")
else:
    say(
        "Skipped, as there is no GPU here. It would show the peak of the step when the budget is "
        "all that is free on the GPU."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - One line for any module: `zoo.checkpoint(model)`. It replaces `forward` and nothing else.
# > - A budget is for the **whole step**: `zoo.checkpoint(model, memory_budget="2GiB")`. One that no
# >   plan keeps is an error that names the least possible.
# > - Ask before you train: `zoo.plan`, `zoo.largest`, `zoo.anatomy` take meta tensors.
# > - Write the test: `zoo.verify(model, inputs).check()`.
# > - Without `zoo`: `use_reentrant=False`, always. And look at your BatchNorms.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** A layer counts its calls: `self.calls += 1` in its forward. What does the counter say after
# one training step with `checkpoint_of_torch`, and with `zoo.recompute`?
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
# for how in (lambda f, x: checkpoint_of_torch(f, x, use_reentrant=False), zoo.recompute):
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
# Between the baseline and the least. On a shared GPU others are hurt when you take too much:
# ask by `memory_budget`. On your own the memory is there anyway, and time is what you pay: ask by
# `max_overhead`, and spend what it frees on a larger batch.
#
# ```python
# bounded = zoo.anatomy(zoo.checkpoint(yours(), max_overhead=0.1), batch).planned
# print(f"{format_bytes(bounded.peak)} of {format_bytes(before.peak)}")
# assert bounded.peak < before.peak
# ```
#
# </details>
#
# **3.** `DropsTokens` asks Python's `random`. Let it ask `torch.randint` instead. What happens with
# `checkpoint_of_torch` now, and why?
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
#         return nn.Linear.forward(self, tokens[:, : torch.randint(2, 64, ()).item()]).relu()
#
#
# checkpoint_of_torch(AsksTorch(8, 8), some, use_reentrant=False).sum().backward()
# ```
#
# </details>
#
# **Next:** [7. A Llama within a budget](07_a_llama_in_a_budget.ipynb)
