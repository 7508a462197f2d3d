"""A vector of floats as a Numba value: as many numbers as one instruction works on.

A compiler turns many plain loops into vector instructions by itself, but it gives up where a loop sums up, where it
cannot rule out that two arrays overlap, or where the loop is short; attention has all three. Here the vectors are
spelled out instead: ``load`` takes the next few numbers of an array, ``add_product`` works on all of them at once and
``total`` adds up what is in the lanes. LLVM knows such vectors on every processor; where the processor's own are
shorter (8 floats are two of ARM's registers), it takes several of them.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

ADD_IN_ANY_ORDER = ("reassoc", "contract", "nsz")


class Vector(types.Type):
    """``lanes`` numbers of type ``dtype``."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.lanes))


def number_pointer(context, builder, array_type, array, place):
    """Pointer to a number of an array, counted from its first one as they lie in memory."""
    return builder.gep(make_array(array_type)(context, builder, array).data, [place])


def row_pointer(context, builder, array_type, array, row, at):
    """Pointer to array[row, at]; a row's numbers lie behind each other. No index counts from the end, so nothing is checked.

    Python's rule for negative indices costs three instructions a row; without it, products of many rows ran at 83 instead of 80
    GFLOP/s, one thread.
    """
    table = make_array(array_type)(context, builder, array)
    stride = builder.extract_value(table.strides, 0)  # bytes
    start = builder.gep(builder.bitcast(table.data, ir.IntType(8).as_pointer()), [builder.mul(row, stride)])
    return builder.gep(builder.bitcast(start, table.data.type), [at])


def load_vector(builder, pointer, vector: Vector):
    """The vector that begins with the number at ``pointer``."""
    place = builder.bitcast(pointer, ir.VectorType(pointer.type.pointee, vector.lanes).as_pointer())
    return builder.load(place, align=_align(vector))


def store_vector(builder, pointer, value, vector: Vector) -> None:
    """The other way around."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=_align(vector))


def _align(vector: Vector) -> int:
    return int(vector.dtype.bitwidth) // 8  # arrays start anywhere: no more than one number's alignment is certain


@intrinsic
def load(context, like, row, at):
    """row[at : at + lanes] of a contiguous row, as a vector like ``like``."""

    def code(context, builder, signature, arguments):
        return load_vector(builder, number_pointer(context, builder, row, *arguments[1:]), like)

    return like(like, row, types.intp), code


@intrinsic
def store(context, row, at, value):
    """row[at : at + lanes] = value."""

    def code(context, builder, signature, arguments):
        store_vector(builder, number_pointer(context, builder, row, *arguments[:2]), arguments[2], value)
        return context.get_dummy_value()

    return types.void(row, types.intp, value), code


@intrinsic
def load_at(context, like, table, row, at):
    """table[row, at : at + lanes] as a vector like ``like``, without a look for negative indices."""

    def code(context, builder, signature, arguments):
        return load_vector(builder, row_pointer(context, builder, table, *arguments[1:]), like)

    return like(like, table, types.intp, types.intp), code


@intrinsic
def prefetch_at(context, table, row, at):
    """Begin to bring table[row, at], and what shares its cache line, into the cache; do not wait. ``at`` may lead into later rows."""

    def code(context, builder, signature, arguments):
        pointer = builder.bitcast(row_pointer(context, builder, table, *arguments), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, keep it near, data
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp), code


@intrinsic
def zeros(context, pointer):
    """Zeros in a vector of the type that ``pointer`` points to."""

    def code(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(pointer.dtype), [0.0] * pointer.dtype.lanes)

    return pointer.dtype(pointer), code


@intrinsic
def lanes_of(context, vector):
    """How many numbers are in a vector, or in each vector of a tile, as a constant."""

    lanes = getattr(vector, "vector", vector).lanes  # a tile's are its vectors'

    def code(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), lanes)

    return types.int64(vector), code


@intrinsic
def add(context, a, b):
    """a + b, lane by lane."""

    def code(context, builder, signature, arguments):
        return added(builder, *arguments)

    return a(a, b), code


def added(builder, a, b):
    """a + b, lane by lane."""
    return builder.fadd(a, b, flags=ADD_IN_ANY_ORDER)


@intrinsic
def larger(context, a, b):
    """The larger of a and b, lane by lane; b where one is nan."""

    def code(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), code


@intrinsic
def add_product(context, total, a, b):
    """total + a * b, lane by lane."""

    def code(context, builder, signature, arguments):
        return added_product(builder, *arguments)

    return total(total, a, b), code


def added_product(builder, total, a, b):
    """total + a * b, lane by lane."""
    return added(builder, total, builder.fmul(a, b, flags=ADD_IN_ANY_ORDER))


def load_everywhere(builder, pointer, vector: Vector):
    """The number at ``pointer`` in every lane of a vector."""
    number = builder.load(pointer)
    one = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, vector.lanes), ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    return _shuffle(builder, one, one, [0] * vector.lanes)


@intrinsic
def total(context, vector):
    """The sum over the lanes."""

    def code(context, builder, signature, arguments):
        return builder.extract_element(vector_of_totals(builder, arguments), ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), code


def vector_of_totals(builder, vectors):
    """The totals of one, two or four vectors as one vector: together, for half the instructions of one by one.

    Each step adds upper halves to lower halves, with as many of the sums in one vector as there is room for.
    """
    vectors, groups, width = list(vectors), 1, vectors[0].type.count  # each vector holds ``groups`` sums of ``width`` lanes
    while width > 1:
        width //= 2
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        groups *= 2 if len(vectors) > 1 else 1
        lower = [group * 2 * width + lane for group in range(groups) for lane in range(width)]
        vectors = [added(builder, _shuffle(builder, x, y, lower), _shuffle(builder, x, y, [i + width for i in lower])) for x, y in pairs]
    while len(vectors) > 1:  # fewer lanes than vectors: no sum is left to be made, only to be joined
        size = vectors[0].type.count
        vectors = [_shuffle(builder, x, y, range(2 * size)) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _shuffle(builder, x, y, lanes):
    """The given lanes of x and y, counted through both."""
    lanes = list(lanes)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


@intrinsic
def take_ticket(context, address):
    """The whole number at ``address``, which is one more afterwards; no two threads get the same."""

    def code(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), code


@intrinsic
def ticket_done(context, address):
    """One more at ``address``; whoever sees it there (``tickets_done``) also sees all that this thread has written."""

    def code(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "release")

    return types.int64(types.int64), code


@intrinsic
def tickets_done(context, address):
    """The whole number at ``address``, looked up anew each time."""

    def code(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def call_kernel(context, kernel, arguments):
    """Call the C function at address ``kernel`` with the address ``arguments``."""

    def code(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])  # a pointer is passed as a whole number of its size is
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def address_of(context, pointer):
    """A pointer as a whole number."""

    def code(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(pointer), code


@intrinsic
def start_of(context, array):
    """The address of an array's first number."""

    def code(context, builder, signature, arguments):
        return builder.ptrtoint(make_array(array)(context, builder, arguments[0]).data, ir.IntType(64))

    return types.int64(array), code


@intrinsic
def pointer_to(context, address, like):
    """A whole number as a pointer of the type of ``like``."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    number = like.dtype.dtype if isinstance(like, types.CPointer) else like.dtype
    target = types.CPointer(number)
    return target(types.int64, like), code
