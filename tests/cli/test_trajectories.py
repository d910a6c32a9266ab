"""Rows of ATIF trajectories and of logs of messages, counted by hand with a tokenizer of bytes.

Its chat template writes a message of n bytes by a role of r letters as r + n + 4 tokens; 11 ask for an answer.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_plan_command import plan_of, refused, run, write_lines
from verl_padding.cli.rows_file import RowsFile, read_batches, read_rows
from verl_padding.cli.trajectories import ChatEncoder
from verl_padding.errors import PaddingDataError
from verl_padding.local.tiny_models import make_byte_tokenizer

SHAPE = ("--dp", 1, "--mini-batch", 1, "--n", 2, "--budget", 4096, "--packer", "plan")
ENCODE = ChatEncoder(make_byte_tokenizer())
TALK = [
    {"role": "user", "content": "2 + 2?"},  # 14 tokens
    {"role": "assistant", "content": "4"},  # 14, of which 2 are the answer and its end
    {"role": "user", "content": "+ 3?"},  # 12
    {"role": "assistant", "content": "7"},
]
FIRST, SECOND = 14 + 11 + 2, 14 + 14 + 12 + 11 + 2


def encoder(template: str) -> ChatEncoder:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer)


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for t in m.tool_calls or [] %}<{{ t.function.name }}:{{ t.function.arguments.n }}>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reasoning is shown in the last message alone, as Qwen3 and others do."""


def log(*entries: dict[str, Any], encode: ChatEncoder | None = ENCODE) -> RowsFile:
    lines = [json.dumps(entry).encode() for entry in entries]
    return read_rows(lines, name="log.jsonl", count_tokens=None, encode=encode)


def test_each_answer_is_a_row_that_begins_with_all_that_the_model_read():
    batch = log({"messages": TALK}, {"messages": TALK[:2]})
    assert batch.rows.tokens_R == (FIRST, SECOND, FIRST)
    assert batch.rows.extends_R == (None, 0, None)
    # The same first messages are the same prompt; each line is a session of its own.
    prompt = batch.rows.prompt_R[0]
    assert batch.rows.session_R == (f"{prompt}_0", f"{prompt}_0", f"{prompt}_1")
    assert batch.lines_R == (0, 1, 2)
    assert batch.notes == ()
    assert batch.rows.forest is not None
    # In trees the second session's only row is the first one's; the second answer shares all of the first row.
    assert sorted(batch.rows.forest.shared_R.tolist()) == [0, FIRST, FIRST]


def test_prompts_and_sessions_may_be_named_and_answers_in_a_prompt_are_no_rows():
    sub_agent = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    batch = log(
        {"messages": TALK[:2], "uid": "sum", "session": "a"},
        {"messages": sub_agent, "uid": "sum", "session": "a"},
        {"prompt": TALK[:3], "completion": TALK[3:], "uid": "sum", "session": "b", "reward": 1.0},
        {"messages": [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]], "prompt": "sum"},
    )
    assert batch.rows.session_R == ("sum_0", "sum_0", "sum_1", "sum_2")
    assert batch.rows.tokens_R == (FIRST, 9 + 11 + 2, SECOND, SECOND)


def test_messages_are_shown_to_the_template_as_it_expects_them():
    call = {"id": "c", "type": "function", "function": {"name": "sum", "arguments": '{"n": 12}'}}
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2?"}]
    tool = {"role": "tool", "tool_call_id": "c", "content": "4"}
    talk = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}, tool]
    batch = log({"messages": [*talk, TALK[1]]}, encode=encoder(THINKING))
    called = len("<sum:12>") + 1
    assert batch.rows.tokens_R[0] == len("system") + 6 + 4 + 11 + called
    assert batch.rows.tokens_R[1] == batch.rows.tokens_R[0] + 1 + len("tool") + 1 + 4 + 11 + 2
    assert batch.notes == ()


def test_reasoning_that_the_template_drops_from_earlier_answers_is_shared_by_trees_and_not_by_chains():
    talk = [TALK[0], {**TALK[1], "reasoning_content": "hmm"}, *TALK[2:]]
    rows = log({"messages": talk}, encode=encoder(THINKING)).rows
    assert rows.tokens_R == (FIRST + len("<think>hmm</think>"), SECOND)
    assert rows.extends_R == (None, None)
    assert rows.forest is not None
    assert rows.forest.shared_R.sum() == 14 + 11  # up to <think>, or 4


