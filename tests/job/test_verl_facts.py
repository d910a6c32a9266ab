"""What the plug-in relies on in verl holds in the installed one, and is missed where it does
not."""

import re

import pytest
from verl.trainer.ppo.v1 import PPOTrainer

from tests.support.changed_verl import rename
from tests.support.fresh_processes import run_fresh
from verl_padding.driver.called_methods import TRACKED
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.job.verl_facts import FACTS, OVERRIDDEN
from verl_padding.job.verl_source import VerlSource, installed_verl

NEW = "_by_another_name"
PIECES = [(fact, piece) for fact in FACTS for piece in fact.code]


@pytest.mark.parametrize(("fact", "piece"), PIECES, ids=[f"{f.name} {p}" for f, p in PIECES])
def test_code_is_missed_once_what_it_names_has_another_name(fact, piece, tmp_path):
    """By its own name, wherever it is in the file, and the definition by its."""
    for name in {re.findall(r"\w+", piece)[-1], fact.name.split(".")[-1]}:
        verl = VerlSource(tmp_path / name)
        file = verl.root / fact.file
        file.parent.mkdir(parents=True)
        file.write_text((installed_verl().root / fact.file).read_text())
        assert fact.what_is_missing(verl) == ""
        changed = VerlSource(verl.root)
        assert rename(changed, {name: name + NEW}, fact.file) > 0
        missing = fact.what_is_missing(changed)
        assert piece in missing or missing == f"{fact.name} in {fact.file} is not there"


def test_each_method_that_the_padded_trainers_override_has_a_fact():
    overriding = {name for each in PaddedTrainer.__mro__ for name in vars(each)} & OVERRIDDEN.keys()
    ours = {name for name in vars(PaddedTrainer) if name in vars(PPOTrainer) and name[:2] != "__"}
    assert ours - {"fit"} == overriding == OVERRIDDEN.keys()
    tracked = {name for name in ours if hasattr(getattr(PaddedTrainer, name), TRACKED)}
    assert tracked == OVERRIDDEN.keys() - {"_setup"} | {"fit"}


def test_facts_take_at_most_2_cpu_seconds_and_import_neither_torch_nor_verl():
    code = (
        "import sys, time; from verl_padding.job.verl_check import *; "
        "assert not missing_facts(installed_verl()); "
        "assert not {'torch', 'verl', 'ray', 'transformers'} & sys.modules.keys(); "
        "print(time.process_time())"
    )
    ran = run_fresh(code, platform=None)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 2
