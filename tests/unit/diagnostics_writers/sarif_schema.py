"""The parts of the SARIF 2.1.0 schema that the writer uses, strict: a property not named here is a mistake."""

from __future__ import annotations

from typing import Any


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(of: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": least}


_STRING: dict[str, Any] = {"type": "string", "minLength": 1}
_FROM_ONE: dict[str, Any] = {"type": "integer", "minimum": 1}
_FROM_ZERO: dict[str, Any] = {"type": "integer", "minimum": 0}
_LEVEL: dict[str, Any] = {"enum": ["none", "note", "warning", "error"]}
_MESSAGE = _object("text", text=_STRING)
_MULTIFORMAT = _object("text", text=_STRING, markdown=_STRING)

_REGION = _object("startLine", startLine=_FROM_ONE, startColumn=_FROM_ONE, endLine=_FROM_ONE, endColumn=_FROM_ONE)
_PHYSICAL = _object(
    "artifactLocation region",
    # RFC 3986 allows neither spaces nor most other signs
    artifactLocation=_object("uri", uri={"type": "string", "pattern": r"^[A-Za-z0-9._~:/%!$&'()*+,;=@-]+$"}),
    region=_REGION,
)
_LOCATION = _object("physicalLocation", id=_FROM_ZERO, physicalLocation=_PHYSICAL, message=_MESSAGE)

_RULE = _object(
    "id",
    id=_STRING,
    name=_STRING,
    shortDescription=_MULTIFORMAT,
    fullDescription=_MULTIFORMAT,
    defaultConfiguration=_object(level=_LEVEL),
    help=_MULTIFORMAT,
    helpUri={"type": "string", "pattern": "^[a-z]+://"},
)
_RESULT = _object(
    # optional in SARIF itself, but uploads without a location are refused
    "ruleId ruleIndex level message locations",
    ruleId=_STRING,
    ruleIndex=_FROM_ZERO,
    level=_LEVEL,
    message=_MESSAGE,
    locations=_list(_LOCATION, 1),
    relatedLocations=_list(_LOCATION, 1),
)
_RUN = _object(
    "tool results",
    tool=_object("driver", driver=_object("name", name=_STRING, version=_STRING, rules=_list(_RULE))),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=_list(_RESULT),
)

SCHEMA = _object(
    "$schema version runs",
    **{"$schema": {"type": "string", "pattern": "^https://"}, "version": {"const": "2.1.0"}, "runs": _list(_RUN, 1)},
)
