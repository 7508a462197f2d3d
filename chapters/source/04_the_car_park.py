# %% [markdown] id="title"
# # 4. The car park
#
# [Before: 3. What a token weighs](03_what_a_token_weighs.ipynb) | [Next: 5. Pages](05_pages.ipynb) |
# [Glossary](glossary.md)
#
# Chapter 3 said how much memory a token takes. This chapter asks how much of that memory really holds tokens while an
# engine serves many requests. In the engines before paging, by a well-known measurement, it was between a fifth and two
# fifths.
#
# **You will be able to**
#
# - build the memory that engines had before paging: reserve, place, give back, in about thirty lines;
# - name the places where slots go to waste, and measure each on a trace;
# - explain why a request is refused although its size is free, and what moving things together would cost.
#
# **You need** [chapter 2](02_remember_the_keys.ipynb) (the KV cache; `torch.cat` against a reserved buffer) and
# [chapter 3](03_what_a_token_weighs.ipynb) (bytes a token).
#
# **Time** About 40 minutes to read; a quarter of a minute to run.

# %% id="setup"
import random
from itertools import pairwise
from time import perf_counter

import matplotlib.pyplot as plt
import torch

from minikv.cache.arena import PLACEMENTS, Arena
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source
from minikv.lab.car_park import PAPER_SLOTS, Request, Trace, chats, simulate, table
from minikv.shape.hardware import HARDWARE
from minikv.shape.model_shape import preset
from minikv.shape.size import with_unit

plt.style.use("minikv.show.course")
BLACK = "#1f1f1f"

# %% [markdown] id="predictions"
# ## Two guesses first
#
# A model does at most 2,048 tokens. Its KV memory has room for 15,700 tokens. Requests come faster than they can be
# served, so somebody always waits for room. The requests are those that we shall measure with.

# %% id="predict-maximum"
trace = chats(500, seed=0)
average = sum(request.total_tokens for request in trace.requests) / len(trace.requests)
predict(
    "ch4-held-maximum",
    f"A request is given room for 2,048 tokens, as it might get that long. On average it fills "
    f"{average:.0f}, prompt and answer together. "
    "What share of the memory holds a token, averaged over time?",
    "%",
)

# %% id="predict-oracle"
predict(
    "ch4-held-oracle",
    "Now somebody who knows the future says how long each request will get, to the token. It is given "
    "exactly that, in the first gap that is long enough. What share now?",
    "%",
)

# %% [markdown] id="row"
# ## One long row
#
# When the weights are loaded, what is left of a GPU's memory is for K and V. Every token takes the same number of bytes,
# so think of that memory as a car park: one long row of [slots](glossary.md#slot), and a slot takes the K and V of one
# token, in all layers. The paper that we shall meet in this chapter gives a GPU of 40 GB with a model of 13 billion
# parameters (OPT-13B: 40 layers, 40 heads of 128, as many KV heads, 2 bytes a number) 12 GB for K and V.

# %% id="slots" tags=["nbval-check-output"]
a_token = 2 * 40 * 40 * 128 * 2  # K and V, layers, heads, head size, bytes a number
print("a token:", with_unit(a_token))
print(f"12 GiB hold {12 * 2**30 // a_token:,} tokens; the paper says 15.7K slots: {PAPER_SLOTS:,}")

# %% [markdown] id="in-one-piece"
# A car takes one slot. A request is more like a coach party that wants to park side by side: its tokens lie **in one
# piece**, slot after slot, because that is how a tensor lies in memory and how a plain attention kernel reads it. And the
# party does not know how many it will be. You have met this in chapter 2: `torch.cat` copies all rows whenever one is
# added, and the engine's `Contiguous` reserves room for `max_tokens` instead. A prompt of 60 tokens and an answer of 40:

# %% id="cat-or-reserve" tags=["nbval-check-output"]
prompt_tokens, output_tokens = 60, 40
total = prompt_tokens + output_tokens
copied = sum(range(prompt_tokens, total + 1))  # 60, then 61, 62, ... 100
print(f"torch.cat:      {copied:5,} rows written, {total:5,} slots taken at the end")
print(f"reserve 1,024:  {total:5,} rows written, {1024:5,} slots taken from the start")

# %% [markdown] id="two-choices"
# Copies, or empty slots. An engine that serves many takes the empty slots, and then it has **two separate choices** to
# make for each request: *how much* to reserve, and *where* in the row. They waste memory in different ways, so let us take
# them one after the other.
#
# ## First choice: how much?
#
# A [reservation](glossary.md#reservation) is made when a request arrives: the prompt is known, the length of the answer is
# not. Three policies:


# %% id="reservations"
def longest(prompt, output, max_tokens):
    return max_tokens  # it might get that long


def power_of_two(prompt, output, max_tokens):
    room = 1
    while room < output:  # known to within a factor of two
        room *= 2
    return min(prompt + room, max_tokens)


def oracle(prompt, output, max_tokens):
    return prompt + output  # known to the token


# %% id="reserve-table" tags=["nbval-check-output"]
print("prompt  answer   longest  power of two  oracle   (the model does at most 2,048)")
for p, o in ((60, 40), (60, 33), (60, 400), (1500, 300)):
    row = [reserve(p, o, 2048) for reserve in (longest, power_of_two, oracle)]
    print(f"{p:6,}{o:8,}{row[0]:10,}{row[1]:14,}{row[2]:8,}")

