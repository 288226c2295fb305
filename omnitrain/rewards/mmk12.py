"""MMK12: (accuracy + 0.3 f) / 1.3, where f is 0, 0.5 or 1 for an answer tag and a box in it.

The answer is what the last \\boxed{} in the last <answer></answer> holds, else that tag's text, else the last box,
else the response; a finished <think></think> does not count. The label is the published one: a letter, a number or
a formula. `row["meta"]["options"]` holds the question's options by letter where it lists any; an answer to such a
question counts by its letter or by the option's value. The letter must stand as one ("B", "(B)", "B. 12", "the
answer is B"): the English word "A" in "A triangle" is none.

Formulas go to math-verify, so `score` must run in the main thread of its process.
"""

import re

from omnitrain.rewards import math

FORM_WEIGHT = 0.3
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0")
_MARK = r"[.):\u3001\uff0e\uff1a\uff09]"
_ALONE = re.compile(r"\(?([A-Ha-h])\)?")
_SEVERAL = re.compile(r"[A-H](?:\s*(?:[,;&\u3001]|and)?\s*[A-H])+")
_LEADING = re.compile(rf"\(?([A-H])\s*{_MARK}")
_SAID = re.compile(
    r"(?i:\banswer|\boption|\bchoice|\bchoose)(?i:\s+is\b)?(?i:\s+option\b)?\s*:?\s*\(?([A-H])\)?(?=\s*(?:$|[.,;:)\n]))"
)


def _bare(text: str) -> str:
    """Without the wrappers that do not change an answer: dollars, \\text{}, stars, a final dot."""
    for _ in range(3):
        text = _WRAPPERS.sub(r"\1", text)
    text = re.sub(r"\\[()\[\]]|[$`]", "", text)
    return text.strip(" \n\t*").rstrip(".").strip(" \n\t*")


def letters(text: str) -> frozenset[str]:
    """The option letters that an answer gives; empty if it gives none."""
    text = _bare(text)
    if match := _ALONE.fullmatch(text):
        return frozenset(match[1].upper())
    if _SEVERAL.fullmatch(text):
        return frozenset(re.sub("and|[^A-H]", "", text))
    if said := _SAID.findall(text):
        return frozenset(said[-1])
    if match := _LEADING.match(text):
        return frozenset(match[1])
    return frozenset()


def given_answer(response: str) -> tuple[str, float]:
    """What the response gives as its answer, and f: half for one answer tag, half for a box (in the tag, if any)."""
    text = response.rpartition("</think>")[2]
    tags = _TAG.findall(text)
    where = tags[-1] if tags else text
    box = math.last_boxed(where)
    form = 0.5 * (len(tags) == 1) + 0.5 * bool(box)
    return (box or where).strip(), form


def _same(label: str, answer: str) -> bool:
    """Equal as text, as numbers, or as formulas."""
    label, answer = (_DEGREES.sub("", _bare(text)) for text in (label, answer))
    if "".join(label.split()).casefold() == "".join(answer.split()).casefold():
        return True
    found = math.final_answer(answer) if len(answer) > 80 else answer
    try:
        return found is not None and math.equal(label, found)
    except ValueError:
        return False  # the label is words, and these are other ones


def is_right(answer: str, label: str, options: dict[str, str]) -> bool:
    """Whether an answer is the label. options: their text by letter, empty for a question without."""
    wanted, given = letters(label), letters(answer)
    named = wanted if wanted <= set(options) or (len(wanted) == 1 and not options) else frozenset()
    if named:
        if len(given) == 1 or (given and len(named) > 1):
            return given == named
        return len(named) == 1 and bool(options) and _same(options[min(named)], answer)
    if len(given) == 1 and given <= set(options):  # the label is a value
        return _same(label, options[min(given)])
    return _same(label, answer)


def score(response: str, row: dict) -> float:
    """0 to 1. Raises ValueError when the row has no label."""
    label = (row["answer"] or "").strip()
    if "<answer>" in label or "\\boxed{" in label:
        label = given_answer(label)[0]
    if not label:
        raise ValueError(f"the label {row['answer']!r} holds no answer")
    answer, form = given_answer(response)
    accuracy = is_right(answer, label, row["meta"].get("options") or {})
    return (accuracy + FORM_WEIGHT * form) / (1 + FORM_WEIGHT)


def warm_up() -> None:
    """Import math-verify now, so that the first sample's time limit does not pay for it."""
    math.warm_up()
