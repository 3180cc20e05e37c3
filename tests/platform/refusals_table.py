"""refusals_table.py: prints the tables of docs/devices.md, from the platforms' own rules and their evidence."""

from collections.abc import Iterable, Iterator

from vllm_opset.bench.format import TIMES
from vllm_opset.platform.cpu import refusals as cpu
from vllm_opset.platform.cuda import refusals as cuda
from vllm_opset.platform.native import evidence
from vllm_opset.platform.native.rules import RULES, SINKS
from vllm_opset.platform.npu import refusals as npu
from vllm_opset.platform.refusals import Settings

HOPPER = 90  # the compute capability of the only GPUs on which parts are on by default
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
    """The configurations that decide whether a part of opset is on, on vLLM's own wheel for CUDA and Hopper GPUs."""
    found: dict[str, dict[str, str]] = {}
    for name, rules in RULES.items():
        for kind in (*(rule.feature for rule in rules.kinds), *([SINKS] if name == "attention" else [])):
            measured = evidence.of_kind(name, kind, HOPPER)
            found.setdefault(kind, {})[name] = f"{'on' if measured and measured.on else 'off'} by default"
        for rule in rules.unsupported:
            found.setdefault(rule.feature, {})[name] = "unsupported"
    return list(_table(("configuration", *RULES), ((feature, *map(of.get, RULES)) for feature, of in found.items())))


def kinds() -> list[str]:
    """The parts that were measured with kinds of models or engines, and the conditions."""
    columns = ("kind", "parts", "by default", "model", "machine", "versions", "commit")
    rows = (
        (row.kind, names, "on" if row.on else "off", row.model, row.machine, row.versions, _linked(row))
        for names, row in _switched_on_together()
    )
    return list(_table(columns, rows))


def ratios() -> list[str]:
    """The measurements, by case: time with the part over time without it."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for names, row in _switched_on_together():
        for name, ratio in row.ratios.items():
            quantity, case = name.split(" ", 1)
            found.setdefault((row.kind, names, case), {})[quantity] = f"{ratio:.3f}{TIMES}"
    quantities = list(dict.fromkeys(quantity for of in found.values() for quantity in of))
    rows = ((*case, *map(of.get, quantities)) for case, of in found.items())
    return list(_table(("kind", "parts", "case", *quantities), rows))


def rows_of_evidence() -> list[evidence.Evidence]:
    return [row for family in evidence.defaults() for row in evidence.evidence(int(family.removeprefix("sm")))]


def _switched_on_together() -> list[tuple[str, evidence.Evidence]]:
    """The rows of evidence, one of them for parts that were switched on together, whose names come first."""
    found: dict[tuple[str, str, str], list[evidence.Evidence]] = {}
    for row in rows_of_evidence():
        found.setdefault((row.kind, row.model, row.commit), []).append(row)
    return [(", ".join(row.part for row in rows), rows[0]) for rows in found.values()]


def _linked(row: evidence.Evidence) -> str:
    """The commit, with a link from the page to the times."""
    return f"[{row.commit}]({row.data.removeprefix('docs/')})" if row.data else row.commit


def _table(columns: Iterable[str], rows: Iterable[Iterable[str | None]]) -> Iterator[str]:
    columns = list(columns)
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(cell or "" for cell in row) + " |"


# By the comments around them in the page.
TABLES = {"refused": refused, "parts": parts, "kinds": kinds, "ratios": ratios}

if __name__ == "__main__":
    print(*("\n".join(table()) for table in TABLES.values()), sep="\n\n")
