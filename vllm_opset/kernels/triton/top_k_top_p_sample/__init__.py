"""top_k_top_p_sample without a sort: estimate the cut-offs from a sample, list candidates near them, filter and sample.

The filters that a call gives decide its variant, because each variant leaves out what its filters do not need:

- `unfiltered`: samples among all tokens.
- `top_k`: lists candidates. The cut-off of top-k is always among them, except for ties.
- `all_filters`: reads rows again whose candidates miss the cut-off of top-p or min-p.

PyTorch serves calls without keys, whatever their variant: its argmax takes Python less time than the launches here.

`read` describes how the kernels work together.
"""

import torch

from vllm_opset import ops
from vllm_opset.kernel import kernel
from vllm_opset.kernels.triton import _launch, _supports
from vllm_opset.kernels.triton.top_k_top_p_sample import _rows, finish, read, reread
from vllm_opset.ops.sampling.top_k_top_p_sample import TopKTopPSampleProblem, check_processed
from vllm_opset.variants import Variant, Variants

UNFILTERED, TOP_K, ALL_FILTERS = "unfiltered", "top_k", "all_filters"
MAX_VOCABULARY = 2**22  # the sum of this many weights fits 64-bit fixed point
FEW_CHUNKS = 128  # one compiled variant serves all rows with at most this many chunks


def filters_of(logits, keys, temperature=None, top_k=None, top_p=None, min_p=None, processed=None) -> frozenset[str]:
    """The filters that a call gives."""
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return frozenset(name for name, values in filters.items() if values is not None)


VARIANTS = Variants(
    filters_of,
    Variant(UNFILTERED, can=lambda filters: not filters),
    Variant(TOP_K, can=lambda filters: filters <= {"top_k"}),
    Variant(ALL_FILTERS),
)


def supports(problem: TopKTopPSampleProblem) -> str | None:
    """fp32, bf16 and fp16 logits of up to 4,194,304 tokens."""
    if problem.vocab_size > MAX_VOCABULARY:
        return f"sums over a row are sized for {MAX_VOCABULARY} tokens"
    return _supports.floats(problem)


@kernel(ops.top_k_top_p_sample, name="triton", supports=supports, variants=VARIANTS)
def top_k_top_p_sample(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    processed: str | None = None,
    variant: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_processed(processed, keys)
    if keys is None:
        return logits.argmax(dim=-1), None
    num_rows, vocab_size = logits.shape
    device, options = logits.device, _launch.launch_options(logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    out = None if processed is None else torch.empty(logits.shape, dtype=torch.float32, device=device)
    if num_rows == 0:
        return tokens, out
    values = _launch.parameters("top_k_top_p_sample", device, num_rows)
    chunk, capacity = values["chunk"], min(vocab_size, values["list_capacity"])
    num_chunks = _launch.cdiv(vocab_size, chunk)
    wants_processed = int(processed is not None)
    picked = VARIANTS.of(variant, logits, keys, temperature, top_k, top_p, min_p)
    filtered, rereads = picked != UNFILTERED, picked == ALL_FILTERS

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ints = empty(num_rows, _rows.NUM_INTS.value, dtype=torch.int32)
    floats = empty(num_rows, _rows.NUM_FLOATS.value, dtype=torch.float32)
    parts = empty(num_rows * num_chunks, _rows.NUM_PARTS.value, dtype=torch.float32)
    part_ids = empty(num_rows * num_chunks, dtype=torch.int32)
    # No kernel reads what its variant does not need, and an allocation takes 1.7 of the 47 microseconds of a draw.
    pivot_sums, listed, listed_ids = floats, floats, ints
    if rereads:
        pivot_sums = empty(num_rows * num_chunks, _rows.NUM_PIVOTS.value, dtype=torch.float32)
    if filtered:
        listed = empty(num_rows * capacity, dtype=torch.float32)
        listed_ids = empty(num_rows * capacity, dtype=torch.int32)

    registers, row_registers = (_launch.registers(device, values[name]) for name in ("registers", "row_registers"))
    # `given` has a bit for each setting; kernels do not read settings that are off. So one compiled variant serves all
    # combinations of settings.
    given = sum(1 << bit for bit, setting in enumerate((temperature, top_k, top_p, min_p)) if setting is not None)
    settings = tuple(
        dummy if setting is None else setting
        for setting, dummy in ((temperature, floats), (top_k, ints), (top_p, floats), (min_p, floats))
    )
    strides = tuple(1 if setting is None else setting.stride(0) for setting in (temperature, top_k, top_p, min_p, keys))

    if filtered:
        _launch.launch(
            read.start, (num_rows,),
            logits, logits.stride(), vocab_size, keys, given, settings, strides, wants_processed, ints, floats,
            LIST_LENGTH=values["list_length"], num_warps=values["row_warps"], **options,
        )  # fmt: skip
    _launch.launch(
        read.read, (num_rows * num_chunks,),
        logits, logits.stride(), vocab_size, num_chunks, keys, given, settings, strides, wants_processed,
        ints, floats, parts, part_ids, pivot_sums, listed, listed_ids, capacity,
        CHUNK=chunk, FILTERED=filtered, REREAD=rereads, num_warps=values["warps"], **registers, **options,
    )  # fmt: skip
    chunks = max(FEW_CHUNKS, _launch.next_power_of_2(num_chunks))
    if rereads:
        programs = min(max(values["reread_programs"] // num_rows, 1), num_chunks)
        _launch.launch(
            reread.reread, (num_rows * programs,),
            logits, logits.stride(), vocab_size, num_chunks, programs, keys, given, settings, strides, wants_processed,
            ints, floats, parts, part_ids, pivot_sums, listed, listed_ids, capacity,
            CHUNK=chunk, CHUNKS=chunks, num_warps=values["warps"], **row_registers, **options,
        )  # fmt: skip
    _launch.launch(
        finish.finish, (num_rows,),
        logits, logits.stride(), vocab_size, num_chunks, keys, tokens, given, settings, strides, wants_processed,
        ints, floats, parts, part_ids, pivot_sums, listed, listed_ids, capacity,
        CHUNK=chunk, CHUNKS=chunks, FILTERED=filtered, REREAD=rereads,
        num_warps=values["row_warps"], **row_registers, **options,
    )  # fmt: skip
    if out is not None:
        _launch.launch(
            read.process, (num_rows * num_chunks,),
            logits, logits.stride(), vocab_size, num_chunks, given, settings, strides, ints, floats, out,
            CHUNK=chunk, LOGPROBS=processed == "logprobs", num_warps=values["warps"], **options,
        )  # fmt: skip
    return tokens, out
