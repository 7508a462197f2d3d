"""Answers that people give to the exercises of chapter 4: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

USAGE = """\
def usage(slots, pieces):
    held = sum(piece[2] for piece in pieces)
    room = sum(piece[1] for piece in pieces)
    final = sum(piece[3] for piece in pieces)
    reserved, internal, free = {reserved}, {internal}, {free}
    largest = {largest}
    return {{"held": held, "reserved": reserved, "internal": internal, "free": free, "largest hole": largest}}"""
RIGHT_USAGE = {
    "reserved": "final - held",
    "internal": "room - final",
    "free": "slots - room",
    "largest": "max(two - one for one, two in zip([0] + [p[0] + p[1] for p in sorted(pieces)], [p[0] for p in sorted(pieces)] + [slots]))",
}
NO_FIRST_HOLE = "max((b[0] - a[0] - a[1] for a, b in zip(sorted(pieces), sorted(pieces)[1:] + [(slots,)])), default=slots)"

STRIP = """\
class Strip:
    def __init__(self, slots):
        self.holes, self.pieces = {{0: slots}}, {{}}

    def take(self, owner, length):
{take}
        raise MemoryError(f"{{length}} wanted, {{sum(self.holes.values())}} free, largest {{max(self.holes.values(), default=0)}}")

    def give_back(self, owner):
        start, length = self.pieces.pop(owner)
{merge}
        self.holes[start] = length"""
TAKE = """\
        for start in sorted(self.holes):
            size = self.holes[start]
            if size >= length:
                del self.holes[start]
                if size > length:
                    self.holes[start + length] = size - length
                self.pieces[owner] = start, length
                return start"""
PUTS_BACK_ON_REFUSAL = """\
        before = dict(self.holes)
        for start in sorted(self.holes):
            size = self.holes.pop(start)
            if size >= length:
                if size > length:
                    self.holes[start + length] = size - length
                self.pieces[owner] = start, length
                return start
        self.holes = before"""
BROKEN_TAKE = PUTS_BACK_ON_REFUSAL.replace("        self.holes = before", "")
MERGE = """\
        for hole in sorted(self.holes):
            if hole + self.holes[hole] == start:
                length += self.holes.pop(hole)
                start = hole
            elif hole == start + length:
                length += self.holes.pop(hole)"""
BEFORE_ONLY = MERGE.partition("            elif")[0].rstrip()
BEHIND_ONLY = """\
        length += self.holes.pop(start + length, 0)"""
ONE_SIDE = MERGE.replace("start = hole", "start = hole\n                break")

PLAN = """\
def plan(slots, pieces, wanted):
    if slots - sum(length for _, length, _ in pieces.values()) < wanted:
        return None
    order = sorted(pieces, key=pieces.get)
    best = None
    for first in range(len(order) + 1):
        begin = sum(pieces[order[first - 1]][:2]) if first else 0
        for last in range(first, len(order) + 1):
            end = pieces[order[last]][0] if last < len(order) else slots
            moved = order[first:last]
            cost = sum(pieces[name][{cost}] for name in moved)
            if end - begin - sum(pieces[name][1] for name in moved) >= wanted:
                if best is None or cost < best[0]:
                    best = cost, begin, moved
    _, end, moved = best
    moves = []
    for name in moved:
        moves.append((name, end))
        end += pieces[name][1]
    return {moves}"""
COMPACTION = """\
def plan(slots, pieces, wanted):
    if slots - sum(length for _, length, _ in pieces.values()) < wanted:
        return None
    moves, end, now = [], 0, dict(pieces)
    for name in sorted(pieces, key=pieces.get):
        bounds = [(0, 0)] + sorted(piece[:2] for piece in now.values()) + [(slots, 0)]
        if {until} and any(two[0] - sum(one) >= wanted for one, two in zip(bounds, bounds[1:])):
            break
        start, length, written = pieces[name]
        if start != end:
            moves.append((name, end))
            now[name] = end, length, written
        end += length
    return moves"""

WRONG = [
    # 1. memory map
    Wrong("e04-usage", "e04-usage-kinds", "Some of them never will be written", USAGE.format(**RIGHT_USAGE | {"reserved": "room - held"})),
    Wrong("e04-usage", "e04-usage-kinds", "they are not internal waste", USAGE.format(**RIGHT_USAGE | {"internal": "room - held"})),
    Wrong("e04-usage", "e04-usage-kinds", "nobody else may have them", USAGE.format(**RIGHT_USAGE | {"free": "slots - held"})),
    Wrong("e04-usage", "e04-usage-hole", "They do not lie side by side", USAGE.format(**RIGHT_USAGE | {"largest": "free"})),
    Wrong(
        "e04-usage", "e04-usage-hole", "behind the last piece is missing",
        USAGE.format(**RIGHT_USAGE | {"largest": RIGHT_USAGE["largest"].replace(" + [slots]", "")}),
    ),
    Wrong(
        "e04-usage", "e04-usage-hole", "before the first piece is missing",
        USAGE.format(**RIGHT_USAGE | {"largest": NO_FIRST_HOLE}),
    ),
    Wrong(
        "e04-usage", "e04-usage-hole", "Put the pieces in order first",
        USAGE.format(**RIGHT_USAGE | {"largest": RIGHT_USAGE["largest"].replace("sorted(pieces)", "pieces")}),
    ),
    # 2. next fit, worst fit
    Wrong(
        "e04-next", "e04-next-on", "began at slot 0 again",
        "def next_fit(holes, length, after):\n    return next((hole for hole in holes if hole[1] >= length), None)",
    ),
    Wrong(
        "e04-next", "e04-next-on", "begins exactly at `after` counts",
        """\
