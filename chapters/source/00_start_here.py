# %% [markdown]
# # 0. Start here
#
# [Next: 1. One token at a time](01_one_token_at_a_time.ipynb) | [Glossary](glossary.md)
#
# A language model answers one word after another, and for every word it looks at everything that was said before. What it
# needs to look at can be kept. Where to keep it, and what to do when there is no room left, is the whole of this course.
#
# This page climbs the ladder once, quickly. Nothing has to be understood yet: run the cells, look at the numbers, and take
# along the question of each rung. The chapters build every rung from scratch.
#
# - **You will be able to** run a chapter, say what each one is about, and know where the ladder leads.
# - **You need** Python, NumPy, and a rough memory of what a matrix product is. PyTorch seen once is enough.
# - **Time** About ten minutes to read; half a minute to run.

# %% [markdown]
# ## How to use these notebooks
#
# - Run a cell with Shift+Enter, or all of them from the menu *Run*. Every number and figure below a cell was made by that cell.
# - A chapter asks you now and then to **predict** a number before you see it. The guess stays in a file beside the notebook
#   and is read by nobody. You can pass.
# - From chapter 2 on there is one **picture with controls**: move them with the mouse, or with Tab and the arrow keys.
# - An **Audit** takes a published figure and computes it again. Some are right, some are not.
# - Code that only draws is folded away: click the bar with the three dots to see it.
# - The **questions** at the end have folded answers. Answer first, then unfold.
#
# Open the notebooks with `python -m minikv learn`: it makes a working copy without outputs, which is yours to change.

# %% id="setup"
import time
from dataclasses import replace

import matplotlib.pyplot as plt

import minikv
from minikv.classroom.notebook import note
from minikv.lab.simulate import Scenario

plt.style.use("minikv.show.course")
model = minikv.load()  # a small model that we trained from scratch; it ships with the course
shape = model.shape
print(f"{shape.parameters / 1e6:.1f} million parameters, {shape.vocab:,} different tokens")

# %% [markdown]
# The model is tiny and knows little more than capitals. Its answers are not the point; *how much work* an answer costs is.
# Text is cut into **tokens**, here mostly whole words, and each is a number.

# %% id="first-words" tags=["nbval-check-output"]
prompt = "The capital of France is"
print(model.tokenizer.encode(prompt))
print(prompt + minikv.generate_with_cache(model, prompt, 8).text)

# %% [markdown]
# ## The job
#
# Eight people ask the same assistant about eight countries. Each prompt starts with the same instructions and ends with
# its own question, and each answer is 16 tokens long. We do this one job in four ways and count each time how many tokens
# went through the model. The answers must not change.

# %% id="job" tags=["nbval-check-output"]
INSTRUCTIONS = (
    "You are a patient guide to the cities of Europe. You know the capital of every country, "
    "the rivers that run through them, and the famous places that a visitor should see. "
    "Answer in one short sentence, name the city first, and never make up what you do not know. "
)
COUNTRIES = ["France", "Italy", "Spain", "Germany", "Austria", "Poland", "Norway", "Greece"]
prompts = [f"{INSTRUCTIONS}The capital of {country} is" for country in COUNTRIES]
ANSWER = 16
print("tokens in each prompt:", [len(model.tokenizer.encode(prompt)) for prompt in prompts])

# %% id="helpers"
table = {}  # what each way took: tokens through the model, passes of the model, seconds


def remember(way, computed_tokens, passes, started):
    table[way] = (computed_tokens, passes, time.perf_counter() - started)
    print(f"{way}: {computed_tokens:,} tokens through the model in {passes} passes")


# %% [markdown]
# ### Rung 1: forget everything
#
# The model as it is written down: to get the next token, push the whole text so far through it. For the token after that,
# push the whole text again, one token longer. (Chapter 1)

# %% id="rung-forget" tags=["nbval-check-output"]
started = time.perf_counter()
forgetful = [minikv.generate_without_cache(model, prompt, ANSWER) for prompt in prompts]
remember(
    "forget everything",
    sum(out.computed_tokens for out in forgetful),
    len(prompts) * ANSWER,
    started,
)

# %% [markdown]
# ### Rung 2: remember
#
# What the model computed about earlier tokens does not change when a new one comes. So it is kept: the **KV cache**. Each
# prompt goes through once, and then one token a pass. (Chapters 2 and 3)

# %% id="rung-remember" tags=["nbval-check-output"]
started = time.perf_counter()
remembering = [minikv.generate_with_cache(model, prompt, ANSWER) for prompt in prompts]
remember(
    "remember", sum(out.computed_tokens for out in remembering), len(prompts) * ANSWER, started
)
assert [out.tokens for out in remembering] == [out.tokens for out in forgetful]
print("The same answers, token for token.")

# %% [markdown]
# ### Rung 3: together
#
# The eight answers need not wait for each other: one pass of the model can carry a token of each. For that, the memory is cut
# into small blocks which are handed out as answers grow. The number of tokens stays; the number of passes falls.
# (Chapters 4, 5 and 7)

# %% id="rung-together" tags=["nbval-check-output"]
sampling = minikv.Sampling(max_new_tokens=ANSWER, ignore_eos=True)
engine = minikv.Engine(model, num_blocks=128, block_size=16, prefix_caching=False)
engine.generate(prompts[:2], sampling)  # once before, so that nothing below pays for starting up
before = engine.stats().steps
started = time.perf_counter()
together = engine.generate(prompts, sampling)
remember(
    "together", sum(out.computed_tokens for out in together), engine.stats().steps - before, started
)
assert [out.tokens for out in together] == [out.tokens for out in forgetful]
print("The same answers, token for token.")

