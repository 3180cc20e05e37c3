"""A warm-up that compiles every kernel variant that serving can launch, before the first request needs it.

Steps have the numbers of tokens that reach all launch parameters (kernels/triton/launch.yaml). Attention's launches
depend on the number of queries and requests, too (`_attention`).
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset import ops, selection
from vllm_opset.attention.images import ImageTokens
from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.kernels.triton._launch import warm_sizes, warming_up
from vllm_opset.kernels.triton._precompile import precompile
from vllm_opset.model import filters, linear
from vllm_opset.model.sampler import logits_dtypes
from vllm_opset.model.warm_up import sampler
from vllm_opset.ops.attention.paged_batch import BatchSizes, PagedBatch
from vllm_opset.ops.sampling.top_k_top_p_sample import TopKTopPSampleProblem
from vllm_opset.variants import Limits, powers_up_to

# The most tokens of the steps whose kernels are compiled ahead. A longer step takes long to run, and only one
# activation has other launch parameters there.
PRECOMPILED_TOKENS = 2048


@contextmanager
def draws_meanwhile(worker: Worker) -> Iterator[None]:
    """While the context loads a model, compile the kernels that draw tokens in other threads. They need no weights."""
    config, device = worker.model_config, worker.device
    vocab_size, second = config.get_vocab_size(), worker.vllm_config.use_v2_model_runner
    draws = {
        dtype: selection.select(ops.top_k_top_p_sample, TopKTopPSampleProblem(device.type, dtype, vocab_size)).run
        for dtype in (logits_dtypes(config) if second else {torch.float32})
    }

    def compile_draws() -> None:
        torch.cuda.set_device(device)  # of this thread
        with precompile():
            filters.draw_by_each(draws, vocab_size, device, [None])

    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(compile_draws)
        yield
        compiled.result()


def kernels(worker: Worker) -> None:
    """Warm up all kernels. vLLM calls this instead of its own warm-up, before it captures graphs."""
    runner = worker.model_runner
    model(worker)
    sampler(runner)
    if runner.is_pooling_model:
        return
    if worker.vllm_config.use_v2_model_runner:
        _scores(runner)
    else:
        from vllm_opset.platform.v1 import warm_up as first

        first.beside_the_model(runner)


@warming_up()
def model(worker: Worker) -> None:
    """Warm up the model's kernels, all but the sampler's, with either of vLLM's model runners."""
    runner = worker.model_runner
    most_tokens = worker.scheduler_config.max_num_batched_tokens
    with precompile():
        _attention(worker)
        for loaded in worker.models:
            linear.multiply(loaded, worker.scheduler_config.max_num_seqs)
            if worker.model_config.is_moe:
                _experts(loaded, most_tokens)
        if takes_any_values(runner):
            _steps(runner, min(most_tokens, PRECOMPILED_TOKENS))
    _attention(worker)
    _steps(runner, most_tokens)
    runner.maybe_remove_all_loras(runner.lora_config)


def _experts(loaded: torch.nn.Module, most_tokens: int) -> None:
    # Imported late: vLLM's module of experts imports thousands of others.
    from vllm_opset.model import experts

    experts.multiply(loaded, most_tokens)


def takes_any_values(runner) -> bool:
    """Whether a step may compute on values that no kernel wrote, as where kernels are compiled and not launched.

    Layers other than attention may choose experts or states by such values.
    """
    return all(isinstance(layer, Attention) for layer in runner.compilation_config.static_forward_context.values())


def _steps(runner, most_tokens: int) -> None:
    for num_tokens in warm_sizes(runner.device, most_tokens):
        _step(runner, num_tokens)
        if runner.lora_config is not None and num_tokens > 1:
            _step(runner, num_tokens - 1)  # Triton compiles vLLM's kernels for adapters anew for multiples of 16


