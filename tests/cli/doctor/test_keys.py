"""Keys that nobody reads, and values of another kind than verl has."""

from tests.support.doctored_job import MODEL, A, mistakes


@mistakes(
    ({f"{A}.optim.lr": "fast"}, "1e-06"),
    ({f"{A}.optim.weight_decay": float("nan")}, "nan"),
    ({"actor_rollout_ref.rollout.n": "eight"}, "eight"),
    ({f"{A}.clip_ratio": None}, "0.2"),
    ({"data.train_batch_size": None}, "a whole number"),
    ({"trainer.total_training_steps": "five"}, "a whole number"),
    ({f"{A}.ppo_epochs": 1.5}, "a whole number"),
    ({"data.train_batch_size": 8.5}, "a whole number"),
    ({f"{A}.policy_loss.dro_beta": "big"}, "a number"),
    ({MODEL: None}, "a text"),
    ({"trainer.val_before_train": "no"}, "false"),
    ({"paddng": "fast"}, "+padding=fast"),
    ({"verl_padding": "fast"}, "+padding=fast"),
    ({"data.max_prompt_lenght": 64}, "data.max_prompt_length"),
    ({"strategy": "rows"}, "padding.strategy"),
    ({"custom_reward_function.path": "code_of_mine.py"}, "reward.custom_reward_function.path"),
    ({"reward_model.reward_manager": "dapo"}, "reward.reward_manager.name"),
    ({"algorithm.lambda": 0.9}, "0.9"),
    ({f"{A}.grad_clip": 0.5}, "0.5"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)


def test_keys_of_a_users_own_are_no_more_than_warned_of(found):
    of_users = {"speed": "fast", "strategy": "rows", "my_padding": 3, "rewards": {"scale": 2}}
    assert {key: verdict for key, (verdict, _) in found(of_users).items()} == dict.fromkeys(
        of_users, "warning"
    )
    deeper = {"data.apply_chat_template_kwargs.padding": True, "data.my_path": "not_here_yet"}
    assert found(deeper) == {}


def test_a_value_of_another_type_that_verl_takes_is_found_to_be_right(found):
    limits = {"algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"}
    assert found({"trainer.val_before_train": 0, f"{A}.entropy_coeff": 0.1, **limits}) == {}
    assert found({"trainer.logger": "console"}) == {}


def test_a_setting_that_verl_reads_or_that_follows_another_is_not_named(found):
    overlong = {"max_resp_len": 64, "overlong_buffer_cfg": {"enable": False}}
    assert found({"reward.reward_kwargs": overlong}) == {}
    assert found({"critic.ppo_max_token_len_per_gpu": 20000}) == {}
