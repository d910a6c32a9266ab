"""The planner's one verb: rows and the shape of a job in, a plan out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain

import numpy as np

from verl_padding.errors import PlanError, plural
from verl_padding.plan.call_costs import CallCosts, LayoutFigures, score_layout
from verl_padding.plan.calls import Call, Packer, Pass
from verl_padding.plan.cost import COST_MODELS
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing import fill_local_batches
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies import STRATEGIES, Job

MAX_COST = 1 << 60
"""Most that all rows of a call may cost together: an eighth of int64's range, as sums add pads and
overheads."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """A layout for each worker call, of the same real rows and as many pads as the call needs."""

    job: Job
    """What it was planned for."""
    layouts: Mapping[str, Layout]
    """Layout of each update and inference pass of the job, by its name."""
    figures: Mapping[str, LayoutFigures]
    """Figures of each layout, by its name."""
    tries: PrefixTries | None = None
    """The rows' common prefixes, if known."""
    warnings: tuple[str, ...] = ()
    """What a user should know, such as fewer optimizer steps than configured."""

    @cached_property
    def n_pads(self) -> int:
        """Pads to make: the most that a layout uses."""
        return max((layout.n_pads for layout in self.layouts.values()), default=0)


def plan_batch(rows: Rows, job: Job) -> BatchPlan:
    """Plans every worker call of a local update. The same rows, job and seed give the same plan on
    every machine.

    >>> from verl_padding.plan import Update
    >>> rows = Rows.from_keys(["a_0_0", "a_0_1", "b_0_0"], [700, 300, 900])
    >>> actor = Update(dp_size=2, token_budget=1024, prompts_per_mini_batch=2)
    >>> calls = {"updates": {"actor": actor}, "inference": {}}
    >>> job = Job(strategy="prompt", prompts=2, sessions_per_prompt=1, **calls)
    >>> # Two short rows against the long row and pad 0:
    >>> plan_batch(rows, job).layouts["actor"].local_batches
    (((0, 1), (2, 3)),)

    Raises:
        PlanError: there is no row, one does not fit into a micro-batch of one of the calls, or all
            together cost too much to be counted.
    """
    if not len(rows):
        raise PlanError(
            "no real row in the batch: every session failed or came back empty. See the errors of "
            "the agent loop, or set trainer.v1.sampler.sync_refill_failed_groups=True"
        )
    for name, call in job.calls():
        _check_longest_row(rows, job, name, call)
    cuts = {
        name: STRATEGIES[job.strategy]
        .cut(rows, job, update)
        .drop(rows.zero_advantage if update.drops_zero_advantage else ())
        for name, update in job.updates.items()
    }
    # A pass gets as many pads as updates whose mini-batches have a fixed size.
    fixed = [len(cut.rows_M) * cut.mini_batch_rows for cut in cuts.values() if cut.mini_batch_rows]
    whole = MiniBatches(rows_M=[[*range(len(rows))]], mini_batch_rows=max(fixed, default=None))
    layouts: dict[str, Layout] = {}
    figures: dict[str, LayoutFigures] = {}
    inputs: dict[str, object] = {}
    for name, call in job.calls():
        # Calls with the same inputs get the same layout, so it is planned and scored once.
        cut, update = cuts.get(name, whole), reuses_layout_of(job, call)
        inputs[name] = cut, update, layout_key(call)
        same = next(other for other in inputs if inputs[other] == inputs[name])
        if same != name:
            layouts[name], figures[name] = layouts[same], figures[same]
            continue
        costs = costs_of(rows, job, call)
        if update is None:
            layouts[name] = fill_local_batches(costs, job.packer, cut)
        else:
            layouts[name] = _layout_as_in(layouts[update], costs, job.packer)
        figures[name] = score_layout(layouts[name], costs)
    return BatchPlan(
        job=job,
        layouts=layouts,
        figures=figures,
        tries=rows.tries,
        warnings=tuple(_warnings(rows, cuts)),
    )


