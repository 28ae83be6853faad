# %% [markdown] name="question"
# # 3. Long sequences
#
# A language model reads a text word by word. To learn from a word a hundred steps back, it must
# remember what it computed a hundred steps ago. So how long may a text be?
#
# We train an LSTM on a real text, find out what really fills the memory (it is not the LSTM), and
# train it again with a fraction of the memory. Two loss curves must lie on top of each other. Not
# nearly: to the last bit.

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
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo.report import notebook

notebook.start("en")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] name="text"
# ## First, what you will be able to do
#
# Python ships with a book: its own language reference, which `help()` shows. No download. We cut it
# into words and signs and number them by how often they come. Here is a training step on 16 rows of
# 128 words, as it is (the *baseline*) and with `checkpoint=True`.

# %% name="payoff"
words = re.findall(r"\w+|[^\w\s]", "\n".join(topics.values()).lower())
vocabulary = [word for word, _ in Counter(words).most_common()]
number = {word: rank for rank, word in enumerate(vocabulary)}
text = torch.tensor([number[word] for word in words], device=device)
N = 16  # rows side by side
columns = text[: len(text) // N * N].view(N, -1).t()
SIZES = {"vocabulary": len(vocabulary), "embedding": 128, "hidden": 128}
chunked = zoo.lstm(**SIZES, chunk_steps=8, chunk_tokens=128).to(device)
parts = zoo.anatomy(chunked, (columns[:128], None, columns[1:129]), checkpoint=True)
notebook.chart("A training step of an LSTM on 128 words", parts)

# %% name="payoff-words"
from zoo.report.notebook import say, table
from zoo.units import format_bytes

sizes = [format_bytes(part.activation_peak) for part in (parts.baseline, parts.planned)]
start = words.index("convenient") - 4
say(
    f"{len(words):,} words, {len(vocabulary):,} different ones: "
    f"… *{' '.join(words[start : start + 14])}* … \n\n"
    f"Activations, at most: {sizes[0]} for the baseline, **{sizes[1]}** with `checkpoint=True`."
)

# %% [markdown] name="predict"
# ## Your guess, before you look
#
# Back to the beginning: the usual model. An embedding, two layers of LSTM over the whole text, a
# linear layer that gives each word of the vocabulary a number (its *logit*), and the cross entropy.
# The LSTM runs for as many steps as the text is long and keeps something at each of them.
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
        logits = self.decoder(outputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %% name="usual-step"
T = 32  # words in a row
tokens, targets = columns[:T], columns[1 : T + 1]
torch.manual_seed(0)
usual = Usual(len(vocabulary)).to(device)
for _ in range(2):
    usual.zero_grad()
    with zoo.track(usual, inputs=(tokens, targets)) as timeline:
        usual(tokens, targets).backward()
notebook.chart("The usual model, by category", timeline)

# %% name="who"
wide = [a for a in timeline.holders(1000) if len(vocabulary) in a.shape]
whole = sum(a.bytes for a in timeline.holders(1000))
rows = [[f"{tuple(a.shape)}", format_bytes(a.bytes), notebook.translated(a.phase)] for a in wide]
table(["activations at the peak, as wide as the vocabulary", "bytes", "made in"], *rows)
say(
    f"The LSTM's share: you said {guess:.0%}, it is at most "
    f"**{1 - sum(a.bytes for a in wide) / whole:.0%}**. The rest is the head's."
)

# %% [markdown] name="who-answer"
# The head takes most of it. For each word of the text it makes as many numbers as there are words
# in the vocabulary, and at the peak, which is the tower in the picture, there are several such
# tensors at once. The one made in the forward is the logarithm of the softmax; the logits
# themselves are gone by then, as nobody needs them any more. Those made in the backward are two
# gradients: of that logarithm, and of the logits.
#
# And this vocabulary is small. Those of today's models have many times as many words.

# %% [markdown] name="head"
# ## First the head
#
# Nobody needs all logits at once. The loss is a sum over words. Take a few words, compute their
# logits, add their losses, go on.
#
# `zoo.lstm` does this. Its `head=` says how:
#
# - `"plain"`: chunk by chunk, with the usual cross entropy;
# - `"inplace"` (default): each chunk's gradient is written over its logits;
# - `"fused"`: gradients are computed in the forward, so no chunk has to wait. Equal up to rounding.
#
# The first two give the same bits. Chunks that wait for the backward still pile up, unless they are
# recomputed. So the plan matters, too.

# %% name="heads"
meta = torch.empty(T, N, dtype=torch.long, device="meta")


def language_model(**settings):
    return zoo.lstm(**(SIZES | {"chunk_steps": 8, "chunk_tokens": 128} | settings)).to(device)


heads = {}
for head in ("plain", "inplace", "fused"):
    found = zoo.anatomy(language_model(head=head), (meta, None, meta), checkpoint=True)
    heads[head] = found.baseline.activation_peak, found.planned.activation_peak

# %% name="heads-table"
rows = [["the usual model", format_bytes(timeline.activation_peak), ""]]
rows += [[f"`zoo.lstm`, `head={head!r}`", *map(format_bytes, two)] for head, two in heads.items()]
table(["activations, at most", "baseline", "`checkpoint=True`"], *rows)
least = [min(heads, key=lambda head: heads[head][way]) for way in (0, 1)]
say(f"Without a plan `{least[0]}` needs least, with one `{least[1]}`.")

# %% [markdown] name="heads-answer"
# Chunks alone save a little: each one's logits still wait for the backward. A plan makes them go:
# it recomputes a chunk when its turn comes.

# %% [markdown] name="time"
# ## Then time
#
# With the head out of the way, the LSTM is what is left. Its memory grows with the length of the
# text. Cut time into chunks. Each chunk hands its hidden and cell state on to the next. Keep only
# these; recompute a chunk when the backward reaches it.
#
# Here are twelve steps of time, moment by moment: on the right in four chunks of three. Blue waits
# for the backward: on the right only what goes into a chunk does. Orange is recomputed, a chunk at
# a time, the last one first.

# %% name="drawn"
chunks = zoo.Plan(((0, 1, 2), (3, 4, 5), (6, 7, 8), 9, 10, 11))
notebook.stepwise({"baseline": zoo.Plan.keep_all(12), "four chunks": chunks})

# %% [markdown] name="time-question"
# In `zoo.lstm` each chunk of time, layer by layer, is a block, whose steps the planner works on.
# So the same planner that did the ResNet does it. Guess: when the text is eight times as long,
# how much more memory is it with the plan?

# %% name="lengths"
LENGTHS = [16, 32, 64, 128]
grown = {"baseline": [], "checkpoint=True": []}
for length in LENGTHS:
    long = torch.empty(length, N, dtype=torch.long, device="meta")
    found = zoo.anatomy(language_model(), (long, None, long), checkpoint=True)
    for sizes, part in zip(grown.values(), (found.baseline, found.planned), strict=True):
        sizes.append(part.activation_peak / 2**20)
notebook.curves("Activations, at most (MiB)", "words in a row", LENGTHS, grown)

# %% name="lengths-words"
ratios = [sizes[-1] / sizes[0] for sizes in grown.values()]
say(
    f"A text {LENGTHS[-1] // LENGTHS[0]} times as long takes ×{ratios[0]:.1f} of the activations "
    f"as the baseline, ×{ratios[1]:.1f} with the plan."
)

# %% [markdown] name="not-truncation"
# ## This is not truncation
#
# There is an older way to save memory on long texts: cut the text, pass the state on, but let no
# gradient through the cut (*truncated* backpropagation through time). It forgets. What the second
# piece could have taught the first is lost.
#
# Checkpointing forgets nothing. Compare the gradients of the recurrent weights: the whole text at
# once, the same text in two truncated halves, and the whole text checkpointed.


# %% name="recurrent-gradient"
def recurrent_gradient(model, pieces):
    model.zero_grad()
    state = None
    for words_in, words_after in pieces:
        loss, state = model(words_in, state, words_after)
        (loss / len(pieces)).backward()
        state = model.detach(state)
    return model.layers[0].weight_hh_l0.grad.clone()


# %% name="truncation"
torch.manual_seed(0)
model = language_model(drop_rate=0.0)
halves = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))
full = recurrent_gradient(model, [(tokens, targets)])
gradients = {"two truncated halves": recurrent_gradient(model, halves)}
zoo.checkpoint(model, True)
gradients["checkpointed"] = recurrent_gradient(model, [(tokens, targets)])
table(
    ["gradient of the recurrent weights", "is off by", "numbers that differ"],
    *([name, f"{(found - full).norm() / full.norm():.1%}", f"{int((found != full).sum()):,}"]
      for name, found in gradients.items()),
)  # fmt: skip

