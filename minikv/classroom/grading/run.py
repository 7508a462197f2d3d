"""One submission run to its end: in a process group of its own, again and again without the answers that break it.

``_run_once`` starts pytest with nbval under ``supervise.py`` and reads what its plugin reports. A cell that overruns its time
or ends the kernel is taken out, together with the answers that it checks, and what is not yet decided is run again: one
broken answer costs no other exercise its points.

What stops before any code of the learner's has begun is nobody's answer's fault: it is tried again, and in the end the
submission is said not to have been graded. So is a kernel tried once more that was killed from outside, as systems do that run
out of memory.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import minikv
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import supervise
from minikv.classroom.grading.plugin import signed
from minikv.classroom.grading.rebuild import Piece, as_notebook, pieces
from minikv.classroom.grading.submissions import Work

STARTUP_S = 60.0
START_TRIES = 4
"""How often a run is begun that stops before any code of the learner's, before the submission counts as not graded."""
STOP = threading.Event()
"""Set when the teacher has interrupted the grader: every submission that is running ends at once."""
REPORT_OF_AN_END = {"passed", "stdout", "cut", "ename", "evalue", "much", "compared", "sound", "threads"}
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TZ")
"""What a submission sees of the teacher's environment: no secrets, no proxies."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use."""

    cell_s: float = 30.0
    wall_s: float = 300.0
    file_bytes: int = 50_000_000
    memory_bytes: int = 8 * 2**30


@dataclass(frozen=True)
class Verdict:
    """Of one check."""

    passed: bool
    message: str = ""
    hidden: bool = False  # it failed in its hidden part


