"""Attention of ranks that share a row, on a CPU."""

import torch

from tests.engines.ulysses import attention_of_packed_rows


def test_packed_rows_attend_to_themselves_alone():
    query, key, value = torch.randn(3, 1, 7, 4, 8, dtype=torch.float64)
    key, value = key[:, :, :2], value[:, :, :2]  # heads that queries share
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    together = attention_of_packed_rows(query, key, value, None, 7, position_ids=position_ids, softmax_scale=0.5)
    for rows in (slice(0, 3), slice(3, 7)):
        scores = torch.einsum("qhd,khd->hqk", query[0, rows], key[0, rows].repeat_interleave(2, 1)) * 0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        alone = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[0, rows].repeat_interleave(2, 1))
        torch.testing.assert_close(together[0, rows], alone)
