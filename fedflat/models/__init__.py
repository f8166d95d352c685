"""Models: a few named networks, import paths, and the check that no state leaves a client unclipped."""

from fedflat.models.registry import NAMES, build
from fedflat.models.state import freeze_batch_norm, group_norm_instead, refuse_unclipped_state

__all__ = ["NAMES", "build", "freeze_batch_norm", "group_norm_instead", "refuse_unclipped_state"]
