"""A flag that is misspelt ends a job that would train without padding."""

import pytest

from tests.support.verl_config import compose_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.misspelt_flag import refuse_misspelt_flag


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("+paddng=fast", r"\+padding=fast"),
        ("+Padding=rows", r"\+padding=rows"),
        ("+paddding.strategy=rows", "padding"),
    ],
)
def test_a_key_that_looks_like_the_flag_is_refused(override, meant):
    with pytest.raises(PaddingConfigError, match=f"Did you mean {meant}"):
        refuse_misspelt_flag(compose_job(override))


def test_the_mode_of_a_padded_trainer_is_refused_with_the_flag():
    for asked in ((), ("+padding=fast",)):
        job = compose_job(*asked, "trainer.v1.trainer_mode=padded_sync")
        with pytest.raises(PaddingConfigError, match=r"trainer_mode=sync \+padding=fast"):
            refuse_misspelt_flag(job)


def test_keys_of_verl_and_of_users_are_let_be():
    refuse_misspelt_flag(compose_job("+padding=fast", "+local=cpu", "+mine.padding=rows"))
    of_users = ("speed=fast", "mode=rows", "template=prompt", "my_padding=3", "baseline=role")
    refuse_misspelt_flag(compose_job(*(f"+{each}" for each in of_users)))
