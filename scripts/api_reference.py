"""Writes docs/api.md: the Python API with its docstrings, the C++ and C headers in short.

Called by hand after a docstring or a public header has changed: python scripts/api_reference.py [--check] [ROOT].
With --check it writes nothing and exits with 1 when docs/api.md is not what it would write. It reads sources only, so
neither plait nor torch has to be importable.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "plait",
    "plait.nn",
    "plait.compat.flash_attn_2",
    "plait.compat.flash_attn_3",
    "plait.integrations.transformers",
    "plait.integrations.torch_flash",
)
HEADERS = (
    "attention.hpp",
    "iha.hpp",
    "kv_cache.hpp",
    "plan.hpp",
    "device.hpp",
    "tensor.hpp",
    "error.hpp",
    "version.hpp",
    "plait.h",
)
HEAD = """\
<!-- Written by scripts/api_reference.py; change the docstrings and headers instead. -->
# API reference

Python first, then the C++ and C headers. `plait.functional` has the same functions as `plait`. How the pieces fit:
[quickstart](quickstart.md); what they compute: [numerics](numerics.md); why a call is refused: [FAQ](faq.md).
"""
HEADERS_HEAD = (
    "C++ is in namespace `plait`. Shapes, dtypes and errors of each function are in the comments of the headers, in",
    "[include/plait](../include/plait).",
)


@dataclass
class Source:
    """One parsed Python file."""

    path: Path

    def __post_init__(self):
        self.lines = self.path.read_text(encoding="utf-8").splitlines()
        self.tree = ast.parse("\n".join(self.lines))

    def public(self) -> list[str]:
        """The names of __all__, or every public function and class where there is none."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return ast.literal_eval(node.value)
        defined = (node for node in self.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        return [node.name for node in defined if not node.name.startswith("_")]

    def origin(self, name: str) -> str | None:
        """The module that `name` is imported from."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and any((item.asname or item.name) == name for item in node.names):
                return node.module
        return None

    def definition(self, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        defined = (node for node in self.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        return next((node for node in defined if node.name == name), None)

    def heading(self, node: ast.FunctionDef | ast.ClassDef) -> str:
        """The signature as the source has it, without the colon."""
        decorators = ["@" + ast.unparse(item) for item in node.decorator_list]
        signature = inspect.cleandoc("\n".join(self.lines[node.lineno - 1 : node.body[0].lineno - 1]))
        return "\n".join([*decorators, signature.rstrip().rstrip(":")])


def module_file(root: Path, module: str) -> Path:
    base = root.joinpath("python", *module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def find(root: Path, module: str, name: str) -> tuple[Source, ast.FunctionDef | ast.ClassDef] | None:
    """Where a public name is defined; None for a module."""
    source = Source(module_file(root, module))
    node = source.definition(name)
    if node is not None:
        return source, node
    origin = source.origin(name)
    if origin is None:
        raise SystemExit(f"api_reference: {module}.{name} is public and nowhere defined")
    if module_file(root, f"{origin}.{name}").is_file():
        return None
    return find(root, origin, name)


def documentation(node: ast.AST, name: str) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"api_reference: {name} is public and has no docstring")
    return text


def markdown(docstring: str) -> list[str]:
    """A docstring as Markdown: Args becomes a list, Returns a paragraph."""
    lines, section = [], ""
    for line in docstring.splitlines():
        title = re.fullmatch(r"(Args|Returns):", line)
        if title:
            section = title[1]
            lines += ["Arguments:", ""] if section == "Args" else ["Returns:"]
        elif line and not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section == "Args" and re.match(r" {4}\S", line):
            names = re.match(r"([\w, ]+): ", line.strip())
            code = ", ".join(f"`{name}`" for name in names[1].split(", ")) + ": " if names else ""
            lines.append(f"* {code}{line.strip()[names.end() if names else 0 :]}")
        else:
            lines.append(("  " if section == "Args" and line else "") + line.strip())
    return lines


def render_class(source: Source, node: ast.ClassDef, name: str) -> list[str]:
    lines = ["```python", source.heading(node)]
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            lines.append("    " + source.lines[item.lineno - 1].strip())
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            lines += ["    " + line for line in source.heading(item).splitlines()]
    lines += ["```", "", *markdown(documentation(node, name)), ""]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
            lines += ["```python", source.heading(item), "```", "", *markdown(ast.get_docstring(item)), ""]
    return lines


def render_module(root: Path, module: str) -> tuple[list[str], list[str]]:
    """The section of a module, and its names."""
    source = Source(module_file(root, module))
    lines = [f"## {module}", "", *markdown(documentation(source.tree, module)), ""]
    names = []
    for public in source.public():
        found = find(root, module, public)
        if found is None:
            continue
        where, node = found
        names.append(f"{module}.{public}")
        lines += [f"### {names[-1]}", ""]
        if isinstance(node, ast.ClassDef):
            lines += render_class(where, node, names[-1])
        else:
            lines += ["```python", where.heading(node), "```", "", *markdown(documentation(node, names[-1])), ""]
    return lines, names


def header_lines(text: str) -> list[str]:
    """The lines of a header, with comments in the C style that begin a line turned into // ones."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("/*") or inside:
            inside = "*/" not in line
            line = "// " + line.removeprefix("/*").removesuffix("*/").strip().removeprefix("* ").strip("*").strip()
        lines.append(line.rstrip())
    return lines


def declared(line: str) -> str | None:
    """The name that a line at column 0 declares."""
    for pattern in (
        r"(?:struct|enum class|class) (\w+)",
        r"typedef (?:struct|enum) (\w+)",
        r"inline constexpr \w+ (\w+) =",
        r"[\w:*& ]+?(\w+)\(",
    ):
        match = re.match(pattern, line)
        if match:
            return match[1]
    return None


def first_sentence(comment: list[str]) -> str:
    return re.split(r"(?<=\.)\s", " ".join(comment))[0].rstrip(".:;")


def render_header(root: Path, name: str) -> list[str]:
    lines = header_lines((root / "include" / "plait" / name).read_text(encoding="utf-8"))
    lines_out = [f"### {name}", "", lines[0].removeprefix("// "), ""]
    comment, names = [], []

    def flush():
        if names:
            text = first_sentence(comment)
            lines_out.append("* " + ", ".join(f"`{item}`" for item in names) + (f": {text}." if text else ""))
            names.clear()

    begun = False
    for line in lines:
        if line.startswith(("namespace plait {", "typedef", "const char* plait")):
            begun = True
        if not begun or line.startswith((" ", "#", "}", "namespace", "extern", "\\")):
            continue
        if line.startswith("//"):
            if names or not comment:
                flush()
                comment = []
            comment.append(line.removeprefix("//").strip())
        elif not line:
            flush()
            comment = []
        elif declared(line):
            names.append(declared(line))
    flush()
    return [*lines_out, ""]


def render(root: Path) -> str:
    body, index = [], []
    for module in MODULES:
        lines, names = render_module(root, module)
        body += lines
        links = (f"[{name.removeprefix(module + '.')}](#{name.replace('.', '').lower()})" for name in names)
        index += [f"| `{module}` | {' · '.join(links)} |"]
    body += ["## C++ and C headers", "", *HEADERS_HEAD, ""]
    for header in HEADERS:
        body += render_header(root, header)
    text = "\n".join([HEAD, "| module | names |", "| --- | --- |", *index, "", *body])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    rest = [argument for argument in arguments if argument != "--check"]
    root = Path(rest[0]) if rest else Path(__file__).parents[1]
    text, target = render(root), root / "docs" / "api.md"
    if not check:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return 0
    print("docs/api.md is out of date: run python scripts/api_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
