"""One engine on the ranks of :mod:`tests.support.sharing_ranks`, and what it computes of rows."""

from functools import partial
from itertools import groupby
from unittest import mock

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, value_loss

from benchmarks.one_gpu.rows import micro_batch_of, trained_rows
from tests.support.engine_shapes import ROLES, TERMS
from tests.support.sharing_ranks import TEMPERATURE
from tests.support.sharing_rows import model_folder, texts_of
from tests.support.verl_config import compose_job
from verl_padding.prefix_sharing.engine import find_trie
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.worker.padded_engine import padded
from verl_padding.worker.plan_packer import module_of


class SharingRanks:
    """An engine in a padded job's form, and the rows of its data-parallel rank."""

    def __init__(self, case, models, dtype):
        self.case = case
        self.engine, self.loss = start_engine(case, model_folder(case.kind, models, dtype))
        row_dtype = torch.float64 if dtype == "float64" else torch.float32
        rows = trained_rows(texts_of(case.rows), row_dtype)
        prompts = sorted({key.split("_")[0] for key in rows})
        dp, rank = (
            self.engine.get_data_parallel_size(),
            self.engine.get_data_parallel_rank(),
        )
        self.prompts, self.n_rows = prompts[rank::dp], len(rows)
        self.rows = {key: rows[key] for key in sorted(rows) if key.split("_")[0] in self.prompts}
        self.prompt_R = [self.prompts.index(key.split("_")[0]) for key in self.rows]

    def compare(self):
        """Cut -> differences from rows alone: of outputs by their values, of gradients relative to
        their norm; and the tokens of both."""
        alone = self.run("alone", may_branch=None)
        found = {}
        for branches in (False, True):
            for cut in self.case.cuts:
                name = f"{'branches' if branches else 'whole'}, {cut}"
                shared = self.run(cut, may_branch=branches)
                found[name] = differences(shared, alone)
        passes = (
            self.run(cut, may_branch=branches, forward_only=True)
            for cut, branches in ((self.case.cuts[0], True), ("alone", None))
        )
        found["pass"] = differences(*passes)
        return found

    def batch(self):
        """The rows of this rank as a worker's call has them."""
        data = micro_batch_of(list(self.rows.values()))
        said = {"use_remove_padding": True, "use_dynamic_bsz": True}
        said |= {"calculate_entropy": self.case.update == "actor", "use_fused_kernels": False}
        said |= {"global_batch_size": self.n_rows, "temperature": TEMPERATURE}
        if self.case.temperatures:
            del said["temperature"]
            data["temperature"] = TEMPERATURE + 0.4 * torch.tensor(self.prompt_R)
        tu.assign_non_tensor(data, **said)
        return data

    def cut_by(self, cut, may_branch):
        """A with-block in which the engine's micro-batches are these, and its rows share; with
        ``may_branch`` None, nothing is shared."""
        number_R = {
            "alone": list(range(len(self.rows))),
            "prompts": self.prompt_R,
            "halves": [2 * prompt // len(self.prompts) for prompt in self.prompt_R],
            "all": [0] * len(self.rows),
        }[cut]
        rows_K = [list(rows) for _, rows in groupby(range(len(number_R)), number_R.__getitem__)]

        def prepare_micro_batches(data, **_):
            found = [tu.index_select_tensor_dict(data, rows) for rows in rows_K]
            for micro_batch in found if may_branch is not None else ():
                trie = find_trie(micro_batch, may_branch=may_branch)
                tu.assign_non_tensor_data(micro_batch, TRIE, trie)
            return found, rows_K

        module = module_of(type(self.engine).stock)
        return mock.patch.dict(module, prepare_micro_batches=prepare_micro_batches)

    def run(self, cut, *, may_branch, forward_only=False):
        """Outputs of all tokens but the last of each row, gradients and computed tokens."""
        engine = self.engine
        engine.done.clear()
        engine.optimizer_zero_grad()
        mode = engine.eval_mode() if forward_only else engine.train_mode()
        with mode, self.cut_by(cut, may_branch):
            answer = engine.forward_backward_batch(
                self.batch(), self.loss, forward_only=forward_only
            )
            found = {"tokens": engine.done["tokens"]}
            if not forward_only:
                found["gradient"] = gradients_of(engine)
        if answer:
            outputs = answer["model_output"].items()
            found["outputs"] = {
                name: torch.cat([row[:-1].detach() for row in values.unbind()])
                for name, values in outputs
            }
            found["loss"] = float(sum(answer["loss"]))
        return found


def start_engine(case, model):
    """The engine of a role as a padded job has it, and the loss of its updates."""
    role = ROLES[case.update]
    section = f"{role}.{case.engine}"
    sections = {
        "role": role,
        "engine": section,
        "transformer": f"{section}.override_transformer_config",
    }
    overrides = [
        f"+local=cpu_{case.engine}",
        f"actor_rollout_ref.model.path={model}",
        *TERMS[case.update],
        f"{role}.optim.total_training_steps=100",
        *(f"{section}.{name}={size}" for name, size in case.sizes.items()),
        *(each.format(**sections) for each in case.overrides),
    ]
    if case.engine == "megatron":
        destroy_groups()
    else:
        overrides.append(f"{role}.optim.lr_scheduler_type=constant")
    if case.update == "critic":
        overrides.append("algorithm.adv_estimator=gae")
    config = compose_job(*overrides)
    if case.update == "critic":
        role_config = omega_conf_to_dataclass(config.critic)
        model_config, loss = role_config.model, partial(value_loss, config=role_config)
        model_config.model_type = "value_model"
    else:
        model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        role_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        role_config.model_config, loss = model_config, partial(ppo_loss, config=role_config)
        model_config.model_type = "language_model"
    role_config.engine.use_dynamic_bsz = role_config.engine.use_remove_padding = True
    stock = EngineRegistry.get_engine_cls(model_config.model_type, case.engine)
    engine = padded(stock)(
        model_config, role_config.engine, role_config.optim, role_config.checkpoint
    )
    engine.initialize()
    assert engine.branch_limit is None
    if case.engine == "megatron" and case.update == "critic":
        draw_head(engine)
    return engine, loss


def destroy_groups():
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


def draw_head(engine):
    """Megatron's critics draw a head by themselves."""
    draw = torch.Generator().manual_seed(0)
    for name, weight in named_parameters(engine):
        if name.endswith("output_layer.weight"):
            weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.1)


