"""The last layer of a model, after its attention, computes only the tokens whose hidden states vLLM reads.

These are the last token of each request. vLLM also reads the others of a request that asks for log-probabilities of its
prompt, and then all are computed. The keys and values of all tokens are in the cache by then. So in a step with
prompts, the last output projection and the last MLP multiply as many rows as there are requests.

Three modules are wrapped. In the last layer, the norm at its start leaves out rows of the residual, and the output
projection leaves out rows of what attention gives it. The norm after all layers gives the rows their places again. Rows
that were left out are zero there.

This needs a model whose code treats each row alone in between. That is not read from the source. The model instead runs
twice on random numbers in its last layer: as it is, and with the rows in another order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.attention.backend import AttentionType
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_opset.attention.impl import OpsetAttentionImpl
from vllm_opset.attention.metadata import OpsetMetadata
from vllm_opset.model.fusion import runs_together
from vllm_opset.model.layers import RMSNormLayer

# A step with fewer tokens of each request computes all of them: leaving out rows copies those that stay.
LEAST_TOKENS_OF_REQUEST = 2
# Rounding depends on the place of a row in a product, and gives less than this. Rows that were confused give more.
MOST_DEVIATION = 0.02


class ReadRows:
    """The rows of the current step that vLLM reads. requests: those that ask for log-probabilities of their prompt."""

    def __init__(self) -> None:
        self.requests: set[str] = set()

    def before_step(self, step: SchedulerOutput) -> None:
        """Note which requests begin and end. Call it before each step."""
        self.requests -= step.finished_req_ids
        for request in step.scheduled_new_reqs:
            parameters = request.sampling_params
            if parameters is not None and parameters.prompt_logprobs is not None:
                self.requests.add(request.req_id)

    def of_step(self, layer_name: str, num_tokens: int) -> torch.Tensor | None:
        """The rows of the requests' last tokens, int64 [num_reqs]; None if the last layer is to compute all rows.

        It computes all in CUDA graphs, which serve all kinds of requests. layer_name: of the last attention.
        """
        if self.requests or not is_forward_context_available():
            return None
        context = get_forward_context()
        metadata = context.attn_metadata
        if not isinstance(metadata, dict) or context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            return None
        of_layer: OpsetMetadata = metadata[layer_name]
        starts = of_layer.batch.query_start_loc
        if num_tokens < LEAST_TOKENS_OF_REQUEST * (len(starts) - 1) or _is_capturing(starts.device):
            return None
        return (starts[1:] - 1).clamp_(min=0).long()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Ends(NamedTuple):
    """The norm at the start of a model's last layer, the output projection of its attention, and the norm after it."""

    begin: RMSNormLayer
    projection: RowParallelLinear
    end: RMSNormLayer


def bind(model: nn.Module, vllm_config: VllmConfig, read: ReadRows, step: Callable[[], object]) -> None:
    """Let the last layer of a model compute only the rows that are read, if it can.

    step: runs the model once, with a few tokens.
    """
    if not _reads_last_tokens(vllm_config):
        return
    found = [ends for module in model.modules() if (ends := _ends_of(module)) is not None]
    if len(found) != 1:
        return
    ((ends, layer_name),) = found
    if _treats_rows_alone(ends, step):
        _leave_out(ends, lambda num_tokens: read.of_step(layer_name, num_tokens))


def _reads_last_tokens(vllm_config: VllmConfig) -> bool:
    """Whether vLLM reads the last tokens' hidden states alone, and nothing else counts on a row for each token."""
    model = vllm_config.model_config
    return (
        runs_together(vllm_config)
        and model.runner_type == "generate"
        and not model.is_multimodal_model  # Qwen3-VL adds features of images between layers
        and not getattr(model, "enable_return_routed_experts", False)  # it records those of each token
        and vllm_config.speculative_config is None  # drafts are made of hidden states, and verified by them
        and vllm_config.lora_config is None  # the adapter of each row is known for all tokens
        and not vllm_config.cache_config.kv_sharing_fast_prefill  # vLLM's own way to leave out rows
    )


