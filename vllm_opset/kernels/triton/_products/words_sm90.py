"""Units of packed weights on Hopper GPUs, WIDTH columns of each row, and the order of columns in which wgmma has them.

A product is a sum over columns, whose order does not matter. Four threads share a row of wgmma's factor. Thread t has
the t-th 32 columns of the row, which are 16 bytes and share a scale. x is stored in the same order of columns.

Four instructions make eight values of a word four pairs: the values i and i + 4, for each i.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WIDTH = gl.constexpr(128)  # A unit has so many columns.
WORDS = gl.constexpr(WIDTH.value // 8)  # A row of a unit has so many words of 32 bits.
GROUPS = gl.constexpr(WORDS.value // 4)  # A row of a unit has so many groups of columns. Each thread has one of them.


@gluon.constexpr_function
def words_layout(rows, warps):
    """The words of a unit [rows, WORDS] in those threads that multiply them."""
    registers, of_warps, row = [[0, 1], [0, 2], [8, 0]], [], 16
    while row < 16 * warps:
        of_warps.append([row, 0])
        row *= 2
    while row < rows:
        registers.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(
        registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, WORDS.value]
    )


@gluon.constexpr_function
def groups_layout(rows, warps):
    """The words by groups: [rows, groups, words of one]."""
    layout = words_layout(rows, warps)

    def split(bases):
        return [[row, word // 4, word % 4] for row, word in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), [], [rows, GROUPS.value, 4]
    )


@gluon.jit
def rows_and_groups(ROWS: gl.constexpr):
    """The rows and the groups of a unit's scales, in the threads that widen their weights."""
    OF_GROUP: gl.constexpr = gl.SliceLayout(2, groups_layout(ROWS, gl.num_warps()))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OF_GROUP))
    return row, gl.arange(0, GROUPS, gl.SliceLayout(0, OF_GROUP))


@gluon.jit
def words_of(unit):
    """The words of a unit in shared memory, by row and group."""
    ROWS: gl.constexpr = unit.shape[0]
    LAYOUT: gl.constexpr = words_layout(ROWS, gl.num_warps())
    BY_GROUP: gl.constexpr = groups_layout(ROWS, gl.num_warps())
    return gl.convert_layout(unit.load(LAYOUT).reshape([ROWS, GROUPS, 4]), BY_GROUP, True)


@gluon.jit
def factor_of(pairs, FACTOR: gl.constexpr):
    """The factor of wgmma [rows, WIDTH] from the values of all words. pairs: both values of each of the four pairs."""
    a, b, c, d, e, f, g, h = pairs
    first = gl.join(gl.join(a, e), gl.join(c, g))
    second = gl.join(gl.join(b, f), gl.join(d, h))
    y = gl.join(first, second)  # by row, group, word, then i // 2, i % 2, and the one of the pair
    y = y.permute([0, 2, 3, 4, 1, 5]).reshape([y.shape[0], WIDTH])
    return gl.convert_layout(y, FACTOR, True)


@triton.jit
def reordered(x, IN_HALVES: gl.constexpr):
    """Columns [rows, WIDTH] of x in the order in which threads have those of the weight.

    IN_HALVES: whether a word's values are by turns of the first and of the second half of a group, as in int4. Those of
    MXFP4 are of eight columns.
    """
    if IN_HALVES:
        x = x.reshape([x.shape[0], GROUPS, 2, 4, 2, 2])  # by group, i % 2, word, the one of the pair, i // 2
        x = x.permute([0, 3, 5, 2, 1, 4])
    else:
        x = x.reshape([x.shape[0], GROUPS, 4, 2, 2, 2])  # by group, word, the one of the pair, i // 2, i % 2
        x = x.permute([0, 2, 4, 5, 1, 3])
    return x.reshape([x.shape[0], WIDTH])
