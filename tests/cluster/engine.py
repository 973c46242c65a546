"""The model engine as a process that also writes down, beside the link, what its ranks hold.

A test must not look through the link: a second session would supersede the agent's. So every few steps the state of all
ranks goes to a file, which is replaced as a whole:

    {"step": N, "ranks": [{"status": RankStatus, "held": bundles, "cells": cells}, ...]}
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from tests.link.model_engine import ModelGroup, serve

LAYERS, EXPERTS, SLOTS, SPARE = 4, 8, 3, 4
EVERY_STEPS = 5


class Diary:
    """Called once a step; says whether the engine is to end. While `hold_switch` exists, armed ranks do not switch."""

    def __init__(self, group: ModelGroup, file: Path, hold_switch: Path) -> None:
        self._group = group
        self._file = file
        self._hold_switch = hold_switch
        self._stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())

    def __call__(self) -> bool:
        if self._hold_switch.exists():
            # As if a rank were not armed yet: what is due is seen anew each step.
            self._group.due = False
        if self._group.step_number % EVERY_STEPS == 0:
            self._write()
        return self._stop.is_set()

    def _write(self) -> None:
        with self._group.lock:
            ranks = [
                {"status": rank.status().to_json(), "held": len(rank.held), "cells": rank.cells}
                for rank in self._group.ranks
            ]
            text = json.dumps({"step": self._group.step_number, "ranks": ranks})
        part = self._file.with_suffix(".part")
        part.write_text(text)
        part.replace(self._file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--hold-file", type=Path, required=True, help="while this file exists, no bundle arrives")
    parser.add_argument("--hold-switch", type=Path, required=True, help="while this file exists, no rank switches")
    parser.add_argument("--diary", type=Path, required=True)
    args = parser.parse_args()
    group = ModelGroup(args.nodes.split(","), LAYERS, EXPERTS, SLOTS, SPARE, name=args.group)
    group.hold_file = args.hold_file
    serve(group, args.dir, window_steps=8, tick_s=0.02, ended=Diary(group, args.diary, args.hold_switch))


if __name__ == "__main__":
    main()