# %% [markdown] id="reservations-honest"
# Only the first can be done. The other two look at `output`, the true length of the answer, which nobody has at that
# moment. (So this oracle is one in the old sense of the word: it knows the future.) They are there to ask: if we *could*
# foresee the length, roughly or exactly, would all be well?
#
# What a request never uses of its reservation is called [internal
# fragmentation](glossary.md#internal-fragmentation). For our 100 tokens, and a model that does 1,024:

# %% id="claim-924"
request, model_max = Request(arrival=0, prompt_tokens=60, output_tokens=40), 1024
reserved = longest(request.prompt_tokens, request.output_tokens, model_max)
print(f"{(reserved - request.total_tokens) / reserved:.1%} of the reservation is never used")
claim("924-of-1024", reserved - request.total_tokens, source="blog")

# %% [markdown] id="context-grows"
# And models learn to read ever longer texts. The users' requests need not get longer for that; the reservations do:

# %% id="claim-32"
llama = preset("llama-3.1-8b")
for model_max in (4 * 1024, 128 * 1024):
    taken = longest(60, 40, model_max)
    size = with_unit(taken * llama.kv_bytes_per_token())
    print(f"{taken:7,} slots: {size}, of which {request.total_tokens / taken:.2%} used")
claim("4k-to-128k", longest(60, 40, 128 * 1024) / longest(60, 40, 4 * 1024), source="blog")

# %% [markdown] id="life"
# All that for a *single* request of an 8B model, and one with grouped KV heads at that (chapter 3).
#
# There is a second kind of waste, which the oracle has too. A slot that will be written in a minute is empty *now*, and
# nobody else may have it. Follow our request through its life, with each policy (the engine's simulation writes one token
# a tick; we shall look at it more closely below):

# %% id="figure-life" tags=["hide-input"]
HATCH = {"held": "", "reserved": "////", "internal": "xxxx", "rounding": "....", "free": ""}
SHADE = dict.fromkeys(HATCH, "white") | {"held": "#9a9a9a"}


def stack(ax, usage, order, scale=1):
    """A stacked area for each kind of slot in ``order``, over time."""
    ticks = range(len(usage))
    areas = [[scale * getattr(each, name) for each in usage] for name in order]
    drawn = ax.stackplot(ticks, areas, colors=[SHADE[name] for name in order], edgecolor=BLACK)
    for area, name in zip(drawn, order, strict=True):
        area.set(hatch=HATCH[name], linewidth=0.5)


alone, useful = Trace((request,), max_tokens=128), {}
fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.6), sharey=True)
for ax, reservation in zip(axes, ("maximum", "power_of_two", "oracle"), strict=True):
    usage = simulate(alone, 128, reservation).usage[:-1]  # in the last tick it has left
    stack(ax, usage, ("held", "reserved", "internal"))
    taken = sum(each.held + each.reserved + each.internal for each in usage)
    useful[reservation] = sum(each.held for each in usage) / taken
    ax.set(
        title=f"{reservation}: {useful[reservation]:.0%} held",
        xlabel="ticks",
        ylim=(0, 128),
    )
axes[0].set_ylabel("slots")
for text, place in (("held", (15, 35)), ("reserved", (1, 84)), ("internal", (15, 112))):
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes[0].annotate(text, place, fontsize=9, bbox=box)
plt.show()

# %% id="figure-life-note"
note(
    "**What to see.** Grey slots hold a token; hatched ones are reserved and will be written later; "
    "crossed ones never will be (the model of this figure does 128 tokens). Averaged over the life "
    f"of the request, {useful['maximum']:.0%} of what it was given holds a token with the maximum, "
    f"{useful['power_of_two']:.0%} with the power of two, and still only {useful['oracle']:.0%} with "
    "perfect foresight. The longer an answer is beside its prompt, the worse the last figure gets: "
    "towards a half."
)

# %% [markdown] id="where"
# ## Second choice: where?
#
# Now several requests share the row. They leave in another order than they came, and where they stood are holes. So keep a
# list of holes, each a first slot and a length, in order. This is the whole bookkeeping:


# %% id="my-row"
class Row:
    def __init__(self, slots, choose):
        self.holes, self.pieces, self.choose = [(0, slots)], {}, choose  # (first slot, length)

    def take(self, name, length):
        """The first slot of the piece for ``name``, or None: refused."""
        hole = self.choose(self.holes, length)
        if hole is None:
            return None
        start, size = hole
        self.holes.remove(hole)
        if size > length:
            self.holes = sorted([*self.holes, (start + length, size - length)])
        self.pieces[name] = (start, length)
        return start

    def give_back(self, name):
        merged = []
        for start, length in sorted([*self.holes, self.pieces.pop(name)]):
            if merged and sum(merged[-1]) == start:  # the hole before ends where this one begins
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.holes = merged


# %% [markdown] id="first-fit"
# One question is left open, `choose`: which hole? [First fit](glossary.md#first-fit) takes the first that is long enough.


# %% id="my-first-fit"
def first_fit(holes, length):
    return next((hole for hole in holes if hole[1] >= length), None)


def picture(row):
    """The row in letters, a dot for a free slot."""
    pieces = [(start, name * length) for name, (start, length) in row.pieces.items()]
    return "".join(text for _, text in sorted(pieces + [(s, "." * n) for s, n in row.holes]))


# %% id="first-fit-run" tags=["nbval-check-output"]
row = Row(24, first_fit)
for name, length in (("A", 6), ("B", 5), ("C", 4), ("D", 6)):
    row.take(name, length)
