"""What runs inside vLLM's workers on a CPU: verl's worker extension with another way to load
weights."""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, for weights that vLLM has packed for a CPU.

    vLLM on a CPU packs the weight of a linear layer for its kernels and leaves an empty tensor in
    its place, which verl's ``load_weights``, bucket by bucket, cannot fill. vLLM's own reload puts
    the layers back first and packs them anew; it needs all weights at once.
    """

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = True,
    ) -> None:
        """Takes the weights that verl's adapter sends through shared memory; LoRA adapters have to
        be merged."""
        if peft_config is not None:
            raise NotImplementedError("vLLM on a CPU needs model.lora.merge=true")
        received: list[tuple[str, torch.Tensor]] = []

        def keep(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            received.extend(
                (name, tensor.clone()) for name, tensor in weights
            )  # the buffer is used again

        cpu = torch.device("cpu")
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=cpu, use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(received))
