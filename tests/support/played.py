"""Sessions of a recipe's agent loop, with a server that answers by a script in the place of a
model."""

import asyncio

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from verl_padding.on_cpu.tiny_models import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()


class ScriptedServer:
    """Answers each request with the first reply that fits and is not used up, and remembers what it
    was asked.

    Args:
        script: replies, or (part of the prompt that it is for, reply).
    """

    def __init__(self, script, tokenizer=TOKENIZER):
        self.tokenizer = tokenizer
        self.script = [("", each) if isinstance(each, str) else each for each in script]
        self.requests = []
        """Name, prompt and sampling parameters of each request."""

    async def generate(self, *, request_id, prompt_ids, sampling_params, **_):
        prompt = self.tokenizer.decode(prompt_ids)
        self.requests.append((request_id, prompt, dict(sampling_params)))
        fitting = [each for each in self.script if each[0] in prompt]
        assert fitting, f"nobody was meant to be asked {prompt!r}"
        self.script.remove(fitting[0])
        ids = self.tokenizer.encode(fitting[0][1])
        return TokenOutput(
            token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 3}
        )

    @property
    def prompts(self):
        return [prompt for _, prompt, _ in self.requests]


def play(kind, script, row, rollout, tokenizer=TOKENIZER, **settings):
    """Rows of a session, and the server that was asked: each row has requests of its own, and what
    was answered to them; the last one has the reward.

    Args:
        rollout: the config's section.
        settings: of the agent loop.
    """
    server = ScriptedServer(script, tokenizer)

    async def run():
        loop = kind(
            trainer_config=DictConfigWrap(
                OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
            ),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(OmegaConf.create({})),
            **settings,
        )
        return await loop.run({"temperature": 1.0}, **row)

    rows = asyncio.run(run())
    assert len({name for name, *_ in server.requests}) >= len(rows)
    for row in rows:
        assert len(row.response_ids) == len(row.response_mask)
        assert row.response_logprobs == [-0.5 * own for own in row.response_mask]
        assert row.extra_fields["global_steps"] == 3
    assert [row.reward_score for row in rows[:-1]] == [None] * (len(rows) - 1)
    return rows, server
