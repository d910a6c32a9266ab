"""A layout as JSON."""

import json

from tests.support.call_costs import costs_of
from verl_padding.plan import Layout, LayoutFigures
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.mini_batch_costs import score_layout


def told(layout, names_R):
    figures = score_layout(layout, costs_of([9] * layout.n_rows, dp_size=2, token_budget=20))
    read = json.loads(json.dumps(layout_as_json(layout, figures, names_R)))
    assert LayoutFigures(**read["figures"]) == figures
    return [step["ranks"] for step in read["steps"]]


def test_a_layout_as_json_has_rows_by_name_and_how_many_pads_there_are():
    # Of three rows; numbers from 3 on are pads.
    of_names = told(Layout(n_rows=3, rows_MDK=((((0, 2), (3,)), ((1,), (4, 5))),)), [7, 8, 9])
    first = [{"rows": [7, 9], "pads": 0}, {"rows": [], "pads": 1}]
    second = [{"rows": [8], "pads": 0}, {"rows": [], "pads": 2}]
    assert of_names == [[{"micro_batches": first}, {"micro_batches": second}]]
    whole = told(Layout(n_rows=3, rows_MDK=((((0, 2),), ((1, 3),)),), cut_by="verl"), [0, 1, 2])
    assert whole == [[{"rows": [0, 2], "pads": 0}, {"rows": [1], "pads": 1}]]
