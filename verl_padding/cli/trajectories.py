"""Calls of a model in ATIF trajectories and in logs of messages, and their tokens: each call is a row of a batch.

ATIF is the Agent Trajectory Interchange Format (github.com/harbor-framework/harbor, rfcs/0001-trajectory-format.md).
Logs of messages are OpenAI's: ``messages``, or ``prompt`` and ``completion`` as TRL and verifiers write them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from verl_padding.errors import PaddingDataError

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One answer of the model, and all that it had read."""

    prompt: str
    """Name of the prompt that its session answers."""
    session: str
    """Name of its session: calls with the same name, of the same prompt, are rows of one session."""
    messages: tuple[Message, ...]
    """The last one is the answer."""
    tools: Sequence[Any] | None = None
    token_ids: tuple[int, ...] | None = None
    """Of what it read and answered, where the trajectory has them."""

    @property
    def has_images(self) -> bool:
        """Or other parts that are not text."""
        parts = (message["content"] for message in self.messages if not isinstance(message["content"], str))
        return any(part["type"] != "text" for content in parts for part in content)


@dataclass(frozen=True, kw_only=True)
class EncodedCall:
    token_ids: tuple[int, ...]
    leaves_out: bool  # whether the chat template shows less than all of the answer: its reasoning, or calls of tools


class ChatEncoder:
    """Tokens of calls: their own, or by a tokenizer and its chat template those of what was read and answered."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer: Any = tokenizer

    def __call__(self, call: ModelCall) -> EncodedCall:
        """
        Raises:
            ValueError: there is no tokenizer, or it has no chat template.
            jinja2.TemplateError: the chat template does not take these messages.
        """
        if call.token_ids is not None:
            return EncodedCall(token_ids=call.token_ids, leaves_out=False)
        if self._tokenizer is None:
            raise ValueError("has messages without token ids: name the model's tokenizer with --tokenizer")
        messages = tuple(map(_as_sent, call.messages)) if self._takes_calls_as_sent else call.messages
        answer = messages[-1]
        prompt, whole = self._texts(messages, call.tools)
        if whole.startswith(prompt):
            response = whole[len(prompt) :]
        else:
            # The template shows what was read otherwise once the answer is there: take the answer from a short chat. It
            # begins where that parts from what asks for an answer, or from another answer.
            user = {"role": "user", "content": "."}
            asked, short = self._texts((user, answer), call.tools)
            _, other = self._texts((user, {"role": "assistant", "content": "\0"}), call.tools)
            response = short[min(first_difference(asked, short), first_difference(other, short)) :]
        sampled = self._ids(response)
        end = self._tokenizer.eos_token_id
        if end in sampled:  # what follows is the template's
            sampled = sampled[: len(sampled) - sampled[::-1].index(end)]
        shown = _without_spaces(response)
        leaves_out = any(_without_spaces(part) not in shown for part in _parts_of_answer(answer))
        return EncodedCall(token_ids=(*self._ids(prompt), *sampled), leaves_out=leaves_out)

    @cached_property
    def _takes_calls_as_sent(self) -> bool:
        """Whether the template shows calls of tools in the form of OpenAI's API alone, as some models' do."""
        function = {"name": "probe", "arguments": {}}
        call = {"id": "000000000", "type": "function", "function": function}
        parsed = {"role": "assistant", "content": "", "tool_calls": [call]}

        def is_shown(answer: Message) -> bool:
            try:
                return "probe" in self._texts(({"role": "user", "content": "."}, answer), None)[1]
            except (TypeError, TemplateError):
                return False

        return not is_shown(parsed) and is_shown(_as_sent(parsed))

    def _texts(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
        """What is read before the last message, and all messages."""
        render = self._tokenizer.apply_chat_template
        before = render(list(messages[:-1]), tools=tools, tokenize=False, add_generation_prompt=True)
        return before, render(list(messages), tools=tools, tokenize=False)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _without_spaces(text: str) -> str:
    """Templates trim texts, and break lines before and after them."""
    return "".join(text.split())


def first_difference(one: str, other: str) -> int:
    """How many characters of two texts are equal up to where they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _parts_of_answer(answer: Message) -> Iterator[str]:
    content = answer["content"] or ""
    yield from [content] if isinstance(content, str) else (part.get("text", "") for part in content)
    yield answer.get("reasoning_content") or ""
    for called in answer.get("tool_calls") or ():
        yield called["function"]["name"]


