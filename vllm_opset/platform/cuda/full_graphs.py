"""Full CUDA graphs of prompts and mixed steps, in place of piecewise graphs with attention between the pieces.

Between pieces, Python launches each layer's attention. A full graph is one launch. It can serve all steps of up to its
number of tokens, whatever the lengths of their requests, if the kernel of attention plans its work on the GPU.
`prefill_sm90` does so on Hopper GPUs. vLLM's own mode with full graphs of such steps, `FULL`, has no other graphs for
decode steps. So this module changes what vLLM's second model runner is about to capture, from vLLM 0.31 on: full graphs
replace the piecewise ones, and the graphs of decode steps stay.
"""

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.attention.backend import OpsetAttentionBackend
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.platform import second_runner


def replace_piecewise(worker: Worker) -> None:
    """Have full graphs captured where vLLM would capture piecewise ones beside decode graphs, if all layers allow it.

    Call it when the KV cache is bound. A user who asks for piecewise graphs alone gets them.
    """
    config = worker.vllm_config
    manager = getattr(worker.model_runner, "cudagraph_manager", None)  # the second model runner's
    if manager is None or manager.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE or not manager.needs_capture():
        return
    layers = config.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if isinstance(layer, AttentionLayerBase)]  # others are experts
    may = second_runner.capture_full_for_piecewise.bridge.needed() and not _needs_piecewise(config)
    if may and all(map(_is_planned_on_gpu, attention)):
        second_runner.capture_full_for_piecewise(manager)


def _needs_piecewise(config: VllmConfig) -> bool:
    """Whether something acts between the layers of a prompt, or a step's graph depends on more than its tokens.

    A KV connector transfers the cache of each layer. Graphs of drafts and adapters come in several kinds for each
    number of tokens, and images in a prompt change its inputs. With these, full graphs of prompts were not tried.
    """
    return (
        config.kv_transfer_config is not None
        or config.speculative_config is not None
        or config.lora_config is not None
        or config.model_config.is_multimodal_model
        or config.cache_config.kv_sharing_fast_prefill
        or config.parallel_config.data_parallel_size > 1
    )


def _is_planned_on_gpu(layer: AttentionLayerBase) -> bool:
    """Whether a variant of the kernel that plans on the GPU can attend the layer's prompts."""
    # vLLM derives further backends from this one, whose batches it makes on the host.
    if layer.get_attn_backend() is not OpsetAttentionBackend or not layer.impl.variants:
        return False
    impl, cache = layer.impl, layer.kv_cache
    query = torch.empty(1, impl.num_heads, impl.head_size, dtype=impl.dtype, device=cache.device)
    one = torch.ones(1, dtype=torch.int32, device=cache.device)
    batch = PagedBatch(torch.cat((one - 1, one)), one, one[None], max_query_len=1, max_seq_len=1)
    able = impl.able(layer, query, cache, batch)
    return any(impl.variants.by_name[name].plans_on_device for name in able)
