"""Answers that people give to the exercises of chapter 6: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

START = """

def start_of(adapter, salt):
    return json.dumps([adapter, salt]).encode()"""

KEYS = """\
def more_keys(keys, ids, size, start, link):
    keys = list(keys)
    for number in range(len(keys), len(ids) // size):
        keys.append(link(keys[-1] if keys else start, ids[number * size : (number + 1) * size]))
    return keys
"""


def tree(found: str, add: str = "self.prompts.append(ids)") -> str:
    """A tree that is a list of prompts, with these bodies."""
    return f"""\
class PromptTree:
    def __init__(self):
        self.prompts = []

    def add(self, ids):
        {add}

    def common(self, ids):
        best = 0
        for prompt in self.prompts:
            length = 0
            while length < min(len(ids), len(prompt)) and prompt[length] == ids[length]:
                length += 1
            best = max(best, length)
        return best

    def found(self, ids, size=1):
        {found}
"""


def shelf(begin: str = "", end: str = "", found: str = "") -> str:
    """A right shelf of another make, with other bodies where they are given."""
    found = found or "return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))"
    begin = (
        begin
        or """\
hits = self.found(keys)
needed, mine = len(keys) - hits, set(keys[:hits])
free = [key for key, (owners, _) in self.blocks.items() if owners == 0 and key not in mine]
available = self.room - len(self.blocks) + len(free)
if needed > available:
    raise ValueError(f"{available} can be had of {needed}")
for key in mine:
    self.blocks[key][0] += 1
free.sort(key=lambda key: self.blocks[key][1])
for key in free[: max(needed - (self.room - len(self.blocks)), 0)]:
    del self.blocks[key]
for key in keys[hits:]:
    self.blocks[key] = [1, None]
return hits"""
    )
    end = (
        end
        or """\
self.now += 1
for place, key in enumerate(keys):
    self.blocks[key][0] -= 1
    self.blocks[key][1] = (self.now, -place)"""
    )

    def body(text: str) -> str:
        return text.replace("\n", "\n        ")

    return f"""\
class Shelf:
    def __init__(self, room):
        self.room, self.blocks, self.now = room, {{}}, 0

    def found(self, keys):
        {body(found)}

    def begin(self, keys):
        {body(begin)}

    def end(self, keys):
        {body(end)}
"""


def prompt(*parts: str, tools: str = "sorted((json.dumps(tool, sort_keys=True) for tool in tools))") -> str:
    """A prompt of these parts in this order."""
    lines = "".join(f"    prompt += {part}\n" for part in parts)
    return f"""\
def build_prompt(rules, tools, user, chat, clock):
    prompt, tools, chat = "", " ".join({tools}), "".join(chat)
{lines}    return prompt"""


APPEND = """\
def append(memory, text, token):
    slot = text.length % memory.size
    if slot == 0:
        text.blocks.append(memory.take())
    elif {when}:
        old = text.blocks.pop()
        text.blocks.append(memory.take())
        {copy}
        {leave}
    memory.slots[text.blocks[-1]][slot] = token
    text.length += 1"""
SHARED, COPY, LEAVE = (
    "memory.owners[text.blocks[-1]] > 1",
    "memory.slots[text.blocks[-1]][:] = memory.slots[old]",
    "memory.owners[old] -= 1",
)

WRONG = [
    Wrong(
        "e06-keys", "e06-keys-chain", "chain each to the key before",
        "def more_keys(keys, ids, size, start, link):\n"
        "    full = len(ids) // size\n"
        "    return keys + [link(start, ids[i * size : (i + 1) * size]) for i in range(len(keys), full)]" + START,
    ),
    Wrong(
        "e06-keys", "e06-keys-chain", "empty slot",
        "def more_keys(keys, ids, size, start, link):\n"
        "    keys = list(keys)\n"
        "    for first in range(len(keys) * size, len(ids), size):\n"
        "        keys.append(link(keys[-1] if keys else start, ids[first : first + size]))\n"
        "    return keys" + START,
    ),
    Wrong(
        "e06-keys", "e06-keys-chain", "full exactly",
        "def more_keys(keys, ids, size, start, link):\n"
        "    keys = list(keys)\n"
        "    while (len(keys) + 1) * size < len(ids):\n"
        "        first = len(keys) * size\n"
        "        keys.append(link(keys[-1] if keys else start, ids[first : first + size]))\n"
        "    return keys" + START,
    ),
    Wrong(
        "e06-keys", "e06-keys-grows", "last key that is known",
        "def more_keys(keys, ids, size, start, link):\n"
        "    keys, parent = list(keys), start\n"
        "    for first in range(len(keys) * size, len(ids) // size * size, size):\n"
        "        parent = link(parent, ids[first : first + size])\n"
        "        keys.append(parent)\n"
        "    return keys" + START,
    ),
    Wrong(
        "e06-keys", "e06-keys-grows", "anew",
        "def more_keys(keys, ids, size, start, link):\n"
        "    keys, parent = [], start\n"
        "    for first in range(0, len(ids) // size * size, size):\n"
        "        parent = link(parent, ids[first : first + size])\n"
        "        keys.append(parent)\n"
        "    return keys" + START,
    ),
    Wrong(
        "e06-keys", "e06-keys-start", "what a salt",
        KEYS + "\ndef start_of(adapter, salt):\n    return ((adapter or '') + (salt or '')).encode()",
    ),
    Wrong(
        "e06-keys", "e06-keys-start", "Glued together",
        KEYS + "\ndef start_of(adapter, salt):\n"
        "    return (('a' + adapter if adapter is not None else '') + ('' if salt is None else salt + 's')).encode()",
    ),
    Wrong(
        "e06-keys", "e06-keys-start", "may stand in a name",
        KEYS + "\ndef start_of(adapter, salt):\n    return f'{adapter}|{salt}'.encode()",
    ),
    Wrong(
        "e06-keys", "e06-keys-start", "three different things",
        KEYS + "\ndef start_of(adapter, salt):\n    return json.dumps([str(adapter), str(salt)]).encode()",
    ),
    Wrong(
        "e06-tree", "e06-tree-found", "may not start in the middle",
        tree(
            "known = {token for prompt in self.prompts for token in prompt}\n"
            "        return min(sum(token in known for token in ids), len(ids) - 1) // size * size"
        ),
    ),
    Wrong(
        "e06-tree", "e06-tree-found", "first difference ends a hit",
        tree(
            "stood = {pair for prompt in self.prompts for pair in enumerate(prompt)}\n"
            "        length = 0\n"
            "        while length < len(ids) - 1 and (length, ids[length]) in stood:\n"
            "            length += 1\n"
            "        return length // size * size"
        ),
    ),
    Wrong(
        "e06-tree", "e06-tree-found", "last prompt only",
        tree("return min(self.common(ids), len(ids) - 1) // size * size", "self.prompts = [ids]"),
    ),
    Wrong("e06-tree", "e06-tree-full", "no logits", tree("return self.common(ids) // size * size")),
    Wrong("e06-tree", "e06-tree-full", "no other must be given up", tree("return max(self.common(ids) - 1, 0) // size * size")),
    Wrong("e06-tree", "e06-tree-blocks", "two others", tree("return min(self.common(ids), len(ids) - 1)")),
    Wrong(
        "e06-tree", "e06-tree-blocks", "leave one token first",
        tree("return min(self.common(ids) // size * size, len(ids) - 1)"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-clock", "before other parts",
        prompt("rules", "clock", "tools", "user", "chat"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-tools", "sort_keys does not sort lists",
        prompt("rules", "json.dumps(tools, sort_keys=True)", "user", "chat", "clock", tools="tools").replace('" ".join(tools)', "tools"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-tools", "keys in each are not",
        prompt(
            "rules", "tools", "user", "chat", "clock",
            tools="json.dumps(tool) for tool in sorted(tools, key=lambda tool: tool['name'])",
        ),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-chat", "depends on their number",
        prompt("rules", "tools", "user", "f'{chat.count(chr(10))} messages: '", "chat", "clock"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-chat", "message 1 of the conversation is missing",
        prompt("rules", "tools", "user", "''.join(chat.splitlines(True)[-6:])", "clock"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-users", "name stands before",
        prompt("user", "rules", "tools", "chat", "clock"),
    ),
    Wrong(
        "e06-prompt", "e06-prompt-users", "behind the conversation",
        prompt("rules", "user", "chat", "tools", "clock"),
    ),
    Wrong(
        "e06-bug", "e06-bug-read", "reads the token of b",
        APPEND.format(when=SHARED, copy="memory.slots[text.blocks[-1]] = memory.slots[old]", leave=LEAVE),
    ),
    Wrong("e06-bug", "e06-bug-read", "copy is empty", APPEND.format(when=SHARED, copy="pass", leave=LEAVE)),
    Wrong("e06-bug", "e06-bug-counts", "never becomes free", APPEND.format(when=SHARED, copy=COPY, leave="pass")),
    Wrong(
        "e06-bug", "e06-bug-counts", "can stay shared",
        """\
def append(memory, text, token):
    if any(memory.owners[block] > 1 for block in text.blocks):
        mine = memory.read(text)
        memory.end(text)
        for each in mine:
            append(memory, text, each)
    if text.length % memory.size == 0:
        text.blocks.append(memory.take())
    memory.slots[text.blocks[-1]][text.length % memory.size] = token
    text.length += 1""",
    ),
    Wrong(
        "e06-bug", "e06-bug-counts", "alone in its last block",
        """\
def append(memory, text, token):
    slot = text.length % memory.size
    if slot == 0:
        text.blocks.append(memory.take())
    elif any(memory.owners[block] > 1 for block in text.blocks):
        old = text.blocks.pop()
        text.blocks.append(memory.take())
        memory.slots[text.blocks[-1]][:] = memory.slots[old]
        memory.owners[old] -= 1
    memory.slots[text.blocks[-1]][slot] = token
    text.length += 1""",
    ),
    Wrong(
        "e06-bug", "e06-bug-counts", "needs no copy",
        """\
def append(memory, text, token):
    slot = text.length % memory.size
    if text.blocks and memory.owners[text.blocks[-1]] > 1:
        old = text.blocks.pop()
        text.blocks.append(memory.take())
        memory.slots[text.blocks[-1]][:] = memory.slots[old]
        memory.owners[old] -= 1
    if slot == 0:
        text.blocks.append(memory.take())
    memory.slots[text.blocks[-1]][slot] = token
    text.length += 1""",
    ),
    Wrong("e06-shelf", "e06-shelf-found", "Nothing is left", shelf(end="for key in keys:\n    del self.blocks[key]")),
    Wrong(
        "e06-shelf", "e06-shelf-found", "may not start in the middle",
        shelf(found="return sum(key in self.blocks for key in keys)"),
    ),
    Wrong(
        "e06-shelf", "e06-shelf-owners", "count the owners",
        shelf(end="self.now += 1\nfor place, key in enumerate(keys):\n    self.blocks[key] = [0, (self.now, -place)]"),
    ),
    Wrong(
        "e06-shelf", "e06-shelf-order", "stranded",
        shelf(end="for key in keys:\n    self.now += 1\n    self.blocks[key][0] -= 1\n    self.blocks[key][1] = (self.now, 0)"),
    ),
    Wrong(
        "e06-shelf", "e06-shelf-order", "least recently used",
        shelf(
            end="self.now += 1\nfor place, key in enumerate(keys):\n    self.blocks[key][0] -= 1\n"
            "    self.blocks[key][1] = self.blocks[key][1] or (self.now, -place)"
        ),
    ),
    Wrong(
        "e06-shelf", "e06-shelf-refuses", "promised twice",
        shelf().replace("owners == 0 and key not in mine", "owners == 0"),
    ),
]  # fmt: skip

RIGHT = [
    Right("e06-keys", KEYS + "\ndef start_of(adapter, salt):\n    return repr((adapter, salt)).encode()"),
    Right(
        "e06-keys",
        """\
def more_keys(keys, ids, size, start, link):
    if (len(keys) + 1) * size > len(ids):
        return [*keys]
    place = len(keys) * size
    parent = keys[len(keys) - 1] if len(keys) > 0 else start
    return more_keys([*keys, link(parent, tuple(ids[place : place + size]))], ids, size, start, link)

def start_of(adapter, salt):
    made = b""
    for text in (adapter, salt):
        raw = b"" if text is None else text.encode()
        made += bytes([text is None]) + len(raw).to_bytes(8, "little") + raw
    return made""",
    ),
    Right("e06-tree", tree("return min(self.common(ids), len(ids) - 1) // size * size")),
    Right(
        "e06-tree",
        """\
class PromptTree:
    def __init__(self):
        self.beginnings = set()

    def add(self, ids):
        self.beginnings |= {tuple(ids[: end + 1]) for end in range(len(ids))}

    def found(self, ids, size=1):
        hits = 0
        while hits + size < len(ids) and tuple(ids[: hits + size]) in self.beginnings:
            hits += size
        return hits""",
    ),
    Right(
        "e06-prompt",
        """\
def build_prompt(rules, tools, user, chat, clock):
    lines = sorted("; ".join(f"{key}: {value}" for key, value in sorted(tool.items())) for tool in tools)
    return "\\n".join([*lines, rules, user, *chat, clock])""",
    ),
    Right("e06-prompt", prompt("rules", "tools", "user", "chat", "clock")),
    Right(
        "e06-bug",
        """\
def append(memory, text, token):
    place, slot = divmod(text.length, memory.size)
    if place == len(text.blocks):
        text.blocks += [memory.take()]
    block = text.blocks[place]
    if memory.owners[block] != 1:
        memory.owners[block] -= 1
        copy = memory.take()
        memory.slots[copy] = list(memory.slots[block])
        text.blocks[place] = block = copy
    memory.slots[block][slot] = token
    text.length = text.length + 1""",
    ),
    Right("e06-shelf", shelf()),
]
