"""Whether a critic can be made of the model that it is to be made of."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_padding.doctor.finding import Finding, in_one_line, not_looked_at, ok, wrong
from verl_padding.doctor.loaded_model import FSDP, folder_to_read, no_hub
from verl_padding.job.roles_of_job import has_critic

CRITIC = "critic.model.path"


def value_head_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether verl's FSDP engines find a head with one number a token for the critic's model.

    They take transformers' model for the classification of tokens, or else that of the package trl
    (``load_valuehead_model`` in verl's utils/model.py). Megatron's engine makes a head of its own.
    """
    if not has_critic(config) or config.critic.strategy not in FSDP or config.critic.model.get("external_lib"):
        return
    from transformers import AutoConfig, AutoModelForTokenClassification
    from verl.utils.import_utils import is_trl_available

    path = str(config.critic.model.path)
    try:
        folder, reason = folder_to_read(path, "path", own_tokenizer=True)
    except OSError as error:
        folder, reason = None, f"cannot be read here ({error})"
    if folder is None:
        yield not_looked_at(CRITIC, f"{path}: {reason}")
        return
    try:
        with no_hub():
            described = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of transformers
        if path != config.actor_rollout_ref.model.path:  # of which that is told
            yield wrong(CRITIC, f"{path}: cannot be read as a model ({in_one_line(error)}).")
        return
    if type(described) in AutoModelForTokenClassification._model_mapping or is_trl_available():
        yield ok(CRITIC, f"{path}, with a head for values")
        return
    yield wrong(
        CRITIC,
        f"{path}: transformers has no model of the kind {described.model_type} with one number a token "
        "(AutoModelForTokenClassification), which a critic is. Choose another model for the critic, or install trl, "
        "which verl takes then.",
    )