@dataclass
class Ran:
    """What running a submission has shown."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # answers that raised
    taken_out: dict[str, str] = field(default_factory=dict)  # answers and added cells, and why
    forged: list[str] = field(default_factory=list)
    tampered: list[str] = field(default_factory=list)  # what somebody did to the grader's own processes and functions
    notes: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)  # how many comparisons held in each check
    not_graded: str = ""  # why not, when that is the grader's or the machine's fault


@dataclass(frozen=True)
class Stop:
    """Why a run has ended before its last cell, and in which. ``killed``: by a signal that comes from outside, as a rule."""

    at: int | None
    why: str
    killed: bool = False


def run(assignment: Assignment, work: Work, limits: Limits, secret: bytes = b"") -> Ran:
    """Run all checks of ``assignment`` on ``work``."""
    ran, until = Ran(), time.monotonic() + limits.wall_s
    starts, tried_again = 0, set[str]()
    while True:
        made = pieces(assignment, work, secret, set(ran.taken_out), set(ran.verdicts))
        if not any(piece.kind == "check" for piece in made):
            return ran
        if STOP.is_set() or time.monotonic() > until:
            ran.notes.append(f"its {limits.wall_s:g} s were up")
            return ran
        began = time.monotonic()
        stop = _run_once(made, limits, until, ran)
        if stop is None or STOP.is_set():
            return ran
        if not _learners_code_ran(made, stop):
            starts, until = starts + 1, until + time.monotonic() - began  # the time was not the learner's
            if starts == START_TRIES:
                ran.not_graded = f"{starts} times the run stopped before any answer was run, the last time since {stop.why}"
                return ran
        elif stop.killed and stop.at is not None and made[stop.at].name not in tried_again:
            tried_again.add(made[stop.at].name)  # may be the machine's lack of memory; if it is the answer, it does so again
        elif not _take_out(made, stop.at, stop.why, work, ran):
            ran.notes.append(stop.why)
            return ran


def _learners_code_ran(made: list[Piece], stop: Stop) -> bool:
    return stop.at is not None and any(piece.theirs for piece in made[: stop.at + 1])


def _take_out(made: list[Piece], at: int | None, why: str, work: Work, ran: Ran) -> bool:
    """Take out what stopped the run; False when there is nothing left to take out."""
    if at is None:
        return False
    piece = made[at]
    if piece.kind == "check":
        ran.verdicts[piece.name] = Verdict(False, f"The check {why}.")
    blamed = [piece.name] if piece.kind in ("answer", "added") else []
    if piece.kind == "check":
        blamed = [each.name for each in made if each.kind == "answer" and each.exercise == piece.exercise and work.answers.get(each.name)]
    new = [name for name in blamed if name not in ran.taken_out]
    if not new:  # it is none of the suspects: then all that is the learner's and has not been taken out
        new = [each.name for each in made if each.kind in ("added", "answer") and each.name not in ran.taken_out]
        new = [name for name in new if "+" in name or work.answers.get(name)]
    ran.taken_out.update((name, why) for name in new)
    return bool(new)


# ---------------------------------------------------------------- one process


def _run_once(made: list[Piece], limits: Limits, until: float, ran: Ran) -> Stop | None:
    """Run the cells; where it was stopped and why, or None when all were run."""
    folder = Path(tempfile.mkdtemp(prefix="minikv-grade-"))
    try:
        (folder / "work").mkdir()
        (folder / "work" / "submission.ipynb").write_text(_json(as_notebook(made)), encoding="utf-8")
        with _Process(folder, limits, until) as process:
            stop = _follow(process, made, limits, until, ran)
        if process.supervisor_lost and not STOP.is_set():
            ran.tampered.append("the process that supervises the submission was stopped from within")
        return replace(stop, killed=True) if stop and process.ended_by_kill else stop
    finally:
        _remove(folder)


def _json(notebook: Any) -> str:
    import nbformat

    return nbformat.writes(notebook)


def _follow(process: _Process, made: list[Piece], limits: Limits, until: float, ran: Ran) -> Stop | None:
    current: int | None = None
    deadline = time.monotonic() + STARTUP_S
    while True:
        report = process.next_report(min(deadline, until))
        if report is None and time.monotonic() >= until:
            return Stop(current, f"was running when the submission's {limits.wall_s:g} s were up")
        if report is None:
            return Stop(current, f"did not end within {limits.cell_s:g} s" if current is not None else "the kernel did not start")
        if "forged" in report:
            ran.tampered.append("something else wrote into what the run reports")
        if report.get("closed") or not _about(report, len(made)):
            return Stop(current, "ended the run")
        if "start" in report:
            current = report["start"]
            deadline = time.monotonic() + (max(limits.cell_s, STARTUP_S) if made[current].kind == "given" else limits.cell_s)
        elif "end" in report:
            ended = report["end"]
            _settle(made[ended], report, ran)
            if made[ended].kind == "given" and not report["passed"] and not any(piece.theirs for piece in made[:ended]):
                return Stop(ended, f"{made[ended].name}, a supplied cell, raised {report['ename']}: {report['evalue'][:200]}")
            if ended == len(made) - 1:
                return None
        elif "gone" in report:
            why = "printed without end" if report["why"] == "TooMuchOutput" else "ended the kernel"
            return Stop(report["gone"], why, bool(report.get("killed")))


def _settle(piece: Piece, report: dict[str, Any], ran: Ran) -> None:
    """What the report of a cell's end says of it."""
    if report["much"]:
        ran.notes.append(f"{piece.name} printed much")
    if report["threads"] and piece.theirs:
        ran.notes.append(f"{piece.name} leaves a thread running")
    if piece.kind == "answer" and (report["ename"] or not report["passed"]):
        ran.broken[piece.name] = f"{report['ename'] or 'an error that was not shown'}: {report['evalue']}"[:500]
    if piece.kind != "check":
        return
    lines = [line for line in report["stdout"].splitlines() if line.strip()]
    printed = report["stdout"].count(piece.token)
    ran.compared[piece.name] = report["compared"] if type(report["compared"]) is int else 0
    passed = report["passed"] and printed == 1 and lines[-1] == piece.token and report["sound"] is True
    if report["sound"] is not True:
        ran.tampered.append(f"{piece.name}: what the checks rely on was changed")
    elif printed and not passed:
        ran.forged.append(piece.name)
    hidden = report["cut"] or piece.hidden_token in report["stdout"]  # what cannot be seen may be hidden
    message = "" if passed else report["evalue"] if report["ename"] == "CheckFailed" else _foreign(report)
    ran.verdicts[piece.name] = Verdict(passed, message, hidden and not passed)


def _foreign(report: dict[str, Any]) -> str:
    if not report["ename"]:
        return "The check did not run to its end."
    return f"The check was ended by {report['ename']}: {report['evalue'][:500]}"


