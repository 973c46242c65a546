"""`python -m api.cli ...`: the command line without the console script."""

from __future__ import annotations

from api.cli import main

main()
