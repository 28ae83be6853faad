# %% [markdown] name="question"
# # 2. Trading compute for memory
#
# Activations can be thrown away and computed again. But which ones? All of them? Every second one?
# And what does it cost?
#
# We take a ResNet and a DenseNet, try the schemes that people use, and look for the best one. Then
# we ask when *not* to do it, and whether the trained network is still the same.

# %% name="install"
# on Colab this installs what the notebook needs; anywhere else it does nothing
import subprocess
import sys

if "google.colab" in sys.modules:
    wanted = "zoo-checkpoint[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %% name="versions"
import platform

import timm
import torch
from IPython.display import Image, Markdown, display
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

import zoo
from zoo.models.densenet import DenseNet
from zoo.units import format_bytes

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"timm {timm.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")


# %% name="table"
def table(head, *rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


# %% [markdown] name="plans"
# ## A plan, drawn
#
# Think of a network as a chain of steps. A *plan* says which steps keep their results and which run
# again. A bracket is a *segment*: only what goes into it is kept. When the backward gets there, the
# segment runs a second time.
#
# Here are nine steps and three plans. The first keeps everything: that is plain training. The
# second is the famous one of Chen and others (2016): of *n* steps make segments of √n, and keep the
# last one, since the backward begins there. The third has a segment within a segment, so some steps
# run three times.

# %% name="draw"
keep_all = zoo.Plan.keep_all(9)
square_root = zoo.Plan(((0, 1, 2), (3, 4, 5), 6, 7, 8))
nested = zoo.Plan((((0, 1, 2), 3, 4), 5, 6, 7, 8))
drawn = [plan.draw().splitlines() for plan in (keep_all, square_root, nested)]
print(f"{'store all':22}{'square root':22}nested\n")
for lines in zip(*drawn, strict=True):
    print("".join(f"{line:22}" for line in lines).rstrip())

# %% [markdown] name="why-root"
# Why √n? With *k* segments you keep *k* inputs, and while one segment runs again you keep its *n /
# k* results on top. The sum *k + n / k* is least at *k* = √n. Memory falls from *n* to 2 √n, and
# the price is at most one more forward.
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
# - **cheap**: keep convolutions, run batch norms and ReLUs again;
# - **the best plan**: whatever takes least time at a given memory.
#
# A forward is about a third of a training step. So running everything once more makes a step about
# a third longer. How much memory is left with `blocks`, do you think? And how long does the *best*
# plan take, **at the memory of `blocks`**?

# %% name="guess"
guess_memory = 0.5  # peak of blocks, store all being 1: change it
guess_time = 1.3  # time of the best plan there, store all being 1: change it

# %% name="resnet"
torch.manual_seed(0)
resnet = zoo.resnet110().to(device)
images = torch.rand(16, 3, 32, 32, device=device)
resnet_frontier = zoo.frontier(resnet, images, optimizer=torch.optim.SGD)

# %% [markdown] name="frontier-method"
# `zoo.frontier` has counted the bytes of each step without running it, has timed each kind of
# kernel, and has then worked out the best plan for every budget. No training happened yet. Each
# point of the blue line is a plan; nothing lies below the line.

# %% name="resnet-frontier"
resnet_frontier.plot("resnet.png")
display(Image("resnet.png", width=820))


# %% name="resnet-table"
def least_time(frontier, budget):
    """The time of the best plan that keeps to a budget."""
    return min(point.time_ratio for point in frontier.optimal if point.peak <= budget)


def compare(frontier):
    head = ["scheme", "peak of a step", "of store all", "its time", "time of the best plan there"]
    shown = sorted(frontier.schemes, key=lambda point: -point.peak)
    rows = [
        [point.name, format_bytes(point.peak), f"{point.peak / frontier.baseline.peak:.2f}",
         f"×{point.time_ratio:.2f}", f"×{least_time(frontier, point.peak):.2f}"]
        for point in shown
    ]  # fmt: skip
    table(
        head, ["store all", format_bytes(frontier.baseline.peak), "1.00", "×1.00", "×1.00"], *rows
    )


compare(resnet_frontier)
blocks = next(point for point in resnet_frontier.schemes if point.name == "blocks")
print(f"peak of blocks: you said {guess_memory:.2f} of store all, "
      f"it is {blocks.peak / resnet_frontier.baseline.peak:.2f}")  # fmt: skip
print(f"best time there: you said ×{guess_time:.2f}, "
      f"it is ×{least_time(resnet_frontier, blocks.peak):.2f}")  # fmt: skip

# %% [markdown] name="resnet-answer"
# Three things to see.
#
# - Every scheme lies above the blue line. At the same memory there is a plan that is faster.
# - The line is steep on the left and gentle on the right. The first half of the memory costs
#   little: what is large and quick to compute goes first. Only the last megabytes are expensive.
# - √n is a poor deal. It counts steps, and steps are not alike.
#
# ## Why are some steps almost free?
#
# A convolution is slow. The batch norm behind it is quick, and its result is just as large. So keep
# the slow one's result and run the quick one again. Let us count: who holds the bytes, who does the
# work?

# %% name="cheap-and-dear"
from torch.utils.flop_counter import FlopCounterMode

parts = {
    "convolution": nn.Conv2d(256, 256, 3, padding=1, bias=False).to(device),
    "batch norm": nn.BatchNorm2d(256).to(device),
    "ReLU": nn.ReLU(),
}
features = torch.rand(8, 256, 24, 24, device=device)


def multiplications(part):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        part(features)
    return counter.get_total_flops()


table(
    ["step", "bytes of its result", "multiplications and additions in products"],
    *(
        [name, format_bytes(part(features).nbytes), f"{multiplications(part):,}"]
        for name, part in parts.items()
    ),
)

# %% [markdown] name="densenet-question"
# ## DenseNet, the hungry one
#
# In a DenseNet each layer reads the results of *all* layers before it, joined into one tensor and
# normalized. Joined anew each time: a block of *n* layers keeps about *n²* pieces, though only *n*
# different ones were made. Guess: will the best plans leave more of its memory or less than of the
# ResNet's?

# %% name="densenet"
torch.manual_seed(0)
densenet = DenseNet(12, (8, 8, 8), classes=10, small_images=True).to(device)
images = torch.rand(8, 3, 32, 32, device=device)
densenet_frontier = zoo.frontier(densenet, images, optimizer=torch.optim.SGD)
densenet_frontier.plot("densenet.png")
display(Image("densenet.png", width=820))
compare(densenet_frontier)

# %% [markdown] name="densenet-answer"
# Less. Even `blocks` goes far here: joined and normalized copies are quick to make again, and they
# are nearly all of it. This is what "memory-efficient DenseNet" means in other libraries, where it
# is a second version of the model, written by hand. Here it falls out of the numbers, and the best
# plans go further.
#
# ## Do the predictions hold?
#
# So far all of this was paper. Take the best plan at the memory of `blocks`, train with it, and
# measure.

# %% name="measured"
budget = next(point.peak for point in densenet_frontier.schemes if point.name == "blocks")
best = min(
    (point for point in densenet_frontier.optimal if point.peak <= budget),
    key=lambda point: point.time_ratio,
)


def measured_peak(model, plan):
    zoo.checkpoint(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with zoo.track(model, optimizer=optimizer, inputs=images) as timeline:
        model(images).logsumexp(1).mean().backward()
        optimizer.step()
    model.zero_grad()
    zoo.uncheckpoint(model)
    return timeline.tensor_peak


table(
    ["peak of a step, DenseNet", "predicted", "measured"],
    *(
        [name, format_bytes(point.peak), format_bytes(measured_peak(densenet, point.plan))]
        for name, point in {
            "store all": densenet_frontier.baseline,
            "best at the memory of blocks": best,
        }.items()
    ),
)

# %% [markdown] name="measured-answer"
# The prediction may be a little above: it also counts what the kernels take for themselves, which
# no tensor shows. A budget must hold, so it is counted in.

# %% [markdown] name="when-not"
# ## When not to use it
#
# **When weights are the memory.** Few images, many weights: there is little to save.
#
# **At the end of the network.** What the last layers keep is used at once, when the backward
# begins. To throw it away and make it again at the peak frees nothing.
#
# Guess first: for how many images is it worth it, one, eight or sixty-four? And if only half of the
# network is run again, should it be the first half or the second?

# %% name="when-not-numbers"
small = zoo.resnet18(classes=8)
rows = []
for count in (1, 8, 64):
    parts = zoo.anatomy(small, torch.empty(count, 3, 96, 96, device="meta"), checkpoint=True)
    saved = 1 - parts.planned.peak / parts.baseline.peak
    rows.append([f"{count}", *map(format_bytes, (parts.baseline.peak, parts.planned.peak)),
                 f"{saved:.0%}"])  # fmt: skip
table(["images, ResNet-18 with AdamW", "store all", "least memory", "saved"], *rows)

batch = torch.empty(64, 3, 96, 96, device="meta")
steps = range(len(parts.plan.flatten()))
segments = [tuple(steps[first : first + 4]) for first in range(0, len(steps), 4)]
middle = len(segments) // 2
halves = {
    "first half again": zoo.Plan((*segments[:middle], *steps[4 * middle :])),
    "second half again": zoo.Plan((*steps[: 4 * middle], *segments[middle:])),
}
table(
    ["plan", "activations, at most"],
    ["store all", format_bytes(parts.baseline.activation_peak)],
    *(
        [name, format_bytes(zoo.anatomy(small, batch, checkpoint=plan).planned.activation_peak)]
        for name, plan in halves.items()
    ),
)

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
def trained(prepare):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=8).to(device)
    prepare(model)
    torch.manual_seed(1)
    model(torch.randn(8, 3, 64, 64, device=device)).logsumexp(1).mean().backward()
    return model


plain = trained(lambda model: None)
switched = trained(lambda model: model.set_grad_checkpointing())
ours = trained(zoo.checkpoint)

inner = "layer2.0.bn1"
rows = []
for name, model in {"plain": plain, "timm's switch": switched, "zoo.checkpoint": ours}.items():
    norm = model.get_submodule(inner)
    same = [torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True)]
    rows.append([name, int(norm.num_batches_tracked), f"{norm.running_mean[0]:.6f}",
                 f"{sum(same)} of {len(same)}"])  # fmt: skip
