"""Run a module or a snippet with the faults of `FAULTS`.

python -m tests.faults.run_with_faults tasks.cli relay
python -m tests.faults.run_with_faults -c "code" arguments
"""

from __future__ import annotations

import runpy
import sys

from tests.faults.inject import install_from_environment


def main(arguments: list[str]) -> None:
    """Behave as `python -m <module> …` or `python -c <code> …` after installing the faults."""
    install_from_environment()
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<snippet>", "exec"), {"__name__": "__main__"})  # noqa: S102  python -c
    else:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
