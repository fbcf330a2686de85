"""`unbounded-agent doctor`: diagnoses, or writes an archive that helps to understand a fault.

What goes into the archive is on a list: the agent's own files, and named files, commands and fields of others. From all
of it, secrets that are recognised are removed.
"""

import argparse
import fnmatch
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import Struct, to_builtins

from agent.cli.doctor.cluster import findings, read_cluster
from agent.cli.doctor.host import HostDiagnosis, diagnose_host, diagnose_machines
from agent.cli.doctor.machines import Diagnosis, MachineFinding
from agent.cli.output import STATES, document, paragraph
from agent.cli.parser import VERSION
from agent.cli.printing import WIDTH, say, terminal
from agent.cli.status import as_dated
from agent.cli.status import as_object as status_of
from agent.host.observe.machine import observe_joined
from agent.host.reconcile import NO_MACHINES, Reconciler
from agent.host.vendors import HOST_VENDORS
from agent.model.conditions import ConditionType, Reason, Status
from agent.model.errors import CommandError
from agent.model.paths import (
    CONDITIONS,
    CONFIG_FILE,
    REPORT_NAME,
    SERVICE_STATE,
    STATE,
    granted_file,
    handoff_file,
    live_file,
    machine_unit,
    nspawn_file,
    report_directory,
    unit_drop_in,
)
from agent.model.text import printable, rfc3339
from agent.system.trust import read_seen
from agent.vendors.host_vendor import Finding


class ClusterDiagnosis(Struct, frozen=True):
    """The findings of a cluster."""

    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    """Sentences on what could not be read, for example because the kubeconfig's user may not read it."""


class Report(Struct, frozen=True):
    """Everything that `doctor` found."""

    machines: tuple[Diagnosis, ...]
    host: HostDiagnosis
    cluster: ClusterDiagnosis | None = None
    """None if the command had no kubeconfig."""

    @property
    def sound(self) -> bool:
        """Whether every machine is ready, host and cluster have no finding, and all of the cluster could be read."""
        cluster = self.cluster or ClusterDiagnosis()
        ready = all(each.ready.status is Status.TRUE for each in self.machines)
        return ready and not (self.host.findings or cluster.findings or cluster.unknown)


def in_words(report: Report, width: int = WIDTH) -> Iterator[str]:
    """Yield the report as lines for people."""
    host, cluster = report.host, report.cluster
    yield "host:" if host.findings else "host: no fault found"
    yield from _findings(host.findings, width)
    if not report.machines:
        yield NO_MACHINES
    for diagnosis in report.machines:
        yield f"{diagnosis.machine}: {STATES[diagnosis.ready.status]}: {diagnosis.ready.reason}"
        if diagnosis.ready.status is Status.TRUE and diagnosis.ready.reason != Reason.ALL_CONDITIONS_TRUE:
            # A machine without a GPU may be Ready even if it does not run. In that case, only the message says so.
            yield from paragraph("    ", diagnosis.ready.message, width)
        yield from _findings(diagnosis.findings, width)
    if cluster is not None:
        yield "cluster:" if cluster.findings or cluster.unknown else "cluster: no fault found"
        yield from _findings(cluster.findings, width)
        for each in cluster.unknown:
            yield from paragraph("  - unknown: ", each, width)
    for each in host.remarks:
        yield from paragraph("note: ", each, width)
    for driver in host.drivers:
        interfaces = "".join(f", {name} {version}" for name, version in driver.interfaces.items())
        unknown = f"; API version unknown: {driver.unknown}" if driver.unknown else ""
        yield f"driver for pods: {driver.vendor} {driver.version}{interfaces}{unknown}"
    yield f"image for machines of this host: containerfiles/{host.image}"


