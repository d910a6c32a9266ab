"""Weights travel from a trainer's ranks to rollout workers through a file, again and again."""

import asyncio
from pathlib import Path

import pytest
import torch

from verl_padding.local import shared_file_checkpoint
from verl_padding.local.shared_file_checkpoint import SharedFileCheckpointEngine


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SharedFileCheckpointEngine]:
    """Two trainer ranks, then two rollout workers."""
    monkeypatch.setattr(shared_file_checkpoint.tempfile, "tempdir", str(tmp_path))
    return [SharedFileCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(4)]


def prepare(engines: list[SharedFileCheckpointEngine]) -> None:
    metadata = [engine.prepare() for engine in engines]
    trainer, rollout = SharedFileCheckpointEngine.build_topology(2, 2, metadata)
    for engine, file in zip(engines, trainer["file"] + rollout["file"], strict=True):
        engine.init_process_group(file=file)


async def receive(engine: SharedFileCheckpointEngine) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights()}


def test_every_cycle_delivers_the_weights_of_its_own_and_leaves_no_file(
    engines: list[SharedFileCheckpointEngine], tmp_path: Path
) -> None:
    async def cycle(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        receivers = [asyncio.create_task(receive(engine)) for engine in engines[2:]]
        await asyncio.sleep(0.05)  # they wait for the file
        for engine in engines[:2]:
            await engine.send_weights(iter(weights.items()))
        return await asyncio.gather(*receivers)

    for step in range(3):
        prepare(engines)
        live = torch.full((2, 3), float(step))
        weights = {"a": live, "b": live.view(3, 2), "c": torch.tensor([step], dtype=torch.bfloat16)}

        received = asyncio.run(cycle(weights))

        for tensors in received:
            assert tensors.keys() == weights.keys()
            assert all(torch.equal(tensors[name], weights[name]) for name in weights)
            assert tensors["c"].dtype == torch.bfloat16
        for engine in engines:
            engine.finalize()
        assert not list(tmp_path.iterdir())
