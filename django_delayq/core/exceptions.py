"""The exceptions of the package. The docstring of each is its default message."""

from __future__ import annotations


class DelayqError(Exception):
    """Something went wrong in django-delayq."""

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()


class InvalidMessage(DelayqError, ValueError):
    """The message cannot be scheduled as it was given; nothing was written."""


class PayloadTooLarge(InvalidMessage):
    """The payload is larger than DELAYQ["PAYLOAD_MAX_BYTES"]."""


class KeyConflict(DelayqError):
    """Another message holds this topic and key."""


class InvalidTransition(DelayqError):
    """The state machine has no such move."""


class HandlerConflict(DelayqError):
    """Two functions were registered as the handler of one topic."""


class BrokerUnavailable(DelayqError):
    """Redis does not answer, or must not be used."""

    # How a sentence about it begins.
    what = "Redis does not answer"


class BrokerFailing(BrokerUnavailable):
    """Redis answers, but cannot be used at the moment."""

    what = "Redis cannot be used"


class BrokerFull(BrokerFailing):
    """Redis has no memory left for the ids of messages."""


class BrokerRubbish(BrokerFailing):
    """Under our keys in Redis is something that this package did not write."""


class BrokerMoved(BrokerUnavailable):
    """Another node of the Redis Cluster has our ids now, and is known."""


class UnusableBroker(BrokerUnavailable):
    """Redis answers, but must not be used."""


class ClusterBroker(UnusableBroker):
    """This way to Redis leads to one node of a Redis Cluster; name its nodes: redis+cluster://host:port,host:port."""


class FarBroker(UnusableBroker):
    """Redis is too far away: a round trip takes more than 150 ms; name a nearer one in DELAYQ["REDIS"], or None."""


class ForeignBroker(UnusableBroker):
    """This Redis prefix belongs to another database; choose another DELAYQ["PREFIX"]."""

    # The identity with which the caller was refused; "" where it does not matter.
    refused = ""


class LeaseLost(DelayqError):
    """The lease ran out and the message may be running elsewhere."""


class Superseded(DelayqError):
    """Another delivery, or a cancel, finished this message first."""


class MessageCancelled(BaseException):
    """A cancel was requested while the handler ran: ``message.raise_if_cancelled()`` raises it.

    Let it out of the handler, and the message is *cancelled*. Not an ``Exception``, so that a handler's own
    ``except Exception`` does not swallow it.
    """


class HandlerTimeout(BaseException):
    """The handler ran longer than its timeout.

    Not an ``Exception``, so that a handler's own ``except Exception`` does not swallow it.
    """