def _findings(findings: Iterable[Finding | MachineFinding], width: int) -> Iterator[str]:
    for each in findings:
        if isinstance(each, MachineFinding):
            aside = "" if each.prevents_ready or each.status is Status.TRUE else " (not needed for Ready)"
            cause = f"{', '.join(each.conditions)}: {each.status}, {each.reason}{aside}"
            evidence, symptoms = each.message, each.symptoms
        else:
            cause, evidence, symptoms = each.cause, each.evidence, ""
        yield from paragraph("  - ", cause, width)
        for heading, text in (("evidence", evidence), ("symptoms", symptoms)):
            yield from paragraph(f"    {heading}: ", text, width) if text else ()
        # Each command is on a line of its own, however long it is, so that users can copy it.
        for index, command in enumerate(each.fix):
            yield f"{' ' * 14 if index else '    fix:      '}{printable(command)}"


def as_object(report: Report) -> dict[str, object]:
    """Return the report for programs (docs/json.md)."""
    return {
        "sound": report.sound,
        "host": to_builtins(report.host.findings),
        "notes": report.host.remarks,
        "drivers": to_builtins(report.host.drivers),
        "image": report.host.image,
        "machines": {
            each.machine: {
                "ready": each.ready.status,
                "reason": each.ready.reason,
                "message": each.ready.message,
                "findings": to_builtins(each.findings),
            }
            for each in report.machines
        },
        "cluster": to_builtins(report.cluster),
    }


# A secret is recognised by its form, or by the name before it. Others stay, so people should read a bundle before they
# send it.
#
# Own rules, because no library fits: detect-secrets (1.5.0, of 2024) is in no release of Debian or Ubuntu, reports the
# lines of a file instead of returning a text without the secrets, and knows neither secrets of several lines nor the
# escaped JSON and the command lines of journals.
#
# Machines write into these texts, and could slow down the search. So the patterns begin only at the start of a word,
# and do not backtrack into what they have matched (`++`, `(?>...)`): otherwise, one long word could take hours.


REMOVED = "[removed]"
BASE64_LINE = re.compile(r"(?:^|(?<=[\s\"'\\|>]))(?:(?:\\n)?[\w+/=-]{16,}+(?:\\[nr])*+)++[\"',\s]*+$")
"""The end of a line that may be part of a PEM block, after a prefix such as a journal's."""
PEM_LINES = 200
"""Lines of the longest PEM block whose end is missing."""

