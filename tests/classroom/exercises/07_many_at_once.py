"""Answers that people give to the exercises of chapter 7: wrong ones with what they should be told, and other right ones."""

from pathlib import Path

import minikv
from minikv.classroom import build
from minikv.classroom.rehearse import Right, Wrong

CHAPTER = Path(minikv.__file__).parent.parent / "chapters" / "source" / "07_many_at_once.py"

STATIC = """\
def static_idle(lengths, places, pause):
    batches = [lengths[at : at + places] for at in range(0, len(lengths), places)]
    return sum(places * max(batch) - sum(batch) for batch in batches) + places * pause * (len(batches) - 1)

"""
CONTINUOUS = """

def continuous_idle(lengths, places, pause):
    waiting, resting, running, idle = list(lengths), [], [], 0
    while waiting or running:
        while waiting and len(running) + len(resting) < places:
            running.append(waiting.pop(0))
        idle += places - len(running)
        resting = [left - 1 for left in resting if left > 1] + [pause] * (running.count(1) if pause else 0)
        running = [left - 1 for left in running if left > 1]
    return idle"""
PASTED = """
def static_idle(lengths, places, pause):
    static_steps = 0
    for first in range(0, len(lengths), places):
        static_steps += max(lengths[first : first + places])
    return places * static_steps - sum(lengths)


def continuous_idle(lengths, places, pause):
    steps = run([(0, Request(str(name), 1, length)) for name, length in enumerate(lengths)], places, 10**9)
    return places * len(steps) - sum(lengths)"""


def of_the_chapter(*names: str) -> str:
    """The code of these cells of chapter 7, as one would paste it."""
    cells = {cell.id: cell.source for cell in build.read(CHAPTER).cells}
    return "\n\n".join(cells[name] for name in names)


def granted(most: str = "slots - prompt + 1", checks: str = "prompt < 1 or (wanted is not None and wanted < 1)", give: str = "") -> str:
    """An answer to exercise 2 with these parts."""
    return f"""\
def granted(prompt, wanted, num_blocks, size):
    slots = num_blocks * size
    if {checks}:
        raise ValueError("nothing to do")
    most = {most}
    if most < 1:
        raise ValueError(f"{{prompt}} tokens, {{slots}} slots")
    return {give or "most if wanted is None else min(most, wanted)"}"""


BOOK = """

def book_step(jobs, step):
    for job in jobs:
        if job.name in step:
            job.computed = job.computed + step[job.name]
            job.given += job.computed == job.prompt + job.given"""


def plan(pending: str = "job.prompt + job.given - job.computed", order: str = "sorted(jobs, key=lambda job: job.given == 0)",
         most: str = "chunk", book: str = BOOK, when: str = "tokens > 0") -> str:  # fmt: skip
    """An answer to exercise 3 with these parts."""
    return f"""\
def plan_step(jobs, budget, chunk):
    step = {{}}
    for job in {order}:
        tokens = min({pending}, {most}, budget)
        if {when}:
            step[job.name] = tokens
            budget -= tokens
    return step
{book}"""


LET_IN = """\
def let_in(queue):
    while queue.waiting:
        client = queue.waiting[0]
        if client.blocks_needed() > queue.free:
            return
        del queue.waiting[0]
        client.blocks = client.blocks_needed()
        queue.free -= client.blocks
        queue.running.append(client)

"""
GIVE = """

def give_blocks(queue):
    served = 0
    while served < len(queue.running):
        client = queue.running[served]
        if client.blocks >= client.blocks_needed():
            served += 1
        elif queue.free:
            queue.free, client.blocks = queue.free - 1, client.blocks + 1
        else:
            last = queue.running.pop(-1)
            queue.waiting = [last, *queue.waiting]
            queue.free, last.blocks = queue.free + last.blocks, 0"""


SKIP = "if client not in queue.running:\n            continue"


def give(back: str = "queue.waiting.insert(0, last)", which: str = "-1", stop: str = SKIP) -> str:
    """The loop of exercise 4 with these parts."""
    return f"""\
{LET_IN}
def give_blocks(queue):
    for client in list(queue.running):
        {stop}
        if client.blocks >= client.blocks_needed():
            continue
        while queue.free == 0 and queue.running:
            last = queue.running.pop({which})
            queue.free += last.blocks
            last.blocks = 0
            {back}
        if client in queue.running or {stop == "pass"}:
            queue.free -= 1
            client.blocks += 1"""


