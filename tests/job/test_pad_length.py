"""A pad is as short as the engines of a job allow."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import verl

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.pad_length import pad_length
from verl_padding.job.role_engine import RoleEngine


def engine(strategy, **config):
    return RoleEngine(
        section="",
        settings={},
        config=SimpleNamespace(strategy=strategy, **config),
        n_gpus=8,
        attention=None,
        device="cuda",
        trains_mtp=False,
    )


FSDP = engine("fsdp2", ulysses_sequence_parallel_size=8)
VEOMNI = engine("veomni", ulysses_parallel_size=4)


def megatron(tensor=1, context=1, fp8=None):
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
    return engine("megatron", **sizes, override_transformer_config={"fp8": fp8})


@pytest.mark.parametrize(
    ("role", "multiple"),
    [
        (FSDP, 1),  # Ulysses rounds the packed micro-batch up, not each row
        (VEOMNI, 1),
        (megatron(), 1),
        (megatron(tensor=4), 4),
        (megatron(tensor=2, context=2), 8),
        (megatron(context=4), 8),
        (megatron(fp8="hybrid"), 16),
        (megatron(tensor=3, fp8="e4m3"), 48),
    ],
)
def test_rows_are_rounded_up_as_verls_engines_do(role, multiple):
    assert role.row_multiple == multiple
    assert pad_length(PaddingConfig(), [role]) == max(2, multiple)
    assert pad_length(PaddingConfig(pad_length=3 * max(2, multiple)), [role]) == 3 * max(2, multiple)


def test_a_pad_is_as_long_as_the_hungriest_role_and_its_picture_need():
    roles = [megatron(tensor=4), megatron(context=3)]
    assert pad_length(PaddingConfig(), roles) == 12
    assert pad_length(PaddingConfig(), roles, at_least=13) == 24
    assert pad_length(PaddingConfig(), [FSDP], at_least=5) == 5


@pytest.mark.parametrize(("length", "fitting"), [(6, 8), (2, 4), (9, 12)])
def test_a_length_that_an_engine_would_round_up_is_refused_with_one_that_fits(length, fitting):
    message = rf"^padding\.pad_length={length}: .* multiples of 4 .*auto, or {fitting}\.$"
    with pytest.raises(PaddingConfigError, match=message):
        pad_length(PaddingConfig(pad_length=length), [megatron(tensor=4)])


def test_the_multiple_is_the_one_that_verl_computes():
    # The rule is that of functions which need Megatron to be imported: this says when they have changed.
    source = (Path(verl.__file__).parent / "models" / "mcore" / "util.py").read_text()
    assert "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size" in source
    assert "return math.lcm(16, align_size), align_size * 128" in source
