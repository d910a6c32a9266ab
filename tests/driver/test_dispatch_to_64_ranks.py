"""Plans for 64 ranks through verl's own dispatch: each rank gets its cells in order, and answers find their rows."""

import pytest
import transfer_queue as tq

from tests.support.padded_rows import plan_for, upsample
from tests.support.ranks_in_process import ANSWER, SHAPES, RanksInProcess
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.columns import IS_PADDING, read_column
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip


@pytest.mark.ray
@pytest.mark.usefixtures("transfer_queue")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_gets_the_plans_cells_in_order_and_answers_find_their_rows(shape):
    lengths = [(3 + number, 1 + number % 5) for number in range(70)]
    batch = put_rows(lengths)
    batch.fields = ["prompts"]
    plan = plan_for(batch, dp_size=SHAPES[shape][0], mini=9)
    ranks = RanksInProcess.of_shape(shape, numbers_or_pad)
    try:
        padded = upsample(batch, plan, PadTemplate(eos_token_id=3, length=2))
        group = PaddedWorkerGroup(ranks, lambda: padded)
        output = group.compute_log_prob(batch)
        assert output.keys == batch.keys
        answers = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[ANSWER])[ANSWER]
        assert answers.tolist() == list(range(70))
        batch.extra_info = {"epochs": 2, "mini_batch_size": 7}
        group.update_actor(batch)
        layouts = plan.layouts
        assert layouts["actor"].n_pads > 0
        for worker, dp_rank in zip(ranks.workers, ranks.dp_ranks(), strict=True):
            for name, epochs, got in (("log_prob", 1, worker.passes), ("actor", 2, worker.mini_batches)):
                cells = [ranks_of[dp_rank] for ranks_of in layouts[name].cells] * epochs
                assert got == [[row if row < 70 else None for row in cell] for cell in cells]
        strip(padded.pads)
    finally:
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


def numbers_or_pad(data):
    """The number of each row, by the length of its prompt; None for a pad."""
    pads = read_column(data, IS_PADDING).tolist()
    lengths = [len(prompt) - 3 for prompt in data["prompts"].unbind()]
    return [None if is_pad else length for is_pad, length in zip(pads, lengths, strict=True)]
