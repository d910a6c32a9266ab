"""A job with a padding section never trains with one of verl's own trainers, which would silently
ignore the section.

verl chooses a trainer by ``trainer.v1.trainer_mode`` alone and then hands it the config: where it
is made, both are known for the first time, and no worker has started. There, one of verl's trainers
is made as its padded counterpart, so that the config keeps verl's name of the mode. Another one,
such as a user's own that extends one of verl's, refuses.

What is refused here ends the TransferQueue that verl's runner has connected to. So whose that is
comes first.
"""

from typing import Any

from verl_padding.errors import PaddingConfigError


def pad_or_refuse_in_stock_trainers(base: type) -> None:
    """Changes how trainers that extend ``base`` are made; a config without ``padding`` passes
    through untouched, unless it has a flag that is misspelt."""

    def make_by_config(cls: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Not at the top: the guard stands even if the trainers cannot be imported.
        if config is not None and config.get("padding") is not None:
            from verl_padding.driver.trainers import resolve_trainer
            from verl_padding.verl_fixes.queue_owner import check_queue_owner

            check_queue_owner()
            cls = resolve_trainer(cls)
        elif config is not None:
            from verl_padding.job.misspelt_flag import refuse_misspelt_flag

            try:
                refuse_misspelt_flag(config)
            except PaddingConfigError:
                from verl_padding.verl_fixes.queue_owner import check_queue_owner

                check_queue_owner()
                raise
        # Python calls the constructor of whatever comes back, which is one of `cls`.
        return object.__new__(cls)

    base.__new__ = staticmethod(make_by_config)  # type: ignore[assignment]
