"""The exported schema is draft 4 and agrees with the loader."""

import jsonschema
import pytest
import tomli

from omnitrain.recipe.json_schema import json_schema
from omnitrain.recipe.loader import dump, load
from omnitrain.recipe.shipped import all_shipped

VALIDATOR = jsonschema.Draft4Validator(json_schema())


def test_it_is_valid_draft_4_and_uses_nothing_newer():
    jsonschema.Draft4Validator.check_schema(json_schema())
    newer = {"$defs", "const", "prefixItems", "discriminator", "null"}

    def walk(node, names=False):
        if isinstance(node, dict):
            for key, value in node.items():
                assert names or key not in newer, key
                assert names or key not in ("exclusiveMinimum", "exclusiveMaximum") or value is True
                walk(value, key in ("properties", "definitions"))
        elif isinstance(node, list):
            for item in node:
                walk(item)

    walk(json_schema())


@pytest.mark.parametrize("shipped", all_shipped(), ids=lambda item: item.name)
def test_shipped_recipes_and_their_dumps_validate(shipped):
    VALIDATOR.validate(tomli.loads(shipped.path.read_text()))
    VALIDATOR.validate(tomli.loads(dump(load([shipped.path]).recipe)))


@pytest.mark.parametrize(
    "change",
    [
        {"nope": 1},
        {"seed": "x"},
        {"seed": -1},
        {"algorithm": {"kind": "grpo"}},
        {"algorithm": {"kind": "sft", "clip_low": 0.1}},
        {"rewards": [{"kind": "choice", "function": "a:b"}]},
        {"train": {"prompts_per_step": 1}},
        {"train": {"prompts_per_step": 1, "learning_rate": -1}},
        {"train": {"prompts_per_step": 1, "learning_rate": 1, "betas": [1, 2, 3]}},
    ],
)
def test_it_refuses_what_the_loader_refuses(change):
    data = tomli.loads(next(item for item in all_shipped() if item.name == "qwen3_omni/gspo_avqa").path.read_text())
    assert not VALIDATOR.is_valid(data | change)


def test_fields_carry_their_docs():
    train = json_schema()["definitions"]["Train"]["properties"]
    assert train["learning_rate"]["description"] .startswith("Peak learning rate")
