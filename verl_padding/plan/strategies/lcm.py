"""A mini-batch is ppo_mini_batch_size x rollout.n rows, pads among them, and there are as many as
verl makes."""

from math import lcm

from verl_padding.plan.calls import StepShape
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.errors import PlanError
from verl_padding.plan.mini_batches import MiniBatches, cut_evenly, ordered, rows_of_prompts
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies.strategy import Strategy


def padded_rows(n_rows: int, *sizes: int) -> int:
    """Rows of a batch of ``n_rows`` real ones after padding, by verl 0.9's rule
    (``_get_required_batch_multiple``); ``sizes`` are the data-parallel sizes and the rows per
    mini-batch of all calls that share the batch.

    >>> padded_rows(25, 4, 8, 12)
    48
    """
    return up_to_multiple(n_rows, lcm(*sizes))


class Lcm(Strategy):
    """verl's rule: fixed mini-batches, as many as make up the smallest common multiple that holds
    the rows.

    25 rows, four ranks, an actor's mini-batches of 8 and a critic's of 12: multiples of lcm(4, 8,
    12) = 24, so 48 rows in every call; six steps of the actor and four of the critic. verl fills
    the last ones with pads alone; here the 25 rows are spread: 5 4 4 4 4 4 and 7 6 6 6. While only
    the critic trains, verl still takes the actor's ranks into the multiple; ``row_multiple`` stands
    for them.
    """

    has_own_steps = True

    def check(self, shape: StepShape, name: str) -> None:
        update = shape.updates[name]
        rows, unit = shape.mini_batch_rows(update), update.dp_size * update.local_batch_multiple
        if rows % unit:
            prompts = f"{update.mini_batch_setting}={update.prompts_per_mini_batch}"
            sessions = f"{shape.sessions_setting}={shape.sessions_per_prompt}"
            raise PlanError(
                f"strategy='lcm': a mini-batch of {name!r} has {prompts} x {sessions} = {rows} "
                f"rows, not a multiple of {unit} ({update.dp_size} data-parallel ranks x "
                f"{update.local_batch_multiple} of a micro-batch); change one or choose another "
                "strategy"
            )

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        updates, size = shape.updates.values(), shape.mini_batch_rows(shape.updates[name])
        sizes = [update.dp_size for update in updates] + [*map(shape.mini_batch_rows, updates)]
        total = padded_rows(len(rows), shape.row_multiple, *sizes)
        by_prompt = ordered(rows_of_prompts(rows), shape.updates[name], shape.seed)
        order = [row for group in by_prompt for row in group]
        return cut_evenly(order, total // size, name, mini_batch_rows=size)