def test_an_answer_that_the_template_shows_otherwise_than_it_asks_for_it_follows_what_it_asks():
    opens_thought = THINKING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}").replace(
        "assistant\n{% endif %}", "assistant\n<think>{% endif %}"
    )
    batch = log({"messages": TALK[:2]}, encode=encoder(opens_thought))
    assert batch.rows.tokens_R == (FIRST + len("<think>"),)
    thought = {"role": "assistant", "content": "hmm</think>4"}
    (note,) = log({"messages": [TALK[0], thought]}, encode=encoder(opens_thought)).notes
    assert "1 of 1 answer" in note


@pytest.mark.parametrize("condition", ["m.content is none", "m.tool_calls"])
def test_calls_of_tools_are_shown_to_templates_that_take_them_as_the_api_has_them(condition):
    as_sent = (
        "{% for m in messages %}{% if " + condition + " %}{{ m.tool_calls[0].function.name + ':' + "
        "m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "sum", "arguments": '{"n": 12}'}}
    talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *TALK[2:]]
    batch = log({"messages": talk}, encode=encoder(as_sent))
    first = len("2 + 2?") + 1 + len('sum:{"n": 12}') + 1
    assert batch.rows.tokens_R == (first, first + len("+ 3?") + 1 + 2)
    assert batch.notes == ()


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({"messages": TALK[:1]}, "no message is the assistant's"),
        ({"messages": [{"content": "?"}]}, "KeyError: 'role'"),
        ({"messages": "hi"}, "TypeError"),
        ({"messages": TALK, "tools": "x"}, "JSONDecodeError"),
    ],
)
def test_a_line_that_is_no_conversation_is_refused_with_its_number(entry, cause):
    with pytest.raises(PaddingDataError, match=rf"log\.jsonl, line 2 \(row number 1\): not a row \(.*{cause}"):
        log({"messages": TALK}, entry)


def test_without_a_tokenizer_and_with_a_template_that_refuses_it_is_said():
    with pytest.raises(PaddingDataError, match=r"log\.jsonl, call 0: .*--tokenizer"):
        log({"messages": TALK}, encode=None)
    with pytest.raises(PaddingDataError, match=r"call 0: TemplateError: no"):
        log({"messages": TALK}, encode=encoder("{{ raise_exception('no') }}"))
    with pytest.raises(PaddingDataError, match="rows and conversations"):
        log({"messages": TALK}, {"prompt": "a", "session": 0, "tokens": 5})


USER, ANSWER = {"source": "user", "message": "2 + 2?"}, {"source": "agent", "message": "4"}


