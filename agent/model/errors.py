"""The agent's exceptions. Each says what failed and what to do next. A class is one that somebody tells apart."""

LONG_COMMAND = 200
"""Characters of a command that a message may begin with."""


class AgentError(Exception):
    """An error with one sentence on what failed, and one on what to do next, which may be empty."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(AgentError):
    """The configuration or an argument is wrong. The message names the file and the key, or the argument."""


class NoMachinesError(ConfigError):
    """There is no configuration file, or none has a table of machines. Nothing else is wrong with the configuration."""


class ConfigChangedError(AgentError):
    """Another process has put other settings in force since this one read the configuration."""


class CommandError(AgentError):
    """A program failed, was not found, or ran out of time.

    The message has the program's arguments, how the program ended (`ended`), and the last part of its standard error.
    If the command is long, the message begins with only the start of the command, and ends with the whole command:
    `status` cuts off messages at the terminal's width, and must still show how the program ended.
    """

    def __init__(self, argv: tuple[str, ...], ended: str, stderr: str = "", hint: str = "") -> None:
        tail, command = " ".join(stderr.split())[-1000:], " ".join(argv)
        why = f"{ended}: {tail}" if tail else ended
        is_long = len(command) > LONG_COMMAND
        message = (
            f"{' '.join(argv[:3])[:80]} ...: {why}; the whole command: {command}" if is_long else f"{command}: {why}"
        )
        super().__init__(message, hint)
        self.argv, self.ended, self.stderr = argv, ended, stderr


def reason(error: OSError, sentence: str) -> str:
    """Return why a step failed, for the end of a sentence. The file is named unless the sentence names it already."""
    file = f"{error.filename}: " if isinstance(error.filename, str) and error.filename not in sentence else ""
    return f"{file}{error.strerror or error}"


class ExitCodeError(CommandError):
    """A program ran to its end, and its exit code means failure. After other CommandErrors, the result is unknown."""

    def __init__(self, argv: tuple[str, ...], status: int, stderr: str = "", stdout: str = "") -> None:
        super().__init__(argv, f"exit code {status}", stderr)
        self.status, self.stdout = status, stdout


class UnreadError(CommandError):
    """A program was killed (SIGPIPE) because nobody read what it wrote."""


class UnkillableError(CommandError):
    """A program goes on, although it was killed at its time limit: it waits in the kernel. `pid` is its process id."""

    def __init__(self, argv: tuple[str, ...], ended: str, hint: str, pid: int) -> None:
        super().__init__(argv, ended, hint=hint)
        self.pid = pid


class BusError(AgentError):
    """A service on the system bus could not be reached, or did not answer."""


class BusAnswerError(BusError):
    """A service answered with an error, or with a different type from the one that its interface promises."""


class DocumentError(AgentError):
    """A document is malformed or of an unknown version. The message names the document and the key at fault."""
