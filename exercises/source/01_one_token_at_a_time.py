# %% [markdown] id="title"
# # Exercises 1. One token at a time
#
# They go with [chapter 1](../chapters/01_one_token_at_a_time.ipynb) and ask for things that it does not show. Write your
# answers where `NotImplementedError` stands. The cell below an answer checks it: run it as often as you like. A check
# that fails says what is wrong, why it matters and what to try. The exercises do not need one another, so take them in
# any order.
#
# You may use whatever the first cell imports, and anything from Python, NumPy and PyTorch. The rest of minikv is closed
# here: what it does is the exercise.
#
# **Together** 15 points, about 80 minutes.

# %% id="e01-setup" role="given"
import math

import torch

from minikv import load, logits
from minikv.classroom.checks import check, expect, hidden_random, lock_minikv

torch.set_grad_enabled(False)
model = load(dtype=torch.float64)  # as in the chapter
lock_minikv()

# %% [markdown] id="mask"
# ## Exercise 1. A mask for a text that is there already
#
# *3 points, 10 minutes, easy*
#
# In the chapter every token was a query and a key. Now suppose that the first `earlier` tokens of a text have been dealt
# with, and only the `new` ones after them ask. They are the *last* tokens of the text, and they may look at all earlier
# ones, at themselves, and not ahead. Complete the mask: one row for each new token, one column for each token of the
# whole text, `True` where the query **may** look. With `new=2, earlier=3`:
#
#              token 0  1  2  3  4
#     token 3        T  T  T  T  .
#     token 4        T  T  T  T  T


# %% id="e01-mask" role="answer"
def causal_mask(new, earlier):
    """Which keys each query may look at: bool tensor [new, earlier + new]."""
    keys = torch.arange(earlier + new)  # the place of each key in the text
    ### BEGIN SOLUTION
    queries = torch.arange(earlier, earlier + new)  # the place of each query in the text
    return keys[None, :] <= queries[:, None]
    ### STUB
    # queries = ...  # the place of each query in the text
    # return ...  # compare keys and queries: [new, earlier + new]
    ### END SOLUTION


# %% id="e01-mask-first" role="check" points=1
with check(
    "the mask of a whole text, nothing before it",
    why="A token that could look ahead would read its own answer; one that cannot see itself forgets what it is.",
    hint="Row i is the query at place i. It may look at the keys at places 0 to i, with i among them.",
):
    expect(
        causal_mask(3, 0),
        torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        mistakes={
            "Your tokens cannot look at themselves: < where <= is needed?": torch.ones(3, 3).tril(
                -1
            ),
            "This is upside down: True is where a query MAY look.": torch.ones(3, 3).triu(1),
            "Your tokens look ahead: rows and columns are swapped.": torch.ones(3, 3).triu(),
        },
    )

# %% id="e01-mask-later" role="check" points=2
with check(
    "the mask of new tokens after earlier ones",
    why="New tokens stand at the END of the text. Count their places from 0, and they see only its beginning.",
    hint="The first new token's place is `earlier`. Its row has earlier + 1 times True.",
):
    expect(
        causal_mask(2, 3),
        torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        mistakes={
            "The mask is aligned at the top left: its offset is missing.": torch.ones(2, 5).tril(),
            "Everything is allowed. The mask may not be skipped when there are several new tokens: they must "
            "not see one another's future.": torch.ones(2, 5),
            "The offset is counted twice.": torch.ones(2, 8).tril(6),
        },
    )
    expect(causal_mask(1, 4), torch.ones(1, 5), "one new token sees everything")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        new, earlier = draw.randint(1, 9), draw.randint(0, 9)
        expect(causal_mask(new, earlier), torch.ones(new, earlier + new).tril(earlier))
    ### END HIDDEN TESTS

# %% [markdown] id="recomputed"
# ## Exercise 2. How much is done again
#
# *3 points, 15 minutes, easy*
#
# The chapter counted for a prompt of one token. Now the prompt has `prompt` tokens, and the model writes `new` after it,
# reading the whole text anew for each. How many times in all does it compute a token that it has computed before?
# (Work it out for `prompt=3, new=3` on paper first. The last token is written and never read.)


# %% id="e01-again" role="answer"
def recomputed_tokens(prompt, new):
    """How often tokens go through the model again in all; prompt >= 1, new >= 0."""
    ### BEGIN SOLUTION: a number, by a formula or a loop
    return sum(prompt + written - 1 for written in range(1, new))
    ### END SOLUTION