def next_fit(holes, length, after):
    turned = sorted(holes, key=lambda h: (h[0] <= after, h))
    return next((h for h in turned if h[1] >= length), None)""",
    ),
    Wrong(
        "e04-next", "e04-next-round", "go round",
        "def next_fit(holes, length, after):\n    return next((hole for hole in holes if hole[1] >= length and hole[0] >= after), None)",
    ),
    Wrong(
        "e04-next", "e04-next-round", "not backwards",
        """\
def next_fit(holes, length, after):
    turned = [h for h in holes if h[0] >= after] + [h for h in reversed(holes) if h[0] < after]
    return next((h for h in turned if h[1] >= length), None)""",
    ),
    Wrong(
        "e04-worst", "e04-worst-full", "This is best fit",
        "def worst_fit(holes, length):\n    return min([h for h in holes if h[1] >= length], key=lambda h: h[1], default=None)",
    ),
    Wrong(
        "e04-worst", "e04-worst-full", "You compare the first slots",
        "def worst_fit(holes, length):\n    return max([h for h in holes if h[1] >= length], default=None)",
    ),
    Wrong(
        "e04-worst", "e04-worst-full", "too short: that is a refusal",
        "def worst_fit(holes, length):\n    return max(holes, key=lambda h: h[1])",
    ),
    Wrong("e04-wishes", "e04-wishes-full", "worst fit serves all of these as well", "wishes = [12, 6]"),
    Wrong("e04-wishes", "e04-wishes-full", "not free in one piece at that moment", "wishes = [10, 10]"),
    # 3. buddies
    Wrong(
        "e04-buddies", "e04-buddies-one", "not the halves of one cut",
        """\
def buddy_holes(slots, pieces):
    ends = [0] + [start + size for start, size in pieces]
    return [(end, start - end) for end, start in zip(ends, [start for start, _ in pieces] + [slots]) if start > end]

def buddy_cuts(slots, pieces):
    return len(pieces) + len(buddy_holes(slots, pieces)) - 1""",
    ),
    Wrong(
        "e04-buddies", "e04-buddies-one", "lies across the middle",
        """\
