"""Publishes what a machine is told next to its handoff, so that a change of it makes no handoff pending."""

from collections.abc import Callable, Collection, Mapping

from agent.host.apply.driver_roots import make_way
from agent.model.errors import reason
from agent.model.faults import in_words
from agent.model.gpu_states import SIZE_LIMIT
from agent.model.paths import handoff_directory
from agent.system.files import System


def publish_documents(
    system: System,
    file_of: Callable[[str], str],
    documents: Mapping[str, bytes],
    with_state: Collection[str],
    unchanged: Collection[str],
) -> tuple[str, ...]:
    """Write the document of each machine in `documents`; remove that of any other machine that is not in `unchanged`.

    `with_state` are the machines that may have one. Return failures, one sentence each. No document contains the time
    of the pass, so it is written, and wakes the machine's service, only if its content has changed.
    """
    failures = []
    for name in sorted({*with_state, *documents} - set(unchanged)):
        path = file_of(name)
        try:
            # A machine that never had a goal has no such directory.
            if system.is_directory(handoff_directory(name), follow=False):
                _update(system, path, documents.get(name))
        except OSError as error:
            failures.append(f"cannot update {path}: {reason(error, path)}")
        except Exception as error:
            failures.append(f"cannot update {path}: {in_words(error)}")
    return tuple(failures)


def _update(system: System, path: str, content: bytes | None) -> None:
    """Write the content if the file has another one; remove the file if `content` is None."""
    if content is None:
        if system.exists(path):
            make_way(path, system)
            system.remove(path)
        return
    try:
        # A link is not followed: root in the machine can remount the directory writable and put one there.
        before = system.read_untrusted(path, SIZE_LIMIT)[0]
    except OSError:
        before = b""
    if before != content:
        make_way(path, system)
        system.write(path, content)
