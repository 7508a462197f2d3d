"""A tile of sums that stays in the processor's registers while products are added to it.

What makes a product of matrices fast is that the processor never waits for a number: every number that is loaded must be
used several times before it is let go. A tile of 3 x 4 sums does that: three numbers on one side and four on the other are
seven loads for twelve products. (With few rows it is memory that is waited for; then sums are many only so that none waits for
the one before.) Twelve sums, three numbers that are held and one that passes by fill the 16 vector registers
of AVX2. The order of the loads counts: with four held and three that pass by, the compiler spills, and the speed is half.

A tile is one value to Numba, rows x columns of vectors, and its size belongs to its type: one function serves tiles of
any size, and what would be dozens of lines of arithmetic is one call for Numba to understand.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from minikv.compiled.simd import (
    Vector,
    added,
    added_product,
    load_everywhere,
    load_vector,
    number_pointer,
    row_pointer,
    store_vector,
    vector_of_totals,
)


class Tile(types.Type):
    """``rows`` x ``columns`` vectors."""

    def __init__(self, vector: Vector, rows: int, columns: int) -> None:
        self.vector, self.rows, self.columns = vector, rows, columns
        super().__init__(name=f"Tile({vector}, {rows}, {columns})")


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile) -> None:
        vector = manager.lookup(tile.vector).get_value_type()
        super().__init__(manager, tile, ir.ArrayType(vector, tile.rows * tile.columns))


@intrinsic(prefer_literal=True)
def no_sums(context, zero, rows, columns):
    """A tile of zeros, of vectors like ``zero``; its size must be written as two numbers."""
    tile = Tile(zero, rows.literal_value, columns.literal_value)

    def code(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(tile), None)

    return tile(zero, rows, columns), code


def _add_products(builder, tile: Tile, sums, left: Callable[[int], Any], right: Callable[[int], Any]):
    """``sums`` + left(row) * right(column). The shorter side is loaded at once and held, the other passes by."""
    held = [left(i) for i in range(tile.rows)] if tile.rows <= tile.columns else [right(j) for j in range(tile.columns)]
    for passing in range(max(tile.rows, tile.columns)):
        number = right(passing) if tile.rows <= tile.columns else left(passing)
        for other, one in enumerate(held):
            place = other * tile.columns + passing if tile.rows <= tile.columns else passing * tile.columns + other
            sums = builder.insert_value(sums, added_product(builder, builder.extract_value(sums, place), one, number), place)
    return sums


@intrinsic
def add_rows_by_rows(context, tile, x, r, y, o, at):
    """tile[i, j] += x[r + i, at : at + lanes] * y[o + j, at : at + lanes]: in the end its lanes add up to dot products."""

    def code(context, builder, signature, arguments):
        sums, x_, r_, y_, o_, at_ = arguments

        def left(i):
            return load_vector(builder, row_pointer(context, builder, x, x_, _plus(builder, r_, i), at_), tile.vector)

        def right(j):
            return load_vector(builder, row_pointer(context, builder, y, y_, _plus(builder, o_, j), at_), tile.vector)

        return _add_products(builder, tile, sums, left, right)

    return tile(tile, x, types.intp, y, types.intp, types.intp), code


@intrinsic
def add_rows_by_row(context, tile, x, r, y, o, at):
    """tile[i, j] += x[r + i, k : k + lanes] * y[o, k : k + lanes] with k = at + j * lanes: several parts of one dot product a row."""

    def code(context, builder, signature, arguments):
        sums, x_, r_, y_, o_, at_ = arguments
        for j in range(tile.columns):
            place = _plus(builder, at_, j * tile.vector.lanes)
            passing = load_vector(builder, row_pointer(context, builder, y, y_, o_, place), tile.vector)
            for i in range(tile.rows):
                mine = load_vector(builder, row_pointer(context, builder, x, x_, _plus(builder, r_, i), place), tile.vector)
                number = i * tile.columns + j
                sums = builder.insert_value(sums, added_product(builder, builder.extract_value(sums, number), mine, passing), number)
        return sums

    return tile(tile, x, types.intp, y, types.intp, types.intp), code


@intrinsic
def add_numbers_by_row(context, tile, numbers, first, step, y, row, at):
    """tile[i, j] += numbers[first + i * step] * y[row, at + j * lanes : at + (j + 1) * lanes]: its lanes are neighbours in a row.

    ``numbers`` may have any shape; they are counted from the first one, as they lie in memory.
    """

    def code(context, builder, signature, arguments):
        sums, numbers_, first_, step_, y_, row_, at_ = arguments

        def left(i):
            place = builder.add(first_, builder.mul(step_, step_.type(i)))
            return load_everywhere(builder, number_pointer(context, builder, numbers, numbers_, place), tile.vector)

        def right(j):
            pointer = row_pointer(context, builder, y, y_, row_, _plus(builder, at_, j * tile.vector.lanes))
            return load_vector(builder, pointer, tile.vector)

        return _add_products(builder, tile, sums, left, right)

    return tile(tile, numbers, types.intp, types.intp, y, types.intp, types.intp), code


@intrinsic
def tile_at(context, tile, table, row, at):
    """A tile like ``tile`` with the numbers table[row + i, at + j * lanes : at + (j + 1) * lanes]."""

    def code(context, builder, signature, arguments):
        value, *place = arguments
        for number, pointer in enumerate(_pointers(context, builder, tile, table, *place)):
            value = builder.insert_value(value, load_vector(builder, pointer, tile.vector), number)
        return value

    return tile(tile, table, types.intp, types.intp), code


@intrinsic
def store_tile(context, table, row, at, tile):
    """The other way around: table[row + i, at + j * lanes : at + (j + 1) * lanes] = tile[i, j]."""

    def code(context, builder, signature, arguments):
        *place, value = arguments
        for number, pointer in enumerate(_pointers(context, builder, tile, table, *place)):
            store_vector(builder, pointer, builder.extract_value(value, number), tile.vector)
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp, tile), code


@intrinsic
def add_columns(context, column, tile):
    """column[i, 0] += the sum over j of tile[i, j]."""

    def code(context, builder, signature, arguments):
        value, other = arguments
        for i in range(tile.rows):
            parts = [builder.extract_value(value, i), *(builder.extract_value(other, i * tile.columns + j) for j in range(tile.columns))]
            value = builder.insert_value(value, functools.reduce(functools.partial(added, builder), parts), i)
        return value

    return column(column, tile), code


@intrinsic
def store_totals(context, table, row, at, tile):
    """table[row + i, at + j] = the sum over the lanes of tile[i, j]; a tile has one column or four."""

    def code(context, builder, signature, arguments):
        table_, row_, at_, value = arguments
        for i in range(tile.rows):
            sums = [builder.extract_value(value, i * tile.columns + j) for j in range(tile.columns)]
            pointer = row_pointer(context, builder, table, table_, _plus(builder, row_, i), at_)
            store_vector(builder, pointer, vector_of_totals(builder, sums), Vector(tile.vector.dtype, tile.columns))
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp, tile), code


def _pointers(context, builder, tile: Tile, table_type, table, row, at):
    """Where the tile's vectors lie in a table, row by row."""
    for i in range(tile.rows):
        for j in range(tile.columns):
            yield row_pointer(context, builder, table_type, table, _plus(builder, row, i), _plus(builder, at, j * tile.vector.lanes))


def _plus(builder, value, number: int):
    return builder.add(value, value.type(number)) if number else value
