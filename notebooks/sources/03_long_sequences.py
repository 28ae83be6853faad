# %% [markdown] name="question"
# # 3. Long sequences
#
# A language model reads a text word by word. To learn from a word a hundred steps back, it must
# remember what it computed a hundred steps ago. So how long may a text be?
#
# We train an LSTM on a real text, find out what really fills the memory (it is not the LSTM), and
# then train it again with a fraction of the memory. At the end two loss curves must lie on top of
# each other. Not nearly: to the last bit.

# %% name="install"
# on Colab this installs what the notebook needs; anywhere else it does nothing
import subprocess
import sys

if "google.colab" in sys.modules:
    wanted = "zoo-checkpoint[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %% name="versions"
import platform
import re
from collections import Counter

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
BLUE, LIGHT_BLUE, ORANGE, GRAY, DARK = "#1f6feb", "#8ec5ff", "#e8912d", "#b8bec8", "#57606a"
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


# %% [markdown] name="text"
# ## The text
#
# Python ships with a book: its own language reference, which `help()` shows. No download. We cut it
# into words and signs and number them by how often they come.

# %% name="words"
from pydoc_data.topics import topics

words = re.findall(r"\w+|[^\w\s]", "\n".join(topics.values()).lower())
vocabulary = [word for word, _ in Counter(words).most_common()]
number = {word: rank for rank, word in enumerate(vocabulary)}
text = torch.tensor([number[word] for word in words], device=device)

print(f"{len(words):,} words, {len(vocabulary):,} different ones")
start = words.index("convenient") - 4
print("...", " ".join(words[start : start + 36]), "...")

# %% name="columns"
T, N = 32, 16  # words in a row, rows side by side

