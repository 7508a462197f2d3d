"""The grader against what is handed in: careless, broken and hostile notebooks, each with the points and the status that it must get.

One small source, and all submissions in one run, as a teacher would do it: what one of them breaks may cost no other a point.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises, grade
from minikv.classroom.grading import feedback, marks, submissions, supervise
from minikv.classroom.grading.rebuild import Piece
from minikv.classroom.grading.run import Limits, Ran, Verdict, _settle
from minikv.classroom.grading.submissions import Handed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the grader needs process groups and pipes: there it runs in a container")

SOURCE = '''\
# %% [markdown] id="title"
# # Exercises 90. Three small ones

# %% id="e90-setup" role="given"
import numpy as np

from minikv.classroom.checks import check, expect, hidden_random, lock_minikv
from minikv.shape.size import with_unit

lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *3 points, 5 minutes, easy*

# %% id="e90-double" role="answer"
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION: twice x
    return 2 * x
    ### END SOLUTION

# %% id="e90-double-two" role="check" points=1
with check("twice two", why="Everything builds on it.", hint="Add it to itself."):
    expect(double(2), 4, mistakes={"That is the square.": lambda got: got == 2**2 + 1})

# %% id="e90-double-any" role="check" points=2
with check("twice any number", why="One case proves little.", hint="Do not look at the cases."):
    expect(double(3), 6)
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        number = draw.randint(10**6, 10**7)
        expect(double(number), 2 * number, "a hidden number")
    ### END HIDDEN TESTS

# %% [markdown] id="two"
# ## Exercise 2. Loud
#
# *2 points, 5 minutes, easy*

# %% id="e90-shout" role="answer"
def shout(text):
    """In capitals."""
    ### BEGIN SOLUTION: capitals
    return text.upper()
    ### END SOLUTION

# %% id="e90-shout-word" role="check" points=2
with check("a word", why="It must be heard.", hint="A method of str does it."):
    expect(shout("key"), "KEY")

# %% [markdown] id="three"
# ## Exercise 3. The middle
#
# *2 points, 5 minutes, medium*

# %% id="e90-parts" role="given"
def numbers():
    return np.array([1.0, 2.0, 6.0])

# %% id="e90-mean" role="answer"
def middle(values):
    """The mean."""
    ### BEGIN SOLUTION
    return values.mean()
    ### STUB
    # return values.mean  # find the bug
    ### END SOLUTION

# %% id="e90-mean-three" role="check" points=1
with check("the mean of three", why="It is the middle.", hint="A pair of brackets?"):
    expect(middle(numbers()), 3.0)

# %% [markdown] id="words" role="manual" points=1
# Because.
'''
RIGHT = {
    "e90-double": "def double(x):\n    return x + x",
    "e90-shout": "def shout(text):\n    return text.upper()",
    "e90-mean": "def middle(values):\n    return sum(values) / len(values)",
}
WRONG = {
    "e90-double": "def double(x):\n    return -1",
    "e90-shout": "def shout(text):\n    return 0",
    "e90-mean": "def middle(values):\n    return 0",
}


GARBAGE = """\
import os
for number in os.listdir(f"/proc/{os.getppid()}/fd"):
    try:
        with open(f"/proc/{os.getppid()}/fd/{number}", "wb", buffering=0) as pipe:
            pipe.write(b'{"end": 9999}\\ngarbage\\n')
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("course") / "exercises" / "source"
    folder.mkdir(parents=True)
    (folder / "90_small.py").write_text(SOURCE)
    return folder / "90_small.py"


def stubs(source: Path, **answers: str) -> dict[str, Any]:
    """The notebook that learners get, as JSON, with these answers in it (- written as _)."""
    made = json.loads(json.dumps(exercises.notebook(exercises.read(source), solved=False)))
    for cell in made["cells"]:
        cell["source"] = answers.get(cell["id"].replace("-", "_"), cell["source"])
    return made


def solved(source: Path, **answers: str) -> dict[str, Any]:
    return stubs(source, **{**{name.replace("-", "_"): code for name, code in RIGHT.items()}, **answers})


def wrong(source: Path, **answers: str) -> dict[str, Any]:
    return stubs(source, **{**{name.replace("-", "_"): code for name, code in WRONG.items()}, **answers})


def cell(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in notebook["cells"] if each["id"] == name)


def added(notebook: dict[str, Any], after: str, code: str) -> dict[str, Any]:
    place = next(place for place, each in enumerate(notebook["cells"]) if each["id"] == after)
    notebook["cells"].insert(place + 1, {"cell_type": "code", "id": "mine", "metadata": {}, "source": code, "outputs": []})
    return notebook


# ---------------------------------------------------------------- careless


