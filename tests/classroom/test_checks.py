"""The helpers of the check cells: what they accept, what they say, and that no answer can talk them into a pass."""

from __future__ import annotations

import builtins
import collections
import enum
import math
from contextlib import suppress

import numpy as np
import pytest
import torch

from minikv.cache.blocks import blocks_for
from minikv.classroom import checks
from minikv.classroom.checks import (
    CheckFailed,
    WrongMistake,
    check,
    expect,
    hidden_random,
    lock_minikv,
    oracle,
    refuses,
    require,
    seed_for,
    use_seed,
)


def said(call) -> str:
    """What a check says that fails in ``call``."""
    with pytest.raises(CheckFailed) as failed, check("the thing", why="It matters.", hint="Try this."):
        call()
    return str(failed.value)


# ---------------------------------------------------------------- messages


def test_a_failure_says_what_why_and_what_to_try():
    assert said(lambda: expect(3, 4, "in the middle")) == (
        "WHAT  the thing\n      in the middle: 3 instead of 4\nWHY   It matters.\nTRY   Try this."
    )


def test_the_first_mistake_that_fits_is_named():
    mistakes = {"twice": 8, "too large": lambda got: got > 4, "never": lambda got: 1 / 0}
    assert "twice" in said(lambda: expect(8, 4, mistakes=mistakes))
    assert "too large" in said(lambda: expect(9, 4, mistakes=mistakes))
    message = said(lambda: expect(3, 4, mistakes=mistakes))
    assert not any(name in message for name in mistakes)
    assert "a mask of another shape" in said(
        lambda: expect(torch.ones(2, 2), torch.ones(2, 5), mistakes={"a mask of another shape": torch.ones(2, 2)})
    )


def test_a_mistake_that_cannot_be_looked_for_is_loud_for_the_author_and_harmless_for_the_learner():
    def expect_four(got, sign):
        with check("the thing", why="It matters.", hint="Try this."):
            expect(got, 4, mistakes={"a sign": sign})

    def asks_minikv(got):
        return blocks_for(got, 0) == got

    for got in (4, 5):
        for sign in (lambda got: no_such_name, lambda got: oracle("minikv.cache.blocks.blocks_for")(got, 2) == 4, asks_minikv):  # noqa: F821
            with suppress(CheckFailed):
                expect_four(got, sign)
            with pytest.raises(WrongMistake, match="'a sign' cannot be looked for"), checks.proving():
                expect_four(got, sign)
    with checks.proving():
        assert "a sign" not in said(lambda: expect("5", 4, mistakes={"a sign": lambda got: got > 4})), "about another kind of value"
        expect(None, None, mistakes={"a sign": lambda got: got < 0})
        with pytest.raises(WrongMistake, match="TypeError"):
            expect_four(4, lambda got: got[0] == 1)
        with pytest.raises(WrongMistake), check("x", why="y", hint="z"):
            require(True, "fine", got=4, mistakes={"a sign": lambda got: got[0] == 1})
    expect_four(4, lambda got: got[0] == 1)


def test_where_lists_and_tensors_differ_is_said():
    assert "entry 1 differs\n      got    [1, 5, 3]\n      wanted [1, 2, 3]" in said(lambda: expect([1, 5, 3], [1, 2, 3]))
    assert "2 entries instead of 3" in said(lambda: expect((1, 2), [1, 2, 3]))
    assert "1 entry instead of 2" in said(lambda: expect([1], [1, 2]))
    big = torch.zeros(20, 20)
    off = big.clone()
    off[3, 7] = 2
    assert "at [3, 7] 2 instead of 0" in said(lambda: expect(off, big))
    assert "at [0, 1] a whole number is wanted, and this is None" in said(lambda: expect([[1, None]], [[1, 2]])).splitlines()[1]