FORMS = {
    # A PEM block with its end. What begins lines of it, such as the journal's prefix, is removed too.
    r"(?s)-----BEGIN ([A-Z0-9 ]+)-----(?:(?!-----BEGIN ).)*?(?:-----END \1-----|(?=-----BEGIN ))": REMOVED,
    # The same, encoded in base64 as in a kubeconfig: it begins with "-----BEGIN".
    r"LS0tLS1CRUdJTi[\w+/=-]*+": REMOVED,
    # Bootstrap tokens (bootstrap-token-secret-format in Kubernetes' documentation): the part before the dot is public.
    r"\b([a-z0-9]{6})\.[a-z0-9]{16}\b": rf"\1.{REMOVED}",
    # JSON web tokens, such as those of service accounts (RFC 7519), also without a signature.
    r"(?<![\w-])((?>[\w-]*?\b(?=eyJ)))[\w-]{11,}+\.[\w-]{8,}+(?:\.[\w-]*+)*+": rf"\1{REMOVED}",
    # Tokens with the prefix of their issuer.
    r"""(?x)(?<![A-Za-z0-9])(?>
    gh[a-z]_\w{16,}+ | github_pat_\w{16,}+ | gl[a-z]{2,6}-[\w.-]{16,}+ | xox[a-z]-[\w-]{8,}+ | xapp-[\w-]{8,}+
    | A(?:KIA|SIA|GPA|IDA|ROA|IPA|NPA|NVA|BIA|CCA)[A-Z0-9]{12,}+ | AIza[\w-]{30,}+ | ya29\.[\w.-]{10,}+
    | 1//0[\w-]{20,}+ | GOCSPX-[\w-]{16,}+ | hf_[A-Za-z0-9]{16,}+ | nvapi-[\w-]{16,}+ | sk-[\w-]{16,}+
    | (?:sk|rk|pk|whsec)_(?:live_|test_)?\w{16,}+ | npm_[A-Za-z0-9]{16,}+ | pypi-[\w-]{16,}+
    | dckr_[a-z]{3}_[\w-]{10,}+ | SG\.[\w-]{10,}+\.[\w-]{10,}+ | hv[a-z]\.[\w-]{16,}+ | do[a-z]_v1_\w{16,}+
    | AGE-SECRET-KEY-1[A-Z0-9]{16,}+ | gl(?:sa|c)_\w{16,}+ | gsk_\w{16,}+ | r8_\w{16,}+ | ATATT3[\w=-]{16,}+
    | tskey-[\w-]{10,}+ | SWMTKN-1-[\w-]{16,}+ | K10[0-9a-f]{16,}+::\S++
    | shp[a-z]{2}_\w{16,}+ | lin_api_\w{16,}+ | ops_eyJ[\w-]{16,}+ | AccountKey=[^;\s"']++
    | \$(?:2[abxy]|[156y]|apr1|argon2[a-z]{0,2}|scrypt)\$[\w./+=$,-]{16,}+
    )""": REMOVED,
    # Headers of HTTP.
    r"""(?ix)(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie)
    (\\*+["']?[ \t]*+[:=][ \t]*+\\*+["']?)[^"'\\\r\n]++""": rf"\1\2{REMOVED}",
    r"(?i)\b(bearer|basic)\s++[\w.+/=~-]{8,}+": rf"\1 {REMOVED}",
    # URLs.
    r"(?<!\w)(\w++://[^/\s:@\"']*+):[^/\s@]++@": rf"\1:{REMOVED}@",
    r"(?<!\w)(\w++://)[^/\s:@\"']{16,}+@": rf"\1{REMOVED}@",
    # curl --user NAME:PASSWORD.
    r"(?<!\S)(-u|--user|--proxy-user)([ =][\"']?)[^\s:\"'-][^\s:\"']*+:[^\s\"']++": rf"\1\2{REMOVED}",
    # .netrc
    r"(?m)\b(login\s++\S++\s++password|^\s*+password)([ \t]++)(?![=:])\S++": rf"\1\2{REMOVED}",
    # An element of XML.
    r"(?i)(<(?>[\w.:-]*?(?:passw(?:or)?d|passphrase|secret|token|api-?key))[\w.:-]*+>)[^<]++": rf"\1{REMOVED}",
}
"""Forms of secrets, with their replacements."""
LONG = re.compile(r"(?<![\w+/.=-])[A-Za-z0-9+/]{40,}+={0,2}(?![\w.-])")
"""Long words without punctuation. Digests are in hexadecimal, and UUIDs and names of pods have hyphens."""

