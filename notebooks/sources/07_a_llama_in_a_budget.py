# %% [markdown] name="question"
# # 7. A Llama within a budget, and without Python
#
# You have a language model, and about half of the memory that its training step takes. Does it
# train there, how much slower, and with the same bits?
#
# On a GPU there is a second question. A step that recomputes runs more Python, and small kernels
# wait for it. A *CUDA graph* holds the kernels of a step and runs them without Python.
#
# You need notebook 2 (what a frontier is) and notebook 6 (what a budget is).

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

import zoo
from zoo.report import notebook
from zoo.report.notebook import say, table
from zoo.units import format_bytes

notebook.start("en")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] name="first-look"
# ## First, what you will be able to do
#
# A small Llama, with grouped queries, rotary positions and SwiGLU as in the large ones, reads
# Python's own help pages, byte by byte: 8 rows of 128 bytes. Its optimizer is AdamW. `budget` is
# for all of a training step: weights, gradients, AdamW's state and activations.

# %% name="payoff"
text = "\n".join(topics.values()).encode("ascii", "ignore")
rows = torch.tensor(list(text[: 8 * 129]), device=device).view(8, 129)
batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
sizes = {"width": 128, "depth": 6, "heads": 4, "groups": 2, "head_width": 32, "mlp_width": 352}
llama = zoo.llama_tiny(**sizes, vocabulary=256).to(device)
budget = 40 * 2**20
zoo.checkpoint(llama, memory_budget=budget, optimizer="adamw")
step = zoo.anatomy(llama, batch)
asked, taken, whole = map(format_bytes, (budget, step.planned.peak, step.baseline.peak))
say(f"Asked: {asked}. Taken: **{taken}**. The baseline, without a budget: **{whole}**.")
notebook.chart("A training step of a small Llama", step)

# %% [markdown] name="frontier"
# ## What does it cost?
#
# **Predict:** about how much longer does the step take?
#
# The frontier has the least time for each amount of memory. Where it crosses the line of the budget
# is the plan in force.

# %% name="frontier-drawn"
frontier = zoo.frontier(llama, batch)
with notebook.figure("Memory and time of a small Llama", 3.8) as (axes,):
    frontier.plot(axes)
    axes.axvline(budget / 2**20, ymax=0.6, color="black", label="budget")
    axes.legend(frameon=False)
best = min(p.time_ratio for p in frontier.optimal if p.peak <= budget)
blocks = next(point for point in frontier.schemes if point.name == "blocks")
say(
    f"Predicted within the budget: **×{best:.2f}** of the time. Each block recomputed, as usual: "
    f"×{blocks.time_ratio:.2f} at {format_bytes(blocks.peak)}."
)

# %% [markdown] name="budgets"
# The line is flat at first: norms, SwiGLU's products and what is only moved about are large and
# quick to make again. Do plans for other budgets keep to them, too?

# %% name="budgets-table"
lines = []
for share in (0.8, 0.6, 0.4):
    asked = int(share * frontier.baseline.peak)
    point = max((p for p in frontier.optimal if p.peak <= asked), key=lambda p: p.peak)
    found = zoo.anatomy(llama, batch, checkpoint=point.plan).planned
    lines.append([f"{share:.0%}", *map(format_bytes, (asked, found.peak))])
    lines[-1].append(f"×{point.time_ratio:.2f}")
table(["of the baseline's peak", "asked", "taken", "time, predicted"], *lines)

# %% [markdown] name="bits"
# ## The same bits?
#
# The loss is computed in chunks of tokens, attention is a kernel, weights are shared. Recomputed by
# the plan of the first picture, is it still the same training?

# %% name="verify"
print(zoo.verify(llama, batch, step.plan, optimizer=torch.optim.AdamW, steps=2))

# %% [markdown] name="graph"
# ## Without Python
#
# Write forward, backward, optimizer and `zero_grad` into one function of a batch, and give it to
# `zoo.make_graphed_step`. On CUDA the first three calls run as they are, the fourth is captured,
# and later ones are replays. The learning rate, hooks, plans and whatever else can be named are
# compared before each replay; now and then a step runs eagerly, and is compared with the graph.
# Where there are no graphs the step just runs.

# %% name="graph-step"
optimizer = torch.optim.AdamW(llama.parameters(), 1e-3, capturable=device == "cuda")