def deleted(source: Path) -> Any:
    notebook = wrong(source)
    notebook["cells"] = [each for each in notebook["cells"] if not each["id"].startswith(("e90-double-", "e90-shout-"))]
    return notebook


def edited(source: Path) -> Any:
    return wrong(source, e90_double_two="assert True", e90_double_any="pass", e90_shout_word="print('passed')", e90_setup="lock_minikv = 1")


def marked_to_be_skipped(source: Path) -> Any:
    notebook = wrong(source)
    cell(notebook, "e90-double-two")["metadata"]["tags"] = ["nbval-skip"]
    cell(notebook, "e90-double-any")["source"] = "# NBVAL_SKIP\n" + cell(notebook, "e90-double-any")["source"]
    return notebook


def reordered(source: Path) -> Any:
    notebook = solved(source)
    notebook["cells"].reverse()
    return notebook


def duplicated(source: Path) -> Any:
    notebook = solved(source)
    notebook["cells"] += copy.deepcopy(notebook["cells"])
    return notebook


def split(source: Path) -> Any:
    """As JupyterLab splits a cell: both halves keep the metadata. And another one whose second half has lost it."""
    notebook = solved(source, e90_double="two = 2", e90_shout="def loud(text):\n    return text.upper()")
    half = copy.deepcopy(cell(notebook, "e90-double"))
    notebook["cells"].insert(4, {**half, "id": "half", "source": "def double(x):\n    return two * x"})
    return added(notebook, "e90-shout", "def shout(text):\n    return loud(text)")


def turned_to_markdown(source: Path) -> Any:
    notebook = solved(source)
    cell(notebook, "e90-shout")["cell_type"] = "markdown"
    cell(notebook, "e90-double-two")["cell_type"] = "markdown"
    return notebook


def stripped(source: Path) -> Any:
    notebook = solved(source)
    for each in notebook["cells"]:
        del each["id"]
        each["metadata"] = {}
    return {**notebook, "metadata": {}}


def of_format_3(source: Path) -> Any:
    cells = [{"cell_type": each["cell_type"], "metadata": each["metadata"], "language": "python", "outputs": [],
              "input" if each["cell_type"] == "code" else "source": each["source"].splitlines(keepends=True)}
             for each in solved(source)["cells"]]  # fmt: skip
    return {"metadata": {"name": ""}, "nbformat": 3, "nbformat_minor": 0, "worksheets": [{"cells": cells, "metadata": {}}]}


def careless_names(source: Path) -> Any:
    shadows = "sum = list = len = range = print = isinstance = type = 5\ncheck = expect = np = hidden_random = numbers = None"
    return added(
        solved(source, e90_mean="def middle(values):\n    return (values[0] + values[1] + values[2]) / 3"), "e90-shout-word", shadows
    )


# ---------------------------------------------------------------- loops, deaths, floods


SWALLOW = "def shout(text):\n    while True:\n        try:\n            print('x' * 1000)\n        except BaseException:\n            pass"
FORK = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.environ.clear()\n"
    "        os.execv('/bin/sleep', ['sleep', '98765'])\n    os._exit(0)\n"
)
BIG_FILE = (
    "def shout(text):\n    with open('big', 'wb') as file:\n        for _ in range(200):\n            file.write(b'x' * 10**6)\n"
    "    return text.upper()"
)

# ---------------------------------------------------------------- hostile


PATCHES = """\
import builtins, numpy as np, math
builtins.abs = builtins.sum = builtins.round = lambda *_: 0
builtins.issubclass = builtins.all = builtins.any = lambda *_: True
builtins.print = builtins.float = lambda *_, **__: None
np.asarray = np.array = lambda *_, **__: 3.0
np.ndarray = np.generic = object
math.isfinite = math.isnan = lambda *_: True
import sys
sys.modules["numpy"] = sys.modules["math"] = None
"""
HOOKS = """\
ip = get_ipython()
ip.showtraceback = ip._showtraceback = lambda *_, **__: None
ip.set_custom_exc((BaseException,), lambda *_, **__: None)
type(ip).showtraceback = lambda *_, **__: None
import sys
sys.excepthook = lambda *_: None
"""
TRANSFORMS = """\
ip = get_ipython()
ip.input_transformers_cleanup.append(lambda lines: ["pass\\n"] if any("check(" in line for line in lines) else lines)
ip.input_transformers_post.append(lambda lines: ["pass\\n"] if any("check(" in line for line in lines) else lines)
import ast
class Nothing(ast.NodeTransformer):
    def visit_With(self, node):
        return ast.Pass()
ip.ast_transformers.append(Nothing())
"""
ANY = """\
class Any:
    __eq__ = __bool__ = __le__ = __ge__ = lambda *_: True
    __sub__ = __rsub__ = __abs__ = lambda *_: 0.0
    __hash__ = lambda _: 1
"""
FORGE = """\
import re, sys
def double(x):
    frame = sys._getframe(1)
    while "raw_cell" not in frame.f_locals:
        frame = frame.f_back
    print("\\n".join(re.findall("[0-9a-f]{32}", frame.f_locals["raw_cell"])))
    get_ipython().showtraceback = lambda *_, **__: None
    raise ValueError
"""
EXPECT = """\
import sys
def double(x):
    expect.__code__ = (lambda *_, **__: None).__code__
    return 0
def shout(text):
    sys.modules["minikv.classroom.checks"]._same = lambda *_: True
    return ""
"""
REBIND = """\
def double(x):
    globals()["expect"] = lambda *_, **__: None
    return {2: 4, 3: 6}.get(x)
"""
NEIGHBOURS = """\
import glob, os
def shout(text):
    seen = glob.glob("../**/*.ipynb", recursive=True) + glob.glob("*")
    return str(seen) if seen else text.upper()
"""
SMUGGLE = """\
seen = []
def double(x):
    if x < 100:
        return 2 * x
    raise type("WHAT" + str(x), (Exception,), {})(f"WHAT  {x}")
"""

