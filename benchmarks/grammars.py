"""Random regexes and JSON schemas, and whether a text follows one; shared with the tests."""

from __future__ import annotations

import json
import random
import re
from typing import Any


def random_regex(chance: random.Random, depth: int = 3) -> str:
    """A regex that Python and both libraries read alike; finite and not empty."""
    kind = chance.randrange(7) if depth else chance.randrange(3)
    if kind == 0:
        return "".join(chance.choices("abcxyz01", k=chance.randint(1, 4)))
    if kind == 1:
        return chance.choice(("[a-f]", "[0-9]", "[^a-z\\n]", "[A-Za-z_]", "\\d"))
    if kind == 2:
        return chance.choice(("[ab]{1,3}", "x?", "[0-9]{2}", "(?:ab|ba)"))
    inner = random_regex(chance, depth - 1)
    if kind == 3:
        return f"(?:{inner}|{random_regex(chance, depth - 1)})"
    if kind == 4:
        return f"(?:{inner}){{{chance.randint(0, 1)},{chance.randint(1, 3)}}}"
    return inner + random_regex(chance, depth - 1)


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose documents are finite."""
    kind = chance.choice((*range(9), 6, 7, 8, 8, 8)) if depth else chance.randrange(6)
    if kind == 0:
        low = chance.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 200)}
    if kind == 1:
        least = chance.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}
    if kind == 2:
        options: list[Any] = ["red", "green", 'a "b"', 7, -1.5, None, True, "ä\n"]
        return {"enum": chance.sample(options, chance.randint(1, 4))}
    if kind == 3:
        return {"type": chance.choice(("boolean", "null"))}
    if kind == 4:
        return {"const": chance.choice(("x", 3, [1, 2], {"a": None}))}
    if kind == 5:
        return {"type": "string", "pattern": chance.choice(("^[a-c]{1,4}$", "^\\d{2}-\\d{2}$"))}
    if kind == 6:
        least = chance.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(chance, depth - 1),
            "minItems": least,
            "maxItems": least + chance.randint(0, 2),
        }
    if kind == 7:
        return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}
    names = chance.sample(("name", "age", "id", "a b", "ключ", "tags"), chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a document follows a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(_same(value, one) for one in schema["enum"])
    if "const" in schema:
        return _same(value, schema["const"])
    match schema["type"]:
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "string" if isinstance(value, str):
            if "pattern" in schema:
                return re.search(schema["pattern"].replace("$", r"\Z"), value, re.ASCII) is not None
            return schema["minLength"] <= len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array" if isinstance(value, list):
            inside = schema["minItems"] <= len(value) <= schema["maxItems"]
            return inside and all(fits(item, schema["items"]) for item in value)
        case "object" if isinstance(value, dict):
            known = schema["properties"]
            return all(key in value for key in schema["required"]) and all(
                key in known and fits(item, known[key]) for key, item in value.items()
            )
    return False


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
