# %% [markdown] id="title"
# # 8. The cliff
#
# [Before: 7. Many at once](07_many_at_once.ipynb) | [Back to 0. Start here](00_start_here.ipynb) | [Glossary](glossary.md)
#
# **You will be able to**
#
# - say beforehand, with one division, how many conversations a server can hold before its slowest answers become many times slower;
# - explain why it is a cliff and not a slope, and who exactly waits behind it;
# - move the cliff: choose what to shorten, to share or to store smaller, and check your arithmetic with a simulator.
#
# **You need** chapters [3](03_what_a_token_weighs.ipynb) (bytes a token, roofline), [5](05_pages.ipynb) (blocks), [6](06_share_the_prefix.ipynb) (prefix sharing, LRU eviction) and
# [7](07_many_at_once.ipynb) (steps, chunked prefill, first come, first served).
#
# **Time** About 45 minutes to read; half a minute to run on two quiet cores.

# %% id="setup"
import random
from collections import OrderedDict
from dataclasses import replace
from functools import cache

import matplotlib.pyplot as plt
import numpy as np

import minikv
from minikv.cache.blocks import BlockPool, BlockTable, blocks_for
from minikv.cache.prefix import KeyChain, PrefixCache
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source
from minikv.lab.cliff import PUBLISHED, SAFE, measure
from minikv.lab.replay import BLOCK_TOKENS, replay
from minikv.lab.simulate import RooflineRunner, Scenario
from minikv.lab.workload import Workload, run_sessions

plt.style.use("minikv.show.course")
model = minikv.load()

# %% [markdown] id="predictions"
# ## Two guesses first
#
# In a moment you will give the engine a pool of KV blocks that holds exactly 6 whole conversations, and run 1, 5, 6, 7 and 8 of them side by side.

# %% id="predict-p99"
predict(
    "one-session-more",
    "The pool holds 6 conversations. You run 8 instead of 5. How many times as long do the slowest "
    "first tokens take?",
    "times",
)

# %% id="predict-rotation"
predict(
    "seven-in-six-places",
    "A cache has 6 places and throws out the least recently used. 7 items are asked for in turn, "
    "over and over: 1, 2, ... 7, 1, 2, ... "
    "Of 70 requests after the first round, how many find their item?",
    "hits",
)

# %% [markdown] id="session"
# ## What an agent does to a cache
#
# An agent works in a loop. It begins with a long *system prompt* (who it is, its tools, the repository). Then something happens (a question, a
# tool's result), the model answers, something happens again. Each such exchange is a [turn](glossary.md#turn); all turns of one conversation are a
# [session](glossary.md#session). A model remembers nothing between requests, so **every turn sends the whole conversation again**, with a few tokens
# more at the end.
#
# Two things about the order of events matter later. A session sends its next turn only when it has its answer: a slow server is also asked
# less often.
# That is a [closed loop](glossary.md#closed-loop). And between an answer and the next turn may lie a pause, the [think
# time](glossary.md#think-time): a person
# reads, a tool runs.
#
# `minikv.lab.workload` plays such sessions. This is the small one that you will measure:

# %% id="session-turns" tags=["nbval-check-output"]
BLOCK = 16
workload = Workload(system_tokens=512, turns=12, turn_tokens=60, output_tokens=4)
print("turn   prompt   of it cached   to compute")
for turn in (0, 1, 2, 6, 11):
    prompt = workload.prompt_tokens(turn)
    cached = workload.cacheable_tokens(turn, BLOCK) if turn else 0
    print(f"{turn + 1:4}   {prompt:6,}   {cached:12,}   {prompt - cached:10,}")

# %% [markdown] id="session-meaning"
# The first turn is cold. From the second on, all but the last piece of the prompt was computed in the turn before. If its blocks are still there (a
# hit, chapter 6), a turn is cheap however long the conversation has become. "If they are still there" is what this chapter is about.

# %% [markdown] id="arithmetic"
# ## How many fit
#
# The arithmetic of chapters 5 and 6: the system prompt's blocks are shared and lie in the pool once. What a session adds is its own. At its
# end each session needs
# its own part in whole blocks, so the pool for K sessions is a sum and the K of a pool is a division:

# %% id="arithmetic-blocks" tags=["nbval-check-output"]
K = 6
shared_blocks = workload.system_tokens // BLOCK
own_blocks = workload.turns * (workload.turn_tokens + workload.output_tokens) // BLOCK
pool_blocks = shared_blocks + K * own_blocks
fits = (pool_blocks - shared_blocks) // own_blocks

assert pool_blocks == workload.blocks(K, BLOCK)
assert fits == K
print(
    f"{shared_blocks} shared + {K} x {own_blocks} own = {pool_blocks} blocks, for {fits} sessions"
)

# %% [markdown] id="arithmetic-when"
# A session is only that long in its last turn. So with one session too many the pool overflows late. When? Walk through the turns and compare:


# %% id="arithmetic-overflow" tags=["nbval-check-output"]
def first_overflow(sessions):
    """The first turn (counted from 1) in which so many sessions need more blocks than there are."""
    for turn in range(workload.turns):
        stored = workload.prompt_tokens(turn) + workload.output_tokens - 1  # the last is not fed
        own_tokens = stored - workload.system_tokens
        if shared_blocks + sessions * blocks_for(own_tokens, BLOCK) > pool_blocks:
            return turn + 1
    return None  # all fit to the end


overflow = {sessions: first_overflow(sessions) for sessions in (K - 5, K - 1, K, K + 1, K + 2)}
for sessions, turn in overflow.items():
    when = "fit to the end" if turn is None else f"overflow in turn {turn} of {workload.turns}"
    print(f"{sessions} sessions: {when}")

# %% [markdown] id="measure"
# ## Measure it
#
# Now for real: the engine of chapter 7, the bundled model, exactly that pool. `measure` runs each number of sessions from an empty cache to
# the end and calls
# us with every finished turn. No think time: whoever has an answer goes on at once.

