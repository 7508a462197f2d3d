"""What a person should look at: code that computes an answer rarely needs to know about frames, hooks or other files.

Each flag is a sentence and never a zero: there are honest reasons for every one of them. Patterns are looked for in the code as Python
reads it: without comments and docstrings, and with text put together that was taken apart ("__sub" + "classes__").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from minikv.classroom.exercises import Assignment, names_bound, names_used
from minikv.classroom.grading.submissions import Work

FRAMES = (
    r"_getframe|_current_frames|currentframe|inspect\.|\b(f|tb|gi|cr|ag)_(back|frame|code|locals|globals|lineno|next|trace)\b|co_consts"
    r"|__traceback__|__(code|globals|closure)__|cell_contents|\btraceback\b|extract_stack|extract_tb"
)
PATTERNS = {
    "reads other people's frames or code": FRAMES,
    "walks through all objects":
        r"__subclasses__|get_objects|get_refer(rers|ents)|\bfrom gc\b|\bgc as\b|\bgc\.(?!collect\b)|__mro__|\.mro\(",
    "touches the machinery of the checks": r"minikv\.classroom|MinikvGuard|\b(hidden_random|oracle|CheckFailed|lock_minikv|use_seed)\b",
    "loads modules by a back door": r"sys\.modules|import_module|importlib|__import__|__loader__|__spec__|\brunpy\b|\bpkgutil\b",
    "touches the notebook's own hooks":
        r"get_ipython|\bIPython\b|ipykernel|showtraceback|custom_exc|(input|ast)_transformer|settrace|setprofile|excepthook|sys\.monitoring",
    "patches what is not its own":
        r"\bbuiltins\b|__builtins__|\bglobals\s*\(|setattr\s*\(|\b(np|numpy|torch|math|random)(\.\w+)+\s*=[^=]|unittest|\bmock\b",
    "answers for every comparison": r"def __eq__\s*\([^)]*\):\s*\n?\s*return True|__eq__.{0,120}True",
    "answers torch's or numpy's questions itself":
        r"__torch_(dispatch|function)__|__array\w*__|_python_dispatch|torch\.(overrides|library|_C|_dynamo)|(Dispatch|Function)Mode\b",
    "ends or signals processes": r"os\._exit|os\.kill|signal\.|sys\.exit|\bexit\s*\(|\bquit\s*\(|\batexit\b",
    "starts processes or threads":
        r"subprocess|os\.(system|popen|fork|spawn|exec|posix_spawn)|multiprocessing|threading|_thread|ctypes|\bcffi\b"
        r"|concurrent\.futures|\basyncio\b",
    "reads or writes files":
        r"\bopen\s*\(|read_text|write_text|read_bytes|write_bytes|\bglob\b|listdir|scandir|os\.(walk|open|read|environ|fd)|/proc/|\.\./"
        r"|\bmmap\b|\bshutil\b|\btempfile\b|linecache|np\.(load|fromfile|memmap)\b|torch\.load\b|\bpickle\b|\bmarshal\b",
    "uses the network": r"\bsocket\b|urllib|import requests|requests\.(get|post|put)\(|http\.client",
    "waits for input": r"\binput\s*\(",
    "is executed from text": r"\b(exec|eval)\s*\(|(?<![\w.])compile\s*\(|CodeType|FunctionType|LambdaType",
}  # fmt: skip
_COMPILED = {said: re.compile(pattern) for said, pattern in PATTERNS.items()}
BY_NAME = "reaches into Python by names that are not written out"
MACHINERY = "reaches into Python's own machinery"
PRETENDS = "derives a class from tensors, arrays, numbers or text"
PLAIN_DUNDERS = {
    f"__{name}__" for name in (
        "init", "post_init", "new", "call", "name", "qualname", "doc", "repr", "str", "len", "iter", "next", "getitem", "setitem",
        "delitem", "contains", "add", "radd", "iadd", "sub", "mul", "rmul", "truediv", "floordiv", "mod", "neg", "abs", "lt", "le", "gt",
        "ge", "eq", "ne", "hash", "bool", "int", "float", "enter", "exit", "slots", "annotations", "future", "main", "matmul", "index",
        "version", "and", "or", "xor", "reversed", "missing",
    )
}  # fmt: skip
BASES = {"Tensor", "Parameter", "ndarray", "generic", "float64", "float32", "int64", "int", "float", "str", "bool", "bytes"}


def flags(work: Work, assignment: Assignment) -> list[str]:
    """What to look at in the learner's code, each with the cell that it stands in."""
    supplied = _all_text(cell.stub for cell in assignment.cells if cell.learners)
    found = []
    for name, code in _codes(work):
        label = name if name in work.answers else f"a cell added after {name}"
        found += [f"{label} {said}" for said in _suspicious(code, supplied)]
        found += [f"{label} imports {each}, which is not given" for each in _not_given(code, assignment)]
    for name, parts in work.answers.items():
        borrowed = set().union(*map(names_used, parts)) & only_in_checks(assignment)
        borrowed -= set().union(*map(names_bound, parts), *(names_bound(code) for _, code in work.added))
        found += [f"{name} uses {', '.join(sorted(borrowed))}, which only the checks define"] if borrowed else []
    return found


