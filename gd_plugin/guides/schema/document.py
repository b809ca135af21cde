"""A schema document: where each subschema stands, which draft it speaks, what its references mean.

In:  a schema as a JSON value.
Out: `Subschema` values with numbers, and `Document.resolve` from a reference to its target.
Kept here: an unresolved or remote reference is an error with its place; nothing is fetched.
Source: JSON Schema core 2020-12, sections 8.2 and 9; RFC 3986 for relative references.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from gd_plugin.errors import GuideTooLargeError, InvalidGuideError, UnsupportedGuideError
from gd_plugin.guides.problem import escape_pointer

__all__ = ["Document", "Subschema"]

_DRAFTS = {
    "http://json-schema.org/draft-03/schema": 3,
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
# values that are data, not schemas
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_MAX_VALUES = 400_000


@dataclass(frozen=True, slots=True)
class Subschema:
    """One place of the document that is read as a schema.

    Attributes:
        value: the schema there.
        pointer: JSON pointer, from the root.
        base: URI that relative references in it are resolved against.
        draft: 4, 6, 7, 2019 or 2020.
    """

    value: Any
    pointer: str
    base: str
    draft: int


class Document:
    """A schema and the places its references may name."""

    def __init__(self, schema: Any) -> None:
        draft = 2020
        if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
            draft = _DRAFTS.get(schema["$schema"].rstrip("#"), 2020)
            if draft == 3:
                raise UnsupportedGuideError(
                    "#/$schema: draft 3 is not supported; 4, 6, 7, 2019-09 and 2020-12 are",
                    pointer="#/$schema",
                    keyword="$schema",
                    hint="write it in a later draft",
                )
        self.root = self._enter(Subschema(schema, "#", "", draft), schema)
        self._resources: dict[str, Subschema] = {"": self.root, self.root.base: self.root}
        self._anchors: dict[tuple[str, str], Subschema] = {}
        self._dynamic: dict[str, list[Subschema]] = {}
        self._recursive: set[str] = set()
        self._index()

    def _enter(self, parent: Subschema, value: Any, *path: str | int) -> Subschema:
        base, draft = parent.base, parent.draft
        if isinstance(value, dict):
            if isinstance(value.get("$schema"), str):
                draft = _DRAFTS.get(value["$schema"].rstrip("#"), draft)
            identifier = value.get("id" if draft == 4 else "$id")
            # up to draft 7 a reference hides its siblings, and an identifier that is a fragment is an anchor
            hidden = draft <= 7 and "$ref" in value
            if isinstance(identifier, str) and not hidden and urldefrag(identifier)[0]:
                base = _join(base, urldefrag(identifier)[0], f"{parent.pointer}/$id")
        pointer = "/".join([parent.pointer, *map(escape_pointer, path)])
        return Subschema(value, pointer, base, draft)

    def _index(self) -> None:
        stack, count = [self.root], 0
        while stack:
            place = stack.pop()
            count += 1
            if count > _MAX_VALUES:
                raise GuideTooLargeError(
                    f"#: the schema holds over {_MAX_VALUES} values",
                    pointer="#",
                    limit="max_schema_values",
                    value=count,
                    hint="name repeated parts with $defs and $ref, or leave parts out",
                )
            value = place.value
            if isinstance(value, dict):
                self._resources.setdefault(place.base, place)
                if value.get("$recursiveAnchor") is True:
                    self._recursive.add(place.base)
                for key in ("$anchor", "$dynamicAnchor", "id" if place.draft == 4 else "$id"):
                    name = value.get(key)
                    if isinstance(name, str) and (key.endswith("nchor") or name.startswith("#")):
                        self._anchors.setdefault((place.base, name.lstrip("#")), place)
                        if key == "$dynamicAnchor":
                            self._dynamic.setdefault(name, []).append(place)
                stack.extend(
                    self._enter(place, item, key)
                    for key, item in value.items()
                    if isinstance(item, dict | list) and key not in _DATA
                )
            elif isinstance(value, list):
                stack.extend(
                    self._enter(place, item, index) for index, item in enumerate(value) if isinstance(item, dict | list)
                )

    def child(self, parent: Subschema, value: Any, *path: str | int) -> Subschema:
        """The subschema `value`, which stands at `path` below `parent`.

        Raises:
            InvalidGuideError: not a schema.
        """
        if not isinstance(value, dict | bool):
            pointer = "/".join([parent.pointer, *map(escape_pointer, path)])
            raise InvalidGuideError(
                f"{pointer}: a schema is an object or a boolean, got {type(value).__name__}",
                pointer=pointer,
                keyword=str(path[0]) if path else None,
                hint="write a schema there; true allows every value",
            )
        return self._enter(parent, value, *path)

    def resolve(self, place: Subschema, keyword: str, reference: Any) -> Subschema:
        """The subschema that `reference` in `place` names.

        Raises:
            InvalidGuideError: it names nothing in this document.
            UnsupportedGuideError: it is dynamic and could mean several places.
        """
        pointer = f"{place.pointer}/{keyword}"
        if not isinstance(reference, str):
            raise InvalidGuideError(
                f"{pointer}: a reference is text",
                pointer=pointer,
                keyword=keyword,
                hint='name a schema of this document, for example "#/$defs/name"',
            )
        if keyword == "$dynamicRef" and len(self._dynamic.get(urldefrag(reference)[1], ())) > 1:
            raise UnsupportedGuideError(
                f"{pointer}: several schemas have the dynamic anchor {reference!r}",
                pointer=pointer,
                keyword=keyword,
                hint="use $ref and $anchor, which name one place",
            )
        uri, fragment = urldefrag(_join(place.base, reference, pointer))
        resource = self._resources.get(uri)
        if resource is None:
            raise InvalidGuideError(
                f"{pointer}: {reference!r} is not in this document, and nothing is fetched",
                pointer=pointer,
                keyword=keyword,
                hint="put the schema it names under $defs",
            )
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((uri, unquote(fragment)))
            # an anchor of the root may be declared under its own URI
            target = target or (self._anchors.get((self.root.base, unquote(fragment))) if not uri else None)
        else:
            target = self._follow(resource, unquote(fragment))
        if target is None or not isinstance(target.value, dict | bool):
            raise InvalidGuideError(
                f"{pointer}: {reference!r} names no schema in this document",
                pointer=pointer,
                keyword=keyword,
                hint="put the schema it names under $defs, or correct the reference",
            )
        if keyword == "$recursiveRef" and uri in self._recursive and len(self._recursive) > 1:
            raise UnsupportedGuideError(
                f"{pointer}: several schemas have $recursiveAnchor, so what is meant depends on the way to it",
                pointer=pointer,
                keyword=keyword,
                hint="use $ref, which names one place",
            )
        return target

    def _follow(self, place: Subschema, pointer: str) -> Subschema | None:
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            value = place.value
            if isinstance(value, dict) and name in value:
                place = self._enter(place, value[name], name)
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                place = self._enter(place, value[int(name)], int(name))
            else:
                return None
        return place


def _join(base: str, reference: str, pointer: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise InvalidGuideError(
            f"{pointer}: {reference!r} is not a URI: {error}",
            pointer=pointer,
            hint='name a schema of this document, for example "#/$defs/name"',
        ) from error