# %% id="measure-run"
turns = {sessions: [] for sessions in overflow}


def keep(sessions, turn):
    turns[sessions].append(turn)


rows = measure(model, workload, K, list(overflow), BLOCK, on_turn=keep)
measured = {row.sessions: row for row in rows}

# %% [markdown] id="measure-counters"
# **Counters first.** They are the same on every machine and every day. *Hit rate* is the share of the prompts' tokens that was found in the
# cache, over all
# *warm* turns, which are those from the second on; *possible* is what a cache that forgets nothing would reach. A turn has *missed* when it
# found less than
# that: some of what it had computed before was gone.


# %% id="measure-count" tags=["nbval-check-output"]
def missed(turn, workload=workload, block=BLOCK):
    """True when a warm turn found less than all full blocks that the turn before had left."""
    return turn.turn > 0 and turn.cached_tokens < workload.cacheable_tokens(turn.turn, block)


print("sessions   hit rate   possible   missed turns   first in turn   evictions")
for row in rows:
    lost = [turn.turn + 1 for turn in turns[row.sessions] if missed(turn)]
    warm = row.sessions * (workload.turns - 1)
    print(
        f"{row.sessions:8}   {row.hit_rate:8.1%}   {row.best_hit_rate:8.1%}   {len(lost):5} of "
        f"{warm:3}"
        f"   {min(lost, default='-'):>13}   {row.evictions:9,}"
        f"{'   <- fits' if row.sessions == K else ''}"
    )

# %% id="measure-assert" tags=["nbval-check-output"]
for sessions, row in measured.items():
    lost = [turn.turn + 1 for turn in turns[sessions] if missed(turn)]
    if sessions <= K:
        assert row.hit_rate == row.best_hit_rate
        assert row.evictions == 0
        assert not lost
    else:
        assert row.hit_rate < row.best_hit_rate
        assert row.evictions > 0
        assert min(lost) >= overflow[sessions]
print(f"up to {K} sessions nothing is ever lost; with {K + 1} the hit rate falls,")
print("and no turn misses before the arithmetic says so")

# %% [markdown] id="percentiles"
# **Then the clock.** One number for many waiting times hides the bad ones, so operators look at two. Sort all times to first token
# (TTFT, chapter 2): half of them are at most the [p50](glossary.md#p50), 99 in 100 are at most the [p99](glossary.md#p99). The p50 is the
# ordinary wait. The p99 is the *tail*: among fewer than a hundred turns, as here, it is simply the slowest of all.

# %% id="measure-clock"
print("sessions   p50 (ms)   p99 (ms)   tokens/s")
for row in rows:
    print(
        f"{row.sessions:8}   {1000 * row.p50_ttft_s:8,.0f}   {1000 * row.p99_ttft_s:8,.0f}   "
        f"{row.tokens_per_s:8,.0f}"
    )

# %% id="measure-figure" tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
counts = list(measured)
left.plot(counts, [1000 * row.p99_ttft_s for row in rows], label="p99")
left.plot(counts, [1000 * row.p50_ttft_s for row in rows], label="p50")
left.set(
    yscale="log", xlabel="sessions", ylabel="time to first token (ms)", title="The tail falls off"
)
left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
right.plot(counts, [100 * row.hit_rate for row in rows], label="hit rate")
right.plot(counts, [100 * row.best_hit_rate for row in rows], label="possible")
right.set(
    xlabel="sessions",
    ylabel="prompt tokens cached (%)",
    ylim=(0, 102),
    title="What the cache still finds",
)
for axis in (left, right):
    axis.axvline(K + 0.5, color="black", linestyle=(0, (6, 4)), linewidth=1)
    axis.set_xticks(counts)
    axis.legend(loc="lower left" if axis is right else "upper left")
plt.show()

before, after = measured[K - 1], measured[K + 2]
note(
    "**What to see.** The dashed line stands where the arithmetic put it. Left of it nothing is lost, "
    "and the waits grow because more sessions share each step: a slope. "
    f"Right of it, turns that miss pull the p99 away from the p50. From {K - 1} sessions to {K + 2} the p99 goes from "
    f"{1000 * before.p99_ttft_s:,.0f} to {1000 * after.p99_ttft_s:,.0f} ms "
    f"on the machine that built this page, **{after.p99_ttft_s / before.p99_ttft_s:.0f} times** as "
    f"much, the p50 from {1000 * before.p50_ttft_s:,.0f} to {1000 * after.p50_ttft_s:,.0f} ms. "
    f"On the right a loss of {100 * (after.best_hit_rate - after.hit_rate):.0f} percentage points "
    "of hits does not look like a catastrophe. It is one. (A busy machine bends the curves on the left; "
    "those on the right are counts and stay as they are.)"
)

# %% id="compare-p99"
compare("one-session-more", after.p99_ttft_s / before.p99_ttft_s, "times")

# %% [markdown] id="tail"
# This is the [cliff](glossary.md#cliff): a gentle slope up to a number that a division gives, and then a wall.
#
# ### The p50 does not see it
#
# A dashboard with the median, or the mean over a day, shows nothing. Put all warm turns of a run in order, fastest first, and the reason shows.

# %% id="tail-figure" tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7.5, 3.2))
for sessions, style in ((K, ":"), (K + 1, "--"), (K + 2, "-")):
    waits = sorted(1000 * turn.ttft_s for turn in turns[sessions] if turn.turn)
    share = 100 * np.arange(1, len(waits) + 1) / len(waits)
    axis.plot(share, waits, color="black", linestyle=style, marker="", label=f"{sessions} sessions")
axis.axvline(50, color="grey", linewidth=0.8)
axis.text(51, 1.02, "p50", transform=axis.get_xaxis_transform(), fontsize=9)
axis.set(yscale="log", xlabel="share of the turns (%)", ylabel="time to first token (ms)")
axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
axis.legend(loc="upper left")
plt.show()

