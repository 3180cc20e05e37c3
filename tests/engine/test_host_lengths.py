"""The lengths on the host that attention layers get equal those on the device exactly, in every step."""

import models
import pytest
from engines import counter, generate

from vllm_opset.platform import second_runner

pytestmark = [pytest.mark.engine, pytest.mark.window]
on_second_runner = pytest.mark.skipif(
    second_runner.why_none() is not None,
    reason="the first model runner needs a device's events for asynchronous scheduling: runs with 0.31 and later",
)


@pytest.mark.parametrize("async_scheduling", [False, pytest.param(True, marks=on_second_runner)])
def test_lengths_on_the_host_are_those_of_the_device(engine, tmp_path, monkeypatch, async_scheduling):
    """Covers chunked prompts, cached prefixes and preemption.

    opset's CPU platform switches asynchronous scheduling off. It stays on here, because on an NPU it may be on.
    """
    from vllm_opset.attention.metadata import OpsetMetadataBuilder
    from vllm_opset.platform.cpu.platform import OpsetCpuPlatform

    monkeypatch.setattr(OpsetCpuPlatform, "_schedule_in_step", lambda scheduler_config: None)
    steps, build = [], OpsetMetadataBuilder.build

    def checked(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        batch = metadata.batch
        assert batch.query_start_loc_cpu.tolist() == batch.query_start_loc.tolist()
        assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist()
        steps.append(batch.seq_lens_cpu.tolist())
        return metadata

    monkeypatch.setattr(OpsetMetadataBuilder, "build", checked)
    models.build("qwen3", tmp_path)
    limits = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40, "async_scheduling": async_scheduling}
    with engine(tmp_path, **limits) as llm:
        for _ in range(2):
            generate(llm, models.prompts() * 3, max_tokens=24)
        preempted = counter(llm, "num_preemptions")
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == async_scheduling
    assert preempted and len(steps) > 50
