"""For every test: one torch thread (the tests' tensors are small; more threads only wait for each other)."""

import torch

torch.set_num_threads(1)
