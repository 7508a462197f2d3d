# %% [markdown] id="title"
# # 7. Many at once
#
# [Before: 6. Share the prefix](06_share_the_prefix.ipynb) | [Next: 8. The cliff](08_the_cliff.ipynb) | [Glossary](glossary.md)
#
# **You will be able to**
#
# - write the scheduler of an inference engine in a dozen lines, and count exactly what it saves against a fixed batch;
# - say what a long prompt does to everybody who is reading along, how cutting it into chunks helps, and who pays;
# - explain what happens when the pool is full: who gives way, what is computed again, and why no token changes.
#
# **You need** prefill, decode, TTFT and TPOT ([chapter 2](02_remember_the_keys.ipynb)), the roofline ([chapter 3](03_what_a_token_weighs.ipynb)), blocks and the
# pool ([chapter 5](05_pages.ipynb)), cached blocks and eviction ([chapter 6](06_share_the_prefix.ipynb)).
#
# **Time** About 45 minutes to read; half a minute to run.

# %% id="setup"
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import minikv
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.classroom.notebook import claim, compare, note, predict, show_source
from minikv.engine.runner import TorchRunner
from minikv.shape.hardware import HARDWARE
from minikv.shape.model_shape import PRESETS
from minikv.shape.roofline import step_cost

plt.style.use("minikv.show.course")
torch.set_grad_enabled(False)
model = minikv.load()  # float32: for the clock
exact = minikv.load(dtype=torch.float64)  # the same weights: where tokens are compared
SAMPLING = {"ignore_eos": True}  # every answer below is as long as it was asked to be

# %% [markdown] id="predictions"
# ## Two guesses first

# %% id="predict-idle"
predict(
    "static-idle",
    "Eight answers of 3, 9, 20, 5, 4, 12, 2 and 6 tokens are written in batches of four, "
    "first the first four, then the others. "
    "A batch ends when its longest answer does. Which share of the places in all steps is empty?",
    "%",
)

# %% id="predict-gap"
predict(
    "longest-gap",
    "Four people watch their answers being written. A fifth pastes a prompt of 2,000 tokens, "
    "and it is taken in at once, "
    "in one pass. By what factor does the longest pause between two tokens of the four exceed "
    "the usual one?",
    "times",
)

# %% [markdown] id="alone"
# ## Alone, the machine mostly carries
#
# Chapter 3 found that decode is memory-bound: for one new token, the machine reads every matrix of the model and multiplies it with a single vector. The
# matrices would be the same for a second conversation, and a third. So let several conversations take their next token in the same pass, and the weights are
# read once for all of them.
#
# Two words first. A [request](glossary.md#request) is a prompt and how it is to be continued. A [step](glossary.md#step) is one pass of the model over whatever was put together
# for it: it may hold one token each of twenty requests. Here is the arithmetic of such steps for a model and a card that you know from chapter 3. Each request has 1,000 tokens so far.

# %% id="why-batch-arithmetic" tags=["nbval-check-output"]
llama, h100 = PRESETS["llama-3.1-8b"], HARDWARE["h100"]
print("requests   GB moved   GB a token   ms a step   tokens a second   (roofline)")
for count in (1, 4, 16, 64, 256):
    cost = step_cost(llama, [(1, 1_000)] * count, rows=count, dtype="bf16")
    seconds = cost.seconds(h100.bytes_per_s, h100.flops_per_s)
    print(
        f"{count:8} {cost.bytes / 1e9:10.2f} {cost.bytes / 1e9 / count:12.3f} "
        f"{1e3 * seconds:11.2f} {count / seconds:17,.0f}"
    )

# %% [markdown] id="why-batch-measured"
# Sixteen requests cost little more than one: almost all of the bytes are weights. Later the K and V of the requests, which nobody shares, take over, and each further request costs its full share.
#
# That was arithmetic. Now this machine. The bundled model fits into a processor's cache and would mislead, as in chapter 3, so we take a larger one with random weights. All
# requests decode; the clock is around single steps. Throughput is tokens a second, over all requests. TPOT is what one reader feels.

# %% id="measure-throughput"
shape = minikv.ModelShape(
    layers=6, hidden=768, heads=12, kv_heads=4, head_dim=64, vocab=2048, ffn=2048
)
large = minikv.load(shape=shape, seed=0)
counts = (1, 2, 4, 8, 16, 32)
tpot_s = []  # a step gives each request one token, so this is the time of a step
for count in counts:
    engine = minikv.Engine(large, num_blocks=2 * count, prefix_caching=False)
    for name in range(count):
        engine.add(name, [name + 1] * 8, minikv.Sampling(max_new_tokens=12, **SAMPLING))
    ends = []
    while engine.has_work:
        engine.step()
        ends.append(engine.runner.now())
    tpot_s.append(statistics.median(after - before for before, after in pairwise(ends)))
per_s = [count / seconds for count, seconds in zip(counts, tpot_s, strict=True)]
del large, engine

# %% id="figure-throughput" tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.9))
left.plot(counts, per_s, label="measured")
left.plot(counts, [per_s[0] * count for count in counts], label="if each were free", marker="")
left.set(ylabel="tokens a second, all together", title="Throughput", ylim=(0, max(per_s) * 1.3))
left.legend(loc="lower right")
right.plot(counts, [1e3 * seconds for seconds in tpot_s])
right.set(ylabel="ms between two tokens", title="TPOT", ylim=(0, 1.15e3 * max(tpot_s)))
for axis in (left, right):
    axis.set_xlabel("requests at once")
    axis.set_xticks([1, 4, 8, 16, 32])