def suspicious(work: Work, assignment: Assignment) -> bool:
    """Whether any code of the learner's does what a person should look at before its messages are shown to anyone."""
    supplied = _all_text(cell.stub for cell in assignment.cells if cell.learners)
    return any(True for _, code in _codes(work) for _ in _suspicious(code, supplied))


def _codes(work: Work) -> list[tuple[str, str]]:
    return [*((name, "\n".join(parts)) for name, parts in work.answers.items()), *work.added]


def _all_text(parts: Any) -> str:
    return " ".join(parts)


def _suspicious(code: str, supplied: str) -> Iterator[str]:
    tree = _tree(code)
    text = _read(tree) if tree else code
    yield from (said for said, pattern in _COMPILED.items() if pattern.search(text) and not pattern.search(supplied))
    if tree is None:
        if re.search(r"^\s*[%!]", code, re.MULTILINE):
            yield "uses a command of the notebook's"
        return
    nodes = list(ast.walk(tree))
    for said, test in ((BY_NAME, _by_name), (MACHINERY, _machinery), (PRETENDS, _derives)):
        if any(map(test, nodes)):
            yield said


# ---------------------------------------------------------------- code as Python reads it


def _tree(code: str) -> ast.Module | None:
    try:
        tree = ast.parse(code)
        _Folded().visit(_Docless().visit(tree))
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read(tree: ast.Module) -> str:
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    except (RecursionError, ValueError):
        return ""


class _Docless(ast.NodeTransformer):
    """Without docstrings and other text that nobody uses."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


class _Folded(ast.NodeTransformer):
    """Text that is put together from constants becomes one constant: by +, *, %, [::-1], join, replace and the like, chr and f""."""

    LIMIT = 10_000
    METHODS = ("join", "replace", "lower", "upper", "swapcase", "strip", "lstrip", "rstrip", "format", "decode", "removeprefix",
               "removesuffix", "title", "capitalize", "fromhex")  # fmt: skip

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        try:
            value = self._value(node) if isinstance(node, (ast.BinOp, ast.Subscript, ast.Call, ast.JoinedStr)) else None
        except Exception:  # what cannot be computed stays as it is
            return node
        return ast.Constant(value) if isinstance(value, (str, bytes)) and len(value) < self.LIMIT else node

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = self._known(node.left), self._known(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Mult) and max(x if isinstance(x, int) else len(x) for x in (left, right)) < self.LIMIT:
                return left * right
            return left % right if isinstance(node.op, ast.Mod) and not re.search(r"%[^s%]", left) else None
        if isinstance(node, ast.Subscript):
            return self._known(node.value)[self._known(node.slice)]
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._known(each.value if isinstance(each, ast.FormattedValue) else each)) for each in node.values)
        assert isinstance(node, ast.Call)
        given = [self._known(each) for each in node.args]
        if isinstance(node.func, ast.Name):
            makers: dict[str, Any] = {"chr": chr, "str": str, "bytes": bytes}
            return makers[node.func.id](*given)
        if isinstance(node.func, ast.Attribute) and node.func.attr in self.METHODS:
            owner = bytes if isinstance(node.func.value, ast.Name) and node.func.value.id == "bytes" else self._known(node.func.value)
            return getattr(owner, node.func.attr)(*given)
        return None

    def _known(self, node: ast.AST) -> Any:
        """The value of a constant, or of a list or slice of constants. ValueError for anything else."""
        if isinstance(node, ast.Slice):
            return slice(*(None if each is None else self._known(each) for each in (node.lower, node.upper, node.step)))
        if isinstance(node, (ast.List, ast.Tuple)):
            values = [self._known(each) for each in node.elts]
            return values if isinstance(node, ast.List) else tuple(values)
        return ast.literal_eval(node)


def _by_name(node: ast.AST) -> bool:
    """getattr(x, name) with a name that is no plain constant, attrgetter and methodcaller likewise, vars() and dir() of something."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if called in ("getattr", "delattr", "hasattr"):
        return len(node.args) > 1 and not _plain_name(node.args[1])
    if called in ("attrgetter", "methodcaller"):
        return not all(map(_plain_name, node.args[:1]))
    return called in ("vars", "dir", "locals", "__getattribute__")


def _plain_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith("_")


def _machinery(node: ast.AST) -> bool:
    """A dunder that no plain class has, as a name, an attribute, a method or a text."""
    if isinstance(node, ast.FunctionDef) and node.name == "__del__":
        return True
    name = (node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else
            node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "")  # fmt: skip
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "np", "numpy", "sys", "os"):
        return name.startswith("_") and name != "__version__"
    return bool(re.fullmatch(r"__\w+__", name)) and name not in PLAIN_DUNDERS


def _derives(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    names = {base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else "" for base in node.bases}
    return bool(names & BASES)


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
