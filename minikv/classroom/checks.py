"""What the check cells of the exercises call: a failure says what is wrong, why it matters and what to try.

    with check("two new tokens after three", why="...", hint="..."):
        expect(causal_mask(2, 3), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], mistakes={"The mask is aligned ...": wrong_mask})

The learner's functions run inside ``check``, so that whatever they raise becomes a message as well. What they return may be
anything: it is cast to the kind of the wanted value before it is compared, and the comparison is ours, never an ``__eq__``
of the learner's. Tensors, arrays, numbers and text of a class of the learner's own are refused: torch would ask such a class
for its content, and it could answer what is wanted. A ``mistake`` that is recognised is named in the message.
"""

from __future__ import annotations

import builtins
import hashlib
import linecache
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any

from minikv.classroom.words import an, counted

Mistakes = Mapping[str, Any]
"""What the message says -> the wrong value that gives the mistake away, or a predicate on the value that was got."""


class CheckFailed(AssertionError):
    """A check that failed, in the four parts that its message has."""

    def __init__(self, what: str, found: str, why: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.found, self.why, self.hint = what, found, why, hint

    def __str__(self) -> str:
        parts = [("WHAT", self.what), ("", self.found), ("WHY", self.why), ("TRY", self.hint)]
        return "\n".join(f"{name:5s} {line}".rstrip() for name, text in parts if text for name, line in _labelled(name, text))

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the traceback, which would show the learner only our own code."""
        return ["This check is not passed yet.", *str(self).splitlines()]


def _labelled(name: str, text: str) -> list[tuple[str, str]]:
    return [(name if place == 0 else "", line) for place, line in enumerate(text.splitlines())]


# ---------------------------------------------------------------- the checks


class check:
    """A block that calls the learner's code: what it is about, why that matters, what to try when it fails."""

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        self.what, self.why, self.hint = what, why, hint

    def __enter__(self) -> check:
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        _restore()
        _open.remove(self)
        if error is None or issubclass(type(error), (CheckFailed, WrongMistake, KeyboardInterrupt)):
            return
        raise CheckFailed(self.what, _told(error, where), self.why, self.hint) from None


_open: list[check] = []


def expect(got: Any, wanted: Any, what: str = "", *, mistakes: Mistakes | None = None, tolerance: float = 1e-9) -> None:
    """Fail unless ``got``, cast to the kind of ``wanted``, is ``wanted``.

    ``wanted`` may be None, a bool, a number, text, a list or tuple (their difference does not count), a set, a dict, an array
    or a tensor. Whole numbers are compared exactly, others within ``tolerance`` (absolute, and relative to what is wanted).
    ``what`` says which of several values of the check this is.
    """
    _restore()
    name = f"{what}: " if what else ""
    try:
        have = _plain(got, wanted)
    except _OfAnotherKind as other:
        asked = " (was that meant, or is a return missing?)" if got is None else ""
        _fail(f"{name}{other}{asked}", got, mistakes)
    want = _plain(wanted, wanted)
    if not _same(have, want, tolerance):
        _fail(name + _difference(have, want, tolerance), got, mistakes, tolerance)
    _held["comparisons"] += 1
    _prove(got, mistakes, tolerance)


def require(holds: Any, found: str, *, mistakes: Mistakes | None = None, got: Any = None) -> None:
    """Fail with ``found`` unless ``holds`` is true: for what no single wanted value says. ``mistakes`` are looked for in ``got``."""
    _restore()
    truth = _plain(holds, True) if _is(holds, bool) or _is_array(holds) else False
    if truth is not True:
        _fail(found, got, mistakes)
    _held["comparisons"] += 1
    _prove(got, mistakes)


def refuses(
    call: Callable[[], Any], error: type[Exception] = ValueError, *, naming: tuple[Any, ...] = (), mistakes: Mistakes | None = None
) -> None:
    """Fail unless ``call()`` raises ``error`` with a message that holds each of ``naming``.

    ``mistakes`` are looked for in what the call gave instead, or in the message of a refusal that does not name all.
    """
    try:
        result = call()
    except NotImplementedError:
        raise
    except error as refusal:
        said = str(refusal)
        _restore()
        missing = [str(each) for each in naming if str(each) not in said]
        if missing:
            _fail(f"refused, as it should be, but the message does not name {' and '.join(missing)}: {_short(said)}", said, mistakes)
        _held["comparisons"] += 1
        _prove(said, mistakes)
        return
    _restore()
    _fail(f"this should be refused with {an(error.__name__)}, but it gave {_short(result)}", result, mistakes)


# ---------------------------------------------------------------- mistakes with a name


class WrongMistake(Exception):
    """A ``mistake`` of a check is one itself: it cannot be looked for."""


_proving: list[bool] = []


@contextmanager
def proving() -> Iterator[None]:
    """Within this, WrongMistake is raised for a mistake that cannot be looked for. A learner's notebook passes over it in silence."""
    _proving.append(True)
    try:
        yield
    finally:
        _proving.pop()


def _prove(got: Any, mistakes: Mistakes | None, tolerance: float = 1e-9) -> None:
    """Look for each mistake in ``got``, which is right. Whether one is found says nothing: some are true of every value."""
    for text, sign in (mistakes or {}).items() if _proving else ():
        _gives_away(got, sign, tolerance, text, right=True)


_held = {"comparisons": 0}
"""How many comparisons have held: the grader asks whether all that a check consists of were made."""


def _fail(found: str, got: Any, mistakes: Mistakes | None, tolerance: float = 1e-9) -> None:
    named = [text for text, sign in (mistakes or {}).items() if _gives_away(got, sign, tolerance, text)]
    around = _open[-1] if _open else check("", why="", hint="")
    raise CheckFailed(around.what, "\n".join([found, *named[:1]]), around.why, around.hint) from None


def _gives_away(got: Any, sign: Any, tolerance: float, text: str, right: bool = False) -> bool:
    """Whether ``got`` is the wrong value ``sign``, or the predicate ``sign`` holds for it."""
    if callable(sign):
        try:
            return sign(got) is True
        except Exception as wrong:  # mostly a value of another kind than the predicate is about
            if _proving and ((right and got is not None) or _is_the_authors(wrong)):
                raise WrongMistake(f"the mistake {text!r} cannot be looked for: {type(wrong).__name__}: {wrong}") from wrong
            return False
    with suppress(_OfAnotherKind):
        return _same(_plain(got, sign), _plain(sign, sign), tolerance)
    return False


def _is_the_authors(wrong: Exception) -> bool:
    """Whether a predicate itself is at fault: a name that it does not have, or an error within minikv, which it asks for the answer."""
    others = {frame.filename for frame in traceback.extract_tb(wrong.__traceback__)[1:] if "/minikv/" in frame.filename}
    return issubclass(type(wrong), (NameError, ImportError)) or bool(others - {__file__})


# ---------------------------------------------------------------- values that can be trusted


class _OfAnotherKind(Exception):
    """A value cannot be cast to the kind that is wanted; the text says so to the learner, and where in a list or dict it is."""

    def __init__(self, wanted: str = "", value: Any = None, said: str | None = None) -> None:
        super().__init__(wanted)
        self.said, self.place = said or f"{wanted} is wanted, and this is {_kind(value)}", ""

    def __str__(self) -> str:
        return _at(self.place) + self.said


class _Members(list[Any]):
    """What is in a set, in an order of its own."""

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}}" if self else "set()"


