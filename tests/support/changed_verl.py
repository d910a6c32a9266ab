"""Copies of verl's source in which something has another name."""

import re
from shutil import copytree, ignore_patterns

from verl_padding.job.verl_source import VerlSource, installed_verl

PARTS = ("trainer", "workers", "utils", "version")
SIX = (
    "_init_tokenizer",
    "_build_replay_buffer",
    "_fetch_one_gen_batch",
    "_compute_advantage",
    "_compute_metrics",
    "_save_checkpoint",
)
"""Methods of verl's trainer that the padded ones override, and without which a job would run on."""
DENOMINATORS = ("global_batch_size", "batch_num_tokens")
TRAIN_BATCH = "self.engine.train_batch(data, loss"
THROUGH_THE_CLASS = "BaseEngine.train_batch(self.engine, data, loss"


def copy_of_verl(folder, *, can_run=False):
    """verl as it is installed, in ``folder/verl``; the parts that have facts, or all that it needs
    to run."""
    root = folder / "verl"
    for part in [""] if can_run else PARTS:
        copytree(installed_verl().root / part, root / part, ignore=ignore_patterns("*.pyc"))
    return VerlSource(root)


def rename(verl, name_of, *files):
    """Renames words in files of a copy, by default in all; how many there were."""
    word = re.compile(r"\b(" + "|".join(map(re.escape, name_of)) + r")\b")
    paths = [verl.root / file for file in files] or [*verl.root.rglob("*.py")]
    renamed = 0
    for path in paths:
        text, n = word.subn(lambda match: name_of[match[1]], path.read_text())
        path.write_text(text)
        renamed += n
    return renamed


def without_six_methods(folder, *, can_run=False):
    """verl whose trainer calls :data:`SIX` by other names."""
    verl = copy_of_verl(folder, can_run=can_run)
    assert rename(verl, {name: f"{name}_of_step" for name in SIX}) >= 2 * len(SIX)
    return verl


def without_denominators(folder):
    """verl whose losses read other denominators, and whose workers call an engine's ``train_batch``
    through its class."""
    verl = copy_of_verl(folder)
    assert rename(verl, {name: f"whole_{name}" for name in DENOMINATORS}) >= 10
    workers = verl.root / "workers/engine_workers.py"
    assert workers.read_text().count(TRAIN_BATCH) == 1
    workers.write_text(workers.read_text().replace(TRAIN_BATCH, THROUGH_THE_CLASS))
    return verl
