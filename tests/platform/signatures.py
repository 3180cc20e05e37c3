"""Compares signatures: calls that one function accepts and another refuses, and calls of vLLM in a source file."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType


def refused(theirs: Callable, ours: Callable) -> list[str]:
    """Calls that `theirs` accepts and `ours` refuses: with all arguments by position, by name, and with the fewest."""
    return [str(call) for call in _calls(parameters(theirs)) if not _binds(inspect.signature(ours), call)]


def parameters(function: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _calls(takes: list[inspect.Parameter]) -> Iterator[tuple[list, dict]]:
    positional = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in takes if p.default is p.empty and p.name in positional]
    needed = [p.name for p in takes if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    by_name = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    only_positional = [p.name for p in takes if p.kind is p.POSITIONAL_ONLY]
    yield positional, dict.fromkeys([p.name for p in takes if p.kind is p.KEYWORD_ONLY])
    yield required, dict.fromkeys(needed)
    yield only_positional, dict.fromkeys(by_name)
    if any(p.kind is p.VAR_POSITIONAL for p in takes):
        yield [*positional, "and", "more"], dict.fromkeys(needed)
    if any(p.kind is p.VAR_KEYWORD for p in takes):
        yield required, dict.fromkeys([*needed, "and_more"])


def _binds(signature: inspect.Signature, call: tuple[list, dict]) -> bool:
    arguments, named = call
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def method(cls: type, name: str) -> Callable:
    """The method as called on an object of the class, without the argument that Python passes by itself."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, staticmethod | classmethod):
        return getattr(cls, name)
    return found.__get__(object())


def is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, staticmethod | classmethod)


def overridden(module: ModuleType) -> Iterator[tuple[type, str, type]]:
    """(class, method, class of vLLM's) for every method of vLLM's that a class of the module replaces."""
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            for name in {name for base in cls.__mro__ if _is_ours(base) for name in vars(base)}:
                base = next(
                    (base for base in cls.__mro__ if base.__module__.startswith("vllm.") and name in vars(base)), None
                )
                if base is not None and is_method(vars(base)[name]):
                    yield cls, name, base


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("vllm_opset.")


class Calls(ast.NodeVisitor):
    """The calls of vLLM's functions in a module's source, as far as their names identify the functions.

    found: for each, (line, function, number of positional arguments, names of the others). Names are followed from
    imports, `self`, `super()` and parameters that are annotated with a class.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.scopes: list[dict[str, object]] = [vars(module)]
        self.cls: type | None = None
        self.found: list[tuple[int, Callable, int | None, list[str] | None]] = []
        self.missing: list[str] = []
        self.visit(ast.parse(inspect.getsource(module)))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "vllm" and len(self.scopes) > 1:
            for alias in node.names:
                try:
                    self.scopes[-1][alias.asname or alias.name] = _imported(node.module, alias.name)
                except (ImportError, AttributeError):
                    self.missing.append(f"{node.module}.{alias.name}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.cls = self.cls, getattr(self.module, node.name, None)
        self.generic_visit(node)
        self.cls = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope: dict[str, object] = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            scope[argument.arg] = _Instance(self._resolve(argument.annotation) if argument.annotation else None)
        if self.cls is not None and node.args.args and node.args.args[0].arg in ("self", "cls"):
            scope[node.args.args[0].arg] = _Instance(self.cls)
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self._resolve(node.func)
        if callable(function) and not isinstance(function, _Instance) and _is_vllms(function):
            self.found.append((node.lineno, function, *_given(node)))

    def _resolve(self, node: ast.expr) -> object | None:
        """The object that the expression names, or None if it is known only at run time."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation
            return self._resolve(ast.parse(node.value, mode="eval").body) if node.value.isidentifier() else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and self.cls:
            return _Instance(self.cls, above=True)
        if isinstance(node, ast.Attribute):
            return _attribute(self._resolve(node.value), node.attr)
        return None


def calls_of(name: str, module: ModuleType) -> list[tuple[int | None, list[str] | None]]:
    """The arguments of every call of a function or method of this name in the module, as in `Calls.found`."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return [_given(node) for node in calls if name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))]


def _given(node: ast.Call) -> tuple[int | None, list[str] | None]:
    """The number of positional arguments, and the names of the others. None: known only at run time."""
    several = any(isinstance(argument, ast.Starred) for argument in node.args)
    names = [keyword.arg for keyword in node.keywords]
    return None if several else len(node.args), None if None in names else names


class _Instance:
    """An object of this class. above: it is seen by `super()`."""

    def __init__(self, cls: object, above: bool = False) -> None:
        self.cls, self.above = cls, above


def _attribute(owner: object | None, name: str) -> object | None:
    if not isinstance(owner, _Instance):
        return getattr(owner, name, None) if isinstance(owner, ModuleType | type) else None
    if not isinstance(owner.cls, type):
        return None
    bases = owner.cls.__mro__[owner.above :]
    holder = next((base for base in bases if name in vars(base)), None)
    return method(holder, name) if holder is not None and is_method(vars(holder)[name]) else None


def _imported(module: str, name: str) -> object:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def _is_vllms(function: Callable) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] == "vllm"


def why_not(function: Callable, num_positional: int | None, names: list[str] | None) -> str | None:
    """The reason why a call is refused. None if it is accepted, or if its arguments are known only at run time."""
    signature = inspect.signature(function)
    bind = signature.bind_partial if num_positional is None or names is None else signature.bind
    try:
        bind(*[None] * (num_positional or 0), **dict.fromkeys(names or []))
    except TypeError as refusal:
        return str(refusal)
    return None
