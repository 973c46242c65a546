"""A candidate in a process of its own, to be stopped and continued: leads, and writes in the name of its leadership all the while.

Each line that it prints is JSON: {"event": "leads" | "wrote" | "refused" | "stepped-down", ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys

from eplane.election import Election
from eplane.errors import LeaseLost, StoreUnavailable
from eplane.store.base import Put
from eplane.store.etcd import EtcdStore


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


async def main(endpoint: str, prefix: str, name: str) -> None:
    store = EtcdStore([endpoint])
    election = Election(store, f"{prefix}leader", name.encode(), ttl_s=2)
    epoch = await election.campaign()
    say("leads", revision=epoch.revision)
    compare = election.compare()
    for count in range(100_000):
        # Written whether it believes to lead or not: the compare alone must keep a stale leader out.
        try:
            result = await store.transact([compare], [Put(f"{prefix}out", f"{name} {count}".encode())])
        except (LeaseLost, StoreUnavailable):
            continue
        say("wrote" if result.succeeded else "refused", held=election.held())
        if not result.succeeded:
            await election.lost.wait()
            say("stepped-down")
            break
        await asyncio.sleep(0.02)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