NAME = re.compile(
    r"""(?x)
    (?<![\w.-])(?P<name>[\w.-]++)
    \\*+["']?[ \t]*+(?:[=:]|%3[aAdD])[ \t]*+(?:\r?\n[ \t]++(?![\w.-]+\\*["']?[ \t]*[=:]))?+"""
)
"""A name that is followed by a value."""
VALUE = re.compile(
    r"""(?x)
    [|>][+-]?[ \t]*+\r?\n(?P<indent>[ \t]++)[^\n]*+(?:\n(?P=indent)[^\n]*+)*+  # a block of YAML
    | \\++["'](?:(?!\\+["'])[^\n])*+(?:\\++["'])?+  # escaped, in JSON that is in JSON
    | "(?:[^"\\\n]|\\.)*+"?+ | '[^'\n]*+'?+
    | \[removed\] | \[[^\]\n]*+\]?+
    | [^\s"']++"""
)
OPTION = re.compile(
    r"""(?x)
    (?<![\w-])(?P<name>--?[a-zA-Z][\w.-]*+)
    \\*+["']?(?:[ \t]*+\\\r?\n[ \t]*+|,?[ \t]++|,)\\*+["']?"""
)
"""An option of a command that is followed by its value, also as the elements of a list."""
ARGUMENT = re.compile(r"(?!-)[^\s\"',\\]++")
LISTED = re.compile(
    r"""(?x)
    (\bname\\*+["']?[ \t]*+[:=][ \t]*+\\*+["']?)(?P<name>[\w.-]++)
    (\\*+["']?[\s,]++\\*+["']?value\\*+["']?[ \t]*+[:=][ \t]*+)(?P<value>\\*+"(?:[^"\n])*+"?+|'[^'\n]*+'?+|[^\s"']++)"""
)
"""An environment variable as Kubernetes has it: an object with a name and a value."""
WHOLE_LINE = re.compile(
    r"""(?im)(?:^|(?<=:[ ]))([ \t]*+(?:pass|passwd|password|passphrase)[ \t]*+[:=][ \t]*+)(?!["'|>\[{])(\S[^\n]*+)$"""
)
"""A password with spaces, without quotes."""
REST = re.compile(rf"{re.escape(REMOVED)}(?:\\?\r?\n[ \t]*+[\w+/=-]{{8,}}+(?=\\?\r?$))+", re.MULTILINE)
"""The rest of a secret that goes on in the next lines."""

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
SECRET_PARTS = ("passw", "passphrase", "passcode", "secret", "token", "credential", "apikey", "privatekey")
SECRET_WORDS = {"pass", "pwd", "pw", "auth", "authorization", "creds", "cookie", "psk", "sig", "signature", "otp"}
"""Words that, as the last one of a name, say that the value is secret."""
KEY_WORDS = {
    *("access", "account", "api", "auth", "certificate", "client", "deploy", "encryption", "license", "master"),
    *("private", "sas", "secret", "service", "session", "shared", "signing", "ssh", "storage", "subscription", "tls"),
}
"""Words before `key` that say that the key is secret."""
HARMLESS_ENDS = {"ttl", "mode", "expiration", "expires", "expiry", "duration", "length", "count", "timeout", "limit"}
FILE_END = re.compile(r"(?i)(?:file|path|directory|dir)$")
PATH = re.compile(r"""^\\*["']?/[^\s]*$""")
"""Matches a value that looks like a path. Such a value stays only after a name that matches FILE_END, because a
secret may begin with a slash too."""
NOT_SECRET = re.compile(r"(?i)\\*[\"']?(?:true|false|yes|no|null|none|nil)?\\*[\"']?[,;)}\]]*")


def redacted(text: str) -> str:
    """Return the text without the secrets that are recognised."""
    for pattern, replacement in FORMS.items():
        text = re.sub(pattern, replacement, text)
    text = _without_cut_blocks(text)
    text = LISTED.sub(
        lambda match: f"{match[1]}{match[2]}{match[3]}{REMOVED}" if _names_secret(match["name"]) else match[0], text
    )
    text = WHOLE_LINE.sub(rf"\1{REMOVED}", text)
    text = _without_values(text, NAME, VALUE)
    text = _without_values(text, OPTION, ARGUMENT)
    text = LONG.sub(lambda match: REMOVED if _is_random(match[0]) else match[0], text)
    return REST.sub(REMOVED, text)


def _without_cut_blocks(text: str) -> str:
    """Remove PEM blocks whose beginning or end is missing: a log begins and ends anywhere."""
    if "-----BEGIN " not in text and "-----END " not in text:
        return text
    lines, left = text.split("\n"), 0
    for index, line in enumerate(lines):
        if "-----BEGIN " in line:
            lines[index] = re.sub(r"-----BEGIN [A-Z0-9 ]+-----(?:(?:\s|\\[nr])*+[\w+/=]{16,}+)*+", REMOVED, line)
            left = PEM_LINES
        elif left:
            lines[index] = BASE64_LINE.sub(REMOVED, line)
            left = left - 1 if lines[index] != line else 0
        elif "-----END " in line:
            lines[index] = re.sub(r"[\w+/=\\]*-----END [A-Z0-9 ]+-----", REMOVED, line)
            before = index - 1
            while before >= 0 and (shorter := BASE64_LINE.sub(REMOVED, lines[before])) != lines[before]:
                lines[before] = shorter
                before -= 1
    return re.sub(rf"(?:(?<=\n)|^)({re.escape(REMOVED)})(?:\n{re.escape(REMOVED)})+", r"\1", "\n".join(lines))