table(["", "batches counted", "its running mean [0]", "buffers like plain's"], *rows)

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
# not. A second run with *new* random numbers gives gradients of another network. A second run with
# the *old* ones is exact. Look at both.


# %% name="dropout"
layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(device)


def gradient(run):
    torch.manual_seed(0)
    layers.zero_grad()
    run(torch.ones(4, 64, device=device)).sum().backward()
    return layers[0].weight.grad.clone()


def new_numbers(inputs):
    return checkpoint_of_torch(layers, inputs, use_reentrant=False, preserve_rng_state=False)


def old_numbers(inputs):
    return zoo.recompute(layers, inputs)


expected = gradient(layers)
for name, run in {"new random numbers": new_numbers, "zoo.recompute": old_numbers}.items():
    wrong = int((gradient(run) != expected).sum())
    print(f"{name}: {wrong} of {expected.numel()} gradients differ")

# %% [markdown] name="verify"
# And for a whole network, with batch norm and dropout in every layer? `zoo.verify` trains two
# copies side by side and compares every bit: outputs, gradients, statistics, weights, random state.

# %% name="verified"
dense = DenseNet(12, (3, 3), classes=10, drop_rate=0.2, small_images=True).to(device)
report = zoo.verify(dense, torch.rand(8, 3, 32, 32, device=device), checkpoint=True)
print(report)

