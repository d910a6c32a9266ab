"""Stock verl's layout, by its own functions."""

from benchmarks.stock_layout import pad_tokens_of_verl, verl_layout


def test_pads_go_behind_the_rows_and_each_row_has_one_place():
    tokens_R = [500, 20, 300, 40, 60, 70, 80]
    rows_MDK = verl_layout(tokens_R, dp_size=2, mini_batch_rows=6, token_budget=600)
    padded_R = [*tokens_R, *[pad_tokens_of_verl()] * 5]  # to 12, a multiple of 2 ranks and 6 rows
    assert len(rows_MDK) == 2
    for rows_DK in rows_MDK:
        assert [sum(map(len, rows_K)) for rows_K in rows_DK] == [3, 3]
        assert len(set(map(len, rows_DK))) == 1
    rows = [rows for rows_DK in rows_MDK for rows_K in rows_DK for rows in rows_K]
    assert sorted(row for each in rows for row in each) == [*range(12)]
    assert all(sum(padded_R[row] for row in each) <= 600 for each in rows)
