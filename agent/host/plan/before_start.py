"""Makes the commands that run in a machine's unit before each start. Pure.

The commands do not need the agent, so a machine starts even if the agent is broken. If the source of a bind in the
machine's .nspawn file is missing, they comment out that bind: systemd-nspawn would not start the machine, and has no
optional binds.
"""

from agent.model.paths import (
    HOST_NVIDIA,
    PASS_LOCK,
    handoff_directory,
    nspawn_file,
    report_directory,
    rewritten_nspawn,
    started_drop_in,
    started_nspawn,
    unit_drop_in,
)

CONFIGURED = "# As configured (nspawn.extra):"
"""The comment before the lines from nspawn.extra. These lines are never commented out, so nspawn fails if the source of
one is missing."""
MISSING = "\\#missing:"
"""The prefix that comments out a line whose source is missing, quoted for the shell."""
LOCK_WAIT = 20
"""Seconds that the commands wait for the end of a running pass. After that, the start continues without the lock. On an
idle host, only a pass that stages a driver takes longer."""
REPORT_MOUNT = "-t tmpfs -o size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec unbounded-agent-report"
"""Arguments of mount(8). The file system is small, so that a machine that fills it does no harm."""


def before_start(machine: str) -> list[str]:
    """Return ExecStartPre= lines that need only a shell and the base system's tools, and no file of the agent.

    Each line may fail ("-"), and runs outside the unit's sandbox ("+"): systemd-nspawn would not see the directory for
    reports if it was mounted in a sandbox.
    """
    return [
        "# The next lines work without the agent, so that the machine starts whatever is wrong with the agent.",
        "# Make an empty directory for reports, and the directories that the machine mounts:",
        _shell(_make_directories(machine)),
        "# systemd-nspawn starts no machine with a Bind= whose source is missing: such lines wait for a later start.",
        _shell(_comment_out_binds(machine)),
        "# Keep a copy of the settings that the machine starts with, in case the agent could not note them.",
        _shell(_copy_settings(machine)),
    ]


def _make_directories(machine: str) -> tuple[str, ...]:
    report = report_directory(machine)
    return (
        "umask 022",
        f"mkdir -p {HOST_NVIDIA} {handoff_directory(machine)} {report}",
        # Remove the reports of the machine's previous run.
        f"umount -l {report} 2>/dev/null",
        f"mount {REPORT_MOUNT} {report}",
    )


def _comment_out_binds(machine: str) -> tuple[str, ...]:
    """Return the script that comments out binds whose source is missing, and restores those whose source is back."""
    file, new = nspawn_file(machine), rewritten_nspawn(machine)
    return (
        # The lock is needed because a pass of the agent writes the same file. If the lock cannot be opened, the shell
        # must go on: without `command` it would exit, because `exec` is a special built-in utility (POSIX). With umask
        # 077 only root can open the lock, so no other user can hold it.
        f"umask 077; command exec 9>>{PASS_LOCK} && flock -w {LOCK_WAIT} 9",
        "umask 022",
        f"test -s {file} || exit 0",
        f"text=$(while IFS= read -r line; do line=${{line#{MISSING}}}",
        # Once `theirs` is set, no line matches the second pattern, so the lines from nspawn.extra stay as they are.
        f'case "$theirs$line" in "{CONFIGURED}") theirs=1 ;; '
        # Without -r, `read` handles backslashes and splits at colons as nspawn does (systemd.nspawn(5), Bind=).
        'Bind=*|BindReadOnly=*) printf %s "${line#*=}" | { IFS=: read source rest; test -e "$source"; } '
        f"|| line={MISSING}$line ;; esac",
        f'printf "%s\\n" "$line"; done <{file})',
        f'test -z "$text" || test "$text" = "$(cat {file})" && exit 0',
        f'printf "%s\\n" "$text" >{new} && sync {new} && mv -f {new} {file}',
    )


def _copy_settings(machine: str) -> tuple[str, ...]:
    copies = ((nspawn_file(machine), started_nspawn(machine)), (unit_drop_in(machine), started_drop_in(machine)))
    return ("umask 022", *(f"cp -f {source} {copy} || rm -f {copy}" for source, copy in copies))


def _shell(script: tuple[str, ...]) -> str:
    """Return an ExecStartPre= line with the script as one quoted word, escaped for systemd (systemd.service(5))."""
    escaped = [line.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$") for line in script]
    # systemd joins the lines with blanks. No line may begin with # or ;, because it would be a comment even in quotes.
    return "ExecStartPre=-+/bin/sh -c '" + "; \\\n    ".join(escaped) + "'"
