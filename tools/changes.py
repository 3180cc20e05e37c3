"""Writes docs/changes-to-vllm.md: the prose of tools/changes-to-vllm.md, with the registry of bridges filled in."""

from collections.abc import Iterable
from pathlib import Path
from string import Template

from vllm_opset.platform.bridges import EVERY, Bridge
from vllm_opset.platform.differences import DIFFERENCES, HOOKS, PATCHES

TEMPLATE = Path(__file__).with_name("changes-to-vllm.md")
PAGE = TEMPLATE.parents[1] / "docs" / TEMPLATE.name
NAMES = {"cpu": "CPUs", "cuda": "GPUs", "npu": "NPUs", "native": "stock vLLM for GPUs"}


def page() -> str:
    return Template(TEMPLATE.read_text()).substitute(
        hooks="\n".join(map(_hook, HOOKS)),
        patches="\n\n".join(map(_patch, PATCHES)),
        differences="\n".join(map(_difference, DIFFERENCES)),
    )


def _hook(bridge: Bridge) -> str:
    return f"- {_changes(bridge)}: {bridge.reason} {_where(bridge)} Offered by {_releases(bridge)}."


def _patch(bridge: Bridge) -> str:
    changes = [f"Changes: {_changes(bridge)}"] if bridge.changes else []  # otherwise the reason names the object
    facts = f"Where: {_where(bridge)}", f"Needed by: {_releases(bridge)}"
    ends = [f"It can go when {bridge.ends}."] if bridge.ends else []
    return f"### `{bridge.name}`\n\n{bridge.reason}\n\n" + "\n".join(f"- {fact}" for fact in (*changes, *facts, *ends))


def _difference(bridge: Bridge) -> str:
    ends = f" The code can go when {bridge.ends}." if bridge.ends else ""
    return f"| {_releases(bridge).removeprefix('vLLM ')} | {bridge.reason}{ends} | `{bridge.code}` |"


def _changes(bridge: Bridge) -> str:
    return ", ".join(f"`{name}`" for name in bridge.changes)


def _where(bridge: Bridge) -> str:
    loading = [f"{_on(bridge.loading)}, when the plugin is loaded."] if bridge.loading else []
    configuring = [f"{_on(bridge.configuring)}, when an engine is configured."] if bridge.configuring else []
    worker = [f"{_on(bridge.worker)}, in a worker."] if bridge.worker else []
    return " ".join(loading + configuring + worker)


def _on(platforms: tuple[str, ...]) -> str:
    return "Everywhere" if platforms == EVERY else "On " + _and(NAMES[platform] for platform in platforms)


def _releases(bridge: Bridge) -> str:
    first, last = ("{}.{}".format(*release) if release else "" for release in (bridge.first, bridge.last))
    if first and last:
        return f"vLLM {first} to {last}"
    return f"vLLM {first} and later" if first else f"vLLM {last} and earlier" if last else "every release"


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


if __name__ == "__main__":
    PAGE.write_text(page())
