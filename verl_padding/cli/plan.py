"""The command ``verl-padding plan``: shows a batch's plan without training on it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from verl_padding.cli.plan_table import comparison_table, step_table
from verl_padding.cli.rows_file import CountTokens, RowsFile, read_rows_file
from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.errors import PaddingDataError
from verl_padding.plan import (
    COST_MODELS,
    Job,
    PlanError,
    Rows,
    Sharing,
    TransformerCost,
    Update,
    plan_batch,
)
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.cost import CostModel
from verl_padding.plan.counted import counted
from verl_padding.plan.mini_batch_costs import MiniBatchCost, RowsMDK, micro_batches_of, mini_batch_costs
from verl_padding.plan.planner import prices_of
from verl_padding.plan.prices import Prices
from verl_padding.stock.layout import VERL_PAD_TOKENS, refuse_what_verl_refuses, verl_layout
from verl_padding.verl_job.calls import ACTOR


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the command is asked for."""

    path: Path
    dp_size: int
    mini_batch: int
    """Prompts of an optimizer step."""
    n: int
    """Rollouts a prompt."""
    budget: int
    """Tokens of a micro-batch on one rank."""
    strategy: str
    cost_model: str
    """Name in ``COST_MODELS``, or a folder with the config.json of a model."""
    tokenizer: str | None
    """Hugging Face name or folder, to count the tokens of a rollout dump."""
    sharing: Sharing = "off"


def show_plan(request: PlanRequest, *, compare: bool, as_json: bool, picture: Path | None) -> int:
    """Plans the rows of a file and prints the plan on standard output; returns the exit code, 2 for a refusal."""
    notes = Console(stderr=True)
    try:
        cost_model = _cost_model(request.cost_model)
        batch = read_rows_file(request.path, _token_counter(request.tokenizer))
        started = time.perf_counter()
        job = _job(request, batch, cost_model)
        plan = plan_batch(batch.rows, job)
        seconds = time.perf_counter() - started
        tokens_R = [*batch.rows.tokens_R, *[MIN_PAD_LENGTH] * plan.n_pads]
        prices = prices_of(batch.rows, job, job.updates[ACTOR])
        if compare:
            refuse_what_verl_refuses(
                len(batch.rows),
                dp_size=request.dp_size,
                mini_batch_rows=request.mini_batch * request.n,
                token_budget=request.budget,
            )
        # Before anything is printed: a refused command prints only its refusal.
        if picture is not None:
            from verl_padding.cli.plan_picture import draw_plan

            draw_plan(
                _computed(micro_batches_of(plan.layouts[ACTOR]), prices),
                tokens_R,
                n_rows=len(batch.rows),
                cost_model=cost_model,
                path=picture,
            )
    except (PaddingDataError, PlanError) as refusal:
        notes.print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    for note in [*_notes(batch, request.sharing), *plan.warnings]:
        notes.print(note, markup=False, highlight=False, soft_wrap=True)
    steps = mini_batch_costs(micro_batches_of(plan.layouts[ACTOR]), prices)
    if as_json:
        told = layout_as_json(plan.layouts[ACTOR], plan.figures[ACTOR], batch.lines_R)
        told["figures"]["plan_seconds"] = seconds
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        Console().print(step_table(steps, title=_title(request)))
        Console().print(f"Planning took {seconds:.2f} s. The cost model is {request.cost_model}.", highlight=False)
    if compare:
        stock = _stock_steps(request, batch.rows, job, notes)
        (notes if as_json else Console()).print(comparison_table(stock, steps))
    if picture is not None:
        notes.print(f"The picture is in {picture}.", highlight=False, soft_wrap=True)
    return 0


def _cost_model(name: str) -> CostModel:
    if name in COST_MODELS:
        return COST_MODELS[name]
    if not (Path(name) / "config.json").is_file():
        raise PaddingDataError(
            f"--cost-model {name}: not {' or '.join(COST_MODELS)}, nor a folder with a config.json. Name one of them."
        )
    from transformers import AutoConfig

    # Not the file's own keys: it leaves out defaults of its kind of model, such as head_dim or layer_types.
    try:
        config = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise PaddingDataError(
            f"--cost-model {name}: config.json cannot be read ({_first_line(error)}). Choose --cost-model attention."
        ) from error
    return TransformerCost.from_config(config)


def _token_counter(tokenizer: str | None) -> CountTokens | None:
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise PaddingDataError(
            f"--tokenizer {tokenizer}: cannot be read ({_first_line(error)}). Name the model's folder."
        ) from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _title(request: PlanRequest) -> str:
    return f"{request.path.name}: {counted(request.dp_size, 'rank')}, {request.strategy}"


def _job(request: PlanRequest, batch: RowsFile, cost_model: CostModel) -> Job:
    prompts = len(set(batch.rows.prompt_R))
    try:
        update = Update(
            dp_size=request.dp_size,
            token_budget=request.budget,
            prompts_per_mini_batch=request.mini_batch,
            cost_model=cost_model,
            budget_setting="--budget",
        )
        return Job(
            strategy=request.strategy,
            prompts=-(-prompts // request.mini_batch) * request.mini_batch,
            sessions_per_prompt=request.n,
            updates={ACTOR: update},
            inference={},
            packer="plan",
            sharing=request.sharing,
            pad_tokens=MIN_PAD_LENGTH,
        )
    except PlanError as refusal:
        raise PlanError(
            f"{refusal} (strategy: --strategy; dp_size: --dp; prompts_per_mini_batch: --mini-batch; "
            "sessions_per_prompt: --n; token_budget: --budget)"
        ) from refusal


def _notes(batch: RowsFile, sharing: Sharing) -> Iterable[str]:
    if sharing == "chains" and batch.rows.extends_R is None:
        yield (
            "--sharing chains: no row says which one it extends, so nothing is shared. Give rows token_ids or "
            "extends, or take a rollout dump"
        )
    if batch.counted:
        yield "The lengths are an estimate: the tokenizer's counts of the rollout dump's input and output."
    if batch.pads:
        yield f"The plan leaves out {counted(batch.pads, 'pad')} of stock verl that the rollout dump holds."


def _stock_steps(request: PlanRequest, rows: Rows, job: Job, notes: Console) -> list[MiniBatchCost]:
    verls = replace(job, sharing="off", pad_tokens=VERL_PAD_TOKENS)
    stock = verl_layout(
        rows.tokens_R,
        dp_size=request.dp_size,
        mini_batch_rows=request.mini_batch * request.n,
        token_budget=request.budget,
        track=lambda numbers: track(list(numbers), "verl's packer", console=notes, transient=True),
    )
    return mini_batch_costs(stock.micro_batches_MD, prices_of(rows, verls, verls.updates[ACTOR]))


def _computed(rows_MDK: RowsMDK, prices: Prices) -> RowsMDK:
    """The same micro-batches, with the rows that the engine computes."""
    n_rows = prices.n_rows
    return [
        [
            [
                [*prices.computed([row for row in rows if row < n_rows]).tolist(), *[r for r in rows if r >= n_rows]]
                for rows in rows_K
            ]
            for rows_K in rows_DK
        ]
        for rows_DK in rows_MDK
    ]
