# %% [markdown] name="question"
# # 1. Where does the memory go?
#
# You start to train a network. Its weights are small, the GPU is large, and still it says *out of
# memory*. So what fills it?
#
# In this notebook we train a small ResNet for a single step and watch every byte. You guess first,
# then you measure, then you look.

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
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import zoo
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en")
device = "cuda" if torch.cuda.is_available() else "cpu"
photographs = torch.stack([torch.tensor(image) for image in load_sample_images().images])
crops = photographs.unfold(1, 128, 99).unfold(2, 128, 170).flatten(0, 2).float() / 255
images = ((crops - crops.mean()) / crops.std()).to(device)

# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# One training step of a ResNet-110 on 32 small photographs with AdamW, twice: as always, which we
# call the *baseline*, and with **activation checkpointing**, also called gradient checkpointing. It
# takes one word, `checkpoint=True`.
#
# The photographs are crops of the two that ship with scikit-learn, four rows of four from each. The
# loss asks for the photograph and the row of a crop.

# %% name="payoff"
targets = torch.arange(32, device=device) // 4  # of each crop the photograph and the row


def loss_of(logits):
    return F.cross_entropy(logits, targets)


deep, small = zoo.resnet110(classes=8).to(device), F.avg_pool2d(images, 2)
two = zoo.anatomy(deep, small, loss=loss_of, checkpoint=True)
always, saving = two.baseline, two.planned
say(
    f"At the peak of the step: **{format_bytes(always.peak)}** for the baseline, "
    f"**{format_bytes(saving.peak)}** with `checkpoint=True`, which is "
    f"{saving.peak / always.peak:.0%} of it."
)
notebook.chart("Memory over a training step of ResNet-110", two)

# %% [markdown] name="same-bits"
# And what is trained? `zoo.verify` trains the network both ways on eight of the photographs and
# compares every bit: outputs, gradients, weights, running statistics, random states.

# %% name="verify"
print(zoo.verify(deep, small[:8], checkpoint=True, steps=1))

# %% [markdown] name="setting"
# By the end of this notebook you will know what the two curves are made of, and why the lower one
# can be lower.
#
# ## The step that we will watch
#
# A network with fewer layers and larger photographs is easier to look into: the baseline of a
# ResNet-18. Here are some of its photographs.

# %% name="step"
model = zoo.resnet18(classes=8).to(device)
baseline = zoo.anatomy(model, images, loss=loss_of).baseline
shown = {f"class {targets[n]}": crops[n].movedim(0, 2) for n in range(0, 32, 5)}
notebook.pictures([shown])

# %% name="weights"
weights = sum(parameter.nbytes for parameter in model.parameters())
count = sum(parameter.numel() for parameter in model.parameters())
say(
    f"{count:,} weights of 4 bytes each are **{format_bytes(weights)}**; "
    f"the batch is {format_bytes(images.nbytes)}."
)

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# The weights are there. Each of them gets a gradient of the same size. AdamW keeps two more numbers
# for each. That makes four.
#
# So how much of the peak is *not* weights, gradients or AdamW's numbers? Nothing? A tenth? Most of
# it? Write your guess into the next cell, and only then run the one after it.

# %% name="guess"
guess = 0.2  # of the peak: change it

# %% name="measure"
say(
    f"You said {guess:.0%}. Four times the weights are {format_bytes(4 * weights)}, the peak is "
    f"{format_bytes(baseline.peak)}: the activations alone are "
    f"**{baseline.by('category')['saved activations'] / baseline.peak:.0%}** of it."
)

# %% [markdown] name="over-time"
# ## Memory over time
#
# `zoo.anatomy` has noted every tensor that was born and every one that died. Here they are, from
# the first operation of the forward to the last of the optimizer. Gray is what is there all the
# time.

# %% name="timeline"
notebook.chart("The baseline, by category", baseline)

# %% [markdown] name="read-the-picture"
# Read it from left to right.
#
# 1. **Forward.** The blue staircase climbs. Each layer leaves something behind, and nobody takes it
#    away.
# 2. **The turn.** The forward is over and the loss is known. The staircase is as high as it gets;
#    the first gradients come on top of it.
# 3. **Backward.** From the last layer to the first, each layer takes what it left and turns it into
#    gradients. Blue goes down, purple comes up.
# 4. **Optimizer.** No blue is left. AdamW only works on gray and purple. Then the gradients go,
#    too.
#
# The blue part is called *activations*: results of the forward that the backward will need. They
# are the largest part of the peak.

# %% name="anatomy"
at_peak = sorted(baseline.by("category").items(), key=lambda row: -row[1])
table(
    ["at the peak", "bytes", "share"],
    *([notebook.translated(name), f"{n:,}", f"{n / baseline.peak:.1%}"] for name, n in at_peak),
)

# %% [markdown] name="blocks-question"
# ## Which layers?
#
# Guess again: are the layers with the most weights also those with the most activations?