def named_parameters(engine):
    parts = engine.module if isinstance(engine.module, list) else [engine.module]
    for number, part in enumerate(parts):
        for name, weight in part.named_parameters():
            yield f"{number} {name}", weight


def _whole(weight):
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.detach().clone()


def gradients_of(engine):
    is_megatron = engine.engine_config.strategy == "megatron"
    return {
        name: _whole(weight.main_grad if is_megatron else weight.grad)
        for name, weight in named_parameters(engine)
        if weight.requires_grad and (is_megatron or weight.grad is not None)
    }


def off(got, want):
    """How far tensors are off, relative to the norm of all."""
    assert got.keys() == want.keys()
    wrong = sum(float((got[name] - want[name]).pow(2).sum()) for name in want)
    size = sum(float(each.pow(2).sum()) for each in want.values())
    assert size > 0
    return float((wrong / size) ** 0.5)


def differences(got, alone):
    found = {"tokens": got["tokens"], "tokens_alone": alone["tokens"]}
    if "outputs" in got:
        assert got["outputs"].keys() == alone["outputs"].keys()
        for name, values in alone["outputs"].items():
            found[name] = float((got["outputs"][name] - values).abs().max())
        found["loss"] = abs(got["loss"] - alone["loss"])
    if "gradient" in got:
        found["gradient"] = off(got["gradient"], alone["gradient"])
    return found