# %% [markdown]
# ### Rung 4: share the beginning
#
# All eight prompts begin alike. Once the first has been computed, the other seven find its beginning in the memory and
# compute only what is their own. (Chapter 6)

# %% id="rung-share" tags=["nbval-check-output"]
engine = minikv.Engine(model, num_blocks=128, block_size=16)
started = time.perf_counter()
sharing = engine.generate(prompts[:1], sampling) + engine.generate(prompts[1:], sampling)
remember(
    "share the beginning",
    sum(out.computed_tokens for out in sharing),
    engine.stats().steps,
    started,
)
assert [out.tokens for out in sharing] == [out.tokens for out in forgetful]
print(
    "Tokens of each prompt that were found instead of computed:",
    [out.cached_tokens for out in sharing],
)

# %% [markdown]
# Four ways, one result. The first figure shows the work, which is exact and the same on every machine, and the time, which
# depends on yours.

# %% id="ladder-figure" tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True)
ways = list(table)[::-1]
for axis, column, title in (
    (left, 0, "tokens through the model"),
    (right, 2, "seconds on this machine"),
):
    values = [table[way][column] for way in ways]
    axis.barh(ways, values, color="#767676")
    axis.set_title(title)
    axis.grid(axis="x")
    axis.set_xlim(0, max(values) * 1.25)
    axis.locator_params(axis="x", nbins=4)
    for place, value in enumerate(values):
        axis.annotate(
            f"{value:,}" if column == 0 else f"{value:.2f}",
            (value, place),
            xytext=(4, -3),
            textcoords="offset points",
            fontsize=9,
        )
plt.show()
most, least = table["forget everything"][0], table["share the beginning"][0]
seconds = ", ".join(f"{took:.2f} s ({way})" for way, (_, _, took) in table.items())
note(
    f"**What to see.** The longest bar is the model without a memory: {most:,} tokens went through "
    f"it for an answer of {len(prompts) * ANSWER}. The shortest does the same job with {least:,}, "
    f"{most / least:.0f} times fewer. On the machine that built this page: {seconds}."
)

# %% [markdown]
# ## The top of the ladder, and the edge
#
# All of this rests on one thing: what was computed is still in memory when it is needed again. Memory ends.
#
# Picture agents that talk with a model over twelve turns, each turn a little longer than the one before, on one graphics card whose
# memory holds 13 such conversations. The engine of this course can run such a setting with a computed clock: all its
# decisions are real, only the seconds are arithmetic. Add one conversation after the other and look at the slowest answers.
# (Chapter 8)

# %% id="edge"
sessions = (6, 12, 13, 14, 15)
scenario = replace(Scenario(), block_size=250).with_capacity(13)
rows = [scenario.run(count) for count in sessions]
for row in rows:
    found, slowest = 100 * row.hit_rate, row.p99_ttft_s
    print(
        f"{row.sessions:2} conversations: {found:.0f} % of the prompts found in memory, "
        f"the slowest first tokens after {slowest:.1f} s"
    )

# %% id="edge-figure" tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7.5, 2.8))
axis.plot(
    sessions, [row.p99_ttft_s for row in rows], label="slowest first tokens (99 of 100 come sooner)"
)
axis.plot(sessions, [row.p50_ttft_s for row in rows], label="the middle one")
axis.axvline(13.5, color="#1f1f1f", linewidth=0.8, linestyle=(0, (6, 4)), marker="")
axis.annotate("13 fill the memory", (13.4, axis.get_ylim()[1] * 0.6), ha="right", fontsize=9)
axis.set_xticks(sessions)
axis.set_xlabel("conversations at the same time")
axis.set_ylabel("seconds until\nthe first token")
axis.legend(loc="upper left")
plt.show()
slow = {row.sessions: row.p99_ttft_s for row in rows}
note(
    f"**What to see.** Up to 13 conversations the slowest first tokens come after about "
    f"{slow[13]:.0f} s. With 14 they take {slow[14]:.0f} s. One conversation more, "
    f"{slow[14] / slow[13]:.0f} times the wait, while the middle one hardly moves: a cliff, not a "
    "slope. A measurement on such a card was published in 2026: 2.6 s with 12 sessions, 38.9 s "
    "with 14 (Momento, *The concurrency cliff is a memory limit*). Chapter 8 says what of this is "
    "computed, what is fitted, and why it has to happen."
)

# %% [markdown]
# ## The map
#
# One sentence holds the course together: **what changes from chapter to chapter is only where K and V live; the model never
# knows.** (What K and V are is the matter of chapter 1.)
#
# | chapter | the question |
# |---|---|
# | [1 One token at a time](01_one_token_at_a_time.ipynb) | What happens between a text and its next token, and why does it get slower? |
# | [2 Remember the keys](02_remember_the_keys.ipynb) | What can be kept, and what does it save? |
# | [3 What a token weighs](03_what_a_token_weighs.ipynb) | How many bytes is a remembered token, and why do bytes decide the speed? |
# | [4 The car park](04_the_car_park.ipynb) | Why is there no room although much is free? |
# | [5 Pages](05_pages.ipynb) | What if memory came in small, equal blocks? |
# | [6 Share the prefix](06_share_the_prefix.ipynb) | When may two requests use the same memory? |
# | [7 Many at once](07_many_at_once.ipynb) | Who computes in the next pass, and who waits? |
# | [8 The cliff](08_the_cliff.ipynb) | Why is one conversation too many so much too many? |
# | [Appendix](appendix_transformer.ipynb) | The rest of the transformer, in a few lines each |
#
# Each chapter ends at a module of `minikv`, the engine that this course builds, and shows its source. The code is small enough to be
# read whole. The terms, in English and Chinese, stand in the [glossary](glossary.md).
#
# **Next:** [one token at a time](01_one_token_at_a_time.ipynb), and why the time for each grows.
