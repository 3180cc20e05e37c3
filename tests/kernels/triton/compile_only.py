"""Compiles Triton kernels for a GPU that is not there: every sample of their contracts runs with no-op launches.

    python tests/kernels/triton/compile_only.py [--target nvidia/sm90] [--table] [--may-spill] [--at-most N]
        [--by-types] [--all-of OP] [OP ...]

Prints JSON: for each op the compiled variants, with their registers, their shared memory, the number of uses of
spilled registers, and whether products and sums are fused. For NVIDIA GPUs it adds local memory, and the global loads
and stores in the PTX. With --table, it prints the largest values of each kernel, and exits with 1 if one for Hopper
spills, unless it --may-spill. With --at-most, it compiles only the first N variants of each kernel of an op. With
--by-types as well, it compiles the first N for each combination of the types of a kernel's arguments. It compiles all
variants of an op that --all-of names. It needs only the stock Triton wheel.
"""

import collections
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import networkx
import torch
import triton
import typer
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from vllm_opset import ops, targets
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton._precompile import precompile
from vllm_opset.targets import Target

HOPPER = Target("nvidia", "sm90")
# Kernels that were slower with more registers, although they spill some, and the uses of spilled registers that this
# script counts with Triton 3.8. See "Registers of `read`" in docs/log/kernels.md.
FASTER_SPILLING = {("top_k_top_p_sample", "read"): 17}
# The limit of a thread block.
SHARED_BYTES = {
    "nvidia/sm80": 166912,
    "nvidia/sm89": 101376,
    "nvidia/sm90": 232448,
    "nvidia/sm100": 232448,
    "nvidia/sm120": 101376,
    "amd/gfx942": 65536,
    "amd/gfx950": 163840,
}


class CompileOnly:
    """Replaces Triton's CUDA driver: kernels are compiled, and their launches do nothing."""

    def __init__(self, target: Target = HOPPER) -> None:
        self.target = _triton(target)
        self.utils = SimpleNamespace(
            # Any module will do. Without one, Triton would load it at every launch.
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES[str(target)]},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, source, metadata):
        return lambda *_: None


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP")] = None,
    target: str = str(HOPPER),
    table: bool = False,
    may_spill: bool = False,
    at_most: int | None = None,
    by_types: bool = False,
    all_of: Annotated[list[str] | None, typer.Option(metavar="OP")] = None,
) -> None:
    wanted = Target(*target.split("/"))
    triton.runtime.driver.set_active(CompileOnly(wanted))
    compiled = _recorded()
    report = {}
    with targets.instead(wanted):
        for name in names or ops.BY_NAME:
            for kernel in kernels_of(name).values():
                if kernel.provider == "triton":
                    compiled.clear()
                    limited = at_most is not None and name not in (all_of or ())
                    triton.knobs.runtime.jit_cache_hook = _refuses_after(at_most, by_types) if limited else None
                    with precompile():  # in a thread for each core
                        _launch_samples(ops.BY_NAME[name], kernel)
                    _launch_samples(ops.BY_NAME[name], kernel)  # a kernel that did not compile raises now
                    resources = _amd_resources if wanted.vendor == "amd" else _resources
                    compiled.sort(key=lambda variant: variant.name)  # threads end in any order
                    report[kernel.op] = report.get(kernel.op, []) + [resources(variant) for variant in compiled]
    if table:
        _print(report, target)
        # Kernels for other GPUs spill too: few launches were chosen for those.
        found = spilling(report, target) if wanted == HOPPER else []
        sys.stderr.writelines(found)
        raise typer.Exit(bool(found) and not may_spill)
    json.dump(report, sys.stdout, indent=1)


def spilling(report: dict, target: str) -> list[str]:
    """A line for each kernel of the report that spills, unless it is faster so."""
    most = collections.Counter()
    for op, variants in report.items():
        for variant in variants:
            kernel = op, variant["kernel"]
            most[kernel] = max(most[kernel], variant["spills"])
    return [
        f"{op}: {kernel} uses spilled registers {uses} times on {target}, compiled with Triton {triton.__version__}\n"
        for (op, kernel), uses in most.items()
        if uses > FASTER_SPILLING.get((op, kernel), 0)
    ]


def _print(report: dict, target: str) -> None:
    rows = collections.defaultdict(list)
    for op, variants in report.items():
        for variant in variants:
            rows[op, variant["kernel"]].append(variant)
    printed = Table("op", "kernel", "variants", "registers", "shared bytes", "spills", title=target)
    for (op, name), variants in rows.items():
        most = (str(max(variant[key] for variant in variants)) for key in ("reg", "shared", "spills"))
        printed.add_row(op, name, str(len(variants)), *most)
    Console(width=120).print(printed)


def _triton(target: Target) -> GPUTarget:
    """The target as Triton names it."""
    if target.vendor == "amd":
        return GPUTarget("hip", target.architecture, target.warp_size)
    return GPUTarget("cuda", target.generation, target.warp_size)