def _warnings(rows: Rows, cuts: Mapping[str, MiniBatches]) -> Iterator[str]:
    held = f"{plural(len(rows), 'row')} of {plural(len(set(rows.prompt_R)), 'prompt')}"
    for name, cut in cuts.items():
        if len(cut.rows_M) < cut.steps:
            yield (
                f"{name}: only {len(cut.rows_M)} of {cut.steps} optimizer steps, because each "
                f"needs a prompt or row of its own, and the batch has {held}"
            )


def _layout_as_in(update: Layout, costs: CallCosts, packer: Packer) -> Layout:
    """The layout of a pass with the micro-batches of an update, and after them those of what that
    leaves out."""
    # Two mini-batches, whose micro-batches of rank 0 are (0, 1) (2) and (5), become one with (0, 1)
    # (2) (5).
    rows_MDK = update.rows_MDK
    if rest := sorted(row for rows in update.dropped for row in rows):
        mini_batch, first_pad = MiniBatches(rows_M=[rest]), costs.n_rows + update.n_pads
        rows_MDK += fill_local_batches(costs, packer, mini_batch, first_pad).rows_MDK
    rows_DK = tuple(tuple(chain.from_iterable(rows_MK)) for rows_MK in zip(*rows_MDK, strict=True))
    return replace(update, rows_MDK=(rows_DK,), dropped=())


def reuses_layout_of(job: Job, call: Call) -> str | None:
    """The update whose micro-batches a call takes over; None if it gets its own.

    They must be the plan's, and the two calls must agree in whatever bounds a micro-batch, such as
    ranks and token budget. They may differ in what rows cost, and in where ranks synchronize: an
    engine may reduce gradients in every micro-batch, and nothing in a pass. Micro-batches of a
    fixed number of rows are not taken over: those of small mini-batches are full of pads. Nor are
    those whose rows are padded to the longest one of their local mini-batch, which for a pass holds
    all mini-batches.
    """
    name = call.as_update if isinstance(call, Pass) else None
    if name is None or name not in job.updates:
        return None
    if call.padded_to == "local_batch" or job.packer == "verl" or call.token_budget is None:
        return None
    calls = call, job.updates[name]
    keys = {replace(layout_key(one), sync_point="micro_batch") for one in calls}
    return name if len(keys) == 1 else None


def costs_of(rows: Rows, job: Job, call: Call) -> CallCosts:
    """What rows and pads cost in a call.

    What rows share is not computed once where micro-batches are cut by rows, nor where the engine
    pads rows to the longest one beside them.
    """
    tries = rows.tries
    if tries is not None and not job.may_branch:
        tries = replace(tries, whole_rows_only=True)
    shares = job.sharing == "on" and call.token_budget is not None and call.padded_to == "row"
    return CallCosts(
        call=call,
        tokens_R=np.array(rows.tokens_R, dtype=np.int64),
        cost_model=COST_MODELS[job.cost_model],
        pad_tokens=job.pad_tokens,
        tries=tries if shares and tries is not None and tries.has_shared_tokens else None,
    )


def layout_key(call: Call) -> Call:
    """What a layout depends on: calls with the same key and rows get the same one."""
    # Two updates of one size, and passes of one budget, differ in what they train and what messages
    # call their settings, which no layout depends on.
    compared = {field.name: getattr(call, field.name) for field in fields(Call)}
    return Call(**compared | {"budget_setting": ""})


def _check_longest_row(rows: Rows, job: Job, name: str, call: Call) -> None:
    """Refuses rows that do not fit into a micro-batch."""
    longest = max(range(len(rows)), key=rows.tokens_R.__getitem__)
    key, tokens = rows.key_R[longest], rows.tokens_R[longest]
    # As if all rows were as long: sums over rows, and rectangles of rows, stay below it.
    cost = int(COST_MODELS[job.cost_model](np.array([tokens]))[0]) * len(rows)
    if call.token_budget is not None and tokens > call.token_budget:
        why = (
            f"more than the {call.token_budget} that a micro-batch of {name!r} may hold: raise "
            f"{call.budget_setting} until it holds {tokens}, or"
        )
    elif cost > MAX_COST:
        why = f"too many to plan {len(rows)} rows together:"
    else:
        return
    raise PlanError(
        f"row {key!r} has {tokens} tokens, prompt and response, {why} keep rows shorter "
        "(data.max_prompt_length, data.max_response_length)"
    )