def is_trajectory(entry: Any) -> bool:
    return isinstance(entry, Mapping) and str(entry.get("schema_version", "")).startswith("ATIF")


def is_log(entry: Any) -> bool:
    return isinstance(entry, Mapping) and ("messages" in entry or isinstance(entry.get("completion"), list))


def calls_of_log(entry: Mapping[str, Any], place: str) -> list[ModelCall]:
    """The calls of one conversation: its assistant messages, in ``completion`` alone if there is one.

    Args:
        place: name of the conversation's session, unless it has one.

    Raises:
        KeyError, TypeError, ValueError: it is not a conversation, or the assistant says nothing in it.
    """
    prompt = entry.get("prompt")
    given, answers = (prompt or [], entry["completion"]) if "completion" in entry else ([], entry["messages"])
    messages = [_message(message) for message in (*given, *answers)]
    name = entry.get("uid", prompt if isinstance(prompt, str) else None)
    tools = entry.get("tools")
    called = [
        at
        for at, message in enumerate(messages)
        if at >= len(given) and message["role"] == "assistant" and message.get("weight", 1)
    ]
    if not called:
        raise ValueError("no message is the assistant's")
    return [
        ModelCall(
            prompt=_name_of(messages[: called[0]]) if name is None else str(name),
            session=str(entry.get("session", place)),
            messages=tuple(messages[: at + 1]),
            tools=json.loads(tools) if isinstance(tools, str) else tools,
        )
        for at in called
    ]


def _message(message: Mapping[str, Any]) -> Message:
    """A message as most chat templates take it: they leave out other roles, and would show None or quote arguments."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    shown = {**message, "role": role, "content": _joined(message.get("content") or "")}
    if message.get("tool_calls"):
        shown["tool_calls"] = [_tool_call(called) for called in message["tool_calls"]]
    return shown


def _as_sent(message: Message) -> Message:
    """A message as OpenAI's API has it, and as the templates of some models, such as DeepSeek's, expect it."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for called in message["tool_calls"]:
        function = called["function"]
        calls.append({**called, "function": {**function, "arguments": json.dumps(function["arguments"])}})
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _tool_call(called: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = called["function"].get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**called, "function": {**called["function"], "arguments": parsed}}


