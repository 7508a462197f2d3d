"""For all tests: tiny models run on one thread (more would only wait for each other), and no property test has a deadline."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("minikv", deadline=None)
settings.load_profile("minikv")
