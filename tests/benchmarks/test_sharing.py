"""What the benchmark of shared prefixes measures, and on which rows."""

from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta

from benchmarks.results import kept
from benchmarks.sharing import GROUPS, train


@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_an_update_that_learns_nothing_ends_the_benchmark(norm):
    def group_with(norm):
        return SimpleNamespace(update_actor=lambda batch: {"metrics": {"grad_norm": [norm]}})

    batch = KVBatchMeta(keys=["p_0_0"], tags=[{}], partition_id="train", extra_info={})
    assert train(group_with(0.5), batch) == 0.5
    with pytest.raises(AssertionError, match="learns nothing"):
        train(group_with(norm), batch)


@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_those_of_the_kept_figures_and_fit_the_budget(group):
    cases = GROUPS[group].cases()
    rows = {name: it["rows"] for name, it in kept(f"sharing {group}")["cases"].items()}
    assert {name: len(texts) for name, texts in cases.items()} == rows
    for texts in cases.values():
        assert max(len(prompt + response) for prompt, response in texts.values()) <= (
            GROUPS[group].budget
        )
