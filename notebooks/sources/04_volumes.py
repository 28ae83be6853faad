# %% [markdown] name="question"
# # 4. How large a patch of a volume fits?
#
# A brain scan has millions of voxels. A V-Net that labels each of them keeps dozens of feature
# maps of that size until the backward pass. So people cut the scan into *patches*, and train on
# patches as large as the memory allows.
#
# A larger patch shows the network more of what surrounds a voxel. How much larger can it be when
# some feature maps are recomputed instead of kept? And does that help?
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
import torch

import zoo
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en")
device = "cuda" if torch.cuda.is_available() else "cpu"


def network(checkpoint=False):
    """Builds the same V-Net each time; that of the paper is four times as wide."""
    torch.manual_seed(0)
    sizes = {"classes": 3, "width": 4, "activation": "prelu", "drop_rate": 0.0}
    return zoo.vnet(**sizes, checkpoint=checkpoint).to(device)


# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# Training steps of a V-Net on cubes of three sizes, as they are (the *baseline*) and with
# `checkpoint=True`. Say that a step may take as many bytes as the dashed line says. (Yours will be
# gigabytes. The picture is the same.) Which cube fits?

# %% name="payoff"
BUDGET, SIDES, MIB = 75 * 2**20, (32, 48, 64), 2**20
anatomies = {}
for side in SIDES:
    cube = torch.rand(1, 1, side, side, side, device=device)
    anatomies[side] = zoo.anatomy(network(), cube, checkpoint=True)
peaks = {
    "baseline": [found.baseline.peak / MIB for found in anatomies.values()],
    "checkpoint=True": [found.planned.peak / MIB for found in anatomies.values()],
}
title, line = "Peak of a training step (MiB)", {"budget": BUDGET / MIB}
notebook.curves(title, "side of the cube in voxels", SIDES, peaks, levels=line)

# %% [markdown] name="scan"
# What fits, fits. Whether a larger cube is of any use is another question, and the end of this
# notebook tries it.
#
# ## A brain that is already on your disk
#
# The package nilearn ships an MRI template of the human brain, the *ICBM 152* template of the
# Montreal Neurological Institute. Nothing is downloaded here. Beside the picture itself (T1) it has
# two maps: how likely each voxel is gray matter, and how likely it is white matter.
#
# Be clear about what this is, and what it is not:
#
# - It is real MRI data, but of no single person. It is the **average** of many aligned scans.
# - An average is clean, far cleaner than any scan. So we add **noise**, as a fast scan has it.
# - The labels below are the most likely of three classes: *gray matter*, *white matter*, *other*.
#   They come from the atlas, not from a doctor's pen.
# - There is one brain here. We train on the back of it and test on the front. That shows whether
#   the network learns; it does not show that it would work in a hospital.
# - This template is symmetric: the left half is the right half in a mirror. So the front, and not
#   the left or right half, is what we hold out. The next cell checks that.

# %% name="load"
import importlib.util
from pathlib import Path

import nibabel

folder = Path(importlib.util.find_spec("nilearn").origin).parent / "datasets" / "data"


