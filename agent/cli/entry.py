"""The entry point of the command: asks the running service to run it, or runs it in this process."""

import io
import os
import sys

from agent.cli import garbage
from agent.cli.asking import ask_service


def run() -> int:
    """Run the command of this process, and return its exit code."""
    garbage.for_a_command()
    # Without this, pydantic reads the metadata of every installed package to find plugins, and imports them. That is
    # slow, and root must not load code in that way.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    # As standard error does. Names of files may not be UTF-8, and the terminal's encoding may lack characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = ask_service(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    if code is None:
        from agent.cli.main import main

        code = main()
    garbage.at_the_end()
    return code


if __name__ == "__main__":
    sys.exit(run())
