"""The queries of prefill_sm90: the register layout of their rows, and their conversion to fp8 for a cache in fp8."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_opset.kernels.triton.paged_attention._call import WARPGROUP
from vllm_opset.kernels.triton.paged_attention._load_sm90 import WARPGROUP_ROWS
from vllm_opset.kernels.triton.paged_attention._tile import power_of_rows

# The largest power of two in a row of queries, once scaled. So the row stays below 256, and e4m3 ends at 448.
E4M3_PEAK = gl.constexpr(128)
E4M3_BITS = gl.constexpr(-(2**20))  # of fp32: the sign, the exponent, and as much of the fraction as e4m3 has


@gluon.constexpr_function
def coalesced(block_d):
    """The layout of rows in which they are loaded and stored: a warp takes whole ones."""
    return gl.BlockedLayout([1, 8], [256 // block_d, block_d // 8], [WARPGROUP, 1], [1, 0])


@gluon.constexpr_function
def as_scores(block_d):
    """A layout in which a thread has elements of the rows of which it also has scores.

    So a number for each row is where scores need it. Four threads share a row, and take 16 bytes each at a time.
    """
    columns = [[0, 1 << bit] for bit in range(block_d.bit_length() - 1)]
    registers = [*columns[:3], *columns[5:], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, [*columns[3:5], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [WARPGROUP_ROWS.value, block_d]
    )


@gluon.jit
def in_two_fp8(q):
    """The rows of q as sums of two matrices in e4m3, and the factors by which these are to be multiplied.

    For q in bf16, the sum is within 2^-16 of the row's largest element. The first matrix is cut off instead of rounded.
    A rounded one had to be converted back for the difference, and ptxas 12.8 then used stale registers.
    """
    q = q.to(gl.float32)
    power, inverse = power_of_rows(q)
    q *= (inverse * E4M3_PEAK)[:, None]
    high = (q.to(gl.int32, bitcast=True) & E4M3_BITS).to(gl.float32, bitcast=True)
    return _in_fp8(high), _in_fp8(q - high), power * (1 / E4M3_PEAK)


@gluon.jit
def _in_fp8(x):
    """x in e4m3, four elements at a time.

    They are put together by a sum. Otherwise, the ptxas of CUDA 12.8 merges two conversions in one instruction, and
    uses stale registers where it finds two that convert the same.
    """
    code: gl.constexpr = """
    {
        .reg .b16 low, high;
        .reg .b32 wide_low, wide_high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        cvt.u32.u16 wide_low, low;
        cvt.u32.u16 wide_high, high;
        mad.lo.u32 $0, wide_high, 65536, wide_low;
    }
    """
    return gl.inline_asm_elementwise(code, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)
