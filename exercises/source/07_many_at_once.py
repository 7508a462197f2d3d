# %% [markdown] id="title"
# # Exercises 7. Many at once
#
# They go with [chapter 7](../chapters/07_many_at_once.ipynb) and ask for things that it does not show. Write your
# answers where `NotImplementedError` or `...` stands. The cell below an answer checks it: run it as often as you like.
# A check that fails says what is wrong, why it matters and what to try. The exercises do not need one another, so take
# them in any order.
#
# You may use whatever the first cell imports, and anything from Python, NumPy and PyTorch. The rest of minikv is closed
# here: what it does is the exercise.
#
# **Together** 18 points, about 100 minutes.

# %% id="e07-setup" role="given"
import random
from dataclasses import dataclass
from functools import cache

import torch

from minikv import load
from minikv.cache.attention.reference import attend_one
from minikv.classroom.checks import (
    check,
    expect,
    hidden_random,
    lock_minikv,
    oracle,
    refuses,
    require,
)

torch.set_grad_enabled(False)
model = load(dtype=torch.float64)  # tokens are compared, as in the chapter
lock_minikv()

# %% [markdown] id="idle"
# ## Exercise 1. Empty places
#
# *3 points, 15 minutes, easy*
#
# A warm-up. The chapter counted the idle row-steps of eight answers whose places were taken again at once. Here a place has
# to be made ready first: when an answer has ended, its place is empty for `pause` steps before the next request sits there.
#
# `lengths` are the tokens of each answer, in the order in which the requests wait, all from the start; an answer of *n*
# tokens takes *n* steps. There are `places` places, and all of them are ready at the beginning. A place in a step that
# gives no token is idle, be it in a pause or because nobody is left for it. Counting ends when the last answer does.
#
# - `static_idle`: batches of `places`, one after the other, the last one perhaps smaller. Between two batches all places
#   are made ready, together. Complete it.
# - `continuous_idle`: each place is made ready for itself, as soon as its answer has ended. Who waits takes the first
#   place that is ready.
#
# For example, with a pause of 1:
#
#     static_idle([3, 1, 2], 2, 1)       ->  2 x (3 + 1 + 2) - 6  =  6
#     continuous_idle([3, 1, 2], 2, 1)   ->  2 x 4 - 6  =  2        # the answer of 2 begins in the third step


# %% id="e07-idle" role="answer"
def static_idle(lengths, places, pause):
    """Idle row-steps when a batch waits for its longest answer."""
    steps = []  # of each batch
    ### BEGIN SOLUTION
    for first in range(0, len(lengths), places):
        steps.append(max(lengths[first : first + places]))  # noqa: PERF401
    pauses = pause * (len(steps) - 1)
    return places * (sum(steps) + pauses) - sum(lengths)
    ### STUB
    # for first in range(0, len(lengths), places):
    #     steps.append(...)  # how long this batch takes
    # pauses = ...  # steps between the batches, in all
    # return ...  # places in all steps, less those that gave a token
    ### END SOLUTION


def continuous_idle(lengths, places, pause):
    """Idle row-steps when requests join and leave between steps."""
    ### BEGIN SOLUTION: find out in how many steps all are done
    ready_at = [0] * places  # the step from which on each place is ready
    steps = 0
    for length in lengths:
        place = ready_at.index(min(ready_at))
        end = ready_at[place] + length
        ready_at[place], steps = end + pause, max(steps, end)
    return places * steps - sum(lengths)
    ### END SOLUTION


# %% id="e07-idle-static" role="check" points=1
with check(
    "batches that wait for their longest",
    why="A batch ends when its longest answer does; until then the others' places are paid for and give nothing.",
    hint="Each batch takes as many steps as its longest answer. All its places count, filled or not, and in a pause as well.",
):
    expect(
        static_idle([3, 1, 2], 2, 5),
        14,
        "[3, 1, 2] with 2 places and a pause of 5",
        mistakes={
            "The pause between the two batches is missing: without it this is the chapter's count.": 4,
            "In the last batch a place has no request at all. It is idle as well.": 12,
            "In a pause all places are idle, not one.": 9,
            "Counting ends with the last answer: no pause comes behind it.": 24,
            "These are all row-steps: take off those that gave a token.": 20,
        },
    )
    expect(
        static_idle([5, 5, 5, 5], 4, 7),
        0,
        "four answers of the same length, in one batch",
        mistakes={"There is one batch, so nothing has to be made ready.": 28},
    )
    expect(
        static_idle([2, 9, 4, 1, 1, 1], 3, 0),
        12,
        "[2, 9, 4, 1, 1, 1] with 3 places, no pause",
        mistakes={
            "You let all batches take as long as the longest answer of all.": 36,
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        places, pause = draw.randint(1, 6), draw.randint(1, 9)
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 20))]
        batches = [lengths[at : at + places] for at in range(0, len(lengths), places)]
        expect(
            static_idle(lengths, places, pause),
            sum(places * (pause + max(batch)) - sum(batch) for batch in batches) - places * pause,
        )
    ### END HIDDEN TESTS

