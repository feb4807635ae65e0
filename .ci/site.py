"""Hooks of mkdocs. The README is the home page, and files outside of docs/ that a page links to are part of the site.

Pages link to each other as on GitHub: by a path from the file that has the link. A page outside of docs/ has the same
path in the site, so `docs/` is taken out of its links. A linked source file becomes a page that shows it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"README.md": "index.md", ".github/CONTRIBUTING.md": "contributing.md", ".github/SECURITY.md": "security.md"}
"""Of pages that have another name in the site: mkdocs leaves out folders that begin with a dot."""

_LINK = re.compile(r"(?<=\]\()(?!https?:)([^)\s#]+)")
_MEMBER = re.compile(r'(id="[\w.]*\.([A-Z]\w*)\.\w+" class="doc doc-heading">\s*<code[^>]*></code>\s*<span [^>]*>)')


def on_files(files: Files, config: Any) -> Files:
    """Add the README, the changelog and what pages link to."""
    pages = [ROOT / "README.md", *(Path(str(file.abs_src_path)) for file in files.documentation_pages())]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    targets = {(page.parent / link).resolve() for page, text in texts.items() for link in _LINK.findall(text)}
    for path in sorted(targets | {ROOT / "README.md"}):
        if path.is_relative_to(ROOT / "docs") or not path.is_file():
            continue
        name = _name_of(path)
        if not name.endswith(".md"):
            files.append(File.generated(config, name, abs_src_path=str(path)))
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".md":
            text = f"# {path.name}\n\n```{path.suffix.lstrip('.') or 'text'}\n{text}```\n"
        files.append(File.generated(config, name, content=_with_links(text, path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page of docs/ lead to where the files are in the site. A search finds the loaders first."""
    page.meta["search"] = {"boost": 3 if page.file.src_path == "reference.md" else 1}
    return _with_links(markdown, Path(page.file.abs_src_path)) if page.file.abs_src_path else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Begin the heading of a method in the reference with its class: `SwiftLoader.resize`."""
    return _MEMBER.sub(r"\1\2.", html)


def _with_links(text: str, path: Path) -> str:
    folder = (ROOT / _name_of(path)).parent

    def replaced(found: re.Match[str]) -> str:
        return os.path.relpath(ROOT / _name_of((path.parent / found[1]).resolve()), folder)

    return _LINK.sub(replaced, text)


def _name_of(path: Path) -> str:
    """Return the path in the site, of the Markdown if it is a page."""
    home = ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT
    name = os.path.relpath(path, home)
    is_shown = path.suffix in (".py", "") and home == ROOT
    return NAMES.get(name, name) if not is_shown else f"{name.removesuffix('.py')}.md"