def _recorded() -> list[CompiledKernel]:
    """A list to which every kernel compiled from now on is added."""
    compiled, original = [], CompiledKernel.__init__

    def init(self, *args):
        original(self, *args)
        compiled.append(self)

    CompiledKernel.__init__ = init
    return compiled


def _refuses_after(number: int, by_types: bool):
    """A hook for Triton that refuses to compile a kernel which has this number of variants. Its launch does nothing.

    A variant that did not compile is never refused, so that its next launch raises. by_types: the number is of variants
    whose arguments have the same types. A constant counts as a type, whatever its value.
    """
    taken = collections.defaultdict(set)

    def refuses(key, fn, compile, **_) -> bool:
        variants = taken[fn.name, by_types and tuple(compile["signature"].values())]
        if len(variants) < number:
            variants.add(key)
        return key not in variants

    return refuses


def _launch_samples(op, kernel) -> None:
    dtype = torch.bfloat16 if op.dtypes[0].is_floating_point else op.dtypes[0]
    for sample in op.samples("cpu", dtype):
        args, kwargs = sample.make()
        if kernel.supports(op.problem_for(*args, **kwargs)) is None:
            kernel.run(*args, **kwargs)


def _resources(kernel: CompiledKernel) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _cuobjdump("--dump-resource-usage", cubin.name))
        numbers = {key.lower(): int(value) for key, value in usage}
        spills = _spills(_cuobjdump("--dump-sass", cubin.name)) if numbers["stack"] else 0
    accesses = collections.Counter(re.findall(r"\b(?:ld|st)\.global[.\w:]*", kernel.asm["ptx"]))
    return {
        "kernel": kernel.name,
        "warps": kernel.metadata.num_warps,
        "fused": kernel.metadata.enable_fp_fusion,
        **numbers,
        "shared": kernel.metadata.shared,
        "spills": spills,
        "accesses": dict(accesses),
    }


def _amd_resources(kernel: CompiledKernel) -> dict:
    notes = dict(re.findall(r"\.((?:[sv]gpr)(?:_spill)?_count):\s+(\d+)", kernel.asm["amdgcn"]))
    return {
        "kernel": kernel.name,
        "warps": kernel.metadata.num_warps,
        "fused": kernel.metadata.enable_fp_fusion,
        "reg": int(notes["vgpr_count"]),
        "shared": kernel.metadata.shared,
        "spills": int(notes["vgpr_spill_count"]) + int(notes["sgpr_spill_count"]),
    }


def _cuobjdump(option: str, path: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    # The program warns of the file's format on stderr every time.
    return subprocess.check_output([program, option, path], text=True, stderr=subprocess.DEVNULL)


def _spills(sass: str) -> int:
    """Counts stores and loads of spilled registers in the innermost loops of matrix products. For a kernel without
    matrix products, it counts them everywhere. A register that is stored before such a loop costs nothing inside the
    loop.
    """
    pattern = r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\d+ )?\s*([A-Z]+)[.\w]* ?(?:[^;]*\b0x([0-9a-f]+) ;)?"
    codes = [
        (int(place, 16), bool(condition), code, int(target, 16) if code == "BRA" and target else None)
        for place, condition, code, target in re.findall(pattern, sass, re.MULTILINE)
    ]
    products = {place for place, _, code, _ in codes if code.endswith("MMA")}
    spills = {place for place, _, code, _ in codes if code in ("STL", "LDL")}
    if not products:
        return len(spills)
    loops = [loop for loop in _loops(codes) if loop & products]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return sum(len(loop & spills) for loop in innermost)


def _loops(codes: list[tuple[int, bool, str, int | None]]) -> list[set[int]]:
    """The addresses of the instructions of each loop: those that lead to a backward jump without passing its target.

    codes: address, whether it is conditional, opcode and target of each instruction. Not every backward jump closes a
    loop: code that waits for a barrier stands at the end of a kernel and jumps back from there.
    """
    flow = networkx.DiGraph()
    for (place, conditional, code, target), following in itertools.zip_longest(codes, codes[1:]):
        if target is not None:
            flow.add_edge(place, target)
        if following and (conditional or code not in ("BRA", "BRX", "EXIT")):
            flow.add_edge(place, following[0])
    entry, reached = codes[0][0], set()
    for place in sorted(flow):  # BRX, a jump to one of several places, has unknown targets: any place not reached yet
        if place not in reached:
            flow.add_edge(entry, place)
            reached |= networkx.descendants(flow, place) | {place}
    dominators = networkx.immediate_dominators(flow, entry)
    loops = {}
    for end, start in flow.edges:
        if start <= end and _dominates(dominators, start, end):
            before = networkx.ancestors(flow.subgraph(set(flow) - {start}), end) if end != start else set()
            loops[start] = loops.get(start, {start}) | before | {end}
    return list(loops.values())


def _dominates(dominators: dict[int, int], start: int, end: int) -> bool:
    """Whether every path to `end` passes `start`."""
    while end != start and end in dominators and dominators[end] not in (None, end):
        end = dominators[end]
    return end == start


if __name__ == "__main__":
    typer.run(main)