# %% name="blocks"
MIB = 2**20
resident = baseline.blocks(resident=True)
held, saved = {}, {}
for allocation in baseline.allocations:
    name = allocation.block
    if allocation.category == "saved activations" and name in resident:
        saved[name] = saved.get(name, 0) + allocation.bytes / MIB
        held[name] = resident[name] / MIB
panels = {"weights, gradients, AdamW (MiB)": held, "activations saved in the forward (MiB)": saved}
notebook.bars("", panels)

# %% [markdown] name="blocks-answer"
# It is the other way round. The first layers see large images and have few channels: few weights,
# many activations. The last ones see tiny images with many channels: many weights, few activations.
#
# Keep this in mind when somebody says that a network is small because it has few parameters.

# %% [markdown] name="why-kept"
# ## Why is it kept at all?
#
# The derivative of *y = w · x* with respect to *w* is *x*. So whoever wants the gradient of a
# weight needs the input that it was multiplied with. That input was made in the forward and is
# needed in the backward, and in between it waits.
#
# PyTorch lets us watch what an operation puts aside. Before you run the cell: which of these keeps
# the most? Which keeps nothing?


# %% name="saved-tensors"
def saved_by(operation, inputs):
    """Lists what an operation saves for its backward, of what is as long as its input."""
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = operation(inputs)
    named = {t.untyped_storage().data_ptr(): n for n, t in (("x", inputs), ("y", output))}
    large = {key: t for key, t in found.items() if t.numel() >= inputs.numel()}
    return {named.get(key, f"{t.dtype}"): t.nbytes / inputs.nbytes for key, t in large.items()}


# %% name="operations"
features = torch.randn(8, 64, 32, 32, device=device, requires_grad=True)
operations = {
    "convolution": torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).to(device),
    "batch norm": torch.nn.BatchNorm2d(64).to(device),
    **{"ReLU": F.relu, "GELU": F.gelu, "x + 1": lambda inputs: inputs + 1.0},
    **{"dropout": torch.nn.Dropout(0.1), "max pooling": torch.nn.MaxPool2d(3, 1, padding=1)},
}
found = {name: saved_by(operation, features) for name, operation in operations.items()}
table(
    ["y = operation(x)", "saves, times the bytes of x", "that is"],
    *([name, f"{sum(t.values()):.2f}", ", ".join(t) or "nothing"] for name, t in found.items()),
)

# %% [markdown] name="why-kept-answer"
# A convolution keeps its input. A batch norm keeps *its* input, which is the convolution's output.
# A ReLU keeps its output, which the next convolution would have kept anyway. So the chain
# convolution, batch norm, ReLU keeps two images per round, not three.
#
# Max pooling is a surprise: beside its input it notes for each output which pixel won, as a number
# of eight bytes. An addition keeps nothing: its derivative is one.

# %% [markdown] name="without-gradients"
# ## And without gradients?
#
# The same forward, but nobody will ask for gradients. Guess the number of activations first.

# %% name="evaluation"
with zoo.track(model, inputs=images) as evaluation, torch.no_grad():
    model(images)
table(
    ["", "training step", "forward under `no_grad`"],
    ["activations, at most", *(format_bytes(t.activation_peak) for t in (baseline, evaluation))],
)

# %% [markdown] name="without-gradients-answer"
# Now each layer's result dies as soon as the next layer has read it. A network can be evaluated on
# far larger images than it can be trained on. Only the waiting costs.

# %% [markdown] name="batch-question"
# ## Twice the batch
#
# Last guess: when the batch doubles, does the memory double?
#
# To find out we need no large machine. `zoo.anatomy` takes a step apart on *meta* tensors, which
# have a shape and no memory. Nothing is computed.

# %% name="batch"
SIZES = [8, 16, 32, 64, 128]
shapes = [torch.empty(size, 3, 128, 128, device="meta") for size in SIZES]
anatomies = [zoo.anatomy(zoo.resnet18(classes=8), shape).baseline for shape in shapes]

# %% name="batch-growth"
grown = {
    "peak of the step": [anatomy.peak / MIB for anatomy in anatomies],
    "activations": [anatomy.activation_peak / MIB for anatomy in anatomies],
}
four = {"weights, gradients, AdamW": 4 * weights / MIB}
notebook.curves(
    "A training step of ResNet-18 at 128 × 128 (MiB)",
    "images in a batch",
    SIZES,
    grown,
    levels=four,
)

# %% name="batch-words"
ratios = [sizes[-1] / sizes[-2] for sizes in grown.values()]
say(
    f"From {SIZES[-2]} to {SIZES[-1]} images the peak grows ×{ratios[0]:.2f}, the activations "
    f"×{ratios[1]:.2f}. The weights do not care."
)

# %% [markdown] name="batch-answer"
# So the larger the batch or the image, the more the activations decide, and buying memory for
# weights is not what helps.

