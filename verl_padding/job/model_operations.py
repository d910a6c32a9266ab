"""Whether the operations that are reckoned for a model are those that its layers take.

No list of names says which models have an MLP without a gate, or experts that all tokens share: a
model of the same config is run once, on tensors that have shapes and no numbers.
"""

from collections.abc import Mapping
from typing import Any

from verl_padding.plan import PlanError, TransformerCost
from verl_padding.plan.transformer_cost import FULL, LINEAR

TOLERANCE = 0.01
"""Part of the operations that may be left out, such as those of rotary angles."""


def model_cost(config: Mapping[str, Any], *, lm_head: bool) -> TransformerCost:
    """What a row costs a model with this Hugging Face config; of a vision-language model, the
    text's part.

    Raises:
        PlanError: the operations of this kind of model are not known, or not those that are
            counted in a forward pass.
    """
    cost = TransformerCost.from_config(config, lm_head=lm_head)
    text = dict(config.get("text_config") or config)
    # The kernels of linear attention do not run on tensors without numbers: other layers stand in.
    if kinds := text.get("layer_types"):
        text["layer_types"] = [FULL if kind == LINEAR else kind for kind in kinds]
    reckoned = TransformerCost.from_config(text, lm_head=False)
    # Attention without a kernel of its own computes pairs that masks hide, too. Of a row of these
    # tokens, it is half.
    per_pair = reckoned.attention * (reckoned.full_layers + reckoned.sliding_layers)
    tokens = -(-reckoned.linear // per_pair)
    want = reckoned.linear * tokens + per_pair * tokens**2
    try:
        counted = _counted_operations(text, tokens)
    except ImportError:
        raise
    except Exception as error:  # of the model's code, on tensors without numbers
        raise _unknown(config, f"its layers cannot be counted ({type(error).__name__})") from error
    if abs(counted / want - 1) > TOLERANCE:
        raise _unknown(config, f"its layers take {counted / want:.3g} times what is reckoned")
    return cost


def _counted_operations(text: Mapping[str, Any], tokens: int) -> int:
    """Operations of a row in a forward pass, without those of a head."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModel

    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = AutoModel.from_config(
            AutoConfig.for_model(**text),
            attn_implementation="eager",
            # Experts as products of matrices whose sizes do not depend on numbers.
            experts_implementation="batched_mm",
        )
        model.eval()(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    return int(counter.get_total_flops())


def _unknown(config: Mapping[str, Any], why: str) -> PlanError:
    return PlanError(
        f"the operations of model_type={config.get('model_type')!r} are not known: {why}; choose "
        "cost_model=attention"
    )
