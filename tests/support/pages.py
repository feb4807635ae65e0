"""The documentation as tests see it: pages, their code blocks as one script, their links and anchors.

A page may hold, in HTML comments that readers don't see:

    <!-- setup            definitions that its blocks need, or a check of what they did
    ...code...
    -->
    <!-- not run: why -->   the next block isn't run
    <!-- needs: module -->  the rest of the section is run where these modules are installed
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = "```"
_NOT_RUN = re.compile(r"<!-- not run:(.*)-->")
_NEEDS = re.compile(r"<!-- needs:(.*)-->")
_HEADING = re.compile(r"#{1,6} +(.*)")
_SECTION = re.compile(r"#{1,2} ")
_LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or the code of a `setup` comment."""

    language: str
    first_line: int
    """Of the code, counted from 0."""
    code: tuple[str, ...]
    reason: str | None
    """Why it isn't run; None if it is."""
    needs: tuple[str, ...]
    """Modules without which it isn't run."""

    @property
    def is_runnable(self) -> bool:
        return self.language == "python" and self.reason is None and all(map(find_spec, self.needs))


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """The path from the repository's root, if it lies there."""
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else self.path.name

    @property
    def lines(self) -> list[str]:
        """Its lines, without line ends."""
        return self.path.read_text(encoding="utf-8").splitlines()

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks, and its setups as blocks, in the order of the page."""
        lines, number = self.lines, 0
        reason: str | None = None
        needs: tuple[str, ...] = ()
        while number < len(lines):
            line = lines[number]
            if _SECTION.match(line):
                needs = ()
            elif found := _NOT_RUN.fullmatch(line):
                reason = found[1].strip()
            elif found := _NEEDS.fullmatch(line):
                needs = tuple(name.strip() for name in found[1].split(","))
            elif line.startswith(_FENCE) or line == "<!-- setup":
                end = lines.index(_FENCE if line.startswith(_FENCE) else "-->", number + 1)
                language = line.removeprefix(_FENCE).strip() if line.startswith(_FENCE) else "python"
                yield Block(language, number + 1, tuple(lines[number + 1 : end]), reason, needs)
                number, reason = end, None
            number += 1

    def script(self) -> str:
        """Return the code that runs here, each line at its number in the page, so that tracebacks fit."""
        script = [""] * len(self.lines)
        for block in self.blocks():
            if block.is_runnable:
                script[block.first_line : block.first_line + len(block.code)] = block.code
        return "\n".join(script) + "\n"

    def prose(self) -> list[str]:
        """Return its lines outside of code."""
        lines = self.lines
        for block in self.blocks():
            lines[block.first_line : block.first_line + len(block.code)] = [""] * len(block.code)
        return lines

    def links(self) -> list[str]:
        return [inline or reference for inline, reference in _LINK.findall("\n".join(self.prose()))]

    def anchors(self) -> set[str]:
        """Return the anchors of its headings, as GitHub makes them."""
        headings = [found[1] for line in self.prose() if (found := _HEADING.fullmatch(line))]
        return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}

    def broken_links(self) -> list[str]:
        """Return the relative links that lead nowhere: no such file, or no such heading in it."""
        return [link for link in self.links() if not link.startswith(("https://", "http://")) and not self._has(link)]

    def _has(self, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (self.path.parent / path).resolve() if path else self.path
        return target.exists() and (not anchor or anchor in Page(target).anchors())


def documentation() -> list[Page]:
    """Return the README and the pages of `docs/` and `.github/`."""
    return [Page(ROOT / "README.md"), *map(Page, sorted((*ROOT.glob("docs/*.md"), *ROOT.glob(".github/*.md"))))]
