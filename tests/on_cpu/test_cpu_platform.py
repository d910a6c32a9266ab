"""What verl asks of an accelerator."""

from verl_padding.on_cpu.cpu_platform import PlatformCPU


def test_the_host_answers_as_a_device_without_memory_of_its_own():
    platform = PlatformCPU()
    device = platform.device_module
    assert str(platform.current_device()) == device.get_device_name() == "cpu"
    assert device.max_memory_allocated() == 0
    assert device.mem_get_info() == (0, 0)
    assert device.synchronize() is device.empty_cache() is None


def test_vllms_cache_takes_a_gib_unless_the_user_has_said_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert PlatformCPU().rollout_env_vars()["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert PlatformCPU().rollout_env_vars()["VLLM_CPU_KVCACHE_SPACE"] == "9"