def buddy_holes(slots, pieces):
    holes, at = [], 0
    for start, size in pieces + [(slots, 0)]:
        while at < start:
            hole = 1
            while 2 * hole <= start - at:
                hole *= 2
            holes.append((at, hole))
            at += hole
        at = start + size
    return holes

def buddy_cuts(slots, pieces):
    return len(pieces) + len(buddy_holes(slots, pieces)) - 1""",
    ),
    Wrong(
        "e04-buddies", "e04-buddies-one", "they grow together",
        """\
def buddy_holes(slots, pieces):
    part = min([size for _, size in pieces], default=slots)
    taken = {slot for start, size in pieces for slot in range(start, start + size)}
    return [(start, part) for start in range(0, slots, part) if start not in taken]

def buddy_cuts(slots, pieces):
    return len(pieces) + len(buddy_holes(slots, pieces)) - 1""",
    ),
    Wrong(  # neighbours of one size, whoever they are
        "e04-buddies", "e04-buddies-across", "They lie side by side and stay two",
        """\
def buddy_holes(slots, pieces):
    taken = {slot for start, size in pieces for slot in range(start, start + size)}
    holes = [(start, 1) for start in range(slots) if start not in taken]
    merged = True
    while merged:
        merged = False
        for one, two in reversed(list(zip(holes, holes[1:]))):
            if one[1] == two[1] and sum(one) == two[0]:
                place = holes.index(one)
                holes[place : place + 2] = [(one[0], 2 * one[1])]
                merged = True
                break
    return holes

def buddy_cuts(slots, pieces):
    return len(pieces) + len(buddy_holes(slots, pieces)) - 1""",
    ),
    Wrong(
        "e04-buddies", "e04-buddies-cuts", "before the first cut there is one already",
        """\
def buddy_holes(slots, pieces):
    taken = {slot for start, size in pieces for slot in range(start, start + size)}
    def free(start, size):
        if not taken & set(range(start, start + size)):
            return [(start, size)]
        half = size // 2
        return free(start, half) + free(start + half, half) if half else []
    return free(0, slots)

def buddy_cuts(slots, pieces):
    return len(pieces) + len(buddy_holes(slots, pieces))""",
    ),
    Wrong(
        "e04-buddies", "e04-buddies-cuts", "not each size",
        "def buddy_cuts(slots, pieces):\n    return (slots // min(size for _, size in pieces)).bit_length() - 1",
    ),
    # 4. find the bugs
    Wrong("e04-bug", "e04-bug-refused", "does not name", STRIP.format(take=BROKEN_TAKE, merge=MERGE)),
    Wrong("e04-bug", "e04-bug-refused", "too short for the one before", STRIP.format(take=PUTS_BACK_ON_REFUSAL, merge=MERGE)),
    Wrong("e04-bug", "e04-bug-merge", "B's hole lies BEHIND", STRIP.format(take=TAKE, merge=BEFORE_ONLY)),
    Wrong("e04-bug", "e04-bug-merge", "A's hole lies BEFORE", STRIP.format(take=TAKE, merge=BEHIND_ONLY)),
    Wrong("e04-bug", "e04-bug-both", "B left between two holes", STRIP.format(take=TAKE, merge=ONE_SIDE)),
    # 5. move as little as possible
    Wrong("e04-plan", "e04-plan-least", "You move everybody", COMPACTION.format(until="not moves")),
    Wrong("e04-plan", "e04-plan-least", "from slot 0 on until it is enough", COMPACTION.format(until="True")),
    Wrong("e04-plan", "e04-plan-least", "not its length", PLAN.format(cost=1, moves="moves")),
    Wrong("e04-plan", "e04-plan-room", "where another one stands", PLAN.format(cost=2, moves="moves[::-1]")),
    Wrong("e04-plan", "e04-plan-none", "here nothing has to be done", PLAN.format(cost=2, moves="moves or None")),
    Wrong(
        "e04-plan", "e04-plan-room", "jumped over",
        "def plan(slots, pieces, wanted):\n    return [(max(pieces, key=pieces.get), 0)]",
    ),
]  # fmt: skip

RIGHT = [
    Right("e04-usage", USAGE.format(**RIGHT_USAGE)),
    Right(  # slot by slot
        "e04-usage",
        """\
