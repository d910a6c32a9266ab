"""The rollout by transformers: the server, a Ray actor, and the two ends of it that verl holds."""

import asyncio
import json
import os
from collections.abc import Iterable
from math import prod
from typing import Any

import ray
import torch
import transformers
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_padding.on_cpu.rollout.batch_generation import Generation, generate
from verl_padding.on_cpu.scripted_replies import Replies
from verl_padding.on_cpu.verl_patches import ROLLOUT_NAME, TEXTS

_KNOWN_PARAMS = {
    "max_tokens",
    "max_new_tokens",
    "temperature",
    "logprobs",
    "ignore_eos",
    "stop_token_ids",
}
"""What agent loops may put into sampling_params."""
_NEUTRAL = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}
"""What verl puts there as well -> the value with which it changes nothing."""


class TransformersServer:
    """One server of a rollout replica, which answers many requests at a time, with the methods that
    verl calls.

    Its weights come from the trainer by `load_weights` and go with `sleep`. Requests that come
    while the model runs wait, and run together then.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: verl's ``HFModelConfig`` or the ``DictConfig`` it is made from.
    """

    def __init__(self, config: Any, model_config: Any) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._config = config
        self._model_config = omega_conf_to_dataclass(model_config)
        self._model: Any = None
        self._weights_of_step: int | None = None
        self._waiting: list[Generation] = []
        self._next_run: asyncio.Task[None]
        self._model_is_free = asyncio.Lock()
        self._rejecting = self._aborting = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._replies: Replies | None = None
        if texts := os.environ.get(TEXTS):
            self._replies = Replies(self._model_config.tokenizer, config, json.loads(texts))

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """The response to a prompt, with the step of the weights it came from; what there is of it
        if it is aborted.

        Args:
            request_id: seeds the response, with the rollout's seed: equal requests with one id get
                one response, at any time and from any server
                (:mod:`verl_padding.on_cpu.rollout.request_names`).
            image_data: PIL images whose tokens the prompt holds, in order.
        """
        generation = self._generation(prompt_ids, sampling_params, request_id)
        step = self._weights_of_step
        if self._replies is not None:
            self._replies.answer(generation)
        elif not self._rejecting:
            changed = {
                name for name, value in sampling_params.items() if value != _NEUTRAL.get(name)
            }
            if unknown := changed - _KNOWN_PARAMS:
                raise ValueError(f"sampling parameters {sorted(unknown)}: not supported here")
            if image_data:
                generation.images = self._model_config.processor.image_processor(
                    images=image_data, return_tensors="pt"
                )
            await self._resumed.wait()
            if self._model is None:
                raise RuntimeError("the server sleeps: no weights have been loaded")
            # Read now: once answered, new weights may come before this goes on.
            step = self._weights_of_step
            # The model answers one group of requests at a time; all that come meanwhile are the
            # next.
            if not self._waiting:
                self._next_run = asyncio.create_task(self._run_waiting())
            self._waiting.append(generation)
            # One request that is cancelled leaves the others their answers.
            await asyncio.shield(self._next_run)
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed" if generation.is_finished else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": step},
        )

    async def load_weights(
        self, weights: dict[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        """Builds the model from the trainer's weights, in transformers' format; responses carry
        ``global_steps``."""
        async with self._model_is_free:
            self._model = await asyncio.to_thread(self._build, weights)
        self._weights_of_step = global_steps

    async def sleep(self) -> None:
        """Drops the weights. Requests that are still running end as aborted."""
        await self._abort()
        self._model = None

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends all requests as aborted; new ones wait for `resume_generation`, or end at once if
        they are rejected."""
        self._rejecting = reject_request
        self._resumed.clear()
        await self._abort()

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._resumed.set()

    async def wake_up(self, **kwargs: Any) -> None:
        """Nothing: weights come with `load_weights`, keys and values live no longer than their
        request."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up

    async def _run_waiting(self) -> None:
        """Answers all that wait, together, once the model is free."""
        async with self._model_is_free:
            rows, self._waiting = self._waiting, []
            if rows:  # else they were aborted
                await asyncio.to_thread(generate, self._model, rows, lambda: self._aborting)

    async def _abort(self) -> None:
        # Those that run see the flag before their next token, and give the lock back.
        self._waiting.clear()
        self._aborting = True
        async with self._model_is_free:
            self._aborting = False

    def _generation(
        self, prompt_ids: list[int], params: dict[str, Any], request_id: str
    ) -> Generation:
        config = self._config
        room = config.prompt_length + config.response_length - len(prompt_ids)
        # A prompt of several turns may be longer than prompt_length: what it has more is taken from
        # its response, of which one token is left at least.
        limit = params.get("max_tokens") or params.get("max_new_tokens")
        limit = limit or min(config.response_length, room)
        stop_ids = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos", config.ignore_eos):
            declared = self._model_config.hf_config.eos_token_id
            stop_ids.update(declared if isinstance(declared, list) else [declared])
            stop_ids.add(self._model_config.tokenizer.eos_token_id)
        return Generation(
            prompt_ids=list(prompt_ids),
            max_new_tokens=max(limit, 1),
            temperature=params.get("temperature", config.temperature),
            stop_ids=stop_ids,
            seed=f"{config.seed} {request_id}",
        )

    def _build(self, weights: dict[str, torch.Tensor]) -> Any:
        hf_config = self._model_config.hf_config
        model_class = getattr(transformers, hf_config.architectures[0])
        dtype = getattr(torch, self._config.dtype)
        # Not load_state_dict: from_pretrained also converts a checkpoint's names (the experts of
        # MoE models).
        model, report = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict=weights,
            dtype=dtype,
            # The faster ways to run a mixture's experts do not support float64; other models ignore
            # this.
            experts_implementation="eager" if dtype == torch.float64 else None,
            output_loading_info=True,
        )
        if wrong := {what: names for what, names in report.items() if names}:
            raise RuntimeError(f"the trainer's weights do not fit {model_class.__name__}: {wrong}")
        # A job for a GPU may choose this rollout, and let its server see one.
        on_gpu = torch.cuda.is_available() and os.environ.get("VERL_PLATFORM") != "cpu"
        return model.eval().to("cuda" if on_gpu else "cpu")


class TransformersReplica(RolloutReplica):
    """The driver's end: one server, whatever the replica's world size, since a small model is not
    split on a CPU."""

    async def launch_servers(self) -> None:
        name = _server_name(self.replica_rank)
        actor = ray.remote(TransformersServer).options(
            name=name, max_concurrency=self.max_concurrency, num_cpus=0
        )
        self._server_handle = actor.remote(self.config, self.model_config)
        self.servers = [self._server_handle]
        self._server_address = name  # where others have one
        await self._server_handle.__ray_ready__.remote()


class TransformersAdapter(BaseRollout):
    """The worker's end: the first of a replica's workers hands the weights to its server, the
    others help to gather.

    It lives in the trainer's worker (hybrid) or in a worker of its own (standalone).
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        size = prod(getattr(self.config, name) for name in sizes)
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server has its memory back as soon as weights arrive."""

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Sends (name, full tensor) pairs to the server; all workers of the replica must call
        it."""
        tensors = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                # A copy: the gathered tensor may be the live parameter.
                tensors[name] = tensor.detach().to("cpu", copy=True)
        if self.is_leader_rank:
            await self._server().load_weights.remote(tensors, global_steps)

    def _server(self) -> Any:
        return ray.get_actor(_server_name(self.replica_rank))


def _server_name(replica_rank: int) -> str:
    return f"{ROLLOUT_NAME}_server_{replica_rank}"