share_lost = {
    sessions: sum(map(missed, turns[sessions])) / (sessions * (workload.turns - 1))
    for sessions in (K + 1, K + 2)
}
note(
    f"**What to see.** Look at the right end, where the curves part. With {K + 1} "
    f"sessions {share_lost[K + 1]:.0%} of the warm turns miss, with {K + 2} "
    f"{share_lost[K + 2]:.0%}. They are the right end of the curve; the middle, where the p50 is "
    "read, belongs to the others."
)

# %% [markdown] id="map"
# ### Where it misses
#
# Each square below is a turn: a row for each session, the turns from left to right. Dark: the turn found all that could be cached. Where it
# found less, the number says how many hundredths of it.

# %% id="map-figure" tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.1))
for axis, sessions in zip(axes, (K, K + 1), strict=True):
    found = np.zeros((sessions, workload.turns))
    for turn in turns[sessions]:
        if turn.turn:
            possible = workload.cacheable_tokens(turn.turn, BLOCK)
            found[turn.session, turn.turn] = turn.cached_tokens / possible
    axis.imshow(found, cmap="gray_r", vmin=0, vmax=1.4, aspect="auto")
    for (session, turn), share in np.ndenumerate(found):
        text = "cold" if turn == 0 else f"{100 * share:.0f}" if share < 1 else ""
        ink = "white" if turn and share > 0.8 else "black"
        axis.text(turn, session, text, ha="center", va="center", fontsize=7, color=ink)
    axis.set_xticks(range(0, workload.turns, 2), range(1, workload.turns + 1, 2))
    axis.set_yticks(range(sessions), range(1, sessions + 1))
    axis.set(xlabel="turn", ylabel="session", title=f"{sessions} sessions over room for {K}")
    axis.grid(visible=False)
plt.show()


def misses_in(turn):
    """How many of the K + 1 sessions miss in this turn (counted from 1)."""
    return sum(missed(each) for each in turns[K + 1] if each.turn == turn - 1)


note(
    f"**What to see.** With {K} sessions every turn finds everything. With {K + 1} all is well until "
    f"turn {overflow[K + 1]}, in which the arithmetic says that the pool overflows. "
    f"Then it is not one session that pays: in that turn {misses_in(overflow[K + 1])} of {K + 1} "
    f"miss, in the last {misses_in(workload.turns)}, and from one to the next they find less."
)

# %% [markdown] id="why"
# ## Why a cliff and not a slope
#
# The pool is short by one session in seven. One would think that a seventh of the tokens is lost. Why does nearly everybody lose?
#
# Forget engines for a moment. Here is LRU in ten lines, with items instead of blocks: an ordered list, the least recently used first.


# %% id="lru-by-hand" tags=["nbval-check-output"]
def lru_hits(places, requests):
    """Requests that find their item when the least recently used makes room for a new one."""
    kept, hits = OrderedDict(), 0
    for item in requests:
        if item in kept:
            hits += 1
            kept.move_to_end(item)  # used just now: the last to go
        else:
            if len(kept) == places:
                kept.popitem(last=False)  # the first in line is the least recently used
            kept[item] = True
    return hits


def rotation(items, rounds):
    return [number % items for number in range(items * rounds)]


for items in (K - 1, K, K + 1):
    requests = rotation(items, rounds=11)
    print(
        f"{items} items in {K} places: {lru_hits(K, requests):2} hits in the "
        f"{len(requests) - items} requests after the first round"
    )

# %% id="compare-rotation"
compare("seven-in-six-places", lru_hits(K, rotation(K + 1, 11)), "hits")

# %% [markdown] id="lru-watch"
# From all to none, by one item. Watch it happen:

# %% id="lru-watching" tags=["nbval-check-output"]
kept = list(range(1, K + 1))
print("kept, oldest first    comes   thrown out   comes next")
for item in (7, 1, 2, 3, 4):
    thrown_out, comes_next = kept[0], item % (K + 1) + 1
    assert thrown_out == comes_next
    print(f"{kept}    {item:5}   {thrown_out:10}   {comes_next:10}")
    kept = [*kept[1:], item]

# %% [markdown] id="lru-meaning"
# In a rotation the least recently used item is always the one that comes next. LRU bets that what was used long ago will be wanted last,
# and sessions that take turns are
# the one pattern for which this bet is always lost. (A user of llama.cpp's server noticed it in public: ten slots and eleven prompts in
# rotation, and nothing is ever
# reused; [discussion 13606](https://github.com/ggml-org/llama.cpp/discussions/13606).)
#
# Now the same with the engine's own `BlockPool` and `PrefixCache`. `minikv.lab.replay` sends lists of block ids through them: no model, no
# clock, only who finds
# what. Every session is a few shared blocks and eight of its own.

# %% id="replay-rotation" tags=["nbval-check-output"]
SHARED, OWN = 3, 8


def session_blocks(session):
    """Block ids of a whole session: the shared ones, then its own."""
    return [*range(SHARED), *range(SHARED + session * OWN, SHARED + (session + 1) * OWN)]


def own_blocks_found(order, policy):
    """With room for K sessions: the share of own blocks found when they came again."""
    order = list(order)
    done = replay(
        [session_blocks(session) for session in order], (SHARED + K * OWN) * BLOCK_TOKENS, policy
    )
    again = len(order) - len(set(order))
    return (done.block_hits - (len(order) - 1) * SHARED) / (again * OWN)


for sessions in (K - 1, K, K + 1):
    found = own_blocks_found(rotation(sessions, 11), "lru")
    by_hand = lru_hits(K, rotation(sessions, 11)) / (10 * sessions)
    assert found == by_hand
    print(
        f"{sessions} sessions: {found:.0%} of their own blocks are found again (by hand: "
        f"{by_hand:.0%})"
    )

# %% [markdown] id="belady"
# ### A slope was possible
#
# Is there no better choice? In 1966 L. A. Belady described the best: throw out what will be needed *last*. It needs to know the future, so
# no server can have it; but a
# replay can, and it says how much of a loss is the policy's fault. Two more lines: the same sessions in **random** order, under LRU and
# under [Belady](glossary.md#belady)'s
# policy.