def _step(runner, num_tokens: int) -> None:
    """Run a step over the most requests it may have. It includes attention if the block table is large enough."""
    num_reqs = min(num_tokens, runner.max_num_reqs)
    longest = num_tokens // num_reqs + num_tokens % num_reqs  # at most: some releases give one request all that is left
    if longest > runner.max_model_len and hasattr(runner, "block_tables"):
        return  # the second model runner would run attention regardless of force_attention
    runner._dummy_run(
        num_tokens,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        force_attention=not runner.is_pooling_model and longest <= runner.max_model_len,
        profile_seq_lens=min(num_tokens, runner.max_model_len),
        remove_lora=False,
        num_active_loras=0 if runner.lora_config is None else runner.lora_config.max_loras,
    )


def _attention(worker: Worker) -> None:
    """Attend the batches that reach all that attention launches while it serves, by one layer of each kind.

    Layers are of one kind if they have the same problem and the same width of the block table.
    """
    if worker.model_runner.is_pooling_model:
        return
    runner, scheduler = worker.model_runner, worker.scheduler_config
    limits = Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, worker.model_config.max_model_len)
    layers = runner.compilation_config.static_forward_context
    kinds = {
        (layers[name].impl.problem, width): layers[name]
        for name, width in _block_table_widths(runner).items()
        if _decodes(layers[name])
    }
    for (_, width), layer in kinds.items():
        for sizes in layer.impl.variants.warm(limits) if layer.impl.variants else ():
            _attend(layer, sizes, width, runner.device)


def _attend(layer: torch.nn.Module, sizes: BatchSizes, width: int, device: torch.device) -> None:
    """Attend a batch of these sizes by a layer, on zeros. width: of the block table."""
    impl, query_lens = layer.impl, sizes.query_lens
    query = torch.zeros(sum(query_lens), impl.num_heads, impl.head_size, dtype=impl.dtype, device=device)
    starts, lens = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([0, *itertools.accumulate(query_lens)], query_lens)
    )
    table = torch.zeros(len(query_lens), width, dtype=torch.int32, device=device)
    batch = PagedBatch(starts, lens, table, max(query_lens), sizes.max_seq_len)
    out = torch.empty_like(query)
    impl.attend(layer, query, layer.kv_cache, batch, out)
    if impl.attends_within_images:
        images = ImageTokens(torch.arange(len(query), device=device), replace(batch, causal=False))
        impl.attend_within_images(layer, query, layer.kv_cache, images, out)


def _block_table_widths(runner) -> dict[str, int]:
    """The blocks that a request has room for, by layer. Triton compiles anew for a stride that 16 does not divide."""
    if hasattr(runner, "block_tables"):  # vLLM's second model runner
        tables = runner.block_tables.input_block_tables
    else:
        from vllm_opset.platform.v1 import slots

        tables = slots.tables(runner)
    groups = runner.kv_cache_config.kv_cache_groups
    return {name: table.stride(0) for group, table in zip(groups, tables, strict=True) for name in group.layer_names}


def _decodes(layer: torch.nn.Module) -> bool:
    impl = getattr(layer, "impl", None)
    return isinstance(impl, OpsetAttentionImpl) and impl.attn_type == AttentionType.DECODER


def _scores(runner) -> None:
    """Run the second model runner's kernels for log-probabilities, for every number of them that a request may want."""
    from vllm.v1.worker.gpu.sample import logprob

    config = runner.model_config
    most = config.get_vocab_size() if config.max_logprobs < 0 else config.max_logprobs
    token = torch.zeros(1, dtype=torch.int64, device=runner.device)
    for ahead in (precompile(logprob.__name__), nullcontext()):
        with ahead:
            for dtype in {config.dtype, torch.float32}:
                logits = torch.zeros(1, config.get_vocab_size(), dtype=dtype, device=runner.device)
                for others in _numbers_of_logprobs(min(most, logprob._MAX_TOPK_BLOCK)):
                    logprob.compute_topk_scores(logits, others, token)


def _numbers_of_logprobs(most: int) -> list[int]:
    """The numbers of log-probabilities beside the chosen token's, at most `most`, that compile all of the variants.

    The kernel's tile is the next power of two of all of them. Triton compiles anew for 1 and for multiples of 16.
    """
    totals = {total for tile in powers_up_to(2 * most + 2) for total in (tile // 2 + 1, tile // 2 + 16, tile)}
    return sorted(total - 1 for total in totals if total - 1 <= most)
