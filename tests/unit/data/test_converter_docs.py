"""docs/data.md names what the code has: data sets, columns, drop reasons, demo sets."""

import re
from pathlib import Path

import pytest

from omnitrain.cli.prepare import DemoSet
from omnitrain.data import converters, media, video
from omnitrain.data.converters import CONVERTERS, load_converter
from omnitrain.data.schema import SCHEMA

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
SOURCES = [*Path(converters.__file__).parent.glob("*.py"), Path(media.__file__), Path(video.__file__)]


def test_every_data_set_column_and_demo_set_is_named():
    for name in CONVERTERS:
        assert f"omnitrain prepare {name} " in PAGE and f"| `{name}` |" in PAGE
    assert all(f"`{name}`" in PAGE for name in SCHEMA.names)
    assert all(f"| `{name}`" in PAGE for name in DemoSet)


def test_every_drop_reason_is_explained_and_none_is_invented():
    found = set()
    for source in SOURCES:
        text = source.read_text()
        found |= {a or b for a, b in re.findall(r'Dropped\([^,]+, f?"([^"]+)"|BadMedia\(f?"([^"]+)"', text)}
        found |= set(re.findall(r'reason = "([^"]+)" if', text))
        found |= set(re.findall(r'BadMedia\("[^"]+" if .* else "([^"]+)"', text))
    reasons = set()
    for reason in found:
        kinds = ("image", "audio", "video")
        reasons |= {re.sub(r"\{[^}]*\}", kind, reason) for kind in kinds} if "{" in reason else {reason}
    table = PAGE.split("## Why a record is dropped")[1].split("\n## ")[0]
    told = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE))))
    inspected = {f"unreadable {kind}" for kind in ("image", "audio", "video")}
    assert reasons | inspected == told


@pytest.mark.parametrize("name", CONVERTERS)
def test_every_converter_says_what_it_is(name):
    converter = load_converter(name)
    assert converter.name == name and isinstance(converter.held_out, bool)
    assert "answer" in converter.system or name == "omni-preference"