class _Words:
    """Something that is shown in these words."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _is(value: Any, kinds: Any) -> bool:
    """``isinstance`` that believes the type, not a ``__class__`` of the learner's own making."""
    return issubclass(type(value), kinds)


def _tensor_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return (torch.Tensor,) if torch else ()


def _array_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray, numpy.generic) if numpy else ()


def _is_array(value: Any) -> bool:
    """Whether this is a tensor or an array of torch's or numpy's own class: one of another class computes its content as it likes."""
    if _is(value, _tensor_types()):
        return type(value) in (_tensor_types()[0], sys.modules["torch"].nn.Parameter)
    return _is(value, _array_types()) and not _made_in_python(type(value))


def _made_in_python(kind: type) -> bool:
    return bool(type.__dict__["__flags__"].__get__(kind) & 1 << 9)  # Py_TPFLAGS_HEAPTYPE; numpy's own classes have it not


def _pretends(value: Any) -> bool:
    """Whether this is of a class of somebody's own that derives from tensors, arrays, numbers or text."""
    if _is(value, _tensor_types() + _array_types()):
        return not _is_array(value)
    return _is(value, (int, float, str)) and type(value) not in (bool, int, float, str)


def _nested(value: Any) -> Any:
    """The numbers of a tensor or array as plain nested lists; no mode that somebody has switched on in torch is asked."""
    if _is(value, _tensor_types()):
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            plain = torch.Tensor.detach(value)
            return torch.Tensor.tolist(torch.Tensor.cpu(plain))
    numpy: Any = sys.modules["numpy"]
    return numpy.ndarray.tolist(numpy.asarray(value, dtype=None))