# %% id="belady-figure" tags=["hide-input"]
dice = random.Random(8)
tried = range(K - 3, 2 * K + 4)
orders = {sessions: [dice.randrange(sessions) for _ in range(30 * sessions)] for sessions in tried}
lines = {
    "rotation, LRU": [own_blocks_found(rotation(sessions, 30), "lru") for sessions in tried],
    "rotation, Belady": [own_blocks_found(rotation(sessions, 30), "optimal") for sessions in tried],
    "random, LRU": [own_blocks_found(orders[sessions], "lru") for sessions in tried],
    "random, Belady": [own_blocks_found(orders[sessions], "optimal") for sessions in tried],
}
figure, axis = plt.subplots(figsize=(7.5, 3.4))
ends = sorted(lines, key=lambda label: lines[label][-1])
heights = []
for label in ends:  # no label on another
    heights.append(max(100 * lines[label][-1], heights[-1] + 7 if heights else 0))
for label, height in zip(ends, heights, strict=True):
    dashes, tone = "--" if "random" in label else "-", "black" if "LRU" in label else "grey"
    found = [100 * share for share in lines[label]]
    axis.plot(tried, found, color=tone, linestyle=dashes, marker="o")
    axis.text(tried[-1] + 0.3, height, label, va="center", fontsize=9)
axis.set(xlabel="sessions", ylabel="own blocks found again (%)", xlim=(2.7, tried[-1] + 3.2))
axis.axvline(K + 0.5, color="black", linestyle=(0, (6, 4)), linewidth=1)
axis.set_xticks(list(tried))
plt.show()

at = list(tried).index(K + 1)
assert lines["rotation, LRU"][at] == 0
assert min(lines["rotation, Belady"][at], lines["random, LRU"][at]) > 0.8
note(
    f"**What to see.** With {K + 1} sessions LRU finds {lines['rotation, LRU'][at]:.0%} in a rotation. "
    f"Belady would find {lines['rotation, Belady'][at]:.0%} of the very same requests: "
    "at any moment one session is out and the others are whole, and it is another one after each "
    "miss. And in random order LRU itself finds "
    f"{lines['random, LRU'][at]:.0%}, because then the oldest is not always the next. "
    f"The memory allows a slope. Rotation *and* LRU together make the cliff."
)

# %% [markdown] id="belady-so"
# So why do engines use LRU all the same? Because it needs no prophecy, costs next to nothing a block, and is good for most traffic. What
# one can do about its one bad case is to keep the
# sessions few enough, which is the subject of the rest of this chapter, or to let blocks fall into a larger, slower memory, which is that
# of the next.

# %% [markdown] id="cascade"
# ## The second half: everyone waits for the recomputed
#
# Real sessions grow, so the rotation closes only at their ends. Then two things happen that the ten lines above did not show. First, losses
# *cascade*. Here are the last
# turns of the run that was one session too large, from the overflow on, in the order in which the sessions got their first token:

# %% id="cascade-table" tags=["nbval-check-output"]
hit_computes = workload.prompt_tokens(1) - workload.cacheable_tokens(1, BLOCK)
print(f"{K + 1} sessions: tokens of each prompt to compute (a hit computes {hit_computes})")
for number in range(overflow[K + 1], workload.turns + 1):
    served = [turn for turn in turns[K + 1] if turn.turn == number - 1]
    served.sort(key=lambda turn: turn.arrived_at + turn.ttft_s)
    computed = [turn.prompt_tokens - turn.cached_tokens for turn in served]
    print(f"turn {number}:", " -> ".join(map(str, computed)))

# %% [markdown] id="cascade-meaning"
# Each session that recomputes takes blocks from the next in line, and a little more than were taken from it, because it has grown by a turn
# as well. The debt is
# handed on and grows, at most until a session finds nothing but the shared system prompt. One session too many is paid for by all.
#
# Second, **a miss is a long prefill, and whoever comes after it stands behind it**. The engine admits first come, first served (chapter 7),
# and a step has only so many tokens.
# To see it undisturbed by a noisy clock, we need the other half of the laboratory.

# %% [markdown] id="l4"
# ## At full scale: a GPU that you do not have
#
# The experiment that made this cliff known was published by Momento in 2026: Qwen3-4B with fp8 weights on one NVIDIA L4 (24 GB), served by
# vLLM; a shared system prompt of
# 10,000 tokens, then 12 turns of about 1,000 new tokens each, answers of at most 75. The talk says that about 13 conversations fit. Chapter
# 3's arithmetic:

# %% id="l4-fits" tags=["nbval-check-output"]
l4 = Scenario(block_size=250)  # by default the published experiment; why 250 stands below
per_token = l4.shape.kv_bytes_per_token("fp8")
whole, shared = 22_800, 10_000  # as published: tokens of a full session, and of its system prompt
apart, together = 13 * whole, shared + 13 * (whole - shared)
print(f"13 sessions apart:     {apart:,} tokens = {apart * per_token / 1e9:.1f} GB")
print(f"13 that share it:      {together:,} tokens = {together * per_token / 1e9:.1f} GB")
weights, memory = l4.shape.parameters / 1e9, l4.machine.memory_bytes / 1e9
print(f"weights at a byte each: {weights:.1f} GB (published: 4.4 GB), of {memory:.0f} GB in all")

# %% id="claim-fits"
claim("13-conversations-fit", together, source="talk")

# %% [markdown] id="l4-how"
# Where is the time to come from without the GPU? The engine never asks what time it is; its *runner* executes a plan and says when it
# ended. So `RooflineRunner` computes no
# token at all. It adds up what the step must move and multiply (the roofline of chapter 3) and moves a clock by that. **Scheduler, pool,
# prefix cache and
# sessions are the real ones.** Hits, evictions and queues are not modelled; they happen.
#
# Is that so? A claim about counters can be checked. Simulate the very runs that you measured, with any clock, here the L4's:

