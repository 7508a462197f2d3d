"""python -m minikv.classroom: what authors and teachers do with the notebooks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minikv.classroom import audits, exercises, grade, misconceptions, rehearse, release
from minikv.classroom.build import BuildError, build, check, sources


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its exit status: 0 when all is well, 1 when notebooks and sources differ or one cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m minikv.classroom", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("build", help="build and execute notebooks from FOLDER/source/*.py, and the page of their claims")
    one.add_argument("folder", type=Path, help="the folder of the notebooks: chapters or exercises")
    one.add_argument("names", nargs="*", help="only those whose file name begins so, such as 05; the page of claims is left alone then")
    one.add_argument("--check", action="store_true", help="build nothing; say where notebooks and sources differ")
    grade.add_arguments(commands.add_parser("grade", help="grade notebooks that were handed in, and write a table of points"))
    bundle = commands.add_parser("release", help="write what students get: the course and the exercises, without solutions")
    bundle.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    arguments = parser.parse_args(argv)
    if arguments.command == "release":
        return release.command(arguments.out)
    return grade.command(arguments) if arguments.command == "grade" else _notebooks(arguments)


def _notebooks(arguments: argparse.Namespace) -> int:
    try:
        chosen = [each for each in sources(arguments.folder) if not arguments.names or each.name.startswith(tuple(arguments.names))]
        if not chosen:
            raise BuildError(f"no source in {arguments.folder} begins with {' or '.join(arguments.names)}")
    except BuildError as wrong:
        print(wrong, file=sys.stderr)
        return 1
    faults = [fault for source in chosen for fault in (_check(source) if arguments.check else _build(source))]
    if not arguments.names and arguments.check:
        faults += audits.check_page(arguments.folder) + misconceptions.check_page(arguments.folder)
    elif not arguments.names and not faults:
        audits.write_page(arguments.folder)
        misconceptions.write_page(arguments.folder)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults and arguments.check:
        print(f"{len(chosen)} notebooks agree with their sources and with the engine.")
    return 1 if faults else 0


def _build(source: Path) -> list[str]:
    print(f"{source.name} ...", end=" ", flush=True)
    try:
        built = rehearse.build(source) if exercises.is_exercise(source) else build(source)
    except BuildError as wrong:
        print("failed")
        return [str(wrong)]
    print(f"{built.seconds:.1f} s, largest kernel so far {built.peak_bytes / 2**20:,.0f} MiB, {built.path.stat().st_size / 1e3:,.0f} KB")
    return []


def _check(source: Path) -> list[str]:
    try:
        return exercises.check(source) if exercises.is_exercise(source) else check(source)
    except BuildError as wrong:
        return [str(wrong)]


if __name__ == "__main__":
    sys.exit(main())
