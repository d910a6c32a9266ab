"""Whether the models that a job loads can be loaded here: from a folder, from the hub's cache, or from the hub."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.doctor.lfs_pointers import is_lfs_pointer
from verl_padding.doctor.served_models import ACTOR_MODEL, settings_of_models
from verl_padding.doctor.settings import NAME_YOURS, is_verls_own
from verl_padding.doctor.weights import refuse_broken_weights

SECONDS = 3.0
"""How long the hub may take to answer."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DESCRIBED = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files that may say that code of the model's own is to be run."""


def models_of_job(config: DictConfig) -> Iterator[Finding]:
    """Each model and tokenizer that the job names; asks the hub at most once for each, and quickly."""
    model = "actor_rollout_ref.model"
    hub = Hub()
    told: dict[str, Finding] = {}
    for setting in settings_of_models(config):
        path = OmegaConf.select(config, setting)
        with_tokenizer = setting != ACTOR_MODEL or not OmegaConf.select(config, f"{model}.tokenizer_path")
        if not path:
            yield wrong(setting, f"{path}: has to be set.")
            continue
        if path not in told:
            told[path] = _model(setting, path, hub, with_tokenizer=with_tokenizer and not setting.startswith("critic"))
        yield Finding(subject=setting, verdict=told[path].verdict, told=told[path].told)
    for name in ("tokenizer_path", "hf_config_path", "lora_adapter_path"):
        if path := OmegaConf.select(config, f"{model}.{name}"):
            found = _model(f"{model}.{name}", path, hub, whole=False)
            folder = Path(os.path.expanduser(path))
            if name == "lora_adapter_path" and folder.is_dir() and not (folder / "adapter_config.json").is_file():
                found = wrong(found.subject, f"{path}: the folder has no adapter_config.json. Name an adapter of PEFT.")
            yield found


def _model(setting: str, path: str, hub: Hub, *, with_tokenizer: bool = False, whole: bool = True) -> Finding:
    if path.endswith("/"):
        return wrong(setting, f"{path}: ends with a /, and verl takes no such path. Write {path.rstrip('/') or '.'}")
    if "://" in path:
        return not_looked_at(setting, f"{path}: verl copies it when the job starts")
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_dir() and path.startswith("~") and not setting.endswith("lora_adapter_path"):
            return wrong(setting, f"{path}: verl does not know what ~ is. Write the whole path: {folder}")
        if folder.is_dir():
            return _folder(setting, path, folder, with_tokenizer) if whole else ok(setting, path)
    except OSError as error:
        return not_looked_at(setting, f"{path}: cannot be read here ({error})")
    if not HUB_NAME.fullmatch(path) or path.count("/") > 1:
        if is_verls_own(setting, path):
            return wrong(setting, f"{path}: is the value of verl's own config, and not here. {NAME_YOURS}")
        return wrong(setting, f"{path}: there is no such folder. Correct the path, or name a model of the hub.")
    return hub.finding(setting, path)


def _folder(setting: str, path: str, folder: Path, with_tokenizer: bool) -> Finding:
    if not (folder / "config.json").is_file():
        return wrong(setting, f"{path}: the folder has no config.json. Name a model's folder.")
    if not _has_weights(folder):
        return wrong(setting, f"{path}: the folder has no weights ({', '.join(WEIGHTS)}). Name a whole model.")
    if with_tokenizer and not any((folder / name).is_file() for name in TOKENIZER):
        return wrong(
            setting, f"{path}: the folder has no tokenizer. Name one with actor_rollout_ref.model.tokenizer_path."
        )
    for name in ("config.json", *(TOKENIZER if with_tokenizer else ())):
        if is_lfs_pointer(folder / name):
            return wrong(setting, f"{path}: {name} is a pointer of Git LFS, not the file itself. git lfs pull")
    try:
        refuse_broken_weights(folder)
    except LookupError as problem:
        return wrong(setting, f"{path}: {problem}. Take a whole model.")
    return ok(setting, path)


def folder_of_model(path: str) -> Path | None:
    """The folder that a model's files are in on this machine; for a name of the hub, in its cache; None if nowhere."""
    if "://" in path:
        return None
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder
    return _in_cache(path)


def _in_cache(name: str) -> Path | None:
    """The folder of the hub's cache that has the config of a model, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json") if HUB_NAME.fullmatch(name) else None
    except ValueError:  # no name that the hub would give
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _has_weights(folder: Path) -> bool:
    """Whether it has a file of weights; a link to nothing is none."""
    return any(file.is_file() for pattern in WEIGHTS for file in folder.glob(pattern))


def is_whole(folder: Path, *, weights: bool, tokenizer: bool) -> bool:
    """Whether a folder of the hub's cache has what is read of a model: it may have a few of its files alone."""
    if weights:
        try:
            refuse_broken_weights(folder)
        except LookupError:
            return False
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER)
    return (not weights or _has_weights(folder)) and (not tokenizer or has_tokenizer)


def brings_code(folder: Path) -> bool:
    """Whether a model's folder has code that transformers runs if it is trusted.

    Raises:
        OSError: one of its files cannot be read.
    """
    described = (folder / name for name in DESCRIBED)
    return any('"auto_map"' in file.read_text(errors="replace") for file in described if file.is_file())


class Hub:
    """A hub of models, which is asked no more once it has not answered."""

    def __init__(self) -> None:
        self._silence = ""

    def finding(self, setting: str, name: str) -> Finding:
        """Whether a model is in the hub's cache, or in the hub."""
        from huggingface_hub import constants

        if _in_cache(name) is not None:
            return ok(setting, f"{name}, in the hub's cache")
        absent = f"{name}: no such folder, and not in the hub's cache"
        if os.environ.get("VERL_USE_MODELSCOPE", "").strip().lower() in ("1", "true", "yes"):
            return not_looked_at(setting, f"{absent}; VERL_USE_MODELSCOPE says to fetch it from ModelScope")
        if constants.HF_HUB_OFFLINE and not self._silence:
            return wrong(setting, f"{absent}; HF_HUB_OFFLINE is set. Correct the path, or fetch the model first.")
        code = None if self._silence else self._ask(name)
        if code is not None and code < 400:
            return ok(setting, f"{name}, to be fetched from the hub")
        if code in (401, 403, 404):
            return wrong(
                setting,
                f"{absent}; the hub has none for you under this name (HTTP {code}). Correct the name, or log in "
                "(hf auth login).",
            )
        reason = self._silence or f"HTTP {code}"
        return wrong(
            setting, f"{absent}; {constants.ENDPOINT} cannot be reached ({reason}). Name a folder, or fetch it first."
        )

    def _ask(self, name: str) -> int | None:
        """The hub's HTTP code for a model; None if it does not answer."""
        from huggingface_hub import constants, get_token, hf_hub_url

        request = urllib.request.Request(hf_hub_url(name, "config.json"), method="HEAD")
        if token := get_token():
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code
        except (OSError, HTTPException, ValueError) as error:
            self._silence = str(error.reason if isinstance(error, urllib.error.URLError) else error)
            # transformers would try for a minute, wherever the rest of the checkup asks for the model's config.
            constants.HF_HUB_OFFLINE = True
            return None