@pytest.mark.parametrize(
    ("got", "wanted", "message"),
    [
        ({"a": 1, "b": 3}, {"a": 1, "b": 2}, "entry 'b' differs\n      got    {'a': 1, 'b': 3}\n      wanted {'a': 1, 'b': 2}"),
        ({"a": 1}, {"a": 1, "b": 2}, "'b' is missing\n      got    {'a': 1}\n      wanted {'a': 1, 'b': 2}"),
        ({1: 2, 3: 4}, {1: 2}, "3 is not wanted\n      got    {1: 2, 3: 4}\n      wanted {1: 2}"),
        ({1: 2, 3: 4}, {}, "1 is not wanted, 3 is not wanted\n      got    {1: 2, 3: 4}\n      wanted {}"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "at ['a', 1] 2 instead of 3"),
        ({"a": [1, "x"]}, {"a": [1, 3]}, "at ['a', 1] a whole number is wanted, and this is a str"),
        ({(1, 2): 3}, {(1, 2): 4}, "at [(1, 2)] 3 instead of 4"),
        ({1, 2}, {2, 3}, "{1, 2} instead of {2, 3}"),
        ({1}, set(), "{1} instead of set()"),
        ([4], [], "1 entry instead of 0\n      got    [4]\n      wanted []"),
        ([[1, "x"], None], [], "got    [[1, 'x'], None]"),
        ([torch.ones(2)], [], "got    [an array [1.0, 1.0]]"),
        ([object()], [], "got    [an object]"),
        (3, "x", "text is wanted, and this is an int"),
        (np.ones(2), {}, "a dict is wanted, and this is a ndarray"),
        (None, 4, "a whole number is wanted, and this is None (was that meant, or is a return missing?)"),
        (3, None, "None is wanted, and this is an int"),
    ],
)  # fmt: skip
def test_values_are_shown_as_they_are_written(got, wanted, message):
    assert f"\n      {message}\n" in said(lambda: expect(got, wanted)) + "\n"
    assert "return missing" not in said(lambda: expect([got], [wanted]))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NotImplementedError("count the blocks"), "not done yet: count the blocks"),
        (NameError("name 'f' is not defined"), "has the cell that defines it been run"),
        (IndexError("list index out of range"), "the code raised IndexError: 'list index out of range'"),
        (SystemExit(0), "the code raised SystemExit"),
    ],
)
def test_whatever_the_code_raises_becomes_a_message(error, message):
    def fail():
        raise error

    assert message in said(fail)


def test_an_interrupt_is_the_learners_own():
    with pytest.raises(KeyboardInterrupt), check("x", why="y", hint="z"):
        raise KeyboardInterrupt


def test_the_notebook_shows_the_message_and_not_our_traceback():
    failed = CheckFailed("the thing", "3 instead of 4", "It matters.", "Try this.")
    assert failed._render_traceback_()[:2] == ["This check is not passed yet.", "WHAT  the thing"]


# ---------------------------------------------------------------- only plain values