def usage(slots, pieces):
    row = ["free"] * slots
    for start, room, written, final in pieces:
        for slot in range(room):
            row[start + slot] = "held" if slot < written else "reserved" if slot < final else "internal"
    found, run, longest = {kind: row.count(kind) for kind in ("held", "reserved", "internal", "free")}, 0, 0
    for kind in row:
        run = run + 1 if kind == "free" else 0
        longest = max(longest, run)
    return found | {"largest hole": longest}""",
    ),
    Right(
        "e04-next",
        """\
def next_fit(holes, length, after):
    best = None
    for hole in holes:
        if hole[1] >= length and (best is None or best[0] < after <= hole[0]):
            best = list(hole)
    return best""",
    ),
    Right(
        "e04-worst",
        """\
def worst_fit(holes, length):
    fitting = [h for h in holes if h[1] >= length]
    return sorted(fitting, key=lambda h: -h[1])[0] if fitting else None""",
    ),
    Right("e04-wishes", "wishes = (9, 12)"),
    Right("e04-wishes", "wishes = [6, 9, 10]"),
    Right(  # from single slots upwards, as the chapter's buddies merge
        "e04-buddies",
        """\
def buddy_holes(slots, pieces):
    taken = {slot for start, size in pieces for slot in range(start, start + size)}
    holes = {(slot, 1) for slot in range(slots) if slot not in taken}
    size = 1
    while size < slots:
        for start in range(0, slots, 2 * size):
            if {(start, size), (start + size, size)} <= holes:
                holes -= {(start, size), (start + size, size)}
                holes.add((start, 2 * size))
        size *= 2
    return sorted(holes)

def buddy_cuts(slots, pieces):
    def cuts(start, size):
        if (start, size) in pieces or not any(start <= at < start + size for at, _ in pieces):
            return 0
        return 1 + cuts(start, size // 2) + cuts(start + size // 2, size // 2)
    return cuts(0, slots)""",
    ),
    Right("e04-bug", STRIP.format(take=TAKE, merge=MERGE)),
    Right(  # no list of holes at all: the holes are what the pieces leave
        "e04-bug",
        """\
class Strip:
    def __init__(self, slots):
        self.row = [None] * slots

    def take(self, owner, length):
        runs, start = [], None
        for slot, there in enumerate(self.row + [0]):
            if there is None and start is None:
                start = slot
            elif there is not None and start is not None:
                runs.append((start, slot - start))
                start = None
        for start, size in runs:
            if size >= length:
                self.row[start : start + length] = [(owner,)] * length
                return start
        raise MemoryError(f"{length} wanted; free: {self.row.count(None)}; largest: {max([0] + [size for _, size in runs])}")

    def give_back(self, owner):
        self.row = [None if there == (owner,) else there for there in self.row]""",
    ),
    Right("e04-plan", PLAN.format(cost=2, moves="[(name, new) for name, new in moves if pieces[name][0] != new]")),
    Right(  # towards the end of the row, the last one first
        "e04-plan",
        """\
def plan(slots, pieces, wanted):
    order = sorted(pieces, key=lambda name: pieces[name][0])
    plans = []
    for first in range(len(order) + 1):
        for last in range(first, len(order) + 1):
            begin = sum(pieces[order[first - 1]][:2]) if first else 0
            end = pieces[order[last]][0] if last < len(order) else slots
            moves = []
            for name in order[first:last][::-1]:
                end -= pieces[name][1]
                if end != pieces[name][0]:
                    moves.append([name, end])
            if end - begin >= wanted:
                plans.append((sum(pieces[name][2] for name, _ in moves), len(moves), moves))
    return min(plans)[2] if plans else None""",
    ),
]
