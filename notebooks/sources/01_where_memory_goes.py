# %% [markdown] name="question"
# # 1. Where does the memory go?
#
# You start to train a network. Its weights are small, the GPU is large, and still it says *out of
# memory*. So what fills it?
#
# In this notebook we train a small ResNet for a single step and watch every byte. You guess first,
# then you measure, then you look.

# %% name="install"
# on Colab this installs what the notebook needs; anywhere else it does nothing
import subprocess
import sys

if "google.colab" in sys.modules:
    wanted = "zoo-checkpoint[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %% name="versions"
import platform

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Image, Markdown, display
from torch import nn

import zoo
from zoo.units import format_bytes

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")

# %% name="drawing"
BLUE, LIGHT_BLUE, ORANGE, PURPLE, GRAY, DARK = (
    "#1f6feb", "#8ec5ff", "#e8912d", "#c39bd3", "#b8bec8", "#57606a",
)  # fmt: skip
MIB = 1024**2
plt.rcParams |= {
    "figure.dpi": 110, "figure.constrained_layout.use": True, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e6e8eb", "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False,
}  # fmt: skip


def table(head, *rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


# %% [markdown] name="setting"
# ## The step that we will watch
#
# A ResNet-18, a batch of real photographs (crops of the two that ship with scikit-learn), and
# AdamW. The loss asks from which photograph, and from which quarter of it, a crop was cut.

# %% name="photographs"
from zoo.harness.config import ModelConfig
from zoo.harness.data import batches

crops = ModelConfig(
    name="resnet18", data="photographs", batch_size=32, size=128, arguments={"classes": 8}
)
batch = batches(crops, count=1, seed=0)[0].to(device)
images, labels = batch.inputs, batch.targets

figure, places = plt.subplots(1, 6, figsize=(9, 1.7), dpi=75)
for place, image, label in zip(places, images, labels, strict=False):
    shades = image.cpu().permute(1, 2, 0)
    place.imshow((shades - shades.min()) / (shades.max() - shades.min()))
    place.set_title(f"class {label}", fontsize=9, fontweight="normal")
    place.axis("off")

# %% name="model"
torch.manual_seed(0)
model = zoo.resnet18(classes=8).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def training_step():
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


training_step()  # the first step makes AdamW's state; the ones after it are all alike

weights = sum(parameter.nbytes for parameter in model.parameters())
count = sum(parameter.numel() for parameter in model.parameters())
print(f"{count:,} weights of 4 bytes each: {format_bytes(weights)}")
print(f"the batch: {format_bytes(images.nbytes)}")

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# The weights are there. Each of them gets a gradient of the same size. AdamW keeps two more numbers
# for each. That makes four.
#
# So how large is the whole step at its peak, counted in copies of the weights? Four? A little more?
# Much more? Write your guess into the next cell, and only then run the one after it.

# %% name="guess"
guess = 4.5  # times the bytes of the weights: change it

# %% name="measure"
with zoo.track(model, optimizer=optimizer, inputs=(images, labels)) as timeline:
    training_step()

table(
    ["", "peak of the step", "in copies of the weights"],
    ["your guess", format_bytes(int(guess * weights)), f"{guess:.1f}"],
    ["measured", format_bytes(timeline.peak), f"{timeline.peak / weights:.1f}"],
)

# %% [markdown] name="over-time"
# ## Memory over time
#
# `zoo.track` has noted every tensor that was born and every one that died. Here they are, from the
# first operation of the forward to the last of the optimizer. Gray is what is there all the time.

# %% name="timeline"
timeline.plot("step.png")
display(Image("step.png", width=900))

# %% [markdown] name="read-the-picture"
# Read it from left to right.
#
# 1. **Forward.** The blue staircase climbs. Each layer leaves something behind, and nobody takes it
#    away.
# 2. **The turn.** The forward is over, the loss is known, and the staircase is as high as it gets.
# 3. **Backward.** From the last layer to the first, each layer takes what it left and turns it into
#    gradients. Blue goes down, purple comes up.
# 4. **Optimizer.** No blue is left. AdamW only works on gray and purple. Then the gradients go,
#    too.
#
# The blue part is called *activations*: results of the forward that the backward will need. It is
# what the peak is made of.

# %% name="anatomy"
at_peak = timeline.by("category")
rows = sorted(at_peak.items(), key=lambda row: -row[1])
table(
    ["at the peak", "bytes", "share"],
    *([name, f"{size:,}", f"{size / timeline.peak:.1%}"] for name, size in rows if size > 1000),
    ["**all**", f"**{timeline.peak:,}**", ""],
)

# %% [markdown] name="blocks-question"
# ## Which layers?
#
# Guess again: are the layers with the most weights also those with the most activations?

# %% name="blocks"
held, kept = timeline.blocks(resident=True), {}
for allocation in timeline.allocations:
    if allocation.category == "saved activations":
        kept[allocation.block] = kept.get(allocation.block, 0) + allocation.bytes
names = [name for name in kept if "." in name or name in ("conv1", "normalize", "maxpool")]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
left.barh(names, [held.get(name, 0) / MIB for name in names], color=GRAY)
left.set_title("weights, gradients, AdamW (MiB)")
left.invert_yaxis()
right.barh(names, [kept[name] / MIB for name in names], color=BLUE)
right.set_title("activations kept in the forward (MiB)")
for part in (left, right):
    part.grid(visible=False, axis="y")
    part.tick_params(axis="y", length=0)

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
def keeps(operation, inputs):
    """What the operation puts aside for its backward: the parts that are as long as the input."""
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = operation(inputs)
    whose = {inputs.untyped_storage().data_ptr(): "input"}
    whose |= {output.untyped_storage().data_ptr(): "output"}
    large = {
        whose.get(key, f"another, {tensor.dtype}"): tensor
        for key, tensor in found.items()
        if tensor.numel() >= inputs.numel()
    }
    return sum(tensor.nbytes for tensor in large.values()), ", ".join(large) or "nothing"


features = torch.randn(8, 64, 32, 32, device=device, requires_grad=True)
operations = {
    "convolution": nn.Conv2d(64, 64, 3, padding=1, bias=False).to(device),
    "batch norm": nn.BatchNorm2d(64).to(device),
    "ReLU": F.relu,
    "GELU": F.gelu,
    "addition": lambda inputs: inputs + 1.0,
    "dropout": nn.Dropout(0.1),
    "max pooling": nn.MaxPool2d(3, 1, padding=1),
}
found = {name: keeps(operation, features) for name, operation in operations.items()}
table(
    ["operation", "keeps, times the bytes of its input", "that is"],
    *([name, f"{size / features.nbytes:.2f}", what] for name, (size, what) in found.items()),
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
with zoo.track(model, optimizer=optimizer, inputs=(images, labels)) as plain, torch.no_grad():
    model(images)

table(
    ["", "training step", "forward under `no_grad`"],
    ["activations, at most", *(format_bytes(t.activation_peak) for t in (timeline, plain))],
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
sizes = [8, 16, 32, 64, 128]
anatomies = [
    zoo.anatomy(zoo.resnet18(classes=8), torch.empty(size, 3, 128, 128, device="meta")).baseline
    for size in sizes
]
activations = [a.activation_peak / MIB for a in anatomies]
peaks = [a.peak / MIB for a in anatomies]

figure, axes = plt.subplots(figsize=(9, 3.4))
axes.plot(sizes, peaks, "o-", color=DARK, label="peak of the step")
axes.plot(sizes, activations, "o-", color=BLUE, label="activations")
axes.axhline(4 * weights / MIB, color=GRAY, ls="--")
axes.text(sizes[-1], 4 * weights / MIB + 20, "weights, gradients, AdamW", ha="right", color=DARK)
axes.set_title("A training step of ResNet-18 at 128 × 128 (MiB)")
axes.set_xlabel("images in a batch")
axes.set_xticks(sizes)
axes.set_xlim(0)
axes.set_ylim(0)
axes.legend(loc="upper left")
print(f"from {sizes[-2]} to {sizes[-1]} images the peak grows ×{peaks[-1] / peaks[-2]:.2f}")

# %% [markdown] name="batch-answer"
# Activations double. The weights do not care. So the larger the batch or the image, the more the
# activations decide, and buying memory for weights is not what helps.

# %% [markdown] name="way-out"
# ## A way out
#
# Activations are special. Unlike weights they can be *made again*: the input of the network is
# still there, and so are the weights. We may throw an activation away in the forward and compute it
# a second time when the backward asks for it. That is called **checkpointing**, and one word does
# it here.

# %% name="checkpointed"
zoo.checkpoint(model, True)
training_step()  # the first one decides the plan
with zoo.track(model, optimizer=optimizer, inputs=(images, labels)) as saving:
    training_step()
zoo.uncheckpoint(model)

figure, axes = plt.subplots(figsize=(9, 3.2))
for name, one, color in (("plain", timeline, BLUE), ("checkpointed", saving, ORANGE)):
    total = [size / MIB for size in one.total()]
    share = [point / (len(total) - 1) for point in range(len(total))]
    axes.plot(share, total, color=color, lw=1.4, label=name)
axes.set_title("The same step twice (MiB)")
axes.set_xlabel("from its first operation to its last", color=DARK)
axes.set_xticks([])
axes.set_ylim(0)
axes.legend(loc="upper right")
table(
    ["", "plain", "checkpointed"],
    ["peak", format_bytes(timeline.peak), format_bytes(saving.peak)],
    ["activations", format_bytes(timeline.activation_peak), format_bytes(saving.activation_peak)],
)

# %% [markdown] name="way-out-answer"
# The staircase is gone. The forward now stays low. In the backward there are humps instead: one
# stretch of layers after the other is run again, used and forgotten. The pointed one at the end
# belongs to the first layers, which are the largest, and it decides the peak. What all this costs
# in time, and how to pay less, is the next notebook.

# %% name="on-a-gpu"
if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
    training_step()
    allocated = torch.cuda.max_memory_allocated()
    print(f"the allocator of the GPU says {format_bytes(allocated)}")
else:
    print("skipped: comparing with the allocator of a GPU needs a GPU")

# %% [markdown] name="remember"
# ## What to remember
#
# > - A training step holds weights, gradients and the optimizer's state, **and** the activations
# >   that wait for the backward. Usually these are the largest part.
# > - They pile up in the forward; the peak is near the turn.
# > - They grow with batch and image size. Weights do not.
# > - Early layers of a convolutional network hold most activations, late ones most weights.
# > - Without gradients nothing has to wait.
# > - An activation can be computed again. A weight cannot.

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
# assert timeline.peak / 2 < sgd.peak < timeline.peak
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
# ratio = wide.activation_peak / anatomies[sizes.index(32)].activation_peak
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
# assert head.by("category").get("saved activations", 0) < timeline.activation_peak / 20
# ```
#
# </details>
#
# **Next:** [2. Trading compute for memory](02_trading_compute.ipynb)
