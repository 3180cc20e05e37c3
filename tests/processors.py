"""Repeats the tests that depend on the processor with fewer of its instructions: `make test-processors`.

PyTorch and oneDNN are limited to a level, and the C++ kernels are built for that level. Levels that this machine lacks
are left out, and its best level is tested without limits.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

from vllm_opset.platform.cpu import machine

# Kernels of both providers against their contracts, weights that oneDNN packs, and the detected processor name.
TESTS = (
    "tests/test_parity.py",
    "tests/kernels/cpp/test_cpp.py",
    "tests/kernels/cpp/test_stored.py",
    "tests/ops/test_linear.py",
    "tests/test_targets.py",
    "tests/model/test_linear_layers.py",
    "tests/platform/cpu/test_machine.py",
    "tests/engine/test_weights.py::test_weights_that_are_gone_are_not_saved",
)
# The other tests of these files do not depend on the processor.
CHOSEN = "(not test_parity) or (keeps_its_contract and (cpu or cpp))"


@dataclass(frozen=True)
class Level:
    """name: as in `machine.VECTORS`. onednn, aten: limits for oneDNN and PyTorch. compiler: flags of g++."""

    name: str
    onednn: str
    aten: str
    compiler: str

    @property
    def environment(self) -> dict[str, str]:
        compiler = f"{os.environ.get('CXX') or 'g++'} {self.compiler}"
        return {"ONEDNN_MAX_CPU_ISA": self.onednn, "ATEN_CPU_CAPABILITY": self.aten, "CXX": compiler}


LEVELS = (
    Level("AVX2", "AVX2", "avx2", "-mno-avx512f"),
    Level("AVX-512", "AVX512_CORE", "avx512", "-mno-avx512bf16 -mno-avx512fp16"),
    Level("AVX-512 with bf16", "AVX512_CORE_BF16", "avx512", "-mno-avx512fp16"),
)


def main(arguments: list[str]) -> int:
    found = machine.processor()
    print(f"{found.name} with {found.vectors}")
    has = list(machine.VECTORS.values())
    best = has.index(found.vectors) if found.vectors in has else len(has)
    failed = []
    for level in LEVELS:
        place = has.index(level.name)
        if place > best:
            if passes(f"with no more than {level.name}", level.environment, arguments):
                continue
            failed.append(level.name)
        elif place < best:
            print(f"left out, as this processor does not have it: {level.name}")
    if not passes("as it is", {}, arguments):
        failed.append("as it is")
    print(f"failed: {', '.join(failed)}" if failed else "every level passed")
    return 1 if failed else 0


def passes(title: str, environment: dict[str, str], arguments: list[str]) -> bool:
    print(f"\n{title}: {environment or 'nothing is set'}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *TESTS, "-k", CHOSEN, *arguments]
    return subprocess.run(command, env=os.environ | environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