plt.show()
note(
    f"**What to see.** {shape.parameters / 1e6:.0f} million parameters, "
    f"{4 * shape.parameters / 1e6:.0f} MB in float32. From 1 to {counts[-1]} requests "
    f"the throughput grows {per_s[-1] / per_s[0]:.1f} times, from {per_s[0]:.0f} to "
    f"{per_s[-1]:.0f} tokens/s, while the time between two tokens of one reader grows "
    f"{tpot_s[-1] / tpot_s[0]:.1f} times, from {1e3 * tpot_s[0]:.0f} to {1e3 * tpot_s[-1]:.0f} "
    "ms (on the machine that built this page). That is the trade: the operator "
    "looks at the left, the reader at the right. A processor has far less arithmetic for each "
    "byte than a GPU, so it leaves the free stretch early."
)

# %% [markdown] id="static"
# ## A batch that waits for its longest
#
# The obvious way: take four requests, run them together until all are done, take the next four. This is **static batching**. It has two leaks. Prompts of different length
# are padded to the longest, so that they form a rectangle. And whoever is done keeps its place empty until the last one is done, because nobody may come in.
#
# We count in places: four places, one for each request of a batch. A place in a step is a *row-step*; it gives a token or it is idle. The prefill gives the first token, so
# an answer of *n* tokens takes *n* steps.


# %% id="jobs" tags=["nbval-check-output"]
@dataclass(eq=False)
class Request:
    name: str
    prompt: int  # tokens
    new: int  # tokens wanted
    computed: int = 0  # tokens that have K and V
    given: int = 0  # tokens written so far

    @property
    def pending(self):
        """Tokens of prompt and answer that have no K and V yet."""
        return self.prompt + self.given - self.computed


def eight():
    sizes = [(6, 3), (11, 9), (4, 20), (9, 5), (7, 4), (5, 12), (10, 2), (8, 6)]
    return [Request(name, *size) for name, size in zip("abcdefgh", sizes, strict=True)]


wanted = sum(request.new for request in eight())
print(wanted, "tokens are wanted")

# %% id="static-counted" tags=["nbval-check-output"]
PLACES = 4
static_steps = padding = 0
for first in range(0, 8, PLACES):
    batch = eight()[first : first + PLACES]
    static_steps += max(request.new for request in batch)
    padding += sum(max(other.prompt for other in batch) - request.prompt for request in batch)
static_idle = PLACES * static_steps - wanted
print(f"{static_steps} steps, {PLACES * static_steps} row-steps, {static_idle} of them idle")
print(f"{padding} padding tokens in the prompts")

# %% id="compare-idle"
compare("static-idle", round(100 * static_idle / (PLACES * static_steps), 1), "%")

# %% [markdown] id="continuous"
# ## Join and leave between steps
#
# Nothing forces the four to stay together. A step is one pass; between two passes anybody may leave and anybody may come. That is
# [continuous batching](glossary.md#continuous-batching). It needs no rectangle either: chapter 5's attention finds each token's past through a block table, so a step is just a row of tokens of
# whatever requests.
#
# What remains is to decide, before each step, *who gets how many tokens in it*. Whoever decides is the **scheduler**. Ours keeps two lists, and one number for each request says all that it needs to know: how many tokens
# are `pending`. All of a new prompt is pending. Of a request that decodes, one token is: the last one it wrote, which has no K and V yet.
#
# To bound the time of a step, the scheduler has a [step budget](glossary.md#step-budget): so many tokens a step and no more. It spends them on decodes first, then on prompts. For now the budget is large enough not to matter.


# %% id="ten-lines"
def plan(waiting, running, places, budget):
    """{request: tokens} of the next step. Who is let in moves from waiting to running.

    ``budget`` is at least ``places``, so that there is always a token for every decode.
    """
    decodes = [request for request in running if request.given]
    prompts = [request for request in running if not request.given]
    step = dict.fromkeys(decodes, 1)
    left = budget - len(decodes)
    while left > 0 and (prompts or (waiting and len(running) < places)):
        if not prompts:
            running.append(waiting.pop(0))
            prompts.append(running[-1])
        request = prompts.pop(0)
        step[request] = min(request.pending, left)
        left -= step[request]
    return step


# %% [markdown] id="booking"
# Then somebody computes the step, and the books are brought up to date: those tokens have K and V now, and a request with nothing left pending has got its next token. That is the whole loop.


# %% id="loop"
def book(step, running):
    for request, tokens in step.items():
        request.computed += tokens
        if request.pending == 0:  # its last token went through the model: here is the next one
            request.given += 1
            if request.given == request.new:
                running.remove(request)


def run(arrivals, places, budget, plan=plan):
    """The plans of all steps, {name: tokens} each. ``arrivals``: (step before which it comes, request)."""
    arrivals, waiting, running, steps = list(arrivals), [], [], []
    while arrivals or waiting or running:
        while arrivals and arrivals[0][0] <= len(steps):
            waiting.append(arrivals.pop(0)[1])
        step = plan(waiting, running, places, budget)
        steps.append({request.name: tokens for request, tokens in step.items()})
        book(step, running)
    return steps