# %% name="on-a-gpu"
if device == "cuda":
    for name, checkpoint in {"store all": False, "least memory": True}.items():
        zoo.checkpoint(resnet, checkpoint)
        torch.cuda.reset_peak_memory_stats()
        resnet(torch.rand(1024, 3, 32, 32, device=device)).logsumexp(1).mean().backward()
        resnet.zero_grad()
        print(f"{name}: {format_bytes(torch.cuda.max_memory_allocated())} on the GPU")
else:
    print("skipped: a batch of a thousand images needs a GPU")

# %% [markdown] name="remember"
# ## What to remember
#
# > - A plan says what is kept and what is run again. Rules like √n or "every block" are plans, but
# >   not the best ones.
# > - Throw away what is large and quick to make: batch norms, activations, joined copies. Keep what
# >   is slow: convolutions.
# > - The first half of the memory is cheap, the last megabytes are expensive.
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
# many steps run three times in the nested plan above? Write a plan in which some step runs four
# times.
#
# <details><summary>Answer</summary>
#
# A step runs once more for each bracket around it. Only a bracket at the very end of another one
# costs nothing more: when the outer one runs again, nobody behind the inner one waits for it, and
# it can wait for the backward.
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
# pairs = zip(plain.named_buffers(), switched.named_buffers(), strict=True)
# alike = [name for (name, a), (_, b) in pairs if torch.equal(a, b)]
# print(alike)
# assert alike and all(name.startswith("bn1.") for name in alike)
# ```
#
# </details>
#
# **Next:** [3. Long sequences](03_long_sequences.ipynb)
