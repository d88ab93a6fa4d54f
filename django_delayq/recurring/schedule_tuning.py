"""The numbers by which schedules work. All that advances and declares them reads the object ``tuning``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(slots=True)
class ScheduleTuning:
    """Numbers without another unit are numbers of rows."""

    # --- when occurrences are made ------------------------------------------------------------------------------------

    # A scheduler looks at the schedules after this time at most. Seconds.
    look_interval: float = 5.0
    # While an occurrence that is due waits for its delivery, a scheduler looks after this time at most. Seconds.
    waiting_interval: float = 1.0
    # A look comes this long after the time of an occurrence, when its delivery has begun. Seconds.
    after_due: float = 0.05
    # One tick advances this many schedules at most, in one transaction.
    advanced_together: int = 200
    # One transaction makes this many occurrences at most; a schedule gets its share of them.
    made_together: int = 1000
    # One statement notes how far this many schedules have come. Its time grows with the square of their number.
    written_together: int = 50
    # A look for silent schedules reads this many.
    looked_at: int = 1000
    # A call is refused after this many rounds in which its schedule came and went.
    rounds: int = 20
    # Clocks of two hosts differ a little: a time that this host's clock puts further into the past is given as a delay.
    clock_margin: timedelta = timedelta(seconds=30)
    # Occurrences whose messages were deleted are deleted at this interval. Seconds.
    prune_interval: float = 600.0

    # --- the page of a schedule ---------------------------------------------------------------------------------------

    # The page shows this many last runs.
    runs_shown: int = 10
    # Between two runs it counts this many times without a message at most.
    times_counted: int = 100
    # The start of the last delivery is looked for among this many last moves of a message.
    moves_looked_at: int = 20

    # --- declarations -------------------------------------------------------------------------------------------------

    # A worker announces the declarations that it knows at this interval. Seconds.
    announce_interval: float = 30.0
    # The row of a forgotten set of declarations is deleted after this time.
    declarations_kept: timedelta = timedelta(days=7)

    # --- what counts as late ------------------------------------------------------------------------------------------

    # An occurrence this long after its time is missed, with "skip" and unless the schedule says otherwise; and a
    # schedule whose next occurrence is not made by then is reported.
    late: timedelta = timedelta(minutes=1)

    @property
    def forgotten_after(self) -> float:
        """Declarations that no worker has announced for three intervals are not known any more. Seconds."""
        return 3 * self.announce_interval


tuning = ScheduleTuning()
