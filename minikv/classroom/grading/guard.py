"""Inside the kernel of a submission: puts back what checks rely on before each check, and says that a check ran to its end.

An answer can patch numpy, ``print`` or IPython's hooks, on purpose or by an innocent ``sum = 0``. ``start`` remembers them all
after the first given cell; ``begin`` puts them back. Nothing here is looked up by a name that the learner could have bound: the
rebuilt cells reach ``MinikvGuard`` through ``object.__subclasses__``, which cannot be patched. What an answer can do to the guard
itself shows in its ``seal``, which the plugin keeps where no answer comes: in another process. This is no sandbox: code that
sets out to defeat it from within the same process can, and is left to the flags that a person reads.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from minikv.classroom import checks

MODULES = (
    "math", "random", "itertools", "functools", "operator", "copy", "collections", "contextlib", "traceback", "hashlib", "json", "re",
    "numpy", "numpy.linalg", "numpy.random", "numpy.testing", "torch", "torch.linalg", "torch.testing", "torch.nn.functional",
)  # fmt: skip
HOOKS = ("CustomTB", "custom_exceptions", "InteractiveTB", "SyntaxTB", "sys_excepthook", "user_ns", "display_pub", "displayhook", "events")
"""Of the running IPython shell: what decides whether an exception is seen."""
NOT_OURS = {"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__", "__module__", "__builtins__"}

_builtins = dict(vars(builtins))
_missing = object()
_dicts: list[tuple[dict[str, Any], dict[str, Any], bool]] = []  # (live, as it was, whether a change during a check is cheating)
_classes: list[tuple[type, dict[str, Any], bool]] = []
_functions: list[tuple[FunctionType, Any, Any, Any]] = []
_lists: list[tuple[list[Any], list[Any]]] = []
_settings: list[Callable[[], Any]] = []
_given: dict[str, Any] = {}
_notebook: dict[str, Any] = {}
_changes: list[str] = []


class MinikvGuard:
    """What the rebuilt cells call; the name is how they find it."""

    @staticmethod
    def start(notebook: dict[str, Any], given: Iterable[str]) -> None:
        """Remember how things are after the first given cell, which gave ``given``."""
        global _notebook
        _notebook = notebook
        _builtins.update(vars(builtins))
        _remember_modules()
        _remember_ipython()
        _remember_settings()
        MinikvGuard.keep(given)
        checks._restore = restore
        _dicts.append((vars(checks), {**vars(checks)}, True))

    @staticmethod
    def keep(given: Iterable[str]) -> None:
        """Remember these names of the notebook: a given cell has just bound them, and no answer may bind them anew."""
        for name in given:
            value = _given[name] = _notebook.get(name, _missing)
            if isinstance(value, FunctionType):
                _remember_function(value)
            elif isinstance(value, type) and value.__module__ == "__main__":
                _remember_class(value, counts=True)

    @staticmethod
    def check(seed: str, code: str, token: str) -> None:
        """Run a check: as one piece of code, so that nothing can be taken out of it, in the notebook's names."""
        MinikvGuard.begin(seed)
        exec(compile(code, "<check>", "exec"), _notebook)
        MinikvGuard.end(token)

    @staticmethod
    def begin(seed: str) -> None:
        """A check begins: everything as it was, its hidden inputs drawn from ``seed``."""
        restore()
        for setting in _settings:
            setting()
        _notebook.update({name: value for name, value in _given.items() if value is not _missing})
        _changes.clear()
        checks._open.clear()
        checks._held["comparisons"] = 0
        checks.use_seed(seed)

    @staticmethod
    def say(token: str) -> None:
        """A line of its own on stdout."""
        sys.stdout.write(f"\n{token}\n")

    @staticmethod
    def end(token: str) -> None:
        """The check's last act. Whoever changed what it relies on while it ran does not get here."""
        restore()
        if not _tells_apart():
            _changes.append("expect")
        if _changes:
            raise checks.CheckFailed(
                "what the checks rely on",
                f"was changed while they ran: {', '.join(sorted(set(_changes))[:5])}",
                "A check that was changed says nothing about the answer.",
                "An answer computes and returns; it patches nothing.",
            )
        MinikvGuard.say(token)


def _tells_apart() -> bool:
    """Whether the comparisons that the check has used still tell right from wrong. The count of those that held stays as it is."""
    held, number = checks._held["comparisons"], int.from_bytes(os.urandom(4), "big")
    expect, require = _notebook.get("expect", checks.expect), _notebook.get("require", checks.require)
    trials = [lambda: expect(number, number + 1), lambda: expect([number], [number, number]), lambda: require(number < 0, "")]
    expect(number, number)
    for trial in trials:
        try:
            trial()
        except checks.CheckFailed:
            continue
        return False
    checks._held["comparisons"] = held
    return True


