"""The changes that tests must detect, as rows of the YAML files beside this one.

name of the change:
  file: vllm_opset/kernels/cpu/rms_norm.py
  from: text that occurs once in that file
  to: the text that replaces it
  why: the effect of the change on users
  parity: rms_norm cpu          # the kernel against its contract, in Triton's interpreter if it is Triton's,
                                # with words of the cases' names, if not all are to run
  tests: tests/ops -k words     # or arguments of pytest
  ascend: tests/ascend -k words # or the same in .venv-ascend, with torch_npu
  interpreted: true             # the tests, with TRITON_INTERPRET=1
  gpu: true                     # the check needs a GPU: the row is run with --gpu
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS = ("parity", "tests", "ascend")
FIELDS = {"file", "from", "to", "why", "interpreted", "gpu", *KINDS}


@dataclass(frozen=True)
class Check:
    """kind: one of KINDS. words: its arguments, as in a shell."""

    kind: str
    words: str
    interpreted: bool
    gpu: bool

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.words)

    @property
    def command(self) -> list[str]:
        """The command, to be run in the root of a copy of the tree."""
        if self.kind == "parity":
            return [sys.executable, str(HERE.relative_to(ROOT) / "check_parity.py"), *self.arguments]
        python = ROOT / ".venv-ascend/bin/python" if self.kind == "ascend" else sys.executable
        own = ("--confcutdir", "tests/ascend") if self.kind == "ascend" else ()
        return [str(python), "-m", "pytest", "-xq", "-p", "no:cacheprovider", *own, *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        interpreted = {"TRITON_INTERPRET": "1" if self.interpreted else "0"}
        ascend = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if self.kind == "ascend" else {}
        return interpreted | ascend | ({"OPSET_PLATFORM": "cuda"} if self.gpu else {})

    def __str__(self) -> str:
        return f"{self.kind} {self.words}"


@dataclass(frozen=True)
class Mutant:
    """One change. file: relative to the root of the tree."""

    name: str
    file: Path
    before: str
    after: str
    why: str
    check: Check

    @property
    def gpu(self) -> bool:
        return self.check.gpu

    def applied(self, text: str) -> str:
        """The text of the file with the change. Raises ValueError unless the replaced text occurs exactly once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {count} times in {self.file}, and must once")
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    """All rows of all tables. Raises ValueError for a row that does not follow the format at the head of this file."""
    rows = [
        (name, row) for table in sorted(HERE.glob("*.yaml")) for name, row in yaml.safe_load(table.read_text()).items()
    ]
    return [_mutant(name, row) for name, row in rows]


def _mutant(name: str, row: dict) -> Mutant:
    kinds = [kind for kind in KINDS if kind in row]
    if len(kinds) != 1 or not row.keys() <= FIELDS:
        raise ValueError(f"{name}: a row has one of {', '.join(KINDS)}, and no fields but {', '.join(sorted(FIELDS))}")
    kind, words = kinds[0], row[kinds[0]]
    interpreted = row.get("interpreted", kind == "parity" and shlex.split(words)[1] == "triton")
    check = Check(kind, words, interpreted, row.get("gpu", False))
    return Mutant(name, Path(row["file"]), row["from"], row["to"], row["why"], check)
