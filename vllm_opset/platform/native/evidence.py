"""The measurements behind the defaults of the parts on stock vLLM, by GPU family, and by kind of model and engine."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Evidence:
    """One part, measured with one kind of model or engine. kind: the feature that a rule of the part names.

    on: whether the part is on by default with that kind. model, machine, versions, commit: the conditions. data: the
    file of the repository with the times, or None if they were not kept. ratios: time with the part over time without
    it, by quantity and case, such as "TPOT 1x1024/32".
    """

    part: str
    kind: str
    on: bool
    model: str
    machine: str
    versions: str
    commit: str
    data: str | None
    ratios: Mapping[str, float]

    @property
    def summary(self) -> str:
        least, most = min(self.ratios.values()), max(self.ratios.values())
        return f"{self.model} took {least:.3f} to {most:.3f} of the time without the part"


@functools.cache
def defaults() -> Mapping[str, Mapping]:
    """By GPU family, such as "sm90": the page on which each part was faster, or None, and rows of evidence."""
    return yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text())


def evidence(family: int) -> list[Evidence]:
    """All rows of a GPU family. family: the compute capability, such as 90."""
    return [Evidence(**row) for row in defaults().get(f"sm{family}", {}).get("kinds", ())]


def of_kind(part: str, kind: str, family: int) -> Evidence | None:
    """The row of a part and a kind; None if they were not measured together on this GPU family."""
    return next((row for row in evidence(family) if (row.part, row.kind) == (part, kind)), None)
