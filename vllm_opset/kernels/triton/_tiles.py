"""The order in which programs take the tiles of a matrix product."""

import triton
import triton.language as tl


@triton.jit
def tile_of(index, num_tiles, num_columns, GROUP: tl.constexpr):
    """The tile of rows and the tile of columns that are taken as number `index`.

    GROUP of the num_tiles tiles of rows take the same one of num_columns tiles of the weight one after the other, so
    the last-level cache still holds it.
    """
    in_group = GROUP * num_columns
    first_tile = index // in_group * GROUP
    grouped = tl.minimum(num_tiles - first_tile, GROUP)
    return first_tile + index % in_group % grouped, index % in_group // grouped
