"""The documentation holds: its code runs, its links lead somewhere, and it names every option."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import swift_loader
from swift_loader import doctor, pipeline, vision
from tests.support.helpers import once_in_a_run, program_environment
from tests.support.pages import ROOT, Page, documentation

TIMEOUT_S = 300

pytestmark = pytest.mark.timeout(TIMEOUT_S)

PAGES = documentation()
QUICK = [page for page in PAGES if page.name in ("README.md", "docs/quickstart.md", "docs/resume.md")]
LANGUAGES = {"python", "bash", "diff"}


def run_pages(pages: list[Page], folder: Path) -> dict[str, str]:
    """Return the traceback of each page, empty where it succeeds; two processes share the work."""
    demanding = [page for page in pages if any(block.needs for block in page.blocks())]
    groups = [demanding, [page for page in pages if page not in demanding]]
    environment = program_environment(folder)
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    outcomes: dict[str, str] = {}
    with ExitStack() as running:
        runs = []
        for number, group in enumerate(groups):
            results, output = folder / f"{number}.json", folder / f"{number}.txt"
            command = [
                sys.executable,
                "-m",
                "tests.support.run_pages",
                str(results),
                *(str(page.path) for page in group),
            ]
            with output.open("w") as stream:
                run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
            running.enter_context(run)
            running.callback(run.kill)
            runs.append((run, results, output))
        for run, results, output in runs:
            status = run.wait(TIMEOUT_S - 20)
            assert status == 0, output.read_text()
            outcomes |= json.loads(results.read_text(encoding="utf-8"))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return once_in_a_run(tmp_path_factory, "quick", lambda: run_pages(QUICK, tmp_path_factory.mktemp("pages")))


@pytest.fixture(scope="module")
def other_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    others = [page for page in PAGES if page not in QUICK]
    return once_in_a_run(tmp_path_factory, "others", lambda: run_pages(others, tmp_path_factory.mktemp("pages")))


@pytest.mark.parametrize("page", QUICK, ids=lambda page: page.name)
def test_the_code_of_a_page_that_newcomers_read_runs(page: Page, outcomes: dict[str, str]) -> None:
    assert not outcomes[str(page.path)], outcomes[str(page.path)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in QUICK], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Page, other_outcomes: dict[str, str]) -> None:
    assert not other_outcomes[str(page.path)], other_outcomes[str(page.path)]
    if missing := sorted({name for block in page.blocks() for name in block.needs if find_spec(name) is None}):
        pytest.skip(f"blocks that need {', '.join(missing)} weren't run; the others were")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_names_its_language_and_says_why_it_is_not_run(page: Page) -> None:
    for block in page.blocks():
        assert block.language in LANGUAGES, f"{page.name}:{block.first_line}: {block.language!r}"
        assert block.reason != "", f"{page.name}:{block.first_line}: no reason"


@pytest.mark.parametrize("page", [*PAGES, Page(ROOT / "CHANGELOG.md")], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Page) -> None:
    assert page.broken_links() == []


def test_the_links_of_docstrings_lead_somewhere() -> None:
    page, link = Page(ROOT / "docs" / "reference.md"), re.compile(r"\]\(([\w-]+\.md(?:#[\w-]+)?)\)")
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "swift_loader").rglob("*.py")}

    assert [(path.name, one) for path, text in texts.items() for one in link.findall(text) if not page._has(one)] == []


def test_the_readme_links_to_each_page() -> None:
    readme = PAGES[0]
    linked = {link.partition("#")[0] for link in readme.links()}

    assert {page.name for page in PAGES[1:] if not page.name.startswith("docs/reference-")} <= linked


def test_each_public_name_stands_on_a_page_of_the_reference() -> None:
    pages = [page.path.read_text(encoding="utf-8") for page in PAGES if page.name.startswith("docs/reference")]
    shown = {name for text in pages for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    public = {
        f"{module.__name__}.{name}" for module in (swift_loader, doctor, pipeline, vision) for name in module.__all__
    }
    package = ROOT / "swift_loader"
    for path in (package / "testing.py", *(package / "integrations").glob("[a-z]*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        code = path.read_text(encoding="utf-8")
        public |= {f"{module}.{name}" for name in re.findall(r"^(?:class|def) ([A-Za-z]\w+)", code, re.MULTILINE)}

    assert public - shown == set()


def test_the_tables_of_options_are_those_of_the_docstrings() -> None:
    check = [sys.executable, str(ROOT / ".ci" / "options"), "--check"]

    assert subprocess.run(check, capture_output=True, text=True, check=False).stderr == ""


def test_the_failures_page_has_each_class_of_errors() -> None:
    errors = {name for name in swift_loader.__all__ if isinstance(getattr(swift_loader, name), type)}
    errors = {name for name in errors if issubclass(getattr(swift_loader, name), BaseException)}

    assert errors <= rows_of(Page(ROOT / "docs" / "failures.md")).keys()


def test_the_migration_page_has_each_argument_of_torch_s_loader() -> None:
    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}

    assert names <= rows_of(Page(ROOT / "docs" / "migration.md")).keys()


def test_the_tests_that_show_a_guarantee_exist() -> None:
    table = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    code = {file: (ROOT / "tests" / "system" / file).read_text(encoding="utf-8") for file, _ in named}

    assert named
    assert [name for file, name in named if f"\ndef {name}(" not in code[file]] == []


def test_the_page_about_the_code_names_what_is_there_and_each_owner_of_a_thread_or_lock() -> None:
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)` `(\w+)(?:\.(\w+))?", text))
    known, owners = set[tuple[str, str]](), set[tuple[str, str]]()
    package = ROOT / "swift_loader"
    for path in package.rglob("*.py"):
        code, file = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        known |= {(file, name) for name in re.findall(r"^ *(?:class |def |)(\w+)\b", code, re.MULTILINE)}
        for body in re.split(r"^(?=class )", code, flags=re.MULTILINE):
            if body.startswith("class ") and re.search(r"threading\.(R?Lock|Timer)\(|[ (]LoaderThread\(", body):
                owners.add((file, body.split("class ", 1)[1].split("(")[0].split(":")[0]))
    owners -= {("runtime.py", "LoaderThread")}

    assert {(file, name) for file, *names in named for name in names if name and (file, name) not in known} == set()
    assert {(file, name) for file, name in owners if f"`{name}`" not in text or file not in text} == set()


def test_the_changelog_begins_with_what_is_to_come_and_then_this_version() -> None:
    headings = [line for line in Page(ROOT / "CHANGELOG.md").lines if line.startswith("## ")]

    assert headings[0] == "## [Unreleased]"
    assert re.fullmatch(rf"## \[{re.escape(swift_loader.__version__)}\] - \d{{4}}-\d{{2}}-\d{{2}}", headings[1])


def rows_of(page: Page) -> dict[str, list[str]]:
    """Return the rows of a page's tables by each name that the first cell has in backticks."""
    rows: dict[str, list[str]] = {}
    for line in page.prose():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            for name in re.findall(r"`(\w+)", cells[0]):
                rows.setdefault(name, cells)
    return rows
