"""Prints, as JSON, the functions and classes of vLLM and PyTorch that an engine replaces. Run in a process of its own.

Its argument is the folder of a model. Its standard input lists the modules to import first, as JSON.
"""

import contextlib
import importlib
import json
import sys
import types
from pathlib import Path

import models
import torch
from engines import generate, running

sys.path.append(str(Path(__file__).parents[1] / "platform"))
import changes

CODE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)


def code(value) -> int | None:
    """Replaces `changes.identity`, because a running engine changes many other values, such as its process groups."""
    return id(value) if isinstance(value, CODE) else None


def after_serving(folder: Path) -> dict[str, int | None]:
    with running(folder) as llm:
        generate(llm, models.prompts(), temperature=1.0, seed=1)
        return changes.snapshot()


def main() -> None:
    changes.identity = code
    folder = Path(sys.argv[1])
    for name in json.load(sys.stdin):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The test does not list attributes that are replaced once on GPUs, so the comparison starts after serving there.
    before = after_serving(folder) if torch.cuda.is_available() else changes.snapshot()
    after = after_serving(folder)
    owners = {name.rsplit(".", 1)[0] for name in before}
    replaced = [name for name in after if name.rsplit(".", 1)[0] in owners and after[name] != before.get(name)]
    # vLLM itself puts what its registry has in the places of the kernels that its second model runner launches.
    print(json.dumps([name for name in replaced if not changes.LAUNCHED.fullmatch(name)]))


if __name__ == "__main__":
    main()
