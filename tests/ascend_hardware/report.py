"""The findings of `make test-ascend-hardware`, as JSON for programs and as text for readers."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

NEVER = (
    "This command had never been run on hardware when it was written. Please send this folder back, whatever it says: "
    "an issue with both files is as good as a patch."
)
TAIL = 2000  # characters of a failed step's output


@dataclass(frozen=True)
class Result:
    """The result of one step. why_not: the error, or None. found: its output for programs. output: the rest, if it
    failed.
    """

    name: str
    seconds: float
    why_not: str | None
    found: object = None
    output: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of one candidate for a constant. promised: whether the constant says that it works."""

    constant: str
    candidate: str
    promised: bool
    why_not: str | None

    @property
    def wrong(self) -> bool:
        return self.promised and self.why_not is not None

    def __str__(self) -> str:
        said = (
            "as written" if self.promised == (self.why_not is None) else "CHANGE IT" if self.promised else "also works"
        )
        return f"{said:10}  {self.constant}: {self.candidate}" + (f" ({self.why_not})" if self.why_not else "")


@dataclass
class Report:
    machine: dict
    results: list[Result] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(result.why_not for result in self.results) and not any(
            verdict.wrong for verdict in self.verdicts
        )

    def write(self, folder: Path) -> None:
        """Writes the report after every step, so that the findings survive if the next step crashes the machine."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(self.as_text())
        everything = {"note": NEVER, "passed": self.passed, **asdict(self)}
        (folder / "report.json").write_text(json.dumps(everything, indent=1, default=str) + "\n")

    def as_text(self) -> str:
        machine = [f"{name}: {value}" for name, value in self.machine.items()]
        steps = [
            f"{'FAILED' if result.why_not else 'ok':6}  {result.name} ({result.seconds:.0f} s)"
            + (f": {result.why_not}" if result.why_not else "")
            for result in self.results
        ]
        constants = ["", "What the documents disagree about (vllm_opset/kernels/ascend/_constraints.py):"]
        constants += map(str, sorted(self.verdicts, key=lambda verdict: not verdict.wrong))
        tails = [f"\n--- {result.name}\n{result.output[-TAIL:]}" for result in self.results if result.why_not]
        return "\n".join([NEVER, "", *machine, "", *steps, *(constants if self.verdicts else []), *tails]) + "\n"
