"""The fence: a rank obeys the newest leader it has heard of, and never an older one again."""

from __future__ import annotations

from eplane.errors import LinkRefused
from eplane.plan import LeaderEpoch
from runtime.link.messages import ErrorCode


class LeaderFence:
    """Leader epochs of one cluster only rise. Another cluster (a wiped or restored etcd) is let in by `adopt` alone:

    adoption is the moment at which the ranks' live placement becomes the truth of that store.
    """

    def __init__(self) -> None:
        self._highest: dict[int, int] = {}
        self._current: LeaderEpoch | None = None

    @property
    def current(self) -> LeaderEpoch | None:
        return self._current

    def is_new_cluster(self, epoch: LeaderEpoch) -> bool:
        return self._current is not None and epoch.cluster != self._current.cluster

    def hear(self, epoch: LeaderEpoch) -> None:
        """An agent mentions a leader: raises what is known of the present cluster, and commands nothing."""
        if self._current is not None and not self.is_new_cluster(epoch) and epoch.revision > self._current.revision:
            self._take(epoch)

    def check(self, epoch: LeaderEpoch) -> None:
        """A command under `epoch`. Raises LinkRefused(stale_leader)."""
        if self.is_new_cluster(epoch):
            raise LinkRefused(
                ErrorCode.STALE_LEADER,
                f"cluster {epoch.cluster:x} has not adopted this world; its leader must do so first",
            )
        self._rise(epoch)

    def adopt(self, epoch: LeaderEpoch) -> None:
        """An adoption under `epoch`: the one way to another cluster. Raises LinkRefused(stale_leader)."""
        self._rise(epoch)

    def _rise(self, epoch: LeaderEpoch) -> None:
        known = self._highest.get(epoch.cluster, 0)
        # A cluster that was left for another may only come back with a leader newer than its last one here.
        if epoch.revision < known or (self.is_new_cluster(epoch) and epoch.revision == known):
            raise LinkRefused(
                ErrorCode.STALE_LEADER, f"leader epoch {epoch.revision} is older than {known}, which was heard here"
            )
        self._take(epoch)

    def _take(self, epoch: LeaderEpoch) -> None:
        self._highest[epoch.cluster] = epoch.revision
        self._current = epoch
