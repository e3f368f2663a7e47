"""Counts of the layout: `make layout` prints them, and tests/test_layout.py asserts those that are rules.

A module here is a Python file of the package besides `__init__.py`. A line of code is neither blank, nor a
comment, nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from paths import ROOT, TESTS

PACKAGE = ROOT / "jaxpp_async"
MAX_LINE = 110
"""Characters of a line of code, of a comment, a docstring or a paragraph of Markdown."""

_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_PRAGMA = re.compile(r"\s*# (noqa|type: ignore|pyright: ignore)\b.*$")
_BAD_SENTENCE = re.compile(r"(?:[.!?]\s+|\n\n\s*)(?:What|Those|They|It)\b[^.]{0,60}")
_BAD_OPENING = re.compile(r"(What|Those|They|It)\b|\w+: |In: |[^.]* in, [^.]* out\b")


@dataclass(frozen=True)
class Module:
    """One Python file of the package.

    Args:
        path: relative to the checkout.
        source: its text.
    """

    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @property
    def name(self) -> str:
        """The dotted name under which it is imported."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def is_package_marker(self) -> bool:
        """Whether it is an `__init__.py`, which counts as no module."""
        return self.path.name == "__init__.py"

    @cached_property
    def num_code_lines(self) -> int:
        """Lines that are neither blank, nor a comment, nor part of a docstring."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        lines = {
            line
            for token in tokens
            if token.type not in _LAYOUT_TOKENS
            for line in range(token.start[0], token.end[0] + 1)
        }
        return len(lines - {line for node in self._docstrings() for line in _lines_of(node)})

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Yield where each docstring stands (`path:line`) and its text."""
        for node in self._docstrings():
            yield f"{self.path}:{node.lineno}", node.value.value.strip()  # type: ignore[attr-defined]

    def public_classes(self) -> list[str]:
        """Return the names of classes at the top of the module that do not begin with an underscore."""
        return [n.name for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]

    def _docstrings(self) -> Iterator[ast.Expr]:
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement


def _lines_of(node: ast.Expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@cache
def all_files() -> tuple[Module, ...]:
    """Return every Python file of the package, package markers too."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(Module(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths)


def modules() -> list[Module]:
    """Return the modules of the package: its Python files besides `__init__.py`."""
    return [module for module in all_files() if not module.is_package_marker]


def classes_named_twice() -> dict[str, list[str]]:
    """Return each public class name that more than one module defines, with those modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for name in module.public_classes():
            found[name].append(module.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def untested_modules() -> list[str]:
    """Return the modules that no test, and no module that tests share, imports by name."""
    imported = {name for path in TESTS.rglob("*.py") for name in _imports(path)}
    return [module.name for module in modules() if module.name not in imported]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\bjaxpp_async(?:\.\w+)+", node.value)  # programs that tests start


def long_lines() -> list[str]:
    """Return where a line of Python is longer than `MAX_LINE` characters (`path:line`). A comment at the end
    of a line that addresses a tool does not count."""
    folders = [PACKAGE, TESTS, ROOT / "examples", ROOT / "benchmarks"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(_PRAGMA.sub("", line)) > MAX_LINE
    ]


def long_markdown_lines() -> list[str]:
    """Return where a line of Markdown is longer than `MAX_LINE`; rows of tables, code and links may be."""
    found: list[str] = []
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]):
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            if len(line) > MAX_LINE and not in_code and not line.lstrip().startswith(("|", "[", "`")):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    return found


def badly_opened_docstrings() -> list[str]:
    """Return where a docstring opens with a pronoun, its own name or "X in, Y out", not with a sentence."""
    return [
        f"{where}: {text.splitlines()[0][:80]}"
        for module in all_files()
        for where, text in module.docstrings()
        if _BAD_OPENING.match(text) and not text.startswith(("Raises:", "Args:", "Returns:", "Yields:"))
    ]


def badly_begun_sentences() -> list[str]:
    """Return where a sentence of a docstring, behind the opening, begins with a pronoun; also in examples."""
    paths = sorted((ROOT / "examples").rglob("*.py"))
    examples = [Module(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]
    return [
        f"{where}: {found[0].strip()}"
        for module in (*all_files(), *examples)
        for where, text in module.docstrings()
        for found in _BAD_SENTENCE.finditer(text)
    ]


def num_import_rule_lines() -> int:
    """Return the length of the import rules in pyproject.toml, without comments and blank lines."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rules = re.split(r"(?m)^\[(?!\[?tool\.importlinter)", text[text.index("[tool.importlinter]") :])[0]
    return sum(1 for line in rules.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def num_architecture_lines() -> int:
    """Return the length of docs/architecture.md in lines."""
    return len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Print the counts."""
    found = modules()
    sizes = sorted((module.num_code_lines, module.name) for module in found)
    total = sum(module.num_code_lines for module in all_files())
    rows = {
        "modules besides __init__.py": len(found),
        "lines of code, __init__.py too": total,
        "largest module, lines": "{} ({})".format(*sizes[-1]),
        "modules under 50 lines": sum(size < 50 for size, _ in sizes),
        "public class names used twice": len(classes_named_twice()),
        "modules that no test imports": len(untested_modules()),
        "docstrings that do not open with a sentence": len(badly_opened_docstrings()),
        "sentences of docstrings that begin with a pronoun": len(badly_begun_sentences()),
        f"lines of Python over {MAX_LINE}": len(long_lines()),
        f"lines of Markdown over {MAX_LINE}": len(long_markdown_lines()),
        "lines of import rules": num_import_rule_lines(),
        "lines of docs/architecture.md": num_architecture_lines(),
    }
    for what, value in rows.items():
        print(f"{what:52}{value}")


if __name__ == "__main__":
    main()
