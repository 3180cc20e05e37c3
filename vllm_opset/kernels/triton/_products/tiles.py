"""The tiles of matrix products: the order in which programs take them, and the launch of a product by experts."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_opset.kernels.triton import _launch


class Order(NamedTuple):
    """The choices of experts by blocks, as `permute` gives them, for rows of x with top_k choices each."""

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    top_k: int

    @property
    def num_blocks(self) -> int:
        return self.expert_ids.shape[0]  # len() of a tensor takes PyTorch twice as long

    @property
    def block_size(self) -> int:
        return self.sorted_token_ids.shape[0] // self.num_blocks


class Product(NamedTuple):
    """The operands of one grouped_gemm, and `out`, which it writes.

    read_once: whether each weight is read once. Then it must not displace other data in the last-level cache.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    order: Order
    out: torch.Tensor
    read_once: bool

    def launch(self, kernel: triton.JITFunction, tile: dict[str, int], *scales, **constants) -> None:
        """Launches one program for each tile of a block's rows and each tile of the weight's.

        tile: BLOCK_M and BLOCK_N, and other launch arguments. scales, constants: what the kernel takes besides.
        """
        (_, num_outputs, _), (sorted_token_ids, expert_ids, top_k) = self.weight.shape, self.order
        tiles = _launch.cdiv(self.order.block_size, tile["BLOCK_M"])
        num_tiles = len(expert_ids) * tiles
        _launch.launch(
            kernel, (num_tiles * _launch.cdiv(num_outputs, tile["BLOCK_N"]),),
            self.x, self.x.stride(0), self.weight, self.bias, *scales, sorted_token_ids, expert_ids, self.out,
            len(self.out), num_tiles, top_k, OUTPUTS=num_outputs, COLUMNS=self.x.shape[1],
            BLOCK_SIZE=self.order.block_size, TILES=tiles, READ_ONCE=self.read_once,
            **constants, **tile, **_launch.launch_options(self.x.device),
        )  # fmt: skip


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
