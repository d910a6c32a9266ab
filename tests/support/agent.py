"""An agent whose sessions have no, one or several rows, by its place in the data: the same in every
run."""

import asyncio
import hashlib
import random
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from tests.support.probe import text_of

MAX_TURNS = 4
LONELY_STEP = 2  # step in which a single session of a single prompt yields a single row
FAILING_STEP = 3  # step in which some sessions raise


def _hash(*parts):
    return int(hashlib.md5("-".join(map(str, parts)).encode()).hexdigest(), 16)


def fields_of(prompt_ids, response_ids, answer):
    """Of a row, from the rollout's answer."""
    return {
        "prompt_ids": list(prompt_ids),
        "response_ids": response_ids,
        "response_mask": [1] * len(response_ids),
        "response_logprobs": answer.log_probs[: len(response_ids)] if answer.log_probs else None,
        "num_turns": 2,
        "metrics": {},
        "extra_fields": dict(answer.extra_fields),
    }


def reward_letters(tokenizer, output):
    text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    output.reward_score = sum(letter.isalpha() for letter in text) / max(1, len(text))
    output.extra_fields["reward_extra_info"] = {"acc": output.reward_score}


class VaryingTurns(AgentLoopBase):
    """Each turn is a row of its own, with a longer context than the one before; a picture is in the
    first alone.

    Args:
        mishaps: whether the lonely and the failing step are as their names say.
    """

    def __init__(self, *args, mishaps, **kwargs):
        super().__init__(*args, **kwargs)
        self.mishaps = mishaps

    async def run(self, sampling_params, **kwargs):
        index, session, step = kwargs["index"], kwargs["session_id"], kwargs["global_steps"]
        turns = 1 + _hash(index, session, step) % MAX_TURNS
        if self.mishaps and step == LONELY_STEP:
            turns = int(session == 0 and index == min(self.first_prompts_of(step)))
        if self.mishaps and step == FAILING_STEP and _hash("fail", index, session) % 5 == 0:
            raise RuntimeError("this session fails on purpose")
        first = kwargs["raw_prompt"][-1]
        outputs = await self._play(
            [self._turn(sampling_params, self._message(first, turn)) for turn in range(turns)]
        )
        if outputs:
            reward_letters(self.tokenizer, outputs[-1])
        return outputs

    async def _play(self, turns):
        return [await turn for turn in turns]

    def _message(self, first, turn):
        return {"role": "user", "content": text_of(first) + "x" * (7 * turn)} if turn else first

    async def _turn(self, sampling_params, message):
        media = await self.process_multi_modal_info([message])
        prompt_ids = await self.ct_build_initial_tokens([message], images=media.get("images"))
        answer = await self.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params=dict(sampling_params),
            image_data=media.get("images"),
        )
        ids = answer.token_ids[: self.rollout_config.response_length]
        return AgentLoopOutput(**fields_of(prompt_ids, ids, answer), multi_modal_data=media)

    def first_prompts_of(self, step):
        """Indices of the prompts of a training step (no shuffle; validation does not get here at
        such a step)."""
        size = self.config.data.train_batch_size
        return range((step - 1) * size, step * size)


class SubagentsInAnyOrder(VaryingTurns):
    """The turns of a session side by side: sub-agents who are all asked the same, after a while
    that no run repeats."""

    async def _play(self, turns):
        return [*await asyncio.gather(*turns)]

    def _message(self, first, turn):
        return first

    async def _turn(self, sampling_params, message):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.3))
        return await super()._turn(sampling_params, message)


def rows_of_step(step):
    """Rows of a training step, of which the sessions at the front bring one each."""
    return (13, 1, 30)[step % 3]


class FewRows(AgentLoopBase):
    """Rows of drawn tokens, whose number in a step is :func:`rows_of_step`; the model is not
    asked."""

    async def run(self, sampling_params, **kwargs):
        index, session, step = kwargs["index"], kwargs["session_id"], kwargs["global_steps"]
        prompt = index % self.config.data.train_batch_size
        if prompt * self.rollout_config.n + session >= rows_of_step(step):
            return []
        draw = random.Random(_hash(index, session, step))
        prompt_ids, ids = (
            [draw.randrange(200) for _ in range(draw.randint(1, most))]
            for most in (60, self.rollout_config.response_length)
        )
        # As verl's rollout servers say: the weights that the answer comes from.
        weights = {"min_global_steps": step, "max_global_steps": step}
        answer = TokenOutput(token_ids=ids, extra_fields=weights)
        output = AgentLoopOutput(**fields_of(prompt_ids, ids, answer), reward_score=draw.random())
        output.extra_fields["reward_extra_info"] = {"acc": output.reward_score}
        return [output]


class WeightedOutput(AgentLoopOutput):
    loss_weight: float


class GrowingContext(AgentLoopBase):
    """Each model call is a row that begins with the whole row before it, as a gateway records them.

    The later a row comes, the less it weighs.

    Args:
        equal_of_three: of each three prompts, so many earn 1 in every session.
    """

    def __init__(self, *args, equal_of_three=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.equal_of_three = equal_of_three

    async def run(self, sampling_params, **kwargs):
        index, session, step = kwargs["index"], kwargs["session_id"], kwargs["global_steps"]
        draw = random.Random(_hash("grow", index, session, step))
        context = await self.ct_build_initial_tokens([kwargs["raw_prompt"][-1]])
        outputs = []
        for _ in range(draw.randint(1, MAX_TURNS)):
            answer = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=context, sampling_params=dict(sampling_params)
            )
            ids = answer.token_ids[: self.rollout_config.response_length]
            outputs.append(
                WeightedOutput(
                    **fields_of(context, ids, answer), loss_weight=1 / (1 + len(outputs))
                )
            )
            context = context + ids + [draw.randrange(5, 200) for _ in range(draw.randint(1, 3))]
        return self._rewarded(outputs, index)

    def _rewarded(self, outputs, index):
        reward_letters(self.tokenizer, outputs[-1])
        if index % 3 < self.equal_of_three:
            outputs[-1].reward_score = 1.0
        return outputs


class Snapshots(GrowingContext):
    """Each model call leaves a row with all that its session has said so far as the response, in
    which what the environment says has no loss.

    Of a session's first row only the first token trains: it was cut off there. A session of two
    calls or more ends with its first answer again, without its last token, if that has several.
    """

    async def run(self, sampling_params, **kwargs):
        index, session, step = kwargs["index"], kwargs["session_id"], kwargs["global_steps"]
        draw = random.Random(_hash("snapshots", index, session, step))
        prompt = await self.ct_build_initial_tokens([kwargs["raw_prompt"][-1]])
        said = []
        mask = []
        outputs = []
        for _ in range(draw.randint(1, 3)):
            answer = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt + said,
                sampling_params=dict(sampling_params),
            )
            answer.log_probs = None  # there are none of what the environment says
            ids = answer.token_ids[:4]
            row = fields_of(prompt, said + ids, answer)
            outputs.append(AgentLoopOutput(**row | {"response_mask": mask + [1] * len(ids)}))
            observed = [draw.randrange(5, 200) for _ in range(draw.randint(1, 3))]
            said, mask = said + ids + observed, mask + [1] * len(ids) + [0] * len(observed)
        first = outputs[0].response_ids
        outputs[0].response_mask = [1] + [0] * (len(first) - 1)
        if len(outputs) > 1 and len(first) > 1:
            outputs.append(AgentLoopOutput(**fields_of(prompt, first[:-1], answer)))
        return self._rewarded(outputs, index)