# %% [markdown] name="train"
# ## Train both
#
# Now for real: two models with the same first weights, the same text, the same dropout. One is the
# baseline, one is checkpointed. To see them learn in seconds, we let them read the same few pages
# again and again. We note each loss as it is, all of its bits.

# %% name="training-step"
STEPS, PAGES = 60, 6


def batch(step):
    """Words (T, N) and those that follow them (T, N); the first page comes after the last."""
    begin = step % PAGES * T
    return columns[begin : begin + T], columns[begin + 1 : begin + T + 1]


def step_once(model, optimizer, state, step):
    loss, state = model(batch(step)[0], state if step % PAGES else None, batch(step)[1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), model.detach(state)


# %% name="training"
def train(checkpoint):
    torch.manual_seed(0)
    model = zoo.checkpoint(language_model(), checkpoint)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, state = [], None
    for step in range(STEPS):
        loss, state = step_once(model, optimizer, state, step)
        losses.append(loss)
    return model, torch.stack(losses).cpu()


(baseline, losses), (lean, lean_losses) = train(False), train(True)

# %% name="curves"
perplexity = {"baseline": losses.exp(), "checkpoint=True": lean_losses.exp()}
notebook.curves("Perplexity while training", "training step", range(STEPS), perplexity, log="y")
weights = zip(baseline.parameters(), lean.parameters(), strict=True)
say(
    f"{int((losses != lean_losses).sum())} of {STEPS} losses differ; "
    f"{sum(not torch.equal(a, b) for a, b in weights)} of the weight tensors differ. "
    f"The perplexity falls from {losses[0].exp():.0f} to {losses[-5:].mean().exp():.0f}."
)

# %% [markdown] name="train-answer"
# Two curves, one line. Dropout included: when a chunk is recomputed, its mask is the very one of
# the forward.
#
# Why insist on the last bit? Because then there is nothing to discuss. A loss that is "close" may
# hide a wrong mask or a state that moved twice. A loss that is *equal* hides nothing.

# %% name="on-a-gpu"
if device == "cuda":
    for checkpoint in (False, True):
        model = zoo.checkpoint(language_model(), checkpoint)
        torch.cuda.reset_peak_memory_stats()
        model(columns[:4096], None, columns[1:4097])[0].backward()
        peak = format_bytes(torch.cuda.max_memory_allocated())
        say(f"`checkpoint={checkpoint}`: {peak} on the GPU")
else:
    say(
        "Skipped, as there is no GPU here. It would show the peak on the GPU for rows of 4,096 "
        "words, with and without a plan; a CPU takes too long for them."
    )

# %% [markdown] name="remember"
# ## What to remember
#
# > - In a language model look at the head first: words times vocabulary, several times over.
# > - Compute the logits of a chunk of words at a time, and never keep all of them.
# > - An LSTM's memory grows with the length of the text. Cut time into chunks; keep the states
# >   between them; recompute the chunks.
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
# The usual model's logits grow with it, all of them. `zoo.lstm` holds one chunk's logits, and its
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
