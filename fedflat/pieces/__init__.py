"""Small pieces that compose into algorithms. Pieces know the core types and nothing of each other.

Example, a method of three pieces (docs/method.md goes on from here)::

    Algorithm("mine", phases=(Phase(rule=sam(0.05)),), transforms=(top_k(0.1),), server=(laplacian_smoothing(),))

Every piece works on the last axis of a flat vector, so it serves one client, a block of clients and the server.
``gradients`` are rules from a gradient function to a gradient function, ``transforms`` change an update before the
``clipping``, ``mechanisms`` draw the noise, ``server`` steps process the noisy mean, and ``state`` has the pieces of
methods that remember something between rounds.
"""

__all__ = ["clipping", "gradients", "mechanisms", "server", "state", "transforms"]
