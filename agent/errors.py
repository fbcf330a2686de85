"""Everything that can go wrong, each with what to do next.

AgentError
├── ConfigError         the configuration, or an argument, is wrong (exit code 2)
├── UnsupportedError    this host cannot do it: no root rights, systemd too old
├── ObservationError    something could not be looked at; never means that it is absent
├── CommandError        a program failed, was not found, or ran out of time
│   └── ExitCodeError   a program ended by itself and says that it failed
├── BusError            a service on the system bus could not be asked, or did not answer
│   └── BusAnswerError  it answered, and says that it failed, or what nobody expects
├── DocumentError       a handoff, report or tool output does not have its form
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


class UnsupportedError(AgentError):
    """The host or the caller lacks something that cannot be worked around."""


class ObservationError(AgentError):
    """Looking failed, which is a different fact from "not there"."""


class CommandError(AgentError):
    """A program that did not succeed: its arguments, how it ended and the end of its standard error."""

    def __init__(self, argv: tuple[str, ...], ended: str, stderr: str = "", hint: str = "") -> None:
        tail = " ".join(stderr.split())[-1000:]
        super().__init__(f"{' '.join(argv)}: {ended}" + (f": {tail}" if tail else ""), hint)
        self.argv = argv
        self.stderr = stderr


class ExitCodeError(CommandError):
    """A program that came to its end with an exit code: its answer, which the same input would give again."""


class BusError(AgentError):
    """A question to a service on the system bus that got no answer."""


class BusAnswerError(BusError):
    """An answer that is none: an error of the service's, or another type than its interface says."""


class DocumentError(AgentError):
    """Names the document and the key that is missing or has the wrong type."""


class ApplyError(AgentError):
    """Names the step that failed; what was done before it stays done."""