def _plain(value: Any, like: Any) -> Any:
    """``value`` cast to the kind of ``like``, of exact built-in types only. _OfAnotherKind where that cannot be."""
    if _pretends(value):
        raise _OfAnotherKind(said=f"this is {_kind(value)}, a class of its own: give back a plain {_base(value)}")
    if _is_array(like):
        if not _is_array(value) and not _is(value, (list, tuple, int, float)):
            raise _OfAnotherKind("an array of numbers", value)
        return _numbers(value)
    if like is None:
        if value is not None:
            raise _OfAnotherKind("None", value)
        return None
    for kind, cast in _CASTS:
        if _is(like, kind):
            return cast(value, like)
    raise TypeError(f"expect cannot compare with a {type(like).__name__}; cast it to lists, numbers or text first")


def _base(value: Any) -> str:
    """The plain class that the class of ``value`` derives from, by its name."""
    plain = (*_tensor_types(), *_array_types(), bool, int, float, str)
    return next(("array" if kind in _array_types() else kind.__name__) for kind in plain if _is(value, kind))


def _numbers(value: Any) -> Any:
    """Nested lists of floats."""
    if _is_array(value):
        return _numbers(_nested(value))
    if _is(value, (list, tuple)):
        return [_numbers(each) for each in _items(value)]
    return _number(value, 0.0)


def _items(value: Any) -> list[Any]:
    return [*(list if _is(value, list) else tuple).__iter__(value)]


def _scalar(value: Any) -> Any:
    """What a tensor or array of one number holds; anything else unchanged."""
    if _is_array(value):
        value = _nested(value)
        while type(value) is list and len(value) == 1:
            value = value[0]
    return value


def _truth(value: Any, like: Any) -> bool:
    value = _scalar(value)
    if not _is(value, bool):
        raise _OfAnotherKind("True or False", value)
    return value is True


def _whole(value: Any, like: Any) -> Any:
    value = _scalar(value)
    if _is(value, int):
        return int.__int__(value)
    if _is(value, float):
        exact = float.__float__(value)
        return int(exact) if exact.is_integer() else exact
    raise _OfAnotherKind("a whole number", value)


def _number(value: Any, like: Any) -> float:
    value = _scalar(value)
    if _is(value, int):
        return float(int.__int__(value))
    if _is(value, float):
        return float.__float__(value)
    raise _OfAnotherKind("a number", value)


def _text(value: Any, like: Any) -> str:
    if not _is(value, str):
        raise _OfAnotherKind("text", value)
    return str.__str__(value)


def _sequence(value: Any, like: Any) -> list[Any]:
    if _is_array(value):
        value = _nested(value)
    if not _is(value, (list, tuple, range)):
        raise _OfAnotherKind("a list", value)
    items = list(value) if type(value) is range else _items(value)
    if not like:
        return [_as_it_is(each) for each in items]
    return [_part(each, like[min(place, len(like) - 1)], place) for place, each in enumerate(items)]


def _part(value: Any, like: Any, place: Any) -> Any:
    """``value``, which stands at ``place`` in something larger, cast to the kind of ``like``."""
    try:
        return _plain(value, like)
    except _OfAnotherKind as other:
        other.place = f"{_short(place)}{', ' if other.place else ''}{other.place}"
        raise


