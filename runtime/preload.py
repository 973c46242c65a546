"""What the forkserver imports once, so that a rank finds it in memory: the rank itself and the slow parts of transformers."""

from __future__ import annotations

import transformers.core_model_loading
import transformers.integrations.moe
import transformers.modeling_utils
import transformers.models.auto.modeling_auto

import runtime.rank

__all__ = ["runtime", "transformers"]
