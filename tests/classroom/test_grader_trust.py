"""What the grader believes: nothing of the machine's fault costs points, reports are signed, and code that goes round the checks is named.

Without a kernel. What hostile notebooks get when they are really run stands in ``test_grade.py``.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import sys
from pathlib import Path, PurePosixPath

import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises, grade
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import discretion, plugin, run, supervise, suspicion
from minikv.classroom.grading.journal import Journal
from minikv.classroom.grading.marks import Mark, Override
from minikv.classroom.grading.rebuild import pieces
from minikv.classroom.grading.run import START_TRIES, Limits, Ran, Stop, Verdict
from minikv.classroom.grading.submissions import Handed, Work

SOURCE = '''\
# %% [markdown] id="title"
# # Exercises 92. One

# %% id="e92-setup" role="given"
from minikv.classroom.checks import check, expect, lock_minikv

lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *2 points, 5 minutes, easy*

# %% id="e92-double" role="answer"
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION: twice x
    return 2 * x
    ### END SOLUTION

# %% id="e92-double-two" role="check" points=2
with check("twice two", why="Everything builds on it.", hint="Add it to itself."):
    expect(double(2), 4)
'''
RIGHT = "def double(x):\n    return x + x"
SETUP, ANSWER, CHECK = 0, 1, 2


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "exercises" / "source").mkdir(parents=True)
    (tmp_path / "exercises" / "source" / "92_one.py").write_text(SOURCE)
    return tmp_path / "exercises" / "source" / "92_one.py"


@pytest.fixture
def assignment(source) -> Assignment:
    return exercises.read(source)


def work(code: str = RIGHT) -> Work:
    return Work(answers={"e92-double": [code]})


@pytest.fixture
def runs(monkeypatch):
    """Instead of running anything: a list of what each run shall end with (None: all passed); what is over is left in it."""
    script: list[Stop | None] = []

    def once(made, limits, until, ran):
        stop = script.pop(0)
        if stop is None:
            ran.verdicts.update({piece.name: Verdict(True) for piece in made if piece.kind == "check"})
        return stop

    monkeypatch.setattr(run, "_run_once", once)
    return script


# ---------------------------------------------------------------- the machine's fault


NOT_THEIR_FAULT = [
    Stop(None, "the kernel did not start"),
    Stop(None, "ended the run"),
    Stop(SETUP, "ended the kernel", killed=True),
    Stop(SETUP, "did not end within 30 s"),
]


@pytest.mark.parametrize("stop", NOT_THEIR_FAULT, ids=str)
def test_what_stops_before_any_answer_is_tried_again(assignment, runs, stop):
    runs += [stop] * (START_TRIES - 1) + [None]
    ran = run.run(assignment, work(), Limits())
    assert (runs, ran.taken_out, ran.not_graded, ran.verdicts) == ([], {}, "", {"e92-double-two": Verdict(True)})


@pytest.mark.parametrize("stop", NOT_THEIR_FAULT, ids=str)
def test_what_never_starts_is_not_graded_and_says_so(assignment, runs, stop):
    runs += [stop] * START_TRIES
    ran = run.run(assignment, work(), Limits())
    assert (runs, ran.taken_out) == ([], {})
    assert "4 times the run stopped before any answer was run" in ran.not_graded


def test_time_lost_before_any_answer_is_not_the_learners(assignment, monkeypatch):
    now = [0.0]
    stops = [NOT_THEIR_FAULT[0], None]

    def once(made, limits, until, ran):
        now[0] += 50
        assert until == (60 if len(stops) == 2 else 110)
        return stops.pop(0)

    monkeypatch.setattr(run, "_run_once", once)
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    assert run.run(assignment, work(), Limits(wall_s=60)).notes == []


def test_a_kernel_killed_from_outside_gets_a_second_chance_and_no_third(assignment, runs):
    killed = Stop(ANSWER, "ended the kernel", killed=True)
    runs += [killed, None]
    assert run.run(assignment, work(), Limits()).taken_out == {}
    runs += [killed, killed, None]
    ran = run.run(assignment, work(), Limits())
    assert (runs, ran.taken_out) == ([], {"e92-double": "ended the kernel"})
    runs += [Stop(ANSWER, "ended the kernel"), None]  # by itself: taken out at once
    assert run.run(assignment, work(), Limits()).taken_out == {"e92-double": "ended the kernel"}


def test_when_nothing_of_the_learners_is_left_a_stop_is_not_graded(assignment, runs):
    runs += [Stop(CHECK, "ended the run")] * START_TRIES
    assert run.run(assignment, Work(), Limits()).not_graded
    stub = next(cell.stub for cell in assignment.cells if cell.id == "e92-double")
    runs += [Stop(CHECK, "ended the run")] * START_TRIES
    assert run.run(assignment, work(stub), Limits()).not_graded


class Reports:
    """A process that tells what it is told to tell."""

    def __init__(self, *reports: dict) -> None:
        self.reports = list(reports)

    def next_report(self, until: float) -> dict:
        return self.reports.pop(0)


def end(place: int, **other: object) -> dict:
    told = {"passed": True, "stdout": "", "cut": False, "ename": "", "evalue": "", "much": False}
    return {"end": place, **told, "compared": 1, "sound": True, "threads": False, **other}


def test_a_supplied_cell_that_fails_before_any_answer_stops_the_run(assignment):
    made = pieces(assignment, work(), b"", set(), set())
    failed = end(SETUP, passed=False, ename="MemoryError", evalue="no room")
    stop = run._follow(Reports({"start": SETUP}, failed), made, Limits(), run.time.monotonic() + 60, Ran())
    assert (stop.at, stop.why) == (SETUP, "e92-setup, a supplied cell, raised MemoryError: no room")
    later = [end(ANSWER), end(CHECK, passed=False)]
    assert run._follow(Reports(end(SETUP), *later), made, Limits(), run.time.monotonic() + 60, Ran()) is None


def test_a_submission_that_was_not_graded_has_no_points_in_the_table_and_is_named(source, tmp_path, monkeypatch, capsys):
    for who in ("ada", "bob"):
        (tmp_path / "in" / who).mkdir(parents=True)
        (tmp_path / "in" / who / "n.ipynb").write_text(json.dumps(exercises.notebook(exercises.read(source), solved=True)))
    asked: list[str] = []

    def ran(assignment, work, limits, secret):
        asked.append("x")
        fails = len(asked) == 2  # the solution is first, then ada
        return Ran(not_graded="4 times no kernel") if fails else Ran(verdicts={"e92-double-two": Verdict(True)})

    monkeypatch.setattr(grade, "run", ran)
    arguments = ["grade", str(source), f"{tmp_path}/in", "--csv", f"{tmp_path}/g.csv", "--jobs", "1"]
    assert command.main(arguments) == 2
    assert "(1 ok, 1 not graded)" in (said := capsys.readouterr().out)
    assert "NOT GRADED: ada. The same command tries them again, and only them." in said
    assert {row["submission"]: (row["total"], row["1 Twice"], row["status"]) for row in rows(tmp_path / "g.csv")} == {
        "ada": ("", "", "not graded"),
        "bob": ("2", "2", "ok"),
    }
    assert command.main(arguments) == 0
    assert len(asked) == 4, "the solution and bob are not run again"
    assert [row["total"] for row in rows(tmp_path / "g.csv")] == ["2", "2"]
    assert not (tmp_path / "g.csv.partial").exists()


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_nobody_is_graded_where_the_solution_does_not_pass(source, tmp_path, monkeypatch, capsys):
    (tmp_path / "n.ipynb").write_text("{}")
    monkeypatch.setattr(grade, "run", lambda *_: Ran(verdicts={"e92-double-two": Verdict(False, "WHAT  no torch here")}))
    assert command.main(["grade", str(source), f"{tmp_path}/n.ipynb", "--csv", f"{tmp_path}/g.csv"]) == 1
    assert "the solution itself does not get all its points on this machine" in (said := capsys.readouterr().err)
    assert "e92-double-two: WHAT  no torch here" in said
    assert not (tmp_path / "g.csv").exists()


def test_kernels_use_no_ports_that_two_of_them_could_choose(monkeypatch):
    import nbval.kernel

    monkeypatch.setattr(nbval.kernel, "KernelManager", nbval.kernel.KernelManager)
    plugin._use_local_sockets()
    assert nbval.kernel.KernelManager(kernel_name="python3").transport == "ipc"


# ---------------------------------------------------------------- reports, and who may write them


def test_a_report_counts_once_in_its_turn_and_only_with_the_key():
    process = object.__new__(run._Process)
    process.key, process.number = b"k", 0

    def line(number: int, body: bytes, key: bytes = b"k") -> bytes:
        return plugin.signed(key, number, body) + b" " + body

    first, second = line(0, b'{"start": 0}'), line(1, b'{"end": 0}')
    assert process._parsed(first) == {"start": 0}
    for forged in (first, b'{"end": 0}', b"", line(1, b'{"end": 0}', b"other"), line(2, b'{"end": 0}')):
        assert process._parsed(forged) == {"closed": True, "forged": True}
    assert process._parsed(second) == {"end": 0}


def test_a_mark_in_the_journal_needs_the_secret_and_the_same_arguments(tmp_path):
    handed = Handed("ada", PurePosixPath("ada.ipynb"), b"{}", (0.0,))
    mark = Mark("ada", "ada.ipynb", "ok", {1: 2.0}, {1: 2}, {1: Override(1.5, "late")}, verdicts={"e92-double-two": Verdict(True)})
    Journal(tmp_path / "g.csv", b"secret", "same").finish(handed, mark)
    assert Journal(tmp_path / "g.csv", b"secret", "same").mark(handed) == mark
    for secret, same in ((b"guess", "same"), (b"secret", "another source")):
        other = Journal(tmp_path / "g.csv", secret, same)
        assert (other.mark(handed), other.refused) == (None, 1)
    again = Handed("ada", PurePosixPath("ada.ipynb"), b'{"cells": []}', (1.0,))
    assert Journal(tmp_path / "g.csv", b"secret", "same").mark(again) is None, "a new attempt is another submission"
    assert (tmp_path / "g.csv.partial").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_grader_closes_itself_to_other_processes_and_opens_again():
    dumpable, subreaper = 3, 37
    libc, found = ctypes.CDLL(None), ctypes.c_int()
    with supervise.hardened():
        assert libc.prctl(dumpable, 0, 0, 0, 0) == 0
        assert libc.prctl(subreaper, ctypes.byref(found), 0, 0, 0) == 0
        assert found.value == 1
    assert libc.prctl(dumpable, 0, 0, 0, 0) == 1
    assert libc.prctl(subreaper, ctypes.byref(found), 0, 0, 0) == 0
    assert found.value == 0
    assert supervise.orphans() == []
    assert os.getpid() not in supervise.strays("no such mark", "/no/such/folder")


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("form", ["tell nobody", "ydobon llet", "74656c6c206e6f626f6479"])
def test_no_message_holds_the_secret(assignment, form):
    ran = Ran(verdicts={"e92-double-two": Verdict(False, f"WHAT  twice two\n      'x{form}x' instead of 4")}, broken={"e92-double": form})
    discretion.withhold(ran, work(), assignment, b"tell nobody")
    assert form not in repr((ran.verdicts, ran.broken))
    assert len(ran.tampered) == 2


def test_of_suspicious_code_only_the_kind_of_an_exception_is_shown(assignment):
    said = "WHAT  twice two\n      the code raised ValueError: 'from elsewhere'\nWHY   Everything builds on it.\nTRY   Add it to itself."
    for code, shown in ((RIGHT, True), (RIGHT + "\nopen('x')", False)):
        ran = Ran(verdicts={"e92-double-two": Verdict(False, said)}, broken={"e92-double": "KeyError: elsewhere"})
        discretion.withhold(ran, work(code), assignment, b"tell nobody")
        message = ran.verdicts["e92-double-two"].message
        assert ("elsewhere" in message, "elsewhere" in ran.broken["e92-double"]) == (shown, shown)
        assert "Everything builds on it." in message
        assert ran.broken["e92-double"].startswith("KeyError")


# ---------------------------------------------------------------- what is named

GOES_ROUND = {
    "a dunder taken apart": 'getattr(object, "__sub" + "classes__")()',
    "a dunder joined": '"".join(["__subcl", "asses__"])',
    "a dunder backwards": 'getattr(object, "__sessalcbus__"[::-1])',
    "a dunder of characters": 'name = f"{chr(95)}{chr(95)}subclasses__"',
    "a dunder replaced": '"__XXclasses__".replace("XX", "sub")',
    "a dunder from hex": 'bytes.fromhex("5f5f737562636c61737365735f5f").decode()',
    "a name that is not written out": "def double(x, name):\n    return getattr(x, name)",
    "attrgetter": "import operator\noperator.attrgetter(name)(x)",
    "vars": 'vars(object)["a"]',
    "threads below threading": "import _thread",
    "all frames": "import sys\nsys._current_frames()",
    "a frame by an exception": "try:\n    1 / 0\nexcept Exception as wrong:\n    wrong.__traceback__.tb_frame",
    "a frame by a generator": "(x for x in ()).gi_frame.f_back",
    "locals of a frame": "frame.f_locals",
    "the collector": "from gc import get_objects",
    "the collector by another name": "import gc as x\nx.get_objects()",
    "a class that answers torch": "class A:\n    def __torch_dispatch__(self): pass",
    "a class that answers torch's functions": "class A:\n    __torch_function__ = None",
    "a tensor of one's own": "class A(torch.Tensor): pass",
    "a number of one's own": "class A(float): pass",
    "torch's registry": "torch.library.Library('aten', 'IMPL')",
    "torch's inside": "torch._C",
    "a mode": "from torch.overrides import TorchFunctionMode",
    "ctypes": "from ctypes import pythonapi",
    "a tracer": "import sys\nsys.settrace(None)",
    "a finalizer": "class A:\n    def __del__(self): pass",
    "bases": "().__class__.__base__",
    "code from text": "exec('x = 1')",
    "a shell": "!cat /etc/passwd",
    "at exit": "import atexit",
}


@pytest.mark.parametrize("code", GOES_ROUND.values(), ids=GOES_ROUND)
def test_code_that_goes_round_the_checks_is_named(assignment, code):
    assert suspicion.suspicious(work(f"{RIGHT}\n{code}"), assignment)
    assert suspicion.flags(work(f"{RIGHT}\n{code}"), assignment)


HONEST = {
    "a docstring": 'def double(x):\n    """Not by __subclasses__-like tricks of others."""\n    return 2 * x  # no __mro__',
    "a class": "class A:\n    __slots__ = ('x',)\n    def __init__(self, x):\n        super().__init__()\n        self._x = x\n"
    "    def __eq__(self, other):\n        return self._x == other._x\n    def __repr__(self):\n        return f'{type(self).__name__}'",
    "a dataclass": "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass A:\n    x: int = 0",
    "a plain getattr": "def double(x):\n    return getattr(x, 'shape', None)",
    "collections": "from collections import Counter, OrderedDict, deque\nimport gc\ngc.collect()",
    "text that looks odd": "print('=' * 40 + f'{3:>5}', 'a' + 'b', '%d of %d' % (1, 2))",
    "an exception": "class Full(Exception):\n    pass\ntry:\n    raise Full('no room')\nexcept Full as full:\n    print(full.args)",
    "torch": "import torch\nx = torch.zeros(3)[None].view(-1)\nwith torch.no_grad():\n    x[:] = 1\nprint(torch.__version__)",
    "main": "if __name__ == '__main__':\n    print(1)",
}


@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST)
def test_honest_code_is_not_named(assignment, code):
    assert suspicion.flags(work(f"{RIGHT}\n{code}"), assignment) == []


@pytest.mark.parametrize(
    "code", ["x = 'a' * 10**9", "x = '%999999999d' % 1", "x = " + "(" * 150 + "1" + ")" * 150, "x = " + "-" * 5000 + "1"]
)
def test_code_that_is_hard_to_read_is_read_in_no_time(assignment, code):
    started = run.time.monotonic()
    suspicion.flags(work(code), assignment)
    assert run.time.monotonic() - started < 5