def trajectory(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": numbered, **more}


def results(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"observation": {"results": [{"content": content, **more} for content in contents]}}


def read(folder: Path, *, encode: ChatEncoder | None = ENCODE, **files: Any) -> RowsFile:
    for name, document in files.items():
        place = folder / f"{name.replace('__', '/')}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(document, indent=1))
    (batch,) = read_batches(folder, None, encode)
    return batch


def lengths(batch: RowsFile) -> Sequence[int]:
    return batch.rows.tokens_R


def test_each_step_of_the_model_is_a_row_and_what_came_back_is_a_tools_or_the_users_message(tmp_path):
    call = {"tool_call_id": "c", "function_name": "sum", "arguments": {"n": 12}}
    steps = (
        {"source": "system", "message": "add"},
        USER,
        {"source": "agent", "message": "", "tool_calls": [call], **results("4", source_call_id="c")},
        {"source": "agent", "message": "ok", "llm_call_count": 0, **results("done")},
        {**ANSWER, "reasoning_content": "hmm"},
    )
    batch = read(tmp_path, encode=encoder(THINKING), one=trajectory(*steps))
    called = len("<sum:12>")
    before = (6 + 3 + 4) + 14
    first = before + 11 + called + 1
    second = before + (9 + called + 4) + (4 + 1 + 4) + (9 + 2 + 4) + (4 + 4 + 4) + 11 + len("<think>hmm</think>") + 2
    assert lengths(batch) == (first, second)
    assert batch.rows.extends_R == (None, 0)


def test_recorded_token_ids_are_taken_as_they_are_and_need_no_tokenizer(tmp_path):
    def step(prompt: list[int], completion: list[int]) -> dict[str, Any]:
        return {**ANSWER, "metrics": {"prompt_token_ids": prompt, "completion_token_ids": completion}}

    document = trajectory(USER, step([1, 2, 3], [4, 5]), step([1, 2, 3, 4, 6], [7]), step([1, 2, 3, 4, 5, 8], [9]))
    batch = read(tmp_path, encode=None, one=document)
    assert lengths(batch) == (5, 6, 7)
    assert batch.rows.extends_R == (None, None, 0)
    assert batch.rows.forest is not None
    assert batch.rows.forest.shared_R.tolist() == [5, 0, 4]


def test_sub_agents_and_continuations_are_rows_of_the_session_and_copied_steps_are_none(tmp_path):
    def refers(**reference: str) -> dict[str, Any]:
        return {**ANSWER, **results(None, subagent_trajectory_ref=[reference])}

    embedded = trajectory({**USER, "message": "a"}, ANSWER, trajectory_id="sub")
    main = trajectory(
        USER,
        refers(trajectory_id="sub"),
        refers(trajectory_path="inner/b.json"),
        refers(trajectory_path="s3://elsewhere/c.json"),
        subagent_trajectories=[embedded],
        continued_trajectory_ref="cont.json",
    )
    copied = {**ANSWER, "is_copied_context": True}
    batch = read(
        tmp_path,
        main=main,
        cont=trajectory({**USER, "message": "so far"}, copied, USER, ANSWER),
        inner__b=trajectory({**USER, "message": "b"}, ANSWER),
        again=trajectory(USER, ANSWER),
        result={"reward": 1},
    )
    sub = 4 + 1 + 4 + 11 + 2
    of_main = [FIRST, FIRST + 1 + 11 + 2, FIRST + 1 + 14 + 11 + 2, sub, sub, 14 + 14 + 14 + 11 + 2]
    by_session: dict[str, list[int]] = {}
    for session, tokens in zip(batch.rows.session_R, lengths(batch), strict=True):
        by_session.setdefault(session, []).append(tokens)
    assert sorted(by_session.values()) == sorted([[FIRST], of_main])
    assert len(set(batch.rows.prompt_R)) == 1
    (note,) = batch.notes
    assert "s3://elsewhere/c.json" in note


def test_a_document_that_is_not_of_the_format_is_refused_with_its_file_and_field(tmp_path):
    with pytest.raises(PaddingDataError, match=r"one\.json: not an ATIF trajectory: steps\.0\.source: "):
        read(tmp_path, one=trajectory({**USER, "source": "me"}))
    (tmp_path / "one.json").write_text("{")
    with pytest.raises(PaddingDataError, match=r"one\.json: not JSON"):
        read(tmp_path)


def test_the_command_compares_what_trajectories_share_and_names_images(tmp_path, tiny_model):
    image = [{"type": "text", "text": "2"}, {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
    lines = [trajectory(USER, ANSWER, USER, ANSWER), trajectory(USER, ANSWER, {**USER, "message": image}, ANSWER)]
    file = write_lines(tmp_path / "rows.jsonl", lines)
    shape = (*SHAPE, "--sharing", "trees", "--compare", "--tokenizer", tiny_model)
    shown = plan_of(file, *shape)
    rows = [
        row for step in shown["steps"] for rank in step["ranks"] for m in rank["micro_batches"] for row in m["rows"]
    ]
    assert sorted(rows) == [0, 1, 2, 3]
    assert list(shown["comparison"]) == ["verl", "plan_without_sharing", "plan_with_chains", "plan"]
    tokens = [column["computed_tokens"] for column in shown["comparison"].values()]
    assert tokens[0] == tokens[1] > tokens[2] > tokens[3]
    assert any(note.startswith("Images count") for note in shown["notes"])
    assert "--tokenizer" in refused(file, *SHAPE)
    one = tmp_path / "one.json"
    one.write_text(json.dumps(lines[0], indent=1))
    assert run(one, *SHAPE, "--tokenizer", tiny_model).stdout.startswith("one.json: 1 rank")
