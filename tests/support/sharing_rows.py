"""The models and rows with which engines that share are compared with rows alone."""

import torch
from transformers import AutoModelForCausalLM

from tests.support.branching_rows import branching_rows
from tests.support.engine_shapes import with_shared_heads
from tests.support.token_tries import awkward_tries, random_tries
from verl_padding.on_cpu.tiny_models import make_tiny_model


def model_folder(kind, folder, dtype):
    return folder / f"{kind}_{dtype}"


def make_model(kind, folder, dtype):
    """A tiny model whose norms and biases do something, and whose log-probs differ."""
    place = model_folder(kind, folder, dtype)
    if place.is_dir():
        return place
    shared = with_shared_heads(make_tiny_model(kind, place / "made"))
    model = AutoModelForCausalLM.from_pretrained(shared, dtype=getattr(torch, dtype))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=draw)
            elif name.endswith("bias"):
                weight.normal_(std=0.2, generator=draw)
            elif weight.ndim == 2:
                weight.mul_(3)
    for file in shared.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (place / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(place)
    return place


def texts_of(rows):
    """Rows by what they are called, of prompts whose rows begin alike."""
    if rows == "branching":
        return branching_rows(prompts=4)
    tries = (
        list(awkward_tries().values())
        if rows == "awkward"
        else [random_tries(seed) for seed in range(4)]
    )
    return {
        f"p{number}_{row}_0": (tokens[:1], tokens[1:])
        for number, trie in enumerate(tries)
        for row, tokens in enumerate(trie)
        if len(tokens) > 1
    }
