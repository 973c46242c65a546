"""`python -m agent`: the agent of one node.

Exit codes: 0 told to stop, 2 bad arguments, 5 the store cannot be reached, 75 the presence in the store was lost (start
again), 76 a newer agent has taken this node over (do not start again).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from eplane.errors import EPlaneError


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent", description="The EPlane agent of one node.")
    parser.add_argument("--group", required=True, help="name of the expert-parallel group")
    parser.add_argument("--node", required=True, help="name of this node, as the runtime knows it")
    parser.add_argument("--etcd", required=True, help="comma list of etcd URLs")
    parser.add_argument("--link-dir", required=True, type=Path, help="where the ranks' sockets and counters lie")
    parser.add_argument("--ttl", type=float, default=3.0, help="seconds that the presence lease lives (default 3)")
    parser.add_argument("--report-every", type=float, default=0.5, help="seconds between load reports (default 0.5)")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token for the leader's API")
    parser.add_argument("--api-ca", type=Path, help="CA certificate of the leader's API")
    parser.add_argument("--etcd-ca", type=Path, help="CA certificate of etcd")
    parser.add_argument("--etcd-cert", type=Path, help="client certificate for etcd")
    parser.add_argument("--etcd-key", type=Path, help="key of the client certificate")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(argv)


async def serve(args: argparse.Namespace) -> int:
    from agent.daemon import build
    from agent.settings import AgentSettings
    from eplane.settings import Secret
    from eplane.store.etcd import EtcdStore
    from eplane.store.tls import TlsFiles

    token = args.token_file.read_text().strip() if args.token_file else None
    settings = AgentSettings(
        group=args.group,
        node=args.node,
        link_dir=args.link_dir,
        ttl_s=args.ttl,
        report_every_s=args.report_every,
        token=Secret(token) if token else None,
        verify_tls=str(args.api_ca) if args.api_ca else True,
    )
    tls = TlsFiles(args.etcd_ca, args.etcd_cert, args.etcd_key) if args.etcd_ca else None
    store = EtcdStore(args.etcd.split(","), tls=tls)
    try:
        return await build(settings, store).run(_told_to_stop())
    finally:
        await store.close()


def _told_to_stop() -> asyncio.Event:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    return stop


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return asyncio.run(serve(args))
    except EPlaneError as error:
        sys.stderr.write(f"agent: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"agent: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
