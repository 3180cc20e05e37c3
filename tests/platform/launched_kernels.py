"""The Triton kernels that vLLM's second model runner launches, by the source of the installed vLLM."""

import ast
import functools
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

RUNNER = "vllm/v1/worker/gpu"
SITE_PACKAGES = Path(importlib.util.find_spec("vllm").origin).parents[1]


@functools.cache
def launched_kernels(root: Path = SITE_PACKAGES) -> dict[str, tuple[str, ...]]:
    """The parameters of each kernel, by its qualified name. root: the folder of the package vllm.

    A kernel is a function that Triton compiles and that other functions use. It is one of the runner's modules, or of a
    module whose functions or classes the runner uses, if these use it.
    """
    used = defaultdict[Path, set[str]](set)
    for path in (root / RUNNER).rglob("*.py"):
        names = set(_names(_tree(path)))
        used[path] |= names
        for module, imported, name in _imports(_tree(path)):
            if name in names:
                used[root / f"{module.replace('.', '/')}.py"].add(imported)
    return {
        f"{'.'.join(path.relative_to(root).with_suffix('').parts)}.{kernel.name}": _parameters(kernel)
        for path, names in used.items()
        if path.exists()  # a package has no kernels of its own
        for kernel in _reached(_tree(path), names)
    }


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """What a module imports from vLLM: for each import, the module, its name for it, and the importer's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def _is_compiled(node: ast.AST) -> bool:
    """Whether this is a function that Triton compiles."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator).partition("(")[0].endswith("jit") for decorator in decorators)


def _names(node: ast.AST) -> Iterator[str]:
    """The names that are used in a node, except by functions that Triton compiles."""
    if isinstance(node, ast.Name):
        yield node.id
    elif not _is_compiled(node):
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _reached(tree: ast.AST, names: Iterable[str]) -> Iterator[ast.FunctionDef]:
    """The kernels of a module that have these names, or that functions and classes of these names use."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}
    left = list(names)
    while left:
        node = defined.pop(left.pop(), None)
        if node is not None and _is_compiled(node):
            yield node
        elif node is not None:
            left += _names(node)


def _parameters(kernel: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(parameter.arg for parameter in kernel.args.args)
