"""What verl asks of an accelerator."""

from verl_padding.on_cpu.cpu_platform import PlatformCPU


def test_vllms_cache_takes_a_gib_unless_the_user_has_said_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert PlatformCPU().rollout_env_vars()["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert PlatformCPU().rollout_env_vars()["VLLM_CPU_KVCACHE_SPACE"] == "9"
