"""graphs.py CASE: a kernel captured in an ACL graph on an NPU, replayed, and compared. Never run on hardware.

CASE is a kernel, such as rms_norm=ascend, or a key of `ANEW`. In the latter case, attention is captured with the
lengths of one step and replayed with those of another, which torch_npu passes on (`auto_dispatch_capture`,
`NPUGraph.update`). Prints one line of JSON: the reason why it does not work, or null.
"""

import dataclasses
import json
import sys
from collections.abc import Callable

import torch
from probes import DTYPE, kernels

from vllm_opset import ops, parity
from vllm_opset.kernel import kernels_of
from vllm_opset.ops.attention._paged_inputs import SPLIT_KV, PagedCase
from vllm_opset.ops.attention.paged_batch import PagedBatch
from vllm_opset.platform.refusals import OUTSIDE_GRAPHS

# By case: the kernel, and the operator's parameters that an update sets.
ANEW = {
    "new lengths, paged_attention=ascend": ("ascend", lambda lens: {"actual_seq_lengths_kv": lens}),
    "new lengths, paged_attention=ascend_atb": (
        "ascend_atb",
        lambda lens: {"context_lens": torch.tensor(lens, dtype=torch.int32)},
    ),
}


def cases() -> list[str]:
    captured = [kernel for kernel in kernels() if kernel.op not in OUTSIDE_GRAPHS]
    return [str(kernel) for kernel in captured] + list(ANEW)


def why_not(case: str) -> str | None:
    return new_lengths(*ANEW[case]) if case in ANEW else replayed(*case.split("="))


def replayed(op_name: str, kernel_name: str) -> str | None:
    """Captures and replays the first samples that a kernel supports, each after a call that warms it up."""
    op, kernel = ops.BY_NAME[op_name], kernels_of(op_name)[kernel_name]
    captured = dataclasses.replace(kernel, run=in_a_graph(kernel.run))
    checks = [
        check
        for dtype in (DTYPE, torch.float32)
        for sample in op.samples("npu", dtype)
        for check in [parity.check_sample(op, kernel, sample, dtype), parity.check_sample(op, captured, sample, dtype)]
        if check.skipped is None
    ]
    failures = [f"{check.case}: {check.failure}" for check in checks if check.failure]
    return None if checks and not failures else "; ".join(failures[:3]) or "no sample was run"


def in_a_graph(run: Callable) -> Callable:
    def capture_and_replay(*args, **kwargs):
        args = [lengths_on_host(x) if isinstance(x, PagedBatch) else x for x in args]
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            returned = run(*args, **kwargs)
        graph.replay()
        torch.npu.synchronize()
        return returned

    return capture_and_replay


def new_lengths(kernel_name: str, updates: Callable) -> str | None:
    """Captures a decode step with shorter sequences, and replays the graph for longer ones."""
    run = kernels_of("paged_attention")[kernel_name].run
    case = PagedCase(((1, 300), (1, 129), (1, 257)), layout=SPLIT_KV, block_size=128)
    (query, kv_cache, batch, out), options = case.make("new lengths", "npu", DTYPE)
    want = torch.empty_like(out)
    run(query, kv_cache, lengths_on_host(batch), want, **options)
    shorter = dataclasses.replace(lengths_on_host(batch), seq_lens=batch.seq_lens - 40)
    shorter.seq_lens_cpu = shorter.seq_lens.cpu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        run(query, kv_cache, shorter, out, **options)
    graph.update(cpu_update_input=[updates(batch.seq_lens.tolist())])
    graph.replay()
    torch.npu.synchronize()
    return None if torch.equal(out, want) else "the replay is not what the kernel gives for the new lengths"


def lengths_on_host(batch: PagedBatch) -> PagedBatch:
    on_host = {f"{name}_cpu": getattr(batch, name).cpu() for name in ("query_start_loc", "seq_lens")}
    return dataclasses.replace(batch, **on_host)


if __name__ == "__main__":
    kernels()  # imports torch_npu
    print(json.dumps(why_not(sys.argv[1])))
