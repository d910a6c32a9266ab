"""verl on a CPU, without a network.

May import: errors, job, pads, runs.
"""

from wrapt import register_post_import_hook

# Before anything imports torchvision: transformers does so by itself wherever it is installed.
register_post_import_hook("verl_padding.local.torchvision_ops:declare_missing_ops", "torchvision.extension")
