"""Decides whether this rank shares its template with the other ranks of its node, and gets it that template.

What ranks share is the same on all of them: a payload without the plan. So a rank sends its plan to its template
besides, whether that is shared or its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.meeting import MeetingPoint, NotShared
from swift_loader.executors.process.node import MEETINGS, is_alone, meeting_name, run_variables
from swift_loader.executors.process.shared_template import SharedTemplate
from swift_loader.executors.process.template import TemplateProcess
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import NewPlan
from swift_loader.transport.payload import Environment, PayloadLayout, write_payload
from swift_loader.transport.sharing_messages import Member
from swift_loader.worker.rank_environment import rank_variables
from swift_loader.worker.spec import ShareDataset, StartMethod, WorkerOptions, WorkerSpec

__all__ = ["TemplateSharing", "why_own"]

_NO_PLAN = PlanSettings.of_seed(0)


def why_own(options: WorkerOptions, world_size: int | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return why a rank has a template of its own from the start; empty if it may share one.

    Args:
        options: The rank's.
        world_size: The number of ranks; None: not known yet.
        environ: What its launcher says.
    """
    if options.share_dataset is ShareDataset.NEVER:
        return "share_dataset=False"
    if options.start_method is not StartMethod.TEMPLATE or options.torch is not None:
        return "only a SwiftLoader with start_method='template' shares one"
    if options.dataset_per_worker:
        return "dataset_per_worker=True"
    if options.share_dataset is ShareDataset.ALWAYS:
        return ""
    return "there is one rank" if world_size == 1 else is_alone(environ)


class TemplateSharing:
    """This rank's part in sharing. Supervisor's thread, unless a method says otherwise."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._world_size = spec.plan.world_size
        self.why_own = why_own(spec.options, self._world_size)
        """Why this rank shares nothing; empty if it does. Other threads only read it."""
        self._sends_plan = not self.why_own
        """Whether the payload is without the plan."""
        self._meeting: MeetingPoint | None = None
        self._member = b""
        """What this rank tells a shared template first."""

    # Any thread -------------------------------------------------------------------------------------------------------

    def write_payload(self) -> tuple[PayloadLayout, int, Definitions]:
        """Write what the template gets. See `transport.payload.write_payload`."""
        environment = Environment.of_this_process(self._spec.modules)
        if not self._sends_plan:
            return write_payload(self._spec, environment)
        program = environment.argv[:1]
        if program and program[0] and Path(program[0]).exists():  # a launcher may give some ranks the absolute path
            program = [str(Path(program[0]).absolute())]
        argv = [*program, *environment.argv[1:]]
        return write_payload(replace(self._spec, plan=_NO_PLAN), replace(environment, argv=argv))

    def meet(self, launch: Launch, payload: tuple[PayloadLayout, int]) -> None:
        """Compute where the ranks meet, if this one shares. That takes a second for each GiB of the payload.

        Args:
            launch: Starts what isn't there. Belongs to the caller.
            payload: What `write_payload` has returned.
        """
        if self.why_own:
            return
        run = {} if self._spec.options.share_dataset is ShareDataset.ALWAYS else run_variables(os.environ)
        conditions = launch.conditions()
        name = meeting_name(conditions, payload, run)
        self._meeting = MeetingPoint(launch, name + MEETINGS.number_of(name))
        variables = rank_variables(launch.environ)
        self._member = Member(payload[0], self._spec.plan, os.getpid(), variables, conditions.affinity).pack()

    @property
    def description(self) -> str:
        """A line for the log, if there are several ranks; else empty."""
        if self._world_size == 1 or self._spec.options.share_dataset is ShareDataset.NEVER:
            return ""
        return f"this rank doesn't share its dataset: {self.why_own}" if self.why_own else ""

    # The supervisor's thread ------------------------------------------------------------------------------------------

    def join(
        self,
        thread: EventLoopThread,
        begin: Callable[[SharedTemplate], TemplateProcess],
        remove: Callable[[TemplateProcess], None],
        payload: int,
    ) -> TemplateProcess | None:
        """Return the template that ranks share. It has built the dataset, or is gone. None if there is none.

        Args:
            thread: Goes on with its work meanwhile.
            begin: Makes a template of what was joined.
            remove: Removes one that isn't used.
            payload: The descriptor of the payload.
        """
        if self._meeting is None:
            return None
        try:
            shared = self._meeting.join(thread)
            shared.greeting = (self._member, payload)
            template = begin(shared)
            thread.run_until(lambda: template.answer is not None or template.is_gone)
            refusal = template.why_refused()
            if not refusal:
                template.put_payload(payload)  # so that the ranks hold one copy of an instance, too
                return template
            remove(template)
            raise NotShared(refusal)
        except NotShared as error:
            self.why_own, self._meeting = str(error), None
            return None

    def tell_plan(self, template: TemplateProcess) -> None:
        """Tell a template of this rank's own its plan, if the payload doesn't."""
        if self._sends_plan:
            template.send(NewPlan(0, self._spec.plan).pack())

    def __repr__(self) -> str:
        return f"<TemplateSharing {self.why_own or self._meeting}>"
