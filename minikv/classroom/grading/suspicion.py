"""What a person should look at: code that computes an answer rarely needs to know about frames, hooks or other files.

Each flag is a sentence and never a zero: there are honest reasons for every one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from minikv.classroom.exercises import Assignment, names_bound, names_used
from minikv.classroom.grading.submissions import Work

PATTERNS = {
    "reads other people's frames or code": r"_getframe|currentframe|inspect\.stack|f_back|f_code|co_consts|__(code|globals|closure)__",
    "walks through all objects": r"__subclasses__|get_objects|get_referrers",
    "touches the machinery of the checks": r"minikv\.classroom|MinikvGuard|\b(hidden_random|oracle|CheckFailed|lock_minikv|use_seed)\b",
    "loads modules by a back door": r"sys\.modules|import_module|importlib|__import__",
    "touches the notebook's own hooks": r"get_ipython|showtraceback|custom_exc|(input|ast)_transformer|settrace|setprofile|excepthook",
    "patches what is not its own": r"\bbuiltins\b|__builtins__|\bglobals\s*\(|setattr\s*\(|\b(np|numpy|torch|math|random)(\.\w+)+\s*=[^=]",
    "answers for every comparison": r"def __eq__\s*\([^)]*\):\s*\n?\s*return True|__eq__.{0,120}True",
    "ends or signals processes": r"os\._exit|os\.kill|signal\.|sys\.exit|\bexit\s*\(|\bquit\s*\(",
    "starts processes or threads": r"subprocess|os\.system|os\.popen|os\.fork|multiprocessing|threading|ctypes",
    "reads or writes files": r"\bopen\s*\(|read_text|write_text|read_bytes|write_bytes|\bglob\b|listdir|scandir|os\.walk|/proc/|\.\./",
    "uses the network": r"\bsocket\b|urllib|import requests|requests\.(get|post|put)\(|http\.client",
    "waits for input": r"\binput\s*\(",
    "is executed from text": r"\b(exec|eval)\s*\(",
}  # fmt: skip
_COMPILED = {said: re.compile(pattern) for said, pattern in PATTERNS.items()}


def flags(work: Work, assignment: Assignment) -> list[str]:
    """What to look at in the learner's code, each with the cell that it stands in."""
    supplied = " ".join(cell.stub for cell in assignment.cells if cell.learners)
    found = []
    for name, code in [*((name, "\n".join(parts)) for name, parts in work.answers.items()), *work.added]:
        label = name if name in work.answers else f"a cell added after {name}"
        found += [f"{label} {said}" for said, pattern in _COMPILED.items() if pattern.search(code) and not pattern.search(supplied)]
        found += [f"{label} imports {each}, which is not given" for each in _not_given(code, assignment)]
    for name, parts in work.answers.items():
        borrowed = set().union(*map(names_used, parts)) & only_in_checks(assignment)
        borrowed -= set().union(*map(names_bound, parts), *(names_bound(code) for _, code in work.added))
        found += [f"{name} uses {', '.join(sorted(borrowed))}, which only the checks define"] if borrowed else []
    return found


def only_in_checks(assignment: Assignment) -> set[str]:
    """The names that check cells bind and nothing else does."""

    def bound(*roles: str) -> set[str]:
        return set().union(*(names_bound(cell.whole) for cell in assignment.of(*roles)))

    return bound("check") - bound("given", "answer", "manual")


def _not_given(code: str, assignment: Assignment) -> list[str]:
    given = {
        name for cell in assignment.cells if cell.role != "check" for name in _minikv_imports(cell.stub if cell.kind == "code" else "")
    }
    return [name for name in _minikv_imports(code) if name not in given]


def _minikv_imports(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "minikv")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minikv":
            yield from (f"{node.module}.{each.name}" for each in node.names)