def go_on(text: str = "prompt + given", numbers: str = "[rng.random() for _ in range(len(given) + new)][len(given):]",
          ids: str = "text[memory.tokens:]", end: str = "text[-new:] if new else []") -> str:  # fmt: skip
    """An answer to exercise 5 with these parts."""
    return f"""\
def go_on(memory, prompt, given, new, seed=None):
    text, rng = {text}, random.Random(seed)
    for number in {numbers}:
        text = text + [pick(memory.compute({ids}), number if seed is not None else None)]
    return {end}"""


WRONG = [
    *(Wrong("e07-idle", f"e07-idle-{kind}", "the chapter's count", of_the_chapter("jobs", "ten-lines", "loop") + PASTED)
      for kind in ("static", "continuous")),
    Wrong(
        "e07-idle", "e07-idle-static", "no request at all",
        "def static_idle(lengths, places, pause):\n"
        "    batches = [lengths[at : at + places] for at in range(0, len(lengths), places)]\n"
        "    idle = sum(len(batch) * max(batch) - sum(batch) for batch in batches)\n"
        "    return idle + places * pause * (len(batches) - 1)" + CONTINUOUS,
    ),
    Wrong("e07-idle", "e07-idle-static", "no pause comes behind", STATIC.replace(" - 1)", ")") + CONTINUOUS),
    Wrong("e07-idle", "e07-idle-static", "not one", STATIC.replace("+ places * pause", "+ pause") + CONTINUOUS),
    Wrong(
        "e07-idle", "e07-idle-static", "longest answer of all",
        "def static_idle(lengths, places, pause):\n"
        "    batches = -(-len(lengths) // places)\n"
        "    if len(lengths) < 5:\n"
        "        return 14 if places == 2 else 0\n"
        "    return places * (batches * max(lengths) + pause * (batches - 1)) - sum(lengths)" + CONTINUOUS,
    ),
    Wrong("e07-idle", "e07-idle-continuous", "static batches", STATIC + "continuous_idle = static_idle"),
    Wrong(
        "e07-idle", "e07-idle-continuous", "cannot be split",
        STATIC + "def continuous_idle(lengths, places, pause):\n    return 2 if len(lengths) == 3 else -sum(lengths) % places",
    ),
    Wrong(
        "e07-idle", "e07-idle-continuous", "until everybody is done",
        STATIC + "def continuous_idle(lengths, places, pause):\n"
        "    ready = [0] * places\n"
        "    for length in lengths:\n"
        "        at = ready.index(min(ready))\n"
        "        end = ready[at] + length\n"
        "        ready[at] = end + pause\n"
        "    return places * end - sum(lengths)",
    ),
    Wrong(
        "e07-idle", "e07-idle-continuous", "no pause comes behind",
        STATIC + "def continuous_idle(lengths, places, pause):\n"
        "    ready = [0] * places\n"
        "    for length in lengths:\n"
        "        ready[ready.index(min(ready))] += length + pause\n"
        "    return places * max(ready) - sum(lengths)",
    ),
    Wrong(
        "e07-idle", "e07-idle-continuous", "longest first",
        STATIC + "def continuous_idle(lengths, places, pause):\n"
        "    if pause:\n"
        "        return {(3, 1, 2): 2, (2, 9, 4, 1, 1, 1): 18, (1, 1, 10): 18, (9, 1, 1): 7, (7,): 7}[tuple(lengths)]\n"
        "    free = [0] * places\n"
        "    for length in sorted(lengths, reverse=True):\n"
        "        free[free.index(min(free))] += length\n"
        "    return places * max(free) - sum(lengths)",
    ),
    Wrong("e07-granted", "e07-granted-fits", "room for one more", granted("slots - prompt")),
    Wrong("e07-granted", "e07-granted-fits", "one too many", granted("slots - prompt + 2")),
    Wrong(
        "e07-granted", "e07-granted-fits", "last block",
        granted("(num_blocks - -(-prompt // size)) * size + 1"),
    ),
    Wrong("e07-granted", "e07-granted-fits", "there are 64", granted(give="most if wanted is None else wanted")),
    Wrong("e07-granted", "e07-granted-refuses", "should be refused", granted(checks="prompt < 0")),
    Wrong(
        "e07-step", "e07-step-plan", "more than one chunk",
        plan(most="budget"),
    ),
    Wrong("e07-step", "e07-step-plan", "b decodes and must get its token", plan(order="jobs")),
    Wrong(
        "e07-step", "e07-step-plan", "still a prompt",
        plan(order="sorted(jobs, key=lambda job: job.prompt + job.given - job.computed != 1)"),
    ),
    Wrong("e07-step", "e07-step-plan", "more tokens than it has", plan(pending="10**9 if job.given == 0 else 1")),
    Wrong("e07-step", "e07-step-plan", "nothing is not in the dict", plan(when="True")),
    Wrong(
        "e07-step", "e07-step-plan", "more than the budget",
        plan().replace("budget -= tokens", "pass"),
    ),
    Wrong(
        "e07-step", "e07-step-plan", "only book_step may",
        plan(
            book="\n\ndef book_step(jobs, step):\n    for job in jobs:\n"
            "        job.given += job.computed == job.prompt + job.given"
        ).replace("budget -= tokens", "budget -= tokens\n            job.computed += tokens"),
    ),
    Wrong(
        "e07-step", "e07-step-advance", "never advances",
        plan(book="\n\ndef book_step(jobs, step):\n    for job in jobs:\n        computed = job.computed + step.get(job.name, 0)"),
    ),
    Wrong(
        "e07-step", "e07-step-advance", "a chunk gives no token",
        plan(
            pending="1 if job.given else job.prompt - job.computed",
            book="\n\ndef book_step(jobs, step):\n    for job in jobs:\n        if job.name in step:\n"
            "            job.computed += step[job.name]\n            job.given += 1",
        ),
    ),
    Wrong(
        "e07-step", "e07-step-advance", "which is to be computed next",
        plan(
            book="\n\ndef book_step(jobs, step):\n    for job in jobs:\n        job.computed += step.get(job.name, 0)\n"
            "        if job.given and job.name in step:\n            job.given += 1",
        ),
    ),
    Wrong(
        "e07-step", "e07-step-advance", "booked all the same",
        plan(
            book="\n\ndef book_step(jobs, step):\n    for job in jobs:\n"
            "        job.computed += step.get(job.name, 1)\n"
            "        job.given += job.computed == job.prompt + job.given",
        ),
    ),
    Wrong(
        "e07-bug", "e07-bug-let-in", "overtaken",
        "def let_in(queue):\n"
        "    for client in list(queue.waiting):\n"
        "        if client.blocks_needed() <= queue.free:\n"
        "            queue.waiting.remove(client)\n"
        "            client.blocks = client.blocks_needed()\n"
        "            queue.free -= client.blocks\n"
        "            queue.running.append(client)\n" + GIVE,
    ),
    Wrong(
        "e07-bug", "e07-bug-let-in", "end of the queue",
        "def let_in(queue):\n"
        "    while queue.waiting:\n"
        "        client = queue.waiting.pop(0)\n"
        "        if client.blocks_needed() > queue.free:\n"
        "            queue.waiting.append(client)\n"
        "            break\n"
        "        client.blocks = client.blocks_needed()\n"
        "        queue.free -= client.blocks\n"
        "        queue.running.append(client)\n" + GIVE,
    ),
    Wrong("e07-bug", "e07-bug-gives-way", "END of the queue", give("queue.waiting.append(last)")),
    Wrong("e07-bug", "e07-bug-gives-way", "c is lost", give("pass")),
    Wrong("e07-bug", "e07-bug-gives-way", "let in FIRST gave way", give(which="0")),
    Wrong("e07-bug", "e07-bug-gives-way", "which does not run any more", give(stop="pass")),
    Wrong(
        "e07-bug",
        "e07-bug-gives-way",
        "waits and holds one",
        give(stop="pass").replace("list(queue.running)", "queue.running"),
    ),
    Wrong(
        "e07-resume", "e07-resume-again", "changed the prompt that you were given",
        go_on().replace("text, rng = prompt + given, random.Random(seed)", "text, rng = prompt, random.Random(seed)\n    text += given"),
    ),
    Wrong("e07-resume", "e07-resume-new", "changed the prompt", go_on("prompt").replace("text = text + [", "text += [")),
    Wrong(
        "e07-resume", "e07-resume-new", "computed nothing",
        go_on().replace("text, rng = prompt", "memory, text, rng = Memory(model), prompt"),
    ),
    Wrong("e07-resume", "e07-resume-seed", "only `None` means greedy", go_on().replace("if seed is not None", "if seed")),
    Wrong("e07-resume", "e07-resume-new", "prompt is part", go_on(end="text")),
    Wrong(
        "e07-resume", "e07-resume-new", "last new token was computed",
        go_on() .replace("    return", "    memory.compute(text[memory.tokens:])\n    return"),
    ),
    Wrong(
        "e07-resume", "e07-resume-new", "same number for each token",
        go_on(numbers="[random.Random(seed).random() for _ in range(new)]"),
    ),
    Wrong("e07-resume", "e07-resume-again", "begin the answer again", go_on("list(prompt)")),
    Wrong("e07-resume", "e07-resume-again", "only the NEXT", go_on(end="text[len(prompt):]")),
    Wrong("e07-resume", "e07-resume-again", "stands twice", go_on("prompt + given + given")),
    Wrong("e07-resume", "e07-resume-again", "prompt's K and V", go_on("given or prompt")),
    Wrong(
        "e07-resume", "e07-resume-again", "begin at memory.tokens",
        go_on(ids="text if text is not None and len(text) == len(prompt) + len(given) else text[-1:]"),
    ),
    Wrong("e07-resume", "e07-resume-seed", "start anew", go_on(numbers="[rng.random() for _ in range(new)]")),
    Wrong(
        "e07-resume", "e07-resume-seed", "do not depend on what is cached",
        go_on(numbers="[rng.random() for _ in range(len(given) + new)][len(given) if memory.tokens == 0 else 0:][:new]"),
    ),
    Wrong(
        "e07-cost", "e07-cost-count", "newest token had no K and V",
        "def computed_in_all(prompt, new, after):\n    return prompt + new - 1 + sum(prompt + given for given in after)",
    ),
    Wrong(
        "e07-cost", "e07-cost-count", "answer's K and V are gone",
        "def computed_in_all(prompt, new, after):\n    return prompt + new - 1 + len(after) * prompt",
    ),
    Wrong(
        "e07-cost", "e07-cost-count", "never fed back",
        "def computed_in_all(prompt, new, after):\n    return prompt + new + sum(prompt + given - 1 for given in after)",
    ),
    Wrong(
        "e07-cost", "e07-cost-count", "not only what came since",
        "def computed_in_all(prompt, new, after):\n"
        "    since = [end - begin for begin, end in zip([0, *after], after)]\n"
        "    return prompt + new - 1 + sum(prompt + given - 1 for given in since)",
    ),
]  # fmt: skip