columns = text[: len(text) // N * N].view(N, -1).t()


def batch(step):
    """Words (T, N) and those that follow them (T, N), going on where the last batch ended."""
    begin = step * T % (len(columns) - T - 1)
    return columns[begin : begin + T], columns[begin + 1 : begin + T + 1]


# %% [markdown] name="predict"
# ## Your guess, before you look
#
# The usual model: an embedding, two layers of LSTM over the whole text, a linear layer that scores
# every word of the vocabulary, and the cross entropy. The LSTM runs for as many steps as the text
# is long and keeps something at each of them.
#
# Of all activations at the peak, which share belongs to the LSTM? Write it down.

# %% name="guess"
guess = 0.7  # of the activations are the LSTM's: change it


# %% name="usual"
class Usual(nn.Module):
    def __init__(self, vocabulary, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens, targets):
        outputs, _ = self.lstm(self.embedding(tokens))
        scores = self.decoder(outputs)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
usual = Usual(len(vocabulary)).to(device)
tokens, targets = batch(0)
usual(tokens, targets).backward()
usual.zero_grad()
with zoo.track(usual, inputs=(tokens, targets)) as timeline:
    usual(tokens, targets).backward()
timeline.plot("usual.png")
display(Image("usual.png", width=900))

# %% name="who"
activations = {}
for allocation in timeline.holders(count=1000):
    is_score = len(vocabulary) in allocation.shape
    whose = "the vocabulary's scores" if is_score else "LSTM and embedding"
    activations[whose] = activations.get(whose, 0) + allocation.bytes
whole = sum(activations.values())
lstm_share = activations["LSTM and embedding"] / whole

figure, axes = plt.subplots(figsize=(9, 1.5))
left = 0
for (name, size), color in zip(activations.items(), (BLUE, ORANGE), strict=True):
    axes.barh(0, size / MIB, left=left, color=color, label=f"{name}: {format_bytes(size)}")
    left += size / MIB
axes.set_title("Activations at the peak (MiB)")
axes.set_yticks([])
axes.grid(visible=False, axis="y")
axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
print(f"the LSTM's share: you said {guess:.0%}, it is {lstm_share:.0%}")

# %% [markdown] name="who-answer"
# The head takes most of it. For each word of the text it makes as many numbers as there are words
# in the vocabulary, and it makes them three times: the scores, the logarithms of their softmax, and
# their gradient. You see it in the picture as the tower between forward and backward.
#
# And this vocabulary is small. Those of today's models have many times as many words.

# %% [markdown] name="head"
# ## First the head
#
# Nobody needs all scores at once. The loss is a sum over words. Take a few words, score them, add
# their losses, go on.
#
# `zoo.lstm` does this. Its `head=` says how:
#
# - `"plain"`: chunk by chunk, with the usual cross entropy;
# - `"inplace"` (default): each chunk's gradient is written over its scores;
# - `"fused"`: gradients are computed in the forward, so no chunk has to wait. Equal up to rounding.
#
# The first two give the same bits. Chunks that wait for the backward still pile up, unless they are
# run again. So the plan matters, too.

# %% name="heads"
meta = torch.empty(T, N, dtype=torch.long, device="meta")


def language_model(**settings):
    sizes = {
        "vocabulary": len(vocabulary),
        "embedding": 128,
        "hidden": 128,
        "chunk_steps": 8,
        "chunk_tokens": 128,
    }
    return zoo.lstm(**(sizes | settings)).to(device)


rows = []
for head in ("plain", "inplace", "fused"):
    parts = zoo.anatomy(language_model(head=head), (meta, None, meta), checkpoint=True)
    sizes = parts.baseline.activation_peak, parts.planned.activation_peak
    rows.append([f'`zoo.lstm`, `head="{head}"`', *map(format_bytes, sizes)])
table(
    ["activations, at most", "store all", "checkpoint=True"],
    ["the usual model", format_bytes(timeline.activation_peak), ""],
    *rows,
)

# %% [markdown] name="heads-answer"
# Chunks alone save a little: each one's scores still wait for the backward. A plan makes them go:
# it runs a chunk again when its turn comes. Without a plan `"fused"` needs least, with one
# `"inplace"`.

# %% [markdown] name="time"
# ## Then time
#
# With the head out of the way, the LSTM is what is left. Its memory grows with the length of the
# text. Cut time into chunks. Each chunk hands its hidden and cell state on to the next. Keep only
# these; run a chunk again when the backward reaches it:
#
# ```
# time      ├── chunk 1 ──┤── chunk 2 ──┤── chunk 3 ──┤── chunk 4 ──┤
# forward   →      (h, c) →      (h, c) →      (h, c) →           loss
# keeps            (h, c)        (h, c)        (h, c)
# backward                                            ← chunk 4 again
#                                       ← chunk 3 again
# ```
#
# In `zoo.lstm` each chunk of time, layer by layer, is a step of the chain. So the same planner that
# did the ResNet does it. Guess: when the text is eight times as long, how much more memory is it
# with the plan?

# %% name="lengths"
lengths = [32, 64, 128, 256]
curves = {"store all": [], "checkpoint=True": []}
model = language_model()
for length in lengths:
    long = torch.empty(length, N, dtype=torch.long, device="meta")
    parts = zoo.anatomy(model, (long, None, long), checkpoint=True)
    curves["store all"].append(parts.baseline.activation_peak / MIB)
    curves["checkpoint=True"].append(parts.planned.activation_peak / MIB)

figure, axes = plt.subplots(figsize=(9, 3.4))
for (name, sizes), color in zip(curves.items(), (BLUE, ORANGE), strict=True):
    axes.plot(lengths, sizes, "o-", color=color, label=name)
axes.set_title("Activations at most (MiB)")
axes.set_xlabel("words in a row")
axes.set_xticks(lengths)
axes.set_ylim(0)
axes.legend(loc="upper left")
for name, sizes in curves.items():
    print(f"{lengths[-1] // lengths[0]} times the text, {name}: ×{sizes[-1] / sizes[0]:.1f}")

# %% [markdown] name="not-truncation"
# ## This is not truncation
#
# There is an older way to save memory on long texts: cut the text, pass the state on, but let no
# gradient through the cut (*truncated* backpropagation through time). It forgets. What the second
# piece could have taught the first is lost.
#
# Checkpointing forgets nothing. Compare the gradients of the recurrent weights: the whole text at
# once, the same text in two truncated halves, and the whole text checkpointed.


# %% name="truncation"
def recurrent_gradient(model, pieces):
    model.zero_grad()
    state = None
    for words_in, words_after in pieces:
        loss, state = model(words_in, state, words_after)
        (loss / len(pieces)).backward()
        state = model.detach(state)
    return model.layers[0].weight_hh_l0.grad.clone()


torch.manual_seed(0)
model = language_model(drop_rate=0.0)
halves = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))
full = recurrent_gradient(model, [(tokens, targets)])
truncated = recurrent_gradient(model, halves)
zoo.checkpoint(model, True)
checkpointed = recurrent_gradient(model, [(tokens, targets)])
table(
    ["gradient of the recurrent weights", "is off by", "numbers that differ"],
    *(
        [name, f"{(found - full).norm() / full.norm():.1%}", f"{int((found != full).sum()):,}"]
        for name, found in {"two truncated halves": truncated, "checkpointed": checkpointed}.items()
    ),
)

# %% [markdown] name="train"
# ## Train both
#
# Now for real: two models with the same first weights, the same text, the same dropout. One keeps
# everything, one is checkpointed. To see them learn in seconds, we let them read the same few pages
# again and again. We note each loss as it is, all of its bits.

# %% name="training"
STEPS, PAGES = 60, 6


def train(checkpoint):
    torch.manual_seed(0)
    model = zoo.checkpoint(language_model(), checkpoint)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, state = [], None
    for step in range(STEPS):
        words_in, words_after = batch(step % PAGES)
        state = state if step % PAGES else None  # the first page begins anew
        loss, state = model(words_in, state, words_after)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = model.detach(state)
        losses.append(loss.detach())
    return model, torch.stack(losses).cpu()


