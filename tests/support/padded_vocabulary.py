"""Has the vanilla bridge pad vocabularies in this process, which verl does not ask of it; for a
model's external_lib.

Megatron-Bridge, which does not run on a CPU, pads them by itself.
"""

from functools import partial

from mbridge import AutoBridge

MULTIPLE = 64  # what vocabularies are padded to

AutoBridge.from_config = partial(AutoBridge.from_config, make_vocab_size_divisible_by=MULTIPLE)
