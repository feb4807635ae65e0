"""A diagnosis in colours, and a display of the progress. Needs rich."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.examination import Step
from swift_loader.doctor.findings import Severity
from swift_loader.doctor.text import headline, time_lines
from swift_loader.doctor.units import share_text

__all__ = ["print_diagnosis", "progress"]

_STYLES = {Severity.FAULT: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print it to stdout."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(headline(diagnosis))}[/bold]")
    for line in time_lines(diagnosis):
        console.print(f"  {escape(line)}")
    if diagnosis.lines:
        table = Table("share", "line", "function", title="Where the time goes", title_justify="left")
        for one in diagnosis.lines:
            table.add_row(
                share_text(one.share), escape(f"{one.line.file}:{one.line.number}"), escape(one.line.function)
            )
        console.print(table)
    for finding in diagnosis.findings:
        style = _STYLES[finding.severity]
        console.print(f"[{style}]{finding.severity.value} ({finding.topic})[/{style}] {escape(finding.what)}")
        console.print(f"    seen: {escape(finding.evidence)}", style="dim")
        console.print(f"    do:   {escape(finding.remedy)}")
    for line in diagnosis.healthy:
        console.print(f"[green]ok[/green] {escape(line)}")


@contextmanager
def progress() -> Iterator[Step]:
    """Show a bar on stderr, if that is a terminal. Yields the function that moves it."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        task = display.add_task("starting", total=1.0)
        yield lambda doing, share: display.update(task, description=doing, completed=share)
