"""The table of mutation testing matches the code that it changes: `make mutants` runs it."""

import ast
import shlex
from collections import Counter

from mutants import KINDS, ROOT, Mutant, mutants

from vllm_opset import ops

MUTANTS = mutants()
LEAST = 60


def test_what_each_row_changes_occurs_once():
    assert [problem for mutant in MUTANTS if (problem := _does_not_fit(mutant))] == []


def _does_not_fit(mutant: Mutant) -> str | None:
    try:
        changed = mutant.applied((ROOT / mutant.file).read_text())
        if mutant.file.suffix == ".py":
            ast.parse(changed)
    except (OSError, ValueError, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    return f"{mutant.name} changes nothing" if mutant.before == mutant.after else None


def test_the_check_of_each_row_exists():
    for mutant in MUTANTS:
        assert mutant.check.kind in KINDS
        first, *_ = named = [word.partition("::")[0] for word in shlex.split(mutant.check.words)]
        found = first in ops.BY_NAME if mutant.check.kind == "parity" else any((ROOT / word).exists() for word in named)
        assert found, f"{mutant.name}: there is no {first}"


def test_names_differ_and_the_table_is_long_enough():
    counts = Counter(mutant.name for mutant in MUTANTS)
    assert len(MUTANTS) >= LEAST and set(counts.values()) == {1}


def test_every_op_is_changed_somewhere():
    """The change is in a file named after the op, or in a shared file with a check that names the op."""
    changed = {mutant.file.stem for mutant in MUTANTS}
    checked = {shlex.split(mutant.check.words)[0] for mutant in MUTANTS if mutant.check.kind == "parity"}
    assert {op.name for op in ops.ALL} <= changed | checked