# %% id="l4-twin" tags=["nbval-check-output"]
for sessions, row in measured.items():
    runner = RooflineRunner(model.shape, l4.machine, pool_blocks, BLOCK)
    engine = minikv.Engine(runner=runner, max_batch_tokens=512)
    simulated = run_sessions(engine, workload, sessions)
    decisions = {
        (turn.session, turn.turn): (turn.cached_tokens, turn.computed_tokens) for turn in simulated
    }
    assert decisions == {
        (turn.session, turn.turn): (turn.cached_tokens, turn.computed_tokens)
        for turn in turns[sessions]
    }
    assert engine.stats().evictions == row.evictions
print(
    f"cached and computed tokens of all {sum(map(len, turns.values()))} measured turns, and all "
    "evictions: the same, turn by turn"
)

# %% [markdown] id="l4-times"
# The decisions are the same to the token. (They must be: without think time nothing in the engine looks at the clock. With it, the clock
# says who comes back first.) The *times* are a model: the least that a machine of these rates needs. How near it comes you can
# try on your own machine,
# with rates measured there: `python -m minikv cliff --json cliff.json`, then `python -m minikv simulate cliff --measured cliff.json` (about
# a minute; the README says what came out
# for us, and how a busy machine spoils it).
#
# ### Audit: twelve, fourteen
#
# Two things were not published: how much memory was left for KV, and how many tokens a step may have. The first we *fit*: memory for 13
# sessions, because the talk says 13.
# To see what depends on it, we compute 9 and 16 as well, which other sums of "what is left beside the weights" would give. Where all
# sessions fit, the size of the pool makes no difference, so
# those rows are computed once.


# %% id="l4-rows"
@cache
def row_for(room, sessions):
    """The computed row for so many sessions over memory for ``room``."""
    if sessions <= room < 16:
        return row_for(16, sessions)  # nothing is ever evicted: a larger pool gives the same row
    return l4.with_capacity(room).run(sessions)


COUNTS = (6, 12, 13, 14, 16)
published = {point["sessions"]: point["p99_ttft_s"] for point in PUBLISHED}
words = {SAFE["sessions"]: f"under {SAFE['p99_below_s']} s"}
words |= {sessions: f"{seconds} s" for sessions, seconds in published.items()}
print("            p99 (s), computed, room for       room for 13         published")
print("sessions         9        13        16     p50 (s)   hit rate         p99")
for sessions in COUNTS:
    nine, thirteen, sixteen = (row_for(room, sessions) for room in (9, 13, 16))
    print(
        f"{sessions:8}   {nine.p99_ttft_s:7.1f}   {thirteen.p99_ttft_s:7.1f}   "
        f"{sixteen.p99_ttft_s:7.1f}"
        f"     {thirteen.p50_ttft_s:7.2f}   {thirteen.hit_rate:8.1%}   {words.get(sessions, ''):>9}"
    )

# %% id="l4-figure" tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7.5, 3.6))
for room, style, tone in ((9, ":", "grey"), (13, "-", "black"), (16, "--", "grey")):
    tail = [row_for(room, sessions).p99_ttft_s for sessions in COUNTS]
    label = f"p99 computed, room for {room}"
    axis.plot(COUNTS, tail, color=tone, linestyle=style, marker="o", label=label)
middle = [row_for(13, sessions).p50_ttft_s for sessions in COUNTS]
axis.plot(
    COUNTS, middle, color="black", linestyle="-.", marker="s", label="p50 computed, room for 13"
)
axis.plot(*zip(*published.items(), strict=True), "kx", markersize=11, label="p99 published")
axis.set(yscale="log", xlabel="sessions", ylabel="time to first token (s)")
axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
axis.set_xticks(COUNTS)
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

twelve, thirteen, fourteen = (row_for(13, sessions) for sessions in (12, 13, 14))
assert thirteen.hit_rate == thirteen.best_hit_rate
assert fourteen.hit_rate < fourteen.best_hit_rate
note(
    "**What to see.** The same wall, wherever the capacity puts it. With room for 13 the p99 goes from "
    f"{twelve.p99_ttft_s:.1f} s at 12 sessions to {fourteen.p99_ttft_s:.0f} s at 14, "
    f"and the p50 from {twelve.p50_ttft_s:.2f} to {fourteen.p50_ttft_s:.2f} s. The published points "
    f"({published[12]} and {published[14]} s) lie higher than the ones computed with that room: "
    f"the clock counts moving and multiplying and knows nothing of what a real server does besides."
)

# %% id="claim-p99"
claim("p99-2.6-to-38.9", fourteen.p99_ttft_s / twelve.p99_ttft_s, source="talk")

# %% [markdown] id="l4-open"
# ### What was fitted, what was chosen
#
# Read such a table as you would read anybody's.
#
# - **Fitted**: the capacity. That the cliff stands between 13 and 14 is therefore no discovery. That there *is* one, and how long its
#   tail is: nothing was fitted for that. How steep it looks also depends on what was chosen, below.
# - **Taken over**: how fast the L4 multiplies. The clock has its memory rate from the data sheet, but for operations a lower, *effective*
#   rate, which was derived from somebody else's prefill of another model, without its attention (with it, the rate would be about a sixth
#   higher and every prefill that much shorter). All seconds of a prefill hang on it; no hit and no miss does.
# - **Few**: a row has eleven warm turns for each session. So its p99 is the slowest turn of all, or the second slowest, of a single run.
# - **Chosen**: the tokens a step. 4,096 was chosen after 512, 2,048, 4,096 and 8,192 had been tried, and it is not what vLLM is known to
#   have used. This is how much depends on it at 12
#   sessions (at 14 it hardly matters; the README has the figures):

