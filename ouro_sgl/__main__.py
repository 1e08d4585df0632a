"""``python -m ouro_sgl``: the commands of the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """\
usage: python -m ouro_sgl COMMAND [flags]

commands:
  serve    serve a model over HTTP
  chat     talk to a model in this terminal; shows how many loops each token ran

Without --model-path both use the bundled model. "COMMAND --help" lists the flags.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code."""
    command, flags = (argv[0], argv[1:]) if argv else ("", [])
    if command == "serve":
        from ouro_sgl.launch_server import main as serve

        return serve(flags)
    if command == "chat":
        from ouro_sgl.chat import main as chat

        return chat(flags)
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    fault = f"unknown command {command!r}" if command else "a command is missing"
    print(f"ouro_sgl: error: {fault}: serve or chat", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
