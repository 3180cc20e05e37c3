"""Calls of kernels before the server is ready, which only vLLM's first model runner needs."""

from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_opset.model import warm_up

DRAFTING = (1, 9, 16)  # requests: Triton compiles anew for 1 and for multiples of 16; vLLM has two versions of top-k


def one_step(runner: GPUModelRunner) -> None:
    """Run a step of one token through the model and the sampler, and compute its slot mapping."""
    attends = not runner.is_pooling_model
    _, last = runner._dummy_run(1, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=attends)
    warm_up.head(runner, last)
    warm_up.sampler(runner)
    if attends:
        slot_mapping(runner)
    warm_up.forget_calls()


def beside_the_model(runner: GPUModelRunner) -> None:
    """Run the kernels of a step that belong to neither the model nor the sampler."""
    slot_mapping(runner)
    if runner.speculative_config is not None:
        rejection(runner)


def slot_mapping(runner: GPUModelRunner) -> None:
    """Compute the slot mapping of one token."""
    starts = torch.tensor([0, 1], dtype=torch.int32, device=runner.device)
    runner.input_batch.block_table.compute_slot_mapping(1, starts, torch.zeros_like(starts[:1], dtype=torch.int64))


def rejection(runner: GPUModelRunner) -> None:
    """Run vLLM's kernels for drafts in variants that its dummy run omits: only greedy requests, and top-k as int32."""
    greedy = SimpleNamespace(all_greedy=True, all_random=False)
    for num_reqs in DRAFTING:
        drafts = SpecDecodeMetadata.make_dummy([[0]] * num_reqs, runner.device)
        ones = torch.ones(num_reqs, device=runner.device)
        sampled = SimpleNamespace(
            all_greedy=False, all_random=False, generators={}, temperature=ones, top_k=ones.int(), top_p=ones
        )
        for metadata in (greedy, sampled):
            logits = torch.zeros(num_reqs, runner.model_config.get_vocab_size(), device=runner.device)
            rejection_sample(
                drafts.draft_token_ids, drafts.num_draft_tokens, drafts.max_spec_len, drafts.cu_num_draft_tokens,
                None, apply_sampling_constraints(logits, drafts.cu_num_draft_tokens, metadata),
                ones[:, None].int(), metadata,
            )  # fmt: skip
