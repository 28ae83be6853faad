# %% [markdown] name="question"
# # 2. Trading compute for memory
#
# Activations can be thrown away and computed again. But which ones? All of them? Every second one?
# And what does it cost?
#
# We take a ResNet and a DenseNet, try the schemes that people use, and look for the best one. Then
# we ask when *not* to do it, and whether the trained network is still the same.

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
import torch
from torch import nn

import zoo
from zoo.models.densenet import DenseNet
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en", "timm")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# For a small DenseNet, the *frontier*: the least time for each amount of memory. To the left is
# less memory, to the bottom less time. The baseline keeps all and recomputes nothing. The orange
# marks are the schemes that people use; at the end of this notebook you can tell which of them to
# leave.

# %% name="payoff"
torch.manual_seed(0)
densenet = DenseNet(12, (8, 8, 8), classes=10, small_images=True).to(device)
images = torch.rand(8, 3, 32, 32, device=device)
densenet_frontier = zoo.frontier(densenet, images, optimizer=torch.optim.SGD)
notebook.chart("A training step of a DenseNet", densenet_frontier)

# %% [markdown] name="plans"
# ## A plan, drawn
#
# Think of a forward as a row of *steps*: a convolution, a norm, and so on. A *plan* says which
# steps keep what they save for the backward, and which are recomputed. A bracket is a *segment*:
# only what goes into it is kept. When the backward gets there, the segment is recomputed.
#
# Here are nine steps and three plans. The first keeps everything: that is the baseline. The
# second is the famous one of Chen and others (2016): of *n* steps make segments of √n, and keep the
# last one, since the backward begins there. The third has a segment within a segment, so some steps
# run three times.
#
# Each is drawn moment by moment, from left to right. ▸ runs a step in the forward or again, ◂ in
# the backward. Blue is an input that is kept for the backward, orange one that is recomputed.

# %% name="draw"
nested = zoo.Plan((((0, 1, 2), 3, 4), 5, 6, 7, 8))
square_root = zoo.Plan(((0, 1, 2), (3, 4, 5), 6, 7, 8))
plans = {"baseline": zoo.Plan.keep_all(9), "square root": square_root, "nested": nested}
notebook.stepwise(plans)
rows = []
for name, plan in plans.items():
    drawn = notebook.moments(plan)
    rows.append([name, f"`{plan.text()}`", max(len(held) for *_, held in drawn), sum(plan.runs())])
table(["plan", "as text", "inputs held at most", "steps run forward"], *rows)

# %% [markdown] name="why-root"
# Why √n? With *k* segments you keep *k* inputs, and while one segment is recomputed you
# keep its *n / k* results on top. The sum *k + n / k* is least at *k* = √n. Memory falls from *n*
# to 2 √n, and the price is at most one more forward.
#
# A nice rule. But look at what it assumes: *all steps are equally large and equally slow*. You have
# seen in the first notebook that the first layers of a ResNet are far larger than the last.

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# The ResNet-110 for small images, with plain SGD. We try these schemes:
#
# - **sqrt**: segments of equally many steps, as above;
# - **blocks**: each residual block is a segment, as timm does it;
# - **cheap**: keep convolutions, recompute batch norms and ReLUs;
# - **the best plan**: whatever takes least time at a given memory.
#
# A forward is about a third of a training step. So recomputing everything makes a step about a
# third longer. How much memory is left with `blocks`, do you think? And how long does the *best*
# plan take, **at the memory of `blocks`**?

# %% name="guess"
guess_memory = 0.5  # peak of blocks, baseline being 1: change it
guess_time = 1.3  # time of the best plan there, baseline being 1: change it

# %% name="resnet"
torch.manual_seed(0)
resnet = zoo.resnet110().to(device)
images = torch.rand(16, 3, 32, 32, device=device)
resnet_frontier = zoo.frontier(resnet, images, optimizer=torch.optim.SGD)
notebook.chart("A training step of ResNet-110", resnet_frontier)

# %% [markdown] name="frontier-method"
# `zoo.frontier` has counted the bytes of each step without running it, has timed each kind of
# kernel, and has then worked out the best plan for every budget. No training happened yet. Each
# point of the blue line is a plan; nothing lies below the line.


# %% name="compare"
def least_time(frontier, budget):
    """The time of the best plan that keeps to a budget."""
    return min(point.time_ratio for point in frontier.optimal if point.peak <= budget)


