"""The numbers by which the console works: how long a statement may take, and how much a page reads, counts and keeps.

All pages and operations read the two objects of this module, ``timeouts`` and ``tuning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(slots=True)
class Timeouts:
    """How long one statement of a page may take, in milliseconds. A page is shown without an answer that is late."""

    # The search for the rows of a list. The nearest rows and the counts get as long again: with the time to write the
    # page, it is there in 0.3 s.
    rows: int = 100
    # Counts and offers beside the rows, which a page can do without.
    beside: int = 200
    # All numbers in the navigation. None begins to be read in the second half: the next page reads it.
    navigation: int = 100
    # A panel, or a page that is read as a whole.
    page: int = 1000
    # All that a page reads before it is there: what is not read by then is left out. The question before a bulk action
    # gets half of it: with its answer to the form that asked, it is there in a second.
    answer: int = 1500
    # The count before a question or an operation: how many messages begin, and what a restore would find.
    count: int = 5000
    # What a user asked for and waits for: the action on a few messages, the longer search or count, the export.
    long: int = 15_000


@dataclass(slots=True)
class ConsoleTuning:
    """Numbers without another unit are numbers of rows."""

    # --- pages --------------------------------------------------------------------------------------------------------

    # A page counts, pages through, groups, or takes for one action this many rows at most.
    counted: int = 10_000
    # A panel that was read is shown for this long before it is read again. Seconds.
    panel_kept: float = 2.5
    # What seldom changes (migrations, row security, the size of the table) is shown for this long. Seconds.
    slow_panel_kept: float = 30.0
    # Numbers in the navigation are of panels that were read up to this long before. Seconds. Of the others, each page
    # reads one: no page has more than 25 statements.
    counts_kept: float = 60.0
    counts_read: int = 1
    # A process keeps this many panels; each has a few variants.
    panels: int = 200
    # A Redis that evicts nothing counts as almost full when it uses more than this share of its memory.
    memory_share: float = 0.9
    # A page shows this many characters of a payload.
    payload_characters: int = 65_536
    # The list shows a payload of this size, as it is stored, or smaller. Bytes.
    small_payload: int = 16_384
    # The page of a message shows this many transitions: the latest ones.
    steps_shown: int = 200
    # The file of an export has this many messages at most.
    exported: int = 100_000
    # An export reads this many messages at a time.
    export_batch: int = 500
    # Each bar of a histogram counts this many rows, shared by the queues.
    bar_rows: int = 300
    # Bars with more rows are counted again, up to this many rows together. PostgreSQL estimates bars with even more.
    recounted: int = 50_000

    # --- searches -----------------------------------------------------------------------------------------------------

    # The longest search, in characters.
    search_characters: int = 10_000
    # A search has this many terms at most.
    search_terms: int = 30
    # One term has this many ids at most.
    term_ids: int = 1000
    # A path into payloads has this many names at most: the database and Python read nested values by recursion.
    path_names: int = 32
    # Beside a page, this many rows of each index are counted: each may cost a read of the table.
    counted_of_index: int = 2000
    # When the search of all rows took too long, this many rows of each index are searched; for a number or an e-mail
    # address, the keys and payloads of this many of the newest messages; and without an index this many are sorted.
    nearest_rows: int = 5000
    # The first rows of this many queues are merged: of each queue, only the rows before the last one of the page are
    # read. The plan takes a part of a millisecond for each queue.
    merged_queues: int = 50
    # To find a number in older keys, it replaces the number in the keys of this many of the newest messages.
    keys_read: int = 300

    # --- actions and operations ---------------------------------------------------------------------------------------

    # More messages than these become an operation, which needs the permission for bulk actions.
    at_once: int = 200
    # An operation keeps the ids of this many messages at most.
    most_messages: int = 1_000_000
    # A confirmation page is valid for this long.
    question_valid: timedelta = timedelta(minutes=10)
    # A confirmation page names this many messages one by one.
    messages_named: int = 10
    # A confirmation page counts the topics of this many messages.
    topics_read: int = 1000
    # The worker renews the lease of its operation with each step; when the lease ends, another worker goes on. Seconds.
    lease: float = 10.0
    # One step of a bulk action changes this many messages at most.
    step_messages: int = 1000
    # One step of a restore takes about this long. Seconds.
    step_seconds: float = 1.0
    # An operation fails after this many failures of a step in a row.
    step_failures: int = 5

    # --- rollups ------------------------------------------------------------------------------------------------------

    # A process writes its counts at this interval. Seconds.
    rollup_interval: float = 10.0
    # Rollups of minutes are kept for this long; then those of hours take their place.
    minutes_kept: timedelta = timedelta(days=2)
    # Rollups of hours are kept for this long.
    hours_kept: timedelta = timedelta(days=90)
    # The mean run time of fewer runs is not compared.
    compared_runs: int = 20
    # A topic got slower when its mean run time is this many times that of the time before.
    slower: float = 1.5
    # A topic fails when this share of its runs of an hour failed, this many times the share of the day before, and this
    # many runs at least: one failure of two runs says nothing.
    failed_share: float = 0.05
    failed_times: float = 3.0
    failed_least: int = 5
    # One statement writes this many rollups: SQLite takes some 32,000 parameters.
    rollup_batch: int = 500

    @property
    def rollups_kept(self) -> float:
        """How long a page shows rollups before it reads them again: half of the time between two writes. Seconds."""
        return self.rollup_interval / 2


timeouts = Timeouts()
tuning = ConsoleTuning()
