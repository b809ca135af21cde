"""JSON Schema `format` -> a language of whole texts, for the formats that are enforced.

A format that no draft knows is an annotation. Each language is a subset of what its standard allows; `COMPLEMENTED` names
those that equal it, so that their complement is exact too.
Sources: RFC 3339 (dates, durations), 5321 (email), 1123 (hostname), 2673 and 4291 (addresses), 3986 and 3987 (URI, IRI),
6570 (URI template), 6901 (JSON pointer), 4122 (UUID).
"""

from functools import lru_cache

from gd_plugin.guides.schema.languages import ANY_CHAR, Language, both, repeat
from gd_plugin.guides.schema.patterns import compile_pattern

__all__ = ["COMPLEMENTED", "FORMATS", "REFUSED", "format_language"]

COMPLEMENTED = frozenset({"date", "ipv4", "uuid"})
# what these ask is not regular
REFUSED = frozenset({"regex"})

_MONTH_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"({_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# a last label of digits alone would be an address
_LAST_LABEL = "([0-9][0-9-]{0,20})?[a-zA-Z]([a-zA-Z0-9-]{0,40}[a-zA-Z0-9])?"
_HOST = f"({_LABEL}\\.)*{_LAST_LABEL}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(\\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"({_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"({_H16}:){{6}}{_LS32}",
        f"::({_H16}:){{5}}{_LS32}",
        f"({_H16})?::({_H16}:){{4}}{_LS32}",
        *(f"(({_H16}:){{0,{before}}}{_H16})?::({_H16}:){{{4 - before}}}{_LS32}" for before in range(1, 4)),
        f"(({_H16}:){{0,4}}{_H16})?::{_LS32}",
        f"(({_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(({_H16}:){{0,6}}{_H16})?::",
    ]
)
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = f'({_ATOM}(\\.{_ATOM})*|"([ !#-\\[\\]-~]|\\\\[ -~])*")'
_EMAIL = f"{_LOCAL}@({_HOST}|\\[{_IPV4}\\])"
_IDN_ATOM = _ATOM.replace("[", "[\\u00a1-\\ud7ff\\uf900-\\ufdcf\\ufdf0-\\uffef", 1)


def _uri(extra: str) -> tuple[str, str]:
    """RFC 3986 section 3 with `extra` unreserved characters: absolute and relative references."""
    unreserved = f"a-zA-Z0-9._~\\-{extra}"
    subs = "!$&'()*+,;="
    percent = "%[0-9a-fA-F]{2}"
    pchar = f"([{unreserved}{subs}:@]|{percent})"
    no_colon = f"([{unreserved}{subs}@]|{percent})"
    authority = f"(([{unreserved}{subs}:]|{percent})*@)?(\\[({_IPV6})\\]|([{unreserved}{subs}]|{percent})*)(:[0-9]*)?"
    slashed = f"(/{pchar}*)*"
    absolute = f"/({pchar}+{slashed})?"
    tail = f"(\\?({pchar}|[/?])*)?(#({pchar}|[/?])*)?"
    uri = f"[a-zA-Z][a-zA-Z0-9+.-]*:(//{authority}{slashed}|{absolute}|{pchar}+{slashed}|){tail}"
    relative = f"(//{authority}{slashed}|{absolute}|{no_colon}+{slashed}|){tail}"
    return uri, relative


_URI, _RELATIVE = _uri("")
_IRI, _IRI_RELATIVE = _uri("\\u00a0-\\ud7ff\\uf900-\\ufdcf\\ufdf0-\\uffef")
_SECOND = "[0-9]+S"
_MINUTE = f"[0-9]+M({_SECOND})?"
_HOUR = f"[0-9]+H({_MINUTE})?"
_CLOCK = f"T({_HOUR}|{_MINUTE}|{_SECOND})"
_DAY = "[0-9]+D"
_MONTH = f"[0-9]+M({_DAY})?"
_YEARS = f"[0-9]+Y({_MONTH})?"
# percent-encoded names are read by few programs
_VARNAME = "[a-zA-Z0-9_]+(\\.[a-zA-Z0-9_]+)*"
_VARSPEC = f"{_VARNAME}(:[1-9][0-9]{{0,2}}|\\*)?"
_POINTER = "(/([^~/]|~[01])*)*"
_COLOURS = "aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange|purple|red|silver|teal|white|yellow"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P(({_DAY}|{_MONTH}|{_YEARS})({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": _EMAIL,
    "idn-email": f"({_IDN_ATOM}(\\.{_IDN_ATOM})*)@{_HOST}",
    "hostname": _HOST,
    "host-name": _HOST,
    # the part of it that every registry takes
    "idn-hostname": "([a-z0-9]{1,20}(-[a-z0-9]{1,20}){0,2}\\.)*[a-z][a-z0-9]{0,19}(-[a-z0-9]{1,20}){0,2}",
    "ipv4": _IPV4,
    "ip-address": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri": _IRI,
    "iri-reference": f"{_IRI}|{_IRI_RELATIVE}",
    "uri-template": f"([!#$&(-;=?-\\[\\]_a-z~]|%[0-9a-fA-F]{{2}}|\\{{[+#./;?&]?{_VARSPEC}(,{_VARSPEC})*\\}})*",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "json-pointer": _POINTER,
    # some validators take a 0 that is not the last digit for a leading one
    "relative-json-pointer": f"(0|[1-9]+0?)(#|{_POINTER})",
    "color": f"#[0-9a-fA-F]{{3}}|#[0-9a-fA-F]{{6}}|{_COLOURS}",
}
_MAX_LENGTHS = {"hostname": 253, "host-name": 253, "idn-hostname": 253, "email": 254, "idn-email": 254}


@lru_cache(maxsize=64)
def format_language(name: str) -> Language | None:
    """The texts of format `name`; None where the format is an annotation."""
    if name not in FORMATS:
        return None
    language = compile_pattern(f"^({FORMATS[name]})$").narrow
    if name in _MAX_LENGTHS:
        language = both(language, repeat(ANY_CHAR, 0, _MAX_LENGTHS[name]))
    return language
