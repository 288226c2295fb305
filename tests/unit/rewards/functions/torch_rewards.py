"""A reward that is a network: it asks whether it would keep gradients."""

import torch

_NETWORK = torch.nn.Linear(1, 1)


def gradients(response, row):
    return float(_NETWORK(torch.ones(1)).requires_grad)
