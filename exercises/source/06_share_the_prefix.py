# %% [markdown] id="title"
# # Exercises 6. Share the prefix
#
# They go with [chapter 6](../chapters/06_share_the_prefix.ipynb) and ask for things that it does not show. Write your
# answers where `NotImplementedError` or `...` stands. The cell below an answer checks it: run it as often as you like.
# A check that fails says what is wrong, why it matters and what to try. The exercises do not need one another, so take
# them in any order.
#
# You may use whatever the first cell imports, and anything from Python, NumPy and PyTorch. The rest of minikv is closed
# here: what it does is the exercise.
#
# **Together** 20 points, about 100 minutes.

# %% id="e06-setup" role="given"
import json
import random

from minikv import Engine, Sampling, load
from minikv.classroom.checks import (
    check,
    expect,
    hidden_random,
    lock_minikv,
    oracle,
    refuses,
    require,
)

model = load()
lock_minikv()

# %% [markdown] id="keys"
# ## Exercise 1. Keys for a text that grows
#
# *4 points, 15 minutes, easy*
#
# The chapter made all keys of a prompt at once. While an answer is written, the text grows, and now and then another
# block is full. Complete `more_keys`: it is given the keys that are known already and makes only those that are missing.
#
# How a key is made is up to `link(parent, block)`, which is handed in. It takes the key *before* this block and the
# block's tokens, a tuple. The first block has no key before it; its parent is `start`. With blocks of 2:
#
#     more_keys([], [5, 6, 7], 2, start, link)            ->  [link(start, (5, 6))]
#     more_keys([k0], [5, 6, 7, 8, 9], 2, start, link)    ->  [k0, link(k0, (7, 8))]
#
# Then write `start_of(adapter, salt)`: the `bytes` in which every chain begins. An *adapter* is a set of additional
# weights, so K and V depend on it; the salt keeps tenants apart. Each is a text of any characters, or `None`. Two
# requests may share blocks only if both have the same adapter **and** the same salt. (An empty text is not `None`.)


# %% id="e06-keys" role="answer"
def more_keys(keys, ids, size, start, link):
    """The keys of all full blocks of ``ids``, a new list; ``keys`` are those of its first blocks, known already."""
    keys = list(keys)
    ### BEGIN SOLUTION
    while (len(keys) + 1) * size <= len(ids):
        first = len(keys) * size  # the place of the block's first token
        parent = keys[-1] if keys else start
        keys.append(link(parent, tuple(ids[first : first + size])))
    return keys
    ### STUB
    # while ...:  # there is a full block that has no key
    #     first = ...  # the place of the block's first token
    #     parent = ...  # the key before it
    #     keys.append(link(parent, tuple(ids[first : first + size])))
    # return keys
    ### END SOLUTION


def start_of(adapter, salt):
    """Bytes that no other pair of adapter and salt gives; each is a text or None."""
    ### BEGIN SOLUTION: bytes made of both, so that they cannot be mixed up
    return json.dumps([adapter, salt]).encode()
    ### END SOLUTION


