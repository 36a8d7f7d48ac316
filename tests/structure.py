"""Figures of the structure of the package, from the syntax trees of its modules.

`python -m tests.structure` prints them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent
TESTS = Path(__file__).parent
RECORDS = ("dataclass", "Struct", "NamedTuple", "TypedDict")
READERS = "parts.formats.readers."
FRONTS = (
    *("testing", "integrations", "data", "ports", "kernel.errors"),
    *("parts.formats.reader", "parts.formats.specification"),
)
"""The packages and modules that users import, besides the package itself."""
KERNEL = ("kernel", "ports")
"""What every save and load of shardwise's own format needs. It imports no part."""
PLATFORM = (
    *("ports", "kernel.errors", "kernel.events", "kernel.deadline", "kernel.decoding"),
    *("kernel.plugins", "kernel.store", "kernel.boxes", "kernel.engine.group"),
    "kernel.engine.rounds",
)
"""What parts may import of the kernel freely, besides public names."""

Name = tuple[str, str]
"""A module, and a name that another module imports from it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How large the package is, and how much of it is connected.

    Attributes:
        statements: of the whole package, without docstrings.
        statements_of_kernel: of `KERNEL`.
        statements_of_api: of what `import shardwise.kernel.api` imports.
        record_types: dataclasses, structs, named tuples and typed dicts.
        names_of_parts_in_kernel: distinct names that the kernel imports from parts.
        names_of_kernel_in_parts: distinct names that parts import from the kernel, besides the
            platform and public names.
        names_of_readers: distinct names that readers of foreign checkpoints import.
        test_files_with_inner_imports: test files that import more than the fronts.
    """

    statements: int
    statements_of_kernel: int
    statements_of_api: int
    record_types: int
    names_of_parts_in_kernel: int
    names_of_kernel_in_parts: int
    names_of_readers: int
    test_files_with_inner_imports: int


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its name below the package: `plan.save`."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def package_of(module: str) -> str:
    """The package of a module: `kernel.plan`, `parts.memory`, `data`; "" for the top level."""
    first, *others = module.split(".")
    if first in ("kernel", "parts") and others:
        first = f"{first}.{others[0]}"
    return first if (SOURCE / first.replace(".", "/")).is_dir() else first.partition(".")[0]


def imported_names(module: str, *, at_import: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield what a module imports of the package: a module and a name, or a module alone.

    Args:
        at_import: only what runs when the module is imported.
    """
    for node in _import_nodes(trees()[module], at_import=at_import):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").removeprefix("shardwise").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield (full, None) if full in trees() else (base, alias.name)
        else:
            for alias in node.names:
                if alias.name.split(".")[0] == "shardwise":
                    yield alias.name.removeprefix("shardwise").lstrip("."), None


def _import_nodes(tree: ast.AST, *, at_import: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and at_import:
            continue
        if isinstance(node, ast.Import):
            yield node
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] == "shardwise":
                yield node
        else:
            yield from _import_nodes(node, at_import=at_import)


def used_names(module: str) -> set[Name]:
    """Names of other modules that a module uses: imported, or as attributes of a module."""
    modules_by_alias = {}
    found = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            base = (node.module or "").removeprefix("shardwise").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                if full in trees():
                    modules_by_alias[alias.asname or alias.name] = full
                elif base:
                    found.add((base, alias.name))
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base = modules_by_alias.get(node.value.id, "")
            if base:
                found.add((base, node.attr))
    return found


def names_from_other_packages(package: str, besides: str = "") -> set[Name]:
    """Names that the modules of a package, besides one module, use of other packages."""
    return {
        (base, name)
        for module in trees()
        if module and package_of(module) == package and module != besides
        for base, name in used_names(module)
        if package_of(base) != package
    }


def is_in(module: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of several modules, or in one of several packages."""
    return f"{module}.".startswith(tuple(f"{place}." for place in places))


def names_over_the_border() -> tuple[set[Name], set[Name]]:
    """Return the names that the kernel imports from parts, and parts from the kernel."""
    of_parts, of_kernel = set(), set()
    for module in filter(None, trees()):
        for base, name in used_names(module):
            if is_in(module, KERNEL) and not is_in(base, KERNEL):
                of_parts.add((base, name))
            elif is_in(base, KERNEL) and not is_in(module, KERNEL):
                is_free = is_in(base, PLATFORM) or name in shardwise.__all__
                of_kernel |= set() if is_free else {(base, name)}
    return of_parts, of_kernel


def names_of_readers() -> set[Name]:
    """Names that readers use of other modules than those of the same reader."""
    return {
        (base, name)
        for module in trees()
        if module.startswith(READERS)
        for base, name in used_names(module)
        if not base.startswith(".".join(module.split(".")[:4]))
    }


def modules_imported_by(module: str) -> set[str]:
    """All modules of the package that an import of a module imports, directly or not."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in trees():
            continue
        seen.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:i]) for i in range(1, len(parts))]
        waiting += [base for base, _ in imported_names(name, at_import=True) if base]
    return seen


def statements_in(module: str) -> int:
    """The number of statements of a module, without docstrings."""
    return sum(
        isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(trees()[module])
    )


def _is_docstring(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a record: data with names."""
    text = " ".join(ast.dump(each) for each in [*node.decorator_list, *node.bases])
    return any(word in text for word in RECORDS)


def inner_imports_of(test: Path) -> list[str]:
    """The modules that a test file imports, except the fronts."""
    text = test.read_text(encoding="utf-8")
    found = re.findall(r"^\s*(?:from|import) shardwise\.([\w.]+)", text, re.MULTILINE)
    return [
        module for module in found if not f"{module}.".startswith(tuple(f"{f}." for f in FRONTS))
    ]


def measure() -> Figures:
    """Measure the package that is imported, and the tests beside this file."""
    of_api = modules_imported_by("kernel.api")
    classes = [
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    of_parts, of_kernel = names_over_the_border()
    tests = [path for path in TESTS.rglob("test_*.py") if inner_imports_of(path)]
    return Figures(
        statements=sum(map(statements_in, trees())),
        statements_of_kernel=sum(statements_in(each) for each in trees() if is_in(each, KERNEL)),
        statements_of_api=sum(map(statements_in, of_api)),
        record_types=sum(map(is_record, classes)),
        names_of_parts_in_kernel=len(of_parts),
        names_of_kernel_in_parts=len(of_kernel),
        names_of_readers=len(names_of_readers()),
        test_files_with_inner_imports=len(tests),
    )


if __name__ == "__main__":
    for name, number in asdict(measure()).items():
        print(f"{name.replace('_', ' '):32} {number:,}")
