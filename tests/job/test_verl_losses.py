"""The table of verl's losses and estimators has a line for each that verl registers, and no
other."""

from inspect import signature

from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from verl_padding.job.verl_losses import ESTIMATORS, POLICY_LOSSES, verls_own


def test_each_loss_and_estimator_that_verl_registers_has_its_line():
    """What the lines say is computed by tests/equivalence."""
    for table, registry in (
        (POLICY_LOSSES, POLICY_LOSS_REGISTRY),
        (ESTIMATORS, ADV_ESTIMATOR_REGISTRY),
    ):
        registered = [
            str(name) for name, each in registry.items() if each.__module__.startswith("verl.")
        ]
        assert sorted(table) == sorted(registered)
        assert verls_own(list(table), registry) == list(table)
        assert verls_own(list(table), dict.fromkeys(table, one_of_a_users_own)) == []


def test_an_estimator_that_groups_reads_which_prompt_a_sample_is_of():
    for name, line in ESTIMATORS.items():
        assert line.has_groups == ("index" in signature(ADV_ESTIMATOR_REGISTRY[name]).parameters)


def one_of_a_users_own():
    raise NotImplementedError
