"""The kinds of fields that verl writes."""

import torch

from tests.support.rows_in_queue import row_fields
from verl_padding.pads.field_kinds import KNOWN_FIELDS, Kind


def test_tensors_of_a_row_of_verl_have_the_lengths_of_their_kinds():
    row = row_fields(5, 3, "u")
    found = {name: len(field) for name, field in row.items() if isinstance(field, torch.Tensor)}
    assert len(set(found.values())) == 3, "of prompt, response and both"
    assert found == {name: KNOWN_FIELDS[name].kind.tokens(5, 3) for name in found}
    assert Kind.ROW.tokens(5, 3) is Kind.OBJECT.tokens(5, 3) is Kind.MULTIMODAL.tokens(5, 3) is None