# %% name="compare-schemes"
def compare(frontier):
    whole, rows = frontier.baseline.peak, []
    for point in sorted(frontier.schemes, key=lambda point: -point.peak):
        best = least_time(frontier, point.peak)
        rows.append([point.name, format_bytes(point.peak), f"{point.peak / whole:.2f}"])
        rows[-1] += [f"×{time:.2f}" for time in (point.time_ratio, best)]
    head = ["scheme", "peak", "of the baseline", "time", "best plan there"]
    table(head, *rows)


# %% name="resnet-table"
compare(resnet_frontier)
whole = resnet_frontier.baseline.peak
blocks = next(point for point in resnet_frontier.schemes if point.name == "blocks")
best_time = least_time(resnet_frontier, blocks.peak)
say(
    f"Peak of blocks: you said {guess_memory:.2f} of the baseline, "
    f"it is **{blocks.peak / whole:.2f}**. "
    f"Best time there: you said ×{guess_time:.2f}, it is **×{best_time:.2f}**."
)

# %% name="steepness"
rows = []
for share in (0.7, 0.5, 0.3):
    rows.append([f"{share:.0%}", f"×{least_time(resnet_frontier, share * whole):.2f}"])
table(["of the baseline's peak", "least time"], *rows)

# %% [markdown] name="resnet-answer"
# Three things to see.
#
# - Every scheme lies above the blue line. At the same memory there is a plan that is faster.
# - The line is steep on the left and gentle on the right: what is large and quick to compute goes
#   first. The last megabytes are the expensive ones.
# - √n is a poor deal. It counts steps, and steps are not alike.
#
# ## Why are some steps almost free?
#
# A convolution is slow. The batch norm behind it is quick, and its result is just as large. So keep
# the slow one's result and recompute the quick one. Let us count: who holds the bytes, who does the
# work?

# %% name="cheap-and-dear"
from torch.utils.flop_counter import FlopCounterMode

features = torch.rand(8, 256, 24, 24, device=device)
parts = {"convolution": nn.Conv2d(256, 256, 3, padding=1, bias=False).to(device)}
parts |= {"batch norm": nn.BatchNorm2d(256).to(device), "ReLU": nn.ReLU()}
rows = []
for name, part in parts.items():
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rows.append([name, format_bytes(part(features).nbytes)])
    rows[-1].append(f"{counter.get_total_flops():,}")
table(["layer", "bytes of its result", "multiplications and additions in products"], *rows)

# %% [markdown] name="densenet-question"
# ## DenseNet, the hungry one
#
# In a DenseNet each layer reads the results of *all* layers before it, joined into one tensor and
# normalized. Joined anew each time: a block of *n* layers keeps about *n²* pieces, though only *n*
# different ones were made. (Its frontier is the first picture.) The scheme `cheap` keeps only the
# results of convolutions. Guess: is the share of the peak that it leaves larger here than in the
# ResNet, or smaller?

# %% name="densenet"
compare(densenet_frontier)
left = []
for frontier in (resnet_frontier, densenet_frontier):
    cheap = next(point for point in frontier.schemes if point.name == "cheap")
    left.append(cheap.peak / frontier.baseline.peak)
say(f"`cheap` leaves {left[0]:.0%} of the ResNet's peak, **{left[1]:.0%}** here.")

# %% [markdown] name="densenet-answer"
# Smaller: joined and normalized copies are quick to make again, and they are most of what is kept
# here. In the ResNet, results of convolutions are a larger share. To recompute those copies is what
# "memory-efficient DenseNet" means in other libraries, where it is a second version of the model,
# written by hand. Here it falls out of the numbers, and at the same memory the best plans take less
# time (last column).
#
# ## Do the predictions hold?
#
# So far all of this was predicted. Take the best plan at the memory of `blocks`, train with it, and
# measure.


