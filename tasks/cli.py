"""`python -m tasks.cli`: the command line without an installed console script."""

from __future__ import annotations

from tasks.commands import deadsure

if __name__ == "__main__":
    deadsure(prog_name="deadsure")
