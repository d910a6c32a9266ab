"""Attention of rows that are packed one behind the other, by torch alone: no pair of tokens of two rows is computed.

transformers gives packed rows to flash-attn's ``flash_attn_varlen_func``, or to sdpa with a mask
of all pairs of their tokens. The attention :data:`PACKED` takes the way of flash-attn (ends of rows
from position ids, sliding windows, verl's exchange between Ulysses ranks), at whose end there are
torch's own kernels:

- half precision on CUDA: ``torch.nn.attention.varlen`` (torch 2.10 or later), one call a layer;
- anything else: ``scaled_dot_product_attention``, row by row.

It takes the place of sdpa in models whose masks are causal, and of flash-attn where that is not installed.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForTokenClassification, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.job.attention import PACKED
from verl_padding.worker.training_workers import for_training_workers

CAUSAL_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Types of layers whose masks :data:`PACKED` can do without."""
WITHOUT_KERNEL = ("attention_dropout", "attn_logit_softcapping")
"""Settings of models that torch's kernel does not take."""
HALF = (torch.bfloat16, torch.float16)


@for_training_workers
def install_in_worker(role: str, trainee: Any) -> None:
    """For verl's ``execute_with_func_generator``: :data:`PACKED` for engines that pack rows."""
    engine = trainee.engine_config
    if not engine.use_remove_padding or not engine.strategy.startswith("fsdp"):
        return
    use_packed_attention(module := trainee.engine.module)
    attention = module.config.get_text_config()._attn_implementation
    if attention == "sdpa" and (ranks := engine.ulysses_sequence_parallel_size) > 1:
        raise PaddingConfigError(
            f"{role}: ulysses_sequence_parallel_size={ranks}: verl exchanges tokens around flash attention, which "
            f"{type(module).__name__} does not take by torch alone. Install flash-attn, or set it to 1."
        )


def use_packed_attention(model: nn.Module) -> None:
    """Puts :data:`PACKED` in the place of sdpa; a model with an attention of its own keeps what it has."""
    config: Any = model.config
    text = config.get_text_config()
    packs = (
        text._attn_implementation == "sdpa"
        and CAUSAL_LAYERS.issuperset(getattr(text, "layer_types", None) or ())
        and not any(getattr(text, name, None) for name in WITHOUT_KERNEL)
        and all(map(_takes_any_attention, attention_layers(model)))
    )
    if packs:
        register()
        config._attn_implementation = PACKED  # that of its parts, too


def _takes_any_attention(layer: nn.Module) -> bool:
    """Whether a layer attends by whatever transformers has under the config's name."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(layer.forward).__globals__


def attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The causal attention modules of a model; those that look at images are none."""
    return (
        module for module in model.modules() if hasattr(module, "layer_idx") and getattr(module, "is_causal", False)
    )


def register() -> None:
    """Makes :data:`PACKED` a choice of transformers'."""
    if PACKED in ALL_ATTENTION_FUNCTIONS:
        return
    ALL_ATTENTION_FUNCTIONS.register(PACKED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, mask_unless_causal)
    find_functions = modeling_flash_attention_utils._lazy_imports

    @wraps(find_functions)
    def find_ours(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Callable[..., Any] | None, ...]:
        if implementation != PACKED:
            return find_functions(implementation, *args, **kwargs)
        pad, unpad = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        return flash_attn_func, flash_attn_varlen_func, None, pad, unpad

    # transformers looks for these functions in packages and on its hub; it has no registry for them.
    modeling_flash_attention_utils._lazy_imports = find_ours