def _ends_of(module: nn.Module) -> tuple[Ends, str] | None:
    """The ends of a module that holds all layers, and the name of its last attention; None for other modules."""
    children = dict(module.named_children())
    layers, end = children.get("layers"), children.get("norm")
    if not isinstance(layers, nn.ModuleList) or not layers or not isinstance(end, RMSNormLayer):
        return None
    last = layers[-1]
    begin = getattr(last, "input_layernorm", None)
    parents = [part for part in last.modules() if isinstance(getattr(part, "attn", None), Attention)]
    if not isinstance(begin, RMSNormLayer) or len(parents) != 1 or not _attends_tokens(parents[0].attn):
        return None
    projection = getattr(parents[0], "o_proj", None)
    fits = isinstance(projection, RowParallelLinear)
    return (Ends(begin, projection, end), parents[0].attn.layer_name) if fits else None


def _attends_tokens(attention: Attention) -> bool:
    """Whether its metadata is opset's, of the step's own requests. Classes of vLLM's derived from it have others."""
    is_plain = type(attention) is Attention and attention.attn_type == AttentionType.DECODER
    return is_plain and isinstance(attention.impl, OpsetAttentionImpl)


def _leave_out(ends: Ends, rows_of_step: Callable[[int], torch.Tensor | None]) -> None:
    """Wrap the modules. rows_of_step: gives the rows to compute for a number of tokens, or None for all of them."""
    begin, project, end = (module.forward for module in ends)
    rows, num_tokens = None, 0

    def norm_at_begin(x: torch.Tensor, residual: torch.Tensor | None = None):
        nonlocal rows, num_tokens
        rows = None
        if residual is None:
            return begin(x)
        x, residual = begin(x, residual)
        num_tokens = len(residual)
        rows = rows_of_step(num_tokens)
        return x, residual if rows is None else residual[rows]

    def projection(x: torch.Tensor):
        return project(x if rows is None else x[rows])

    def norm_at_end(x: torch.Tensor, residual: torch.Tensor | None = None):
        x, *residual = (end(x),) if residual is None else end(x, residual)
        if rows is not None:
            x = x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, rows, x)
        return (x, *residual) if residual else x

    ends.begin.forward, ends.projection.forward, ends.end.forward = norm_at_begin, projection, norm_at_end


def _treats_rows_alone(ends: Ends, step: Callable[[], object]) -> bool:
    """Whether the model gives each row the same if its last layer has the rows in another order."""
    expected = _result(ends, step, lambda num_tokens: None)
    if expected is None:
        return False
    found = _result(ends, step, lambda num_tokens: torch.arange(num_tokens, device=expected.device).roll(1))
    return bool((found - expected).norm() <= MOST_DEVIATION * expected.norm())


def _result(ends: Ends, step: Callable, rows_of_step: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
    """What the norm at the end returns for random rows, in fp32; None if the last layer gets no residual."""
    residuals, results = [], []
    with _restored(ends):
        begin = ends.begin.forward

        def begin_at_random(x: torch.Tensor, residual: torch.Tensor | None = None):
            if residual is None:
                return begin(x)
            x, residual = begin(x, residual)
            residuals.append(_random(residual, 1))
            return _random(x, 2), residuals[-1]

        ends.begin.forward = begin_at_random
        _leave_out(ends, rows_of_step)
        project, end = ends.projection.forward, ends.end.forward

        def kept(*args):
            found = end(*args)
            results.append((found[0] if isinstance(found, tuple) else found).float())
            return found

        ends.projection.forward, ends.end.forward = lambda x: project(_random(x, 3)), kept
        step()
    return results[0] if residuals and results else None


def _random(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


@contextmanager
def _restored(ends: Ends) -> Iterator[None]:
    """Restore the modules at the end of the context."""
    forwards = [module.forward for module in ends]
    try:
        yield
    finally:
        for module, forward in zip(ends, forwards, strict=True):
            module.forward = forward
