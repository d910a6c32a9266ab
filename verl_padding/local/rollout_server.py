"""The rollout server: a Ray actor that generates with transformers, many requests at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import transformers
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from verl_padding.local.batch_generation import Generation, generate
from verl_padding.local.scripted_replies import Replies, scripted_replies

_LIMITS = ("max_tokens", "max_new_tokens")
_KNOWN_PARAMS = {*_LIMITS, "temperature", "top_p", "top_k", "logprobs", "ignore_eos", "stop_token_ids"}
"""What verl and agent loops may put into sampling_params, and ``repetition_penalty=1``."""


class TransformersServer:
    """One server of a rollout replica, with the methods that verl calls on a server's handle.

    It has no weights of its own: they come from the trainer by `load_weights` and go with `sleep`. All work
    on the model runs in one thread, so weights never change during a forward pass. Requests that come while others are
    answered wait, and are answered together then.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: verl's ``HFModelConfig`` or the ``DictConfig`` it is made from.
        replica_rank: which replica this is.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._config = config
        self._model_config = omega_conf_to_dataclass(model_config)
        self._hf_config = self._model_config.hf_config
        self._replica_rank = replica_rank
        self._stop_ids = _stop_ids(self._hf_config, self._model_config.tokenizer)
        self._model: Any = None
        self._weights_of_step: int | None = None
        self._waiting: list[Generation] = []
        self._answers: dict[Generation, asyncio.Event] = {}  # of those that wait or run
        self._rejecting = self._aborting = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._work_to_do = asyncio.Event()
        self._model_thread = ThreadPoolExecutor(1)
        self._loop_task: asyncio.Task[None] | None = None
        self._replies = scripted_replies(self._model_config.tokenizer, config)
        self._replied = 0

    async def ready(self) -> str:
        """Returns: a name for the server, where others have an address."""
        self._loop_task = asyncio.create_task(self._generate_forever())
        return f"transformers-{self._replica_rank}"

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continues one prompt.

        Args:
            request_id: seeds the response, with the rollout's seed: equal requests with one id get one response, at
                any time and from any server (:mod:`verl_padding.local.request_names`).
            image_data: PIL images whose tokens the prompt holds, in order.

        Returns: the response with the step of the weights it came from; what there is of it, and stop_reason
            "aborted", where `abort_all_requests` has cut it off.

        Raises:
            RuntimeError: the server sleeps, so there are no weights.
            NotImplementedError: the request holds videos or audio.
            ValueError: a sampling parameter is unknown or out of range.
        """
        if self._replies is not None:
            return self._scripted(self._replies, len(prompt_ids), sampling_params, request_id)
        if video_data or audio_data:
            raise NotImplementedError("the transformers rollout generates from text and images only")
        generation = self._generation(list(prompt_ids), sampling_params, request_id, self._images(image_data))
        if self._rejecting:
            return self._output(generation, sampling_params, self._weights_of_step)
        await self._resumed.wait()
        if self._model is None:
            raise RuntimeError("asked to generate while the server sleeps: no weights have been loaded")
        self._answers[generation] = answer = asyncio.Event()
        self._waiting.append(generation)
        self._work_to_do.set()
        step = self._weights_of_step  # read now: once answered, new weights may come before this goes on
        await answer.wait()
        if generation.error is not None:
            raise generation.error
        return self._output(generation, sampling_params, step)

    def _scripted(self, replies: Replies, prompt: int, params: dict[str, Any], request_id: str) -> TokenOutput:
        """A reply that no model gives; each of its tokens has a log-prob of -1."""
        self._replied += 1
        longest = self._config.prompt_length + self._config.response_length - prompt
        limit = max(1, min(params.get("max_tokens") or self._config.response_length, longest))
        ids = replies.draw(f"{request_id} {self._replied}", limit)
        generation = Generation([0], len(ids), token_ids=ids, log_probs=[-1.0] * len(ids))
        return self._output(generation, params, self._weights_of_step)

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None = None) -> None:
        """Builds the model from the trainer's weights.

        Args:
            weights: every tensor of a checkpoint in transformers' format, by name.
            global_steps: the trainer's step, which responses carry.

        Raises:
            RuntimeError: requests are running, or weights are missing or left over.
        """
        if self._answers:
            raise RuntimeError(f"{len(self._answers)} requests are running: abort them before new weights")
        self._model = await self._in_model_thread(lambda: self._build(weights))
        self._weights_of_step = global_steps

    async def sleep(self) -> None:
        """Drops the weights. Requests that are still running end as aborted."""
        await self._abort()
        self._model = None

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends all requests as aborted and holds new ones until `resume_generation`.

        Args:
            reject_request: answer new requests at once, as aborted, instead of holding them.
        """
        self._rejecting = reject_request
        self._resumed.clear()
        count = await self._abort()
        return {"aborted_count": count, "request_ids": []}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._resumed.set()

    async def wake_up(self, **kwargs: Any) -> None:
        """Nothing: weights come with `load_weights`, keys and values live no longer than their request."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up

    async def _generate_forever(self) -> None:
        while True:
            await self._work_to_do.wait()
            if not (rows := self._next_rows()):
                self._work_to_do.clear()
                continue
            try:
                # no name of this coroutine may hold the model: it would keep the weights through `sleep`
                await self._in_model_thread(partial(generate, self._model, rows, lambda: self._aborting))
            except Exception as error:
                for row in rows:
                    row.error = error
            self._answer(rows)

    def _next_rows(self) -> list[Generation]:
        """Those that have waited longest, as many as prompts of the longest one's length fit."""
        rows: list[Generation] = []
        longest = 0
        while self._waiting and len(rows) < self._config.max_num_seqs:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if rows and longest * (len(rows) + 1) > self._config.max_num_batched_tokens:
                break
            rows.append(self._waiting.pop(0))
        return rows

    async def _abort(self) -> int:
        answers = [*self._answers.values()]
        self._answer(self._waiting)
        self._waiting.clear()
        self._aborting = True
        await asyncio.gather(*[answer.wait() for answer in answers])
        self._aborting = False
        return len(answers)

    def _answer(self, rows: list[Generation]) -> None:
        for row in rows:
            self._answers.pop(row).set()

    async def _in_model_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, work)

    def _images(self, image_data: list[Any] | None) -> dict[str, torch.Tensor]:
        if not image_data:
            return {}
        return dict(self._model_config.processor.image_processor(images=image_data, return_tensors="pt"))

    def _generation(
        self, prompt_ids: list[int], params: dict[str, Any], request_id: str, images: dict[str, torch.Tensor]
    ) -> Generation:
        params = dict(params)
        if params.get("repetition_penalty") == 1:
            del params["repetition_penalty"]
        if unknown := params.keys() - _KNOWN_PARAMS:
            raise ValueError(f"the transformers rollout does not support the sampling parameters {sorted(unknown)}")
        config = self._config
        budget = config.prompt_length + config.response_length - len(prompt_ids)
        limit = next((params[name] for name in _LIMITS if name in params), min(config.response_length, budget))
        limit = max(1, limit)
        if config.max_model_len is not None:  # a prompt that leaves no room is refused, as verl's rollouts do
            limit = min(limit, config.max_model_len - len(prompt_ids))
        stop_ids = frozenset(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos", config.ignore_eos):
            stop_ids |= self._stop_ids
        return Generation(
            prompt_ids=prompt_ids,
            max_new_tokens=limit,
            temperature=params.get("temperature", config.temperature),
            top_k=params.get("top_k", config.top_k),
            top_p=params.get("top_p", config.top_p),
            stop_ids=stop_ids,
            seed=f"{config.seed} {request_id}",
            images=images,
        )

    def _output(self, generation: Generation, params: dict[str, Any], step: int | None) -> TokenOutput:
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs if params.get("logprobs") else None,
            stop_reason="completed" if generation.is_finished else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": step},
        )

    def _build(self, weights: dict[str, torch.Tensor]) -> Any:
        model_class = getattr(transformers, self._hf_config.architectures[0])
        dtype = getattr(torch, self._config.dtype)
        # Not load_state_dict: from_pretrained also converts a checkpoint's names (the experts of MoE models).
        model, report = model_class.from_pretrained(
            None,
            config=self._hf_config,
            state_dict=weights,
            dtype=dtype,
            # The faster ways to run a mixture's experts do not support float64; other models ignore this.
            experts_implementation="eager" if dtype == torch.float64 else None,
            output_loading_info=True,
        )
        wrong = {what: names for what, names in report.items() if names}
        if wrong:
            raise RuntimeError(f"the trainer's weights do not fit {model_class.__name__}: {wrong}")
        return model.eval()


def _stop_ids(hf_config: Any, tokenizer: Any) -> frozenset[int]:
    declared = getattr(hf_config, "eos_token_id", None)
    ids = [*declared] if isinstance(declared, (list, tuple)) else [declared]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
