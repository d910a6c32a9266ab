"""The page of messages: every refusal of the plug-in has its line there, and every line is a message that there is."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pages import DOCS, read
from tests.support.refusals import PACKAGE, REFUSALS, VALUE, with_values_out

WARNINGS, OTHERS = "Warnings in the log", "Messages of verl, Ray and others"
LINE = re.compile(r"^\| (?P<messages>`.+`[^|]*) \| (?P<cause>[^|]{15,}) \| (?P<fix>[^|]{8,}) \|$")
LETTERS = 8
"""A part of a message with fewer letters of its own would be found anywhere."""

TOLD_BY = {
    "The current node timed out during startup": "ray/_private/node.py",
    "Ping failed, invalid value returned from server": None,  # torch's, in C++
    "EADDRINUSE": None,
    "Token authentication is enabled for this Ray cluster": "ray/_private/authentication/authentication_token_setup.py",
    "Disabled critic as algorithm.adv_estimator != gae": "verl/trainer/ppo/utils.py",
    "<> engine is not available": "verl/workers/engine/__init__.py",
    "Unknown advantage estimator simply": "verl/trainer/ppo/core_algos.py",
    "Error in _run_prompt for uid=": "verl/trainer/ppo/v1/agent_loop_tq.py",
    "Unsupported loss mode": "verl/trainer/ppo/core_algos.py",
    "selected terminal groups with no materializable trajectories": "verl/trainer/ppo/v1/replay_buffer.py",
    "Not enough GPUs to run the reward model": "verl/experimental/reward_loop/reward_model.py",
    "Distributed package doesn't have NCCL built in": "torch/distributed/distributed_c10d.py",
    "Total available GPUs <> is less than total desired GPUs": "verl/single_controller/ray/base.py",
    "Fail to clear_data for key-value based backends": "transfer_queue/storage/managers/base.py",
    "InvalidAuthToken: Authentication token is missing or incorrect": None,
    "Unsupported interpolation type verl_padding.version": "omegaconf/base.py",
    "Missing mandatory value": "omegaconf/basecontainer.py",
    "Could not override": "hydra/_internal/defaults_list.py",
    "To append to your config use": "hydra/_internal/config_loader_impl.py",
    "Could not find 'padding/<>'": "hydra/_internal/defaults_list.py",
    "No such file or directory: <>": None,
    "No API key configured": "wandb/sdk/lib/wbauth/authenticate.py",
    "We couldn't connect to": "transformers/utils/hub.py",
    "LocalEntryNotFoundError": "huggingface_hub/errors.py",
    "not supported and SGLang also not Found": "verl/third_party/vllm/__init__.py",
    "No module named 'vllm'": None,
    "operator torchvision::nms does not exist": None,
    "Could not import module '<>'. Are this object's requirements defined correctly?": (
        "transformers/utils/import_utils.py"
    ),
    "not registered, registered agent loops": "verl/experimental/agent_loop/agent_loop.py",
    "must be divisible by minimal possible batch size": "verl/utils/config.py",
    "AF_UNIX path length cannot exceed": "ray/_private/utils.py",
    "<> is not supported": "verl/utils/tracking.py",
}
"""Messages of other packages, and the file that has them; None for those of C libraries and of Python."""
PUT_IN_BY_US = ("verl_padding.version", "'padding/<>'")
"""Ends of such messages that the page has as a user of the plug-in sees them."""


@dataclass(frozen=True)
class Line:
    section: str
    messages: tuple[str, ...]
    """Parts of messages, each with ``<>`` where a value is put in."""


def lines() -> list[Line]:
    found, section, before = [], "", ""
    for line in read(DOCS / "troubleshooting.md").split("\n"):
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            parts = LINE.match(line)
            assert parts, f"not a message, a cause and a fix: {line}"
            assert before.startswith("| "), f"in no table: {line}"
            found.append(Line(section, tuple(map(with_values_out, re.findall(r"`([^`]+)`", parts["messages"])))))
        before = line
    return found


LINES = lines()
OF_REFUSALS = [message for line in LINES if line.section not in (WARNINGS, OTHERS) for message in line.messages]


@cache
def strings_of_the_package() -> str:
    """All strings of the package, one a line, with ``<>`` for what ``logging`` or an f-string puts in."""
    told = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                told.append("".join(str(p.value) if isinstance(p, ast.Constant) else VALUE for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                told.append(re.sub("%[srd]", VALUE, node.value))
    return "\n".join(told)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.place)
def test_every_refusal_has_its_line(refusal):
    if not refusal.carries_another:
        met = [message for message in OF_REFUSALS if message in refusal.shown]
        assert len(met) == 1, f"docs/troubleshooting.md has {met or 'no line'} for: {refusal.shown}"


@pytest.mark.parametrize("message", OF_REFUSALS)
def test_every_line_is_a_refusal_that_there_is(message):
    assert any(message in refusal.shown for refusal in REFUSALS)


def test_a_line_is_found_by_words_of_its_message():
    for line in LINES:
        for message in line.messages:
            assert len(re.findall("[A-Za-z]", message.replace(VALUE, ""))) >= LETTERS, message
    assert len(OF_REFUSALS) == len(set(OF_REFUSALS)) > 100


def test_warnings_are_those_of_the_package():
    warnings = [message for line in LINES if line.section == WARNINGS for message in line.messages]
    assert len(warnings) > 5
    assert [message for message in warnings if message not in strings_of_the_package()] == []


def test_messages_of_other_packages_are_in_their_files():
    others = {message for line in LINES if line.section == OTHERS for message in line.messages}
    assert others == set(TOLD_BY)
    for message, file in TOLD_BY.items():
        if file is not None:
            spec = find_spec(file.split("/")[0])
            assert spec is not None
            assert spec.origin is not None
            text = (Path(spec.origin).parent.parent / file).read_text()
            words = message
            for ours in PUT_IN_BY_US:
                words = words.removesuffix(ours)
            assert all(part.strip() in text for part in words.split(VALUE)), message