def _without_values(text: str, named: re.Pattern[str], valued: re.Pattern[str]) -> str:
    """Remove the values that follow names of secrets. The value of another name may have such names in it."""
    kept, end = [], 0
    for match in named.finditer(text):
        if match.start() < end or not _names_secret(match["name"]):
            continue
        value = valued.match(text, match.end())
        if value and not _is_harmless(match["name"], value[0]):
            kept += [text[end : match.end()], REMOVED]
            end = value.end()
    return "".join([*kept, text[end:]])


def _names_secret(name: str) -> bool:
    """Return whether a name says that its value is secret."""
    words = [word.lower() for word in WORDS.findall(name)]
    if not words or words[-1] in HARMLESS_ENDS:
        return False
    joined = "".join(words)
    if any(part in joined for part in SECRET_PARTS) or words[-1] in SECRET_WORDS:
        return True
    keys = [index for index, word in enumerate(words) if word in ("key", "keys")]
    return any(index and words[index - 1] in KEY_WORDS for index in keys) or words[-2:] == ["key", "data"]


def _is_harmless(name: str, value: str) -> bool:
    """Return whether the value of a secret's name is no secret: a path of a file, a truth value, nothing."""
    is_path = FILE_END.search(name) and PATH.match(value)
    return bool(is_path or NOT_SECRET.fullmatch(value) or value.startswith(REMOVED))


def _is_random(word: str) -> bool:
    """Return whether a long word may be a key in base64, and is no path."""
    kinds = (any(map(test, word)) for test in (str.isupper, str.islower, str.isdigit))
    return all(kinds) and not word.startswith("/") and word.count("/") <= len(word) // 12


FILE_LIMIT = 2 << 20
"""Bytes of the largest file in the archive. Of a longer text, only the end is kept."""
TOTAL_LIMIT = 32 << 20
"""Bytes of all files together, before compression."""
COMMAND_LIMIT = 30.0
"""Seconds for one command."""
LINES = "5000"
"""Lines of a log that are kept."""

FILES = (
    *("/etc/os-release", "/proc/version", "/proc/devices", "/proc/modules", "/proc/meminfo", CONFIG_FILE, CONDITIONS),
    SERVICE_STATE,
)
CMDLINE = "/proc/cmdline"
PARAMETERS = re.compile(
    r"""(?x)(?:root|rootfstype|rootflags|ro|rw|init|console|BOOT_IMAGE|mem|numa.*|hugepages.*|hugepagesz|isolcpus|lsm
    |video|efi|clocksource|tsc|idle|mitigations|security|apparmor|selinux|cgroup.*|default_hugepagesz|systemd\.unified.*
    |.*iommu.*|pci.*|acpi.*|kvm.*|vfio.*|drm.*|modprobe.*|module.*|rd\.driver\..*)"""
)
"""Kernel parameters whose values are included, besides those of the vendors' modules. Others may be secrets of any
form."""
MODULES = tuple(name for vendor in HOST_VENDORS for name in (*vendor.drivers, *vendor.module_names))
UNIT_PROPERTIES = (
    *("Id", "LoadState", "ActiveState", "SubState", "Result", "FragmentPath", "DropInPaths", "NeedDaemonReload"),
    *("ExecMainStatus", "ExecMainCode", "MainPID", "NRestarts", "ActiveEnterTimestamp", "InactiveEnterTimestamp"),
    *("DevicePolicy", "DeviceAllow", "Requires", "Wants", "After", "MemoryMax", "TasksMax", "UnitFileState"),
)
"""What is included of a machine's unit: its environment and its arguments may have secrets."""
SERVICES = tuple(service for vendor in HOST_VENDORS for service in vendor.services)


def _journal(*which: str) -> tuple[str, ...]:
    return ("journalctl", *which, "-n", LINES, "--no-pager")