# %% id="e01-again-one" role="check" points=1
with check(
    "a prompt of one token and 50 new ones, as in the chapter",
    why="Round by round the model computes 1, 2, ... 50 tokens, and only one of each round's is new.",
    hint="Round n reads n tokens. n - 1 of them have been read before. Add up over all rounds.",
):
    expect(
        recomputed_tokens(1, 50),
        1225,
        mistakes={
            "These are all passes, with each token's first one: count only the repetitions.": 1275,
            "49 times 49: but only the very first token is computed again 49 times, the later ones less often.": 2401,
        },
    )

# %% id="e01-again-prompt" role="check" points=2
with check(
    "a longer prompt",
    why="The prompt is read again in every round: with long prompts it is most of the work.",
    hint="Round 1 reads the whole prompt for the first time. Every later round reads it again.",
):
    expect(
        recomputed_tokens(3, 3),
        7,
        mistakes={
            "The prompt seems to be missing: it is computed again as well, in every round but the first.": 3,
            "The first round computes the prompt for the first time: that is no repetition.": 12,
        },
    )
    expect(recomputed_tokens(5, 0), 0, "nothing is written, so nothing is read")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        prompt, new = draw.randint(1, 2000), draw.randint(1, 300)
        expect(recomputed_tokens(prompt, new), (new - 1) * prompt + (new - 1) * (new - 2) // 2)
    ### END HIDDEN TESTS

# %% [markdown] id="stop"
# ## Exercise 3. Stop in time
#
# *4 points, 20 minutes, medium*
#
# The chapter's loop always wrote *n* tokens. A model says that it has finished by writing a *stop token*. Write the loop
# that listens. `next_logits(ids)` stands for the model: it takes a list of token ids and gives logits, `[tokens,
# vocab]`, one row for each. The answer ends before the first stop token, which does not belong to it, or when it has
# `limit` tokens. Do not call `next_logits` more often than needed, and leave the caller's list as it is.


# %% id="e01-stop" role="answer"
def write_until(next_logits, prompt, limit, stop_tokens):
    """The greedy answer to ``prompt`` (a list of ids): at most ``limit`` new ids, none of ``stop_tokens``, a list."""
    ### BEGIN SOLUTION: a loop that takes the best token of the last row
    new = []
    while len(new) < limit:
        token = int(next_logits(prompt + new)[-1].argmax())
        if token in stop_tokens:
            break
        new.append(token)
    return new
    ### END SOLUTION


# %% id="e01-stop-model" role="given"
class CountingModel:
    """A model of ten tokens in which t + 1 follows after t. It writes down what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, ids):
        self.asked.append(list(ids))
        rows = torch.zeros(len(ids), 10)
        for row, token in enumerate(ids):
            rows[row, (token + 1) % 10] = 1
        return rows


# %% id="e01-stop-greedy" role="check" points=2
with check(
    "the answer when nothing stops it",
    why="Only the last row of the logits continues the text; and a model that keeps nothing must be handed all of it.",
    hint="In each round: logits of prompt + answer so far, its last row, argmax, append.",
):
    plain = CountingModel()
    expect(
        write_until(plain, [3, 1, 4], 4, ()),
        [5, 6, 7, 8],
        mistakes={
            "The prompt is part of your answer: give only what is new.": [3, 1, 4, 5, 6, 7, 8],
            "You take the first row. It continues the first token, not the text.": [4, 4, 4, 4],
            "The same token again and again: what you write must be read in the next round.": [
                5,
                5,
                5,
                5,
            ],
        },
    )
    expect(
        plain.asked,
        [[3, 1, 4], [3, 1, 4, 5], [3, 1, 4, 5, 6], [3, 1, 4, 5, 6, 7]],
        "what the model was asked in each round",
        mistakes={
            "From the second round on you hand over only the newest token, as if the model remembered the rest. "
            "It is stateless: nothing is kept between two calls (a cache comes in chapter 2).": lambda asked: (
                len(asked[1]) == 1
            ),
            "The model is asked once more after the last token: nobody needs that.": lambda asked: (
                len(asked) == 5
            ),
        },
    )
    expect(write_until(plain, [3], 0, ()), [], "an answer of at most 0 tokens")

# %% id="e01-stop-stops" role="check" points=2
with check(
    "the answer ends at a stop token",
    why="Without it a model writes on after it has finished; each needless round reads the whole text once more.",
    hint="Look at the token before you append it. Only what the model writes can stop it, not what the prompt holds.",
):
    stopping, mine = CountingModel(), [7, 4]
    expect(
        write_until(stopping, mine, 8, (7, 9)),
        [5, 6],
        mistakes={
            "The stop token is part of your answer: it is a signal, not text.": [5, 6, 7],
            "The stop token in the PROMPT has stopped you. Only a token that the model writes may.": [],
            "You write on after the stop token.": lambda new: len(new) == 8 or 8 in new,
        },
    )
    expect(len(stopping.asked), 3, "calls of the model")
    expect(mine, [7, 4], "the caller's list, afterwards")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        first, limit, stop = draw.randint(0, 9), draw.randint(1, 12), draw.randint(0, 9)
        until = (stop - first - 1) % 10
        wanted = [(first + 1 + step) % 10 for step in range(min(until, limit))]
        expect(write_until(CountingModel(), [stop, first], limit, {stop}), wanted)
    ids = model.tokenizer.encode("The capital of France is")
    row = logits(model, ids)[-1]
    expect(write_until(lambda text: logits(model, text), ids, 1, ()), [int(row.argmax())])
    ### END HIDDEN TESTS

# %% [markdown] id="bug"
# ## Exercise 4. Find the bug
#
# *2 points, 15 minutes, medium*
#
# A colleague computes the weights of a head twice from the same scores: once with a causal mask, once with a mask that
# lets a query see only itself and the token before. In bfloat16 both are right. In float32 the second is right and
# every later use of the scores is wrong. Repair the function. (It is the kind of fault that the chapter's war story is
# about, in another place.)


# %% id="e01-bug" role="answer"
def weights_of(scores, allowed):
    """Softmax over the allowed keys, in float32; scores, allowed [queries, keys], each row allows one key at least."""
    ### BEGIN SOLUTION
    scores = scores.float().masked_fill(~allowed, -math.inf)
    return scores.softmax(-1)
    ### STUB
    # scores = scores.float()
    # scores.masked_fill_(~allowed, -math.inf)
    # scores -= scores.max(-1, keepdim=True).values
    # weights = scores.exp()
    # return weights / weights.sum(-1, keepdim=True)
    ### END SOLUTION


# %% id="e01-bug-twice" role="check" points=2
with check(
    "the scores, after the function has used them",
    why="A function that gives back a new tensor must not change the one that it was given: the next reader of it "
    "gets other numbers, far away from the fault.",
    hint="`x.float()` is `x` itself when x is in float32 already. Then everything that writes in place "
    "(names that end in _, -=) writes into the caller's tensor.",
):
    scores = torch.tensor([[1.0, 5.0, 5.0], [2.0, 3.0, 5.0], [0.0, 1.0, 2.0]])
    before, everything = scores.clone(), torch.ones(3, 3, dtype=torch.bool)
    causal = everything.tril()
    expect(
        weights_of(scores.bfloat16(), causal),
        before.masked_fill(~causal, -math.inf).softmax(-1),
        tolerance=1e-6,
    )
    expect(
        weights_of(scores, causal),
        before.masked_fill(~causal, -math.inf).softmax(-1),
        tolerance=1e-6,
    )
    expect(
        scores,
        before,
        "the caller's scores",
        mistakes={
            "They were masked in place.": lambda got: bool((got[~causal] == -math.inf).all()),
            "They were shifted in place.": lambda got: bool((got.max(-1).values == 0).all()),
        },
    )
    expect(weights_of(scores, everything), before.softmax(-1), "with another mask", tolerance=1e-6)
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    scores = torch.tensor([[draw.uniform(-90, 90) for _ in range(6)] for _ in range(4)])
    before = scores.clone()
    causal = torch.ones(4, 6, dtype=torch.bool).tril(2)
    expect(
        weights_of(scores, causal),
        before.masked_fill(~causal, -math.inf).softmax(-1),
        tolerance=1e-6,
    )
    expect(scores, before)
    ### END HIDDEN TESTS

# %% [markdown] id="padded"
# ## Exercise 5. Short texts in a long row
#
# *3 points, 20 minutes, hard*
#
# Texts of different lengths in one tensor need *padding*. Here it stands at the **left**: text *i* is the last
# `lengths[i]` rows, and what stands before is rubbish. Compute causal attention of one head for all texts at once. A
# text's rows must come out as if it were alone. The rows of the padding shall be zero (a softmax over nothing is not
# zero: look what it is).


# %% id="e01-padded" role="answer"
def padded_head(q, k, v, lengths):
    """Causal attention of one head; q, k, v [texts, longest, head_dim], padded at the left; the output as q."""
    ### BEGIN SOLUTION: scores, a mask for the future and for the padding, softmax, weighted sum
    longest = q.shape[1]
    place = torch.arange(longest)
    real = place >= longest - torch.tensor(lengths)[:, None]  # [texts, longest]
    allowed = (place[None, :] <= place[:, None]) & real[:, None, :]  # [texts, queries, keys]
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    return (scores.softmax(-1) @ v).masked_fill(~real[:, :, None], 0)
    ### END SOLUTION


# %% id="e01-padded-parts" role="given"
def some_texts(lengths, head_dim, seed):
    """q, k, v of texts with these lengths, padded at the left with large numbers: [texts, longest, head_dim] each."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(3, len(lengths), max(lengths), head_dim, generator=draw, dtype=torch.float64)
    for text, length in enumerate(lengths):
        made[:, text, : max(lengths) - length] = 50
    return made


def alone(q, k, v):
    """The chapter's head, for one text; q, k, v [tokens, head_dim]."""
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T / math.sqrt(q.shape[1])).masked_fill(future, -math.inf).softmax(-1) @ v


