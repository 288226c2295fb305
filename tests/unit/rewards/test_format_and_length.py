from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from omnitrain.recipe.rewards import FormatReward, LengthReward, check_rewards
from omnitrain.rewards import load_reward


def format_score(response, pattern=None):
    return load_reward(FormatReward(kind="format", pattern=pattern))(response, {})


@pytest.mark.parametrize(
    "response, value",
    [
        ("<think>a\nb</think>\n<answer>B</answer>\n", 1.0),
        ("<think>a</think> so <answer>B</answer>", 0.0),
        ("<think>a</think><answer>B</answer> done", 0.0),
        ("<think>a</think><answer>B</answer><answer>C</answer>", 0.0),
        ("<think>a<think>b</think><answer>B</answer>", 0.0),
        ("<answer>B</answer><think>a</think>", 0.0),
        ("<think> </think><answer>B</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<answer>B</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_the_whole_template_and_each_tag_once(response, value):
    assert format_score(response) == value


def test_a_pattern_must_match_the_whole_response_over_lines():
    assert format_score("so\nAnswer: 3", r".*Answer: \d") == 1.0
    assert format_score("so\nAnswer: 3!", r".*Answer: \d") == 0.0


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValidationError, match="is not a regular expression: unterminated"):
        FormatReward(kind="format", pattern="[a")


@pytest.mark.parametrize("tokens, value", [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (200, -1.0)])
def test_length_falls_from_0_to_minus_1_over_the_buffer(tokens, value):
    facts = {"response_tokens": tokens, "max_new_tokens": 100}
    assert load_reward(LengthReward(kind="length", buffer=20))("", facts) == value
    longer = facts | {"max_new_tokens": 1000}
    assert load_reward(LengthReward(kind="length", buffer=20, limit=100))("", longer) == value


@pytest.mark.parametrize(
    "options, says",
    [
        ({"buffer": 65}, "buffer = 65 is more than rollout.max_new_tokens = 64"),
        ({"buffer": 16, "limit": 80}, "starts at limit - buffer = 64 tokens.*= 64 ends every response before"),
    ],
)
def test_a_penalty_that_no_response_can_get_is_refused(options, says):
    with pytest.raises(ValueError, match=rf"rewards\[0\].*{says}"):
        check_rewards([LengthReward(kind="length", **options)], 64)
    check_rewards([LengthReward(kind="length", buffer=64), LengthReward(kind="length", buffer=17, limit=80)], 64)


def test_a_buffer_beyond_the_limit_is_refused():
    with pytest.raises(ValidationError, match="buffer = 9 is more than limit = 8"):
        LengthReward(kind="length", buffer=9, limit=8)


def test_a_reward_of_pictures_is_refused_for_a_model_that_writes_text():
    with pytest.raises(ValueError, match=r'rewards\[0\].kind = "genrm_ocr" reads pictures'):
        check_rewards([SimpleNamespace(kind="genrm_ocr")], 64)