def restore() -> None:
    """Put back what was remembered. Until the builtins are back, no builtin is used."""
    live = builtins.__dict__
    for name in _builtins:
        if name in live:
            if live[name] is not _builtins[name] and name != "_":
                live[name] = _builtins[name]
                _changes.append(name)
        else:
            live[name] = _builtins[name]
            _changes.append(name)
    for name, value in _given.items():
        if value is not _missing and callable(value) and _notebook.get(name) is not value:
            _notebook[name] = value
            _changes.append(name)
    for live, saved, counts in _dicts:
        for name, value in saved.items():
            if live.get(name, _missing) is not value:
                live[name] = value
                if counts:
                    _changes.append(name)
    for kind, saved, counts in _classes:
        _restore_class(kind, saved, counts)
    for function, code, defaults, keywords in _functions:
        if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ is not keywords:
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
            _changes.append(function.__name__)
    for now, before in _lists:
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            now[:] = before


def _restore_class(kind: type, saved: dict[str, Any], counts: bool) -> None:
    live = type.__dict__["__dict__"].__get__(kind)
    for name, value in saved.items():
        if live.get(name, _missing) is not value:
            type.__setattr__(kind, name, value)
            if counts:
                _changes.append(f"{kind.__name__}.{name}")
    for name in [name for name in live if name not in saved and name not in NOT_OURS and _behaves(live[name])]:
        type.__delattr__(kind, name)
        if counts:
            _changes.append(f"{kind.__name__}.{name}")


# ---------------------------------------------------------------- remembering


def _remember_modules() -> None:
    loaded = [sys.modules[name] for name in MODULES if name in sys.modules]
    _dicts.extend((vars(module), _own(vars(module)), True) for module in loaded)
    _dicts.append((sys.modules, {name: sys.modules[name] for name in ("builtins", "sys", *MODULES) if name in sys.modules}, True))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "minikv" and name not in (__name__, checks.__name__):
            behaviour = {key: value for key, value in vars(module).items() if _behaves(value)}
            _dicts.append((vars(module), behaviour, False))
            for value in behaviour.values():
                if isinstance(value, type) and value.__module__ == name:
                    _remember_class(value, counts=False)
    for value in vars(checks).values():
        if isinstance(value, FunctionType) and value.__module__ == checks.__name__:
            _remember_function(value)
        elif isinstance(value, type) and value.__module__ == checks.__name__:
            _remember_class(value, counts=True)
    if "torch" in sys.modules:
        _remember_class(sys.modules["torch"].Tensor, counts=True)
    _remember_class(sys.modules["random"].Random, counts=True)


def _own(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in NOT_OURS and callable(value)}


def _remember_function(function: FunctionType) -> None:
    _functions.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))


def _remember_class(kind: type, counts: bool) -> None:
    saved = {name: value for name, value in vars(kind).items() if name not in NOT_OURS and _behaves(value)}
    _classes.append((kind, saved, counts))
    for value in saved.values() if counts and kind.__module__ in (checks.__name__, "__main__") else ():
        if isinstance(value, FunctionType):
            _remember_function(value)


def _behaves(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def _remember_ipython() -> None:
    shell: Any = getattr(builtins, "get_ipython", lambda: None)()
    if shell is None:
        return
    _dicts.append((vars(shell), {name: vars(shell)[name] for name in HOOKS if name in vars(shell)}, False))
    for kind in (*type(shell).__mro__, type(sys.stdout), type(shell.display_pub)):
        if kind.__module__.startswith(("IPython", "ipykernel")):
            _remember_class(kind, counts=False)
    known = set(vars(shell))
    _settings.append(lambda: [vars(shell).pop(name) for name in set(vars(shell)) - known if callable(vars(shell)[name])])
    manager = shell.input_transformer_manager
    lists = [manager.cleanup_transforms, manager.line_transforms, manager.token_transformers, shell.input_transformers_post]
    lists += [shell.ast_transformers, *shell.events.callbacks.values()]
    _lists.extend((each, list(each)) for each in lists)


def _remember_settings() -> None:
    saved = {name: getattr(sys, name) for name in ("stdout", "stderr", "displayhook", "excepthook", "unraisablehook")}
    _dicts.append((vars(sys), saved, False))
    own = set(vars(sys.stdout))
    out, limit = sys.stdout, sys.getrecursionlimit()
    _settings.append(lambda: [vars(out).pop(name) for name in set(vars(out)) - own if callable(vars(out)[name])])
    _settings.append(lambda: sys.settrace(None))
    _settings.append(lambda: sys.setprofile(None))
    _settings.append(lambda: threading.settrace(None))
    _settings.append(lambda: sys.setrecursionlimit(limit))
    torch: Any = sys.modules.get("torch")
    if torch:
        gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        _settings.append(lambda: [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())])
        _settings.append(lambda: [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())])
        _settings.append(lambda: torch.set_grad_enabled(gradients))
        _settings.append(lambda: torch.set_default_dtype(dtype))
