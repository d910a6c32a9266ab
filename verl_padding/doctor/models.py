"""Whether the models that a job loads can be loaded here: from a folder, from the hub's cache, or from the hub."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.verl_job.roles_of_job import has_critic

SECONDS = 3.0
"""How long the hub may take to answer."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def models_of_job(config: DictConfig) -> Iterator[Finding]:
    """Each model and tokenizer that the job names; asks the hub at most once for each, and quickly."""
    model = "actor_rollout_ref.model"
    has_tokenizer = bool(OmegaConf.select(config, f"{model}.tokenizer_path"))
    wanted = [(f"{model}.path", not has_tokenizer)]
    if has_critic(config):
        wanted.append(("critic.model.path", False))
    if config.reward.reward_model.enable:
        wanted.append(("reward.reward_model.model_path", True))
    seen: dict[str, Finding] = {}
    for setting, with_tokenizer in wanted:
        path = str(OmegaConf.select(config, setting))
        if path not in seen:
            seen[path] = _model(setting, path, with_tokenizer)
        yield Finding(subject=setting, verdict=seen[path].verdict, told=seen[path].told)
    for setting in (f"{model}.tokenizer_path", f"{model}.hf_config_path", f"{model}.lora_adapter_path"):
        if path := OmegaConf.select(config, setting):
            yield _model(setting, str(path), False, weights=False)


def _model(setting: str, path: str, with_tokenizer: bool, *, weights: bool = True) -> Finding:
    if "://" in path:
        return not_looked_at(setting, f"{path}: verl copies it when the job starts")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _folder(setting, path, folder, with_tokenizer) if weights else ok(setting, path)
    if not HUB_NAME.fullmatch(path) or path.count("/") > 1:
        return wrong(setting, f"{path}: there is no such folder. Correct the path, or name a model of the hub.")
    return _of_hub(setting, path)


def _folder(setting: str, path: str, folder: Path, with_tokenizer: bool) -> Finding:
    if not (folder / "config.json").is_file():
        return wrong(setting, f"{path}: the folder has no config.json. Name a model's folder.")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return wrong(setting, f"{path}: the folder has no weights ({', '.join(WEIGHTS)}). Name a whole model.")
    if with_tokenizer and not any((folder / name).is_file() for name in TOKENIZER):
        return wrong(
            setting, f"{path}: the folder has no tokenizer. Name one with actor_rollout_ref.model.tokenizer_path."
        )
    return ok(setting, path)


def _of_hub(setting: str, name: str) -> Finding:
    from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ok(setting, f"{name}, in the hub's cache")
    absent = f"{name}: no such folder, and not in the hub's cache"
    if os.environ.get("VERL_USE_MODELSCOPE", "").strip().lower() in ("1", "true", "yes"):
        return not_looked_at(setting, f"{absent}; VERL_USE_MODELSCOPE says to fetch it from ModelScope")
    if constants.HF_HUB_OFFLINE:
        return wrong(setting, f"{absent}; HF_HUB_OFFLINE is set. Correct the path, or fetch the model first.")
    request = urllib.request.Request(hf_hub_url(name, "config.json"), method="HEAD")
    if token := get_token():
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ok(setting, f"{name}, to be fetched from the hub")
    except urllib.error.HTTPError as refusal:
        return wrong(
            setting,
            f"{absent}; the hub has none for you under this name (HTTP {refusal.code}). Correct the name, or log in "
            "(hf auth login).",
        )
    except OSError as error:
        # transformers would try for a minute, wherever the rest of the checkup asks for the model's config.
        constants.HF_HUB_OFFLINE = True
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return wrong(
            setting,
            f"{absent}; {constants.ENDPOINT} cannot be reached ({reason}). Name a folder, or fetch the model first.",
        )