def _name_of(messages: Sequence[Message]) -> str:
    """The same name for the same messages."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def calls_of_trajectories(documents: Mapping[Path, Any]) -> tuple[list[ModelCall], list[str]]:
    """The calls of ATIF trajectories, of each the sub-agents' and continuations' behind its own; and what is not there.

    Args:
        documents: parsed JSON by its file, to which the paths of other trajectories in it are relative. One to which
            another one refers belongs to that one's session, and one that is not among them is read from its file.

    Returns:
        The calls; and the paths to which trajectories refer and which are no files.

    Raises:
        PaddingDataError: the package ``atif`` is not installed, or a trajectory is not of the format.
    """
    try:
        from atif import Trajectory
    except ModuleNotFoundError as error:
        raise PaddingDataError("ATIF trajectories need the package atif: pip install 'verl_padding[atif]'.") from error
    loaded = {path.resolve(): _validated(Trajectory, document, path) for path, document in documents.items()}
    missing: list[str] = []
    refers: dict[Path, list[Path]] = {}
    waiting = list(loaded)
    while waiting:
        path = waiting.pop()
        refers[path] = []
        for named in _paths_in(loaded[path]):
            other = (path.parent / named).resolve()
            if other not in loaded and other.is_file():
                loaded[other] = _validated(Trajectory, json.loads(other.read_bytes()), other)
                waiting.append(other)
            if other in loaded:
                refers[path].append(other)
            else:
                missing.append(named)
    referred = {other for others in refers.values() for other in others}
    calls: list[ModelCall] = []
    for root in (path for path in loaded if path not in referred):
        steps = loaded[root].steps
        first = next((step for step in range(len(steps)) if steps[step].source == "agent"), len(steps))
        prompt = _name_of([message for step in steps[:first] for message in _messages_of_step(step)])
        behind, seen = [root], set()
        while behind:
            path = behind.pop(0)
            if path not in seen:
                seen.add(path)
                calls += _calls_of_trajectory(loaded[path], prompt=prompt, session=str(root))
                behind += refers[path]
    return calls, missing


def _validated(model: Any, document: Any, path: Path) -> Any:
    try:
        return model.model_validate(document)
    except ValueError as error:
        (first, *_) = error.errors() if hasattr(error, "errors") else [{"loc": (), "msg": str(error)}]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise PaddingDataError(f"{path}: not an ATIF trajectory: {where}: {first['msg']}.") from error


def _paths_in(trajectory: Any) -> Iterator[str]:
    """Files of sub-agents' trajectories and of the continuation."""
    for step in trajectory.steps:
        for result in step.observation.results if step.observation else ():
            for reference in result.subagent_trajectory_ref or ():
                if reference.trajectory_path is not None and reference.trajectory_id is None:
                    yield reference.trajectory_path
    if trajectory.continued_trajectory_ref is not None:
        yield trajectory.continued_trajectory_ref
    for embedded in trajectory.subagent_trajectories or ():
        yield from _paths_in(embedded)


def _calls_of_trajectory(trajectory: Any, *, prompt: str, session: str) -> Iterator[ModelCall]:
    messages: list[Message] = []
    for step in trajectory.steps:
        answer, *results = _messages_of_step(step)
        messages.append(answer)
        # Other steps of an agent are not of the model, or are another trajectory's.
        if step.source == "agent" and step.llm_call_count != 0 and not step.is_copied_context:
            metrics = step.metrics
            ids = None
            if metrics and metrics.prompt_token_ids and metrics.completion_token_ids:
                ids = (*metrics.prompt_token_ids, *metrics.completion_token_ids)
            tools = trajectory.agent.tool_definitions
            yield ModelCall(prompt=prompt, session=session, messages=tuple(messages), tools=tools, token_ids=ids)
        messages += results
    for embedded in trajectory.subagent_trajectories or ():
        yield from _calls_of_trajectory(embedded, prompt=prompt, session=session)


def _messages_of_step(step: Any) -> list[Message]:
    """The step's own message, and what came back: of a tool's call as the tool's, else as the user's."""
    own: dict[str, Any] = {"role": "assistant" if step.source == "agent" else step.source}
    own["content"] = _content(step.message)
    if step.reasoning_content:
        own["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        own["tool_calls"] = [
            {
                "id": called.tool_call_id,
                "type": "function",
                "function": {"name": called.function_name, "arguments": called.arguments},
            }
            for called in step.tool_calls
        ]
    messages: list[Message] = [own]
    for result in step.observation.results if step.observation else ():
        if result.content is not None:
            by = {"role": "tool", "tool_call_id": result.source_call_id} if result.source_call_id else {"role": "user"}
            messages.append({**by, "content": _content(result.content)})
    return messages


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts = [{"type": "text", "text": part.text} if part.type == "text" else {"type": part.type} for part in content]
    return _joined(parts)


def _joined(content: Any) -> Any:
    """Parts that are all text as one: templates of models without images take texts alone."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "".join(part["text"] for part in content)
