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


def _vector_at(context, builder, array_type, array, index, vector):
    data = make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), context.get_value_type(vector).as_pointer())


def _align(vector: Vector) -> int:
    return int(vector.dtype.bitwidth) // 8  # arrays start anywhere: no more than one number's alignment is certain


@intrinsic
def load(context, like, row, at):
    """row[at : at + lanes] of a contiguous row, as a vector like ``like``."""

    def code(context, builder, signature, arguments):
        pointer = _vector_at(context, builder, signature.args[1], arguments[1], arguments[2], like)
        return builder.load(pointer, align=_align(like))

    return like(like, row, types.intp), code


@intrinsic
def store(context, row, at, value):
    """row[at : at + lanes] = value."""

    def code(context, builder, signature, arguments):
        pointer = _vector_at(context, builder, signature.args[0], arguments[0], arguments[1], value)
        builder.store(arguments[2], pointer, align=_align(value))
        return context.get_dummy_value()

    return types.void(row, types.intp, value), code


def _row_at(context, builder, array_type, array, row, at):
    """Pointer to array[row, at]; a row's numbers lie behind each other. No index counts from the end, so nothing is checked."""
    table = make_array(array_type)(context, builder, array)
    stride = builder.extract_value(table.strides, 0)  # bytes
    start = builder.gep(builder.bitcast(table.data, ir.IntType(8).as_pointer()), [builder.mul(row, stride)])
    return builder.gep(builder.bitcast(start, table.data.type), [at])


@intrinsic
def load_at(context, like, table, row, at):
    """table[row, at : at + lanes] as a vector like ``like``.

    As ``load`` of ``table[row]``, but Python's rule for negative indices costs three instructions a row: products
    of 24 to 512 rows with 384 numbers run at 83 instead of 80 GFLOP/s without it, one thread.
    """

    def code(context, builder, signature, arguments):
        pointer = _row_at(context, builder, signature.args[1], arguments[1], arguments[2], arguments[3])
        return builder.load(builder.bitcast(pointer, context.get_value_type(like).as_pointer()), align=_align(like))

    return like(like, table, types.intp, types.intp), code


@intrinsic
def store_at(context, table, row, at, value):
    """table[row, at : at + lanes] = value."""

    def code(context, builder, signature, arguments):
        pointer = _row_at(context, builder, signature.args[0], arguments[0], arguments[1], arguments[2])
        builder.store(arguments[3], builder.bitcast(pointer, context.get_value_type(value).as_pointer()), align=_align(value))
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp, value), code


@intrinsic
def number(context, row, at):
    """row[at], without a check for negative indices."""

    def code(context, builder, signature, arguments):
        return builder.load(builder.gep(make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]))

    return row.dtype(row, types.intp), code


@intrinsic
def number_at(context, table, row, at):
    """table[row, at], without a check for negative indices."""

    def code(context, builder, signature, arguments):
        return builder.load(_row_at(context, builder, signature.args[0], arguments[0], arguments[1], arguments[2]))

    return table.dtype(table, types.intp, types.intp), code


@intrinsic
def prefetch_at(context, table, row, at):
    """Begin to bring table[row, at], and what shares its cache line, into the cache; do not wait for it."""

    def code(context, builder, signature, arguments):
        pointer = _row_at(context, builder, signature.args[0], arguments[0], arguments[1], arguments[2])
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
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
    """How many numbers are in a vector, as a constant."""

    def code(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), vector.lanes)

    return types.int64(vector), code


@intrinsic
def add(context, a, b):
    """a + b, lane by lane."""

    def code(context, builder, signature, arguments):
        return builder.fadd(*arguments, flags=ADD_IN_ANY_ORDER)

    return a(a, b), code


@intrinsic
def larger(context, a, b):
    """The larger of a and b, lane by lane; b where one is nan."""

    def code(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), code


@intrinsic
def add_product(context, total, a, b):
    """total + a * b, lane by lane; ``a`` may be one number for all lanes."""

    def code(context, builder, signature, arguments):
        sum_, a_, b_ = arguments
        if not isinstance(a, Vector):
            one = builder.insert_element(ir.Constant(b_.type, ir.Undefined), a_, ir.Constant(ir.IntType(32), 0))
            a_ = _shuffle(builder, one, one, [0] * total.lanes)
        return builder.fadd(sum_, builder.fmul(a_, b_, flags=ADD_IN_ANY_ORDER), flags=ADD_IN_ANY_ORDER)

    return total(total, a, b), code


@intrinsic
def total(context, vector):
    """The sum over the lanes, by halves: add the upper half to the lower one until one number is left."""

    def code(context, builder, signature, arguments):
        value, lanes, index = arguments[0], vector.lanes, ir.IntType(32)
        while lanes > 1:
            lanes //= 2
            lower, upper = (_shuffle(builder, value, value, range(start, start + lanes)) for start in (0, lanes))
            value = builder.fadd(lower, upper, flags=ADD_IN_ANY_ORDER)
        return builder.extract_element(value, ir.Constant(index, 0))

    return vector.dtype(vector), code


@intrinsic
def totals(context, a, b, c, d):
    """The four vectors' totals as one vector of four: together, for half the instructions of one by one.

    Each step adds upper halves to lower halves, with as many of the four in one vector as there is room for.
    """
    result = Vector(a.dtype, 4)

    def code(context, builder, signature, arguments):
        vectors, groups = list(arguments), 1  # each vector holds ``groups`` sums of ``width`` lanes
        width = a.lanes
        while width > 1:
            width //= 2
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
            groups *= 2 if len(vectors) > 1 else 1
            lower = [group * 2 * width + lane for group in range(groups) for lane in range(width)]
            vectors = [
                builder.fadd(_shuffle(builder, x, y, lower), _shuffle(builder, x, y, [i + width for i in lower]), flags=ADD_IN_ANY_ORDER)
                for x, y in pairs
            ]
        while len(vectors) > 1:  # fewer than four lanes: no sum is left to be made, only to be joined
            size = vectors[0].type.count
            vectors = [_shuffle(builder, x, y, range(2 * size)) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    return result(a, b, c, d), code


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
def pointer_to(context, address, like):
    """A whole number as a pointer of the type of ``like``."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    number = like.dtype.dtype if isinstance(like, types.CPointer) else like.dtype
    target = types.CPointer(number)
    return target(types.int64, like), code
