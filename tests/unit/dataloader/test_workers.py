from __future__ import annotations

from loguru import logger

from swift_loader.dataloader import workers


def test_what_workers_say_when_they_start_is_logged_once() -> None:
    lines: list[str] = []
    handler = logger.add(lines.append, level="DEBUG", format="{message}")
    try:
        for _ in range(3):
            workers._log_once("starting takes longer here")
    finally:
        logger.remove(handler)
    assert lines == ["starting takes longer here\n"]
