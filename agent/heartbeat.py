"""Says in the store that this life of the agent is here, and what its ranks serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from eplane.clock import Clock
from eplane.election import Presence, ProgressGate
from eplane.keys import GroupKeys
from eplane.records import PresenceRecord, decode, encode
from eplane.store.base import CreateRevision, Store
from runtime.link.messages import RankStatus

log = logging.getLogger("eplane.agent")
# An agent whose loop hangs for this many lease times gives its presence up.
HUNG_AFTER_TTLS = 3.0


class Heartbeat:
    """The leased presence key of one node. A newer life takes it over; `lost` tells the older one to end."""

    def __init__(self, store: Store, keys: GroupKeys, node: str, incarnation: str, ttl_s: float, clock: Clock) -> None:
        self._node = node
        self._incarnation = incarnation
        self._gate = ProgressGate(ttl_s * HUNG_AFTER_TTLS, clock)
        self._told = PresenceRecord(node, incarnation)
        self._presence = Presence(store, keys.agent(node), encode(self._told), ttl_s, clock, self._gate)

    @property
    def presence(self) -> Presence:
        return self._presence

    def beat(self) -> None:
        """The loop made progress: the lease may be kept."""
        self._gate.beat()

    def compare(self) -> CreateRevision:
        """What every acknowledgement carries. Raises LeaseLost once the key is another's."""
        return self._presence.compare()

    async def successor(self) -> str | None:
        """The other life of this node's agent that holds the key now, if one does."""
        kv = await self._presence.observe()
        holder = None if kv is None else decode(PresenceRecord, kv.value).incarnation
        return None if holder == self._incarnation else holder

    async def tell(self, world: str | None, statuses: Mapping[int, RankStatus]) -> None:
        """Update the key when something changed. Ranks that do not agree on what is live have no digest."""
        live = {(status.live.digest, status.live.epoch) for status in statuses.values()}
        digest, epoch = live.pop() if len(live) == 1 else (None, None)
        record = PresenceRecord(self._node, self._incarnation, world, tuple(sorted(statuses)), digest, epoch)
        if record != self._told:
            await self._presence.update(encode(record))
            self._told = record
