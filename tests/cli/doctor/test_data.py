"""What is wrong with the rows of a job."""

from tests.support.doctored_job import REWARD, TRAIN, mistakes


@mistakes(
    ({TRAIN: "none.parquet"}, "none.parquet"),
    ({TRAIN: []}, "no file"),
    ({TRAIN: 3}, "3"),
    ({"actor_rollout_ref.model.custom_chat_template": "mine.jinja"}, "tokenizer", TRAIN),
    ({TRAIN: "broken.parquet"}, "broken.parquet"),
    ({TRAIN: "rows.csv"}, "rows.csv"),
    ({TRAIN: "few.parquet"}, "data.train_batch_size"),
    ({TRAIN: "no_prompt.parquet"}, "data.prompt_key"),
    ({TRAIN: "no_source.parquet"}, "data_source"),
    ({TRAIN: "own_source.parquet"}, "mine", f"{REWARD}.path"),
    ({TRAIN: "own_agent.parquet"}, "mien"),
    ({TRAIN: "texts.parquet"}, "messages"),
    ({"data.max_prompt_length": 4}, "8 of 8"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)