# %% id="e07-idle-continuous" role="check" points=2
with check(
    "join and leave between steps",
    why="A place is empty only while it is made ready, or when nobody waits any more. One can count that without a model.",
    hint="Follow each place: from which step on is it ready? The next request takes the one that is ready first.",
):
    expect(
        continuous_idle([3, 1, 2], 2, 1),
        2,
        "[3, 1, 2] with 2 places and a pause of 1",
        mistakes={
            "The pause is missing: without it this is the chapter's count.": 0,
            "This is what static batches leave: the third request need not wait for the first one.": 6,
            "Counting ends with the last answer: no pause comes behind it.": 4,
        },
    )
    expect(
        continuous_idle([2, 9, 4, 1, 1, 1], 3, 4),
        18,
        "[2, 9, 4, 1, 1, 1] with 3 places and a pause of 4",
        mistakes={
            "You divide the tokens evenly. But an answer is written one token after the other: it cannot be split between "
            "places.": 0,
            "The pause is missing: without it this is the chapter's count.": 9,
        },
    )
    expect(
        continuous_idle([1, 1, 10], 3, 2),
        18,
        "[1, 1, 10] with 3 places",
        mistakes={
            "Places that nobody needs any more are idle, too, until the last answer is done.": 0
        },
    )
    expect(
        continuous_idle([9, 1, 1], 2, 1),
        7,
        "[9, 1, 1] with 2 places and a pause of 1",
        mistakes={
            "Here the last to be done is not the last that came: count until everybody is done.": lambda got: (
                got < 0
            ),
        },
    )
    expect(continuous_idle([7], 2, 3), 7, "one request, two places")
    expect(
        continuous_idle([4, 4, 9], 2, 0),
        9,
        "[4, 4, 9] with 2 places, no pause",
        mistakes={
            "That would need the longest first, or answers cut in pieces. They are served whole, in the order in which they "
            "wait.": 1
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(8):
        places, pause = draw.randint(1, 6), draw.randint(0, 5)
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 20))]
        waiting, steps = list(lengths), 0
        busy = [-pause] * places  # steps that are left; below 0: since when it is empty
        while waiting or max(busy) > 0:
            for place, left in enumerate(busy):
                if waiting and left <= -pause:
                    busy[place] = waiting.pop(0)
            busy = [left - 1 for left in busy]
            steps += 1
        expect(continuous_idle(lengths, places, pause), places * steps - sum(lengths))
    ### END HIDDEN TESTS

# %% [markdown] id="admission"
# ## Exercise 2. As many as fit
#
# *3 points, 15 minutes, easy*
#
# The chapter refused a request that can never run. A kinder server gives a shorter answer, and says how long it may be.
# Write `granted(prompt, wanted, num_blocks, size)`. `prompt` is the number of tokens of the prompt, `wanted` the number
# of new tokens that are asked for, or `None` for "as many as there is room for". It gives back how many new tokens the
# request may have when it is alone in a pool of `num_blocks` blocks of `size` slots: never more than wanted.
#
# If not even one new token is possible, it raises a `ValueError` that names the tokens of the prompt and the slots of
# the pool. It also refuses an empty prompt and `wanted` below 1, with a `ValueError`: here, where only the one who asks
# is hurt, and not in a step that many share.
#
# Count with care what needs a slot. The last new token is never fed back.


# %% id="e07-granted" role="answer"
def granted(prompt, wanted, num_blocks, size):
    """How many new tokens a request may have; ValueError when it can have none."""
    ### BEGIN SOLUTION: see how many slots are left behind the prompt
    slots = num_blocks * size
    if prompt < 1 or (wanted is not None and wanted < 1):
        raise ValueError(
            f"a prompt of {prompt} tokens and {wanted} new ones: both must be at least 1"
        )
    most = slots - prompt + 1  # the last one needs no slot
    if most < 1:
        raise ValueError(f"the prompt has {prompt} tokens, and the pool has only {slots} slots")
    return most if wanted is None else min(wanted, most)
    ### END SOLUTION


# %% id="e07-granted-fits" role="check" points=2
with check(
    "how long the answer may be",
    why="One token too many, and the request waits for a block that does not exist, with everybody behind it. One too few, "
    "and a request is cut for nothing.",
    hint="The tokens that need a slot are prompt + new - 1. Which number of new ones fills the pool exactly?",
):
    expect(
        granted(20, None, 4, 16),
        45,
        "a prompt of 20, 4 blocks of 16, as many as fit",
        mistakes={
            "The last new token is never fed back, so it needs no slot: there is room for one more.": 44,
            "That is one too many: prompt + new - 1 tokens need slots.": 46,
            "You round the prompt up to whole blocks. But the answer goes on in the prompt's last block.": lambda got: (
                got in (32, 33)
            ),
        },
    )
    expect(granted(20, 30, 4, 16), 30, "the same with 30 wanted: less than fits")
    expect(granted(20, 45, 4, 16), 45, "the same with 45 wanted: exactly what fits")
    expect(
        granted(20, 46, 4, 16),
        45,
        "the same with 46 wanted: one too many",
        mistakes={
            "46 new tokens need 20 + 46 - 1 = 65 slots, and there are 64.": 46,
        },
    )
    expect(
        [granted(tokens, 1, 16, 1) for tokens in (15, 16)],
        [1, 1],
        "one new token after a prompt of 15 and of 16, 16 blocks of 1",
    )
    ### BEGIN HIDDEN TESTS
    draw, blocks_for = hidden_random(), oracle("minikv.cache.blocks.blocks_for")
    for _ in range(8):
        size, num_blocks = draw.randint(1, 20), draw.randint(1, 20)
        prompt, wanted = draw.randint(1, size * num_blocks), draw.randint(1, 400)
        new = 1
        while new < wanted and blocks_for(prompt + new, size) <= num_blocks:
            new += 1
        expect(granted(prompt, wanted, num_blocks, size), new)
    ### END HIDDEN TESTS