# %% id="l4-budgets"
tera, giga = l4.machine.flops_per_s / 1e12, l4.machine.bytes_per_s / 1e9
peak = l4.machine.peak_flops_per_s / 1e12
print(f"the clock: {tera:.0f} TFLOP/s (data sheet: {peak:.0f}), {giga:.0f} GB/s")
for budget in (512, 2_048, 4_096, 8_192):
    row = replace(l4, max_batch_tokens=budget).with_capacity(13).run(12)
    assert budget != l4.max_batch_tokens or row == row_for(13, 12)  # 13 or 16: no difference
    print(
        f"steps of up to {budget:5,} tokens: p99 at 12 sessions {row.p99_ttft_s:.1f} s (published: "
        f"{published[12]} s)"
    )

# %% [markdown] id="l4-large"
# - **Coarse**: blocks of 250 tokens instead of 16, so that a row takes a fraction of a second. A turn can then lose up to 249 tokens of a
#   partly filled block where it would lose 15. On the row that
#   matters most:

# %% id="l4-blocks"
fine = Scenario(block_size=16).with_capacity(13).run(14)
for size, row in ((16, fine), (l4.block_size, fourteen)):
    print(
        f"blocks of {size:3}: p50 {row.p50_ttft_s:.2f} s, p99 {row.p99_ttft_s:.1f} s, hit rate "
        f"{row.hit_rate:.1%} of {row.best_hit_rate:.1%} possible"
    )

# %% [markdown] id="queue"
# ### Who waits for whom
#
# Now the queue. These are the last turns of the 14 computed sessions: each bar runs from the moment a turn is sent to its first token.

# %% id="queue-figure" tags=["hide-input"]
sent = []
l4.with_capacity(13).run(14, sent.append)
final = [turn for turn in sent if turn.turn == l4.workload.turns - 1]
final.sort(key=lambda turn: turn.arrived_at + turn.ttft_s)
start = final[0].arrived_at
figure, axis = plt.subplots(figsize=(7.5, 3.8))
for place, turn in enumerate(final):
    lost = missed(turn, l4.workload, l4.block_size)
    look = {"color": "silver", "hatch": "//"} if lost else {"color": "black"}
    sent_at, first_at = turn.arrived_at - start, turn.arrived_at + turn.ttft_s - start
    axis.barh(place, turn.ttft_s, left=sent_at, edgecolor="black", **look)
    words = f"computes {turn.prompt_tokens - turn.cached_tokens:,}"
    axis.text(first_at + 0.4, place, words, va="center", fontsize=8)
axis.set(
    xlabel="seconds since the first of them was sent", ylabel="in order of first token", yticks=[]
)
axis.set_xlim(-0.5, 1.25 * max(turn.arrived_at + turn.ttft_s - start for turn in final))
axis.invert_yaxis()
plt.show()

worst = final[-1]
again = worst.prompt_tokens - worst.cached_tokens
runner = RooflineRunner(l4.shape, l4.machine, 1, 250, "fp8", "fp8")
alone = runner.step_seconds([(again, worst.prompt_tokens)], 1)
note(
    f"**What to see.** Hatched bars missed, and they stand in line. The last session computes {again:,} "
    f"tokens again. Alone on the L4 that would take {alone:.1f} s; "
    f"it waits {worst.ttft_s:.0f} s, because the recomputations of all the others go first. That is "
    "the height of the cliff: not one long prefill, but a queue of them."
)

# %% [markdown] id="lucky"
# ### The lucky few
#
# Behind the cliff some still hit, and their users swear that the server is fast. Compare the sessions' mean times to first token:

# %% id="lucky-few"
for sessions in (12, 14, 16):
    row = row_for(13, sessions)
    print(
        f"{sessions} sessions: luckiest {row.luckiest_ttft_s:.2f} s, unluckiest "
        f"{row.unluckiest_ttft_s:.2f} s, {row.unluckiest_ttft_s / row.luckiest_ttft_s:.1f} times"
    )
whole_turns = sum(not missed(turn, l4.workload, l4.block_size) for turn in final)
note(
    f"In the last turn with 14 sessions {whole_turns} of {len(final)} still found everything. Some "
    "spread there is without any miss, as with 12 sessions: "
    f"the luckiest is one whose turns arrive between those of the others."
)

# %% [markdown] id="swap"
# ### An old acquaintance
#
# Whoever ran servers in the 2000s has seen this picture. A machine had a little less memory than its programs touched in turn. It did not
# get a little slower; it began to *swap*, the disk light
# stayed on, and nothing moved any more, while the one program that was still in memory felt fine. P. J. Denning called it [thrashing](glossary.md#thrashing) in
# 1968 and gave the remedy, too: admit no more
# programs than their working sets fit. A session's KV is its working set.

# %% [markdown] id="move"
# ## Move the cliff
#
# The line stands where `memory = shared + K x own` puts it. So there are three things that move it: more memory or fewer bytes a token,
# more of the session shared, less that is a session's own.
#
# **Your turn.** The L4 has the same memory for KV as above. Make **20 sessions** fit: change the numbers in the first lines, predict with
# the arithmetic, run, compare. As it stands, it fails.

# %% id="move-cell"
system_tokens = 10_000  # shared by all sessions
turn_tokens = 1_000  # new in every turn; what all have in common could move to the system prompt
turns_a_session = 12
kv_dtype = "fp8"  # bf16, fp8 or int4
think_time_s = 0.0


def try_it(sessions, system_tokens, turn_tokens, turns, kv_dtype, think_time_s):
    changed_workload = Workload(system_tokens, turns, turn_tokens, 75, think_time_s)
    changed = replace(l4.with_capacity(13), kv_dtype=kv_dtype, workload=changed_workload)
    row = changed.run(sessions)
    own = changed.workload.own_tokens
    print(
        f"{system_tokens:,} shared ({system_tokens / (system_tokens + own):.0%}) + {own:,} own, "
        f"{kv_dtype}, think time {think_time_s:g} s: {changed.fits} fit\n"
        f"   {sessions} simulated: hit rate {row.hit_rate:.1%} of {row.best_hit_rate:.1%} possible, "
        f"p50 {row.p50_ttft_s:.1f} s, p99 {row.p99_ttft_s:.1f} s"
    )
    return changed.fits, row


