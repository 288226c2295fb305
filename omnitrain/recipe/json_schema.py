"""The recipe's JSON Schema in draft 4, which Taplo (the TOML language server) completes and checks by."""

from typing import Any

from omnitrain.recipe.schema import Recipe

FILE_NAME = "omnitrain.schema.json"


def json_schema() -> dict[str, Any]:
    """The schema as plain data."""
    schema = _draft4(Recipe.model_json_schema())
    return {"$schema": "http://json-schema.org/draft-04/schema#", "title": "omnitrain recipe", **schema}


def _draft4(node: Any, names: bool = False) -> Any:
    """pydantic writes draft 2020-12. `names`: the keys of this dict are field names, not keywords."""
    if isinstance(node, list):
        return [_draft4(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {name: _draft4(item) for name, item in node.items()}
    node = {key: value for key, value in node.items() if key not in ("title", "discriminator", "format")}
    if options := node.pop("anyOf", None):
        # TOML has no null: an optional field is one that is left out.
        options = [option for option in options if option != {"type": "null"}]
        node = {**options[0], **node} if len(options) == 1 else {**node, "anyOf": options}
    if "default" in node and node["default"] is None:
        del node["default"]
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "$defs":
            out["definitions"] = _draft4(value, names=True)
        elif key == "properties":
            out[key] = _draft4(value, names=True)
        elif key == "$ref":
            out["$ref"] = value.replace("#/$defs/", "#/definitions/")
        elif key == "const":
            out["enum"] = [value]
        elif key in ("exclusiveMinimum", "exclusiveMaximum"):
            out[key[9:].lower()] = value
            out[key] = True
        elif key == "prefixItems":
            out["items"], out["additionalItems"] = _draft4(value), False
        elif key in ("default", "enum", "required"):
            out[key] = value
        else:
            out[key] = _draft4(value)
    if "$ref" in out and len(out) > 1:
        # Draft 4 ignores what stands beside a $ref.
        out["allOf"] = [{"$ref": out.pop("$ref")}]
    return out
