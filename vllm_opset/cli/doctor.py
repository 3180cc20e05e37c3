"""`vllm-opset doctor`: reports this machine, the platform that vLLM would use, and every op's kernel, with reasons."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer

from vllm_opset import devices, ops, selection
from vllm_opset.bench.measure import dtype_of
from vllm_opset.bench.report import versions
from vllm_opset.cli import autoload
from vllm_opset.cli.arguments import DTYPES, known
from vllm_opset.cli.show import AsJson, print_json, print_missing, print_table
from vllm_opset.kernel import unavailable
from vllm_opset.kernels import ascend
from vllm_opset.platform import PluginError, stock
from vllm_opset.platform.cpu import machine
from vllm_opset.platform.cuda import device as gpu
from vllm_opset.platform.native import evidence
from vllm_opset.platform.native import parts as native_parts

NATIVE = "vllm_opset.platform.native.platform.OpsetNativePlatform"
ENTRY_POINT_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


@dataclass(frozen=True)
class Fault:
    """A reason why vLLM would not use the plugin here, and the cure."""

    what: str
    cure: str


def examine(
    dtype: Annotated[str, typer.Option(help=f"The model's dtype: one of {', '.join(DTYPES)}.")] = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Report which kernels would run here and why; exit with 1, and name the cure, if vLLM would not use the plugin."""
    known(dtype, DTYPES, "--dtype")
    # vLLM logs to standard output by default, but that is for the report.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    faults = list(_faults())
    active = None
    if not faults:
        active, faults = _active_platform()
    device = _device(active)
    kernels, parts, kinds = [], {}, []
    try:
        selection.require_device(device)
        kernels = _kernels(device, DTYPES[dtype])
        if active == NATIVE:
            family = _family()
            parts, kinds = native_parts.decide_without_model(family), evidence.evidence(family)
        elif active:
            _check_settings()
    except ValueError as error:
        faults = [*faults, Fault(*_what_and_cure(str(error)))]
    found = {
        "machine": _machine(), "platform": active, "device": device, "dtype": dtype, "kernels": kernels,
        "parts": {name: part._asdict() for name, part in parts.items()},
        "kinds": [{**asdict(kind), "summary": kind.summary} for kind in kinds],
    }  # fmt: skip
    if as_json:
        print_json({**found, "unavailable": unavailable(), "faults": [asdict(fault) for fault in faults]})
    else:
        _print(found, faults)
    raise typer.Exit(1 if faults else 0)


def _print(found: dict, faults: list[Fault]) -> None:
    print_table("This machine", ("what", "found"), ({"what": k, "found": v} for k, v in found["machine"].items()))
    print(f"Platform: {found['platform'] or 'none of this plugin'}\n")
    rows = map(_on_one_line, found["kernels"])
    serves = "Kernels on" if found["platform"] else "Kernels that would serve on"
    title = f"{serves} {found['device']!r}, {found['dtype']}"
    print_table(title, ("op", "kernel", "why", "others"), rows, listed_if_narrow=True)
    if found["parts"]:
        title = "Parts of these that serve here, if they can do the model; else vLLM's own do"
        switch = ({"part": name, "on": part["on"], "why": part["why"]} for name, part in found["parts"].items())
        print_table(title, ("part", "on", "why"), switch)
    if found["kinds"]:
        rows = ({**row, "found": f"{row['summary']} ({row['machine']}, {row['versions']})"} for row in found["kinds"])
        title = "Models and engines that were measured on their own"
        print_table(title, ("kind", "part", "on", "found"), rows, listed_if_narrow=True)
    print_missing(unavailable())
    for fault in faults:
        print(f"NOT USED: {fault.what}. Cure: {fault.cure}")


def _machine() -> dict[str, str]:
    return {
        "vllm-opset": versions().get("vllm-opset", "not installed"),
        "vLLM": stock.release() or "not installed",
        "torch": torch.__version__,
        "Triton": _version("triton"),
        "torch_npu": _version("torch_npu"),
        "CANN": ascend.cann(),
        "Python": platform.python_version(),
        "CPU": f"{machine.physical_cores()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "accelerator": _accelerator(),
    }


