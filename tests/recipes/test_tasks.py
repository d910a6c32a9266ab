"""The recipe's tasks as state machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_padding.recipes.context_reset.tasks import GSM8K_SOURCE, TASKS, NotedMath, SymbolPath, task_of

PATHS = st.text("12", min_size=1, max_size=6)


@given(path=PATHS, right=st.integers(0, 6))
def test_a_path_is_walked_until_the_first_wrong_reply(path, right):
    task = SymbolPath(path)
    turns = 0
    while not task.done:
        (message,) = task.messages()
        assert message["content"] == "ab"[int(path[turns]) - 1] * 8
        task.react(path[turns] if turns < right else "9")
        turns += 1
    walked = min(right, len(path))
    assert turns == min(right + 1, len(path))
    assert task.reward == pytest.approx(0.9 * walked / len(path) + 0.1)
    assert task.info["acc"] == float(walked == len(path))


@pytest.mark.parametrize(("reply", "reward"), [("x", 0.0), ("", 0.0), ("4", 0.1), ("\u0664", 0.0), ("1", 1.0)])
def test_form_is_worth_a_little_and_the_right_number_all(reply, reward):
    task = SymbolPath("1")
    task.react(reply)
    assert task.done
    assert task.reward == pytest.approx(reward)


@pytest.mark.parametrize("path", ["", "3", "0", "1a"])
def test_a_path_of_other_digits_is_refused(path):
    with pytest.raises(ValueError, match="must be digits from 1 to 2"):
        SymbolPath(path)


def test_math_carries_notes_from_turn_to_turn_and_nothing_else():
    task = NotedMath("How many?", "42")
    assert "How many?" in task.messages()[0]["content"]
    assert "Note" not in task.messages()[0]["content"]
    task.react("  There are six rows of seven. ")
    (message,) = task.messages()
    assert "Note 1: There are six rows of seven.\n" in message["content"]
    assert not task.done
    assert task.reward == 0.0
    task.react("So it is\n#### 42")
    assert task.done
    assert task.reward == 1.0


def test_a_wrong_final_answer_earns_nothing():
    task = NotedMath("How many?", "42")
    task.react("#### 41")
    assert task.done
    assert task.reward == 0.0


def test_each_source_has_its_task_and_an_unknown_one_is_refused_with_the_choices():
    row = {
        "data_source": GSM8K_SOURCE,
        "raw_prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "1"},
    }
    assert isinstance(task_of(row), NotedMath)
    with pytest.raises(
        ValueError, match=r"data_source='other': no task for it\. Choices: verl_padding/symbol_path, "
    ) as refusal:
        task_of(row | {"data_source": "other"})
    assert all(source in str(refusal.value) for source in TASKS)