# %% name="measured"
def measured_peak(model, plan):
    zoo.checkpoint(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with zoo.track(model, optimizer=optimizer, inputs=images) as timeline:
        model(images).logsumexp(1).mean().backward()
        optimizer.step()
    model.zero_grad()
    zoo.uncheckpoint(model)
    return timeline.tensor_peak


# %% name="measured-table"
images = torch.rand(8, 3, 32, 32, device=device)
budget = next(point.peak for point in densenet_frontier.schemes if point.name == "blocks")
fitting = [point for point in densenet_frontier.optimal if point.peak <= budget]
best = min(fitting, key=lambda point: point.time_ratio)
chosen = {"baseline": densenet_frontier.baseline, "best at the memory of blocks": best}
rows = []
for name, point in chosen.items():
    rows.append([name, *map(format_bytes, (point.peak, measured_peak(densenet, point.plan)))])
table(["peak of a step, DenseNet", "predicted", "measured"], *rows)

# %% [markdown] name="measured-answer"
# The prediction may be a little above: it also counts what the kernels take for themselves, which
# no tensor shows. A budget must hold, so it is counted in.

# %% [markdown] name="when-not"
# ## When not to use it
#
# **When weights are the memory.** Few images, many weights: there is little to save.
#
# **At the end of the network.** What the last layers keep is used at once, when the backward
# begins. To recompute it at the peak frees nothing.
#
# Guess first: for how many images is it worth it, one, eight or sixty-four? And if only half of the
# network is recomputed, should it be the first half or the second?

# %% name="when-not-numbers"
small, rows = zoo.resnet18(classes=8), []
for count in (1, 8, 64):
    batch = torch.empty(count, 3, 96, 96, device="meta")
    parts = zoo.anatomy(small, batch, checkpoint=True)
    peaks = parts.baseline.peak, parts.planned.peak
    rows.append([f"{count}", *map(format_bytes, peaks), f"{1 - peaks[1] / peaks[0]:.0%}"])
table(["images, ResNet-18 with AdamW", "baseline", "least memory", "saved"], *rows)

# %% name="halves"
steps = range(len(parts.plan.flatten()))
segments = [tuple(steps[first : first + 4]) for first in range(0, len(steps), 4)]
middle = len(segments) // 2
halves = {
    "first half recomputed": zoo.Plan((*segments[:middle], *steps[4 * middle :])),
    "second half recomputed": zoo.Plan((*steps[: 4 * middle], *segments[middle:])),
}
found = {name: zoo.anatomy(small, batch, checkpoint=half) for name, half in halves.items()}
rows = [["baseline", format_bytes(parts.baseline.activation_peak)]]
rows += [[name, format_bytes(part.planned.activation_peak)] for name, part in found.items()]
table(["plan", "activations, at most"], *rows)

# %% [markdown] name="when-not-answer"
# So also ask what you want the memory for. If a larger batch is all you want, adding up the
# gradients of two small batches costs no recomputation. (But batch norm then sees small batches,
# and the result is another one.) And if a step fits, leave checkpointing off: by itself it never
# makes a step faster.

# %% [markdown] name="batch-norm"
# ## Is it still the same network?
#
# A batch norm does two things in the forward: it normalizes, and it moves its running mean a
# little. Run the forward twice and the running mean moves twice. The gradients are right, the loss
# is right, and yet the network that you save is another one: in `eval()` it uses those means.
#
# timm's switch `set_grad_checkpointing` shows it. We train three copies of the same ResNet-18 for
# one step each. How many batches will each have counted?

# %% name="batch-norm-counts"
import timm


def trained(prepare):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=8).to(device)
    prepare(model)
    torch.manual_seed(1)
    model(torch.randn(8, 3, 64, 64, device=device)).logsumexp(1).mean().backward()
    return model


# %% name="batch-norm-table"
baseline, ours = trained(lambda model: None), trained(zoo.checkpoint)
switched = trained(lambda model: model.set_grad_checkpointing())
rows = []
for name, model in {"baseline": baseline, "timm": switched, "zoo.checkpoint": ours}.items():
    norm = model.get_submodule("layer2.0.bn1")
    same = [torch.equal(a, b) for a, b in zip(baseline.buffers(), model.buffers(), strict=True)]
    rows.append([name, int(norm.num_batches_tracked), f"{norm.running_mean[0]:.6f}"])
    rows[-1].append(f"{sum(same)} / {len(same)}")
table(["", "batches counted", "its running mean [0]", "buffers like the baseline's"], *rows)

# %% [markdown] name="batch-norm-answer"
# With the switch, each batch norm inside of the blocks has counted the batch twice. This is not
# timm's own fault: `torch.utils.checkpoint` runs a function again and cannot know what else it
# does. Old tutorials advise to replace the momentum by something like its square root. That repairs
# the mean only if nothing else changes, and not the counter.
#
# Here the layer runs once. What the backward needs again is made by its kernels, which get scratch
# statistics. No momentum to fake.
#
# ## Dropout
#
# The same tutorials say: do not use dropout with checkpointing. The worry is right, the advice is
# not. To recompute with *new* random numbers gives gradients of another network. To recompute with
# the *old* ones is exact. Look at both.

