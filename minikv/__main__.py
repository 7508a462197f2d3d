"""python -m minikv: one subcommand a file in cli/."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pkgutil import iter_modules

from minikv import cli
from minikv.errors import ModelError, RequestError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its exit status: 0 when it did its work, 2 when what was asked for cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m minikv", description="A small engine that shows what a KV cache is.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in iter_modules(cli.__path__):
        command = import_module(f"minikv.cli.{module.name}")
        summary, _, details = (command.__doc__ or "").partition("\n")
        one = commands.add_parser(
            module.name.replace("_", "-"), help=summary, description=f"{summary}\n{details}", formatter_class=argparse.RawTextHelpFormatter
        )
        command.add_arguments(one)
        one.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ModelError, RequestError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
