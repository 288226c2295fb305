import json
from pathlib import Path

import pytest

from omnitrain.rewards import math

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k_test.jsonl"

RIGHT = [
    (r"so \boxed{18}", "18"),
    (r"first \boxed{17}, no: \boxed{18}", "18"),
    ("<think>17?</think><answer>18</answer>", "18"),
    (r"<think>\boxed{17}</think><answer>18</answer>", "18"),
    (r"<answer>\boxed{18}</answer>", "18"),
    ("she makes\n#### 18", "18"),
    ("She makes $18.", "18"),
    ("9 * 2 = 18 dollars every day.", "18"),
    ("It is 18.00", "18"),
    (r"\boxed{\$70,000}", "70000"),
    (r"\boxed{70{,}000}", "70000"),
    ("The profit is $70,000.", "70000"),
    (r"\boxed{18 \text{ eggs}}", "18"),
    (r"\boxed{18\text{ dollars per day}}", "18"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    ("it grew by 150%", "150"),
    ("that leaves -3", "-3"),
    ("that leaves \u22123", "-3"),
    ("a loss of -$3", "-3"),
    ("7 - 3", "3"),
    ("7-3", "3"),
    (r"\boxed{0.75}", "3/4"),
    ("it is 3/4", "0.75"),
    ("<answer>The answer is $18.</answer>", "18"),
    ("18", "#### 18"),
    ("18", "<answer>18</answer>"),
    (r"\boxed{\frac{36}{2}}", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{1+x^2}", "x^2+1"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
]

WRONG = [
    ("", "18"),
    ("no idea", "18"),
    ("19", "18"),
    ("18 or 19", "18"),
    (r"\boxed{17} because 18", "18"),
    ("<answer>16</answer> 18", "18"),
    ("<answer></answer> 18", "18"),
    (r"\boxed{2x}", "2"),
    (r"\boxed{18 \text{ million}}", "18"),
    ("<answer>18 million</answer>", "18"),
    ("<answer>between 17 and 18</answer>", "18"),
    (r"\boxed{18 + 1}", "18"),
    (r"\boxed{1/0}", "18"),
    (r"\boxed{0.3333}", "1/3"),
    (r"\boxed{eighteen", "18"),
    ("1" * 5000, "18"),
]


@pytest.mark.parametrize("response, label", RIGHT)
def test_right_answers_in_every_notation_score_one(response, label):
    assert math.score(response, {"answer": label}) == 1.0


@pytest.mark.parametrize("response, label", WRONG)
def test_wrong_answers_score_zero(response, label):
    assert math.score(response, {"answer": label}) == 0.0


def test_an_expression_that_explodes_is_wrong_and_ends_soon():
    assert math.score(r"\boxed{9^{9^{9^{9}}}}", {"answer": "18"}) == 0.0


@pytest.mark.parametrize("label", ["", None, "  ", "<answer></answer>"])
def test_a_label_without_an_answer_is_an_error_not_a_zero(label):
    with pytest.raises(ValueError, match="label"):
        math.score("18", {"answer": label})


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not here")
def test_every_gsm8k_solution_scores_one_and_its_successor_zero():
    for line in GSM8K.read_text().splitlines():
        solution = json.loads(line)["answer"]
        number = solution.rpartition("####")[2].strip().replace(",", "")
        assert math.score(solution, {"answer": number}) == 1.0, solution
        assert math.score(solution, {"answer": str(int(number) + 1)}) == 0.0, solution
        assert math.score(f"It is ${number}.", {"answer": number}) == 1.0, solution
        assert math.score(rf"\boxed{{{number} \text{{ apples}}}}", {"answer": number}) == 1.0, solution
