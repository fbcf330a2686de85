"""Explains failures of skopeo and umoci. Pure."""

import re

from agent.model.errors import AgentError, ApplyError, CommandError

ARCHIVE_HINT = "decompress it with `gunzip` if it is compressed (skopeo 1.9 cannot); otherwise copy it there again"
LOGIN_HINT = "check the file of image.credentials: `skopeo login --authfile FILE REGISTRY` writes one"
NAME_HINT = "check image.name, or image.repository and image.tag; with image.mirror, whether the image is there"
CA_HINT = "put the registry's CA as a file *.crt into the directory image.ca_directory"
DAMAGE_HINT = "the source is damaged or was changed: copy the image there again"
NETWORK_HINT = "check the network to the registry; without one, use an oci: or docker-archive: image"
LIMIT_HINT = "the registry limits how much it sends: wait, log in with image.credentials, or use image.mirror"
FAULT_HINT = "the registry, or a proxy in front of it, has a fault: wait, then run the command again"
PROXY_HINT = "check the proxy, and this command's variables HTTPS_PROXY and NO_PROXY"
HINTS = (
    (r"no space left on device", "free up space on the file system of /var/lib/machines"),
    (r"loading tar component|invalid tar header", ARCHIVE_HINT),
    (r"unexpected EOF", "the source is damaged, or the connection broke: run the command again"),
    (r"toomanyrequests|[Tt]oo [Mm]any [Rr]equests|StatusCode: 429\b", LIMIT_HINT),
    (r"(HTTP status: |status code |from registry |StatusCode: )5[0-9]{2}\b", FAULT_HINT),
    (r"proxyconnect|Proxy Authentication Required", PROXY_HINT),
    (r"unauthorized|authentication required|denied|status code 403", LOGIN_HINT),
    (r"manifest unknown|name unknown|not found|no descriptor found|no such (file|image)", NAME_HINT),
    (r"x509: certificate (has expired|is not yet valid)", "check the registry's certificate, and this host's clock"),
    (r"x509|tls: |certificate", CA_HINT),
    (r"gave HTTP response to HTTPS client", "give the registry a certificate, or use an oci: or docker-archive: image"),
    (r"rejected|signature", "the signature policy refuses the image: see image.signature_policy"),
    (r"[Dd]igest|[Mm]anifest does not match", DAMAGE_HINT),
    (r"no image found in (manifest list|image index)", "use an image for this host's architecture"),
    (
        r"no such host|server misbehaving|name resolution|refused|time(d )?out|deadline exceeded|no route|unreachable|"
        r"reset by peer|EOF$",
        NETWORK_HINT,
    ),
)
"""What to do, by a pattern for the program's message. The first pattern that matches counts."""
LOG_LINE = re.compile(r'^time="[^"]*" level=(?P<level>\w+) msg="?(?P<text>.*?)"?\s*$')
"""A line of skopeo's log, in the format of logrus."""
MARK = re.compile(r"^[^\x20-\x7e]+ *")
"""The symbol that umoci puts before a message."""
QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
"""A URL with a query, which may have a signature that gives access."""


def explained(error: CommandError, what: str) -> AgentError:
    """Return a program's failure as one sentence about `what`, with the next step as the hint.

    The sentence has the program's last message. If the program printed none, the sentence has the message of `error`
    instead, which contains the program's arguments.
    """
    text = _last_message(error.stderr)
    if not text:
        return ApplyError(f"{what}: {error.message}", error.hint or "run the command again")
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "")
    return ApplyError(f"{what}: {text}", hint or "correct this, then run the command again")


def _last_message(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if not lines:
        return ""
    found = LOG_LINE.match(lines[-1])
    text = found["text"].replace('\\"', '"').replace("\\n", " ") if found else MARK.sub("", lines[-1])
    return QUERY.sub(r"\1", " ".join(text.split()))[-600:]