def _set(value: Any, like: Any) -> _Members:
    kind = set if _is(value, set) else frozenset
    if not _is(value, (set, frozenset)):
        raise _OfAnotherKind("a set", value)
    sample = next(iter(like), None)
    return _Members(sorted((_plain(each, sample) if like else _as_it_is(each) for each in kind.__iter__(value)), key=repr))


def _mapping(value: Any, like: Any) -> dict[Any, Any]:
    if not _is(value, dict):
        raise _OfAnotherKind("a dict", value)
    if not like:
        return {_as_it_is(key): _as_it_is(each) for key, each in dict.items(value)}
    first_key, first_value = next(iter(like.items()))
    known = {_frozen(_plain(key, key)): each for key, each in like.items()}
    plain = {}
    for key, each in dict.items(value):
        plain_key = _frozen(_plain(key, first_key))
        plain[plain_key] = _part(each, known.get(plain_key, first_value), plain_key)
    return plain


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if _is(value, list) else value


def _as_it_is(value: Any) -> Any:
    """``value`` itself where it is plain all through, and words for it where not: for a place at which nothing is wanted."""
    return value if _all_plain(value) else _Words(_short(value))


_CASTS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    (bool, _truth),
    (int, _whole),
    (float, _number),
    (str, _text),
    ((list, tuple, range), _sequence),
    ((set, frozenset), _set),
    (dict, _mapping),
)


def _same(have: Any, want: Any, tolerance: float) -> bool:
    """Whether two plain values are the same."""
    if type(want) in (list, _Members):
        return type(have) is type(want) and len(have) == len(want) and all(map(_same, have, want, [tolerance] * len(want)))
    if type(want) is dict:
        return type(have) is dict and have.keys() == want.keys() and all(_same(have[key], want[key], tolerance) for key in want)
    if type(want) is float and type(have) in (int, float):
        close = abs(have - want) <= tolerance * (1 + abs(want)) if math.isfinite(want) else have == want
        return close or (math.isnan(have) and math.isnan(want))
    return type(have) is type(want) and have == want


def _difference(have: Any, want: Any, tolerance: float) -> str:
    """Where two plain values differ first, and how."""
    place = ""
    while type(have) is type(want) and type(want) in (list, dict):
        if said := _other_entries(have, want):
            return f"{_at(place)}{said}\n{_both(have, want)}"
        entries = want if type(want) is dict else range(len(want))
        at = next(each for each in entries if not _same(have[each], want[each], tolerance))
        if not place and len(repr(want)) <= 60 and len(want) > 1:
            return f"entry {_short(at)} differs\n{_both(have, want)}"
        place, have, want = f"{place}{', ' if place else ''}{_short(at)}", have[at], want[at]
    return f"{_at(place)}{_short(have)} instead of {_short(want)}"


def _at(place: str) -> str:
    return f"at [{place}] " if place else ""


def _other_entries(have: Any, want: Any) -> str:
    """What is said of a list of another length, or of a dict with other keys; empty when there is nothing to say."""
    if type(want) is dict:
        missing = [f"{_short(key)} is missing" for key in want if key not in have]
        return ", ".join(missing + [f"{_short(key)} is not wanted" for key in have if key not in want])
    return f"{counted(len(have), 'entry', 'entries')} instead of {len(want)}" if len(have) != len(want) else ""


def _both(have: Any, want: Any) -> str:
    return f"got    {_short(have)}\nwanted {_short(want)}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if value is ...:
        return "..., which stands where your part belongs: not done yet"
    if _is(value, type(len)) or _is(value, type(_kind)):
        return "a function (is a pair of brackets missing?)"
    return an(type(value).__name__)


def _short(value: Any, width: int = 100) -> str:
    """A value in a few words, without a ``__repr__`` of the learner's own."""
    if _is_array(value):
        return f"an array {_short(_nested(value))}"
    if type(value) is _Words:
        text = value.text
    elif type(value) in (list, tuple, set, frozenset, dict, _Members):
        text = repr(value) if _all_plain(value) else _kind(value)
    elif type(value) in (int, float, str, bool, type(None)):
        text = f"{value:.6g}" if type(value) is float else repr(value)
    else:
        text = _kind(value)
    return text if len(text) <= width else text[: width - 4] + " ..."


