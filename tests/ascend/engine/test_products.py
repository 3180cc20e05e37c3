"""The same on other product families, which the driver's device name selects. Each runs in a process of its own."""

import json
import re
import sys
from pathlib import Path

import asking
import emulated_npu
import pytest
from checks import DEVICES
from processes import run

HERE = Path(__file__).parent
EVERY = {
    "rms_norm": "ascend",
    "fused_add_rms_norm": "ascend",
    "rotary_embedding": "ascend",
    "silu_and_mul": "ascend",
    "reshape_and_cache": "ascend",
    "paged_attention": "ascend",
    "route": "ascend",
    "fused_experts": "ascend",
    "quantise": "ascend",
    "linear": "ascend",
    "top_k_top_p_sample": "ascend",
}
# The reference serves the ops that the documents do not promise for a product.
NOT = dict.fromkeys(EVERY, "reference")
A5 = {**NOT, "rms_norm": "ascend", "reshape_and_cache": "ascend_scatter"}
EXPECTED = {
    "A2": {"float16": EVERY, "bfloat16": EVERY},
    "A3": {"float16": EVERY, "bfloat16": EVERY},
    "A5": {"float16": A5, "bfloat16": A5},
    "310P": {"float16": {**NOT, "rms_norm": "ascend"}, "bfloat16": NOT},
}


@pytest.mark.parametrize("product", DEVICES)
def test_kernels_are_those_documented_for_the_product(product):
    soc = DEVICES[product]
    finished = run(sys.executable, HERE / "kernels_here.py", **emulated_npu.variables(), EMULATED_NPU_SOC=soc)
    assert finished.code == 0, finished.output
    assert json.loads(finished.out.splitlines()[-1]) == EXPECTED[product]


ASK = """
import sys
import asking, models
from engines import running
folder, dtype = sys.argv[1:]
from pathlib import Path
with running(Path(folder), dtype=dtype, gpu_memory_utilization=0.05, max_num_batched_tokens=512) as llm:
    print("TOKENS", asking.tokens(llm, asking.prompts()[:3]))
"""


def ask(folder: Path, dtype: str, soc: str):
    variables = emulated_npu.variables()
    for path in (HERE, HERE.parents[1], HERE.parents[1] / "engine"):
        variables["PYTHONPATH"] += f":{path}"
    return run(sys.executable, "-c", ASK, folder, dtype, **variables, EMULATED_NPU_SOC=soc)


def test_an_engine_runs_where_most_falls_to_the_references(tmp_path):
    asking.build("qwen3", tmp_path)
    finished = ask(tmp_path, "float16", DEVICES["310P"])
    assert finished.code == 0 and "TOKENS [[" in finished.out, finished.output
    assert re.search("paged_attention +reference", finished.output)


def test_bfloat16_is_refused_where_there_is_none(tmp_path):
    asking.build("qwen3", tmp_path)
    finished = ask(tmp_path, "bfloat16", DEVICES["310P"])
    assert finished.code != 0
    assert "there is no bfloat16 on Ascend310P3: give --dtype float16" in finished.output
