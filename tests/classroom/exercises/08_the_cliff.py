"""Answers that people give to the exercises of chapter 8: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

FIT = "def blocks_of_sessions(sessions, system_tokens, own_tokens, block_size):\n    {}\n"
BACK = """
def sessions_that_fit(pool_blocks, system_tokens, own_tokens, block_size):
    shared = system_tokens // block_size
    each = blocks_for(system_tokens % block_size + own_tokens, block_size)
    return {}
"""
GOOD_BACK = BACK.format("max(0, (pool_blocks - shared) // each)")
GOOD_FIT = FIT.format("return system_tokens // block_size + sessions * blocks_for(system_tokens % block_size + own_tokens, block_size)")

BELADY = """\
def belady_hits(places, requests):
    kept, hits = [], 0
    for now, item in enumerate(requests):
        if item in kept:
            hits += 1
        else:
            if len(kept) == places:
                {}
            kept.append(item)
    return hits"""

BUG = """\
def let_in(pool, waiting):
    admitted = {}
    for name, hits, total in waiting:
        %s
    return admitted"""

WHO = """\
def who_misses_first(pool_blocks, block_size, system_tokens, turn_tokens, answer_tokens, turns):
    n, stored = len(turn_tokens), [0] * len(turn_tokens)
    for turn in range(1, turns + 1):
        for s in range(n):
            stored[s] = turn * (turn_tokens[s] + answer_tokens) - 1
            others = sum({idle} for o in range(n) if o != s)
            if system_tokens // block_size + others + blocks_for(stored[s], block_size) > pool_blocks:
                return {who}
    return None"""
DOWN, UP = "stored[o] // block_size", "blocks_for(stored[o], block_size)"

POLICY = """\
class MyPolicy:
    def __init__(self):
        self.now, self.last, self.first, self.dice = 0, {}, {}, random.Random(0)

    def used(self, session):
        self.now += 1
        self.last[session] = self.now
        self.first.setdefault(session, self.now)

    def choose(self, kept):
        %s"""

WRONG = [
    Wrong(
        "e08-fit", "e08-fit-blocks", "only full blocks have a key",
        FIT.format("return blocks_for(system_tokens, block_size) + sessions * blocks_for(own_tokens, block_size)") + GOOD_BACK,
    ),
    Wrong(
        "e08-fit", "e08-fit-blocks", "rest of the system prompt is missing",
        FIT.format("return system_tokens // block_size + sessions * blocks_for(own_tokens, block_size)") + GOOD_BACK,
    ),
    Wrong(
        "e08-fit", "e08-fit-blocks", "Nothing is shared here",
        FIT.format("return sessions * blocks_for(system_tokens + own_tokens, block_size)") + GOOD_BACK,
    ),
    Wrong("e08-fit", "e08-fit-sessions", "You round up", GOOD_FIT + BACK.format("max(0, -(-(pool_blocks - shared) // each))")),
    Wrong("e08-fit", "e08-fit-sessions", "taken away before you divide", GOOD_FIT + BACK.format("pool_blocks // each")),
    Wrong("e08-fit", "e08-fit-sessions", "Less than no session", GOOD_FIT + BACK.format("(pool_blocks - shared) // each")),
    Wrong(
        "e08-percentile", "e08-percentile-few", "index 1",
        "def percentile(waits, percent):\n    return sorted(waits)[min(len(waits) * percent // 100, len(waits) - 1)]",
    ),
    Wrong(
        "e08-percentile", "e08-percentile-few", "lies between two waits",
        "def percentile(waits, percent):\n    import numpy as np\n    return float(np.percentile(waits, percent))",
    ),
    Wrong(
        "e08-percentile", "e08-percentile-few", "caller's own list",
        "def percentile(waits, percent):\n    waits.sort()\n    return waits[-(-len(waits) * percent // 100) - 1]",
    ),
    Wrong(
        "e08-percentile", "e08-percentile-tail", "7.000000000000001",
        "def percentile(waits, percent):\n    return sorted(waits)[min(math.ceil(percent / 100 * len(waits)), len(waits)) - 1]",
    ),
    Wrong(
        "e08-percentile", "e08-percentile-tail", "rounded down",
        "def percentile(waits, percent):\n    return sorted(waits)[max(1, len(waits) * percent // 100) - 1]",
    ),
    Wrong(
        "e08-belady", "e08-belady-small", "not the past",
        BELADY.format("kept.remove(max(kept, key=lambda x: requests[:now][::-1].index(x)))"),
    ),
    Wrong(
        "e08-belady", "e08-belady-small", "without giving it a place",
        """\