COMMANDS = {
    "units": ("systemctl", "list-units", "--all", "--no-pager", "unbounded-agent*", "systemd-nspawn@*", *SERVICES),
    "service.log": (*_journal("-u", "unbounded-agent*"), "-o", "short-iso"),
    "kernel.log": (*_journal("-k", "-b"), "-o", "short-iso"),
    "lspci": ("lspci", "-Dnnk"),
    "disks": ("df", "-h"),
    # Without the options of file systems, which may have passwords.
    "mounts": ("findmnt", "--list", "--output=SOURCE,TARGET,FSTYPE,VFS-OPTIONS"),
    "ldconfig": ("ldconfig", "-p"),
}
REPORT_LIMIT = 90
"""Seconds for a vendor's report: it searches the journals of three boots."""
SUPPORT_REPORT = (
    f'cd "$(mktemp -d)" && timeout -k 5 {REPORT_LIMIT} "$@" --output-file report >&2; '
    f"{{ gzip -dc report.gz || cat report; }} | tail -c {FILE_LIMIT}"
)
"""Prints what a report has got to, also if it hangs. Unpacked, it needs no memory, whatever its size."""
IN_SANDBOX = (
    *("systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--no-ask-password"),
    # Not even a program that the report starts can open a GPU.
    *("--property=DevicePolicy=closed", "--property=DeviceAllow=/dev/kmsg r", "--property=ProtectKernelModules=yes"),
    *("--property=PrivateTmp=yes", "--property=ProtectSystem=strict", "--property=LimitFSIZE=64M"),
    *("--property=MemoryMax=512M", f"--property=RuntimeMaxSec={REPORT_LIMIT + 20}", "--property=TimeoutStopSec=5"),
)
MACHINE_COMMANDS = {
    "unit": ("systemctl", "show", "--no-pager", f"--property={','.join(UNIT_PROPERTIES)}", "{unit}"),
    "start.log": _journal("-b", "-u", "{unit}", "-u", "unbounded-agent-prepare@{machine}"),
    "machine-half.log": _journal("-M", "{machine}", "-b", "-u", "unbounded-agent*"),
    "containerd.log": _journal("-M", "{machine}", "-b", "-u", "containerd"),
    "kubelet.log": _journal("-M", "{machine}", "-b", "-u", "kubelet"),
}


def write_bundle(path: str, report: Report, reconciler: Reconciler) -> tuple[str, ...]:
    """Write the archive, which only its owner may read. Return sentences on what was left out. Raises OSError."""
    now = time.time()
    left_out: list[str] = []
    buffer, total = io.BytesIO(), 0
    line = read_seen(reconciler.system.read_text, CMDLINE)
    parameters = _parameters(line) if isinstance(line, str) else {}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, read in _contents(report, reconciler):
            try:
                text = read()
            except (CommandError, OSError) as error:
                left_out.append(f"{name}: {error}")
                continue
            for whole, shown in parameters.items():
                text = re.sub(rf"(?<!\S){re.escape(whole)}(?!\S)", shown.replace("\\", r"\\"), text)
            data = redacted(text).encode(errors="replace")[-FILE_LIMIT:]
            total += len(data)
            if total > TOTAL_LIMIT:
                left_out.append(f"{name} and what would follow: the archive is limited to {TOTAL_LIMIT >> 20} MiB")
                break
            _add(archive, name, data, now)
        _add(archive, "left-out.txt", "".join(f"{each}\n" for each in left_out).encode(errors="replace"), now)
    reconciler.system.write(path, buffer.getvalue(), 0o600)
    return tuple(left_out)


def _add(archive: tarfile.TarFile, name: str, data: bytes, now: float) -> None:
    member = tarfile.TarInfo(f"unbounded-agent/{name.lstrip('/')}")
    member.size, member.mtime, member.mode = len(data), int(now), 0o600
    archive.addfile(member, io.BytesIO(data))


