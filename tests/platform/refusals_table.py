"""refusals_table.py: prints the tables of docs/devices.md, from the platforms' own rules and their evidence."""

from collections.abc import Iterable, Iterator

from vllm_opset.bench.format import TIMES
from vllm_opset.platform.cpu import refusals as cpu
from vllm_opset.platform.cuda import refusals as cuda
from vllm_opset.platform.native import evidence
from vllm_opset.platform.native.rules import PARTS
from vllm_opset.platform.npu import refusals as npu
from vllm_opset.platform.refusals import Settings

PLATFORMS = {"CPU": cpu, "NVIDIA GPU": cuda, "Ascend NPU": npu}
OF_SETTINGS = "leave out what the message names"


def refused() -> list[str]:
    """The features that each platform without vLLM's compiled kernels refuses, with the cure."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for platform, module in PLATFORMS.items():
        for rule in (*module.EARLY_RULES, *module.RULES):
            cure = OF_SETTINGS if isinstance(rule, Settings) else rule.cure
            found.setdefault((rule.feature, cure), {})[platform] = "refused"
    rows = ((feature, *(where.get(name, "") for name in PLATFORMS), cure) for (feature, cure), where in found.items())
    return list(_table(("feature", *PLATFORMS, "cure"), rows))


def parts() -> list[str]:
    """The configurations in which a part of opset is off on vLLM's own wheel for CUDA."""
    found: dict[str, dict[str, str]] = {}
    for name, part in PARTS.items():
        for rule in (*part.kinds, *part.slower):
            found.setdefault(rule.feature, {})[name] = "off by default"
        for rule in part.unsupported:
            found.setdefault(rule.feature, {})[name] = "unsupported"
    return list(_table(("configuration", *PARTS), ((feature, *map(of.get, PARTS)) for feature, of in found.items())))


def kinds() -> list[str]:
    """The evidence for each part and kind of model or engine."""
    columns = ("kind", "part", "by default", "time to stock vLLM's", "model", "machine", "versions", "commit")
    found = [row for family in evidence.defaults() for row in evidence.evidence(int(family.removeprefix("sm")))]
    rows = (
        (
            row.kind,
            row.part,
            "on" if row.on else "off",
            ", ".join(f"{case}: {ratio:.3f}{TIMES}" for case, ratio in row.ratios.items()),
            *(row.model, row.machine, row.versions, row.commit),
        )
        for row in found
    )
    return list(_table(columns, rows))


def _table(columns: Iterable[str], rows: Iterable[Iterable[str | None]]) -> Iterator[str]:
    columns = list(columns)
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(cell or "" for cell in row) + " |"


if __name__ == "__main__":
    print("\n".join(refused()), "\n".join(parts()), "\n".join(kinds()), sep="\n\n")