def train(tokens, targets):
    loss = llama(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


graphed = zoo.make_graphed_step(train, model=llama, optimizer=optimizer)
losses = [graphed(**batch).item() for _ in range(8)]

# %% name="graph-words"
say(
    f"{graphed.eager} calls ran eagerly, {graphed.captures} was captured, {graphed.replays} were "
    f"replays. The loss falls from {losses[0]:.2f} to {losses[-1]:.2f}."
)

# %% [markdown] name="times"
# Is it worth it? With a GPU the next cells take the time of your step, eagerly and as a graph.
# Without one they show what an H200 took: milliseconds per step, one run each. *switch* is the
# library's own checkpointing, *plan* one for 70 % (Llama) or 90 % (ResNet) of the baseline's peak.

# %% name="recorded"
RECORDED = [  # model, batch, variant, milliseconds of an eager step and of a captured one
    ("HF Llama 1B (GQA)", "4×2048 tokens", "baseline", 175.1, 195.47),
    ("HF Llama 1B (GQA)", "4×2048 tokens", "switch", 213.65, 241.51),
    ("HF Llama 1B (GQA)", "4×2048 tokens", "True", None, 224.77),
    ("HF Llama 1B (GQA)", "4×2048 tokens", "plan", None, 221.29),
    ("timm ResNet-50, small batch", "8×3×224×224", "baseline", 18.27, 5.59),
    ("timm ResNet-50, small batch", "8×3×224×224", "switch", 63.25, 7.57),
    ("timm ResNet-50, small batch", "8×3×224×224", "True", 79.95, 7.02),
    ("timm ResNet-50, small batch", "8×3×224×224", "plan", 40.65, 5.83),
]

# %% name="times-table"
head = ["model", "size", "variant", "eager, ms", "captured, ms"]
if device == "cuda":
    from torch.utils.benchmark import Timer

    calls = [Timer("call(**batch)", globals={"call": f, "batch": batch}) for f in (train, graphed)]
    eager, captured = (1000 * call.timeit(20).mean for call in calls)
    table(head, ["a small Llama", "8×128 tokens", "plan", f"{eager:.2f}", f"{captured:.2f}"])
else:
    say("Recorded on an NVIDIA H200, torch 2.11, n = 1; not measured here.")
    table(head, *([*row[:3], row[3] or "", row[4]] for row in RECORDED))

# %% [markdown] name="times-answer"
# Kernels of a small batch are short, and eagerly the GPU waits for Python: there recomputation
# made the ResNet's step 2.2 to 4.4 times as long, and a captured step 1.04 to 1.35 times. The
# Llama's captured step took 1.24 times the baseline's by the library's switch, 1.13 times by the
# plan.

# %% [markdown] name="remember"
# ## What to remember
#
# > - `zoo.checkpoint(model, memory_budget=..., optimizer="adamw")` is for the whole step, and takes
# >   no more memory away than it must.
# > - The first megabytes that are saved cost little time, the last ones much: look at the frontier.
# > - `zoo.verify` says whether every bit is the baseline's.
# > - Small kernels, many of them: capture the step with `zoo.make_graphed_step`.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** Ask for a budget that cannot be met. What do you learn?
#
# <details><summary>Answer</summary>
#
# The error names the least budget, and the ways out.
#
# ```python
# try:
#     zoo.checkpoint(llama, memory_budget="10MiB", inputs=batch, optimizer="adamw")
# except zoo.BudgetError as error:
#     print(error)
# ```
#
# </details>
#
# **2.** Train by the same plan with SGD instead of AdamW. How much smaller is the peak?
#
# <details><summary>Answer</summary>
#
# By about the two numbers that AdamW keeps per weight.
#
# ```python
# sgd = zoo.anatomy(llama, batch, checkpoint=step.plan, optimizer=torch.optim.SGD).planned
# weights = sum(parameter.nbytes for parameter in llama.parameters())
# print(format_bytes(step.planned.peak - sgd.peak), format_bytes(2 * weights))
# assert 0.9 < (step.planned.peak - sgd.peak) / (2 * weights) < 1.1
# ```
#
# </details>
#
# **3.** A scheduler changes the learning rate before each step. What does a graph do then, and what
# do you change?
#
# <details><summary>Answer</summary>
#
# A number is part of the graph, so that each call runs eagerly, and a warning says so. Let the rate
# be a tensor on the GPU, `lr=torch.tensor(1e-3, device="cuda")`: the scheduler fills it, and the
# graph reads it.
#
# </details>
