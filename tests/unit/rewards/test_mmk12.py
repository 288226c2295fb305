import pytest

from omnitrain.rewards import mmk12

OPTIONS = {"A": "$6$ cm", "B": "$\\frac{1}{2}$", "C": "A triangle", "D": "AB"}


def score(response, answer, options=OPTIONS):
    return mmk12.score(response, {"answer": answer, "meta": {"options": options} if options else {}})


def right(response, answer, options=OPTIONS):
    return score(response, answer, options) * 1.3 >= 1


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<think>so</think><answer>$\\boxed{B}$</answer>", 1.3),
        ("<answer>B</answer>", 1.15),
        ("\\boxed{B}", 1.15),
        ("The answer is B.", 1.0),
        ("<answer>\\boxed{A}</answer>", 0.3),
        ("<answer>A</answer> \\boxed{B}", 0.15),
        ("<answer>A</answer><answer>\\boxed{B}</answer>", 1.15),
        ("<think>\\boxed{B} <answer>B</answer></think> no idea", 0.0),
        ("", 0.0),
    ],
)
def test_accuracy_counts_1_and_the_form_up_to_0_3_of_1_3(response, expected):
    assert score(response, "B") == pytest.approx(expected / 1.3)


@pytest.mark.parametrize(
    "given", ["B", "b", "(B)", "B.", "B. 1/2", "\\text{B}", "$B$", "**B**", "Option B", "1/2", "0.5", "\\frac12"]
)
def test_a_choice_counts_by_its_letter_or_its_value(given):
    assert right(f"<answer>\\boxed{{{given}}}</answer>", "B")
    assert right(f"<answer>{given}</answer>", "B")
    assert not right(f"<answer>{given}</answer>", "A")


@pytest.mark.parametrize(
    "response",
    [
        "A triangle has three sides",
        "<answer>A triangle</answer>",
        "The answer is A triangle",
        "Choose A better method.",
        "A",
    ],
)
def test_the_english_word_a_is_not_the_letter(response):
    assert right(response, "A") == (response == "A")


def test_an_option_may_be_words_or_look_like_letters():
    assert right("<answer>a triangle.</answer>", "C") and right("<answer>\\boxed{AB}</answer>", "D")
    assert not right("<answer>\\boxed{AB}</answer>", "A")


def test_a_label_that_is_the_value_is_met_by_its_letter():
    assert right("<answer>\\boxed{A}</answer>", "6 cm") and not right("<answer>\\boxed{B}</answer>", "6 cm")


def test_several_right_letters_must_all_be_named():
    assert right("<answer>\\boxed{A, C}</answer>", "AC") and right("<answer>C and A</answer>", "A,C")
    assert not right("<answer>\\boxed{A}</answer>", "AC") and not right("<answer>\\boxed{ABC}</answer>", "AC")


@pytest.mark.parametrize(
    "answer, given, expected",
    [
        ("36", "36", True),
        ("36^\\circ", "36°", True),
        ("$\\sqrt{3}$", "\\sqrt 3", True),
        ("2*3", "6", True),
        ("2*3", "23", False),
        ("-2", "2", False),
        ("x=5", "5", True),
        ("isosceles triangle", "Isosceles  Triangle", True),
        ("isosceles triangle", "right triangle", False),
        ("B", "B", True),
        ("B", "C", False),
        ("AB", "AB", True),
    ],
)
def test_without_options_it_is_the_number_the_formula_or_the_words(answer, given, expected):
    assert right(f"<answer>The answer is $\\boxed{{{given}}}$</answer>", answer, None) is expected


@pytest.mark.parametrize("answer", [None, "", " "])
def test_a_missing_label_is_an_error_and_not_a_zero(answer):
    with pytest.raises(ValueError, match="holds no answer"):
        score("B", answer)


def test_it_reads_the_options_that_the_converter_writes():
    from omnitrain.data.converters.mmk12 import options

    question = "How long is the side? ( )\nA. $3$ cm  B. $4$ cm\nC. $5$ cm  D. A side has no length"
    assert right("<answer>\\boxed{4}</answer>", "B", options(question))
    assert not right("<answer>\\boxed{5}</answer>", "B", options(question))
    assert right("<answer>A side has no length</answer>", "D", options(question))
