"""The rollout server, used as the plain object it is before Ray wraps it."""

import asyncio
import gc
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_padding.on_cpu.rollout.server import TransformersServer
from verl_padding.on_cpu.tiny_models import make_tiny_model

CONFIG = SimpleNamespace(
    prompt_length=32, response_length=16, ignore_eos=False, seed=1, temperature=1.0, dtype="float64"
)
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1, "logprobs": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture, whose weights have other names in a checkpoint and in the trainer."""
    folder = make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def server(model):
    """It has no weights yet."""
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    return TransformersServer(CONFIG, SimpleNamespace(hf_config=model.config, tokenizer=tokenizer))


def in_a_loop(test):
    """A test as pytest runs it."""

    @wraps(test)
    def run(**fixtures):
        async def main():
            await test(**fixtures)

        asyncio.run(main())

    return run


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@in_a_loop
async def test_a_request_is_answered_by_its_id_at_any_time_by_any_server(model, server):
    prompts = {str(n): [[5, 6], [7], [5, 6], [8, 9, 10]][n % 4] for n in range(24)}
    answers = []
    for names, pause in ((list(prompts), 0.0), (list(reversed(prompts)), 0.002)):
        await server.load_weights(weights(model), global_steps=1)
        running = {}
        for name in names:
            running[name] = asyncio.create_task(server.generate(prompts[name], PARAMS, name))
            await asyncio.sleep(pause)
        outputs = {name: await task for name, task in running.items()}
        # as rows hold them
        float32 = {name: torch.tensor(outputs[name].log_probs).tolist() for name in names}
        answers.append({name: (outputs[name].token_ids, float32[name]) for name in names})
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens, _ in answers[0].values()}) == 24, "no two are alike"


def live_models(kind):
    gc.collect()
    return sum(isinstance(thing, kind) for thing in gc.get_objects())


@in_a_loop
async def test_new_weights_are_used_and_old_ones_are_gone(model, server):
    greedy = PARAMS | {"temperature": 0.0}
    old = live_models(type(model))
    await server.load_weights(weights(model), global_steps=1)
    first = await server.generate([1, 2, 3], greedy, "")
    assert live_models(type(model)) == old + 1
    expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1).max()
    assert first.log_probs[0] == pytest.approx(expected.item(), abs=1e-5)
    await server.sleep()
    assert live_models(type(model)) == old
    with pytest.raises(RuntimeError, match="sleeps"):
        await server.generate([1, 2, 3], greedy, "")
    changed = weights(model)
    changed["lm_head.weight"].neg_()
    await server.load_weights(changed, global_steps=2)
    second = await server.generate([1, 2, 3], greedy, "")
    assert second.token_ids != first.token_ids
    assert second.extra_fields["global_steps"] == 2


@in_a_loop
async def test_an_abort_returns_what_there_is_and_holds_later_requests(model, server):
    await server.load_weights(weights(model), global_steps=1)
    # too long to be finished before the abort
    endless = PARAMS | {"max_tokens": 3000, "ignore_eos": True}
    running = [asyncio.create_task(server.generate([n], endless, "")) for n in range(3)]
    await asyncio.sleep(1)
    waiting = asyncio.create_task(server.generate([3], endless, ""))
    await asyncio.sleep(0)

    await server.abort_all_requests()

    outputs = await asyncio.wait_for(asyncio.gather(*running), timeout=60)
    assert (await waiting).stop_reason == "aborted"
    assert all(output.stop_reason == "aborted" for output in outputs)
    assert all(0 < len(o.token_ids) == len(o.log_probs) < 3000 for o in outputs)
    held = asyncio.create_task(server.generate([1], PARAMS, ""))
    await server.sleep()
    await asyncio.sleep(0.1)
    assert not held.done()
    await server.load_weights(weights(model), global_steps=2)
    await server.resume_generation()
    output = await asyncio.wait_for(held, timeout=60)
    assert output.stop_reason == "completed"
    assert output.extra_fields["global_steps"] == 2


@pytest.mark.parametrize(
    ("prompt", "params", "tokens"),
    [(1, {}, 16), (40, {}, 8), (50, {}, 1), (8, {"max_tokens": 9}, 9)],
)
@in_a_loop
async def test_a_response_has_the_room_that_its_prompt_leaves(
    model, server, prompt, params, tokens
):
    await server.load_weights(weights(model))
    output = await server.generate([5] * prompt, PARAMS | {"ignore_eos": True} | params, "")
    assert len(output.token_ids) == tokens


@in_a_loop
async def test_requests_that_fail_raise_and_later_ones_are_answered(model, server):
    await server.load_weights(weights(model))
    failing = [server.generate([10**6], PARAMS, str(n)) for n in range(2)]
    errors = await asyncio.gather(*failing, return_exceptions=True)
    assert all(isinstance(error, IndexError) for error in errors)
    assert (await server.generate([1], PARAMS, "")).token_ids