# %% [markdown] id="continuous-run"
# The same eight requests, four places, everybody there from the start. A number is a prompt of so many tokens, a dot is a decode.


# %% id="continuous-counted" tags=["nbval-check-output"]
def show(steps, names):
    for name in names:
        cells = [step.get(name, "") for step in steps]
        print(f"{name:>4} |" + "".join(f"{'.' if cell == 1 else cell:>3}" for cell in cells))


UNLIMITED = 10**9
steps = run([(0, request) for request in eight()], PLACES, UNLIMITED)
show(steps, "abcdefgh")
idle = PLACES * len(steps) - wanted
print(
    f"{len(steps)} steps instead of {static_steps}; {idle} idle row-steps instead of {static_idle}"
)
assert idle == sum(PLACES - len(step) for step in steps)

# %% id="continuous-note"
tail = next(at for at, step in enumerate(steps) if len(step) < PLACES)
note(
    "**What to see.** *e* starts in the step after *a* has ended, *f* after *d*, and so on. "
    f"Before step {tail} no place is ever empty (the first step is step 0). The {idle} idle "
    "row-steps that are left are "
    "all at the end, where nobody waits any more: with a queue that never runs dry there "
    f"would be none. Static batching left {static_idle}."
)

# %% [markdown] id="engine-continuous"
# ## The same on a real model
#
# minikv's engine does this with tokens. `add` puts a request into the queue, `step` plans, computes and books one step and returns the requests that got a token. Its places are called `max_batch_requests`, its budget `max_batch_tokens`. To see what it
# decides we write down every plan on its way to the runner, the part that computes.


# %% id="record"
def record(runner):
    """A list that fills with {request: tokens} as ``runner`` executes step after step."""
    steps, execute = [], runner.execute

    def recording(plan, now):
        pieces = zip(plan.sequences, plan.pieces, strict=True)
        steps.append({text.request.request_id: len(piece.tokens) for text, piece in pieces})
        return execute(plan, now)

    runner.execute = recording
    return steps


def some_prompt(seed, tokens):
    return random.Random(seed).choices(range(1, model.shape.vocab), k=tokens)


# %% id="engine-run" tags=["nbval-check-output"]
def run_engine(arrivals, places, budget, runner):
    """As ``run``, on minikv's engine; returns the plans and the tokens of each request."""
    limits = {"max_batch_requests": places, "max_batch_tokens": budget}
    engine = minikv.Engine(runner=runner, prefix_caching=False, **limits)
    steps, arrivals, tokens = record(runner), list(arrivals), {}
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= len(steps):
            _, request = arrivals.pop(0)
            sampling = minikv.Sampling(max_new_tokens=request.new, **SAMPLING)
            engine.add(request.name, some_prompt(request.name, request.prompt), sampling)
        tokens |= {output.request_id: output.tokens for output in engine.step()}
    return steps, tokens


def alone(name, prompt_tokens, new):
    """The tokens of a request that has a cache to itself (chapter 2)."""
    return minikv.generate_with_cache(exact, some_prompt(name, prompt_tokens), new).tokens


runner = TorchRunner(exact, 64, 16)  # 64 blocks of 16: more than enough for all
engine_steps, tokens = run_engine([(0, job) for job in eight()], PLACES, UNLIMITED, runner)
assert engine_steps == steps
assert all(tokens[job.name] == alone(job.name, job.prompt, job.new) for job in eight())
print(f"{len(engine_steps)} steps, each with the very plan that our lines made")
print(f"{len(tokens)} answers, token for token what each request gets when it runs alone")

# %% [markdown] id="long-prompt"
# ## One long prompt, and everyone waits
#
# Without a limit a prompt goes through in one step, however long it is. Decode steps are short; this one is not; and whoever decodes is in the same step and waits for all of it. Two readers, and a prompt of 60 tokens that arrives before step 3:


# %% id="long-by-hand" tags=["nbval-check-output"]
def with_long():
    return [(0, Request("a", 5, 12)), (0, Request("b", 4, 12)), (3, Request("long", 60, 3))]


for budget in (UNLIMITED, 16):
    steps = run(with_long(), PLACES, budget)
    print("no limit" if budget == UNLIMITED else f"at most {budget} tokens a step")
    show(steps, ["a", "b", "long"])
    print("tokens a step:", [sum(step.values()) for step in steps], "\n")

# %% [markdown] id="chunked"
# With a budget of 16 the two decodes get their tokens first, and the prompt gets what is left, a chunk of it a step. Cutting a prompt over several steps is [chunked prefill](glossary.md#chunked-prefill). No result changes: a later chunk
# attends to the K and V of the earlier ones, which lie in the cache. Chapter 2 split a prompt that way already.
#
# Note what a chunk does *not* give: a token. The first token needs the last row of the prompt, and that row needs the K and V of all the others (chapter 1). So the **first token waits for the whole prefill**, in chunks or not.
#
# Now with a clock. Four readers decode on the bundled model, and a prompt of 2,000 tokens arrives. A budget of 4,096 swallows the prompt whole, smaller ones cut it. We write down when each token came.

# %% id="race"
LONG, READERS, QUIET = 2_000, 4, 10  # prompt tokens; who decodes; their steps before it comes
COUNTRIES = ["France", "Italy", "Spain", "Norway"]