def _all_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_all_plain, value.keys())) and all(map(_all_plain, value.values()))
    if type(value) in (list, tuple, set, frozenset, _Members):
        return all(map(_all_plain, value))
    return type(value) in (int, float, str, bool, type(None), _Words)


# ---------------------------------------------------------------- what the learner's code raised


def _told(error: BaseException, where: TracebackType | None) -> str:
    """An exception of the learner's code in a line or two: what it says and where it was raised."""
    kind = type(error)
    said = error.args[0] if error.args and type(error.args[0]) is str else ""
    if issubclass(kind, NotImplementedError):
        return f"not done yet: {said or 'the function only raises NotImplementedError'}"
    if issubclass(kind, NameError):
        return f"{said}: has the cell that defines it been run, and did it run to its end?"
    return f"the code raised {kind.__name__}: {_short(said, 300) if said else 'without a message'}{_place(where)}"


def _place(where: TracebackType | None) -> str:
    """The innermost line of a notebook's cell that an exception passed through, the check's own line aside."""
    others = ("/minikv/", "/site-packages/")
    frames = [frame for frame in traceback.extract_tb(where)[1:] if not any(each in frame.filename for each in others)]
    if not frames:
        return ""
    line = frames[-1].line or linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"\nin {frames[-1].name}, at the line: {line}" if line else ""


# ---------------------------------------------------------------- hidden checks


_state = {"seed": "without a secret"}


def hidden_random() -> random.Random:
    """Where hidden checks draw their inputs from: the grader seeds it from the teacher's secret and the check's name."""
    return random.Random(_state["seed"])


def seed_for(secret: bytes, check_id: str) -> str:
    """What ``hidden_random`` is seeded with in one check."""
    return hashlib.sha256(secret + b"\0" + check_id.encode()).hexdigest()


def use_seed(seed: str) -> None:
    """Let ``hidden_random`` draw from ``seed`` until further notice."""
    _state["seed"] = seed


def _no_restore() -> None:
    """In the grader the guard is called here instead: what an answer patched is put back before anything is compared."""


_restore: Callable[[], None] = _no_restore


# ---------------------------------------------------------------- what of minikv an answer may use


_import = builtins.__import__
_locked: list[tuple[dict[str, Any], dict[int, Any]]] = []  # a notebook's names, and what it gives of minikv


def lock_minikv() -> None:
    """From here on the calling notebook can import from minikv only what it has imported already: the rest is the exercise."""
    names = sys._getframe(1).f_globals
    unlock(names)
    given = {id(value): value for value in names.values()}
    _locked.append((names, given))
    builtins.__import__ = _import_what_is_given


def unlock(names: dict[str, Any]) -> None:
    """Undo ``lock_minikv`` for the notebook with these names."""
    _locked[:] = [entry for entry in _locked if entry[0] is not names]
    if not _locked and builtins.__import__ is _import_what_is_given:
        builtins.__import__ = _import


def _import_what_is_given(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:  # fmt: skip
    module = _import(name, globals, locals, fromlist, level)
    given = next((given for names, given in _locked if names is globals), None)
    if given is None or name.split(".")[0] != "minikv":
        return module
    wanted = [getattr(module, each, None) for each in fromlist] if fromlist else [module]
    if not all(id(each) in given for each in wanted):
        what = f"{name}.{fromlist[0]}" if fromlist else name
        raise ImportError(f"{what} is not given in this notebook: what it does is the exercise. Use what the first cell imports.")
    return module


def oracle(name: str) -> Any:
    """Something of minikv that a *check* compares with, by its dotted name; functions (the learner's) cannot ask for it."""
    if not sys._getframe(1).f_code.co_name.startswith(("<module>", "<cell")):  # the name that IPython gives a cell's own level
        raise ImportError(f"{name} is for the checks only: what it does is the exercise")
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)
