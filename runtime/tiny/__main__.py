"""`python -m runtime.tiny prompts [DOMAIN ...]`: the shipped held-out prompts, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from eplane.errors import EPlaneError
from runtime.tiny import DOMAINS, load_prompts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.tiny", description="What ships with the tiny model.")
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="print the held-out prompts")
    prompts.add_argument("domains", nargs="*", help=f"of {', '.join(DOMAINS)}; all when none is named")
    given = parser.parse_args(argv)
    try:
        for domain in given.domains or DOMAINS:
            for prompt in load_prompts(domain):
                sys.stdout.write(json.dumps(asdict(prompt), ensure_ascii=True) + "\n")
    except EPlaneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
