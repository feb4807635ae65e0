from __future__ import annotations

import threading

import pytest

from swift_loader.worker.import_guard import importing, refuse_nesting


def test_a_loader_is_refused_while_the_modules_are_imported() -> None:
    refuse_nesting()
    with importing():
        with pytest.raises(RuntimeError, match="a module starts a loader when it is imported"):
            refuse_nesting()
        with importing():
            pass
        with pytest.raises(RuntimeError):
            refuse_nesting()
    refuse_nesting()


def test_an_import_that_fails_ends_the_refusal() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    refuse_nesting()


def test_other_threads_may_start_loaders() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            refuse_nesting()
        except RuntimeError as error:
            errors.append(error)

    with importing():
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(60)
    assert errors == []
