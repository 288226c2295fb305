"""Mathematics: 1 if the final answer of the response equals the label, else 0.

The final answer is the last \\boxed{}, else the last <answer></answer>, else what follows the last `####`, else
the last number; what a finished <think></think> holds does not count. Two plain numbers are compared exactly,
without commas, currency, percent signs and unit words (that is GSM8K's rule); anything else goes to math-verify.

math-verify stops itself by SIGALRM, so `score` must run in the main thread of its process.
"""

import logging
import re
from fractions import Fraction

_UNSIGNED = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_IN_TEXT = re.compile(rf"{_UNSIGNED}(?:/\d+)?")
_PLAIN = re.compile(rf"(?P<number>[-+]?{_UNSIGNED})(?:\s*/\s*(?P<below>\d+))?\s*(?P<unit>%|[A-Za-z][A-Za-z ./-]*)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_CURRENCY = "$€£"
# Words after a number that change its value, so that are no unit.
_MAGNITUDES = set("hundred thousand million billion trillion dozen".split())
_NOT_UNITS = _MAGNITUDES.union("pi sqrt sin cos tan log ln exp and or".split())
_LONGEST = 400
_SECONDS = 3


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} whose braces balance."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def _numbers(text: str) -> list[str]:
    """The numbers in running text, with their signs; the minus of "5-3" is no sign."""
    found = []
    for match in _IN_TEXT.finditer(text):
        before = text[: match.start()].rstrip(_CURRENCY + " ")
        negative = before.endswith("-") and not re.search(r"[\w).]-$|[\d)]\s+-$", before[-8:])
        found.append(f"-{match[0]}" if negative else match[0])
    return found


def final_answer(text: str) -> str | None:
    """The final answer as written, or None when there is none."""
    text = text.rpartition("</think>")[2].replace("\u2212", "-")
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tags = _TAG.findall(text)
    if tags:
        return tags[-1].strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def plain_number(text: str) -> Fraction | None:
    """The exact value of "$1,234.50", "-3/4", "18 eggs" or "50%" (50); None if it is more than one plain number."""
    if len(text) > _LONGEST:
        return None
    text = _TEXT.sub(r" \1 ", text).replace("\\!", "").replace("{,}", ",").replace("\u2212", "-")
    text = re.sub(r"\\?[$€£]|\\[,;: ()\[\]]", "", text).replace("\\%", "%").strip().rstrip(".").strip()
    match = _PLAIN.fullmatch(re.sub(r"^([-+])\s+", r"\1", text))
    if not match or match["below"] == "0":
        return None
    words = re.findall(r"[a-z]+", (match["unit"] or "").lower())
    if words and (len(words[0]) < 2 or _NOT_UNITS.intersection(words)):
        return None
    return Fraction(match["number"].replace(",", "")) / int(match["below"] or 1)


def _number_among_words(text: str) -> Fraction | None:
    """"The answer is $18.": the only number of a text without formulas."""
    text = _TEXT.sub(r" \1 ", text).replace("\\$", "$").replace("\\%", "%")
    numbers = _numbers(text)
    if len(numbers) != 1 or re.search(r"[\\^_=+*(){}<>|]|[A-Za-z]\s*[-/]|\d[A-Za-z]", text):
        return None
    if _NOT_UNITS.intersection(re.findall(r"[a-z]+", text.lower())):
        return None
    return plain_number(numbers[0])


def _magnitudes(text: str) -> set[str]:
    return _MAGNITUDES.intersection(re.findall(r"[a-z]+", text.lower()))


def _equal_expressions(label: str, answer: str) -> bool:
    """math-verify's judgement. An answer that it cannot read, or that takes it too long, is not equal."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{label}}}", parsing_timeout=_SECONDS)
    if not gold:
        raise ValueError(f"the label {label!r} is not a mathematical expression")
    if not answer or len(answer) > _LONGEST or _magnitudes(answer) != _magnitudes(label):
        return False  # math-verify would drop the "million" of "18 million"
    return bool(verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=_SECONDS), timeout_seconds=_SECONDS))


def equal(label: str, answer: str) -> bool:
    """Whether two final answers are the same number or expression. Raises ValueError for a label that is neither."""
    expected, found = plain_number(label), plain_number(answer)
    if expected is not None and found is None:
        found = _number_among_words(answer)
    if expected is not None and found is not None:
        return found == expected or ("%" in answer and found / 100 == expected)
    return _equal_expressions(label, answer)


def score(response: str, row: dict) -> float:
    """1.0 or 0.0. `row["answer"]` is the label: a number or an expression, bare, boxed, tagged or after `####`.

    Raises ValueError when the label is empty or cannot be read.
    """
    label = (row["answer"] or "").strip()
    if re.search(r"\\boxed\{|<answer>|####", label):
        label = final_answer(label)
    if not label:
        raise ValueError(f"the label {row['answer']!r} holds no answer")
    answer = final_answer(response)
    if answer is None:
        return 0.0
    return float(equal(label, answer))


def warm_up() -> None:
    """Import math-verify now, so that the first sample's time limit does not pay for it."""
    import math_verify  # noqa: F401