def volume(kind):
    """Reads one of the three volumes -> (X, Y, Z), numbers from 0 to 1, a voxel per millimeter."""
    image = nibabel.load(folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz")
    return torch.tensor(image.get_fdata(), dtype=torch.float32) / 255


# %% name="template"
template, gray, white = volume("t1"), volume("gm"), volume("wm")
mirrored = torch.equal(template, template.flip(0))
say(f"{tuple(template.shape)}: {template.numel():,} voxels. Left is right in a mirror: {mirrored}.")

# %% name="halve"
from torch.nn import functional as F

# a voxel per 2 mm: eight times fewer, so that this runs on two CPU cores
t1, likely_gray, likely_white = F.avg_pool3d(torch.stack([template, gray, white])[None], 2)[0]
other = (1 - likely_gray - likely_white).clamp(min=0)
labels = torch.stack([other, likely_gray, likely_white]).argmax(0)
inside = t1[t1 > 0.02]
clean = (t1 - inside.mean()) / inside.std()
torch.manual_seed(0)
scan = clean + 0.7 * torch.randn_like(clean)  # in standard deviations of the brain's gray values

# %% name="split"
SPLIT = 78  # the back, below, is for training; the front is for testing
back, back_labels = scan[:, :SPLIT], labels[:, :SPLIT]
# the network halves each axis four times, so that sizes are multiples of 16
front = F.pad(scan[1:97, SPLIT : SPLIT + 32], (1, 1), value=scan.min().item())
front_labels = F.pad(labels[1:97, SPLIT : SPLIT + 32], (1, 1))
say(f"Training on {tuple(back.shape)}, testing on {tuple(front.shape)} voxels of 2 mm.")

# %% name="show"
SHADES = ["#16161d", "#7fa7d1", "#f4efe6"]
lined = scan.clone()
lined[:, SPLIT] = scan.max()
cuts = {"from above": (slice(None), slice(None), 44), "from the side": 49}
rows = {f"the scan, {name}": lined[cut].T for name, cut in cuts.items()}
rows |= {f"its labels, {name}": labels[cut].T for name, cut in cuts.items()}
notebook.pictures([rows], shades=SHADES, height=2.4)

# %% [markdown] name="predict"
# The front lies beyond the white line. Of the labels the bright one is white matter, the blue one
# gray matter.
#
# ## Your guess, before you look
#
# The patch is a cube. You double its side: 32 becomes 64.
#
# 1. By what factor do the *activations* grow? 2, 4, 8 or 16?
# 2. By what factor does the *peak of the whole training step* grow: parameters, gradients,
#    optimizer state and activations? By the same factor, by less, or by more?
#
# Write your guesses into the next cell, and only then run the one after it.

# %% name="guess"
guess_activations = 4  # times as many bytes: change it
guess_step = 4  # and the whole step: change it

# %% name="growth"
table(
    ["side", "activations", "checkpointed", "whole step", "checkpointed, whole step"],
    *(
        [side, *map(format_bytes, (a.baseline.activation_peak, a.planned.activation_peak,
                                   a.baseline.peak, a.planned.peak))]
        for side, a in anatomies.items()
    ),
)  # fmt: skip

# %% name="growth-words"
small, large = anatomies[32].baseline, anatomies[64].baseline
say(
    f"You said ×{guess_activations} and ×{guess_step}. **Twice the side:** activations "
    f"×{large.activation_peak / small.activation_peak:.1f}, the whole step "
    f"×{large.peak / small.peak:.1f}. There are 2³ = {2**3} times as many voxels."
)

# %% [markdown] name="budget"
# The activations grow with the voxels; the weights, their gradients and the optimizer's state do
# not grow at all, so the whole step grows by less. A larger patch moves the peak from what is fixed
# to what checkpointing can cut.

# %% name="fits"
fitting = [
    max(side for side, found in anatomies.items() if part(found).peak <= BUDGET)
    for part in (lambda found: found.baseline, lambda found: found.planned)
]
SMALL, LARGE = fitting
say(
    f"Within {format_bytes(BUDGET)}, **the baseline fits a cube of side {SMALL}, "
    f"`checkpoint=True` one of side {LARGE}**: {LARGE**3 / SMALL**3:.1f} times the voxels."
)

# %% [markdown] name="why"
# Why only this much? Look at a V-Net: it goes down, then up, and each level on the way up joins the
# feature map that the same level had on the way down. These *skips* must wait for the whole time in
# between. No plan can drop them, and at full size they are the largest maps that there are. A
# ResNet has no such long arms.

# %% [markdown] name="check"
# ## Is it the same network?
#
# A larger patch is worth nothing if training is different. `zoo.verify` trains two copies from the
# same state, a baseline and one that is checkpointed, and compares every bit: outputs, loss,
# gradients, weights, running statistics and the state of the random numbers.

# %% name="verify"
print(zoo.verify(network(), back[None, None, :16, :32, :32].to(device), steps=2))

# %% [markdown] name="learn"
# ## Does the larger patch help?
#
# Three trainings, each within the budget, each of the same number of steps:
#
# - the **small** patch, baseline;
# - the **large** patch, with `checkpoint=True`;
# - the small patch again, but as many of them in each step as the large patch has voxels, one after
#   the other, with their gradients added up. It sees about as much of the brain per step as the
#   large patch does, and takes no more memory than the small one. If the large patch is ahead of
#   this one, it is because of what surrounds a voxel, and not because of more voxels.
#
# After some of the steps we look at the front of the brain, which training never sees, and count
# how well prediction and labels overlap. *Dice* is 1 where they are the same and 0 where they do
# not touch.
#
# Beside them stands a rival that learns nothing but two numbers: below the first gray value a voxel
# is "other", above the second it is white matter. On a T1 scan this is not a bad idea. (Without
# our noise it would nearly solve the task: in the average brain gray values tell the tissue. Always
# try the simple thing first.)
#
# **Predict:** which of the three wins? And do they beat the two thresholds?


# %% name="rival"
def dice(found, target):
    """Mean Dice of gray and white matter."""
    both = [2 * ((found == c) & (target == c)).sum() for c in (1, 2)]
    return sum((n / ((found == c).sum() + (target == c).sum())).item()
               for c, n in zip((1, 2), both, strict=True)) / 2  # fmt: skip


def thresholded(image, low, high):
    """Labels voxels by their gray value alone."""
    return (image > low).long() + (image > high).long()


# %% name="rivals"
def rival_of(seen, unseen):
    """Looks for the two thresholds of the largest Dice on the back; returns that on the front."""
    image, target = seen[::2, ::2, ::2], back_labels[::2, ::2, ::2]
    levels = torch.linspace(-3, 3, 25).tolist()
    pairs = [(low, high) for low in levels for high in levels if low < high]
    best = max(pairs, key=lambda pair: dice(thresholded(image, *pair), target))
    return dice(thresholded(unseen, *best), front_labels)


clean_front = F.pad(clean[1:97, SPLIT : SPLIT + 32], (1, 1), value=-3)
rival, easy = rival_of(back, front), rival_of(clean[:, :SPLIT], clean_front)
say(f"Two thresholds: Dice {rival:.2f} on the front; without the noise {easy:.2f}.")


# %% name="loss"
def loss_of(logits, target):
    """Cross entropy and soft Dice, as usual for volumes."""
    found, wanted = logits.softmax(1), F.one_hot(target, 3).movedim(-1, 1)
    both = (found * wanted).sum((0, 2, 3, 4))
    overlap = (2 * both + 1) / (found.sum((0, 2, 3, 4)) + wanted.sum((0, 2, 3, 4)) + 1)
    return F.cross_entropy(logits, target) + 1 - overlap.mean()


@torch.no_grad()
def predicted(model):
    """Labels the front of the brain."""
    return model.eval()(front[None, None].to(device)).argmax(1)[0].cpu()


# %% name="patches"
BRAIN = back_labels.nonzero().tolist()


def patch(side, generator):
    """Cuts a cube around a random voxel of the brain -> (1, 1, D, H, W), (1, D, H, W)."""
    middle = BRAIN[torch.randint(len(BRAIN), (), generator=generator)]
    corner = [min(max(m - side // 2, 0), n - side) for m, n in zip(middle, back.shape, strict=True)]
    box = tuple(slice(start, start + side) for start in corner)
    return back[box][None, None].to(device), back_labels[box][None].to(device)


# %% name="step"
def training_step(model, optimizer, side, patches, generator):
    """Takes one step on so many patches, one after the other; their gradients add up."""
    optimizer.zero_grad()
    for image, target in (patch(side, generator) for _ in range(patches)):
        (loss_of(model.train()(image), target) / patches).backward()
    optimizer.step()


# %% name="train"
STEPS, EVERY = 40, 8


def trained(side, patches, checkpoint):
    """Trains a network; returns it, and the Dice on the front after some of the steps."""
    model, generator = network(checkpoint), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=STEPS)
    curve = [dice(predicted(model), front_labels)]
    for step in range(1, STEPS + 1):
        training_step(model, optimizer, side, patches, generator)
        pace.step()
        curve += [dice(predicted(model), front_labels)] if step % EVERY == 0 else []
    return model, curve


# %% name="trainings"
many = round(LARGE**3 / SMALL**3)
runs = {
    f"side {SMALL}": trained(SMALL, 1, False),
    f"side {LARGE}, checkpointed": trained(LARGE, 1, True),
    f"{many} patches of side {SMALL}": trained(SMALL, many, False),
}
curves = {name: curve for name, (_, curve) in runs.items()}
notebook.curves(
    "Dice on the front of the brain", "training steps", range(0, STEPS + 1, EVERY), curves,
    levels={"two thresholds": rival},
)  # fmt: skip

# %% name="slices"
y = 12
row = {"scan, held out": front[:, y].T, "labels": front_labels[:, y].T}
for name, (model, _) in runs.items():
    row[name] = predicted(model)[:, y].T
notebook.pictures([row], shades=SHADES, height=1.9)

# %% name="verdict"
(one, large, more), names = [curve[-1] for curve in curves.values()], [*curves]
order = sorted(curves, key=lambda name: -curves[name][-1])
beaten = sum(curve[-1] > rival for curve in curves.values())
table(["after the last step", "Dice"], *([name, f"{curves[name][-1]:.2f}"] for name in order))
say(
    f"After {STEPS} steps each, **{order[0]}** is ahead. The large patch is {large - one:+.2f} "
    f"from one small patch, and {large - more:+.2f} from as many voxels in small patches. "
    f"{beaten} of 3 networks beat the two thresholds ({rival:.2f})."
)

# %% [markdown] name="real"
# This is one short run on one brain: read it as a demonstration, not as a law. A difference of a
# few hundredths is within what another seed changes. And a step on the large patch also takes
# longer: what is equal here is the number of steps and the budget, not the time.
#
# ## The paper's size, on a GPU that is not here
#
# The V-Net of the paper is four times as wide and was trained on volumes of 128 × 128 × 64. The
# sizes that fit a large GPU can be asked for on this computer: `zoo.largest` with `device="a100"`
# looks at shapes only: tensors on the `meta` device have a shape and no numbers. `vary` names the
# dimensions that grow together, `multiple_of=32` the sizes to try; the network takes multiples of
# 16.
#
# **Predict:** a cube of which side fits into 8 GiB as the baseline?

# %% name="largest"
paper, cube = zoo.vnet(classes=3).to("meta"), torch.empty(1, 1, 128, 128, 128, device="meta")
found = {
    checkpoint: zoo.largest(
        paper, cube, memory_budget="8GiB", checkpoint=checkpoint, vary=(2, 3, 4), multiple_of=32,
        device="a100", verify=False,
    )
    for checkpoint in (False, True)
}  # fmt: skip

# %% name="largest-table"
table(
    ["in 8 GiB, estimated", "side of the cube", "time"],
    *([f"`checkpoint={c}`", f.size, f"×{f.predicted_time_ratio:.2f}"] for c, f in found.items()),
)

# %% [markdown] name="gpu"
# ## On a GPU
#
# The same question for the GPU of this computer, if it has one: what is the largest cube in half a
# gigabyte, and does one real training step of it keep to that?

# %% name="on-gpu"
if device == "cuda":
    for checkpoint in (False, True):
        print(zoo.largest(
            network(), cube, memory_budget="512MiB", checkpoint=checkpoint, vary=(2, 3, 4),
            multiple_of=16))  # fmt: skip
else:
    say(
        "Skipped, as there is no GPU here. It would show the sides that fit into 512 MiB on the "
        "GPU, each with the peak of one real training step."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - Activations of a volume grow with the **cube** of the patch's side. Weights do not grow.
# > - The **skips** of a U-shaped network must wait. They bound what any plan can save.
# > - `zoo.largest(model, sample, memory_budget=..., vary=(2, 3, 4), multiple_of=16)` answers "which
# >   patch fits?" without trying until it crashes, also for a GPU that is not here.
# > - A larger patch costs time as well as memory, and helps where labels depend on what is far
# >   away. Whether yours do, only an experiment tells: with equal steps, and beside several small
# >   patches whose gradients add up, which take no more memory either.
# > - Say what your labels are. Put a simple rival beside your network.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** AdamW keeps two numbers per weight. Without an optimizer (`optimizer=None`), which patch
# gains the most, in per cent of its peak, and why?
#
# <details><summary>Answer</summary>
#
# The smallest. The same number of bytes is gone from each peak. For a small patch the weights and
# what belongs to them are most of it; for a large one they are a small part.
#
# ```python
# gains = {}
# for side in (32, 48):
#     image = back[None, None, :side, :side, :side].to(device)
#     without = zoo.anatomy(network(), image, optimizer=None).baseline.peak
#     gains[side] = 1 - without / anatomies[side].baseline.peak
#     print(f"side {side}: {gains[side]:.0%} less")
# assert gains[32] > gains[48]
# ```
#
# </details>
#
# **2.** Is `checkpoint=True` really better than recomputing each level as a whole (`"blocks"`),
# or than keeping all convolutions (`"cheap"`)? Look at activations with meta tensors.
#
# <details><summary>Answer</summary>
#
# It is, in bytes. `"blocks"` keeps the inputs of each level, the skips among them, and at its peak
# all of one level at full size is there at once. `"cheap"` keeps every convolution's result.
#
# ```python
# sizes = {}
# for option in (True, "blocks", "cheap"):
#     found = zoo.anatomy(network().to("meta"), cube, checkpoint=option).planned
#     sizes[option] = found.activation_peak
#     print(f"checkpoint={option!r:9} {format_bytes(sizes[option])}")
# assert sizes[True] == min(sizes.values())
# ```
#
# </details>
#
# **3.** We held out the front. Hold out the right half instead, train on the left half, and the
# Dice on the right half will look wonderful. Why would that number be worthless here?
#
# <details><summary>Answer</summary>
#
# The template is symmetric: the right half is the left half in a mirror. The test would contain the
# training data, only flipped. Find out what your test set has in common with your training set
# before you believe a number.
#
# ```python
# assert torch.equal(gray, gray.flip(0)) and torch.equal(white, white.flip(0))
# ```
#
# </details>
#
# **Next:** [5. Transformers](05_transformers.ipynb)
