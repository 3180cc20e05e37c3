"""Steps that one CUDA graph replays get no attention metadata, since the graph has the addresses of what it reads."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_opset.attention.metadata import OpsetMetadataBuilder
from vllm_opset.platform import second_runner


def build_no_metadata(worker: Worker) -> None:
    """Let vLLM build no attention metadata for a step that one graph replays, if only layers in it would read it.

    Opset's metadata is views of buffers, whose addresses the graph has. Other backends plan a step while they build it.
    Call it when vLLM has captured its graphs.
    """
    if second_runner.skip_metadata.bridge.needed() and _only_layers_read_it(worker):
        second_runner.skip_metadata(worker.model_runner.model_state)


def _only_layers_read_it(worker: Worker) -> bool:
    """Whether all metadata is opset's, and neither a KV connector nor a model that drafts reads it as well."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    config, runner = worker.vllm_config, worker.model_runner
    if not config.use_v2_model_runner or type(runner.model_state) is not DefaultModelState:
        return False
    builders = [builder for groups in runner.attn_groups for group in groups for builder in group.metadata_builders]
    return (
        config.kv_transfer_config is None
        and config.speculative_config is None
        # vLLM derives further builders from this one, which write to buffers of their own.
        and {type(builder) for builder in builders} == {OpsetMetadataBuilder}
    )
