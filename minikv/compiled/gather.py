"""Rows of a table, by their numbers: what a model does first with its tokens.

It is hardly any work. But torch's index_select and the two views before it take 12 us, and some 75 after a step that went
through all of the memory, when nothing of them is in a cache any more. One more kernel in a step takes about 1.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import math

import torch
from numba import carray, types

from minikv.compiled.cfunction import compiled_function
from minikv.compiled.simd import address_of, pointer_to, take_ticket, ticket_done

# What the compiled loop takes, by its place. Addresses: TABLE [TABLE_ROWS, WIDTH]; NUMBERS [ROWS] int64; OUT [ROWS, WIDTH].
# TICKET is the next one, DONE counts the tickets done.
TICKET, DONE, ROWS, TABLE, TABLE_ROWS, WIDTH, NUMBERS, OUT, FIELDS = range(9)
ROWS_A_TICKET = 16


def kernel(dtype: torch.dtype) -> int:
    """Address of the C function; its arguments are FIELDS whole numbers, as above. A row that the table does not have is all nan."""
    return compiled_function(_gather, dtype, 1)


def tickets(rows: int) -> int:
    """How many tickets there are."""
    return -(-rows // ROWS_A_TICKET)


def _gather(arguments):
    """What each thread does: take the next few rows until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    table = carray(pointer_to(a[TABLE], arguments), (a[TABLE_ROWS], a[WIDTH]))
    numbers = carray(pointer_to(a[NUMBERS], types.int64), (a[ROWS],))
    out = carray(pointer_to(a[OUT], arguments), (a[ROWS], a[WIDTH]))
    while True:
        first = take_ticket(address_of(arguments)) * ROWS_A_TICKET
        if first >= a[ROWS]:
            break
        for r in range(first, min(first + ROWS_A_TICKET, a[ROWS])):
            known = 0 <= numbers[r] < a[TABLE_ROWS]
            for i in range(a[WIDTH]):
                out[r, i] = table[numbers[r], i] if known else math.nan
        ticket_done(address_of(arguments) + 8 * DONE)
