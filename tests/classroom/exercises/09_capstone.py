"""Answers that people give to the capstone: wrong ones with what they should be told, and other right ones.

Its steps need one another, so a wrong answer to a later step brings the right ones to the steps before it along.
"""

from pathlib import Path

from minikv.classroom import exercises
from minikv.classroom.rehearse import Right, Wrong, solution

ANSWERS = solution(exercises.read(Path(__file__).parents[3] / "exercises" / "source" / "09_capstone.py"))


def but(good: str, bad: str, *cells: str) -> str:
    """The right answers to these cells, with ``good`` replaced by ``bad``."""
    code = "\n\n".join(ANSWERS[cell] for cell in cells)
    assert good in code, f"the solution does not hold: {good}"
    return code.replace(good, bad)


FORWARD = ("e09-pages", "e09-forward")
ALL = ("e09-pages", "e09-pool", "e09-keys", "e09-forward", "e09-plan", "e09-engine")

WRONG = [
    Wrong("e09-pages", "e09-pages-check", "cut to count", but("[:, :count]", "", "e09-pages")),
    Wrong(
        "e09-pool", "e09-pool-owners", "last owner has let go",
        but("if self.owners[block] == 0:", "if block not in self.free:", "e09-pool"),
    ),
    Wrong("e09-pool", "e09-pool-cached", "as good as free", but("len(self.free) + len(self.cached)", "len(self.free)", "e09-pool")),
    Wrong("e09-pool", "e09-pool-cached", "head was given up first", but("reversed(table)", "table", "e09-pool")),
    Wrong("e09-pool", "e09-pool-cached", "by its old key", but("del self.block_of[self.key_of.pop(block)]", "pass", "e09-pool")),
    Wrong("e09-keys", "e09-keys-check", "another beginning", but("parent + repr", "repr", "e09-keys")),
    Wrong(
        "e09-keys", "e09-keys-check", "Only full blocks",
        "def chain_keys(ids, block_size):\n    return [tuple(ids[: end + block_size]) for end in range(0, len(ids), block_size)]",
    ),
    Wrong(
        "e09-forward", "e09-forward-check", "positions go on at start",
        but('"""One pass over', 'pieces = [(table, ids, 0) for table, ids, _ in pieces]\n    """One pass over', *FORWARD),
    ),
    Wrong("e09-forward", "e09-forward-check", "over start + len(ids) tokens", but("layer, start + len(ids)", "layer, len(ids)", *FORWARD)),
    Wrong("e09-plan", "e09-plan-check", "long prompt goes first", but("bool(request.answer) == decoding and", "", "e09-plan")),
    Wrong("e09-plan", "e09-plan-check", "nothing to compute", but(" and count > 0", "", "e09-plan")),
    Wrong(
        "e09-engine", "e09-engine-alone", "without a cache",
        but("answer.append(int(row.argmax()))", "answer.append(int(row.argmax()))\n                request.computed = 0", *ALL),
    ),
    Wrong("e09-engine", "e09-engine-many", "gives no token", but("if request.computed == len(request.ids):", "if True:", *ALL)),
    Wrong(
        "e09-engine", "e09-engine-prefix", "One token at least",
        but("(len(request.prompt) - 1) // self.block_size", "len(request.prompt) // self.block_size", *ALL),
    ),
    Wrong("e09-engine", "e09-engine-prefix", "Nothing was found", but("self.pool.keep(request.table[number], keys[number])", "pass", *ALL)),
    Wrong(
        "e09-engine", "e09-engine-tight", "All or nothing",
        but("                self.pool.release(hits)\n", "", *ALL),
    ),
]  # fmt: skip

RIGHT = [
    Right(
        "e09-pages",
        """\
class Pages:
    def __init__(self, shape, num_blocks, block_size):
        self.size, self.rows = block_size, {}

    def write(self, table, layer, start, k, v):
        for number in range(len(k)):
            block, slot = divmod(start + number, self.size)
            self.rows[table[block], layer, slot] = k[number], v[number]

    def read(self, table, layer, count):
        nothing = next(iter(self.rows.values()))[0] * torch.nan
        rows = [self.rows.get((table[p // self.size], layer, p % self.size), (nothing, nothing)) for p in range(count)]
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])""",
    ),
    Right(
        "e09-pool",
        """\
class Pool:
    def __init__(self, num_blocks):
        self.blocks = [{"owners": 0, "key": None, "since": 0} for _ in range(num_blocks)]
        self.clock = 0

    def idle(self):
        return [b for b in range(len(self.blocks)) if not self.blocks[b]["owners"]]

    def num_free(self):
        return len(self.idle())

    def take(self):
        if not self.idle():
            raise MemoryError
        block = min(self.idle(), key=lambda b: (self.blocks[b]["key"] is not None, self.blocks[b]["since"]))
        self.blocks[block].update(owners=1, key=None)
        return block

    def share(self, block):
        self.blocks[block]["owners"] += 1

    def release(self, table):
        for block in table[::-1]:
            self.clock += 1
            self.blocks[block]["owners"] -= 1
            self.blocks[block]["since"] = self.clock

    def keep(self, block, key):
        if self.find(key) is None:
            self.blocks[block]["key"] = key

    def find(self, key):
        return next((b for b, each in enumerate(self.blocks) if each["key"] == key), None)""",
    ),
    Right(
        "e09-keys",
        "def chain_keys(ids, block_size):\n    return [tuple(ids[: block_size * n]) for n in range(1, len(ids) // block_size + 1)]",
    ),
    Right(
        "e09-plan",
        """\
def plan(running, budget):
    decodes = [(request, 1) for request in running if request.answer][:budget]
    prompts = [(request, len(request.prompt) - request.computed) for request in running if not request.answer]
    left, step = budget - len(decodes), decodes
    for request, lacks in prompts:
        if left and lacks:
            step = step + [(request, min(lacks, left))]
            left = max(0, left - lacks)
    return step""",
    ),
]  # fmt: skip
