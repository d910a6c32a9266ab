"""Weights travel from a trainer's ranks to rollout workers through a file, again and again."""

import asyncio
import tempfile

import torch

from verl_padding.on_cpu.rollout.shared_file_checkpoint import SharedFileCheckpointEngine


async def receive(engine):
    return {name: tensor async for name, tensor in engine.receive_weights()}


def test_every_cycle_delivers_the_weights_of_its_own_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engines = [SharedFileCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(4)]
    trainers, rollouts = engines[:2], engines[2:]

    async def cycle(weights):
        receivers = [asyncio.create_task(receive(engine)) for engine in rollouts]
        await asyncio.sleep(0.05)  # they wait for the file
        for engine in trainers:
            await engine.send_weights(iter(weights.items()))
        return await asyncio.gather(*receivers)

    for step in range(3):
        metadata = [engine.prepare() for engine in engines]
        of_trainers, of_rollouts = SharedFileCheckpointEngine.build_topology(2, 2, metadata)
        for engine, file in zip(engines, of_trainers["file"] + of_rollouts["file"], strict=True):
            engine.init_process_group(file=file)
        live = torch.full((2, 3), float(step))
        weights = {"a": live, "b": live.view(3, 2), "c": torch.tensor([step], dtype=torch.bfloat16)}
        for tensors in asyncio.run(cycle(weights)):
            assert tensors.keys() == weights.keys()
            assert all(torch.equal(tensors[name], weights[name]) for name in weights)
            assert tensors["c"].dtype == torch.bfloat16
        for engine in engines:
            engine.finalize()
        assert not list(tmp_path.iterdir())
