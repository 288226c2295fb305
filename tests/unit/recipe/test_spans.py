"""The span index against tomli: the same paths, and each span holds the text of its key and value."""

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.recipe.spans import position, spans

BARE = st.text("abcXYZ019_-", min_size=1, max_size=5)
QUOTED = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs", "Cc")), max_size=5)


def basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


KEYS = st.one_of(BARE, QUOTED.map(basic), QUOTED.filter(lambda t: "'" not in t).map(lambda t: f"'{t}'"))
DOTTED = st.lists(KEYS, min_size=1, max_size=3).flatmap(
    lambda parts: st.sampled_from([".", " . ", "\t."]).map(lambda dot: dot.join(parts))
)
SCALARS = st.one_of(
    st.integers(-1000, 1000).map(str),
    st.sampled_from(["3e-6", "1_000", "0xff", "inf", "-nan", "true", "false", "1979-05-27 07:32:00", "07:32:00.5"]),
    QUOTED.map(basic),
    st.sampled_from(
        ["'a # b'", '"]}"', '"\\""', "'''a\n'b''\n'''''", '"""x\n"y" \\"""\n[z]\n"""""', '""', "''", '""""""']
    ),
)
GAPS = st.sampled_from(["", " ", "\t", "\n", " # note, ]\n", "\n\n  "])


def lists(children):
    def build(items, gap, comma):
        return "[" + gap + f"{gap},{gap}".join(items) + (gap + "," if comma and items else "") + gap + "]"

    return st.builds(build, st.lists(children, max_size=3), GAPS, st.booleans())


def tables(children):
    pairs = st.lists(st.tuples(DOTTED, children), max_size=3)
    return pairs.map(lambda items: "{ " + ", ".join(f"{key} = {value}" for key, value in items) + " }")


VALUES = st.recursive(SCALARS, lambda children: lists(children) | tables(children), max_leaves=6)
PAIRS = st.builds(lambda key, gap, value: f"{key} {gap}= {value}", DOTTED, st.sampled_from(["", "\t"]), VALUES)
HEADERS = DOTTED.map(lambda key: f"[{key}]") | DOTTED.map(lambda key: f"[[ {key} ]]  # header")
LINES = st.lists(PAIRS | HEADERS | st.just("# comment = [1]") | st.just(""), max_size=10)


def paths(value, prefix=()):
    found = {prefix} if prefix else set()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found |= paths(item, prefix + (key,))
    return found


@given(LINES)
@settings(max_examples=200, deadline=None)
def test_paths_equal_those_of_tomli(lines):
    text = "\n".join(lines)
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError:
        return
    assert set(spans(text)) == paths(data)


@given(LINES)
@settings(max_examples=200, deadline=None)
def test_a_value_span_holds_the_value(lines):
    text = "\n".join(lines)
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError:
        return
    for path, span in spans(text).items():
        value = data
        for part in path:
            value = value[part]
        if not isinstance(value, (dict, list)):
            parsed = tomli.loads(f"x = {text[slice(*span.value)]}")["x"]
            assert parsed == value or parsed != parsed


def test_positions_count_lines_and_columns_from_one():
    text = 'a = 1\n  [t]\n\tkey = "x" # y\n[[r]]\nb = [1, { c = 2 }]\n'
    found = spans(text)
    assert position(text, found["t",].key[0]) == (2, 4)
    assert position(text, found["t", "key"].key[0]) == (3, 2)
    assert position(text, found["t", "key"].value[0]) == (3, 8)
    assert position(text, found["r", 0, "b", 1, "c"].key[0]) == (5, 11)