def _contents(report: Report, reconciler: Reconciler) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each file in the archive, with a function that returns the file's text."""
    system = reconciler.system
    facts, planned, difference = reconciler.preview()
    machines = as_dated(reconciler.evaluate(facts, planned, difference), system)
    steps = "".join(f"{each.describe()}\n" for each in difference.actions)
    yield "version.txt", lambda: f"{VERSION}\n"
    yield "doctor.txt", lambda: "\n".join(in_words(report))
    yield "doctor.json", lambda: document("doctor", as_object(report))
    yield "status.json", lambda: document("status", status_of(machines, facts))
    yield "plan.txt", lambda: steps
    yield "settings.json", lambda: json.dumps(to_builtins(reconciler.config), indent=1)
    for path in FILES:
        yield f"files{path}", partial(system.read_text, path)
    yield f"files{CMDLINE}", partial(system.read_text, CMDLINE)
    commands = {f"commands/{name}": argv for name, argv in COMMANDS.items()}
    names = read_seen(system.entries, STATE)
    records = [f"{STATE}/{name}" for name in (names if isinstance(names, tuple) else ()) if name.endswith(".json")]
    for machine in (each.name for each in machines):
        for name, argv in MACHINE_COMMANDS.items():
            filled = (each.format(machine=machine, unit=machine_unit(machine)) for each in argv)
            commands[f"machines/{machine}/{name}"] = tuple(filled)
        records += [file(machine) for file in (nspawn_file, unit_drop_in, handoff_file, granted_file, live_file)]
        records.append(f"{report_directory(machine)}/{REPORT_NAME}")
    for path in records:
        # Read the file as untrusted: it may be a machine's report, which processes in the machine can write.
        yield f"files{path}", lambda path=path: system.read_untrusted(path)[0].decode(errors="replace")  # type: ignore[misc]
    for name, argv in commands.items():
        yield name, partial(system.run, *argv, timeout=COMMAND_LIMIT)
    for program, *options in (vendor.support_report for vendor in HOST_VENDORS if vendor.support_report):
        # Last, because it takes longest, and has much that others have too.
        if place := system.find_program(program):
            command = (*IN_SANDBOX, "/bin/sh", "-c", SUPPORT_REPORT, "sh", place, *options)
            yield f"commands/{program}", partial(system.run, *command, timeout=REPORT_LIMIT + 30)


def _parameters(command_line: str) -> dict[str, str]:
    """Return the kernel's unknown parameters, with what is shown of them. Logs have them too."""
    found = dict[str, str]()
    for word in command_line.split():
        name, is_set, _ = word.partition("=")
        module = name.partition(".")[0].replace("-", "_")
        known = PARAMETERS.fullmatch(name) or any(fnmatch.fnmatchcase(module, each) for each in MODULES)
        if is_set and not known:
            found[word] = f"{name}={REMOVED}"
    return found


def doctor(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the diagnoses as text, or as JSON for programs. Return 0 if the report is sound, otherwise 1.

    If the configuration on disk is invalid, the report is about the last good one, and the exit code is 2. With
    --bundle, write an archive instead, and return 0: if no path is given, into a new file in the current directory.
    """
    found = examine(reconciler, options.kubeconfig)
    if options.bundle is not None:
        name = f"unbounded-agent-{os.uname().nodename}-{rfc3339(time.time()).replace(':', '')}.tar.gz"
        path = os.path.abspath(options.bundle or name)
        left_out = write_bundle(path, found, reconciler)
        aside = f"; what is missing ({len(left_out)}) is listed in left-out.txt in the archive" if left_out else ""
        say([f"{path} is written{aside}", "Secrets that were recognised are removed. Read it before you send it."])
        return 0
    say([document("doctor", as_object(found))] if options.json else in_words(found, terminal()[0]))
    return 2 if reconciler.rejected else 0 if found.sound else 1


def examine(reconciler: Reconciler, kubeconfig: str = "") -> Report:
    """Return the diagnoses of the host and its machines, and with a kubeconfig those of the cluster."""
    facts, planned, difference = reconciler.preview()
    system, config = reconciler.system, reconciler.config
    machines = reconciler.evaluate(facts, planned, difference)
    cluster = None
    if kubeconfig:
        nodes = {observe_joined(each.name, system) for each in machines}
        read = read_cluster(system, kubeconfig, sorted(nodes - {""}))
        cluster = ClusterDiagnosis(findings(read), read.unknown)
    made_by_up = {name for name, settings in config.machines.items() if settings.node}
    # A machine that has not reported may have a kubelet.
    kubelets = any(
        each.name in made_by_up or each.condition(ConditionType.GPUS_ADVERTISED).reason != Reason.NO_KUBELET
        for each in machines
    )
    host = diagnose_host(facts, config, system, reconciler.rejected, kubelets=kubelets)
    return Report(diagnose_machines(machines, facts, config, system, as_root=os.geteuid() == 0), host, cluster)
