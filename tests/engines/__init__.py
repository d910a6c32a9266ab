"""verl's Megatron and VeOmni engines on a CPU, in float32: tools of the tests that train with them.

What they show is the logic of engine, bridge and ranks. What they do not show is the kernels of Transformer Engine and
VeOmni, nccl and low precision. Importing this package makes verl's engines for a CPU known in this process, and in all
that inherit its environment.
"""

import os
from importlib import import_module

from wrapt import register_post_import_hook

LOADED_BY_VERL = "VERL_USE_EXTERNAL_MODULES"
ENGINES = {
    "verl.workers.engine.megatron.transformer_impl": "tests.engines.megatron.engines",
    "verl.workers.engine.veomni.transformer_impl": "tests.engines.veomni",
}
"""verl's module -> ours, whose ``register_engines`` is called with it once it is imported."""

for verls, ours in ENGINES.items():
    register_post_import_hook(lambda module, ours=ours: import_module(ours).register_engines(module), verls)
_modules = os.environ.get(LOADED_BY_VERL, "").split(",")
if __name__ not in _modules:
    os.environ[LOADED_BY_VERL] = ",".join([*filter(None, _modules), __name__])