def race(budget, long=LONG):
    runner = TorchRunner(model, 256, 16)
    steps, began, outputs, first = record(runner), runner.now(), {}, None
    engine = minikv.Engine(runner=runner, max_batch_tokens=budget, prefix_caching=False)
    for reader in range(READERS):
        sampling = minikv.Sampling(max_new_tokens=200, **SAMPLING)
        engine.add(reader, f"The capital of {COUNTRIES[reader]} is", sampling, now=began)
    while "long" not in outputs or not outputs["long"].finished:
        if len(steps) == QUIET:
            arrived, sampling = runner.now(), minikv.Sampling(max_new_tokens=10, **SAMPLING)
            engine.add("long", some_prompt("long", long), sampling, now=arrived)
        for output in engine.step():
            if output.request_id == "long" and "long" not in outputs:
                first = len(steps) - 1  # the step that gave its first token
            outputs[output.request_id] = output
    assert all(
        outputs[reader].token_times_s == outputs[0].token_times_s for reader in range(READERS)
    )
    times_s = [began - arrived + at for at in outputs[0].token_times_s]  # 0: the prompt arrives
    return {"steps": steps, "first": first, "ttft_s": outputs["long"].ttft_s, "times_s": times_s}


BUDGETS = (4_096, 512, 128, 32)
race(64, long=200)  # once before, so that nothing below pays for starting up
races = {}
for budget in BUDGETS:
    races[budget] = min((race(budget) for _ in range(2)), key=lambda found: found["ttft_s"])

# %% [markdown] id="race-counters"
# Counters first: they are the same on every machine.