# %% name="dropout"
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(device)


def gradient(run):
    torch.manual_seed(0)
    layers.zero_grad()
    run(torch.ones(4, 64, device=device)).sum().backward()
    return layers[0].weight.grad.clone()


# %% name="dropout-table"
def new_numbers(inputs):
    return checkpoint_of_torch(layers, inputs, use_reentrant=False, preserve_rng_state=False)


def old_numbers(inputs):
    return zoo.recompute(layers, inputs)


ways = {"new random numbers": new_numbers, "`zoo.recompute`": old_numbers}
rows = [[name, int((gradient(run) != gradient(layers)).sum())] for name, run in ways.items()]
table(["", f"gradients that differ, of {layers[0].weight.numel()}"], *rows)

# %% [markdown] name="verify"
# And for a whole network, with batch norm and dropout in every layer? `zoo.verify` trains two
# copies side by side and compares every bit: outputs, gradients, statistics, weights, random state.

# %% name="verified"
dense = DenseNet(12, (3, 3), classes=10, drop_rate=0.2, small_images=True).to(device)
report = zoo.verify(dense, torch.rand(8, 3, 32, 32, device=device), checkpoint=True)
print(report)

# %% name="on-a-gpu"
if device == "cuda":
    for checkpoint in (False, True):
        zoo.checkpoint(resnet, checkpoint)
        torch.cuda.reset_peak_memory_stats()
        resnet(torch.rand(1024, 3, 32, 32, device=device)).logsumexp(1).mean().backward()
        resnet.zero_grad()
        say(f"`checkpoint={checkpoint}`: {format_bytes(torch.cuda.max_memory_allocated())}")
else:
    say(
        "Skipped, as there is no GPU here. It would show the peak of ResNet-110 on the GPU for a "
        "batch of 1,024 images, as the baseline and with the least memory."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - A plan says what is kept and what is recomputed. Rules like √n or "every block" are plans, but
# >   not the best ones.
# > - Throw away what is large and quick to make: batch norms, activations, joined copies. Keep what
# >   is slow: convolutions.
# > - The first megabytes are cheap to save, the last ones are expensive.
# > - Where weights are the memory, and at the end of the network, there is nothing to gain.
# > - Recomputation must leave no trace: not in batch norm's statistics, not in the random numbers.
# >   Check it.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** You may spend a tenth more time. How little memory does the ResNet need then?
#
# <details><summary>Answer</summary>
#
# Read the line at ×1.1, or let Python read it.
#
# ```python
# allowed = [point for point in resnet_frontier.optimal if point.time_ratio <= 1.1]
# least = min(allowed, key=lambda point: point.peak)
# print(f"{format_bytes(least.peak)}, ×{least.time_ratio:.2f}")
# assert least.peak < resnet_frontier.baseline.peak
# ```
#
# `zoo.resnet110(checkpoint="auto", max_overhead=0.1)` does the same by itself.
#
# </details>
#
# **2.** Chen's rule gives 2 √n. Nest it: make segments within segments. For nine equal steps, how
# many run three times in the nested plan above? Write a plan in which some step runs four times.
#
# <details><summary>Answer</summary>
#
# A step runs once more for each bracket around it. Only a bracket at the very end of another one
# costs nothing more: when the outer one is recomputed, nobody behind the inner one waits for
# it, and it can wait for the backward.
#
# ```python
# print(nested.runs())
# assert max(nested.runs()) == 3
# deeper = zoo.Plan(((((0, 1), 2), 3, 4), 5, 6, 7, 8))
# assert max(deeper.runs()) == 4
# assert max(zoo.Plan(((0, 1, (2, 3, 4)), 5, 6, 7, 8)).runs()) == 2
# print(deeper.draw())
# ```
#
# </details>
#
# **3.** In the table of the three ResNet-18, some buffers are alike even with timm's switch. Which,
# and why?
#
# <details><summary>Answer</summary>
#
# Those of the first batch norm. It stands before the blocks, and only the blocks are checkpointed.
#
# ```python
# pairs = zip(baseline.named_buffers(), switched.named_buffers(), strict=True)
# alike = [name for (name, a), (_, b) in pairs if torch.equal(a, b)]
# print(alike)
# assert alike and all(name.startswith("bn1.") for name in alike)
# ```
#
# </details>
#
# **Next:** [3. Long sequences](03_long_sequences.ipynb)
