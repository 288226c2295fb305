import pytest

from omnitrain.rewards import choice

LABEL = {"answer": "<answer>B</answer>"}


@pytest.mark.parametrize(
    "response, value",
    [
        ("<think>it barks</think><answer>B</answer>", 1.0),
        ("<answer> b </answer>", 1.0),
        ("<answer>(B)</answer>", 1.0),
        ("<answer>B.</answer>", 1.0),
        ("<ANSWER>\nB\n</ANSWER>", 1.0),
        ("<answer>B</answer> so <answer>B</answer>", 1.0),
        ("<answer>A</answer>", 0.0),
        ("B", 0.0),
        ("", 0.0),
        ("<answer>B", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>A</answer><answer>B</answer>", 0.0),
        ("<answer></answer><answer>B</answer>", 0.0),
        ("<answer>A or B</answer>", 0.0),
        ("<answer>A<answer>B</answer>", 0.0),
    ],
)
def test_one_answer_tag_with_the_labels_letter_scores_one_and_all_else_zero(response, value):
    assert choice.score(response, LABEL) == value


@pytest.mark.parametrize("label", ["", None, "B", "<answer></answer>", "<answer>A</answer><answer>B</answer>"])
def test_a_label_without_one_tag_is_an_error_not_a_zero(label):
    with pytest.raises(ValueError, match="label"):
        choice.score("<answer>B</answer>", {"answer": label})
