"""The plan of an update on the real TransferQueue: pads, rows that branch, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq

from tests.support.rows_in_queue import (
    PARTITION,
    put_columns,
    put_rows,
    put_some_fields,
    queue_content,
)
from tests.support.sessions_that_grow import put_grown_sessions
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.planned_update import update_seed
from verl_padding.driver.training_steps import TrainingSteps
from verl_padding.errors import PaddingConfigError, PaddingDataError
from verl_padding.job.calls import LOG_PROB
from verl_padding.pads.prompt_order import ordered_uid
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def test_rows_with_images_share_only_full_prefixes_which_is_said_once(caplog):
    # Two sessions of a row, one that begins with all of it, and one that branches off that.
    session = [*range(5, 20)], [*range(5, 35)], [*range(5, 30), *range(80, 95)]
    rows = {
        f"{prompt}_0_{row}": (tokens[:-4], tokens[-4:])
        for prompt in "ab"
        for row, tokens in enumerate(session)
    }
    images = [{"pixel_values": torch.ones(2, 3)}] * 6
    batch = put_grown_sessions(rows, multi_modal_inputs=images)
    trainer = padded_trainer("padding.packer=plan", "padding.sharing=on")
    trainer._job.has_images = True
    for _ in range(2):
        metrics = {}
        trainer._balance_batch(batch, metrics)
        assert metrics["padding/actor/sharing_factor"] == pytest.approx(85 / 70)
    assert caplog.text.count("full-prefix sharing only") == 1


def test_what_rows_of_a_session_count_as_is_said_once_unless_it_is_set(caplog):
    sessions, rows = ["a_0_0", "a_1_0"], ["a_0_0", "a_0_1"]
    by_session = ("padding.advantages=session", "padding.weighting=session")
    for overrides, keys, said in (
        ((), sessions, []),
        ((), rows, ["padding.advantages=session", "padding.weighting=session"]),
        (by_session[:1], rows, ["padding.weighting=session"]),
        (by_session, rows, []),
    ):
        caplog.clear()
        trainer = padded_trainer(*overrides)
        batch = put_rows([(5, 3)] * 2, keys)
        for _ in range(2):
            trainer._balance_batch(batch, {})
        told = [message for message in caplog.messages if "several rows" in message]
        assert len(told) == bool(said), overrides
        for setting in by_session:
            assert (setting in "".join(told)) == (setting in said)


def test_the_pass_is_skipped_until_the_rows_fill_a_second_step():
    one_step = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "padding.packer=plan"]
    one_step += ["actor_rollout_ref.rollout.calculate_log_probs=false"]
    one_step += ["algorithm.rollout_correction=null"]  # rows have log-probs of the rollout
    by_rows = ["padding.optimizer_steps=by_rows", "padding.recompute_old_log_probs=auto"]
    trainer = padded_trainer(*one_step, *by_rows)
    for sessions, makes_pass in ((8, False), (9, True), (8, True)):  # a step has 4 x 2 rows
        batch = put_rows([(5, 3)] * sessions, [f"p{i % 4}_{i // 4}_0" for i in range(sessions)])
        metrics = {}
        trainer._balance_batch(batch, metrics)
        assert metrics["padding/actor/optimizer_steps/total"] == 1 + (sessions > 8)
        assert (LOG_PROB in trainer.steps.current.plan.layouts) == makes_pass
    asked = padded_trainer(*one_step, by_rows[0], "padding.recompute_old_log_probs=false")
    batch = put_rows([(5, 3)] * 9, [f"p{i % 4}_{i // 4}_0" for i in range(9)])
    with pytest.raises(PaddingConfigError, match=r"padding\.optimizer_steps=by_rows: "):
        asked._balance_batch(batch, {})


def refused(trainer, batch, message):
    content = queue_content()
    with pytest.raises(PaddingDataError, match=message):
        trainer._balance_batch(batch, metrics={})
    assert queue_content() == content, "a refusal leaves the queue as it was"
    assert trainer.steps.current is None


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            (60, 5),
            (
                r"^step 7: row '{}' has 65 tokens.* 64"
                r" .*actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
            ),
        ),
        ((0, 5), r"^row '{}': its prompt has no token\. verl takes the log-prob of the first"),
    ],
    ids=["over the token budget", "without a prompt"],
)
def test_a_row_that_cannot_be_planned_is_refused_by_key_and_setting(lengths, message):
    batch = put_rows([(5, 3), lengths])
    refused(padded_trainer(), batch, message.format(batch.keys[1]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"weight": torch.ones(3)}, {"weight": torch.ones(5).double(), "more": 1}],
            "'weight': .* without listing it",
        ),
        ([{"batch_row": torch.tensor(1.0)}] * 2, "'batch_row': "),
        (
            [{"batch_row": torch.ones(8).long()}, {"batch_row": torch.ones(11).long()}],
            "'batch_row': ",
        ),
    ],
)
def test_fields_of_several_dtypes_and_the_plug_ins_own_names_are_refused(rows, message):
    refused(padded_trainer(), put_some_fields([(5, 3), (6, 5)], rows), f"^field {message}")


def test_values_of_other_rows_keep_no_column_from_a_row():
    put_some_fields([(5, 3)], [{"batch_row": torch.ones(8).long()}])
    batch = put_rows([(5, 3), (7, 2)], ["b_0_0", "b_1_0"])
    put_columns(batch, batch_row=[torch.ones(1).long()] * 2)
    padded_trainer()._balance_batch(batch, {})


def test_a_field_without_a_kind_is_refused_though_no_pad_is_needed():
    trainer = padded_trainer("trainer.n_gpus_per_node=1", dp_size=1)
    batch = put_rows([(5, 3), (4, 2)] * 2)
    trainer._balance_batch(batch, {})
    assert trainer.steps.current.plan.n_pads == 0
    content = queue_content()
    put_columns(batch, odd=[torch.ones(15), torch.ones(8)] * 2)
    with pytest.raises(PaddingDataError, match=r"^field 'odd': its kind is unclear.* fit no kind"):
        trainer._balance_batch(batch, {})
    assert queue_content() == content


@pytest.mark.parametrize(("eos", "pad", "token"), [(3, 4, 3), (None, 4, 4), (None, None, 0)])
def test_a_pad_is_made_of_the_end_of_a_text_or_of_whatever_token_there_is(eos, pad, token):
    trainer = padded_trainer()
    trainer.tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    trainer.steps = TrainingSteps(trainer, trainer._job)
    trainer.steps.has_probed = True
    trainer._balance_batch(put_rows([(5, 3), (7, 2), (4, 9)]), {})
    pads = [key for key, tag in queue_content().items() if tag.get("is_padding")]
    rows = tq.kv_batch_get(keys=pads, partition_id=PARTITION, select_fields=["input_ids"])
    assert {int(each) for ids in rows["input_ids"] for each in ids} == {token}


def test_the_plan_is_the_same_whichever_session_ends_first():
    keys = [f"{ordered_uid(7, row % 4)}_{row // 4 % 2}_{row // 8}" for row in range(12)]
    found = []
    for order in (range(12), [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]):
        trainer = padded_trainer("padding.packer=plan")
        batch = put_rows([(3 + row, 1 + row % 5) for row in order], [keys[row] for row in order])
        trainer._balance_batch(batch, {})
        update = trainer.steps.current
        found.append((batch.keys, update.plan.layouts))
        strip(update.pads)
        tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    assert found[0] == found[1]


def test_the_shuffle_changes_from_step_to_step_and_not_from_run_to_run():
    seeds = [update_seed(0, step, update) for step in (7, 8) for update in (0, 1)]
    assert len(set(seeds)) == 4
    assert update_seed(0, 7, 0) == seeds[0] != update_seed(1, 7, 0)
