"""serve.py [PLATFORM]: asks the tiny model, through `vllm serve` on a platform, the questions it was not trained on.

Never run on hardware. Prints one line of JSON: the number of right answers, the number of questions, the choices of
kernels that the server logged, and the errors.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from processes import Server
from questions import HELD_OUT, REQUIRED, grade

QUESTIONS = 100
KERNEL_ROWS = 20  # of the table that the server logs, including the lines after it
# A dtype that all of the NPU's kernels take, and the block size on which its documents agree.
ARGUMENTS = {"npu": ("--dtype", "bfloat16", "--block-size", "128")}


def answers(platform: str, questions: int = QUESTIONS) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        # CANN's set_env.sh puts its own Python packages there, and `Server` would leave them out.
        search = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
        server = Server(Path(folder) / "log", *ARGUMENTS.get(platform, ()), OPSET_PLATFORM=platform, **search)
        try:
            server.wait_until_ready()
            asked = HELD_OUT[:questions]
            said = [server.complete(task["completion"], max_tokens=64)["choices"][0]["text"] for task in asked]
            wrong = [
                f"{task['completion']!r}: {text!r}" for task, text in zip(asked, said, strict=True)
                if not grade(task["answer"], text)
            ]  # fmt: skip
            stopped = server.stop()
            _, _, table = server.text().partition("vllm-opset: op, kernel, reason, problem")
        finally:
            server.kill()
    right = len(asked) - len(wrong)
    enough = right >= REQUIRED * len(asked) and stopped == 0
    reason = None if enough else f"{right} of {len(asked)} right, exit code {stopped}: {'; '.join(wrong[:3])}"
    return {"why_not": reason, "right": right, "asked": len(asked), "kernels": table.splitlines()[:KERNEL_ROWS]}


if __name__ == "__main__":
    print(json.dumps(answers((sys.argv[1:] or ["npu"])[0])))