GUARD = """\
kinds = getattr(object, "__sub" + "classes__")
guard = [kind for kind in kinds() if kind.__name__[:6] == "Minikv"][0].begin.__globals__
for name in ("_dicts", "_classes", "_functions", "_lists", "_settings"):
    guard[name].clear()
guard["checks"]._same = lambda *_: True
def double(x):
    return 0
"""
CLASS = """\
guard = [kind for kind in object.__subclasses__() if kind.__name__ == "MinikvGuard"][0]
guard.check = staticmethod(lambda seed, code, token: print(token))
def double(x):
    return 0
"""
QUEUE = """\
import _thread, ast, sys
def empty():
    while True:
        for frame in sys._current_frames().values():
            while frame:
                queue = frame.f_locals.get("to_run") or []
                queue[:] = [each for each in queue if not isinstance(each[0], ast.With)]
                frame = frame.f_back
sys.setswitchinterval(1e-6)
_thread.start_new_thread(empty, ())
def double(x):
    return 0
"""
SOMETIMES = """\
real, calls = expect.__code__, []
def double(x):
    calls.append(x)
    expect.__code__ = real if len(calls) in (1, 5) else (lambda got, wanted, what="", *, mistakes=None, tolerance=0: None).__code__
    return 2 * x if len(calls) in (1, 5) else 0
"""
ABOVE = """\
import os
def above(what):
    process = os.getpid()
    while process > 1:
        if what in open(f"/proc/{process}/cmdline").read():
            return process
        process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
"""
ESCAPES = (
    ABOVE
    + """\
if os.fork() == 0:
    os.setsid()
    supervisor = above("supervise.py")
    if os.fork() == 0:
        os.kill(supervisor, 9)
        os.environ.clear()
        os.chdir("/")
        os.execv("/bin/sleep", ["sleep", "98763"])
    os._exit(0)
"""
)
SPY = {
    "e90_double": "seen = open({path!r}).read().strip()\ndef double(x):\n    raise ValueError(seen)",
    "e90_shout": "def shout(text):\n    return seen",
    "e90_mean": "raise KeyError('mine')",
}


def reads_the_secret(source: Path) -> Any:
    return stubs(source, **{name: code.replace("{path!r}", repr(f"{source.parent}/secret")) for name, code in SPY.items()})


MAGIC = "%nosuch\ndef shout(text):\n    return text.upper()"
EXITS = "import os\ndef shout(text):\n    os._exit(0)"
KILLS = "import os\ndef shout(text):\n    os.kill(os.getpid(), 9)"
MUCH = "for _ in range(3000):\n    print('x' * 1000)\n" + RIGHT["e90-shout"]
BREAKS = "import builtins\nbuiltins.isinstance = builtins.len = lambda *_: True"
EQUALS = {name: f"def {call}(x):\n    return Any()" for name, call in (("e90_shout", "shout"), ("e90_mean", "middle"))}