# %% id="e06-keys-parts" role="given"
class NotingLink:
    """A link that makes keys one can read, and writes down what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, parent, block):
        self.asked.append([parent, list(block)])
        return f"{parent}>{' '.join(map(str, block))}"


def mixed_up(start_of, pairs):
    """Which of ``pairs`` (adapter, salt) get the same start, as a text; empty when none do."""
    seen, mixed = {}, []
    for pair in pairs:
        start = start_of(*pair)
        require(type(start) is bytes, f"start_of{pair!r} gives no bytes")
        again = start_of(*pair)
        require(start == again, f"start_of{pair!r} gives something else each time")
        if start in seen:
            mixed.append(f"{seen[start]} = {pair}")
        seen[start] = pair
    return "; ".join(mixed)


# %% id="e06-keys-chain" role="check" points=1
with check(
    "the keys of a new prompt",
    why="A key stands for its block and all that stood before. One that forgets its past serves K and V that do not fit.",
    hint="Full blocks only. The first one's parent is start, every other one's is the key just before it.",
):
    expect(
        more_keys([], [5, 6, 7, 8, 9], 2, "s", NotingLink()),
        ["s>5 6", "s>5 6>7 8"],
        "5 tokens in blocks of 2",
        mistakes={
            "All your blocks hang on start: chain each to the key before it.": ["s>5 6", "s>7 8"],
            "Your keys forget their past.": lambda got: len(got) == 2 and "5" not in got[1],
            "The last block has an empty slot. It will still change, so it gets no key yet.": [
                "s>5 6",
                "s>5 6>7 8",
                "s>5 6>7 8>9",
            ],
            "The second block is full too: 4 of the 5 tokens fill it.": ["s>5 6"],
        },
    )
    expect(
        more_keys([], [5, 6, 7, 8], 2, "s", NotingLink()),
        ["s>5 6", "s>5 6>7 8"],
        "4 tokens in blocks of 2",
        mistakes={"The last block is full exactly: it gets its key now.": ["s>5 6"]},
    )
    expect(more_keys([], [5, 6, 7], 4, "s", NotingLink()), [], "3 tokens in blocks of 4")

# %% id="e06-keys-grows" role="check" points=1
with check(
    "a text that has grown",
    why="An answer of 1,000 tokens must not make 1,000 chains. A key is made once, and the older ones never change.",
    hint="Begin after the blocks that have keys. The parent of the next one is the last known key.",
):
    link, known = NotingLink(), ["k0", "k1"]
    expect(
        more_keys(known, [1, 2, 3, 4, 5, 6, 7, 8], 2, "s", link),
        ["k0", "k1", "k1>5 6", "k1>5 6>7 8"],
        "two keys are known, two more blocks are full",
        mistakes={
            "You make all keys anew instead of keeping those that are known.": lambda got: (
                got[0] != "k0"
            ),
            "You hang the first new block on start: its parent is the last key that is known.": lambda got: (
                str(got[2]).startswith("s>")
            ),
            "Only the new keys are there: give all of them.": ["k1>5 6", "k1>5 6>7 8"],
            "You take tokens from the beginning of the text: start after the blocks that have keys.": lambda got: (
                got[2] == "k1>1 2"
            ),
        },
    )
    expect(len(link.asked), 2, "calls of link")
    expect(known, ["k0", "k1"], "the list that was handed in, afterwards")
    idle = NotingLink()
    expect(more_keys(known, [1, 2, 3, 4, 5], 2, "s", idle), ["k0", "k1"], "no further block full")
    expect(len(idle.asked), 0, "calls of link when no block is new")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        size, grown = draw.randint(1, 5), [draw.randint(0, 9) for _ in range(draw.randint(0, 30))]
        whole = more_keys([], grown, size, "s", NotingLink())
        expect(len(whole), len(grown) // size)
        step_by_step = []
        for end in range(len(grown) + 1):
            step_by_step = more_keys(step_by_step, grown[:end], size, "s", NotingLink())
        expect(step_by_step, whole)
    ### END HIDDEN TESTS

# %% id="e06-keys-start" role="check" points=2
with check(
    "adapter and salt are not mixed up",
    why="Two tenants with the same start read each other's K and V: computed with other weights, or simply not theirs.",
    hint="Whatever sign you put between the two texts may also be in them. Is there a way to write down both so that each "
    "can be read back?",
):
    expect(
        mixed_up(start_of, [("x", None), (None, "x"), (None, None), ("x", "x"), ("y", None)]),
        "",
        "pairs with the same start",
        mistakes={
            'An adapter "x" gets what a salt "x" gets: the two fields are mixed up.': lambda got: (
                "('x', None) = (None, 'x')" in got
            ),
            "The salt is missing in it.": lambda got: "('x', None) = ('x', 'x')" in got,
            "The adapter is missing in it.": lambda got: "(None, None) = ('y', None)" in got,
        },
    )
    expect(
        mixed_up(start_of, [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]),
        "",
        "pairs with the same start",
        mistakes={"Glued together, one cannot see where the adapter ends.": lambda got: True},
    )
    signs = [",", "/", "|", ":", "-", "_", " ", "\n", "\0", '"', "'", "\\", ";", "=", "', '"]
    expect(
        mixed_up(start_of, [pair for s in signs for pair in ((f"a{s}b", "c"), ("a", f"b{s}c"))]),
        "",
        "pairs with the same start",
        mistakes={
            "Your sign between the two may stand in a name as well, and then nobody knows which one it is.": lambda got: (
                True
            )
        },
    )
    expect(
        mixed_up(start_of, [(None, "a"), ("", "a"), ("None", "a"), ("null", "a"), ("a", "None")]),
        "",
        "pairs with the same start",
        mistakes={
            "No adapter, an empty text and a text that says 'None' are three different things.": lambda got: (
                True
            )
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    texts = [None] + [
        "".join(draw.choices("ab,/|:-\"'\\ []", k=draw.randint(0, 3))) for _ in "x" * 25
    ]
    drawn = sorted({(a, b) for a in texts for b in texts}, key=repr)
    expect(mixed_up(start_of, drawn), "")
    ### END HIDDEN TESTS

# %% [markdown] id="tree"
# ## Exercise 2. A tree of tokens
#
# *4 points, 20 minutes, medium*
#
# Some engines keep no keys at all. They keep a *tree* of tokens: each prompt is a path from the root, and prompts with
# a common beginning share that part of the path. Write it as a class. `add(ids)` says that a prompt has been computed.
# `found(ids)` says how many tokens of a new prompt need not be computed because an earlier prompt began with the same
# ones, and changes nothing. At least one token of a prompt is always computed. `ids` is a list of token ids, never
# empty, and nothing is ever evicted.
#
#     tree.add([1, 2, 3, 4])
#     tree.add([1, 2, 9])
#     tree.found([1, 2, 3, 8, 8])   ->  3
#
# And if the engine shares whole blocks only? `found(ids, size)` gives the tokens that are found when blocks have `size`
# slots. The tree stays the same: it is enough to know how the answer is rounded. (Any structure will do, if its
# answers are right.)


# %% id="e06-tree" role="answer"
class PromptTree:
    """Prompts that have been computed, and what of a new one is there already."""

    def __init__(self):
        ### BEGIN SOLUTION: an empty tree
        self.root = {}  # token -> the tree behind it
        ### END SOLUTION

    def add(self, ids):
        """All tokens of ``ids`` have K and V now."""
        ### BEGIN SOLUTION: go down the path of ids, and make what is missing
        node = self.root
        for token in ids:
            node = node.setdefault(token, {})
        ### END SOLUTION

    def found(self, ids, size=1):
        """How many tokens of ``ids`` are found, in whole blocks of ``size``; at least one is left to compute."""
        ### BEGIN SOLUTION: go down as far as the path goes; leave one token; round to whole blocks
        node, common = self.root, 0
        while common < len(ids) and ids[common] in node:
            node = node[ids[common]]
            common += 1
        return min(common, len(ids) - 1) // size * size
        ### END SOLUTION


# %% id="e06-tree-parts" role="given"
def tree_of(kind, *prompts):
    """A tree of class ``kind`` to which these prompts have been added."""
    tree = kind()
    for ids in prompts:
        tree.add(list(ids))
    return tree


def found_by_engine(prompts, size):
    """How many tokens of each prompt minikv finds, when they come one after the other."""
    engine, found = Engine(model, num_blocks=400, block_size=size), []
    for number, ids in enumerate(prompts):
        engine.add(number, ids, Sampling(max_new_tokens=1, ignore_eos=True))
        outputs = []
        while engine.has_work:
            outputs = engine.step() or outputs
        found.append(outputs[0].cached_tokens)
    return found


# %% id="e06-tree-found" role="check" points=1
with check(
    "the longest common beginning with any earlier prompt",
    why="K and V of a token depend on every token before it. So what is shared begins at the first token and ends at the "
    "first difference.",
    hint="Walk from the root, a token at a time, and stop where the path ends. Every prompt that was added is in the tree.",
):
    tree = tree_of(PromptTree, [1, 2, 3, 4, 5], [1, 2, 9])
    expect(
        tree.found([1, 2, 3, 7]),
        3,
        "[1, 2, 3, 7] after [1, 2, 3, 4, 5] and [1, 2, 9]",
        mistakes={
            "You compare with the last prompt only, but the first one has more in common.": 2,
            "Nothing is found, although an earlier prompt begins with the same three tokens: it need not be the whole "
            "prompt.": 0,
        },
    )
    expect(
        tree.found([2, 3, 4, 5]),
        0,
        "[2, 3, 4, 5]",
        mistakes={
            "These tokens stood in the MIDDLE of an earlier prompt. There they had another past, so their K and V were "
            "others: a hit may not start in the middle.": lambda got: got > 0
        },
    )
    expect(
        tree.found([1, 2, 9, 4, 5, 6]),
        3,
        "[1, 2, 9, 4, 5, 6]",
        mistakes={
            "4 and 5 stood at these places, but after a 3 and not after a 9: the first difference ends a hit for good.": 5
        },
    )
    expect(tree.found([7, 7]), 0, "[7, 7]")
    expect(tree.found([7, 7]), 0, "[7, 7] again: asking computes nothing")

# %% id="e06-tree-full" role="check" points=1
with check(
    "one token is left to compute",
    why="The next token comes from the logits of the last one, and logits are not kept. With nothing to compute, there is "
    "no row to take them from: an engine has crashed on this.",
    hint="At most len(ids) - 1 tokens can be found.",
):
    tree = tree_of(PromptTree, [1, 2, 3, 4, 5, 6, 7, 8])
    expect(
        tree.found([1, 2, 3, 4, 5, 6, 7, 8]),
        7,
        "the same prompt again",
        mistakes={
            "All tokens are found, so none is computed, and there are no logits to take the next token from.": 8
        },
    )
    expect(tree.found([1, 2, 3]), 2, "the first three of its tokens")
    expect(tree.found([1]), 0, "its first token alone")
    expect(
        tree.found([1, 2, 3, 4, 5, 6, 7, 8, 9]),
        8,
        "the same prompt with one token more",
        mistakes={"Here the new token is the one to compute: no other must be given up.": 7},
    )

# %% id="e06-tree-blocks" role="check" points=2
with check(
    "whole blocks only",
    why="Blocks are what is shared. A partly filled one will still be written to, so it cannot be given to others.",
    hint="First the tokens in common, then at most len(ids) - 1 of them, and then down to whole blocks: in this order.",
):
    tree = tree_of(PromptTree, range(1, 13))
    expect(
        tree.found([1, 2, 3, 4, 5, 6, 50, 51], 4),
        4,
        "6 tokens in common, blocks of 4",
        mistakes={
            "The second block holds two common tokens and two others: it is not the same block.": 6,
            "You round up: the second block is not the same.": 8,
        },
    )
    expect(
        tree.found(list(range(1, 13)), 4),
        8,
        "the same 12 tokens again, blocks of 4",
        mistakes={
            "All three blocks are found, and nothing is left to compute.": 12,
            "11 tokens are no whole number of blocks: leave one token first, then round.": 11,
        },
    )
    expect(tree.found(list(range(1, 14)), 4), 12, "one token more, blocks of 4")
    prompts = [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1, 2, 2], [1, 2, 1], [1, 2, 1, 2, 1, 2, 2, 1, 1]]
    for slots in (1, 2):
        tree, answers = PromptTree(), []
        for ids in prompts:
            answers.append(tree.found(ids, slots))
            tree.add(ids)
        expect(answers, found_by_engine(prompts, slots), f"four prompts, blocks of {slots}")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for slots in (1, 3):
        prompts = [draw.choices((1, 2), k=draw.randint(1, 14)) for _ in range(8)]
        tree, answers = PromptTree(), []
        for ids in prompts:
            answers.append(tree.found(ids, slots))
            tree.add(ids)
        expect(answers, found_by_engine(prompts, slots))
    ### END HIDDEN TESTS

# %% [markdown] id="prompt"
# ## Exercise 3. Tidy up a prompt
#
# *4 points, 20 minutes, medium*
#
# Below is the prompt of a travel assistant. It contains all that the model should know: the rules, the tools (a list of
# dictionaries, in no particular order: they come from a server that shuffles them, and the keys in each as well), the
# user's name, the conversation so far, and the time. Somebody wrote it without a thought for the prefix cache: hardly
# anything is ever found.
#
# Rewrite it so that as much as possible is found. The prompt must still hold everything: the rules, each tool with all
# its names and values, the user's name, every message of the conversation in order, and the time. Which words you put
# around them is up to you. `tokens_to_compute(first, second)` asks the real engine (blocks of 16): it sends the first
# prompt, then the second, and gives how many tokens of the second must be computed. Use it to measure.
#
# Ask of each part how often it changes: every second, with each message, with each user, never?


# %% id="e06-prompt-parts" role="given"
RULES = (
    "You are a patient guide to the cities of Europe. Answer in one short sentence, name the city "
    "first, and never make up what you do not know. Be kind to people who have lost their way.\n"
)
TOOLS = [
    {"name": "weather", "city": "the name of a city", "day": "a day of the week"},
    {"name": "train", "from": "the first city", "to": "the last city", "class": "1 or 2"},
    {"name": "hotel", "city": "the name of a city", "nights": "how many nights"},
    {"name": "river", "city": "the name of a city"},
]
CHAT = [
    "User: What is the capital of France, and how do I get there?\n",
    "Guide: Paris is the capital of France, and there is a train to it.\n",
    "User: And what is the capital of Italy, and is it far from there?\n",
    "Guide: Rome is the capital of Italy, and there is a night train to it.\n",
    "User: What is the weather like in Rome in the month of May?\n",
    "Guide: Rome is warm in May, and there is not much rain at all.\n",
]


def count(text):
    """Tokens of a text."""
    return len(model.tokenizer.encode(text))


def tokens_to_compute(first, second):
    """How many tokens of ``second`` the engine computes when ``first`` has just been there."""
    engine = Engine(model, num_blocks=200, block_size=16)
    for number, prompt in enumerate((first, second)):
        engine.add(number, prompt, Sampling(max_new_tokens=1, ignore_eos=True))
        outputs = []
        while engine.has_work:
            outputs = engine.step() or outputs
    return outputs[0].computed_tokens


def shuffled(tools, seed):
    """The same tools in another order, and their keys as well."""
    mixed = [dict(random.Random(seed).sample(sorted(tool.items()), len(tool))) for tool in tools]
    return random.Random(seed).sample(mixed, len(mixed))


# %% id="e06-prompt" role="answer"
def build_prompt(rules, tools, user, chat, clock):
    """The prompt, a text; rules, user, clock are texts, tools a list of dicts, chat a list of texts, the oldest first."""
    ### BEGIN SOLUTION
    prompt = rules  # never changes
    for tool in sorted(tools, key=lambda tool: tool["name"]):
        prompt += json.dumps(tool, sort_keys=True) + "\n"
    prompt += f"The user is {user}.\n"  # the same all through a conversation
    for number, message in enumerate(chat, 1):
        prompt += f"({number}) {message}"  # only ever grows
    return prompt + f"It is {clock}.\n"  # always new
    ### STUB
    # prompt = f"It is {clock}. The user is {user}.\n{rules}"
    # prompt += json.dumps(tools) + "\n"
    # for number, message in enumerate(chat, 1):
    #     prompt += f"({number} of {len(chat)}) {message}"
    # return prompt
    ### END SOLUTION


# %% id="e06-prompt-complete" role="given"
def complete(prompt, rules, tools, user, chat, clock):
    """The prompt itself, if it holds all that it must."""
    require(type(prompt) is str, "build_prompt gives no text")
    for what, part in (("the rules", rules.strip()), ("the user", user), ("the time", clock)):
        require(part in prompt, f"{what} cannot be found in the prompt: {part[:40]!r}")
    for tool in tools:
        for text in (*tool, *tool.values()):
            require(text in prompt, f"the tool {tool['name']!r} is not complete: no {text!r}")
    end = 0
    for number, message in enumerate(chat, 1):
        at = prompt.find(message.strip(), end)
        require(at >= 0, f"message {number} of the conversation is missing, or in the wrong place")
        end = at + len(message.strip())
    return prompt


def built(build, tools=TOOLS, user="Ada", chat=CHAT, clock="12:03:44"):
    """The prompt that ``build`` makes of these parts, if it is complete."""
    mine, talk = [dict(tool) for tool in tools], list(chat)
    return complete(build(RULES, mine, user, talk, clock), RULES, tools, user, chat, clock)


# %% id="e06-prompt-clock" role="check" points=1
with check(
    "the same prompt, half a minute later",
    why="The first token that differs ends the hit. A clock in front makes the whole prompt new, every second.",
    hint="What always changes stands at the very end.",
):
    first, second = built(build_prompt), built(build_prompt, clock="12:04:15")
    computed = tokens_to_compute(first, second)
    require(
        computed <= 40,
        f"{computed} of {count(second)} tokens are computed; at most 40 need be",
        got=(first, second),
        mistakes={
            "The time stands before other parts, and everything after it is computed again.": lambda got: (
                got[0].find("12:03:44") < len(got[0]) - 60
            )
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    later = f"{draw.randint(13, 23)}:{draw.randint(10, 59)}:{draw.randint(10, 59)}"
    require(tokens_to_compute(first, built(build_prompt, clock=later)) <= 40, "too many tokens")
    ### END HIDDEN TESTS

# %% id="e06-prompt-tools" role="check" points=1
with check(
    "the same tools in another order",
    why="To us it is the same list. To the cache it is another text, and nothing behind it is found.",
    hint="Two orders can change: that of the tools, and that of the keys in each.",
):
    first, second = built(build_prompt), built(build_prompt, tools=shuffled(TOOLS, 1))
    turned = [dict(reversed(tool.items())) for tool in TOOLS]  # the keys in another order
    computed = tokens_to_compute(first, second)
    require(
        computed <= 40,
        f"{computed} of {count(second)} tokens are computed; at most 40 need be",
        got=(first, second),
        mistakes={
            "The keys in each tool are in order now, but the tools themselves are not: sort_keys does not sort lists.": lambda got: (
                built(build_prompt, tools=TOOLS[::-1]) != got[0]
                and built(build_prompt, tools=turned) == got[0]
            ),
            "The tools are in order now, but the keys in each are not.": lambda got: (
                built(build_prompt, tools=TOOLS[::-1]) == got[0]
            ),
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    mixed = built(build_prompt, tools=shuffled(TOOLS, draw.randint(0, 10**6)))
    require(tokens_to_compute(first, mixed) <= 40, "too many tokens")
    ### END HIDDEN TESTS

# %% id="e06-prompt-chat" role="check" points=1
with check(
    "two messages later",
    why="A conversation that only grows is found up to its last full block. Whatever is changed in what was said before "
    "makes all of it new.",
    hint="Compare the two prompts letter by letter: where is the first one that differs? Nothing before the new messages "
    "may depend on how many there are.",
):
    new = [
        "User: And which river is it that runs through the city of Rome?\n",
        "Guide: Rome lies on the Tiber, which runs through the city to the sea.\n",
    ]
    first, second = built(build_prompt), built(build_prompt, chat=CHAT + new, clock="12:04:15")
    most = count("".join(new)) + 60
    computed = tokens_to_compute(first, second)
    require(
        computed <= most,
        f"{computed} of {count(second)} tokens are computed; at most {most} need be",
        got=(first, second),
        mistakes={
            "The time stands before the conversation: all of it is computed again.": lambda got: (
                got[0].find("12:03:44") < got[0].find(CHAT[0].strip())
            ),
            "The messages that were there before have changed: what does your prompt say about them that depends on their "
            "number?": lambda got: (
                got[0][: got[0].find(CHAT[-1].strip())] != got[1][: got[1].find(CHAT[-1].strip())]
            ),
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    said = [f"User: And what about {draw.randint(2, 99)} cities?\n" for _ in range(5)]
    end = draw.randint(1, 4)
    before = built(build_prompt, chat=CHAT + said[:end])
    after = built(build_prompt, chat=CHAT + said[: end + 1], clock="13:05:59")
    require(tokens_to_compute(before, after) <= 80, "too many tokens")
    ### END HIDDEN TESTS

# %% id="e06-prompt-users" role="check" points=1
with check(
    "another user, who has just begun",
    why="Rules and tools are the same for everybody. Whoever comes first computes them for all others, unless something of "
    "his own stands before them.",
    hint="What never changes stands first, then what changes with the user, then what changes with each message.",
):
    other = ["User: Hello, I am in Oslo. Is there a river?\n"]
    first = built(build_prompt)
    second = built(build_prompt, user="Grace", chat=other, clock="12:05:01")
    most = count("".join(other)) + 60
    computed = tokens_to_compute(first, second)
    require(
        computed <= most,
        f"{computed} of {count(second)} tokens are computed; at most {most} need be",
        got=(first, second),
        mistakes={
            "The time stands before what all users share.": lambda got: (
                got[0].find("12:03:44") < got[0].find("weather")
            ),
            "Rules or tools stand behind the conversation, where no other user can share them.": lambda got: (
                got[0].find(CHAT[0].strip()) < max(got[0].find("river"), got[0].find(RULES[:20]))
            ),
            "The user's name stands before what all users share.": lambda got: (
                got[0].find("Ada") < max(got[0].find("weather"), got[0].find(RULES[:20]))
            ),
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    name = "".join(draw.choices("ABCDEFGH", k=4))
    mixed = shuffled(TOOLS, draw.randint(0, 10**6))
    stranger = built(build_prompt, user=name, chat=other, tools=mixed, clock="23:59:59")
    require(tokens_to_compute(first, stranger) <= count("".join(other)) + 70, "too many tokens")
    ### END HIDDEN TESTS

# %% [markdown] id="bug"
# ## Exercise 4. Find the bug
#
# *3 points, 15 minutes, medium*
#
# A prompt shall be continued in several ways at once. So `fork` gives a second text the same blocks, the last, partly
# filled one among them, and counts its owners. Then each goes on by itself with `append`. For a text alone, `append`
# is right. With two, this happens (blocks of 4):
#
#     a: [1, 2, 3, 4, 5, 6], b = fork(a)
#     append 7 to a, append 8 to b
#     a reads [1, 2, 3, 4, 5, 6, 8]          (reported for a real engine)
#
# The class is right; repair `append`. It may use `memory.take()` and change `memory.slots` and `memory.owners`. A block
# with two owners must not be written to. Who wants to write copies it first, and from then on owns the copy instead
# (*copy-on-write*). No more blocks may be taken than necessary: what one text alone owns is written in place, and a full
# block is never copied.


# %% id="e06-bug-memory" role="given"
class Text:
    """Some tokens in blocks: which blocks, in order, and how many tokens."""

    def __init__(self):
        self.blocks, self.length = [], 0


class Memory:
    """Blocks of ``size`` slots. A slot holds a token here, in place of its K and V."""

    def __init__(self, num_blocks, size):
        self.size = size
        self.slots = [[0] * size for _ in range(num_blocks)]  # 0: nothing is there
        self.owners = [0] * num_blocks
        self.taken = 0  # how often a block was taken

    def take(self):
        """A block that nobody owns. It has one owner now."""
        block = self.owners.index(0)
        self.owners[block], self.slots[block] = 1, [0] * self.size
        self.taken += 1
        return block

    def fork(self, text):
        """Another text with the same tokens, in the same blocks."""
        other = Text()
        other.blocks, other.length = list(text.blocks), text.length
        for block in text.blocks:
            self.owners[block] += 1
        return other

    def end(self, text):
        """The text leaves."""
        for block in text.blocks:
            self.owners[block] -= 1
        text.blocks, text.length = [], 0

    def read(self, text):
        """The tokens of a text, as a list."""
        filled = [token for block in text.blocks for token in self.slots[block]]
        return filled[: text.length]


# %% id="e06-bug" role="answer"
def append(memory, text, token):
    """Write ``token`` behind ``text``."""
    ### BEGIN SOLUTION
    slot = text.length % memory.size
    if slot == 0:  # the last block is full, or there is none
        text.blocks.append(memory.take())
    elif memory.owners[text.blocks[-1]] > 1:
        shared = text.blocks[-1]
        text.blocks[-1] = memory.take()
        memory.slots[text.blocks[-1]][:slot] = memory.slots[shared][:slot]
        memory.owners[shared] -= 1
    memory.slots[text.blocks[-1]][slot] = token
    text.length += 1
    ### STUB
    # slot = text.length % memory.size
    # if slot == 0:  # the last block is full, or there is none
    #     text.blocks.append(memory.take())
    # memory.slots[text.blocks[-1]][slot] = token
    # text.length += 1
    ### END SOLUTION


# %% id="e06-bug-parts" role="given"
def written(append, memory, tokens):
    """A new text with these tokens."""
    text = Text()
    for token in tokens:
        append(memory, text, token)
    return text


# %% id="e06-bug-read" role="check" points=1
with check(
    "two texts that go on differently",
    why="The slot that one writes is the slot that the other reads: it goes on from a token that it never had.",
    hint="How many owners has the last block? With more than one, take a block, copy what is in it, and put it in the old "
    "one's place in this text.",
):
    memory = Memory(8, 4)
    a = written(append, memory, [1, 2, 3, 4, 5, 6])
    b = memory.fork(a)
    append(memory, a, 7)
    append(memory, b, 8)
    expect(
        memory.read(a),
        [1, 2, 3, 4, 5, 6, 7],
        "what a reads",
        mistakes={
            "a reads the token of b: both write into the same block.": [1, 2, 3, 4, 5, 6, 8],
            "The copy is empty: the tokens that stood in the block belong to it as well.": lambda got: (
                0 in got
            ),
        },
    )
    expect(
        memory.read(b),
        [1, 2, 3, 4, 5, 6, 8],
        "what b reads",
        mistakes={"b reads the token of a.": [1, 2, 3, 4, 5, 6, 7]},
    )
    append(memory, a, 9)
    append(memory, b, 10)
    expect(memory.read(a), [1, 2, 3, 4, 5, 6, 7, 9], "what a reads, one token later")
    expect(memory.read(b), [1, 2, 3, 4, 5, 6, 8, 10], "what b reads, one token later")

# %% id="e06-bug-counts" role="check" points=2
with check(
    "who owns what, and how many blocks are taken",
    why="An owner too many, and a block never becomes free. A copy too many, and sharing saves nothing.",
    hint="After the copy the text owns the new block and not the old one any more. Whoever is alone in a block needs no "
    "copy, and a full block is not written to.",
):
    memory = Memory(8, 4)
    a = written(append, memory, [1, 2, 3, 4, 5, 6])
    b = memory.fork(a)
    append(memory, b, 8)
    expect(memory.read(a), [1, 2, 3, 4, 5, 6], "what a reads")
    expect(memory.read(b), [1, 2, 3, 4, 5, 6, 8], "what b reads")
    expect(
        [memory.owners[block] for block in a.blocks + b.blocks[-1:]],
        [2, 1, 1],
        "owners of the two blocks of a and of the last block of b",
        mistakes={
            "b still counts as an owner of the block that it has left: it never becomes free.": [
                2,
                2,
                1,
            ],
            "Both still write into one block.": [2, 2, 2],
            "The whole text was copied: the full first block can stay shared.": [1, 1, 1],
        },
    )
    expect(
        memory.taken,
        3,
        "blocks taken: two for a, one copy for b",
        mistakes={"The full first block was copied as well; nobody writes to it.": 4},
    )
    append(memory, a, 7)
    expect(
        memory.taken,
        3,
        "blocks taken, after a has gone on too",
        mistakes={"a is alone in its last block by now and may write there, without a copy.": 4},
    )
    memory.end(a)
    memory.end(b)
    expect(sum(memory.owners), 0, "owners of all blocks, after both have left")
    memory = Memory(8, 4)
    full = written(append, memory, [1, 2, 3, 4])
    other = memory.fork(full)
    append(memory, full, 5)
    append(memory, other, 6)
    expect(
        memory.taken,
        3,
        "blocks taken: a full one, shared, and a new one for each text",
        mistakes={
            "The shared block is full: both go on in new blocks, and it needs no copy.": lambda got: (
                got > 3
            )
        },
    )
    expect([memory.read(full), memory.read(other)], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    memory, living = Memory(200, draw.randint(1, 4)), [(Text(), [])]
    for number in range(80):
        text, held = living[draw.randrange(len(living))]
        move = draw.random()
        if move < 0.7:
            append(memory, text, number)
            held.append(number)
        elif move < 0.9 and len(living) < 8:
            living.append((memory.fork(text), list(held)))
        elif len(living) > 1:
            living = [pair for pair in living if pair[0] is not text]
            memory.end(text)
        for text, held in living:
            expect(memory.read(text), held)
        blocks = [block for text, _ in living for block in text.blocks]
        expect(memory.owners, [blocks.count(block) for block in range(200)])
    ### END HIDDEN TESTS

# %% [markdown] id="shelf"
# ## Exercise 5. A shelf that says no
#
# *5 points, 30 minutes, hard*
#
# The chapter's shelf took for granted that there is a block for everything. Write one that does not. It has room for
# `room` blocks, each known by its key. The keys of a request come in order, the first block first, and each holds its
# past: here they are simply `["a", "ab", "abc"]` for the three blocks of `abc`. (All blocks are full, and the token
# that is always computed stands in a block that is not on this shelf.)
#
# - `found(keys)`: how many blocks from the start are on the shelf. It changes nothing.
# - `begin(keys)`: a request comes. It becomes an owner of the blocks that are found and of new ones for the rest, and
#   gets back how many were found. If there is no empty place, the block is evicted whose last owner left the longest ago.
# - `end(keys)`: the request leaves. What nobody owns any more stays on the shelf and may be evicted. Of the blocks that
#   become free together, the **tail is evicted before the head**.
# - If the new blocks cannot all be had, `begin` raises a `ValueError` that names how many new blocks are needed and how
#   many can be had, and nothing has changed. Careful: blocks that this request has found cannot be evicted for it.


# %% id="e06-shelf" role="answer"
class Shelf:
    """Room for so many blocks, found by their keys; each has a number of owners, perhaps 0."""

    def __init__(self, room):
        ### BEGIN SOLUTION: an empty shelf
        self.room = room
        self.owners = {}  # key -> requests that use it now
        self.unowned = []  # keys that may be evicted, in the order in which they are
        ### END SOLUTION

    def found(self, keys):
        """How many of ``keys``, from the first on, are on the shelf."""
        ### BEGIN SOLUTION: count until one is missing
        hits = 0
        while hits < len(keys) and keys[hits] in self.owners:
            hits += 1
        return hits
        ### END SOLUTION

    def begin(self, keys):
        """A request comes: how many blocks it found. ValueError, with nothing changed, when there is no room for the rest."""
        ### BEGIN SOLUTION: look, see whether there is room, and only then change anything
        hits = self.found(keys)
        needed = len(keys) - hits
        evictable = [key for key in self.unowned if key not in keys[:hits]]
        available = self.room - len(self.owners) + len(evictable)
        if needed > available:
            raise ValueError(f"{needed} new blocks are needed, and {available} can be had")
        self.unowned = evictable
        for key in keys[:hits]:
            self.owners[key] += 1
        for key in keys[hits:]:
            if len(self.owners) == self.room:
                del self.owners[self.unowned.pop(0)]
            self.owners[key] = 1
        return hits
        ### END SOLUTION

    def end(self, keys):
        """The request with these keys, which has begun, leaves."""
        ### BEGIN SOLUTION: one owner less; what has none left may be evicted
        for key in reversed(keys):
            self.owners[key] -= 1
            if self.owners[key] == 0:
                self.unowned.append(key)
        ### END SOLUTION


# %% id="e06-shelf-parts" role="given"
def keys_of(word):
    """A block for each letter; its key is the word up to there."""
    return [word[:end] for end in range(1, len(word) + 1)]


def visit(shelf, *words):
    """Requests that come and leave, one after the other: how many blocks each found."""
    hits = []
    for word in words:
        hits.append(shelf.begin(keys_of(word)))
        shelf.end(keys_of(word))
    return hits


# %% id="e06-shelf-found" role="check" points=1
with check(
    "what one request leaves behind, another finds",
    why="K and V are still right when their owner leaves. Throwing them away would be a pity.",
    hint="`end` takes an owner away, not the block. `found` stops at the first key that is missing.",
):
    shelf = Shelf(8)
    expect(
        visit(shelf, "abc", "abc", "abde"),
        [0, 3, 2],
        "blocks found by abc, abc and abde",
        mistakes={
            "Nothing is left when a request leaves.": [0, 0, 0],
            "A hit on a block without an owner must not take it off the shelf.": [0, 3, 0],
        },
    )
    expect(shelf.found(keys_of("abcx")), 3, "abcx")
    expect(
        shelf.found(["x", "ab", "abc"]),
        0,
        "a key that is missing, then two that are there",
        mistakes={"A hit may not start in the middle.": lambda got: got > 0},
    )
    expect([shelf.found(keys_of("z")), shelf.found(keys_of("z"))], [0, 0], "asked twice for z")

# %% id="e06-shelf-owners" role="check" points=1
with check(
    "blocks that somebody owns",
    why="A block that is evicted under a request which reads it holds somebody else's K and V.",
    hint="Count the owners of each block. Only at 0 it may be evicted, and a hit makes it 1 again.",
):
    shelf = Shelf(4)
    expect(shelf.begin(keys_of("ab")), 0)
    expect(shelf.begin(keys_of("ab")), 2, "the same blocks for a second request")
    shelf.end(keys_of("ab"))  # one of the two has left
    visit(shelf, "x", "y", "z", "xy")
    expect(
        shelf.found(keys_of("ab")),
        2,
        "ab, which one of two requests still owns, after four others",
        mistakes={
            "It was evicted, although it has an owner left: count the owners.": lambda got: got < 2
        },
    )
    shelf.end(keys_of("ab"))
    visit(shelf, "pqrs")
    expect(
        [shelf.found(keys_of("ab")), shelf.found(keys_of("pqrs"))],
        [0, 4],
        "ab and pqrs, after the last owner of ab has left and pqrs needed all four places",
    )
    shelf = Shelf(3)
    visit(shelf, "ab")
    shelf.begin(keys_of("ab"))  # nobody owned it; now somebody does
    visit(shelf, "x", "y")
    expect(
        shelf.found(keys_of("ab")),
        2,
        "ab, found again and in use",
        mistakes={
            "A block that is found has an owner again: it may not be evicted any more.": lambda got: (
                got < 2
            )
        },
    )

# %% id="e06-shelf-order" role="check" points=2
with check(
    "who is evicted",
    why="When a chain's head goes, its tail is still there and can never be found: a hit cannot start in the middle.",
    hint="Keep the blocks without owners in a row. `end` puts them at its back, the last block of the request first; "
    "evict from the front.",
):
    shelf = Shelf(3)
    visit(shelf, "abc", "x")
    expect(
        shelf.found(keys_of("abc")),
        2,
        "room for 3: abc left, then x needed one block",
        mistakes={
            "The head went first, and its tail is stranded.": 0,
            "Every block of abc is still there: where is x? There is room for 3.": 3,
            "One block was needed, and more were evicted.": 1,
        },
    )
    shelf = Shelf(3)
    visit(shelf, "a", "b", "c", "a", "d")
    expect(
        [shelf.found([key]) for key in "abcd"],
        [1, 0, 1, 1],
        "room for 3: a, b, c, a again, d; which of a, b, c, d are there",
        mistakes={
            "a was evicted, the first that came. But it was used again since: the LEAST RECENTLY USED one goes.": [
                0,
                1,
                1,
                1,
            ],
        },
    )
    shelf = Shelf(3)
    for each in "ab":
        shelf.begin([each])
    for each in "ba":
        shelf.end([each])
    visit(shelf, "xy")
    expect(
        [shelf.found(["a"]), shelf.found(["b"])],
        [1, 0],
        "room for 3: a and b came, b left, then a; xy needed one place of theirs",
        mistakes={
            "a came first, but it LEFT last: until then it was in use.": [0, 1],
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    chain_of, pool_of = (
        oracle("minikv.cache.prefix.KeyChain"),
        oracle("minikv.cache.blocks.BlockPool"),
    )
    index_of, table_of = (
        oracle("minikv.cache.prefix.PrefixCache"),
        oracle("minikv.cache.blocks.BlockTable"),
    )
    for room in (4, 7):
        shelf, pool = Shelf(room), pool_of(room, 1)
        index, living = index_of(pool), []
        for _ in range(60):
            word = "".join(draw.choices("ab", k=draw.randint(1, room // 2)))
            chain, table = chain_of(b"", 1), table_of(1)
            chain.extend([ord(letter) for letter in word])
            hits = index.lookup(chain, most=len(word))
            table.blocks.extend([hit.block for hit in hits])
            if len(living) < 2:
                pool.share(table.blocks)
                table.blocks.extend(pool.allocate_many(len(word) - len(hits)))
                table.num_tokens, chain.linked = len(word), hits[-1] if hits else None
                index.publish(chain, table, len(hits))
                expect(shelf.begin(keys_of(word)), len(hits))
                living.append((word, table))
            while len(living) > 1 or (living and draw.random() < 0.5):
                word, table = living.pop(draw.randrange(len(living)))
                pool.release(reversed(table.blocks))
                shelf.end(keys_of(word))
    ### END HIDDEN TESTS

# %% id="e06-shelf-refuses" role="check" points=1
with check(
    "a request that does not fit now",
    why="Counted as found and as free, a block is promised twice. And whoever is refused must leave no trace: no owner, no "
    "eviction.",
    hint="Work out what is needed and what can be had before you change anything. Blocks that this request has found are "
    "not among those that can be had.",
):
    shelf = Shelf(4)
    visit(shelf, "ab")
    refuses(lambda: shelf.begin(keys_of("abcde")), ValueError, naming=(3, 2))
    expect(shelf.found(keys_of("abcde")), 2, "what is found of abcde after it was refused")
    expect(
        visit(shelf, "xyzw"),
        [0],
        "a request for all four places, afterwards",
    )
    shelf = Shelf(4)
    shelf.begin(keys_of("ab"))
    refuses(lambda: shelf.begin(keys_of("xyz")), ValueError, naming=(3, 2))
    expect(shelf.begin(keys_of("abcd")), 2, "abcd, which fits: two are there, two places are empty")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    room = draw.randint(5, 30)
    shelf = Shelf(room)
    first, rest = "a" * draw.randint(1, room), draw.randint(1, 9)
    visit(shelf, first)
    needed, free = room - len(first) + rest, room - len(first)
    refuses(lambda: shelf.begin(keys_of("a" * (room + rest))), ValueError, naming=(needed, free))
    expect(visit(shelf, "a" * room), [len(first)])
    ### END HIDDEN TESTS
