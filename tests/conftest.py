"""Settings of the whole suite: one thread a process, since workers share few cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, so before it is

import torch

torch.set_num_threads(1)