class _Process:
    """pytest and nbval under supervision, in ``folder``; leaving the block ends them, whatever they do."""

    def __init__(self, folder: Path, limits: Limits, until: float) -> None:
        self.folder, self.mark, self.key = folder, secrets.token_hex(16), secrets.token_bytes(32)
        self.reports, write = os.pipe()
        read_key, write_key = os.pipe()
        self.buffer, self.pending, self.number = b"", list[dict[str, Any]](), 0
        self.supervisor_lost = self.ended_by_kill = False
        wall_s = max(1.0, until - time.monotonic()) + 5
        supervisor = [sys.executable, "-S", "-E", supervise.__file__, wall_s, limits.file_bytes, limits.memory_bytes, folder, "--"]
        pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--noconftest", "-q", "--tb=no", "--color=no"]
        plugins = ["-p", "no:cacheprovider", "-p", "minikv.classroom.grading.plugin", "-p", "nbval.plugin"]
        nbval = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=1000000", "submission.ipynb"]
        ours = ["--minikv-report-fd", write, "--minikv-key-fd", read_key]
        environment = _environment(folder) | {supervise.MARK: self.mark, "MINIKV_PASS_FDS": f"{write},{read_key}"}
        self.process = subprocess.Popen(
            list(map(str, [*supervisor, *pytest, *plugins, *ours, *nbval])), cwd=folder / "work", env=environment,
            pass_fds=[write, read_key], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.write(write_key, self.key)
        for each in (write, read_key, write_key):
            os.close(each)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()  # the supervisor reads it as: end everything
        try:
            self.process.wait(20)
            self.supervisor_lost = self.process.returncode < 0  # ended by a signal, whoever sent it
        except subprocess.TimeoutExpired:  # stopped by whomever, or on a machine that is far too busy: nobody is blamed
            self.process.kill()
            self.process.wait()
        self.ended_by_kill = self.process.returncode == 256 - signal.SIGKILL  # pytest was, and the supervisor passes it on
        supervise.kill(lambda: [*supervise.strays(self.mark, str(self.folder)), *supervise.orphans()])
        os.close(self.reports)

    def next_report(self, until: float) -> dict[str, Any] | None:
        """The next report, {"closed": True} after the last one, None when the time is up."""
        while not self.pending:
            patience = until - time.monotonic()
            if patience <= 0 or STOP.is_set():
                return None
            if not select.select([self.reports], [], [], min(patience, 0.5))[0]:
                continue
            data = os.read(self.reports, 65536)
            if not data:
                return {"closed": True}
            *lines, self.buffer = (self.buffer + data).split(b"\n")
            self.pending += map(self._parsed, lines)
        return self.pending.pop(0)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        """The report in ``line``. One that our plugin has not signed, in its turn, ends the run."""
        signature, _, body = line.partition(b" ")
        if not hmac.compare_digest(signature, signed(self.key, self.number, body)):
            return {"closed": True, "forged": True}
        self.number += 1
        return dict(json.loads(body))


def _about(report: dict[str, Any], cells: int) -> bool:
    """True when the report is about one of our ``cells`` and tells all that a report of its kind tells."""
    places = [report[kind] for kind in ("start", "end", "gone") if kind in report]
    told = report.keys() >= REPORT_OF_AN_END if "end" in report else "why" in report or "gone" not in report
    return told and all(type(place) is int and 0 <= place < cells for place in places)


def _environment(folder: Path) -> dict[str, str]:
    """A scratch home in ``folder``, and nothing of the teacher's own settings."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    for name, below in (("HOME", "home"), ("TMPDIR", "tmp"), ("IPYTHONDIR", "home/ipython"), ("MPLCONFIGDIR", "home/mpl")):
        (folder / below).mkdir(parents=True, exist_ok=True)
        environment[name] = str(folder / below)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        environment[name] = str(folder / "home" / name.lower())
    package = Path(minikv.__file__).parent.parent
    return environment | {
        "PYTHONPATH": str(package),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "MPLBACKEND": "agg",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUTF8": "1",
    }


def _remove(folder: Path) -> None:
    """Also what a submission has made unreadable; the supervisor has removed the rest already."""

    def again(function: Any, path: str, _: Any) -> None:
        os.chmod(Path(path).parent, 0o700)
        os.chmod(path, 0o700)
        function(path)

    try:
        if folder.exists():
            shutil.rmtree(folder, onerror=again)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