print(picture(row), " A, B, C and D arrive")
row.give_back("B")
print(picture(row), " B leaves")
row.take("E", 3)
print(picture(row), " E takes 3 slots of B's")
row.give_back("C")
print(picture(row), " C leaves; its hole and the one before are one")
free = sum(length for _, length in row.holes)
print(f"F wants 8: {row.take('F', 8)}. {free} slots are free, in holes {row.holes}")

# %% [markdown] id="external"
# There it is. F is refused with more than 8 slots free, because no 8 of them lie side by side. That is [external
# fragmentation](glossary.md#external-fragmentation). Could a better choice have avoided it? [Best
# fit](glossary.md#best-fit) takes the *smallest* hole that is long enough, to keep the large ones whole:


# %% id="my-best-fit"
def best_fit(holes, length):
    fitting = [hole for hole in holes if hole[1] >= length]
    return min(fitting, key=lambda hole: hole[1], default=None)


# %% id="first-or-best" tags=["nbval-check-output"]
for holes, wishes in (([(0, 8), (12, 4)], (3, 8)), ([(0, 10), (12, 7)], (4, 6, 6))):
    print("holes", holes, "wishes", wishes)
    for choose in (first_fit, best_fit):
        row = Row(20, choose)
        row.holes = list(holes)
        got = [row.take(str(n), wish) for n, wish in enumerate(wishes)]
        print(f"   {choose.__name__:10}", ["refused" if start is None else start for start in got])

# %% [markdown] id="no-winner"
# Each wins once. Best fit leaves the smallest rests, and a rest may be too small for anybody. Nobody can choose right
# without knowing who comes next.
#
# A third idea is to make holes that fit *each other*. With [buddies](glossary.md#buddy), every size is rounded up to a power
# of two. A piece that is too large is cut in halves until it fits, and a freed piece grows together again only with its
# buddy, the other half of the same cut. Buddies are found without a search: their first slots differ in one bit.


# %% id="my-buddy"
def buddy_take(holes, length):
    """``holes`` is a set of (first slot, size). The first slot and the rounded size, or None."""
    size = 1
    while size < length:
        size *= 2
    fitting = [hole for hole in holes if hole[1] >= size]
    if not fitting:
        return None
    start, hole = min(fitting, key=lambda hole: (hole[1], hole[0]))
    holes.remove((start, hole))
    while hole > size:
        hole //= 2
        holes.add((start + hole, hole))  # the upper half stays free
    return start, size


def buddy_give_back(holes, start, size):
    while (start ^ size, size) in holes:  # its buddy is free as well
        holes.remove((start ^ size, size))
        start, size = min(start, start ^ size), 2 * size
    holes.add((start, size))


# %% id="buddy-run" tags=["nbval-check-output"]
holes = {(0, 16)}
pieces = {name: buddy_take(holes, length) for name, length in (("A", 3), ("B", 1), ("C", 5))}
print("A wants 3, B 1, C 5:", pieces, " holes", sorted(holes))
for name in "BCA":
    buddy_give_back(holes, *pieces[name])
    print(f"{name} leaves: holes", sorted(holes))

# %% [markdown] id="buddy-said"
# After C has left, the holes (4, 4) and (8, 8) lie side by side and stay two: they are not halves of one cut. Buddies are
# quick to find and to merge, and every rounding costs slots: C asked for 5 and got 8.
#
# The fourth way is not to live with holes at all: [compaction](glossary.md#compaction). When a request is refused although
# enough is free, move everybody towards slot 0. Then there is one hole.


# %% id="my-compact"
def compact(row):
    """Move all pieces together. Returns the moves: (name, old first slot, new first slot)."""
    moves, end = [], 0
    for name, (start, length) in sorted(row.pieces.items(), key=lambda item: item[1]):
        if start != end:
            moves.append((name, start, end))
        row.pieces[name] = (end, length)
        end += length
    row.holes = [(end, sum(length for _, length in row.holes))]
    return moves


# %% [markdown] id="512-of-600"
# ### 512 wanted, 600 free
#
# You have seen 100 of 1,024, an example of internal waste. Here is its counterpart. A row of 2,048 slots; A, B, C and D
# arrive, B and D leave, and E wants 512.

# %% id="512-by-hand" tags=["nbval-check-output"]
lengths = {"A": 704, "B": 400, "C": 744, "D": 200}
row = Row(2048, first_fit)
for name, length in lengths.items():
    row.take(name, length)
for name in "BD":
    row.give_back(name)
free = sum(length for _, length in row.holes)
print(f"E wants 512: {row.take('E', 512)}. {free} slots are free, in holes {row.holes}")
print(f"moved together: {compact(row)}, one hole: {row.holes}")
print(f"E wants 512: from slot {row.take('E', 512)}")

# %% [markdown] id="512-engine-said"
# The engine's own memory is called `Arena`. It says *why* it refuses:


# %% id="512-engine" tags=["nbval-check-output"]
def before_e(placement):
    """The same history; A has written 500 of its slots, C 600."""
    arena = Arena(2048, placement)
    for name, length in lengths.items():
        arena.allocate(name, length)
    for name in "BD":
        arena.free(name)
    arena.write("A", 500)
    arena.write("C", 600)
    return arena


