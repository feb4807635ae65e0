"""The second process: builds the dataset again, and the same samples in another order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from swift_loader.doctor.facts import OtherBuild
from swift_loader.doctor.probes.board import Board, Request
from swift_loader.doctor.probes.entropy import EntropyWatch
from swift_loader.doctor.probes.leaves import digests_of
from swift_loader.doctor.probes.subject import Subject, build

__all__ = ["compare"]

_now_s = time.perf_counter  # before the watch replaces it


def compare(request: Request, board: Board, report: Callable[[object], None]) -> None:
    """Build the samples of the request, last one first, and report their digests."""
    watch = EntropyWatch()
    watch.install()
    watch.begin()
    dataset, construction = build(request.settings.target, board)
    of_constructor = watch.end()
    if dataset is None or not construction.lengths[0]:
        return
    subject = Subject(dataset, construction.lengths[0], board)
    digests, entropy = {}, {}
    deadline_s = _now_s() + request.seconds
    for index in reversed(request.indices):
        watch.begin()
        with suppress(Exception, SystemExit):
            digests[index] = digests_of(subject.fetch(index))
        entropy[index] = watch.end()
        if _now_s() > deadline_s:
            break
    report(OtherBuild(construction.lengths[0], digests, entropy, of_constructor))
