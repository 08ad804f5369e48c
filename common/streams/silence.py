"""After which silence each stream counts as lost. Pure.

A stream with a rule has messages that a live peer sends at least each `heartbeat_s`; one that is
silent for longer than `limit_s` hangs or is unreachable. The rule is stated beside the heartbeat in
the `.proto`. A stream without a rule (Publish at the worker, Session at the router, MatchStream)
ends with its connection, which HTTP/2 PING checks after ten seconds without data
(`common/rpc/message_stream.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class SilenceRule(NamedTuple):
    """The limits of one stream, in seconds."""

    heartbeat_s: float
    """Longest time between two messages of a live peer."""

    limit_s: float
    """Silence after which the peer counts as lost."""

    def with_heartbeat(self, heartbeat_s: float) -> SilenceRule:
        """Returns the rule of a peer with another heartbeat, of which as many may be missed."""
        return SilenceRule(heartbeat_s, self.limit_s / self.heartbeat_s * heartbeat_s)


# Attach: both ends send heartbeats and judge. HelloAck states the heartbeat; three missed ones are
# the limit.
ATTACH = SilenceRule(heartbeat_s=1.0, limit_s=3.0)
# Session: the frontend sends the heartbeat, to which the router responds; the frontend judges.
SESSION = SilenceRule(heartbeat_s=0.5, limit_s=2.0)
# Sync: the sender's digest, and the response to each frame; both ends judge.
SYNC = SilenceRule(heartbeat_s=1.0, limit_s=3.0)
# Subscribe: the load reports of each live worker, which the indexer forwards; the router judges.
SUBSCRIBE = SilenceRule(heartbeat_s=2.0, limit_s=5.0)
# Acknowledge, which a member repeats: the peer responds; the member judges, by its setting
# `routable_limit_s`, of which this is the default.
ACKNOWLEDGE = SilenceRule(heartbeat_s=0.5, limit_s=10.0)