# only root can still write to the pipe of a process that has closed itself to others
NO_ENTRY = ("tampered", "something else wrote") if os.geteuid() == 0 else ("partial", "e90-shout raised PermissionError")
ALL: dict[str, tuple[Callable[[Path], Any], float, str, str]] = {
    # what is handed in, the points of 6, the status, and what "look at" says
    "blank": (stubs, 0, "ok", ""),
    "right": (solved, 6, "ok", ""),
    "partly": (lambda s: stubs(s, e90_double=RIGHT["e90-double"]), 3, "ok", ""),
    "two visible cases only": (lambda s: solved(s, e90_double="def double(x):\n    return {2: 4, 3: 6}.get(x)"), 4, "ok", ""),
    "deleted": (deleted, 0, "tampered", "e90-double-two was deleted"),
    "edited": (edited, 0, "tampered", "e90-double-two was changed"),
    "marked to be skipped": (marked_to_be_skipped, 0, "tampered", "marked to be skipped"),
    "answers marked": (lambda s: solved(s, e90_double="# NBVAL_SKIP\ndef double(x):\n    return x + x"), 6, "ok", "marked for nbval"),
    "reordered": (reordered, 6, "ok", ""),
    "duplicated": (duplicated, 6, "ok", ""),
    "split": (split, 6, "ok", ""),
    "turned to markdown": (turned_to_markdown, 4, "partial", "e90-shout is no code cell any more"),
    "stripped": (stripped, 6, "ok", ""),
    "of format 3": (of_format_3, 6, "ok", ""),
    "careless names": (careless_names, 6, "ok", ""),
    "syntax error": (lambda s: solved(s, e90_shout="def shout(text)\n    return"), 4, "partial", "e90-shout raised SyntaxError"),
    "unknown magic": (lambda s: solved(s, e90_shout=MAGIC), 4, "partial", "e90-shout raised"),
    "loop at top level": (lambda s: solved(s, e90_shout="while True:\n    pass"), 4, "partial", "e90-shout was taken out: it did not end"),
    "loop in a function": (lambda s: solved(s, e90_shout="def shout(text):\n    while True:\n        pass"), 4, "partial", "did not end"),
    "loop in an added cell": (lambda s: added(solved(s), "title", "while True:\n    pass"), 6, "partial", "title+0 was taken out"),
    "endless printing": (lambda s: solved(s, e90_shout=SWALLOW), 4, "partial", "e90-shout was taken out"),
    "os._exit": (lambda s: solved(s, e90_shout=EXITS), 4, "partial", "ended the kernel"),
    "SIGKILL": (lambda s: solved(s, e90_shout=KILLS), 4, "partial", "ended the kernel"),
    "kills its parent": (lambda s: solved(s, e90_shout="import os\nos.kill(os.getppid(), 9)"), 4, "partial", "e90-shout was taken out"),
    "exit()": (lambda s: solved(s, e90_shout="exit()"), 4, "partial", "e90-shout was taken out: it ended the kernel"),
    "exit() in a function": (lambda s: solved(s, e90_shout="def shout(text):\n    raise SystemExit"), 4, "ok", ""),
    "input()": (lambda s: solved(s, e90_shout="name = input()"), 4, "partial", "waits for input"),
    "much output": (lambda s: solved(s, e90_shout=MUCH), 6, "ok", "printed much"),
    "huge file": (lambda s: solved(s, e90_shout=BIG_FILE), 4, "ok", "reads or writes files"),
    "leaves a process": (lambda s: solved(s, e90_shout=FORK + RIGHT["e90-shout"]), 6, "ok", "starts processes"),
    "not a notebook": (lambda s: b"%PDF-1.7 \xff\xfe", 0, "unreadable", "no JSON"),
    "empty": (lambda s: b"", 0, "unreadable", "empty"),
    "a list": (lambda s: [1, 2], 0, "unreadable", "another kind"),
    "patches everything": (lambda s: wrong(s, e90_double=PATCHES + WRONG["e90-double"]), 0, "ok", "patches what is not its own"),
    "patches and is right": (lambda s: solved(s, e90_double=RIGHT["e90-double"] + "\n" + PATCHES), 6, "ok", "patches what is not its own"),
    "breaks the kernel": (lambda s: solved(s, e90_shout=BREAKS), 4, "partial", ""),
    "hooks": (lambda s: wrong(s, e90_double=HOOKS + WRONG["e90-double"]), 0, "ok", "own hooks"),
    "input hooks": (lambda s: wrong(s, e90_double=TRANSFORMS + WRONG["e90-double"]), 0, "ok", "own hooks"),
    "equals everything": (lambda s: stubs(s, e90_double=f"{ANY}def double(x):\n    return Any()", **EQUALS), 0, "ok", "every comparison"),
    "forged": (lambda s: wrong(s, e90_double=FORGE), 0, "tampered", "token"),
    "patches expect": (lambda s: stubs(s, e90_double=EXPECT), 0, "ok", "reads other people's frames or code"),
    "rebinds expect": (lambda s: stubs(s, e90_double=REBIND), 0, "ok", "patches what is not its own"),
    "reads its neighbours": (lambda s: solved(s, e90_shout=NEIGHBOURS), 6, "ok", "reads or writes files"),
    "smuggles": (lambda s: solved(s, e90_double=SMUGGLE), 4, "ok", ""),
    "half a character": (lambda s: solved(s, e90_shout="# \ud83d\n" + RIGHT["e90-shout"]), 6, "ok", ""),
    "garbage in the report": (lambda s: solved(s, e90_shout=GARBAGE), 4, *NO_ENTRY),
    "empties the guard": (lambda s: stubs(s, e90_double=GUARD), 0, "tampered", "what the checks rely on was changed"),
    "replaces the guard": (lambda s: stubs(s, e90_double=CLASS), 0, "tampered", "what the checks rely on was changed"),
    "empties the queue": (lambda s: stubs(s, e90_double=QUEUE), 0, "ok", "leaves a thread running"),
    "patches expect for a while": (lambda s: stubs(s, e90_double=SOMETIMES), 1, "tampered", "only 1 of 4 comparisons were made"),
    "kills its supervisor": (lambda s: solved(s, e90_shout=ESCAPES + RIGHT["e90-shout"]), 6, "tampered", "was stopped from within"),
    "reads the secret": (reads_the_secret, 0, "tampered", "e90-shout-word: its message held the teacher's secret"),
    "takes minikv's": (lambda s: solved(s, e90_shout="from minikv.cache.blocks import blocks_for as shout"), 4, "partial", "not given"),
    "uses a check's name": (lambda s: solved(s, e90_shout="def shout(text):\n    return number"), 4, "ok", "only the checks define"),
    "=cmd()": (solved, 6, "ok", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def graded(source, tmp_path_factory):
    """All of them, handed in as folders with one file name, graded by the command, two at a time."""
    folder = tmp_path_factory.mktemp("graded")
    for name, (make, *_) in ALL.items():
        made = make(source)
        (folder / "in" / name).mkdir(parents=True)
        (folder / "in" / name / "90_small.ipynb").write_bytes(made if isinstance(made, bytes) else json.dumps(made).encode())
    (source.parent / "secret").write_text("tell nobody\n")
    before = set(supervise.descendants(os.getpid()))
    home, scratch = set(Path.home().iterdir()), set(Path(tempfile.gettempdir()).glob("minikv-grade-*"))
    started = time.monotonic()
    arguments = ["--csv", f"{folder}/grades.csv", "--feedback", f"{folder}/feedback", "--answers", f"{folder}/answers"]
    limits = ["--secret", f"{source.parent}/secret", "--jobs", "2", "--cell-timeout", "3", "--wall", "60"]
    assert command.main(["grade", str(source), str(folder / "in"), *arguments, *limits]) == 0
    (folder / "seconds").write_text(str(time.monotonic() - started))
    assert set(supervise.descendants(os.getpid())) <= before, "something is still running"
    assert set(Path.home().iterdir()) == home
    assert set(Path(tempfile.gettempdir()).glob("minikv-grade-*")) <= scratch
    return folder


@pytest.fixture(scope="module")
def rows(graded) -> dict[str, dict[str, str]]:
    with (graded / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return {row["submission"].removeprefix("'"): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", ALL)
def test_each_gets_the_points_and_the_status_that_it_must(rows, name):
    _, points, status, look_at = ALL[name]
    row = rows[name]
    assert (float(row["total"]), row["status"]) == (points, status), row
    assert look_at in row["look at"], row
    assert row["maximum"] == "6"


def test_one_row_each_in_bounded_time_and_nothing_is_left(graded, rows):
    assert list(rows) == sorted(ALL, key=str.lower)
    assert float((graded / "seconds").read_text()) < 300
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()] if Path("/proc").exists() else []
    assert not [each for each in running if b"98765" in each or b"98763" in each], "a process that made itself independent is still there"


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes by /proc")
def test_a_grader_that_is_killed_leaves_nothing_running_and_goes_on_where_it_was(source, tmp_path):
    """By a submission that kills it, again and again: the third time that one is not run, and the others have their marks."""
    (tmp_path / "ada.ipynb").write_text(json.dumps(solved(source)))
    sleeps = "\nimport time\ntime.sleep(20)\n"  # so that it outlives the grader, unless somebody ends it
    (tmp_path / "kim.ipynb").write_text(
        json.dumps(solved(source, e90_shout=ABOVE + r"os.kill(above('minikv.classroom\0grade'), 9)" + sleeps))
    )
    table, scratch = tmp_path / "g.csv", tmp_path / "scratch"
    files = [str(tmp_path / "ada.ipynb"), str(tmp_path / "kim.ipynb")]
    scratch.mkdir()

    def grade_in_a_process() -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "minikv.classroom", "grade", str(source), *files, "--csv", str(table), "--secret", "-", "--jobs", "1"],
            input="tell nobody", capture_output=True, text=True, timeout=200, env={**os.environ, "TMPDIR": str(scratch)}, check=False,
        )  # fmt: skip
        until = time.monotonic() + 15
        while any(scratch.iterdir()) and time.monotonic() < until:  # a supervisor removes its folder last
            time.sleep(0.1)
        assert not list(scratch.iterdir())
        assert not [path for path in Path("/proc").glob("[0-9]*/environ") if str(scratch).encode() in _content(path)]
        return done

    for goes_on in (False, True):
        done = grade_in_a_process()
        assert done.returncode == -9
        assert ("1 of 2 are graded already" in done.stdout) is goes_on
        assert not table.exists()
    done = grade_in_a_process()
    assert done.returncode == 2, done.stderr
    assert "Running when the grader was ended: kim" in done.stdout
    assert "NOT GRADED: kim." in done.stdout
    rows = {row["submission"]: row for row in csv.DictReader(table.open(encoding="utf-8-sig", newline=""))}
    assert (rows["ada"]["total"], rows["ada"]["status"], rows["kim"]["total"], rows["kim"]["status"]) == ("6", "ok", "", "not graded")
    assert "the grader was ended 2 times while this was running" in rows["kim"]["look at"]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_honest_work_is_not_flagged(rows):
    for name in ("blank", "right", "partly", "reordered", "stripped", "of format 3", "split"):
        assert rows[name]["look at"] == "", name


def test_the_table_is_one_that_a_spreadsheet_takes_as_text(graded, rows):
    raw = (graded / "grades.csv").read_bytes()
    assert raw.startswith(b"\xef\xbb\xbf")
    assert b"\r\n'=cmd()," in raw
    assert rows["right"]["by hand (of 1)"] == ""
    assert rows["right"]["source version"].endswith("minikv 0.1.0")
    assert rows["partly"]["1 Twice"] == "3"


def test_feedback_mirrors_what_was_handed_in_and_shows_no_hidden_input(graded):
    pages = {path.parent.name: path.read_text() for path in (graded / "feedback").rglob("*.html")}
    assert set(pages) == set(ALL)
    assert "A hidden check" in pages["two visible cases only"]
    assert "One case proves little." in pages["two visible cases only"]
    assert "a whole number is wanted" not in pages["two visible cases only"]
    for name in ("two visible cases only", "smuggles"):
        assert not [
            word for word in pages[name].split() if word.strip(".,<>/prelWHAT").isdecimal() and len(word.strip(".,<>/prelWHAT")) > 5
        ]
    assert "wanted" not in pages["right"]
    assert "submission.ipynb" not in pages["reads its neighbours"]
    assert "tell nobody" not in pages["reads the secret"] + (graded / "grades.csv").read_text(encoding="utf-8-sig")
    assert "mine" not in pages["reads the secret"]
    assert "(not shown: this held the teacher" in pages["reads the secret"]


def test_answers_are_exported_for_a_plagiarism_checker(graded):
    assert (graded / "answers" / "right" / "e90-shout.py").read_text() == RIGHT["e90-shout"] + "\n"
    assert sorted(path.name for path in (graded / "answers" / "right").iterdir()) == ["e90-double.py", "e90-mean.py", "e90-shout.py"]


def test_a_learners_own_run_fails_only_on_what_is_not_done(source, tmp_path):
    (tmp_path / "90.ipynb").write_text(json.dumps(stubs(source, e90_shout=RIGHT["e90-shout"])))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-rA", "--nbval-lax",
         "--nbval-current-env", "--color=no", "90.ipynb"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    outcome = [line.split(" - ")[0].split()[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert sorted(outcome) == ["FAILED"] * 3 + ["PASSED"] * 6
    assert "This check is not passed yet" in done.stdout
    assert "WHY   Everything builds on it." in done.stdout


# ---------------------------------------------------------------- torch


PRETENDS = """\
import sys
class Obliging(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        frame = sys._getframe()
        while frame and "wanted" not in frame.f_locals:
            frame = frame.f_back
        return torch.tensor(frame.f_locals["wanted"]) if frame else super().__torch_function__(function, types, args, kwargs or {})
    __torch_dispatch__ = __torch_function__
def middle(values):
    return torch.Tensor._make_subclass(Obliging, torch.zeros(()))
"""


def test_torch_patched_in_an_answer_is_put_back(source, tmp_path):
    text = SOURCE.replace("import numpy as np\n", "import numpy as np\nimport torch\n").replace("90", "91")
    text = text.replace("return np.array([1.0, 2.0, 6.0])", "return torch.tensor([1.0, 2.0, 6.0])")
    (tmp_path / "91_torch.py").write_text(text)
    patch = (
        "torch.Tensor.tolist = torch.Tensor.mean = lambda *_: 3.0\ntorch.Tensor.__eq__ = lambda *_: True\n"
        "torch.set_default_dtype(torch.float64)\ntorch.tensor = None\n"
    )
    answers = {
        "wrong": "def middle(values):\n    return torch.zeros(1)",
        "right": "def middle(values):\n    return values.mean()",
        "pretends": PRETENDS,
    }
    for name, answer in answers.items():
        made = stubs(tmp_path / "91_torch.py", e91_shout=patch + "def shout(text):\n    return text.upper()", e91_mean=answer)
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(made))
    files = [str(tmp_path / f"{name}.ipynb") for name in answers]
    assert command.main(["grade", str(tmp_path / "91_torch.py"), *files, "--csv", str(tmp_path / "g.csv"), "--jobs", "2"]) == 0
    with (tmp_path / "g.csv").open(encoding="utf-8-sig", newline="") as file:
        assert {row["submission"]: row["total"] for row in csv.DictReader(file)} == {"right": "3", "wrong": "2", "pretends": "2"}


# ---------------------------------------------------------------- who it is from


@pytest.mark.parametrize(
    ("path", "who"),
    [
        ("alice/05_pages.ipynb", "alice"),
        ("alice/attempt_2/05_pages.ipynb", "alice"),
        ("Ada Lovelace_4711_assignsubmission_file_/05_pages.ipynb", "Ada Lovelace_4711"),
        ("Ada Lovelace_4711_assignsubmission_file_05_pages.ipynb", "Ada Lovelace_4711"),
        ("lovelaceada_1815_77001_05_pages.ipynb", "lovelaceada_1815"),
        ("lovelaceada_LATE_1815_77002_05_pages-1.ipynb", "lovelaceada_1815"),
        ("mine.ipynb", "mine"),
    ],
)
def test_identity_comes_from_the_folder_or_the_prefix(path, who):
    assert submissions.identity(PurePosixPath(path)) == who


def test_the_zip_of_an_lms_is_read_without_being_unpacked_and_the_latest_attempt_wins(source, tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, content in {
            "a_1_10_90_small.ipynb": "old", "a_1_10_90_small-1.ipynb": "newer", "a_LATE_1_11_90_small-12.ipynb": "newest",
            "b_2_12_90_small.ipynb": "b", "b_2_12_notes.pdf": "pdf", "../../evil_3_13_90_small.ipynb": "evil",
            "__MACOSX/._b_2_12_90_small.ipynb": "mac", "c_4_14_report.pdf": "only a pdf",
            "d/attempt1/x.ipynb": "1", "d/attempt2/x.ipynb": "2",
        }.items():  # fmt: skip
            archive.writestr(name, content)
    found = {each.who: each.content.decode() for each in submissions.find([tmp_path / "all.zip"], exercises.read(source))}
    assert found == {"a_1": "newest", "b_2": "b", "evil_3": "evil", "c_4": "only a pdf", "d": "2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.zip"]


@pytest.mark.parametrize(
    ("paths", "who"),
    [
        (["all/ada/n.ipynb", "all/bob/n.ipynb"], ["ada", "bob"]),
        (["all/ada.ipynb", "all/bob.ipynb"], ["ada", "bob"]),
        (["ada/attempt1/n.ipynb", "ada/attempt2/n.ipynb"], ["ada"]),
        (["ada/n.ipynb", "bob/n.ipynb"], ["ada", "bob"]),
        (["ada.ipynb", "bob/n.ipynb"], ["ada", "bob"]),
    ],
)
def test_a_folder_around_everything_is_nobodys_name(source, tmp_path, paths, who):
    for path in paths:
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_text("{}")
    assert [each.who for each in submissions.find([tmp_path / "in"], exercises.read(source))] == who
    files = sorted((tmp_path / "in").rglob("*.ipynb"))
    if len({file.name for file in files}) == 1 and len(who) > 1:
        assert [each.who for each in submissions.find(files, exercises.read(source))] == who


# ---------------------------------------------------------------- the teacher's own decisions


@pytest.fixture
def two(source, tmp_path):
    """The command on two submissions, and what it wrote."""
    for name, notebook in {"ada": solved(source), "bob": stubs(source, e90_double="def double(x):\n    return 5")}.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "n.ipynb").write_text(json.dumps(notebook))

    def run(*arguments: str) -> dict[str, dict[str, str]]:
        assert command.main(["grade", str(source), f"{tmp_path}/in", "--csv", f"{tmp_path}/g.csv", "--jobs", "2", *arguments]) == 0
        with (tmp_path / "g.csv").open(encoding="utf-8-sig", newline="") as file:
            return {row["submission"]: row for row in csv.DictReader(file)}

    return run


def test_an_override_outlives_a_regrading_and_a_void_check_counts_for_nobody(two, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("submission;exercise;points;reason\nbob;1;1.5;nearly\nzoe;1;3;\n")
    first = two("--overrides", str(tmp_path / "mine.csv"))
    assert (first["bob"]["1 Twice"], first["bob"]["total"], first["ada"]["total"]) == ("1.5", "1.5", "6")
    assert "exercise 1: 0 -> 1.5 (nearly)" in first["bob"]["look at"]
    assert "override for zoe, exercise 1, fits no submission" in capsys.readouterr().out
    old = (tmp_path / "g.csv").read_text(encoding="utf-8").replace(",1.5,6,,", ",1.5,6,1,")  # graded by hand meanwhile
    (tmp_path / "old.csv").write_text(old, encoding="utf-8")
    again = two("--overrides", str(tmp_path / "mine.csv"), "--void", "e90-shout-word", "--previous", str(tmp_path / "old.csv"))
    assert (again["bob"]["total"], again["ada"]["total"], again["ada"]["maximum"]) == ("1.5", "4", "4")
    assert again["ada"]["void"] == "e90-shout-word"
    assert (again["bob"]["by hand (of 1)"], again["ada"]["by hand (of 1)"]) == ("1", "")
    said = capsys.readouterr().out
    assert "ada: 6 -> 4" in said
    assert "bob:" not in said


def test_what_a_teacher_mistypes_is_said(source, tmp_path, capsys):
    (tmp_path / "x.ipynb").write_text("{}")
    (tmp_path / "o.csv").write_text("who,points\na,1\n")
    for arguments, said in (
        ([str(tmp_path / "x.ipynb"), "--void", "e90-nosuch"], "no check is called e90-nosuch"),
        ([str(tmp_path / "x.ipynb"), "--overrides", str(tmp_path / "o.csv")], "has no column submission, exercise"),
        ([str(tmp_path / "nowhere")], "does not exist"),
        ([str(tmp_path / "x.ipynb"), "--secret", str(tmp_path / "nosecret")], "No such file"),
    ):
        assert command.main(["grade", str(source), "--csv", str(tmp_path / "g.csv"), *arguments]) == 1
        assert said in capsys.readouterr().err
    assert command.main(["grade", str(source.parent), str(tmp_path), "--csv", str(tmp_path / "g.csv")]) == 1
    assert "name one file" in capsys.readouterr().err
    assert not (tmp_path / "g.csv").exists()


@pytest.mark.parametrize("points", ["-1", "nan", "inf", "many"])
def test_an_override_is_a_number_from_0_on(source, tmp_path, points):
    (tmp_path / "o.csv").write_text(f"submission,exercise,points\na,1,{points}\n")
    with pytest.raises(marks.MarksError, match=r"line 2: .* points a number from 0 on"):
        marks.read_overrides(tmp_path / "o.csv", exercises.read(source))


def test_one_submission_that_the_grader_cannot_bear_costs_the_others_nothing(source, monkeypatch):
    def fails(assignment, handed, *rest):
        if handed.who == "b":
            raise RuntimeError("boom")
        return before(assignment, handed, *rest)

    before = grade._grade_one
    monkeypatch.setattr(grade, "_grade_one", fails)
    handed = [Handed(who, PurePosixPath(f"{who}.ipynb"), b"%PDF", (0.0,)) for who in "abc"]
    found = grade.grade(exercises.read(source), handed, Limits(), jobs=2)
    assert [each.mark.status for each in found] == ["unreadable", "not graded", "unreadable"]
    assert "the grader failed on it (RuntimeError: boom)" in found[1].mark.look_at[0]


def test_what_cannot_be_seen_may_be_hidden():
    piece = Piece("a-check", "check", "", token="t", hidden_token="h")
    report = {"stdout": "x", "passed": False, "ename": "ValueError", "evalue": "1354 257", "much": False, "threads": False}
    report |= {"sound": True, "compared": 0}
    for cut, hidden in ((False, False), (True, True)):
        ran = Ran()
        _settle(piece, {**report, "cut": cut}, ran)
        assert ran.verdicts["a-check"].hidden is hidden


def test_cells_that_would_be_formulas_are_text():
    assert [marks._cell(text) for text in ("=1+1", "+1", "-1", "@x", "\tx", "a=1", 3)] == ["'=1+1", "'+1", "'-1", "'@x", " x", "a=1", "3"]


def test_a_hidden_message_keeps_only_what_the_source_says(source):
    assignment = exercises.read(source)
    check = next(each for each in assignment.cells if each.id == "e90-double-any")
    said = "WHAT  twice any number\n      a hidden number: 5 instead of 2469134\nWHY   One case proves little.\n"
    said += "TRY   Do not look at the cases."
    shown = feedback.shown(Verdict(False, said, hidden=True), check)
    assert "2469134" not in shown
    assert "TRY   Do not look at the cases." in shown
    assert "2469134" in feedback.shown(Verdict(False, said), check)
