"""Starts threads, of which the unit may have only a limited number."""

import threading

from agent.model.errors import AgentError

ADVICE = "check the limit: `systemctl show --property=TasksCurrent,TasksMax unbounded-agent-dra`"


def start(thread: threading.Thread, work: str) -> None:
    """Start a thread. Raises AgentError if that is not possible. `work` completes the sentence "cannot ..."."""
    try:
        thread.start()
    except RuntimeError as error:
        # The unit has as many threads as TasksMax= permits, or there is no memory left.
        raise AgentError(f"cannot {work}: {error}", ADVICE) from error