# %% [markdown] name="way-out"
# ## A way out
#
# Activations are special. Unlike weights they can be *made again*: the input of the network is
# still there, and so are the weights. We may throw an activation away in the forward and
# **recompute** it when the backward asks for it.
#
# Here is a network of six layers, drawn moment by moment, from left to right. ▸ runs a layer in the
# forward, ◂ in the backward. Blue is an input that waits for the backward. On the right, the inputs
# of layers 1 and 2 do not wait: they are recomputed, in orange, shortly before they are needed.

# %% name="drawn"
notebook.stepwise(
    {
        "baseline": zoo.Plan.keep_all(6),
        "layers 0 to 2 recomputed": zoo.Plan(((0, 1, 2), 3, 4, 5)),
    }
)

# %% [markdown] name="way-out-answer"
# Fewer are held at once, and some layers run twice: memory for time. Back to the two curves of the
# ResNet, at the top. When the forward ends, what waits in each? And what makes the peak of the
# lower one?

# %% name="waiting"
waiting = []
for timeline in (always, saving):
    turn = next(mark.point for mark in timeline.phases if mark.phase == "backward")
    waiting.append(format_bytes(timeline.by("category", turn)["saved activations"]))
largest = ", ".join(f"`{part.block}`" for part in saving.holders(4))
where = notebook.translated(saving.phase_at(saving.peak_point))
say(
    f"At the end of the forward {waiting[0]} of activations wait in the baseline, "
    f"**{waiting[1]}** with checkpointing: the curve still climbs, but less. Its peak of "
    f"{format_bytes(saving.peak)} is in the {where}; the largest tensors then are "
    f"those of {largest}."
)

# %% [markdown] name="waiting-answer"
# The shaded stripes of the first picture are the recomputations: one stretch of layers after the
# other is recomputed, used and forgotten. Each makes a tooth of the lower curve, and the high ones
# are equally high: the plan divides the network so that no stretch stands out. No choice of what to
# recompute gets around them: to go back through a stretch, its activations must be there, and so
# must the inputs of all stretches before it. What fits below the teeth anyway is kept.
#
# What this costs in time, and how to pay less, is the next notebook.

# %% name="on-a-gpu"
if device == "cuda":
    say(f"The GPU's allocator reserved {format_bytes(baseline.reserved_peak)} for the baseline.")
else:
    say(
        "Skipped, as there is no GPU here. It would show how much memory the GPU's allocator "
        "reserved for the baseline, to be compared with the sum of the tensors above."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - A training step holds weights, gradients and the optimizer's state, **and** the activations
# >   that wait for the backward. Usually these are the largest part.
# > - They pile up in the forward; the peak is near the turn.
# > - They grow with batch and image size. Weights do not.
# > - Early layers of a convolutional network hold most activations, late ones most weights.
# > - Without gradients nothing has to wait.
# > - An activation can be recomputed. A weight cannot.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** Replace AdamW by plain SGD without momentum. Which part of the picture goes away? Does the
# step then fit in half the memory?
#
# <details><summary>Answer</summary>
#
# Only the optimizer's state goes away, two copies of the weights. The activations stay as they are,
# and they are the larger part.
#
# ```python
# shape = torch.empty(32, 3, 128, 128, device="meta")
# sgd = zoo.anatomy(zoo.resnet18(classes=8), shape, optimizer=torch.optim.SGD).baseline
# print(format_bytes(sgd.peak), sgd.by("category").get("optimizer state", 0))
# assert baseline.peak / 2 < sgd.peak < baseline.peak
# ```
#
# </details>
#
# **2.** Images twice as wide and twice as high: by how much do the activations grow? And the
# weights?
#
# <details><summary>Answer</summary>
#
# Four times as many pixels, so four times the activations. The weights stay: a convolution's kernel
# does not know how large the image is.
#
# ```python
# wide = zoo.anatomy(zoo.resnet18(classes=8), torch.empty(32, 3, 256, 256, device="meta")).baseline
# ratio = wide.activation_peak / anatomies[2].activation_peak
# print(f"×{ratio:.2f}")
# assert 3.5 < ratio < 4.5
# ```
#
# </details>
#
# **3.** Freeze all weights but those of the last layer. What happens to the blue staircase, and
# why?
#
# <details><summary>Answer</summary>
#
# It almost disappears. No gradient has to pass through the frozen layers, so they keep nothing.
# This is why training only a new head is so cheap.
#
# ```python
# frozen = zoo.resnet18(classes=8).requires_grad_(False)
# frozen.fc.requires_grad_(True)
# head = zoo.anatomy(frozen, torch.empty(32, 3, 128, 128, device="meta")).baseline
# print(format_bytes(head.activation_peak))
# assert head.by("category").get("saved activations", 0) < baseline.activation_peak / 20
# ```
#
# </details>
#
# **Next:** [2. Trading compute for memory](02_trading_compute.ipynb)