mine, my_row = try_it(20, system_tokens, turn_tokens, turns_a_session, kv_dtype, think_time_s)
print("20 fit: well done" if mine >= 20 else f"20 do not fit: {20 - mine} too many")

# %% [markdown] id="move-answers"
# When you have tried: one change at a time, and a trap among them.

# %% id="move-ways"
ways = {
    "a longer think time": (10_000, 1_000, 12, "fp8", 60.0),
    "two thirds of the turns": (10_000, 1_000, 8, "fp8", 0.0),
    "450 tokens of each turn moved into the system prompt": (15_500, 550, 12, "fp8", 0.0),
    "a smaller KV dtype": (10_000, 1_000, 12, "int4", 0.0),
}
outcome = {}
for way, values in ways.items():
    print(f"{way}:")
    outcome[way] = try_it(20, *values)
for fitting, row in outcome.values():  # the arithmetic is right about every one of them
    assert (row.hit_rate == row.best_hit_rate) == (fitting >= 20)

# %% [markdown] id="move-meaning"
# - **Think time** is the trap. It spreads the load over time, but a session that thinks still wants its blocks back: they must lie
#   somewhere meanwhile. The cliff stays where it is. (In
#   this simulation all sessions begin at once and think equally long, so that they even come back together.)
# - **Two thirds of the turns** free a third of each session's own part and are still not enough. Divide before you promise.
# - **Sharing more** costs the users nothing, if it stands at the front and is the same for all to the byte (chapter 6).
# - **int4** stores numbers in about half a byte. What that does to the answers is another question, which this course does not measure.

# %% [markdown] id="explorer"
# ## See it: where the line stands
#
# The curves were simulated in advance for the same model and GPU, with sessions that end at 16,000 tokens after 8 turns; the crosses are
# simulated at this very moment. Memory is
# counted in sessions that share *nothing*. Use Tab and the arrow keys. Try these:
#
# - one session more than fits, then one fewer: which of p50 and p99 tells you?
# - from 0 to 75 % shared: how far does the line move, and what happens with the p99 on its way?
# - a think time of 60 s: what does it change, and what does it not?

# %% id="explorer-widget"
from minikv.classroom.explorers import cliff_explorer

explore(cliff_explorer.draw, **cliff_explorer.CONTROLS)

# %% [markdown] id="war-story"
# ## War story: counted twice
#
# At the edge of the cliff the pool is nearly always full, and admission has to count exactly. A request needs 5 blocks; 2 are found in the
# cache, so 3 new ones are needed. The pool reports 4 that can be had.
# 3 is at most 4: admit?


# %% id="war-setup" tags=["nbval-check-output"]
def nearly_full_pool():
    """8 blocks of 4 slots: 4 with an owner, 2 cached ones of our prompt, 2 free."""
    pool = BlockPool(8, 4)
    prefix, chain, table = PrefixCache(pool), KeyChain(b"story", 4), BlockTable(4)
    chain.extend(range(8))
    table.blocks.extend(pool.allocate_many(2))
    table.num_tokens = 8
    prefix.publish(chain, table, 0)
    pool.allocate_many(4)
    pool.release(reversed(table.blocks))
    return pool, [entry.block for entry in prefix.lookup(chain, most=2)]


pool, hits = nearly_full_pool()
needed = 5 - len(hits)
print(f"hits: {len(hits)}, new blocks needed: {needed}, blocks that can be had: {pool.num_free}")
if needed <= pool.num_free:  # looks right
    pool.share(hits)
    try:
        pool.allocate_many(needed)
    except MemoryError as wrong:
        print(f"MemoryError: {wrong}")

# %% [markdown] id="war-why"
# The two hits were *among* the four. Taking them for ourselves left two. So take them first and check afterwards? Then a request that has
# to wait keeps its pins, and tries again in the next step:

# %% id="war-pins" tags=["nbval-check-output"]
pool, hits = nearly_full_pool()
for attempt in (1, 2, 3):
    pool.share(hits)  # pinned before the check
    if needed > pool.num_free:
        owners = [pool.references[block] for block in hits]
        print(
            f"attempt {attempt}: {pool.num_free} can be had, so it waits; the hits now have "
            f"{owners} owners"
        )

# %% [markdown] id="war-who"
# Nobody runs, and the blocks have three owners: they will never be free again. Both faults lived in the same few lines of vLLM: the pins
# before the check were reported as [issue 11562](https://github.com/vllm-project/vllm/issues/11562); when [pull request 11565](https://github.com/vllm-project/vllm/pull/11565) moved
# them after it, the reviewer saw at once that the hits would then be counted as free as well. The right count subtracts those hits that nobody owns:

# %% id="war-right" tags=["nbval-check-output"]
pool, hits = nearly_full_pool()
available = pool.num_free - sum(pool.is_evictable(block) for block in hits)
print(f"needed {needed}, available {available}:", "admitted" if needed <= available else "deferred")

engine = minikv.Engine(model, num_blocks=8, block_size=4)  # the same in the engine
prompt = list(range(100, 140))
engine.generate([prompt[:8]], minikv.Sampling(max_new_tokens=1))
engine.add("holder", prompt[20:34], minikv.Sampling(max_new_tokens=3, ignore_eos=True))
engine.step()
engine.add("later", prompt[:17], minikv.Sampling(max_new_tokens=1))
engine.step()
assert (engine.stats().waiting, engine.stats().preemptions) == (1, 0)
engine.check_integrity()
done = [output for _ in range(4) for output in engine.step() if output.finished]
assert [(output.request_id, output.cached_tokens) for output in done] == [
    ("holder", 0),
    ("later", 8),
]
print("in minikv the later request waits, no block is lost, and then it finds its 8 cached tokens")

# %% [markdown] id="source"
# ## The engine's version
#
# The arithmetic, as the laboratory has it, and the admission whose one line the war story is about:

# %% id="source-blocks"
show_source(Workload.blocks)

# %% id="source-allocate"
from minikv.engine.scheduler import Scheduler

