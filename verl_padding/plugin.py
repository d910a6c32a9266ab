"""Entry point in group ``verl.plugins``: loaded by ``import verl`` in every process, Ray workers
included.

verl only imports this module, and swallows its exceptions with a line at DEBUG. So this module
imports nothing but the standard library until it can report an error, and a job that asks for
padding while the plug-in is broken ends here: verl would silently train it unpadded, since Hydra
takes ``+padding=prompt`` for a plain string if it finds no group.
"""

from verl_padding.entry.plugin_errors import report_failure

try:
    import verl_padding.entry.import_hooks  # noqa: F401  (registers its hooks on import)
except Exception:
    report_failure("the plug-in could not be loaded")