class Obliging(torch.Tensor):
    """A tensor that is asked for its content by torch, and would answer anything."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("a class of the learner's own was asked")

    __torch_dispatch__ = __torch_function__


class OwnText(str):
    __slots__ = ()


class OwnNumber(float):
    pass


class Kind(enum.IntEnum):
    FOUR = 4


@pytest.mark.parametrize(
    ("value", "wanted", "plain"),
    [
        (lambda: torch.Tensor._make_subclass(Obliging, torch.zeros(2)), torch.zeros(2), "Tensor"),
        (lambda: [torch.Tensor._make_subclass(Obliging, torch.zeros(2))], [[0.0, 0.0]], "Tensor"),
        (lambda: np.zeros(2).view(np.recarray), np.zeros(2), "array"),
        (lambda: OwnNumber(4), 4.0, "float"),
        (lambda: Kind.FOUR, 4, "int"),
        (lambda: OwnText("four"), "four", "str"),
    ],
)
def test_a_class_of_ones_own_is_refused_and_a_plain_value_asked_for(value, wanted, plain):
    message = said(lambda: expect(value(), wanted))
    assert f"a class of its own: give back a plain {plain}" in message


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.nn.Parameter(torch.ones(2)), [1.0, 1.0]),
        (np.float64(4), 4.0),
        (np.int32(4), 4),
        (np.bool_(True), True),
        (torch.Size([2, 3]), [2, 3]),
        (collections.namedtuple("Pair", "a b")(1, 2), [1, 2]),
        (collections.Counter(a=1), {"a": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
    ],
)
def test_what_python_numpy_and_torch_have_themselves_is_taken(value, wanted):
    expect(value, wanted)


def test_modes_that_are_left_on_in_torch_are_not_asked():
    asked = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    got, wanted = torch.arange(3.0), [0.0, 1.0, 2.0]
    with Functions(), Dispatched():
        expect(got, wanted)
    assert asked == []


def test_every_comparison_that_holds_is_counted_and_no_other():
    def counted(call) -> int:
        before = checks._held["comparisons"]
        call()
        return checks._held["comparisons"] - before

    assert counted(lambda: expect(4, 4)) == counted(lambda: require(True, "")) == counted(lambda: refuses(lambda: int("x"))) == 1
    assert counted(lambda: said(lambda: expect(4, 5))) == counted(lambda: said(lambda: require(False, "no"))) == 0


# ---------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (4.0, 4), (np.int64(4), 4), (torch.tensor(4), 4), (torch.tensor([[4]]), 4), (True, True), (np.bool_(True), True),
        (torch.tensor(True), True), (2, 2.0), (0.1 + 0.2, 0.3), (math.inf, math.inf), (math.nan, math.nan), ("a", "a"), (None, None),
        ((1, 2), [1, 2]), ([1, 2], (1, 2)), (torch.tensor([1, 2]), [1, 2]), (np.array([1, 2]), (1, 2)), (range(2), [0, 1]), ([], []),
        ({1, 2}, {2, 1}), (frozenset({1}), {1}), ({"a": [1]}, {"a": (1,)}), ([[True], [False]], torch.tensor([[1.0], [0.0]])),
        (torch.ones(2, dtype=torch.bfloat16), np.ones(2)), ([(1, "a"), (2, "b")], [[1, "a"], [2, "b"]]),
        ({(1, 2): "x"}, {(1, 2): "x"}), ({}, {}), (set(), set()), ({1: {2: 3.0}}, {1: {2: 3}}), ([None, 1], [None, 1]),
    ],
)  # fmt: skip
def test_the_same_thing_in_other_clothes_passes(got, wanted):
    expect(got, wanted)


class Any:
    """Equals everything."""

    __class__ = int
    __eq__ = __bool__ = __le__ = lambda *_: True
    __sub__ = __abs__ = lambda *_: 0.0
    __hash__ = None
    __repr__ = lambda _: 1 / 0  # noqa: E731


class Number(float):
    __eq__ = lambda *_: True  # noqa: E731
    __sub__ = __rsub__ = __abs__ = lambda *_: 0.0
    __hash__ = None
    is_integer = lambda _: True  # noqa: E731


class Text(str):
    __eq__ = lambda *_: True  # noqa: E731
    __hash__ = None


class Row(list):
    __eq__ = lambda *_: True  # noqa: E731
    __iter__ = lambda _: iter([1, 2])  # noqa: E731
    __len__ = lambda _: 2  # noqa: E731
    __hash__ = None


class Tensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True

    tolist = lambda _: [1, 2]  # noqa: E731


@pytest.mark.parametrize(
    ("got", "wanted"),
    [(Any(), 4), (Any(), 4.0), (Any(), "a"), (Any(), [1]), (Any(), None), (Any(), True), (Any(), torch.ones(1)), (Any(), {1}),
     (Any(), {1: 2}),
     (Number(7.5), 4), (Number(7.5), 4.0), (Text("b"), "a"), (Row([3]), [1, 2]), (Tensor([3.0, 4.0]), [1, 2]),
     (Tensor([3.0, 4.0]), torch.tensor([1, 2])), (None, 4), ("4", 4), (4.5, 4), (1, True), (0, False), (None, []), (len, 4),
     ([1, 2, 3], [1, 2]), ([], [1]), ([1], []), ({1: 2}, {}), ({1}, set()), ({2: 1}, {1: 2}),
     ({"a": {"b": 1}}, {"a": {"b": 2}}),
     ([{1: 2}], [{1: 3}]), ([[1, 2]], [{1, 2}]), ({1: 1, 2: 2}, {1: 1, 3: 2}),
     ({1: 2}, {1: 3}), ({}, {1: 3}), ({1}, {1, 2}), (math.nan, 1.0), (1.0, math.nan), (..., 4),
     (torch.ones(1, 2), torch.ones(2)), ([[1], [2, 3]], torch.ones(2, 2)), (1e-3, 0.0), ([Any()], [1]), ("ab", ["a", "b"])],
    ids=lambda _: "value",
)  # fmt: skip
def test_something_else_fails_with_a_message(got, wanted):
    assert said(lambda: expect(got, wanted)).startswith("WHAT  the thing\n")


def test_a_predicate_needs_a_real_truth():
    require(True, "fine")
    require(torch.tensor(True), "fine")
    for holds in (False, None, Any(), 1, torch.tensor(False)):
        assert "5 tokens computed" in said(lambda holds=holds: require(holds, "5 tokens computed"))


def test_a_refusal_names_its_numbers():
    def refuse(text):
        raise ValueError(text)

    refuses(lambda: refuse("20 tokens do not fit into 16"), naming=(16, 20))
    assert "does not name 20" in said(lambda: refuses(lambda: refuse("too long for 16"), naming=(16, 20)))
    assert "refused with a ValueError, but it gave 3" in said(lambda: refuses(lambda: 3))
    assert "with an IndexError" in said(lambda: refuses(lambda: 3, IndexError))
    mistakes = {"three": 3, "says nothing": lambda got: got == ""}
    assert "but it gave 3\n      three\nWHY" in said(lambda: refuses(lambda: 3, mistakes=mistakes))
    assert "says nothing" in said(lambda: refuses(lambda: refuse(""), naming=(16,), mistakes=mistakes))
    assert "says nothing" not in said(lambda: refuses(lambda: refuse("no"), naming=(16,), mistakes=mistakes))
    assert "raised IndexError" in said(lambda: refuses(lambda: [][0]))
    assert "not done yet" in said(lambda: refuses(lambda: (_ for _ in ()).throw(NotImplementedError("later")), Exception))


def test_what_an_author_cannot_compare_is_an_error_of_the_author():
    with pytest.raises(TypeError, match="cannot compare with a object"):
        expect(1, object())


def test_hidden_inputs_come_from_the_secret_and_the_check():
    draws = []
    for secret, name in ((b"a", "x"), (b"a", "x"), (b"b", "x"), (b"a", "y")):
        use_seed(seed_for(secret, name))
        draws.append(hidden_random().random())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


# ---------------------------------------------------------------- what of minikv may be used


@pytest.fixture
def notebook():
    names = {"__name__": "__main__", "lock_minikv": lock_minikv, "oracle": oracle}
    exec("from minikv.cache.blocks import blocks_for\nimport math\nlock_minikv()", names)
    yield names
    checks.unlock(names)
    assert builtins.__import__ is checks._import


@pytest.mark.parametrize(
    "code",
    ["import minikv", "from minikv.cache.blocks import BlockPool", "from minikv.cache import blocks", "import minikv.cache.blocks as b",
     "from minikv.cache.blocks import *", "def f():\n    from minikv.cache.prefix import PrefixCache\nf()"],
)  # fmt: skip
def test_what_is_not_given_cannot_be_imported(notebook, code):
    with pytest.raises(ImportError, match="is not given in this notebook"):
        exec(code, notebook)


def test_what_is_given_can_and_others_are_not_locked(notebook):
    exec("from minikv.cache.blocks import blocks_for\nimport json, numpy as np\nfrom torch import nn", notebook)
    import minikv.cache.prefix  # noqa: F401

    exec("import minikv", {"__name__": "__main__"})


def test_only_a_check_may_ask_the_oracle(notebook):
    exec("assert oracle('minikv.cache.blocks.blocks_for')(5, 4) == 2", notebook)
    with pytest.raises(ImportError, match="for the checks only"):
        exec("def answer():\n    return oracle('minikv.cache.blocks.blocks_for')(5, 4)\nanswer()", notebook)
