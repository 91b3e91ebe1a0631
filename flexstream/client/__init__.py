"""Who sends: producers, where the server is, who they are to it, and what to do when it is away.

Rows go from `producer` straight to the native `cython_ext.produce.sender`; the control port's client is `http`.
"""
