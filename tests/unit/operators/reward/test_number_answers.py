"""``function: number``: the number that an answer gives, however it is written."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.functions import Score, number, number_in
from laminar.operators.reward.operator import build
from laminar.schemas.errors import ConfigError
from tests.support import sample
from tests.support.dataflow import World


def score(text: str, reference: str | None = "22", finish: str = "stop", **options: Any) -> Score:
    return number(sample.completed(sample.prompt(reference=reference), text=text, finish=finish), **options)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("22", "22"),
        ("22.", "22"),
        ("  22\n", "22"),
        ("17 + 5 = 22", "22"),
        ("The answer is **22**.", "22"),
        ("$22!", "22"),
        ("22%", "22"),
        ("+22", "22"),
        ("22.0", "22.0"),
        (".5", ".5"),
        ("-4", "-4"),
        ("\u22124", "-4"),
        ("9-3", "3"),
        ("9 - 3 = -6", "-6"),
        ("x-3", "3"),
        ("(-3)", "-3"),
        ("1,250", "1250"),
        ("12,345,678.50", "12345678.50"),
        ("1,2500", "2500"),
        ("one of 3, 4", "4"),
        ("v1.2.3", "3"),
        ("#### 22 (of 30)", "22"),
        ("so \\boxed{22}, since 17 and 5", "22"),
        ("\\boxed{17}, no, \\boxed{22}, as 17 + 5", "22"),
        ("7 ####", "7"),
        ("twenty-two", None),
        ("", None),
        ("\u0662\u0662", None),
        ("9" * 101, None),
        ("9" * 50, "9" * 50),
    ],
)
def test_the_number_of_an_answer(text: str, found: str | None) -> None:
    assert number_in(text) == (None if found is None else Decimal(found))


def test_the_first_number_can_be_meant() -> None:
    assert number_in("22, since 17 + 5", pick="first") == 22
    assert score("22, since 17 + 5").reward == 0.0
    assert score("22, since 17 + 5", pick="first").reward == 1.0


def test_a_reward_is_one_for_the_right_number_and_zero_for_another_or_none() -> None:
    assert score("It is 22.") == Score(reward=1.0, components={"number_found": 1.0})
    assert score("It is 23.") == Score(reward=0.0, components={"number_found": 1.0})
    assert score("It is a lot.") == Score(reward=0.0, components={"number_found": 0.0})
    assert score("22.004").reward == 0.0
    assert score("22.004", tolerance=0.01).reward == 1.0
    assert score("1250", reference="1,250").reward == 1.0


def test_f7_a_truncated_answer_is_not_right_unless_it_may_be() -> None:
    assert score("22", finish="length").reward == 0.0
    assert score("22", finish="length", require_stop=False).reward == 1.0


@pytest.mark.parametrize("reference", [None, "twenty-two"])
def test_f4_without_a_number_to_compare_with_there_is_no_reward(reference: str | None) -> None:
    found = score("22", reference=reference)
    assert found.reward is None
    assert "reference answer" in (found.failure or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pik": "last"}, "operators.reward.options: unknown 'pik' (valid for number: pick, tolerance, require_stop)"),
        ({"pick": "middle"}, "operators.reward.options.pick: Input should be 'last' or 'first', not 'middle'"),
        ({"tolerance": "some"}, "operators.reward.options.tolerance: "),
    ],
)
def test_options_that_cannot_be_are_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RewardConfig(function="number", options=options), World().context("reward"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
