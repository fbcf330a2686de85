"""The entry point of the command: prepares the process, and reports what keeps the output from being written."""

import gc
import io
import os
import sys

from agent.cli.main import main
from agent.cli.printing import STDOUT, ignore_broken_pipe, report


def run() -> int:
    """Run the command that this process was started with. Return its exit code, even if nothing can be printed."""
    if sys.stdout is None:
        # The user closed standard output (`>&-`).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            return _run()
        finally:
            # Write what is still in the buffer: argparse leaves the help there.
            sys.stdout.flush()
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    except OSError as error:
        ignore_broken_pipe()
        report(f"{error.filename or STDOUT}: {error.strerror}")
        return 1


def _run() -> int:
    # Without this variable, pydantic reads the metadata of every installed package to find plugins, and imports the
    # plugins. That is slow, and root must not load code in that way.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    # Escape what cannot be encoded, as standard error does: names of files may not be UTF-8, and the terminal's
    # encoding may lack characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    # Otherwise Python would search all objects for garbage three times while it exits. The kernel frees the memory.
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
