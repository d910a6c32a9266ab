"""Breaks each guard of the project in turn, in a copy, and shows that a test fails for each.

``python -m tests.mutations`` exits with 1 if a broken guard goes unnoticed. Generic mutation tools break every line;
here are the faults that a padding can have, each the way someone could write it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
COPIED = ("verl_padding", "configs", "recipes", "benchmarks", "tests", "setup.cfg", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    fault: str
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: str
    """Tests that must notice, as arguments of pytest."""

    def apply(self, root: Path) -> None:
        """Breaks the guard in a copy of the project."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} holds {self.old!r} {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


MUTATIONS = [
    Mutation(
        "the denominator counts pads",
        "verl_padding/pads/columns.py",
        "REAL_ROWS: layout.real_rows_M,",
        "REAL_ROWS: [layout.rows_per_cell * layout.dp_size] * layout.n_mini_batches,",
        "tests/pads/test_padded_batch.py tests/equivalence/test_actor_update.py",
    ),
    Mutation(
        "the denominator is the configured one",
        "verl_padding/trainer/losses.py",
        'if self.denominator == "rows":',
        "if False:",
        "tests/equivalence/test_registered_losses.py",
    ),
    Mutation(
        "sessions of several rows weigh more than others",
        "verl_padding/pads/weighing.py",
        "weight * share_of[row] for",
        "weight for",
        "tests/equivalence/test_row_weights.py",
    ),
    Mutation(
        "a mini-batch of light rows has a small loss",
        "verl_padding/pads/weighing.py",
        "share = _over(len(rows), sum(counts_of.values()))",
        "share = 1.0",
        "tests/equivalence/test_row_weights.py",
    ),
    Mutation(
        "the tokens of a light row count in full below the line",
        "verl_padding/pads/weighing.py",
        "sum(weight_of[row] * tokens_of[row] for row in rows)",
        "sum(tokens_of.values())",
        "tests/equivalence/test_row_weights.py",
    ),
    Mutation(
        "a weight acts on the log-probs alone",
        "verl_padding/trainer/losses.py",
        "model_output = {name: weighed_output(value, factor_R) for name, value in model_output.items()}",
        'model_output = model_output | {"log_probs": weighed_output(model_output["log_probs"], factor_R)}',
        "tests/equivalence/test_row_weights.py",
    ),
    Mutation(
        "credit knows nothing of shared prefixes",
        "verl_padding/trainer/mixin.py",
        "credit_sessions(batch, extends_R, self.config.algorithm)",
        "credit_sessions(batch, None, self.config.algorithm)",
        "tests/equivalence/test_session_advantages_in_queue.py",
    ),
    Mutation(
        "a session loses its reward with the end of its last row",
        "verl_padding/trainer/session_advantages.py",
        "rewards[places_of_trained[-1] if len(places_of_trained) else -1] += scores[-1]",
        "rewards[-1] += scores[-1]",
        "tests/trainer/test_session_advantages.py",
    ),
    Mutation(
        "a token that two rows of a session have is two tokens of its trajectory",
        "verl_padding/trainer/session_advantages.py",
        "token_R[row][: lengths[earlier]] = token_R[earlier]",
        "pass",
        "tests/trainer/test_session_advantages.py",
    ),
    Mutation(
        "the tenth row of a session comes before its second",
        "verl_padding/trainer/session_advantages.py",
        "key=lambda row: index_of_key(keys[row])",
        "key=lambda row: keys[row]",
        "tests/trainer/test_session_advantages.py",
    ),
    Mutation(
        "with an in-reward KL, each row of a session brings the reward",
        "verl_padding/trainer/session_advantages.py",
        "(fields[REWARDS][row] - fields[SCORES][row])[of_row]",
        "fields[REWARDS][row][of_row]",
        "tests/trainer/test_session_advantages.py",
    ),
    Mutation(
        "weights of zero in a whole mini-batch pass",
        "verl_padding/pads/weighing.py",
        "if not any(weight_of[row] for row in with_loss):",
        "if False:",
        "tests/pads/test_weighing.py",
    ),
    Mutation(
        "a pass has micro-batches of its own where it could have the update's",
        "verl_padding/plan/planner.py",
        "if taken is None else layouts[taken].as_one_mini_batch()",
        "",
        "tests/plan/test_promises.py tests/equivalence/test_ratio_one.py",
    ),
    Mutation(
        "the loss sees pads",
        "verl_padding/trainer/losses.py",
        "trained = _trained_rows(data, real)",
        "trained = list(range(len(data)))",
        "tests/equivalence/test_registered_losses.py",
    ),
    Mutation(
        "a micro-batch of pads alone has a loss without a gradient",
        "verl_padding/trainer/losses.py",
        "return values.flatten()[:0].sum()",
        "return values.detach().flatten()[:0].sum()",
        "tests/trainer/test_losses.py",
    ),
    Mutation(
        "a micro-batch of one row has as much say in a metric as one of twenty",
        "verl_padding/trainer/loss_metrics.py",
        "return RunningMetric(AggregationType.SUM, number * weight * share.reporting_ranks)",
        "return RunningMetric(AggregationType.MEAN, number)",
        "tests/trainer/test_losses.py",
    ),
    Mutation(
        "the batch that advantages are computed from holds pads",
        "verl_padding/trainer/mixin.py",
        "        return batch\n\n    def _find_extensions(",
        "        return self._padded_batch.update_call(ACTOR, batch)\n\n    def _find_extensions(",
        "tests/equivalence/test_advantages.py",
    ),
    Mutation(
        "the pads stay when the step ends",
        "verl_padding/trainer/mixin.py",
        "            strip(self._padded_batch)\n",
        "",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "the pads stay when the step raises",
        "verl_padding/trainer/mixin.py",
        "strip_after_an_error(self._padded_batch)",
        "pass",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "the pads stay when the step is interrupted",
        "verl_padding/trainer/mixin.py",
        "except BaseException:\n            if self._padded_batch is not None:",
        "except Exception:\n            if self._padded_batch is not None:",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "the storage of a queue that is let go of ends with its last handle",
        "verl_padding/pads/queue.py",
        "    _HELD.append(tq_interface._TQ_STORAGE)\n",
        "",
        "tests/pads/test_queue.py",
    ),
    Mutation(
        "a job takes the rows of another one for its own",
        "verl_padding/pads/queue_claim.py",
        "    if owner != ray.get_runtime_context().get_job_id():\n",
        "    if False:\n",
        "tests/pads/test_queue_claim.py",
    ),
    Mutation(
        "a second trainer takes the queue of one that lives",
        "verl_padding/pads/queue_claim.py",
        "    return data is not None and WorkerTableData.FromString(data).is_alive",
        "    return False",
        "tests/pads/test_queue_claim.py",
    ),
    Mutation(
        "a checkpoint of stock verl brings pads and trained rows along",
        "verl_padding/trainer/mixin.py",
        "            super()._setup()\n            clear_leftovers(TRAIN_PARTITION)\n",
        "            clear_leftovers(TRAIN_PARTITION)\n            super()._setup()\n",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "a loss that is a mean of rows weighs them by their micro-batch",
        "verl_padding/trainer/losses.py",
        "self.inner = over_the_mini_batch(inner)",
        "self.inner = inner",
        "tests/equivalence/test_registered_losses.py",
    ),
    Mutation(
        "a pad lacks a field that only some rows have",
        "verl_padding/pads/source.py",
        "for keys in listing.keys_by_fields.values()]",
        "for keys in list(listing.keys_by_fields.values())[:1]]",
        "tests/pads/test_random_schemas.py",
    ),
    Mutation(
        "one scalar goes into the queue with a stride of zero",
        "verl_padding/pads/queue.py",
        "value.repeat(len(keys), *[1] * value.ndim)",
        "value.expand(len(keys), *value.shape).contiguous()",
        "tests/pads/test_random_schemas.py",
    ),
    Mutation(
        "a column is read as one storage alone gives it",
        "verl_padding/pads/columns.py",
        "(column.values() if column.is_nested else column).reshape(len(data))",
        "column",
        "tests/trainer/test_storages_that_read_by_shape.py",
    ),
    Mutation(
        "a field that no pad can be made for waits for the first pad",
        "verl_padding/pads/padded_batch.py",
        "if not self._template.has_met(self._source.names - OWN_COLUMNS):",
        "if False:",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "pads of an earlier run stay",
        "verl_padding/trainer/mixin.py",
        "            clear_leftovers(TRAIN_PARTITION)\n",
        "",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "a checkpoint brings rows back that its weights were trained on",
        "verl_padding/trainer/mixin.py",
        "set_aside(batches if self.trainer_mode != SYNC else [])",
        "set_aside([])",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "a pad has a mask of ones",
        "verl_padding/pads/roles.py",
        '"loss_mask": FieldRole(Role.RESPONSE),',
        '"loss_mask": FieldRole(Role.RESPONSE, Fill.ONE),',
        "tests/pads tests/equivalence/test_actor_update.py",
    ),
    Mutation(
        "a pad lacks what the trainer has added to real rows",
        "verl_padding/pads/padded_batch.py",
        "        self._complete_pads(layout.n_pads)\n",
        "",
        "tests/pads/test_padded_batch.py",
    ),
    Mutation(
        "pads gather in the last step",
        "verl_padding/plan/mini_batches.py",
        "rows_M = [[order[place] for place in part] for part in even_ranges(len(order), n_parts)]",
        "size = mini_batch_rows or -(-len(order) // n_parts)\n"
        "    rows_M = [list(order[start : start + size]) for start in range(0, len(order), size)]",
        "tests/plan/test_promises.py",
    ),
    Mutation(
        "verl shuffles rows into other mini-batches",
        "verl_padding/pads/padded_batch.py",
        '            "shuffle": False,\n',
        "",
        "tests/pads/test_padded_batch.py",
    ),
    Mutation(
        "an answer of fewer rows goes unnoticed",
        "verl_padding/trainer/worker_calls.py",
        "if came != sent:",
        "if came > sent:",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "pads count among the real rows of a batch",
        "verl_padding/trainer/step_metrics.py",
        "REAL_ROWS_TOTAL: n_rows,",
        "REAL_ROWS_TOTAL: n_rows + plan.n_pads,",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the pads of a batch are those of all its calls",
        "verl_padding/trainer/step_metrics.py",
        "PAD_ROWS_TOTAL: plan.n_pads,",
        "PAD_ROWS_TOTAL: sum(layout.n_pads for layout in plan.layouts.values()),",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the share of pads is one of all rows",
        "verl_padding/trainer/step_metrics.py",
        "PAD_ROWS_SHARE: plan.n_pads / n_rows,",
        "PAD_ROWS_SHARE: plan.n_pads / (n_rows + plan.n_pads),",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "a pad counts as one token",
        "verl_padding/trainer/step_metrics.py",
        "pad_tokens = plan.n_pads * pad_length",
        "pad_tokens = plan.n_pads",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the share of pads' tokens is one of all tokens",
        "verl_padding/trainer/step_metrics.py",
        "PAD_TOKENS_SHARE: pad_tokens / sum(tokens_R),",
        "PAD_TOKENS_SHARE: pad_tokens / (sum(tokens_R) + pad_tokens),",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the critic is said to take the actor's steps",
        "verl_padding/trainer/step_metrics.py",
        "OPTIMIZER_STEPS.format(update=update): layout.n_mini_batches,",
        "OPTIMIZER_STEPS.format(update=update): plan.layouts[updates[0]].n_mini_batches,",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the emptiest mini-batch is the first",
        "verl_padding/trainer/step_metrics.py",
        "min(layout.real_rows_M),",
        "layout.real_rows_M[0],",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the fullest mini-batch counts its pads",
        "verl_padding/trainer/step_metrics.py",
        "max(layout.real_rows_M),",
        "layout.rows_per_cell * layout.dp_size,",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "an update is said to take all pads",
        "verl_padding/trainer/step_metrics.py",
        "UPDATE_PADS.format(update=update): layout.n_pads,",
        "UPDATE_PADS.format(update=update): plan.n_pads,",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "imbalance is told over the lower bound",
        "verl_padding/trainer/step_metrics.py",
        "plan.figures[update].imbalance,",
        "plan.figures[update].over_lower_bound,",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "imbalance of micro-batches is that of mini-batches",
        "verl_padding/trainer/step_metrics.py",
        "= figures.micro_imbalance\n",
        "= figures.imbalance\n",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "micro-batches of a pass are its mini-batches",
        "verl_padding/trainer/step_metrics.py",
        "= figures.micro_batches\n",
        "= figures.optimizer_steps\n",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "packing efficiency of a pass is another figure",
        "verl_padding/trainer/step_metrics.py",
        "= figures.packing_efficiency\n",
        "= figures.micro_over_lower_bound\n",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "what the workers tell of micro-batches is taken for the other",
        "verl_padding/trainer/step_metrics.py",
        "((MICRO_BATCHES, CALL_MICRO_BATCHES), (PACKING_EFFICIENCY, CALL_PACKING))",
        "((MICRO_BATCHES, CALL_PACKING), (PACKING_EFFICIENCY, CALL_MICRO_BATCHES))",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "what the workers tell is told twice",
        "verl_padding/trainer/step_metrics.py",
        'metrics.pop(f"{update}/{theirs}")',
        'metrics[f"{update}/{theirs}"]',
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "memory allocated is memory reserved",
        "verl_padding/trainer/step_metrics.py",
        '("allocated", CALL_MEMORY)',
        '("reserved", CALL_MEMORY)',
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "memory reserved is memory allocated",
        "verl_padding/trainer/step_metrics.py",
        '("reserved", CALL_MEMORY_RESERVED)',
        '("allocated", CALL_MEMORY_RESERVED)',
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "seconds of a call are those of all local updates",
        "verl_padding/trainer/step_metrics.py",
        "seconds_after[call.timer] - seconds_before.get(call.timer, 0.0)",
        "seconds_after[call.timer]",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "performance metrics leave pads out",
        "verl_padding/trainer/mixin.py",
        "            self._pad_tags += self._padded_batch.pads.tags\n",
        "",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "peaks of memory go on from call to call",
        "verl_padding/trainer/worker_calls.py",
        "        self._worker_group.execute_with_func_generator(start_peak)\n",
        "",
        "tests/equivalence/test_actor_update.py",
    ),
    Mutation(
        "imbalance of a layout is over its lower bound",
        "verl_padding/plan/figures.py",
        "imbalance=slowest * n_ranks / cost,",
        "imbalance=slowest / sum(step.mini_bound for step in steps),",
        "tests/trainer/test_step_metrics.py tests/plan/test_promises.py",
    ),
    Mutation(
        "a micro-batch counts as many as it has rows",
        "verl_padding/trainer/losses.py",
        "Metric(AggregationType.SUM, 1.0)",
        "Metric(AggregationType.SUM, float(len(data)))",
        "tests/trainer/test_losses.py",
    ),
    Mutation(
        "packing efficiency counts pads",
        "verl_padding/trainer/losses.py",
        "int(tokens_R[computed].sum()) / budget",
        "int(tokens_R.sum()) / budget",
        "tests/trainer/test_losses.py",
    ),
    Mutation(
        "a row's slice of its tip is off by one",
        "verl_padding/patches/shared_prefixes.py",
        "slices = [rows[place[tip]][:length] for",
        "slices = [rows[place[tip]].roll(1)[:length] for",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "rows share that do not begin with each other",
        "verl_padding/patches/shared_prefixes.py",
        "            if inputs.extends(longer, shorter):\n",
        "            if True:\n",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "a row takes the outputs of a tip of another session",
        "verl_padding/patches/shared_prefixes.py",
        "members.setdefault(chain, []).append(row)",
        "members.setdefault(0, []).append(row)",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "rows share whose images differ",
        "verl_padding/pads/lineage.py",
        "return self._images is None or _images_begin_alike(self._images[shorter], self._images[longer])",
        "return True",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "an output of responses alone is taken for one of all tokens",
        "verl_padding/patches/shared_prefixes.py",
        "        if [len(row) for row in rows] == list(tokens_R):",
        "        if True:",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "engines share that may read fields which nobody compares",
        "verl_padding/patches/shared_prefixes.py",
        "if inspect.unwrap(getattr(cls, name)).__module__ != FSDPEngineWithLMHead.__module__:",
        "if False:",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "images of all sessions are held at once",
        "verl_padding/pads/lineage.py",
        "[[rows] for rows in alike] if large else [alike] if alike else []",
        "[alike] if alike else []",
        "tests/pads/test_lineage.py",
    ),
    Mutation(
        "the driver reads the images of a few rows",
        "verl_padding/pads/lineage.py",
        "        if large or len(parts) > 1",
        "        if len(parts) > 1",
        "tests/pads/test_lineage.py",
    ),
    Mutation(
        "the budget counts all tokens of a chain",
        "verl_padding/patches/shared_prefixes.py",
        "return sum(tokens_R[tip] for tip in set(tip_R))",
        "return sum(tokens_R)",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "rows that have changed since the plan are taken for chains that are none",
        "verl_padding/patches/plan_packer.py",
        "    if planned > budget:",
        "    if False:",
        "tests/patches/test_shared_prefixes.py",
    ),
    Mutation(
        "an agent loop's word on lineage is lost",
        "verl_padding/pads/lineage.py",
        "        extends_R[row] = named",
        "        pass",
        "tests/pads/test_lineage.py",
    ),
    Mutation(
        "chains are planned as if their rows were computed one by one",
        "verl_padding/plan/planner.py",
        "chain_R=rows.chain_R if shares(job, call) else None,",
        "chain_R=None,",
        "tests/plan/test_chains.py",
    ),
    Mutation(
        "the score of a session is that of its first row",
        "verl_padding/trainer/session_metrics.py",
        "last_S = [max(rows",
        "last_S = [min(rows",
        "tests/trainer/test_session_metrics.py",
    ),
    Mutation(
        "a session is as long as its rows are in the mean",
        "verl_padding/trainer/session_metrics.py",
        "sum(response_R) / len(sessions)",
        "sum(response_R) / len(keys)",
        "tests/trainer/test_session_metrics.py",
    ),
    Mutation(
        "rows of a session are sessions of a row",
        "verl_padding/trainer/session_metrics.py",
        "len(keys) / len(sessions)",
        "len(sessions) / len(keys)",
        "tests/trainer/test_session_metrics.py",
    ),
    Mutation(
        "the session of the most rows is that of the fewest",
        "verl_padding/trainer/session_metrics.py",
        "max(map(len, sessions))",
        "min(map(len, sessions))",
        "tests/trainer/test_session_metrics.py",
    ),
    Mutation(
        "the turns of a session are those of its last row",
        "verl_padding/trainer/session_metrics.py",
        "sum(turns_R) / len(sessions)",
        "sum(turns_R[row] for row in last_S) / len(sessions)",
        "tests/trainer/test_session_metrics.py",
    ),
    Mutation(
        "tokens that chains spare count as computed",
        "verl_padding/trainer/step_metrics.py",
        "= figures.computed_tokens",
        "= sum(tokens_R)",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the sharing factor is one over it",
        "verl_padding/trainer/step_metrics.py",
        "= figures.sharing_factor",
        "= 1 / figures.sharing_factor",
        "tests/trainer/test_step_metrics.py",
    ),
    Mutation(
        "the error of a prediction is a share of the longest micro-batch",
        "verl_padding/timing/figures.py",
        "np.abs(scaled - measured).sum() / measured.sum()",
        "np.abs(scaled - measured).sum() / measured.max()",
        "tests/timing/test_laps.py",
    ),
    Mutation(
        "comparing rows is said to take what planning takes",
        "verl_padding/trainer/mixin.py",
        "metrics[LINEAGE_SECONDS] = compared - looked",
        "metrics[LINEAGE_SECONDS] = compared - started",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "asking for laps is said to take all the time there is",
        "verl_padding/trainer/mixin.py",
        "metrics[TIMING_SECONDS] = time.perf_counter() - started",
        "metrics[TIMING_SECONDS] = time.perf_counter()",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "planning is said to take what pads take too",
        "verl_padding/trainer/mixin.py",
        "metrics[PLAN_SECONDS] = planned - started",
        "metrics[PLAN_SECONDS] = time.perf_counter() - started",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "pads are said to take what planning takes too",
        "verl_padding/trainer/mixin.py",
        "metrics[UPSAMPLE_SECONDS] = time.perf_counter() - planned",
        "metrics[UPSAMPLE_SECONDS] = time.perf_counter() - started",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "a pad of another length than its role says leaves for the workers",
        "verl_padding/pads/template.py",
        "            self._check(name, made, role)\n",
        "",
        "tests/pads/test_template.py",
    ),
    Mutation(
        "lcm forgets the actor's ranks while the critic warms up",
        "verl_padding/verl_job/job_reader.py",
        "                row_multiple=dp_sizes[ACTOR],\n",
        "",
        "tests/verl_job/test_job.py",
    ),
    Mutation(
        "a plan depends on which session ended first",
        "verl_padding/trainer/mixin.py",
        "batch.reorder(data_order(batch.keys))",
        "data_order(batch.keys)",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "rows of a session are ordered as text",
        "verl_padding/pads/prompt_order.py",
        "int(session), int(index)",
        "session, index",
        "tests/pads/test_prompt_order.py",
    ),
    Mutation(
        "prompts start anew with each fetch of a step",
        "verl_padding/trainer/mixin.py",
        "first = fetched if step == self.global_steps else 0",
        "first = 0",
        "tests/trainer/test_mixin.py",
    ),
    Mutation(
        "sub-agents draw by the order in which they ask",
        "verl_padding/local/request_names.py",
        "name_tasks(asyncio.get_running_loop())",
        "pass",
        "tests/local/test_request_names.py",
    ),
    Mutation(
        "the rollout draws by an id that no run repeats",
        "verl_padding/local/request_names.py",
        "return agent.next_request()",
        "return str(wrapped(*args, **kwargs))",
        "tests/local/test_request_names.py",
    ),
    Mutation(
        "a rank that waits is said to be busy",
        "verl_padding/patches/micro_batch_clock.py",
        "busy_s=min(end.cpu_s - begin.cpu_s, seconds) if one_thread else None",
        "busy_s=seconds if one_thread else None",
        "tests/patches/test_micro_batch_clock.py",
    ),
    Mutation(
        "the seconds of all threads are taken for those of a rank",
        "verl_padding/patches/micro_batch_clock.py",
        "not self._has_events and torch.get_num_threads() == 1",
        "not self._has_events",
        "tests/patches/test_micro_batch_clock.py",
    ),
    Mutation(
        "the resident set is told in KiB",
        "verl_padding/local/cpu_platform.py",
        "1024 * int(found[1])",
        "int(found[1])",
        "tests/benchmarks/test_train_step.py",
    ),
    Mutation(
        "each mark waits for the device",
        "verl_padding/patches/micro_batch_clock.py",
        "            mark.event.record()\n",
        "            mark.event.record()\n            self._device.synchronize()\n",
        "tests/patches/test_micro_batch_clock.py",
    ),
    Mutation(
        "rows that share a prefix count as computed, each by itself",
        "verl_padding/patches/micro_batch_clock.py",
        "sorted(set(tips)) if tips is not None else range(len(tokens_R))",
        "range(len(tokens_R))",
        "tests/patches/test_micro_batch_clock.py",
    ),
    Mutation(
        "the slowest rank of a step is taken for that of each micro-batch",
        "verl_padding/timing/figures.py",
        "by_level[lap.mini_batch, lap.micro_batch].append(lap)",
        "by_level[0, 0].append(lap)",
        "tests/timing/test_laps.py",
    ),
    Mutation(
        "a rank that computes is said to wait",
        "verl_padding/timing/figures.py",
        "sum(max(lap.seconds - (lap.busy_s or 0.0), 0.0) for lap in laps)",
        "sum(lap.seconds for lap in laps)",
        "tests/timing/test_laps.py",
    ),
    Mutation(
        "a fit of full micro-batches is judged by empty ones",
        "verl_padding/timing/learned_costs.py",
        "key=lambda each: (each.measured.fill, each.measured.sums_D),",
        "key=lambda each: 0,",
        "tests/timing/test_learned_costs.py",
    ),
    Mutation(
        "a fit is judged by what it was made from",
        "verl_padding/timing/learned_costs.py",
        "zip(fits, reversed(halves), strict=True)",
        "zip(fits, halves, strict=True)",
        "tests/timing/test_learned_costs.py",
    ),
    Mutation(
        "the plan changes over to whatever is better by a hair",
        "verl_padding/timing/learned_costs.py",
        "if other < CLEARLY * in_use:",
        "if other < in_use:",
        "tests/timing/test_learned_costs.py",
    ),
    Mutation(
        "what a step has tried is forgotten after the window",
        "verl_padding/timing/learned_costs.py",
        "if number - each.number < MEMORY}",
        "if False}",
        "tests/timing/test_learned_costs.py",
    ),
    Mutation(
        "a slow rank's seconds are put down to what its rows cost",
        "verl_padding/plan/measured_cost.py",
        "    return paces / paces.mean()",
        "    return np.ones_like(paces)",
        "tests/plan/test_measured_cost.py",
    ),
    Mutation(
        "a pass is said to try what only its update tries",
        "verl_padding/trainer/step_timing.py",
        " and update_taken(job, call) is None",
        "",
        "tests/trainer/test_step_timing.py",
    ),
    Mutation(
        "a critic that has to be fetched is never looked at",
        "verl_padding/verl_job/job_reader.py",
        "(fetched or Path(",
        "(Path(",
        "tests/verl_job/test_job.py",
    ),
    Mutation(
        "costs that were learned do not outlast a restart",
        "verl_padding/timing/learned_costs.py",
        'used=bool(said["used"]),',
        "used=False,",
        "tests/timing/test_learned_costs.py",
    ),
    Mutation(
        "rows of models whose layers run on are packed",
        "verl_padding/verl_job/packed_row_refusals.py",
        "if (layers := layers_that_run_on(text)) and not",
        "if (layers := '') and not",
        "tests/verl_job/test_packed_row_refusals.py",
    ),
    Mutation(
        "sequence parallelism is what verl's setting says, whatever the bridge",
        "verl_padding/verl_job/role_engine.py",
        "by_bridge = tensor if config.vanilla_mbridge else bool(config.sequence_parallel)",
        "by_bridge = bool(config.sequence_parallel)",
        "tests/verl_job/test_model_refusals.py",
    ),
    Mutation(
        "a bucket with which verl drops tokens is taken",
        "verl_padding/verl_job/megatron_refusals.py",
        "multiple = context * lcm(multiple, 2)",
        "multiple = context",
        "tests/verl_job/test_megatron_refusals.py",
    ),
    Mutation(
        "the reference is judged before the actor whose sizes it has",
        "verl_padding/verl_job/job_reader.py",
        "engines.reverse()",
        "engines.sort(key=lambda engine: engine.section != 'actor_rollout_ref.ref')",
        "tests/verl_job/test_model_refusals.py",
    ),
]


def copy_project(root: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif source.exists():
            shutil.copy(source, root / name)


def fails(tests: str, mutation: Mutation | None = None) -> bool:
    """Whether a test fails in a copy of the project, with a guard broken there.

    Raises:
        RuntimeError: pytest could not run the tests at all.
    """
    one = ["-x", "-n", "0"] if mutation else []  # several faults are tried at the same time
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        copy_project(root)
        if mutation is not None:
            mutation.apply(root)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *one, *tests.split()],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
        )
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 1


def main() -> int:
    console = Console()
    tests = sorted({argument for mutation in MUTATIONS for argument in mutation.tests.split()})
    if fails(" ".join(tests)):
        console.print("[red]The tests fail without any fault.[/red]")
        return 1
    table = Table("fault", "broken in", "a test fails")
    unnoticed = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutation, noticed in zip(MUTATIONS, pool.map(lambda it: fails(it.tests, it), MUTATIONS), strict=True):
            unnoticed += not noticed
            table.add_row(mutation.fault, mutation.file, "yes" if noticed else "[red]no[/red]")
            console.print(f"{'noticed' if noticed else 'NOT NOTICED'}: {mutation.fault}")
    console.print(table)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
