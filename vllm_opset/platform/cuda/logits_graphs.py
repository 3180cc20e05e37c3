"""CUDA graphs of the LM head, for steps in which each request has one token.

vLLM replays a graph of the model in a decode step. It then gathers the last token's hidden state of each request and
multiplies it by the LM head, from Python. If a model is small, the GPU waits for that. Here, a second graph multiplies:
with one token each, the requests are the first rows of the model's output. All other steps take vLLM's own way.
"""

import inspect

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.model.sampler import OpsetSampler
from vllm_opset.platform import second_runner
from vllm_opset.platform.cuda.capturing import captured
from vllm_opset.variants import powers_up_to

# The graphs of 1, 2, 4 … 128 rows keep 255 rows of logits together. In bf16, those of 128,256 tokens take 65 MB, which
# vLLM does not count when it sizes the KV cache.
MOST_ROWS = 128
# The attributes that a model's `compute_logits` may use. Other code may copy from the host, which no graph can.
ALLOWED_ATTRIBUTES = {"logits_processor", "lm_head", "model", "embed_tokens"}


def capture(worker: Worker) -> None:
    """Capture the graphs if the engine allows them. Call it when vLLM has captured its own."""
    runner = worker.model_runner
    if second_runner.sample_by.bridge.needed() and _may_capture(worker):
        second_runner.sample_by(runner, LogitsGraphs(runner).sample)


def drop(worker: Worker) -> None:
    """Let go of the graphs. Call it before vLLM ends its runner, whose graphs share their pool of memory."""
    runner = getattr(worker, "model_runner", None)  # None if the start failed
    if runner is not None:
        vars(runner).pop("sample", None)


def _may_capture(worker: Worker) -> bool:
    """Whether a request's logits are those of the last row of its hidden states, in one process.

    Adapters change the head, and requests with drafts have logits for several rows. vLLM has a pool of its own for
    graphs whose memory sleeps. With vLLM's own sampler, its own path to the sampler remains.
    """
    config, runner = worker.vllm_config, worker.model_runner
    return (
        getattr(getattr(runner, "cudagraph_manager", None), "hidden_states", None) is not None
        and type(runner.sampler) is OpsetSampler
        and runner.model_state.num_new_sampled_tokens_per_step == 1
        and config.parallel_config.world_size_across_dp == 1
        and config.speculative_config is None
        and config.lora_config is None
        and not config.model_config.enable_sleep_mode
        and _is_capturable(runner.model, runner.dtype)
    )


def _is_capturable(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether vLLM's own layer gives the model's logits, and multiplies by the head without a copy of it.

    vLLM's kernels for quantised weights keep memory for each stream, and after its captures vLLM allows no more of it.
    """
    used = inspect.unwrap(type(model).compute_logits).__code__.co_names
    processor = getattr(model, "logits_processor", None)
    if type(processor) is not LogitsProcessor or not ALLOWED_ATTRIBUTES.issuperset(used):
        return False
    method = getattr(getattr(model, "lm_head", None), "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedEmbeddingMethod):
        return False
    without_copy = {None, dtype}
    if current_platform.is_cuda():
        without_copy.add(torch.float32)  # out of vLLM's tree, it copies the head in fp32
    return processor.head_dtype in without_copy


class LogitsGraphs:
    """A graph of the LM head for 1, 2, 4 … rows of the output of the graphs that a runner has captured."""

    def __init__(self, runner) -> None:
        self._runner, self._sample = runner, runner.sample
        self._hidden_states: torch.Tensor = runner.cudagraph_manager.hidden_states
        self._stream = torch.cuda.Stream()
        most = min(MOST_ROWS, runner.max_num_reqs, len(self._hidden_states))
        self._sizes = list(powers_up_to(most))
        self._captured = {size: self._capture(size) for size in reversed(self._sizes)}

    @torch.inference_mode()
    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph, and the logits that it writes.

        The next replay of the model may overwrite the logits, since the pool is shared. All that reads them is launched
        before it, on the same stream.
        """
        rows = self._hidden_states[:size]
        return captured(
            lambda: self._runner.model.compute_logits(rows), self._runner.cudagraph_manager.pool, self._stream
        )

    def sample(self, hidden_states: torch.Tensor, input_batch, grammar_output) -> tuple:
        """vLLM's method `sample` of its second model runner."""
        num_reqs = input_batch.num_reqs
        if (
            grammar_output is not None
            or input_batch.num_tokens != num_reqs
            or num_reqs > self._sizes[-1]
            # A step that no graph replayed has another tensor.
            or hidden_states.data_ptr() != self._hidden_states.data_ptr()
        ):
            return self._sample(hidden_states, input_batch, grammar_output)
        graph, logits = self._captured[next(size for size in self._sizes if size >= num_reqs)]
        graph.replay()
        output = self._runner.sampler(logits[:num_reqs], input_batch)
        return output, output.num_sampled, output.num_rejected