baseline, baseline_losses = train(False)
lean, lean_losses = train(True)

# %% name="curves"
figure, axes = plt.subplots(figsize=(9, 3.8))
axes.plot(baseline_losses.exp(), color=LIGHT_BLUE, lw=7, solid_capstyle="round", label="store all")
axes.plot(lean_losses.exp(), color=DARK, lw=1.5, ls=(0, (4, 3)), label="checkpoint=True")
axes.set_title("Perplexity while training")
axes.set_xlabel("step")
axes.set_yscale("log")
ticks = [20, 50, 100, 200, 500, 1000, 2000, 4000]
axes.set_yticks(ticks, ticks)
axes.minorticks_off()
axes.legend()

different = int((baseline_losses != lean_losses).sum())
weights = zip(baseline.parameters(), lean.parameters(), strict=True)
print(f"{different} of {STEPS} losses differ")
print(f"all weights equal: {all(torch.equal(a, b) for a, b in weights)}")
first, last = baseline_losses[0].exp(), baseline_losses[-5:].mean().exp()
print(f"perplexity {first:.0f} -> {last:.0f}, with a vocabulary of {len(vocabulary)}")

# %% [markdown] name="train-answer"
# Two curves, one line. Dropout included: when a chunk is recomputed, its mask is the very one of
# the forward.
#
# Why insist on the last bit? Because then there is nothing to discuss. A loss that is "close" may
# hide a wrong mask or a state that moved twice. A loss that is *equal* hides nothing.

# %% name="on-a-gpu"
if device == "cuda":
    long = text[: 4096 * N].view(N, 4096).t()
    for name, checkpoint in {"store all": False, "checkpoint=True": True}.items():
        model = zoo.checkpoint(language_model(), checkpoint)
        torch.cuda.reset_peak_memory_stats()
        model(long[:-1], None, long[1:])[0].backward()
        print(f"{name}: {format_bytes(torch.cuda.max_memory_allocated())} on the GPU")
else:
    print("skipped: rows of thousands of words need a GPU to be quick")

# %% [markdown] name="remember"
# ## What to remember
#
# > - In a language model look at the head first: words times vocabulary, three times.
# > - Score a chunk of words at a time, and never keep all scores.
# > - An LSTM's memory grows with the length of the text. Cut time into chunks; keep the states
# >   between them; run the chunks again.
# > - Truncation forgets and changes the gradient. Checkpointing does neither.
# > - Exact means equal bits: losses, weights, dropout and all.

# %% [markdown] name="exercises"
# ## Exercises
#
# **1.** Take a vocabulary ten times as large. What does it do to the usual model, and what to
# `zoo.lstm` with `checkpoint=True`?
#
# <details><summary>Answer</summary>
#
# The usual model's scores grow with it, all of them. `zoo.lstm` holds one chunk's scores, and its
# size you choose yourself with `chunk_tokens`.
#
# ```python
# large = 10 * len(vocabulary)
# usual_peak = zoo.anatomy(Usual(large), (meta, meta)).baseline.activation_peak
# lean_model = language_model(vocabulary=large, chunk_tokens=32)
# lean_peak = zoo.anatomy(lean_model, (meta, None, meta), checkpoint=True).planned.activation_peak
# print(format_bytes(usual_peak), format_bytes(lean_peak))
# assert lean_peak < usual_peak / 5
# ```
#
# </details>
#
# **2.** Two models with the same weights, one with `chunk_steps=8`, one with `chunk_steps=16`. Are
# their losses equal? And their gradients?
#
# <details><summary>Answer</summary>
#
# The losses are those of the same text and agree up to rounding. In the gradients the sum over time
# is made in another order, and a sum of floating point numbers depends on the order. So compare
# bits only between models with the same chunks: `checkpoint=` never changes the chunks.
#
# ```python
# other = language_model(drop_rate=0.0, chunk_steps=16)
# other.load_state_dict(model.state_dict())
# zoo.checkpoint(other, True)
# gradients = recurrent_gradient(other, [(tokens, targets)])
# print((gradients - full).abs().max())
# ```
#
# </details>
#
# **3.** Leave out `model.detach(state)` in the training loop. What happens, and what does it mean?
#
# <details><summary>Answer</summary>
#
# The second backward wants to go on into the first step's text, whose activations are gone. PyTorch
# says so. The line with `detach` is where the truncation of this loop is: between batches, on
# purpose.
#
# ```python
# state, said = None, "nothing"
# try:
#     for step in range(2):
#         loss, state = baseline(*batch(step)[:1], state, batch(step)[1])
#         loss.backward()
# except RuntimeError as error:
#     said = str(error)
# print(said[:60])
# assert "second time" in said
# ```
#
# </details>
#
# **Next:** [4. Volumes](04_volumes.ipynb)