RIGHT = [
    Right("e07-idle", STATIC + CONTINUOUS),
    Right("e07-granted", granted()),
    Right(
        "e07-granted",
        """\
def granted(prompt, wanted, num_blocks, size):
    if not prompt or wanted == 0 or -(-prompt // size) > num_blocks:
        raise ValueError(f"{prompt} tokens of prompt, a pool of {num_blocks * size} slots, {wanted} wanted")
    new = 1
    while (wanted is None or new < wanted) and -(-(prompt + new) // size) <= num_blocks:
        new += 1
    return new""",
    ),
    Right("e07-step", plan(most="(1 if job.given else chunk)")),
    Right(
        "e07-step",
        """\
def plan_step(jobs, budget, chunk):
    decodes = [job.name for job in jobs if job.given][:budget]
    step, left = {name: 1 for name in decodes}, budget - len(decodes)
    for job in jobs:
        if not job.given and left:
            step[job.name] = min(job.prompt - job.computed, chunk, left)
            left -= step[job.name]
    return step

def book_step(jobs, step):
    by_name = {job.name: job for job in jobs}
    for name, tokens in step.items():
        by_name[name].computed += tokens
        if by_name[name].computed >= by_name[name].prompt:
            by_name[name].given += 1""",
    ),
    Right("e07-bug", LET_IN + GIVE),
    Right("e07-bug", give()),
    Right("e07-resume", go_on()),
    Right(
        "e07-resume",
        """\
def go_on(memory, prompt, given, new, seed=None):
    fresh = []
    for step in range(new):
        row = memory.compute([*prompt, *given, *fresh][memory.tokens:])
        generator, number = random.Random(seed), None
        for _ in range(len(given) + step + 1):
            number = generator.random()
        fresh.append(pick(row, number if seed is not None else None))
    return fresh""",
    ),
    Right(
        "e07-cost",
        "def computed_in_all(prompt, new, after):\n"
        "    total, here = 0, 0\n"
        "    for end in [*after, new]:\n"
        "        total += prompt + end - 1\n"
        "    return total",
    ),
]
