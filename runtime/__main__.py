"""`python -m runtime serve|score`: the embedded engine, and the check of what it answered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eplane.errors import EPlaneError
from runtime.options import ServeOptions, rank_list


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 ok, 2 bad input, 70 the world was lost."""
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve a model with this node's ranks of a world"))
    score = commands.add_parser("score", help="check answers (JSON lines on stdin) against one deterministic rank")
    score.add_argument("--model", default="tiny")
    score.add_argument("--plain", action="store_true", help="compare with plain transformers instead")
    given = parser.parse_args(arguments)
    try:
        if given.command == "score":
            from runtime.reference import score_lines

            return score_lines(given.model, sys.stdin, sys.stdout, plain=given.plain)
        options = _options(given)
        from runtime.launcher import serve

        return serve(options)
    except EPlaneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a Hugging Face folder, or `tiny`: the model that ships with EPlane")
    add("--group", default="default")
    add("--world-size", type=int, default=1)
    add("--ranks", help="ranks of this node, like 0-3 (default: all)")
    add("--nodes", help="node of each rank, comma-separated (default: all on --node)")
    add("--node", default="local")
    add("--master", default="127.0.0.1:29500", help="HOST:PORT where rank 0 hosts the rendezvous")
    add("--link-dir", default="./eplane-link", help="where the ranks' sockets and counters are")
    add("--http", default="127.0.0.1:8000")
    add("--slots", type=int, help="slots of each rank and layer (default: just enough)")
    add("--spare-cells", type=int, help="cells of a rank beyond its slots (default: 2 a layer)")
    add("--placement", help="`linear` or a JSON file (default: the last one kept in --state-dir, else linear)")
    add("--state-dir")
    add("--window-steps", type=int, default=32)
    add("--routing-sample", type=int, default=32, help="tokens of a window whose experts are told together (0: none)")
    add("--tick-ms", type=float, default=25.0)
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    add("--max-tokens-per-step", type=int, default=64)
    add("--kv-tokens", type=int, default=8192)
    add("--queue", type=int, default=256, help="requests that may wait on a rank")
    add("--collective-timeout-s", type=float, default=60.0)
    add("--start-timeout-s", type=float, default=180.0)
    add("--device", default="auto", help="auto or cpu")
    add("--transfer-host", help="address other ranks reach this node's transfer server at")
    add("--fault", help="break something on purpose: wrong-bundle, skip-digest, mixed-epoch")


def _options(given: argparse.Namespace) -> ServeOptions:
    values = {name: value for name, value in vars(given).items() if name not in ("command", "ranks", "nodes")}
    size = given.world_size
    nodes = tuple(given.nodes.split(",")) if given.nodes else (given.node,) * size
    ranks = rank_list(given.ranks) if given.ranks else tuple(r for r, n in enumerate(nodes) if n == given.node)
    return ServeOptions(ranks=ranks, nodes=nodes, **values)


if __name__ == "__main__":
    sys.exit(main())