def offer_without_flash_attn(_: Any) -> None:
    """Lets models of verl's FSDP engines be loaded with :data:`PACKED`, critics too: verl loads those with flash-attn,
    whatever their config says."""
    from verl.utils import model

    register()
    load_with_flash_attn = model.load_valuehead_model

    @wraps(load_with_flash_attn)
    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        if is_flash_attn_2_available():
            return load_with_flash_attn(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    model.load_valuehead_model = load


def mask_unless_causal(*, mask_function: Callable[..., Any], use_vmap: bool = False, **given: Any) -> Any:
    """transformers' mask interface: None for packed rows, a mask of all pairs where tokens see later ones, as those of
    an image may."""
    length, device = given["q_length"], given["device"]
    zero, at = torch.zeros((), dtype=torch.long, device=device), torch.arange(length - 1, device=device)
    # Tokens that see each other lie side by side, so that the pairs of neighbours tell.
    if use_vmap or bool(torch.as_tensor(mask_function(zero, zero, at, at + 1)).any()):
        return sdpa_mask(mask_function=mask_function, use_vmap=use_vmap, **given)
    return flash_attention_mask(mask_function=mask_function, **given)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, heads, tokens, head size) -> (1, tokens, heads, head size), None."""
    if attention_mask is not None and attention_mask.ndim == 4:
        masked: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return masked
    if "sliding_window" not in kwargs and getattr(module.config, "sliding_window", None) is not None:
        raise PaddingError(
            f"attn_implementation={PACKED}: {type(module).__name__} has its sliding window in a mask alone, and would "
            "attend to all tokens. Set override_config.attn_implementation=eager, with padding.sharing=chains or off."
        )
    attended: tuple[torch.Tensor, None] = flash_attention.flash_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return attended


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's function of this name, by torch.

    Args:
        q, k, v: (tokens, heads, head size) of sequences one behind the other; ``k`` and ``v`` may have fewer heads.
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,): where the sequences of queries and of keys begin and end.
        causal: a query sees no later key; the last query of a sequence is at its last key.
        window_size: keys before and behind its own that a query sees; -1 for all of them.

    Returns: (tokens, heads, head size).

    Raises:
        PaddingError: dropout, a soft cap or sinks: torch has no kernel with them, and without it is another model.
    """
    if dropout_p or softcap or s_aux is not None:
        raise PaddingError(
            f"attn_implementation={PACKED}: dropout={dropout_p}, softcap={softcap}, sinks={s_aux is not None}: torch's "
            "kernels do without. Install flash-attn, or set override_config.attn_implementation=eager."
        )
    window = (window_size[0], 0) if causal else window_size
    if has_kernel(q):
        from torch.nn.attention import varlen

        grouped = how_to_group_heads(q.device) if q.shape[1] != k.shape[1] else {}
        if grouped is None:
            k, v = (_as_many_heads(states, q) for states in (k, v))
        lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
        return varlen.varlen_attn(q, k, v, *lengths, scale=softmax_scale, window_size=window, **grouped or {})
    # Repeated, for with grouped heads and a mask torch keeps all weights; and split, for the gradient of a slice is as
    # long as what it was cut from.
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    k, v = (_as_many_heads(states, q) for states in (k, v))
    rows = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    return torch.cat([_attend_in_row(*row, window, softmax_scale) for row in rows])


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """flash-attn's function of this name, of sequences of one length: (sequences, tokens, heads, head size)."""
    ends = []
    for states in (q, k):
        rows, length = states.shape[:2]
        ends.append(torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device))
    lengths = *ends, q.shape[1], k.shape[1]
    return flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lengths, **kwargs).view_as(q)


def has_kernel(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype in HALF and find_spec("torch.nn.attention.varlen") is not None


@cache
def how_to_group_heads(device: torch.device) -> dict[str, bool] | None:
    """How torch's kernel is told that keys have fewer heads than queries; None where they have to be repeated.

    Versions differ: 2.11 takes them as they are, later ones with ``enable_gqa``. It is tried, once.
    """
    from torch.nn.attention import varlen

    draw = torch.Generator(device).manual_seed(0)
    q, k = (torch.randn(4, heads, 64, dtype=HALF[0], device=device, generator=draw) for heads in (4, 2))
    ends = torch.tensor([0, 4], dtype=torch.int32, device=device)
    repeated = _as_many_heads(k, q)
    want = varlen.varlen_attn(q, repeated, repeated, ends, ends, 4, 4, window_size=(-1, 0))
    for grouped in ({}, {"enable_gqa": True}):
        try:
            got = varlen.varlen_attn(q, k, k, ends, ends, 4, 4, window_size=(-1, 0), **grouped)
        except (TypeError, ValueError, RuntimeError):  # what versions answer that do not take this
            continue
        if torch.allclose(got, want, atol=0.05):
            return grouped
    return None


def _as_many_heads(states: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def _attend_in_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: tuple[int, int], scale: float | None
) -> torch.Tensor:
    """(queries, heads, head size), of one row."""
    (n_queries, n_keys), (left, right) = (len(q), len(k)), window
    is_causal, mask = right == 0 and n_queries == n_keys and not 0 <= left < n_keys - 1, None
    if not is_causal and (left >= 0 or right >= 0):
        keys = torch.arange(n_keys, device=q.device)
        distance = keys - keys[n_keys - n_queries :, None]  # of each key from a query's own
        mask = torch.ones_like(distance, dtype=torch.bool)
        if right >= 0:
            mask &= distance <= right
        if left >= 0:
            mask &= distance >= -left
    q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    return out[0].transpose(0, 1)
