"""The strategies: what a mini-batch is made of. To add one, write its module and register it below.

``padding.strategy`` and all messages take their choices from here. A file of that name in
``configs/padding`` makes it a choice of the config group, ``+padding=<name>``.
"""

from collections.abc import Mapping

from verl_padding.plan.strategies.lcm import Lcm
from verl_padding.plan.strategies.prompt import Prompt
from verl_padding.plan.strategies.rows import EvenRows
from verl_padding.plan.strategies.strategy import Strategy

STRATEGIES: Mapping[str, Strategy] = {"prompt": Prompt(), "rows": EvenRows(), "lcm": Lcm()}
"""Strategies by the name that a job gives."""
