"""How long ended messages are kept: a time for all, or times by names of topics and queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from . import values
from .bounds import LENGTHS
from .text import shown

# The janitor asks one query for each pattern, once a minute.
MOST_PATTERNS = 100
QUEUE = "queue="

# Seconds; False: for ever.
Span = float | Literal[False]


class Rule(NamedTuple):
    """A time for the messages of one pattern that match none before it."""

    # As the project wrote it. "": all messages.
    pattern: str
    span: Span

    @property
    def column(self) -> str:
        """The column whose values the pattern describes."""
        return "queue" if self.pattern.startswith(QUEUE) else "topic"

    @property
    def name(self) -> str:
        """The name; where ``is_prefix`` is true, the beginning of names."""
        return self.pattern.removeprefix(QUEUE).removesuffix("*")

    @property
    def is_prefix(self) -> bool:
        """True when the pattern has the beginning of names."""
        return not self.pattern or self.pattern.endswith("*")

    def matches(self, topic: str, queue: str) -> bool:
        """Return whether a message is of this pattern."""
        value = queue if self.column == "queue" else topic
        return value.startswith(self.name) if self.is_prefix else value == self.name


Retention = Span | tuple[Rule, ...]


def rules(retention: Retention) -> tuple[Rule, ...]:
    """Return the rules of a setting, the first that matches counts. The last one is for all messages."""
    return retention if isinstance(retention, tuple) else (Rule("", retention),)


def kept_for(retention: Retention, topic: str, queue: str) -> Span:
    """Return how long a message with this topic and queue is kept after its end."""
    return next(rule.span for rule in rules(retention) if rule.matches(topic, queue))


def by_names(given: Mapping[Any, Any], span: Any, rest: float) -> tuple[Rule, ...]:
    """Check a dict of patterns and times. ``span`` checks a time; ``rest`` is the time where "" has none."""
    if len(given) > MOST_PATTERNS:
        raise ValueError(f"has more than {MOST_PATTERNS} patterns")
    found = []
    for pattern, kept in given.items():
        try:
            found.append(Rule(_checked(pattern), span(kept)))
        except ValueError as error:
            raise ValueError(f"of {shown(pattern)} {error}") from None
    found.sort(key=lambda rule: rule.pattern == "")
    return (*found,) if found and found[-1].pattern == "" else (*found, Rule("", rest))


def _checked(pattern: Any) -> str:
    """Return the pattern of a rule; raise ValueError when it is none."""
    if not isinstance(pattern, str):
        raise ValueError('is for no name: write a topic, "queue=" and a queue, or the beginning of one and a "*"')
    rule = Rule(pattern, False)
    if pattern and rule.column == "queue":
        values.word(rule.name, LENGTHS.queue)
    elif pattern:
        values.topic(rule.name, LENGTHS.topic)
    return pattern