for placement in ("first_fit", "best_fit", "compaction"):
    arena = before_e(placement)
    try:
        start = arena.allocate("E", 512)
        print(f"{placement}: E from slot {start}, {arena.moved_tokens} tokens moved")
    except MemoryError as refusal:
        print(f"{placement}: {refusal}")

# %% [markdown] id="moving"
# (Buddies would not have got so far: C's 744 slots are 1,024 for them, and beside A's 1,024 and B's 512 there is no room.)
#
# ### What does moving cost?
#
# Only *written* tokens have to be copied: C's 600. At 128 KiB a token (Llama-3.1-8B in bf16, chapter 3) that can be done on
# this machine, with real memory. The arena tells whoever keeps the tensors what to move, through `on_move`. One trap: C
# moves down by 400 slots and is 600 long, so its old and its new place overlap. Copied upwards, in parts no longer than the
# distance, nothing is overwritten that is still needed.

# %% id="real-move" tags=["nbval-check-output"]
a_token = llama.kv_bytes_per_token()
memory = torch.zeros(2048, a_token, dtype=torch.uint8)  # [slots, bytes of a token]


def move(owner, old, new, tokens):
    step = old - new
    for done in range(0, tokens, step):
        part = min(step, tokens - done)
        memory[new + done : new + done + part] = memory[old + done : old + done + part]


arena = before_e("compaction")
arena.on_move = move
start = arena.segment("C").start
memory[start : start + 600] = torch.arange(600)[:, None].remainder(251).to(torch.uint8)
arena.allocate("E", 512)
now = arena.segment("C").start
assert all((memory[now + token] == token % 251).all() for token in range(600))
print(f"C moved from slot {start} to {now}; all its {600 * a_token:,} bytes are there")

# %% id="real-move-time"
seconds = []
for _ in range(5):
    began = perf_counter()
    move("C", 1104, 704, 600)
    seconds.append(perf_counter() - began)
moved_bytes = 600 * a_token
gpu = HARDWARE["h100"]
on_gpu_s = 2 * moved_bytes / gpu.bytes_per_s  # read once and written once
step_s = 2 * llama.parameters / gpu.bytes_per_s  # a decode step reads the weights, 2 bytes each
note(
    f"On the machine that built this page the move took {1e3 * min(seconds):.0f} ms: "
    f"{with_unit(moved_bytes)} read and written. An H100 ({gpu.bytes_per_s / 1e9:,.0f} GB/s) would "
    f"need {1e3 * on_gpu_s:.2f} ms at least, where one decode step of this model, which reads all "
    f"the weights, takes {1e3 * step_s:.1f} ms at least. So on a GPU moving is "
    f"{'not dear' if on_gpu_s < step_s else 'dear'} in itself."
)

# %% [markdown] id="moving-said"
# What is dear about it is the rest. Nobody may read or write while things move; every place that was noted somewhere (in
# a kernel's arguments, in a copy that is under way) is wrong afterwards; and a mistake does not crash, it makes the text
# wrong. llama.cpp had such a mistake in its CPU backend: as soon as the memory had been compacted once, conversations
# went on in garbage ([issue 12253](https://github.com/ggml-org/llama.cpp/issues/12253), 2025).

# %% [markdown] id="trace"
# ## Measure it: one trace for all
#
# Now many requests and both choices together. `minikv.lab.car_park` lets the *same* requests live through each kind of
# memory. What is assumed:
#
# - **Lengths.** Prompts and answers are log-normal: many short ones, a few very long. Their means (161 and 338 tokens) are
#   those of the ShareGPT conversations in figure 11 of the PagedAttention paper; how far they spread is our choice
#   (sigma 1). What is longer than 2,048 together is drawn again.
# - **Arrivals.** At random (Poisson), one every five ticks on average. A tick is one decode step: each running request writes
#   one token. A prefill takes no time.
# - **Order.** First come, first served: who is refused waits, and all behind wait too.
# - **Memory.** The 15,700 slots of above. More requests come than fit, on purpose: a slot that nobody wants is no waste, so
#   all averages are over the ticks at which somebody waits.

# %% id="chats" tags=["nbval-check-output"]
requests = trace.requests
until = requests[-1].arrival + 1  # as long as somebody may still come
prompts = [request.prompt_tokens for request in requests]
answers = [request.output_tokens for request in requests]
print(f"{len(requests)} requests in {until:,} ticks")
print(f"prompts: mean {sum(prompts) / len(prompts):.0f} tokens, longest {max(prompts):,}")
print(f"answers: mean {sum(answers) / len(answers):.0f} tokens, longest {max(answers):,}")

# %% id="run-all" tags=["nbval-check-output"]
ways = [(r, p) for r in ("maximum", "power_of_two", "oracle") for p in PLACEMENTS]
results = {way: simulate(trace, PAPER_SLOTS, *way, ticks=until, snapshots=0) for way in ways}
print(table(list(results.values())))

# %% [markdown] id="columns"
# The columns: *held* to *external* are shares of all slots in percent; *external* is what is free while somebody waits,
# and what buddies rounded up. *copies* comes further down. *requests*: how many run at the same time. *finished*: how
# many were done while others still arrived. *by holes*: how many were refused at least once although their size was free.
# *moved*: tokens. (*preempted* is for a later chapter.)
#
# First over time, for three of the twelve. Time runs to the right, and the height is the whole memory.