# %% id="e01-padded-full" role="check" points=1
with check(
    "two texts of the same length, no padding",
    why="Texts of one batch must not learn of each other, and the scale belongs to the head, not to the text.",
    hint="Start from the chapter's one_head and give every tensor one more axis, for the texts. Divide by sqrt(head_dim).",
):
    q, k, v = some_texts([4, 4], 2, seed=1)
    expect(
        padded_head(q, k, v, [4, 4]),
        torch.stack([alone(q[0], k[0], v[0]), alone(q[1], k[1], v[1])]),
        mistakes={
            "Your queries look ahead: the causal mask is missing.": (
                q @ k.transpose(1, 2) / math.sqrt(2)
            ).softmax(-1)
            @ v,
            "The scores are not divided by the root of head_dim.": torch.stack(
                [alone(q[i] * math.sqrt(2), k[i], v[i]) for i in (0, 1)]
            ),
        },
    )

# %% id="e01-padded-left" role="check" points=2
with check(
    "texts of lengths 3 and 5 together",
    why="Padding is not text. Whoever can see it gets another answer in a batch than alone.",
    hint="A key counts when it is not in the future AND not in the padding. A row of the padding allows no key at all: set it to 0.",
):
    q, k, v = some_texts([3, 5], 4, seed=2)
    out = padded_head(q, k, v, [3, 5])
    expect(
        out[1],
        alone(q[1], k[1], v[1]),
        "the long text",
        mistakes={
            "The long text has no padding, but some of it is missing.": lambda got: bool(
                (got[:2] == 0).all()
            )
        },
    )
    expect(
        out[0, 2:],
        alone(q[0, 2:], k[0, 2:], v[0, 2:]),
        "the short text",
        mistakes={
            "It looks at the padding: mask the keys of the padding as well.": alone(
                q[0], k[0], v[0]
            )[2:],
            "It is taken from the wrong end: the padding stands at the left, before the text.": lambda got: (
                bool((got[-1] == 0).all())
            ),
        },
    )
    expect(
        out[0, :2],
        torch.zeros(2, 4),
        "the rows of the padding",
        mistakes={
            "A softmax over nothing is 0 / 0, which is nan: put zeros there afterwards.": lambda got: (
                bool(got.isnan().any())
            )
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    lengths = [draw.randint(1, 7) for _ in range(4)]
    q, k, v = some_texts(lengths, 3, seed=draw.randint(0, 10**6))
    out = padded_head(q, k, v, lengths)
    for text, length in enumerate(lengths):
        expect(out[text, -length:], alone(q[text, -length:], k[text, -length:], v[text, -length:]))
        expect(out[text, :-length], torch.zeros(max(lengths) - length, 3))
    ### END HIDDEN TESTS