# %% id="e07-granted-refuses" role="check" points=1
with check(
    "who is refused at once",
    why="In the queue such a request would wait for ever and block the rest; in a step it would stop everybody. At the door "
    "it hurts only itself, and the message says why.",
    hint="raise ValueError(f\"...\") with both numbers: the prompt's tokens and the pool's slots (blocks x size).",
):
    refuses(lambda: granted(65, 1, 4, 16), ValueError, naming=(65, 64))
    refuses(lambda: granted(17, None, 16, 1), ValueError, naming=(17, 16))
    refuses(lambda: granted(0, 5, 4, 16), ValueError)
    refuses(lambda: granted(5, 0, 4, 16), ValueError)
    expect(
        granted(64, 1, 4, 16),
        1,
        "a prompt that fills the pool, one new token",
        mistakes={"A prompt of 64 tokens in 64 slots can have its one token.": 0},
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        size, num_blocks = draw.randint(1, 20), draw.randint(1, 20)
        prompt = size * num_blocks + draw.randint(1, 9)
        refuses(
            lambda p=prompt, n=num_blocks, s=size: granted(p, 1, n, s),
            ValueError,
            naming=(prompt, size * num_blocks),
        )
        refuses(lambda n=num_blocks, s=size: granted(0, None, n, s), ValueError)
        refuses(lambda n=num_blocks, s=size: granted(1, 0, n, s), ValueError)
        full, wanted = size * num_blocks, draw.randint(1, 9)
        expect(granted(full, wanted, num_blocks, size), 1, "a prompt that fills the pool")
        expect(granted(full, None, num_blocks, size), 1, "a prompt that fills the pool")
    ### END HIDDEN TESTS

# %% [markdown] id="step"
# ## Exercise 3. A step that is fair to short prompts
#
# *4 points, 25 minutes, medium*
#
# The chapter's scheduler gave all that is left of the budget to the first prompt. A short prompt behind a long one then
# waits for all of its chunks. Write one that takes at most `chunk` tokens of a prompt in a step, so that several prompts
# advance side by side. `jobs` are all requests that run, in the order in which they came:
#
#     Job(name, prompt, given, computed)      tokens of the prompt; tokens written so far; tokens that have K and V
#
# - `plan_step(jobs, budget, chunk)` gives a dict, name to tokens. First every request that decodes gets its one token.
#   Then each prompt, in order, gets as much as it needs, as `chunk` allows, and as is left of the budget. Whoever gets
#   nothing is not in the dict. If the budget is smaller than the number of decodes, the first ones get theirs. Nothing
#   in `jobs` changes: a plan is only a plan. A request decodes when it has been given a token (`given` >= 1). A prompt
#   of which only one token is left does not decode yet.
# - `book_step(jobs, step)` books a step that was computed. Every job in it has so many computed tokens more. Whose last
#   token went through the model is given the next one. Who is done is not your concern.
#
# For one prompt of 10 tokens alone, with a budget and a chunk of 4, the steps are 4, 4, 2, and then it decodes.


# %% id="e07-job" role="given"
@dataclass(eq=False)
class Job:
    name: str
    prompt: int
    given: int = 0
    computed: int = 0


# %% id="e07-step" role="answer"
def plan_step(jobs, budget, chunk):
    """The next step: {name: tokens}, decodes first, at most ``budget`` tokens in all and ``chunk`` of each prompt."""
    ### BEGIN SOLUTION: one round over those that decode, one over the others
    step = {}
    for decoding in (True, False):
        for job in jobs:
            if (job.given > 0) == decoding:
                pending = job.prompt + job.given - job.computed
                tokens = min(pending, 1 if decoding else chunk, budget - sum(step.values()))
                if tokens > 0:
                    step[job.name] = tokens
    return step
    ### END SOLUTION


def book_step(jobs, step):
    """Bring ``computed`` and ``given`` of the jobs up to date."""
    ### BEGIN SOLUTION: add what was computed; with nothing pending, a token was given
    for job in jobs:
        job.computed += step.get(job.name, 0)
        if job.computed == job.prompt + job.given:
            job.given += 1
    ### END SOLUTION


# %% id="e07-step-parts" role="given"
def two_and_three():
    """Two that decode, and three prompts between and behind them."""
    return [Job("long", 40, 0, 8), Job("a", 5, 3, 7), Job("s", 3), Job("b", 9, 1, 9), Job("t", 6)]


def steps_of(plan_step, book_step, jobs, budget, chunk, steps):
    """So many steps, one after the other."""
    plans = []
    for _ in range(steps):
        plans.append(plan_step(jobs, budget, chunk))
        book_step(jobs, plans[-1])
    return plans


# %% id="e07-step-plan" role="check" points=2
with check(
    "one step",
    why="Someone is reading along with every decode; a missed step is a pause. And the step must not take longer than its "
    "budget allows.",
    hint="Two rounds over jobs. In the second: the smallest of what is pending, chunk, and what is left of the budget.",
):
    expect(
        plan_step(two_and_three(), 100, 16),
        {"a": 1, "b": 1, "long": 16, "s": 3, "t": 6},
        "a large budget, chunk 16",
        mistakes={
            "long gets all that it needs: more than one chunk.": lambda got: got["long"] == 32,
            "A prompt that was begun goes on behind what it has computed: not all of it is pending.": lambda got: (
                got["long"] > 16
            ),
            "A short prompt gets a whole chunk: more tokens than it has.": lambda got: got["s"] > 3,
            "A request that decodes has exactly one token pending: the last one it was given.": lambda got: (
                got["a"] != 1
            ),
        },
    )
    expect(
        plan_step(two_and_three(), 8, 4),
        {"a": 1, "b": 1, "long": 4, "s": 2},
        "a budget of 8, chunk 4",
        mistakes={
            "Who gets nothing is not in the dict.": lambda got: 0 in got.values(),
            "That is more than the budget.": lambda got: sum(got.values()) > 8,
            "You take the jobs one after the other: b decodes and must get its token before any prompt.": lambda got: (
                "b" not in got
            ),
            "The budget has two tokens left for s: a chunk may be smaller than the prompt.": lambda got: (
                "s" not in got
            ),
        },
    )
    expect(
        plan_step(two_and_three(), 5, 4),
        {"a": 1, "b": 1, "long": 3},
        "a budget of 5: it ends before s and t",
    )
    expect(plan_step(two_and_three(), 1, 4), {"a": 1}, "a budget of 1: not even for all decodes")
    expect(
        plan_step([Job("q", 20), Job("p", 9, 0, 8)], 4, 4),
        {"q": 4},
        "two prompts, a budget of 4; of p only the last token is left",
        mistakes={
            "p has one token pending, but it is still a prompt: it waits for its turn.": lambda got: (
                "p" in got
            )
        },
    )
    same = two_and_three()
    expect(
        plan_step(same, 10, 4) == plan_step(same, 10, 4),
        True,
        "planned twice without booking, is it the same plan",
        mistakes={"Planning has changed the jobs: only book_step may.": False},
    )

# %% id="e07-step-advance" role="check" points=2
with check(
    "step after step",
    why="A scheduler that does not keep how far a prompt has come begins again each time and never ends; a large engine had "
    "a chunked prefill that did not advance.",
    hint="`computed` grows by what the step held. The first token comes when prompt + given tokens are computed, not earlier.",
):
    alone = [Job("p", 10)]
    expect(
        steps_of(plan_step, book_step, alone, 4, 4, 5),
        [{"p": 4}, {"p": 4}, {"p": 2}, {"p": 1}, {"p": 1}],
        "a prompt of 10, budget and chunk 4",
        mistakes={
            "It never advances: book what was computed.": lambda got: got == [{"p": 4}] * 5,
            "A chunk gives no token. Only when the whole prompt has been computed, the first one comes.": lambda got: (
                got[1] == {"p": 1}
            ),
            "After the prompt nothing is pending: the last chunk gives a token, which is to be computed next.": lambda got: (
                got[3] == {}
            ),
        },
    )
    expect([alone[0].given, alone[0].computed], [3, 12], "tokens given and computed after 5 steps")
    mixed = two_and_three()
    steps_of(plan_step, book_step, mixed, 7, 4, 3)
    expect(
        [[job.name, job.given, job.computed] for job in mixed],
        [["long", 0, 20], ["a", 6, 10], ["s", 1, 3], ["b", 4, 12], ["t", 0, 0]],
        "name, given, computed of five jobs after 3 steps with budget 7 and chunk 4",
        mistakes={
            "A job that was in no step has been booked all the same.": lambda got: got[4][2] > 0
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        budget, chunk = draw.randint(1, 20), draw.randint(1, 10)
        jobs = [Job(str(number), draw.randint(1, 30)) for number in range(6)]
        state = [[job.prompt, 0, 0] for job in jobs]
        for _ in range(15):
            left, wanted = budget, {}
            for decodes in (1, 0):
                for number, (prompt, given, computed) in enumerate(state):
                    tokens = min(prompt + given - computed, left, 1 if decodes else chunk)
                    if tokens and decodes == (given > 0):
                        wanted[str(number)] = tokens
                        left -= tokens
            step = plan_step(jobs, budget, chunk)
            expect(
                {name: tokens for name, tokens in step.items() if tokens != 0},
                wanted,
                "what plan_step planned for six prompts, in one of their first 15 steps",
            )
            book_step(jobs, step)
            for number, tokens in wanted.items():
                job = state[int(number)]
                job[2] += tokens
                job[1] += job[2] == job[0] + job[1]
            expect(
                [[job.prompt, job.given, job.computed] for job in jobs],
                state,
                "prompt, given, computed of six jobs, when book_step has booked one of their first 15 steps",
            )
    ### END HIDDEN TESTS

# %% [markdown] id="bug"
# ## Exercise 4. Find the bug
#
# *3 points, 15 minutes, medium*
#
# A scheduler with blocks, in two functions. `let_in` lets waiting requests in as long as there are blocks for all of
# their tokens. `give_blocks` gives each running request, in the order in which they were let in, the block that its next
# token needs; when there is none, whoever was let in last gives up all of its blocks and goes back to the *head* of the
# queue, even if it is the one that needs the block.
#
# Most of the time all is well. But now and then a request is never heard of again, and now and then one that waits still
# holds a block. And some say that those who came later are served before them. Repair both functions.
# (`blocks_needed()` says how many blocks all of a request's tokens need, the newest one included.)


# %% id="e07-bug-parts" role="given"
@dataclass(eq=False)
class Client:
    """A request with blocks, which are only counted."""

    name: str
    tokens: int  # prompt and answer so far
    wanted: int  # tokens of the answer that are still to come
    blocks: int = 0

    def blocks_needed(self, size=4):
        return -(-self.tokens // size)


@dataclass
class Queue:
    """Who waits, who runs, in order, and how many blocks are free."""

    waiting: list
    running: list
    free: int


# %% id="e07-bug" role="answer"
def let_in(queue):
    """Let waiting requests in, first come, first served, as long as there are blocks."""
    ### BEGIN SOLUTION
    while queue.waiting and queue.waiting[0].blocks_needed() <= queue.free:
        client = queue.waiting.pop(0)
        client.blocks = client.blocks_needed()
        queue.free -= client.blocks
        queue.running.append(client)
    ### STUB
    # while queue.waiting:
    #     client = queue.waiting.pop(0)
    #     if client.blocks_needed() > queue.free:
    #         break
    #     client.blocks = client.blocks_needed()
    #     queue.free -= client.blocks
    #     queue.running.append(client)
    ### END SOLUTION


def give_blocks(queue):
    """Every running request gets the block that it needs; who was let in last gives way."""
    ### BEGIN SOLUTION
    for client in list(queue.running):
        while client in queue.running and client.blocks < client.blocks_needed():
            if queue.free > 0:
                queue.free -= 1
                client.blocks += 1
            else:
                last = queue.running.pop()
                queue.free += last.blocks
                last.blocks = 0
                queue.waiting.insert(0, last)
    ### STUB
    # for client in queue.running:
    #     if client.blocks < client.blocks_needed():
    #         while queue.free == 0:
    #             last = queue.running.pop()
    #             queue.free += last.blocks
    #             last.blocks = 0
    #             queue.waiting.append(last)
    #         queue.free -= 1
    #         client.blocks += 1
    ### END SOLUTION


# %% id="e07-bug-run" role="given"
def audit(queue, clients, pool):
    """What is wrong with the books, as a text; empty when nothing is."""
    wrong = []
    for client in clients:
        places = queue.waiting.count(client) + queue.running.count(client)
        if client.wanted and places != 1:
            wrong.append(f"{client.name} stands in {places} places, and it has not ended")
        if client.blocks and client not in queue.running:
            wrong.append(f"{client.name} does not run and holds {client.blocks} blocks")
        if client in queue.running and client.blocks < client.blocks_needed():
            wrong.append(f"{client.name} runs and lacks a block")
    if queue.free + sum(client.blocks for client in clients) != pool:
        wrong.append("blocks free and held do not add up to the pool")
    return "; ".join(wrong)


def named(queue):
    """Who waits, who runs, and how many blocks are free."""
    return [
        [each.name for each in queue.waiting],
        [each.name for each in queue.running],
        queue.free,
    ]


def served(let_in, give_blocks, sizes, pool, most=300):
    """Run requests of (tokens, wanted), all there from the start; names in the order in which they ended."""
    clients = [Client("abcdefghij"[number], *size) for number, size in enumerate(sizes)]
    queue, ended = Queue(list(clients), [], pool), []
    for _ in range(most):
        for part, name in ((give_blocks, "give_blocks"), (let_in, "let_in")):
            part(queue)
            wrong = audit(queue, clients, pool)
            require(not wrong, f"after {name}: {wrong}")
        for client in list(queue.running):
            client.tokens, client.wanted = client.tokens + 1, client.wanted - 1
            if client.wanted == 0:
                queue.running.remove(client)
                queue.free, client.blocks = queue.free + client.blocks, 0
                ended.append(client.name)
        if len(ended) == len(clients):
            break
    return ended


# %% id="e07-bug-let-in" role="check" points=1
with check(
    "where the blocks end",
    why="A request that stands in no list is never answered, and no error says so: its reader waits for ever.",
    hint="Look at the first in the queue before you take it out.",
):
    queue = Queue([Client("a", 5, 9), Client("b", 9, 9), Client("c", 1, 9)], [], 4)
    let_in(queue)
    expect(
        named(queue),
        [["b", "c"], ["a"], 2],
        "4 blocks free; a needs 2, b 3, c 1: who waits, who runs, free blocks",
        mistakes={
            "b was taken out of the queue, did not fit, and stands nowhere now: it is lost.": lambda got: (
                "b" not in got[0] + got[1]
            ),
            "c has overtaken b. Nobody overtakes, or a long request would wait for ever.": lambda got: (
                "c" in got[1]
            ),
            "b went back to the end of the queue.": lambda got: got[0] == ["c", "b"],
        },
    )
    queue = Queue([Client("a", 4, 9), Client("b", 4, 9)], [], 2)
    let_in(queue)
    expect(named(queue), [[], ["a", "b"], 0], "2 blocks free; a and b need 1 each")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        clients = [Client(name, draw.randint(1, 20), 1) for name in "abcdef"]
        free = draw.randint(0, 20)
        queue, fit = Queue(list(clients), [], free), 0
        while fit < 6 and sum(each.blocks_needed() for each in clients[: fit + 1]) <= free:
            fit += 1
        let_in(queue)
        left = free - sum(each.blocks_needed() for each in clients[:fit])
        expect(named(queue), [list("abcdef"[fit:]), list("abcdef"[:fit]), left])
    ### END HIDDEN TESTS

# %% id="e07-bug-gives-way" role="check" points=2
with check(
    "when there is no block left",
    why="A block that a waiting request holds serves nobody. And who gave way at the head of the queue comes back first: at "
    "its end, newcomers would pass it again and again.",
    hint="There are two faults in this function. Where does the one that gives way stand afterwards? And what if it is the "
    "very one that needs the block?",
):
    queue = Queue([Client("d", 3, 9)], [Client("a", 5, 9, 1), Client("b", 3, 9, 1)], 0)
    queue.running.append(Client("c", 8, 9, 2))
    give_blocks(queue)
    expect(
        named(queue),
        [["c", "d"], ["a", "b"], 1],
        "a needs a second block, c was let in last, d waits: who waits, who runs, free blocks",
        mistakes={
            "c went to the END of the queue: d, which came later, passes it.": lambda got: (
                got[0] == ["d", "c"]
            ),
            "A block is missing: was it given to c, which does not run any more?": lambda got: (
                got[2] < 1 and "c" not in got[1]
            ),
            "c is lost.": lambda got: "c" not in got[0] + got[1],
            "The one that was let in FIRST gave way. It has computed the most.": lambda got: (
                "a" in got[0]
            ),
        },
    )
    a, b = Client("a", 4, 9, 1), Client("b", 5, 9, 1)
    queue = Queue([], [a, b], 0)
    give_blocks(queue)
    expect(
        [*named(queue), a.blocks, b.blocks],
        [["b"], ["a"], 1, 1, 0],
        "b needs a second block and was let in last itself: who waits, who runs, free blocks, blocks of a and of b",
        mistakes={
            "b has given way, and then it was given a block all the same: it waits and holds one.": lambda got: (
                got[4] > 0 and got[0] == ["b"]
            ),
            "a gave way to b, but b was let in last.": lambda got: "a" in got[0],
        },
    )
    expect(
        served(let_in, give_blocks, [(6, 9), (3, 9), (4, 5), (9, 2), (1, 4)], 5),
        ["a", "b", "c", "d", "e"],
        "five requests in a pool of 5 blocks, in the order in which they end",
        mistakes={
            "Some are never heard of again.": lambda got: len(got) < 5,
            "One has ended twice.": lambda got: len(got) > 5,
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        sizes = [(draw.randint(1, 12), draw.randint(1, 12)) for _ in range(8)]
        expect(sorted(served(let_in, give_blocks, sizes, draw.randint(6, 12))), list("abcdefgh"))
    ### END HIDDEN TESTS

# %% [markdown] id="resume"
# ## Exercise 5. As if nothing had happened
#
# *5 points, 30 minutes, hard*
#
# A request was preempted. Of it there are left its prompt, the tokens that its reader was given, and its seed: three
# things that fit into a message. Perhaps another engine goes on with it. Write the function that does. The reader must
# not notice: the tokens shall be those that would have come without the preemption.
#
# `memory` holds K and V of the beginning of the text, perhaps of nothing, perhaps of some tokens that were still cached.
# `memory.tokens` is the number of its tokens that have K and V; at least one token of the text has none. `memory.compute(ids)` puts further tokens through the model, *behind*
# those that it holds, and gives the logits of the last one, `[vocab]`. Every token that has no K and V is computed once,
# and none again. The last new token is never fed back. The lists `prompt` and `given` belong to the caller: do not change
# them.
#
# An answer may be greedy: `seed` is `None`, and `pick(row, None)` gives the best token. Or it is *sampled*: each token is
# drawn, and likely ones are drawn more often. The draw needs a random number: `pick(row, number)`, with a number from 0
# to 1. The rule is that token *i* of the **answer** is picked with the *i*-th number that a new `random.Random(seed)`
# gives. (`random.Random(7).random()` is always the same number, the first one of seed 7.)


# %% id="e07-resume-parts" role="given"
class Memory:
    """K and V of the beginning of one text."""

    def __init__(self, through):
        self.through, shape = (
            through,
            model.shape,
        )  # through: the model, or something that counts and calls it
        self.layers = [
            torch.zeros(2, 0, shape.kv_heads, shape.head_dim) for _ in range(shape.layers)
        ]

    @property
    def tokens(self):
        """How many tokens have K and V here."""
        return self.layers[0].shape[1]

    def compute(self, ids):
        """Put the tokens ``ids`` through the model, behind what is here: the logits of the last one, [vocab]."""
        places = torch.arange(self.tokens, self.tokens + len(ids))
        return self.through(torch.tensor(ids), places, self)[-1]

    def attend(self, layer, q, k, v):
        """What the model asks for in each layer."""
        self.layers[layer] = torch.cat((self.layers[layer], torch.stack((k, v))), dim=1)
        keys, values = self.layers[layer].transpose(1, 2)
        return attend_one(q, keys, values)


def pick(row, number):
    """A token by its logits [vocab]: the best one without a number, else the one that the number falls on."""
    if number is None:
        return int(row.argmax())
    return min(int((row.softmax(-1).cumsum(-1) <= number).sum()), len(row) - 1)


# %% id="e07-resume" role="answer"
def go_on(memory, prompt, given, new, seed=None):
    """The next ``new`` tokens of an answer of which ``given`` is there already; all lists of ids."""
    ### BEGIN SOLUTION: a loop: compute what has no K and V, pick with the right number, append
    text = prompt + given
    numbers = random.Random(seed)
    for _ in given:
        numbers.random()  # used before the preemption
    for _ in range(new):
        row = memory.compute(text[memory.tokens :])
        text.append(pick(row, None if seed is None else numbers.random()))
    return text[len(prompt) + len(given) :]
    ### END SOLUTION


# %% id="e07-resume-whole" role="given"
PROMPT = tuple(model.tokenizer.encode("The river that runs through the city of"))


@cache
def answer_to(logits, text, new, seed):
    """A tuple of tokens behind ``text``, a tuple."""
    numbers, written = random.Random(seed), ()
    for _ in range(new):
        row = logits(model, text + written)[-1]
        written += (pick(row, None if seed is None else numbers.random()),)
    return written


def whole(logits, prompt, new, seed=None):
    """An answer without a cache and without a preemption."""
    return list(answer_to(logits, tuple(prompt), 8, seed)[:new])


def begins(tokens):
    """Whether a list begins with these tokens."""
    return lambda got: list(got[: len(tokens)]) == tokens


@dataclass
class Ran:
    """What came of one call of go_on."""

    answer: object
    computed: int  # tokens that it put through the model
    wrong: str  # what is wrong with its memory afterwards; empty when nothing is


def resumed(logits, go_on, prompt, given, new, seed=None, held=0):
    """One call of go_on, when the first ``given`` tokens of the answer are there and ``held`` of the text are cached."""
    answer, counts = whole(logits, prompt, given + new, seed), []

    def counting(ids, places, memory):
        counts.append(len(ids))
        return model(ids, places, memory)

    memory, fresh = Memory(model), Memory(model)
    if held:
        memory.compute([*prompt, *answer[:given]][:held])
    memory.through = counting
    handed, read = list(prompt), answer[:given]
    got = go_on(memory, handed, read, new, seed=seed)
    for name, now, before in (("prompt", handed, prompt), ("given", read, answer[:given])):
        expect(
            now,
            list(before),
            f"{name}, the list that was handed in, afterwards",
            mistakes={
                "You have changed the prompt that you were given: `text += ...` writes into the caller's list. Make a new "
                "one: `prompt + given`.": lambda _: name == "prompt",  # noqa: B023
                "You have changed the list `given`, which belongs to the caller.": lambda _: True,
            },
        )
    fresh.compute([*prompt, *answer[:-1]])
    wrong = ""
    for have, want in zip(memory.layers, fresh.layers, strict=True):
        if have.shape != want.shape:
            wrong = "it does not hold each token but the last once"
        elif (have - want).abs().max() > 1e-6:
            wrong = wrong or "its K and V are not those of the text"
    return Ran(got, sum(counts), wrong)


# %% id="e07-resume-new" role="check" points=1
with check(
    "a new request: nothing is given and nothing is held",
    why="First the prompt in one piece, then one token at a time: that is prefill and decode.",
    hint="In each round compute what has no K and V yet: first the whole prompt, then only the newest token.",
):
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, 0, 6)
    expect(
        ran.answer,
        whole(oracle("minikv.logits"), PROMPT, 6),
        "six tokens",
        mistakes={"The prompt is part of your answer.": lambda got: got[:3] == list(PROMPT[:3])},
    )
    expect(
        ran.computed,
        len(PROMPT) + 5,
        "tokens computed for a prompt and six new ones",
        mistakes={
            "memory computed nothing: put the tokens through `memory.compute`.": 0,
            "The last new token was computed as well. Nobody needs what comes after it.": len(
                PROMPT
            )
            + 6,
        },
    )
    expect(ran.wrong, "", "what is wrong with memory afterwards")
    expect(
        resumed(oracle("minikv.logits"), go_on, PROMPT, 0, 6, 7).answer,
        whole(oracle("minikv.logits"), PROMPT, 6, 7),
        "six tokens, seed 7",
        mistakes={
            "This is the greedy answer: where is the seed?": whole(
                oracle("minikv.logits"), PROMPT, 6
            ),
            "The same number for each token: a new random.Random in each round begins anew.": begins(
                whole(oracle("minikv.logits"), PROMPT, 1, 7)
            ),
        },
    )

# %% id="e07-resume-again" role="check" points=2
with check(
    "resumed after three tokens",
    why="K and V of the answer are gone like those of the prompt. What is left out, or put in twice, changes every token "
    "that comes, and no error says so.",
    hint="Make one list of prompt and answer, and keep one number: how many of its tokens have K and V. The rest is pending.",
):
    given = whole(oracle("minikv.logits"), PROMPT, 3)
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, 3, 5)
    expect(
        ran.answer,
        whole(oracle("minikv.logits"), PROMPT, 8)[3:],
        "the next five tokens",
        mistakes={
            "You begin the answer again: what was given belongs to the text as well.": whole(
                oracle("minikv.logits"), PROMPT, 5
            ),
            "You give what the reader has got already: only the NEXT tokens are asked for.": whole(
                oracle("minikv.logits"), PROMPT, 8
            ),
            "What was given stands twice in your text.": whole(
                oracle("minikv.logits"), [*PROMPT, *given, *given], 5
            ),
            "Only what was given is in your text: the prompt's K and V are gone as well.": whole(
                oracle("minikv.logits"), given, 5
            ),
        },
    )
    expect(
        ran.computed,
        len(PROMPT) + 3 + 4,
        "tokens computed to resume and write five more",
        mistakes={"memory computed nothing: put the tokens through `memory.compute`.": 0},
    )
    expect(ran.wrong, "", "what is wrong with memory afterwards")
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, 3, 5, held=4)
    expect(
        ran.answer,
        whole(oracle("minikv.logits"), PROMPT, 8)[3:],
        "the next five tokens, when four of the prompt were still cached",
        mistakes={
            "Four tokens are there already, and you have computed them again behind themselves: begin at "
            "memory.tokens.": lambda got: ran.computed == len(PROMPT) + 3 + 4,
        },
    )
    expect(ran.computed, len(PROMPT) + 3 + 4 - 4, "tokens computed then")
    expect(ran.wrong, "", "what is wrong with memory then")
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, 3, 5, held=len(PROMPT) + 2)
    expect(
        ran.answer, whole(oracle("minikv.logits"), PROMPT, 8)[3:], "all cached but the newest token"
    )
    expect(ran.computed, 5, "tokens computed then")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    prompt = [draw.randint(300, 2000) for _ in range(draw.randint(2, 12))]
    end = draw.randint(1, 7)
    cached = draw.randint(1, len(prompt) + end - 1)
    ran = resumed(oracle("minikv.logits"), go_on, prompt, end, 8 - end, held=cached)
    expect(
        ran.answer, whole(oracle("minikv.logits"), prompt, 8)[end:], "another prompt, partly cached"
    )
    expect(ran.computed, len(prompt) + 8 - 1 - cached, "tokens computed then")
    expect(ran.wrong, "", "what is wrong with memory then")
    ### END HIDDEN TESTS

# %% id="e07-resume-seed" role="check" points=1
with check(
    "a sampled answer, resumed",
    why="The seed promises the same text each time. If its numbers start anew after a preemption, the text depends on how "
    "full the pool was. An engine has had this fault.",
    hint="Token i of the answer gets number i. How many numbers have been used up before the first new token?",
):
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, 3, 5, 7)
    read = [*PROMPT, *whole(oracle("minikv.logits"), PROMPT, 3, 7)]
    expect(
        ran.answer,
        whole(oracle("minikv.logits"), PROMPT, 8, 7)[3:],
        "seed 7, after three tokens",
        mistakes={
            "The random numbers start anew: the fourth token gets the first number again.": whole(
                oracle("minikv.logits"), read, 5, 7
            ),
            "This is the greedy answer: where is the seed?": whole(
                oracle("minikv.logits"), read, 5
            ),
        },
    )
    expect(ran.computed, len(PROMPT) + 3 + 4, "tokens computed to resume and write five more")
    expect(
        resumed(oracle("minikv.logits"), go_on, PROMPT, 6, 2, 7, held=len(PROMPT)).answer,
        whole(oracle("minikv.logits"), PROMPT, 8, 7)[6:],
        "seed 7, after six tokens, the prompt still cached",
        mistakes={
            "The numbers that are used up do not depend on what is cached: count the given tokens.": lambda got: (
                True
            )
        },
    )
    expect(
        resumed(oracle("minikv.logits"), go_on, PROMPT, 3, 5, 0).answer,
        whole(oracle("minikv.logits"), PROMPT, 8, 0)[3:],
        "seed 0, after three tokens",
        mistakes={
            "Seed 0 is a seed: only `None` means greedy.": whole(
                oracle("minikv.logits"), [*PROMPT, *whole(oracle("minikv.logits"), PROMPT, 3, 0)], 5
            )
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    seed, end = draw.randint(0, 10**6), draw.randint(1, 7)
    ran = resumed(oracle("minikv.logits"), go_on, PROMPT, end, 8 - end, seed)
    expect(ran.answer, whole(oracle("minikv.logits"), PROMPT, 8, seed)[end:], "another seed")
    ### END HIDDEN TESTS

# %% [markdown] id="resume-cost"
# And what does it cost? A request has `prompt` tokens and gets `new` ones. It is preempted, and loses everything, each
# time when its reader has just got so many tokens as `after` says: `[3, 5]` means twice, after the third and after the
# fifth. How many tokens go through the model for it, in all?


# %% id="e07-cost" role="answer"
def computed_in_all(prompt, new, after):
    """Tokens computed for a request that is preempted after each of these numbers of new tokens (at least 1, below new)."""
    ### BEGIN SOLUTION: what it takes without a preemption, and what each one throws away
    return prompt + new - 1 + sum(prompt + given - 1 for given in after)
    ### END SOLUTION


# %% id="e07-cost-count" role="check" points=1
with check(
    "tokens computed in all",
    why="What a preemption costs is known beforehand. So one can weigh it against copying the blocks elsewhere.",
    hint="Which tokens have K and V at the moment of the preemption? The one that was given last has not been fed back yet.",
):
    expect(
        computed_in_all(5, 8, []),
        12,
        "a prompt of 5 and 8 new ones, never preempted",
        mistakes={"The last token is never fed back.": 13},
    )
    expect(
        computed_in_all(5, 8, [3]),
        19,
        "preempted once, after 3 tokens",
        mistakes={
            "Prompt and given are thrown away, you think. But the newest token had no K and V yet.": 20,
            "Only the prompt is computed again, you think. The answer's K and V are gone as well.": 17,
            "The prompt is computed again as well, not only the answer.": lambda got: (
                got in (14, 15)
            ),
        },
    )
    engine = oracle("minikv.Engine")(model, num_blocks=16, block_size=4, prefix_caching=False)
    sampling = oracle("minikv.Sampling")(max_new_tokens=8, ignore_eos=True)
    engine.add("a", list(PROMPT), sampling)
    while engine.has_work:
        (output,) = engine.step()
        if len(output.tokens) in (3, 5):
            engine.scheduler._preempt(engine.scheduler.running[0])
    expect(
        computed_in_all(len(PROMPT), 8, [3, 5]),
        output.computed_tokens,
        "minikv's own count, preempted after 3 and after 5 tokens",
        mistakes={
            "Each preemption loses everything, not only what came since the last one.": lambda got: (
                got in (3 * len(PROMPT) + 10, 3 * len(PROMPT) + 11, 2 * len(PROMPT) + 11)
            )
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        prompt, new = draw.randint(1, 3000), draw.randint(3, 500)
        after = sorted(draw.sample(range(1, new), 2))
        expect(
            computed_in_all(prompt, new, after), prompt + new - 1 + 2 * (prompt - 1) + sum(after)
        )
    ### END HIDDEN TESTS
