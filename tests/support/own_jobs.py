"""Jobs of a user's own, in a folder: data, agent loop, reward and tools."""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pandas
import yaml
from rich.console import Console

from verl_padding.cli.dry_run import dry_run
from verl_padding.job.composition import JobArguments

AGENT = "actor_rollout_ref.rollout.agent"
TURNS = "actor_rollout_ref.rollout.multi_turn"
LOOP = """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Mine(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        play = super().run
        return [await play(sampling_params, **row), await play(sampling_params, **row)]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0 if ground_truth in solution_str else 0.0
"""
TOOL = '''
from verl.tools.function_tool import function_tool


@function_tool
def add(expression: str) -> str:
    """Adds.

    Args:
        expression: what to add.
    """
    return str(len(expression))
'''


def dry_run_of(*overrides, **options):
    """The exit code of the dry run of a job, and its output."""
    console = Console(width=1000, record=True, file=StringIO())
    options = {"replies": ["2 it is"], "timeout_s": 280} | options
    return (
        dry_run(JobArguments(overrides=overrides), console=console, **options),
        console.export_text(),
    )


@dataclass
class OwnJob:
    """Files in a folder that is on Python's path."""

    folder: Path
    model: Path

    def file(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def data(self):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"one and {row}"}],
                "data_source": "mine",
                "reward_model": {"style": "rule", "ground_truth": "2"},
                "extra_info": {"index": row},
            }
            for row in range(8)
        ]
        path = self.folder / "train.parquet"
        pandas.DataFrame(rows).to_parquet(path)
        return f"data.train_files={path}"

    def loop(self):
        self.file("loop_of_mine.py", LOOP)
        entry = [{"name": "mine", "_target_": "loop_of_mine.Mine"}]
        agents = self.file("agent.yaml", yaml.safe_dump(entry))
        return [f"{AGENT}.agent_loop_config_path={agents}", f"{AGENT}.default_agent_loop=mine"]

    def reward(self, text=REWARD):
        return [f"reward.custom_reward_function.path={self.file('reward_of_mine.py', text)}"]

    def tool(self):
        path = self.file("tool_of_mine.py", TOOL)
        return [
            f"{TURNS}.function_tool_path={path}",
            f"{AGENT}.default_agent_loop=tool_agent",
            f"{TURNS}.enable=true",
        ]

    def overrides(self, *more):
        """A job that can start; later overrides win."""
        first = [
            "+local=cpu",
            "+padding=prompt",
            f"actor_rollout_ref.model.path={self.model}",
            "data.train_batch_size=4",
            "data.max_prompt_length=128",
            "data.max_response_length=48",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
        ]
        given = {each.partition("=")[0] for each in more}
        first.append(self.data())
        return [each for each in first if each.partition("=")[0] not in given] + list(more)
