"""Tells an engine that works from one that hangs or stands still, by its reports and heartbeats.

Knows no process and no request; time is passed in, so that tests need not wait.
"""

from __future__ import annotations

from spark_server.wire import Heartbeat, StepReport

# A step that computes is given this many stuck-timeouts (a first compile, a very long prefill).
COMPUTING_TIMEOUTS = 15
# Share of one CPU that tells a step that computes from one that hangs.
COMPUTING_SHARE = 0.1
# Loading may hold the interpreter for long; only a stopped process is silent for so many timeouts.
LOADING_TIMEOUTS = 3


class ProgressClock:
    """When the engine was last heard and when it last got on with its work, in seconds.

    Args:
        stuck_timeout: seconds without progress that are a fault.
        now: the time at which the engine was started, of the clock that all calls use.
    """

    def __init__(self, stuck_timeout: float, now: float) -> None:
        self._timeout = stuck_timeout
        self._heard = self._moved = now
        self._beat: tuple[float, float] | None = None

    def report(self, report: StepReport, now: float) -> None:
        """A step that ran rows or said something is progress; so is a wait for a grammar."""
        self._heard = now
        if report.deltas or report.stats.held or (report.stepped and report.stats.last_step_rows):
            self._moved = now

    def beat(self, beat: Heartbeat, now: float) -> None:
        """A long step that burns CPU is a long step; one that does not is a hang."""
        self._heard = now
        previous, self._beat = self._beat, (now, beat.cpu_seconds)
        if previous is None or beat.step_age is None:
            return
        wall, cpu = now - previous[0], beat.cpu_seconds - previous[1]
        within = beat.step_age < self._timeout * COMPUTING_TIMEOUTS
        if within and cpu >= COMPUTING_SHARE * wall:
            self._moved = now

    def heard(self, now: float) -> None:
        """Any other sign of life."""
        self._heard = now

    def work_begins(self, now: float) -> None:
        """The engine was idle and has work from now on."""
        self._moved = now

    def own_pause(self, seconds: float) -> None:
        """The observer itself stood still: not the engine's fault."""
        self._heard += seconds
        self._moved += seconds

    def age(self, now: float) -> float:
        """Seconds since the last progress; means something only while work is running."""
        return now - self._moved

    def silence(self, now: float) -> float:
        """Seconds since anything was heard."""
        return now - self._heard

    def stuck(self, now: float, *, loading: bool, working: bool) -> bool:
        """Whether the engine should be ended: silent, or at work and not moving."""
        if loading:
            # Without a first heartbeat the process may still be importing.
            return self._beat is not None and self.silence(now) >= (
                LOADING_TIMEOUTS * self._timeout
            )
        return self.silence(now) >= self._timeout or (working and self.age(now) >= self._timeout)
