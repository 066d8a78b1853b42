"""The command line: `memopt`, or `python -m memopt` where the script is not on PATH."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import memopt
from memopt import info
from memopt.demo import command as demo

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def parser() -> argparse.ArgumentParser:
    called = "python -m memopt" if Path(sys.argv[0]).name == "__main__.py" else "memopt"
    top = argparse.ArgumentParser(
        prog=called,
        description="PyTorch layers that hold less memory between forward and backward.",
        epilog=f"`{called} COMMAND --help` says more about a command.",
    )
    top.add_argument("--version", action="version", version=f"memopt {memopt.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in (("info", info), ("demo", demo)):
        summary = module.SUMMARY
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 a check failed, 2 wrong usage."""
    top = parser()
    arguments = top.parse_args(argv)
    if not hasattr(arguments, "run"):
        top.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"{top.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