# %% id="figure-time" tags=["hide-input"]
KINDS = ("held", "reserved", "internal", "rounding", "free")
fig, axes = plt.subplots(3, 1, figsize=(7.5, 6.2), sharex=True, sharey=True)
for ax, way in zip(
    axes, (("maximum", "buddy"), ("oracle", "buddy"), ("oracle", "compaction")), strict=True
):
    stack(ax, results[way].usage[::4], KINDS, 100 / PAPER_SLOTS)
    ax.set_title(
        f"{results[way].name}: {results[way].held:.1%} of the slots hold a token", fontsize=10
    )
    ax.set(ylim=(0, 100), ylabel="% of slots")
    ax.set_xticks(
        range(0, until // 4, 125), [f"{4 * tick:,}" for tick in range(0, until // 4, 125)]
    )
    at, base = until // 5, 0
    for name in KINDS:
        share = 100 * getattr(results[way].usage[4 * at], name) / PAPER_SLOTS
        if share > 7:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            ax.text(at, base + share / 2, name, ha="center", va="center", fontsize=9, bbox=box)
        base += share
axes[-1].set(xlabel="ticks", xlim=(0, until // 4))
plt.show()

# %% id="figure-time-note"
big, wise = results["maximum", "buddy"], results["oracle", "buddy"]
moved = results["oracle", "compaction"]
note(
    f"**What to see.** With the maximum, {big.mean_requests:.0f} requests have reserved nearly "
    f"everything, and {big.internal:.0%} of the memory is crossed: never written. With the oracle "
    f"nothing is crossed, and {wise.mean_requests:.0f} requests run, but {wise.external:.0%} of the "
    "memory is free (white) or rounded up (dotted) while others wait in line. Compaction closes "
    f"the white: {moved.mean_requests:.0f} requests. What no placement can touch is the hatched part, "
    f"{moved.reserved:.0%} of the memory: promised to tokens that are yet to come."
)

# %% id="compare-maximum"
compare("ch4-held-maximum", 100 * results["maximum", "first_fit"].held, "%")

# %% [markdown] id="bars-intro"
# All twelve as bars. With the maximum all four placements gave exactly the same, to the last slot, so they are one bar. (Why?
# Question 1.)

# %% id="figure-bars" tags=["hide-input"]
same = [results["maximum", placement].usage for placement in PLACEMENTS]
assert all(one == other for one, other in pairwise(same))
bars = {"maximum, any": results["maximum", "buddy"]}
bars |= {results[way].name: results[way] for way in ways if way[0] != "maximum"}
white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
fig, ax = plt.subplots(figsize=(7.5, 4.6))
for place, result in enumerate(bars.values()):
    left = 0
    for name in KINDS:
        share = 100 * getattr(result, name)
        look = {"color": SHADE[name], "hatch": HATCH[name], "edgecolor": BLACK, "linewidth": 0.6}
        ax.barh(place, share, left=left, **look)
        middle = left + share / 2
        if share > 4:
            box = white if HATCH[name] else None
            words = f"rounding {share:.0f}" if name == "rounding" else f"{share:.0f}"
            ax.text(middle, place, words, ha="center", va="center", fontsize=9, bbox=box)
            if place == 0:
                ax.text(middle, -0.7, name, ha="center", fontsize=9)
        left += share
ax.set_yticks(range(len(bars)), bars)
ax.set(ylim=(len(bars) - 0.4, -1), xlim=(0, 100), xlabel="% of all slots, while somebody waits")
ax.grid(visible=False)
plt.show()

# %% id="figure-bars-note"
spans = []
for reservation in ("maximum", "power_of_two", "oracle"):
    held = sorted(results[reservation, placement].held for placement in PLACEMENTS)
    low, high = f"{held[0]:.0%}", f"{held[-1]:.0%}"
    spans.append(f"{reservation.replace('_', ' ')} {low if low == high else f'{low} to {high}'}")
note(
    "**What to see.** The grey part is what the memory is for. It grows from group to group with "
    f"what one knows about lengths: {', '.join(spans)}. Within a group it depends on the placement, "
    "and buddies lose most: their rounding (dotted) and their holes. But even with perfect "
    f"foresight *and* everything moved together, only {moved.held:.0%} of the slots hold tokens."
)

# %% id="compare-oracle"
compare("ch4-held-oracle", 100 * results["oracle", "first_fit"].held, "%")

# %% [markdown] id="seeds"
# Is it the luck of one trace? Four other seeds, with the oracle:

# %% id="other-seeds" tags=["nbval-check-output"]
print("share held (%)      " + "".join(f"{placement:>12}" for placement in PLACEMENTS))
for seed in (1, 2, 3, 4):
    other = chats(500, seed=seed)
    end = other.requests[-1].arrival + 1
    held = [
        simulate(other, PAPER_SLOTS, "oracle", p, ticks=end, snapshots=0).held for p in PLACEMENTS
    ]
    print(f"requests of seed {seed}: " + "".join(f"{100 * share:12.1f}" for share in held))
    assert held[2] == min(held)
    assert held[3] == max(held)

# %% [markdown] id="seeds-said"
# Buddies are last and compaction is first each time. Between first fit and best fit it is a matter of luck.
#
# And the bill for compaction, over the whole trace?

# %% id="moved-bill"
plain = results["oracle", "first_fit"]
moved_bytes = moved.moved_tokens * 2 * 40 * 40 * 128 * 2  # of OPT-13B, as at the beginning
weights = 13e9 * 2
gpu = HARDWARE["a100-80"]
move_s, steps_s = 2 * moved_bytes / gpu.bytes_per_s, until * weights / gpu.bytes_per_s
note(
    f"{moved.moved_tokens:,} tokens were moved, {moved.moved_tokens / moved.finished:,.0f} for each "
    f"request that was finished: {with_unit(moved_bytes)}. On an A100 "
    f"({gpu.bytes_per_s / 1e9:,.0f} GB/s) that is at least {move_s:.1f} s of reading and writing, "
    f"beside at least {steps_s:.0f} s for {until:,} decode steps that read {weights / 1e9:.0f} GB of "
    f"weights each: {move_s / steps_s:.1%}. The price of compaction is trouble more than time. What it "
    f"gets back, against first fit: {100 * (moved.held - plain.held):.0f} of the "
    f"{100 * (1 - plain.held):.0f} percent that held nothing."
)

# %% [markdown] id="copies"
# ## Copies
#
# One more kind of waste hides inside *held*. In a service all prompts begin with the same instructions. Each request lies in
# a piece of its own, so each keeps a copy of them. The same trace, with 200 tokens of system prompt before every prompt:

# %% id="duplicates" tags=["nbval-check-output"]
system = chats(500, seed=0, shared_prefix_tokens=200)
end = system.requests[-1].arrival + 1
for way in (("maximum", "buddy"), ("oracle", "buddy"), ("oracle", "compaction")):
    result = simulate(system, PAPER_SLOTS, *way, ticks=end, snapshots=0)
    different = result.held - result.duplicate
    print(f"{result.name:18} held {result.held:6.1%}: ", end="")
    print(f"copies {result.duplicate:6.1%}, different tokens {different:6.1%}")

# %% [markdown] id="copies-said"
# A piece belongs to one request, from its first slot to its last. There is no way to say "my first 200 slots are over
# there". [Chapter 6](06_share_the_prefix.ipynb) comes back to this.

# %% [markdown] id="widget-intro"
# ## See it: twelve requests in 64 slots
#
# Now you choose. A strip is the whole memory after an event, the newest at the bottom; letters are owners. A request that is
# refused although its size is free is marked with `>>`, and the holes that would have been enough have a dashed edge. Use
# Tab and the arrow keys. Try:
#
# - Move `Event` one by one and watch how the first hole comes about.
# - At the marked event, change `Place` to compaction: the past changes too, since other requests were let in. When does the
#   last one leave?
# - `Reserve` at maximum: two requests at a time, whatever the placement. Count the crossed slots.
# - Buddies with the power of two, seed 2, event 15. How many slots are free, how many does G want, and why is it refused?

# %% id="widget"
from minikv.classroom.explorers import car_park

explore(car_park.draw, **car_park.CONTROLS)

# %% [markdown] id="audit"
# ## Audit: 20 to 38 %
#
# The paper that introduced paging (Kwon and others, 2023) measured the systems before it. Figure 2 shows what its KV memory
# held, for its own rendering of the engine Orca with three reservations; it assumes that Orca places with **buddies**. So it
# is our buddy rows that belong beside it:

# %% id="paper" tags=["nbval-check-output"]
# figure 2: held, reserved, internal, external and others, in %; figure 13a: requests at a time
PAPER = {
    "maximum": ("Orca (Max)", 20.4, 13.3, 57.3, 8.9, 7.00),
    "power_of_two": ("Orca (Pow2)", 26.8, 17.9, 13.6, 41.6, 9.81),
    "oracle": ("Orca (Oracle)", 38.2, 25.2, 0.0, 36.6, 13.62),
}
print(f"{'':20}      held  reserved  internal  external  requests")
for reservation, (name, *published) in PAPER.items():
    r = results[reservation, "buddy"]
    shares = [100 * share for share in (r.held, r.reserved, r.internal, r.external)]
    for who, numbers in ((name, published), ("  ours, buddy", (*shares, r.mean_requests))):
        print(f"{who:20}" + "".join(f"{number:10.1f}" for number in numbers))
rest = PAPER_SLOTS % 2048
print()
print(
    f"{PAPER_SLOTS:,} slots are {PAPER_SLOTS // 2048} pieces of 2,048; {rest:,} are left over: ",
    end="",
)
print(f"{rest / PAPER_SLOTS:.1%}")

# %% [markdown] id="paper-said"
# This is **not a reproduction**, and agreement in one place proves little. The paper ran a model on a GPU; ours is
# bookkeeping. Its lengths are those of real conversations, ours are drawn with the same means and a spread that we chose. Its
# averages are over an experiment, ours over the ticks at which somebody waits. And we count what buddies round up as
# *external and others*, which is how we read its figure; a textbook would say internal. What carries over is the order,
# and the size of the thing: with a reservation in one piece, most of the memory holds nothing.
#
# One column can be checked by hand. With the maximum, pieces of 2,048 are cut from 15,700 slots; the last line gives what is
# left over, close to the paper's 8.9 %.

# %% [markdown] id="war-story"
# ## War story: refused at half full
#
# Sixteen cells. Four conversations of four are there, the first and the third end, and one of eight is to come back.

# %% id="war" tags=["nbval-check-output"]
row = Row(16, first_fit)
for name in "ABCD":
    row.take(name, 4)
row.give_back("A")
row.give_back("C")
print(picture(row), " wanted: 8, free:", sum(n for _, n in row.holes), " ->", row.take("E", 8))

# %% [markdown] id="war-public"
# This is [issue 9201](https://github.com/ggml-org/llama.cpp/issues/9201) of llama.cpp (2024). Its server can save a
# conversation's KV to a file and restore it later. Restoring needed neighbouring cells, and failed when there were none,
# whatever was free in total. The reporter's way out was to use one conversation fewer after each failure; it settled at
# about half of them. (koboldcpp, built on the same code, had a report of the same kind:
# [issue 445](https://github.com/LostRuins/koboldcpp/issues/445).)
#
# How it went on is this chapter in one project. The report proposes compaction, which llama.cpp had (`defrag`), with
# trouble such as you have read about, or to allocate in pieces. In 2025 it learnt to write a batch into cells that are
# *not* neighbours, and compaction was removed as no longer needed ([pull request
# 15473](https://github.com/ggml-org/llama.cpp/pull/15473)). Restoring still asked for one piece until December of that year
# ([pull request 17982](https://github.com/ggml-org/llama.cpp/pull/17982)).
#
# In minikv the refusal says its numbers, compaction serves the request, and the engine itself does not ask for
# neighbours at all:

# %% id="war-minikv" tags=["nbval-check-output"]
from minikv.cache.blocks import BlockPool


def sixteen(placement):
    arena = Arena(16, placement)
    for name in "ABCD":
        arena.allocate(name, 4)
        arena.write(name, 3)
    arena.free("A")
    arena.free("C")
    return arena


try:
    sixteen("first_fit").allocate("E", 8)
except MemoryError as refusal:
    print(f"first fit:  {refusal}")
arena = sixteen("compaction")
print(f"compaction: E from slot {arena.allocate('E', 8)}, {arena.moved_tokens} tokens moved")
pool = BlockPool(num_blocks=4, block_size=4)  # four pieces of 4, numbered 0 to 3
first, second, third, fourth = pool.allocate_many(4)
pool.release([first, third])
print(f"in pieces:  E gets pieces {pool.allocate_many(2)}, and they need not be neighbours")

# %% [markdown] id="engine"
# ## The engine's version
#
# `Arena.allocate` is your `take`:

# %% id="source-allocate"
show_source(Arena.allocate)

# %% id="source-choose"
show_source(Arena._choose)

# %% id="source-leftover"
show_source(Arena._leftover)

# %% [markdown] id="engine-read"
# Read it beside `Row`:
#
# - **Check, then change.** Everything that can go wrong raises before the first line that changes anything. A refused request
#   leaves no trace.
# - **One list of holes for all four.** Best fit and buddies ask for the smallest hole, first fit and compaction for the first. Only the
#   rest of a hole differs: one piece, or a buddy for each halving.
# - **Compaction is first fit with a second try**: `can_allocate` compares with all that is free, and `_compact` runs when no
#   single hole is long enough. It reports each move in address order, downwards, which is what `move` above relied on.

# %% id="source-compact"
show_source(Arena._compact)

# %% [markdown] id="agree-intro"
# Yours against the engine's: random histories of 3,000 arrivals and departures. Each time both must give the same first
# slot, or both refuse. (Compaction is first fit with your `compact` before a second try.)


# %% id="agree" tags=["nbval-check-output"]
def agree(placement, take, give_back, slots=256, events=3000):
    arena, rng, owned, refused = Arena(slots, placement), random.Random(4), [], 0
    for name in range(events):
        if owned and rng.random() < 0.48:
            leaver = owned.pop(rng.randrange(len(owned)))
            arena.free(leaver)
            give_back(leaver)
            continue
        length = rng.randint(1, 40)
        mine = take(name, length)
        try:
            assert arena.allocate(name, length) == mine
            owned.append(name)
        except MemoryError:
            assert mine is None
            refused += 1
    print(f"{placement}: the same in {events:,} events, {refused} of them refusals")


for choose in (first_fit, best_fit):
    row = Row(256, choose)
    agree(choose.__name__, row.take, row.give_back)

# %% id="agree-more" tags=["nbval-check-output"]
holes, pieces = {(0, 256)}, {}


def buddy_or_none(name, length):
    got = buddy_take(holes, length)
    if got is None:
        return None
    pieces[name] = got
    return got[0]


agree("buddy", buddy_or_none, lambda name: buddy_give_back(holes, *pieces.pop(name)))

row = Row(256, first_fit)


def compact_and_take(name, length):
    start = row.take(name, length)
    if start is None and sum(free for _, free in row.holes) >= length:
        compact(row)
        start = row.take(name, length)
    return start


agree("compaction", compact_and_take, row.give_back)

# %% [markdown] id="agree-reserve"
# And the reservations, for prompts up to 60, answers up to 40 and a model that does 100 tokens:

# %% id="agree-reservations" tags=["nbval-check-output"]
from minikv.cache.arena import RESERVATIONS

mine = {"maximum": longest, "power_of_two": power_of_two, "oracle": oracle}
cases = [(p, o, 100) for p in range(1, 61) for o in range(1, 41)]
assert all(mine[name](*case) == RESERVATIONS[name](*case) for name in mine for case in cases)
print(f"{len(cases):,} pairs of lengths, three reservations, all the same")

# %% [markdown] id="questions"
# ## Questions
#
# **1.** With the maximum, first fit, best fit, buddies and compaction gave the same result to the last slot. Why?
#
# <details><summary>Answer</summary>
#
# All pieces have the same size, 2,048. Whoever leaves makes a hole in which the next one fits exactly, whichever hole is
# chosen. (Only the rest of 1,364 slots is too small for anybody, always.) Holes that fit nobody come from pieces of
# *different* sizes. Keep this in mind: equal pieces cure one kind of waste. These were only far too large.
#
# </details>
#
# **2.** Length unknown? Then let each request start with a small piece, and when it is full, give it one twice as large and copy.
# What does that cost? (Chapter 2 knows the first half of the answer.)
#
# <details><summary>Answer</summary>
#
# Copies: with doubling, each token is copied about once on average, where `torch.cat` copies all of them in each step. That
# is bearable. But while copying, the old and the new piece must both be there; after it, up to half of the new piece is
# empty; and all the small pieces that a request has left behind are together smaller than the next one that it needs. It
# trades internal against external waste. And when no large piece is free, a request that is already running cannot go on.
#
# </details>
#
# **3.** The model is replaced by one with a quarter of the KV heads (chapter 3). The same memory in bytes, plenty of the same
# requests. What happens to the shares of waste, and what to the number of requests?
#
# <details><summary>Answer</summary>
#
# A token takes a quarter of the bytes, so the same memory has four times the slots. Each request still fills and reserves the
# same number of *slots*. As long as enough of them wait, the shares stay much as they were (only a rest that is too small
# for the next piece weighs less), and about four times as many requests run. GQA makes the car park larger; it does not make
# anybody park better.
#
# </details>
#
# **4.** "Our model attends only to the last 1,000 tokens (windowed attention), so a request never needs more than 1,000 slots."
#
# <details><summary>Answer</summary>
#
# Not by itself. The window bounds the *work* of a step: older keys are masked. The *storage* shrinks only if somebody gives
# the old slots back or writes over them. In a row like ours nobody does: a piece is given back whole, and its oldest slots
# cannot be taken away from its front. A cache for such a model must be built for it, for example as a ring of 1,000
# slots in which token 1,001 takes the place of token 1.
#
# </details>
#
# **5.** An oracle knew every length to the token, and still only about half of the memory held tokens. Where was the rest?
#
# <details><summary>Answer</summary>
#
# Mostly reserved: slots for tokens that were to come, idle until then. A request holds its whole final length from its first
# tick on. The rest was external: holes too small for who stands first in line, who stops all behind. Knowing the length
# solves neither. One would have to stop reserving, and hand out slots when they are written.
#
# </details>
#
# **6.** Two requests begin with the same 1,000 tokens. Could the arena let the second use the first one's slots?
#
# <details><summary>Answer</summary>
#
# Not while each lies in one piece. The second's own tokens would have to follow directly behind the shared ones, where the
# first one's own tokens already lie. It would work if a request could be made of several pieces: a shared one, then its own.
# [Chapter 5](05_pages.ipynb) makes that possible, [chapter 6](06_share_the_prefix.ipynb) does it.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# The servers among them no longer give a request one piece of a shared memory; traces of it are still there. As of 2026;
# files move.
#
# | engine | what it calls it | where |
# |---|---|---|
# | vLLM | no allocator for pieces of any size: `BlockPool` hands out equal blocks; `max_model_len` bounds a request, but reserves nothing | `vllm/v1/core/block_pool.py` |
# | SGLang | `TokenToKVPoolAllocator.alloc` takes free slots from a list, neighbours or not (with pages of one token) | `python/sglang/srt/mem_cache/allocator/token.py` |
# | Hugging Face transformers | `StaticLayer` reserves `max_cache_len` for each row of the batch (our *maximum*); `DynamicLayer` grows by `torch.cat` | `src/transformers/cache_utils.py` |
# | llama.cpp | `find_slot(ubatch, cont)`; only with `cont` must the cells be neighbours | `src/llama-kv-cache.h`, `src/llama-kv-cache.cpp` |

# %% [markdown] id="sources"
# ## Sources
#
# - W. Kwon, Z. Li, S. Zhuang, Y. Sheng, L. Zheng, C. H. Yu, J. Gonzalez, H. Zhang, I. Stoica: *Efficient Memory Management for
#   Large Language Model Serving with PagedAttention*, SOSP 2023, arXiv 2309.06180: shares (figure 2), lengths (figure
#   11), requests at the same time (figure 13a), memory (table 1), reservations and buddies (section 6.1).
# - G.-I. Yu and others: *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: the engine
#   after which the paper names the three reservations.
# - D. Knuth: *The Art of Computer Programming*, volume 1, section 2.5: first fit, best fit, buddies.
# - Sankalp Shubham: *How prompt caching works*, 2025, parts 2 and 3 ("the blog"): 924 of 1,024; 4K to 128K.
# - llama.cpp issues 9201 and 12253, pull requests 15473 and 17982; koboldcpp issue 445.

# %% [markdown] id="next"
# ## Next
#
# Two hints lay in the numbers. Equal pieces never refuse anybody who would fit, and slots that are handed out only when
# they are written are not reserved for anybody. So what if *all* pieces were equal, and small, and a request got the next one
# when its last one is full?

# %% id="teaser" tags=["nbval-check-output"]
pages = simulate(trace, PAPER_SLOTS, "paged", block_size=16, ticks=until, snapshots=0)
for result in (results["maximum", "buddy"], results["oracle", "compaction"], pages):
    print(
        f"{result.name:20} {result.held:6.1%} held, {result.mean_requests:4.1f} requests at a time"
    )

# %% [markdown] id="next-link"
# The price: a request no longer lies in one piece, and attention has to find its way. [Chapter 5: Pages](05_pages.ipynb).
