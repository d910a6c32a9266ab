"""What a row costs a rank, by the operations that its model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_padding.plan.cost import Int64s
from verl_padding.plan.errors import PlanError

UNIT = 24576
"""Cost of the linear layers for one token: that of ``attention_cost``, so that costs of all models
are of one size.

A row of 128k tokens then costs less than 10^12 with any model of today, and the sum of a million
rows fits int64.
"""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with layers of a gated delta rule, whose other layers gate what attention gives."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OTHER_MIXERS = (
    "kv_lora_rank",
    "mamba_d_state",
    "mamba_d_conv",
    "attn_layer_period",
    "block_types",
    "conv_L_cache",
)
"""Keys of models whose layers are not all plain attention: latent, state-space, recurrent or
convolution."""


@dataclass(frozen=True, kw_only=True)
class TransformerCost:
    """Operations of a row in a forward pass; a backward pass takes twice as many, so their ratios
    are the same.

    A multiply-add is two operations. Linear layers, per token: 2 x (q, k, v and output projections,
    gated MLP or active experts with their router, LM head, tied or not; the embedding lookup takes
    none). Attention, per pair of query and key: 4 x heads x head_dim a layer, half for the scores
    and half for the sum of values; with a causal mask a row of L tokens has L (L + 1) / 2 pairs,
    with a sliding window of w the sum of min(t, w) over t = 1 .. L. Linear attention (a gated delta
    rule) has no pairs: a token costs its projections, a convolution over some tokens, and 5
    operations for each number of each head's state.

    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1, and verl's
    flops_counter.py, which counts full squares instead of causal pairs or windows, and embeddings
    as a layer. Norms, activations and softmax are left out, as they are there.
    """

    linear: int
    """Operations per token, in all layers and the head."""
    attention: int
    """Operations per pair of query and key, in one layer."""
    full_layers: int
    """Layers whose queries see all keys before them."""
    sliding_layers: int = 0
    """Layers whose queries see the last ``window`` keys."""
    window: int | None = None
    """Keys that a query of a sliding layer sees."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, lm_head: bool = True) -> TransformerCost:
        """Reads a Hugging Face config (``AutoConfig.to_dict()``); of a vision-language model, only
        the text's part.

        Args:
            lm_head: whether the model ends in logits over the vocabulary; a critic ends in one
                value per token.

        Raises:
            PlanError: the operations of this kind of model are not known here.
        """
        config = config.get("text_config") or config
        known = {key: value for key, value in config.items() if value is not None}
        try:
            _check_layers(known)
            return cls._from_known(known, lm_head=lm_head)
        except (LookupError, TypeError) as odd:  # a key is missing, or differs by layer
            raise PlanError(
                f"the operations of model_type={config.get('model_type')!r} are not known, by what "
                f"its config lacks or has: {odd}; choose cost_model=attention"
            ) from odd

    @classmethod
    def _from_known(cls, config: Mapping[str, Any], *, lm_head: bool) -> TransformerCost:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
        projections = 2 * hidden * head_dim * (heads + kv_heads)
        if config.get("model_type") in HYBRIDS:
            projections += hidden * head_dim * heads  # a gate beside each query
        mixers = list(config.get("layer_types") or ()).count(LINEAR)
        multiplies = (layers - mixers) * projections + sum(
            _mlp(config, layer) for layer in range(layers)
        )
        if lm_head:
            multiplies += hidden * config["vocab_size"]
        sliding = sliding_layers(config)
        return cls(
            linear=2 * multiplies + (mixers and mixers * _gated_delta_rule(config)),
            attention=4 * heads * head_dim,
            full_layers=layers - sliding - mixers,
            sliding_layers=sliding,
            window=config["sliding_window"] if sliding else None,
        )

    def __call__(self, tokens_R: Int64s) -> Int64s:
        """Cost of rows (R,), in whole numbers: ``UNIT`` x operations / those of a token's linear
        layers."""
        # Elementwise in float64: the same on every machine.
        return np.rint(self.flops(tokens_R) * (UNIT / self.linear)).astype(np.int64)

    def flops(self, tokens_R: Int64s) -> NDArray[np.float64]:
        """Floating-point operations of rows (R,) in a forward pass."""
        tokens = tokens_R.astype(np.float64)
        pairs = self.full_layers * self._pairs(tokens, None) + self.sliding_layers * self._pairs(
            tokens, self.window
        )
        return self.linear * tokens + self.attention * pairs

    def _pairs(self, tokens: NDArray[np.float64], window: int | None) -> NDArray[np.float64]:
        # Ten tokens and a window of four: 1 + 2 + 3 + 4 pairs, and four for each of six more.
        seen = tokens if window is None else np.minimum(tokens, window)
        return seen * (seen + 1) / 2 + (tokens - seen) * seen


def _gated_delta_rule(config: Mapping[str, Any]) -> int:
    """Operations per token of a layer of linear attention, as verl's flops_counter.py has them."""
    hidden, heads = int(config["hidden_size"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    keys, values = int(config["linear_num_key_heads"]) * key_dim, heads * value_dim
    # To queries, keys, values, a gate of their size, and two numbers a head; back from the values.
    projections = hidden * (2 * keys + 3 * values + 2 * heads)
    convolution = int(config["linear_conv_kernel_dim"]) * (2 * keys + values)
    return 2 * (projections + convolution) + 5 * heads * key_dim * value_dim


def _mlp(config: Mapping[str, Any], layer: int) -> int:
    """Multiply-adds per token of a layer's MLP, or of its active experts."""
    hidden = int(config["hidden_size"])
    if _is_dense(config, layer):
        return 3 * hidden * int(config["intermediate_size"])
    experts = next(config[key] for key in EXPERTS if config.get(key))
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    active = (
        int(config["num_experts_per_tok"]) * width
        + int(config.get("n_shared_experts") or 0) * width
    )
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    # A shared expert of its own width has a gate of one number a token.
    return 3 * hidden * (active + shared) + hidden * int(experts) + (hidden if shared else 0)


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has one MLP, not experts."""
    return bool(
        not any(config.get(key) for key in EXPERTS)
        or layer in (config.get("mlp_only_layers") or ())
        or (layer + 1) % (config.get("decoder_sparse_step") or 1)
        or layer < (config.get("first_k_dense_replace") or 0)
    )


def sliding_layers(config: Mapping[str, Any]) -> int:
    """How many layers of a model attend to a window of a row; by its Hugging Face config."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if kinds:
        return list(kinds).count(SLIDING)
    if config.get("use_sliding_window"):
        # transformers' Qwen2Config: the first max_window_layers see everything.
        return max(config["num_hidden_layers"] - config.get("max_window_layers", 0), 0)
    return int(config["num_hidden_layers"])


def _check_layers(config: Mapping[str, Any]) -> None:
    """Raises a LookupError if layers mix tokens in a way that is not reckoned with here."""
    kinds = {FULL, SLIDING, *([LINEAR] if config.get("model_type") in HYBRIDS else [])}
    odd = [f"layer_types={kind}" for kind in config.get("layer_types", ()) if kind not in kinds]
    odd += [f"{key}={config[key]}" for key in OTHER_MIXERS if config.get(key)]
    if odd:
        raise LookupError(odd[0])
