"""Removes secrets from texts that are sent to other people. Pure.

A secret is recognised by its form, or by the name before it. Others stay, so people should read a bundle before they
send it.

Own rules, because no library fits: detect-secrets (1.5.0, of 2024) is in no release of Debian or Ubuntu, reports the
lines of a file instead of returning a text without the secrets, and knows neither secrets of several lines nor the
escaped JSON and the command lines of journals.

Machines write into these texts, and could slow down the search. So the patterns begin only at the start of a word, and
do not backtrack into what they have matched (`++`, `(?>...)`): otherwise, one long word could take hours.
"""

import re

REMOVED = "[removed]"
BASE64_LINE = re.compile(r"(?:^|(?<=[\s\"'\\|>]))(?:(?:\\n)?[\w+/=-]{16,}+(?:\\[nr])*+)++[\"',\s]*+$")
"""The end of a line that may be part of a PEM block, after a prefix such as a journal's."""
PEM_LINES = 200
"""Lines of the longest PEM block whose end is missing."""

FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    # A PEM block with its end. What begins lines of it, such as the journal's prefix, is removed too.
    (
        re.compile(r"(?s)-----BEGIN ([A-Z0-9 ]+)-----(?:(?!-----BEGIN ).)*?(?:-----END \1-----|(?=-----BEGIN ))"),
        REMOVED,
    ),
    # The same, encoded in base64 as in a kubeconfig: it begins with "-----BEGIN".
    (re.compile(r"LS0tLS1CRUdJTi[\w+/=-]*+"), REMOVED),
    # Bootstrap tokens (bootstrap-token-secret-format in Kubernetes' documentation): the part before the dot is public.
    (re.compile(r"\b([a-z0-9]{6})\.[a-z0-9]{16}\b"), rf"\1.{REMOVED}"),
    # JSON web tokens, such as those of service accounts (RFC 7519), also without a signature.
    (re.compile(r"(?<![\w-])((?>[\w-]*?\b(?=eyJ)))[\w-]{11,}+\.[\w-]{8,}+(?:\.[\w-]*+)*+"), rf"\1{REMOVED}"),
    # Tokens with the prefix of their issuer.
    (
        re.compile(
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
            )"""
        ),
        REMOVED,
    ),
    # Headers of HTTP.
    (
        re.compile(
            r"""(?ix)(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie)
            (\\*+["']?[ \t]*+[:=][ \t]*+\\*+["']?)[^"'\\\r\n]++"""
        ),
        rf"\1\2{REMOVED}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s++[\w.+/=~-]{8,}+"), rf"\1 {REMOVED}"),
    # URLs.
    (re.compile(r"(?<!\w)(\w++://[^/\s:@\"']*+):[^/\s@]++@"), rf"\1:{REMOVED}@"),
    (re.compile(r"(?<!\w)(\w++://)[^/\s:@\"']{16,}+@"), rf"\1{REMOVED}@"),
    # curl --user NAME:PASSWORD.
    (re.compile(r"(?<!\S)(-u|--user|--proxy-user)([ =][\"']?)[^\s:\"'-][^\s:\"']*+:[^\s\"']++"), rf"\1\2{REMOVED}"),
    # .netrc
    (re.compile(r"(?m)\b(login\s++\S++\s++password|^\s*+password)([ \t]++)(?![=:])\S++"), rf"\1\2{REMOVED}"),
    # An element of XML.
    (
        re.compile(r"(?i)(<(?>[\w.:-]*?(?:passw(?:or)?d|passphrase|secret|token|api-?key))[\w.:-]*+>)[^<]++"),
        rf"\1{REMOVED}",
    ),
)
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
    for pattern, replacement in FORMS:
        text = pattern.sub(replacement, text)
    text = _without_cut_blocks(text)
    text = LISTED.sub(_without_listed_value, text)
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


def _without_listed_value(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{match[3]}{REMOVED}" if _names_secret(match["name"]) else match[0]


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
