"""Requests with a seed get the same tokens alone and together, in any order, with prompts computed in pieces."""

import models
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.window]

REQUESTS = (
    {"seed": 5, "temperature": 1.0},
    {"seed": 7, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"seed": -9, "temperature": 1.2, "min_p": 0.02, "frequency_penalty": 0.2, "presence_penalty": 0.3},
    {"seed": 5, "temperature": 2.0, "top_p": 0.95, "n": 2},
)


def test_tokens_do_not_depend_on_the_batch(engine, tmp_path):
    from vllm import SamplingParams

    models.build("qwen3", tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts((150, 7, 40, 100, 77))]
    parameters = [SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, **one) for one in REQUESTS]

    def generate(llm, order: list[int]) -> dict[int, list[tuple[int, ...]]]:
        outputs = llm.generate([prompts[i] for i in order], [parameters[i] for i in order], use_tqdm=False)
        return {
            i: [tuple(completion.token_ids) for completion in output.outputs]
            for i, output in zip(order, outputs, strict=True)
        }

    # Most prompts take several steps; what they draw before their last one is taken back.
    with engine(tmp_path, max_num_batched_tokens=32, max_num_seqs=8) as llm:
        together = generate(llm, [0, 1, 2, 3, 4])
        assert generate(llm, [4, 2, 0, 3, 1]) == together
        for i in range(len(REQUESTS)):
            assert generate(llm, [i]) == {i: together[i]}
        (report,) = llm.collective_rpc("opset_report")
    first, second = together[4]
    assert first != second, "two completions of one request are the same"
    served = {row["op"] for row in report if row["calls"] > 0}
    assert served >= {"top_k_top_p_sample", "apply_penalties"}
