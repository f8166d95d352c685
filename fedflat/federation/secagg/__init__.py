"""Secure aggregation: the server of a deployment learns a sum, already noisy, and no single update.

``protocol`` has the mathematics of a session, ``sharing`` its verifiable shares, ``dealing`` what clients sign for each
other. ``stages`` says what travels in each step; ``client`` answers the steps, ``rounds`` asks them: the back end of
``trust: distributed``.
"""