def belady_hits(places, requests):
    kept, hits = set(), 0
    for now, item in enumerate(requests):
        def ahead(x):
            return requests.index(x, now + 1) if x in requests[now + 1 :] else 10**9
        if item in kept:
            hits += 1
        else:
            kept.add(item)
            if len(kept) > places:
                kept.remove(max(sorted(kept), key=ahead))
    return hits""",
    ),
    Wrong(
        "e08-belady", "e08-belady-small", "never asked for again",
        BELADY.format("kept.remove(max(kept, key=lambda x: requests.index(x, now) if x in requests[now:] else 0))"),
    ),
    Wrong("e08-belady", "e08-belady-large", "who comes next", BELADY.format("kept.pop(0)")),
    Wrong(
        "e08-belady", "e08-belady-large", "behind the present",
        BELADY.format("kept.remove(max(kept, key=lambda x: requests.index(x, now) if x in requests[now:] else 0))"),
    ),
    Wrong(
        "e08-bug", "e08-bug-leak", "left an owner behind",
        BUG % """pool.share(hits)
        if total - len(hits) > pool.num_free:
            break
        admitted[name] = hits + pool.allocate_many(total - len(hits))""",
    ),
    Wrong(
        "e08-bug", "e08-bug-leak", "overtook",
        BUG % """if total - len(hits) > pool.num_free - sum(pool.is_evictable(b) for b in hits):
            continue
        pool.share(hits)
        admitted[name] = hits + pool.allocate_many(total - len(hits))""",
    ),
    Wrong(
        "e08-bug", "e08-bug-count", "counted as free as well",
        BUG % """if total - len(hits) > pool.num_free:
            break
        pool.share(hits)
        admitted[name] = hits + pool.allocate_many(total - len(hits))""",
    ),
    Wrong(
        "e08-bug", "e08-bug-count", "a second time",
        BUG % """if total - len(hits) > pool.num_free - len(hits):
            break
        pool.share(hits)
        admitted[name] = hits + pool.allocate_many(total - len(hits))""",
    ),
    Wrong("e08-who", "e08-who-equal", "somebody else pays", WHO.format(idle=DOWN, who="(turn, s)")),
    Wrong("e08-who", "e08-who-equal", "has had its turn 2 already", WHO.format(idle=DOWN, who="(turn, (s + 1) % n)")),
    Wrong(
        "e08-who", "e08-who-partly", "keep the partly filled blocks",
        WHO.format(idle=UP, who="(turn, s + 1) if s + 1 < n else (turn + 1, 0)"),
    ),
    Wrong(
        "e08-who", "e08-who-fits", "no turn 3 here",
        WHO.format(idle=DOWN, who="(turn, s + 1) if s + 1 < n else (turn + 1, 0)"),
    ),
    Wrong("e08-policy", "e08-policy-rotation", "gets: nothing", POLICY % "return min(kept, key=self.last.get)"),
    Wrong("e08-policy", "e08-policy-rotation", "gets: nothing", POLICY % "return kept[0]"),
    Wrong("e08-policy", "e08-policy-ordinary", "stay for ever", POLICY % "return max(kept, key=self.last.get)"),
    Wrong("e08-policy", "e08-policy-ordinary", "LRU alone is no answer", POLICY % "return min(kept, key=self.last.get)"),
]  # fmt: skip

RIGHT = [
    Right(
        "e08-fit",
        """\
def blocks_of_sessions(sessions, system_tokens, own_tokens, block_size):
    blocks = shared = system_tokens // block_size
    for _ in range(sessions):
        blocks += math.ceil((system_tokens + own_tokens - shared * block_size) / block_size)
    return blocks

def sessions_that_fit(pool_blocks, system_tokens, own_tokens, block_size):
    sessions = 0
    while blocks_of_sessions(sessions + 1, system_tokens, own_tokens, block_size) <= pool_blocks:
        sessions += 1
    return sessions""",
    ),
    Right(
        "e08-percentile",
        """\
def percentile(waits, percent):
    for wait in sorted(waits):
        if 100 * sum(other <= wait for other in waits) >= percent * len(waits):
            return wait""",
    ),
    Right(
        "e08-percentile",
        "def percentile(waits, percent):\n    import numpy as np\n    return np.sort(waits)[(len(waits) * percent - 1) // 100]",
    ),
    Right(
        "e08-belady",
        """\
def belady_hits(places, requests):
    following, seen = {}, {}
    for at in range(len(requests) - 1, -1, -1):
        following[at] = seen.get(requests[at], math.inf)
        seen[requests[at]] = at
    kept, hits = {}, 0
    for at, item in enumerate(requests):
        if item in kept:
            hits += 1
        elif len(kept) == places:
            del kept[max(kept, key=kept.get)]
        kept[item] = following[at]
    return hits""",
    ),
    Right(
        "e08-bug",
        BUG % """pool.share(hits)
        if total - len(hits) > pool.num_free:
            pool.release(reversed(hits))
            break
        admitted[name] = hits + pool.allocate_many(total - len(hits))""",
    ),
    Right(
        "e08-who",
        """\
def who_misses_first(pool_blocks, block_size, system_tokens, turn_tokens, answer_tokens, turns):
    n = len(turn_tokens)
    room = pool_blocks - system_tokens // block_size
    full = [0] * n
    for number in range(n * turns):
        turn, s = divmod(number, n)
        own = (turn + 1) * (turn_tokens[s] + answer_tokens) - 1
        full[s] = 0
        if sum(full) + math.ceil(own / block_size) > room:
            if number + 1 == n * turns:
                return None
            return (number + 1) // n + 1, (number + 1) % n
        full[s] = own // block_size""",
    ),
    Right("e08-policy", POLICY % "return self.dice.choice(kept)"),
    Right(
        "e08-policy",
        """\
class MyPolicy:
    # the one used last goes; when that has been wrong several times in a row for newcomers, the oldest goes
    def __init__(self):
        self.order, self.seen, self.new = [], set(), False

    def used(self, session):
        self.new = session not in self.seen
        self.seen.add(session)
        if session in self.order:
            self.order.remove(session)
        self.order.append(session)

    def choose(self, kept):
        ordered = [session for session in self.order if session in kept]
        silent = len(set(self.order[self.order.index(ordered[0]) :])) - len(kept)
        return ordered[0] if silent > 1 else ordered[-1]""",
    ),
]  # fmt: skip
