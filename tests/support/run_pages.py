"""Runs the code of pages, one after the other, in this process: `python -m tests.support.run_pages RESULTS.json PAGE
...`.

Each page is a script of its own, in an empty folder. Importing torch and a framework takes longer than most pages.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import ModuleType

from tests.support.pages import Page

LIMIT_S = 200
"""For a page; then the process ends with the stacks of all threads."""


def run_page(page: Page) -> str:
    """Run a page as `__main__`; return the traceback, or an empty string if it succeeds."""
    module, main = ModuleType("__main__"), sys.modules["__main__"]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.chdir(folder)
        sys.modules["__main__"] = module
        try:
            exec(compile(page.script(), str(page.path), "exec"), vars(module))
        except BaseException:
            return traceback.format_exc()
        finally:
            vars(module).clear()
            gc.collect()
            sys.modules["__main__"] = main
            os.chdir(before)
    return ""


if __name__ == "__main__":
    results, *paths = sys.argv[1:]
    outcomes = {}
    for path in paths:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        outcomes[path] = run_page(Page(Path(path)))
    faulthandler.cancel_dump_traceback_later()
    Path(results).write_text(json.dumps(outcomes), encoding="utf-8")
