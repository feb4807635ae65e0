"""The training loops of one case of a storm: all that is drawn happens, and all that arrives is compared."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random
from subprocess import Popen
from typing import Any

from swift_loader import (
    LoaderClosed,
    ProtocolError,
    SwiftLoader,
    SwiftLoaderError,
    TooManyErrors,
    WorkerDied,
    WorkerStalled,
)
from tests.support.storm_case import NUM_EPOCHS, TRAITS, Case, Deed, Event, Leg, Pass
from tests.support.storm_datasets import PlantedError
from tests.support.storm_keeping import Holder, Kept
from tests.support.storm_reference import (
    Agreement,
    Deviation,
    Epoch,
    Fingerprint,
    compare_in_order,
    compare_unordered,
    make_reference,
    storm_loader,
)
from tests.support.storm_trainer import Surroundings, kill, pause_self, processes

_STOPPED_S = 0.1
_IDLE_S = 0.05

_CHANGES = {Deed.CHDIR, Deed.ENVIRON, Deed.GROW, Deed.REPLACE}
"""Of what a dataset depends on: before the loader starts, they are none."""

_SPARE_SLOTS = 8
"""Of each worker, beyond what is in flight."""

_MEMORY_SLACK = 64 << 20
"""Beyond what is in flight and what is kept, for slots that are rounded up."""


class Loop:
    """A case under way."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._epochs: list[Epoch] = []
        self._agreement = Agreement(case)
        self._kept: list[Kept] = []
        self._kept_nbytes = 0
        self._holders: list[Holder] = []
        self._pausing: Popen[bytes] | None = None
        self._last: Any = None
        """The batch that the loop is at."""
        self._leg_deeds: Counter[Deed] = Counter()
        self._leg: Leg | None = None
        self._surroundings: Surroundings | None = None
        self.has_met_planted = False
        self.num_batches = 0
        self.deeds: Counter[Deed] = Counter()

    def go(self, surroundings: Surroundings) -> None:
        """Make all legs."""
        self._surroundings = surroundings
        self._epochs = make_reference(self._case, surroundings.folder)
        state: dict[str, int] | None = None
        position = (0, 0)
        for leg in self._case.legs:
            surroundings.put_back()
            self._leg, self._leg_deeds, self._agreement = leg, Counter(), Agreement(self._case)
            state, position = self._run_leg(leg, surroundings.folder, state, position)
            self._check_kept()

    def let_go(self) -> None:
        """Let go of all that is kept."""
        self._kept.clear()
        self._last = None
        with contextlib.suppress(Deviation):  # there was another before
            self._finish_holders()

    def is_planted(self, error: Exception) -> bool:
        """Return whether the leg has done something that may end in this error."""
        if not isinstance(error, SwiftLoaderError) or isinstance(error, ProtocolError) or self._leg is None:
            return False
        deeds = self._leg_deeds
        has_changed = deeds[Deed.GROW] or deeds[Deed.REPLACE] or TRAITS[self._case.kind].differs_by_itself
        num_kills = deeds[Deed.KILL] + deeds[Deed.KILL_TEMPLATE] + deeds[Deed.STOP]
        num_survived = min(self._leg.worker_restarts, 1)
        is_too_much = isinstance(error, (WorkerDied, WorkerStalled)) and num_kills > num_survived
        return bool(has_changed or is_too_much)

    # Loaders ----------------------------------------------------------------------------------------------------------

    def _run_leg(
        self, leg: Leg, folder: str, state: dict[str, int] | None, position: tuple[int, int]
    ) -> tuple[dict[str, int] | None, tuple[int, int]]:
        """Return the state at the end, if there can be one, and the (epoch, batch) that comes next."""
        loader = storm_loader(
            self._case,
            folder,
            leg.workers,
            leg.slow_s,
            in_order=leg.in_order,
            multithread=leg.multithread,
            start_method=leg.start_method,
            data_queue_size=leg.data_queue_size,
            dataset_per_worker=leg.dataset_per_worker,
            timeout=leg.timeout_s,
            worker_restarts=leg.worker_restarts,
            validate=leg.validate,
        )
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            else:
                position = (position[0], 0)
                loader.set_epoch(position[0])
            if not leg.starts_by_itself or self._case.num_consumers > 1:
                try:
                    loader.start(self._case.seed % self._case.num_consumers)
                except PlantedError:
                    if not self._first_fails(leg, position):
                        raise
                    self.has_met_planted = True
                    return state, position
            reached = position
            finished = state["epoch"] if state is not None and position == (state["epoch"] + 1, 0) else None
            for number, one in enumerate(leg.passes):
                closes = leg.closes_in_midst and number == len(leg.passes) - 1
                reached, position = self._run_pass(loader, leg, one, position, finished, closes=closes)
                finished = None
            self._check_restarts(loader)
        self._finish_holders()
        is_in_midst = reached[1] > 0
        if is_in_midst and not leg.in_order:
            return None, position
        return loader.state_dict(), reached

    def _first_fails(self, leg: Leg, position: tuple[int, int]) -> bool:
        """Return whether the first batch, for which `start` waits, has a sample that fails."""
        epoch, waits = self._epochs[position[0]], leg.validate and leg.workers > 0
        return waits and position[1] >= len(epoch.batches) and epoch.ending == PlantedError.__name__

    def _run_pass(
        self,
        loader: SwiftLoader,
        leg: Leg,
        one: Pass,
        position: tuple[int, int],
        finished: int | None,
        *,
        closes: bool,
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return where a state goes on, and where the next pass begins.

        Of the epoch `finished`, whose end the loaded state was saved at, nothing is left if it is chosen.
        """
        epoch, begin = position
        chosen = one.epoch if one.epoch is not None or epoch < NUM_EPOCHS else 0
        if chosen is not None:
            loader.set_epoch(chosen)
            epoch, begin = chosen, begin if chosen == epoch else 0
        is_finished = chosen is not None and chosen == finished
        due = () if is_finished else self._epochs[epoch].batches[begin:]
        due_ending = "" if is_finished else self._epochs[epoch].ending
        limit = one.breaks_at if one.breaks_at is not None and one.breaks_at < len(due) else None
        where = f"epoch {epoch}, from batch {begin} on"
        got: list[Fingerprint] = []
        ending = ""
        iterator = iter(loader)
        try:
            while limit is None or len(got) < limit:
                self._last = None  # as `for batch in loader` would not: the batch before is let go
                for event in one.events:
                    if event.at == len(got) and (loader.has_started or event.deed not in _CHANGES):
                        self._carry_out(event, iterator, f"{where}, before batch {len(got)}")
                batch = next(iterator)
                got.append(self._take(loader, leg, batch, due, len(got), where))
                del batch
        except StopIteration:
            pass
        except (PlantedError, TooManyErrors) as error:
            if type(error).__name__ != due_ending:
                raise
            self.has_met_planted = True
            if not loader.has_started:  # it came as the loader started
                return position, position
            ending = type(error).__name__
        # In completion order, the batch that fails may come before or after others: what is beyond it isn't known here.
        is_cut_short = not leg.in_order and bool(due_ending)
        if not leg.in_order:
            known = {batch.ids for batch in due}
            compared = [one for one in got if one.ids in known] if is_cut_short else got
            compare_unordered(compared, [self._agreement.expected(batch) for batch in due], where)
        if limit is None and (ending != due_ending or (len(got) != len(due) and not is_cut_short)):
            raise Deviation(
                f"wrong data: {where}: {len(got)} batches instead of {len(due)}, then {ending or 'the end'}"
            )
        if closes:
            self._close_in_midst(loader, iterator, is_over=limit is None)
        self._finish_holders()
        self._check_memory(leg)
        is_over = limit is None and not ending
        return (epoch + 1, 0) if is_over else (epoch, begin + len(got)), (epoch + 1, 0)

    def _take(
        self, loader: SwiftLoader, leg: Leg, batch: Any, due: tuple[Fingerprint, ...], number: int, where: str
    ) -> Fingerprint:
        """Look at a batch, and keep it or parts of it."""
        self._last = batch
        self.num_batches += 1
        name = f"{where}: batch {number}"
        whole = Fingerprint.of(batch)
        told = tuple(loader.batch_indices.tolist())
        if told != whole.ids:
            raise Deviation(f"wrong data: {name} has the samples {whole.ids}, and batch_indices says {told}")
        print_ = self._agreement.note(whole, name)
        if leg.in_order:
            if number >= len(due):
                raise Deviation(f"wrong data: {name} is one too many")
            compare_in_order(print_, self._agreement.expected(due[number]), name)
        rng = Random(self._case.seed + self.num_batches)
        if leg.hoard and rng.random() < 0.8:
            self._kept.append(Kept(name, batch, rng))
            self._kept_nbytes += whole.nbytes
            while len(self._kept) > leg.hoard:
                self._drop(rng.randrange(len(self._kept)))
        return print_

    def _drop(self, number: int) -> None:
        dropped = self._kept.pop(number)
        if dropped.is_changed:
            raise Deviation(f"wrong data: {dropped.name} changed while it was kept")

    def _close_in_midst(self, loader: SwiftLoader, iterator: Any, *, is_over: bool) -> None:
        loader.close()
        expected: type[BaseException] = StopIteration if is_over else LoaderClosed
        try:
            next(iterator)
        except (expected, PlantedError, TooManyErrors):
            return
        raise Deviation("after close(), the iterator goes on")

    # What happens in between ------------------------------------------------------------------------------------------

    def _carry_out(self, event: Event, iterator: Any, name: str) -> None:
        assert self._surroundings is not None
        assert self._leg is not None
        rng = Random(event.seed)
        deed = event.deed
        if deed in (Deed.KILL, Deed.KILL_TEMPLATE, Deed.STOP):
            if not self._strike(deed, rng):
                return
        elif deed in (Deed.FORK, Deed.FORK_NEXT):
            self._fork(rng, iterator if deed is Deed.FORK_NEXT else None)
        elif deed is Deed.PAUSE:
            self._pausing = pause_self(self._leg.timeout_s + 0.7)
        elif deed is Deed.IDLE:
            time.sleep(rng.random() * _IDLE_S)
        else:
            {
                Deed.CHDIR: self._surroundings.change_directory,
                Deed.ENVIRON: self._surroundings.change_environment,
                Deed.GROW: self._surroundings.grow,
                Deed.REPLACE: self._surroundings.replace,
            }[deed]()
        self._leg_deeds[deed] += 1
        self.deeds[deed] += 1

    def _strike(self, deed: Deed, rng: Random) -> bool:
        """Kill or stop a process of the loader; return whether there was one."""
        victims = processes(rng, templates=deed is Deed.KILL_TEMPLATE, except_for={one.pid for one in self._holders})
        for victim in victims[:1]:
            kill(victim, signal.SIGSTOP if deed is Deed.STOP else signal.SIGKILL)
            assert self._leg is not None
            if deed is Deed.STOP and (self._leg.timeout_s > 5 or rng.random() < 0.5):
                time.sleep(_STOPPED_S)
                kill(victim, signal.SIGCONT)
        return bool(victims)

    def _fork(self, rng: Random, iterator: Any) -> None:
        """Have a child keep what is kept here, and, for certain, the batch that comes next to be let go."""
        current = [Kept("the last batch", self._last, rng)] if self._last is not None else []
        self._holders.append(Holder([*self._kept, *current], iterator, rng))
        if rng.random() < 0.5:
            while self._kept:
                self._drop(0)

    def _finish_holders(self) -> None:
        if self._pausing is not None:
            self._pausing.wait()
            self._pausing = None
        holders, self._holders = self._holders, []
        complaints = [complaint for holder in holders if (complaint := holder.finish())]
        if complaints:
            raise Deviation(complaints[0])

    # What must hold ---------------------------------------------------------------------------------------------------

    def _check_kept(self) -> None:
        """Look at all that is kept, and let it go; called after `close()`."""
        while self._kept:
            self._drop(0)
        self._kept_nbytes = 0

    def _check_restarts(self, loader: SwiftLoader) -> None:
        num_restarts = loader.report().get("worker_restarts", 0)
        deeds = self._leg_deeds
        num_kills = deeds[Deed.KILL] + deeds[Deed.KILL_TEMPLATE] + deeds[Deed.STOP]
        if num_restarts > num_kills:
            raise Deviation(f"{num_restarts} restarts, although only {num_kills} processes were killed or stopped")

    def _check_memory(self, leg: Leg) -> None:
        """Hold what is mapped for batches to what is in flight, and some times what is kept."""
        largest = max((batch.nbytes for epoch in self._epochs for batch in epoch.batches), default=0)
        limit = leg.workers * (leg.data_queue_size + _SPARE_SLOTS) * largest + 3 * self._kept_nbytes + _MEMORY_SLACK
        mapped = _mapped_nbytes()
        if mapped > limit:
            kept = f"{len(self._kept)} batches are kept, {self._kept_nbytes / 1e6:.1f} MB"
            raise Deviation(f"memory: {mapped / 1e6:.0f} MB are mapped, and {limit / 1e6:.0f} MB are meant; {kept}")


def _mapped_nbytes() -> int:
    """Return how much of the loader's memory is mapped here."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:swift_loader" in line:
            begin, _, end = line.split(" ", 1)[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total
