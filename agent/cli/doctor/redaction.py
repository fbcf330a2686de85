"""Removes secrets from texts that are sent to other people. Pure.

A secret is recognised by its form, or by the name before it. Other secrets stay, so people should read a bundle before
they send it.

Machines write into these texts, and could slow down the search. So the patterns begin only at the start of a word, and
do not backtrack into what they have matched (`++`, `(?>...)`): otherwise, one long word could take hours.
"""

import re

REMOVED = "[removed]"
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # A PEM block: up to its end or, if that is missing, up to the beginning of the next block.
    (re.compile(r"(?s)-----BEGIN ([A-Z ]+)-----(?:(?!-----BEGIN ).)*?(?:-----END \1-----|(?=-----BEGIN ))"), REMOVED),
    # A PEM block with neither an end nor a next block: the lines of base64 that follow its beginning.
    (re.compile(r"-----BEGIN [A-Z ]+-----(?:\s*+[\w+/=]{16,}+)*+"), REMOVED),
    # Bootstrap tokens (bootstrap-token-secret-format in Kubernetes' documentation): the part before the dot is public.
    (re.compile(r"\b([a-z0-9]{6})\.[a-z0-9]{16}\b"), rf"\1.{REMOVED}"),
    # JSON web tokens, such as those of service accounts (RFC 7519).
    (re.compile(r"(?<![\w-])((?>[\w-]*?\b(?=eyJ)))[\w-]{11,}+\.[\w-]{8,}+\.[\w-]*"), rf"\1{REMOVED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.+/=~-]{8,}"), rf"\1 {REMOVED}"),
    (re.compile(r"(?<!\w)(\w++://[^/\s:@]*+):[^/\s@]++@"), rf"\1:{REMOVED}@"),
    (
        re.compile(
            r"""(?ix)
            (?<![\w.-])
            ((?>[\w.-]*(?:password|passwd|secret|token|credential|api[_-]?key|private[_-]?key|key[_-]data))[\w.-]*+)
            (["']?\s*[=:]\s*)
            ("(?:[^"\\]|\\.)*"|'[^']*'|(?:\[removed\]|[^\s,;}\]])+)
            """
        ),
        rf"\1\2{REMOVED}",
    ),
)
"""Regular expressions of secrets, with their replacements. The last one finds secrets by the name before them."""
FILE_NAME = re.compile(r"(?i)(?:file|path|directory)$")
PATH = re.compile(r"""^["']?/[^\s]*$""")
"""Matches a value that looks like a path. Such a value stays only after a name that matches FILE_NAME, because a secret
may begin with a slash too."""


def redacted(text: str) -> str:
    """Return the text without the secrets that are recognised."""
    for pattern, replacement in PATTERNS[:-1]:
        text = pattern.sub(replacement, text)
    pattern, replacement = PATTERNS[-1]

    def replace(match: re.Match[str]) -> str:
        return match[0] if FILE_NAME.search(match[1]) and PATH.match(match[3]) else match.expand(replacement)

    return pattern.sub(replace, text)