# %% id="race-counted" tags=["nbval-check-output"]
print("budget   largest step   steps until   tokens through the model")
print("         (tokens)       its 1st token until then (prompt + readers' decodes)")
for budget, found in races.items():
    taken = [sum(step.values()) for step in found["steps"][QUIET : found["first"] + 1]]
    print(
        f"{budget:6} {max(taken):10,} {len(taken):14} {sum(taken):13,} = {LONG:,} + {READERS} "
        f"x {len(taken)}"
    )
    assert sum(taken) == LONG + READERS * len(taken)
    assert len(taken) == -(-LONG // min(LONG, budget - READERS))  # chunks, rounded up

# %% [markdown] id="race-clock"
# Now the clock, on the machine that built this page.


# %% id="race-timed"
def gaps_s(found):
    """(when a token came, seconds since the one before) for the readers."""
    return [(after, after - before) for before, after in pairwise(found["times_s"])]


usual_s = statistics.median(gap for found in races.values() for at, gap in gaps_s(found) if at < 0)
longest_s = {
    budget: max(gap for at, gap in gaps_s(found) if at > 0) for budget, found in races.items()
}
print(f"usual time between two tokens of a reader: {1e3 * usual_s:.1f} ms")
for budget, found in races.items():
    print(
        f"budget {budget:5}: longest {1e3 * longest_s[budget]:6.0f} ms; "
        f"the long request's own first token after {1e3 * found['ttft_s']:6.0f} ms"
    )

# %% id="compare-gap"
compare("longest-gap", longest_s[4_096] / usual_s, "times")

# %% id="figure-gaps" tags=["hide-input"]
figure, axes = plt.subplots(2, 1, figsize=(7.5, 4.4), sharex=True, sharey=True)
for axis, budget, title in zip(
    axes, (4_096, 128), ("the prompt in one step", "at most 128 tokens a step"), strict=True
):
    ends, pauses = zip(*[(1e3 * at, 1e3 * gap) for at, gap in gaps_s(races[budget])], strict=True)
    begins = [end - pause for end, pause in zip(ends, pauses, strict=True)]
    axis.bar(begins, pauses, pauses, align="edge", color="#c8c8c8", edgecolor="#1f1f1f")
    axis.axvline(0, color="#1f1f1f", linewidth=0.8, linestyle=(0, (6, 4)), marker="")
    first = (1e3 * races[budget]["ttft_s"], 0)
    axis.annotate(
        "the long request's\nfirst token", first, xytext=(14, 34), textcoords="offset points",
        fontsize=9, arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    axis.set(title=title, ylabel="ms since the\ntoken before")
    axis.annotate("the prompt arrives ", (0, 0.6e3 * longest_s[4_096]), ha="right", fontsize=9)
width = 1e3 * max(races[4_096]["ttft_s"], races[128]["ttft_s"])
axes[0].set_xlim(-0.35 * width, 1.4 * width)
axes[1].set_xlabel("ms since the long prompt arrived")
plt.show()
whole, cut = races[4_096], races[128]
price = cut["ttft_s"] / whole["ttft_s"] - 1
fewest = races[32]
note(
    "**What to see.** A bar is the pause before a token of a reader, as wide and as high as "
    f"it took. Taken in whole, the prompt stops all {READERS} readers for "
    f"{1e3 * longest_s[4_096]:.0f} ms. In chunks of {128 - READERS} their longest pause is "
    f"{1e3 * longest_s[128]:.0f} ms, "
    f"{longest_s[4_096] / longest_s[128]:.0f} times shorter, but there are "
    f"{cut['first'] - QUIET + 1} slow steps instead of one. **The price** is the long "
    "request's: its first token comes "
    f"{abs(100 * price):.0f} % "
    f"{'later' if price > 0 else 'sooner (noise: it computes no less)'} than in one step; with "
    "a budget of 32 it takes "
    f"{fewest['ttft_s'] / whole['ttft_s']:.1f} times as long. Each step has fixed costs, each "
    "chunk reads the weights again and the K and V before it, and in each the readers get "
    "their tokens too."
)

# %% [markdown] id="decode-first"
# ## Why decodes go first
#
# The budget is spent on decodes before prompts. Someone is watching a decode: a missed step is a visible pause. Who waits for a first token waits a moment longer. And a decode costs one token of the budget, so serving all of them leaves most of it to the prompts.
#
# ## Audit: who comes first in vLLM?
#
# The blog says that vLLM prefers decode. (The design of vLLM's engine that is in use today is called V1, the one before it V0.) Count it for the design that we have built: over the steps in which the long prompt was taken in on the real engine, how often did a decoding request
# get nothing? For comparison, the other order, by hand: prompts first, decodes from what is left.


# %% id="audit-decode-first" tags=["nbval-check-output"]
def prefill_first(waiting, running, places, budget):
    while waiting and len(running) < places:
        running.append(waiting.pop(0))
    step = {}
    for request in sorted(running, key=lambda request: request.given > 0):  # prompts, then decodes
        tokens = min(request.pending, budget - sum(step.values()))
        if tokens > 0:
            step[request] = tokens
    return step


def left_out(steps, first, last):
    """Decoding requests that got no token, added up over steps ``first`` to ``last``."""
    return sum(reader not in step for step in steps[first : last + 1] for reader in range(READERS))


arrivals = [(0, Request(reader, 5, 60)) for reader in range(READERS)]
other = run([*arrivals, (QUIET, Request("long", LONG, 10))], 64, 128, prefill_first)
last = max(at for at, step in enumerate(other) if step.get("long", 0) > 1)
print(
    f"prompts first: {left_out(other, QUIET, last)} times a reader got nothing, in "
    f"{last - QUIET + 1} steps"
)
claim("vllm-prefers-decode", left_out(cut["steps"], QUIET, cut["first"]), source="blog")

# %% [markdown] id="preemption"
# ## When the pool runs out
#
# Up to here every request had all the blocks it asked for. In truth nobody knows how long an answer gets, and reserving for the longest was chapter 4's waste. So the scheduler lets a request in when there are blocks for what it has *now*, its prompt,
# and hands out further blocks as the answer grows. That fills the pool well. It also means that one day a decode needs a block and there is none.
#
# Then somebody must give way. A running request loses all its blocks, goes back to the head of the queue, and is resumed when there is room: [preemption](glossary.md#preemption). What it had written so far is kept, that is only a few numbers. Its K and V are gone and will be computed again.
#
# Three requests, and a pool that holds their prompts with ease, but not three whole answers. At its end a request needs slots for prompt + new - 1 tokens: the last token written is never fed back.

# %% id="preempt-run" tags=["nbval-check-output"]
PROMPT, NEW, POOL = 32, 25, 9  # tokens, tokens, blocks of 16


def squeeze(num_blocks, prefix_caching):
    runner = TorchRunner(exact, num_blocks, 16)
    steps, events, outputs = record(runner), [], {}
    engine = minikv.Engine(runner=runner, prefix_caching=prefix_caching)
    for name in "abc":
        engine.add(name, some_prompt(name, PROMPT), minikv.Sampling(max_new_tokens=NEW, **SAMPLING))
    while engine.has_work:
        before = {
            text.output.request_id: text.table.num_tokens for text in engine.scheduler.running
        }
        count = engine.stats().preemptions
        outputs |= {output.request_id: output for output in engine.step()}
        if engine.stats().preemptions > count:
            gone = [text.output.request_id for text in engine.scheduler.waiting]
            events += [(len(steps) - 1, name, before[name]) for name in gone]
        engine.check_integrity()
    return engine, steps, events, outputs


each = blocks_for(PROMPT + NEW - 1, 16)
print(f"{each} blocks for each at its end, {3 * each} for all three; there are {POOL}")
engine, steps, events, outputs = squeeze(POOL, prefix_caching=False)
show(steps, "abc")
for at, name, lost in events:
    print(f"step {at}: {name} gives up its blocks, with K and V of {lost} tokens in them")
print("preemptions:", engine.stats().preemptions)

# %% id="preempt-account"
at, _, lost = events[0]
note(
    f"In step {at} each of the three has filled its {blocks_for(lost, 16)} blocks, and *a* "
    "needs one more. *c* gives up all of its own. "
    f"It cannot come back at once: with its newest token it is {lost + 1} tokens long and "
    f"needs {blocks_for(lost + 1, 16)} blocks, "
    f"where {POOL - 2 * each} is left. When *a* and *b* have ended, *c* goes through the model "
    "once more in a single step, prompt and "
    f"answer together ({lost + 1} tokens), and continues with its next token."
)

# %% [markdown] id="preempt-question"
# Are the tokens the same? And is the extra work exactly what was lost?

# %% id="preempt-proof" tags=["nbval-check-output"]
for name, output in outputs.items():
    assert output.tokens == alone(name, PROMPT, NEW)
    lost = sum(tokens for _, who, tokens in events if who == name)
    assert output.computed_tokens == PROMPT + NEW - 1 + lost
    print(
        f"{name}: {output.computed_tokens} tokens computed = {PROMPT} + {NEW} - 1 + {lost} lost, "
        f"preempted {output.preemptions} times"
    )
print("all tokens as when each runs alone")

# %% [markdown] id="preempt-which"
# **Why *c*?** The rule is: whoever was admitted last gives way, even if it is the one that needs the block. It has usually computed the least, so the least is lost. And it makes sure that the one admitted *first* is never preempted: it always goes on, so it ends some day and gives its blocks back, then the next is first. Nobody can wait for ever, and no two can take turns in throwing each other out.
#
# One more thing that chapter 6 gave us. With prefix caching on, blocks that *c* gives up are not free but cached. The others evict what they need, the tail of *c* first. The rest is still there when *c* comes back:

# %% id="preempt-cached" tags=["nbval-check-output"]
engine, steps, events, cached = squeeze(POOL, prefix_caching=True)
saved = outputs["c"].computed_tokens - cached["c"].computed_tokens
assert cached["c"].tokens == outputs["c"].tokens
print(
    f"c computed {cached['c'].computed_tokens} tokens, {saved} fewer: {saved // 16} of its "
    "blocks survived"
)
print("hits counted for prompts:", engine.stats().hit_tokens)

# %% [markdown] id="preempt-note"
# Those tokens do not count as hits: minikv's hit rate is about prompts when they are first let in, and it should not look better because the pool is too small.
#
# Instead of recomputing, an engine can copy the blocks to the host's memory and back (*swapping*). Which is faster depends on bytes a token and on the bus; that question belongs to the second part of the course, below the cliff.

# %% [markdown] id="admission"
# ## Who may come in at all
#
# Two decisions are called [admission](glossary.md#admission). The daily one: may the first in the queue run *now*? It may when its tokens fit into blocks that are free or can be evicted. If not, nobody overtakes it, or a long prompt would starve behind a stream of short ones.
#
# The other one is made once, when a request is added: can it *ever* run? If it would not fit into the whole pool, alone, then no amount of preemption helps. It would wait for ever, and everyone behind it too. So it is refused at once, with both numbers, and nobody else notices. It fits if and only if `blocks_for(prompt + max_new_tokens - 1)` is at most the pool.

# %% id="admission-edge" tags=["nbval-check-output"]
engine = minikv.Engine(exact, num_blocks=4, block_size=16, prefix_caching=False)
engine.add("neighbour", some_prompt("neighbour", 20), minikv.Sampling(max_new_tokens=6, **SAMPLING))
engine.step()
before = engine.stats()
for new in (45, 46):  # 20 + 45 - 1 = 64 tokens = 4 blocks; one more is a fifth
    print(f"20 + {new} - 1 tokens: {blocks_for(20 + new - 1, 16)} blocks of 4.", end=" ")
    try:
        engine.add(new, some_prompt(new, 20), minikv.Sampling(max_new_tokens=new, **SAMPLING))
        print("accepted; it waits or runs")
    except minikv.RequestError as wrong:
        assert engine.stats().waiting == before.waiting + 1  # only the one that was accepted
        print("refused:\n   ", str(wrong).replace("; ", ";\n    "))
answers = {}
while engine.has_work:
    answers |= {output.request_id: output.tokens for output in engine.step()}
assert answers == {"neighbour": alone("neighbour", 20, 6), 45: alone(45, 20, 45)}
print("the neighbour, and the one that just fits, got all their tokens")

# %% [markdown] id="widget"
# ## See it: the timeline
#
# A row is a request, a column a step. Four readers, then a long prompt before step 4. Every plan below is made by the engine's own scheduler, with a runner that computes nothing. Use Tab to reach a control and the arrow keys to move it. Try this:
#
# - Turn chunked prefill off: the prompt goes through in one step, and look what the summary says about the readers' longest gap.
# - Chunking on again: make the budget smaller until the prompt only trickles. Who waits now?
# - Make the pool smaller, to 20 and to 16 blocks: who waits, who is preempted? With 12 blocks: why is the long request refused?
# - A long prompt of 64 with 32 blocks: watch what becomes of the work on it, and compare with 48 blocks.

# %% id="timeline"
from minikv.classroom.explorers import batch_timeline
from minikv.classroom.notebook import explore

explore(batch_timeline.draw, **batch_timeline.CONTROLS)

# %% [markdown] id="war-story"
# ## War story: what comes back is not what left
#
# A preempted request has a prompt, some tokens that were given to its reader already, and no K and V. To resume it, the text of both must go through the model once more, and then the *next* token is due. It is easy to get wrong by one list. Here is a request that is preempted after three of its eight tokens, and resumed in three ways. `writes` is the model without any cache, so the only thing that can go wrong is the list.


# %% id="war-story-lines" tags=["nbval-check-output"]
def writes(text, n):
    text = list(text)
    for _ in range(n):
        text.append(int(minikv.logits(exact, text)[-1].argmax()))
    return text[-n:]


prompt = exact.tokenizer.encode("The capital of Norway is")
given = writes(prompt, 3)  # and now its blocks are taken away
resumed = {
    "never preempted": writes(prompt, 8),
    "prompt + given": given + writes(prompt + given, 5),
    "prompt only": given + writes(prompt, 5),  # what was given is dropped
    "given twice": given + writes(prompt + given + given, 5),  # it stood in both lists
}
for how, answer in resumed.items():
    print(f"{how:16}{exact.tokenizer.decode(answer)}")
assert resumed["prompt + given"] == resumed["never preempted"]
assert resumed["prompt only"] != resumed["never preempted"]
assert resumed["given twice"] != resumed["never preempted"]

# %% [markdown] id="war-story-hits-intro"
# No error, no warning. The first fault one can see. The second has all the marks of a good answer: the tokens that were handed out before are fine, the later ones were chosen after a text that stood there twice. The third way to go wrong needs a prefix cache: count the tokens to compute *before* looking up what is cached, then start *after* the hits.

# %% id="war-story-hits" tags=["nbval-check-output"]
table = BlockTable(block_size=4)
table.blocks.extend([7, 3])  # room for its 5 + 3 tokens; the first block was found in the cache
hits, count = 4, len(prompt) + len(given) - 0  # the count was made when no hit was known
try:
    places = [table.locate(position) for position in range(hits, hits + count)]
except IndexError as wrong:
    print("IndexError:", wrong)

# %% [markdown] id="war-story-told"
# Whose was it? **vllm-gaudi** (vLLM for Intel's accelerators) had the first two kinds: output tokens were booked twice in each iteration, which came to light when a preempted request was put back into the batch, and a resumed request's prefill left out what it had written (pull requests [524](https://github.com/vllm-project/vllm-gaudi/pull/524) and [541](https://github.com/vllm-project/vllm-gaudi/pull/541), November 2025: accuracy with preemptions was restored). In **nano-vllm** the third kind is reported: a preempted request hits the prefix cache when it is resumed, its token count is the old one, and the
# model runner reads past the end of the block table under load ([pull request 211](https://github.com/GeeeekExplorer/nano-vllm/pull/211), April 2026).
#
# How minikv avoids it: there is no second list and no second counter. A sequence is *one* list of tokens, prompt and answer together, and *one* number, how many of them have K and V. Everything after that is pending. A preemption sets it to 0; a lookup sets it to the hits; the count is taken afterwards.

# %% id="war-story-minikv"
from minikv.engine.request import Sequence
from minikv.engine.scheduler import Scheduler

show_source(Sequence.pending_tokens)
show_source(Scheduler._preempt)

# %% [markdown] id="war-story-check"
# The same request on the engine, preempted by hand after three tokens and again after five, with the prefix cache on. (`_preempt` is private to the scheduler: nobody but a test would call it.)

# %% id="war-story-checked" tags=["nbval-check-output"]
engine = minikv.Engine(exact, num_blocks=16, block_size=4)
engine.add("a", prompt, minikv.Sampling(max_new_tokens=8, **SAMPLING))
output, written = None, []
while engine.has_work:
    (output,) = engine.step()
    written += output.new_tokens
    if len(written) in (3, 5):
        engine.scheduler._preempt(engine.scheduler.running[0])
assert written == output.tokens == resumed["never preempted"]
assert output.preemptions == 2
print(
    f"preempted {output.preemptions} times, {output.computed_tokens} tokens computed, text "
    "unchanged"
)

# %% [markdown] id="engine-version"
# ## The engine's version
#
# `plan` spends the budget in three rounds: decodes, prompts under way, new ones. It is our dozen lines with blocks added.

# %% id="source-plan"
show_source(Scheduler.plan)
show_source(Scheduler._plan_decodes)

# %% [markdown] id="source-plan-read"
# `_make_room` gets a decode the block that it needs, and preempts from the end of the running list until there is one; it says False when the request itself was at the end. When anybody had to give way, nobody is let in during the same step: there is no room, and who gave way would only come back to give way again.
#
# `_schedule` turns a request into a piece of the step. Look for three things: where the chunk is cut, that only a complete piece asks for logits, and that a decode is no special case. It is a piece with one token pending.

# %% id="source-schedule"
show_source(Scheduler._schedule)

# %% [markdown] id="source-step-read"
# And the step itself. The scheduler plans, the runner computes, `commit` books what was computed. In this order, so that nothing is booked if the runner fails. The time comes from the runner: hand the engine one that computes nothing, and the same code simulates another machine. The widget above did that, and chapter 8 will.

# %% id="source-step"
show_source(minikv.Engine._step_alone)

# %% [markdown] id="agreement"
# ### Do ours and the engine's agree?
#
# As long as there are blocks for all, they must make the same plan for the same arrivals, token for token, in the same order. Two hundred random schedules, with the runner that computes nothing:

# %% id="agreement-checked" tags=["nbval-check-output"]
from minikv.lab.simulate import RooflineRunner

compared = 0
for seed in range(200):
    dice = random.Random(seed)
    places, budget = dice.randint(1, 6), dice.randint(6, 40)
    sizes = [(dice.randint(1, 60), dice.randint(1, 15)) for _ in range(8)]
    times = [0, *sorted(dice.randint(0, 3) for _ in range(7))]

    def arrivals(times=times, sizes=sizes):
        return [
            (at, Request(i, *size)) for i, (at, size) in enumerate(zip(times, sizes, strict=True))
        ]

    ours = run(arrivals(), places, budget)
    runner = RooflineRunner(llama, h100, num_blocks=200, block_size=16)
    theirs, _ = run_engine(arrivals(), places, budget, runner)
    assert [list(step.items()) for step in ours] == [list(step.items()) for step in theirs]
    compared += len(ours)
print(f"{compared:,} steps planned twice, always alike")

# %% [markdown] id="questions"
# ## Questions
#
# **1.** *"Continuous batching makes a single request faster."* True?
#
# <details><summary>Answer</summary>
#
# No. Its own steps hold the tokens of others as well, so each takes a little longer than alone. What gets shorter is the wait before it starts, and what grows is the number of tokens a second for all. If there is only one request, nothing changes.
#
# </details>
#
# **2.** Caching is off, a prompt has 10 tokens, the step budget is 4, nobody else is there. Which chunks are computed, and in which step comes the first token? What could go wrong in a scheduler that remembers "this request is in prefill" but not how far?
#
# <details><summary>Answer</summary>
#
# 4, 4, 2, and the first token comes in the third step. A scheduler whose progress is not kept begins again at token 0 each time and never ends; a large engine had a chunked prefill that did not advance ([sglang issue 36855](https://github.com/sgl-project/sglang/issues/36855)). In minikv progress is the table's number of tokens: a lookup sets it to the hits at the start, and after that only `commit` moves it forward, by what was computed.
#
# </details>
#
# **3.** The pool has 16 blocks of one token. Requests of 15, 16 and 17 prompt tokens come in, each wanting one new token, then one of 4. Who gets an answer? What would happen if the one of 17 were put into the queue?
#
# <details><summary>Answer</summary>
#
# 15, 16 and 4. The one of 17 needs 17 + 1 - 1 = 17 blocks and is refused at once. In the queue it would reach the head some day, never fit, and block everyone behind it for ever; [vLLM issue 39734](https://github.com/vllm-project/vllm/issues/39734) and [sglang issue 39271](https://github.com/sgl-project/sglang/issues/39271) report this kind. Note that 16 tokens with one new token do fit: the new one is never fed back.
#
# </details>
#
# **4.** Somebody sends an empty prompt, somebody else asks for 0 new tokens. Why must `add` look at this, and not the step?
#
# <details><summary>Answer</summary>
#
# A step holds the tokens of many. An exception in the middle of it is everybody's; such requests have stopped whole servers (vLLM issues [7632](https://github.com/vllm-project/vllm/issues/7632) and [6521](https://github.com/vllm-project/vllm/issues/6521)). In `add` only the one who asked gets an error, and nothing has been touched yet.
#
# </details>
#
# **5.** (Back to chapter 5.) Static batching pads. Why does continuous batching need no padding, although the requests of a step have different lengths?
#
# <details><summary>Answer</summary>
#
# Projections and feed-forward work on each token alone, so the tokens of all requests lie one after the other in one matrix. Only attention looks at a past, and paged attention finds each token's own past through its request's block table. Nothing has to be rectangular.
#
# </details>
#
# **6.** *"Chunked prefill computes less, that is why it is smoother."* And: would a budget of 5 with four readers be smoother still?
#
# <details><summary>Answer</summary>
#
# It computes the same prompt tokens and, until the first token, more decodes; each chunk also reads the weights and the earlier K and V again. It is smoother only because the work is spread. With a budget of 5 the prompt gets one token a step: the readers hardly notice it, but it needs a step for every token of the prompt, and decode steps are memory-bound (chapter 3), so most of the machine is idle. The budget belongs where a step begins to be compute-bound.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# As of 2026:
#
# | | what they call it | where |
# |---|---|---|
# | vLLM (V1) | `max_num_batched_tokens` is the step budget, `max_num_seqs` the places. No decode or prefill phase: running requests are served in order of admission, then waiting ones, which in effect puts decodes before a new prompt. Preempts the last of the running by recomputation. | `vllm/v1/core/sched/scheduler.py` |
# | SGLang | `PrefillAdder` fills a step with (chunks of) prompts, `chunked_prefill_size`; a step is prefill or decode unless `--enable-mixed-chunk`. Preemption is called *retraction* (`retract_decode`). | `python/sglang/srt/managers/schedule_policy.py`, `schedule_batch.py` |
# | Hugging Face transformers | `FIFOScheduler`: decoding requests first, a split prompt is `PREFILLING_SPLIT`; a safety margin of free blocks is kept from new requests. | `src/transformers/generation/continuous_batching/scheduler.py` |
# | llama.cpp server | *slots* are the places; sampled tokens of generating slots go into the batch first, then prompt tokens up to `--batch-size`. | `tools/server/server-context.cpp` |

# %% [markdown] id="sources"
# ## Sources
#
# - Gyeong-In Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: scheduling by iteration, which is continuous batching.
# - Woosuk Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, 2023, arXiv 2309.06180: preemption by swapping and by recomputation.
# - Amey Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024, arXiv 2403.02310: chunked prefill beside decodes.
# - Sankalp Shubham, *How prompt caching works*, 2025: the audited sentence.
# - vllm-gaudi pull requests 524 and 541; nano-vllm pull request 211; the issues named in the questions.

# %% [markdown] id="next"
# ## Next
#
# The requests of this chapter came once and left. Conversations come back, turn after turn, with their whole past, and hope that it is still in the pool. What if there is one conversation more than fits? [Chapter 8: the cliff](08_the_cliff.ipynb).