def _version(module: str) -> str:
    """The version of the distribution that brings the module. `triton` may come from, say, triton-ascend."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(module, ())
        known = (f"{importlib.metadata.version(name)} ({name})" for name in names)
        return ", ".join(known) or "installed without its metadata"


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "none" if torch.version.cuda is None else f"none: {gpu.missing()}"
    device = torch.accelerator.current_accelerator().type
    return f"{torch.accelerator.device_count()} of type {device}" + (f": {_gpu()}" if device == "cuda" else "")


def _gpu() -> str:
    major, minor = torch.cuda.get_device_capability()
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {built_for}"


def _faults() -> Iterator[Fault]:
    """The faults that can be found without importing vLLM."""
    if autoload.IMPORT_FAILS:
        yield Fault(
            f"`import torch` fails in this environment, because it loads torch_npu: {ascend.missing()}",
            f"as said, or where there is no NPU: pip uninstall torch_npu, or export {autoload.VARIABLE}=0",
        )
    if not stock.installed():
        yield Fault("vLLM is not installed", "install it; the README shows how for a CPU")
        return
    # AMD's GPUs are "cuda" to PyTorch, too, and no platform of opset is for them.
    if torch.version.cuda and torch.cuda.is_available() and os.environ.get("OPSET_PLATFORM") != "cpu":
        for reason in filter(None, (gpu.missing(), gpu.too_old())):
            what, _, cure = reason.partition(": ")
            yield Fault(what, cure)
    for group in ENTRY_POINT_GROUPS:
        if not any(point.name == "opset" for point in importlib.metadata.entry_points(group=group)):
            yield Fault(f"the plugin has no entry point in {group}", "pip install . in a clone")
    if os.environ.get("OPSET_PLATFORM") == "off":
        yield Fault("OPSET_PLATFORM=off", "unset OPSET_PLATFORM")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "opset" not in plugins.split(","):
        yield Fault(f"VLLM_PLUGINS={plugins!r} leaves it out", "unset VLLM_PLUGINS, or add opset to it")
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        yield Fault(
            "VLLM_TARGET_DEVICE=cpu makes vLLM use its own CPU platform before any plugin", "unset VLLM_TARGET_DEVICE"
        )


def _active_platform() -> tuple[str | None, list[Fault]]:
    """opset's platform if vLLM uses it; otherwise None and the reasons."""
    try:
        from vllm.platforms import current_platform
    except PluginError as error:
        return None, [Fault(*_what_and_cure(str(error)))]
    except Exception as error:
        return None, [Fault(f"vLLM finds no platform: {error}".rstrip("."), _cure_without_platform())]
    name = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if name.startswith("vllm_opset."):
        return name, []
    return None, [
        Fault(f"vLLM uses the platform {name}", "see the log above; OPSET_PLATFORM=cpu takes the CPU anywhere")
    ]


def _cure_without_platform() -> str:
    """The cure. vLLM accepts only one platform plugin, but loads all installed ones unless VLLM_PLUGINS is set."""
    others = {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUPS[0])} - {"opset"}
    if not others:
        return "see the log above"
    return f"set VLLM_PLUGINS=opset, which leaves out other platform plugins: {', '.join(sorted(others))}"


def _what_and_cure(message: str) -> tuple[str, str]:
    """The first sentence of an error, and the rest as the cure. Without a rest, the first sentence implies the cure."""
    what, _, cure = message.partition(". ")
    return what.rstrip("."), cure.rstrip(".") or "correct that, or leave it out"


def _check_settings() -> None:
    from vllm.platforms import current_platform

    current_platform.check_additional_config({})


def _device(active: str | None) -> str:
    """The device of opset's platform if vLLM uses that, else the device that the platform would have."""
    if active:
        from vllm.platforms import current_platform

        return current_platform.device_type
    return devices.here()[-1]


def _family() -> int:
    """The compute capability of the GPUs, such as 90, by vLLM's own platform. A variable may hide them from PyTorch."""
    from vllm.platforms import current_platform

    return current_platform.get_device_capability().to_int()


def _kernels(device: str, dtype: torch.dtype) -> list[dict]:
    """The kernel that selection would choose for each op, over the problems of the op's own sample inputs."""
    rows = []
    for op in ops.ALL:
        samples = (sample.make() for sample in op.samples("cpu", dtype_of(op, dtype)))
        problems = dict.fromkeys(op.problem_for(*args, **kwargs) for args, kwargs in samples)  # in the samples' order
        chosen: dict[str, list] = {}
        refused = []
        for problem in problems:
            try:
                choice = selection.select(op, dataclasses.replace(problem, device=device, target=None))
            except selection.OverrideError as error:  # not a fault: a model may have none of these sample problems
                refused.append(str(error).partition(". ")[0])
            else:
                chosen.setdefault(choice.name, []).append(choice)
        rows += [_kernel_row(op.name, name, choices, len(problems)) for name, choices in chosen.items()]
        if refused:
            why = f"{refused[0]} ({len(refused)} of {len(problems)} sample problems)"
            rows.append({"op": op.name, "kernel": "none", "variants": [], "why": why, "others": []})
    return rows


def _kernel_row(op: str, kernel: str, choices: list[selection.Choice], problems: int) -> dict:
    share = "" if len(choices) == problems else f" ({len(choices)} of {problems} sample problems)"
    others = sorted({other for choice in choices for other in choice.rejected})
    variants = choices[0].kernel.variants
    return {
        "op": op,
        "kernel": kernel,
        "variants": [] if variants is None else list(variants.by_name),
        "why": choices[0].reason + share,
        "others": [{"kernel": name, "reason": reason} for name, reason in others],
    }


def _on_one_line(row: dict) -> dict:
    others = "; ".join(f"{other['kernel']}: {other['reason']}" for other in row["others"])
    variants = f" ({', '.join(row['variants'])})" if row["variants"] else ""
    return {**row, "kernel": row["kernel"] + variants, "others": others}
