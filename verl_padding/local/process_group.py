"""Patch of ``verl.utils.distributed`` (verl 0.9): one backend for the one device of a CPU job."""

from types import ModuleType
from typing import Any

import wrapt


def use_one_gloo_backend(distributed: ModuleType) -> None:
    """Makes "cpu:gloo" the default backend of the workers' process group.

    verl asks for "cpu:gloo,<device>:<backend>". On a CPU that names the device twice, and torch refuses it.
    """

    def with_gloo(wrapped: Any, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(timeout_second: int | None = None, backend: str | None = None) -> Any:
            return wrapped(timeout_second=timeout_second, backend=backend or "cpu:gloo")

        return call(*args, **kwargs)

    wrapt.wrap_function_wrapper(distributed, "initialize_global_process_group_ray", with_gloo)
