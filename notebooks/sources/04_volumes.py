# %% [markdown] name="question"
# # 4. How large a patch of a volume fits?
#
# A brain scan has millions of voxels. A V-Net that labels each of them keeps dozens of feature
# maps of that size until the backward pass. So people cut the scan into *patches*, and train on
# patches as large as the memory allows.
#
# A larger patch shows the network more of what surrounds a voxel. How much larger can it be when
# some feature maps are computed twice instead of kept? And does that help?
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
import importlib.util
import os
import platform
import textwrap
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the profiler warns of memory older than itself

import matplotlib.pyplot as plt
import nibabel
import torch
from IPython.display import Markdown
from torch.nn import functional as F

import zoo

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")

plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}
BLUE, ORANGE, GRAY = "#1f6fb4", "#d9731a", "#8a8a8a"
MIB = 2**20

# %% [markdown] name="scan"
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
folder = Path(importlib.util.find_spec("nilearn").origin).parent / "datasets" / "data"


def volume(kind):
    """Reads one of the three volumes -> (X, Y, Z), numbers from 0 to 1, a voxel per millimeter."""
    image = nibabel.load(folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz")
    return torch.tensor(image.get_fdata(), dtype=torch.float32) / 255


template, gray, white = volume("t1"), volume("gm"), volume("wm")
print(f"shape {tuple(template.shape)}, {template.numel():,} voxels")
print("left is right in a mirror:", torch.equal(template, template.flip(0)))

NOISE = 0.7  # in standard deviations of the gray values inside of the brain
# a voxel per 2 mm: eight times fewer, so that this runs on two CPU cores
half = F.avg_pool3d(torch.stack([template, gray, white])[None], 2)[0]
other = (1 - half[1] - half[2]).clamp(min=0)
labels = torch.stack([other, half[1], half[2]]).argmax(0)
inside = half[0] > 0.02
clean = (half[0] - half[0][inside].mean()) / half[0][inside].std()
torch.manual_seed(0)
scan = clean + NOISE * torch.randn_like(clean)

CLASSES = ("other", "gray matter", "white matter")
SPLIT = 78  # the back, below, is for training; the front is for testing
back, back_labels = scan[:, :SPLIT], labels[:, :SPLIT]
front, front_labels = scan[1:97, SPLIT : SPLIT + 32], labels[1:97, SPLIT : SPLIT + 32]
# the network halves each axis four times, so that sizes are multiples of 16
front, front_labels = F.pad(front, (1, 1), value=scan.min().item()), F.pad(front_labels, (1, 1))
print(f"training on {tuple(back.shape)}, testing on {tuple(front.shape)}")

# %% name="show"
SHADES = plt.matplotlib.colors.ListedColormap(["#16161d", "#7fa7d1", "#f4efe6"])


def show(axes, picture, title, **options):
    """Draws a slice with its first axis to the right."""
    axes.imshow(picture.T, origin="lower", **({"cmap": "gray"} | options))
    axes.set_title(title, fontsize=10)
    axes.axis("off")


figure, axes = plt.subplots(2, 3, figsize=(9, 6.2), dpi=80, layout="constrained")
cuts = {"from above": (slice(None), slice(None), 44), "from the front": (slice(None), 54),
        "from the side": 49}  # fmt: skip
for (name, cut), (above, below) in zip(cuts.items(), axes.T, strict=True):
    show(above, scan[cut], f"the scan, {name}")
    show(below, labels[cut], "its labels", cmap=SHADES, interpolation="nearest", vmax=2)
for panel in axes[:, 0]:
    panel.axhline(SPLIT, color=ORANGE)
    panel.text(1, SPLIT + 3, "test", color=ORANGE, fontsize=10)
    panel.text(1, SPLIT - 9, "train", color=ORANGE, fontsize=10)
for panel in axes[:, 2]:
    panel.axvline(SPLIT, color=ORANGE)
plt.show()

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# The patch is a cube. You double its side: 32 becomes 64.
#
# 1. By what factor do the *activations* grow? 2, 4, 8 or 16?
# 2. By what factor does the *peak of the whole training step* grow: parameters, gradients,
#    optimizer state and activations? By the same factor, by less, or by more?
#
# Write your guesses into the next cell, and only then run the ones after it.
#
# The cell trains a V-Net on cubes of three sizes, one that keeps everything and one that runs
# things again, and reads what the allocator hands out (`zoo.anatomy`).

# %% name="guess"
guess_activations = 4  # times as many bytes: change it
guess_step = 4  # and the whole step: change it

# %% name="loss"
WIDTH = 4  # channels at full size; the paper has 16


def network(checkpoint=False):
    """Builds the same V-Net each time, with the same weights."""
    torch.manual_seed(0)
    model = zoo.vnet(
        classes=3, width=WIDTH, activation="prelu", drop_rate=0.0, checkpoint=checkpoint
    )
    return model.to(device)


def overlap(scores, target):
    """Soft Dice of each class: 1 where a prediction covers its target exactly."""
    found = scores.softmax(1)
    wanted = F.one_hot(target, len(CLASSES)).movedim(-1, 1)
    both = (found * wanted).sum((0, 2, 3, 4))
    return (2 * both + 1) / (found.sum((0, 2, 3, 4)) + wanted.sum((0, 2, 3, 4)) + 1)


def loss_of(scores, target):
    """Cross entropy and Dice, as usual for volumes."""
    return F.cross_entropy(scores, target) + 1 - overlap(scores, target).mean()


# %% name="sizes"
SIDES = (32, 48, 64)


def taken_apart(side):
    """Trains copies on a cube of the scan; bytes do not depend on the labels, so any will do."""
    image = back[None, None, :side, :side, :side].to(device)
    return zoo.anatomy(
        network(), image, checkpoint=True, loss=lambda scores: loss_of(scores, scores.argmax(1))
    )


anatomies = {side: taken_apart(side) for side in SIDES}
print("          keep everything             checkpoint=True")
print("side   activations  whole step    activations  whole step")
for side, found in anatomies.items():
    plain, planned = found.baseline, found.planned
    print(f"{side:4} {plain.activation_peak / MIB:9.1f} MiB {plain.peak / MIB:7.1f} MiB "
          f"{planned.activation_peak / MIB:10.1f} MiB {planned.peak / MIB:7.1f} MiB")  # fmt: skip

# %% name="growth"
small, large = anatomies[32].baseline, anatomies[64].baseline
Markdown(
    f"You said × {guess_activations} and × {guess_step}.\n\n"
    f"**Twice the side:** activations × {large.activation_peak / small.activation_peak:.1f}, "
    f"the whole step × {large.peak / small.peak:.1f}. There are 2³ = {2**3} times as many voxels. "
    "The activations grow with them; the weights, their gradients and the optimizer's state do not "
    "grow at all. A larger patch moves the peak from what is fixed to what checkpointing can cut."
)

# %% [markdown] name="budget"
# ## A budget
#
# Say that a training step may take as many bytes as the dashed line below says. (Yours will be
# gigabytes. The picture is the same.) Which patch fits?

# %% name="fits"
curves = {
    "keep everything": (BLUE, {side: found.baseline.peak for side, found in anatomies.items()}),
    "checkpoint=True": (ORANGE, {side: found.planned.peak for side, found in anatomies.items()}),
}
BUDGET = (anatomies[48].baseline.peak + anatomies[48].planned.peak) // 2
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name, (color, peaks) in curves.items():
    axes.plot(list(peaks), [peak / MIB for peak in peaks.values()], "o-", color=color)
    axes.annotate(name, (64, peaks[64] / MIB), (-12, 4), textcoords="offset points", ha="right",
                  va="bottom", color=color)  # fmt: skip
axes.axhline(BUDGET / MIB, color=GRAY, linestyle="--")
axes.text(64, BUDGET / MIB + 2, "the budget", color=GRAY, ha="right")
axes.set(xlabel="side of the patch in voxels", ylabel="peak of a training step, MiB", ylim=0,
         xticks=SIDES)  # fmt: skip
plt.show()

fitting = {name: max(s for s, p in peaks.items() if p <= BUDGET)
           for name, (_, peaks) in curves.items()}  # fmt: skip
SMALL, LARGE = fitting["keep everything"], fitting["checkpoint=True"]
Markdown(
    f"In {BUDGET / MIB:.0f} MiB, **keeping everything fits a cube of side {SMALL}; "
    f"`checkpoint=True` fits one of side {LARGE}**: {LARGE**3 / SMALL**3:.1f} times the voxels."
)

# %% [markdown] name="why"
# Why only this much? Look at a V-Net: it goes down, then up, and each level on the way up joins the
# feature map that the same level had on the way down. These *skips* must wait for the whole time in
# between. No plan can drop them, and at full size they are the largest maps that there are. A
# ResNet, which has no such long arms, saves more.

# %% [markdown] name="check"
# ## Is it the same network?
#
# A larger patch is worth nothing if training is different. `zoo.verify` trains two copies from the
# same state, one that keeps everything and one that does not, and compares every bit: outputs,
# loss, gradients, weights, running statistics and the state of the random numbers.

# %% name="verify"
report = zoo.verify(network(), back[None, None, :16, :32, :32].to(device), steps=2)
print(textwrap.fill(str(report), 96))

# %% [markdown] name="learn"
# ## Does the larger patch help?
#
# Now train both, each with the patch that fits the budget. After some steps we look at the front of
# the brain, which training never sees, and count how well prediction and labels overlap. *Dice* is
# 1 where they are the same and 0 where they do not touch.
#
# Beside them stands a rival that learns nothing but two numbers: below the first gray value a voxel
# is "other", above the second it is white matter. On a T1 scan this is not a bad idea. (Without
# our noise it would nearly solve the task: in the average brain gray values tell the tissue. Always
# try the simple thing first.)
#
# **Predict:** which of the two networks wins? And do they beat the two thresholds?

# %% name="rival"


def dice(found, target):
    """Mean Dice of gray and white matter."""
    scores = [2 * ((found == c) & (target == c)).sum() / ((found == c).sum() + (target == c).sum())
              for c in (1, 2)]  # fmt: skip
    return sum(scores).item() / 2


def thresholded(image, low, high):
    """Labels voxels by their gray value alone."""
    return (image > low).long() + (image > high).long()


def best_of_two(image, target):
    """Looks for the two thresholds of the largest Dice."""
    image, target = image[::2, ::2, ::2], target[::2, ::2, ::2]
    levels = torch.linspace(-3, 3, 25).tolist()
    pairs = [(low, high) for low in levels for high in levels if low < high]
    return max(pairs, key=lambda pair: dice(thresholded(image, *pair), target))


rival = dice(thresholded(front, *best_of_two(back, back_labels)), front_labels)
print(f"two thresholds, chosen on the back: Dice {rival:.3f} on the front")
back_clean, front_clean = clean[:, :SPLIT], F.pad(clean[1:97, SPLIT : SPLIT + 32], (1, 1), value=-3)
easy = dice(thresholded(front_clean, *best_of_two(back_clean, back_labels)), front_labels)
print(f"the same without the noise:         Dice {easy:.3f}")

# %% name="steps"
BRAIN = back_labels.nonzero().tolist()


def patch(side, generator):
    """Cuts a cube around a random voxel of the brain -> (1, 1, D, H, W), (1, D, H, W)."""
    middle = BRAIN[torch.randint(len(BRAIN), (), generator=generator)]
    corner = [min(max(m - side // 2, 0), n - side) for m, n in zip(middle, back.shape, strict=True)]
    box = tuple(slice(start, start + side) for start in corner)
    return back[box][None, None].to(device), back_labels[box][None].to(device)


def train_step(model, optimizer, image, target):
    """Takes one step of training."""
    optimizer.zero_grad()
    loss = loss_of(model(image), target)
    loss.backward()
    optimizer.step()


# %% name="train"
# a larger patch has more voxels and takes longer, so that it gets fewer steps
STEPS, EVERY = {SMALL: 64, LARGE: 36}, {SMALL: 8, LARGE: 6}


@torch.no_grad()
def predicted(model):
    """Labels the front of the brain."""
    model.eval()
    found = model(front[None, None].to(device)).argmax(1)[0].cpu()
    model.train()
    return found


def trained(side, checkpoint):
    """Trains a network and returns it with the Dice on the front after some of the steps."""
    model, generator = network(checkpoint), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=STEPS[side])
    curve = {0: dice(predicted(model), front_labels)}
    for step in range(1, STEPS[side] + 1):
        train_step(model, optimizer, *patch(side, generator))
        pace.step()
        if step % EVERY[side] == 0:
            curve[step] = dice(predicted(model), front_labels)
    return model, curve


runs = {SMALL: trained(SMALL, False), LARGE: trained(LARGE, True)}
for side, (_, curve) in runs.items():
    print(f"side {side}: Dice {curve[STEPS[side]]:.3f} after {STEPS[side]} steps")

# %% name="curves"
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for (side, (_, curve)), color in zip(runs.items(), (BLUE, ORANGE), strict=True):
    how = "keep everything" if side == SMALL else "checkpoint=True"
    millions = [step * side**3 / 1e6 for step in curve]
    for axes, places in zip(panels, (list(curve), millions), strict=True):
        axes.plot(places, curve.values(), "o-", color=color, markersize=4,
                  label=f"side {side}, {how}")  # fmt: skip
for axes, what in zip(panels, ("steps of training", "million voxels seen"), strict=True):
    axes.axhline(rival, color=GRAY, linestyle="--", label="two thresholds")
    axes.set(xlabel=what, ylim=(0, 1))
panels[0].set_ylabel("Dice on the front of the brain")
panels[1].legend(frameon=False, loc="lower right", fontsize=9)
plt.show()

# %% name="slices"
figure, rows = plt.subplots(2, 4, figsize=(9, 4.8), dpi=80, layout="constrained")
for row, y in zip(rows, (2, 12), strict=True):
    show(row[0], front[:, y], "scan, held out")
    show(row[1], front_labels[:, y], "labels", cmap=SHADES, interpolation="nearest", vmax=2)
    for axes, (side, (model, _)) in zip(row[2:], runs.items(), strict=True):
        found = predicted(model)[:, y]
        score = dice(found, front_labels[:, y])
        show(axes, found, f"patch {side}: Dice {score:.2f}", cmap=SHADES,
             interpolation="nearest", vmax=2)  # fmt: skip
plt.show()

# %% name="verdict"
final = {side: curve[STEPS[side]] for side, (_, curve) in runs.items()}
seen = {side: STEPS[side] * side**3 / 1e6 for side in runs}
ahead = "larger" if final[LARGE] > final[SMALL] else "smaller"
Markdown(
    f"The **{ahead}** patch is ahead: Dice {final[SMALL]:.2f} with side {SMALL}, "
    f"{final[LARGE]:.2f} with side {LARGE}. The larger one saw "
    f"{seen[LARGE] / seen[SMALL]:.1f} times as many voxels ({seen[LARGE]:.1f} and "
    f"{seen[SMALL]:.1f} million) in {STEPS[LARGE]} and not {STEPS[SMALL]} steps. Two thresholds "
    f"get {rival:.2f}. This is one short run on one brain: read it as a demonstration, not as a "
    "law."
)

# %% [markdown] name="real"
# ## The paper's size, on a GPU that is not here
#
# The V-Net of the paper is four times as wide and was trained on volumes of 128 × 128 × 64. The
# sizes that fit a large GPU can be asked for on this computer: `zoo.largest` with `device="a100"`
# looks at shapes only: tensors on the `meta` device have a shape and no numbers. `vary` names the
# dimensions that grow together, `multiple_of=32` the sizes to try; the network takes multiples of
# 16.
#
# **Predict:** a cube of which side fits into 8 GiB when everything is kept?

# %% name="largest"
paper, cube = zoo.vnet(classes=3).to("meta"), torch.empty(1, 1, 128, 128, 128, device="meta")
parameters = sum(parameter.numel() for parameter in paper.parameters())
print(f"{parameters / 1e6:.1f} million parameters")
for checkpoint in (False, True):
    found = zoo.largest(
        paper, cube, memory_budget="8GiB", checkpoint=checkpoint, vary=(2, 3, 4),
        multiple_of=32, device="a100", verify=False,
    )  # fmt: skip
    print(textwrap.fill(f"checkpoint={checkpoint}: {found}", 96))

# %% [markdown] name="gpu"
# ## On a GPU
#
# The same question for the GPU of this computer, if it has one: what is the largest cube in half a
# gigabyte, and does one real training step of it keep to that?

# %% name="on-gpu"
if device == "cuda":
    for checkpoint in (False, True):
        print(f"checkpoint={checkpoint}:", zoo.largest(
            network(), cube, memory_budget="512MiB", checkpoint=checkpoint, vary=(2, 3, 4),
            multiple_of=16))  # fmt: skip
else:
    print("skipped: this computer has no GPU that torch can use")

# %% [markdown] name="remember"
# ## What to remember
#
# > - Activations of a volume grow with the **cube** of the patch's side. Weights do not grow.
# > - The **skips** of a U-shaped network must wait. They bound what any plan can save.
# > - `zoo.largest(model, sample, memory_budget=..., vary=(2, 3, 4), multiple_of=16)` answers "which
# >   patch fits?" without trying until it crashes, also for a GPU that is not here.
# > - A larger patch costs time as well as memory, and helps where labels depend on what is far
# >   away. Whether yours do, only an experiment tells.
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
# **2.** Is `checkpoint=True` really better than running each level again as a whole (`"blocks"`),
# or than keeping all convolutions (`"cheap"`)? Look at activations on paper, with meta tensors.
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
#     print(f"checkpoint={option!r:9} {sizes[option] / MIB:6.1f} MiB")
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
