"""An actor or a critic in this process, trained by verl's own functions on rows that no pad is
beside.

No worker, no FSDP, no packing: each row is computed alone, and the rows of a mini-batch are one
micro-batch of verl's loss, with their number as ``global_batch_size``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.utils.torch_functional import get_cosine_schedule_with_warmup
from verl.workers.config.optimizer import build_optimizer
from verl.workers.utils.losses import ppo_loss, value_loss

from benchmarks.one_gpu.rows import nested

Row = Mapping[str, Any]
"""Fields of a row, as a worker has them: ``input_ids`` (L,), ``responses`` (T,), ``advantages``
(T,), .."""


class OneProcess:
    """A model, verl's loss and optimizer for it, and a cosine schedule.

    Args:
        config: verl's config of the actor or the critic.
        model: folder of the weights.
        steps: training steps of the job.
    """

    def __init__(self, config, model, *, steps):
        self.config = omega_conf_to_dataclass(config)
        self.is_critic = "cliprange_value" in config
        kind = transformers.AutoConfig.from_pretrained(model)
        auto = transformers.AutoModelForCausalLM
        if self.is_critic:
            auto = transformers.AutoModelForTokenClassification
        elif hasattr(kind, "vision_config"):
            auto = transformers.AutoModelForImageTextToText
        self.model = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = build_optimizer(self.model.parameters(), self.config.optim)
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, num_warmup_steps=0, num_training_steps=steps
        )
        self.loss = partial(value_loss if self.is_critic else ppo_loss, config=self.config)

    def outputs(self, rows):
        """What verl's engine makes of each row, jagged (R, L): of a token, what is said of the next
        one."""
        found = {}
        for row in rows:
            ids = row["input_ids"]
            positions = row["position_ids"].unsqueeze(-2)
            logits = self.model(
                input_ids=ids[None], position_ids=positions, **row["images"]
            ).logits[0]
            if self.is_critic:
                found.setdefault("values", []).append(logits.squeeze(-1))
                continue
            log_probs = logits.log_softmax(-1)
            next_ids = ids.roll(-1)[:, None]
            found.setdefault("log_probs", []).append(log_probs.gather(-1, next_ids).squeeze(-1))
            found.setdefault("entropy", []).append(-(log_probs.exp() * log_probs).sum(-1))
        return {name: nested(each) for name, each in found.items()}

    def response_outputs(self, rows, name):
        """An output of the tokens of each response, without a gradient."""
        with torch.no_grad():
            row_outputs = self.outputs(rows)[name].unbind()
        pairs = zip(row_outputs, rows, strict=True)
        return [output[-1 - len(row["responses"]) : -1] for output, row in pairs]

    def optimizer_step(self, rows, n_rows):
        """Trains on a mini-batch that counts as ``n_rows`` rows; metrics by verl's names."""
        names = [
            name
            for name, value in rows[0].items()
            if isinstance(value, torch.Tensor) and value.dim() == 1
        ]
        data = TensorDict(
            {name: nested([row[name] for row in rows]) for name in names}, batch_size=len(rows)
        )
        tokens = int(sum(row["loss_mask"].sum() for row in rows))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=n_rows)
        self.optimizer.zero_grad()
        loss, metrics = self.loss(model_output=self.outputs(rows), data=data, dp_group=None)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_grad)
        self.optimizer.step()
        plain = {
            name: Metric.aggregate_dp([value]) if isinstance(value, Metric) else value
            for name, value in metrics.items()
        }
        return plain | {"loss": loss.item(), "grad_norm": norm.item()}
