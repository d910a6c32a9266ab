"""Rows as verl's agent loop writes them, in the real TransferQueue."""

from uuid import uuid4

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from benchmarks.one_gpu.rows import nested
from verl_padding.pads.queue import controller
from verl_padding.plan.row_keys import row_key, uid_of_key

PARTITION = "train"


def row_fields(prompt, response, uid):
    """Fields of a text row of ``prompt`` + ``response`` tokens (verl,
    trainer/ppo/v1/agent_loop_tq.py)."""
    ids = torch.randint(5, 200, (prompt + response,))
    mask = torch.ones(response, dtype=torch.int64)
    return {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(prompt + response),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": torch.rand(response),
        "rollout_log_probs": -torch.rand(response),
        "uid": uid,
        "num_turns": 2,
        "data_source": "toy",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_fields": {"reward_extra_info": {"acc": 1.0}},
        "multi_modal_inputs": {},
        "session_id": 0,
        "raw_prompt": [{"role": "user", "content": "?"}],
    }


def row_tag(prompt, response):
    """What verl's agent loop says of a row."""
    lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    return {
        "status": "success",
        **lengths,
        "global_steps": 1,
        "min_global_steps": 1,
        "max_global_steps": 1,
    }


def default_keys(n_rows):
    """Two rows a session and one session a prompt."""
    uids = [uuid4().hex for _ in range(n_rows)]
    return [row_key(uids[i - i % 2], 0, i % 2) for i in range(n_rows)]


def put_rows(lengths, keys=None, **extra_fields):
    """Puts one row a (prompt, response) length, and gives their batch as verl samples it.

    Without ``keys``, two rows a session and one session a prompt.
    """
    rows = [{name: values[i] for name, values in extra_fields.items()} for i in range(len(lengths))]
    keys = default_keys(len(lengths)) if keys is None else list(keys)
    fields = [
        row_fields(*length, uid_of_key(key)) | row
        for length, key, row in zip(lengths, keys, rows, strict=True)
    ]
    tags = [row_tag(*length) for length in lengths]
    meta = tq.kv_batch_put(
        keys=keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(fields), tags=tags
    )
    return KVBatchMeta(
        keys=keys,
        tags=tags,
        partition_id=PARTITION,
        fields=None,
        extra_info=dict(meta.extra_info or {}),
    )


def put_columns(batch, **columns):
    """Puts a tensor of each row, by the name of its field, as trainer and workers put what they
    have computed.

    Calls with the batch that it gives read them.
    """
    fields = {name: nested(rows) for name, rows in columns.items()}
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=PARTITION,
        fields=TensorDict(fields, batch_size=len(batch)),
        tags=batch.tags,
    )


def put_some_fields(lengths, rows):
    """Puts rows one by one, as sessions end, each with fields of its own beside those of a text
    row."""
    keys, tags = default_keys(len(lengths)), [row_tag(*length) for length in lengths]
    for length, key, tag, row in zip(lengths, keys, tags, rows, strict=True):
        fields = list_of_dict_to_tensordict([row_fields(*length, uid_of_key(key)) | row])
        tq.kv_batch_put(keys=[key], partition_id=PARTITION, fields=fields, tags=[tag])
    return KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION, fields=None, extra_info={})


def read_columns(batch, *names):
    """Of each field, a tensor of each row."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=list(names))
    return [[row.clone() for row in data[name].unbind()] for name in names]


def empty_queue():
    """Takes out all rows that tests have put there."""
    controller()  # where a test has ended it, verl's client would wait for ever
    for partition, rows in (tq.kv_list() or {}).items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)


def queue_content():
    """Keys and tags of all rows that are in the queue now."""
    return dict((tq.kv_list(PARTITION) or {}).get(PARTITION, {}))