show_source(Scheduler._allocate)

# %% [markdown] id="source-runner"
# And the whole trick of the simulator. It is the only part that differs between the run on your machine and the L4; the pieces of a plan go
# in, a time comes out:

# %% id="source-execute"
show_source(RooflineRunner.execute)

# %% id="source-step"
show_source(RooflineRunner.step_seconds)

# %% [markdown] id="source-read"
# Read `_allocate` from the top: hits are looked up (*one token must be computed*, chapter 6), what is new is counted, what can be had is
# counted without the hits, and only then does anything change. The policy
# itself is `LeastRecentlyUsed` in `minikv/cache/blocks.py`, a dozen lines around the same ordered dictionary as yours. Yours and the
# engine's agree; here for every number of sessions at once, and in random order:

# %% id="source-agree" tags=["nbval-check-output"]
for sessions in tried:
    for order in (rotation(sessions, 30), orders[sessions]):
        again = len(order) - len(set(order))
        assert abs(own_blocks_found(order, "lru") * again - lru_hits(K, order)) < 1e-6
print(
    f"{2 * len(tried)} orders: as many hits by hand as with the engine's pool, prefix cache and LRU"
)

# %% [markdown] id="questions"
# ## Questions
#
# **1.** A colleague sees a hit rate of 91 % where 93.5 % are possible and says that the cache is fine. What do you ask to see?
#
# <details><summary>Answer</summary>
#
# The p99, and the misses by turn. A mean over all turns hides that the misses lie together, in the longest prompts, at the same moment. A
# few percent of missing hits were a p99 of ten times as much above.
#
# </details>
#
# **2.** You replace the L4 by a GPU with the same memory that multiplies twice as fast. Where is the cliff now, and how high?
#
# <details><summary>Answer</summary>
#
# At the same number of sessions: memory decides the place, and so every hit and every miss stays what it was. But a recomputation is a prefill, compute-bound (chapter 3),
# so the wall is about half as high. Try it: `replace(l4.machine, flops_per_s=...)`. Speed makes the fall shorter; only bytes move the edge.
#
# </details>
#
# **3.** Back to chapter 3: you serve the same 20 sessions with a model of equal size that has a KV head for each of its 32 query heads
# instead of 8. What happens?
#
# <details><summary>Answer</summary>
#
# A token weighs four times as much, so a quarter of the tokens fit. With 13 GB that were room for 176,400 tokens there is room for 44,100:
# after the 10,000 shared ones, two sessions.
#
# </details>
#
# **4.** "A cached decode step costs the same however long the conversation is, so after a hit all turns take equally long." Right?
#
# <details><summary>Answer</summary>
#
# No. A hit saves *computing* K and V again; attention still reads all of them, for every new token. That is why bytes a token (chapter 3)
# decide both how many sessions fit and how fast each of them decodes.
#
# </details>
#
# **5.** Belady's policy lost only a share where LRU lost all. Could a server that knows its sessions come near to it?
#
# <details><summary>Answer</summary>
#
# In a pure rotation, yes: throw out the *most* recently used (there it is also the one needed last), and at any moment all but one session
# are whole. But then the one who has just been served is thrown out, which is the worst choice for a user who answers at once. What
# servers really do is to admit fewer sessions, or to keep evicted blocks in a larger memory.
#
# </details>
#
# **6.** The computed p99 at 12 sessions was below the published one. Name two reasons that have nothing to do with a wrong scheduler.
#
# <details><summary>Answer</summary>
#
# The clock knows only moving and multiplying (a step costs something besides: scheduling, launching, sampling, the network), and the step
# budget was chosen, not known: the table above shows how much it alone moves that figure. A third: the L4's rate was taken over.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# As of 2026. What they call it and where it lives:
#
# | engine | who is thrown out |
# |---|---|
# | vLLM | `free_block_queue` in `vllm/v1/core/block_pool.py` holds free and cached blocks in the order of eviction, LRU; admission is `allocate_slots` in `vllm/v1/core/kv_cache_manager.py` |
# | SGLang | strategies by name in `python/sglang/srt/mem_cache/evict_policy.py` (LRU, LFU, FIFO, MRU and more), on the leaves of its radix tree |
# | Hugging Face transformers | an "initialized" block of the `BlockManager` in `src/transformers/generation/continuous_batching/cache_manager.py`; in the versions that we read, `popitem()` takes the one released *last*, so it is not LRU |
# | llama.cpp | the slot with the most similar prompt is taken, otherwise the least recently used one: `tools/server/server-context.cpp`; `--cache-ram` keeps what was thrown out in main memory |
#
# To run sessions against a server of theirs: `benchmarks/multi_turn/benchmark_serving_multi_turn.py` (vLLM),
# `benchmark/hicache/bench_multiturn.py` (SGLang).
#
# A signal to watch in any of them: cached tokens divided by prompt tokens, *by turn number*, next to the p99 of the time to first token.

# %% [markdown] id="sources"
# ## Sources
#
# - K. Shams (Momento), "Serving LLMs at Scale: The Hidden KV Cache Advantage", QCon AI Boston, 2026: the talk whose figures are audited
#   here, and the picture of the 2000s.
# - Momento, "The concurrency cliff is a memory limit", 2026-06-26, https://www.gomomento.com/blog/the-concurrency-cliff-is-a-memory-limit/:
#   the published experiment.
# - L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
# - P. J. Denning, "Thrashing: its causes and prevention", AFIPS Fall Joint Computer Conference, 1968.
# - vLLM issue 11562 and pull request 11565 (December 2024); llama.cpp discussion 13606.

# %% [markdown] id="next"
# ## Next
#
# The blocks that were thrown out had been computed, and the server has main memory and a disk that nobody asked. What if a block fell there
# instead of away? That question opens the second part of the course, below the cliff. Until
# then: the whole experiment with more rows is `python -m minikv cliff` and `python -m minikv simulate cliff`, and every term of the course
# is in the [glossary](glossary.md).
