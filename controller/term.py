"""One term of leadership: the only way by which a controller writes.

Every write carries the compare on the leader key, so a leader that lost its seat writes nothing, whatever it believes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from eplane.errors import LeaseLost, OutcomeUnknown, StoreUnavailable
from eplane.plan import LeaderEpoch
from eplane.store.base import Compare, CreateRevision, Delete, Op, Put, Store
from eplane.store.mirror import Mirror
from eplane.transactions import Transaction

log = logging.getLogger(__name__)


class Term:
    """One term. `epoch` is its fencing token; `ended` once a write has met a successor."""

    def __init__(self, store: Store, mirror: Mirror, epoch: LeaderEpoch, compare: CreateRevision) -> None:
        self._store = store
        self._mirror = mirror
        self.epoch = epoch
        self.compare = compare
        self.ended = False

    @property
    def revision(self) -> int:
        return self.epoch.revision

    async def apply(self, *parts: Transaction) -> bool:
        """The parts as one transaction. True when it was applied and the mirror shows it; False when a compare failed.

        Raises LeaseLost when this term is over, OutcomeUnknown (StoreUnavailable) when nothing can be said yet: then the
        state is read again and the step repeated, which its compares make harmless.
        """
        if self.ended:
            raise LeaseLost("the term of this leader is over")
        compares: tuple[Compare, ...] = tuple(
            dict.fromkeys([self.compare, *(c for part in parts for c in part.compares)])
        )
        ops = tuple(op for part in parts for op in part.ops)
        try:
            result = await self._store.transact(compares, ops)
        except OutcomeUnknown:
            revision = await self._own_success(ops)
            if revision is None:
                raise
            await self._mirror.wait(revision)
            return True
        if result.succeeded:
            await self._mirror.wait(result.revision)
            return True
        found = result.found.get(self.compare.key)
        if found is None or found.create_revision != self.compare.revision:
            self.ended = True
            raise LeaseLost("another leader has taken over")
        log.info("a write lost a race on one of %s", ", ".join(c.key for c in compares[1:]))
        return False

    async def apply_each(self, transactions: Iterable[Transaction]) -> None:
        """Values that nothing names yet, one transaction each."""
        for transaction in transactions:
            await self.apply(transaction)

    async def _own_success(self, ops: Sequence[Op]) -> int | None:
        """The revision of a write whose reply was lost, if it can be seen: every record carries a nonce of its writer."""
        mine = next((op for op in ops if isinstance(op, Put)), None)
        if mine is None:
            return None
        try:
            found = await self._store.get(mine.key)
        except StoreUnavailable:
            return None
        return found.mod_revision if found is not None and found.value == mine.value else None


def put(key: str, value: bytes, *compares: Compare) -> Transaction:
    return Transaction(compares, (Put(key, value),))


def delete(key: str, *compares: Compare) -> Transaction:
    return Transaction(compares, (Delete(key),))
