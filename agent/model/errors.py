"""The agent's exceptions. Each says what failed and what to do next.

AgentError
├── ConfigError         the configuration, or an argument, is wrong (exit code 2)
│   └── NoMachinesError there is no configuration file, or none with a table of machines
├── UnsupportedError    this host cannot do it: no root rights, systemd too old
├── ObservationError    something could not be observed; never means that it is absent
├── CommandError        a program failed, was not found, or ran out of time
│   └── ExitCodeError   a program ended by itself and reported failure
├── BusError            a service on the system bus could not be reached, or did not answer
│   └── BusAnswerError  it answered with an error or an unexpected type
├── DocumentError       a handoff, report or tool output is malformed
└── ApplyError          a step towards the goal failed
"""


class AgentError(Exception):
    """One sentence on what failed, and one on what to do next (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(AgentError):
    """Names the file and the key, or the argument."""


class NoMachinesError(ConfigError):
    """The configuration has no file, or none that names machines; nothing else is wrong with it."""


class UnsupportedError(AgentError):
    """The host or the caller does not meet a requirement that cannot be worked around."""


class ObservationError(AgentError):
    """The observation failed, which is a different fact from "not there"."""


class CommandError(AgentError):
    """A program failed: its arguments, how it ended and the end of its standard error."""

    def __init__(self, argv: tuple[str, ...], ended: str, stderr: str = "", hint: str = "") -> None:
        tail = " ".join(stderr.split())[-1000:]
        super().__init__(f"{' '.join(argv)}: {ended}" + (f": {tail}" if tail else ""), hint)
        self.argv = argv
        self.stderr = stderr


class ExitCodeError(CommandError):
    """A program ended with an exit code of its own. The same input would give the same result again."""


class BusError(AgentError):
    """A call to a service on the system bus got no answer."""


class BusAnswerError(BusError):
    """A service answered with an error, or with another type than its interface promises."""


class DocumentError(AgentError):
    """Names the document and the key that is missing or has the wrong type."""


class ApplyError(AgentError):
    """Names the step that failed; earlier steps stay done."""
