"""Requests that arrive while an engine runs others. An engine that a benchmark times imports it. It needs only vLLM.

One thread of the client's process hands requests over and takes outputs. While it waits for the output of a step, it
wakes at the next arrival and sends that request to the engine's process, which schedules it with its next step, as in a
server. Handling a request, waking up, and the outputs that the thread handles meanwhile make it late: with the tiny
model on two cores and 60 requests/s, a request was sent 1.1 ms after its arrival in the median, and 5 ms at the 99th
percentile. An engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) gets requests between steps, so they may be
late by a step. Times are taken once vLLM has handled a step's outputs. They count from the arrival, so that no delay is
left out.
"""

import time
from collections import deque
from collections.abc import Sequence


def generate(
    engine, prompts: Sequence, sampling: Sequence, loras: Sequence | None, arrivals: Sequence[float]
) -> tuple[list[list[int]], list[list[float]]]:
    """(the tokens of each request, seconds from its arrival to each of its outputs).

    engine: vLLM's LLMEngine, which has no other requests. sampling: SamplingParams, which are changed. arrivals:
    seconds from now, ascending. An output has the tokens of one step: several if drafts are accepted.
    """
    from vllm.sampling_params import RequestOutputKind

    begin = time.perf_counter()
    tokens: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    later = deque(enumerate(arrivals))
    while later or engine.has_unfinished_requests():
        if later and not _has_output(engine, begin + later[0][1] - time.perf_counter()):
            number, _ = later.popleft()
            (prompt,) = engine.renderer.render_cmpl([prompts[number]])
            sampling[number].output_kind = RequestOutputKind.DELTA
            lora = loras[number] if loras else None
            engine.add_request(str(number), prompt, sampling[number], lora_request=lora)
            continue
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            number, found = int(output.request_id), output.outputs[0].token_ids
            if found:
                tokens[number] += found
                times[number].append(now - arrivals[number])
    return tokens, times


def _has_output(engine, seconds: float) -> bool:
    """Whether a step has outputs before so many seconds are over. It returns once that is known.

    An engine in this process has no queue of outputs: it then has some after its next step.
    """
    if seconds <= 0:
        return False
    if not engine.has_unfinished_requests():
        time.sleep(seconds)
        return False
    outputs = getattr(engine.engine_core, "outputs_queue", None)
    if outputs is None:
        return True
    with outputs.not_empty:
        return outputs.not_empty.wait_for(lambda: bool(outputs.queue), seconds)
